//! The programs of the README and of the guide, which are tested as they stand.

#[doc = include_str!("../../README.md")]
mod readme {}
#[doc = include_str!("../../docs/guide/async.md")]
mod asynchronous {}
#[doc = include_str!("../../docs/guide/backends.md")]
mod backends {}
#[doc = include_str!("../../docs/guide/streams.md")]
mod streams {}

/// Only unsafe code can make a backend read through an event pointer.
///
/// ```compile_fail,E0133
/// use arrow_device::device::{Backend, EventPtr};
/// fn check(device: &dyn Backend, event: EventPtr) -> bool {
///     device.check_event(event).is_ok()
/// }
/// ```
struct UnsafeEvents;
