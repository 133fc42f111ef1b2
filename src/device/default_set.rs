//! What depends on the backends that this build has: the process's default set of devices, and devices of a program's memory.

use std::sync::{Arc, Mutex, OnceLock};

use crate::abi::ArrowDeviceType;
use crate::device::backend::{DevicePtr, Program, not_supported};
use crate::device::{Device, DeviceId, Devices, HostBackend, absent, lock};
use crate::error::{Error, Result};

impl Devices {
    /// Returns the process's default set: the CPU, the devices of the features that are on, and
    /// what the program adds.
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

    /// Returns the first GPU of the default set: CUDA device 0, or else ROCm device 0. Never falls
    /// back to another device.
    ///
    /// ```
    /// use arrow_device::Devices;
    /// match Devices::gpu() {
    ///     Ok(gpu) => println!("using {gpu}"),
    ///     Err(e) => println!("{e}"), // says what is missing for each vendor
    /// }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`] with the reason for each vendor.
    pub fn gpu() -> Result<Device> {
        let first = |device_type| Self::global().get(DeviceId::new(device_type, 0));
        first(ArrowDeviceType::CUDA).or_else(|no_cuda| {
            first(ArrowDeviceType::ROCM).map_err(|no_rocm| {
                let (cuda, rocm) = (reason(&no_cuda), reason(&no_rocm));
                absent(
                    DeviceId::new(ArrowDeviceType::CUDA, 0),
                    format!("no GPU was found. CUDA: {cuda}. ROCm: {rocm}"),
                )
            })
        })
    }

    /// Returns the default set's simulated device, `sim`, which the first call makes.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`] without the feature `sim`, and on other systems than
    /// Linux.
    pub fn simulated() -> Result<Device> {
        Self::open_simulated(0)
    }

    /// Returns the default set's device of this name: `cpu`, `sim`, `cuda:0`, `cuda-host`, ... (see
    /// [`DeviceId`]).
    ///
    /// `sim` means [`Devices::simulated`]. `sim:1`, `sim:2`, ... are further simulated devices,
    /// each made when it is first opened by this function.
    ///
    /// ```
    /// use arrow_device::Devices;
    /// # if cfg!(any(miri, not(target_os = "linux"))) { return Ok(()) }
    /// let (first, second) = (Devices::open("sim")?, Devices::open("sim:1")?);
    /// assert_ne!(first, second);
    /// assert_eq!(format!("{first}, {second}"), "sim, sim:1");
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for a name that is none, and
    /// [`Error::DeviceNotAvailable`] with what is missing.
    pub fn open(name: &str) -> Result<Device> {
        let id: DeviceId = name.parse()?;
        if name.starts_with("sim") {
            return Self::open_simulated(id.id);
        }
        Self::global().get(id)
    }

    /// Returns the default set's simulated device of this number, which the first call makes.
    fn open_simulated(number: i64) -> Result<Device> {
        // One call at a time, so that a number has one device.
        static OPENING: Mutex<()> = Mutex::new(());
        let _one = lock(&OPENING);
        let id = DeviceId::new(ArrowDeviceType::EXT_DEV, number);
        if let Some(device) = Self::global().known(id) {
            return Ok(device);
        }
        let device = new_simulated(id)?;
        Self::global().add(device.clone())?;
        Ok(device)
    }
}

impl Device {
    /// Returns a device like this one, the CPU or one of type CUDA, whose memory the program allocates: memory that other processes can
    /// map, for example, large pages, or memory that several libraries share. `allocate` gets the device's id, and returns the address of
    /// at least so many bytes; `free` gets that address. An upload to such a CPU copies. On a GPU, whose context is current in `allocate`,
    /// what is freed is kept for reuse first, as where the driver has no pools; on [`Error::OutOfMemory`] the device frees what it has kept,
    /// and asks once more. The memory cannot become a slice of cudarc's.
    ///
    /// ```
    /// use arrow_device::Devices;
    /// use arrow_device::device::DevicePtr;
    ///
    /// # #[cfg(unix)] {
    /// // SAFETY: the memory has as many bytes, is aligned to a page and initialised, and nobody else has it.
    /// let device = unsafe {
    ///     Devices::cpu().with_memory(
    ///         |_, bytes| {
    ///             let memory = libc::aligned_alloc(4096, bytes.next_multiple_of(4096));
    ///             assert!(!memory.is_null());
    ///             memory.write_bytes(0, bytes);
    ///             Ok(DevicePtr::new(memory))
    ///         },
    ///         |memory| libc::free(memory.as_ptr()),
    ///     )
    /// }?;
    /// let batch = arrow_array::record_batch!(("id", Int64, [1, 2, 3]))?;
    /// assert_eq!(device.upload(&batch)?.to_host()?, batch);
    /// # }
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] for another device, and what opening one returns.
    ///
    /// # Safety
    /// The memory is aligned to 64 bytes, the device can read and write it, on the CPU it is initialised, and nothing else uses it, but to
    /// read what the device's buffers hold, until `free` is called with it: once, on any thread, and on the CPU also in a child that was forked.
    pub unsafe fn with_memory(
        &self,
        allocate: fn(DeviceId, usize) -> Result<DevicePtr>,
        free: fn(DevicePtr),
    ) -> Result<Self> {
        let program = Program { allocate, free };
        match self.id().device_type {
            ArrowDeviceType::CPU => Self::new(Arc::new(HostBackend::new(self.id(), Some(program)))),
            #[cfg(feature = "cuda")]
            ArrowDeviceType::CUDA => crate::device::cuda::with_memory(self, program),
            _ => Err(not_supported(
                self.id(),
                "with_memory",
                "only memory of the CPU, and CUDA's own, can be a program's",
            )),
        }
    }
}

/// Returns why there is no device, without its name.
fn reason(e: &Error) -> String {
    match e {
        Error::DeviceNotAvailable { reason, .. } => reason.to_string(),
        e => e.to_string(),
    }
}

fn new_simulated(id: DeviceId) -> Result<Device> {
    #[cfg(feature = "sim")]
    return Device::new(super::sim::SimDevice::numbered(Default::default(), id)?);
    #[cfg(not(feature = "sim"))]
    Err(absent(
        id,
        "the simulated device needs the feature `sim` and Linux",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whichever features are on, and whether or not there is a vendor's library.
    #[test]
    fn a_missing_gpu_is_explained_once() {
        let Err(e) = Devices::gpu() else {
            return;
        };
        let text = e.to_string();
        for part in ["is not available", "cuda:0", "CUDA: ", "ROCm: "] {
            assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
        }
    }

    #[cfg(all(feature = "sim", target_os = "linux", not(miri)))]
    mod simulated {
        use super::*;
        use crate::device::sim::{SimConfig, SimDevice};

        #[test]
        fn a_name_opens_the_device_that_it_prints() {
            let opened = |name| Devices::open(name).unwrap();
            assert_eq!(opened("sim"), Devices::simulated().unwrap());
            assert_eq!(opened("sim:0"), opened("sim"));
            assert_ne!(opened("sim:1000"), opened("sim"));
            for name in ["sim", "sim:1000"] {
                let device = opened(name);
                assert_eq!(
                    (device.to_string(), opened(name)),
                    (name.into(), device.clone())
                );
                assert_eq!(format!("{device:?}"), format!("Device({name})"));
                assert_eq!(Devices::global().get(device.id()).unwrap(), device);
                assert_eq!(
                    device.id().to_string().parse::<DeviceId>().unwrap(),
                    device.id()
                );
                let queue = format!("{:?}", device.default_queue());
                assert!(queue.contains(name), "{queue}");
            }
        }

        #[test]
        fn a_simulated_device_has_other_memory_of_a_program() {
            let allocate = |id, _| Err(absent(id, "nobody asks for memory"));
            // SAFETY: no memory is returned.
            let refused = unsafe { Devices::simulated().unwrap().with_memory(allocate, |_| ()) };
            assert!(matches!(refused, Err(Error::NotSupported { .. })));
        }

        #[test]
        fn a_number_is_one_device() {
            let other = SimDevice::new(SimConfig::default()).unwrap();
            let other = Device::new(other).unwrap();
            for (name, why) in [
                (other.to_string(), "Devices::add"),
                ("sim:-1".into(), "numbered from 0"),
            ] {
                let e = Devices::open(&name).unwrap_err().to_string();
                assert!(e.starts_with(&format!("device {name} is not")), "{e}");
                assert!(e.contains(why), "{e}");
            }
            Devices::global().add(other.clone()).unwrap();
            assert_eq!(Devices::open(&other.to_string()).unwrap(), other);
        }

        /// Other extension devices go by the specification's name too; no such device is made.
        #[test]
        fn the_specifications_name() {
            let id: DeviceId = "ext-dev:123456".parse().unwrap();
            assert_eq!(id.to_string(), "sim:123456");
            assert!(Devices::open("ext-dev:123456").is_err());
        }
    }
}
