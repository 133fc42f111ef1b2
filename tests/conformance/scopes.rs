//! That no foreign code runs within `Backend::within`, which forbids it: neither a budget, nor the owner of host or of device memory, nor a
//! stream, nor a waker.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Poll, Wake};
use std::time::{Duration, Instant};

use arrow_array::{ArrayRef, Int32Array, RecordBatch};
use arrow_buffer::{Buffer, ScalarBuffer};
use arrow_device::async_stream::{DeviceRecordBatchStream, MovingStream, UploadingStream};
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{
    Device, DeviceBuffer, DeviceBufferMut, DeviceRecordBatch, Devices, ImportOptions, MemoryBudget,
    Result, SyncPolicy,
};
use arrow_schema::ArrowError;
use bytes::Bytes;
use futures::executor::block_on_stream;
use futures::stream;

use super::wrap;
use super::wrapped::{Twist, Wrapped, depth};

/// How often each kind of foreign code was called.
static CALLS: [AtomicUsize; 5] = [const { AtomicUsize::new(0) }; 5];
const BUDGET: usize = 0;
const HOST_OWNER: usize = 1;
const DEVICE_OWNER: usize = 2;
const POLL: usize = 3;
const WAKER: usize = 4;

/// What all foreign code does.
fn call(kind: usize) {
    // A panic might be caught, and an abort is not.
    if depth() > 0 {
        let stack = std::backtrace::Backtrace::force_capture();
        eprintln!("foreign code runs in a scope: {stack}");
        std::process::abort();
    }
    CALLS[kind].fetch_add(1, SeqCst);
}

#[derive(Debug)]
struct Budget;

impl MemoryBudget for Budget {
    fn reserve(&self, _: usize) -> Result<()> {
        call(BUDGET);
        Ok(())
    }

    fn release(&self, _: usize) {
        call(BUDGET);
    }
}

/// An owner of a buffer's memory.
struct Source([u8; 64]);

impl AsRef<[u8]> for Source {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        call(HOST_OWNER);
    }
}

/// An owner of device memory.
struct Lent(#[allow(dead_code)] DeviceBuffer);

impl Drop for Lent {
    fn drop(&mut self) {
        call(DEVICE_OWNER);
    }
}

struct Woken;

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        call(WAKER);
    }
}

fn device() -> Device {
    let sim = SimDevice::new(SimConfig::default()).unwrap();
    wrap(Wrapped::new(sim, Twist::NoNotify))
}

fn source() -> RecordBatch {
    let bytes = Bytes::from_owner(Source([7; 64]));
    let values = ScalarBuffer::new(Buffer::from(bytes), 0, 16);
    let column: ArrayRef = Arc::new(Int32Array::new(values, None));
    RecordBatch::try_from_iter([("a", column)]).unwrap()
}

#[test]
fn foreign_code_runs_outside() {
    let schema = source().schema();
    let (one, two) = (device(), device());
    let mut sources = 0;
    let batches = stream::poll_fn(move |_| {
        call(POLL);
        sources += 1;
        Poll::Ready((sources < 4).then(|| Ok::<_, ArrowError>(source())))
    });
    let up = UploadingStream::new_on(schema.clone(), batches, one.default_queue());
    let moved = MovingStream::new(up.with_budget(Arc::new(Budget)), &two);
    let down = moved.with_budget(Arc::new(Budget)).into_host_stream();
    let down = block_on_stream(down.with_budget(Arc::new(Budget)));
    assert_eq!(down.filter(|batch| batch.is_ok()).count(), 3);

    let devices = Devices::new();
    devices.add(one.clone()).unwrap();
    let options = ImportOptions::default().with_devices(devices);
    let (array, exported) = one
        .upload(&source())
        .unwrap()
        .export(SyncPolicy::Event)
        .unwrap();
    // SAFETY: the array was just exported.
    let array = unsafe { DeviceRecordBatch::import_with(array, &exported, &options) }.unwrap();
    let joined = DeviceRecordBatch::concat(&schema, &[array.clone(), array]).unwrap();
    assert_eq!(joined.to_host().unwrap().num_rows(), 32);
    let queue = one.default_queue();
    let mut memory = DeviceBufferMut::allocate(&queue, 64).unwrap();
    memory.fill(7).unwrap();
    let memory = memory.freeze().unwrap();
    let (address, owner) = (memory.address(), Box::new(Lent(memory)));
    // SAFETY: the memory has 64 bytes, which the owner keeps and nobody writes to.
    let lent = unsafe { DeviceBuffer::from_raw(&one, address, 64, owner, None) };
    assert_eq!(
        lent.to_host_on(&one.new_queue().unwrap()).unwrap().len(),
        64
    );
    let event = queue.record().unwrap().unwrap();
    let woken = event.notify(&Arc::new(Woken).into()).unwrap();
    drop(lent);
    one.synchronize().unwrap();
    // The batches' sources and the one here; what 3 batches took in 3 streams and gave back.
    let least = [9, 4, 1, 4, usize::from(!woken)];
    let start = Instant::now();
    while CALLS
        .iter()
        .zip(least)
        .any(|(calls, least)| calls.load(SeqCst) < least)
    {
        assert!(start.elapsed() < Duration::from_secs(20), "{CALLS:?}");
        std::thread::yield_now();
    }
}
