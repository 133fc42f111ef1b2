//! What a device's implementation provides: [`Backend`] and [`RawQueue`].

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::Waker;

use crate::device::DeviceId;
use crate::error::{Error, Result};

/// An address in some device's memory: what a C struct's `buffers[i]` holds.
///
/// It is opaque. Only a device's own engine reads through it; on devices whose memory the host
/// can read it is an ordinary pointer. `Debug` prints the address and never what lies there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePtr(*mut c_void);

// SAFETY: an address is a number until a device's engine follows it; following it is unsafe and
// whoever does so upholds the rules of that device's memory.
unsafe impl Send for DevicePtr {}
// SAFETY: as above.
unsafe impl Sync for DevicePtr {}

impl DevicePtr {
    /// The null address.
    pub const NULL: Self = Self(std::ptr::null_mut());

    /// Wraps an address.
    pub const fn new(ptr: *mut c_void) -> Self {
        Self(ptr)
    }

    /// The address as a pointer. On most devices the host must not follow it.
    pub const fn as_ptr(self) -> *mut c_void {
        self.0
    }

    /// The address as a number.
    pub fn address(self) -> usize {
        self.0.addr()
    }

    /// Whether this is the null address.
    pub const fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// The address `bytes` further on. The caller sees to it that it lies in the same allocation.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0.wrapping_byte_add(bytes))
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

/// An event as it stands in `ArrowDeviceArray.sync_event`: a pointer to the event object of the
/// device's type ("Synchronization event types" of the specification), never the event itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(transparent)]
pub struct EventPtr(NonNull<c_void>);

// SAFETY: an address; only a backend's event functions follow it, and those work on any thread.
unsafe impl Send for EventPtr {}
// SAFETY: as above.
unsafe impl Sync for EventPtr {}

impl EventPtr {
    /// Wraps `sync_event`; `None` if it is null, that is, if nothing needs to be waited for.
    pub fn new(sync_event: *mut c_void) -> Option<Self> {
        NonNull::new(sync_event).map(Self)
    }

    /// The pointer as it goes into `sync_event`.
    pub fn as_ptr(self) -> *mut c_void {
        self.0.as_ptr()
    }
}

/// Between which memories a copy runs.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyKind {
    /// From host memory to this device.
    HostToDevice,
    /// From this device to host memory.
    DeviceToHost,
    /// Within this device, or from a device that this one reaches ([`Backend::reaches`]).
    DeviceToDevice,
}

/// One contiguous copy of a list.
#[derive(Clone, Copy, Debug)]
pub struct CopyOp {
    /// First byte to read.
    pub src: DevicePtr,
    /// First byte to write.
    pub dst: DevicePtr,
    /// How many bytes; never 0.
    pub bytes: usize,
    /// Which memories.
    pub kind: CopyKind,
}

/// Whose memory an address lies in.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressClass {
    /// This device's own memory; `bytes` bytes from the address are known to belong to it.
    Device,
    /// Host memory that this device can read (page-locked or managed, say).
    HostAccessible,
    /// Host memory that this device cannot read, but the host can.
    Host,
    /// Memory that nobody can use as asked: another device's, freed, or too short.
    Inaccessible,
    /// The backend cannot tell.
    Unknown,
}

/// Whether [`Backend::notify_event`] took the waker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notify {
    /// The event has completed already; the waker is not called.
    Completed,
    /// The waker is called once the event completes.
    Registered,
    /// This backend cannot notify; the caller waits on a thread of its own.
    Unsupported,
}

/// A device's implementation. Programs use [`Device`](crate::Device), which wraps one of these and
/// counts what it does; crates that add a device implement this trait and register it with
/// [`Devices::register`](crate::Devices::register).
///
/// Methods may be called from any thread, with any or no context current, and do not panic. New
/// methods will always come with defaults. Safe methods are safe for all arguments: none follows a pointer, and a size
/// that cannot be served (0 bytes included) is an error.
///
/// What is called here directly, and on the queues that it returns, is not counted in
/// [`TransferStats`](crate::TransferStats), and memory and events that it returns are leaked unless the caller frees and
/// releases them. [`Queue`](crate::Queue) and [`DeviceBufferMut`](crate::DeviceBufferMut) do both.
///
/// # Safety
///
/// Safe code relies on these answers:
/// - [`host_readable`](Self::host_readable) is `true` only if the host may read all memory of this
///   device with ordinary loads, once the event that guards it has completed;
/// - [`classify`](Self::classify) answers `Device` or `HostAccessible` only for memory that this
///   device may read for the whole length asked about;
/// - a completed event ([`query_event`](Self::query_event), [`wait_event`](Self::wait_event)) means
///   that all work queued before it was recorded has finished and is visible to the host;
/// - `classify` answers `Host` only for memory that the host may read, if the address is one that
///   may be read at all: a driver cannot tell ordinary memory from no memory;
/// - after [`settle`](Self::settle), whatever it answers, nothing that was queued before runs any more;
/// - [`allocate_host`](Self::allocate_host) gives memory that the host may read and write; of a
///   host-readable device, [`RawQueue::allocate`] gives initialised memory.
pub unsafe trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Device type and id, as they stand in `ArrowDeviceArray`.
    fn id(&self) -> DeviceId;

    /// Whether the host may read this device's memory with ordinary loads.
    fn host_readable(&self) -> bool;

    /// Whether all work has completed when the call that asked for it returns. Such a device has no
    /// events: none is recorded, queried or waited for.
    fn is_synchronous(&self) -> bool {
        false
    }

    /// The queue on which work runs when no other is named. Always the same one.
    fn default_queue(&self) -> Result<Arc<dyn RawQueue>>;

    /// A further queue.
    fn new_queue(&self) -> Result<Arc<dyn RawQueue>>;

    /// Returns an error for an event pointer that cannot be one of this device's. Backends that cannot tell
    /// accept it.
    ///
    /// # Safety
    /// If `event` is aligned for the event type of this device's type (a `cudaEvent_t` or `hipEvent_t`, for example), it
    /// points to as many bytes as that type has, which may be read: the backend may look at them. Whether they are a live
    /// event is not presupposed.
    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        let _ = event;
        Ok(())
    }

    /// Whether the event has completed. Never waits.
    ///
    /// # Safety
    /// `event` points to a live event of this device's type.
    unsafe fn query_event(&self, event: EventPtr) -> Result<bool>;

    /// Makes the calling thread wait until the event has completed.
    ///
    /// # Safety
    /// As [`query_event`](Self::query_event).
    unsafe fn wait_event(&self, event: EventPtr) -> Result<()>;

    /// Calls `waker` once the event has completed, or never will (the device failed), on any thread. If the backend drops all
    /// clones of it without a call, this crate's own waiting falls back to [`query_event`](Self::query_event).
    ///
    /// # Safety
    /// As [`query_event`](Self::query_event); the event lives until the waker was called, or all its clones were dropped.
    unsafe fn notify_event(&self, event: EventPtr, waker: &Waker) -> Result<Notify> {
        let _ = (event, waker);
        Ok(Notify::Unsupported)
    }

    /// Takes back an event that [`RawQueue::record`] gave out, for reuse. Never waits.
    ///
    /// # Safety
    /// `event` came from `record` of a queue of this device and is not used again.
    unsafe fn release_event(&self, event: EventPtr);

    /// Whose memory `bytes` bytes at `address` are.
    fn classify(&self, address: DevicePtr, bytes: usize) -> AddressClass {
        let _ = (address, bytes);
        AddressClass::Unknown
    }

    /// Why `classify` does not vouch for `bytes` bytes at `address`, if there is more to say, and what to
    /// do about it; for errors.
    fn explain(&self, address: DevicePtr, bytes: usize) -> Option<String> {
        let _ = (address, bytes);
        None
    }

    /// Returns host memory of `bytes` bytes from which this device copies fastest (page-locked), 64-byte aligned;
    /// `Ok(None)` if ordinary memory serves. 0 bytes are an error, or `None`.
    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        let _ = bytes;
        Ok(None)
    }

    /// Gives back memory of [`allocate_host`](Self::allocate_host). Must not wait for the device.
    ///
    /// # Safety
    /// `address` and `bytes` are those of one `allocate_host`, and no copy uses the memory any more.
    unsafe fn free_host(&self, address: DevicePtr, bytes: usize) {
        let _ = (address, bytes);
    }

    /// Whether the device may copy straight from this host memory, without the call reading it
    /// synchronously or going through staging.
    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        let _ = (address, bytes);
        false
    }

    /// Whether this device can copy straight out of `other`'s memory.
    fn reaches(&self, other: &dyn Backend) -> bool {
        let _ = other;
        false
    }

    /// Whether this device's queues can wait for `other`'s events. If not, a host thread does.
    fn accepts_events_of(&self, other: &dyn Backend) -> bool {
        let _ = other;
        false
    }

    /// Makes later work of a stream that need not be this crate's wait for `event`, without waiting
    /// itself. `stream` is the runtime's handle as a number. `Ok(false)`: this backend knows no streams by
    /// handles, and nothing was done.
    ///
    /// # Safety
    /// `stream` is a handle of the device's runtime: of a live stream, or one that stands for a default
    /// stream. `event` points to a live event of this device's type.
    unsafe fn stream_wait(&self, stream: usize, event: EventPtr) -> Result<bool> {
        let _ = (stream, event);
        Ok(false)
    }

    /// Gives back memory that is kept for reuse.
    fn trim(&self) {}

    /// Makes the calling thread wait for all work of this device.
    fn synchronize(&self) -> Result<()>;

    /// As [`synchronize`](Self::synchronize), as long as it takes: an error means that the device has
    /// failed, and nothing that was queued before runs any more. For threads that hold up nobody, and after
    /// errors.
    fn settle(&self) -> Result<()> {
        self.synchronize()
    }

    /// For downcasts to the backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// An ordered queue of device work (a CUDA or HIP stream): what it is given runs in order, later. As for [`Backend`],
/// safe methods are safe for all arguments, and what is called here directly is neither counted nor given back by itself.
///
/// # Safety
///
/// - [`allocate`](Self::allocate) gives memory of at least `bytes` bytes, aligned to 64 bytes, that
///   nothing else uses, valid for work on this queue at once and elsewhere after an event;
/// - work runs in the order in which it was given, and after the events of earlier
///   [`wait`](Self::wait) calls;
/// - an event of [`record`](Self::record) completes when all earlier work has, and not before: the events of a queue complete
///   in the order in which they were recorded.
pub unsafe trait RawQueue: fmt::Debug + Send + Sync + 'static {
    /// Allocates `bytes` bytes of device memory in queue order. 0 bytes are an error.
    fn allocate(&self, bytes: usize) -> Result<DevicePtr>;

    /// Frees after all work that this queue was given before. Never waits. After an error the memory
    /// is lost, not the caller's again.
    ///
    /// # Safety
    /// `base` and `bytes` are those of one `allocate` of this device, freed once; work on other
    /// queues that uses it was waited for on this one.
    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()>;

    /// Runs a list of copies that do not overlap, in any order among themselves. Either all are
    /// queued or, on an error, none is under way.
    ///
    /// # Safety
    /// All memory is valid for its length and lives, unchanged, until the copies have completed.
    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()>;

    /// Sets `bytes` bytes of device memory.
    ///
    /// # Safety
    /// As [`copy`](Self::copy).
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()>;

    /// Whether all that is given to the queue's handle, by anybody on any thread, runs in one order. A
    /// per-thread stream's does not: there, only work given through this queue does.
    fn is_one_stream(&self) -> bool {
        true
    }

    /// Records an event after all work so far. The pointer is stable until
    /// [`Backend::release_event`].
    fn record(&self) -> Result<EventPtr>;

    /// Makes later work of this queue wait for `event`. The event may be released afterwards: the
    /// wait stays.
    ///
    /// # Safety
    /// `event` points to a live event of this device's type.
    unsafe fn wait(&self, event: EventPtr) -> Result<()>;

    /// The runtime's handle of the queue's stream as a number, if there is one.
    fn stream_handle(&self) -> Option<usize> {
        None
    }

    /// For downcasts to the backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// [`Error::Device`] for backends.
pub fn device_error(
    device: DeviceId,
    operation: &'static str,
    code: i32,
    message: impl Into<std::borrow::Cow<'static, str>>,
) -> Error {
    Error::Device {
        device,
        operation,
        code,
        message: message.into(),
    }
}

/// Events are followed by unsafe code only.
///
/// ```compile_fail,E0133
/// use arrow_device::device::{Backend, EventPtr};
/// fn check(device: &dyn Backend, event: EventPtr) -> bool {
///     device.check_event(event).is_ok()
/// }
/// ```
#[cfg(doctest)]
struct UnsafeEvents;
