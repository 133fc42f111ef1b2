//! Imports C streams: device readers over an `ArrowDeviceArrayStream`.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use arrow_schema::{Schema, SchemaRef};

use crate::abi::{
    ArrowDeviceType, CStream, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, ForeignSchema,
    guard,
};
use crate::data::DeviceRecordBatch;
use crate::error::{Error, Result};
use crate::interchange::ImportOptions;
use crate::interchange::schema::import_schema;
use crate::stream::reader::DeviceRecordBatchReader;

/// Reads a producer's C stream of record batches, on any device. It ends after an error. Dropping it releases the stream;
/// batches may outlive it.
///
/// A stream of arrays of another type is refused: import what its `get_next` returns with
/// [`DeviceArray::import`](crate::DeviceArray::import).
#[derive(Debug)]
pub struct DeviceRecordBatchStreamReader(Batches<FFI_ArrowDeviceArrayStream>);

impl DeviceRecordBatchStreamReader {
    /// Moves the stream out of `stream`, where a released struct remains, and reads its schema.
    ///
    /// # Safety
    /// `stream` is null, or points to a struct that keeps to the C device stream interface and whose arrays meet the safety
    /// requirements of [`DeviceArray::import`](crate::DeviceArray::import).
    ///
    /// # Errors
    /// Returns [`Error::Released`] for a released stream, [`Error::InvalidInput`] for missing callbacks and invalid schemas,
    /// and [`Error::Foreign`] with the producer's errno and text.
    pub unsafe fn from_raw(stream: *mut FFI_ArrowDeviceArrayStream) -> Result<Self> {
        if stream.is_null() || !stream.is_aligned() {
            return Err(Error::invalid("stream", "is null or misaligned"));
        }
        // SAFETY: the caller guarantees that a pointer that is not null points to a stream whose arrays may be imported.
        unsafe {
            let stream = FFI_ArrowDeviceArrayStream::from_raw(stream);
            Self::new(stream, ImportOptions::default())
        }
    }

    /// Takes over a stream and reads its schema.
    ///
    /// # Safety
    /// `stream` keeps to the C device stream interface, and its arrays meet the safety requirements of
    /// [`DeviceArray::import`](crate::DeviceArray::import) with these options.
    ///
    /// # Errors
    /// Returns the same errors as [`from_raw`](Self::from_raw).
    pub unsafe fn new(stream: FFI_ArrowDeviceArrayStream, options: ImportOptions) -> Result<Self> {
        let mut batches = Batches::new(stream, options, |array| array);
        batches.open()?;
        Ok(Self(batches))
    }
}

impl Iterator for DeviceRecordBatchStreamReader {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: the caller of the constructor guarantees that the stream's arrays may be imported.
        unsafe { self.0.next() }
    }
}

impl DeviceRecordBatchReader for DeviceRecordBatchStreamReader {
    fn schema(&self) -> SchemaRef {
        self.0.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.0.device_type()
    }
}

/// A foreign stream of batches, until its end or an error.
#[derive(Debug)]
pub(crate) struct Batches<S: CStream> {
    stream: S,
    /// Empty before [`open`](Self::open).
    pub(crate) schema: SchemaRef,
    options: ImportOptions,
    /// Makes of the producer's array the one to import.
    adopt: fn(FFI_ArrowDeviceArray) -> FFI_ArrowDeviceArray,
    /// At its end, or after an error.
    pub(crate) ended: bool,
}

impl<S: CStream> Batches<S> {
    pub(crate) fn new(
        stream: S,
        options: ImportOptions,
        adopt: fn(FFI_ArrowDeviceArray) -> FFI_ArrowDeviceArray,
    ) -> Self {
        Self {
            stream,
            schema: Arc::new(Schema::empty()),
            options,
            adopt,
            ended: false,
        }
    }

    pub(crate) fn device_type(&self) -> ArrowDeviceType {
        self.stream.device_type()
    }

    /// Checks that the stream has all callbacks, and reads its schema. Before this it must not be read.
    pub(crate) fn open(&mut self) -> Result<()> {
        let callbacks = self.stream.callbacks();
        if callbacks.release.is_none() {
            return Err(Error::Released(S::NAME));
        }
        let missing = |path| Err(Error::invalid(path, "is null"));
        match (callbacks.get_schema, callbacks.get_next) {
            (None, _) => missing("stream.get_schema"),
            (_, None) => missing("stream.get_next"),
            _ if callbacks.get_last_error.is_none() => missing("stream.get_last_error"),
            (Some(get_schema), _) => {
                let mut schema = ForeignSchema::empty();
                let (this, out) = (&raw mut self.stream, schema.as_mut_ptr());
                // SAFETY: the caller of the reader's constructor guarantees that the stream keeps to the interface. `out` is
                // empty; what a failed call leaves in it is released when it is dropped.
                let code = guard::call_foreign("get_schema", || unsafe { get_schema(this, out) })?;
                self.check("get_schema", code)?;
                self.schema = import_schema(schema.as_ref())?;
                Ok(())
            }
        }
    }

    /// Returns the next batch.
    ///
    /// # Safety
    /// The stream's arrays meet the safety requirements of [`DeviceArray::import`](crate::DeviceArray::import) with the
    /// options.
    pub(crate) unsafe fn next(&mut self) -> Option<Result<DeviceRecordBatch>> {
        if self.ended {
            return None;
        }
        let item = self.array().and_then(|array| match array {
            // SAFETY: the caller guarantees that the stream's arrays may be imported.
            Some(array) => unsafe {
                DeviceRecordBatch::import_as(array, self.schema.clone(), &self.options).map(Some)
            },
            None => Ok(None),
        });
        self.ended = !matches!(item, Ok(Some(_)));
        item.transpose()
    }

    /// Returns the next array, or `None` at the end. Not to be called again after that, or after an error.
    fn array(&mut self) -> Result<Option<FFI_ArrowDeviceArray>> {
        let Some(get_next) = self.stream.callbacks().get_next else {
            return Ok(None);
        };
        let this = &raw mut self.stream;
        let mut out = S::Array::from(FFI_ArrowDeviceArray::empty());
        // SAFETY: the caller of the reader's constructor guarantees that the stream keeps to the interface. `out` is empty;
        // what a failed call leaves in it is released when the array below is dropped.
        let code = guard::call_foreign("get_next", || unsafe { get_next(this, &raw mut out) });
        let array = (self.adopt)(out.into());
        self.check("get_next", code?)?;
        if array.is_released() {
            return Ok(None);
        }
        let (declared, got) = (self.device_type(), array.device_type());
        if declared != got {
            return Err(Error::invalid(
                "array.device_type",
                format!("is {got} in a stream of {declared}"),
            ));
        }
        Ok(Some(array))
    }

    /// Returns the producer's error with its text, unless `code` is 0.
    fn check(&mut self, operation: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let get_last_error = self.stream.callbacks().get_last_error;
        let this = &raw mut self.stream;
        // SAFETY: the caller of the reader's constructor guarantees that the stream keeps to the interface, which allows this call
        // after a failed one.
        let text = guard::call_foreign("get_last_error", || unsafe {
            get_last_error.map_or(ptr::null(), |get| get(this))
        })?;
        // SAFETY: the producer's text is null or a string that lives until the next call.
        let message = unsafe { guard::foreign_text(text) }.into();
        Err(Error::Foreign {
            operation,
            errno: code,
            message,
        })
    }
}
