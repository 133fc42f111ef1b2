//! How [`Devices`] find OpenCL devices.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use arrow_device::device::parts::Process;
use arrow_device::device::{AddressClass, DeviceId, DevicePtr, EventPtr};
use arrow_device::{ArrowDeviceType, Device, Devices, Error, Result};
use opencl_sys::{CL_INVALID_CONTEXT, cl_context};

use crate::cells;
use crate::config::{OpenClConfig, devices_of};
use crate::context::lock;
use crate::device::OpenClDevice;
use crate::event;
use crate::platform::{absent, absent_after, list, loader};

/// How many contexts of foreign producers are kept at most: their memory is then found without another look at its context.
const FOREIGN: usize = 16;

/// The OpenCL devices of a set of devices; see [`register`].
#[derive(Clone, Debug)]
pub struct OpenClDevices(Arc<Known>);

#[derive(Debug)]
struct Known {
    process: Process,
    added: Mutex<Vec<Device>>,
    /// In contexts of foreign producers, the oldest first.
    foreign: Mutex<VecDeque<Device>>,
}

/// Registers OpenCL with a set of devices: `Devices::open("opencl:0")` opens the first device of the first platform, with the
/// defaults of [`OpenClConfig`], at its first use.
///
/// Memory belongs to a context, which an id does not name. So an import uses the device, among those that were
/// [added](OpenClDevices::add), in whose context the array's event is or whose memory the array has. If its event is of a context
/// that no device has, the import opens the device in that context; the last 16 such devices are kept. An array without an event
/// whose memory is unknown is taken for memory of the device that the set has for the id.
///
/// ```no_run
/// use arrow_device::Devices;
/// arrow_device_opencl::register(Devices::global());
/// let device = Devices::open("opencl:0")?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub fn register(devices: &Devices) -> OpenClDevices {
    let known = OpenClDevices(Arc::new(Known {
        process: Process::this(),
        added: Mutex::default(),
        foreign: Mutex::default(),
    }));
    let opened = known.clone();
    devices.register(ArrowDeviceType::OPENCL, move |number| {
        let config = |number| OpenClConfig::new(number).open();
        let device = match usize::try_from(number) {
            Ok(number) => config(number)?,
            Err(_) => {
                let id = OpenClConfig::new(0).with_id(number).id();
                return Err(absent(id, "OpenCL devices are numbered from 0"));
            }
        };
        opened.add(device.clone())?;
        Ok(device)
    });
    let resolver = known.clone();
    devices.register_resolver(ArrowDeviceType::OPENCL, move |id, event, address| {
        resolver.resolve(id, event, address)
    });
    known
}

impl OpenClDevices {
    /// Adds a device, for imports of its memory: one of [`OpenClConfig::adopt`], for example. It is kept as long as the set of
    /// devices. Unlike [`Devices::add`], which names one device of an id, several may have the same id.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if it is not an OpenCL device.
    pub fn add(&self, device: Device) -> Result<()> {
        self.0.process.check(device.id(), CL_INVALID_CONTEXT)?;
        OpenClDevice::of(&device)?;
        let mut added = lock(&self.0.added);
        if !added.contains(&device) {
            added.push(device);
        }
        Ok(())
    }

    fn resolve(
        &self,
        id: DeviceId,
        event: Option<EventPtr>,
        address: Option<DevicePtr>,
    ) -> Result<Option<Device>> {
        // Another thread may have had a lock.
        self.0.process.check(id, CL_INVALID_CONTEXT)?;
        let mut candidates = lock(&self.0.added).clone();
        candidates.extend(lock(&self.0.foreign).iter().cloned());
        candidates.retain(|device| device.id() == id);
        let context = self.context_of(id, event)?;
        if let Some(context) = context {
            candidates
                .retain(|device| OpenClDevice::of(device).is_ok_and(|d| d.context() == context));
        }
        // Several devices may share a context, and one device may have several.
        if let Some(address) = address {
            let owns = |device: &&Device| {
                device.backend().classify(address, 1).class == AddressClass::Device
            };
            if let Some(owner) = candidates.iter().find(owns) {
                return Ok(Some(owner.clone()));
            }
        }
        // A device whose memory the host reads takes no other memory.
        let takes = |device: &Device| !device.is_host_readable();
        candidates.retain(takes);
        let is_foreign = |event| cells::owner(event).is_none();
        match context {
            Some(context) if candidates.is_empty() && event.is_some_and(is_foreign) => {
                self.adopt(id, context, address)
            }
            Some(_) => Ok(candidates.into_iter().next()),
            None => Ok(None),
        }
    }

    /// Returns the context of the array's event.
    fn context_of(&self, id: DeviceId, event: Option<EventPtr>) -> Result<Option<cl_context>> {
        let Some(event) = event else {
            return Ok(None);
        };
        if !event.as_ptr().cast::<usize>().is_aligned() {
            return Ok(None);
        }
        let cl = loader(id)?;
        // SAFETY: the caller of the import guarantees a live event of this type (see `register_resolver`), and the pointer is aligned.
        let event = unsafe { cells::read(event) };
        if event.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller of the import guarantees a live event, and the handle that was read is not null.
        let context = unsafe { event::context(cl, event) };
        context.map(Some).map_err(|failed| absent_after(id, failed))
    }

    /// Opens the device in the context of a foreign producer.
    fn adopt(
        &self,
        id: DeviceId,
        context: cl_context,
        address: Option<DevicePtr>,
    ) -> Result<Option<Device>> {
        let cl = loader(id)?;
        // SAFETY: the live event of the array keeps its context alive.
        let devices =
            unsafe { devices_of(cl, context) }.map_err(|failed| absent_after(id, failed))?;
        let listed = list(id)?.1;
        let named = usize::try_from(id.id)
            .ok()
            .and_then(|number| listed.get(number));
        let named = named
            .map(|listed| listed.device)
            .filter(|device| devices.contains(device));
        // The producer may number its devices in another way.
        let device = match (named, &devices[..]) {
            (Some(device), _) => device,
            (None, [device]) => *device,
            _ => {
                return Err(Error::NotSupported {
                    device: id,
                    operation: "import",
                    reason:
                        "the context of its event has several devices, of which the id names none"
                            .into(),
                });
            }
        };
        let config = OpenClConfig::new(0).with_id(id.id).for_memory(address);
        // SAFETY: the live event of the array keeps its context alive, and `device` was taken from that context's list.
        let device = unsafe { config.adopt_context(context, device, None) }?;
        let mut foreign = lock(&self.0.foreign);
        foreign.push_back(device.clone());
        let oldest = match foreign.len() > FOREIGN {
            true => foreign.pop_front(),
            false => None,
        };
        drop(foreign);
        drop(oldest);
        Ok(Some(device))
    }
}
