//! Packs structs into capsules and unpacks them.
//!
//! A capsule owns its struct. Its destructor drops the struct, which releases it unless a consumer has moved it out.
//! Unpacking moves the struct out, so that the capsule's destructor finds it released.

use std::ffi::CStr;
use std::ptr::NonNull;

use arrow_data::ffi::FFI_ArrowArray;
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{Field, Schema};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::{PyCapsule, PyCapsuleMethods};

use super::stream::HostStream;
use super::wrong_type;
use crate::abi::{FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream};
use crate::data::DeviceArray;
use crate::error::Result;
use crate::interchange::schema::{export_field, export_schema};

/// What a schema capsule describes: a [`Field`], a [`Schema`], or the type of a [`DeviceArray`].
/// Nobody else can name it, and so implement it.
pub trait CapsuleSchema {
    fn schema(&self) -> Result<FFI_ArrowSchema>;
}

/// A struct of the C interfaces that capsules carry.
///
/// # Safety
/// The type is the C struct that capsules of this name carry.
pub(super) unsafe trait InCapsule: Sized + Send + 'static {
    const NAME: &'static CStr;

    /// A struct as one that was released or moved out.
    fn empty() -> Self {
        // SAFETY: a C struct that is released has zeros.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! in_capsules {
    ($($name:literal $struct:ident)*) => {$(
        // SAFETY: the specification gives the C struct this name.
        unsafe impl InCapsule for $struct {
            const NAME: &'static CStr = $name;
        }
    )*};
}

in_capsules! {
    c"arrow_schema" FFI_ArrowSchema
    c"arrow_array" FFI_ArrowArray
    c"arrow_array_stream" HostStream
    c"arrow_device_array" FFI_ArrowDeviceArray
    c"arrow_device_array_stream" FFI_ArrowDeviceArrayStream
}

/// Makes a capsule that owns `value`.
pub(super) fn pack<T: InCapsule>(py: Python<'_>, value: T) -> PyResult<Bound<'_, PyCapsule>> {
    PyCapsule::new_with_value(py, value, T::NAME)
}

/// Whether this is a capsule with such a struct.
pub(super) fn holds<T: InCapsule>(object: &Bound<'_, PyAny>) -> bool {
    let capsule = object.cast::<PyCapsule>();
    capsule.is_ok_and(|capsule| capsule.is_valid_checked(Some(T::NAME)))
}

/// Moves the struct out of a capsule.
pub(super) fn unpack<T: InCapsule>(object: &Bound<'_, PyAny>) -> PyResult<T> {
    // SAFETY: the protocol requires a live struct, which nothing else uses (see `within`). What is left needs no release.
    within(object, |source| unsafe { source.replace(T::empty()) })
}

/// Reads the struct in a capsule without moving it out.
pub(super) fn look<T: InCapsule, R>(
    object: &Bound<'_, PyAny>,
    look: impl FnOnce(&T) -> R,
) -> PyResult<R> {
    within(object, |source: NonNull<T>| {
        // SAFETY: the protocol requires a live struct, which nothing else uses (see `within`).
        look(unsafe { source.as_ref() })
    })
}

/// Runs `f` with the struct in a capsule: the protocol requires a capsule of this name to hold a live struct of this type until its
/// destructor runs. It also forbids other consumers to take from it; this crate's are kept out by the critical section, since
/// without the GIL two threads could take the struct at once.
fn within<T: InCapsule, R>(
    object: &Bound<'_, PyAny>,
    f: impl FnOnce(NonNull<T>) -> R,
) -> PyResult<R> {
    let expected = format!("a capsule named {:?}", T::NAME);
    let Ok(capsule) = object.cast::<PyCapsule>() else {
        return Err(wrong_type(object, &expected)?);
    };
    with_critical_section(object, || {
        let Ok(pointer) = capsule.pointer_checked(Some(T::NAME)) else {
            return Err(PyValueError::new_err(format!(
                "expected {expected}, got {object:?}"
            )));
        };
        let pointer = pointer.cast::<T>();
        if !pointer.is_aligned() {
            return Err(PyValueError::new_err(format!(
                "{object:?} has a misaligned pointer"
            )));
        }
        Ok(f(pointer))
    })
}

impl CapsuleSchema for Field {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        export_field(self)
    }
}

impl CapsuleSchema for Schema {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        export_schema(self)
    }
}

impl CapsuleSchema for DeviceArray {
    fn schema(&self) -> Result<FFI_ArrowSchema> {
        self.export_type()
    }
}
