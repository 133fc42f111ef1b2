//! `struct ArrowArray` and `struct ArrowSchema`, with all members.
//!
//! arrow-rs 59 and 60 differ in which members of `FFI_ArrowArray` and `FFI_ArrowSchema` they show,
//! and both type `release` as `extern "C"`, through which nothing may unwind. This crate reads and
//! writes the C layout through its own structs, whose bits are those of arrow-rs's.

use std::ffi::{c_char, c_void};
use std::mem::ManuallyDrop;
use std::ptr;

use arrow_data::ffi::FFI_ArrowArray;
use arrow_schema::ffi::FFI_ArrowSchema;

use super::guard::{ReleaseFn, release_once};
use crate::error::Result;

/// `struct ArrowArray`. It has no `Drop`: whoever owns it calls [`release`](Self::release).
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CArray {
    /// Elements.
    pub(crate) length: i64,
    /// Nulls among the elements; -1 if not computed.
    pub(crate) null_count: i64,
    /// Elements before the first.
    pub(crate) offset: i64,
    /// How many pointers `buffers` points to.
    pub(crate) n_buffers: i64,
    /// How many pointers `children` points to.
    pub(crate) n_children: i64,
    /// `n_buffers` pointers, which lie in host memory and point to memory of the device.
    pub(crate) buffers: *mut *const c_void,
    /// `n_children` pointers; they and the structs lie in host memory.
    pub(crate) children: *mut *mut CArray,
    /// The values of a dictionary, or null.
    pub(crate) dictionary: *mut CArray,
    /// Null once released.
    pub(crate) release: Option<ReleaseFn<CArray>>,
    /// Belongs to the producer.
    pub(crate) private_data: *mut c_void,
}

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
#[repr(C)]
#[derive(Debug)]
pub struct ForeignSchema {
    /// Format string, terminated by a zero byte.
    pub(crate) format: *const c_char,
    /// Field name, terminated by a zero byte, or null.
    pub(crate) name: *const c_char,
    /// Key-value metadata in the C data interface's encoding, or null.
    pub(crate) metadata: *const c_char,
    /// `ARROW_FLAG_*` bits.
    pub(crate) flags: i64,
    /// How many pointers `children` points to.
    pub(crate) n_children: i64,
    /// `n_children` pointers.
    pub(crate) children: *mut *mut ForeignSchema,
    /// The value type of a dictionary, or null.
    pub(crate) dictionary: *mut ForeignSchema,
    /// Null once released.
    pub(crate) release: Option<ReleaseFn<ForeignSchema>>,
    /// Belongs to the producer.
    pub(crate) private_data: *mut c_void,
}

// The conversions below move bits between these types.
const _: () = {
    assert!(size_of::<CArray>() == size_of::<FFI_ArrowArray>());
    assert!(align_of::<CArray>() == align_of::<FFI_ArrowArray>());
    assert!(size_of::<ForeignSchema>() == size_of::<FFI_ArrowSchema>());
    assert!(align_of::<ForeignSchema>() == align_of::<FFI_ArrowSchema>());
};

impl CArray {
    /// Returns a released struct, all of whose members are zero.
    pub(crate) const fn empty() -> Self {
        // SAFETY: null pointers, no callback and zeros are values of all members.
        unsafe { std::mem::zeroed() }
    }

    /// Returns whether `release` is null.
    pub(crate) const fn is_released(&self) -> bool {
        self.release.is_none()
    }

    /// Calls the release callback, unless it is null, and marks the struct released whatever happened. A panic becomes
    /// [`Error::Panic`](crate::Error::Panic).
    ///
    /// # Safety
    /// `this` is valid for reads and writes, aligned, and not used elsewhere during the call. Its callback, if any, is the
    /// producer's and was not called before, neither here nor on a copy of the struct.
    pub(crate) unsafe fn release(this: *mut Self) -> Result<()> {
        // SAFETY: the slot lies in `*this`, which the caller guarantees to be valid, unused elsewhere and not released before
        // (see `# Safety`).
        unsafe { release_once("ArrowArray.release", this, &raw mut (*this).release) }
    }

    /// Moves the struct out of arrow-rs's type.
    pub(crate) fn from_arrow(arrow: FFI_ArrowArray) -> Self {
        let arrow = ManuallyDrop::new(arrow);
        // SAFETY: both are the C struct: same size and alignment (asserted above), same fields (tested below). `ManuallyDrop`
        // keeps the source from being released, so the result is the only owner. A pointer to an `extern "C"` function may be
        // called as `extern "C-unwind"`, which only allows more.
        unsafe { ptr::read((&raw const *arrow).cast::<Self>()) }
    }

    /// Moves the struct into arrow-rs's type, whose drop calls `release` as `extern "C"`: a callback that unwinds aborts the
    /// process from then on.
    #[cfg(any(test, feature = "pyo3"))]
    pub(crate) fn into_arrow(self) -> FFI_ArrowArray {
        // SAFETY: both are the C struct, as in `from_arrow`. `Self` has no drop, so the result is the only owner.
        unsafe { ptr::read((&raw const self).cast::<FFI_ArrowArray>()) }
    }

    /// Returns the struct as arrow-rs's type, for its getters.
    pub(crate) const fn as_arrow(&self) -> &FFI_ArrowArray {
        // SAFETY: both are the C struct, as in `from_arrow`. A shared reference neither moves nor releases it.
        unsafe { &*ptr::from_ref(self).cast::<FFI_ArrowArray>() }
    }
}

// SAFETY: the C data interface lets a consumer read and release on any thread. Whoever made the
// struct (`from_raw`) guaranteed that it follows that interface.
unsafe impl Send for ForeignSchema {}

impl ForeignSchema {
    /// Returns a released schema, all of whose members are zero: memory for a producer to write a
    /// schema to.
    pub(crate) const fn empty() -> Self {
        // SAFETY: null pointers, no callback and zeros are values of all members.
        unsafe { std::mem::zeroed() }
    }

    /// Moves the schema out of `source` and leaves a released one there.
    ///
    /// # Safety
    /// - `source` is valid for reads and writes, aligned, initialized, and used by nobody else
    ///   during the call; no copy of the struct is used afterwards.
    /// - Unless it is released, it is as the C data interface requires.
    pub unsafe fn from_raw(source: *mut FFI_ArrowSchema) -> Self {
        // SAFETY: the caller guarantees that `source` is valid for reads and writes and holds a
        // struct (see `# Safety`), which has the layout of this one.
        unsafe { ptr::replace(source.cast::<Self>(), Self::empty()) }
    }

    /// Returns the address to which a producer writes a schema.
    pub(crate) const fn as_mut_ptr(&mut self) -> *mut FFI_ArrowSchema {
        ptr::from_mut(self).cast()
    }
}

impl AsRef<FFI_ArrowSchema> for ForeignSchema {
    fn as_ref(&self) -> &FFI_ArrowSchema {
        // SAFETY: both are the C struct: same size and alignment (asserted above), same fields (tested below). A shared
        // reference neither moves nor releases it.
        unsafe { &*ptr::from_ref(self).cast::<FFI_ArrowSchema>() }
    }
}

impl Drop for ForeignSchema {
    fn drop(&mut self) {
        let this = ptr::from_mut(self);
        // A drop cannot report an error.
        // SAFETY: `self` is the only copy of the struct (`from_raw` moves), so its callback has not
        // run; the caller of `from_raw` guaranteed that it may run.
        let _ = unsafe { release_once("ArrowSchema.release", this, &raw mut (*this).release) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use arrow_array::{Array, DictionaryArray, Int8Array, StringArray};
    use arrow_data::ArrayData;
    use arrow_schema::{DataType, Field, Fields};
    use std::collections::HashMap;
    use std::ffi::CStr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Length 5, offset 2, three nulls, two buffers: all different.
    fn data() -> ArrayData {
        let values = Int8Array::from(vec![
            Some(1),
            Some(2),
            None,
            None,
            Some(5),
            None,
            Some(7),
            Some(8),
        ]);
        // Through ArrayData, whose slice keeps an offset.
        let data = values.to_data();
        ArrayData::builder(DataType::Int8)
            .len(5)
            .offset(2)
            .nulls(Some(values.nulls().unwrap().slice(2, 5)))
            .add_buffer(data.buffers()[0].clone())
            .build()
            .unwrap()
    }

    /// What the getters of arrow-rs say is what the fields here say, at every node.
    fn same_array(ours: &CArray, arrow: &FFI_ArrowArray) {
        assert_eq!(ours.length, arrow.len() as i64);
        assert_eq!(ours.null_count, arrow.null_count() as i64);
        assert_eq!(ours.offset, arrow.offset() as i64);
        assert_eq!(ours.n_buffers, arrow.num_buffers() as i64);
        assert_eq!(ours.n_children, arrow.num_children() as i64);
        assert_eq!(ours.is_released(), arrow.is_released());
        for i in 0..arrow.num_buffers() {
            // SAFETY: arrow-rs wrote `n_buffers` pointers.
            let buffer = unsafe { *ours.buffers.add(i) };
            assert_eq!(buffer.cast::<u8>(), arrow.buffer(i));
        }
        for i in 0..arrow.num_children() {
            // SAFETY: arrow-rs wrote `n_children` pointers to live structs.
            let child = unsafe { &**ours.children.add(i) };
            assert!(ptr::eq(child.as_arrow(), arrow.child(i)));
            same_array(child, arrow.child(i));
        }
        assert_eq!(ours.dictionary.is_null(), arrow.dictionary().is_none());
        if let Some(dictionary) = arrow.dictionary() {
            // SAFETY: not null, so a live struct of arrow-rs.
            same_array(unsafe { &*ours.dictionary }, dictionary);
        }
    }

    #[test]
    fn array_fields_are_where_arrow_has_them() {
        let ours = CArray::from_arrow(FFI_ArrowArray::new(&data()));
        assert_eq!(
            (ours.length, ours.null_count, ours.offset, ours.n_buffers),
            (5, 3, 2, 2)
        );
        assert_eq!(ours.n_children, 0);
        assert!(ours.release.is_some() && !ours.private_data.is_null());
        same_array(&ours, ours.as_arrow());
        // Back again: arrow-rs releases it.
        let back = ours.into_arrow();
        assert_eq!((back.len(), back.null_count(), back.offset()), (5, 3, 2));
    }

    #[test]
    fn array_children_and_dictionary() {
        let words: DictionaryArray<arrow_array::types::Int8Type> =
            ["a", "b", "a"].into_iter().collect();
        let fields: Fields = vec![
            Field::new("d", words.data_type().clone(), true),
            Field::new("s", DataType::Utf8, true),
            Field::new("i", DataType::Int8, true),
        ]
        .into();
        let batch = arrow_array::StructArray::new(
            fields,
            vec![
                Arc::new(words),
                Arc::new(StringArray::from(vec!["x", "yy", "zzz"])),
                Arc::new(Int8Array::from(vec![1, 2, 3])),
            ],
            None,
        );
        let mut ours = CArray::from_arrow(FFI_ArrowArray::new(&batch.to_data()));
        assert_eq!((ours.n_children, ours.n_buffers, ours.length), (3, 1, 3));
        same_array(&ours, ours.as_arrow());
        // SAFETY: `ours` is the only owner and not released yet.
        unsafe { CArray::release(&raw mut ours) }.unwrap();
        assert!(ours.is_released());
        // SAFETY: released is allowed, and does nothing.
        unsafe { CArray::release(&raw mut ours) }.unwrap();
    }

    #[test]
    fn schema_fields_are_where_arrow_has_them() {
        let children: Fields = vec![
            Field::new("a", DataType::Int8, false),
            Field::new_dictionary("b", DataType::Int16, DataType::Utf8, true),
        ]
        .into();
        let field = Field::new("distinct", DataType::Struct(children), true)
            .with_metadata(HashMap::from([("k".to_string(), "v".to_string())]));
        let mut produced = FFI_ArrowSchema::try_from(&field).unwrap();
        // SAFETY: `produced` is the only copy.
        let ours = unsafe { ForeignSchema::from_raw(&raw mut produced) };
        // SAFETY: both are null-terminated strings of arrow-rs.
        let (format, name) = unsafe { (CStr::from_ptr(ours.format), CStr::from_ptr(ours.name)) };
        assert_eq!((format, name), (c"+s", c"distinct"));
        assert_eq!((ours.flags, ours.n_children), (2, 2));
        assert!(!ours.metadata.is_null() && ours.dictionary.is_null());
        assert!(ours.release.is_some() && !ours.private_data.is_null());

        let arrow = ours.as_ref();
        assert_eq!((arrow.format(), arrow.name()), ("+s", Some("distinct")));
        assert_eq!(arrow.flags().unwrap().bits(), ours.flags);
        assert_eq!(arrow.metadata().unwrap()["k"], "v");
        assert_eq!(arrow.children().count() as i64, ours.n_children);
        // SAFETY: arrow-rs wrote two pointers to live structs.
        let second = unsafe { &**ours.children.add(1) };
        assert!(ptr::eq(second.as_ref(), arrow.child(1)));
        // SAFETY: a dictionary type of arrow-rs has a live value type.
        let values = unsafe { &*second.dictionary };
        assert!(ptr::eq(
            values.as_ref(),
            arrow.child(1).dictionary().unwrap()
        ));
        assert_eq!(values.as_ref().format(), "u");
    }

    #[test]
    fn empty_is_released() {
        assert!(CArray::empty().is_released() && CArray::empty().into_arrow().is_released());
        assert!(ForeignSchema::empty().release.is_none());
    }

    unsafe extern "C-unwind" fn count_and_panic(array: *mut CArray) {
        // SAFETY: the test's counter outlives the struct.
        let calls = unsafe { &*(*array).private_data.cast::<AtomicUsize>() };
        calls.fetch_add(1, Ordering::Relaxed);
        panic!("release failed");
    }

    #[test]
    fn a_panicking_release_runs_once() {
        let calls = AtomicUsize::new(0);
        let mut array = CArray {
            release: Some(count_and_panic),
            private_data: (&raw const calls).cast_mut().cast(),
            ..CArray::empty()
        };
        // SAFETY: `array` is the only copy.
        let e = unsafe { CArray::release(&raw mut array) }.unwrap_err();
        assert!(matches!(e, Error::Panic { .. }));
        assert_eq!(e.to_string(), "ArrowArray.release panicked: release failed");
        assert!(array.is_released());
        // SAFETY: it is released, which is allowed, and does nothing.
        unsafe { CArray::release(&raw mut array) }.unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }
}
