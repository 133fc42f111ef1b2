//! [`Gpu`]: the calls into wgpu.
//!
//! wgpu reports errors to a handler of the program, which panics unless the program sets another one, and panics itself where a driver
//! fails. So each call goes through [`Gpu::call`], in error scopes (which wgpu keeps for each thread) and where a panic is caught.
//! A lost device is not reported at all: [`Gpu::check_alive`] finds out.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use arrow_device::device::engine::Health;
use arrow_device::device::{DeviceId, device_error};
use arrow_device::{Error, Result};
use wgpu::{BufferDescriptor, BufferUsages, ErrorFilter, PollError, PollType, SubmissionIndex};

/// The code of errors: wgpu has messages, and no numbers.
const CODE: i32 = -1;

/// A wgpu device with its queue.
pub(crate) struct Gpu {
    pub(crate) health: Health,
    pub(crate) device: wgpu::Device,
    pub(crate) queue: Arc<wgpu::Queue>,
    pub(crate) info: wgpu::AdapterInfo,
    pub(crate) limits: wgpu::Limits,
}

impl Gpu {
    pub(crate) fn new(id: DeviceId, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Self> {
        let gpu = Self {
            health: Health::new(id),
            device: device.clone(),
            queue: Arc::new(queue.clone()),
            info: device.adapter_info(),
            limits: device.limits(),
        };
        gpu.check_alive()?;
        // wgpu has no other way to ask whether a queue is the device's.
        let tried = gpu.call("adopt", |device, queue| {
            let encoder = device.create_command_encoder(&Default::default());
            queue.submit([encoder.finish()]);
        });
        tried.map_err(|e| {
            let text = "the queue takes no work of the device; pass both as `request_device` returned them";
            gpu.not_supported("adopt", format!("{text} ({e})"))
        })?;
        Ok(gpu)
    }

    pub(crate) fn id(&self) -> DeviceId {
        self.health.id()
    }

    /// Calls wgpu. Errors that it reports on this thread meanwhile are returned. A panic is the end of the device, because nobody
    /// knows what it left undone.
    pub(crate) fn call<T>(
        &self,
        operation: &'static str,
        work: impl FnOnce(&wgpu::Device, &wgpu::Queue) -> T,
    ) -> Result<T> {
        let scoped = || {
            let filters = [
                ErrorFilter::Internal,
                ErrorFilter::OutOfMemory,
                ErrorFilter::Validation,
            ];
            // The last one is popped first, by a panic too.
            let [first, second, third] = filters.map(|filter| self.device.push_error_scope(filter));
            let value = work(&self.device, &self.queue);
            let errors = [third, second, first].map(|scope| now(scope.pop()).flatten());
            (value, errors.into_iter().flatten().next())
        };
        match self.caught(operation, scoped)? {
            (value, None) => Ok(value),
            (_, Some(error)) => {
                // What a lost device has made is invalid.
                self.check_alive()?;
                Err(match error {
                    wgpu::Error::OutOfMemory { .. } => self.out_of_memory(operation, 0),
                    error => self.error(operation, error.to_string()),
                })
            }
        }
    }

    /// Makes a panic an error, and the device's failure. For calls that report no errors.
    pub(crate) fn caught<T>(&self, operation: &'static str, work: impl FnOnce() -> T) -> Result<T> {
        let _inside = self.health.enter_even_if_failed()?;
        catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            let text = text.unwrap_or("no message").trim();
            self.health
                .fail(self.error(operation, format!("wgpu panicked: {text}")))
        })
    }

    pub(crate) fn error(&self, operation: &'static str, message: impl Into<String>) -> Error {
        device_error(self.id(), operation, CODE, message.into())
    }

    /// Returns the error for a call that a device only refuses if it is lost, or for a reason that wgpu does not tell.
    pub(crate) fn refused(&self, operation: &'static str, message: impl Into<String>) -> Error {
        let alive = self.check_alive().err();
        alive.unwrap_or_else(|| self.error(operation, message))
    }

    pub(crate) fn not_supported(
        &self,
        operation: &'static str,
        reason: impl Into<String>,
    ) -> Error {
        Error::NotSupported {
            device: self.id(),
            operation,
            reason: reason.into().into(),
        }
    }

    pub(crate) fn out_of_memory(&self, operation: &'static str, bytes: usize) -> Error {
        Error::OutOfMemory {
            device: self.id(),
            operation,
            bytes,
        }
    }

    /// Returns an error if the device has failed or is lost: whatever was submitted before has then not been accepted, or may never
    /// end. As long as this succeeds, wgpu has accepted every submission that was made before.
    ///
    /// wgpu says nothing of calls of a lost device: they return objects that do nothing. The one way to be told that leaves the
    /// program its callback (`set_device_lost_callback`) is a call that must fail if the device is *not* lost.
    pub(crate) fn check_alive(&self) -> Result<()> {
        self.health.check()?;
        let is_alive = self.caught("create_buffer", || {
            let scope = self.device.push_error_scope(ErrorFilter::Validation);
            fail(&self.device);
            now(scope.pop()).flatten().is_some()
        })?;
        match is_alive {
            true => Ok(()),
            false => Err(self.lost()),
        }
    }

    /// Remembers that the device is lost. Returns the error for it.
    pub(crate) fn lost(&self) -> Error {
        let text = "the wgpu device was lost or destroyed; open or adopt another one";
        self.health.fail(self.error("wgpu", text))
    }

    /// Makes a buffer; `mapped` for writing if the usage says that it can be.
    pub(crate) fn create_buffer(
        &self,
        operation: &'static str,
        bytes: usize,
        usage: BufferUsages,
        mapped_at_creation: bool,
    ) -> Result<wgpu::Buffer> {
        let out_of_memory = || self.out_of_memory(operation, bytes);
        let size = u64::try_from(bytes).map_err(|_| out_of_memory())?;
        if size > self.limits.max_buffer_size {
            return Err(out_of_memory());
        }
        let made = self.call(operation, |device, _| {
            device.create_buffer(&BufferDescriptor {
                label: Some("arrow-device"),
                size,
                usage,
                mapped_at_creation,
            })
        });
        made.map_err(|e| match e {
            Error::OutOfMemory { .. } => out_of_memory(),
            e => e,
        })
    }

    /// Makes this thread wait until a submission has ended, or all that were made before this call. Callbacks of whatever has ended
    /// run on this thread.
    ///
    /// Without a timeout: with one, wgpu-core 30.0.1 panics if another thread submits work meanwhile.
    pub(crate) fn wait(&self, submission: Option<SubmissionIndex>) -> Result<()> {
        let wait = PollType::Wait {
            submission_index: submission,
            timeout: None,
        };
        match self.caught("poll", || self.device.poll(wait))? {
            Ok(_) => Ok(()),
            // The submission was not accepted.
            Err(PollError::WrongSubmissionIndex(..)) => Err(self.lost()),
            Err(e) => Err(self.health.fail(self.error("poll", e.to_string()))),
        }
    }

    /// Runs the callbacks of what has ended, on this thread, and waits for nothing. Returns whether all submissions have ended.
    pub(crate) fn poll(&self) -> Result<bool> {
        match self.caught("poll", || self.device.poll(PollType::Poll))? {
            Ok(status) => Ok(status.is_queue_empty()),
            Err(e) => Err(self.health.fail(self.error("poll", e.to_string()))),
        }
    }
}

/// Returns whether both are one device. wgpu's comparison says so too of devices of two instances.
pub(crate) fn is_same(one: &wgpu::Device, other: &wgpu::Device) -> bool {
    let compare = || {
        // An error of one is seen by the scope that was opened last on that device.
        let outer = other.push_error_scope(ErrorFilter::Validation);
        let inner = one.push_error_scope(ErrorFilter::Validation);
        fail(other);
        let is_seen = now(inner.pop()).flatten().is_some();
        drop(outer);
        is_seen
    };
    one == other && catch_unwind(AssertUnwindSafe(compare)).unwrap_or(false)
}

/// Makes a call that is an error of validation, unless the device is lost.
fn fail(device: &wgpu::Device) {
    let _invalid = device.create_buffer(&BufferDescriptor {
        label: None,
        size: 4,
        usage: BufferUsages::empty(),
        mapped_at_creation: false,
    });
}

/// Returns the value of a future of wgpu. Outside of browsers all are ready at once.
pub(crate) fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// Locks a mutex. No code of this crate leaves what it protects half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
