//! [`every_call_fails`]: a device keeps its promises whichever call of its runtime fails.

use std::ffi::c_void;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrow_device::arrow_array::{Int64Array, RecordBatch, StringArray};
use arrow_device::arrow_buffer::Buffer;
use arrow_device::device::engine::{Engine, Health, Memories, Runtime};
use arrow_device::device::{
    Capabilities, CopyKind, CopyOp, DevicePtr, EventPtr, PointerInfo, Relation, device_error,
};
use arrow_device::{
    Device, DeviceBufferMut, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Error,
    ExportOptions, FFI_ArrowDeviceArrayStream, Queue, Result, SyncPolicy, upload_reader,
};

use super::exports::{is_refused, options};
use super::streams::reader;

/// How long everything may take to be freed.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// As if nothing had been asked: the next call may succeed.
    Passing,
    OutOfMemory,
    /// A list of copies is given to the runtime up to its middle.
    Midway,
    /// Nothing of the device runs any more.
    Lost,
}

/// Checks a device of a runtime when each of its runtime's calls fails, one after the other, in three ways, and each list of copies midway: an operation then succeeds all the
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
    while_some_fail(|nth| fails(&open, Fault::Midway, nth));
}

/// Lets the first, the second and so on fail, as long as there is one.
fn while_some_fail(fails: impl Fn(usize) -> bool) {
    let failed = (1..).take_while(|nth| fails(*nth)).count();
    assert!(failed > 0, "nothing has failed");
}

/// Returns how many calls can fail.
fn calls<R: Runtime>(open: &impl Fn() -> Result<(R, Arc<R::Stream>)>) -> usize {
    let (device, faults) = faulty(open);
    use_everything(&device).expect("no call fails");
    faults.calls.load(Ordering::SeqCst)
}

/// Lets a call fail. Returns whether there was one.
fn fails<R: Runtime>(
    open: &impl Fn() -> Result<(R, Arc<R::Stream>)>,
    fault: Fault,
    nth: usize,
) -> bool {
    let (device, faults) = faulty(open);
    *lock(&faults.next) = Some((nth, fault));
    let outcome = use_everything(&device);
    let failed = lock(&faults.next).take().is_none();
    // The call may be one of another thread.
    while failed && !faults.is_over.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let what = *lock(&faults.what);
    let case = format!("call {nth}, {what}, {fault:?}: {outcome:?}");
    match &outcome {
        // The order of calls changes from run to run.
        Ok(()) => {}
        Err(Error::Device { device: of, .. } | Error::OutOfMemory { device: of, .. }) => {
            assert!(failed && *of == device.id(), "{case}");
        }
        // Through a stream, as C carries it.
        Err(Error::Foreign { message, .. }) => {
            let names = message.contains(&device.id().to_string());
            assert!(failed && names, "{case}");
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
    failed
}

fn faulty<R: Runtime>(open: &impl Fn() -> Result<(R, Arc<R::Stream>)>) -> (Device, Arc<Faults<R>>) {
    let (runtime, stream) = open().expect("a device");
    let faults = Arc::new(Faults {
        calls: AtomicUsize::new(0),
        next: Mutex::default(),
        what: Mutex::default(),
        is_over: AtomicBool::new(false),
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
    assert!(buffer.to_host()?.iter().all(|byte| *byte == 0x5A));

    let mut host = device.host_buffer(70_000)?;
    host.fill(7);
    let column = Int64Array::new(Buffer::from(host).slice_with_length(0, 69_992).into(), None);
    let sevens = RecordBatch::try_from_iter([("sevens", Arc::new(column) as _)])?;
    assert_eq!(device.upload(&sevens)?.to_host()?, sevens);

    copy_midway(&one, device)?;
    drop(up);
    if is_refused(device) {
        return device.synchronize();
    }
    let uploads = upload_reader(reader(&[batch(), batch()], None), device);
    let stream = FFI_ArrowDeviceArrayStream::new(uploads, ExportOptions::new(SyncPolicy::Event))?;
    // SAFETY: the stream is an export of `arrow-device`, which is opened once.
    let again = unsafe { DeviceRecordBatchStreamReader::new(stream, options(device)) }?;
    for back in again.into_host_reader() {
        assert_eq!(back.map_err(Error::from)?, batch());
    }
    device.synchronize()
}

/// None of a list of copies runs after the call has returned an error: their memory is the caller's again.
fn copy_midway(queue: &Queue, device: &Device) -> Result<()> {
    const BYTES: usize = 1 << 20;
    static WRITTEN: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
    let mut memory = DeviceBufferMut::allocate(queue, 2 * BYTES)?;
    memory.fill(1)?;
    let mut host = vec![0; 2 * BYTES];
    let copy = |at: usize| CopyOp {
        src: memory.address().offset(at),
        dst: DevicePtr::new((&raw mut host[at]).cast()),
        bytes: BYTES,
        kind: CopyKind::DeviceToHost,
    };
    let list = [0, BYTES].map(copy);
    // SAFETY: both sides have this many bytes, and live until the queue was waited for, or the call has failed.
    let copied = unsafe { queue.raw().copy(&list) };
    if copied.is_ok() {
        return queue.synchronize().inspect_err(|_| {
            // The copies may run as long as the process does.
            lock(&WRITTEN).push(std::mem::take(&mut host));
        });
    }
    host.fill(2);
    // An error if the device is lost.
    let _: Result<()> = device.synchronize();
    assert!(
        host.iter().all(|byte| *byte == 2),
        "written after the error"
    );
    copied
}

/// Which call fails, and what the runtime has.
struct Faults<R: Runtime> {
    calls: AtomicUsize,
    next: Mutex<Option<(usize, Fault)>>,
    /// The call that has failed.
    what: Mutex<&'static str>,
    /// That failure is complete.
    is_over: AtomicBool,
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
                Some((1, fault)) if *fault != Fault::Midway => {
                    let fault = *fault;
                    *next = None;
                    *lock(&self.faults.what) = what;
                    fault
                }
                Some((_, Fault::Midway)) => return Ok(()),
                Some((left, _)) => {
                    *left -= 1;
                    return Ok(());
                }
                None => return Ok(()),
            }
        };
        let health = self.runtime.health();
        let error = device_error(health.id(), what, -77, "injected");
        let failure = match (fault, bytes) {
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
        };
        self.faults.is_over.store(true, Ordering::SeqCst);
        failure
    }
}

impl<R: Runtime> Faulty<R> {
    /// Whether a list of copies is the one that fails midway.
    fn is_midway(&self) -> bool {
        let mut next = lock(&self.faults.next);
        let Some((left, Fault::Midway)) = &mut *next else {
            return false;
        };
        *left -= 1;
        let is_next = *left == 0;
        if is_next {
            *next = None;
            *lock(&self.faults.what) = "copy";
            self.faults.is_over.store(true, Ordering::SeqCst);
        }
        is_next
    }
}

// SAFETY: all is the runtime's, and a call that fails has done nothing, or has set `under_way`.
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
        let is_midway = copies.len() > 1 && self.is_midway();
        let copies = &copies[..copies.len() / if is_midway { 2 } else { 1 }];
        // SAFETY: the caller guarantees what `copy` asks for.
        unsafe { self.runtime.copy(stream, copies, under_way) }?;
        *under_way |= is_midway;
        match is_midway {
            true => Err(device_error(self.health().id(), "copy", -77, "injected")),
            false => Ok(()),
        }
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
