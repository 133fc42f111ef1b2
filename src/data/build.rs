//! Building arrays from buffers, and from other arrays.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::array::DeviceArray;
use crate::data::layout::{BufferKind, Layout, Nesting, check_rows, check_type, child_type};
use crate::data::tree::{Node, NullCount, Slot, Tree};
use crate::data::validity::Validity;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, Owner};

impl DeviceArray {
    /// Makes an array of a type for which every bit pattern is a valid value (integers, floats, decimals, dates,
    /// times, intervals, booleans, fixed-size binary) from its buffers, at offset 0.
    ///
    /// `validity` says which rows are null; without it no row is null. To take over the nulls of an input, pass
    /// its [`validity`](Self::validity), or use [`with_values`](Self::with_values). The null count is known only
    /// if the validity knows it; otherwise operations that need it count it.
    ///
    /// Nothing is copied. An export may have to copy the bitmap if it starts within a byte; see
    /// [`export`](Self::export).
    ///
    /// ```
    /// use arrow_buffer::Buffer;
    /// use arrow_device::{DeviceArray, DeviceBuffer};
    /// use arrow_schema::DataType;
    /// let values = DeviceBuffer::from(Buffer::from_vec(vec![1i32, 2, 3]));
    /// let array = DeviceArray::from_values(DataType::Int32, 3, values, None)?;
    /// assert_eq!(array.to_host()?.len(), 3);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for any other type, if the validity has another number of rows, if the
    /// values are too short, or if the buffers are on two devices.
    pub fn from_values(
        data_type: DataType,
        length: usize,
        values: DeviceBuffer,
        validity: Option<Validity>,
    ) -> Result<Self> {
        let layout = Layout::of(&data_type);
        let plain = layout.nesting == Nesting::Leaf && !layout.variadic;
        if !plain || layout.buffers().len() != 2 {
            return Err(Error::argument(format!(
                "{data_type} has more than a buffer of values; use DeviceArray::from_parts"
            )));
        }
        let (device, operation) = (values.device().clone(), "DeviceArray::from_values");
        let values = [Some(values)];
        // SAFETY: every bit pattern is a value of these types.
        unsafe {
            Self::with_validity(
                operation,
                &device,
                data_type,
                length,
                validity,
                &values,
                &[],
            )
        }
    }

    /// As [`from_parts`](Self::from_parts), for an array with this validity; `others` are the buffers after the bitmap.
    ///
    /// # Safety
    /// The values in `others` and their relation to the children must be valid, as for [`from_parts`](Self::from_parts).
    pub(super) unsafe fn with_validity(
        operation: &str,
        device: &Device,
        data_type: DataType,
        length: usize,
        validity: Option<Validity>,
        others: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        let (bitmap, bit_offset, nulls) = match validity {
            Some(validity) if validity.len() != length || validity.device() != device => {
                return Err(Error::argument(format!(
                    "{operation} on {device}: {data_type} of {length} rows with a validity bitmap of {} rows on {}; \
                     pass one of the same rows and device",
                    validity.len(),
                    validity.device()
                )));
            }
            Some(validity) => {
                let (buffer, bit_offset, nulls) = validity.into_parts();
                (Some(buffer), bit_offset, nulls)
            }
            None => (None, 0, Some(0)),
        };
        let mut buffers = Vec::with_capacity(1 + others.len());
        buffers.push(bitmap);
        buffers.extend_from_slice(others);
        // SAFETY: the caller guarantees the values (see `# Safety`). A `Validity` knows a null count only from an array
        // that has these rows of the bitmap and knows it (`Validity::nulls`); without a bitmap there are no nulls.
        unsafe { Self::assemble(data_type, length, nulls, bit_offset, &buffers, children) }
    }

    /// Makes an array of any type from its buffers and children, at offset 0.
    ///
    /// The buffers are in the order of the C data interface; those of a view type are the bitmap, the views and
    /// all data buffers. A validity bitmap starts at bit 0 of its buffer. A buffer without bytes may be `None`. A
    /// dictionary's values are its child.
    ///
    /// `nulls` is the number of null rows in the array's validity bitmap, or `None` if it is not known. It is only
    /// checked against the number of rows: exports state it, and arrow-rs relies on it.
    ///
    /// # Safety
    /// - The values must be valid for the type once the buffers are ready: offsets ascend and stay inside the
    ///   values, text is UTF-8, and keys, type ids, views and run ends refer to values that exist. Sizes that
    ///   follow from the type are checked.
    /// - `nulls`, if it is given, is the number of unset bits among the first `length` bits of the bitmap.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if counts, lengths, types or devices do not fit together.
    pub unsafe fn from_parts(
        data_type: DataType,
        length: usize,
        nulls: Option<usize>,
        buffers: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        // SAFETY: the caller guarantees values and null count (see `# Safety`); the bitmap starts at bit 0.
        unsafe { Self::assemble(data_type, length, nulls, 0, buffers, children) }
    }

    /// As [`from_parts`](Self::from_parts), for a validity bitmap that starts at bit `bit_offset` of its buffer.
    ///
    /// # Safety
    /// As [`from_parts`](Self::from_parts), for the bits from `bit_offset` on.
    unsafe fn assemble(
        data_type: DataType,
        length: usize,
        nulls: Option<usize>,
        bit_offset: usize,
        buffers: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        check_type(&data_type)?;
        check_rows(length)?;
        let layout = Layout::of(&data_type);
        let wrong = |what: String| Err(Error::argument(format!("{data_type}: {what}")));
        let kinds = layout.buffers();
        let fits = match layout.variadic {
            true => buffers.len() >= kinds.len(),
            false => buffers.len() == kinds.len(),
        };
        if !fits || children.len() != layout.n_children() {
            return wrong(format!(
                "{} buffers and {} children given, {} and {} needed",
                buffers.len(),
                children.len(),
                kinds.len(),
                layout.n_children()
            ));
        }
        let of_buffers = buffers.iter().flatten().map(DeviceBuffer::device);
        let mut devices = of_buffers.chain(children.iter().map(DeviceArray::device));
        let Some(device) = devices.next().cloned() else {
            return wrong("there is neither a buffer nor a child, so the device is unknown".into());
        };
        for (kind, buffer) in kinds.iter().zip(buffers) {
            let bytes = match kind {
                BufferKind::Validity if buffer.is_none() => None,
                BufferKind::Validity => kind.bytes(bit_offset.saturating_add(length)),
                _ => kind.bytes(length),
            };
            let needed = match bytes {
                Some(bytes) if length > 0 => bytes?,
                _ => 0,
            };
            let there = buffer.as_ref().map_or(0, DeviceBuffer::len);
            if there < needed {
                return wrong(format!(
                    "a buffer has {there} bytes where {length} rows need {needed}"
                ));
            }
        }
        let has_bitmap = layout.has_validity() && buffers[0].is_some();
        let may_have_nulls = has_bitmap || data_type == DataType::Null;
        if let Some(n) = nulls.filter(|n| *n > length || (*n > 0 && !may_have_nulls)) {
            return wrong(format!("{n} nulls in {length} rows"));
        }
        for (i, child) in children.iter().enumerate() {
            if child_type(&data_type, i) != Some(child.data_type()) {
                return wrong(format!("child {i} is of type {}", child.data_type()));
            }
            let needed = match layout.nesting {
                Nesting::RowByRow => length,
                Nesting::Times(n) => length
                    .checked_mul(n as usize)
                    .ok_or_else(|| Error::argument("too many rows"))?,
                _ => 0,
            };
            if child.len() < needed {
                let rows = child.len();
                return wrong(format!("child {i} has {rows} rows, {needed} needed"));
            }
        }
        let mut builder = Builder::new(device);
        for buffer in buffers {
            builder.buffer(buffer.as_ref())?;
        }
        if layout.variadic {
            builder.buffer(None)?;
        }
        builder.nodes.push(Node {
            validity_offset: bit_offset,
            nulls: NullCount::from(nulls),
            ..Node::new(layout, length, 0, 0, builder.slots.len())
        });
        builder.children(0, children)?;
        Ok(Self::from_tree(Arc::new(builder.finish(data_type))))
    }
}

/// Collects nodes, slots and owners.
pub(crate) struct Builder {
    pub(crate) nodes: Vec<Node>,
    pub(crate) slots: Vec<Slot>,
    owners: Vec<Arc<Owner>>,
    /// The index of each owner except the last [`RECENT`], by its address.
    indices: HashMap<usize, u32>,
    device: Device,
}

/// How many owners, the last ones, are compared one by one.
const RECENT: usize = 8;

impl Builder {
    pub(crate) fn new(device: Device) -> Self {
        Self {
            nodes: Vec::new(),
            slots: Vec::new(),
            owners: Vec::new(),
            indices: HashMap::new(),
            device,
        }
    }

    /// Returns the index of `owner`, which is added if it is new.
    fn owner(&mut self, owner: &Arc<Owner>) -> Result<u32> {
        self.check_device(owner.device(), "buffers")?;
        // Buffers of one owner are mostly next to each other.
        let recent = self.owners.len().saturating_sub(RECENT);
        let known = self.owners[recent..]
            .iter()
            .rposition(|o| Arc::ptr_eq(o, owner));
        if let Some(i) = known {
            return Ok((recent + i) as u32);
        }
        // `owners` keeps them alive, so no other owner has the same address.
        let address = |owner: &Arc<Owner>| Arc::as_ptr(owner).addr();
        if let Some(i) = self.indices.get(&address(owner)) {
            return Ok(*i);
        }
        let index = self.owners.len() as u32;
        self.owners.push(owner.clone());
        // The one that has just ceased to be among the recent ones.
        if let Some(left) = self.owners.len().checked_sub(RECENT + 1) {
            self.indices
                .insert(address(&self.owners[left]), left as u32);
        }
        Ok(index)
    }

    fn check_device(&self, device: &Device, what: &str) -> Result<()> {
        match *device == self.device {
            true => Ok(()),
            false => Err(Error::argument(format!(
                "{what} of {} and of {device} in one array",
                self.device
            ))),
        }
    }

    pub(crate) fn buffer(&mut self, buffer: Option<&DeviceBuffer>) -> Result<()> {
        let slot = match buffer {
            None => Slot::absent(),
            Some(buffer) => {
                let owner = self.owner(buffer.owner())?;
                Slot::new(buffer.base(), buffer.offset(), Some(buffer.len()), owner)
            }
        };
        self.slots.push(slot);
        Ok(())
    }

    /// Appends the slots of node `node` of `tree`; returns the number of the first.
    pub(crate) fn slots_of(&mut self, tree: &Tree, node: usize) -> Result<usize> {
        let first = self.slots.len();
        for (i, slot) in tree.slots(node).iter().enumerate() {
            let owner = match slot.is_null() {
                true => 0,
                false => self.owner(tree.owner(slot))?,
            };
            let slot = Slot::new(slot.base, slot.offset, tree.bytes(node, i), owner);
            self.slots.push(slot);
        }
        Ok(first)
    }

    /// Appends `children` and their descendants as the children of the node at `parent`.
    pub(crate) fn children(&mut self, parent: usize, children: &[DeviceArray]) -> Result<()> {
        self.nodes[parent].first_child = self.nodes.len() as u32;
        self.nodes[parent].n_children = children.len() as u32;
        let mut queue = VecDeque::new();
        for child in children {
            self.check_device(child.device(), "arrays")?;
            let view = child.view();
            self.node(child.tree(), view.node, parent)?;
            let node = self.nodes.last_mut().expect("just pushed");
            node.cut |= view.length != node.length;
            node.length = view.length;
            node.offset = view.offset;
            node.validity_offset = view.validity_offset;
            node.nulls = NullCount::from(child.null_count());
            queue.push_back((self.nodes.len() - 1, child.tree(), view.node));
        }
        while let Some((to, tree, from)) = queue.pop_front() {
            let source = &tree.nodes[from];
            self.nodes[to].first_child = self.nodes.len() as u32;
            for i in 0..source.n_children as usize {
                let child = source.first_child as usize + i;
                self.node(tree, child, to)?;
                queue.push_back((self.nodes.len() - 1, tree, child));
            }
        }
        Ok(())
    }

    /// Copies one node with its slots.
    fn node(&mut self, tree: &Tree, from: usize, parent: usize) -> Result<()> {
        let source = &tree.nodes[from];
        let first_slot = self.slots_of(tree, from)?;
        self.nodes.push(Node {
            parent: parent as u32,
            first_child: 0,
            first_slot: first_slot as u32,
            nulls: source.nulls.clone(),
            ..*source
        });
        Ok(())
    }

    pub(crate) fn finish(self, root: DataType) -> Tree {
        Tree {
            device: self.device,
            root,
            nodes: self.nodes,
            slots: self.slots,
            owners: self.owners.into(),
        }
    }
}

/// A struct over `children`, which all have `rows` rows.
pub(crate) fn struct_tree(
    device: Device,
    root: DataType,
    rows: usize,
    children: &[DeviceArray],
) -> Result<Tree> {
    let mut builder = Builder::new(device);
    let node = Node::new(Layout::of(&root), rows, 0, 0, 1);
    builder.nodes.push(node);
    builder.slots.push(Slot::absent());
    builder.children(0, children)?;
    Ok(builder.finish(root))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::device::Devices;
    use crate::memory::{HostSlab, Memory, Ready};

    /// Each owner has one index, however many there are and whichever come again. To look for each one among all
    /// others would take minutes.
    #[test]
    fn many_owners() {
        let n: usize = if cfg!(miri) { 50 } else { 200_000 };
        let owner = || {
            let memory = Memory::Slab(HostSlab::new(0).unwrap());
            Arc::new(Owner::new(Devices::cpu(), memory, Ready::Now))
        };
        let owners: Vec<_> = (0..n).map(|_| owner()).collect();
        let mut builder = Builder::new(Devices::cpu());
        let start = Instant::now();
        for again in [1, 2, 3] {
            for (i, owner) in owners.iter().enumerate() {
                assert_eq!(builder.owner(owner).unwrap() as usize, i, "{again}");
                assert_eq!(builder.owner(&owners[i / 2]).unwrap() as usize, i / 2);
            }
        }
        let took = start.elapsed();
        assert_eq!(builder.owners.len(), n);
        assert!(took < Duration::from_secs(60), "{took:?}");
    }
}
