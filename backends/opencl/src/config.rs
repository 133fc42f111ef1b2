//! How an OpenCL device is opened.

use std::ptr::null_mut;
use std::sync::Arc;

use arrow_device::device::{DeviceId, DevicePtr};
use arrow_device::{ArrowDeviceType, Device, Result};
use opencl_sys::*;

use crate::context::Context;
use crate::device::{OpenClDevice, check_queue};
use crate::memory::{Kind, OpenClMemory};
use crate::object::{CommandQueue, ContextObject};
use crate::platform::{Listed, OpenClDeviceInfo, absent, absent_after, describe, find, loader};
use crate::shared::Shared;
use crate::sys::{Answer, Cl, create, info, info_list};

/// How an OpenCL device is opened. `Devices::open("opencl:0")` uses the defaults once the crate is
/// [registered](crate::register).
///
/// ```no_run
/// use arrow_device_opencl::{OpenClConfig, OpenClMemory};
/// let device = OpenClConfig::new(0).with_memory(OpenClMemory::FineSvm).open()?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct OpenClConfig {
    ordinal: usize,
    id: i64,
    memory: Option<OpenClMemory>,
    idle_bytes: usize,
    /// Whether the device is for memory of a foreign producer, and some of that memory.
    imports: bool,
    given: Option<DevicePtr>,
}

impl OpenClConfig {
    /// Configures the device of this number among those of all platforms ([`devices`](crate::devices)).
    pub fn new(ordinal: usize) -> Self {
        Self {
            ordinal,
            id: i64::try_from(ordinal).unwrap_or(i64::MAX),
            memory: None,
            idle_bytes: 256 << 20,
            imports: false,
            given: None,
        }
    }

    /// Sets the id that arrays of the device carry; by default the device's number.
    #[must_use]
    pub fn with_id(mut self, id: i64) -> Self {
        self.id = id;
        self
    }

    /// Sets which memory the device allocates. By default the first of [`Usm`](OpenClMemory::Usm), [`Svm`](OpenClMemory::Svm)
    /// and [`FineSvm`](OpenClMemory::FineSvm) that it has; [`Handles`](OpenClMemory::Handles) is chosen only here.
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

    /// Makes the device one for memory of a foreign producer.
    pub(crate) fn for_memory(mut self, address: Option<DevicePtr>) -> Self {
        (self.imports, self.given) = (true, address);
        self
    }

    /// Opens the device in a context of its own.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`](arrow_device::Error::DeviceNotAvailable) with the reason if there is no OpenCL
    /// loader, no driver, no such device, or if the device has no such memory.
    pub fn open(&self) -> Result<Device> {
        let id = self.id();
        let (cl, listed) = find(id, self.ordinal)?;
        let properties: [cl_context_properties; 3] = [
            CL_CONTEXT_PLATFORM,
            listed.platform.expose_provenance() as cl_context_properties,
            0,
        ];
        let device = &raw const listed.device;
        // SAFETY: the loader has listed the device; the list of properties ends with 0 and is read during the call.
        let context = unsafe {
            create!(
                cl,
                clCreateContext(properties.as_ptr(), 1, device, None, null_mut())
            )
        };
        let context = context.map_err(|failed| absent_after(id, failed))?;
        // SAFETY: the context was just made for this device, and nobody else has it.
        unsafe { self.open_in(cl, ContextObject::own(cl, context), listed, None) }
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
        let cl = loader(id)?;
        // SAFETY: the caller guarantees context and device; each value is read as what the specification says it is.
        let kept: Answer<_> = unsafe {
            ContextObject::retain(cl, context).and_then(|context| {
                let platform = info!(
                    cl,
                    clGetDeviceInfo(device, CL_DEVICE_PLATFORM) as cl_platform_id
                )?;
                let devices = devices_of(cl, context.raw())?;
                Ok((context, platform, devices))
            })
        };
        let (context, platform, devices) = kept.map_err(|failed| absent_after(id, failed))?;
        if !devices.contains(&device) {
            return Err(absent(id, "the context does not contain the device"));
        }
        // SAFETY: the device is one of the context's, and the caller guarantees the queue.
        unsafe { self.open_in(cl, context, Listed { platform, device }, queue) }
    }

    pub(crate) fn id(&self) -> DeviceId {
        DeviceId::new(ArrowDeviceType::OPENCL, self.id)
    }

    /// # Safety
    /// The device is one of the context's, and the queue live.
    unsafe fn open_in(
        &self,
        cl: &'static Cl,
        context: ContextObject,
        listed: Listed,
        queue: Option<cl_command_queue>,
    ) -> Result<Device> {
        let id = self.id();
        // SAFETY: the caller guarantees the device, which the context keeps alive.
        let described = unsafe { describe(cl, listed) };
        let (info, mut kinds) = described.map_err(|failed| absent_after(id, failed))?;
        if let (Some(address), [Kind::Usm(usm), _, ..]) = (self.given, &kinds[..]) {
            // SAFETY: the context is live.
            if !unsafe { usm.knows(context.raw(), address.as_ptr()) } {
                // Shared virtual memory comes first then.
                kinds.rotate_left(1);
            }
        }
        let kind = self.choose(&info, &kinds)?;
        // SAFETY: the caller guarantees that the device is one of the context's.
        let context = unsafe { Context::new(cl, id, context, listed.device) };
        let shared = Shared::new(context, kind, info, self.idle_bytes);
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        let check = |queue| unsafe { check_queue(&shared, queue) };
        let queue: Option<CommandQueue> = queue.map(check).transpose()?;
        Device::new(Arc::new(OpenClDevice::new(shared, queue)?))
    }

    fn accepts(&self, kind: OpenClMemory) -> bool {
        match (self.memory, kind) {
            (Some(memory), _) => kind == memory,
            (None, OpenClMemory::Handles) => false,
            // Nobody knows whether the host may read a foreign producer's memory.
            (None, OpenClMemory::FineSvm) => !self.imports,
            (None, _) => true,
        }
    }

    fn choose(&self, info: &OpenClDeviceInfo, kinds: &[Kind]) -> Result<Kind> {
        let id = self.id();
        let version = info.version.strip_prefix("OpenCL ").unwrap_or_default();
        if version.starts_with("1.0") || version.starts_with("1.1") {
            return Err(absent(
                id,
                format!("{info} is older than OpenCL 1.2; update its driver"),
            ));
        }
        let chosen = kinds.iter().find(|kind| self.accepts(kind.name())).copied();
        chosen.ok_or_else(|| {
            let reason = match self.memory {
                Some(memory) => format!("{info} has no memory of the kind {memory:?}, but {:?}", info.memory),
                None => format!(
                    "{info} has neither unified shared memory (cl_intel_unified_shared_memory) nor shared virtual memory; \
                     open it with OpenClMemory::Handles, whose arrays cannot be exported"
                ),
            };
            absent(id, reason)
        })
    }
}

/// Returns the devices of a context.
///
/// # Safety
/// The context is live.
pub(crate) unsafe fn devices_of(cl: &Cl, context: cl_context) -> Answer<Vec<cl_device_id>> {
    // SAFETY: the caller guarantees the context; the answer is a list of pointers.
    let list = unsafe { info_list!(cl, clGetContextInfo(context, CL_CONTEXT_DEVICES) as [usize]) }?;
    Ok(list
        .into_iter()
        .map(std::ptr::with_exposed_provenance_mut)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_the_host_reads_is_not_chosen_for_a_foreign_producer() {
        let config = OpenClConfig::new(0);
        assert!(config.accepts(OpenClMemory::FineSvm));
        let foreign = config.clone().for_memory(None);
        assert!(!foreign.accepts(OpenClMemory::FineSvm));
        assert!(foreign.accepts(OpenClMemory::Svm) && foreign.accepts(OpenClMemory::Usm));
        let named = config.with_memory(OpenClMemory::FineSvm).for_memory(None);
        assert!(named.accepts(OpenClMemory::FineSvm));
    }
}
