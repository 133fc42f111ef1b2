//! [`every_call_fails`]: a device keeps its promises whichever call of its runtime fails.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrow_array::{Int64Array, RecordBatch, StringArray};
use arrow_device::device::engine::{Engine, Health, Memories, Runtime};
use arrow_device::device::{
    Capabilities, CopyOp, DevicePtr, EventPtr, ExportSync, PointerInfo, Relation, device_error,
};
use arrow_device::{
    Device, DeviceBufferMut, DeviceRecordBatch, Devices, Error, ImportOptions, Result, SyncPolicy,
};

/// How long everything may take to be freed.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// As if nothing had been asked: the next call may succeed.
    Passing,
    OutOfMemory,
    /// Nothing of the device runs any more.
    Lost,
}

/// Checks a device of a runtime when each of its runtime's calls fails, one after the other, in three ways: an operation then succeeds all the
/// same, or is an error that names the device; nothing is lost or freed twice; and the device works afterwards, or says that it does not.
/// `open` makes a runtime and the stream of its default queue, several times. `most` is about how many calls of each kind are tried: 0 for
/// all.
///
/// # Panics
/// Panics if the device does not keep to that.
pub fn every_call_fails<R: Runtime>(open: impl Fn() -> Result<(R, Arc<R::Stream>)>, most: usize) {
    for fault in [Fault::Passing, Fault::OutOfMemory, Fault::Lost] {
        let calls = calls(&open);
        let step = if most == 0 { 1 } else { calls.div_ceil(most) };
        for nth in (1..=calls).step_by(step) {
            fails(&open, fault, nth);
        }
    }
}

/// Returns how many calls can fail.
fn calls<R: Runtime>(open: &impl Fn() -> Result<(R, Arc<R::Stream>)>) -> usize {
    let (device, faults) = faulty(open);
    use_everything(&device).expect("no call fails");
    faults.calls.load(Ordering::SeqCst)
}

/// Lets a call fail.
fn fails<R: Runtime>(open: &impl Fn() -> Result<(R, Arc<R::Stream>)>, fault: Fault, nth: usize) {
    let (device, faults) = faulty(open);
    *lock(&faults.next) = Some((nth, fault));
    let outcome = use_everything(&device);
    let failed = lock(&faults.next).take().is_none();
    let what = *lock(&faults.what);
    let case = format!("call {nth}, {what}, {fault:?}: {outcome:?}");
    match &outcome {
        // The order of calls changes from run to run.
        Ok(()) => {}
        Err(Error::Device { device: of, .. } | Error::OutOfMemory { device: of, .. }) => {
            assert!(failed && *of == device.id(), "{case}");
        }
        Err(e) => panic!("{case}: {e}"),
    }
    match device.upload(&batch()).and_then(|up| up.to_host()) {
        Ok(back) => assert!(
            back == batch() && (fault != Fault::Lost || !failed),
            "{case}"
        ),
        Err(e) => {
            let is_said = e.to_string().contains("cannot be used any more");
            assert!(fault == Fault::Lost && failed && is_said, "{case}: {e}");
        }
    }
    let engine = Engine::<Faulty<R>>::of(&device).expect("the device is of this runtime");
    let end = Instant::now() + PATIENCE;
    loop {
        device.trim();
        match engine.in_use() {
            (0, 0, 0) => break,
            in_use => assert!(Instant::now() < end, "{case}: in use {in_use:?}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn faulty<R: Runtime>(open: &impl Fn() -> Result<(R, Arc<R::Stream>)>) -> (Device, Arc<Faults<R>>) {
    let (runtime, stream) = open().expect("a device");
    let faults = Arc::new(Faults {
        calls: AtomicUsize::new(0),
        next: Mutex::default(),
        what: Mutex::default(),
        streams: Mutex::new(vec![stream.clone()]),
    });
    let faulty = Faulty {
        runtime,
        faults: faults.clone(),
    };
    // SAFETY: the stream is the runtime's.
    let device = unsafe { Engine::open(faulty, stream, 1 << 20) };
    (device.expect("a device"), faults)
}

fn batch() -> RecordBatch {
    let numbers = (0..900).map(|i| (i % 7 > 0).then_some(i));
    let numbers = Arc::new(Int64Array::from_iter(numbers)) as _;
    let names = (0..900).map(|i| format!("row {i}"));
    let names = Arc::new(StringArray::from_iter_values(names)) as _;
    RecordBatch::try_from_iter([("numbers", numbers), ("names", names)]).expect("equal lengths")
}

/// Uses what a device offers.
fn use_everything(device: &Device) -> Result<()> {
    let (one, two) = (device.new_queue()?, device.new_queue()?);
    let up = device.upload_on(&batch(), &one)?;
    if let Some(event) = one.record()? {
        two.wait(&event)?;
    }
    assert_eq!(up.start_to_host(&two)?.wait()?, batch());
    one.synchronize()?;

    let mut buffer = DeviceBufferMut::allocate(&two, 100_001)?;
    buffer.fill(0x5A)?;
    let other = DeviceBufferMut::allocate(&two, 50)?;
    let buffer = buffer.freeze()?;
    drop((other, two));
    assert!(buffer.to_host_on(&one)?.iter().all(|byte| *byte == 0x5A));

    let mut host = device.host_buffer(70_000)?;
    host.fill(7);
    let column = Int64Array::new(host.into_buffer().slice_with_length(0, 69_992).into(), None);
    let sevens = RecordBatch::try_from_iter([("sevens", Arc::new(column) as _)])?;
    assert_eq!(device.upload(&sevens)?.to_host()?, sevens);

    if !matches!(
        device.backend().capabilities().exports,
        ExportSync::Refused(_)
    ) {
        let devices = Devices::new();
        devices.add(device.clone())?;
        let (array, schema) = up.export(SyncPolicy::Event)?;
        let options = ImportOptions::default().with_devices(devices);
        // SAFETY: both structs come from one export of this crate.
        let again = unsafe { DeviceRecordBatch::import_with(array, &schema, &options) }?;
        assert_eq!(again.to_host()?, batch());
    }
    device.synchronize()
}

/// Which call fails, and what the runtime has.
struct Faults<R: Runtime> {
    calls: AtomicUsize,
    next: Mutex<Option<(usize, Fault)>>,
    /// The call that has failed.
    what: Mutex<&'static str>,
    streams: Mutex<Vec<Arc<R::Stream>>>,
}

/// A runtime of whose calls one fails.
struct Faulty<R: Runtime> {
    runtime: R,
    faults: Arc<Faults<R>>,
}

impl<R: Runtime> fmt::Debug for Faulty<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.runtime.fmt(f)
    }
}

impl<R: Runtime> Faulty<R> {
    /// Counts a call, which fails if it is its turn. `bytes` are those that it allocates.
    fn call(&self, what: &'static str, bytes: Option<usize>) -> Result<()> {
        self.faults.calls.fetch_add(1, Ordering::SeqCst);
        let fault = {
            let mut next = lock(&self.faults.next);
            match &mut *next {
                Some((1, fault)) => {
                    let fault = *fault;
                    *next = None;
                    *lock(&self.faults.what) = what;
                    fault
                }
                Some((left, _)) => {
                    *left -= 1;
                    return Ok(());
                }
                None => return Ok(()),
            }
        };
        let health = self.runtime.health();
        let error = device_error(health.id(), what, -77, "injected");
        match (fault, bytes) {
            (Fault::OutOfMemory, Some(bytes)) => Err(Error::OutOfMemory {
                device: health.id(),
                operation: what,
                bytes,
            }),
            (Fault::Lost, _) => {
                // What has been given to the runtime still runs, although the device is taken for lost.
                let streams = lock(&self.faults.streams).clone();
                while self.runtime.synchronize(&streams).is_err() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // SAFETY: all work has ended, and no more is accepted.
                Err(unsafe { health.lose(error) })
            }
            _ => Err(error),
        }
    }
}

// SAFETY: all is the runtime's, and a call that fails has done nothing.
unsafe impl<R: Runtime> Runtime for Faulty<R> {
    type Stream = R::Stream;
    type Event = R::Event;
    type Memory = R::Memory;

    const EVENT_WORDS: usize = R::EVENT_WORDS;

    fn health(&self) -> &Health {
        self.runtime.health()
    }

    fn memories(&self) -> &Memories<R::Memory> {
        self.runtime.memories()
    }

    fn capabilities(&self) -> Capabilities {
        self.runtime.capabilities()
    }

    fn new_stream(&self) -> Result<Arc<R::Stream>> {
        self.call("new_stream", None)?;
        let stream = self.runtime.new_stream()?;
        lock(&self.faults.streams).push(stream.clone());
        Ok(stream)
    }

    unsafe fn adopt_stream(&self, handle: usize) -> Result<Arc<R::Stream>> {
        // SAFETY: the caller guarantees the stream.
        unsafe { self.runtime.adopt_stream(handle) }
    }

    fn stream_handle(&self, stream: &R::Stream) -> Option<usize> {
        self.runtime.stream_handle(stream)
    }

    fn allocate(&self, bytes: usize, stream: &R::Stream) -> Result<R::Memory> {
        self.call("allocate", Some(bytes))?;
        self.runtime.allocate(bytes, stream)
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<R::Memory>> {
        self.call("allocate_host", Some(bytes))?;
        self.runtime.allocate_host(bytes)
    }

    fn base(&self, memory: &R::Memory) -> DevicePtr {
        self.runtime.base(memory)
    }

    fn max_allocation(&self) -> usize {
        self.runtime.max_allocation()
    }

    unsafe fn free_in_order(&self, memory: &R::Memory, stream: &R::Stream) -> Result<bool> {
        self.call("free_in_order", None)?;
        // SAFETY: the caller guarantees what `free_in_order` asks for.
        unsafe { self.runtime.free_in_order(memory, stream) }
    }

    fn frees_wait(&self) -> bool {
        self.runtime.frees_wait()
    }

    fn trim(&self) {
        self.runtime.trim();
    }

    unsafe fn copy(
        &self,
        stream: &R::Stream,
        copies: &[CopyOp],
        under_way: &mut bool,
    ) -> Result<()> {
        self.call("copy", None)?;
        // SAFETY: the caller guarantees what `copy` asks for.
        unsafe { self.runtime.copy(stream, copies, under_way) }
    }

    unsafe fn fill(
        &self,
        stream: &R::Stream,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    ) -> Result<()> {
        self.call("fill", None)?;
        // SAFETY: the caller guarantees what `fill` asks for.
        unsafe { self.runtime.fill(stream, dst, byte, bytes) }
    }

    fn record(&self, stream: &R::Stream) -> Result<R::Event> {
        self.call("record", None)?;
        self.runtime.record(stream)
    }

    fn mark(&self, stream: &R::Stream) -> Result<R::Event> {
        self.call("mark", None)?;
        self.runtime.mark(stream)
    }

    fn pointer(&self, event: &R::Event) -> *mut c_void {
        self.runtime.pointer(event)
    }

    unsafe fn foreign_event(&self, event: EventPtr) -> Result<R::Event> {
        self.call("foreign_event", None)?;
        // SAFETY: the caller guarantees the event.
        unsafe { self.runtime.foreign_event(event) }
    }

    fn is_done(&self, event: &R::Event) -> Result<bool> {
        self.call("is_done", None)?;
        self.runtime.is_done(event)
    }

    fn wait_host(&self, event: &R::Event) -> Result<()> {
        self.call("wait_host", None)?;
        self.runtime.wait_host(event)
    }

    fn wait(&self, stream: &R::Stream, event: &R::Event, is_own: bool) -> Result<bool> {
        self.call("wait", None)?;
        self.runtime.wait(stream, event, is_own)
    }

    fn gate(&self, stream: &R::Stream) -> Result<Option<Box<dyn Send>>> {
        self.call("gate", None)?;
        self.runtime.gate(stream)
    }

    fn synchronize(&self, streams: &[Arc<R::Stream>]) -> Result<()> {
        self.call("synchronize", None)?;
        self.runtime.synchronize(streams)
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        self.runtime.classify(address, bytes)
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        self.runtime.copies_directly_from(address, bytes)
    }

    fn accepts_events_of(&self, other: &Self) -> bool {
        self.runtime.accepts_events_of(&other.runtime)
    }

    fn relation(&self, other: &Self) -> Relation {
        self.runtime.relation(&other.runtime)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
