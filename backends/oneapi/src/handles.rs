//! SYCL's own objects behind devices and queues.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use arrow_device::device::engine::{Engine, Health, Memories};
use arrow_device::device::{DeviceId, DevicePtr};
use arrow_device::{Device, Queue, Result};

use crate::memory::Block;
use crate::sys::{self, Found, OneApiMemory, Owned, Properties, Sycl, raw};

/// A oneAPI device: what the engine makes an arrow-device device of.
pub struct OneApiDevice {
    pub(crate) health: Health,
    pub(crate) memories: Memories<Arc<Block>>,
    pub(crate) sycl: Sycl,
    /// The device and its context.
    pub(crate) device: Arc<Owned<raw::Device>>,
    pub(crate) properties: Properties,
    pub(crate) memory: OneApiMemory,
    name: String,
}

impl fmt::Debug for OneApiDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (id, kind) = (self.health.id(), self.memory.name());
        write!(f, "OneApiDevice({id} {:?}, {kind})", self.name)
    }
}

impl OneApiDevice {
    pub(crate) fn new(
        sycl: Sycl,
        id: DeviceId,
        memory: OneApiMemory,
        (device, properties): Found,
    ) -> Result<Self> {
        let name = properties.name();
        if !properties.has(memory) {
            let kind = memory.name();
            let reason = format!(
                "\"{name}\" has no unified shared memory (USM) of the kind {kind}, which arrow-device needs"
            );
            return Err(sys::absent(id, reason));
        }
        Ok(Self {
            health: Health::new(id),
            memories: Memories::default(),
            sycl,
            device: Arc::new(device),
            properties,
            memory,
            name,
        })
    }

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

/// A queue of a oneAPI device: a `sycl::queue`, in order.
#[derive(Debug)]
pub struct OneApiQueue(pub(crate) Owned<raw::Queue>);

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
