//! The HIP runtime's library, loaded at run time.
//!
//! Constants are hip-runtime-sys's; its enums are integers here. A code that is newer than the
//! bindings would be no value of the enum, which is undefined behaviour, and HIP 6 has given its
//! memory types other numbers.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use hip_runtime_sys as bindings;

use crate::device::Process;
use crate::device::gpu::{self, Call, Calls, Code, Library, RawStream, functions, load};

/// `hipPointerAttribute_t`, with its memory type as an integer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PointerAttributes {
    pub(super) memory_type: c_uint,
    pub(super) device: c_int,
    pub(super) device_pointer: *mut c_void,
    pub(super) host_pointer: *mut c_void,
    pub(super) is_managed: c_int,
    pub(super) allocation_flags: c_uint,
}

impl PointerAttributes {
    pub(super) const NONE: Self = Self {
        memory_type: c_uint::MAX,
        device: -1,
        device_pointer: std::ptr::null_mut(),
        host_pointer: std::ptr::null_mut(),
        is_managed: 0,
        allocation_flags: 0,
    };
}

functions! {
    /// The functions that only HIP has, or that differ from CUDA's. All are in HIP 5.2.
    pub(crate) struct Functions {
        get_version = ["hipRuntimeGetVersion"] (version: *mut c_int);
        get_device = ["hipGetDevice"] (ordinal: *mut c_int);
        set_device = ["hipSetDevice"] (ordinal: c_int);
        pointer_attributes = ["hipPointerGetAttributes"] (attributes: *mut PointerAttributes, ptr: *const c_void);
        address_range = ["hipMemGetAddressRange"] (start: *mut *mut c_void, bytes: *mut usize, ptr: *mut c_void);
        copy = ["hipMemcpyAsync"] (dst: *mut c_void, src: *const c_void, bytes: usize, kind: c_int, stream: RawStream);
        copy_peer = ["hipMemcpyPeerAsync"]
            (dst: *mut c_void, to: c_int, src: *const c_void, from: c_int, bytes: usize, stream: RawStream);
        get_last_error = ["hipGetLastError"] ();
        peek_at_last_error = ["hipPeekAtLastError"] ();
    }
}

type Text = unsafe extern "C" fn(Code) -> *const c_char;
type StreamDevice = unsafe extern "C" fn(RawStream, *mut c_int) -> Code;

/// The runtime.
pub(crate) struct Hip {
    pub(super) functions: Functions,
    calls: Calls,
    process: Process,
    error_name: Call<Text>,
    error_text: Call<Text>,
    /// Returns the device of a stream. Not in HIP 5.2 and 5.4; in 6.2.
    pub(super) stream_device: Option<Call<StreamDevice>>,
}

/// Newest first. The numbers are those of HIP's major versions.
const NAMES: &[&str] = if cfg!(windows) {
    &["amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"]
} else {
    &[
        "libamdhip64.so.7",
        "libamdhip64.so.6",
        "libamdhip64.so.5",
        "libamdhip64.so",
    ]
};

impl Library for Hip {
    const VENDOR: &'static str = "ROCm";
    const ADVICE: &'static str = "";
    // Host memory that is not coherent is visible to the host after an event only if the event
    // says so.
    const EVENT_FLAGS: c_uint = bindings::hipEventDisableTiming | bindings::hipEventReleaseToSystem;
    // Visible to the host without an event.
    const HOST_FLAGS: c_uint = bindings::hipHostMallocPortable | bindings::hipHostMallocCoherent;

    fn get() -> Result<&'static Self, &'static str> {
        static HIP: OnceLock<Result<Hip, String>> = OnceLock::new();
        let advice = "the HIP runtime's library cannot be loaded; install ROCm";
        let hip = HIP.get_or_init(|| load(NAMES, advice, Hip::check));
        hip.as_ref().map_err(String::as_str)
    }

    fn calls(&self) -> &Calls {
        &self.calls
    }

    fn process(&self) -> Process {
        self.process
    }

    fn text(&self, code: Code) -> String {
        // SAFETY: the functions accept any code, and return null or a static text.
        unsafe {
            gpu::text(
                (self.error_name.function)(code),
                (self.error_text.function)(code),
            )
        }
    }

    fn is_lost(code: Code) -> bool {
        // Invalid context; uncorrectable ECC; illegal address; launch timeout; context is destroyed;
        // assert; launch failure; HSA's own errors.
        matches!(code, 201 | 214 | 700 | 702 | 709 | 710 | 719 | 1052 | 1053)
    }

    fn quietly<T>(&self, calls: impl FnOnce() -> T) -> T {
        let before = self.last_error();
        let done = calls();
        self.forget_error(before);
        done
    }
}

impl Hip {
    /// Returns the runtime, or why it cannot be used. It initialises itself: without a device,
    /// `hipInit` of 5.2 returns "invalid device".
    fn check(library: &libloading::Library) -> Result<Self, String> {
        let found = || {
            // SAFETY: libraries of these names are the HIP runtime, and this one stays loaded; the
            // types are those of its headers, of 7.14 for the last.
            unsafe {
                Ok(Self {
                    functions: Functions::find(library, 0)?,
                    calls: Calls::find(library, Calls::HIP)?,
                    process: Process::this(),
                    error_name: Call::find(library, "hipGetErrorName")?,
                    error_text: Call::find(library, "hipGetErrorString")?,
                    stream_device: Call::find(library, "hipStreamGetDevice").ok(),
                })
            }
        };
        found().map_err(|name: &str| {
            format!("the HIP runtime has no {name}: it is older than 5.2, update ROCm")
        })
    }

    /// Clears the thread's last error if calls of this crate have left it, that is, if there was
    /// none `before` them. Their errors are returned otherwise, and the program would take the last
    /// error for its own.
    pub(super) fn forget_error(&self, before: Code) {
        if before == 0 && self.last_error() != 0 {
            // SAFETY: the function has no arguments.
            let _ = unsafe { self.functions.get_last_error() };
        }
    }

    /// Returns the thread's last error, which stays.
    pub(super) fn last_error(&self) -> Code {
        // SAFETY: the function has no arguments.
        unsafe { (self.functions.peek_at_last_error.function)() }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use bindings::{hipMemPoolProps, hipPointerAttribute_t};

    use super::*;
    use crate::device::gpu::{NOT_CAPTURED, PoolProps, RELAXED, RELEASE_THRESHOLD};

    /// The engine's numbers and layouts are those of the runtime's header.
    #[test]
    fn the_bindings_agree() {
        let relaxed = bindings::hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
        let none = bindings::hipStreamCaptureStatus::hipStreamCaptureStatusNone;
        let threshold = bindings::hipMemPoolAttr::hipMemPoolAttrReleaseThreshold;
        let pinned = bindings::hipMemAllocationType::hipMemAllocationTypePinned;
        let no_handles = bindings::hipMemAllocationHandleType::hipMemHandleTypeNone;
        let device = bindings::hipMemLocationType::hipMemLocationTypeDevice;
        assert_eq!((relaxed as c_int, none as c_int), (RELAXED, NOT_CAPTURED));
        assert_eq!(threshold as c_int, RELEASE_THRESHOLD);
        let start = [pinned as c_int, no_handles as c_int, device as c_int, 7];
        assert_eq!(PoolProps::of_device(7).0, start);
        assert_eq!(size_of::<hipMemPoolProps>(), size_of::<PoolProps>());
        assert_eq!(align_of::<hipMemPoolProps>(), align_of::<PoolProps>());
        let location = offset_of!(hipMemPoolProps, location);
        assert_eq!(location, 2 * size_of::<c_int>());
    }

    #[test]
    fn the_attributes_of_pointers_agree() {
        macro_rules! same {
            ($($ours:ident $theirs:ident)*) => {
                $(assert_eq!(offset_of!(PointerAttributes, $ours), offset_of!(hipPointerAttribute_t, $theirs));)*
            };
        }
        same!(memory_type memoryType device device device_pointer devicePointer);
        same!(host_pointer hostPointer is_managed isManaged allocation_flags allocationFlags);
        let [ours, theirs] = [
            size_of::<PointerAttributes>(),
            size_of::<hipPointerAttribute_t>(),
        ];
        assert_eq!(ours, theirs);
        assert_eq!(size_of::<bindings::hipError_t>(), size_of::<Code>());
        assert_eq!(size_of::<bindings::hipMemoryType>(), size_of::<c_uint>());
    }
}
