//! Trees in memory that the host can read, as arrow-rs arrays. Arrays of most types are built directly from their
//! buffers; the others are built from [`ArrayData`], which costs more allocations.

use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, BooleanArray, DictionaryArray, FixedSizeBinaryArray, GenericByteArray,
    GenericByteViewArray, PrimitiveArray, RecordBatch, RecordBatchOptions, StructArray,
    downcast_integer, downcast_primitive, make_array, types,
};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_data::{ArrayData, ArrayDataBuilder};
use arrow_schema::{DataType, Schema, UnionMode};

use crate::abi::guard;
use crate::data::array::DeviceArray;
use crate::data::layout::{BufferKind, Nesting, child_type};
use crate::data::sizes::read_sizes;
use crate::data::tree::{Slot, Tree, View};
use crate::device::Counters;
use crate::error::{Error, Result};
use crate::memory::{HostSlab, host_buffer};

/// The rows of an array in host-readable memory as `ArrayData`. Waits until the memory is ready. Copies only values
/// that are not aligned as arrow-rs requires, and counts those.
pub(crate) fn unwrap(array: &DeviceArray) -> Result<ArrayData> {
    make_ready(array)?;
    Part::root(array).data()
}

/// As [`unwrap`], but returns an array. arrow-rs panics on some data; the guard turns that into an error, so that
/// data from outside cannot end the program.
pub(crate) fn to_array(array: &DeviceArray) -> Result<ArrayRef> {
    make_ready(array)?;
    guard::callback("building an arrow array", || Part::root(array).array())
}

/// As [`to_array`], for the columns of a batch.
pub(crate) fn to_batch(schema: &Arc<Schema>, array: &DeviceArray) -> Result<RecordBatch> {
    make_ready(array)?;
    guard::callback("building an arrow batch", || {
        let columns = Part::root(array).arrays()?;
        let options = RecordBatchOptions::new().with_row_count(Some(array.len()));
        let batch = RecordBatch::try_new_with_options(schema.clone(), columns, &options);
        Ok(batch?)
    })
}

/// Waits until the host may read the memory.
fn make_ready(array: &DeviceArray) -> Result<()> {
    let device = array.device();
    if !device.is_host_readable() {
        return Err(Error::NotSupported {
            device: device.id(),
            operation: "reading an array on the host",
            reason: "the host cannot read this device's memory; use to_host".into(),
        });
    }
    array.wait()
}

/// Rows of a node. The memory is ready, and the host can read it.
struct Part<'a> {
    tree: &'a Tree,
    view: View,
    data_type: &'a DataType,
    slots: &'a [Slot],
    /// These are the run ends of a run-end encoded array.
    run_ends: bool,
}

impl<'a> Part<'a> {
    fn root(array: &'a DeviceArray) -> Self {
        let (tree, view) = (&**array.tree(), array.view());
        Self {
            tree,
            view,
            data_type: tree.data_type(view.node),
            slots: tree.slots(view.node),
            run_ends: false,
        }
    }

    /// The rows of child `i` that belong to these rows.
    fn child(&self, i: usize) -> Self {
        let view = self.tree.child(self.view, i);
        Self {
            tree: self.tree,
            view,
            data_type: child_type(self.data_type, i).unwrap_or(&DataType::Null),
            slots: self.tree.slots(view.node),
            run_ends: i == 0 && self.tree.layout(self.view.node).nesting == Nesting::Runs,
        }
    }

    fn n_children(&self) -> usize {
        self.tree.nodes[self.view.node].n_children as usize
    }

    /// All children as arrays.
    fn arrays(&self) -> Result<Vec<ArrayRef>> {
        let mut arrays = Vec::with_capacity(self.n_children());
        for i in 0..self.n_children() {
            arrays.push(self.child(i).array()?);
        }
        Ok(arrays)
    }

    /// The rows as an array. May panic, as arrow-rs does.
    fn array(&self) -> Result<ArrayRef> {
        use DataType as T;
        if self.view.length == 0 {
            return self.other();
        }
        macro_rules! primitive {
            ($t:ty) => {{
                let mut array = PrimitiveArray::<$t>::try_new(self.typed(1)?, self.nulls()?)?;
                // The type has a time zone, precision or scale.
                if array.data_type() != self.data_type {
                    array = array.with_data_type(self.data_type.clone());
                }
                Ok(Arc::new(array))
            }};
        }
        macro_rules! bytes {
            ($t:ty) => {{
                let (offsets, values, nulls) = (self.typed(1)?, self.all(2)?, self.nulls()?);
                // SAFETY: the array needs one more offset than rows, ascending offsets inside the values, and valid
                // UTF-8 for text. `rows` takes the offsets of all rows and one more. The rest is guaranteed by whoever
                // made the array: the caller of an `unsafe` import or constructor (or `Validation::Full`, which checks
                // it), or arrow-rs.
                let array = unsafe {
                    let offsets = OffsetBuffer::new_unchecked(offsets);
                    GenericByteArray::<$t>::new_unchecked(offsets, values, nulls)
                };
                Ok(Arc::new(array))
            }};
        }
        macro_rules! views {
            ($t:ty) => {{
                let (views, nulls) = (self.typed(1)?, self.nulls()?);
                let buffers = 2..self.slots.len() - 1;
                let buffers = buffers.map(|i| self.all(i)).collect::<Result<Arc<[_]>>>()?;
                let make = GenericByteViewArray::<$t>::new_unchecked;
                // SAFETY: the array needs views that point into its buffers, and valid UTF-8 for text: guaranteed by
                // whoever made the array, the caller of an `unsafe` function, `Validation::Full` or arrow-rs. `all` takes
                // every data buffer.
                let array = unsafe { make(views, buffers, nulls) };
                Ok(Arc::new(array))
            }};
        }
        macro_rules! dictionary {
            ($t:ty) => {{
                let keys = PrimitiveArray::<$t>::try_new(self.typed(1)?, self.nulls()?)?;
                let values = self.child(0).array()?;
                // SAFETY: keys must refer to values that exist: guaranteed by whoever made the array, the caller of an
                // `unsafe` function, `Validation::Full` or arrow-rs.
                let array = unsafe { DictionaryArray::new_unchecked(keys, values) };
                Ok(Arc::new(array))
            }};
        }
        downcast_primitive! {
            self.data_type => (primitive),
            T::Boolean => {
                let bits = self.bits(1)?;
                Ok(Arc::new(BooleanArray::new(bits, self.nulls()?)))
            }
            T::Utf8 => bytes!(types::Utf8Type),
            T::LargeUtf8 => bytes!(types::LargeUtf8Type),
            T::Binary => bytes!(types::BinaryType),
            T::LargeBinary => bytes!(types::LargeBinaryType),
            T::Utf8View => views!(types::StringViewType),
            T::BinaryView => views!(types::BinaryViewType),
            T::FixedSizeBinary(size @ 1..) => {
                let (values, nulls) = (self.rows(1)?, self.nulls()?);
                Ok(Arc::new(FixedSizeBinaryArray::try_new(*size, values, nulls)?))
            }
            T::Struct(fields) => {
                let (fields, nulls) = (fields.clone(), self.nulls()?);
                let array = StructArray::try_new_with_length(
                    fields,
                    self.arrays()?,
                    nulls,
                    self.view.length,
                );
                // `ArrayData` accepts nulls of a field that is not nullable.
                array.map_or_else(|_| self.other(), |array| Ok(Arc::new(array)))
            }
            T::Dictionary(keys, _) => {
                downcast_integer! {
                    &**keys => (dictionary),
                    _ => self.other(),
                }
            }
            _ => self.other(),
        }
    }

    /// The rows as an array of any type.
    #[cold]
    fn other(&self) -> Result<ArrayRef> {
        Ok(make_array(self.data()?))
    }

    fn data(&self) -> Result<ArrayData> {
        let (tree, view) = (self.tree, self.view);
        let layout = tree.layout(view.node);
        let is_union = matches!(self.data_type, DataType::Union(_, _));
        let sparse = matches!(self.data_type, DataType::Union(_, UnionMode::Sparse));
        // A struct's rows are pushed down to its children, so that the struct itself starts at 0.
        let pushed = matches!(layout.nesting, Nesting::RowByRow | Nesting::Times(_)) && !is_union;
        let mut buffers = Vec::with_capacity(self.slots.len());
        for (i, kind) in layout.buffers().iter().enumerate() {
            let bytes = match kind.bytes(view.offset + view.length) {
                _ if *kind == BufferKind::Validity => continue,
                // None of the node's rows are reached. They need not be valid then, and the first offset is one of theirs.
                _ if view.length == 0 && tree.nodes[view.node].length > 0 => 0,
                // An array without rows may lack its single offset.
                Some(bytes) if view.length == 0 => bytes?.min(self.bytes(i)?),
                Some(bytes) => bytes?,
                None => self.bytes(i)?,
            };
            buffers.push(match self.run_ends && view.length > 0 {
                // Older versions of arrow-rs read the buffer from its start, whatever the offset.
                true => self.rows(i)?,
                false => self.buffer(i, 0, bytes, kind.align())?,
            });
        }
        if layout.variadic {
            for i in layout.buffers().len()..self.slots.len() - 1 {
                buffers.push(self.all(i)?);
            }
        }
        if sparse && view.offset > 0 && view.length > 0 {
            // Type ids are cut here; with an offset arrow-rs would cut the children too.
            buffers[0] = buffers[0].slice_with_length(view.offset, view.length);
        }
        let children = (0..self.n_children()).map(|i| self.child(i).data());
        let builder = ArrayDataBuilder::new(self.data_type.clone())
            .len(view.length)
            .offset(if pushed || sparse || self.run_ends || view.length == 0 {
                0
            } else {
                view.offset
            })
            .nulls(self.nulls()?)
            .buffers(buffers)
            .child_data(children.collect::<Result<Vec<_>>>()?);
        // SAFETY: the data must be valid for its type. Buffers have the lengths that the type requires (`buffer`); that
        // the values are valid is guaranteed by whoever made the array: the caller of an `unsafe` import or constructor
        // (or `Validation::Full`, which checks it), or arrow-rs.
        Ok(unsafe { builder.build_unchecked() })
    }

    /// The validity bitmap, if a row is null.
    fn nulls(&self) -> Result<Option<NullBuffer>> {
        let view = self.view;
        let node = &self.tree.nodes[view.node];
        let known = self.tree.null_count_of(node, view);
        if known == Some(0) || self.tree.bitmap_of(node).is_none() {
            return Ok(None);
        }
        // The whole buffer: arrow-rs counts rows from the data's offset, which may be larger than the bitmap's.
        let needed = (view.validity_offset + view.length).div_ceil(8);
        let buffer = self.buffer(0, 0, self.slots[0].bytes().unwrap_or(needed), 1)?;
        let bits = BooleanBuffer::new(buffer, view.validity_offset, view.length);
        let nulls = match known {
            // SAFETY: a known number was counted in these bits, or guaranteed by the caller of an `unsafe` function
            // (see `NullCount`).
            Some(nulls) => unsafe { NullBuffer::new_unchecked(bits, nulls) },
            None => NullBuffer::new(bits),
        };
        Ok(Some(nulls).filter(|nulls| nulls.null_count() > 0))
    }

    /// The values in buffer `i` of these rows.
    fn typed<T: arrow_buffer::ArrowNativeType>(&self, i: usize) -> Result<ScalarBuffer<T>> {
        Ok(ScalarBuffer::from(self.rows(i)?))
    }

    /// The bytes in buffer `i`, of fixed-width values or offsets, of these rows.
    fn rows(&self, i: usize) -> Result<Buffer> {
        let kind = self.tree.layout(self.view.node).buffers()[i];
        let end = kind.bytes(self.view.offset + self.view.length);
        let end = end.unwrap_or(Ok(0))?;
        let start = match kind {
            BufferKind::Fixed { width, .. } => self.view.offset * width as usize,
            BufferKind::Offsets { width } => self.view.offset * usize::from(width),
            _ => 0,
        };
        self.buffer(i, start, end - start, kind.align())
    }

    /// The bits in buffer `i` of these rows.
    fn bits(&self, i: usize) -> Result<BooleanBuffer> {
        let View { offset, length, .. } = self.view;
        Ok(BooleanBuffer::new(self.rows(i)?, offset, length))
    }

    /// All of buffer `i`, whose size depends on the data.
    fn all(&self, i: usize) -> Result<Buffer> {
        self.buffer(i, 0, self.bytes(i)?, 1)
    }

    /// The size of buffer `i` in bytes.
    fn bytes(&self, i: usize) -> Result<usize> {
        let known = self.slots[i].bytes();
        if known.is_none() {
            // SAFETY: the host can read the memory, and it is ready: `make_ready` checked both before there was a `Part`.
            unsafe { read_sizes(self.tree, self.view.node) }?;
        }
        Ok(known.or(self.slots[i].bytes()).unwrap_or(0))
    }

    /// `bytes` bytes from byte `start` of buffer `i`.
    fn buffer(&self, i: usize, start: usize, bytes: usize, align: usize) -> Result<Buffer> {
        let slot = &self.slots[i];
        if bytes == 0 {
            return Ok(Buffer::default());
        }
        if slot.is_null() {
            let path = self.tree.buffer_path(self.view.node, i);
            let what = format!("is null, {bytes} bytes are needed");
            return Err(Error::invalid(path, what));
        }
        let address = slot.address().offset(start);
        // SAFETY: the host can read the memory, and it is ready (`make_ready`). The buffer has at least `start + bytes`
        // bytes: where the type determines its size, import and constructors checked it; elsewhere `bytes` is its size as
        // its producer states it (contract of the import). The owner keeps the memory alive.
        let buffer = unsafe { host_buffer(self.tree.owner(slot), address, bytes) };
        if address.address() % align == 0 {
            return Ok(buffer);
        }
        let counters = self.tree.device.counters();
        Counters::add(&counters.host_copied_bytes, bytes);
        Counters::add(&counters.host_allocations, 1);
        let mut slab = HostSlab::new(bytes)?;
        slab.copy_from_slice(&buffer);
        Ok(slab.into_buffer())
    }
}
