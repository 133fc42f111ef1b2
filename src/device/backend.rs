//! What the implementation of a device provides: [`Backend`] and [`RawQueue`].

use std::any::{Any, TypeId};
use std::borrow::Cow;
use std::ffi::c_void;
use std::fmt;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::device::DeviceId;
use crate::error::{Error, Result};

/// An address in the memory of a device, such as `buffers[i]` of a C struct.
///
/// On devices whose memory the host can read, it is an ordinary pointer; elsewhere only the device
/// can read through it. `Debug` prints the address and never reads the memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct DevicePtr(*mut c_void);

// SAFETY: the type only holds an address. Reading through it is unsafe, and whoever does so upholds
// the rules of the memory.
unsafe impl Send for DevicePtr {}
// SAFETY: a shared reference only reads the address.
unsafe impl Sync for DevicePtr {}

impl DevicePtr {
    /// The null address.
    pub const NULL: Self = Self(std::ptr::null_mut());

    /// Wraps an address.
    pub const fn new(ptr: *mut c_void) -> Self {
        Self(ptr)
    }

    /// Returns the address as a pointer. On most devices the host must not dereference it.
    pub const fn as_ptr(self) -> *mut c_void {
        self.0
    }

    /// Returns the address as a number.
    pub fn address(self) -> usize {
        self.0.addr()
    }

    /// Returns whether this is the null address.
    pub const fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Returns the address `bytes` bytes further on, which should lie in the same allocation.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0.wrapping_byte_add(bytes))
    }

    /// Returns the addresses of `bytes` bytes from here on, up to the end of the address space.
    pub fn range(self, bytes: usize) -> Range<usize> {
        self.address()..self.address().saturating_add(bytes)
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

/// The value of `ArrowDeviceArray.sync_event`: a pointer to an event object of the device's type
/// ("Synchronization event types" of the specification), never the event itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(transparent)]
pub struct EventPtr(NonNull<c_void>);

// SAFETY: the type only holds an address. The functions of a backend that read through it are
// unsafe and work on any thread.
unsafe impl Send for EventPtr {}
// SAFETY: a shared reference only reads the address.
unsafe impl Sync for EventPtr {}

impl EventPtr {
    /// Wraps `sync_event`. Returns `None` if it is null: there is nothing to wait for.
    pub fn new(sync_event: *mut c_void) -> Option<Self> {
        NonNull::new(sync_event).map(Self)
    }

    /// Returns the pointer, for `sync_event`.
    pub fn as_ptr(self) -> *mut c_void {
        self.0.as_ptr()
    }
}

/// The direction of a copy.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyKind {
    /// From host memory to this device.
    HostToDevice,
    /// From this device to host memory.
    DeviceToHost,
    /// Within this device, or from a device that this one reaches ([`Relation::copies`]).
    DeviceToDevice,
}

/// How a program allocates the memory of a device: see [`Device::with_memory`](crate::Device::with_memory).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    pub(crate) allocate: fn(DeviceId, usize) -> Result<DevicePtr>,
    pub(crate) free: fn(DevicePtr),
}

/// One contiguous copy.
#[derive(Clone, Copy, Debug)]
pub struct CopyOp {
    /// The first byte to read.
    pub src: DevicePtr,
    /// The first byte to write.
    pub dst: DevicePtr,
    /// The number of bytes; never 0.
    pub bytes: usize,
    /// The direction.
    pub kind: CopyKind,
}

impl CopyOp {
    pub(crate) fn new(kind: CopyKind, src: DevicePtr, dst: DevicePtr, bytes: usize) -> Self {
        Self {
            src,
            dst,
            bytes,
            kind,
        }
    }
}

/// Whose memory an address lies in.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AddressClass {
    /// Memory of this device, for the whole length that was asked about.
    Device,
    /// Host memory that this device can read (page-locked or managed memory, for example).
    HostAccessible,
    /// Host memory that the host can read, but this device cannot.
    Host,
    /// Memory that cannot be used: another device's, freed, or too short.
    Inaccessible,
    /// The backend cannot tell.
    Unknown,
}

/// The answer of [`Backend::classify`]: what a backend knows of an address.
#[non_exhaustive]
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PointerInfo {
    /// Whose memory it is.
    pub class: AddressClass,
    /// The addresses around the bytes, and including them, that are known to be of that class: those of the whole allocation if
    /// the backend can tell. An import does not ask again about the next buffer in it.
    pub range: Range<usize>,
    /// Text for an error message: why memory of this class is not accepted, and what to do about it.
    pub reason: Option<Cow<'static, str>>,
}

impl PointerInfo {
    /// Makes the answer for addresses of this class, without a reason.
    pub fn new(class: AddressClass, range: Range<usize>) -> Self {
        Self {
            class,
            range,
            reason: None,
        }
    }

    /// Adds why memory of this class is not accepted, which ends an error message.
    #[must_use]
    pub fn with_reason(mut self, reason: impl Into<Cow<'static, str>>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// Whether the device may read the memory, or the backend cannot tell. The error is the end of a message.
    pub(crate) fn check(&self) -> Result<(), String> {
        match self.class {
            AddressClass::Device | AddressClass::HostAccessible | AddressClass::Unknown => Ok(()),
            AddressClass::Host | AddressClass::Inaccessible => {
                let reason = self.reason.as_ref();
                Err(reason.map_or_else(String::new, |why| format!(": {why}")))
            }
        }
    }
}

/// What an export of a device's memory carries in `sync_event`, and so when its consumer may use the memory.
///
/// [`SyncPolicy::Wait`](crate::SyncPolicy::Wait) makes every export wait, whatever the device says.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ExportSync {
    /// An event of the device's type, unless the memory is ready: the consumer waits for it.
    #[default]
    Event,
    /// Null, without a wait: all work of the device, of every program that can reach its memory, runs in one order, as on
    /// the one queue of a WebGPU device; what was recorded has been submitted. The device's default queue waits for work of
    /// other devices that the memory depends on. If the host can read the memory of the device, an export waits, as with
    /// [`Wait`](Self::Wait), because the host would not keep to that order.
    QueueOrder,
    /// Null: the export waits until the memory is ready, because the specification has no event type for the device, or
    /// consumers cannot wait for its events.
    Wait,
    /// Nothing: arrays of this device cannot be exported, for example because its addresses stand for handles that no other
    /// library knows. The text says why, and what to do instead.
    Refused(&'static str),
}

/// What is always true of a device, whatever happens to it.
#[non_exhaustive]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capabilities {
    /// The device type and id, as in `ArrowDeviceArray`.
    pub id: DeviceId,
    /// Whether the host may read all of the device's memory with ordinary loads, once the event that guards it has completed.
    pub host_readable: bool,
    /// Whether work has completed when the call that queues it returns. Such a device has no events: none is recorded, queried or
    /// waited for.
    pub synchronous: bool,
    /// What exports of the device's memory carry in `sync_event`.
    pub exports: ExportSync,
    /// Whether [`RawQueue::copy`] has read all host memory that it copies from when it returns, without an error: by staging it
    /// itself. An upload then gives its source and its staging memory back at once, and not after an event. Unlike
    /// [`Backend::copies_directly_from`], which only saves a copy where it is right, this is a promise: where it is wrong, devices
    /// read memory that was freed.
    pub copies_read_host_at_once: bool,
}

impl Capabilities {
    /// Makes those of an asynchronous device that the host cannot read, which exports with events and of whose queues nothing is
    /// known: change the fields that differ.
    pub fn new(id: DeviceId) -> Self {
        Self {
            id,
            host_readable: false,
            synchronous: false,
            exports: ExportSync::Event,
            copies_read_host_at_once: false,
        }
    }
}

/// The answer of [`Backend::relation`]: what one device can do with another one's memory and events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Relation {
    /// Whether it copies directly from the other one's memory.
    pub copies: bool,
    /// Whether its queues wait for events of the other one. If not, a host thread waits.
    pub waits: bool,
}

impl dyn Backend {
    /// Returns the backend as its own type, if it is of that type.
    pub fn downcast_ref<T: Backend>(&self) -> Option<&T> {
        // SAFETY: the value is a `T`, as its type's id says.
        (self.type_id() == TypeId::of::<T>()).then(|| unsafe { &*ptr::from_ref(self).cast() })
    }
}

impl dyn RawQueue {
    /// Returns the queue as the backend's own type, if it is of that type.
    pub fn downcast_ref<T: RawQueue>(&self) -> Option<&T> {
        // SAFETY: the value is a `T`, as its type's id says.
        (self.type_id() == TypeId::of::<T>()).then(|| unsafe { &*ptr::from_ref(self).cast() })
    }
}

/// The implementation of a device. Programs use [`Device`](crate::Device), which wraps a backend
/// and counts what it does; crates that add a device implement this trait and register it with
/// [`Devices::register`](crate::Devices::register).
///
/// Methods may be called from any thread, with any or no context current, and do not panic. New
/// methods will always have defaults. Safe methods accept all arguments: none reads through a
/// pointer, and a size that is not available (0 bytes included) is an error.
///
/// Rules that no signature shows, each checked by the suite in the crate `arrow-device-conformance`:
/// - **Flush.** Recorded work makes progress even if nobody ever waits for it or asks about it. A backend whose runtime
///   batches work hands it over in [`RawQueue::record`] at the latest.
/// - **Dropped queues count.** The work of a queue whose last handle was dropped still runs, and
///   [`synchronize`](Self::synchronize) waits for it.
/// - **Host-readable memory is initialised**, also when it is reused: safe code may read it before any work has written to it.
///
/// Direct calls of a backend and its queues are not counted in
/// [`TransferStats`](crate::TransferStats), and the memory and events that they return leak unless
/// the caller frees and releases them. [`Queue`](crate::Queue) and
/// [`DeviceBufferMut`](crate::DeviceBufferMut) do both.
///
/// # Safety
///
/// Safe code relies on the following:
/// - [`capabilities`](Self::capabilities) keep what they promise, and are the same at each call.
/// - [`classify`](Self::classify) returns `Device` or `HostAccessible` only for memory that this
///   device may read for the whole length that was asked about, and for all bytes of the range that it returns. It returns `Host`
///   only for memory that the host may read, or for addresses where there is no memory at all, which a driver
///   cannot tell from ordinary memory.
/// - A completed event ([`query_event`](Self::query_event), [`wait_event`](Self::wait_event)) means
///   that all work queued before it was recorded has finished and is visible to the host.
/// - After [`synchronize`](Self::synchronize) has succeeded, or failed while [`is_over`](Self::is_over) is `true`, no work that was queued
///   before it runs any more.
/// - [`allocate_host`](Self::allocate_host) returns memory that the host may read and write. If the
///   device is host-readable, [`RawQueue::allocate`] returns initialised memory; if it is of type CPU, the host may write it too.
#[allow(unused_variables)] // of defaults
pub unsafe trait Backend: Any + fmt::Debug + Send + Sync {
    /// Returns what is always true of the device.
    fn capabilities(&self) -> Capabilities;

    /// Returns the queue that is used when no other is named: the same one at each call.
    fn default_queue(&self) -> Result<Arc<dyn RawQueue>>;

    /// Creates a queue.
    fn new_queue(&self) -> Result<Arc<dyn RawQueue>>;

    /// Makes the calling thread wait for all work of this device.
    fn synchronize(&self) -> Result<()>;

    /// Returns whether nothing of the device runs any more, after [`synchronize`](Self::synchronize) has returned an error. If it is
    /// `false`, that is called again, on a thread that blocks nobody.
    fn is_over(&self) -> bool {
        true
    }

    /// Returns an error for an event pointer that cannot be an event of this device. Backends that
    /// cannot tell accept it.
    ///
    /// # Safety
    /// If `event` is aligned for the event type of this device (a `cudaEvent_t` or `hipEvent_t`,
    /// for example), it points to as many readable bytes as that type has, because the backend may
    /// read them. They need not be a live event.
    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        match self.capabilities() {
            device if device.synchronous => Err(no_events(device.id)),
            _ => Ok(()),
        }
    }

    /// Returns whether the event has completed. Never waits. A thread of the device asks at any time, and again and again.
    ///
    /// # Safety
    /// `event` points to a live event of this device's type.
    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        Err(no_events(self.capabilities().id))
    }

    /// Makes the calling thread wait until the event has completed.
    ///
    /// # Safety
    /// As [`query_event`](Self::query_event).
    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        Err(no_events(self.capabilities().id))
    }

    /// Releases an event that [`RawQueue::record`] returned, which may be reused. Never waits.
    ///
    /// # Safety
    /// `event` came from `record` of a queue of this device and is not used again.
    unsafe fn release_event(&self, event: EventPtr) {}

    /// Returns whose memory `bytes` bytes at `address` are.
    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        PointerInfo::new(AddressClass::Unknown, 0..usize::MAX)
    }

    /// Allocates `bytes` bytes of the host memory from which this device copies fastest
    /// (page-locked memory), aligned to 64 bytes. Returns `Ok(None)` if ordinary memory is as good.
    /// 0 bytes are an error, or `None`.
    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        Ok(None)
    }

    /// Frees memory of [`allocate_host`](Self::allocate_host). Must not wait for the device.
    ///
    /// # Safety
    /// `address` and `bytes` are those of one call of `allocate_host`, and no copy uses the memory
    /// any more.
    unsafe fn free_host(&self, address: DevicePtr, bytes: usize) {}

    /// Returns whether a copy from this host memory needs no staging by this crate: the device copies directly from it, so
    /// that the call that queues the copy neither reads the memory nor stages it, or the call has read all of it before it
    /// returns, at the speed of a `memcpy`. The answer for a null address is `false`.
    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        false
    }

    /// Returns what this device can do with memory and events of `other`, another device.
    fn relation(&self, other: &dyn Backend) -> Relation {
        Relation::default()
    }

    /// Makes a queue of a stream of the device's runtime, by its handle as a number.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if streams of this device have no handles, and [`Error::InvalidArgument`] for a stream that cannot
    /// be a queue of this device.
    ///
    /// # Safety
    /// The handle is that of a live stream of the device's runtime, or stands for a default stream, as long as the queue lives.
    unsafe fn adopt_queue(&self, handle: usize) -> Result<Arc<dyn RawQueue>> {
        Err(no_handles(self.capabilities().id))
    }

    /// Frees memory that is kept for reuse. May wait for the device's work.
    fn trim(&self) {}
}

fn no_events(device: DeviceId) -> Error {
    let reason = "work of this device is done when a call returns, so that it has no events";
    not_supported(device, "event", reason)
}

pub(crate) fn no_handles(device: DeviceId) -> Error {
    let reason = "streams of this device have no handles";
    not_supported(device, "adopt a queue", reason)
}

/// An ordered, asynchronous queue of device work, such as a CUDA or HIP stream. As for [`Backend`],
/// safe methods accept all arguments, and direct calls are neither counted nor undone
/// automatically.
///
/// # Safety
///
/// Safe code relies on the following:
/// - [`allocate`](Self::allocate) returns at least `bytes` bytes, aligned to 64 bytes, that nothing
///   else uses, valid for work on this queue at once and elsewhere after an event.
/// - Work runs in the order in which it was queued, and after the events of earlier
///   [`wait`](Self::wait) calls.
/// - An event of [`record`](Self::record) completes when all earlier work has, and not before: the
///   events of a queue complete in the order in which they were recorded.
///
/// # Dropping a queue
///
/// Its work still runs (see [`Backend`]), and the drop does not wait for it. A backend whose runtime waits where it destroys a
/// queue destroys it once it is idle, as this crate does for CUDA and HIP, or on a thread of its own. How long a runtime takes to
/// destroy an idle queue is up to the runtime.
pub unsafe trait RawQueue: Any + fmt::Debug + Send + Sync {
    /// Allocates `bytes` bytes of device memory in the order of the queue. 0 bytes are an error.
    fn allocate(&self, bytes: usize) -> Result<DevicePtr>;

    /// Frees memory after all work that was queued before. Never waits. After an error the memory
    /// is lost: the caller does not own it again.
    ///
    /// # Safety
    /// `base` and `bytes` are those of one call of `allocate` on this device, and are freed once.
    /// This queue waits for work on other queues that uses the memory.
    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()>;

    /// Queues copies, which run in any order among themselves. If this returns an error, none of
    /// them runs any more, but destinations may have been written.
    ///
    /// # Safety
    /// All memory is valid for its length and lives, unchanged, until the copies have completed. No
    /// destination overlaps another range of the list. Host memory may be read during this call: work
    /// that writes to it has completed.
    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()>;

    /// Queues setting `bytes` bytes of device memory to `byte`.
    ///
    /// # Safety
    /// As [`copy`](Self::copy).
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()>;

    /// Records an event after all work so far. The pointer is valid until
    /// [`Backend::release_event`]. A [synchronous](Capabilities::synchronous) device records none.
    fn record(&self) -> Result<EventPtr> {
        Err(Error::argument("a queue of this device records no events"))
    }

    /// Makes later work of this queue wait for `event`, which may be released after this call. Returns `false`, and does nothing, if the
    /// queue cannot wait for this event: a host thread does then.
    ///
    /// # Safety
    /// `event` points to a live event of this device's type.
    unsafe fn wait(&self, event: EventPtr) -> Result<bool> {
        let _ = event;
        Err(Error::argument(
            "a queue of this device waits for no events",
        ))
    }

    /// Returns the runtime's handle of the queue's stream as a number, if there is one.
    fn stream_handle(&self) -> Option<usize> {
        None
    }
}

/// Creates an [`Error::Device`], for backends.
pub fn device_error(
    device: DeviceId,
    operation: &'static str,
    code: i32,
    message: impl Into<Cow<'static, str>>,
) -> Error {
    Error::Device {
        device,
        operation,
        code,
        message: message.into(),
    }
}

/// Returns [`Error::NotSupported`].
pub(crate) fn not_supported(
    device: DeviceId,
    operation: &'static str,
    reason: impl Into<Cow<'static, str>>,
) -> Error {
    Error::NotSupported {
        device,
        operation,
        reason: reason.into(),
    }
}

/// Returns [`Error::OutOfMemory`].
pub(crate) fn out_of_memory(device: DeviceId, operation: &'static str, bytes: usize) -> Error {
    Error::OutOfMemory {
        device,
        operation,
        bytes,
    }
}

/// Returns [`Error::DeviceNotAvailable`].
pub(crate) fn absent(device: DeviceId, reason: impl Into<Cow<'static, str>>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into(),
    }
}
