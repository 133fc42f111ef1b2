//! Out: to capsules.

use arrow_array::RecordBatchReader;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use super::attached::detached;
use super::capsule::pack;
use super::data::CapsuleArray;
use super::request::{check_keywords, check_request, check_schema};
use super::stream;
use crate::abi::FFI_ArrowDeviceArrayStream;
use crate::device::Devices;
use crate::interchange::ExportOptions;
use crate::interchange::schema::import_field;
use crate::stream::export_reader;

/// An array or a batch as the two capsules, `arrow_schema` and `arrow_device_array`, that
/// `__arrow_c_device_array__(requested_schema=None, **kwargs)` answers with. Nothing is copied.
///
/// `requested_schema` and `keywords` are the method's arguments. A request for another representation of the same data
/// gets the data as it is; nothing is converted. pyarrow ignores events: for it, and for other consumers that read on
/// the host, use [`SyncPolicy::Wait`](crate::SyncPolicy::Wait).
///
/// # Errors
/// `ValueError` for a requested schema that does not fit the data; `NotImplementedError` for a keyword that is not
/// None; what [`DeviceArray::export`](crate::DeviceArray::export) fails with.
pub fn array_to_python<'py>(
    py: Python<'py>,
    data: &impl CapsuleArray,
    options: &ExportOptions,
    requested_schema: Option<&Bound<'py, PyAny>>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
    check_request(&data.data_type(), requested_schema, keywords)?;
    let (schema, array) = detached(|| Ok::<_, PyErr>((data.schema()?, data.array(options)?)))?;
    Ok((pack(py, schema)?, pack(py, array)?))
}

/// A stream as the capsule `arrow_device_array_stream` that
/// `__arrow_c_device_stream__(requested_schema=None, **kwargs)` answers with. Nothing is copied.
///
/// Make the stream with [`FFI_ArrowDeviceArrayStream::new`] or [`export_reader`]. Consumers may call it attached to the
/// interpreter or not; while the reader works, the interpreter is free. The stream is released if this fails:
/// [`check_request`](super::check_request) tells before.
///
/// A reader that uses Python itself should know that pyo3 takes a thread for attached that was detached by others than
/// pyo3, within a call from Python (`Python::attach` then attaches nothing); consumers written in C detach so.
///
/// # Errors
/// As [`array_to_python`]; `ValueError` for a stream that was released.
pub fn stream_to_python<'py>(
    py: Python<'py>,
    stream: FFI_ArrowDeviceArrayStream,
    requested_schema: Option<&Bound<'py, PyAny>>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyCapsule>> {
    check_keywords(keywords)?;
    pack(py, outgoing(stream, requested_schema)?)
}

/// A reader of host batches as the capsule `arrow_array_stream` that `__arrow_c_stream__(requested_schema=None)` answers
/// with: for consumers that do not know of devices, pyarrow among them. A device stream becomes such a reader by
/// [`into_host_reader`](crate::DeviceRecordBatchReader::into_host_reader). Else as [`stream_to_python`].
///
/// # Errors
/// As [`stream_to_python`].
pub fn host_stream_to_python<'py>(
    py: Python<'py>,
    reader: impl RecordBatchReader + Send + 'static,
    requested_schema: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let stream = export_reader(reader, &Devices::cpu())?;
    let stream = outgoing(stream, requested_schema)?;
    pack(py, stream::as_host(stream))
}

fn outgoing(
    stream: FFI_ArrowDeviceArrayStream,
    requested_schema: Option<&Bound<'_, PyAny>>,
) -> PyResult<FFI_ArrowDeviceArrayStream> {
    let stream = stream::outgoing(stream)?;
    if requested_schema.is_none() {
        return Ok(stream);
    }
    let (stream, schema) = stream::with_schema(stream)?;
    check_schema(requested_schema, || {
        import_field(schema.as_ref()).map(|field| field.data_type().clone())
    })?;
    Ok(stream)
}
