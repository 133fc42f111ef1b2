//! How [`Devices`] find OpenCL devices.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use arrow_device::device::{AddressClass, DeviceId, DevicePtr, EventPtr};
use arrow_device::{ArrowDeviceType, Device, Devices, Result};
use opencl_sys::{CL_EVENT_CONTEXT, cl_context, cl_event};

use crate::open::OpenClConfig;
use crate::platform::{absent, absent_after, devices_of, loader, platforms_devices};
use crate::runtime::OpenClDevice;
use crate::sys::{Cl, call, lock};

/// How many contexts of foreign producers are kept at most: their memory is then found without another look at its context.
const FOREIGN: usize = 16;

/// The OpenCL devices of a set of devices; see [`register`].
#[derive(Clone, Debug, Default)]
pub struct OpenClDevices(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    added: Vec<Device>,
    /// In contexts of foreign producers, the oldest first.
    foreign: VecDeque<Device>,
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
    let known = OpenClDevices::default();
    let opened = known.clone();
    devices.register(ArrowDeviceType::OPENCL, move |number| {
        let id = DeviceId::new(ArrowDeviceType::OPENCL, number);
        let wrong = |_| absent(id, "OpenCL devices are numbered from 0");
        let device = OpenClConfig::new(usize::try_from(number).map_err(wrong)?).open()?;
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
    /// Returns [`Error::NotSupported`](arrow_device::Error::NotSupported) if it is not an OpenCL device.
    pub fn add(&self, device: Device) -> Result<()> {
        // In a child of the process another thread may have had the lock.
        let health = &OpenClDevice::of(&device)?.context.health;
        let _inside = health.enter_even_if_failed()?;
        let mut known = lock(&self.0);
        if !known.added.contains(&device) {
            known.added.push(device.clone());
        }
        Ok(())
    }

    fn resolve(
        &self,
        id: DeviceId,
        event: Option<EventPtr>,
        address: Option<DevicePtr>,
    ) -> Result<Option<Device>> {
        let (cl, _inside) = loader(id)?;
        let event = event.filter(|event| event.as_ptr().cast::<usize>().is_aligned());
        // SAFETY: the caller of the import guarantees a live event of this type (see `register_resolver`), and the pointer is aligned.
        let raw = event.map(|event| unsafe { event.as_ptr().cast::<cl_event>().read() });
        // SAFETY: the caller of the import guarantees a live event; the context is a pointer.
        let ask = |raw| unsafe { call!(info cl.clGetEventInfo(raw, CL_EVENT_CONTEXT)) };
        let asked = raw.filter(|raw| !raw.is_null()).map(ask).transpose();
        let context: Option<cl_context> = asked.map_err(|failed| absent_after(id, failed))?;
        let is_meant = |device: &&Device| {
            let of = || OpenClDevice::of(device).map(OpenClDevice::context);
            device.id() == id && context.is_none_or(|context| of().is_ok_and(|of| of == context))
        };
        let candidates: Vec<Device> = {
            let known = lock(&self.0);
            let all = known.added.iter().chain(&known.foreign);
            all.filter(is_meant).cloned().collect()
        };
        // Several devices may share a context, and one device may have several.
        let owns = |device: &&Device| {
            let classify = |address| device.backend().classify(address, 1).class;
            address.map(classify) == Some(AddressClass::Device)
        };
        let owner = candidates.iter().find(owns);
        let first = || candidates.first().filter(|_| context.is_some());
        if let Some(found) = owner.or_else(first) {
            return Ok(Some(found.clone()));
        }
        let adopt = |context| self.adopt(cl, id, context, address);
        context.map(adopt).transpose()
    }

    /// Opens the device in the context of a foreign producer, which the live event of the array keeps alive.
    fn adopt(
        &self,
        cl: &Cl,
        id: DeviceId,
        context: cl_context,
        address: Option<DevicePtr>,
    ) -> Result<Device> {
        // SAFETY: the live event of the array keeps its context alive.
        let devices = unsafe { devices_of(cl, context) };
        let devices = devices.map_err(|failed| absent_after(id, failed))?;
        let listed = platforms_devices(cl, id)?;
        let named = usize::try_from(id.id).map_or(None, |number| listed.get(number));
        let named = named.filter(|listed| devices.contains(&listed.device));
        // The producer may number its devices in another way.
        let device = match (named, &devices[..]) {
            (Some(listed), _) => listed.device,
            (None, [device]) => *device,
            _ => {
                let text = "the event of the array to import is of a context with several devices, and the array's id names none of them";
                return Err(absent(id, text));
            }
        };
        let mut config = OpenClConfig::new(0).with_id(id.id);
        config.given = address;
        // SAFETY: the live event of the array keeps its context alive, and `device` was taken from that context's list.
        let device = unsafe { config.adopt_context(context, device, None) }?;
        let mut known = lock(&self.0);
        known.foreign.push_back(device.clone());
        let oldest = (known.foreign.len() > FOREIGN).then(|| known.foreign.pop_front());
        drop((known, oldest));
        Ok(device)
    }
}
