//! Structs in and out of capsules.
//!
//! A capsule that goes out owns its struct; its destructor drops it, which releases what no consumer moved away. A
//! struct that comes in is moved out, so that the capsule's own destructor finds it released.

use std::ffi::CStr;

use arrow_schema::ffi::FFI_ArrowSchema;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use super::stream::HostStream;
use crate::abi::c_data::CArray;
use crate::abi::{FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream};

/// A struct of the C interfaces that travels in capsules.
///
/// # Safety
/// The type is the C struct that capsules of this name carry. `take` moves it out and leaves a released one.
pub(super) unsafe trait InCapsule: Sized + Send + 'static {
    const NAME: &'static CStr;

    /// # Safety
    /// `source` is valid for reads and writes, aligned, and used by nobody else meanwhile.
    unsafe fn take(source: *mut Self) -> Self;
}

// SAFETY: the name is the specification's; `from_raw` moves.
unsafe impl InCapsule for FFI_ArrowSchema {
    const NAME: &'static CStr = c"arrow_schema";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::from_raw(source) }
    }
}

// SAFETY: as above.
unsafe impl InCapsule for FFI_ArrowDeviceArray {
    const NAME: &'static CStr = c"arrow_device_array";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::from_raw(source) }
    }
}

// SAFETY: as above.
unsafe impl InCapsule for FFI_ArrowDeviceArrayStream {
    const NAME: &'static CStr = c"arrow_device_array_stream";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::from_raw(source) }
    }
}

/// `ArrowArray`, which is on the CPU.
#[repr(transparent)]
pub(super) struct HostArray(CArray);

// SAFETY: as for `FFI_ArrowDeviceArray`.
unsafe impl Send for HostArray {}

impl HostArray {
    pub(super) fn on_cpu(self) -> FFI_ArrowDeviceArray {
        FFI_ArrowDeviceArray::from_host(self.0)
    }
}

// SAFETY: the name is the specification's; the array is replaced by a released one.
unsafe impl InCapsule for HostArray {
    const NAME: &'static CStr = c"arrow_array";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller's.
        unsafe { std::ptr::replace(source, Self(CArray::empty())) }
    }
}

// SAFETY: the name is the specification's.
unsafe impl InCapsule for HostStream {
    const NAME: &'static CStr = c"arrow_array_stream";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller's.
        unsafe { std::ptr::replace(source, Self::empty()) }
    }
}

/// A capsule that owns `value`.
pub(super) fn pack<T: InCapsule>(py: Python<'_>, value: T) -> PyResult<Bound<'_, PyCapsule>> {
    PyCapsule::new_with_value(py, value, T::NAME)
}

/// Whether this is a capsule of such structs.
pub(super) fn holds<T: InCapsule>(object: &Bound<'_, PyAny>) -> bool {
    object
        .cast::<PyCapsule>()
        .is_ok_and(|capsule| capsule.is_valid_checked(Some(T::NAME)))
}

/// Moves the struct out of a capsule.
pub(super) fn unpack<T: InCapsule>(object: &Bound<'_, PyAny>) -> PyResult<T> {
    let capsule = capsule_of::<T>(object)?;
    // Without the one interpreter lock two threads could take at once.
    with_critical_section(object, || {
        let source = pointer::<T>(capsule)?;
        // SAFETY: a capsule of this name holds a live struct of this type until its destructor runs (the protocol), and
        // `capsule` is alive; no other consumer takes from it meanwhile (the protocol; this crate's own are kept out).
        Ok(unsafe { T::take(source) })
    })
}

/// Looks at the struct in a capsule.
pub(super) fn look<T: InCapsule, R>(
    object: &Bound<'_, PyAny>,
    look: impl FnOnce(&T) -> R,
) -> PyResult<R> {
    let capsule = capsule_of::<T>(object)?;
    with_critical_section(object, || {
        // SAFETY: as in `unpack`.
        Ok(look(unsafe { &*pointer::<T>(capsule)? }))
    })
}

fn capsule_of<'a, 'py, T: InCapsule>(
    object: &'a Bound<'py, PyAny>,
) -> PyResult<&'a Bound<'py, PyCapsule>> {
    let Ok(capsule) = object.cast::<PyCapsule>() else {
        return Err(PyTypeError::new_err(format!(
            "expected a capsule named {:?}, got an object of type {}",
            T::NAME,
            object.get_type().name()?
        )));
    };
    Ok(capsule)
}

/// The pointer is not null: no capsule has a null one.
fn pointer<T: InCapsule>(capsule: &Bound<'_, PyCapsule>) -> PyResult<*mut T> {
    if !capsule.is_valid_checked(Some(T::NAME)) {
        let name = capsule.name()?.map(|name| {
            // SAFETY: read at once; nobody renames the capsule meanwhile.
            unsafe { name.as_cstr() }.to_string_lossy().into_owned()
        });
        return Err(PyValueError::new_err(format!(
            "expected a capsule named {:?}, got one named {:?}",
            T::NAME,
            name.unwrap_or_default()
        )));
    }
    let pointer = capsule.pointer_checked(Some(T::NAME))?.cast::<T>();
    if !pointer.is_aligned() {
        return Err(PyValueError::new_err(format!(
            "the pointer of the capsule {:?} is misaligned",
            T::NAME
        )));
    }
    Ok(pointer.as_ptr())
}
