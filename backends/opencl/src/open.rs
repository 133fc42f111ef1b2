//! How an OpenCL device is opened.

use std::ptr::null_mut;
use std::sync::Arc;

use arrow_device::device::engine::{Engine, Health};
use arrow_device::device::{DeviceId, DevicePtr};
use arrow_device::{ArrowDeviceType, Device, Result};
use opencl_sys::*;

use crate::context::Context;
use crate::platform::{
    Kind, Listed, OpenClDeviceInfo, OpenClMemory, absent, absent_after, describe, loader,
    platforms_devices,
};
use crate::runtime::{OpenClDevice, OpenClQueue};
use crate::sys::{CONTEXT, Cl, Object, call};

/// How an OpenCL device is opened. `Devices::open("opencl:0")` uses the defaults once the crate is
/// [registered](crate::register).
///
/// ```no_run
/// use arrow_device_opencl::{OpenClConfig, OpenClMemory};
/// let device = OpenClConfig::new(0).with_memory(OpenClMemory::Handles).open()?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct OpenClConfig {
    ordinal: usize,
    id: i64,
    memory: Option<OpenClMemory>,
    idle_bytes: usize,
    /// Memory of a foreign producer that the device is for.
    pub(crate) given: Option<DevicePtr>,
}

impl OpenClConfig {
    /// Configures the device of this number among those of all platforms ([`devices`](crate::devices)).
    pub fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            id: i64::try_from(ordinal).unwrap_or(i64::MAX),
            memory: None,
            idle_bytes: 256 << 20,
            given: None,
        }
    }

    /// Sets the id that arrays of the device carry; by default the device's number.
    #[must_use]
    pub fn with_id(mut self, id: i64) -> Self {
        self.id = id;
        self
    }

    /// Sets which memory the device allocates. By default [`Usm`](OpenClMemory::Usm) if it has that, or else
    /// [`Svm`](OpenClMemory::Svm); [`Handles`](OpenClMemory::Handles) is chosen only here.
    #[must_use]
    pub fn with_memory(mut self, memory: OpenClMemory) -> Self {
        self.memory = Some(memory);
        self
    }

    /// Sets how many bytes of freed memory are kept for reuse, 256 MiB by default.
    /// [`Device::trim`](arrow_device::Device::trim) frees what is kept.
    #[must_use]
    pub fn with_idle_limit(mut self, bytes: usize) -> Self {
        self.idle_bytes = bytes;
        self
    }

    /// Opens the device in a context of its own.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`](arrow_device::Error::DeviceNotAvailable) with the reason if there is no OpenCL
    /// loader, no driver, no such device, or if the device has no such memory.
    pub fn open(&self) -> Result<Device> {
        let (device, queue, idle_bytes) = self.parts()?;
        // SAFETY: the queue was made of this device.
        unsafe { Engine::open(device, queue, idle_bytes) }
    }

    /// What [`open`](Self::open) gives to the engine, for tests that let its calls fail.
    #[doc(hidden)]
    pub fn parts(&self) -> Result<(OpenClDevice, Arc<OpenClQueue>, usize)> {
        let id = self.id();
        let (cl, _inside) = loader(id)?;
        let devices = platforms_devices(cl, id)?;
        let listed = devices.get(self.ordinal).copied();
        let found = || {
            let count = devices.len();
            format!("OpenCL lists {count} devices, which are numbered from 0")
        };
        let listed = listed.ok_or_else(|| absent(id, found()))?;
        let platform = listed.platform.expose_provenance() as cl_context_properties;
        let properties: [cl_context_properties; 3] = [CL_CONTEXT_PLATFORM, platform, 0];
        let device = &raw const listed.device;
        // SAFETY: the loader has listed the device; the list of properties ends with 0 and is read during the call. Nobody else has the
        // context.
        let context = unsafe {
            call!(made cl.clCreateContext(properties.as_ptr(), 1, device, None, null_mut()))
                .map(|made| Object::own(cl, CONTEXT, made))
        };
        let context = context.map_err(|failed| absent_after(id, failed))?;
        // SAFETY: the context was just made for this device.
        unsafe { self.open_in(cl, context, listed, None) }
    }

    /// Opens a device in a context that the program has, with the program's command queue as its default queue. Takes references
    /// of its own to both. The number of the configuration is not used except as the id.
    ///
    /// # Errors
    /// As [`open`](Self::open), and [`Error::NotSupported`](arrow_device::Error::NotSupported) if the command queue is of
    /// another context or device, or out of order.
    ///
    /// # Safety
    /// `context`, `device` and `queue` are live, and `device` is one of the context's.
    pub unsafe fn adopt(
        &self,
        context: cl_context,
        device: cl_device_id,
        queue: cl_command_queue,
    ) -> Result<Device> {
        // SAFETY: the caller guarantees all three (see `# Safety`).
        unsafe { self.adopt_context(context, device, Some(queue)) }
    }

    /// As [`adopt`](Self::adopt), with a queue of its own if none is given.
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn adopt_context(
        &self,
        context: cl_context,
        device: cl_device_id,
        queue: Option<cl_command_queue>,
    ) -> Result<Device> {
        let id = self.id();
        let (cl, _inside) = loader(id)?;
        // SAFETY: the caller guarantees context and device; the platform is a pointer.
        let asked = unsafe {
            Object::retain(cl, CONTEXT, context).and_then(|context| {
                let platform: cl_platform_id =
                    call!(info cl.clGetDeviceInfo(device, CL_DEVICE_PLATFORM))?;
                Ok((context, platform))
            })
        };
        let (context, platform) = asked.map_err(|failed| absent_after(id, failed))?;
        // SAFETY: the caller guarantees that the device is one of the context's, and the queue.
        let parts = unsafe { self.open_in(cl, context, Listed { platform, device }, queue) };
        let (device, queue, idle_bytes) = parts?;
        // SAFETY: the queue was made of this device.
        unsafe { Engine::open(device, queue, idle_bytes) }
    }

    pub(crate) fn id(&self) -> DeviceId {
        DeviceId::new(ArrowDeviceType::OPENCL, self.id)
    }

    /// # Safety
    /// The device is one of the context's, and the queue live.
    unsafe fn open_in(
        &self,
        cl: &'static Cl,
        context: Object,
        listed: Listed,
        queue: Option<cl_command_queue>,
    ) -> Result<(OpenClDevice, Arc<OpenClQueue>, usize)> {
        let id = self.id();
        // SAFETY: the caller guarantees the device, which the context keeps alive.
        let described = unsafe { describe(cl, listed) };
        let (info, mut kinds) = described.map_err(|failed| absent_after(id, failed))?;
        if let (Some(address), [Kind::Usm(usm), ..]) = (self.given, &kinds[..]) {
            let (raw, what) = (context.raw(), CL_MEM_ALLOC_TYPE_INTEL);
            let address = address.as_ptr().cast_const();
            // SAFETY: the context is live; the call accepts any address and does not follow it.
            let found = unsafe { call!(info usm.clGetMemAllocInfoINTEL(raw, address, what)) };
            if !found.is_ok_and(|found: cl_uint| found != CL_MEM_TYPE_UNKNOWN_INTEL) {
                // The producer's is shared virtual memory.
                kinds.remove(0);
            }
        }
        let kind = self.choose(&info, &kinds)?;
        let device = OpenClDevice::new(Context {
            cl,
            health: Health::new(id),
            object: context,
            device: listed.device,
            kind,
            info,
        });
        let queue = match queue {
            // SAFETY: the caller guarantees a live queue (see `# Safety`).
            Some(queue) => unsafe { OpenClQueue::adopt(&device, queue) },
            None => OpenClQueue::new(&device),
        };
        Ok((device, queue?, self.idle_bytes))
    }

    fn choose(&self, info: &OpenClDeviceInfo, kinds: &[Kind]) -> Result<Kind> {
        let version = info.version.strip_prefix("OpenCL ").unwrap_or_default();
        if version.starts_with("1.0") || version.starts_with("1.1") {
            let reason = format!("{info} is older than OpenCL 1.2; update its driver");
            return Err(absent(self.id(), reason));
        }
        let is_meant = |kind: &&Kind| match self.memory {
            Some(memory) => kind.name() == memory,
            None => kind.name() != OpenClMemory::Handles,
        };
        kinds.iter().find(is_meant).copied().ok_or_else(|| {
            let reason = match self.memory {
                Some(memory) => format!("{info} has no memory of the kind {memory:?}, but {:?}", info.memory),
                None => format!(
                    "{info} has neither unified shared memory (cl_intel_unified_shared_memory) nor shared virtual memory; \
                     open it with OpenClMemory::Handles, whose arrays cannot be exported"
                ),
            };
            absent(self.id(), reason)
        })
    }
}
