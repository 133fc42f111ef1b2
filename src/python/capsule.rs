//! Packs structs into capsules and unpacks them.
//!
//! A capsule owns its struct. Its destructor drops the struct, which releases it unless a consumer has moved it out.
//! Unpacking moves the struct out, so that the capsule's destructor finds it released.

use std::ffi::CStr;
use std::mem;

use arrow_schema::ffi::FFI_ArrowSchema;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use super::stream::HostStream;
use crate::abi::c_data::CArray;
use crate::abi::{FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream};

/// A struct of the C interfaces that capsules carry.
///
/// # Safety
/// The type is the C struct that capsules of this name carry. `take` moves it out and leaves a released one.
pub(super) unsafe trait InCapsule: Sized + Send + 'static {
    const NAME: &'static CStr;

    /// # Safety
    /// `source` is valid for reads and writes, aligned, and used by nothing else during the call.
    unsafe fn take(source: *mut Self) -> Self;
}

// SAFETY: the specification gives the C struct this name; `from_raw` moves it out.
unsafe impl InCapsule for FFI_ArrowSchema {
    const NAME: &'static CStr = c"arrow_schema";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller guarantees a valid, aligned struct that nothing else uses.
        unsafe { Self::from_raw(source) }
    }
}

// SAFETY: the specification gives the C struct this name; `from_raw` moves it out.
unsafe impl InCapsule for FFI_ArrowDeviceArray {
    const NAME: &'static CStr = c"arrow_device_array";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller guarantees a valid, aligned struct that nothing else uses.
        unsafe { Self::from_raw(source) }
    }
}

// SAFETY: the specification gives the C struct this name; `from_raw` moves it out.
unsafe impl InCapsule for FFI_ArrowDeviceArrayStream {
    const NAME: &'static CStr = c"arrow_device_array_stream";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller guarantees a valid, aligned struct that nothing else uses.
        unsafe { Self::from_raw(source) }
    }
}

/// `ArrowArray`, whose data the host can read. Dropping it releases it.
#[repr(transparent)]
pub(super) struct HostArray(CArray);

// SAFETY: the C data interface allows a release on any thread, and nothing else is called.
unsafe impl Send for HostArray {}

impl HostArray {
    /// The data is ready, and the host can read it.
    pub(super) fn of(mut array: FFI_ArrowDeviceArray) -> Self {
        Self(array.take_array())
    }

    pub(super) fn on_cpu(mut self) -> FFI_ArrowDeviceArray {
        FFI_ArrowDeviceArray::from_host(mem::replace(&mut self.0, CArray::empty()))
    }
}

impl Drop for HostArray {
    fn drop(&mut self) {
        // SAFETY: this owns the struct, and whoever has moved it out has left a released one.
        let outcome = unsafe { CArray::release(&mut self.0) };
        // A drop cannot report a panic of the callback. The struct is released all the same.
        drop(outcome);
    }
}

// SAFETY: the specification gives `ArrowArray` this name; `take` leaves a released one.
unsafe impl InCapsule for HostArray {
    const NAME: &'static CStr = c"arrow_array";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller guarantees a valid, aligned struct that nothing else uses.
        unsafe { std::ptr::replace(source, Self(CArray::empty())) }
    }
}

// SAFETY: the specification gives `ArrowArrayStream` this name; `take` leaves a released one.
unsafe impl InCapsule for HostStream {
    const NAME: &'static CStr = c"arrow_array_stream";

    unsafe fn take(source: *mut Self) -> Self {
        // SAFETY: the caller guarantees a valid, aligned struct that nothing else uses.
        unsafe { std::ptr::replace(source, Self::empty()) }
    }
}

/// Makes a capsule that owns `value`.
pub(super) fn pack<T: InCapsule>(py: Python<'_>, value: T) -> PyResult<Bound<'_, PyCapsule>> {
    PyCapsule::new_with_value(py, value, T::NAME)
}

/// Whether this is a capsule with such a struct.
pub(super) fn holds<T: InCapsule>(object: &Bound<'_, PyAny>) -> bool {
    object
        .cast::<PyCapsule>()
        .is_ok_and(|capsule| capsule.is_valid_checked(Some(T::NAME)))
}

/// Moves the struct out of a capsule.
pub(super) fn unpack<T: InCapsule>(object: &Bound<'_, PyAny>) -> PyResult<T> {
    let capsule = capsule_of::<T>(object)?;
    // Without the GIL two threads could take the struct at once.
    with_critical_section(object, || {
        let source = pointer::<T>(capsule)?;
        // SAFETY: the protocol requires a capsule of this name to hold a live struct of this type until its destructor runs,
        // and `capsule` is alive. It also forbids other consumers to take from it; this crate's are kept out by the
        // critical section.
        Ok(unsafe { T::take(source) })
    })
}

/// Reads the struct in a capsule without moving it out.
pub(super) fn look<T: InCapsule, R>(
    object: &Bound<'_, PyAny>,
    look: impl FnOnce(&T) -> R,
) -> PyResult<R> {
    let capsule = capsule_of::<T>(object)?;
    with_critical_section(object, || {
        // SAFETY: the protocol requires a capsule of this name to hold a live struct of this type until its destructor runs,
        // and `capsule` is alive. The critical section keeps this crate's `unpack` out meanwhile.
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

/// The pointer in a capsule, which is never null.
fn pointer<T: InCapsule>(capsule: &Bound<'_, PyCapsule>) -> PyResult<*mut T> {
    if !capsule.is_valid_checked(Some(T::NAME)) {
        let name = capsule.name()?.map(|name| {
            // SAFETY: the name is copied at once, within the critical section, so the capsule is not renamed meanwhile.
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
