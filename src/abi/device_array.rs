//! `ArrowDeviceArray`.

use std::ffi::c_void;
use std::mem::{self, offset_of};
use std::{fmt, ptr};

use arrow_data::ArrayData;
use arrow_data::ffi::FFI_ArrowArray;

use super::ArrowDeviceType;
use super::c_data::CArray;
use crate::error::Error;

/// `struct ArrowDeviceArray`: an array whose buffers lie in the memory of a device ("The
/// ArrowDeviceArray structure" of the specification).
///
/// The struct itself, its children and its lists of pointers are in host memory; what `buffers[i]`
/// points to is the device's, and nothing here reads it. The struct has no release callback of its
/// own: the embedded array owns the buffers, the children and the event, and its callback runs when
/// the struct is dropped. A callback that panics does not unwind out of the drop.
///
/// Ownership crosses the C boundary by moving ("Moving an array"):
///
/// ```
/// use arrow_device::abi::FFI_ArrowDeviceArray;
/// use arrow_device::ArrowDeviceType;
/// use arrow_array::{Array, Int32Array};
///
/// // A producer moves its array into memory that the consumer gave.
/// let mut out = FFI_ArrowDeviceArray::empty();
/// let produced = FFI_ArrowDeviceArray::new_cpu(&Int32Array::from(vec![1, 2, 3]).to_data());
/// // SAFETY: `out` is valid and holds nothing that needs a release.
/// unsafe { produced.write_to(&mut out) };
///
/// // The consumer takes it over; what is left behind is released.
/// // SAFETY: `out` is a valid struct, and this is its only owner.
/// let taken = unsafe { FFI_ArrowDeviceArray::from_raw(&mut out) };
/// assert!(out.is_released());
/// assert_eq!(taken.device_type(), ArrowDeviceType::CPU);
/// assert_eq!(taken.array().len(), 3);
/// ```
#[repr(C)]
pub struct FFI_ArrowDeviceArray {
    pub(crate) array: CArray,
    pub(crate) device_id: i64,
    pub(crate) device_type: ArrowDeviceType,
    pub(crate) sync_event: *mut c_void,
    pub(crate) reserved: [i64; 3],
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<FFI_ArrowDeviceArray>() == 128);
    assert!(align_of::<FFI_ArrowDeviceArray>() == 8);
    assert!(offset_of!(FFI_ArrowDeviceArray, array) == 0);
    assert!(offset_of!(FFI_ArrowDeviceArray, device_id) == 80);
    assert!(offset_of!(FFI_ArrowDeviceArray, device_type) == 88);
    assert!(offset_of!(FFI_ArrowDeviceArray, sync_event) == 96);
    assert!(offset_of!(FFI_ArrowDeviceArray, reserved) == 104);
};

// SAFETY: the specification lets a consumer release on any thread, and no pointer in the struct is
// tied to one. Who made the struct (`new`, `from_raw`) vouches for the producer's side of that.
unsafe impl Send for FFI_ArrowDeviceArray {}
// SAFETY: through a shared reference the struct is only read: addresses and numbers, and the lists
// in host memory that the producer must not change before the release. Releasing takes ownership.
unsafe impl Sync for FFI_ArrowDeviceArray {}

impl FFI_ArrowDeviceArray {
    /// Shares `data`, which is in host memory, without copying its buffers: device type CPU, id -1,
    /// no event.
    pub fn new_cpu(data: &ArrayData) -> Self {
        Self::from_host(CArray::from_arrow(FFI_ArrowArray::new(data)))
    }

    /// An array in host memory: device type CPU, id -1, no event.
    pub(crate) const fn from_host(array: CArray) -> Self {
        Self {
            array,
            device_id: -1,
            device_type: ArrowDeviceType::CPU,
            sync_event: ptr::null_mut(),
            reserved: [0; 3],
        }
    }

    /// Puts an array, whose buffers are on the given device, and its event together. `reserved` is
    /// zero.
    ///
    /// # Safety
    /// - The buffers lie in memory that the device can access, and live until `array`'s release
    ///   callback runs, which may happen on any thread.
    /// - `sync_event` is null, and then the data is ready for any access; or it points to an event
    ///   of the kind that the specification names for `device_type` ("Synchronization event
    ///   types"), lives until that callback runs, and completes when the data is ready.
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

    /// All zero: released, and device type 0, "no device yet". What a consumer gives a producer to
    /// write to.
    pub const fn empty() -> Self {
        Self {
            array: CArray::empty(),
            device_id: 0,
            device_type: ArrowDeviceType::new(0),
            sync_event: ptr::null_mut(),
            reserved: [0; 3],
        }
    }

    /// Moves the struct out of `source` and leaves an [empty](Self::empty) one there, which needs
    /// no release. A released source gives an empty struct; its other members mean nothing.
    ///
    /// # Safety
    /// - `source` is valid for reads and writes, aligned, initialized, and used by nobody else
    ///   during the call; no copy of the struct is used afterwards.
    /// - Unless it is released, it is as the C data interface and the C Device data interface ask:
    ///   its pointers and counts are right (`n_buffers`, `n_children`), its children and
    ///   dictionary likewise, its event is null or an event of its device type, and its release
    ///   callback may be called once, from any thread.
    pub unsafe fn from_raw(source: *mut Self) -> Self {
        // SAFETY: the caller vouches for `source`. `replace` drops nothing.
        let taken = unsafe { ptr::replace(source, Self::empty()) };
        if taken.is_released() {
            return Self::empty();
        }
        taken
    }

    /// Moves the struct to `out`. What was there is overwritten, not released.
    ///
    /// # Safety
    /// `out` is valid for writes of `size_of::<Self>()` bytes and aligned. It need not be
    /// initialized; a struct that is there and not released leaks.
    pub unsafe fn write_to(self, out: *mut Self) {
        // SAFETY: the caller vouches for `out`.
        unsafe { out.write(self) }
    }

    /// Whether the embedded array's release callback is null: nothing is owned, and in a stream
    /// this marks the end.
    pub const fn is_released(&self) -> bool {
        self.array.is_released()
    }

    /// The embedded array, through arrow-rs's getters. Its buffers are addresses on the device:
    /// do not follow them on the host.
    pub const fn array(&self) -> &FFI_ArrowArray {
        self.array.as_arrow()
    }

    /// The type of device that can access the buffers.
    pub const fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    /// Which device of that type. Without meaning for the CPU, where producers write -1 or 0.
    pub const fn device_id(&self) -> i64 {
        self.device_id
    }

    /// The event to wait for before the data is accessed; null if it is ready ("Synchronization").
    pub const fn sync_event(&self) -> *mut c_void {
        self.sync_event
    }

    /// The reserved members. Producers must zero them; this crate accepts other values, and
    /// ignores them.
    pub const fn reserved(&self) -> [i64; 3] {
        self.reserved
    }

    /// Gives up the device's type and id and keeps the array. While there is an event this is
    /// refused and the struct comes back unchanged: without the event nobody could tell when the
    /// data is ready.
    ///
    /// arrow-rs calls the release callback as `extern "C"`: from here on it must not unwind.
    ///
    /// ```
    /// use arrow_device::abi::FFI_ArrowDeviceArray;
    /// use arrow_array::{Array, Int32Array};
    ///
    /// let array = FFI_ArrowDeviceArray::new_cpu(&Int32Array::from(vec![1, 2]).to_data());
    /// assert_eq!(array.into_array().unwrap().len(), 2);
    /// ```
    #[allow(
        clippy::result_large_err,
        reason = "the struct goes back to its owner; boxing it would allocate"
    )]
    pub fn into_array(mut self) -> Result<FFI_ArrowArray, Self> {
        if self.sync_event.is_null() {
            Ok(self.take_array().into_arrow())
        } else {
            Err(self)
        }
    }

    /// Moves the embedded array out and leaves a released one. The event, if any, lives until the
    /// array that is given back is released.
    pub(crate) const fn take_array(&mut self) -> CArray {
        mem::replace(&mut self.array, CArray::empty())
    }

    /// Calls the release callback, if there is one; [`Error::Panic`](crate::Error::Panic) if it threw.
    /// The struct is released either way.
    pub(crate) fn release(mut self) -> Result<(), Error> {
        self.release_once()
    }

    fn release_once(&mut self) -> Result<(), Error> {
        // The address of the whole struct, which starts with the array: a producer may look at the
        // members behind it from within its callback.
        let array = ptr::from_mut(self).cast::<CArray>();
        // SAFETY: `self` is the only copy of the struct (`from_raw` and `write_to` move), so its
        // callback has not run; whoever made the struct vouches that it may.
        unsafe { CArray::release(array) }
    }
}

impl Drop for FFI_ArrowDeviceArray {
    fn drop(&mut self) {
        // A drop cannot report an error; who has a device to keep it calls `release`.
        let _ = self.release_once();
    }
}

impl Default for FFI_ArrowDeviceArray {
    fn default() -> Self {
        Self::empty()
    }
}

impl fmt::Debug for FFI_ArrowDeviceArray {
    /// Numbers and addresses; nothing that the addresses point to.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FFI_ArrowDeviceArray")
            .field("device_type", &self.device_type)
            .field("device_id", &self.device_id)
            .field("sync_event", &self.sync_event)
            .field("released", &self.is_released())
            .field("length", &self.array.length)
            .field("null_count", &self.array.null_count)
            .field("offset", &self.array.offset)
            .field("n_buffers", &self.array.n_buffers)
            .field("n_children", &self.array.n_children)
            .field("dictionary", &!self.array.dictionary.is_null())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
