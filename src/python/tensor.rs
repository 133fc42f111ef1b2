//! DLPack capsules: `dltensor` and, since version 1.0, `dltensor_versioned`.
//!
//! A consumer that takes the tensor renames the capsule. The destructor deletes the tensor if the capsule still has its
//! first name.

use std::ffi::CStr;
use std::ptr::NonNull;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};
use pyo3::{ffi, intern};

use super::attached::{DropAttached, detached};
use super::wrong_type;
use crate::abi::ArrowDeviceType;
use crate::data::DeviceArray;
use crate::device::Devices;
use crate::dlpack::{
    DLDevice, DLManagedTensor, DLManagedTensorVersioned, DlpackOptions, DlpackStream, delete,
};
use crate::error::Error;

/// The name of a capsule, and its name once a consumer has taken the tensor.
type Names = [&'static CStr; 2];

const VERSIONED: Names = [c"dltensor_versioned", c"used_dltensor_versioned"];
const UNVERSIONED: Names = [c"dltensor", c"used_dltensor"];

/// Exports the values of a column as the result of
/// `__dlpack__(stream=None, max_version=None, dl_device=None, copy=None)`. Nothing is copied unless `copy` is `True`; the consumer
/// may then write to the tensor. See [`DeviceArray::export_dlpack`] for the types, and [`DlpackStream`] for `stream`.
///
/// ```
/// use arrow_device::DeviceArray;
/// use arrow_device::python::pyo3::{prelude::*, types::PyCapsule};
/// use arrow_device::python::tensor_to_python;
///
/// struct Column(DeviceArray); // a #[pyclass]
///
/// impl Column {
///     // #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
///     fn __dlpack__<'py>(
///         &self,
///         py: Python<'py>,
///         stream: Option<i64>,
///         max_version: Option<(u32, u32)>,
///         dl_device: Option<(i32, i32)>,
///         copy: Option<bool>,
///     ) -> PyResult<Bound<'py, PyCapsule>> {
///         // SAFETY: the DLPack protocol obliges the Python code that calls this to pass a live stream, and not to write
///         // to a tensor that is not a copy.
///         unsafe { tensor_to_python(py, &self.0, stream, max_version, dl_device, copy) }
///     }
/// }
/// ```
///
/// # Safety
/// - `stream`, if it is above 2, is the handle of a live stream of the column's device (see
///   [`DlpackStream::from_number`]);
/// - if neither a copy nor a `max_version` of at least 1.0 is asked for, the consumer does not write to the memory: before version
///   1.0 a tensor cannot say that it is read-only.
///
/// # Errors
/// Raises `BufferError` for what DLPack cannot express, so that a consumer can take another way: types that it does not have,
/// booleans, nulls, and another device than the column's. Raises `ValueError` for a stream that the device cannot have,
/// `BufferError` for one that its backend cannot wait on, and the errors of the device.
pub unsafe fn tensor_to_python<'py>(
    py: Python<'py>,
    column: &DeviceArray,
    stream: Option<i64>,
    max_version: Option<(u32, u32)>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let device = DLDevice::try_from(column.device().id()).map_err(refused)?;
    if dl_device.is_some_and(|asked| asked != (device.device_type.value(), device.device_id)) {
        return Err(PyBufferError::new_err(format!(
            "the data is on {}, and a copy to another device is not supported",
            column.device()
        )));
    }
    // SAFETY: the caller guarantees that the stream is live (first point of `# Safety`).
    let stream = unsafe { DlpackStream::from_number(stream) };
    // SAFETY: the stream is only checked here.
    unsafe { stream.wait(column.device(), None) }?;
    let options = DlpackOptions {
        copy: copy == Some(true),
        ..DlpackOptions::new(stream)
    };
    let tensor = detached(|| column.export_dlpack(&options)).map_err(refused)?;
    // SAFETY: the tensors were just made. The caller guarantees that a consumer that asks for the unversioned struct does not
    // write unless it is a copy (second point of `# Safety`).
    unsafe {
        match max_version {
            Some((1.., _)) => pack(py, tensor.into_versioned(), VERSIONED),
            _ => pack(py, tensor.into_unversioned(), UNVERSIONED),
        }
    }
}

/// The array API standard asks for `BufferError` where there is no such tensor.
fn refused(e: Error) -> PyErr {
    match e {
        Error::InvalidArgument(_) | Error::NotSupported { .. } => {
            PyBufferError::new_err(e.to_string())
        }
        e => e.into(),
    }
}

/// # Safety
/// `tensor` is a tensor of this crate, and nothing else deletes it.
unsafe fn pack<T>(py: Python<'_>, tensor: *mut T, names: Names) -> PyResult<Bound<'_, PyCapsule>> {
    // SAFETY: the pointer of a tensor is not null. Without a capsule it is deleted here, once. The destructor may run on any
    // thread, as the deleter may.
    unsafe {
        let pointer = NonNull::new_unchecked(tensor.cast());
        let destroy = Some(destroy::<T> as ffi::PyCapsule_Destructor);
        PyCapsule::new_with_pointer_and_destructor(py, pointer, names[0], destroy)
            .inspect_err(|_| delete(tensor))
    }
}

/// Deletes the tensor unless a consumer has taken it, which has then renamed the capsule. A deleter of this crate never unwinds.
unsafe extern "C" fn destroy<T>(capsule: *mut ffi::PyObject) {
    for [name, _] in [VERSIONED, UNVERSIONED] {
        // SAFETY: only `pack` installs this destructor, for a tensor of this type. Python calls it once, attached.
        unsafe {
            if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) == 1 {
                return delete(ffi::PyCapsule_GetPointer(capsule, name.as_ptr()).cast::<T>());
            }
        }
    }
}

/// Imports a tensor from any object with `__dlpack__` and `__dlpack_device__`. The object makes the device's default queue
/// wait until the memory is ready. See [`DeviceArray::import_dlpack`] for the types.
///
/// Memory that the host can read (the CPU's, page-locked, managed) is copied once, within its device, and the tensor is
/// deleted after the copy. Columns become Rust slices there, but NumPy and PyTorch may write to a tensor that they have
/// exported, even to one marked read-only, which may be a read-only view of an array that is written. Only a tensor that
/// the producer marks as a copy ([`IS_COPIED`](crate::dlpack::DLManagedTensorVersioned::IS_COPIED)) is shared. The interpreter is not
/// released during the copy, so that Python code does not write meanwhile.
///
/// Memory that the host cannot read is never copied. What is written to it later changes the column's values, and nothing
/// that Rust code relies on.
///
/// ```no_run
/// use arrow_device::python::{pyo3::prelude::*, tensor_from_python};
/// # fn f(object: &Bound<'_, PyAny>) -> PyResult<()> {
/// let column = tensor_from_python(object)?;
/// println!("{} rows on {}", column.len(), column.device());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Raises `TypeError` for any other object, `NotImplementedError` for a device that is not available or whose tensors this
/// crate does not exchange, `ValueError` for a tensor that is malformed, not compact, or of a type that Arrow does not have,
/// `MemoryError` if there is no memory for the copy, and the errors of the methods. The tensor is then deleted.
pub fn tensor_from_python(object: &Bound<'_, PyAny>) -> PyResult<DeviceArray> {
    let (array, is_copied) = import(object)?;
    if is_copied || !array.device().is_host_readable() {
        return Ok(array);
    }
    Ok(array.compact()?)
}

/// Imports a tensor like [`tensor_from_python`], but never copies: the column shares the tensor's memory and keeps it alive.
///
/// ```no_run
/// use arrow_device::python::{pyo3::prelude::*, tensor_from_python_shared};
/// # fn f(weights: &Bound<'_, PyAny>) -> PyResult<()> {
/// // SAFETY: the array was made for this call, and nothing else in the program uses it.
/// let column = unsafe { tensor_from_python_shared(weights) }?;
/// # Ok(())
/// # }
/// ```
///
/// # Safety
/// Nothing writes to the memory while the column, or anything made from it without a copy, lives. A read-only mark does not
/// guarantee that.
///
/// # Errors
/// Raises the same errors as [`tensor_from_python`].
pub unsafe fn tensor_from_python_shared(object: &Bound<'_, PyAny>) -> PyResult<DeviceArray> {
    Ok(import(object)?.0)
}

/// Returns the column, which is not copied, and whether the producer has made the tensor as a copy for this import alone. If not,
/// others may write to the memory.
fn import(object: &Bound<'_, PyAny>) -> PyResult<(DeviceArray, bool)> {
    let py = object.py();
    let Some(of_device) = object.getattr_opt(intern!(py, "__dlpack_device__"))? else {
        return Err(wrong_type(object, "an object with __dlpack_device__")?);
    };
    let (device_type, device_id) = of_device.call0()?.extract()?;
    let device_type = ArrowDeviceType::new(device_type);
    let device = DLDevice {
        device_type,
        device_id,
    };
    let device = detached(|| Devices::global().get(device.into()))?;
    let queue = device.default_queue();
    let arguments = PyDict::new(py);
    arguments.set_item("stream", queue.dlpack_stream()?)?;
    let method = object.getattr(intern!(py, "__dlpack__"))?;
    arguments.set_item("max_version", (1, 0))?;
    let answer = match method.call((), Some(&arguments)) {
        // Objects from before version 1.0 do not accept this argument.
        Err(e) if e.is_instance_of::<PyTypeError>(py) => {
            arguments.del_item("max_version")?;
            method.call((), Some(&arguments))?
        }
        answer => answer?,
    };
    let refused =
        || PyTypeError::new_err("__dlpack__ returned no tensor, or one that was used before");
    let capsule = answer.cast::<PyCapsule>().map_err(|_| refused())?;
    // SAFETY: the DLPack protocol requires the producer to export a valid tensor, which `take` has just taken over, which the array
    // keeps, and to make the given stream wait, which is the queue's. That nothing writes is the callers' part: `tensor_from_python` copies, and
    // `tensor_from_python_shared` requires it.
    Ok(unsafe {
        if let Some(tensor) = take::<DLManagedTensorVersioned>(capsule, VERSIONED)? {
            let array = crate::dlpack::import(tensor, &queue, DropAttached::new)?;
            (
                array,
                (*tensor).flags & DLManagedTensorVersioned::IS_COPIED != 0,
            )
        } else {
            let tensor = take::<DLManagedTensor>(capsule, UNVERSIONED)?.ok_or_else(refused)?;
            (
                crate::dlpack::import(tensor, &queue, DropAttached::new)?,
                false,
            )
        }
    })
}

/// Takes the tensor out of a capsule of this name. Renames the capsule, so that its destructor does not delete the tensor.
fn take<T>(capsule: &Bound<'_, PyCapsule>, [name, used]: Names) -> PyResult<Option<*mut T>> {
    // Without the GIL two threads could take the tensor at once.
    with_critical_section(capsule, || {
        if !capsule.is_valid_checked(Some(name)) {
            return Ok(None);
        }
        let pointer = capsule.pointer_checked(Some(name))?;
        // SAFETY: this thread is attached, the object is a capsule, and the name is static, as `PyCapsule_SetName` requires.
        match unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } {
            0 => Ok(Some(pointer.cast().as_ptr())),
            _ => Err(PyErr::fetch(capsule.py())),
        }
    })
}
