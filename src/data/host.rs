//! Arrow-rs data in host memory as arrays of the CPU device, and arrays in memory that the host can read as arrow-rs data. Values are
//! not copied, unless they are not aligned as arrow-rs requires.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, RecordBatch, RecordBatchOptions, cast::AsArray, downcast_primitive,
    make_array, types,
};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_data::{ArrayData, ArrayDataBuilder};
use arrow_schema::{DataType, Schema};

use crate::abi::guard;
use crate::data::array::{DeviceArray, path};
use crate::data::fit::are_of_one_kind;
use crate::data::layout::{Nesting, check_type, child_type};
use crate::data::node::{Buffers, Node, NodeBuffer, NullCount, View};
use crate::data::numbers::Numbers;
use crate::device::{Counters, DevicePtr, Devices};
use crate::error::{Error, Result, bail};
use crate::memory::{Memory, Owner, Ready};

impl DeviceArray {
    /// Makes an array on the CPU device of the data of an arrow-rs array, whose children have the rows that it refers to. Copies nothing.
    pub(crate) fn from_host(data: ArrayData) -> Result<Self> {
        check_type(data.data_type())?;
        let node = of_data(data.data_type(), &data, &keeper(data.clone()))?;
        Ok(Self::from_node(Devices::cpu(), node))
    }
}

/// The columns of a batch as a struct array of the CPU.
pub(crate) fn wrap_batch(batch: &RecordBatch) -> Result<DeviceArray> {
    let fields = batch.schema_ref().fields();
    let owner = keeper(batch.columns().to_vec());
    let columns = fields.iter().zip(batch.columns());
    let columns = columns.map(|(field, column)| of_column(field.data_type(), column, &owner));
    let columns = columns.collect::<Result<_>>()?;
    let root = Node::of_columns(fields.clone(), batch.num_rows(), columns);
    Ok(DeviceArray::from_node(Devices::cpu(), Arc::new(root)))
}

/// An owner that keeps the memory of `data`.
fn keeper(data: impl Any + Send + Sync) -> Arc<Owner> {
    let memory = Memory::Kept(Box::new(data));
    Arc::new(Owner::new(Devices::cpu(), memory, Ready::Now))
}

/// A node for a column, which `owner` keeps. Columns of numbers and text are not converted to `ArrayData`, which would cost
/// allocations for each.
fn of_column(data_type: &DataType, column: &ArrayRef, owner: &Arc<Owner>) -> Result<Arc<Node>> {
    macro_rules! primitive {
        ($t:ty) => {
            (column.as_primitive_opt::<$t>()).map(|of| (0, [Some(of.values().inner()), None]))
        };
    }
    macro_rules! bytes {
        ($t:ty) => {
            (column.as_bytes_opt::<$t>())
                .map(|of| (0, [Some(of.offsets().inner().inner()), Some(of.values())]))
        };
    }
    let flat = downcast_primitive! {
        data_type => (primitive),
        DataType::Boolean => (column.as_boolean_opt())
            .map(|of| (of.values().offset(), [Some(of.values().inner()), None])),
        DataType::Utf8 => bytes!(types::Utf8Type),
        DataType::LargeUtf8 => bytes!(types::LargeUtf8Type),
        DataType::Binary => bytes!(types::BinaryType),
        DataType::LargeBinary => bytes!(types::LargeBinaryType),
        _ => None,
    };
    let Some((offset, buffers)) = flat else {
        check_type(data_type)?;
        let data = column.to_data();
        return of_data(data_type, &data, &keeper(data.clone()));
    };
    let (rows, nulls) = ([column.len(), offset], column.nulls());
    let buffers = buffers.into_iter().flatten();
    Ok(node(data_type, rows, nulls, buffers, Vec::new(), owner))
}

/// A node for `ArrayData`, which `owner` keeps, as `data_type` says: it may have other names of fields.
fn of_data(data_type: &DataType, data: &ArrayData, owner: &Arc<Owner>) -> Result<Arc<Node>> {
    // What arrow-rs considers equal may have the children of a union in another order.
    if !are_of_one_kind(data.data_type(), data_type) {
        let of = data.data_type();
        bail!("the schema says {data_type} of a column of {of}: cast it");
    }
    let rows = [data.len(), data.offset()];
    let child = |(i, child)| {
        // As its parent declares it.
        let data_type = child_type(data_type, i).unwrap_or(&DataType::Null);
        of_data(data_type, child, owner)
    };
    let children = data.child_data().iter().enumerate().map(child);
    let children = children.collect::<Result<_>>()?;
    let (nulls, buffers) = (data.nulls(), data.buffers().iter());
    Ok(node(data_type, rows, nulls, buffers, children, owner))
}

/// A node over these buffers, those after the bitmap, in memory of `owner`.
fn node<'a>(
    data_type: &DataType,
    [length, offset]: [usize; 2],
    nulls: Option<&NullBuffer>,
    others: impl Iterator<Item = &'a Buffer>,
    children: Vec<Arc<Node>>,
    owner: &Arc<Owner>,
) -> Arc<Node> {
    let wrapped = |buffer: &Buffer| {
        // What arrow-rs has for no bytes points nowhere.
        let base = match buffer.len() {
            0 => DevicePtr::NULL,
            _ => DevicePtr::new(buffer.as_ptr().cast_mut().cast()),
        };
        NodeBuffer::new(owner, base, 0, Some(buffer.len()))
    };
    // A bitmap without nulls is left out, as in `ArrayData`.
    let nulls = nulls.filter(|nulls| nulls.null_count() > 0);
    let mut node = Node::new(data_type.clone(), length, Buffers::new(), children);
    if node.layout.has_validity() {
        let bitmap = nulls.map(|nulls| wrapped(nulls.buffer()));
        node.buffers.push(bitmap.unwrap_or_else(NodeBuffer::absent));
    }
    node.buffers.extend(others.map(wrapped));
    if node.layout.variadic {
        node.buffers.push(NodeBuffer::absent());
    }
    node.offset = offset;
    node.validity_offset = nulls.map_or(offset, NullBuffer::offset);
    node.nulls = NullCount::known(nulls.map_or(0, NullBuffer::null_count));
    Arc::new(node)
}

/// The rows of an array in host-readable memory as `ArrayData`. Waits until the memory is ready. Copies only values
/// that are not aligned as arrow-rs requires, and counts those.
pub(crate) fn unwrap(array: &DeviceArray) -> Result<ArrayData> {
    make_ready(array)?;
    to_data(array, array.view(), false)
}

/// As [`unwrap`], but returns an array. arrow-rs panics on some data; the guard turns that into an error, so that
/// data from outside cannot end the program.
pub(crate) fn to_array(array: &DeviceArray) -> Result<ArrayRef> {
    let data = unwrap(array)?;
    guard::callback("building an arrow array", || Ok(make_array(data)))
}

/// As [`to_array`], for the columns of a batch.
pub(crate) fn to_batch(schema: &Arc<Schema>, array: &DeviceArray) -> Result<RecordBatch> {
    make_ready(array)?;
    guard::callback("building an arrow batch", || {
        let column = |i| Ok(make_array(to_data(array, array.view().child(i), false)?));
        let columns = (0..array.num_children()).map(column);
        let columns = columns.collect::<Result<_>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(array.len()));
        let batch = RecordBatch::try_new_with_options(schema.clone(), columns, &options);
        Ok(batch?)
    })
}

/// Waits until the host may read the memory, and finds out the sizes of its buffers.
fn make_ready(array: &DeviceArray) -> Result<()> {
    if !array.device().is_host_readable() {
        bail!("the host cannot read this device's memory; use to_host");
    }
    Numbers::in_place(&[array])?.all_sizes(array)
}

/// Rows of a node of an array, for which [`make_ready`] was called; `is_run_ends` says what they are.
fn to_data(array: &DeviceArray, view: View<'_>, is_run_ends: bool) -> Result<ArrayData> {
    let (node, layout) = (&**view.node, view.layout());
    // Of these exactly the rows: `View::child` cuts the children of structs; with an offset arrow-rs would cut those of unions too, and
    // older versions read run ends from the buffer's start, whatever the offset.
    let is_cut = is_run_ends || matches!(layout.nesting, Nesting::RowByRow | Nesting::Times(_));
    // The bitmap is apart, and arrow-rs has no sizes of a view array's buffers.
    let n_buffers = node.buffers.len() - usize::from(layout.variadic);
    let mut buffers = Vec::with_capacity(n_buffers);
    for i in usize::from(layout.has_validity())..n_buffers {
        let size = node.buffers[i].bytes().unwrap_or(0);
        // A view array's data buffers have no kind.
        let kind = layout.buffers().get(i);
        let bytes = |rows| kind.and_then(|kind| kind.bytes(rows)).unwrap_or(Ok(size));
        let start = if is_cut { bytes(view.offset)? } else { 0 };
        let end = match view.length {
            // None of the node's rows are reached. They need not be valid then, and the first offset is one of theirs.
            0 if node.cut || node.length > 0 => start,
            // An array without rows may lack its single offset.
            0 => bytes(view.offset)?.min(size).max(start),
            rows => bytes(view.offset + rows)?.max(start),
        };
        let align = kind.map_or(1, |kind| kind.align());
        buffers.push(buffer(array, view, i, start..end, align)?);
    }
    let children = (0..node.children.len()).map(|i| {
        let is_run_ends = i == 0 && layout.nesting == Nesting::Runs;
        to_data(array, view.child(i), is_run_ends)
    });
    let skips = !is_cut && view.length > 0;
    let builder = ArrayDataBuilder::new(node.data_type.clone())
        .len(view.length)
        .offset(if skips { view.offset } else { 0 })
        .nulls(nulls(array, view)?)
        .buffers(buffers)
        .child_data(children.collect::<Result<Vec<_>>>()?);
    // SAFETY: the data must be valid for its type. Buffers have the lengths that the type requires (`buffer`); that
    // the values are valid is guaranteed by whoever made the array: the caller of an `unsafe` import or constructor
    // (or `Validation::Full`, which checks it), or arrow-rs.
    Ok(unsafe { builder.build_unchecked() })
}

/// The validity bitmap, if a row is null.
fn nulls(array: &DeviceArray, view: View<'_>) -> Result<Option<NullBuffer>> {
    let known = view.null_count();
    let Some(bitmap) = view.node.bitmap().filter(|_| known != Some(0)) else {
        return Ok(None);
    };
    // The whole buffer: arrow-rs counts rows from the data's offset, which may be larger than the bitmap's.
    let bits = buffer(array, view, 0, 0..bitmap.bytes().unwrap_or(0), 1)?;
    let bits = BooleanBuffer::new(bits, view.validity_offset, view.length);
    let nulls = match known {
        // SAFETY: a known number was counted in these bits, or guaranteed by the caller of an `unsafe` function
        // (see `NullCount`).
        Some(nulls) => unsafe { NullBuffer::new_unchecked(bits, nulls) },
        None => NullBuffer::new(bits),
    };
    Ok(Some(nulls).filter(|nulls| nulls.null_count() > 0))
}

/// These bytes of buffer `i`.
fn buffer(
    array: &DeviceArray,
    view: View<'_>,
    i: usize,
    range: Range<usize>,
    align: usize,
) -> Result<Buffer> {
    let bytes = range.len();
    if bytes == 0 {
        return Ok(Buffer::default());
    }
    let buffer = &view.node.buffers[i];
    let address = buffer.address().offset(range.start);
    let ptr = NonNull::new(address.as_ptr().cast::<u8>());
    let Some((owner, ptr)) = buffer.owner.as_ref().zip(ptr) else {
        let path = format!("{}.buffers[{i}]", path(&[array], view.node));
        let what = format!("is null, {bytes} bytes are needed");
        return Err(Error::invalid(path, what));
    };
    // SAFETY: the host can read the memory, and it is ready (`make_ready`). The buffer has at least `range.end`
    // bytes: where the type determines its size, import and constructors checked it; elsewhere `bytes` is its size as
    // its producer states it (contract of the import). The buffer holds the owner, which keeps the memory alive and unchanged.
    let buffer = unsafe { Buffer::from_custom_allocation(ptr, bytes, owner.clone()) };
    if address.address() % align == 0 {
        return Ok(buffer);
    }
    Counters::add(&array.device().counters().host_copied_bytes, bytes);
    // Ordinary memory, which keeps no other device alive.
    let mut host = Devices::cpu().host_buffer(bytes)?;
    host.copy_from_slice(&buffer);
    Ok(Buffer::from(host))
}
