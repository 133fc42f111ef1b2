//! What differs between vendors.

use std::any::Any;
use std::ffi::c_int;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::api::{Answer, Code, RawStream, code};
use super::library::Library;
use crate::device::backend::{CopyOp, DevicePtr};

/// Which memory a device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memory {
    Device,
    /// Page-locked host memory.
    Host,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Managed,
}

/// What a library must be told to copy out of other memory: a context's address, or a device's
/// number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Peer(pub(in crate::device) usize);

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

/// What a thread had before the context became current, for [`Runtime::leave`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Before {
    /// The device, where the library has a current one instead of a stack of contexts.
    #[cfg_attr(not(feature = "rocm"), allow(dead_code))]
    pub(crate) ordinal: c_int,
    /// The thread's last error, where the library keeps one.
    #[cfg_attr(not(feature = "rocm"), allow(dead_code))]
    pub(crate) last_error: Code,
}

/// One device of a vendor's library, in one context where there are such.
///
/// # Safety
/// The methods do what they say, and `library().api()` has the functions that its fields name.
/// Memory that the library allocates is aligned to 64 bytes, and nothing else uses it.
/// `look_up` returns what the library reports. The methods of the second group are called
/// between `enter` and `leave` only: [`Current`](super::entry::Current) sees to it.
pub(crate) unsafe trait Runtime: fmt::Debug + Send + Sync + 'static {
    fn library(&self) -> &dyn Library;
    /// Returns the device's number in the library.
    fn ordinal(&self) -> c_int;
    /// Whether the host may read managed memory while the device works.
    fn reads_managed(&self) -> bool;
    /// Whether the device has memory pools.
    fn supports_pools(&self) -> bool;
    /// Whether device memory is this device's own, and of this context if it belongs to one.
    fn owns(&self, kind: PointerKind) -> bool;
    /// Returns the device's number of a backend of the same vendor's, by what it returns from
    /// `as_any`.
    fn ordinal_of(&self, other: &dyn Any) -> Option<c_int>;
    /// Returns the vendor's type of queue for a stream of this crate's.
    fn queue(&self, stream: RawStream, lent: Arc<AtomicBool>) -> Box<dyn Any + Send + Sync>;
    /// Makes the device current on this thread.
    fn enter(&self) -> Answer<Before>;
    /// Makes current again what was before.
    fn leave(&self, before: Before);

    /// Returns why a stream that is no default stream is not one of this context; `None` if it is.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn foreign(&self, stream: RawStream) -> Answer<Option<String>>;
    /// Returns what lies at an address, which is looked up and not followed.
    fn look_up(&self, address: usize) -> Answer<Found>;
    /// Returns what the library must be told to copy out of such memory; `None` if it finds it by
    /// the address.
    fn peer_of(&self, kind: PointerKind) -> Answer<Option<Peer>>;
    /// Queues a copy.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); `from` is what `peer_of` returned for
    /// the source; the stream is live, or stands for a default stream.
    unsafe fn copy(&self, copy: &CopyOp, from: Option<Peer>, stream: RawStream) -> Answer;
    /// Queues a list of copies, whose sources are read in the stream's order, in one call; `None` if
    /// the library has no such call.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); the stream is live, and no default
    /// stream.
    unsafe fn copy_list(&self, copies: &[CopyOp], stream: RawStream) -> Option<Answer> {
        let _ = (copies, stream);
        None
    }
}

/// Whether a code says that the library has shut down and taken everything back: a device was opened
/// before, so it was initialised.
pub(super) fn is_shut_down(code: Code) -> bool {
    matches!(code, code::DEINITIALIZED | code::NOT_INITIALIZED)
}

impl dyn Runtime {
    /// Whether a code says that a context, this one or another that the call named, is lost: nothing
    /// that was queued runs any more, and every later call fails.
    pub(super) fn is_final(&self, code: Code) -> bool {
        is_shut_down(code) || (self.library().api().is_lost)(code)
    }
}

/// Makes an address of a library's memory, which is no Rust allocation.
pub(crate) fn to_ptr(address: usize) -> DevicePtr {
    DevicePtr::new(std::ptr::with_exposed_provenance_mut(address))
}
