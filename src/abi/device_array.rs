//! `ArrowDeviceArray`.

use std::ffi::c_void;

use arrow_data::ffi::FFI_ArrowArray;

use super::ArrowDeviceType;
use super::c_data::CArray;
use super::guard::released_once;

/// `struct ArrowDeviceArray`: an array whose buffers lie in the memory of a device ("The
/// ArrowDeviceArray structure" of the specification).
///
/// The struct itself, its children and its lists of pointers are in host memory; `buffers[i]`
/// points to memory of the device, which nothing here reads. The struct has no release callback of
/// its own: the embedded array owns the buffers, the children and the event, and its callback runs
/// when the struct is dropped. A callback that panics does not unwind out of the drop.
///
/// Ownership crosses the C boundary by moving ("Moving an array"):
///
/// ```
/// use arrow_array::Int32Array;
/// use arrow_device::abi::FFI_ArrowDeviceArray;
/// use arrow_device::{ArrowDeviceType, Devices, SyncPolicy};
///
/// // A producer moves its array to memory of the consumer.
/// let array = Devices::cpu().upload_array(&Int32Array::from(vec![1, 2, 3]))?;
/// let (mut out, _schema) = array.export(SyncPolicy::Event)?;
///
/// // The consumer moves it out, and leaves a released struct.
/// // SAFETY: `out` is a valid struct, and this is its only owner.
/// let taken = unsafe { FFI_ArrowDeviceArray::from_raw(&mut out) };
/// assert!(out.is_released());
/// assert_eq!(taken.device_type(), ArrowDeviceType::CPU);
/// assert_eq!(taken.array().len(), 3);
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Debug)]
#[repr(C)]
pub struct FFI_ArrowDeviceArray {
    pub(crate) array: CArray,
    pub(crate) device_id: i64,
    pub(crate) device_type: ArrowDeviceType,
    pub(crate) sync_event: *mut c_void,
    pub(crate) reserved: [i64; 3],
}

// SAFETY: the specification lets a consumer release on any thread, and no pointer in the struct is
// tied to one. Whoever made the struct (`new`, `from_raw`) guaranteed it for the producer.
unsafe impl Send for FFI_ArrowDeviceArray {}
// SAFETY: through a shared reference the struct is only read: addresses, numbers, and lists in host
// memory that the producer must not change before the release. Releasing takes ownership.
unsafe impl Sync for FFI_ArrowDeviceArray {}

impl FFI_ArrowDeviceArray {
    /// Combines an array, whose buffers are on the given device, with its event. `reserved` is
    /// zero.
    ///
    /// # Safety
    /// - The buffers lie in memory that the device can access, and live until `array`'s release
    ///   callback runs, which may happen on any thread.
    /// - `sync_event` is null, and the data is ready for any access; or it points to an event of
    ///   the kind that the specification names for `device_type` ("Synchronization event types"),
    ///   lives until that callback runs, and completes when the data is ready.
    pub unsafe fn new(
        array: FFI_ArrowArray,
        device_type: ArrowDeviceType,
        device_id: i64,
        sync_event: *mut c_void,
    ) -> Self {
        Self {
            array: CArray::from_arrow(array),
            device_id,
            device_type,
            sync_event,
            reserved: [0; 3],
        }
    }

    /// Returns a released struct, all of whose members are zero, the device type included: memory
    /// for a producer to write an array to.
    pub const fn empty() -> Self {
        // SAFETY: null pointers, no callback and zeros are values of all members.
        unsafe { std::mem::zeroed() }
    }

    /// Returns the embedded array as arrow-rs's type. Its buffers are addresses on the device,
    /// which the host must not read.
    pub const fn array(&self) -> &FFI_ArrowArray {
        self.array.as_arrow()
    }

    /// Returns the type of the device that can access the buffers.
    pub const fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    /// Returns the id of the device among those of its type. It has no meaning for the CPU, where
    /// producers write -1 or 0.
    pub const fn device_id(&self) -> i64 {
        self.device_id
    }

    /// Returns the event to wait for before the data is accessed; null if it is ready
    /// ("Synchronization").
    pub const fn sync_event(&self) -> *mut c_void {
        self.sync_event
    }
}

#[cfg(any(test, feature = "pyo3"))]
impl From<CArray> for FFI_ArrowDeviceArray {
    /// An array of the CPU that is ready.
    fn from(array: CArray) -> Self {
        let mut this = Self::empty();
        (this.device_type, this.device_id, this.array) = (ArrowDeviceType::CPU, -1, array);
        this
    }
}

#[cfg(any(test, feature = "pyo3"))]
impl From<FFI_ArrowDeviceArray> for CArray {
    /// Moves the embedded array out. The event, if any, lives until the result is released.
    fn from(mut array: FFI_ArrowDeviceArray) -> Self {
        std::mem::replace(&mut array.array, Self::empty())
    }
}

released_once!(
    FFI_ArrowDeviceArray,
    array.release,
    "ArrowArray.release",
    "Unless it is released, it is as the C data interface and the C Device data interface require: its pointers and counts are right (`n_buffers`, `n_children`), its children and dictionary likewise, its event is null or an event of its device type, and its release callback may be called once, from any thread."
);

#[cfg(test)]
mod tests;
