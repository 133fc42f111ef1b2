//! What CUDA's driver and HIP's runtime have alike: handles, codes, and the functions that do the
//! same under two names.

use std::ffi::{c_int, c_uchar, c_uint, c_void};
use std::ops::Deref;

use crate::device::Process;

/// What a call returns: the vendor's enum as an integer, for a library may return codes that its
/// bindings do not have.
pub(crate) type Code = c_int;

/// Codes that mean the same in both.
pub(crate) mod code {
    use super::Code;

    pub(crate) const INVALID_VALUE: Code = 1;
    pub(crate) const OUT_OF_MEMORY: Code = 2;
    pub(crate) const NOT_INITIALIZED: Code = 3;
    pub(crate) const DEINITIALIZED: Code = 4;
    pub(crate) const NOT_READY: Code = 600;
    pub(crate) const NOT_SUPPORTED: Code = 801;
}

/// The capture mode in which a thread's calls cannot spoil other threads' stream captures.
pub(crate) const RELAXED: c_int = 2;
/// The capture status of a stream that is not being captured.
pub(crate) const NOT_CAPTURED: c_int = 0;
/// The attribute of a pool that says how many bytes of freed memory it keeps.
pub(crate) const RELEASE_THRESHOLD: c_int = 4;

/// A call that did not succeed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed {
    /// The call's name.
    pub(crate) call: &'static str,
    pub(crate) code: Code,
}

pub(crate) type Answer<T = ()> = std::result::Result<T, Failed>;

/// A function of a vendor's library, with its name for error messages.
#[derive(Clone, Copy)]
pub(crate) struct Call<F> {
    pub(crate) name: &'static str,
    pub(crate) function: F,
}

impl<F> Call<F> {
    /// Checks what the function returned: 0 is success.
    pub(crate) fn check(&self, code: Code) -> Answer {
        match code {
            0 => Ok(()),
            code => Err(Failed {
                call: self.name,
                code,
            }),
        }
    }

    /// As [`check`](Self::check), for a function that queries whether work has completed.
    pub(super) fn check_done(&self, code: Code) -> Answer<bool> {
        match code {
            code::NOT_READY => Ok(false),
            code => self.check(code).map(|()| true),
        }
    }
}

impl<F> Deref for Call<F> {
    type Target = F;

    fn deref(&self) -> &F {
        &self.function
    }
}

/// A stream's handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct RawStream(pub(in crate::device) *mut c_void);

// SAFETY: the handle is not followed here, and both libraries accept it on any thread.
unsafe impl Send for RawStream {}
// SAFETY: the handle is not followed here, and both libraries accept it on several threads at once.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// The default stream that all threads share, of whichever context is current.
    pub(crate) const LEGACY: Self = Self(std::ptr::null_mut());

    /// Whether it stands for a default stream (0 and 1: the legacy one, 2: the calling thread's) of
    /// whichever context is current.
    pub(crate) fn is_default(self) -> bool {
        self.0.addr() <= 2
    }

    /// Whether it stands for the calling thread's own stream, in CUDA and HIP alike.
    pub(crate) fn is_per_thread(self) -> bool {
        self.0.addr() == 2
    }
}

/// An event's handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct RawEvent(pub(in crate::device) *mut c_void);

// SAFETY: the handle is not followed here, and both libraries accept it on any thread.
unsafe impl Send for RawEvent {}
// SAFETY: the handle is not followed here, and both libraries accept it on several threads at once.
unsafe impl Sync for RawEvent {}

/// A memory pool's handle.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct RawPool(pub(in crate::device) *mut c_void);

// SAFETY: the handle is not followed here, and both libraries accept it on any thread.
unsafe impl Send for RawPool {}
// SAFETY: the handle is not followed here, and both libraries accept it on several threads at once.
unsafe impl Sync for RawPool {}

/// `CUmemPoolProps` and `hipMemPoolProps`, whose later members depend on the version.
#[repr(C)]
pub(crate) struct PoolProps {
    pub(crate) allocation_type: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location_type: c_int,
    pub(crate) location_id: c_int,
    pub(crate) rest: [usize; 9],
}

impl PoolProps {
    pub(crate) const PINNED: c_int = 1;
    pub(crate) const ON_DEVICE: c_int = 1;

    /// A pool of a device's own memory.
    pub(super) fn of_device(ordinal: c_int) -> Self {
        Self {
            allocation_type: Self::PINNED,
            handle_types: 0,
            location_type: Self::ON_DEVICE,
            location_id: ordinal,
            rest: [0; 9],
        }
    }
}

/// Declares a table of functions: each with its symbols, one for each vendor that the table is of,
/// and its type in the vendors' headers, with handles as this module has them and enums as integers.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        $vis:vis struct $functions:ident {
            $($name:ident = [$($symbol:literal),+] ($($arg:ty),*) -> $answer:ty;)*
        }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        $vis struct $functions {
            $($vis $name: $crate::device::gpu::Call<unsafe extern "C" fn($($arg),*) -> $answer>,)*
        }

        impl $functions {
            /// Finds the functions by their symbols of a vendor, which has this number in the table;
            /// an error is the symbol of one that is missing.
            ///
            /// # Safety
            /// `library` is that vendor's, and stays loaded for as long as the functions are called.
            $vis unsafe fn find(
                library: &libloading::Library,
                vendor: usize,
            ) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the caller guarantees that the library is the vendor's (see
                    // `# Safety`), so its functions have the types of the vendor's headers.
                    $($name: unsafe {
                        $crate::device::gpu::find_call(library, [$($symbol),+][vendor])
                    }?,)*
                })
            }
        }
    };
}
pub(crate) use functions;

pub(crate) type AllocateManaged = Call<unsafe extern "C" fn(*mut usize, usize, c_uint) -> Code>;

/// A vendor's library, by what CUDA and HIP have alike. All but the first functions of [`Calls`]
/// work in the current context.
pub(crate) struct Api {
    pub(crate) vendor: &'static str,
    /// Where the library was initialised. A child of that process must not call it.
    pub(crate) process: Process,
    /// What a user can do about streams and memory of another context.
    pub(crate) advice: &'static str,
    /// Whether a code means that a context is lost.
    pub(crate) is_lost: fn(Code) -> bool,
    /// The flags of events without timing.
    pub(crate) event_flags: c_uint,
    /// The flags of page-locked memory that serves all devices, and is not write-combined, since
    /// the host reads it.
    pub(crate) host_flags: c_uint,
    /// `None` for HIP, which has no device type for managed memory.
    pub(crate) allocate_managed: Option<AllocateManaged>,
    pub(crate) calls: Calls,
}

impl Deref for Api {
    type Target = Calls;

    fn deref(&self) -> &Calls {
        &self.calls
    }
}

/// The numbers of the vendors in [`Calls`].
#[cfg(feature = "cuda")]
pub(crate) const CUDA: usize = 0;
#[cfg(feature = "rocm")]
pub(crate) const HIP: usize = 1;

functions! {
    /// The functions that both libraries have.
    pub(crate) struct Calls {
        device_count = ["cuDeviceGetCount", "hipGetDeviceCount"] (*mut c_int) -> Code;
        version = ["cuDriverGetVersion", "hipRuntimeGetVersion"] (*mut c_int) -> Code;
        exchange_capture_mode = ["cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"] (*mut c_int) -> Code;
        synchronize = ["cuCtxSynchronize", "hipDeviceSynchronize"] () -> Code;
        create_stream = ["cuStreamCreate", "hipStreamCreateWithFlags"] (*mut RawStream, c_uint) -> Code;
        destroy_stream = ["cuStreamDestroy_v2", "hipStreamDestroy"] (RawStream) -> Code;
        synchronize_stream = ["cuStreamSynchronize", "hipStreamSynchronize"] (RawStream) -> Code;
        query_stream = ["cuStreamQuery", "hipStreamQuery"] (RawStream) -> Code;
        is_capturing = ["cuStreamIsCapturing", "hipStreamIsCapturing"] (RawStream, *mut c_int) -> Code;
        wait = ["cuStreamWaitEvent", "hipStreamWaitEvent"] (RawStream, RawEvent, c_uint) -> Code;
        create_event = ["cuEventCreate", "hipEventCreateWithFlags"] (*mut RawEvent, c_uint) -> Code;
        destroy_event = ["cuEventDestroy_v2", "hipEventDestroy"] (RawEvent) -> Code;
        record = ["cuEventRecord", "hipEventRecord"] (RawEvent, RawStream) -> Code;
        query = ["cuEventQuery", "hipEventQuery"] (RawEvent) -> Code;
        wait_event = ["cuEventSynchronize", "hipEventSynchronize"] (RawEvent) -> Code;
        create_pool = ["cuMemPoolCreate", "hipMemPoolCreate"] (*mut RawPool, *const PoolProps) -> Code;
        destroy_pool = ["cuMemPoolDestroy", "hipMemPoolDestroy"] (RawPool) -> Code;
        set_pool = ["cuMemPoolSetAttribute", "hipMemPoolSetAttribute"] (RawPool, c_int, *mut c_void) -> Code;
        trim = ["cuMemPoolTrimTo", "hipMemPoolTrimTo"] (RawPool, usize) -> Code;
        allocate_in_order = ["cuMemAllocFromPoolAsync", "hipMallocFromPoolAsync"] (*mut usize, usize, RawPool, RawStream) -> Code;
        free_in_order = ["cuMemFreeAsync", "hipFreeAsync"] (*mut c_void, RawStream) -> Code;
        allocate_device = ["cuMemAlloc_v2", "hipMalloc"] (*mut usize, usize) -> Code;
        free_device = ["cuMemFree_v2", "hipFree"] (*mut c_void) -> Code;
        allocate_host = ["cuMemHostAlloc", "hipHostMalloc"] (*mut usize, usize, c_uint) -> Code;
        free_host = ["cuMemFreeHost", "hipHostFree"] (*mut c_void) -> Code;
        fill = ["cuMemsetD8Async", "hipMemsetD8Async"] (*mut c_void, c_uchar, usize, RawStream) -> Code;
    }
}

impl Api {
    /// Returns the number of devices.
    pub(crate) fn device_count(&self) -> Answer<c_int> {
        let mut count = 0;
        // SAFETY: `count` is valid for the write of an int.
        let code = unsafe { (self.device_count)(&raw mut count) };
        self.device_count.check(code).map(|()| count)
    }

    /// Returns the version, in the vendor's numbers; `None` if the library does not say.
    pub(crate) fn version(&self) -> Option<c_int> {
        let mut version = 0;
        // SAFETY: `version` is valid for the write of an int.
        let code = unsafe { (self.version)(&raw mut version) };
        (code == 0).then_some(version)
    }
}
