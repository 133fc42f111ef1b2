//! [`ForeignSchema`].

use arrow_schema::ffi::FFI_ArrowSchema;

use super::c_data::CSchema;

/// `struct ArrowSchema` of a foreign producer.
///
/// Dropping it calls the release callback; a callback that panics does not unwind out of the drop.
/// arrow-rs's own type calls the callback as `extern "C"` instead, where a panic aborts the
/// process.
///
/// ```
/// use arrow_device::abi::ForeignSchema;
/// use arrow_schema::ffi::FFI_ArrowSchema;
/// use arrow_schema::{DataType, Field};
///
/// let mut produced = FFI_ArrowSchema::try_from(&Field::new("id", DataType::Int64, false))?;
/// // SAFETY: `produced` is a valid struct, and this is its only owner.
/// let schema = unsafe { ForeignSchema::from_raw(&mut produced) };
/// assert_eq!(schema.as_ref().name(), Some("id"));
/// # Ok::<(), arrow_schema::ArrowError>(())
/// ```
#[derive(Debug)]
#[repr(transparent)]
pub struct ForeignSchema(CSchema);

// SAFETY: the C data interface lets a consumer read and release on any thread. Whoever made the
// struct (`from_raw`) guaranteed that it follows that interface.
unsafe impl Send for ForeignSchema {}

impl ForeignSchema {
    /// Returns a released schema, all of whose members are zero: memory for a producer to write a
    /// schema to.
    pub const fn empty() -> Self {
        Self(CSchema::empty())
    }

    /// Moves the schema out of `source` and leaves a released one there.
    ///
    /// # Safety
    /// - `source` is valid for reads and writes, aligned, initialized, and used by nobody else
    ///   during the call; no copy of the struct is used afterwards.
    /// - Unless it is released, it is as the C data interface requires.
    pub unsafe fn from_raw(source: *mut FFI_ArrowSchema) -> Self {
        // SAFETY: the caller guarantees that `source` is valid for reads and writes and holds a
        // struct (see `# Safety`), which has the layout of `CSchema`.
        Self(unsafe { std::ptr::replace(source.cast::<CSchema>(), CSchema::empty()) })
    }

    /// Returns the address to which a producer writes a schema.
    pub const fn as_mut_ptr(&mut self) -> *mut FFI_ArrowSchema {
        (&raw mut self.0).cast()
    }

    /// Returns the struct, whose owner the caller becomes.
    #[cfg(feature = "pyo3")]
    pub(crate) fn into_inner(self) -> CSchema {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is initialized, and is neither used again nor dropped, so the result is
        // the only owner.
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
        // A drop cannot report an error.
        // SAFETY: `self` is the only copy of the struct (`from_raw` moves), so its callback has not
        // run; the caller of `from_raw` guaranteed that it may run.
        let _ = unsafe { CSchema::release(&mut self.0) };
    }
}
