//! Building trees: from parts, and from arrays of other trees.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::data::array::DeviceArray;
use arrow_schema::DataType;

use crate::data::layout::Layout;
use crate::data::tree::{Node, NullCount, Owners, Slot, Tree};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, Owner};

/// Collects nodes, slots and owners.
pub(crate) struct Builder {
    pub(crate) nodes: Vec<Node>,
    pub(crate) slots: Vec<Slot>,
    owners: Vec<Arc<Owner>>,
    /// The index of each owner except the last [`RECENT`], by its address.
    indices: HashMap<usize, u32>,
    device: Device,
}

/// How many owners, the last ones, are looked at one by one.
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

    /// Index of `owner`, which is added if it is new.
    pub(crate) fn owner(&mut self, owner: &Arc<Owner>) -> Result<u32> {
        if *owner.device() != self.device {
            return Err(Error::argument(format!(
                "buffers of {} and of {} in one array",
                self.device,
                owner.device()
            )));
        }
        // Buffers of one owner are mostly side by side.
        let recent = self.owners.len().saturating_sub(RECENT);
        let known = self.owners[recent..]
            .iter()
            .rposition(|o| Arc::ptr_eq(o, owner));
        if let Some(i) = known {
            return Ok((recent + i) as u32);
        }
        // `owners` keeps them alive: no other one has the same address.
        let address = |owner: &Arc<Owner>| Arc::as_ptr(owner).addr();
        if let Some(i) = self.indices.get(&address(owner)) {
            return Ok(*i);
        }
        let index = self.owners.len() as u32;
        self.owners.push(owner.clone());
        // The one that is not among the recent ones any more.
        if let Some(left) = self.owners.len().checked_sub(RECENT + 1) {
            self.indices
                .insert(address(&self.owners[left]), left as u32);
        }
        Ok(index)
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

    /// Appends `children` and their descendants as the children of the node at `parent`.
    pub(crate) fn children(&mut self, parent: usize, children: &[DeviceArray]) -> Result<()> {
        self.nodes[parent].first_child = self.nodes.len() as u32;
        self.nodes[parent].n_children = children.len() as u32;
        let mut queue = VecDeque::new();
        for child in children {
            if *child.device() != self.device {
                return Err(Error::argument(format!(
                    "arrays of {} and of {} in one array",
                    self.device,
                    child.device()
                )));
            }
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
        let first_slot = self.slots.len() as u32;
        for slot in tree.slots(from) {
            let owner = if slot.is_null() {
                0
            } else {
                self.owner(tree.owner(slot))?
            };
            self.slots
                .push(Slot::new(slot.base, slot.offset, slot.bytes(), owner));
        }
        let source = &tree.nodes[from];
        self.nodes.push(Node {
            length: source.length,
            layout: source.layout,
            cut: source.cut,
            padded: source.padded,
            offset: source.offset,
            validity_offset: source.validity_offset,
            nulls: source.nulls.clone(),
            parent: parent as u32,
            first_child: 0,
            n_children: source.n_children,
            first_slot,
            n_slots: source.n_slots,
        });
        Ok(())
    }

    pub(crate) fn finish(self, root: DataType) -> Tree {
        Tree {
            device: self.device,
            root,
            nodes: self.nodes,
            slots: self.slots,
            owners: Owners::Many(self.owners),
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
    builder
        .nodes
        .push(root_node(Layout::of(&root), rows, 1, NullCount::known(0)));
    builder.slots.push(Slot::absent());
    builder.children(0, children)?;
    Ok(builder.finish(root))
}

/// A root node over the first `n_slots` slots.
pub(crate) fn root_node(layout: Layout, length: usize, n_slots: usize, nulls: NullCount) -> Node {
    Node {
        length,
        layout,
        cut: false,
        padded: false,
        offset: 0,
        validity_offset: 0,
        nulls,
        parent: 0,
        first_child: 1,
        n_children: 0,
        first_slot: 0,
        n_slots: n_slots as u32,
    }
}

/// Room for a child of the node at `parent`, filled in later.
pub(crate) fn placeholder(parent: usize) -> Node {
    Node {
        parent: parent as u32,
        first_child: 0,
        ..root_node(Layout::NONE, 0, 0, NullCount::known(0))
    }
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
        assert!(took < Duration::from_secs(20), "{took:?}");
    }
}
