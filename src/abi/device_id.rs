//! [`ArrowDeviceType`] and [`DeviceId`].

use std::fmt;

/// The type of device that can access the memory of an array ("ArrowDeviceType" of the
/// specification).
///
/// It wraps an `int32_t` rather than being an enum: a code that this crate does not know is no
/// error.
///
/// ```
/// use arrow_device::ArrowDeviceType;
/// assert_eq!(ArrowDeviceType::CUDA.value(), 2);
/// assert_eq!(ArrowDeviceType::CUDA.to_string(), "CUDA (2)");
/// assert_eq!(ArrowDeviceType::new(99).to_string(), "unknown device type (99)");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct ArrowDeviceType(i32);

macro_rules! device_types {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $short:literal;)*) => {
        impl ArrowDeviceType {
            $($(#[$doc])* pub const $name: Self = Self($code);)*

            /// All types that the specification names.
            pub const ALL: [Self; 14] = [$(Self::$name),*];

            /// Returns the specification's name without its prefix (`CUDA_HOST`), or `None` for an
            /// unknown code.
            pub(crate) const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// Returns the name in lower case with hyphens (`cuda-host`), as in device names like
            /// `cuda-host:0`, or `None` for an unknown code.
            pub const fn short_name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some($short),)*
                    _ => None,
                }
            }
        }
    };
}

device_types! {
    /// Ordinary host memory.
    CPU = 1, "cpu";
    /// CUDA device memory.
    CUDA = 2, "cuda";
    /// Host memory page-locked by CUDA.
    CUDA_HOST = 3, "cuda-host";
    /// OpenCL buffers.
    OPENCL = 4, "opencl";
    /// Vulkan buffers.
    VULKAN = 7, "vulkan";
    /// Metal buffers, on Apple devices.
    METAL = 8, "metal";
    /// Buffers of a Verilog simulator.
    VPI = 9, "vpi";
    /// ROCm device memory.
    ROCM = 10, "rocm";
    /// Host memory page-locked by ROCm.
    ROCM_HOST = 11, "rocm-host";
    /// Extension devices. They are named `sim`, after this crate's simulated device.
    EXT_DEV = 12, "sim";
    /// CUDA managed (unified) memory.
    CUDA_MANAGED = 13, "cuda-managed";
    /// oneAPI unified shared memory.
    ONEAPI = 14, "oneapi";
    /// WebGPU buffers.
    WEBGPU = 15, "webgpu";
    /// Memory of a Qualcomm Hexagon DSP.
    HEXAGON = 16, "hexagon";
}

impl ArrowDeviceType {
    /// Wraps a code, known or not.
    pub const fn new(code: i32) -> Self {
        Self(code)
    }

    /// Returns the code.
    pub const fn value(self) -> i32 {
        self.0
    }
}

impl fmt::Display for ArrowDeviceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "unknown device type ({})", self.0),
        }
    }
}

impl fmt::Debug for ArrowDeviceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A device's type and id, the pair in an `ArrowDeviceArray`.
///
/// Displays as `cpu`, `cuda:0`, `cuda-host:1`, `sim`, `sim:3`, and parses from the same names. A
/// missing id means 0, or -1 for `cpu`. Extension devices ([`ArrowDeviceType::EXT_DEV`]) display as
/// `sim` and also parse from `ext-dev`.
///
/// ```
/// use arrow_device::{ArrowDeviceType, DeviceId};
/// let id: DeviceId = "cuda".parse()?;
/// assert_eq!(id, DeviceId::new(ArrowDeviceType::CUDA, 0));
/// assert_eq!(id.to_string(), "cuda:0");
/// assert_eq!(DeviceId::new(ArrowDeviceType::EXT_DEV, 0).to_string(), "sim");
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId {
    /// The type of the device.
    pub device_type: ArrowDeviceType,
    /// The id among devices of its type; -1 for the CPU.
    pub id: i64,
}

impl DeviceId {
    /// The CPU, with the id -1, which the specification recommends.
    pub const CPU: Self = Self {
        device_type: ArrowDeviceType::CPU,
        id: -1,
    };

    /// Makes a pair of type and id.
    pub const fn new(device_type: ArrowDeviceType, id: i64) -> Self {
        Self { device_type, id }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.device_type.short_name() {
            Some("cpu") => f.write_str("cpu"),
            Some("sim") if self.id == 0 => f.write_str("sim"),
            Some(name) => write!(f, "{name}:{}", self.id),
            None => write!(f, "{}:{}", self.device_type, self.id),
        }
    }
}

impl fmt::Debug for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceId({self})")
    }
}
