//! In: from capsules, or from objects that have the methods.

use arrow_schema::ffi::FFI_ArrowSchema;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::attached::{Detached, detached};
use super::capsule::{HostArray, holds, look, unpack};
use super::data::{CapsuleArray, CapsuleStream};
use super::stream::{self, HostStream};
use crate::abi::{FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream};
use crate::interchange::{ImportOptions, Validation};

/// Takes over an array or a batch: a [`DeviceArray`](crate::DeviceArray) or a
/// [`DeviceRecordBatch`](crate::DeviceRecordBatch), as the caller asks. Nothing is copied.
///
/// `object` has `__arrow_c_device_array__`, or else `__arrow_c_array__` (which is on the CPU); or it is the pair of
/// capsules that one of these answers. Values are checked.
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
/// `TypeError` for another object; `ValueError` for capsules of the wrong name, ones that were used before, and data
/// that breaks a rule; `NotImplementedError` for a device that is not there; what the method raises. The array is
/// released then, unless it was left in its capsule (a wrong name, a schema that breaks a rule).
pub fn array_from_python<T: CapsuleArray>(object: &Bound<'_, PyAny>) -> PyResult<T> {
    // SAFETY: values are checked.
    unsafe { array_from_python_with(object, &checked()) }
}

/// As [`array_from_python`], with options.
///
/// # Safety
/// Without [`Validation::Full`] the values are valid for their type.
///
/// # Errors
/// As [`array_from_python`].
pub unsafe fn array_from_python_with<T: CapsuleArray>(
    object: &Bound<'_, PyAny>,
    options: &ImportOptions,
) -> PyResult<T> {
    let methods = ["__arrow_c_device_array__", "__arrow_c_array__"];
    let answer = answer(object, object.is_instance_of::<PyTuple>(), &methods)?;
    let Ok((schema, array)) = answer.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>() else {
        return Err(PyTypeError::new_err(format!(
            "expected a pair of capsules, got an object of type {}",
            answer.get_type().name()?
        )));
    };
    let as_type = look(&schema, |schema: &FFI_ArrowSchema| T::parse(schema))??;
    let array = if holds::<HostArray>(&array) {
        unpack::<HostArray>(&array)?.on_cpu()
    } else {
        unpack::<FFI_ArrowDeviceArray>(&array)?
    };
    let array = stream::released_attached(array);
    // SAFETY: the capsules' producer vouches for the structs, the caller for values that are not checked.
    let imported = detached(|| unsafe { T::import(array, as_type, options) })?;
    Ok(imported)
}

/// Takes over a stream: a [`DeviceRecordBatchStreamReader`](crate::DeviceRecordBatchStreamReader) or a
/// [`DeviceArrayStreamReader`](crate::DeviceArrayStreamReader), as the caller asks.
///
/// `object` has `__arrow_c_device_stream__`, or else `__arrow_c_stream__` (which is on the CPU); or it is the capsule
/// that one of these answers. Values are checked, batch by batch.
///
/// ```no_run
/// use arrow_device::python::{Detached, pyo3::prelude::*, stream_from_python};
/// use arrow_device::{DeviceRecordBatchReader, DeviceRecordBatchStreamReader};
/// # fn f(object: &Bound<'_, PyAny>) -> PyResult<()> {
/// let stream = stream_from_python::<DeviceRecordBatchStreamReader>(object)?;
/// for batch in Detached::new(stream.into_host_reader()) {
///     let batch = batch.map_err(arrow_device::Error::from)?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`array_from_python`]; `OSError` with the errno and text of a producer that fails.
pub fn stream_from_python<S: CapsuleStream>(object: &Bound<'_, PyAny>) -> PyResult<Detached<S>> {
    // SAFETY: values are checked.
    unsafe { stream_from_python_with(object, checked()) }
}

/// As [`stream_from_python`], with options.
///
/// # Safety
/// As [`array_from_python_with`].
///
/// # Errors
/// As [`stream_from_python`].
pub unsafe fn stream_from_python_with<S: CapsuleStream>(
    object: &Bound<'_, PyAny>,
    options: ImportOptions,
) -> PyResult<Detached<S>> {
    let methods = ["__arrow_c_device_stream__", "__arrow_c_stream__"];
    let is_capsule = holds::<FFI_ArrowDeviceArrayStream>(object) || holds::<HostStream>(object);
    let answer = answer(object, is_capsule, &methods)?;
    let stream = if holds::<HostStream>(&answer) {
        stream::incoming_host(unpack(&answer)?)?
    } else {
        stream::incoming(unpack(&answer)?)?
    };
    // SAFETY: as in `array_from_python_with`.
    let reader = unsafe { S::open(stream, options) }?;
    Ok(Detached::new(reader))
}

fn checked() -> ImportOptions {
    ImportOptions::default().with_validation(Validation::Full)
}

/// What the first of the methods that the object has answers; the object itself if it is such an answer.
fn answer<'py>(
    object: &Bound<'py, PyAny>,
    is_answer: bool,
    methods: &[&str; 2],
) -> PyResult<Bound<'py, PyAny>> {
    if is_answer {
        return Ok(object.clone());
    }
    for method in methods {
        if let Some(method) = object.getattr_opt(*method)? {
            return method.call0();
        }
    }
    Err(PyTypeError::new_err(format!(
        "an object of type {} has neither {} nor {}",
        object.get_type().name()?,
        methods[0],
        methods[1]
    )))
}
