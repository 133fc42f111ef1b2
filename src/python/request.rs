//! Checks what a consumer asks for besides the data: a schema, and keywords that do not exist yet.

use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, FieldRef};
use pyo3::exceptions::{PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::capsule;
use crate::error::Result;
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
    check_keywords(keywords)?;
    check_schema(requested_schema, || Ok(data_type.clone()))
}

/// Accepts unknown keywords only if they are None.
pub(super) fn check_keywords(keywords: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
    let unknown: Vec<String> = keywords
        .into_iter()
        .flatten()
        .filter(|(_, value)| !value.is_none())
        .map(|(name, _)| name.to_string())
        .collect();
    if unknown.is_empty() {
        return Ok(());
    }
    Err(PyNotImplementedError::new_err(format!(
        "unknown keyword arguments: {}",
        unknown.join(", ")
    )))
}

/// Accepts a request for another representation of the same data, which is answered with the data as it is, as the protocol
/// allows. Refuses a request for other data.
pub(super) fn check_schema(
    requested: Option<&Bound<'_, PyAny>>,
    actual: impl FnOnce() -> Result<DataType>,
) -> PyResult<()> {
    let Some(requested) = requested.filter(|requested| !requested.is_none()) else {
        return Ok(());
    };
    let requested = capsule::look(requested, |schema: &FFI_ArrowSchema| import_field(schema))??;
    let actual = actual()?;
    match difference(&actual, requested.data_type(), "") {
        None => Ok(()),
        Some(difference) => Err(PyValueError::new_err(format!(
            "the requested schema does not fit the data: {difference}"
        ))),
    }
}

/// Explains why two types are not representations of the same data, if they are not.
fn difference(actual: &DataType, requested: &DataType, path: &str) -> Option<String> {
    let (a, b) = (values(actual), values(requested));
    if kind(a) != kind(b) {
        let at = if path.is_empty() { "the data" } else { path };
        return Some(format!("{at} is {actual}, {requested} is asked for"));
    }
    let named = matches!(a, DataType::Struct(_) | DataType::Union(..));
    let (a, b) = (fields(a), fields(b));
    if a.len() != b.len() {
        let at = if path.is_empty() { "the data" } else { path };
        return Some(format!(
            "{at} has {} fields, {} are asked for",
            a.len(),
            b.len()
        ));
    }
    a.iter().zip(&b).find_map(|(a, b)| {
        let path = match path {
            "" => a.name().clone(),
            path => format!("{path}.{}", a.name()),
        };
        if named && a.name() != b.name() {
            return Some(format!("{path} is asked for as {:?}", b.name()));
        }
        difference(a.data_type(), b.data_type(), &path)
    })
}

/// The type of the values, without their encoding.
fn values(mut data_type: &DataType) -> &DataType {
    loop {
        data_type = match data_type {
            DataType::Dictionary(_, values) => values,
            DataType::RunEndEncoded(_, values) => values.data_type(),
            data_type => return data_type,
        }
    }
}

/// What a value is, apart from its width and unit.
fn kind(data_type: &DataType) -> &'static str {
    use DataType::*;
    match data_type {
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
        List(_) | LargeList(_) | ListView(_) | LargeListView(_) | FixedSizeList(..) => "list",
        Struct(_) => "struct",
        Union(..) => "union",
        Map(..) => "map",
        _ => "number",
    }
}

fn fields(data_type: &DataType) -> Vec<&FieldRef> {
    use DataType::*;
    match data_type {
        List(item) | LargeList(item) | ListView(item) | LargeListView(item) => vec![item],
        FixedSizeList(item, _) => vec![item],
        // Names of a map's fields do not matter.
        Map(entries, _) => match entries.data_type() {
            Struct(fields) => fields.iter().collect(),
            _ => vec![entries],
        },
        Struct(fields) => fields.iter().collect(),
        Union(fields, _) => fields.iter().map(|(_, field)| field).collect(),
        _ => Vec::new(),
    }
}
