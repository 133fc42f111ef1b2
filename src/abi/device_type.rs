//! `ArrowDeviceType`.

use std::fmt;

/// The kind of device that can access the memory of an array ("ArrowDeviceType" of the
/// specification).
///
/// An open `int32_t`, not an enum: a code that this crate does not know is data, not an error.
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

            /// All codes that the specification names.
            pub const ALL: [Self; 14] = [$(Self::$name),*];

            /// The specification's name without its prefix (`CUDA_HOST`); `None` for unknown codes.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($code => Some(stringify!($name)),)*
                    _ => None,
                }
            }

            /// The name in lower case with hyphens (`cuda-host`), as in device names like
            /// `cuda-host:0`; `None` for unknown codes.
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
    /// OpenCL.
    OPENCL = 4, "opencl";
    /// Vulkan buffers.
    VULKAN = 7, "vulkan";
    /// Metal on Apple devices.
    METAL = 8, "metal";
    /// A Verilog simulator's buffers.
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
    /// WebGPU.
    WEBGPU = 15, "webgpu";
    /// Qualcomm Hexagon.
    HEXAGON = 16, "hexagon";
}

impl ArrowDeviceType {
    /// Wraps any code.
    pub const fn new(code: i32) -> Self {
        Self(code)
    }

    /// The code.
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
