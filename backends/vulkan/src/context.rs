//! [`Context`]: a device of Vulkan, and what every part of the backend needs of it.

use std::any::Any;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard};

use arrow_device::device::parts::exit::{self, Inside};
use arrow_device::device::parts::{Failure, Process, Worker};
use arrow_device::device::{DeviceId, device_error};
use arrow_device::{Error, Result};
use ash::vk;

use crate::codes::{Answer, Failed};
use crate::physical::keep_device;

/// Whose the device is.
pub(crate) enum Origin {
    /// This crate's, with so many VkQueues.
    Own(usize),
    /// A program's, which keeps it as long as the first lives, and the loader as long as the second.
    Program(Box<dyn Any + Send + Sync>, ash::Entry),
}

/// A device of Vulkan.
pub(crate) struct Context {
    pub(crate) id: DeviceId,
    process: Process,
    pub(crate) instance: ash::Instance,
    pub(crate) physical: vk::PhysicalDevice,
    pub(crate) device: ash::Device,
    pub(crate) family: u32,
    /// The work that has failed, if some has.
    pub(crate) failure: Failure,
    /// Polls events and timelines. Its jobs neither block nor copy.
    pub(crate) worker: Worker,
    /// Copies between ordinary memory and staging memory.
    pub(crate) copier: Worker,
    /// After all of the above.
    origin: ManuallyDrop<Origin>,
}

impl Context {
    /// # Safety
    /// Instance and device are live and belong to the physical device. The device has queues of the family. They are from
    /// [`take_device`](crate::physical::take_device), or live as long as what `origin` keeps.
    pub(crate) unsafe fn new(
        id: DeviceId,
        instance: ash::Instance,
        physical: vk::PhysicalDevice,
        device: ash::Device,
        family: u32,
        origin: Origin,
    ) -> Self {
        exit::watch();
        Self {
            id,
            process: Process::this(),
            instance,
            physical,
            device,
            family,
            failure: Failure::default(),
            worker: Worker::new("arrow-device vulkan"),
            copier: Worker::new("arrow-device vulkan copies"),
            origin: ManuallyDrop::new(origin),
        }
    }

    /// Lets this thread call Vulkan while the result lives, or returns an error if the device cannot be used: it has failed, the
    /// process ends, or is a child of the one that opened the device.
    pub(crate) fn enter_usable(&self) -> Result<Inside> {
        let inside = self.enter()?;
        self.check_alive()?;
        Ok(inside)
    }

    /// As [`enter_usable`](Self::enter_usable), also if the device has failed.
    pub(crate) fn enter(&self) -> Result<Inside> {
        self.check_process()?;
        exit::enter().ok_or_else(|| {
            let code = vk::Result::ERROR_INITIALIZATION_FAILED.as_raw();
            device_error(self.id, "exit", code, "the process is ending")
        })
    }

    /// Lets this thread destroy what it owns, if it may.
    pub(crate) fn enter_to_drop(&self) -> Option<Inside> {
        (!self.is_forked()).then(exit::enter).flatten()
    }

    /// Returns an error if the device has failed. Then no thread asks for a foreign event any more: whoever is told of the failure may
    /// release it.
    pub(crate) fn check_alive(&self) -> Result<()> {
        self.failure.check().inspect_err(|_| {
            drop(without_polls());
        })
    }

    /// Asks for a foreign event, unless the device has failed.
    pub(crate) fn poll(&self, ask: impl FnOnce() -> Answer<bool>) -> Result<Answer<bool>> {
        let _polls = POLLS.read().unwrap_or_else(PoisonError::into_inner);
        self.failure.check()?;
        Ok(ask())
    }

    pub(crate) fn check_process(&self) -> Result<()> {
        // As from a device that was not initialised.
        let code = vk::Result::ERROR_INITIALIZATION_FAILED.as_raw();
        self.process.check(self.id, code)
    }

    /// Returns whether this is a child of the process that opened the device. Nothing there may call Vulkan, or take a lock that
    /// another thread may have held.
    pub(crate) fn is_forked(&self) -> bool {
        !self.process.is_this()
    }

    /// Names the device in an error. A device that is lost has failed.
    pub(crate) fn check<T>(&self, answer: Answer<T>) -> Result<T> {
        answer.map_err(|failed| self.error(failed))
    }

    pub(crate) fn error(&self, failed: Failed) -> Error {
        let error = failed.error(self.id);
        if failed.is_lost() {
            self.failure.set(error);
            return match self.check_alive() {
                Err(first) => first,
                Ok(()) => failed.error(self.id),
            };
        }
        error
    }

    /// As [`check`](Self::check), of a call that allocates.
    pub(crate) fn check_allocation<T>(&self, answer: Answer<T>, bytes: usize) -> Result<T> {
        answer.map_err(|failed| match failed.is_out_of_memory() {
            true => self.out_of_memory(failed.call, bytes),
            false => self.error(failed),
        })
    }

    pub(crate) fn out_of_memory(&self, operation: &'static str, bytes: usize) -> Error {
        Error::OutOfMemory {
            device: self.id,
            operation,
            bytes,
        }
    }

    pub(crate) fn not_supported(&self, operation: &'static str, reason: String) -> Error {
        Error::NotSupported {
            device: self.id,
            operation,
            reason: reason.into(),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let Some(_inside) = self.enter_to_drop() else {
            return;
        };
        // SAFETY: the value is not used again.
        match unsafe { ManuallyDrop::take(&mut self.origin) } {
            // All that was made of it holds this context and was destroyed before, after its work (`Shared::drop`).
            Origin::Own(count) if !self.failure.is_set() => {
                keep_device((self.physical, self.family, count), self.device.clone());
            }
            // Of no use to anybody, and not destroyed either.
            Origin::Own(_) => {}
            // The program's objects may go now, and then the library.
            Origin::Program(keep, entry) => {
                drop(keep);
                drop(entry);
            }
        }
    }
}

/// A VkQueue and the lock that guards it: Vulkan wants one thread at a time to use a queue, so a program and this crate share the
/// program's lock. `Mutex<vk::Queue>` is one.
///
/// The crate calls [`with`](Self::with) while it holds locks of its own. While a program has its lock, it must therefore not call
/// this crate or drop anything of it: that could wait for ever. The crate waits for the device within `with` only after a failure.
///
/// # Safety
/// `with` calls `work` once, on the calling thread, with the same live VkQueue each time, and lets no other thread use that VkQueue
/// meanwhile. It does not panic.
pub unsafe trait SharedQueue: Send + Sync {
    /// Calls `work` with the VkQueue, which nothing else uses meanwhile.
    fn with(&self, work: &mut dyn FnMut(vk::Queue));
}

// SAFETY: the mutex excludes all others that keep to it, and `work` is called once. A program that shares the VkQueue takes the
// same lock (see `VulkanConfig::adopt`).
unsafe impl SharedQueue for Mutex<vk::Queue> {
    fn with(&self, work: &mut dyn FnMut(vk::Queue)) {
        work(*lock(self));
    }
}

/// Held for reading while a foreign event is asked for. One for the process, as several devices may have one VkDevice.
static POLLS: RwLock<()> = RwLock::new(());

/// Nobody asks for foreign events while the result lives.
pub(crate) fn without_polls() -> RwLockWriteGuard<'static, ()> {
    POLLS.write().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex. No code of this crate leaves what it protects half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
