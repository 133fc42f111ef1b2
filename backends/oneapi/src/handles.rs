//! SYCL's own objects behind devices and queues.

use std::ffi::c_void;
use std::sync::Arc;

use arrow_device::device::DevicePtr;
use arrow_device::device::engine::Engine;
use arrow_device::{Device, Queue, Result};

use crate::runtime::{OneApiDevice, OneApiQueue};
use crate::sys::OneApiMemory;

impl OneApiDevice {
    /// Returns what is behind a oneAPI device.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`](arrow_device::Error::NotSupported) for a device of another type.
    pub fn of(device: &Device) -> Result<&Self> {
        Engine::<Self>::of(device).map(Engine::runtime)
    }

    /// Returns SYCL's name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns which memory this device allocates.
    pub fn memory(&self) -> OneApiMemory {
        self.memory
    }

    /// Returns whether the address is one of unified shared memory of this device's context, of whatever kind and whoever
    /// allocated it.
    ///
    /// # Errors
    /// Returns [`Error::Device`](arrow_device::Error::Device) with SYCL's error.
    pub fn owns(&self, address: DevicePtr) -> Result<bool> {
        Ok(self.device.kind(address)?.is_some())
    }
}

impl OneApiQueue {
    /// Returns what is behind a queue of a oneAPI device.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`](arrow_device::Error::NotSupported) for a queue of a device of another type.
    pub fn of(queue: &Queue) -> Result<&Self> {
        Engine::<OneApiDevice>::stream(queue).map(Arc::as_ref)
    }

    /// Returns the `sycl::queue*`, which lives as long as this value. Work that a program gives to it runs in this queue's order.
    pub fn sycl_queue(&self) -> *mut c_void {
        self.0.sycl_queue()
    }
}
