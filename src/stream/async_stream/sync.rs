//! Locks of the state that two sides race for. The model checker has its own.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// A number that no other living thread has.
pub(crate) type ThreadKey = usize;

pub(crate) fn this_thread() -> ThreadKey {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here).addr())
}
