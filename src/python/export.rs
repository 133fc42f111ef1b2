//! Exports to capsules, and what consumers ask for besides the data: a schema, and keywords that do not exist yet.

use arrow_array::RecordBatchReader;
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, FieldRef};
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

use super::attached::detached;
use super::capsule::{CapsuleSchema, look, pack};

use super::stream::{Detached, HostStream};
use crate::abi::FFI_ArrowDeviceArrayStream;
use crate::abi::c_data::CArray;
use crate::data::DeviceArray;
use crate::device::Devices;
use crate::device::backend::not_supported;
use crate::interchange::schema::import_field;
use crate::interchange::{ExportOptions, SyncPolicy};
use crate::stream::export::export;
use crate::stream::{DeviceRecordBatchReader, upload_reader};

/// Exports a schema as the capsule `arrow_schema`: the result of `__arrow_c_schema__()`. Consumers such as DuckDB call it before
/// they ask for the data, so an object with a stream must be able to answer without consuming the stream.
///
/// ```
/// use arrow_device::DeviceRecordBatchReader;
/// use arrow_device::python::{pyo3::{prelude::*, types::PyCapsule}, schema_to_python};
/// # fn f<'py>(py: Python<'py>, reader: Box<dyn DeviceRecordBatchReader>) -> PyResult<Bound<'py, PyCapsule>> {
/// schema_to_python(py, reader.schema().as_ref())
/// # }
/// ```
///
/// # Errors
/// Raises `ValueError` for names and time zones that C strings cannot hold.
pub fn schema_to_python<'py>(
    py: Python<'py>,
    described: &impl CapsuleSchema,
) -> PyResult<Bound<'py, PyCapsule>> {
    pack(py, described.schema()?)
}

/// Exports an array or a batch as two capsules, `arrow_schema` and `arrow_device_array`: the result of
/// `__arrow_c_device_array__(requested_schema=None, **kwargs)`. Nothing is copied.
///
/// `requested_schema` and `keywords` are the method's arguments. Nothing is converted: if another representation of the same
/// data is requested, the data is exported as it is, which the protocol allows. pyarrow ignores events. For it, and for other
/// consumers that read on the host, use [`SyncPolicy::Wait`](crate::SyncPolicy::Wait).
///
/// # Errors
/// Raises `ValueError` for a requested schema that does not fit the data, `NotImplementedError` for a keyword that is not
/// None, and the errors of [`DeviceArray::export`](crate::DeviceArray::export).
pub fn array_to_python<'py>(
    py: Python<'py>,
    data: impl Into<DeviceArray>,
    options: &ExportOptions,
    requested_schema: Option<&Bound<'py, PyAny>>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
    let data = data.into();
    check_request(data.data_type(), requested_schema, keywords)?;
    let (schema, array) = (data.schema()?, detached(|| data.export_array(options))?);
    Ok((pack(py, schema)?, pack(py, array)?))
}

/// Exports an array or a batch that the host can read as two capsules, `arrow_schema` and `arrow_array`: the result of
/// `__arrow_c_array__(requested_schema=None)`, for consumers that do not support devices, as most do not. Waits until the
/// memory is ready. Nothing is copied. Otherwise this is like [`array_to_python`].
///
/// # Errors
/// Raises `NotImplementedError` if the host cannot read the device's memory, as pyarrow does, and the errors of
/// [`array_to_python`].
pub fn host_array_to_python<'py>(
    py: Python<'py>,
    data: impl Into<DeviceArray>,
    requested_schema: Option<&Bound<'py, PyAny>>,
) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
    let data = data.into();
    let device = data.device();
    check_request(data.data_type(), requested_schema, None)?;
    if !device.is_host_readable() {
        let reason = "the host cannot read this memory; copy the data to the CPU, or use __arrow_c_device_array__";
        return Err(not_supported(device.id(), "__arrow_c_array__", reason).into());
    }
    let options = ExportOptions::new(SyncPolicy::Wait);
    let (schema, array) = (data.schema()?, detached(|| data.export_array(&options))?);
    let array = CArray::from(array).into_arrow();
    Ok((pack(py, schema)?, pack(py, array)?))
}

/// Exports a reader of batches on devices as the capsule `arrow_device_array_stream`: the result of
/// `__arrow_c_device_stream__(requested_schema=None, **kwargs)`. Nothing is copied.
///
/// Consumers may call the stream attached to the interpreter or not; while the reader works, the interpreter is released.
/// [`check_request`] checks the arguments beforehand.
///
/// A reader that uses Python itself should know that pyo3 considers a thread attached during a call from Python even if
/// code other than pyo3 has detached it, as consumers written in C do. `Python::attach` then attaches nothing.
///
/// # Errors
/// Raises the same errors as [`array_to_python`].
pub fn stream_to_python<'py>(
    py: Python<'py>,
    reader: impl DeviceRecordBatchReader + Send + 'static,
    options: ExportOptions,
    requested_schema: Option<&Bound<'py, PyAny>>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let data_type = DataType::Struct(reader.schema().fields().clone());
    check_request(&data_type, requested_schema, keywords)?;
    let stream = export::<FFI_ArrowDeviceArrayStream>(reader, options, Detached::wrap)?;
    pack(py, stream)
}

/// Exports a reader of host batches as the capsule `arrow_array_stream`: the result of
/// `__arrow_c_stream__(requested_schema=None)`, for consumers that do not support devices, such as pyarrow.
///
/// [`into_host_reader`](crate::DeviceRecordBatchReader::into_host_reader) makes such a reader of a device stream. It waits for
/// each batch, and copies only those that the host cannot read. Otherwise this is like [`stream_to_python`].
///
/// # Errors
/// Raises the same errors as [`stream_to_python`].
pub fn host_stream_to_python<'py>(
    py: Python<'py>,
    reader: impl RecordBatchReader + Send + 'static,
    requested_schema: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let data_type = DataType::Struct(reader.schema().fields().clone());
    check_request(&data_type, requested_schema, None)?;
    let reader = upload_reader(reader, &Devices::cpu());
    let options = ExportOptions::new(SyncPolicy::Wait);
    pack(py, export::<HostStream>(reader, options, Detached::wrap)?)
}

/// Checks the arguments of `__arrow_c_device_array__` and `__arrow_c_device_stream__` for data of this type (a struct for
/// batches).
///
/// [`array_to_python`] and [`stream_to_python`] do this themselves. An
/// object whose stream can be taken only once checks the arguments before it takes the stream:
///
/// ```no_run
/// use arrow_device::DeviceRecordBatchReader;
/// use arrow_device::python::pyo3::{prelude::*, types::PyDict};
/// # fn f(reader: Box<dyn DeviceRecordBatchReader>, schema: Option<&Bound<'_, PyAny>>, kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
/// let fields = reader.schema().fields().clone();
/// arrow_device::python::check_request(&arrow_schema::DataType::Struct(fields), schema, kwargs)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Raises `ValueError` for a requested schema that does not fit the data, and `NotImplementedError` for a keyword that is
/// not None.
pub fn check_request(
    data_type: &DataType,
    requested_schema: Option<&Bound<'_, PyAny>>,
    keywords: Option<&Bound<'_, PyDict>>,
) -> PyResult<()> {
    // Keywords that do not exist yet are accepted only if they are None.
    let mut keywords = keywords.into_iter().flatten();
    if let Some((name, _)) = keywords.find(|(_, value)| !value.is_none()) {
        let text = format!("unknown keyword argument: {name}");
        return Err(PyNotImplementedError::new_err(text));
    }
    let Some(requested) = requested_schema.filter(|requested| !requested.is_none()) else {
        return Ok(());
    };
    let requested = look(requested, |schema: &FFI_ArrowSchema| import_field(schema))??;
    // A request for another representation of the same data is answered with the data as it is, as the protocol allows.
    difference(data_type, requested.data_type(), "").map_or(Ok(()), |difference| {
        let text = format!("the requested schema does not fit the data: {difference}");
        Err(PyValueError::new_err(text))
    })
}

/// Explains why two types are not representations of the same data, if they are not.
fn difference(actual: &DataType, requested: &DataType, path: &str) -> Option<String> {
    let at = if path.is_empty() { "the data" } else { path };
    let ((kind, a), (other_kind, b)) = (contents(actual), contents(requested));
    if kind != other_kind {
        return Some(format!("{at} is {actual}, {requested} is asked for"));
    }
    if a.len() != b.len() {
        let (a, b) = (a.len(), b.len());
        return Some(format!("{at} has {a} fields, {b} are asked for"));
    }
    a.iter().zip(&b).find_map(|(a, b)| {
        let path = match path {
            "" => a.name().clone(),
            path => format!("{path}.{}", a.name()),
        };
        if matches!(kind, "struct" | "union") && a.name() != b.name() {
            return Some(format!("{path} is asked for as {:?}", b.name()));
        }
        difference(a.data_type(), b.data_type(), &path)
    })
}

/// What a value is, apart from its width, its unit and its encoding; and the fields in it.
fn contents(data_type: &DataType) -> (&'static str, Vec<&FieldRef>) {
    use DataType::*;
    let kind = match data_type {
        Dictionary(_, values) => return contents(values),
        RunEndEncoded(_, values) => return contents(values.data_type()),
        List(item)
        | LargeList(item)
        | ListView(item)
        | LargeListView(item)
        | FixedSizeList(item, _) => return ("list", vec![item]),
        Struct(fields) => return ("struct", fields.iter().collect()),
        Union(fields, _) => return ("union", fields.iter().map(|(_, field)| field).collect()),
        // Names of a map's fields do not matter.
        Map(entries, _) => return ("map", contents(entries.data_type()).1),
        Null => "null",
        Boolean => "boolean",
        Utf8 | LargeUtf8 | Utf8View => "text",
        Binary | LargeBinary | BinaryView | FixedSizeBinary(_) => "bytes",
        Date32 | Date64 => "date",
        Time32(_) | Time64(_) => "time",
        Timestamp(_, None) => "local timestamp",
        Timestamp(_, Some(_)) => "timestamp",
        Duration(_) => "duration",
        Interval(_) => "interval",
        _ => "number",
    };
    (kind, Vec::new())
}
