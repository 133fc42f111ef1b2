//! [`Devices`]: the devices of a program, by type and id.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::{ArrowDeviceType, guard};
use crate::device::{Device, DeviceId, DevicePtr, EventPtr, absent, host_memory, lock};
use crate::error::{Error, Result};

/// Locked while it makes a device, so that a device is made once.
type Factory = Arc<Mutex<dyn Fn(i64) -> Result<Device> + Send>>;
type Resolver = Arc<
    dyn Fn(DeviceId, Option<EventPtr>, Option<DevicePtr>) -> Result<Option<Device>> + Send + Sync,
>;

/// A set of devices, by type and id.
///
/// [`Devices::global`] is the process's default set and is never dropped; further sets are for
/// tests, and for programs that keep devices apart. Clones share their contents.
///
/// The factory of a device's type makes the device at its first use, and the set keeps it.
///
/// ```
/// use arrow_device::{Devices, DeviceId};
/// assert_eq!(Devices::cpu().id(), DeviceId::CPU);
/// let absent = Devices::open("cuda:0").unwrap_err();
/// assert!(absent.to_string().contains("cuda:0"));
/// ```
#[derive(Clone, Default)]
pub struct Devices(Arc<Registry>);

#[derive(Default)]
struct Registry {
    factories: Mutex<HashMap<ArrowDeviceType, Factory>>,
    resolvers: Mutex<HashMap<ArrowDeviceType, Resolver>>,
    devices: Mutex<HashMap<DeviceId, Device>>,
}

impl Devices {
    /// Creates a set that contains only the CPU.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the CPU. There is one per process.
    pub fn cpu() -> Device {
        static CPU: OnceLock<Device> = OnceLock::new();
        CPU.get_or_init(|| Device::on_host(DeviceId::CPU)).clone()
    }

    /// Adds a device under its own id.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if another device has that id. [`Devices::cpu`] has all
    /// ids of the CPU's type.
    pub fn add(&self, device: Device) -> Result<()> {
        let taken = || Error::argument(format!("device {} is registered already", device.id()));
        if device.id().device_type == ArrowDeviceType::CPU {
            return (device == Self::cpu()).then_some(()).ok_or_else(taken);
        }
        let mut devices = lock(&self.0.devices);
        let there = devices.entry(device.id()).or_insert_with(|| device.clone());
        (*there == device).then_some(()).ok_or_else(taken)
    }

    /// Registers a factory, which makes a device of this type from its id. Devices that the set has
    /// already stay. The factory makes one device at a time, and must not request one of its type from
    /// this set, which would deadlock.
    ///
    /// The device that the factory returns must have this type and the requested id, because
    /// imports rely on it to reach the memory of that device. Otherwise it is dropped, and
    /// [`get`](Self::get) returns [`Error::DeviceNotAvailable`] with both names. A factory for the
    /// CPU's type is never called.
    ///
    /// ```
    /// use arrow_device::{ArrowDeviceType, DeviceId, Devices};
    /// let devices = Devices::new();
    /// devices.register(ArrowDeviceType::OPENCL, |_| Ok(Devices::cpu()));
    /// let refused = devices.get(DeviceId::new(ArrowDeviceType::OPENCL, 0)).unwrap_err();
    /// assert!(refused.to_string().contains("its factory returned the device cpu"));
    /// ```
    pub fn register(
        &self,
        device_type: ArrowDeviceType,
        factory: impl Fn(i64) -> Result<Device> + Send + Sync + 'static,
    ) {
        let factory = Arc::new(Mutex::new(factory));
        let old = lock(&self.0.factories).insert(device_type, factory);
        // Dropped outside the lock: the old factory may hold values that use this set.
        drop(old);
    }

    /// Registers a resolver, which finds the device of an array of this type that is imported, where the id alone does not
    /// name it: memory of OpenCL and SYCL belongs to a context, for example, which only the event or the address tells.
    ///
    /// The imports, all `unsafe`, ask the resolver before [`get`](Self::get), which they use if it returns `Ok(None)`. They pass the
    /// id that the array states, its event, and the address of its first buffer that is not null. The resolver may rely on what the
    /// import's caller vouched for: the event is live and of the type that belongs to the device type, and the address is one of
    /// that type's. The device that it returns must have the type and id that the array states; otherwise the import is refused with
    /// both names. A resolver of the CPU's type is never called.
    ///
    /// ```
    /// use arrow_device::{ArrowDeviceType, Device, Devices};
    /// # fn find(event: arrow_device::device::EventPtr) -> Option<Device> { None }
    /// let devices = Devices::new();
    /// devices.register_resolver(ArrowDeviceType::OPENCL, |_id, event, _address| Ok(event.and_then(find)));
    /// ```
    pub fn register_resolver(
        &self,
        device_type: ArrowDeviceType,
        resolver: impl Fn(DeviceId, Option<EventPtr>, Option<DevicePtr>) -> Result<Option<Device>>
        + Send
        + Sync
        + 'static,
    ) {
        let old = lock(&self.0.resolvers).insert(device_type, Arc::new(resolver));
        // Dropped outside the lock, as in `register`.
        drop(old);
    }

    /// Returns the device of this type and id. Any id of the CPU's type is the CPU.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`] with what is missing, or the error of the factory.
    pub fn get(&self, id: DeviceId) -> Result<Device> {
        if id.device_type == ArrowDeviceType::CPU {
            return Ok(Self::cpu());
        }
        if let Some(known) = self.known(id) {
            return Ok(known);
        }
        let factory = lock(&self.0.factories).get(&id.device_type).cloned();
        let factory = factory.ok_or_else(|| no_backend(id))?;
        let factory = lock(&factory);
        // Another thread may have made it meanwhile.
        if let Some(known) = self.known(id) {
            return Ok(known);
        }
        let made = guard::call_foreign("factory", || factory(id.id));
        let made = made.unwrap_or_else(|_| Err(absent(id, "its factory panicked")))?;
        let made = of_this_id(made, id, "factory")?;
        // One that was added meanwhile stays.
        Ok(lock(&self.0.devices).entry(id).or_insert(made).clone())
    }

    /// Returns the device of this type and id that the set has already.
    pub(super) fn known(&self, id: DeviceId) -> Option<Device> {
        lock(&self.0.devices).get(&id).cloned()
    }

    /// As [`get`](Self::get), after the resolver of the type, which is told the address if there is one. Page-locked memory without a
    /// backend is plain host memory if there is nothing to wait for.
    ///
    /// # Safety
    /// `event` points to a live event of the device type of `id`.
    pub(crate) unsafe fn get_for_import(
        &self,
        id: DeviceId,
        event: Option<EventPtr>,
        address: impl FnOnce() -> Option<DevicePtr>,
    ) -> Result<Device> {
        if id.device_type == ArrowDeviceType::CPU {
            return Ok(Self::cpu());
        }
        let resolver = lock(&self.0.resolvers).get(&id.device_type).cloned();
        if let Some(resolver) = resolver {
            let found = guard::call_foreign("resolver", || resolver(id, event, address()));
            let found = found.unwrap_or_else(|_| Err(absent(id, "its resolver panicked")))?;
            if let Some(found) = found {
                return of_this_id(found, id, "resolver");
            }
        }
        let missing = match self.get(id) {
            Err(e) => e,
            found => return found,
        };
        match id.device_type {
            ArrowDeviceType::CUDA_HOST | ArrowDeviceType::ROCM_HOST if event.is_none() => {
                Ok(host_memory(id))
            }
            _ => Err(missing),
        }
    }
}

impl FromStr for DeviceId {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        let (name, id) = match s.split_once(':') {
            Some((name, id)) => (name, Some(id)),
            None => (s, None),
        };
        let device_type = ArrowDeviceType::ALL
            .into_iter()
            .find(|t| t.short_name() == Some(name))
            .or((name == "ext-dev").then_some(ArrowDeviceType::EXT_DEV))
            .ok_or_else(|| {
                let known = ArrowDeviceType::ALL.map(|t| t.short_name().unwrap_or_default());
                Error::argument(format!(
                    "unknown device '{s}': use one of {}, followed by ':' and a number if needed",
                    known.join(", ")
                ))
            })?;
        let id = match id {
            None if device_type == ArrowDeviceType::CPU => -1,
            None => 0,
            Some(id) => id
                .parse()
                .map_err(|_| Error::argument(format!("device '{s}': '{id}' is not a number")))?,
        };
        Ok(Self { device_type, id })
    }
}

/// Refuses a device that is not the one that was asked for.
fn of_this_id(found: Device, id: DeviceId, by: &str) -> Result<Device> {
    if found.id() == id {
        return Ok(found);
    }
    let reason = format!("its {by} returned the device {found}; register one that returns {id}");
    Err(absent(id, reason))
}

fn no_backend(device: DeviceId) -> Error {
    use ArrowDeviceType as T;
    let of_vendor = |name: &str, feature: &str, is_on: bool| match is_on {
        true => {
            format!("{name} is not registered with this set of devices; see {feature}::register")
        }
        false => format!("arrow-device was built without {name}; enable its feature `{feature}`"),
    };
    let cuda = || of_vendor("CUDA", "cuda", cfg!(feature = "cuda"));
    let rocm = || of_vendor("ROCm", "rocm", cfg!(feature = "rocm"));
    let reason = match device.device_type {
        T::CUDA | T::CUDA_HOST | T::CUDA_MANAGED => return absent(device, cuda()),
        T::ROCM | T::ROCM_HOST => return absent(device, rocm()),
        T::METAL => {
            "no backend is registered for Metal; memory that the host shares with it can be used \
             without one, see the module `metal`"
        }
        T::EXT_DEV => {
            "no extension device with this id is registered; simulated devices are added with \
             Devices::add"
        }
        t if t.name().is_none() => "the specification does not name this device type",
        _ => "no backend is registered for this device type; see Devices::register",
    };
    absent(device, reason)
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ids: Vec<_> = lock(&self.0.devices).keys().copied().collect();
        ids.sort();
        f.debug_tuple("Devices").field(&ids).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_device_is_the_cpu() {
        let devices = Devices::new();
        devices.add(Devices::cpu()).unwrap();
        let id = DeviceId::new(ArrowDeviceType::CPU, 3);
        let other = Device::on_host(id);
        assert!(matches!(devices.add(other), Err(Error::InvalidArgument(_))));
        assert_eq!(devices.get(id).unwrap(), Devices::cpu());
    }
}
