//! What a vendor brings: its calls, by what they do.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;

use crate::device::backend::{CopyOp, DevicePtr};

/// What a call answers: the vendor's enum as an integer, for there may be codes that no enum has.
pub(in crate::device) type Code = c_int;

/// A call that did not succeed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::device) struct Failed {
    /// The call's name.
    pub(in crate::device) call: &'static str,
    /// The same with the name and code for "out of memory": that error has no other place for them.
    pub(in crate::device) out_of_memory: &'static str,
    pub(in crate::device) code: Code,
}

impl Failed {
    /// What a call answered: 0 is success.
    pub(in crate::device) fn or_done(
        call: &'static str,
        out_of_memory: &'static str,
        code: Code,
    ) -> Answer {
        match code {
            0 => Ok(()),
            code => Err(Self {
                call,
                out_of_memory,
                code,
            }),
        }
    }
}

pub(in crate::device) type Answer<T = ()> = std::result::Result<T, Failed>;

/// What follows from a code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::device) enum Meaning {
    OutOfMemory,
    /// The call cannot be made now: during a stream capture, or in a host function.
    Passing,
    /// The context is lost, this one or another that the call named: nothing that was queued runs any
    /// more, and every later call fails.
    Lost,
    /// The runtime has shut down and taken everything back.
    ShutDown,
    /// The call has failed, and no more.
    Other,
}

/// Which memory a device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::device) enum Memory {
    Device,
    /// Page-locked host memory.
    Host,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Managed,
}

/// What a runtime must be told to copy out of other memory: a context's address, or a device's number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::device) struct Peer(pub(in crate::device) usize);

/// What kind of memory an address lies in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::device) enum PointerKind {
    /// Memory of the device of this ordinal; in which context, if it belongs to one (memory of a pool
    /// does not, and HIP has none).
    Device(c_int, Option<usize>),
    /// Page-locked host memory; whether a device reaches it under this very address.
    Host { mapped: bool },
    /// Managed memory.
    Managed,
    /// Nothing that the runtime knows: ordinary host memory, or no memory at all.
    Unknown,
}

/// A stream's handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(in crate::device) struct RawStream(pub(in crate::device) *mut c_void);

// SAFETY: a handle, which may be used on any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// The handle that stands for the calling thread's own stream, in CUDA and HIP alike.
    pub(in crate::device) const PER_THREAD: Self = Self(std::ptr::without_provenance_mut(2));

    /// The default stream that all threads share, of whichever context is current.
    pub(in crate::device) const LEGACY: Self = Self(std::ptr::null_mut());

    /// Whether it stands for a default stream (0 and 1: the legacy one) of whichever context is current.
    pub(in crate::device) fn is_default(self) -> bool {
        self.0.addr() <= 2
    }

    /// Whether it stands for the default stream that all threads share.
    pub(in crate::device) fn is_legacy(self) -> bool {
        self.0.addr() <= 1
    }
}

/// An event's handle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(in crate::device) struct RawEvent(pub(in crate::device) *mut c_void);

// SAFETY: a handle, which may be used on any thread.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

/// What was current on a thread before [`Runtime::enter`].
#[derive(Clone, Copy, Debug)]
pub(in crate::device) struct Before {
    /// The device, where the runtime has a current one instead of a stack of contexts.
    #[cfg_attr(not(feature = "rocm"), allow(dead_code))]
    pub(in crate::device) ordinal: c_int,
    pub(in crate::device) capture_mode: c_int,
    /// The thread's last error, where the runtime has such.
    #[cfg_attr(not(feature = "rocm"), allow(dead_code))]
    pub(in crate::device) last_error: Code,
}

/// What a runtime calls its calls, for errors before they are made.
#[derive(Debug)]
pub(in crate::device) struct Names {
    pub(in crate::device) vendor: &'static str,
    /// What to do about streams and memory of another context.
    pub(in crate::device) advice: &'static str,
    pub(in crate::device) synchronize: &'static str,
    pub(in crate::device) create_stream: &'static str,
    pub(in crate::device) stream_of: &'static str,
    pub(in crate::device) wait: &'static str,
    pub(in crate::device) record: &'static str,
    pub(in crate::device) query: &'static str,
    pub(in crate::device) wait_event: &'static str,
    pub(in crate::device) allocate_in_order: &'static str,
    pub(in crate::device) free_in_order: &'static str,
    pub(in crate::device) trim: &'static str,
    pub(in crate::device) allocate_device: &'static str,
    pub(in crate::device) allocate_host: &'static str,
    pub(in crate::device) allocate_managed: &'static str,
    pub(in crate::device) pointer: &'static str,
    pub(in crate::device) copy: &'static str,
    pub(in crate::device) fill: &'static str,
}

impl Names {
    /// The call that allocates memory, out of any stream's order.
    pub(in crate::device) fn allocate(&self, memory: Memory) -> &'static str {
        match memory {
            Memory::Device => self.allocate_device,
            Memory::Host => self.allocate_host,
            Memory::Managed => self.allocate_managed,
        }
    }
}

/// A function for the runtime to call in a stream's order. It must not call the runtime.
pub(in crate::device) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// One device of a vendor's runtime, in one context where there are such: the calls that differ.
///
/// Dropping it gives back the context and the pool; memory that is still being freed in the order of
/// streams stays until then.
///
/// # Safety
/// The calls do what they say here; memory that is allocated is aligned to 64 bytes and nobody else's.
/// `kind_of_byte` answers for memory that the runtime vouches for. Those in the second group are made
/// between `enter` and `leave` only: [`Current`](super::context::Current) sees to it.
pub(in crate::device) unsafe trait Runtime:
    fmt::Debug + Send + Sync + 'static
{
    fn names(&self) -> &'static Names;
    /// The device's number in the runtime.
    fn ordinal(&self) -> c_int;
    /// The runtime's name and text for a code: "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected".
    fn text(&self, code: Code) -> String;
    fn meaning(&self, code: Code) -> Meaning;
    /// Whether the host may read managed memory while the device works.
    fn reads_managed(&self) -> bool;
    /// Whether `destroy_stream` may wait for the stream's work.
    fn destroying_waits(&self) -> bool {
        false
    }
    /// Whether memory is allocated and freed in the order of streams.
    fn has_pool(&self) -> bool;
    /// Whether device memory is this device's own, and of this context if it belongs to one.
    fn owns(&self, kind: PointerKind) -> bool;
    /// The device's number of a backend of the same vendor's, by what it answers to `as_any`; `None` of another's.
    fn ordinal_of(&self, other: &dyn Any) -> Option<c_int>;
    /// What stands for a stream of a queue outside this crate: the vendor's type of queue.
    fn queue(&self, stream: RawStream) -> Box<dyn Any + Send + Sync>;
    /// Makes the device current on this thread, and allows calls that would spoil other libraries' stream
    /// captures: this crate refuses streams that are captured, and touches no others'.
    fn enter(&self) -> Answer<Before>;
    /// Makes current again what was before.
    fn leave(&self, before: Before);

    /// Waits for all work.
    fn synchronize(&self) -> Answer;

    /// A stream that does not wait for the legacy default stream.
    fn create_stream(&self) -> Answer<RawStream>;
    /// # Safety
    /// From `create_stream`, destroyed once. Work that it was given runs on, or is waited for.
    unsafe fn destroy_stream(&self, stream: RawStream);
    /// # Safety
    /// As all that take a stream: it is live, or stands for a default stream.
    unsafe fn synchronize_stream(&self, stream: RawStream) -> Answer;
    /// Whether a stream has no work.
    ///
    /// # Safety
    /// As `synchronize_stream`.
    unsafe fn is_idle(&self, stream: RawStream) -> Answer<bool>;
    /// # Safety
    /// As `synchronize_stream`.
    unsafe fn is_captured(&self, stream: RawStream) -> Answer<bool>;
    /// Why a stream that is no default stream is not one of this context; `None` if it is.
    ///
    /// # Safety
    /// As `synchronize_stream`.
    unsafe fn foreign(&self, stream: RawStream) -> Answer<Option<String>>;
    /// Makes later work of a stream wait.
    ///
    /// # Safety
    /// As `synchronize_stream`; the event is live, and may be another device's of the runtime.
    unsafe fn wait(&self, stream: RawStream, event: RawEvent) -> Answer;

    /// An event without timing.
    fn create_event(&self) -> Answer<RawEvent>;
    /// # Safety
    /// From `create_event`, destroyed once. Waits for it that were queued stay.
    unsafe fn destroy_event(&self, event: RawEvent);
    /// # Safety
    /// Event and stream are live and this context's.
    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Answer;
    /// Whether an event has completed.
    ///
    /// # Safety
    /// The event is live.
    unsafe fn query(&self, event: RawEvent) -> Answer<bool>;
    /// Waits for an event.
    ///
    /// # Safety
    /// The event is live.
    unsafe fn wait_event(&self, event: RawEvent) -> Answer;

    /// Allocates from the pool in a stream's order. There is a pool.
    ///
    /// # Safety
    /// As `synchronize_stream`.
    unsafe fn allocate_in_order(&self, bytes: usize, stream: RawStream) -> Answer<DevicePtr>;
    /// # Safety
    /// As `synchronize_stream`; `ptr` is from `allocate_in_order`, or was allocated in a stream's order by
    /// others; freed once.
    unsafe fn free_in_order(&self, ptr: DevicePtr, stream: RawStream) -> Answer;
    /// Gives idle memory of the pool back. There is a pool.
    fn trim(&self) -> Answer;

    /// Allocates memory, out of any order. Host memory serves all devices, and is not write-combined.
    fn allocate(&self, memory: Memory, bytes: usize) -> Answer<DevicePtr>;
    /// Frees memory; may wait for the device.
    ///
    /// # Safety
    /// From `allocate` with this kind, used no more, freed once.
    unsafe fn free(&self, memory: Memory, ptr: DevicePtr) -> Answer;

    /// What lies at an address, which is looked up and not followed.
    fn kind_of_byte(&self, address: usize) -> Answer<PointerKind>;
    /// What the runtime must be told to copy out of such memory; `None` if it finds it by the address.
    fn peer_of(&self, kind: PointerKind) -> Answer<Option<Peer>>;
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); `from` is what `peer_of` said of the source.
    unsafe fn copy(&self, copy: &CopyOp, from: Option<Peer>, stream: RawStream) -> Answer;
    /// Runs a list of copies in one call; `None` if the runtime has none. Sources are read in the stream's
    /// order.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); the stream is not the legacy default one.
    unsafe fn copy_list(&self, copies: &[CopyOp], stream: RawStream) -> Option<Answer>;
    /// # Safety
    /// As [`RawQueue::fill`](crate::device::RawQueue::fill).
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize, stream: RawStream) -> Answer;
    /// # Safety
    /// As `synchronize_stream`; the function may be called with `data` once, on any thread, and does not
    /// unwind.
    unsafe fn launch_host(
        &self,
        stream: RawStream,
        function: HostFunction,
        data: *mut c_void,
    ) -> Answer;
}

/// A runtime's address. The memory is the runtime's, so no Rust allocation is behind it.
pub(in crate::device) fn to_ptr(address: usize) -> DevicePtr {
    DevicePtr::new(std::ptr::with_exposed_provenance_mut::<c_void>(address))
}
