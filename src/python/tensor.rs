//! DLPack capsules: `dltensor` and, since version 1.0, `dltensor_versioned`.
//!
//! A consumer that takes a capsule's tensor renames the capsule; the destructor of one that still has its name deletes
//! the tensor.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use arrow_schema::DataType;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};
use pyo3::{Borrowed, ffi, intern};

use super::attached::{detached, drop_attached};
use crate::abi::{ArrowDeviceType, guard};
use crate::data::DeviceArray;
use crate::device::{Device, Devices, Queue};
use crate::dlpack::{
    DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DlpackOptions,
    DlpackStream, DlpackTensor, Managed,
};

const VERSIONED: &CStr = c"dltensor_versioned";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";
const UNVERSIONED: &CStr = c"dltensor";
const USED_UNVERSIONED: &CStr = c"used_dltensor";

/// The values of a column as what `__dlpack__(stream=None, max_version=None, dl_device=None, copy=None)` answers with;
/// see [`DeviceArray::export_dlpack`] for what goes out, and [`DlpackStream`] for `stream`. Nothing is copied.
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
///         // to a tensor of this class.
///         unsafe { tensor_to_python(py, &self.0, stream, max_version, dl_device, copy) }
///     }
/// }
/// ```
///
/// # Safety
/// - `stream`, if it is above 2, is the handle of a live stream of the column's device (see
///   [`DlpackStream::from_number`]);
/// - if no `max_version` of at least 1.0 is asked for, the consumer does not write to the memory: before version 1.0 a
///   tensor cannot say that it is read-only.
///
/// # Errors
/// Raises `BufferError` for another device than the column's, and if a copy is asked for; `ValueError` for a column that is no
/// tensor, booleans, nulls, and a stream that the device cannot have.
pub unsafe fn tensor_to_python<'py>(
    py: Python<'py>,
    column: &DeviceArray,
    stream: Option<i64>,
    max_version: Option<(u32, u32)>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<Bound<'py, PyCapsule>> {
    if copy == Some(true) {
        return Err(PyBufferError::new_err(
            "no copies are made here; bring it elsewhere first",
        ));
    }
    let device = DLDevice::of(column.device().id())?;
    if dl_device.is_some_and(|asked| asked != (device.device_type.value(), device.device_id)) {
        return Err(PyBufferError::new_err(format!(
            "the data is on {}, and no copies are made here",
            column.device()
        )));
    }
    if *column.data_type() == DataType::Boolean {
        return Err(PyValueError::new_err(
            "booleans have bits, which no tensor has; cast them to UInt8",
        ));
    }
    let tensor = detached(|| {
        // SAFETY: the caller guarantees that the stream is live (first point of `# Safety`).
        let stream = unsafe { DlpackStream::from_number(stream) };
        column.export_dlpack(&DlpackOptions::new(stream))
    })?;
    // SAFETY: the caller guarantees that a consumer that asks for the unversioned struct does not write (second point of
    // `# Safety`).
    unsafe { pack(py, tensor, max_version.is_some_and(|(major, _)| major >= 1)) }
}

/// # Safety
/// As [`DlpackTensor::into_unversioned`] if not `versioned`.
unsafe fn pack(
    py: Python<'_>,
    tensor: DlpackTensor,
    versioned: bool,
) -> PyResult<Bound<'_, PyCapsule>> {
    // SAFETY: the pointers are not null, names are static; the destructor deletes the tensor unless a consumer has
    // taken it, on whatever thread; without a capsule it is deleted here. Before 1.0 the caller guarantees that nobody writes.
    unsafe {
        if versioned {
            let tensor = tensor.into_versioned();
            let pointer = NonNull::new_unchecked(tensor.cast());
            let delete = Some(delete_versioned as ffi::PyCapsule_Destructor);
            PyCapsule::new_with_pointer_and_destructor(py, pointer, VERSIONED, delete)
                .inspect_err(|_| drop(Original(tensor)))
        } else {
            let tensor = tensor.into_unversioned();
            let pointer = NonNull::new_unchecked(tensor.cast());
            let delete = Some(delete_unversioned as ffi::PyCapsule_Destructor);
            PyCapsule::new_with_pointer_and_destructor(py, pointer, UNVERSIONED, delete)
                .inspect_err(|_| drop(Original(tensor)))
        }
    }
}

/// A producer's tensor: dropping it calls the deleter.
struct Original<T: Managed>(*mut T);

// SAFETY: only the deleter is called, once, which may happen on any thread (DLPack).
unsafe impl<T: Managed> Send for Original<T> {}

impl<T: Managed> Drop for Original<T> {
    fn drop(&mut self) {
        // SAFETY: a tensor that was taken from its producer, and lives until its deleter is called.
        if let Some(deleter) = unsafe { T::deleter(self.0) } {
            // A drop cannot report a panic.
            // SAFETY: this is the one call.
            let _ = guard::call_foreign("deleter", || unsafe { deleter(self.0) });
        }
    }
}

/// What [`held`] puts before a tensor.
struct Held<T: Managed> {
    tensor: T,
    original: Original<T>,
}

/// The same tensor, deleted as what comes from Python must be released.
///
/// # Safety
/// `original` was taken from its producer.
unsafe fn held<T: Managed>(original: *mut T) -> *mut T {
    // SAFETY: the caller's; of another version nothing more is read.
    let version = unsafe { T::version(original) };
    if version.is_some_and(|version| version.major != DLPackVersion::CURRENT.major) {
        // It will be refused, and deleted at once: on this thread, which is attached.
        return original;
    }
    // SAFETY: as above: of a version that has a tensor there. A copy of plain members.
    let tensor = unsafe { T::tensor(original).read() };
    let held = Box::into_raw(Box::new(Held {
        tensor: T::new(tensor, delete_held::<T>),
        original: Original(original),
    }));
    // SAFETY: just made, and nobody else has it.
    unsafe {
        let tensor = &raw mut (*held).tensor;
        T::set_manager_ctx(tensor, held.cast());
        tensor
    }
}

/// # Safety
/// A tensor of [`held`], once.
unsafe extern "C-unwind" fn delete_held<T: Managed>(tensor: *mut T) {
    // SAFETY: the caller's.
    let held = unsafe { Box::from_raw(T::manager_ctx(tensor).cast::<Held<T>>()) };
    drop_attached(held.original);
}

unsafe extern "C" fn delete_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this on a capsule of `pack`, once.
    unsafe { delete::<DLManagedTensorVersioned>(capsule, VERSIONED) }
}

unsafe extern "C" fn delete_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as above.
    unsafe { delete::<DLManagedTensor>(capsule, UNVERSIONED) }
}

/// # Safety
/// A capsule of [`pack`], of this type and name unless a consumer has taken its tensor; once.
unsafe fn delete<T: Managed>(capsule: *mut ffi::PyObject, name: &'static CStr) {
    // SAFETY: the caller's; one of this name still has its tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, name.as_ptr()) == 1 {
            let tensor = ffi::PyCapsule_GetPointer(capsule, name.as_ptr());
            drop(Original(tensor.cast::<T>()));
        }
    }
}

/// Imports a tensor from any object with `__dlpack__` and `__dlpack_device__`; see [`DeviceArray::import_dlpack`] for what
/// comes in. The object makes the device's default queue wait until the memory is ready.
///
/// Memory that the host can read (the CPU's, page-locked, managed) is copied once, within its device, and the tensor is
/// deleted after the copy: columns become Rust slices there, and NumPy and PyTorch may write to a tensor that they have
/// given out, one marked read-only included (it may be a read-only view of an array that is written). Only a tensor that
/// the producer marks as a copy of its own ([`IS_COPIED`](DLManagedTensorVersioned::IS_COPIED)) is taken over as it is. The
/// interpreter is not released during the copy, so that Python code does not write meanwhile.
///
/// Memory that the host cannot read is never copied: what is written to it later shows in the column's values, and in
/// nothing that Rust relies on.
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
/// Raises `TypeError` for another object; `NotImplementedError` for a device that is not there, or whose tensors this
/// crate does not exchange; `ValueError` for a tensor that is malformed, not compact, or of a type that Arrow has not;
/// `MemoryError` if there is no memory for the copy; and what the methods raise. The tensor is deleted then.
pub fn tensor_from_python(object: &Bound<'_, PyAny>) -> PyResult<DeviceArray> {
    let (array, queue, is_copied) = import(object)?;
    if is_copied || !array.device().is_host_readable() {
        return Ok(array);
    }
    Ok(array.compact_on(&queue)?)
}

/// As [`tensor_from_python`], but never copies: the column shares the tensor's memory, and keeps it alive.
///
/// ```no_run
/// use arrow_device::python::{pyo3::prelude::*, tensor_from_python_shared};
/// # fn f(weights: &Bound<'_, PyAny>) -> PyResult<()> {
/// // SAFETY: the array was made for this call, and nothing else in the program has it.
/// let column = unsafe { tensor_from_python_shared(weights) }?;
/// # Ok(())
/// # }
/// ```
///
/// # Safety
/// Nothing writes to the memory while the column, or anything made from it without a copy, lives. A tensor that is marked
/// read-only does not say that much.
///
/// # Errors
/// As [`tensor_from_python`].
pub unsafe fn tensor_from_python_shared(object: &Bound<'_, PyAny>) -> PyResult<DeviceArray> {
    Ok(import(object)?.0)
}

/// The column without a copy, the queue that its memory is ready on, and whether it is a copy of the producer's for us
/// alone. If it is not, others may write to the memory.
fn import(object: &Bound<'_, PyAny>) -> PyResult<(DeviceArray, Queue, bool)> {
    let py = object.py();
    let Some(of_device) = object.getattr_opt(intern!(py, "__dlpack_device__"))? else {
        return Err(PyTypeError::new_err(format!(
            "an object of type {} has no __dlpack_device__",
            object.get_type().name()?
        )));
    };
    let (device_type, device_id) = of_device.call0()?.extract::<(i32, i32)>()?;
    let id = DLDevice {
        device_type: ArrowDeviceType::new(device_type),
        device_id,
    };
    let device: Device = detached(|| Devices::global().get(id.id()))?;
    let queue = device.default_queue();
    let arguments = PyDict::new(py);
    arguments.set_item("stream", queue.dlpack_stream()?)?;
    let method = object.getattr(intern!(py, "__dlpack__"))?;
    arguments.set_item("max_version", (1, 0))?;
    let answer = match method.call((), Some(&arguments)) {
        // Objects from before version 1.0 know no such argument.
        Err(e) if e.is_instance_of::<PyTypeError>(py) => {
            arguments.del_item("max_version")?;
            method.call((), Some(&arguments))?
        }
        answer => answer?,
    };
    let Ok(capsule) = answer.cast::<PyCapsule>() else {
        return Err(PyTypeError::new_err(
            "__dlpack__ answered something else than a capsule",
        ));
    };
    let capsule = capsule.as_borrowed();
    let mut is_copied = false;
    let array = if let Some(tensor) = take(capsule, VERSIONED, USED_VERSIONED)? {
        let tensor = tensor.cast::<DLManagedTensorVersioned>().as_ptr();
        // SAFETY: the capsule's producer vouches for the tensor, which was taken just now, and has made the queue wait. Its
        // flags are read only if it is of a version that has them. That nobody writes is seen to by the callers of this
        // function: by a copy, or by their own contract.
        unsafe {
            let ours = DLPackVersion::CURRENT.major;
            is_copied = (*tensor).version.major == ours
                && (*tensor).flags & DLManagedTensorVersioned::IS_COPIED != 0;
            DeviceArray::import_dlpack(held(tensor), &queue)
        }
    } else if let Some(tensor) = take(capsule, UNVERSIONED, USED_UNVERSIONED)? {
        let tensor = tensor.cast::<DLManagedTensor>().as_ptr();
        // SAFETY: as above.
        unsafe { DeviceArray::import_dlpack_unversioned(held(tensor), &queue) }
    } else {
        return Err(PyTypeError::new_err(
            "__dlpack__ answered a capsule that is no tensor, or was used",
        ));
    };
    Ok((array?, queue, is_copied))
}

/// The tensor of a capsule of this name, which gets the other one: its destructor leaves the tensor alone then.
fn take(
    capsule: Borrowed<'_, '_, PyCapsule>,
    name: &'static CStr,
    used: &'static CStr,
) -> PyResult<Option<NonNull<c_void>>> {
    // Without the one interpreter lock two threads could take at once.
    with_critical_section(&capsule, || {
        if !capsule.is_valid_checked(Some(name)) {
            return Ok(None);
        }
        let pointer = capsule.pointer_checked(Some(name))?;
        if !pointer.cast::<DLManagedTensorVersioned>().is_aligned() {
            return Err(PyValueError::new_err("the tensor's pointer is misaligned"));
        }
        // SAFETY: a capsule, attached; the name is static.
        let renamed = unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) };
        match renamed {
            0 => Ok(Some(pointer)),
            _ => Err(PyErr::fetch(capsule.py())),
        }
    })
}
