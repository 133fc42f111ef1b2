//! Exports readers as `ArrowDeviceArrayStream`.
//!
//! The stream owns its reader. Every callback catches panics and returns an errno, whose text is valid until the next
//! call. A call during another one is refused with `EBUSY`. After an error every further `get_next` repeats that error and does not call the reader; after the end every
//! further one reports the end.

use std::ffi::{CString, c_char, c_int};
use std::ptr;
use std::sync::{Arc, Mutex, TryLockError};

use arrow_array::RecordBatchReader;
use arrow_schema::SchemaRef;
use arrow_schema::ffi::FFI_ArrowSchema;

use crate::abi::{
    ArrowDeviceType, CStream, Callbacks, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, guard,
};
use crate::device::{Device, DeviceId};
use crate::error::{Error, Result, bail};
use crate::interchange::schema::export_schema;
use crate::interchange::{ExportOptions, SyncPolicy};
use crate::stream::reader::DeviceRecordBatchReader;
use crate::stream::upload_reader;

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
    let reader = upload_reader(reader, device);
    FFI_ArrowDeviceArrayStream::new(reader, ExportOptions::new(SyncPolicy::Event))
}

impl FFI_ArrowDeviceArrayStream {
    /// Exports a reader of record batches without copying them. Batches may be on several devices of the reader's type.
    ///
    /// A consumer may read the stream on any thread, so the reader is `Send`:
    ///
    /// ```compile_fail,E0277
    /// # use arrow_device::{ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatches, Error, ExportOptions};
    /// # use arrow_device::{FFI_ArrowDeviceArrayStream, SyncPolicy};
    /// # fn export(batch: DeviceRecordBatch) -> Result<FFI_ArrowDeviceArrayStream, Error> {
    /// let (schema, shared) = (batch.schema(), std::rc::Rc::new(batch));
    /// let batches = std::iter::once_with(move || Ok(DeviceRecordBatch::clone(&shared)));
    /// let reader = DeviceRecordBatches::new(batches, schema, ArrowDeviceType::CPU);
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
        export(reader, options, |arrays| arrays)
    }
}

/// The arrays of an exported stream, made when they are asked for.
pub(crate) type Arrays = Box<dyn Iterator<Item = Result<FFI_ArrowDeviceArray>> + Send>;

/// Exports a reader as a C stream of what `wrap` makes of its arrays.
pub(crate) fn export<S: CStream>(
    reader: impl DeviceRecordBatchReader + Send + 'static,
    options: ExportOptions,
    wrap: fn(Arrays) -> Arrays,
) -> Result<S> {
    // An error is better reported here than at every call by a consumer.
    let schema = reader.schema();
    export_schema(&schema)?;
    let (declared, fit) = (options.label(reader.device_type()), schema.clone());
    // All batches of a stream are on one type of device. Their device ids may differ.
    let arrays = reader.map(move |batch| {
        let array = batch?.with_schema(fit.clone())?.export_array(&options)?;
        if array.device_type() == declared {
            return Ok(array);
        }
        let id = DeviceId::new(array.device_type(), array.device_id());
        bail!("an array on {id} in a stream of device type {declared}")
    });
    let exporter = Exporter {
        arrays: wrap(Box::new(arrays)),
        schema,
        end: None,
        text: None,
    };
    // The callbacks below keep to the stream interface for a `private_data` that is a share of an `Exporter`, whose arrays are
    // `Send` and of the declared device type.
    let share = Arc::into_raw(Shared::new(Mutex::new(exporter)));
    let callbacks = Callbacks {
        get_schema: Some(get_schema::<S>),
        get_next: Some(get_next::<S>),
        get_last_error: Some(get_last_error::<S>),
        release: Some(release::<S>),
        private_data: share.cast_mut().cast(),
    };
    Ok(S::new(declared, callbacks))
}

/// What a stream's `private_data` is a share of. Each call holds another share, so that a release during a call leaves the stream to
/// that call. A second call at the same time is refused: it comes from within the reader, or from a consumer that relies on a lock
/// which the reader gives up, as Python's.
type Shared = Arc<Mutex<Exporter>>;

struct Exporter {
    arrays: Arrays,
    schema: SchemaRef,
    /// How the arrays ended, which every further call repeats.
    end: Option<Result<()>>,
    /// The text for `get_last_error`.
    text: Option<CString>,
}

impl Exporter {
    fn next(&mut self) -> Result<FFI_ArrowDeviceArray> {
        if let Some(end) = &self.end {
            return end.clone().map(|()| FFI_ArrowDeviceArray::empty());
        }
        // A panic is an error like others: the reader is not called again.
        let next = guard::callback("get_next", || self.arrays.next().transpose());
        self.end = match &next {
            Ok(Some(_)) => None,
            Ok(None) => Some(Ok(())),
            Err(e) => Some(Err(e.clone())),
        };
        next.map(|array| array.unwrap_or_else(FFI_ArrowDeviceArray::empty))
    }

    /// Keeps the text of an error, and returns its errno.
    fn fail(&mut self, e: &Error) -> c_int {
        // The `Display` of another crate's error may panic.
        let described = guard::call_foreign("get_last_error", || {
            (guard::c_text(e.to_string()), e.errno())
        });
        let (text, errno) = described.unwrap_or((None, libc::EIO));
        self.text = text;
        errno
    }
}

/// Returns `body` of what is behind a stream; `EINVAL` if the stream is null or released, and `EBUSY` during another call.
///
/// # Safety
/// `stream` is null or points to a stream of this file, released or not.
unsafe fn call<S: CStream, T>(
    stream: *mut S,
    body: impl FnOnce(&mut Exporter) -> Result<T, c_int>,
) -> Result<T, c_int> {
    // SAFETY: the caller guarantees that `stream` can be read if it is not null. One that is not released still holds the share
    // that `export` put into its `private_data`, so there is one to count.
    let shared: Shared = unsafe {
        match stream.as_ref().map(S::callbacks) {
            Some(callbacks) if callbacks.release.is_some() => {
                let share = callbacks.private_data.cast_const().cast();
                Arc::increment_strong_count(share);
                Arc::from_raw(share)
            }
            _ => return Err(libc::EINVAL),
        }
    };
    let answer = match shared.try_lock() {
        Ok(mut exporter) => body(&mut exporter),
        // Panics are caught further in.
        Err(TryLockError::Poisoned(e)) => body(&mut e.into_inner()),
        Err(TryLockError::WouldBlock) => Err(libc::EBUSY),
    };
    drop_share(shared);
    answer
}

/// The last share drops the reader, which may panic.
fn drop_share(shared: Shared) {
    let _ = guard::call_foreign("release", || drop(shared));
}

/// Writes to `out` what `body` returns, or `empty` after an error, whose text is kept and whose errno is returned.
///
/// # Safety
/// As for [`call`]; `out` is null, or valid for writes and holds nothing to release.
unsafe fn answer<S: CStream, T>(
    stream: *mut S,
    out: *mut T,
    empty: T,
    body: impl FnOnce(&mut Exporter) -> Result<T>,
) -> c_int {
    if out.is_null() {
        return libc::EINVAL;
    }
    let body = |exporter: &mut Exporter| {
        exporter.text = None;
        guard::callback("a stream's callback", || body(exporter)).map_err(|e| exporter.fail(&e))
    };
    // SAFETY: the caller keeps to the contract of `call`, and guarantees that `out` is valid for writes.
    unsafe {
        let answer = call(stream, body);
        let code = answer.as_ref().err().copied().unwrap_or(0);
        out.write(answer.unwrap_or(empty));
        code
    }
}

unsafe extern "C-unwind" fn get_schema<S: CStream>(
    stream: *mut S,
    out: *mut FFI_ArrowSchema,
) -> c_int {
    let empty = FFI_ArrowSchema::empty();
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, and an `out` that is valid
    // for writes and holds nothing to release.
    unsafe { answer(stream, out, empty, |this| export_schema(&this.schema)) }
}

unsafe extern "C-unwind" fn get_next<S: CStream>(stream: *mut S, out: *mut S::Array) -> c_int {
    let empty = FFI_ArrowDeviceArray::empty().into();
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, and an `out` that is valid
    // for writes and holds nothing to release.
    unsafe { answer(stream, out, empty, |this| this.next().map(S::Array::from)) }
}

unsafe extern "C-unwind" fn get_last_error<S: CStream>(stream: *mut S) -> *const c_char {
    let text = |exporter: &mut Exporter| {
        let text = exporter.text.as_ref();
        Ok(text.map_or(ptr::null(), |text| text.as_ptr()))
    };
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from.
    match unsafe { call(stream, text) } {
        Ok(text) => text,
        Err(libc::EBUSY) => c"another call on this stream is under way".as_ptr(),
        Err(_) => ptr::null(),
    }
}

unsafe extern "C-unwind" fn release<S: CStream>(stream: *mut S) {
    // SAFETY: the interface requires the consumer to pass the stream that this callback was read from, and to use it no more. While
    // it is not released, its `private_data` is the share that `export` put there, which is taken back once.
    let shared: Shared = unsafe {
        match stream.as_ref().map(S::callbacks) {
            Some(callbacks) if callbacks.release.is_some() => {
                let share = callbacks.private_data.cast_const().cast();
                stream.write(S::new(ArrowDeviceType::new(0), Callbacks::empty()));
                Arc::from_raw(share)
            }
            _ => return,
        }
    };
    drop_share(shared);
}
