//! The flat form of an array and all its descendants: three allocations, however many columns there are.
//!
//! A tree whose memory has several owners keeps all of them. Its children are therefore trees of their own, with the
//! owners of their own buffers only ([`Tree::child_tree`]).

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use arrow_schema::{DataType, FieldRef};

use crate::data::layout::{Layout, Nesting, child_field, child_type};
use crate::device::{Device, DevicePtr};
use crate::memory::Owner;

/// An array with its descendants. A parent comes before its children, which are next to each other; a
/// dictionary's values count as its child.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) device: Device,
    /// The type of the root; record batches are structs.
    pub(crate) root: DataType,
    pub(crate) nodes: Vec<Node>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) owners: Owners,
}

/// The owners of the memory that slots lie in.
#[derive(Debug)]
pub(crate) enum Owners {
    One(Arc<Owner>),
    Many(Box<Many>),
}

/// Any number of owners.
#[derive(Debug, Default)]
pub(crate) struct Many {
    owners: Vec<Arc<Owner>>,
    /// The root's children as trees of their own; each is made when it is first asked for.
    children: OnceLock<Box<[OnceLock<Arc<Tree>>]>>,
    /// The tree that this one is a child of, if any.
    origin: Option<Origin>,
}

/// The tree that a child was taken from. The child does not keep it alive.
#[derive(Debug)]
struct Origin {
    tree: Weak<Tree>,
    /// The number in that tree of each node of the child.
    nodes: Vec<u32>,
}

#[derive(Debug)]
pub(crate) struct Node {
    /// Rows.
    pub(crate) length: usize,
    /// Of the node's type.
    pub(crate) layout: Layout,
    /// The buffers hold more rows after these: the node is a slice of another tree's node.
    pub(crate) cut: bool,
    /// A transfer wrote the buffers, for this node or for one that it is a slice of: they are padded to 64 bytes
    /// with zeros, and so are the bits after the last row.
    pub(crate) padded: bool,
    /// Rows to skip in all buffers but the validity bitmap.
    pub(crate) offset: usize,
    /// Bits to skip in the validity bitmap. It differs from `offset` where values and bitmap come from different
    /// arrays ([`Validity`](crate::Validity)), and in arrow-rs arrays in host memory.
    pub(crate) validity_offset: usize,
    pub(crate) nulls: NullCount,
    pub(crate) parent: u32,
    pub(crate) first_child: u32,
    pub(crate) n_children: u32,
    pub(crate) first_slot: u32,
    pub(crate) n_slots: u32,
}

/// One buffer: base, offset in bytes and length in bytes, as in `DeviceBuffer`.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) base: DevicePtr,
    pub(crate) offset: usize,
    /// Index into the owners.
    pub(crate) owner: u32,
    /// -1 while it is unknown.
    bytes: AtomicI64,
}

/// A number of nulls, or -1 while it is unknown. A known one was counted in the validity bitmap, or the caller
/// of an `unsafe` function guaranteed it (an import, [`DeviceArray::from_parts`]): exports state it, and
/// `unsafe` code relies on it. Safe code cannot set one.
///
/// [`DeviceArray::from_parts`]: crate::DeviceArray::from_parts
#[derive(Debug)]
pub(crate) struct NullCount(AtomicI64);

impl NullCount {
    pub(crate) const fn known(nulls: usize) -> Self {
        Self(AtomicI64::new(nulls as i64))
    }

    pub(crate) const fn unknown() -> Self {
        Self(AtomicI64::new(-1))
    }

    pub(crate) fn get(&self) -> Option<usize> {
        usize::try_from(self.0.load(Relaxed)).ok()
    }

    pub(crate) fn set(&self, nulls: usize) {
        self.0.store(nulls as i64, Relaxed);
    }
}

impl From<Option<usize>> for NullCount {
    fn from(nulls: Option<usize>) -> Self {
        nulls.map_or(Self::unknown(), Self::known)
    }
}

impl Clone for NullCount {
    fn clone(&self) -> Self {
        Self(AtomicI64::new(self.0.load(Relaxed)))
    }
}

impl Node {
    /// A node of `length` rows at offset 0, over `n_slots` slots from `first_slot`, with neither nulls nor
    /// children.
    #[inline(always)]
    pub(crate) fn new(
        layout: Layout,
        length: usize,
        parent: usize,
        first_slot: usize,
        n_slots: usize,
    ) -> Self {
        Self {
            length,
            layout,
            cut: false,
            padded: false,
            offset: 0,
            validity_offset: 0,
            nulls: NullCount::known(0),
            parent: parent as u32,
            first_child: 0,
            n_children: 0,
            first_slot: first_slot as u32,
            n_slots: n_slots as u32,
        }
    }

    /// Room for a child of the node at `parent`, which is filled in later.
    pub(crate) fn placeholder(parent: usize) -> Self {
        Self::new(Layout::NONE, 0, parent, 0, 0)
    }

    /// Whether it is known that no row is null.
    #[inline(always)]
    pub(crate) fn has_no_nulls(&self) -> bool {
        self.nulls.get() == Some(0) && !self.layout.is_null_type()
    }

    /// Whether a view of this node, which is number `view.node`, is all of its rows.
    #[inline]
    pub(crate) fn is_all(&self, view: View) -> bool {
        view.offset == self.offset && view.length == self.length
    }

    /// All rows of this node, which is number `index`.
    #[inline]
    pub(crate) fn whole(&self, index: usize) -> View {
        View {
            node: index,
            offset: self.offset,
            length: self.length,
            validity_offset: self.validity_offset,
        }
    }
}

impl Slot {
    /// A buffer of `bytes` bytes; `None` if the size is stored in device memory.
    pub(crate) fn new(base: DevicePtr, offset: usize, bytes: Option<usize>, owner: u32) -> Self {
        Self {
            base,
            offset,
            owner,
            bytes: AtomicI64::new(bytes.map_or(-1, |n| n as i64)),
        }
    }

    /// A missing buffer.
    pub(crate) fn absent() -> Self {
        Self::new(DevicePtr::NULL, 0, Some(0), 0)
    }

    pub(crate) fn address(&self) -> DevicePtr {
        self.base.offset(self.offset)
    }

    pub(crate) fn is_null(&self) -> bool {
        self.base.is_null()
    }

    /// Its length in bytes, if it is known.
    pub(crate) fn bytes(&self) -> Option<usize> {
        usize::try_from(self.bytes.load(Relaxed)).ok()
    }

    pub(crate) fn set_bytes(&self, bytes: usize) {
        self.bytes.store(bytes as i64, Relaxed);
    }
}

impl Owners {
    pub(crate) fn as_slice(&self) -> &[Arc<Owner>] {
        match self {
            Self::One(owner) => std::slice::from_ref(owner),
            Self::Many(many) => &many.owners,
        }
    }
}

impl From<Vec<Arc<Owner>>> for Owners {
    fn from(mut owners: Vec<Arc<Owner>>) -> Self {
        match owners.pop() {
            Some(only) if owners.is_empty() => Self::One(only),
            last => {
                owners.extend(last);
                Self::Many(Box::new(Many {
                    owners,
                    ..Many::default()
                }))
            }
        }
    }
}

/// A range of a node's rows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct View {
    pub(crate) node: usize,
    /// Rows to skip, the node's own offset included.
    pub(crate) offset: usize,
    pub(crate) length: usize,
    pub(crate) validity_offset: usize,
}

impl Tree {
    /// The type of a node, which is looked up from the root on.
    pub(crate) fn data_type(&self, node: usize) -> &DataType {
        if node == 0 {
            return &self.root;
        }
        let parent = self.nodes[node].parent as usize;
        let position = node - self.nodes[parent].first_child as usize;
        child_type(self.data_type(parent), position).unwrap_or(&DataType::Null)
    }

    /// The field of a node; the root and a dictionary's values have none.
    pub(crate) fn field(&self, node: usize) -> Option<&FieldRef> {
        if node == 0 {
            return None;
        }
        let parent = self.nodes[node].parent as usize;
        let position = node - self.nodes[parent].first_child as usize;
        child_field(self.data_type(parent), position)
    }

    pub(crate) fn layout(&self, node: usize) -> &Layout {
        &self.nodes[node].layout
    }

    pub(crate) fn slots(&self, node: usize) -> &[Slot] {
        self.slots_of(&self.nodes[node])
    }

    #[inline]
    pub(crate) fn slots_of(&self, node: &Node) -> &[Slot] {
        &self.slots[node.first_slot as usize..][..node.n_slots as usize]
    }

    pub(crate) fn owner(&self, slot: &Slot) -> &Arc<Owner> {
        &self.owners.as_slice()[slot.owner as usize]
    }

    /// All rows of a node.
    #[inline]
    pub(crate) fn whole(&self, node: usize) -> View {
        self.nodes[node].whole(node)
    }

    /// Whether a view is all of its node, from the start of its buffers.
    pub(crate) fn is_uncut(&self, view: View) -> bool {
        let node = &self.nodes[view.node];
        !node.cut && view.offset == 0 && node.offset == 0 && view.length == node.length
    }

    /// The rows of child `i` that belong to a view, where the type alone determines them; otherwise all rows.
    #[inline]
    pub(crate) fn child(&self, view: View, i: usize) -> View {
        let node = self.nodes[view.node].first_child as usize + i;
        let child = &self.nodes[node];
        let (skip, length) = match self.layout(view.node).nesting {
            Nesting::RowByRow => (view.offset, view.length),
            Nesting::Times(n) => {
                let n = n as usize;
                (view.offset.saturating_mul(n), view.length.saturating_mul(n))
            }
            _ => return self.whole(node),
        };
        View {
            node,
            offset: child.offset + skip,
            length,
            validity_offset: child.validity_offset + skip,
        }
    }

    /// The number of nulls in a view's own bitmap, if it is known without reading the bitmap.
    pub(crate) fn null_count(&self, view: View) -> Option<usize> {
        self.null_count_of(&self.nodes[view.node], view)
    }

    /// As [`null_count`](Self::null_count), for a view of `node`.
    pub(crate) fn null_count_of(&self, node: &Node, view: View) -> Option<usize> {
        if node.layout.is_null_type() {
            return Some(view.length);
        }
        match node.nulls.get() {
            Some(0) => Some(0),
            _ if view.length == 0 || self.bitmap_of(node).is_none() => Some(0),
            Some(n) if n == node.length => Some(view.length),
            Some(n) if node.is_all(view) => Some(n),
            None => self.null_count_of_origin(node, view),
            _ => None,
        }
    }

    /// As [`null_count_of`](Self::null_count_of), if the tree that this one is a child of has counted them meanwhile.
    #[cold]
    fn null_count_of_origin(&self, node: &Node, view: View) -> Option<usize> {
        let (origin, at) = self.origin(view.node)?;
        node.nulls.set(origin.null_count(origin.whole(at))?);
        self.null_count_of(node, view)
    }

    /// Keeps the nulls that were counted in a view, if the view is all of its node.
    pub(crate) fn keep_null_count(&self, view: View, nulls: usize) {
        let node = &self.nodes[view.node];
        if node.is_all(view) {
            node.nulls.set(nulls);
        }
        if let Some((origin, at)) = self.origin(view.node) {
            origin.keep_null_count(View { node: at, ..view }, nulls);
        }
    }

    /// The size in bytes of a node's buffer, if it is known.
    pub(crate) fn bytes(&self, node: usize, buffer: usize) -> Option<usize> {
        let slot = &self.slots(node)[buffer];
        slot.bytes().or_else(|| {
            let (origin, at) = self.origin(node)?;
            let bytes = origin.bytes(at, buffer)?;
            slot.set_bytes(bytes);
            Some(bytes)
        })
    }

    /// Keeps the size in bytes of a node's buffer.
    pub(crate) fn keep_bytes(&self, node: usize, buffer: usize, bytes: usize) {
        self.slots(node)[buffer].set_bytes(bytes);
        if let Some((origin, at)) = self.origin(node) {
            origin.keep_bytes(at, buffer, bytes);
        }
    }

    /// The tree that this one is a child of, if it is still there, and the number of a node in it.
    fn origin(&self, node: usize) -> Option<(Arc<Self>, usize)> {
        let Owners::Many(many) = &self.owners else {
            return None;
        };
        let origin = many.origin.as_ref()?;
        Some((origin.tree.upgrade()?, origin.nodes[node] as usize))
    }

    /// Child `i` of the root as a tree of its own, which keeps only the owners of its own buffers. It is made once, so
    /// that what is counted in it stays known. `None` if this tree has no more than one owner, which every child
    /// needs.
    pub(crate) fn child_tree(self: &Arc<Self>, i: usize) -> Option<Arc<Self>> {
        let many = match &self.owners {
            Owners::Many(many) if many.owners.len() > 1 => many,
            _ => return None,
        };
        let children = many.children.get_or_init(|| {
            let n = self.nodes[0].n_children;
            (0..n).map(|_| OnceLock::new()).collect()
        });
        let child = children.get(i)?;
        let made =
            child.get_or_init(|| Arc::new(self.part(self.nodes[0].first_child as usize + i)));
        Some(made.clone())
    }

    /// A node and its descendants as a tree of their own.
    fn part(self: &Arc<Self>, node: usize) -> Self {
        let order = self.below(node);
        let mut parents = vec![0; order.len()];
        let (mut nodes, mut slots) = (Vec::with_capacity(order.len()), Vec::new());
        let (mut owners, mut indices) = (Vec::new(), HashMap::new());
        for (i, &(index, first_child)) in order.iter().enumerate() {
            let source = &self.nodes[index as usize];
            let children = first_child as usize..(first_child + source.n_children) as usize;
            parents[children].fill(i as u32);
            let first_slot = slots.len() as u32;
            for slot in self.slots_of(source) {
                let mut owner = 0;
                if !slot.is_null() {
                    owner = *indices.entry(slot.owner).or_insert_with(|| {
                        owners.push(self.owner(slot).clone());
                        owners.len() as u32 - 1
                    });
                }
                slots.push(Slot::new(slot.base, slot.offset, slot.bytes(), owner));
            }
            nodes.push(Node {
                nulls: source.nulls.clone(),
                parent: parents[i],
                first_child,
                first_slot,
                ..*source
            });
        }
        Self {
            device: self.device.clone(),
            root: self.data_type(node).clone(),
            nodes,
            slots,
            owners: Owners::Many(Box::new(Many {
                owners,
                children: OnceLock::new(),
                origin: Some(Origin {
                    tree: Arc::downgrade(self),
                    nodes: order.into_iter().map(|(node, _)| node).collect(),
                }),
            })),
        }
    }

    /// A node and its descendants, level by level, each with the position of its first child.
    pub(crate) fn below(&self, node: usize) -> Vec<(u32, u32)> {
        let mut order = vec![(node as u32, 1)];
        let mut i = 0;
        while i < order.len() {
            let n = &self.nodes[order[i].0 as usize];
            order[i].1 = order.len() as u32;
            order.extend((n.first_child..n.first_child + n.n_children).map(|node| (node, 0)));
            i += 1;
        }
        order
    }

    /// The path of a node from the root, for errors.
    pub(crate) fn path(&self, node: usize) -> String {
        if node == 0 {
            return "array".into();
        }
        let parent = self.nodes[node].parent as usize;
        let mut path = self.path(parent);
        if matches!(self.data_type(parent), DataType::Dictionary(_, _)) {
            path.push_str(".dictionary");
        } else {
            let position = node - self.nodes[parent].first_child as usize;
            path.push_str(&format!(".children[{position}]"));
        }
        path
    }

    pub(crate) fn buffer_path(&self, node: usize, buffer: usize) -> String {
        format!("{}.buffers[{buffer}]", self.path(node))
    }

    /// The slot of a node's validity bitmap, if it has one.
    pub(crate) fn bitmap_of(&self, node: &Node) -> Option<&Slot> {
        let first = self.slots_of(node).first();
        first.filter(|slot| node.layout.has_validity() && !slot.is_null())
    }
}

impl View {
    /// The distance in bytes from the bitmap's start to the address that an export states for it: the C data
    /// interface has one offset for all buffers. `None` if that is not a whole number of bytes, or is negative.
    #[inline]
    pub(crate) fn bitmap_shift(self) -> Option<usize> {
        let bits = self.validity_offset.checked_sub(self.offset)?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}
