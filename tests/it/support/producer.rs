//! A stream producer as a library in C would be, and arrays that count their release.

use std::ffi::{CString, c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use super::c_stream::CStream;
use arrow_array::{Array, Int32Array, RecordBatch};
use arrow_data::ffi::FFI_ArrowArray;
use arrow_device::{
    ArrowDeviceType, DeviceArray, DeviceBuffer, DeviceRecordBatch, Devices, ExportOptions,
    FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, SyncPolicy,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};

/// A producer made of closures, as a library in C would be.
pub(crate) struct Producer {
    pub schema: Box<dyn FnMut(*mut FFI_ArrowSchema) -> c_int + Send>,
    pub next: Box<dyn FnMut(*mut FFI_ArrowDeviceArray) -> c_int + Send>,
    pub text: Option<CString>,
    pub released: Arc<AtomicUsize>,
}

impl Producer {
    pub(crate) fn new(
        schema: &Schema,
        next: impl FnMut(*mut FFI_ArrowDeviceArray) -> c_int + Send + 'static,
    ) -> Self {
        let schema = schema.clone();
        Self {
            schema: Box::new(move |out| {
                // SAFETY: the consumer passes memory for one struct.
                unsafe { out.write(FFI_ArrowSchema::try_from(&schema).unwrap()) };
                0
            }),
            next: Box::new(next),
            text: None,
            released: Arc::default(),
        }
    }

    pub(crate) fn stream(
        self,
        device_type: ArrowDeviceType,
    ) -> (FFI_ArrowDeviceArrayStream, Arc<AtomicUsize>) {
        unsafe extern "C-unwind" fn get_schema(
            s: *mut FFI_ArrowDeviceArrayStream,
            out: *mut FFI_ArrowSchema,
        ) -> c_int {
            // SAFETY: the consumer calls this with a stream of this producer, which is not released
            // yet.
            unsafe { ((*(*s.cast::<CStream>()).private_data.cast::<Producer>()).schema)(out) }
        }
        unsafe extern "C-unwind" fn get_next(
            s: *mut FFI_ArrowDeviceArrayStream,
            out: *mut FFI_ArrowDeviceArray,
        ) -> c_int {
            // SAFETY: the consumer calls this with a stream of this producer, which is not released
            // yet.
            unsafe { ((*(*s.cast::<CStream>()).private_data.cast::<Producer>()).next)(out) }
        }
        unsafe extern "C-unwind" fn get_last_error(
            s: *mut FFI_ArrowDeviceArrayStream,
        ) -> *const c_char {
            // SAFETY: the consumer calls this with a stream of this producer, which is not released
            // yet.
            let producer = unsafe { &*(*s.cast::<CStream>()).private_data.cast::<Producer>() };
            producer
                .text
                .as_ref()
                .map_or(std::ptr::null(), |t| t.as_ptr())
        }
        unsafe extern "C-unwind" fn release(s: *mut FFI_ArrowDeviceArrayStream) {
            // SAFETY: the consumer calls this with a stream of this producer, once: `release` is
            // null afterwards.
            unsafe {
                let producer =
                    Box::from_raw((*s.cast::<CStream>()).private_data.cast::<Producer>());
                producer.released.fetch_add(1, SeqCst);
                (*s.cast::<CStream>()).release = None;
            }
        }
        let released = self.released.clone();
        let data = Box::into_raw(Box::new(self)).cast();
        // The callbacks keep to the interface, for a private pointer to a boxed `Producer`.
        let stream = CStream {
            device_type,
            get_schema,
            get_next,
            get_last_error,
            release: Some(release),
            private_data: data,
        };
        (stream.into_ffi(), released)
    }
}

/// Three rows of one column, one of them null.
pub(crate) fn ints() -> RecordBatch {
    let ints = Int32Array::from(vec![Some(1), None, Some(3)]);
    RecordBatch::try_from_iter([("i", Arc::new(ints) as _)]).unwrap()
}

/// An array on the CPU that counts its release.
pub(crate) fn counted(batch: &RecordBatch, count: &Arc<AtomicUsize>) -> FFI_ArrowDeviceArray {
    struct Counts(Arc<AtomicUsize>, #[allow(dead_code)] RecordBatch);
    impl Drop for Counts {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let data = batch.column(0).to_data();
    let values = data.buffers()[0].clone();
    let bytes = values.len();
    let base = arrow_device::device::DevicePtr::new(values.as_ptr().cast_mut().cast());
    let owner = Box::new(Counts(count.clone(), batch.clone()));
    // SAFETY: the owner holds the batch, and so the values, which nobody writes.
    let values = unsafe { DeviceBuffer::from_raw(&Devices::cpu(), base, bytes, owner, None) };
    let rows = batch.num_rows();
    let array = DeviceArray::from_values(DataType::Int32, rows, values, None).unwrap();
    let schema = Arc::new(Schema::new(vec![Field::new("i", DataType::Int32, true)]));
    let batch = DeviceRecordBatch::try_new(schema, &[array]).unwrap();
    batch
        .export_array(&ExportOptions::new(SyncPolicy::Event))
        .unwrap()
}

/// The embedded array, whose memory is ready.
pub(crate) fn into_arrow(mut array: FFI_ArrowDeviceArray) -> FFI_ArrowArray {
    assert!(array.sync_event().is_null());
    // SAFETY: the embedded array is the struct's first member. It is moved out, and the struct is released afterwards.
    unsafe { FFI_ArrowArray::from_raw((&raw mut array).cast()) }
}

/// The same array under another label.
pub(crate) fn relabel(
    array: FFI_ArrowDeviceArray,
    device_type: ArrowDeviceType,
    id: i64,
) -> FFI_ArrowDeviceArray {
    let array = into_arrow(array);
    // SAFETY: the array is valid and in host memory; only its device type and id are wrong, as in
    // some producers' arrays.
    unsafe { FFI_ArrowDeviceArray::new(array, device_type, id, std::ptr::null_mut()) }
}
