//! The conformance suite for backends of [`arrow_device`].
//!
//! A backend's test hands a device to the suite, which checks every rule of the contract, prints a
//! table of what became of each, and panics if one is broken:
//!
//! ```
//! use arrow_device::Devices;
//! use arrow_device_conformance::{Subject, run};
//! let report = run(&Subject::new(Devices::cpu()));
//! for (rule, why) in report.skipped() {
//!     println!("{}: {why}", rule.name());
//! }
//! ```
//!
//! The suite checks more if the [`Subject`] says more about the device. [`check_all`] returns the
//! table without a panic. Two more functions belong to the suite: [`every_call_fails`], and
//! [`run_in_processes`] for what only a process of its own shows.
//!
//! Each [`Rule`] is one line of the contract of [`Backend`](arrow_device::device::Backend) or
//! [`RawQueue`](arrow_device::device::RawQueue), or of what `arrow-device` builds on them. The
//! suite uses public functions only and reads device memory by copies, so it works for every
//! device: synchronous or asynchronous, readable by the host or not.
//!
//! A check that hangs is reported like any other broken rule: each runs on a thread of its own and
//! has a [limit](Subject::with_limit).
//!
//! The crate is unstable: names, signatures and rules may change in any release.
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod arrays;
mod copies;
#[cfg(all(target_os = "linux", not(miri)))]
mod ends;
mod events;
mod exports;
mod faulty;
mod foreign;
mod help;
mod host;
mod identity;
mod kit;
mod memory;
mod notify;
mod poison;
#[cfg(not(miri))]
mod processes;
mod queues;
mod report;
mod rule;
mod samples;
#[cfg(all(target_os = "linux", not(miri)))]
mod soak;
mod streams;
mod subject;
mod transfer;
mod watch;

pub use faulty::every_call_fails;
pub use help::{
    assert_balanced, assert_error, assert_works, found, is_required, next_id, numbers, soon,
};
pub use poison::Poisoning;
#[cfg(not(miri))]
pub use processes::alone;
#[cfg(all(target_os = "linux", not(miri)))]
pub use processes::{ends_well, run_in_processes};
pub use report::{Report, check_all, run};
pub use rule::{Rule, Verdict};
pub use subject::{Foreign, Hold, Subject};

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
        "the capabilities and the default queue never change"
    "identity.registry" identity::registry:
        "a registered device is found under its id, and no other takes that id"
    "identity.registered" identity::registered:
        "a crate's registered devices are found by their numbers, each time the same, and a number that no device has is an error"
    "identity.another" identity::another:
        "two devices of a type have two ids, and neither takes the other's memory or events for its own"
    "allocate.aligned" memory::aligned:
        "allocate returns at least the requested bytes, aligned to 64 bytes, which nothing else uses"
    "allocate.huge" memory::huge:
        "an allocation that is too large, or of 0 bytes, fails with an error and does no harm"
    "allocate.many" memory::many:
        "many small allocations exist at the same time and keep their content"
    "allocate.initialised" memory::initialised:
        "memory that the host can read holds values at once, fresh or reused: zeros, or what was written before (seen if it is from Rust's allocator)"
    "queue.own" queues::own:
        "new_queue returns a queue of its own, never the default queue"
    "queue.never-waits" queues::never_waits:
        "copy and fill never wait for the device"
    "queue.adopted" queues::adopted:
        "a queue that is made of a stream works in the order of that stream, which outlives it"
    "event.synchronous" events::synchronous:
        "a synchronous device has no events, and its work is done when the call returns"
    "event.never-waits" events::never_waits:
        "query, notify, release, free and free_host never wait for the device"
    "event.after-work" events::after_work:
        "an event completes only after all earlier work, which is then visible to the host"
    "event.wait" events::wait:
        "wait_event returns only after the event has completed"
    "event.reuse" events::reuse:
        "released events may be reused; a recorded event never shows the state of an earlier record"
    "event.leaks" events::leaks:
        "released events are freed or reused, however many are recorded"
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
    "foreign.order" foreign::order:
        "a queue that waits for an event of another library runs its later work after it, and other queues go on"
    "foreign.failed" foreign::failed:
        "an event of another library that has failed is an error for who asks or waits, and the device goes on"
    "foreign.fails" foreign::fails:
        "if an event fails that a queue was told to wait for, the device has failed for good, and so has what waits for that device"
    "foreign.imported" foreign::imported:
        "an array with an event of another library is imported at once; it is read, and an export of it is ready, only after the event"
    "queue.progress" queues::progress:
        "recorded work runs although nobody waits for it, queries it or synchronizes"
    "queue.dropped" queues::dropped:
        "dropping a queue does not wait for its work, but synchronize does"
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
    "copy.random" copies::random:
        "copies and fills of any place and length do what they do in a model"
    "fill.exact" copies::fill:
        "fill sets exactly its bytes"
    "free.in-order" memory::free_in_order:
        "free takes effect after all work that the queue was given before"
    "free.elsewhere" memory::free_elsewhere:
        "memory may be freed on another queue and thread than it was allocated on"
    "shrink.to-fit" memory::shrink_to_fit:
        "a buffer that shrinks keeps its content, by one copy, without a wait"
    "host.allocate" host::allocate:
        "allocate_host returns writable memory, aligned to 64 bytes, which any thread may free"
    "host.buffer" host::buffer:
        "host buffers are copied to and from, and freeze into buffers and bytes without a copy"
    "host.direct" host::direct:
        "copies_directly_from is false for null"
    "host.classify" host::classify:
        "classify accepts an address only if the device can read the whole length"
    "host.allocation" host::allocation:
        "what classify says of the bytes asked about, it says of all of the range that it returns"
    "host.view" host::view:
        "a host view waits for the event first, and exists only for memory that the host can read"
    "array.types" arrays::types:
        "arrays of every type, whole and sliced, come back with the same values"
    "array.devices" arrays::devices:
        "arrays move between devices with the same values"
    "array.compact" arrays::compact:
        "compact copies of slices have the same values, in aligned memory of their own on the device"
    "array.concat" arrays::concat:
        "concatenated slices have the same values, in one allocation on the device"
    "array.threads" arrays::threads:
        "several threads transfer at the same time"
    "export.handover" exports::handover:
        "an export carries what the capabilities say: an event that completes with the work, or null, in the order of all queues or once the data is ready"
    "export.refused" exports::refused:
        "if the capabilities refuse exports, every export is refused with NotSupported, and nothing leaks"
    "export.types" exports::types:
        "cut arrays of every type are exported and imported with the same values"
    "stream.types" streams::types:
        "streams of every type come back with the same values, and end after an error"
    "stream.no-copies" streams::no_copies:
        "streams of device batches, whole and cut, copy nothing, and their batches outlive them"
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
