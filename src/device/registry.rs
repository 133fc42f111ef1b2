//! [`Devices`]: which device serves a (type, id) pair.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::abi::ArrowDeviceType;
use crate::device::cpu::HostBackend;
use crate::device::handle::WeakDevice;
use crate::device::{Device, DeviceId};
use crate::error::{Error, Result};

type Factory = Arc<dyn Fn(i64) -> Result<Device> + Send + Sync>;

/// The devices that a program can reach, by type and id.
///
/// [`Devices::global`] is the process's default and is never dropped; own values are for tests and
/// for programs that keep worlds apart. Clones share their content.
///
/// A device is made by the factory of its type at its first use and kept. If there is none
/// ([`Error::DeviceNotAvailable`]), the reason is kept too, for the first 64 such ids, and later requests get
/// it again.
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
    devices: Mutex<HashMap<DeviceId, Slot>>,
}

/// Filled once, outside the map's lock, so that a slow or panicking factory blocks only requests for
/// its own device.
type Slot = Arc<OnceLock<Result<Device>>>;

/// For how many ids the reason is kept why there is no device. Producers name ids, as many as they like.
const KEPT_REASONS: usize = 64;

impl Devices {
    /// An empty set. The CPU is always there.
    pub fn new() -> Self {
        Self::default()
    }

    /// The process's default set: the CPU, the devices of the features that are on, and what the
    /// program adds.
    pub fn global() -> &'static Self {
        static GLOBAL: OnceLock<Devices> = OnceLock::new();
        GLOBAL.get_or_init(|| {
            let devices = Devices::new();
            #[cfg(feature = "cuda")]
            crate::device::cuda::register(&devices);
            #[cfg(feature = "rocm")]
            crate::device::rocm::register(&devices);
            devices
        })
    }

    /// The CPU. There is one per process.
    pub fn cpu() -> Device {
        static CPU: OnceLock<Device> = OnceLock::new();
        CPU.get_or_init(|| {
            Device::new(Arc::new(HostBackend::new(DeviceId::CPU)))
                .expect("the host backend's default queue is always there")
        })
        .clone()
    }

    /// The first GPU of the default set: CUDA, then ROCm. Never falls back to another device.
    pub fn gpu() -> Result<Device> {
        let cuda = Self::global().get(DeviceId::new(ArrowDeviceType::CUDA, 0));
        cuda.or_else(|no_cuda| {
            Self::global()
                .get(DeviceId::new(ArrowDeviceType::ROCM, 0))
                .map_err(|no_rocm| Error::DeviceNotAvailable {
                    device: DeviceId::new(ArrowDeviceType::CUDA, 0),
                    reason: format!("no GPU. {no_cuda}. {no_rocm}").into(),
                })
        })
    }

    /// The default set's simulated device, made at the first call.
    ///
    /// # Errors
    /// [`Error::DeviceNotAvailable`] without the feature `sim` or on another system than Linux.
    pub fn simulated() -> Result<Device> {
        static SIMULATED: OnceLock<Result<Device>> = OnceLock::new();
        SIMULATED
            .get_or_init(|| {
                let device = new_simulated()?;
                Self::global().add(device.clone())?;
                Ok(device)
            })
            .clone()
    }

    /// The default set's device of this name: `cpu`, `sim`, `cuda:0`, `cuda-host`, ... (see
    /// [`DeviceId`]). `sim` means [`Devices::simulated`].
    pub fn open(name: &str) -> Result<Device> {
        if name == "sim" {
            return Self::simulated();
        }
        Self::global().get(name.parse()?)
    }

    /// Adds a device under its own id.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if that id is taken by another device. All ids of the CPU's type are taken by
    /// [`Devices::cpu`].
    pub fn add(&self, device: Device) -> Result<()> {
        let taken = || Error::argument(format!("device {} is registered already", device.id()));
        if device.id().device_type == ArrowDeviceType::CPU {
            return (device == Self::cpu()).then_some(()).ok_or_else(taken);
        }
        let mut devices = self.devices();
        let slot = devices.entry(device.id()).or_default();
        // A device takes the place of a failure to make one.
        if slot.get().is_some_and(Result::is_err) {
            *slot = Slot::default();
        }
        let slot = slot.clone();
        drop(devices);
        let there = slot.get_or_init(|| Ok(device.clone()));
        let added = there.as_ref().is_ok_and(|there| *there == device);
        added.then_some(()).ok_or_else(taken)
    }

    /// Registers how devices of a type are made from their id. Devices that were asked for before
    /// stay as they are. The factory must not ask this set for the id that it is making.
    ///
    /// The device that a factory returns must have that type and the id that it was given: imports rely on a device for
    /// how the memory under its id is reached. Any other is dropped, and [`get`](Self::get) returns
    /// [`Error::DeviceNotAvailable`] that names both. A factory for the CPU's type is never called.
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
        let old = self
            .0
            .factories
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(device_type, Arc::new(factory));
        // Outside the lock: what the old factory holds may use this set.
        drop(old);
    }

    /// The device of this type and id. Any id of the CPU's type is the CPU.
    ///
    /// # Errors
    /// [`Error::DeviceNotAvailable`] with what is missing.
    pub fn get(&self, id: DeviceId) -> Result<Device> {
        if id.device_type == ArrowDeviceType::CPU {
            return Ok(Self::cpu());
        }
        let factory = self
            .0
            .factories
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&id.device_type)
            .cloned();
        let Some(factory) = factory else {
            // Not kept: a factory or a device may be registered later.
            let known = self.devices().get(&id).cloned();
            return match known.as_ref().and_then(|slot| slot.get()) {
                Some(device) => device.clone(),
                None => Err(no_backend(id)),
            };
        };
        let slot = self.slot(id);
        let made = slot.get_or_init(|| {
            let absent = |reason| Error::DeviceNotAvailable { device: id, reason };
            let make = || {
                let made = factory(id.id)?;
                if made.id() == id {
                    return Ok(made);
                }
                let reason = format!(
                    "its factory returned the device {made}; register one that returns {id}"
                );
                Err(absent(reason.into()))
            };
            let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(make));
            made.unwrap_or_else(|payload| {
                std::mem::forget(payload);
                Err(absent("its factory panicked".into()))
            })
        });
        match made {
            Ok(_) => {}
            Err(Error::DeviceNotAvailable { .. }) if self.reasons() <= KEPT_REASONS => {}
            // Perhaps for now only, or one of many: the next request tries again.
            Err(_) => {
                let mut devices = self.devices();
                if devices
                    .get(&id)
                    .is_some_and(|there| Arc::ptr_eq(there, &slot))
                {
                    devices.remove(&id);
                }
            }
        }
        made.clone()
    }

    /// As [`get`](Self::get); page-locked memory whose backend is missing is then served as plain
    /// host memory if nothing needs to be waited for.
    pub(crate) fn get_for_import(&self, id: DeviceId, has_event: bool) -> Result<Device> {
        let missing = match self.get(id) {
            Err(e) => e,
            found => return found,
        };
        let page_locked = matches!(
            id.device_type,
            ArrowDeviceType::CUDA_HOST | ArrowDeviceType::ROCM_HOST
        );
        if !page_locked || has_event {
            return Err(missing);
        }
        page_locked_without_backend(id)
    }

    fn devices(&self) -> std::sync::MutexGuard<'_, HashMap<DeviceId, Slot>> {
        self.0
            .devices
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// How many reasons are kept.
    fn reasons(&self) -> usize {
        let devices = self.devices();
        let made = devices.values().filter_map(|slot| slot.get());
        made.filter(|made| made.is_err()).count()
    }

    fn slot(&self, id: DeviceId) -> Slot {
        self.devices().entry(id).or_default().clone()
    }
}

/// Page-locked memory as plain host memory: one device for an id as long as anything uses it. Ids come
/// from producers, so that none may cost memory for ever.
fn page_locked_without_backend(id: DeviceId) -> Result<Device> {
    // A map of its own, for `get` goes on saying that the backend is missing.
    static PAGE_LOCKED: Mutex<Option<PageLocked>> = Mutex::new(None);
    let mut known = PAGE_LOCKED.lock().unwrap_or_else(PoisonError::into_inner);
    let PageLocked { devices, used } = known.get_or_insert_with(PageLocked::default);
    if let Some(device) = devices.get(&id).and_then(WeakDevice::upgrade) {
        return Ok(device);
    }
    if devices.len() > 8 + 2 * (Arc::strong_count(used) - 1) {
        // Most are no longer used, so that each insertion pays for a constant number of entries.
        devices.retain(|_, device| device.is_used());
        devices.shrink_to(2 * devices.len());
    }
    let device = Device::new(Arc::new(HostBackend::counted(id, used.clone())))?;
    devices.insert(id, device.downgrade());
    Ok(device)
}

#[derive(Default)]
struct PageLocked {
    devices: HashMap<DeviceId, WeakDevice>,
    /// Every device that is still used holds it too, which counts them.
    used: Arc<()>,
}

#[cfg(all(feature = "sim", target_os = "linux"))]
fn new_simulated() -> Result<Device> {
    use crate::device::sim::{SimConfig, SimDevice};
    Device::new(SimDevice::new(SimConfig::default())?)
}

#[cfg(not(all(feature = "sim", target_os = "linux")))]
fn new_simulated() -> Result<Device> {
    Err(Error::DeviceNotAvailable {
        device: DeviceId::new(ArrowDeviceType::EXT_DEV, 0),
        reason: "the simulated device needs the feature `sim` and Linux".into(),
    })
}

fn no_backend(device: DeviceId) -> Error {
    let reason = match device.device_type {
        ArrowDeviceType::CUDA | ArrowDeviceType::CUDA_HOST | ArrowDeviceType::CUDA_MANAGED => {
            if cfg!(feature = "cuda") {
                "this set of devices does not know CUDA; see cuda::register"
            } else {
                "this build of arrow-device has no CUDA; enable its feature `cuda`"
            }
        }
        ArrowDeviceType::ROCM | ArrowDeviceType::ROCM_HOST => {
            if cfg!(feature = "rocm") {
                "this set of devices does not know ROCm; see rocm::register"
            } else {
                "this build of arrow-device has no ROCm; enable its feature `rocm`"
            }
        }
        ArrowDeviceType::EXT_DEV => {
            "no extension device with this id is registered; simulated devices are added with \
             Devices::add"
        }
        t if t.name().is_none() => "the specification does not name this device type",
        _ => "no backend is registered for this device type; see Devices::register",
    };
    Error::DeviceNotAvailable {
        device,
        reason: reason.into(),
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ids: Vec<_> = self.devices().keys().copied().collect();
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
        let other = Device::new(Arc::new(HostBackend::new(id))).unwrap();
        assert!(matches!(devices.add(other), Err(Error::InvalidArgument(_))));
        assert_eq!(devices.get(id).unwrap(), Devices::cpu());
    }
}
