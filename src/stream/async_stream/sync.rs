//! Locks of the state that two sides race for: those of std, without poisoning, since nothing panics while they are held.

use std::sync::{self, PoisonError};

pub(crate) use std::sync::MutexGuard;

#[derive(Debug)]
pub(crate) struct Mutex<T>(sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct Condvar(sync::Condvar);

impl Condvar {
    pub(crate) fn new() -> Self {
        Self(sync::Condvar::new())
    }

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A number that no other living thread has.
pub(crate) type ThreadKey = usize;

pub(crate) fn this_thread() -> ThreadKey {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here).addr())
}
