//! What a vendor provides.

use std::ffi::{c_int, c_uint};
use std::fmt;
use std::ops::Range;

use super::api::{Answer, Calls, Code, RawStream, code};
use crate::abi::ArrowDeviceType;
use crate::device::Process;
use crate::device::backend::{CopyOp, DevicePtr};

/// Which memory a device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memory {
    Device,
    /// Page-locked host memory.
    Host,
    Managed,
}

impl Memory {
    /// The memory of a vendor's device of this type.
    pub(super) fn of(device_type: ArrowDeviceType) -> Self {
        match device_type {
            ArrowDeviceType::CUDA_HOST | ArrowDeviceType::ROCM_HOST => Self::Host,
            ArrowDeviceType::CUDA_MANAGED => Self::Managed,
            _ => Self::Device,
        }
    }
}

/// What kind of memory an address lies in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PointerKind {
    /// Memory of the device of this ordinal; in which context, if it belongs to one (memory of a
    /// pool does not, and HIP has none).
    Device(c_int, Option<usize>),
    /// Page-locked host memory; whether a device reaches it under this very address.
    Host { mapped: bool },
    /// Managed memory.
    Managed,
    /// Nothing that the library knows: ordinary host memory, or no memory at all.
    Unknown,
}

/// What the library reports about an address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) kind: PointerKind,
    /// The range of the allocation, all of which is memory; `None` if the library does not tell.
    pub(crate) range: Option<Range<usize>>,
}

/// What a device can do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Features {
    /// It has memory pools.
    pub(crate) pools: bool,
    /// The host may read managed memory while the device works.
    pub(crate) reads_managed: bool,
}

/// A vendor's library, which stays loaded.
pub(crate) trait Library: 'static {
    const VENDOR: &'static str;
    /// What a user can do about streams and memory of another context.
    const ADVICE: &'static str;
    /// The flags of events without timing.
    const EVENT_FLAGS: c_uint;
    /// The flags of page-locked memory that serves all devices, and is not write-combined, since
    /// the host reads it.
    const HOST_FLAGS: c_uint;

    /// Returns the library, loaded at the first call, or why it cannot be used.
    fn get() -> Result<&'static Self, &'static str>;
    fn calls(&self) -> &Calls;
    /// Returns where the library was initialised. A child of that process must not call it.
    fn process(&self) -> Process;
    /// Returns the library's name and text for a code: "CUDA_ERROR_NO_DEVICE: no CUDA-capable
    /// device is detected".
    fn text(&self, code: Code) -> String;
    /// Whether a code means that a context, this one or another that the call named, is lost.
    fn is_lost(code: Code) -> bool;

    /// Makes calls without a current device, which leave no trace on the thread.
    fn quietly<T>(&self, calls: impl FnOnce() -> T) -> T {
        calls()
    }
}

/// One device of a vendor's library, in one context where there are such.
///
/// # Safety
/// The methods do what they say, and the library's functions are those that [`Calls`] names. Memory
/// that the library allocates is aligned to 64 bytes, and nothing else uses it. `look_up` returns
/// what the library reports. The methods after `leave` are called between `enter` and `leave` only:
/// [`Current`](super::context::Current) sees to it.
pub(crate) unsafe trait Runtime: fmt::Debug + Send + Sync + Sized + 'static {
    type Library: Library;
    /// What a thread had before the device became current.
    type Before: Copy;
    /// What keeps a stream that was given.
    type Given: Send + Sync + 'static;

    fn library(&self) -> &'static Self::Library;
    /// Returns the device's number in the library.
    fn ordinal(&self) -> c_int;
    fn features(&self) -> Features;
    /// Whether kernels of the device reach memory of a context of the same device.
    fn reaches_context(&self, context: usize) -> bool;
    /// Makes the device current on this thread.
    fn enter(&self) -> Answer<Self::Before>;
    /// Makes current again what was before.
    fn leave(&self, before: Self::Before);

    /// Returns why a stream that is no default stream is not one of this context; `None` if it is.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn foreign(&self, stream: RawStream) -> Answer<Option<String>>;
    /// Returns what lies at an address, which is looked up and not followed.
    fn look_up(&self, address: usize) -> Answer<Found>;
    /// Returns what the library must be told to copy out of such memory (a context's address, or a
    /// device's number); `None` if it finds it by the address.
    fn peer_of(&self, kind: PointerKind) -> Answer<Option<usize>>;
    /// Queues a copy.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); `from` is what `peer_of` returned for
    /// the source; the stream is live, or stands for a default stream.
    unsafe fn copy(&self, copy: &CopyOp, from: Option<usize>, stream: RawStream) -> Answer;
    /// Queues a list of copies, whose sources are read in the stream's order, in one call; `None` if
    /// the library has no such call. After an error some of them may have been queued.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); the stream is live, and no default
    /// stream.
    unsafe fn copy_list(&self, copies: &[&CopyOp], stream: RawStream) -> Option<Answer> {
        let _ = (copies, stream);
        None
    }
}

/// Whether a code says that the library has shut down and taken everything back: a device was opened
/// before, so it was initialised.
pub(super) fn is_shut_down(code: Code) -> bool {
    matches!(code, code::DEINITIALIZED | code::NOT_INITIALIZED)
}

/// Makes an address of a library's memory, which is no Rust allocation.
pub(crate) fn to_ptr(address: usize) -> DevicePtr {
    DevicePtr::new(std::ptr::with_exposed_provenance_mut(address))
}
