//! Building trees: from parts, and from arrays of other trees.

use std::collections::VecDeque;
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
    device: Device,
}

impl Builder {
    pub(crate) fn new(device: Device) -> Self {
        Self {
            nodes: Vec::new(),
            slots: Vec::new(),
            owners: Vec::new(),
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
        // Buffers of one owner mostly stand together.
        let known = self.owners.iter().rposition(|o| Arc::ptr_eq(o, owner));
        Ok(known.unwrap_or_else(|| {
            self.owners.push(owner.clone());
            self.owners.len() - 1
        }) as u32)
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
