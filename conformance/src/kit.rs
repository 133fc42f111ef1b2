//! Tools for rules.
//!
//! After a violation nothing is known about the work that still runs, so a rule that panics frees
//! neither the host memory nor the device memory that it uses.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::task::{Wake, Waker};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use super::watch::note;
use super::{Hold, Subject, Verdict};
use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use arrow_device::{Device, Devices, HostBuffer, Queue, SyncEvent};

/// Bytes of a large allocation of odd size.
pub(super) const LARGE: usize = if cfg!(miri) {
    (1 << 8) + 1
} else {
    (1 << 20) + 1
};

/// The reason why rules about events are skipped.
pub(super) const NO_EVENTS: Verdict = Verdict::Skipped("a synchronous device has no events");

/// The reason why rules are skipped that show nothing unless a queue is certainly busy.
pub(super) const NO_HOLD: Verdict = Verdict::Skipped("the subject has no hold");

/// How long to wait for something that must not happen.
pub(super) const MOMENT: Duration = Duration::from_millis(10);

/// Device memory, freed on its queue.
pub(super) struct Block {
    queue: Queue,
    base: DevicePtr,
    pub(super) bytes: usize,
}

impl Block {
    pub(super) fn new(queue: &Queue, bytes: usize) -> Self {
        note("allocate");
        let base = queue.raw().allocate(bytes).expect("allocate");
        assert!(!base.is_null(), "allocate({bytes}) gave null");
        Self {
            queue: queue.clone(),
            base,
            bytes,
        }
    }

    /// The address of byte `offset`.
    pub(super) fn at(&self, offset: usize) -> DevicePtr {
        assert!(offset <= self.bytes);
        self.base.offset(offset)
    }

    /// Fills everything on `queue`.
    pub(super) fn fill(&self, queue: &Queue, byte: u8) {
        fill(queue, self.base, byte, self.bytes);
    }

    /// Sets the queue to free the memory on, which has waited for all work that uses it.
    pub(super) fn free_on(mut self, queue: &Queue) {
        self.queue = queue.clone();
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        note("free");
        // SAFETY: `new` has allocated the memory with this size, and it is freed only here. Rules
        // ensure that work on other queues is done, or that `queue` waits for it.
        let freed = unsafe { self.queue.raw().free(self.base, self.bytes) };
        freed.expect("free");
    }
}

/// Host memory for copies, with its length in bytes, which is not asked of memory that a copy may be writing.
pub(super) struct Host(Option<HostBuffer>, usize);

impl Host {
    /// The host memory from which `device` copies fastest, with this content.
    pub(super) fn with(device: &Device, content: &[u8]) -> Self {
        let mut host = device.host_buffer(content.len()).expect("host_buffer");
        host.copy_from_slice(content);
        Self(Some(host), content.len())
    }

    /// Ordinary memory with this content.
    pub(super) fn heap(content: &[u8]) -> Self {
        let mut host = Devices::cpu()
            .host_buffer(content.len())
            .expect("host_buffer");
        host.copy_from_slice(content);
        Self(Some(host), content.len())
    }

    /// `bytes` bytes, for copies to the host.
    pub(super) fn empty(device: &Device, bytes: usize) -> Self {
        Self::with(device, &vec![0xEE; bytes])
    }

    /// The content. No copy may be writing it.
    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_ref().expect("there until dropped")
    }

    /// The address of byte `offset`.
    pub(super) fn at(&self, offset: usize) -> DevicePtr {
        let host = self.0.as_ref().expect("there until dropped");
        assert!(offset <= self.1);
        host.as_device_ptr().offset(offset)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}

/// One copy of `bytes` bytes.
pub(super) fn op(kind: CopyKind, src: DevicePtr, dst: DevicePtr, bytes: usize) -> CopyOp {
    CopyOp {
        src,
        dst,
        bytes,
        kind,
    }
}

pub(super) fn copy(queue: &Queue, copies: &[CopyOp]) {
    note("copy");
    // SAFETY: rules copy between blocks and host memory that they keep until the queue is done, or
    // for ever after a panic. `at` checks the addresses, and the rules choose lengths within the
    // memory.
    unsafe { queue.raw().copy(copies) }.expect("copy");
}

pub(super) fn up(queue: &Queue, src: DevicePtr, dst: DevicePtr, bytes: usize) {
    copy(queue, &[op(CopyKind::HostToDevice, src, dst, bytes)]);
}

pub(super) fn down(queue: &Queue, src: DevicePtr, dst: DevicePtr, bytes: usize) {
    copy(queue, &[op(CopyKind::DeviceToHost, src, dst, bytes)]);
}

pub(super) fn across(queue: &Queue, src: DevicePtr, dst: DevicePtr, bytes: usize) {
    copy(queue, &[op(CopyKind::DeviceToDevice, src, dst, bytes)]);
}

pub(super) fn fill(queue: &Queue, dst: DevicePtr, byte: u8, bytes: usize) {
    note("fill");
    // SAFETY: rules fill blocks that they keep until the queue is done, or for ever after a panic,
    // with lengths within them.
    unsafe { queue.raw().fill(dst, byte, bytes) }.expect("fill");
}

/// Waits for all work of a queue.
pub(super) fn finish(queue: &Queue) {
    note("wait for a queue");
    queue.synchronize().expect("waiting for a queue");
}

/// The content of a block, after waiting for the queue.
pub(super) fn content(queue: &Queue, block: &Block) -> Vec<u8> {
    let host = Host::empty(queue.device(), block.bytes);
    down(queue, block.at(0), host.at(0), block.bytes);
    finish(queue);
    host.bytes().to_vec()
}

/// Records an event on a device that has events.
pub(super) fn record(queue: &Queue) -> SyncEvent {
    note("record");
    let event = queue.record().expect("record");
    event.expect("an event of a device that is not synchronous")
}

pub(super) fn queue(device: &Device) -> Queue {
    note("new_queue");
    device.new_queue().expect("new_queue")
}

/// Bytes that do not repeat after a short time.
pub(super) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut data = Vec::with_capacity(bytes + 8);
    while data.len() < bytes {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        data.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    data.truncate(bytes);
    data
}

#[track_caller]
pub(super) fn assert_bytes(expected: &[u8], actual: &[u8], what: impl std::fmt::Display) {
    assert_eq!(expected.len(), actual.len(), "{what}: length");
    if expected == actual {
        return;
    }
    if let Some(i) = (0..expected.len()).find(|&i| expected[i] != actual[i]) {
        let n = expected.len();
        let (e, a) = (expected[i], actual[i]);
        panic!("{what}: byte {i} of {n} is {a:#04x}, not {e:#04x}");
    }
}

/// Returns whether `done` becomes true within `time`.
pub(super) fn soon(time: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + time;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for threads of a scope. If one panics, this panics with the same text, which the scope
/// itself does not keep.
pub(super) fn join<'scope>(threads: impl IntoIterator<Item = ScopedJoinHandle<'scope, ()>>) {
    for thread in threads {
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Runs `call`, which must return while `hold` keeps a queue busy.
pub(super) fn returns_while_held(
    subject: &Subject,
    hold: &mut Hold,
    what: &'static str,
    call: impl FnOnce() + Send,
) {
    note(what);
    std::thread::scope(|scope| {
        let (sender, done) = channel();
        let thread = scope.spawn(move || {
            call();
            // The receiver lives until this thread is joined.
            let _ = sender.send(());
        });
        let waited = done.recv_timeout(subject.patience) == Err(RecvTimeoutError::Timeout);
        if waited {
            // Lets the thread end.
            hold.open();
        }
        join([thread]);
        assert!(!waited, "{what} waited for the device");
    });
}

/// Counts how often it is woken.
#[derive(Default)]
pub(super) struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.count();
    }
}

impl Woken {
    pub(super) fn count(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn times(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(super) fn waker(self: &Arc<Self>) -> Waker {
        self.clone().into()
    }
}
