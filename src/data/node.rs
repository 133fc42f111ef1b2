//! [`Node`]: an array without its device, as arrow-rs's `ArrayData` on the host: one recursive value, with its buffers and its
//! children inside.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};

use arrow_schema::{DataType, Fields};
use smallvec::{SmallVec, smallvec};

use crate::data::layout::{Layout, Nesting};
use crate::device::DevicePtr;
use crate::memory::{DeviceBuffer, Owner};

/// Type, rows, buffers and children of an array. Record batches are structs, and a dictionary's values are its child.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) data_type: DataType,
    /// Of the type.
    pub(crate) layout: Layout,
    /// Rows.
    pub(crate) length: usize,
    /// The buffers hold more rows after these: the node is a slice of another one.
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
    /// In the order of the C data interface.
    pub(crate) buffers: Buffers,
    pub(crate) children: Vec<Arc<Node>>,
}

/// Only views have more than three.
pub(crate) type Buffers = SmallVec<[NodeBuffer; 3]>;

/// One buffer of a node, as [`DeviceBuffer`], except that its size may be unknown.
#[derive(Clone, Debug)]
pub(crate) struct NodeBuffer {
    pub(crate) base: DevicePtr,
    /// In bytes.
    pub(crate) offset: usize,
    /// `None` if there is no memory.
    pub(crate) owner: Option<Arc<Owner>>,
    pub(crate) bytes: Count,
}

/// A number that may be unknown: then it is -1.
#[derive(Debug)]
pub(crate) struct Count(AtomicI64);

/// A number of nulls. A known one was counted in the validity bitmap, or the caller
/// of an `unsafe` function guaranteed it (an import, [`DeviceArray::from_parts`]): exports state it, and
/// `unsafe` code relies on it. Safe code cannot set one.
///
/// [`DeviceArray::from_parts`]: crate::DeviceArray::from_parts
pub(crate) type NullCount = Count;

/// A range of a node's rows, for walks: an array has a node of exactly its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) node: &'a Arc<Node>,
    /// Rows to skip, the node's own offset included.
    pub(crate) offset: usize,
    pub(crate) length: usize,
    pub(crate) validity_offset: usize,
}

impl Node {
    /// A node at offset 0 without nulls.
    pub(crate) fn new(
        data_type: DataType,
        length: usize,
        buffers: Buffers,
        children: Vec<Arc<Self>>,
    ) -> Self {
        Self {
            layout: Layout::of(&data_type),
            data_type,
            length,
            cut: false,
            padded: false,
            offset: 0,
            validity_offset: 0,
            nulls: NullCount::known(0),
            buffers,
            children,
        }
    }

    /// The columns of a batch: a struct without nulls.
    pub(crate) fn of_columns(fields: Fields, rows: usize, columns: Vec<Arc<Self>>) -> Self {
        let no_bitmap = smallvec![NodeBuffer::absent()];
        Self::new(DataType::Struct(fields), rows, no_bitmap, columns)
    }

    /// The validity bitmap, if there is one.
    pub(crate) fn bitmap(&self) -> Option<&NodeBuffer> {
        let first = self.buffers.first();
        first.filter(|buffer| self.layout.has_validity() && !buffer.is_null())
    }

    /// Visits the node and all of its descendants, parents before their children.
    pub(crate) fn each<'a>(self: &'a Arc<Self>, visit: &mut impl FnMut(&'a Arc<Self>)) {
        visit(self);
        self.children.iter().for_each(|child| child.each(visit));
    }

    /// As [`each`](Self::each), as a list.
    pub(crate) fn all(self: &Arc<Self>) -> Vec<&Arc<Self>> {
        let mut all = Vec::new();
        self.each(&mut |node| all.push(node));
        all
    }
}

/// The owners of the memory of some nodes and their descendants that `choose` chooses, each once.
pub(crate) fn owners<'a>(
    nodes: impl IntoIterator<Item = &'a Arc<Node>>,
    choose: impl Fn(&Owner) -> bool,
) -> Vec<Arc<Owner>> {
    let (mut all, mut seen) = (Vec::<Arc<Owner>>::new(), HashSet::new());
    let mut add = |node: &Arc<Node>| {
        let buffers = node.buffers.iter();
        let owners = buffers.filter_map(|buffer| buffer.owner.as_ref());
        for owner in owners.filter(|owner| choose(owner)) {
            let is_new = match &all[..] {
                [] => true,
                // Mostly there is only one, or the same as before.
                [first, ..] if Arc::ptr_eq(first, owner) => false,
                [.., last] => !Arc::ptr_eq(last, owner) && seen.insert(Arc::as_ptr(owner)),
            };
            if is_new {
                all.push(owner.clone());
            }
        }
    };
    nodes.into_iter().for_each(|node| node.each(&mut add));
    all
}

impl NodeBuffer {
    /// A buffer of `bytes` bytes in memory of `owner`; `None` if the size is stored in device memory.
    pub(crate) fn new(
        owner: &Arc<Owner>,
        base: DevicePtr,
        offset: usize,
        bytes: Option<usize>,
    ) -> Self {
        Self {
            base,
            offset,
            owner: (!base.is_null()).then(|| owner.clone()),
            bytes: Count::from(bytes),
        }
    }

    /// A missing buffer.
    pub(crate) fn absent() -> Self {
        Self {
            base: DevicePtr::NULL,
            offset: 0,
            owner: None,
            bytes: Count::known(0),
        }
    }

    pub(crate) fn address(&self) -> DevicePtr {
        self.base.offset(self.offset)
    }

    pub(crate) fn is_null(&self) -> bool {
        self.base.is_null()
    }

    /// Its length in bytes, if it is known.
    pub(crate) fn bytes(&self) -> Option<usize> {
        self.bytes.get()
    }

    /// The buffer by itself, `bytes` bytes long; `None` if there is no memory.
    pub(crate) fn to_buffer(&self, bytes: usize) -> Option<DeviceBuffer> {
        let (base, offset) = (self.base, self.offset);
        let owner = self.owner.clone()?;
        Some(DeviceBuffer::from_parts(owner, base, offset, bytes))
    }
}

impl From<Option<&DeviceBuffer>> for NodeBuffer {
    fn from(buffer: Option<&DeviceBuffer>) -> Self {
        let Some(buffer) = buffer else {
            return Self::absent();
        };
        let bytes = Some(buffer.len());
        Self::new(&buffer.owner, buffer.base, buffer.offset, bytes)
    }
}

impl Count {
    pub(crate) fn known(number: usize) -> Self {
        Self::from(Some(number))
    }

    pub(crate) fn get(&self) -> Option<usize> {
        usize::try_from(self.0.load(Relaxed)).ok()
    }

    pub(crate) fn set(&self, number: usize) {
        self.0.store(number as i64, Relaxed);
    }
}

impl From<Option<usize>> for Count {
    fn from(number: Option<usize>) -> Self {
        Self(AtomicI64::new(number.map_or(-1, |n| n as i64)))
    }
}

impl Clone for Count {
    fn clone(&self) -> Self {
        Self::from(self.get())
    }
}

impl<'a> View<'a> {
    /// All rows of a node.
    pub(crate) fn whole(node: &'a Arc<Node>) -> Self {
        Self {
            node,
            offset: node.offset,
            length: node.length,
            validity_offset: node.validity_offset,
        }
    }

    pub(crate) fn layout(self) -> &'a Layout {
        &self.node.layout
    }

    /// `length` rows from row `offset` of these on.
    pub(crate) fn slice(self, offset: usize, length: usize) -> Self {
        Self {
            offset: self.offset + offset,
            length,
            validity_offset: self.validity_offset + offset,
            ..self
        }
    }

    /// Whether these are all rows of the node.
    pub(crate) fn is_all(self) -> bool {
        self.offset == self.node.offset && self.length == self.node.length
    }

    /// Whether these are all rows of the node, from the start of its buffers.
    pub(crate) fn is_uncut(self) -> bool {
        !self.node.cut && self.offset == 0 && self.is_all()
    }

    /// The rows of child `i` that belong to these, where the type alone determines them; otherwise all rows.
    pub(crate) fn child(self, i: usize) -> Self {
        let child = Self::whole(&self.node.children[i]);
        match self.node.layout.nesting {
            Nesting::RowByRow => child.slice(self.offset, self.length),
            Nesting::Times(n) => {
                let n = n as usize;
                child.slice(self.offset.saturating_mul(n), self.length.saturating_mul(n))
            }
            _ => child,
        }
    }

    /// The number of nulls in the bitmap of these rows, if it is known without reading the bitmap.
    pub(crate) fn null_count(self) -> Option<usize> {
        let node = self.node;
        if node.layout.is_null_type() {
            return Some(self.length);
        }
        match node.nulls.get() {
            Some(0) => Some(0),
            _ if self.length == 0 || node.bitmap().is_none() => Some(0),
            Some(n) if n == node.length => Some(self.length),
            Some(n) if self.is_all() => Some(n),
            _ => None,
        }
    }

    /// A node of these rows.
    pub(crate) fn to_node(self) -> Arc<Node> {
        match self.is_all() {
            true => self.node.clone(),
            false => Arc::new(Node {
                length: self.length,
                cut: true,
                offset: self.offset,
                validity_offset: self.validity_offset,
                nulls: NullCount::from(self.null_count()),
                ..Node::clone(self.node)
            }),
        }
    }

    /// A node of these rows of a struct at offset 0, whose children have exactly these rows.
    pub(crate) fn pushed_down(self) -> Arc<Node> {
        let node = self.node;
        let fits = |child: &Arc<Node>| child.length == self.length;
        if self.is_all() && self.offset == 0 && node.children.iter().all(fits) {
            return node.clone();
        }
        let children = (0..node.children.len()).map(|i| self.child(i).to_node());
        let (data_type, buffers) = (node.data_type.clone(), node.buffers.clone());
        Arc::new(Node {
            validity_offset: self.validity_offset,
            nulls: NullCount::from(self.null_count()),
            ..Node::new(data_type, self.length, buffers, children.collect())
        })
    }

    /// The distance in bytes from the bitmap's start to the address that an export states for it: the C data
    /// interface has one offset for all buffers. `None` if that is not a whole number of bytes, or is negative.
    pub(crate) fn bitmap_shift(self) -> Option<usize> {
        let bits = self.validity_offset.checked_sub(self.offset)?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}
