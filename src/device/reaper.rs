//! The reaper: a lazily started thread per device that acts once events have completed.
//!
//! Thread contract: actions run on the reaper's thread, outside its lock, in no particular order;
//! only an action of [`Reaper::later`] may wait for the device. The thread ends when it has had nothing
//! to do for a while, and is started again when needed.
//!
//! Where the backend cannot notify, the thread asks again and again, less and less often; it waits only
//! for a device that does not answer any more, so no event holds up another.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use crate::device::backend::Notify;
use crate::device::{Device, SyncEvent};

/// How long an idle thread stays.
const IDLE: Duration = Duration::from_secs(2);
/// How soon the thread asks a backend again that cannot notify, at first and at last.
const ASK: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
/// How long it pauses at most where asking takes long.
const LONG_ASK: Duration = Duration::from_millis(10);

#[derive(Default)]
pub(crate) struct Reaper {
    shared: Arc<Shared>,
}

/// The reaper of a device, which keeps what actions throw.
pub(crate) struct ReaperOf<'a> {
    device: &'a Device,
    reaper: &'a Reaper,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    items: Vec<Item>,
    running: bool,
    signalled: bool,
    /// The device is gone.
    closed: bool,
}

struct Item {
    events: Vec<SyncEvent>,
    action: Box<dyn FnOnce() + Send>,
    /// Of the registration for the last of `events`; the event is kept until it was called.
    signal: Option<Arc<Signal>>,
    /// The backend of the last of `events` cannot notify.
    asks: bool,
}

/// The waker of one registration.
struct Signal {
    fired: AtomicBool,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Reaper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reaper").finish_non_exhaustive()
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.fired.store(true, Ordering::Release);
        self.shared.lock().signalled = true;
        self.shared.wake.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(self: &Arc<Self>) {
        let mut ask = ASK.0;
        loop {
            let asking = Instant::now();
            let items = std::mem::take(&mut self.lock().items);
            let mut waiting = Vec::new();
            for mut item in items {
                if item.settle(self) {
                    run_action(item.action);
                } else {
                    waiting.push(item);
                }
            }
            let mut state = self.lock();
            state.items.append(&mut waiting);
            let blocked = state.items.iter().all(|item| item.signal.is_some());
            let mut idle = state.closed;
            let over = idle && state.items.is_empty();
            if !state.signalled && !over {
                // Asking takes time as well: at most a part of this thread's.
                let pause = match blocked {
                    true => IDLE,
                    false => ask.max((4 * asking.elapsed()).min(LONG_ASK)),
                };
                let (guard, timeout) = self
                    .wake
                    .wait_timeout_while(state, pause, |s| !s.signalled)
                    .unwrap_or_else(PoisonError::into_inner);
                state = guard;
                idle = blocked && timeout.timed_out() || state.closed;
            }
            ask = if state.signalled {
                ASK.0
            } else {
                (ask * 2).min(ASK.1)
            };
            if idle && state.items.is_empty() {
                state.running = false;
                return;
            }
            state.signalled = false;
        }
    }
}

impl Item {
    /// Whether all events have completed; asks for a notification of the last that has not.
    fn settle(&mut self, shared: &Arc<Shared>) -> bool {
        if let Some(signal) = &self.signal {
            if !signal.fired.load(Ordering::Acquire) {
                return false;
            }
        }
        self.signal = None;
        while let Some(event) = self.events.last() {
            if !self.asks {
                let signal = Arc::new(Signal {
                    fired: AtomicBool::new(false),
                    shared: shared.clone(),
                });
                let waker = Waker::from(signal.clone());
                let backend = event.device().backend();
                // SAFETY: the item keeps the event until the waker was called.
                match unsafe { backend.notify_event(event.as_ptr(), &waker) } {
                    Ok(Notify::Completed) => {}
                    Ok(Notify::Registered) => {
                        self.signal = Some(signal);
                        return false;
                    }
                    Ok(Notify::Unsupported) | Err(_) => self.asks = true,
                }
            }
            if self.asks {
                match event.is_complete() {
                    Ok(true) => {}
                    Ok(false) => return false,
                    // It will not tell: then all work must have ended.
                    Err(_) => event.device().settle(),
                }
            }
            self.asks = false;
            self.events.pop();
        }
        true
    }

    /// Makes this thread wait for all events.
    fn wait(&self) {
        for event in &self.events {
            if event.wait_uncounted().is_err() {
                event.device().settle();
            }
        }
    }
}

/// Runs outside all locks. Panics are parked already, but not those of a device's own drop.
fn run_action(action: Box<dyn FnOnce() + Send>) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(action)) {
        // Dropping the payload could panic again.
        std::mem::forget(payload);
    }
}

impl<'a> ReaperOf<'a> {
    pub(super) fn new(device: &'a Device, reaper: &'a Reaper) -> Self {
        Self { device, reaper }
    }

    /// Runs `action` once all `events` have completed: at once on this thread if they have
    /// already, else on the reaper's.
    pub(crate) fn after(&self, mut events: Vec<SyncEvent>, action: impl FnOnce() + Send + 'static) {
        events.retain(|event| !event.is_complete().unwrap_or(false));
        if events.is_empty() {
            return self.device.parking("release", action);
        }
        self.push(events, action);
    }

    /// Runs `action`, which may wait for the device, on the reaper's thread.
    pub(crate) fn later(&self, action: impl FnOnce() + Send + 'static) {
        self.push(Vec::new(), action);
    }

    fn push(&self, events: Vec<SyncEvent>, action: impl FnOnce() + Send + 'static) {
        let device = self.device.clone();
        let action = move || device.parking("release", action);
        self.reaper.push(events, Box::new(action));
    }
}

impl Reaper {
    fn push(&self, events: Vec<SyncEvent>, action: Box<dyn FnOnce() + Send>) {
        let mut state = self.shared.lock();
        state.items.push(Item {
            events,
            action,
            signal: None,
            asks: false,
        });
        state.signalled = true;
        if !state.running {
            let shared = self.shared.clone();
            state.running = std::thread::Builder::new()
                .name("arrow-device reaper".into())
                .spawn(move || {
                    // Backends do not panic; if one does, the next item starts a new thread.
                    if catch_unwind(AssertUnwindSafe(|| shared.run())).is_err() {
                        shared.lock().running = false;
                    }
                })
                .is_ok();
        }
        let stranded = if state.running {
            Vec::new()
        } else {
            std::mem::take(&mut state.items)
        };
        drop(state);
        self.shared.wake.notify_one();
        // No thread to be had: wait here rather than lose the action.
        for item in stranded {
            item.wait();
            run_action(item.action);
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        // Nothing is left to do: whatever waits here holds the device.
        let mut state = self.shared.lock();
        state.closed = true;
        state.signalled = true;
        drop(state);
        self.shared.wake.notify_one();
    }
}
