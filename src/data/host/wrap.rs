//! Arrow-rs data in host memory as trees, without copying values. There are two walks: one over [`ArrayData`],
//! and one over arrays, which does not convert them to [`ArrayData`] because that costs allocations for each
//! column.

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
use arrow_schema::{DataType, UnionFields};

use crate::data::array::DeviceArray;
use crate::data::layout::{Layout, Nesting, check_type, child_type, has_validity};
use crate::data::tree::{Node, NullCount, Owners, Slot, Tree};
use crate::device::{DevicePtr, Devices};
use crate::error::{Error, Result};
use crate::memory::{Kept, Memory, Owner, Ready};

impl DeviceArray {
    /// Makes an array on the CPU device of Arrow data in host memory, without a copy.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if a child has fewer rows than its parent's offset and length require.
    pub fn from_host(data: ArrayData) -> Result<Self> {
        Ok(Self::from_tree(Arc::new(wrap_data(data)?)))
    }
}

/// Arrow data as a tree of the CPU; the tree keeps the data alive.
pub(crate) fn wrap_data(data: ArrayData) -> Result<Tree> {
    check_type(data.data_type())?;
    let root = data.data_type().clone();
    let mut wrapper = Wrapper::default();
    wrapper.data(&data, 0, 0)?;
    wrapper.descend()?;
    wrapper.kept.push(data);
    Ok(wrapper.finish(root, &[]))
}

/// The columns of a batch as a tree of the CPU, with a constant number of allocations.
pub(crate) fn wrap_batch(batch: &RecordBatch) -> Result<Tree> {
    let fields = batch.schema_ref().fields();
    let root = DataType::Struct(fields.clone());
    let mut room = 1;
    for (field, column) in fields.iter().zip(batch.columns()) {
        room += nodes(field.data_type(), &**column)?;
    }
    let mut wrapper = Wrapper {
        nodes: Vec::with_capacity(room),
        // Bitmap, offsets, values; or bitmap, views, sizes: data buffers of views make it grow.
        slots: Vec::with_capacity(3 * room),
        later: Vec::with_capacity(room - 1 - fields.len()),
        kept: Vec::new(),
    };
    let layout = Layout::of(&root);
    wrapper.slots.push(Slot::absent());
    wrapper.nodes.push(Node {
        n_children: layout.n_children() as u32,
        ..Node::new(layout, batch.num_rows(), 0, 0, 1)
    });
    wrapper.children(0, Children::Arrays(batch.columns()), batch.num_rows())?;
    wrapper.descend()?;
    Ok(wrapper.finish(root, batch.columns()))
}

/// Returns how many nodes a column has. Checks nested types on the way.
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

/// Where a node's children come from.
enum Children<'a> {
    None,
    Arrays(&'a [ArrayRef]),
    Entries(&'a StructArray),
    Union(&'a UnionArray, &'a UnionFields),
    Runs {
        ends_type: &'a DataType,
        ends: &'a Buffer,
        runs: usize,
        values: &'a ArrayRef,
    },
    Data(Vec<ArrayData>),
}

/// Makes nodes and slots, level by level.
#[derive(Default)]
struct Wrapper<'a> {
    nodes: Vec<Node>,
    slots: Vec<Slot>,
    /// Nodes whose children come later, where those come from, and how many rows each must have.
    later: Vec<(usize, Children<'a>, usize)>,
    /// Keeps alive the buffers of slots that came from `ArrayData`.
    kept: Vec<ArrayData>,
}

/// What a node needs besides its buffers.
struct Head<'h, 'a> {
    data_type: &'h DataType,
    length: usize,
    /// Rows to skip in all buffers but the validity bitmap.
    offset: usize,
    nulls: Option<&'h NullBuffer>,
    children: Children<'a>,
}

impl<'a> Wrapper<'a> {
    /// Adds all descendants.
    fn descend(&mut self) -> Result<()> {
        let mut i = 0;
        while let Some((node, children, needed)) = self.later.get_mut(i) {
            let (node, needed) = (*node, *needed);
            let children = std::mem::replace(children, Children::None);
            self.children(node, children, needed)?;
            i += 1;
        }
        Ok(())
    }

    /// The tree, which keeps `columns` and the `ArrayData` alive.
    fn finish(self, root: DataType, columns: &[ArrayRef]) -> Tree {
        let columns = columns.to_vec();
        let memory = match self.kept.is_empty() {
            true => Memory::Arrow(columns),
            // `ArrayData` moves, the buffers that the slots point to do not.
            false => Memory::Kept(Kept(Box::new((self.kept, columns)))),
        };
        let device = Devices::cpu();
        let owner = Owner::new(device.clone(), memory, Ready::Now);
        Tree {
            device,
            root,
            nodes: self.nodes,
            slots: self.slots,
            owners: Owners::One(Arc::new(owner)),
        }
    }

    /// Adds the children of a node, each of which must have at least `needed` rows.
    fn children(&mut self, node: usize, children: Children<'a>, needed: usize) -> Result<()> {
        self.nodes[node].first_child = self.nodes.len() as u32;
        match children {
            Children::None => {}
            Children::Arrays(arrays) => {
                for array in arrays {
                    // `ArrayRef` is an `Array` too, but its calls go through two tables.
                    self.array(&**array, node, needed)?;
                }
            }
            Children::Entries(entries) => self.array(entries, node, needed)?,
            Children::Union(array, fields) => {
                for (id, _) in fields.iter() {
                    self.array(&**array.child(id), node, needed)?;
                }
            }
            Children::Runs {
                ends_type,
                ends,
                runs,
                values,
            } => {
                let first_slot = self.slots.len();
                self.bitmap(ends_type, None);
                self.slot(ends);
                let head = Head {
                    data_type: ends_type,
                    length: runs,
                    offset: 0,
                    nulls: None,
                    children: Children::None,
                };
                self.node(head, first_slot, node, needed)?;
                self.array(&**values, node, needed)?;
            }
            Children::Data(children) => {
                for child in &children {
                    self.data(child, node, needed)?;
                }
            }
        }
        Ok(())
    }

    /// Adds a node for `ArrayData`.
    fn data(&mut self, data: &ArrayData, parent: usize, needed: usize) -> Result<()> {
        let first_slot = self.slots.len();
        self.bitmap(data.data_type(), data.nulls());
        for buffer in data.buffers() {
            self.slot(buffer);
        }
        let head = Head {
            data_type: data.data_type(),
            length: data.len(),
            offset: row_offset(data)?,
            nulls: data.nulls(),
            children: Children::Data(data.child_data().to_vec()),
        };
        self.node(head, first_slot, parent, needed)
    }

    /// Adds a node for an array of a type that arrow-rs does not define: only it knows where its memory is.
    #[cold]
    fn foreign(&mut self, array: &dyn Array, parent: usize, needed: usize) -> Result<()> {
        let data = array.to_data();
        self.data(&data, parent, needed)?;
        self.kept.push(data);
        Ok(())
    }

    /// Adds a node for an array.
    fn array(&mut self, array: &'a dyn Array, parent: usize, needed: usize) -> Result<()> {
        use DataType as T;
        let data_type = array.data_type();
        let mut head = Head {
            data_type,
            length: array.len(),
            offset: 0,
            // A bitmap without nulls is left out, as in `ArrayData`.
            nulls: array.nulls().filter(|nulls| nulls.null_count() > 0),
            children: Children::None,
        };
        let first_slot = self.slots.len();
        self.bitmap(data_type, head.nulls);
        let any = array.as_any();
        macro_rules! foreign {
            () => {{
                self.slots.truncate(first_slot);
                return self.foreign(array, parent, needed);
            }};
        }
        macro_rules! own {
            ($t:ty) => {
                match any.downcast_ref::<$t>() {
                    Some(array) => array,
                    None => foreign!(),
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
            T::Union(fields, _) => {
                let array = own!(UnionArray);
                self.slot(array.type_ids().inner());
                array.offsets().iter().for_each(|offsets| self.slot(offsets.inner()));
                head.children = Children::Union(array, fields);
            }
            T::Dictionary(keys, _) => {
                downcast_integer! {
                    &**keys => (dictionary),
                    _ => foreign!(),
                }
            }
            T::RunEndEncoded(ends, _) => {
                downcast_run_end_index! {
                    ends.data_type() => (runs, ends),
                    _ => foreign!(),
                }
            }
            _ => foreign!(),
        }
        self.node(head, first_slot, parent, needed)
    }

    #[inline(always)]
    fn bitmap(&mut self, data_type: &DataType, nulls: Option<&NullBuffer>) {
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

    /// Adds the node over the slots from `first_slot` on.
    #[inline(always)]
    fn node(
        &mut self,
        head: Head<'_, 'a>,
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
            let needed = match (&children, layout.nesting) {
                // `row_offset` has checked the rows.
                (Children::Data(_), _) => 0,
                (_, Nesting::RowByRow) => length,
                // Saturated, it is more rows than there can be.
                (_, Nesting::Times(n)) => length.saturating_mul(n as usize),
                _ => 0,
            };
            self.later.push((self.nodes.len(), children, needed));
        }
        self.nodes.push(Node {
            offset,
            validity_offset: nulls.map_or(offset, NullBuffer::offset),
            nulls: NullCount::known(nulls.map_or(0, NullBuffer::null_count)),
            n_children: n_children as u32,
            ..Node::new(
                layout,
                length,
                parent,
                first_slot,
                self.slots.len() - first_slot,
            )
        });
        Ok(())
    }
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
