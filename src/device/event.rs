//! [`SyncEvent`]: a point in the work of a queue.

use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use crate::device::backend::EventPtr;
use crate::device::{Counters, Device, lock};
use crate::error::{Error, Result};

/// A point in the work of a queue: it completes once all work that was queued before it has. Clones
/// are the same event.
#[derive(Clone)]
pub struct SyncEvent(Arc<Owned>);

struct Owned {
    device: Device,
    ptr: EventPtr,
    seen: Seen,
    /// What work before the event uses, until somebody who knows that it has completed drops it.
    kept: Mutex<Option<Box<dyn Send>>>,
    /// Of tasks that wait for it. While there are any, the release thread watches the event.
    wakers: Mutex<Vec<Waker>>,
}

/// Whether an event was seen complete, which it stays: the device is not asked again. Who sees it set sees what was done before the
/// event.
pub(crate) type Seen = AtomicBool;

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the caller of `from_recorded` guaranteed that `ptr` came from `record` of a queue
        // of this device and is owned by nobody else; this is its last use.
        unsafe { self.device.backend().release_event(self.ptr) }
    }
}

impl SyncEvent {
    /// # Safety
    /// `ptr` was recorded by a queue of `device` and is owned by nobody else.
    pub(crate) unsafe fn from_recorded(device: Device, ptr: EventPtr) -> Self {
        Self(Arc::new(Owned {
            device,
            ptr,
            seen: Seen::default(),
            kept: Mutex::default(),
            wakers: Mutex::default(),
        }))
    }

    pub(crate) fn as_ref(&self) -> EventRef<'_> {
        EventRef {
            device: &self.0.device,
            ptr: self.0.ptr,
            seen: &self.0.seen,
        }
    }

    /// Returns the device whose work the event marks.
    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    /// Returns the pointer for `ArrowDeviceArray.sync_event`. It is valid as long as a clone of
    /// this event lives.
    pub fn as_ptr(&self) -> EventPtr {
        self.0.ptr
    }

    /// Returns whether the work before this event has completed. Never waits.
    ///
    /// # Errors
    /// Returns the device's own error.
    pub fn is_complete(&self) -> Result<bool> {
        self.as_ref().is_complete()
    }

    /// Makes this thread wait until the work before this event has completed: one host wait.
    ///
    /// # Errors
    /// Returns the device's own error. The work may still run then.
    pub fn wait(&self) -> Result<()> {
        self.as_ref().wait()
    }

    /// Keeps `sources` until the event has completed. Then the release thread drops them, unless
    /// [`drop_kept`](Self::drop_kept) was first.
    pub(crate) fn keep(&self, sources: impl Send + 'static) {
        {
            let mut kept = lock(&self.0.kept);
            // What was kept before stays, too.
            *kept = Some(Box::new((kept.take(), sources)));
        }
        let event = self.clone();
        let done = vec![self.clone()];
        self.device().when(done, move || drop(event.take_kept()));
    }

    /// Drops what is [kept](Self::keep) until this event on this thread, if the event is known to have
    /// completed: the release thread may be far behind. Panics are kept for
    /// [`take_drop_error`](Device::take_drop_error).
    pub(crate) fn drop_kept(&self) {
        if self.as_ref().is_known_complete() {
            let kept = self.take_kept();
            self.device().parking("release", || drop(kept));
        }
    }

    /// Taken out under the lock, to be dropped without it.
    fn take_kept(&self) -> Option<Box<dyn Send>> {
        lock(&self.0.kept).take()
    }

    /// Arranges that `waker` is called once the event has completed, without waiting. Returns
    /// `true` if it has completed already; the waker is not called then. The event may be dropped
    /// before it completes. A waker of the same task is called once, however often this is called with it.
    ///
    /// # Errors
    /// Returns the device's own error. The waker is not called then.
    pub fn notify(&self, waker: &Waker) -> Result<bool> {
        if self.is_complete()? {
            return Ok(true);
        }
        // Wakers run foreign code: this is cloned before, and dropped after the lock is held.
        let new = waker.clone();
        let mut wakers = lock(&self.0.wakers);
        if wakers.iter().any(|known| known.will_wake(&new)) {
            return Ok(false);
        }
        wakers.push(new);
        let is_first = wakers.len() == 1;
        drop(wakers);
        if is_first {
            let event = self.clone();
            self.device().when(vec![self.clone()], move || {
                let wakers = std::mem::take(&mut *lock(&event.0.wakers));
                for waker in wakers {
                    event.device().parking("waker", || waker.wake());
                }
            });
        }
        Ok(false)
    }

    /// As [`notify`](Self::notify), for a future.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<Result<()>> {
        match self.notify(cx.waker()) {
            Ok(false) => Poll::Pending,
            done => Poll::Ready(done.map(drop)),
        }
    }
}

impl fmt::Debug for SyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SyncEvent({}, {:?})", self.device(), self.as_ptr())
    }
}

impl Device {
    /// Runs `action` once all `events` have completed: at once, on this thread, if they have
    /// already, or else on the release thread. A panic is kept for
    /// [`take_drop_error`](Self::take_drop_error).
    pub(crate) fn after(&self, mut events: Vec<SyncEvent>, action: impl FnOnce() + Send + 'static) {
        events.retain(|event| !event.is_complete().unwrap_or(false));
        match events.is_empty() {
            true => self.parking("release", action),
            false => self.when(events, action),
        }
    }

    /// As [`after`](Self::after), always on the release thread, for events that have hardly completed
    /// yet: they are not queried here. Without events `action` may wait for the device.
    pub(crate) fn when(&self, mut events: Vec<SyncEvent>, action: impl FnOnce() + Send + 'static) {
        let device = self.clone();
        let action = move || device.parking("release", action);
        if self.is_forked() {
            // Neither that thread nor work of the device is here.
            return action();
        }
        let are_complete = move || {
            while let Some(last) = events.last() {
                match last.is_complete() {
                    Ok(false) => return false,
                    Ok(true) => {}
                    // Wait until all work has ended.
                    Err(_) => last.device().settle(),
                }
                events.pop();
            }
            true
        };
        self.0.releases.watch(are_complete, action);
    }
}

/// A borrowed event, of this crate or of a foreign producer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventRef<'a> {
    pub(crate) device: &'a Device,
    pub(crate) ptr: EventPtr,
    seen: &'a Seen,
}

impl<'a> EventRef<'a> {
    /// `seen` belongs to the event.
    ///
    /// # Safety
    /// `ptr` points to an event of `device`'s type that lives for `'a`.
    pub(crate) unsafe fn new(device: &'a Device, ptr: EventPtr, seen: &'a Seen) -> Self {
        Self { device, ptr, seen }
    }

    /// Whether it was seen complete. In a child of the process the device says that it cannot be used.
    pub(crate) fn is_known_complete(&self) -> bool {
        self.seen.load(Ordering::Acquire) && !self.device.is_forked()
    }

    pub(crate) fn is_complete(&self) -> Result<bool> {
        if self.is_known_complete() {
            return Ok(true);
        }
        // SAFETY: the event is of this device and lives for `'a` (`SyncEvent` owns it, or the
        // caller of `new` guaranteed it).
        let done = unsafe { self.device.backend().query_event(self.ptr) }?;
        if done {
            self.seen.store(true, Ordering::Release);
        }
        Ok(done)
    }

    pub(crate) fn wait(&self) -> Result<()> {
        Counters::add(&self.device.counters().host_waits, 1);
        if self.is_known_complete() {
            return Ok(());
        }
        // SAFETY: the event is of this device and lives for `'a`, as in `is_complete`.
        unsafe { self.device.backend().wait_event(self.ptr) }?;
        self.seen.store(true, Ordering::Release);
        Ok(())
    }
}

/// Does what a task does too, for a caller that blocks its thread: work that does not poll is ready at once.
pub(crate) fn now<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => done,
        Poll::Pending => Err(Error::argument("work that blocks its thread was pending")),
    }
}

/// Waits for an event, if there is one.
pub(crate) async fn completion(event: Option<SyncEvent>) -> Result<()> {
    match event {
        Some(event) => std::future::poll_fn(|cx| event.poll(cx)).await,
        None => Ok(()),
    }
}
