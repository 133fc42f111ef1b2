//! Options of imports and exports.

use std::sync::Arc;

use crate::abi::ArrowDeviceType;
use crate::device::Devices;
use crate::memory::Owner;

/// How much of foreign data an import checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Validation {
    /// Everything that can be checked without reading a buffer: pointers, counts, lengths, offsets,
    /// flags, nesting, and whether the device can use the memory. Values are trusted.
    #[default]
    Structure,
    /// Values too: offsets, keys, type ids, views, run ends, UTF-8 and null counts. All values that
    /// safe calls can reach afterwards are checked, not only those of the array's rows: a list's
    /// child, for example, is checked whole. Bytes under a null that are no UTF-8 are legal: an import to the CPU then uses a copy of the
    /// array with zeros for them, which is counted. On other devices, and in columns of views, they are refused.
    ///
    /// This waits for the data that it reads. If the host can read the memory, it is checked in place. Otherwise
    /// it is copied to the host first: validity bitmaps, then all buffers, except those of a batch's
    /// columns in which every value is valid, such as numbers. Buffers that name the same bytes
    /// share one copy of them; buffers that overlap otherwise are copied one by one, and the import
    /// returns [`Error::OutOfMemory`](crate::Error::OutOfMemory) if there is no memory
    /// for them.
    Full,
}

/// How an import is done. End a literal with `..`, since there may be more fields one day.
///
/// ```
/// use arrow_device::{ImportOptions, Validation};
/// let options = ImportOptions { validation: Validation::Full, ..Default::default() };
/// ```
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    /// Where the array's device is looked up; `None` stands for [`Devices::global`].
    pub devices: Option<Devices>,
    /// How much is checked.
    pub validation: Validation,
    /// An array of type CUDA is one of ROCm: hipDF says so of HIP's memory. It is refused if HIP does not know the memory.
    pub cuda_is_rocm: bool,
}

/// What an export does with the events that guard the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SyncPolicy {
    /// The consumer gets an event to wait for; the export does not wait. A single event that guards
    /// everything is passed on as it is; several become one. Devices whose events others cannot wait for
    /// say what happens instead ([`ExportSync`](crate::device::ExportSync)): none of CUDA, ROCm, OpenCL and oneAPI.
    Event,
    /// The export blocks this thread until the memory is ready; the consumer gets no event.
    Wait,
}

/// What this crate may conclude from a consumer's release.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum ReleasePolicy {
    /// A consumer that releases guarantees that its device work on the memory is done, or ordered
    /// before this crate's later work on the queue that made the memory. Memory that this crate has not allocated on
    /// a queue (that of an import, of another process, or of the host) is given back at the release: for it the work is done.
    #[default]
    Ordered,
    /// For consumers that do not guarantee this: a thread of the device first waits for all work of
    /// the device. The release itself still returns at once.
    Synchronize,
}

impl ReleasePolicy {
    /// Drops a share of memory that a consumer has released. Never waits and never unwinds: a panic in the owner's drop is kept
    /// by the device.
    pub(crate) fn release(self, owner: Arc<Owner>) {
        // Work of a synchronous device has always completed.
        if self == Self::Synchronize && !owner.device().is_synchronous() {
            owner.add_unknown_use();
        }
        if let Some(owner) = Arc::into_inner(owner) {
            let device = owner.device().clone();
            device.parking("release", || drop(owner));
        }
    }
}

/// How an export is done. End a literal with `..`, since there may be more fields one day.
///
/// ```
/// use arrow_device::{ExportOptions, SyncPolicy};
/// let options = ExportOptions { counts_nulls: false, ..ExportOptions::new(SyncPolicy::Event) };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// What is done with the events that guard the memory.
    pub sync: SyncPolicy,
    /// Whether null counts that are not known are counted: the validity bitmaps are copied to the host together, with one host wait.
    /// Otherwise they are stated as -1, which some consumers (cuDF) take for "no nulls".
    pub counts_nulls: bool,
    /// What may be concluded from the consumer's release.
    pub release: ReleasePolicy,
    /// Memory of ROCm goes out with the type CUDA, for hipDF, which takes no other.
    pub rocm_as_cuda: bool,
}

impl ExportOptions {
    /// Makes options with this policy for events, which count nulls, and [`ReleasePolicy::Ordered`].
    pub const fn new(sync: SyncPolicy) -> Self {
        Self {
            sync,
            counts_nulls: true,
            release: ReleasePolicy::Ordered,
            rocm_as_cuda: false,
        }
    }

    /// The type with which memory of this type goes out.
    pub(crate) fn label(&self, device_type: ArrowDeviceType) -> ArrowDeviceType {
        match device_type {
            ArrowDeviceType::ROCM if self.rocm_as_cuda => ArrowDeviceType::CUDA,
            own => own,
        }
    }
}
