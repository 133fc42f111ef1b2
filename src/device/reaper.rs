//! The reaper: a thread per device, started when needed, that runs items once their events have
//! completed.
//!
//! Items run on the reaper's thread, outside its lock, in no particular order. The thread ends after
//! it has been idle for a while.
//!
//! If the backend cannot notify, the thread polls the pending events, at growing intervals and for at
//! most a fifth of its time. It waits only for a device whose queries fail, so no event delays
//! another that could complete before it.

use std::collections::HashMap;
use std::mem::take;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use crate::abi::guard;
use crate::device::backend::{Backend, Notify};
use crate::device::{Process, lock, scope};
use crate::error::Result;

/// How long an idle thread lives.
const IDLE: Duration = Duration::from_secs(2);
/// The shortest and the longest interval at which events are polled.
const ASK: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
pub(crate) struct Reaper {
    shared: Arc<Shared>,
    /// Where the thread runs.
    process: Process,
}

impl Default for Reaper {
    fn default() -> Self {
        Self {
            shared: Arc::default(),
            process: Process::this(),
        }
    }
}

/// An action, and the events that it comes after, one after the other.
pub(super) trait Item: Send {
    /// The backend of the next event; `None` if there is none.
    fn backend(&self) -> Option<Arc<dyn Backend>>;

    /// As [`Backend::notify_event`], for the next event.
    ///
    /// # Safety
    /// There is one, and the item is kept until the waker was called or dropped.
    unsafe fn notify(&self, waker: &Waker) -> Result<Notify>;

    /// Whether the next event has completed.
    fn is_complete(&self) -> Result<bool>;

    /// Makes this thread wait for the next event.
    fn wait(&self) -> Result<()>;

    /// Makes this thread wait until the work before the next event does not run any more, even if its device has failed.
    fn settle(&self);

    /// Leaves the next event behind.
    fn advance(&mut self);

    fn run(self: Box<Self>);
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    /// How many wakers were registered, by all threads so far: the next registration's number.
    registrations: AtomicU64,
    /// How often an item was looked at, for tests.
    #[cfg(test)]
    visits: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Items that the thread has not seen yet.
    items: Vec<Box<dyn Item>>,
    /// Registrations whose waker was called, or dropped without a call, and that the thread has not
    /// seen yet.
    woken: Vec<(u64, Fired)>,
    running: bool,
    /// The device was dropped.
    closed: bool,
}

/// The items that the thread has seen.
#[derive(Default)]
struct Waiting {
    /// By the registration of a waker for their next event. The event is kept until the waker was
    /// called or dropped.
    registered: HashMap<u64, Box<dyn Item>>,
    /// Those for whose next event the backend cannot notify, or did not, and which is polled.
    polled: Vec<Box<dyn Item>>,
}

/// What a backend did with a waker.
#[derive(Clone, Copy, PartialEq)]
enum Fired {
    Called,
    /// It cannot call it any more.
    Dropped,
}

/// The waker of one registration.
struct Signal {
    registration: u64,
    fired: AtomicBool,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Reaper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reaper").finish_non_exhaustive()
    }
}

impl Signal {
    fn fire(&self, fired: Fired) {
        if !self.fired.swap(true, Ordering::Relaxed) {
            self.shared.lock().woken.push((self.registration, fired));
            self.shared.wake.notify_one();
        }
    }
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.fire(Fired::Called);
    }
}

impl Drop for Signal {
    fn drop(&mut self) {
        self.fire(Fired::Dropped);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn run(self: &Arc<Self>) {
        let mut waiting = Waiting::default();
        let mut ask = ASK.0;
        // When events were polled last, and how long that took.
        let (mut polled, mut took) = (Instant::now(), Duration::ZERO);
        loop {
            let mut state = self.lock();
            let (items, woken) = (take(&mut state.items), take(&mut state.woken));
            drop(state);
            if !(items.is_empty() && woken.is_empty()) {
                ask = ASK.0;
            }
            for item in items {
                waiting.proceed(item, self);
            }
            for (registration, fired) in woken {
                match (waiting.registered.remove(&registration), fired) {
                    (Some(item), Fired::Called) => waiting.proceed(item, self),
                    // The backend might drop another waker as well.
                    (Some(item), Fired::Dropped) => waiting.polled.push(item),
                    (None, _) => {}
                }
            }
            let mut due = polled + ask.max(4 * took);
            if !waiting.polled.is_empty() && Instant::now() >= due {
                let start = Instant::now();
                waiting.poll(self);
                polled = Instant::now();
                took = polled - start;
                ask = (ask * 2).min(ASK.1);
                due = polled + ask.max(4 * took);
            }

            let state = self.lock();
            let pause = match waiting.polled.is_empty() {
                true => IDLE,
                false => due.saturating_duration_since(Instant::now()),
            };
            let idle = waiting.is_empty();
            let nothing =
                |s: &mut State| s.items.is_empty() && s.woken.is_empty() && !(s.closed && idle);
            let (mut state, _) = self
                .wake
                .wait_timeout_while(state, pause, nothing)
                .unwrap_or_else(PoisonError::into_inner);
            if idle && state.items.is_empty() {
                state.running = false;
                return;
            }
        }
    }
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.registered.is_empty() && self.polled.is_empty()
    }

    /// Runs the item if all events have completed; else waits for the next one that has not.
    fn proceed(&mut self, mut item: Box<dyn Item>, shared: &Arc<Shared>) {
        #[cfg(test)]
        shared.visits.fetch_add(1, Ordering::Relaxed);
        while item.backend().is_some() {
            let registration = shared.registrations.fetch_add(1, Ordering::Relaxed);
            let signal = Arc::new(Signal {
                registration,
                fired: AtomicBool::new(false),
                shared: shared.clone(),
            });
            let waker = Waker::from(signal.clone());
            // SAFETY: there is an event, and `registered` keeps the item until the waker was called or dropped.
            let answer = unsafe { item.notify(&waker) };
            if let Ok(Notify::Registered) = answer {
                self.registered.insert(registration, item);
                return;
            }
            // Nothing was registered: the waker's drop must not be reported.
            signal.fired.store(true, Ordering::Relaxed);
            if !matches!(answer, Ok(Notify::Completed)) {
                return self.polled.push(item);
            }
            item.advance();
        }
        run(item);
    }

    /// Polls events, and proceeds with the items of those that have completed.
    fn poll(&mut self, shared: &Arc<Shared>) {
        let items = take(&mut self.polled);
        let Some(backend) = items.iter().find_map(|item| item.backend()) else {
            return;
        };
        // The queries share one entry into the device's runtime.
        let answers = scope::within(&*backend, || {
            let answers = items.iter().map(|item| item.is_complete());
            answers.collect::<Vec<_>>()
        });
        for (mut item, answer) in items.into_iter().zip(answers) {
            match answer {
                Ok(false) => {
                    self.polled.push(item);
                    continue;
                }
                Ok(true) => {}
                // Wait until all work has ended.
                Err(_) => item.settle(),
            }
            item.advance();
            self.proceed(item, shared);
        }
    }
}

/// Runs an item, outside all locks. It keeps the panics of its action, but may also drop the device,
/// which may panic.
fn run(item: Box<dyn Item>) {
    let _ = guard::call_foreign("release", || item.run());
}

impl Reaper {
    /// Whether this process is a child of the one in which the reaper was made.
    pub(super) fn is_forked(&self) -> bool {
        !self.process.is_this()
    }

    /// Runs `item` on the reaper's thread once its events have completed. After a fork, the child
    /// has neither that thread nor work of the device: the item runs at once, on this thread.
    pub(super) fn push(&self, item: Box<dyn Item>) {
        if self.is_forked() {
            return run(item);
        }
        let mut state = self.shared.lock();
        state.items.push(item);
        if !state.running {
            let shared = self.shared.clone();
            state.running = std::thread::Builder::new()
                .name("arrow-device reaper".into())
                .spawn(move || {
                    // Backends do not panic. If one does, the next item starts a new thread.
                    if guard::call_foreign("reaper", || shared.run()).is_err() {
                        shared.lock().running = false;
                    }
                })
                .is_ok();
        }
        let stranded = if state.running {
            Vec::new()
        } else {
            take(&mut state.items)
        };
        drop(state);
        self.shared.wake.notify_one();
        // No thread could be started: wait here rather than lose the item.
        for mut item in stranded {
            while item.backend().is_some() {
                if item.wait().is_err() {
                    item.settle();
                }
                item.advance();
            }
            scope::outside(move || run(item));
        }
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        // No item is left: each holds the device.
        let mut state = self.shared.lock();
        state.closed = true;
        drop(state);
        self.shared.wake.notify_one();
    }
}

#[cfg(all(test, feature = "sim", target_os = "linux", not(miri)))]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::device::sim::{SimConfig, SimDevice, SimMode};
    use crate::device::{Device, SyncEvent};

    /// Each action runs as soon as its event has completed, and items of pending events are not
    /// looked at.
    #[test]
    fn two_visits_an_item() {
        const N: u64 = 300;
        let sim = SimDevice::new(SimConfig::default().with_mode(SimMode::Deferred)).unwrap();
        let device = Device::new(sim).unwrap();
        let queue = device.default_queue();
        let (sender, done) = mpsc::channel();
        let events: Vec<SyncEvent> = (0..N)
            .map(|i| {
                let event = queue.record().unwrap().unwrap();
                let sender = sender.clone();
                let action = move || sender.send(i).unwrap();
                device.after(vec![event.clone()], action);
                event
            })
            .collect();
        for (i, event) in (0..).zip(&events) {
            event.wait().unwrap();
            assert_eq!(done.recv_timeout(Duration::from_secs(60)), Ok(i));
        }
        let visits = device.reaper().shared.visits.load(Ordering::Relaxed);
        assert!((N..=2 * N).contains(&visits), "{visits} visits");
    }
}
