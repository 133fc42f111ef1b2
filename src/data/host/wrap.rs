//! Host memory of arrow-rs as trees. Arrays are read in place, one by one: [`ArrayData`] of them would
//! cost some allocations for each.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{
    Array, ArrayRef, DictionaryArray, GenericByteArray, GenericByteViewArray, GenericListArray,
    GenericListViewArray, PrimitiveArray, RecordBatch, RunArray, StructArray, UnionArray,
    downcast_integer, downcast_primitive, downcast_run_end_index, types,
};
use arrow_buffer::{Buffer, NullBuffer};
use arrow_data::ArrayData;
use arrow_schema::DataType;

use crate::data::array::DeviceArray;
use crate::data::build::root_node;
use crate::data::layout::{Layout, Nesting, check_type, child_type};
use crate::data::tree::{Node, NullCount, Owners, Slot, Tree};
use crate::device::{DevicePtr, Devices};
use crate::error::{Error, Result};
use crate::memory::{Kept, Memory, Owner, Ready};

impl DeviceArray {
    /// Arrow data in host memory as an array of the CPU, without a copy.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a child has fewer rows than its parent's offset and length ask.
    pub fn from_host(data: ArrayData) -> Result<Self> {
        Ok(Self::from_tree(Arc::new(wrap_data(data)?)))
    }
}

/// Arrow data as a tree of the CPU; the tree holds the data.
pub(crate) fn wrap_data(data: ArrayData) -> Result<Tree> {
    check_type(data.data_type())?;
    let root = data.data_type().clone();
    let mut wrapper = Wrapper::default();
    wrapper.node(Parts::of_data(&data)?, 0, 0)?;
    wrapper.descend()?;
    let Wrapper { nodes, slots, .. } = wrapper;
    // `ArrayData` moves, the buffers that the slots point to do not.
    let memory = Memory::Kept(Kept(Box::new(data)));
    Ok(tree(root, nodes, slots, memory))
}

/// The columns of a batch as a tree of the CPU: some allocations, whatever their number.
pub(crate) fn wrap_batch(batch: &RecordBatch) -> Result<Tree> {
    let root = DataType::Struct(batch.schema_ref().fields().clone());
    let mut room = 1;
    for column in batch.columns() {
        room += nodes(column.data_type())?;
    }
    let mut wrapper = Wrapper::default();
    wrapper.nodes.reserve_exact(room);
    // Mask, offsets, values; or mask, views, lengths, and then out-of-line buffers make it grow.
    wrapper.slots.reserve_exact(3 * room);
    wrapper.later.reserve_exact(room - 1 - batch.num_columns());
    wrapper.root(&root, batch.num_rows());
    for column in batch.columns() {
        match Parts::of_array(column) {
            Some(parts) => wrapper.node(parts, 0, batch.num_rows())?,
            None => return wrap_batch_data(batch),
        }
    }
    if !wrapper.descend()? {
        return wrap_batch_data(batch);
    }
    let Wrapper { nodes, slots, .. } = wrapper;
    let memory = Memory::Arrow(batch.columns().to_vec());
    Ok(tree(root, nodes, slots, memory))
}

/// A batch with arrays that are not arrow-rs's own: only they know where their memory is.
#[cold]
fn wrap_batch_data(batch: &RecordBatch) -> Result<Tree> {
    let root = DataType::Struct(batch.schema_ref().fields().clone());
    let columns: Vec<_> = batch.columns().iter().map(|c| c.to_data()).collect();
    let mut wrapper = Wrapper::default();
    wrapper.root(&root, batch.num_rows());
    for column in &columns {
        wrapper.node(Parts::of_data(column)?, 0, batch.num_rows())?;
    }
    wrapper.descend()?;
    let Wrapper { nodes, slots, .. } = wrapper;
    Ok(tree(root, nodes, slots, Memory::Kept(Kept(Box::new(columns)))))
}

/// How many nodes an array of this type has; checks nested types on the way.
fn nodes(data_type: &DataType) -> Result<usize> {
    fn count(data_type: &DataType) -> usize {
        let children = 0..Layout::of(data_type).n_children();
        let types = children.filter_map(|i| child_type(data_type, i));
        1 + types.map(count).sum::<usize>()
    }
    if !data_type.is_nested() && !matches!(data_type, DataType::Dictionary(_, _)) {
        return Ok(1);
    }
    check_type(data_type)?;
    Ok(count(data_type))
}

fn tree(root: DataType, nodes: Vec<Node>, slots: Vec<Slot>, memory: Memory) -> Tree {
    let device = Devices::cpu();
    let owner = Owner::new(device.clone(), memory, Ready::Now);
    Tree {
        device,
        root,
        nodes,
        slots,
        owners: Owners::One(Arc::new(owner)),
    }
}

/// What a node is made of, borrowed from host memory.
struct Parts<'a> {
    data_type: &'a DataType,
    length: usize,
    /// Rows to skip in all buffers but the mask.
    offset: usize,
    nulls: Option<&'a NullBuffer>,
    /// Buffers behind the mask, up to the first that is not there.
    buffers: [Option<&'a Buffer>; 2],
    /// Further ones.
    more: &'a [Buffer],
    children: Children<'a>,
}

/// Where a node's children come from.
#[derive(Clone, Copy)]
enum Children<'a> {
    None,
    Arrays(&'a [ArrayRef]),
    Entries(&'a StructArray),
    Union(&'a UnionArray),
    Runs {
        ends_type: &'a DataType,
        ends: &'a Buffer,
        runs: usize,
        values: &'a ArrayRef,
    },
    Data(&'a [ArrayData]),
}

impl<'a> Parts<'a> {
    /// `None` for arrays that are not arrow-rs's own.
    fn of_array(array: &'a dyn Array) -> Option<Self> {
        use DataType as T;
        let data_type = array.data_type();
        let any = array.as_any();
        let mut parts = Self {
            data_type,
            length: array.len(),
            offset: 0,
            // A mask without nulls is none, as in `ArrayData`.
            nulls: array.nulls().filter(|nulls| nulls.null_count() > 0),
            buffers: [None, None],
            more: &[],
            children: Children::None,
        };
        macro_rules! primitive {
            ($t:ty) => {{
                let array = any.downcast_ref::<PrimitiveArray<$t>>()?;
                parts.buffers[0] = Some(array.values().inner());
            }};
        }
        macro_rules! bytes {
            ($t:ty) => {{
                let array = any.downcast_ref::<GenericByteArray<$t>>()?;
                parts.buffers = [Some(array.offsets().inner().inner()), Some(array.values())];
            }};
        }
        macro_rules! views {
            ($t:ty) => {{
                let array = any.downcast_ref::<GenericByteViewArray<$t>>()?;
                parts.buffers[0] = Some(array.views().inner());
                parts.more = array.data_buffers();
            }};
        }
        macro_rules! list {
            ($t:ty) => {{
                let array = any.downcast_ref::<GenericListArray<$t>>()?;
                parts.buffers[0] = Some(array.offsets().inner().inner());
                parts.children = Children::Arrays(std::slice::from_ref(array.values()));
            }};
        }
        macro_rules! list_view {
            ($t:ty) => {{
                let array = any.downcast_ref::<GenericListViewArray<$t>>()?;
                parts.buffers = [Some(array.offsets().inner()), Some(array.sizes().inner())];
                parts.children = Children::Arrays(std::slice::from_ref(array.values()));
            }};
        }
        macro_rules! dictionary {
            ($t:ty) => {{
                let array = any.downcast_ref::<DictionaryArray<$t>>()?;
                parts.buffers[0] = Some(array.keys().values().inner());
                parts.children = Children::Arrays(std::slice::from_ref(array.values()));
            }};
        }
        macro_rules! runs {
            ($t:ty, $ends_field:ident) => {{
                let array = any.downcast_ref::<RunArray<$t>>()?;
                let ends = array.run_ends();
                parts.offset = ends.offset();
                parts.children = Children::Runs {
                    ends_type: $ends_field.data_type(),
                    ends: ends.inner().inner(),
                    runs: ends.values().len(),
                    values: array.values(),
                };
            }};
        }
        downcast_primitive! {
            data_type => (primitive),
            T::Null => {
                any.downcast_ref::<arrow_array::NullArray>()?;
            }
            T::Boolean => {
                let values = array.as_boolean_opt()?.values();
                parts.offset = values.offset();
                parts.buffers[0] = Some(values.inner());
            }
            T::Utf8 => bytes!(types::Utf8Type),
            T::LargeUtf8 => bytes!(types::LargeUtf8Type),
            T::Binary => bytes!(types::BinaryType),
            T::LargeBinary => bytes!(types::LargeBinaryType),
            T::Utf8View => views!(types::StringViewType),
            T::BinaryView => views!(types::BinaryViewType),
            T::FixedSizeBinary(_) => {
                parts.buffers[0] = Some(array.as_fixed_size_binary_opt()?.values());
            }
            T::List(_) => list!(i32),
            T::LargeList(_) => list!(i64),
            T::ListView(_) => list_view!(i32),
            T::LargeListView(_) => list_view!(i64),
            T::FixedSizeList(_, _) => {
                let values = array.as_fixed_size_list_opt()?.values();
                parts.children = Children::Arrays(std::slice::from_ref(values));
            }
            T::Struct(_) => {
                parts.children = Children::Arrays(array.as_struct_opt()?.columns());
            }
            T::Map(_, _) => {
                let array = array.as_map_opt()?;
                parts.buffers[0] = Some(array.offsets().inner().inner());
                parts.children = Children::Entries(array.entries());
            }
            T::Union(_, _) => {
                let array = array.as_union_opt()?;
                let offsets = array.offsets().map(|offsets| offsets.inner());
                parts.buffers = [Some(array.type_ids().inner()), offsets];
                parts.children = Children::Union(array);
            }
            T::Dictionary(keys, _) => {
                downcast_integer! {
                    &**keys => (dictionary),
                    _ => return None,
                }
            }
            T::RunEndEncoded(ends_field, _) => {
                downcast_run_end_index! {
                    ends_field.data_type() => (runs, ends_field),
                    _ => return None,
                }
            }
            _ => return None,
        }
        Some(parts)
    }

    fn of_data(data: &'a ArrayData) -> Result<Self> {
        Ok(Self {
            data_type: data.data_type(),
            length: data.len(),
            offset: row_offset(data)?,
            nulls: data.nulls(),
            buffers: [None, None],
            more: data.buffers(),
            children: Children::Data(data.child_data()),
        })
    }
}

/// Makes nodes and slots, level by level.
#[derive(Default)]
struct Wrapper<'a> {
    nodes: Vec<Node>,
    slots: Vec<Slot>,
    /// Nodes whose children come later, with where those come from and how many rows they need.
    later: Vec<(usize, Children<'a>, usize)>,
}

impl<'a> Wrapper<'a> {
    fn root(&mut self, root: &DataType, rows: usize) {
        let layout = Layout::of(root);
        self.slots.push(Slot::absent());
        self.nodes.push(Node {
            n_children: layout.n_children() as u32,
            ..root_node(layout, rows, 1, NullCount::known(0))
        });
    }

    fn node(&mut self, parts: Parts<'a>, parent: usize, rows_needed: usize) -> Result<()> {
        let Parts {
            data_type,
            length,
            offset,
            nulls,
            ..
        } = parts;
        if length < rows_needed {
            return Err(too_short(data_type, length, rows_needed));
        }
        let layout = Layout::of(data_type);
        let first_slot = self.slots.len();
        let mut validity_offset = offset;
        if layout.has_validity() {
            match nulls {
                Some(nulls) => {
                    validity_offset = nulls.offset();
                    self.slot(nulls.buffer());
                }
                None => self.slots.push(Slot::absent()),
            }
        }
        for buffer in parts.buffers.into_iter().map_while(|buffer| buffer) {
            self.slot(buffer);
        }
        for buffer in parts.more {
            self.slot(buffer);
        }
        if layout.variadic {
            self.slots.push(Slot::absent());
        }
        let n_children = layout.n_children();
        if n_children > 0 {
            let needed = match layout.nesting {
                Nesting::RowByRow => Some(length),
                Nesting::Times(n) => length.checked_mul(n as usize),
                _ => Some(0),
            };
            // More than there can be.
            let needed = needed.unwrap_or(usize::MAX);
            self.later.push((self.nodes.len(), parts.children, needed));
        }
        self.nodes.push(Node {
            length,
            layout,
            cut: false,
            padded: false,
            offset,
            validity_offset,
            nulls: NullCount::known(nulls.map_or(0, NullBuffer::null_count)),
            parent: parent as u32,
            first_child: 0,
            n_children: n_children as u32,
            first_slot: first_slot as u32,
            n_slots: (self.slots.len() - first_slot) as u32,
        });
        Ok(())
    }

    fn slot(&mut self, buffer: &Buffer) {
        let base = DevicePtr::new(buffer.as_ptr().cast_mut().cast());
        self.slots.push(Slot::new(base, 0, Some(buffer.len()), 0));
    }

    /// Adds all descendants. `false`: one is not an array of arrow-rs's own.
    fn descend(&mut self) -> Result<bool> {
        let mut i = 0;
        while let Some(&(node, children, needed)) = self.later.get(i) {
            i += 1;
            self.nodes[node].first_child = self.nodes.len() as u32;
            let known = match children {
                Children::None => true,
                Children::Arrays(arrays) => {
                    let arrays = arrays.iter().map(|array| &**array);
                    self.arrays(arrays, node, needed)?
                }
                Children::Entries(entries) => self.arrays([entries as _], node, needed)?,
                Children::Union(array) => {
                    let DataType::Union(fields, _) = array.data_type() else {
                        return Ok(false);
                    };
                    let arrays = fields.iter().map(|(id, _)| &**array.child(id));
                    self.arrays(arrays, node, needed)?
                }
                Children::Runs {
                    ends_type,
                    ends,
                    runs,
                    values,
                } => {
                    let ends = Parts {
                        data_type: ends_type,
                        length: runs,
                        offset: 0,
                        nulls: None,
                        buffers: [Some(ends), None],
                        more: &[],
                        children: Children::None,
                    };
                    self.node(ends, node, needed)?;
                    self.arrays([&**values], node, needed)?
                }
                Children::Data(children) => {
                    for child in children {
                        // `row_offset` has looked at the rows.
                        self.node(Parts::of_data(child)?, node, 0)?;
                    }
                    true
                }
            };
            if !known {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn arrays(
        &mut self,
        arrays: impl IntoIterator<Item = &'a dyn Array>,
        parent: usize,
        rows_needed: usize,
    ) -> Result<bool> {
        for array in arrays {
            match Parts::of_array(array) {
                Some(parts) => self.node(parts, parent, rows_needed)?,
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

/// Rows to skip in buffers and children, which must have the rows then: arrow-rs checks only that
/// children are as long as their parent, whatever its offset. A struct's children may have been cut
/// already (`ArrayData::slice`) while its offset was left.
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
