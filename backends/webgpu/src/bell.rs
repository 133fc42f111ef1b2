//! [`Bell`]: what wakes the device's thread.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::sys::lock;

/// Wakes the device's thread.
#[derive(Default)]
pub(crate) struct Bell(Mutex<bool>, Condvar);

impl Bell {
    pub(crate) fn ring(&self) {
        *lock(&self.0) = true;
        self.1.notify_one();
    }

    /// Waits until it is rung, or has been since the last time.
    pub(crate) fn wait(&self, most: Duration) {
        let waited = self
            .1
            .wait_timeout_while(lock(&self.0), most, |is_rung| !*is_rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}
