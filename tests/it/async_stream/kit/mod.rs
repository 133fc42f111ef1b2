//! Waiting without an executor, batches, metadata, and the C-style peers.
#![allow(dead_code, unused_imports)]

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_device::abi::FFI_ArrowAsyncTask;
use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, DeviceRecordBatchStream, Outcome};
use arrow_device::{DeviceRecordBatch, Devices, ExportOptions, ImportOptions, Result};
use futures::Stream;
use futures::future::BoxFuture;

use crate::simkit::Sim;

mod consumer;
mod producer;
mod schema;
mod waits;

/// A stream whose schema has not come yet.
pub(crate) type Opening = BoxFuture<'static, Result<AsyncDeviceRecordBatchStream>>;

pub(crate) use consumer::{Call, FakeConsumer, Handler};
pub(crate) use producer::FakeProducer;
pub(crate) use schema::CountedSchema;
pub(crate) use waits::{forbid_waits, in_poll};

/// How long anything may take: a lost wake-up is a failure, not a hang.
pub(crate) const LONG: Duration = Duration::from_secs(20);
/// How long is waited to see that something does not happen.
pub(crate) const SHORT: Duration = Duration::from_millis(50);

/// Sends a stream to a handler of these tests or of this crate.
pub(crate) fn produce<S: DeviceRecordBatchStream>(
    stream: S,
    handler: *mut Handler,
    options: ExportOptions,
) -> impl Future<Output = Result<Outcome>> + Unpin + use<S> {
    // SAFETY: these handlers keep to the interface, stay where they are until their release, and each goes to one producer.
    unsafe { arrow_device::async_stream::produce(stream, handler, options) }
}

/// A struct with no task in it.
pub(crate) fn no_task() -> FFI_ArrowAsyncTask {
    FFI_ArrowAsyncTask {
        extract_data: None,
        private_data: std::ptr::null_mut(),
    }
}

/// Counts wake-ups.
#[derive(Default)]
pub(crate) struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
    }
}

impl Wakes {
    pub(crate) fn new() -> (Arc<Self>, Waker) {
        let wakes = Arc::new(Self::default());
        let waker = Waker::from(wakes.clone());
        (wakes, waker)
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(SeqCst)
    }

    /// Waits for the first wake-up.
    #[track_caller]
    pub(crate) fn wait(&self) {
        eventually("a wake-up", || self.count() > 0);
    }
}

struct Parked {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, SeqCst);
        self.thread.unpark();
    }
}

/// Polls when woken, and only then.
#[track_caller]
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let parked = Arc::new(Parked {
        thread: std::thread::current(),
        woken: AtomicBool::new(false),
    });
    let waker = Waker::from(parked.clone());
    let mut context = Context::from_waker(&waker);
    let end = Instant::now() + LONG;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        while !parked.woken.swap(false, SeqCst) {
            assert!(Instant::now() < end, "nothing wakes the future");
            std::thread::park_timeout(Duration::from_millis(100));
        }
    }
}

/// One poll, whose waker nobody listens to.
pub(crate) fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

pub(crate) fn poll_with<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(waker))
}

pub(crate) fn poll_next<S: Stream + Unpin>(stream: &mut S) -> Poll<Option<S::Item>> {
    Pin::new(stream).poll_next(&mut Context::from_waker(Waker::noop()))
}

pub(crate) fn poll_next_with<S: Stream + Unpin>(
    stream: &mut S,
    waker: &Waker,
) -> Poll<Option<S::Item>> {
    Pin::new(stream).poll_next(&mut Context::from_waker(waker))
}

/// What is ready.
#[track_caller]
pub(crate) fn ready<T>(poll: Poll<T>) -> T {
    match poll {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("is pending"),
    }
}

/// The next item, waited for.
#[track_caller]
pub(crate) fn next<S: Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
    block_on(std::future::poll_fn(|context| {
        Pin::new(&mut *stream).poll_next(context)
    }))
}

/// All items up to the end.
#[track_caller]
pub(crate) fn all<S: Stream + Unpin>(mut stream: S) -> Vec<S::Item> {
    std::iter::from_fn(|| next(&mut stream)).collect()
}

/// Waits for what another thread does.
#[track_caller]
pub(crate) fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !happened() {
        assert!(Instant::now() < end, "never happened: {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Something to wait at until it is opened.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<(bool, usize)>, Condvar)>);

impl Gate {
    /// Waits, at most for `LONG`.
    pub(crate) fn pass(&self) {
        let (state, opened) = &*self.0;
        let mut state = state.lock().unwrap();
        state.1 += 1;
        opened.notify_all();
        let (state, waited) = opened.wait_timeout_while(state, LONG, |s| !s.0).unwrap();
        assert!(state.0 || !waited.timed_out(), "nobody opens the gate");
    }

    /// Waits until somebody waits at the gate.
    #[track_caller]
    pub(crate) fn reached(&self) {
        let (state, opened) = &*self.0;
        let state = state.lock().unwrap();
        let (state, _) = opened
            .wait_timeout_while(state, LONG, |s| s.1 == 0)
            .unwrap();
        assert!(state.1 > 0, "nobody comes to the gate");
    }

    pub(crate) fn open(&self) {
        self.0.0.lock().unwrap().0 = true;
        self.0.1.notify_all();
    }
}

/// Numbers from `first`.
pub(crate) fn numbers(first: i64, rows: usize) -> RecordBatch {
    let values = Int64Array::from_iter_values(first..first + rows as i64);
    RecordBatch::try_from_iter([("i", Arc::new(values) as ArrayRef)]).unwrap()
}

/// A batch that nothing else equals, in memory of the host.
pub(crate) fn batch(i: i64) -> DeviceRecordBatch {
    Devices::cpu().upload(&numbers(i * 100, 5)).unwrap()
}

/// Which of them it is.
#[track_caller]
pub(crate) fn number_of(batch: &DeviceRecordBatch) -> i64 {
    let host = batch.to_host().unwrap();
    let values = host.column(0).as_any().downcast_ref::<Int64Array>();
    let first = values.unwrap().value(0);
    assert_eq!(host, numbers(first, 5));
    first / 100
}

/// Imports that know a simulated device.
pub(crate) fn options_of(sim: &Sim) -> ImportOptions {
    let devices = Devices::new();
    devices.add(sim.device.clone()).unwrap();
    ImportOptions {
        devices: Some(devices),
        ..Default::default()
    }
}

/// The encoding of `ArrowSchema.metadata`.
pub(crate) fn encode(pairs: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut out = (pairs.len() as i32).to_ne_bytes().to_vec();
    for text in pairs.iter().flat_map(|(key, value)| [key, value]) {
        out.extend((text.len() as i32).to_ne_bytes());
        out.extend_from_slice(text);
    }
    out
}

/// What `encode` made.
///
/// # Safety
/// Null, or metadata in that encoding.
pub(crate) unsafe fn decode(metadata: *const std::ffi::c_char) -> Option<HashMap<String, String>> {
    if metadata.is_null() {
        return None;
    }
    // SAFETY: metadata starts with a count of 4 bytes.
    let n = unsafe { metadata.cast::<i32>().read_unaligned() };
    // SAFETY: the count has 4 bytes, so this is still within the metadata or at its end.
    let mut at = unsafe { metadata.cast::<u8>().add(4) };
    let mut out = HashMap::new();
    for _ in 0..n {
        let mut text = || {
            // SAFETY: the metadata has a key and a value for each count, each with its length
            // before it.
            unsafe {
                let len = at.cast::<i32>().read_unaligned() as usize;
                let bytes = std::slice::from_raw_parts(at.add(4), len);
                at = at.add(4 + len);
                String::from_utf8(bytes.to_vec()).unwrap()
            }
        };
        let key = text();
        out.insert(key, text());
    }
    Some(out)
}

pub(crate) fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    let own = |&(key, value): &(&str, &str)| (key.to_string(), value.to_string());
    pairs.iter().map(own).collect()
}
