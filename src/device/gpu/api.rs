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
}

/// Makes the answer of a query: whether work has completed.
pub(super) fn is_done(answer: Answer) -> Answer<bool> {
    match answer {
        Err(failed) if failed.code == code::NOT_READY => Ok(false),
        answer => answer.map(|()| true),
    }
}

/// A stream's handle, as a number: it is not followed here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct RawStream(pub(in crate::device) usize);

impl RawStream {
    /// The default stream that all threads share, of whichever context is current.
    pub(crate) const LEGACY: Self = Self(0);

    /// Whether it stands for a default stream (0 and 1: the legacy one, 2: the calling thread's) of
    /// whichever context is current.
    pub(crate) fn is_default(self) -> bool {
        self.0 <= 2
    }

    /// Whether it stands for the calling thread's own stream, in CUDA and HIP alike.
    pub(crate) fn is_per_thread(self) -> bool {
        self.0 == 2
    }
}

/// An event's handle, as a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct RawEvent(pub(in crate::device) usize);

/// A memory pool's handle, as a number.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct RawPool(pub(in crate::device) usize);

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

/// Finds a function by its symbol; an error is the symbol.
///
/// # Safety
/// `F` is the type of the library's function of that name, and the library stays loaded for as long
/// as it is called.
pub(crate) unsafe fn find_call<F: Copy>(
    library: &libloading::Library,
    symbol: &'static str,
) -> Result<Call<F>, &'static str> {
    // SAFETY: the caller guarantees that `F` is the function's type (see `# Safety`).
    match unsafe { library.get::<F>(symbol.as_bytes()) } {
        Ok(function) => Ok(Call {
            name: symbol,
            function: *function,
        }),
        Err(_) => Err(symbol),
    }
}

/// Declares a table of functions, and a method for each of them that makes the call: with its
/// symbols, one for each vendor that the table is of, and its arguments in the vendors' headers, with
/// handles as this module has them and enums as integers.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        $vis:vis struct $functions:ident {
            $($name:ident = [$($symbol:literal),+] ($($arg:ident: $type:ty),*);)*
        }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        $vis struct $functions {
            $($vis $name: $crate::device::gpu::Call<unsafe extern "C" fn($($type),*) -> Code>,)*
        }

        #[allow(non_snake_case, dead_code, clippy::too_many_arguments)]
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

            $(
                /// Makes the call.
                ///
                /// # Safety
                /// The arguments are what the vendor's documentation of the function asks for: live
                /// handles and memory, and pointers that are valid for what is written.
                $vis unsafe fn $name(&self, $($arg: $type),*) -> $crate::device::gpu::Answer {
                    // SAFETY: the caller guarantees what the function asks for (see `# Safety`).
                    self.$name.check(unsafe { (self.$name.function)($($arg),*) })
                }
            )*
        }
    };
}
pub(crate) use functions;

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
        count_devices = ["cuDeviceGetCount", "hipGetDeviceCount"] (count: *mut c_int);
        get_version = ["cuDriverGetVersion", "hipRuntimeGetVersion"] (version: *mut c_int);
        exchange_capture_mode = ["cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"] (mode: *mut c_int);
        synchronize = ["cuCtxSynchronize", "hipDeviceSynchronize"] ();
        create_stream = ["cuStreamCreate", "hipStreamCreateWithFlags"] (stream: *mut RawStream, flags: c_uint);
        destroy_stream = ["cuStreamDestroy_v2", "hipStreamDestroy"] (stream: RawStream);
        synchronize_stream = ["cuStreamSynchronize", "hipStreamSynchronize"] (stream: RawStream);
        query_stream = ["cuStreamQuery", "hipStreamQuery"] (stream: RawStream);
        is_capturing = ["cuStreamIsCapturing", "hipStreamIsCapturing"] (stream: RawStream, status: *mut c_int);
        wait = ["cuStreamWaitEvent", "hipStreamWaitEvent"] (stream: RawStream, event: RawEvent, flags: c_uint);
        create_event = ["cuEventCreate", "hipEventCreateWithFlags"] (event: *mut RawEvent, flags: c_uint);
        destroy_event = ["cuEventDestroy_v2", "hipEventDestroy"] (event: RawEvent);
        record = ["cuEventRecord", "hipEventRecord"] (event: RawEvent, stream: RawStream);
        query_event = ["cuEventQuery", "hipEventQuery"] (event: RawEvent);
        wait_event = ["cuEventSynchronize", "hipEventSynchronize"] (event: RawEvent);
        create_pool = ["cuMemPoolCreate", "hipMemPoolCreate"] (pool: *mut RawPool, props: *const PoolProps);
        destroy_pool = ["cuMemPoolDestroy", "hipMemPoolDestroy"] (pool: RawPool);
        set_pool = ["cuMemPoolSetAttribute", "hipMemPoolSetAttribute"] (pool: RawPool, attribute: c_int, value: *mut c_void);
        trim = ["cuMemPoolTrimTo", "hipMemPoolTrimTo"] (pool: RawPool, bytes_to_keep: usize);
        allocate_in_order = ["cuMemAllocFromPoolAsync", "hipMallocFromPoolAsync"]
            (address: *mut usize, bytes: usize, pool: RawPool, stream: RawStream);
        free_in_order = ["cuMemFreeAsync", "hipFreeAsync"] (ptr: *mut c_void, stream: RawStream);
        allocate_device = ["cuMemAlloc_v2", "hipMalloc"] (address: *mut usize, bytes: usize);
        free_device = ["cuMemFree_v2", "hipFree"] (ptr: *mut c_void);
        allocate_host = ["cuMemHostAlloc", "hipHostMalloc"] (address: *mut usize, bytes: usize, flags: c_uint);
        free_host = ["cuMemFreeHost", "hipHostFree"] (ptr: *mut c_void);
        allocate_managed = ["cuMemAllocManaged", "hipMallocManaged"] (address: *mut usize, bytes: usize, flags: c_uint);
        fill = ["cuMemsetD8Async", "hipMemsetD8Async"] (dst: *mut c_void, byte: c_uchar, count: usize, stream: RawStream);
    }
}

impl Api {
    /// Returns the number of devices.
    pub(crate) fn device_count(&self) -> Answer<c_int> {
        let mut count = 0;
        // SAFETY: `count` is valid for the write of an int.
        unsafe { self.count_devices(&raw mut count) }?;
        Ok(count)
    }

    /// Returns the version, in the vendor's numbers; `None` if the library does not say.
    pub(crate) fn version(&self) -> Option<c_int> {
        let mut version = 0;
        // SAFETY: `version` is valid for the write of an int.
        let answer = unsafe { self.get_version(&raw mut version) };
        answer.is_ok().then_some(version)
    }
}
