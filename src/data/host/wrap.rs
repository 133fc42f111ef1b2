//! Host memory of arrow-rs as trees. Arrays are read in place, one by one: [`ArrayData`] of them would
//! cost some allocations for each.

use std::slice;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, BooleanArray, DictionaryArray, FixedSizeBinaryArray, FixedSizeListArray,
    GenericByteArray, GenericByteViewArray, GenericListArray, GenericListViewArray, MapArray,
    NullArray, PrimitiveArray, RecordBatch, RunArray, StructArray, UnionArray, downcast_integer,
    downcast_primitive, downcast_run_end_index, types,
};
use arrow_buffer::{Buffer, NullBuffer};
use arrow_data::ArrayData;
use arrow_schema::DataType;

use crate::data::array::DeviceArray;
use crate::data::build::root_node;
use crate::data::layout::{Layout, Nesting, check_type, child_type, has_validity};
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
    wrapper.data(&data, 0, 0)?;
    wrapper.descend()?;
    let Wrapper { nodes, slots, .. } = wrapper;
    // `ArrayData` moves, the buffers that the slots point to do not.
    let memory = Memory::Kept(Kept(Box::new(data)));
    Ok(tree(root, nodes, slots, memory))
}

/// The columns of a batch as a tree of the CPU: some allocations, whatever their number.
pub(crate) fn wrap_batch(batch: &RecordBatch) -> Result<Tree> {
    let fields = batch.schema_ref().fields();
    let root = DataType::Struct(fields.clone());
    let mut room = 1;
    for (field, column) in fields.iter().zip(batch.columns()) {
        room += nodes(field.data_type(), &**column)?;
    }
    let mut wrapper = Wrapper {
        nodes: Vec::with_capacity(room),
        // Mask, offsets, values; or mask, views, lengths: out-of-line buffers make it grow.
        slots: Vec::with_capacity(3 * room),
        later: Vec::with_capacity(room - 1 - fields.len()),
    };
    wrapper.root(&root, batch.num_rows());
    let (nodes, slots, memory) =
        if wrapper.children(0, Children::Arrays(batch.columns()), batch.num_rows())?
            && wrapper.descend()?
        {
            let Wrapper { nodes, slots, .. } = wrapper;
            (nodes, slots, Memory::Arrow(batch.columns().to_vec()))
        } else {
            foreign(batch, &root)?
        };
    Ok(tree(root, nodes, slots, memory))
}

/// As [`wrap_batch`], for arrays that are not arrow-rs's own: only they know where their memory is.
#[cold]
fn foreign(batch: &RecordBatch, root: &DataType) -> Result<(Vec<Node>, Vec<Slot>, Memory)> {
    let columns: Vec<_> = batch.columns().iter().map(|c| c.to_data()).collect();
    let mut wrapper = Wrapper::default();
    wrapper.root(root, batch.num_rows());
    wrapper.children(0, Children::Data(&columns), batch.num_rows())?;
    wrapper.descend()?;
    let Wrapper { nodes, slots, .. } = wrapper;
    Ok((nodes, slots, Memory::Kept(Kept(Box::new(columns)))))
}

/// How many nodes a column has; checks nested types on the way.
fn nodes(data_type: &DataType, column: &dyn Array) -> Result<usize> {
    fn count(data_type: &DataType) -> usize {
        let children = 0..Layout::of(data_type).n_children();
        let types = children.filter_map(|i| child_type(data_type, i));
        1 + types.map(count).sum::<usize>()
    }
    if !data_type.is_nested() && !matches!(data_type, DataType::Dictionary(_, _)) {
        return Ok(1);
    }
    check_type(data_type)?;
    if !same_children(data_type, column.data_type()) {
        return Err(Error::argument(format!(
            "the schema says {data_type} of a column of {}: cast it",
            column.data_type()
        )));
    }
    Ok(count(data_type))
}

/// Whether two types that arrow-rs takes for the same have the same children in the same order: it
/// lets those of unions differ.
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
    // Types are mostly the same in memory.
    a == b || (n > 0 && n == Layout::of(b).n_children() && ids(a) == ids(b) && (0..n).all(child))
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

/// Makes nodes and slots, level by level.
#[derive(Default)]
struct Wrapper<'a> {
    nodes: Vec<Node>,
    slots: Vec<Slot>,
    /// Nodes whose children come later, with where those come from and how many rows they need.
    later: Vec<(usize, Children<'a>, usize)>,
}

/// What a node needs beside its buffers.
struct Head<'a> {
    data_type: &'a DataType,
    length: usize,
    /// Rows to skip in all buffers but the mask.
    offset: usize,
    nulls: Option<&'a NullBuffer>,
    children: Children<'a>,
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

    /// Adds all descendants. `false`: one is not an array of arrow-rs's own.
    fn descend(&mut self) -> Result<bool> {
        let mut i = 0;
        while let Some(&(node, children, needed)) = self.later.get(i) {
            i += 1;
            if !self.children(node, children, needed)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds the children of a node, which have at least `needed` rows. `false` as above.
    fn children(&mut self, node: usize, children: Children<'a>, needed: usize) -> Result<bool> {
        self.nodes[node].first_child = self.nodes.len() as u32;
        match children {
            Children::None => {}
            Children::Arrays(arrays) => {
                for array in arrays {
                    // `ArrayRef` is an `Array` too, of calls through two tables.
                    if !self.array(&**array, node, needed)? {
                        return Ok(false);
                    }
                }
            }
            Children::Entries(entries) => return self.array(entries, node, needed),
            Children::Union(array) => {
                let DataType::Union(fields, _) = array.data_type() else {
                    return Ok(false);
                };
                for (id, _) in fields.iter() {
                    if !self.array(&**array.child(id), node, needed)? {
                        return Ok(false);
                    }
                }
            }
            Children::Runs {
                ends_type,
                ends,
                runs,
                values,
            } => {
                let (length, first_slot) = (runs, self.slots.len());
                self.mask(ends_type, None);
                self.slot(ends);
                let head = Head {
                    data_type: ends_type,
                    length,
                    offset: 0,
                    nulls: None,
                    children: Children::None,
                };
                self.node(head, first_slot, node, needed)?;
                return self.array(&**values, node, needed);
            }
            Children::Data(children) => {
                for child in children {
                    self.data(child, node, needed)?;
                }
            }
        }
        Ok(true)
    }

    fn data(&mut self, data: &'a ArrayData, parent: usize, needed: usize) -> Result<()> {
        let head = Head {
            data_type: data.data_type(),
            length: data.len(),
            offset: row_offset(data)?,
            nulls: data.nulls(),
            children: Children::Data(data.child_data()),
        };
        let first_slot = self.slots.len();
        self.mask(head.data_type, head.nulls);
        for buffer in data.buffers() {
            self.slot(buffer);
        }
        self.node(head, first_slot, parent, needed)
    }

    /// `false`: it is not an array of arrow-rs's own.
    fn array(&mut self, array: &'a dyn Array, parent: usize, needed: usize) -> Result<bool> {
        use DataType as T;
        let data_type = array.data_type();
        let mut head = Head {
            data_type,
            length: array.len(),
            offset: 0,
            // A mask without nulls is none, as in `ArrayData`.
            nulls: array.nulls().filter(|nulls| nulls.null_count() > 0),
            children: Children::None,
        };
        let first_slot = self.slots.len();
        self.mask(data_type, head.nulls);
        let any = array.as_any();
        macro_rules! own {
            ($t:ty) => {
                match any.downcast_ref::<$t>() {
                    Some(array) => array,
                    None => return Ok(false),
                }
            };
        }
        macro_rules! primitive {
            ($t:ty) => {
                self.slot(own!(PrimitiveArray<$t>).values().inner())
            };
        }
        macro_rules! bytes {
            ($t:ty) => {{
                let array = own!(GenericByteArray<$t>);
                self.slot(array.offsets().inner().inner());
                self.slot(array.values());
            }};
        }
        macro_rules! views {
            ($t:ty) => {{
                let array = own!(GenericByteViewArray<$t>);
                self.slot(array.views().inner());
                array.data_buffers().iter().for_each(|data| self.slot(data));
            }};
        }
        macro_rules! list {
            ($t:ty) => {{
                let array = own!(GenericListArray<$t>);
                self.slot(array.offsets().inner().inner());
                head.children = Children::Arrays(slice::from_ref(array.values()));
            }};
        }
        macro_rules! list_view {
            ($t:ty) => {{
                let array = own!(GenericListViewArray<$t>);
                self.slot(array.offsets().inner());
                self.slot(array.sizes().inner());
                head.children = Children::Arrays(slice::from_ref(array.values()));
            }};
        }
        macro_rules! dictionary {
            ($t:ty) => {{
                let array = own!(DictionaryArray<$t>);
                self.slot(array.keys().values().inner());
                head.children = Children::Arrays(slice::from_ref(array.values()));
            }};
        }
        macro_rules! runs {
            ($t:ty, $ends:ident) => {{
                let array = own!(RunArray<$t>);
                head.offset = array.run_ends().offset();
                head.children = Children::Runs {
                    ends_type: $ends.data_type(),
                    ends: array.run_ends().inner().inner(),
                    runs: array.run_ends().inner().len(),
                    values: array.values(),
                };
            }};
        }
        downcast_primitive! {
            data_type => (primitive),
            T::Null => {
                own!(NullArray);
            }
            T::Boolean => {
                let values = own!(BooleanArray).values();
                head.offset = values.offset();
                self.slot(values.inner());
            }
            T::Utf8 => bytes!(types::Utf8Type),
            T::LargeUtf8 => bytes!(types::LargeUtf8Type),
            T::Binary => bytes!(types::BinaryType),
            T::LargeBinary => bytes!(types::LargeBinaryType),
            T::Utf8View => views!(types::StringViewType),
            T::BinaryView => views!(types::BinaryViewType),
            T::FixedSizeBinary(_) => self.slot(own!(FixedSizeBinaryArray).values()),
            T::List(_) => list!(i32),
            T::LargeList(_) => list!(i64),
            T::ListView(_) => list_view!(i32),
            T::LargeListView(_) => list_view!(i64),
            T::FixedSizeList(_, _) => {
                let values = own!(FixedSizeListArray).values();
                head.children = Children::Arrays(slice::from_ref(values));
            }
            T::Struct(_) => head.children = Children::Arrays(own!(StructArray).columns()),
            T::Map(_, _) => {
                let array = own!(MapArray);
                self.slot(array.offsets().inner().inner());
                head.children = Children::Entries(array.entries());
            }
            T::Union(_, _) => {
                let array = own!(UnionArray);
                self.slot(array.type_ids().inner());
                array.offsets().iter().for_each(|offsets| self.slot(offsets.inner()));
                head.children = Children::Union(array);
            }
            T::Dictionary(keys, _) => {
                downcast_integer! {
                    &**keys => (dictionary),
                    _ => return Ok(false),
                }
            }
            T::RunEndEncoded(ends, _) => {
                downcast_run_end_index! {
                    ends.data_type() => (runs, ends),
                    _ => return Ok(false),
                }
            }
            _ => return Ok(false),
        }
        self.node(head, first_slot, parent, needed)?;
        Ok(true)
    }

    #[inline(always)]
    fn mask(&mut self, data_type: &DataType, nulls: Option<&NullBuffer>) {
        if has_validity(data_type) {
            match nulls {
                Some(nulls) => self.slot(nulls.buffer()),
                None => self.slots.push(Slot::absent()),
            }
        }
    }

    #[inline(always)]
    fn slot(&mut self, buffer: &Buffer) {
        let base = DevicePtr::new(buffer.as_ptr().cast_mut().cast());
        self.slots.push(Slot::new(base, 0, Some(buffer.len()), 0));
    }

    /// The node over the slots from `first_slot`.
    #[inline(always)]
    fn node(
        &mut self,
        head: Head<'a>,
        first_slot: usize,
        parent: usize,
        rows_needed: usize,
    ) -> Result<()> {
        let Head {
            data_type,
            length,
            offset,
            nulls,
            children,
        } = head;
        if length < rows_needed {
            return Err(too_short(data_type, length, rows_needed));
        }
        let layout = Layout::of(data_type);
        if layout.variadic {
            self.slots.push(Slot::absent());
        }
        let n_children = layout.n_children();
        if n_children > 0 {
            let needed = match (children, layout.nesting) {
                // `row_offset` has looked at the rows.
                (Children::Data(_), _) => 0,
                (_, Nesting::RowByRow) => length,
                // Or more than there can be.
                (_, Nesting::Times(n)) => length.saturating_mul(n as usize),
                _ => 0,
            };
            self.later.push((self.nodes.len(), children, needed));
        }
        self.nodes.push(Node {
            length,
            layout,
            cut: false,
            padded: false,
            offset,
            validity_offset: nulls.map_or(offset, NullBuffer::offset),
            nulls: NullCount::known(nulls.map_or(0, NullBuffer::null_count)),
            parent: parent as u32,
            first_child: 0,
            n_children: n_children as u32,
            first_slot: first_slot as u32,
            n_slots: (self.slots.len() - first_slot) as u32,
        });
        Ok(())
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
