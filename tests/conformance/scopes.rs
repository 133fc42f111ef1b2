//! That no foreign code runs where `Backend::within` says so: neither a budget, nor a source, nor a release, nor a waker.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::Poll;
use std::time::{Duration, Instant};

use arrow_array::{ArrayRef, Int32Array, RecordBatch};
use arrow_buffer::{Buffer, ScalarBuffer};
use arrow_device::async_stream::{DeviceRecordBatchStream, MovingStream, UploadingStream};
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{
    Device, DeviceRecordBatch, Devices, ImportOptions, MemoryBudget, Result, SyncPolicy,
};
use arrow_schema::ArrowError;
use bytes::Bytes;
use futures::executor::block_on_stream;
use futures::stream;

use super::wrap;
use super::wrapped::{Twist, Wrapped, depth};

static CALLS: AtomicUsize = AtomicUsize::new(0);

/// What all foreign code does.
fn call() {
    // A panic might be caught, and an abort is not.
    if depth() > 0 {
        eprintln!(
            "foreign code runs in a scope: {}",
            std::backtrace::Backtrace::force_capture()
        );
        std::process::abort();
    }
    CALLS.fetch_add(1, SeqCst);
}

#[derive(Debug)]
struct Budget;

impl MemoryBudget for Budget {
    fn reserve(&self, _: usize) -> Result<()> {
        call();
        Ok(())
    }

    fn release(&self, _: usize) {
        call();
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
        call();
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
        call();
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
    one.synchronize().unwrap();
    // Of 5 sources, 4 polls, and what the batches of 3 streams took.
    let start = Instant::now();
    while CALLS.load(SeqCst) < 5 + 4 + 9 {
        assert!(start.elapsed() < Duration::from_secs(20), "{CALLS:?} calls");
        std::thread::yield_now();
    }
}
