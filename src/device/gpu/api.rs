//! What CUDA's driver and HIP's runtime have alike: handles, codes, and the functions that do the
//! same under two names.

use std::ffi::{c_int, c_uchar, c_uint, c_void};
use std::ops::Deref;

use super::newer_hip;
use crate::device::Process;
use crate::device::backend::{CopyOp, DevicePtr};

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
pub(super) const RELAXED: c_int = 2;
/// The capture status of a stream that is not being captured.
pub(super) const NOT_CAPTURED: c_int = 0;
/// The attribute of a pool that says how many bytes of freed memory it keeps.
pub(super) const RELEASE_THRESHOLD: c_int = 4;

/// A call that did not succeed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed {
    /// The call's name.
    pub(crate) call: &'static str,
    /// The name with that of the code for "out of memory", for
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), which has no other place for it.
    pub(crate) out_of_memory: &'static str,
    pub(crate) code: Code,
}

pub(crate) type Answer<T = ()> = std::result::Result<T, Failed>;

/// A function of a vendor's library, with its name for error messages.
#[derive(Clone, Copy)]
pub(crate) struct Call<F> {
    pub(crate) name: &'static str,
    /// See [`Failed`].
    pub(crate) out_of_memory: &'static str,
    pub(crate) function: F,
}

impl<F: Copy> Call<F> {
    /// Makes the same call of something that stands for its function.
    pub(crate) fn map<G>(&self, map: impl FnOnce(F) -> G) -> Call<G> {
        Call {
            name: self.name,
            out_of_memory: self.out_of_memory,
            function: map(self.function),
        }
    }
}

impl<F> Call<F> {
    /// Checks what the function returned: 0 is success.
    pub(crate) fn check(&self, code: Code) -> Answer {
        match code {
            0 => Ok(()),
            code => Err(Failed {
                call: self.name,
                out_of_memory: self.out_of_memory,
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
    /// The handle that stands for the calling thread's own stream, in CUDA and HIP alike.
    pub(crate) const PER_THREAD: Self = Self(std::ptr::without_provenance_mut(2));

    /// The default stream that all threads share, of whichever context is current.
    pub(crate) const LEGACY: Self = Self(std::ptr::null_mut());

    /// Whether it stands for a default stream (0 and 1: the legacy one) of whichever context is
    /// current.
    pub(crate) fn is_default(self) -> bool {
        self.0.addr() <= 2
    }

    /// Whether it stands for the default stream that all threads share.
    pub(crate) fn is_legacy(self) -> bool {
        self.0.addr() <= 1
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

/// Compares a vendor's bindings with what is assumed to be alike: the constants above, and the
/// layout of [`PoolProps`] (size, alignment, offset of the location).
pub(crate) const fn check_alike(
    [relaxed, not_captured, threshold, pinned, on_device]: [c_int; 5],
    [size, align, location]: [usize; 3],
) {
    assert!(relaxed == RELAXED && not_captured == NOT_CAPTURED && threshold == RELEASE_THRESHOLD);
    assert!(pinned == PoolProps::PINNED && on_device == PoolProps::ON_DEVICE);
    assert!(size == size_of::<PoolProps>() && align == align_of::<PoolProps>());
    assert!(location == std::mem::offset_of!(PoolProps, location_type));
}

/// `CUmemcpyAttributes`: how the copies of a list are to be made. Not all bindings have them.
#[repr(C)]
pub(crate) struct CopyAttributes {
    source_access_order: c_uint,
    source_hint: [c_int; 2],
    destination_hint: [c_int; 2],
    flags: c_uint,
}

impl CopyAttributes {
    /// Sources are read in the stream's order, not during the call.
    const IN_STREAM_ORDER: Self = Self {
        source_access_order: 1,
        source_hint: [0; 2],
        destination_hint: [0; 2],
        flags: 0,
    };
}

/// The function that runs a list of copies. Its parameters depend on the library's version, and
/// bindings have only one of them, or none: CUDA's types are those of its headers, compared by eye.
#[derive(Clone, Copy)]
pub(crate) enum CopyList {
    /// `cuMemcpyBatchAsync_v2` of CUDA 13. HIP has no such function.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Plain(
        unsafe extern "C" fn(
            *mut *mut c_void,
            *mut *mut c_void,
            *mut usize,
            usize,
            *mut CopyAttributes,
            *mut usize,
            usize,
            RawStream,
        ) -> Code,
    ),
    /// `cuMemcpyBatchAsync` of CUDA 12.8, which also says which copy it refused.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    WithIndex(
        unsafe extern "C" fn(
            *mut *mut c_void,
            *mut *mut c_void,
            *mut usize,
            usize,
            *mut CopyAttributes,
            *mut usize,
            usize,
            *mut usize,
            RawStream,
        ) -> Code,
    ),
    /// `hipMemcpyBatchAsync` of HIP 7, which takes no attributes before 7.3: 7.1 and 7.2 refuse
    /// them. Without them a copy reads its source when a single one would.
    #[cfg_attr(not(feature = "rocm"), allow(dead_code))]
    WithoutAttributes(newer_hip::CopyList<RawStream, Code>),
}

impl CopyList {
    /// Gives a stream a list of copies, whose sources are to be read in the stream's order.
    ///
    /// # Safety
    /// All memory lives until the copies are done; the stream is live, of the current context, and
    /// not the legacy default one.
    pub(super) unsafe fn call(self, copies: &[CopyOp], stream: RawStream) -> Code {
        let addresses = |of: fn(&CopyOp) -> DevicePtr| -> Vec<_> {
            copies.iter().map(|copy| of(copy).as_ptr()).collect()
        };
        let (mut dst, mut src) = (addresses(|copy| copy.dst), addresses(|copy| copy.src));
        let mut sizes: Vec<_> = copies.iter().map(|copy| copy.bytes).collect();
        // One set of attributes, from the first copy on.
        let (mut attributes, mut first) = (CopyAttributes::IN_STREAM_ORDER, 0usize);
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        let (dst, src, count) = (dst.as_mut_ptr(), src.as_mut_ptr(), sizes.len());
        let sizes = sizes.as_mut_ptr();
        let mut refused = usize::MAX;
        // SAFETY: the three lists have `count` members, there is one set of attributes, and all
        // live during the call; the caller guarantees that memory and stream are live (see
        // `# Safety`).
        unsafe {
            match self {
                Self::Plain(f) => f(dst, src, sizes, count, attributes, first, 1, stream),
                Self::WithIndex(f) => {
                    let refused = &raw mut refused;
                    f(
                        dst, src, sizes, count, attributes, first, 1, refused, stream,
                    )
                }
                Self::WithoutAttributes(f) => {
                    let (none, refused) = (std::ptr::null_mut::<usize>(), &raw mut refused);
                    f(
                        dst,
                        src,
                        sizes,
                        count,
                        none.cast(),
                        none,
                        0,
                        refused,
                        stream,
                    )
                }
            }
        }
    }
}

type OnStream = unsafe extern "C" fn(RawStream) -> Code;
type OnEvent = unsafe extern "C" fn(RawEvent) -> Code;
type Free = unsafe extern "C" fn(*mut c_void) -> Code;
type Allocate = unsafe extern "C" fn(*mut usize, usize) -> Code;
/// With flags.
type AllocateWith = unsafe extern "C" fn(*mut usize, usize, c_uint) -> Code;

/// A function that the library calls in a stream's order. It must not call the library.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// A callback, which comes with the stream and a code.
pub(crate) type StreamCallback = unsafe extern "C" fn(RawStream, Code, *mut c_void);

/// The function that makes the library call the host in a stream's order. Later work of the stream
/// waits for it.
#[derive(Clone, Copy)]
pub(crate) enum LaunchHost {
    /// `cuLaunchHostFunc`, and `hipLaunchHostFunc` of HIP 5.3 and later. After a failure nothing is
    /// called.
    Function(unsafe extern "C" fn(RawStream, Option<HostFunction>, *mut c_void) -> Code),
    /// `hipStreamAddCallback` of all versions of HIP. The callback is called after a failure too.
    #[cfg_attr(not(feature = "rocm"), allow(dead_code))]
    Callback(unsafe extern "C" fn(RawStream, Option<StreamCallback>, *mut c_void, c_uint) -> Code),
}

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
    /// Names of calls that differ, for errors before they are made.
    pub(crate) stream_of: &'static str,
    pub(crate) pointer: &'static str,
    pub(crate) copy: &'static str,

    /// The flags of events without timing.
    pub(crate) event_flags: c_uint,
    /// The flags of page-locked memory that serves all devices, and is not write-combined, since
    /// the host reads it.
    pub(crate) host_flags: c_uint,
    /// `None` for HIP, which has no device type for managed memory.
    pub(crate) allocate_managed: Option<Call<AllocateWith>>,
    /// `None` in older libraries, as is the next.
    pub(crate) copy_list: Option<Call<CopyList>>,
    pub(crate) launch_host: Option<Call<LaunchHost>>,
    pub(crate) calls: Calls,
}

impl Deref for Api {
    type Target = Calls;

    fn deref(&self) -> &Calls {
        &self.calls
    }
}

/// The functions that both libraries have, under two names:
/// [`functions`](super::library::functions) says which is which.
pub(crate) struct Calls {
    pub(crate) device_count: Call<unsafe extern "C" fn(*mut c_int) -> Code>,
    pub(crate) version: Call<unsafe extern "C" fn(*mut c_int) -> Code>,
    pub(crate) exchange_capture_mode: Call<unsafe extern "C" fn(*mut c_int) -> Code>,

    pub(crate) synchronize: Call<unsafe extern "C" fn() -> Code>,
    pub(crate) create_stream: Call<unsafe extern "C" fn(*mut RawStream, c_uint) -> Code>,
    pub(crate) destroy_stream: Call<OnStream>,
    pub(crate) synchronize_stream: Call<OnStream>,
    pub(crate) query_stream: Call<OnStream>,
    pub(crate) is_capturing: Call<unsafe extern "C" fn(RawStream, *mut c_int) -> Code>,
    pub(crate) wait: Call<unsafe extern "C" fn(RawStream, RawEvent, c_uint) -> Code>,
    pub(crate) create_event: Call<unsafe extern "C" fn(*mut RawEvent, c_uint) -> Code>,
    pub(crate) destroy_event: Call<OnEvent>,
    pub(crate) record: Call<unsafe extern "C" fn(RawEvent, RawStream) -> Code>,
    pub(crate) query: Call<OnEvent>,
    pub(crate) wait_event: Call<OnEvent>,
    pub(crate) create_pool: Call<unsafe extern "C" fn(*mut RawPool, *const PoolProps) -> Code>,
    pub(crate) destroy_pool: Call<unsafe extern "C" fn(RawPool) -> Code>,
    pub(crate) set_pool: Call<unsafe extern "C" fn(RawPool, c_int, *mut c_void) -> Code>,
    pub(crate) trim: Call<unsafe extern "C" fn(RawPool, usize) -> Code>,
    pub(crate) allocate_in_order:
        Call<unsafe extern "C" fn(*mut usize, usize, RawPool, RawStream) -> Code>,
    pub(crate) free_in_order: Call<unsafe extern "C" fn(*mut c_void, RawStream) -> Code>,
    pub(crate) allocate_device: Call<Allocate>,
    pub(crate) free_device: Call<Free>,
    pub(crate) allocate_host: Call<AllocateWith>,
    pub(crate) free_host: Call<Free>,
    pub(crate) fill: Call<unsafe extern "C" fn(*mut c_void, c_uchar, usize, RawStream) -> Code>,
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
