//! What CUDA's driver and HIP's runtime have alike: handles, codes, and the functions that do the
//! same under two names.

use std::ffi::{c_int, c_uchar, c_uint, c_void};

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

impl<F: Copy> Call<F> {
    /// Finds a function by its symbol; an error is the symbol.
    ///
    /// # Safety
    /// `F` is the type of the library's function of that name, and the library stays loaded for as
    /// long as it is called.
    pub(crate) unsafe fn find(
        library: &libloading::Library,
        name: &'static str,
    ) -> Result<Self, &'static str> {
        // SAFETY: the caller guarantees that `F` is the function's type (see `# Safety`).
        let function = unsafe { library.get::<F>(name.as_bytes()) };
        let function = *function.map_err(|_| name)?;
        Ok(Self { name, function })
    }

    /// Checks what the function returned: 0 is success.
    pub(crate) fn check(&self, code: Code) -> Answer {
        let call = self.name;
        (code == 0).then_some(()).ok_or(Failed { call, code })
    }
}

/// A stream's handle, as a number: it is not followed here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct RawStream(pub(crate) usize);

impl RawStream {
    /// The default stream that all threads share, of whichever context is current.
    pub(crate) const LEGACY: Self = Self(0);
    /// The calling thread's own default stream, in CUDA and HIP alike.
    pub(super) const PER_THREAD: Self = Self(2);

    /// Whether it stands for a default stream (0 and 1: the legacy one, 2: the calling thread's) of
    /// whichever context is current.
    pub(crate) fn is_default(self) -> bool {
        self.0 <= 2
    }
}

/// An event's handle, as a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct RawEvent(pub(crate) usize);

/// A memory pool's handle, as a number.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct RawPool(pub(crate) usize);

/// `CUmemPoolProps` and `hipMemPoolProps`: the type of allocations, of handles and of the location,
/// the location's number, and later members that depend on the version.
#[repr(C)]
pub(crate) struct PoolProps(pub(crate) [c_int; 4], pub(crate) [usize; 9]);

impl PoolProps {
    /// A pool of a device's own memory, which is pinned and has no handles.
    pub(crate) fn of_device(ordinal: c_int) -> Self {
        Self([1, 0, 1, ordinal], [0; 9])
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
        $vis struct $functions {
            $($vis $name: $crate::device::gpu::Call<unsafe extern "C" fn($($type),*) -> Code>,)*
        }

        #[allow(dead_code, clippy::too_many_arguments)]
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
                        $crate::device::gpu::Call::find(library, [$($symbol),+][vendor])
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

functions! {
    /// The functions that both libraries have. All but the first three work in the current context.
    pub(crate) struct Calls {
        count_devices = ["cuDeviceGetCount", "hipGetDeviceCount"] (count: *mut c_int);
        device_attribute = ["cuDeviceGetAttribute", "hipDeviceGetAttribute"] (value: *mut c_int, attribute: c_int, device: c_int);
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

impl Calls {
    /// The numbers of the vendors' symbols in the table.
    #[cfg(feature = "cuda")]
    pub(crate) const CUDA: usize = 0;
    #[cfg(feature = "rocm")]
    pub(crate) const HIP: usize = 1;
}
