//! Arrays in memory that the host can read, as arrow-rs arrays.

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_data::{ArrayData, ArrayDataBuilder};
use arrow_schema::{DataType, Schema, UnionMode};

use crate::abi::guard;
use crate::data::array::DeviceArray;
use crate::data::layout::{BufferKind, Nesting};
use crate::data::node::View;
use crate::data::sizes::read_sizes;
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
    guard::callback("building an arrow array", || {
        Ok(make_array(Part::root(array).data()?))
    })
}

/// As [`to_array`], for the columns of a batch.
pub(crate) fn to_batch(schema: &Arc<Schema>, array: &DeviceArray) -> Result<RecordBatch> {
    make_ready(array)?;
    guard::callback("building an arrow batch", || {
        let column = |i| Ok(make_array(Part::root(array).child(i).data()?));
        let columns = (0..array.num_children()).map(column);
        let columns = columns.collect::<Result<_>>()?;
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

/// Rows of a node of an array. The memory is ready, and the host can read it.
struct Part<'a> {
    array: &'a DeviceArray,
    view: View<'a>,
    /// These are the run ends of a run-end encoded array.
    run_ends: bool,
}

impl<'a> Part<'a> {
    fn root(array: &'a DeviceArray) -> Self {
        Self {
            array,
            view: array.view(),
            run_ends: false,
        }
    }

    /// The rows of child `i` that belong to these rows.
    fn child(&self, i: usize) -> Self {
        Self {
            array: self.array,
            view: self.view.child(i),
            run_ends: i == 0 && self.view.layout().nesting == Nesting::Runs,
        }
    }

    fn data(&self) -> Result<ArrayData> {
        let (view, node) = (self.view, &**self.view.node);
        let layout = &node.layout;
        let is_union = matches!(node.data_type, DataType::Union(_, _));
        let sparse = matches!(node.data_type, DataType::Union(_, UnionMode::Sparse));
        // A struct's rows are pushed down to its children, so that the struct itself starts at 0.
        let pushed = matches!(layout.nesting, Nesting::RowByRow | Nesting::Times(_)) && !is_union;
        let mut buffers = Vec::with_capacity(node.buffers.len());
        for (i, kind) in layout.buffers().iter().enumerate() {
            let bytes = match kind.bytes(view.offset + view.length) {
                _ if *kind == BufferKind::Validity => continue,
                // None of the node's rows are reached. They need not be valid then, and the first offset is one of theirs.
                _ if view.length == 0 && node.length > 0 => 0,
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
            for i in layout.buffers().len()..node.buffers.len() - 1 {
                buffers.push(self.buffer(i, 0, self.bytes(i)?, 1)?);
            }
        }
        if sparse && view.offset > 0 && view.length > 0 {
            // Type ids are cut here; with an offset arrow-rs would cut the children too.
            buffers[0] = buffers[0].slice_with_length(view.offset, view.length);
        }
        let children = (0..node.children.len()).map(|i| self.child(i).data());
        let builder = ArrayDataBuilder::new(node.data_type.clone())
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
        let known = view.null_count();
        let Some(bitmap) = view.node.bitmap().filter(|_| known != Some(0)) else {
            return Ok(None);
        };
        // The whole buffer: arrow-rs counts rows from the data's offset, which may be larger than the bitmap's.
        let needed = (view.validity_offset + view.length).div_ceil(8);
        let buffer = self.buffer(0, 0, bitmap.bytes().unwrap_or(needed), 1)?;
        let bits = BooleanBuffer::new(buffer, view.validity_offset, view.length);
        let nulls = match known {
            // SAFETY: a known number was counted in these bits, or guaranteed by the caller of an `unsafe` function
            // (see `NullCount`).
            Some(nulls) => unsafe { NullBuffer::new_unchecked(bits, nulls) },
            None => NullBuffer::new(bits),
        };
        Ok(Some(nulls).filter(|nulls| nulls.null_count() > 0))
    }

    /// The bytes in buffer `i`, of fixed-width values, of these rows.
    fn rows(&self, i: usize) -> Result<Buffer> {
        let kind = self.view.layout().buffers()[i];
        let bytes = |rows| kind.bytes(rows).unwrap_or(Ok(0));
        let (start, len) = (bytes(self.view.offset)?, bytes(self.view.length)?);
        self.buffer(i, start, len, kind.align())
    }

    /// The size of buffer `i` in bytes.
    fn bytes(&self, i: usize) -> Result<usize> {
        let buffer = &self.view.node.buffers[i];
        if buffer.bytes().is_none() {
            // SAFETY: the host can read the memory, and it is ready: `make_ready` checked both before there was a `Part`.
            unsafe { read_sizes(self.array, self.view.node) }?;
        }
        Ok(buffer.bytes().unwrap_or(0))
    }

    /// `bytes` bytes from byte `start` of buffer `i`.
    fn buffer(&self, i: usize, start: usize, bytes: usize, align: usize) -> Result<Buffer> {
        if bytes == 0 {
            return Ok(Buffer::default());
        }
        let part = &self.view.node.buffers[i];
        let Some(owner) = &part.owner else {
            let path = self.array.node().buffer_path(self.view.node, i);
            let what = format!("is null, {bytes} bytes are needed");
            return Err(Error::invalid(path, what));
        };
        let address = part.address().offset(start);
        // SAFETY: the host can read the memory, and it is ready (`make_ready`). The buffer has at least `start + bytes`
        // bytes: where the type determines its size, import and constructors checked it; elsewhere `bytes` is its size as
        // its producer states it (contract of the import). The owner keeps the memory alive.
        let buffer = unsafe { host_buffer(owner, address, bytes) };
        if address.address() % align == 0 {
            return Ok(buffer);
        }
        let counters = self.array.device().counters();
        Counters::add(&counters.host_copied_bytes, bytes);
        Counters::add(&counters.host_allocations, 1);
        let mut slab = HostSlab::new(bytes)?;
        slab.copy_from_slice(&buffer);
        Ok(slab.into_buffer())
    }
}
