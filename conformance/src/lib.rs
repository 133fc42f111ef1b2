//! The conformance suite for backends of [`arrow_device`].
//!
//! A backend's test hands a device to the suite, which checks every rule of the contract and panics
//! with a table if one is broken:
//!
//! ```
//! use arrow_device::Devices;
//! use arrow_device_conformance::{Subject, run};
//! run(&Subject::new(Devices::cpu()));
//! ```
//!
//! Each [`Rule`] is one line of the contract of [`Backend`](arrow_device::device::Backend) or
//! [`RawQueue`](arrow_device::device::RawQueue), or of what `arrow-device` builds on them. The
//! suite uses public functions only and reads device memory by copies, so it works for every
//! device: synchronous or asynchronous, readable by the host or not.
//!
//! The crate is unstable: names, signatures and rules may change in any release.
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use arrow_device::{Device, Queue};

mod arrays;
mod copies;
mod events;
mod host;
mod identity;
mod kit;
mod memory;
mod notify;
mod samples;
mod transfer;

type MakeHold = Box<dyn Fn(&Queue) -> Hold>;

/// A device under test, and what the suite knows about it.
pub struct Subject {
    device: Device,
    another: Option<Box<dyn Fn() -> Device>>,
    hold: Option<MakeHold>,
    balance: Option<Box<dyn Fn() -> Result<(), String>>>,
    patience: Duration,
    strict: bool,
}

impl Subject {
    /// A device about which nothing else is known. Nothing else may use it while the suite runs.
    pub fn new(device: Device) -> Self {
        Self {
            device,
            another: None,
            hold: None,
            balance: None,
            patience: Duration::from_secs(10),
            strict: false,
        }
    }

    /// Sets a function that makes further devices of the same type, with ids of their own.
    #[must_use]
    pub fn with_another(mut self, make: impl Fn() -> Device + 'static) -> Self {
        self.another = Some(Box::new(make));
        self
    }

    /// Sets a function that queues work which does not end before its [`Hold`] is opened. The suite
    /// uses it to test calls while work is certainly running. Other queues may be held up, too.
    #[must_use]
    pub fn with_hold(mut self, hold: impl Fn(&Queue) -> Hold + 'static) -> Self {
        self.hold = Some(Box::new(hold));
        self
    }

    /// Sets a function that checks whether all memory, events and host memory of the device have
    /// been freed. The suite calls it after all rules, until it returns `Ok` or the patience ends.
    #[must_use]
    pub fn with_balance(mut self, balance: impl Fn() -> Result<(), String> + 'static) -> Self {
        self.balance = Some(Box::new(balance));
        self
    }

    /// Sets how long to wait for what must happen soon, such as the call of a waker or a release.
    /// 10 seconds by default.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Requires that the backend recognizes its own addresses and events: it classifies live memory
    /// as `Device` and freed memory as something else, and it refuses events of other devices.
    #[must_use]
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Keeps `queue` busy, if the subject supports that.
    fn hold(&self, queue: &Queue) -> Hold {
        self.hold.as_ref().map_or(Hold(None), |hold| hold(queue))
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Subject").field(&self.device).finish()
    }
}

/// Keeps a queue busy. Dropping it lets the queue continue.
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
    fn holds(&self) -> bool {
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

/// The result of a rule that is not broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The device keeps the rule.
    Kept,
    /// The rule does not apply, for this reason.
    Skipped(&'static str),
}

/// One line of the contract, and its check.
#[derive(Debug)]
pub struct Rule {
    name: &'static str,
    contract: &'static str,
    check: fn(&Subject) -> Verdict,
}

impl Rule {
    /// Returns a short name, such as `event.wait`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the line of the contract.
    pub fn contract(&self) -> &'static str {
        self.contract
    }

    /// Checks the rule. After an error the device may be in any state, and what the check has
    /// allocated stays allocated.
    ///
    /// # Errors
    /// Returns a description of what happened instead.
    pub fn check(&self, subject: &Subject) -> Result<Verdict, String> {
        catch_unwind(AssertUnwindSafe(|| (self.check)(subject)))
            .map_err(|panic| panic_text(&*panic))
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    match panic.downcast_ref::<&str>() {
        Some(text) => (*text).into(),
        None => match panic.downcast_ref::<String>() {
            Some(text) => text.clone(),
            None => "panicked without a text".into(),
        },
    }
}

/// Checks all rules in order.
///
/// # Panics
/// Panics if a rule is broken, with a table of the results of all rules.
pub fn run(subject: &Subject) {
    let mut table = String::new();
    let mut broken = 0;
    for rule in rules() {
        let checked = if broken > 0 && rule.name == "balance" {
            Ok(Verdict::Skipped("broken rules leave things behind"))
        } else {
            rule.check(subject)
        };
        let line = match checked {
            Ok(Verdict::Kept) => format!("kept     {}\n", rule.name),
            Ok(Verdict::Skipped(why)) => format!("skipped  {}: {why}\n", rule.name),
            Err(seen) => {
                broken += 1;
                format!(
                    "BROKEN   {}: {seen}\n         the contract: {}\n",
                    rule.name, rule.contract
                )
            }
        };
        table.push_str(&line);
    }
    assert!(
        broken == 0,
        "{} breaks {broken} rules of the contract\n{table}",
        subject.device
    );
}

macro_rules! rules {
    ($($name:literal $check:path: $contract:literal)*) => {
        /// Returns all rules, simple ones first.
        pub fn rules() -> &'static [Rule] {
            const RULES: &[Rule] = &[$(Rule { name: $name, contract: $contract, check: $check }),*];
            RULES
        }
    };
}

rules! {
    "identity.stable" identity::stable:
        "id, host-readable, synchronous and the default queue never change"
    "identity.registry" identity::registry:
        "a registered device is found under its id, and no other takes that id"
    "identity.within" identity::within:
        "within runs its work once, on the same thread, also inside itself, and panics leave it as they are"
    "identity.another" identity::another:
        "two devices of a type have two ids, and neither takes the other's memory or events for its own"
    "allocate.aligned" memory::aligned:
        "allocate returns at least the requested bytes, aligned to 64 bytes, which nothing else uses"
    "allocate.huge" memory::huge:
        "an allocation that is too large, or of 0 bytes, fails with an error and does no harm"
    "allocate.many" memory::many:
        "many small allocations exist at the same time and keep their content"
    "event.synchronous" events::synchronous:
        "a synchronous device has no events, and its work is done when the call returns"
    "event.after-work" events::after_work:
        "an event completes only after all earlier work, which is then visible to the host"
    "event.wait" events::wait:
        "wait_event returns only after the event has completed"
    "event.never-waits" events::never_waits:
        "query, notify, release, free and free_host never wait for the device"
    "event.reuse" events::reuse:
        "released events may be reused; a recorded event never shows the state of an earlier record"
    "event.order" events::order:
        "work of a queue runs after the events that the queue was told to wait for before"
    "event.wait-stays" events::wait_stays:
        "an event may be released after a queue was told to wait for it; the queue still waits"
    "event.threads" events::threads:
        "events are queried, waited for and released on any thread"
    "event.check" events::check:
        "check_event accepts the device's own live events"
    "event.synchronize" events::synchronize:
        "synchronize returns only after all work of all queues"
    "notify.backend" notify::backend:
        "notify_event calls the waker after the event completes and not before, or reports that it is not supported"
    "notify.event" notify::event:
        "SyncEvent::notify calls the waker on every backend"
    "copy.exact" copies::exact:
        "copies move exactly their bytes, whatever their size and offset"
    "copy.list" copies::list:
        "a list may hold many copies, and all of them run"
    "copy.order" copies::order:
        "work runs in the order in which it was given"
    "copy.heap" copies::heap:
        "host memory of copies may be ordinary memory"
    "fill.exact" copies::fill:
        "fill sets exactly its bytes"
    "free.in-order" memory::free_in_order:
        "free takes effect after all work that the queue was given before"
    "free.elsewhere" memory::free_elsewhere:
        "memory may be freed on another queue and thread than it was allocated on"
    "shrink.in-order" memory::shrink:
        "shrink frees the end of an allocation after all work that the queue was given before, or does nothing and says so"
    "shrink.to-fit" memory::shrink_to_fit:
        "a buffer that shrinks keeps its content, by one copy or none, without a wait"
    "host.allocate" host::allocate:
        "allocate_host returns writable memory, aligned to 64 bytes, which any thread may free"
    "host.slab" host::slab:
        "host slabs are copied to and from, and freeze into buffers and bytes without a copy"
    "host.classify" host::classify:
        "classify accepts an address only if the device can read the whole length"
    "host.allocation" host::allocation:
        "classify_allocation agrees with classify, for the bytes asked about and all of the range it returns"
    "host.view" host::view:
        "a host view waits for the event first, and exists only for memory that the host can read"
    "array.types" arrays::types:
        "arrays of every layout, whole and sliced, come back with the same values"
    "array.devices" arrays::devices:
        "arrays move between devices with the same values"
    "array.compact" arrays::compact:
        "compact copies of slices have the same values, in aligned memory of their own on the device"
    "array.concat" arrays::concat:
        "concatenated slices have the same values, in one allocation on the device"
    "array.threads" arrays::threads:
        "several threads transfer at the same time"
    "transfer.counts" transfer::counts:
        "an upload is one allocation and no wait, a download is one wait, and everything is counted"
    "transfer.source" transfer::source:
        "the source of an upload lives until its copies are done, and no longer than needed"
    "transfer.loan" transfer::loan:
        "memory lent to a queue is freed after that queue's work"
    "transfer.drop" transfer::drop_order:
        "arrays and queues outlive the last handle of their device"
    "balance" memory::balance:
        "everything has been freed"
}
