//! Exports readers as `ArrowDeviceArrayStream`.
//!
//! The stream owns its reader. Every callback catches panics and returns an errno, whose text is valid until the next
//! call. After an error every further `get_next` repeats that error and does not call the reader; after the end every
//! further one reports the end.

use std::ffi::{CString, c_char, c_int};
use std::ptr;

use arrow_array::RecordBatchReader;
use arrow_schema::SchemaRef;
use arrow_schema::ffi::FFI_ArrowSchema;

use crate::abi::{ArrowDeviceType, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, guard};
use crate::data::DeviceRecordBatch;
use crate::device::{Device, DeviceId};
use crate::error::{Error, Result};
use crate::interchange::schema::export_schema;
use crate::interchange::{ExportOptions, SyncPolicy};
use crate::stream::UploadingReader;
use crate::stream::reader::DeviceRecordBatchReader;

/// Exports a reader of host batches as a device stream. Each batch is uploaded to `device` when the consumer asks for it,
/// and is exported with its event, so that uploads overlap with the consumer's work.
///
/// # Errors
/// Returns an error if names or metadata of the schema contain null bytes, which C strings cannot hold, and that of a device whose
/// arrays cannot be exported.
pub fn export_reader(
    reader: impl RecordBatchReader + Send + 'static,
    device: &Device,
) -> Result<FFI_ArrowDeviceArrayStream> {
    device.check_export()?;
    let reader = UploadingReader::new(reader, device);
    FFI_ArrowDeviceArrayStream::new(reader, ExportOptions::new(SyncPolicy::Event))
}

impl FFI_ArrowDeviceArrayStream {
    /// Exports a reader of record batches without copying them. Batches may be on several devices of the reader's type.
    ///
    /// A consumer may read the stream on any thread, so the reader is `Send`:
    ///
    /// ```compile_fail,E0277
    /// # use arrow_device::{ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatchIterator, Error, ExportOptions};
    /// # use arrow_device::{FFI_ArrowDeviceArrayStream, SyncPolicy};
    /// # fn export(batch: DeviceRecordBatch) -> Result<FFI_ArrowDeviceArrayStream, Error> {
    /// let (schema, shared) = (batch.schema(), std::rc::Rc::new(batch));
    /// let batches = std::iter::once_with(move || Ok(DeviceRecordBatch::clone(&shared)));
    /// let reader = DeviceRecordBatchIterator::new(batches, schema, ArrowDeviceType::CPU);
    /// FFI_ArrowDeviceArrayStream::new(reader, ExportOptions::new(SyncPolicy::Event)) // does not compile: an `Rc`
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns an error if names or metadata of the schema contain null bytes, which C strings cannot hold.
    pub fn new(
        reader: impl DeviceRecordBatchReader + Send + 'static,
        options: ExportOptions,
    ) -> Result<Self> {
        // An error is better reported here than at every call by a consumer.
        let schema = reader.schema();
        export_schema(&schema)?;
        let device_type = reader.device_type();
        let exporter = Box::new(Exporter {
            reader: Box::new(reader),
            options,
            schema,
            device_type,
            state: State::Open,
            text: None,
        });
        // The callbacks below keep to the stream interface for a `private_data` that points to a boxed `Exporter`, whose reader is
        // `Send`. `Exporter::next` refuses batches on another device type.
        Ok(Self {
            device_type,
            get_schema: Some(get_schema),
            get_next: Some(get_next),
            get_last_error: Some(get_last_error),
            release: Some(release),
            private_data: Box::into_raw(exporter).cast(),
        })
    }
}

/// A stream's `private_data`.
struct Exporter {
    reader: Box<dyn DeviceRecordBatchReader + Send>,
    options: ExportOptions,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    state: State,
    /// The text for `get_last_error`.
    text: Option<CString>,
}

enum State {
    Open,
    Ended,
    Failed(Error),
}

impl Exporter {
    fn next(&mut self) -> Result<Option<FFI_ArrowDeviceArray>> {
        match &self.state {
            State::Open => {}
            State::Ended => return Ok(None),
            State::Failed(e) => return Err(e.clone()),
        }
        // A panic is an error like others: the reader is not called again.
        let next = guard::callback("get_next", || match self.reader.next() {
            Some(batch) => self.export(batch?).map(Some),
            None => Ok(None),
        });
        self.state = match &next {
            Ok(Some(_)) => State::Open,
            Ok(None) => State::Ended,
            Err(e) => State::Failed(e.clone()),
        };
        next
    }

    /// All batches of a stream are on one type of device. Their device ids may differ.
    fn export(&self, batch: DeviceRecordBatch) -> Result<FFI_ArrowDeviceArray> {
        let array = batch.fitted(&self.schema)?.export_array(&self.options)?;
        if array.device_type() == self.device_type {
            return Ok(array);
        }
        let id = DeviceId::new(array.device_type(), array.device_id());
        let declared = self.device_type;
        Err(Error::argument(format!(
            "an array on {id} in a stream of device type {declared}"
        )))
    }
}

/// Runs the body of a callback. Answers with the errno of its error, and keeps the text.
///
/// # Safety
/// `stream` is null or points to a stream of this file, released or not, that no other call uses.
unsafe fn answer(
    stream: *mut FFI_ArrowDeviceArrayStream,
    operation: &'static str,
    body: impl FnOnce(&mut Exporter) -> Result<()>,
) -> c_int {
    // SAFETY: the caller guarantees that `stream` can be read if it is not null, and that this is its only call. A stream
    // that is not released still has the `Exporter` that `new` boxed.
    let exporter = unsafe {
        match stream.as_mut() {
            Some(stream) if !stream.is_released() => &mut *stream.private_data.cast::<Exporter>(),
            _ => return libc::EINVAL,
        }
    };
    exporter.text = None;
    let Err(e) = guard::callback(operation, || body(exporter)) else {
        return 0;
    };
    // The `Display` and the drop of another crate's error may panic.
    let described = guard::call_foreign("get_last_error", || {
        let mut text = e.to_string().into_bytes();
        text.retain(|byte| *byte != 0);
        (CString::new(text).ok(), e.errno())
    });
    let (text, errno) = described.unwrap_or((None, libc::EIO));
    exporter.text = text;
    errno
}

unsafe extern "C-unwind" fn get_schema(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowSchema,
) -> c_int {
    if !out.is_null() {
        // SAFETY: the interface requires an `out` that is valid for writes and holds nothing to release.
        unsafe { out.write(FFI_ArrowSchema::empty()) };
    }
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, one call at a time,
    // and an `out` that is null or valid for writes.
    unsafe {
        answer(stream, "get_schema", |exporter| {
            if out.is_null() {
                return Err(Error::argument("get_schema: out is null"));
            }
            out.write(export_schema(&exporter.schema)?);
            Ok(())
        })
    }
}

unsafe extern "C-unwind" fn get_next(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    if !out.is_null() {
        // SAFETY: the interface requires an `out` that is valid for writes and holds nothing to release.
        unsafe { out.write(FFI_ArrowDeviceArray::empty()) };
    }
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, one call at a time,
    // and an `out` that is null or valid for writes.
    unsafe {
        answer(stream, "get_next", |exporter| {
            if out.is_null() {
                return Err(Error::argument("get_next: out is null"));
            }
            if let Some(array) = exporter.next()? {
                out.write(array);
            }
            Ok(())
        })
    }
}

unsafe extern "C-unwind" fn get_last_error(
    stream: *mut FFI_ArrowDeviceArrayStream,
) -> *const c_char {
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, one call at a time.
    // A stream that is not released still has the `Exporter` that `new` boxed.
    unsafe {
        match stream.as_ref() {
            Some(stream) if !stream.is_released() => {
                let exporter = &*stream.private_data.cast::<Exporter>();
                exporter.text.as_ref().map_or(ptr::null(), |t| t.as_ptr())
            }
            _ => ptr::null(),
        }
    }
}

unsafe extern "C-unwind" fn release(stream: *mut FFI_ArrowDeviceArrayStream) {
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, and to use it no
    // more. A stream that is not released still has the `Exporter` that `new` boxed.
    unsafe {
        match stream.as_ref() {
            Some(stream) if !stream.is_released() => {}
            _ => return,
        }
        let exporter = (*stream).private_data.cast::<Exporter>();
        (*stream).release = None;
        // A panic in the reader's drop ends here.
        let _ = guard::callback("release", || {
            drop(Box::from_raw(exporter));
            Ok(())
        });
    }
}
