//! The driver library, loaded at run time.
//!
//! Handles and constants are cudarc's. Its functions are not used: they read a return code that is
//! newer than the bindings as a value of an enum, which is undefined behaviour, and panic if the
//! library or a function is missing. Nor would they save code: HIP needs the engine's table in any
//! case, of which CUDA's names are a column; only the 13 functions below are CUDA's alone.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{CUcontext, CUdevice, CUdeviceptr};

use crate::device::Process;
use crate::device::gpu::{self, Call, Calls, Code, Library, RawStream, functions, load};

/// What the stub library returns from every function that is called. It has no texts.
const STUB_LIBRARY: Code = 34;

functions! {
    /// The functions that only CUDA has, or that differ from HIP's.
    pub(crate) struct Functions {
        init = ["cuInit"] (flags: c_uint);
        get_device = ["cuDeviceGet"] (device: *mut CUdevice, ordinal: c_int);
        retain_primary = ["cuDevicePrimaryCtxRetain"] (context: *mut CUcontext, device: CUdevice);
        release_primary = ["cuDevicePrimaryCtxRelease_v2"] (device: CUdevice);
        push_context = ["cuCtxPushCurrent_v2"] (context: CUcontext);
        pop_context = ["cuCtxPopCurrent_v2"] (context: *mut CUcontext);
        stream_context = ["cuStreamGetCtx"] (stream: RawStream, context: *mut CUcontext);
        pointer_attributes = ["cuPointerGetAttributes"]
            (count: c_uint, attributes: *mut c_int, data: *mut *mut c_void, address: CUdeviceptr);
        copy = ["cuMemcpyAsync"] (dst: *mut c_void, src: *mut c_void, bytes: usize, stream: RawStream);
        copy_peer = ["cuMemcpyPeerAsync"]
            (dst: *mut c_void, to: CUcontext, src: *mut c_void, from: CUcontext, bytes: usize, stream: RawStream);
        error_name = ["cuGetErrorName"] (code: Code, text: *mut *const c_char);
        error_text = ["cuGetErrorString"] (code: Code, text: *mut *const c_char);
    }
}

// `CUdeviceptr` is an integer of the size of a pointer, which is passed as one.
const _: () = assert!(size_of::<CUdeviceptr>() == size_of::<*mut c_void>());

/// `CUmemcpyAttributes`, which not all bindings have: the order in which sources are read, hints of
/// places (two numbers each) and flags.
pub(super) type CopyAttributes = [c_uint; 6];

/// Sources are read in the stream's order, not during the call.
pub(super) const IN_STREAM_ORDER: CopyAttributes = [1, 0, 0, 0, 0, 0];

/// Destinations, sources, bytes, how many; attributes, the first copy of each, how many; the stream.
type CopyList = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut *mut c_void,
    *mut usize,
    usize,
    *mut CopyAttributes,
    *mut usize,
    usize,
    RawStream,
) -> Code;

/// The driver.
pub(crate) struct Driver {
    pub(super) functions: Functions,
    calls: Calls,
    process: Process,
    /// Runs a list of copies. Since CUDA 13, which not all bindings are of.
    pub(in crate::device) copy_list: Option<Call<CopyList>>,
}

impl Library for Driver {
    const VENDOR: &'static str = "CUDA";
    const ADVICE: &'static str = "; open the device with that one (Device::from_cuda_context)";
    /// `CU_EVENT_DISABLE_TIMING`.
    const EVENT_FLAGS: c_uint = 2;
    /// `CU_MEMHOSTALLOC_PORTABLE`.
    const HOST_FLAGS: c_uint = 1;

    fn get() -> Result<&'static Self, &'static str> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        // The driver installs the name with the number; the plain one may be the toolkit's stub,
        // which only serves to link programs.
        let names: &[&str] = if cfg!(windows) {
            &["nvcuda.dll"]
        } else {
            &["libcuda.so.1", "libcuda.so"]
        };
        let advice = "the NVIDIA driver's library cannot be loaded; install the driver";
        let driver = DRIVER.get_or_init(|| load(names, advice, Driver::check));
        driver.as_ref().map_err(String::as_str)
    }

    fn calls(&self) -> &Calls {
        &self.calls
    }

    fn process(&self) -> Process {
        self.process
    }

    fn text(&self, code: Code) -> String {
        let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
        // SAFETY: each function writes a static text, or leaves the pointer null or makes it so for
        // an unknown code.
        unsafe {
            let _ = self.functions.error_name(code, &raw mut name);
            let _ = self.functions.error_text(code, &raw mut text);
            gpu::text(name, text)
        }
    }

    fn is_lost(code: Code) -> bool {
        // Device unavailable; invalid context; uncorrectable ECC, NVLink and contained errors; illegal
        // address to launch failure, with "context is destroyed" in between; tensor memory leak; MPS
        // client terminated; external device.
        matches!(
            code,
            46 | 201 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911
        )
    }
}

impl Driver {
    /// Returns the driver, initialised, or why it cannot be used.
    fn check(library: &libloading::Library) -> Result<Self, String> {
        let found = || {
            // SAFETY: libraries of these names are CUDA drivers, and this one stays loaded; `CopyList`
            // is the type of the function in the header of CUDA 13.
            unsafe {
                Ok(Self {
                    functions: Functions::find(library, Calls::CUDA)?,
                    calls: Calls::find(library, Calls::CUDA)?,
                    process: Process::this(),
                    copy_list: Call::find(library, "cuMemcpyBatchAsync_v2").ok(),
                })
            }
        };
        let driver = found()
            .map_err(|name: &str| format!("the driver has no {name}: it is too old, update it"))?;
        // SAFETY: called before all other functions, with the only flags that there are.
        match unsafe { driver.functions.init(0) }.map_err(|failed| failed.code) {
            Ok(()) => Ok(driver),
            Err(STUB_LIBRARY) => Err(
                "cuInit failed: the CUDA toolkit's stub library was loaded instead of the driver \
                 (code 34); remove the toolkit's folder `stubs` from the library path"
                    .into(),
            ),
            Err(code) => {
                let text = driver.text(code);
                Err(format!("cuInit failed: {text} (code {code})"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use cudarc::driver::sys as theirs;

    use super::*;
    use crate::device::gpu::{NOT_CAPTURED, PoolProps, RELAXED, RELEASE_THRESHOLD};

    /// The engine's numbers and layouts are those of the driver's header.
    #[test]
    fn the_bindings_agree() {
        let relaxed = theirs::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let none = theirs::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let threshold = theirs::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let pinned = theirs::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        let device = theirs::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        assert_eq!((relaxed as c_int, none as c_int), (RELAXED, NOT_CAPTURED));
        assert_eq!(threshold as c_int, RELEASE_THRESHOLD);
        // The type of handles is none, 0; in some versions of the bindings it is no enum.
        let start = [pinned as c_int, 0, device as c_int, 7];
        assert_eq!(PoolProps::of_device(7).0, start);
        assert_eq!(size_of::<theirs::CUmemPoolProps>(), size_of::<PoolProps>());
        assert_eq!(
            align_of::<theirs::CUmemPoolProps>(),
            align_of::<PoolProps>()
        );
        let location = offset_of!(theirs::CUmemPoolProps, location);
        assert_eq!(location, 2 * size_of::<c_int>());
    }

    /// Of the codes of the Multi-Process Service (805 to 810) only the last says that the client was
    /// terminated. That it has too many clients (808) leaves a context as it is.
    #[test]
    fn only_a_terminated_client_has_lost_its_context() {
        let lost: Vec<Code> = (800..=820).filter(|code| Driver::is_lost(*code)).collect();
        assert_eq!(lost, [810]);
    }
}
