//! Between arrow-rs arrays in host memory and trees, without copying values.

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions, StructArray, make_array};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_data::{ArrayData, ArrayDataBuilder};
use arrow_schema::{DataType, Schema};

use crate::data::array::DeviceArray;
use crate::data::build::root_node;
use crate::data::layout::{BufferKind, Layout, Nesting, check_type};
use crate::data::tree::{Node, NullCount, Owners, Slot, Tree, View};
use crate::device::{Counters, DevicePtr, Devices};
use crate::error::{Error, Result};
use crate::memory::{Memory, Owner, Ready, host_buffer};

/// Arrow data as a tree of the CPU; the tree holds the data.
pub(crate) fn wrap_array(data: ArrayData) -> Result<Tree> {
    check_type(data.data_type())?;
    let root = data.data_type().clone();
    let mut wrapper = Wrapper::default();
    wrapper.node(&data, 0)?;
    wrapper.descend(vec![(0, &data)])?;
    Ok(wrapper.finish(vec![data], root))
}

/// The columns of a batch as a tree of the CPU.
pub(crate) fn wrap_batch(batch: &RecordBatch) -> Result<Tree> {
    let root = DataType::Struct(batch.schema_ref().fields().clone());
    let layout = Layout::of(&root);
    let columns: Vec<_> = batch.columns().iter().map(|c| c.to_data()).collect();
    let mut wrapper = Wrapper::default();
    wrapper.slots.push(Slot::absent());
    wrapper.nodes.push(Node {
        n_children: columns.len() as u32,
        ..root_node(layout, batch.num_rows(), 1, NullCount::known(0))
    });
    for column in &columns {
        check_type(column.data_type())?;
        wrapper.node(column, 0)?;
    }
    wrapper.descend(
        columns
            .iter()
            .enumerate()
            .map(|(i, c)| (1 + i, c))
            .collect(),
    )?;
    Ok(wrapper.finish(columns, root))
}

#[derive(Default)]
struct Wrapper {
    nodes: Vec<Node>,
    slots: Vec<Slot>,
}

impl Wrapper {
    fn node(&mut self, data: &ArrayData, parent: usize) -> Result<()> {
        let layout = Layout::of(data.data_type());
        let offset = row_offset(data, &layout)?;
        let first_slot = self.slots.len() as u32;
        let nulls = data.nulls();
        let mut validity_offset = offset;
        if layout.has_validity() {
            match nulls {
                Some(nulls) => {
                    validity_offset = nulls.offset();
                    self.buffer(nulls.buffer());
                }
                None => self.slots.push(Slot::absent()),
            }
        }
        for buffer in data.buffers() {
            self.buffer(buffer);
        }
        if layout.variadic {
            self.slots.push(Slot::absent());
        }
        self.nodes.push(Node {
            length: data.len(),
            layout,
            cut: false,
            padded: false,
            offset,
            validity_offset,
            nulls: NullCount::known(nulls.map_or(0, NullBuffer::null_count)),
            parent: parent as u32,
            first_child: 0,
            n_children: data.child_data().len() as u32,
            first_slot,
            n_slots: self.slots.len() as u32 - first_slot,
        });
        Ok(())
    }

    fn buffer(&mut self, buffer: &Buffer) {
        let base = DevicePtr::new(buffer.as_ptr().cast_mut().cast());
        self.slots.push(Slot::new(base, 0, Some(buffer.len()), 0));
    }

    /// Adds all descendants, level by level.
    fn descend(&mut self, mut level: Vec<(usize, &ArrayData)>) -> Result<()> {
        while !level.is_empty() {
            let mut next = Vec::new();
            for (node, data) in level {
                self.nodes[node].first_child = self.nodes.len() as u32;
                for child in data.child_data() {
                    next.push((self.nodes.len(), child));
                    self.node(child, node)?;
                }
            }
            level = next;
        }
        Ok(())
    }

    fn finish(self, data: Vec<ArrayData>, root: DataType) -> Tree {
        let device = Devices::cpu();
        // `ArrayData` moves, the buffers that the slots point to do not.
        let owner = Owner::new(device.clone(), Memory::Arrow(data), Ready::Now);
        Tree {
            device,
            root,
            nodes: self.nodes,
            slots: self.slots,
            owners: Owners::One(Arc::new(owner)),
        }
    }
}

/// Rows to skip in buffers and children, which must have the rows then: arrow-rs checks only that
/// children are as long as their parent, whatever its offset. A struct's children may have been cut
/// already (`ArrayData::slice`) while its offset was left.
fn row_offset(data: &ArrayData, layout: &Layout) -> Result<usize> {
    let times = match layout.nesting {
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

impl DeviceArray {
    /// Arrow data in host memory as an array of the CPU, without a copy.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a child has fewer rows than its parent's offset and length ask.
    pub fn from_host(data: ArrayData) -> Result<Self> {
        Ok(Self::from_tree(Arc::new(wrap_array(data)?)))
    }
}

/// The rows of a view in host-readable memory as arrow data. Waits until the memory is ready; copies
/// only values that are not aligned as arrow-rs asks, and counts those.
pub(crate) fn unwrap(array: &DeviceArray) -> Result<ArrayData> {
    let device = array.device();
    if !device.is_host_readable() {
        return Err(Error::NotSupported {
            device: device.id(),
            operation: "reading an array on the host",
            reason: "the host cannot read this device's memory; use to_host".into(),
        });
    }
    array.wait()?;
    crate::data::hidden::resolve_sizes(array)?;
    data(array.tree(), array.view(), array.null_count())
}

fn data(tree: &Arc<Tree>, view: View, nulls: Option<usize>) -> Result<ArrayData> {
    let data_type = tree.data_type(view.node);
    let layout = tree.layout(view.node);
    let slots = tree.slots(view.node);
    // Struct rows are pushed down to the children, so that the struct itself starts at 0.
    let pushed = matches!(layout.nesting, Nesting::RowByRow | Nesting::Times(_))
        && !matches!(data_type, DataType::Union(_, _));
    let offset = if pushed || view.length == 0 {
        0
    } else {
        view.offset
    };
    let sparse = matches!(data_type, DataType::Union(_, _)) && layout.nesting == Nesting::RowByRow;

    let mut mask = None;
    let mut buffers = Vec::with_capacity(slots.len());
    for (kind, slot) in layout.buffers().iter().zip(slots) {
        if *kind == BufferKind::Validity {
            if nulls != Some(0) && !slot.is_null() && view.length > 0 {
                // All of it: arrow-rs counts from the data's offset, which may be the larger one.
                let needed = (view.validity_offset + view.length).div_ceil(8);
                let buffer = buffer(tree, slot, slot.bytes().unwrap_or(needed), 1)?;
                let bits = BooleanBuffer::new(buffer, view.validity_offset, view.length);
                // Counted, whatever the producer said: arrow-rs relies on it.
                mask = Some(NullBuffer::new(bits));
            }
            continue;
        }
        let bytes = match kind.bytes(view.offset + view.length) {
            // No rows may come without the one offset.
            Some(bytes) if view.length == 0 => bytes?.min(slot.bytes().unwrap_or(0)),
            Some(bytes) => bytes?,
            None => slot.bytes().unwrap_or(0),
        };
        buffers.push(buffer(tree, slot, bytes, kind.align())?);
    }
    if layout.variadic {
        for slot in &slots[layout.buffers().len()..slots.len() - 1] {
            buffers.push(buffer(tree, slot, slot.bytes().unwrap_or(0), 1)?);
        }
    }
    if sparse && view.offset > 0 && view.length > 0 {
        // Type ids are cut here, since arrow-rs would cut the children too.
        buffers[0] = buffers[0].slice_with_length(view.offset, view.length);
    }
    let children = (0..layout.n_children())
        .map(|i| {
            let child = tree.child(view, i);
            data(tree, child, tree.null_count(child))
        })
        .collect::<Result<Vec<_>>>()?;
    let builder = ArrayDataBuilder::new(data_type.clone())
        .len(view.length)
        .offset(if sparse { 0 } else { offset })
        .nulls(mask)
        .buffers(buffers)
        .child_data(children);
    // SAFETY: buffers have the lengths that the type asks for; that the values are valid is what
    // `unsafe` imports promise, `Validation::Full` checks and arrow-rs arrays bring along.
    Ok(unsafe { builder.build_unchecked() })
}

/// One buffer of a ready, host-readable tree.
fn buffer(tree: &Tree, slot: &Slot, bytes: usize, align: usize) -> Result<Buffer> {
    if slot.is_null() || bytes == 0 {
        return Ok(Buffer::default());
    }
    let address = slot.address();
    // SAFETY: the host can read the device's memory and it is ready; the slot has at least `bytes`
    // bytes: checked where its length is known, else promised by its producer.
    let buffer = unsafe { host_buffer(tree.owner(slot), address, bytes) };
    if address.address() % align == 0 {
        return Ok(buffer);
    }
    let counters = tree.device.counters();
    Counters::add(&counters.host_copied_bytes, bytes);
    Counters::add(&counters.host_allocations, 1);
    let mut slab = crate::memory::HostSlab::new(bytes)?;
    slab.copy_from_slice(&buffer);
    Ok(slab.into_buffer())
}

/// Arrow data as an array; arrow-rs panics on some data, which must not cross into C or kill a
/// caller who imported it.
pub(crate) fn to_array(data: ArrayData) -> Result<ArrayRef> {
    crate::abi::guard::call_foreign("building an arrow array", || make_array(data))
}

/// A ready, host-readable batch as arrow-rs's.
pub(crate) fn to_batch(schema: &Arc<Schema>, array: &DeviceArray) -> Result<RecordBatch> {
    let data = unwrap(array)?;
    let rows = data.len();
    let columns = crate::abi::guard::call_foreign("building an arrow batch", || {
        StructArray::from(data).into_parts().1
    })?;
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    Ok(RecordBatch::try_new_with_options(
        schema.clone(),
        columns,
        &options,
    )?)
}
