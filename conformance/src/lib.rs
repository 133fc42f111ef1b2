//! One suite that every backend of [`arrow_device`] passes.
//!
//! Each [`Rule`] checks one line of the contract of [`Backend`](arrow_device::device::Backend),
//! [`RawQueue`](arrow_device::device::RawQueue) or of what `arrow-device` builds on them. It uses public calls
//! only and reads device memory by copies, so it serves every device: synchronous or not, readable
//! by the host or not.
//!
//! Unstable: names, signatures and rules may change in any release.
//!
//! ```
//! use arrow_device::Devices;
//! use arrow_device_conformance::{Subject, run};
//! run(&Subject::new(Devices::cpu()));
//! ```
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

/// A device under test, and what the suite may know of it.
pub struct Subject {
    device: Device,
    another: Option<Box<dyn Fn() -> Device>>,
    hold: Option<MakeHold>,
    balance: Option<Box<dyn Fn() -> Result<(), String>>>,
    patience: Duration,
    strict: bool,
}

impl Subject {
    /// A device of which nothing else is known. The suite has it to itself.
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

    /// Makes further devices of the kind, with ids of their own.
    #[must_use]
    pub fn with_another(mut self, make: impl Fn() -> Device + 'static) -> Self {
        self.another = Some(Box::new(make));
        self
    }

    /// Queues work that does not end before its [`Hold`] is opened. With it the suite shows, rather
    /// than hopes, that work is under way. Other queues may be held up too.
    #[must_use]
    pub fn with_hold(mut self, hold: impl Fn(&Queue) -> Hold + 'static) -> Self {
        self.hold = Some(Box::new(hold));
        self
    }

    /// Says whether the device has got everything back: memory, events, host memory. Asked when
    /// all rules are done, until it agrees or patience ends.
    #[must_use]
    pub fn with_balance(mut self, balance: impl Fn() -> Result<(), String> + 'static) -> Self {
        self.balance = Some(Box::new(balance));
        self
    }

    /// How long to wait for what must happen soon: a waker's call, a release. 10 seconds if not
    /// given.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The backend knows its own addresses and events: it classifies live memory as `Device`, freed
    /// memory as something else, and refuses events of others.
    #[must_use]
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// Keeps `queue` busy; nothing happens if the subject cannot.
    fn hold(&self, queue: &Queue) -> Hold {
        self.hold.as_ref().map_or(Hold(None), |hold| hold(queue))
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Subject").field(&self.device).finish()
    }
}

/// A queue that is kept busy. Dropping it lets the queue go on.
#[must_use]
pub struct Hold(Option<Box<dyn FnOnce() + Send>>);

impl Hold {
    /// `open` ends the work that keeps the queue busy. It does not block.
    pub fn new(open: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(open)))
    }

    /// Lets the queue go on.
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

/// How a rule ended that was not broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The device keeps it.
    Kept,
    /// It does not apply, for this reason.
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
    /// A short name: `event.wait`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What the contract says.
    pub fn contract(&self) -> &'static str {
        self.contract
    }

    /// Checks the rule. After an error the device may be in any state, and what the check had
    /// allocated stays allocated.
    ///
    /// # Errors
    /// What was seen instead.
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
/// If any is broken, with a table of all rules and what was seen.
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
        /// All rules, simple ones first.
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
    "identity.another" identity::another:
        "two devices of a kind have two ids and do not take each other's memory and events for theirs"
    "allocate.aligned" memory::aligned:
        "allocate gives at least the bytes asked for, aligned to 64 bytes, that nothing else uses"
    "allocate.huge" memory::huge:
        "an allocation that cannot be, or of 0 bytes, answers with an error and does no harm"
    "allocate.many" memory::many:
        "many small allocations live side by side and keep their content"
    "event.synchronous" events::synchronous:
        "a synchronous device has no events, and its work is done when the call returns"
    "event.after-work" events::after_work:
        "an event completes only when all earlier work has, and that work is visible to the host then"
    "event.wait" events::wait:
        "wait_event returns only after the event has completed"
    "event.never-waits" events::never_waits:
        "query, notify, release, free and free_host never wait for the device"
    "event.reuse" events::reuse:
        "released events may be reused; a recorded one never shows an earlier record's state"
    "event.order" events::order:
        "work of a queue runs after the events of its earlier waits"
    "event.wait-stays" events::wait_stays:
        "an event may be released after a queue was told to wait for it: the wait stays"
    "event.threads" events::threads:
        "events are queried, waited for and released on any thread"
    "event.check" events::check:
        "check_event accepts the device's own live events"
    "event.synchronize" events::synchronize:
        "synchronize returns only after all work of all queues"
    "notify.backend" notify::backend:
        "notify_event calls the waker once the event completes and not before, or says that it cannot"
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
    "host.allocate" host::allocate:
        "allocate_host gives writable memory, 64-byte aligned, that any thread may free"
    "host.slab" host::slab:
        "host slabs are copied to and from, and freeze into buffers and bytes without a copy"
    "host.classify" host::classify:
        "classify vouches for an address only where the device may read the whole length"
    "host.view" host::view:
        "a host view waits for the event first, and only memory that the host reads has one"
    "array.types" arrays::types:
        "arrays of every layout, whole and sliced, come back with the same values"
    "array.devices" arrays::devices:
        "arrays go from device to device and back with the same values"
    "array.compact" arrays::compact:
        "compact copies of slices have the same values, in aligned memory of their own on the device"
    "array.threads" arrays::threads:
        "threads transfer side by side"
    "transfer.counts" transfer::counts:
        "an upload is one allocation and no wait, a download one wait, and everything is counted"
    "transfer.source" transfer::source:
        "the source of an upload lives until its copies are done, and no longer than needed"
    "transfer.loan" transfer::loan:
        "memory lent to a queue is freed after that queue's work"
    "transfer.drop" transfer::drop_order:
        "arrays and queues outlive the last handle of their device"
    "balance" memory::balance:
        "everything was given back"
}
