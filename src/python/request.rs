//! Checks what a consumer asks for besides the data: a schema, and keywords that do not exist yet.

use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, FieldRef};
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::capsule;
use crate::interchange::schema::import_field;

/// Checks the arguments of `__arrow_c_device_array__` and `__arrow_c_device_stream__` for data of this type (a struct for
/// batches).
///
/// [`array_to_python`](super::array_to_python) and [`stream_to_python`](super::stream_to_python) do this themselves. An
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
    let unknown = keywords
        .into_iter()
        .flatten()
        .find(|(_, value)| !value.is_none());
    if let Some((name, _)) = unknown {
        let text = format!("unknown keyword argument: {name}");
        return Err(PyNotImplementedError::new_err(text));
    }
    let Some(requested) = requested_schema.filter(|requested| !requested.is_none()) else {
        return Ok(());
    };
    let requested = capsule::look(requested, |schema: &FFI_ArrowSchema| import_field(schema))??;
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
