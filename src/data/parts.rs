//! [`Parts`]: an array and its descendants as they are laid out in C structs.

use arrow_schema::DataType;

use crate::data::array::DeviceArray;
use crate::data::build::Builder;
use crate::data::tree::{Node, NullCount, Tree, View};
use crate::error::Result;
use crate::memory::DeviceBuffer;

/// What was found in the validity bitmap of a part, and what replaces it or another buffer.
#[derive(Clone, Default)]
pub(crate) struct Counted {
    pub(crate) nulls: Option<usize>,
    /// A buffer in place of the one with this number: a bitmap that starts at the bit that the values' offset says, or the
    /// offsets of an array without rows.
    pub(crate) buffer: Option<(usize, DeviceBuffer)>,
}

/// An array and its descendants: parents before children, and siblings next to each other.
pub(crate) struct Parts<'a> {
    tree: &'a Tree,
    root: View,
    nulls: Option<usize>,
    as_batch: bool,
    /// The node of each part, and the part that is its first child; empty if the parts are exactly the tree's
    /// nodes.
    order: Vec<(u32, u32)>,
}

impl<'a> Parts<'a> {
    /// With `as_batch` the root is exported at offset 0, and its rows are pushed down to its children.
    #[inline]
    pub(crate) fn of(array: &'a DeviceArray, as_batch: bool) -> Self {
        let (tree, root) = (&**array.tree(), array.view());
        let order = match root.node {
            0 => Vec::new(),
            node => tree.below(node),
        };
        Self {
            tree,
            root,
            nulls: array.null_count(),
            as_batch,
            order,
        }
    }

    pub(crate) fn tree(&self) -> &'a Tree {
        self.tree
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self.order.len() {
            0 => self.tree.nodes.len(),
            n => n,
        }
    }

    /// Whether the root is a batch's.
    pub(crate) fn is_batch(&self) -> bool {
        self.as_batch
    }

    /// The node of part `i` and its rows: all rows of the node, except for the root and the children of a batch's
    /// root.
    pub(crate) fn get(&self, i: usize) -> (&'a Node, View) {
        let index = self.order.get(i).map_or(i, |(node, _)| *node as usize);
        let node = &self.tree.nodes[index];
        (node, self.view(i, index, node))
    }

    #[inline(always)]
    fn view(&self, i: usize, index: usize, node: &Node) -> View {
        let mut view = node.whole(index);
        if i == 0 {
            view = self.root;
        } else if self.as_batch && node.parent as usize == self.root.node {
            // As `Tree::child` for structs.
            view.offset += self.root.offset;
            view.validity_offset += self.root.offset;
            view.length = self.root.length;
        }
        view
    }

    /// Visits every part with its number, its node, its rows and the number of its first child.
    #[inline(always)]
    pub(crate) fn each(&self, mut visit: impl FnMut(usize, &'a Node, View, usize)) {
        if self.order.is_empty() {
            for (i, node) in self.tree.nodes.iter().enumerate() {
                visit(i, node, self.view(i, i, node), node.first_child as usize);
            }
            return;
        }
        for (i, &(index, first)) in self.order.iter().enumerate() {
            let index = index as usize;
            let node = &self.tree.nodes[index];
            visit(i, node, self.view(i, index, node), first as usize);
        }
    }

    /// The number of nulls in the bitmap of part `i`, if it is known without reading the bitmap.
    #[inline(always)]
    pub(crate) fn null_count(&self, i: usize, node: &Node, view: View) -> Option<usize> {
        match i {
            0 => self.nulls,
            _ if node.has_no_nulls() => Some(0),
            _ => self.tree.null_count_of(node, view),
        }
    }

    /// Makes a tree of type `root` of the parts. `counted` has an element for each part.
    pub(crate) fn rebuild(&self, root: &DataType, counted: &[Counted]) -> Result<Tree> {
        let mut builder = Builder::new(self.tree.device.clone());
        let mut parents = vec![0; self.len()];
        for (i, counted) in counted.iter().enumerate() {
            let (node, mut view) = self.get(i);
            let nulls = counted.nulls.or_else(|| self.null_count(i, node, view));
            if self.as_batch && i == 0 {
                (view.offset, view.validity_offset) = (0, 0);
            }
            let first_slot = builder.slots_of(self.tree, view.node)?;
            if let Some((k, buffer)) = &counted.buffer {
                builder.buffer(Some(buffer))?;
                builder.slots.swap_remove(first_slot + k);
                view.validity_offset = view.offset;
            }
            let first_child = self.order.get(i).map_or(node.first_child, |part| part.1);
            if node.n_children > 0 {
                parents[first_child as usize..][..node.n_children as usize].fill(i as u32);
            }
            builder.nodes.push(Node {
                length: view.length,
                cut: node.cut || !node.is_all(view),
                offset: view.offset,
                validity_offset: view.validity_offset,
                nulls: NullCount::from(nulls),
                parent: parents[i],
                first_child,
                first_slot: first_slot as u32,
                ..*node
            });
        }
        Ok(builder.finish(root.clone()))
    }
}
