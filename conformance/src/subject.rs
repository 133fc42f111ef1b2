//! [`Subject`]: a device under test, and what the suite knows about it.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arrow_device::device::engine::{Engine, Runtime};
use arrow_device::device::{DevicePtr, EventPtr, WeakDevice};
use arrow_device::{Device, Devices, Error, Queue};

type Make = Arc<dyn Fn() -> Device + Send + Sync>;
type MakeHold = Arc<dyn Fn(&Queue) -> Hold + Send + Sync>;
pub(super) type MakeForeign = Arc<dyn Fn(&Device) -> Foreign + Send + Sync>;
/// Says what it has read, once it has.
type Read = Box<dyn FnMut() -> Option<Vec<u8>>>;
pub(super) type Consumer = Arc<dyn Fn(&Device, EventPtr, DevicePtr, usize) -> Read + Send + Sync>;
type Registration = (fn(&Devices), i64);
type Refused = Arc<dyn Fn(&Queue) -> Vec<Error> + Send + Sync>;
type Balance = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// A device under test, and what the suite knows about it. Its functions are called on the suite's
/// own threads.
#[derive(Clone)]
pub struct Subject {
    pub(super) device: Device,
    pub(super) another: Option<Make>,
    hold: Option<MakeHold>,
    pub(super) foreign: Vec<MakeForeign>,
    pub(super) consumer: Option<Consumer>,
    pub(super) registration: Option<Registration>,
    #[cfg_attr(not(all(target_os = "linux", not(miri))), allow(dead_code))]
    pub(super) refused: Option<Refused>,
    pub(super) balance: Option<Balance>,
    pub(super) patience: Duration,
    limit: Option<Duration>,
    pub(super) knows_its_memory: bool,
    pub(super) refuses_foreign_events: bool,
    pub(super) lazy: bool,
}

impl Subject {
    /// A device about which nothing else is known. Nothing else may use it while the suite runs.
    pub fn new(device: Device) -> Self {
        Self {
            device,
            another: None,
            hold: None,
            foreign: Vec::new(),
            consumer: None,
            registration: None,
            refused: None,
            balance: None,
            patience: Duration::from_secs(10),
            limit: None,
            knows_its_memory: false,
            refuses_foreign_events: false,
            lazy: false,
        }
    }

    /// Devices over the [`Engine`](arrow_device::device::engine::Engine), which `open` opens with ids of their own: the first one and
    /// [others](Self::with_another), whose [balance](Self::with_balance) the engine knows. Asks for all that [`strict`](Self::strict) does.
    pub fn of<R: Runtime>(open: impl Fn() -> Device + Send + Sync + 'static) -> Self {
        let device = open();
        let all = Arc::new(Mutex::new(vec![device.downgrade()]));
        let others = all.clone();
        let another = move || {
            let device = open();
            lock(&others).push(device.downgrade());
            device
        };
        let balance = move || {
            let left: Vec<_> = lock(&all).iter().filter_map(WeakDevice::upgrade).collect();
            left.iter().try_for_each(in_use::<R>)
        };
        Self::new(device)
            .with_another(another)
            .with_balance(balance)
            .strict()
    }

    /// Sets a function that makes further devices of the same type, with ids of their own.
    #[must_use]
    pub fn with_another(mut self, make: impl Fn() -> Device + Send + Sync + 'static) -> Self {
        self.another = Some(Arc::new(make));
        self
    }

    /// Sets a function that queues work which does not end before its [`Hold`] is opened. The suite
    /// uses it to test calls while work is certainly running. Other queues may be held up, too.
    #[must_use]
    pub fn with_hold(mut self, hold: impl Fn(&Queue) -> Hold + Send + Sync + 'static) -> Self {
        self.hold = Some(Arc::new(hold));
        self
    }

    /// Adds a function that makes an event of another library of the program. There may be several, as for events of the device's own
    /// context and of another one.
    #[must_use]
    pub fn with_foreign_event(
        mut self,
        make: impl Fn(&Device) -> Foreign + Send + Sync + 'static,
    ) -> Self {
        self.foreign.push(Arc::new(make));
        self
    }

    /// Sets a function that gives another library of the program an event of an export, and the address and the length of a buffer,
    /// which that library reads once the event has completed: it waits in its own way, and copies on a queue of its own. Returns a
    /// function that never waits, and gives the bytes once they are read. Event and buffer live until then.
    #[must_use]
    pub fn with_consumer(
        mut self,
        consumer: impl Fn(&Device, EventPtr, DevicePtr, usize) -> Read + Send + Sync + 'static,
    ) -> Self {
        self.consumer = Some(Arc::new(consumer));
        self
    }

    /// Sets the function that registers the devices of the backend's crate, and the number of one that is there.
    #[must_use]
    pub fn with_registration(mut self, register: fn(&Devices), number: i64) -> Self {
        self.registration = Some((register, number));
        self
    }

    /// Sets a function that calls what else the backend's crate offers, which a forked child is refused, and returns the errors.
    #[must_use]
    pub fn with_refused(
        mut self,
        refused: impl Fn(&Queue) -> Vec<Error> + Send + Sync + 'static,
    ) -> Self {
        self.refused = Some(Arc::new(refused));
        self
    }

    /// Sets a function that checks whether all memory, events and host memory of the device have
    /// been freed. The suite calls it when it holds nothing itself, until it returns `Ok` or the
    /// patience ends.
    #[must_use]
    pub fn with_balance(
        mut self,
        balance: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        self.balance = Some(Arc::new(balance));
        self
    }

    /// Sets how long to wait for what must happen soon, such as the call of a waker or a release.
    /// 10 seconds by default.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets how long the check of one rule may take. After that time the rule is broken, its thread
    /// is abandoned, and no further rule is checked. Six times the patience by default.
    #[must_use]
    pub fn with_limit(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Requires that the backend recognizes its own addresses: it classifies live memory as
    /// `Device`, and freed memory and that of other devices as something else.
    #[must_use]
    pub fn knows_its_memory(mut self) -> Self {
        self.knows_its_memory = true;
        self
    }

    /// Requires that the backend recognizes its own events: `check_event` refuses those of other
    /// devices, and pointers to anything else.
    #[must_use]
    pub fn refuses_foreign_events(mut self) -> Self {
        self.refuses_foreign_events = true;
        self
    }

    /// Requires both [`knows_its_memory`](Self::knows_its_memory) and
    /// [`refuses_foreign_events`](Self::refuses_foreign_events).
    #[must_use]
    pub fn strict(self) -> Self {
        self.knows_its_memory().refuses_foreign_events()
    }

    /// Declares that the device runs nothing until somebody waits for it, so that a test notices
    /// every wait that is missing. Only devices for tests do that: all others start what was queued
    /// by themselves, since a consumer may wait by means that the backend does not see.
    #[must_use]
    pub fn runs_only_when_waited_for(mut self) -> Self {
        self.lazy = true;
        self
    }

    /// How long the check of one rule may take.
    pub(super) fn limit(&self) -> Duration {
        let limit = self.limit;
        limit.unwrap_or_else(|| self.patience.saturating_mul(6))
    }

    /// Keeps `queue` busy, if the subject supports that.
    pub(super) fn hold(&self, queue: &Queue) -> Hold {
        self.hold
            .as_ref()
            .map_or_else(Hold::default, |hold| hold(queue))
    }
}

fn lock(devices: &Mutex<Vec<WeakDevice>>) -> MutexGuard<'_, Vec<WeakDevice>> {
    devices.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Subject").field(&self.device).finish()
    }
}

/// Keeps a queue busy. Dropping it lets the queue continue. The default one keeps nothing busy.
#[derive(Default)]
#[must_use]
pub struct Hold(Option<Box<dyn FnOnce() + Send>>);

impl Hold {
    /// Makes a hold from a function that ends the work which keeps the queue busy. The function
    /// must not block.
    pub fn new(open: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(open)))
    }

    /// Lets the queue continue.
    pub fn open(&mut self) {
        if let Some(open) = self.0.take() {
            open();
        }
    }

    /// Whether the queue is certainly busy.
    pub(super) fn holds(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.open();
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hold").field(&self.holds()).finish()
    }
}

/// An event of another library of the program, as its arrays would carry it: pending until the suite ends it.
pub struct Foreign {
    pub(super) event: EventPtr,
    pub(super) end: Box<dyn FnOnce(bool) + Send>,
    pub(super) fails: bool,
    /// What keeps the event.
    pub(super) _keep: Box<dyn Any>,
}

impl Foreign {
    /// Makes one of what `sync_event` would point to, what keeps that, and a function that ends the event: with `true` it completes, with
    /// `false` the work before it has failed. The function is called once, on any thread.
    ///
    /// # Safety
    /// `event` points to a live event of the device's type, as long as `keep` lives.
    pub unsafe fn new(
        event: EventPtr,
        keep: impl Any,
        end: impl FnOnce(bool) + Send + 'static,
    ) -> Self {
        Self {
            event,
            end: Box::new(end),
            fails: true,
            _keep: Box::new(keep),
        }
    }

    /// Declares that such events cannot fail.
    #[must_use]
    pub fn never_fails(mut self) -> Self {
        self.fails = false;
        self
    }
}

impl fmt::Debug for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Foreign").field(&self.event).finish()
    }
}

/// Returns what of a device is in use as an error.
pub(super) fn in_use<R: Runtime>(device: &Device) -> Result<(), String> {
    device.trim();
    let engine = Engine::<R>::of(device).map_err(|e| e.to_string())?;
    match engine.in_use() {
        (0, 0, 0) => Ok(()),
        (memory, host, events) => Err(format!(
            "{device}: {memory} allocations, {host} pieces of host memory and {events} events are in use"
        )),
    }
}
