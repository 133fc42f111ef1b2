//! Streams that go from this crate to Python, and back: their callbacks run detached from the interpreter, and what comes from
//! Python is released attached.

use std::ptr;

use arrow_schema::SchemaRef;

use super::attached::{DropAttached, detached, has_interpreter};
use crate::abi::c_data::CArray;
use crate::abi::{ArrowDeviceType, CStream, Callbacks, FFI_ArrowDeviceArray, guard};
use crate::data::DeviceRecordBatch;
use crate::error::{Error, Result};
use crate::interchange::ImportOptions;
use crate::stream::DeviceRecordBatchReader;
use crate::stream::export::Arrays;
use crate::stream::import::Batches;

/// Arrays of a stream for Python: the interpreter is released while they are made, and while their reader is dropped.
pub(super) struct Detached(Option<Arrays>);

impl Detached {
    pub(super) fn wrap(arrays: Arrays) -> Arrays {
        Box::new(Self(Some(arrays)))
    }
}

impl Iterator for Detached {
    type Item = Result<FFI_ArrowDeviceArray>;

    fn next(&mut self) -> Option<Self::Item> {
        let arrays = self.0.as_mut()?;
        detached(|| arrays.next())
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        let arrays = self.0.take();
        detached(|| drop(arrays));
    }
}

/// A reader of a stream from Python, which releases the interpreter during each `next`.
pub(super) struct Reader<S: CStream>(DropAttached<Batches<S>>);

impl<S: CStream> Reader<S> {
    /// Must be called attached to the interpreter.
    ///
    /// # Safety
    /// The stream keeps to its interface, and its arrays meet the safety requirements of
    /// [`DeviceArray::import`](crate::DeviceArray::import) with these options.
    pub(super) unsafe fn new(stream: S, options: ImportOptions) -> Result<Self> {
        let mut batches = DropAttached::new(Batches::new(stream, options, released_attached));
        detached(|| batches.open())?;
        Ok(Self(batches))
    }
}

impl<S: CStream> Iterator for Reader<S> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let batches = &mut *self.0;
        if !batches.ended && !has_interpreter() {
            batches.ended = true;
            return Some(Err(Error::Foreign {
                operation: "get_next",
                errno: libc::ECANCELED,
                message: "the Python interpreter is gone".into(),
            }));
        }
        // SAFETY: the caller of `new` guarantees that the stream's arrays may be imported.
        detached(|| unsafe { batches.next() })
    }
}

impl<S: CStream> DeviceRecordBatchReader for Reader<S> {
    fn schema(&self) -> SchemaRef {
        self.0.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.0.device_type()
    }
}

/// The same array, released by a thread that is attached to the interpreter.
pub(super) fn released_attached(inner: FFI_ArrowDeviceArray) -> FFI_ArrowDeviceArray {
    if inner.is_released() {
        return inner;
    }
    let mut outer = FFI_ArrowDeviceArray {
        array: CArray {
            release: Some(release_array),
            ..inner.array
        },
        device_id: inner.device_id,
        device_type: inner.device_type,
        sync_event: inner.sync_event,
        reserved: inner.reserved,
    };
    outer.array.private_data = Box::into_raw(Box::new(DropAttached::new(inner))).cast();
    outer
}

unsafe extern "C-unwind" fn release_array(array: *mut CArray) {
    // SAFETY: the interface requires the consumer to pass a live array, once. Only `released_attached` installs this
    // callback, with a boxed array as `private_data`.
    unsafe {
        let boxed = (*array)
            .private_data
            .cast::<DropAttached<FFI_ArrowDeviceArray>>();
        (*array).private_data = ptr::null_mut();
        (*array).release = None;
        drop(Box::from_raw(boxed));
    }
}

/// `struct ArrowArrayStream` of the C stream interface. Dropping it releases it. arrow-rs's type for it has callbacks out of which
/// nothing may unwind.
#[repr(transparent)]
pub(super) struct HostStream(Callbacks<Self, CArray>);

// SAFETY: the C stream interface allows calls from any thread, one at a time.
unsafe impl Send for HostStream {}

impl Drop for HostStream {
    fn drop(&mut self) {
        let this = ptr::from_mut(self);
        // SAFETY: `this` is a live struct that nothing else uses, and its `release` is its own callback. A moved or released
        // struct has none.
        let outcome = unsafe {
            guard::release_once("ArrowArrayStream.release", this, &raw mut (*this).0.release)
        };
        // A drop cannot report a panic of the callback. The struct is released all the same.
        drop(outcome);
    }
}

impl CStream for HostStream {
    const NAME: &'static str = "the ArrowArrayStream";
    type Array = CArray;

    fn new(_: ArrowDeviceType, callbacks: Callbacks<Self, CArray>) -> Self {
        Self(callbacks)
    }

    fn device_type(&self) -> ArrowDeviceType {
        ArrowDeviceType::CPU
    }

    fn callbacks(&self) -> &Callbacks<Self, CArray> {
        &self.0
    }
}
