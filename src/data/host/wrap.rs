//! Arrow-rs data in host memory as arrays of the CPU device, without copying values. There are two walks: one over [`ArrayData`],
//! and one over arrays, which does not convert them to [`ArrayData`] because that costs allocations for each
//! column.

use std::sync::Arc;

use arrow_array::{
    Array, BooleanArray, DictionaryArray, FixedSizeBinaryArray, FixedSizeListArray,
    GenericByteArray, GenericByteViewArray, GenericListArray, GenericListViewArray, MapArray,
    NullArray, PrimitiveArray, RecordBatch, RunArray, StructArray, UnionArray, downcast_integer,
    downcast_primitive, downcast_run_end_index, types,
};
use arrow_buffer::{Buffer, NullBuffer};
use arrow_data::ArrayData;
use arrow_schema::DataType;
use smallvec::smallvec;

use crate::data::array::DeviceArray;
use crate::data::layout::{Layout, Nesting, check_type, child_type, has_validity};
use crate::data::node::{Buffers, Node, NodeBuffer, NullCount};
use crate::device::{DevicePtr, Devices};
use crate::error::{Error, Result};
use crate::memory::{Kept, Memory, Owner, Ready};

impl DeviceArray {
    /// Makes an array on the CPU device of Arrow data in host memory, without a copy.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if a child has fewer rows than its parent's offset and length require.
    pub fn from_host(data: ArrayData) -> Result<Self> {
        check_type(data.data_type())?;
        let owner = owner(Memory::Kept(Kept(Box::new(data.clone()))));
        let node = of_data(data.data_type(), &data, &owner)?;
        Ok(Self::from_node(Devices::cpu(), node))
    }
}

/// The columns of a batch as a struct array of the CPU.
pub(crate) fn wrap_batch(batch: &RecordBatch) -> Result<DeviceArray> {
    let (fields, rows) = (batch.schema_ref().fields(), batch.num_rows());
    let owner = owner(Memory::Arrow(batch.columns().to_vec()));
    let column = |i: usize| {
        let (data_type, column) = (fields[i].data_type(), &**batch.column(i));
        check_column(data_type, column)?;
        of_array(data_type, column, rows, &owner)
    };
    let columns = (0..fields.len()).map(column).collect::<Result<_>>()?;
    let root = DataType::Struct(fields.clone());
    let root = Node::new(root, rows, smallvec![NodeBuffer::absent()], columns);
    Ok(DeviceArray::from_node(Devices::cpu(), Arc::new(root)))
}

fn owner(memory: Memory) -> Arc<Owner> {
    Arc::new(Owner::new(Devices::cpu(), memory, Ready::Now))
}

/// Refuses nested types that no array can have, and columns of another type than their field says.
fn check_column(data_type: &DataType, column: &dyn Array) -> Result<()> {
    if !data_type.is_nested() && !matches!(data_type, DataType::Dictionary(_, _)) {
        return Ok(());
    }
    check_type(data_type)?;
    match same_children(data_type, column.data_type()) {
        true => Ok(()),
        false => Err(Error::argument(format!(
            "the schema says {data_type} of a column of {}: cast it",
            column.data_type()
        ))),
    }
}

/// Whether two types that arrow-rs considers equal have the same children in the same order: it lets those of
/// unions differ.
fn same_children(a: &DataType, b: &DataType) -> bool {
    let ids = |data_type: &DataType| match data_type {
        DataType::Union(fields, _) => fields.iter().map(|(id, _)| id).collect(),
        _ => Vec::new(),
    };
    let child = |i| match (child_type(a, i), child_type(b, i)) {
        (Some(a), Some(b)) => same_children(a, b),
        (a, b) => a == b,
    };
    let n = Layout::of(a).n_children();
    // Types are mostly one and the same object.
    a == b || (n > 0 && n == Layout::of(b).n_children() && ids(a) == ids(b) && (0..n).all(child))
}

/// The type of child `i` as its parent declares it.
fn declared(data_type: &DataType, i: usize) -> &DataType {
    child_type(data_type, i).unwrap_or(&DataType::Null)
}

fn wrapped(buffer: &Buffer, owner: &Arc<Owner>) -> NodeBuffer {
    let base = DevicePtr::new(buffer.as_ptr().cast_mut().cast());
    NodeBuffer::new(owner, base, 0, Some(buffer.len()))
}

/// The validity bitmap that an array of the type begins with, if it has one.
fn bitmap(
    data_type: &DataType,
    nulls: Option<&NullBuffer>,
    owner: &Arc<Owner>,
) -> Option<NodeBuffer> {
    let bitmap = || nulls.map(|nulls| wrapped(nulls.buffer(), owner));
    has_validity(data_type).then(|| bitmap().unwrap_or_else(NodeBuffer::absent))
}

/// A node over these buffers.
fn node(
    data_type: &DataType,
    [length, offset]: [usize; 2],
    nulls: Option<&NullBuffer>,
    mut buffers: Buffers,
    children: Vec<Arc<Node>>,
) -> Arc<Node> {
    let layout = Layout::of(data_type);
    if layout.variadic {
        buffers.push(NodeBuffer::absent());
    }
    Arc::new(Node {
        offset,
        validity_offset: nulls.map_or(offset, NullBuffer::offset),
        nulls: NullCount::known(nulls.map_or(0, NullBuffer::null_count)),
        ..Node::new(data_type.clone(), length, buffers, children)
    })
}

/// A node for `ArrayData`, which `owner` keeps.
fn of_data(data_type: &DataType, data: &ArrayData, owner: &Arc<Owner>) -> Result<Arc<Node>> {
    let offset = row_offset(data)?;
    let bitmap = bitmap(data_type, data.nulls(), owner).into_iter();
    let others = data.buffers().iter().map(|buffer| wrapped(buffer, owner));
    let children = data.child_data().iter().enumerate();
    let children = children.map(|(i, child)| of_data(declared(data_type, i), child, owner));
    Ok(node(
        data_type,
        [data.len(), offset],
        data.nulls(),
        bitmap.chain(others).collect(),
        children.collect::<Result<_>>()?,
    ))
}

/// A node for an array of a type that arrow-rs does not define: only it knows where its memory is.
#[cold]
fn of_foreign(data_type: &DataType, array: &dyn Array) -> Result<Arc<Node>> {
    let data = array.to_data();
    let owner = owner(Memory::Kept(Kept(Box::new(data.clone()))));
    of_data(data_type, &data, &owner)
}

/// A node for an array of at least `needed` rows, which `owner` keeps.
fn of_array(
    data_type: &DataType,
    array: &dyn Array,
    needed: usize,
    owner: &Arc<Owner>,
) -> Result<Arc<Node>> {
    use DataType as T;
    if array.len() < needed {
        return Err(too_short(data_type, array.len(), needed));
    }
    // A bitmap without nulls is left out, as in `ArrayData`.
    let nulls = array.nulls().filter(|nulls| nulls.null_count() > 0);
    let (mut buffers, mut children) = (Buffers::new(), Vec::new());
    let mut offset = 0;
    buffers.extend(bitmap(data_type, nulls, owner));
    let needed = match Layout::of(data_type).nesting {
        Nesting::RowByRow => array.len(),
        // Saturated, it is more rows than there can be.
        Nesting::Times(n) => array.len().saturating_mul(n as usize),
        _ => 0,
    };
    let mut add = |buffer: &Buffer| buffers.push(wrapped(buffer, owner));
    let mut child = |i, array: &dyn Array| -> Result<()> {
        children.push(of_array(declared(data_type, i), array, needed, owner)?);
        Ok(())
    };
    let any = array.as_any();
    macro_rules! own {
        ($t:ty) => {
            match any.downcast_ref::<$t>() {
                Some(array) => array,
                None => return of_foreign(data_type, array),
            }
        };
    }
    macro_rules! primitive {
        ($t:ty) => {
            add(own!(PrimitiveArray<$t>).values().inner())
        };
    }
    macro_rules! bytes {
        ($t:ty) => {{
            let array = own!(GenericByteArray<$t>);
            add(array.offsets().inner().inner());
            add(array.values());
        }};
    }
    macro_rules! views {
        ($t:ty) => {{
            let array = own!(GenericByteViewArray<$t>);
            add(array.views().inner());
            array.data_buffers().iter().for_each(add);
        }};
    }
    macro_rules! list {
        ($t:ty) => {{
            let array = own!(GenericListArray<$t>);
            add(array.offsets().inner().inner());
            child(0, &**array.values())?;
        }};
    }
    macro_rules! list_view {
        ($t:ty) => {{
            let array = own!(GenericListViewArray<$t>);
            add(array.offsets().inner());
            add(array.sizes().inner());
            child(0, &**array.values())?;
        }};
    }
    macro_rules! dictionary {
        ($t:ty) => {{
            let array = own!(DictionaryArray<$t>);
            add(array.keys().values().inner());
            child(0, &**array.values())?;
        }};
    }
    macro_rules! runs {
        ($t:ty) => {{
            let array = own!(RunArray<$t>);
            let ends = array.run_ends();
            offset = ends.offset();
            let buffers = smallvec![NodeBuffer::absent(), wrapped(ends.inner().inner(), owner)];
            let rows = [ends.inner().len(), 0];
            children.push(node(
                declared(data_type, 0),
                rows,
                None,
                buffers,
                Vec::new(),
            ));
            let values = declared(data_type, 1);
            children.push(of_array(values, &**array.values(), 0, owner)?);
        }};
    }
    downcast_primitive! {
        data_type => (primitive),
        T::Null => {
            own!(NullArray);
        }
        T::Boolean => {
            let values = own!(BooleanArray).values();
            offset = values.offset();
            add(values.inner());
        }
        T::Utf8 => bytes!(types::Utf8Type),
        T::LargeUtf8 => bytes!(types::LargeUtf8Type),
        T::Binary => bytes!(types::BinaryType),
        T::LargeBinary => bytes!(types::LargeBinaryType),
        T::Utf8View => views!(types::StringViewType),
        T::BinaryView => views!(types::BinaryViewType),
        T::FixedSizeBinary(_) => add(own!(FixedSizeBinaryArray).values()),
        T::List(_) => list!(i32),
        T::LargeList(_) => list!(i64),
        T::ListView(_) => list_view!(i32),
        T::LargeListView(_) => list_view!(i64),
        T::FixedSizeList(_, _) => child(0, &**own!(FixedSizeListArray).values())?,
        T::Struct(_) => {
            for (i, column) in own!(StructArray).columns().iter().enumerate() {
                child(i, &**column)?;
            }
        }
        T::Map(_, _) => {
            let array = own!(MapArray);
            add(array.offsets().inner().inner());
            child(0, array.entries())?;
        }
        T::Union(fields, _) => {
            let array = own!(UnionArray);
            add(array.type_ids().inner());
            array.offsets().iter().for_each(|offsets| add(offsets.inner()));
            for (i, (id, _)) in fields.iter().enumerate() {
                child(i, &**array.child(id))?;
            }
        }
        T::Dictionary(keys, _) => {
            downcast_integer! {
                &**keys => (dictionary),
                _ => return of_foreign(data_type, array),
            }
        }
        T::RunEndEncoded(ends, _) => {
            downcast_run_end_index! {
                ends.data_type() => (runs),
                _ => return of_foreign(data_type, array),
            }
        }
        _ => return of_foreign(data_type, array),
    }
    Ok(node(
        data_type,
        [array.len(), offset],
        nulls,
        buffers,
        children,
    ))
}

/// Returns the rows to skip in buffers and children, after checking that the children have these rows: arrow-rs
/// only checks that children are as long as their parent, whatever its offset. `ArrayData::slice` cuts a struct's
/// children and leaves its offset.
fn row_offset(data: &ArrayData) -> Result<usize> {
    let times = match Layout::of(data.data_type()).nesting {
        Nesting::RowByRow => 1,
        Nesting::Times(n) => n as usize,
        _ => return Ok(data.offset()),
    };
    let children = data.child_data();
    let rows = |offset: usize| offset.checked_add(data.len())?.checked_mul(times);
    let have = |offset| rows(offset).is_some_and(|n| children.iter().all(|c| c.len() >= n));
    if have(data.offset()) {
        return Ok(data.offset());
    }
    let is_struct = matches!(data.data_type(), DataType::Struct(_));
    if is_struct && children.iter().all(|c| c.len() == data.len()) {
        return Ok(0);
    }
    Err(Error::argument(format!(
        "{}: a child is too short for {} rows at {}",
        data.data_type(),
        data.len(),
        data.offset()
    )))
}

#[cold]
fn too_short(data_type: &DataType, length: usize, needed: usize) -> Error {
    Error::argument(format!(
        "{data_type}: {length} rows where its parent needs {needed}"
    ))
}
