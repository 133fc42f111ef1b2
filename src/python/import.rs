//! Imports from capsules, and from objects that have the methods.

use std::sync::Arc;

use arrow_data::ffi::FFI_ArrowArray;
use arrow_schema::SchemaRef;
use arrow_schema::ffi::FFI_ArrowSchema;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use super::attached::detached;
use super::capsule::{InCapsule, holds, look, unpack};

use super::stream::{HostStream, Reader, released_attached};
use super::wrong_type;
use crate::abi::c_data::CArray;
use crate::abi::{CStream, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream};
use crate::data::DeviceArray;
use crate::interchange::schema::{import_field, import_schema};
use crate::interchange::{ImportOptions, Validation};
use crate::stream::DeviceRecordBatchReader;

/// The methods of arrays and batches, the preferred one first.
const ARRAY: [&str; 2] = ["__arrow_c_device_array__", "__arrow_c_array__"];
/// The methods of streams, the preferred one first.
const STREAM: [&str; 2] = ["__arrow_c_device_stream__", "__arrow_c_stream__"];

/// Imports an array or a batch: a [`DeviceArray`](crate::DeviceArray) or a
/// [`DeviceRecordBatch`](crate::DeviceRecordBatch), whichever the caller asks for. Nothing is copied.
///
/// `object` has the method `__arrow_c_device_array__`, or else `__arrow_c_array__` (whose data is on the CPU), or it is the
/// pair of capsules that one of these returns. Values are checked.
///
/// ```no_run
/// use arrow_device::python::{array_from_python, pyo3::prelude::*};
/// use arrow_device::{DeviceArray, DeviceRecordBatch};
/// # fn f(object: &Bound<'_, PyAny>) -> PyResult<()> {
/// let batch: DeviceRecordBatch = array_from_python(object)?;
/// let array = array_from_python::<DeviceArray>(object)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Raises `TypeError` for any other object, `ValueError` for capsules that have another name or were used before and for
/// invalid data, `NotImplementedError` for a device that is not available, and the errors of the method. The array is then
/// released, except with a wrong name or an invalid schema, which leave it in its capsule.
pub fn array_from_python<T: TryFrom<DeviceArray>>(object: &Bound<'_, PyAny>) -> PyResult<T>
where
    PyErr: From<T::Error>,
{
    let is_pair = object.is_instance_of::<PyTuple>();
    let other = (STREAM, "a stream, not a single array or batch");
    let answer = answer(object, is_pair, ARRAY, other)?;
    let Ok((schema, array)) = answer.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() else {
        return Err(wrong_type(&answer, "a pair of capsules")?);
    };
    let field = look(&schema, |schema: &FFI_ArrowSchema| import_field(schema))??;
    let array = if holds::<FFI_ArrowArray>(&array) {
        FFI_ArrowDeviceArray::from(CArray::from_arrow(unpack(&array)?))
    } else {
        unpack(&array)?
    };
    let (array, field) = (released_attached(array), Arc::new(field));
    // SAFETY: the protocol requires the capsules to hold structs that keep to the interface, and values are checked.
    let array = detached(|| unsafe { DeviceArray::import_as(array, field, &checked()) })?;
    Ok(T::try_from(array)?)
}

/// Imports a stream of record batches. One of arrays of another type, such as a column of pyarrow's (`ChunkedArray`), raises `ValueError`:
/// import its arrays one by one, with [`array_from_python`].
///
/// `object` has the method `__arrow_c_device_stream__`, or else `__arrow_c_stream__` (whose data is on the CPU), or it is
/// the capsule that one of these returns. Values are checked, batch by batch. The reader releases the interpreter (the GIL) during
/// each `next`.
///
/// ```no_run
/// use arrow_device::python::{pyo3::prelude::*, stream_from_python};
/// # fn f(object: &Bound<'_, PyAny>) -> PyResult<()> {
/// for batch in stream_from_python(object)? {
///     println!("{} rows", batch?.num_rows());
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Raises the same errors as [`array_from_python`], and `OSError` with the errno and text of a producer that fails.
pub fn stream_from_python(
    object: &Bound<'_, PyAny>,
) -> PyResult<impl DeviceRecordBatchReader + Send + use<>> {
    let other = (ARRAY, "a single array or batch, not a stream");
    let is_capsule = holds::<FFI_ArrowDeviceArrayStream>(object) || holds::<HostStream>(object);
    let answer = answer(object, is_capsule, STREAM, other)?;
    if holds::<HostStream>(&answer) {
        return reader::<HostStream>(&answer);
    }
    reader::<FFI_ArrowDeviceArrayStream>(&answer)
}

/// Imports the schema of record batches.
///
/// `object` has the method `__arrow_c_schema__`, or it is the capsule that this returns. The capsule keeps its schema.
///
/// ```no_run
/// use arrow_device::python::{pyo3::prelude::*, schema_from_python};
/// # fn f(object: &Bound<'_, PyAny>) -> PyResult<()> {
/// println!("{} columns", schema_from_python(object)?.fields().len());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Raises `TypeError` for any other object, `ValueError` for a capsule of another name, an invalid schema, and the type of arrays that are
/// no batches, and the errors of the method.
pub fn schema_from_python(object: &Bound<'_, PyAny>) -> PyResult<SchemaRef> {
    let answer = match object.getattr_opt("__arrow_c_schema__")? {
        Some(method) => method.call0()?,
        None if object.is_instance_of::<PyCapsule>() => object.clone(),
        None => return Err(wrong_type(object, "an object with __arrow_c_schema__")?),
    };
    Ok(look(&answer, import_schema)??)
}

/// Reads the stream in a capsule.
fn reader<S: CStream + InCapsule>(
    capsule: &Bound<'_, PyAny>,
) -> PyResult<Box<dyn DeviceRecordBatchReader + Send>> {
    // SAFETY: the protocol requires the capsule to hold a stream that keeps to the interface, and values are checked.
    let reader = unsafe { Reader::new(unpack::<S>(capsule)?, checked()) }?;
    Ok(Box::new(reader))
}

fn checked() -> ImportOptions {
    ImportOptions {
        validation: Validation::Full,
        ..Default::default()
    }
}

/// Calls the first of the methods that the object has. Returns the object itself if it is already such a result. If it has
/// one of the `other` methods instead, the error says what it is.
fn answer<'py>(
    object: &Bound<'py, PyAny>,
    is_answer: bool,
    methods: [&str; 2],
    other: ([&str; 2], &str),
) -> PyResult<Bound<'py, PyAny>> {
    if is_answer {
        return Ok(object.clone());
    }
    for method in methods {
        if let Some(method) = object.getattr_opt(method)? {
            // Some producers have no default for `requested_schema`.
            return method.call1((object.py().None(),));
        }
    }
    let name = object.get_type().name()?;
    let mut text = format!(
        "an object of type {name} has neither {} nor {}",
        methods[0], methods[1]
    );
    for method in other.0 {
        if object.hasattr(method)? {
            text.push_str(&format!("; it has {method}, so it is {}", other.1));
            break;
        }
    }
    Err(PyTypeError::new_err(text))
}
