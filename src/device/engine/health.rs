//! [`Health`]: whether the runtime of a device may be called.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::device::DeviceId;
use crate::device::backend::device_error;
use crate::device::engine::process::{self, Inside, Process};
use crate::error::{Error, Result};

/// What every error after a failure ends with.
const FINAL: &str = "; the device cannot be used any more in this process";
/// The code of errors that no runtime has returned.
pub(super) const NO_CODE: i32 = -1;

/// Whether the runtime of a device may be called: not in a child of the process that opened the device, not while the process ends, and not
/// after the device has failed. A cheap handle; clones are of the same device.
///
/// Runtimes differ in what follows failed work: some let later work run, on wrong data, and some end the process. So the first failure is
/// remembered, and reported by every operation from then on, as by a CUDA context.
///
/// ```
/// use arrow_device::abi::ArrowDeviceType;
/// use arrow_device::device::{DeviceId, device_error, engine::Health};
///
/// let device = DeviceId::new(ArrowDeviceType::OPENCL, 0);
/// let health = Health::new(device);
/// {
///     let _inside = health.enter()?; // the runtime may be called here
/// }
/// health.fail(device_error(device, "clWaitForEvents", -14, "a kernel failed"));
/// health.fail(device_error(device, "clFlush", -36, "a later failure, which follows from the first one"));
/// let text = health.enter().unwrap_err().to_string();
/// assert!(text.contains("a kernel failed; the device cannot be used any more in this process"));
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Health(Arc<State>);

#[derive(Debug)]
struct State {
    id: DeviceId,
    process: Process,
    /// The first failure.
    failure: OnceLock<Error>,
    /// Nothing of the device runs any more.
    is_over: AtomicBool,
}

impl Health {
    /// Makes that of a device whose runtime must not be called any more once the process ends, because its libraries run their destructors
    /// then. Make it after those libraries were loaded.
    pub fn new(device: DeviceId) -> Self {
        // Also for calls without a device, which list devices for example. For a device, the engine watches again.
        process::watch();
        Self(Arc::new(State {
            id: device,
            process: Process::this(),
            failure: OnceLock::new(),
            is_over: AtomicBool::new(false),
        }))
    }

    /// Returns the type and the id of the device.
    pub fn id(&self) -> DeviceId {
        self.0.id
    }

    /// Lets this thread into the runtime until the result is dropped, which should be soon: the end of the process waits for it, at most two
    /// seconds. Once the process ends, a thread is kept here for ten seconds, and then gets an error. A thread may be inside several times.
    ///
    /// # Errors
    /// The device has failed, the process was forked after it was opened, or the process is ending.
    pub fn enter(&self) -> Result<Inside> {
        let inside = self.enter_even_if_failed()?;
        self.check()?;
        Ok(inside)
    }

    /// As [`enter`](Self::enter), also if the device has failed: to wait for its work, or to release what this thread owns. After an error
    /// that is left to the system.
    ///
    /// # Errors
    /// The process was forked after the device was opened, or it is ending.
    pub fn enter_even_if_failed(&self) -> Result<Inside> {
        self.0.process.check(self.0.id, NO_CODE)?;
        process::enter()
            .ok_or_else(|| device_error(self.0.id, "exit", NO_CODE, "the process is ending"))
    }

    /// Whether this is the process in which the device was opened. In a child of it, no lock may be taken that another thread of the parent
    /// may have held.
    pub(crate) fn is_here(&self) -> bool {
        self.0.process.is_this()
    }

    /// Returns the failure as an error, if there is one. Costs an atomic load while there is none.
    ///
    /// # Errors
    /// The device has failed.
    pub fn check(&self) -> Result<()> {
        self.0
            .failure
            .get()
            .map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Work of the device has failed: from now on every operation is an error. Work that was queued may still run. Returns the error with
    /// which the device has failed first.
    pub fn fail(&self, mut error: Error) -> Error {
        if let Error::Device { message, .. } = &mut error {
            // Another device's failure says so already.
            if !message.contains(FINAL) {
                message.to_mut().push_str(FINAL);
            }
        }
        self.0.failure.get_or_init(|| error).clone()
    }

    /// As [`fail`](Self::fail); and nothing that was queued runs any more.
    ///
    /// # Safety
    /// No work of the device runs any more, and none will: what it uses may be freed from now on.
    pub unsafe fn lose(&self, error: Error) -> Error {
        let first = self.fail(error);
        self.0.is_over.store(true, Ordering::Release);
        first
    }

    /// A device that has failed has nothing left that runs.
    pub(super) fn end(&self) {
        if self.check().is_err() {
            self.0.is_over.store(true, Ordering::Release);
        }
    }

    /// Whether nothing of the device runs any more, and never will; in a child of the process nothing of it does.
    pub(crate) fn is_over(&self) -> bool {
        self.0.is_over.load(Ordering::Acquire) || !self.is_here()
    }
}

/// What belongs to a runtime: it is dropped where the runtime may be called, and leaked where it may not.
pub(super) struct Guarded<T>(ManuallyDrop<T>, Health);

impl<T> Guarded<T> {
    pub(super) fn new(value: T, health: &Health) -> Self {
        Self(ManuallyDrop::new(value), health.clone())
    }
}

impl<T> Deref for Guarded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Clone> Clone for Guarded<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), self.1.clone())
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        if let Ok(_inside) = self.1.enter_even_if_failed() {
            // SAFETY: this is the only drop of the value, which is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}
