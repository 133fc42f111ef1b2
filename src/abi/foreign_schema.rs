//! A producer's schema.

use arrow_schema::ffi::FFI_ArrowSchema;

use super::c_data::CSchema;

/// A foreign `ArrowSchema` with its owner: dropping it releases it as this crate releases all foreign structs, so that
/// a release callback may unwind. Dropping arrow-rs's own type calls the callback as `extern "C"`, which may not.
///
/// ```
/// use arrow_device::abi::ForeignSchema;
/// use arrow_schema::ffi::FFI_ArrowSchema;
/// use arrow_schema::{DataType, Field};
///
/// let mut produced = FFI_ArrowSchema::try_from(&Field::new("id", DataType::Int64, false))?;
/// // SAFETY: a valid struct, and this is its only owner.
/// let schema = unsafe { ForeignSchema::from_raw(&mut produced) };
/// assert_eq!(schema.as_ref().name(), Some("id"));
/// # Ok::<(), arrow_schema::ArrowError>(())
/// ```
#[derive(Debug)]
#[repr(transparent)]
pub struct ForeignSchema(CSchema);

// SAFETY: the C data interface lets a consumer read and release on any thread.
unsafe impl Send for ForeignSchema {}

impl ForeignSchema {
    /// All zero: released. What a consumer gives a producer to write to.
    pub const fn empty() -> Self {
        Self(CSchema::empty())
    }

    /// Moves the schema out of `source` and leaves a released one there.
    ///
    /// # Safety
    /// - `source` is valid for reads and writes, aligned, initialized, and used by nobody else during the call; no copy
    ///   of the struct is used afterwards.
    /// - Unless it is released, it is as the C data interface asks.
    pub unsafe fn from_raw(source: *mut FFI_ArrowSchema) -> Self {
        // SAFETY: the caller vouches for `source`, which has this layout.
        Self(unsafe { std::ptr::replace(source.cast::<CSchema>(), CSchema::empty()) })
    }

    /// Where a producer may write a schema to.
    pub const fn as_mut_ptr(&mut self) -> *mut FFI_ArrowSchema {
        (&raw mut self.0).cast()
    }

    /// Gives the schema up, to be written to a consumer's struct.
    #[cfg(feature = "pyo3")]
    pub(crate) fn into_inner(self) -> CSchema {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not used again and not dropped.
        unsafe { std::ptr::read(&raw const this.0) }
    }
}

impl AsRef<FFI_ArrowSchema> for ForeignSchema {
    fn as_ref(&self) -> &FFI_ArrowSchema {
        self.0.as_arrow()
    }
}

impl Drop for ForeignSchema {
    fn drop(&mut self) {
        // SAFETY: the producer gave it to us, and this is its only copy. An error cannot be told.
        let _ = unsafe { CSchema::release(&mut self.0) };
    }
}
