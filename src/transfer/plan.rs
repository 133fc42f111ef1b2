//! The plan of a transfer: where each buffer's bytes come from, and where in one slab they go. Every buffer starts at a
//! multiple of 64 bytes and is padded to a multiple of 64 with zeros.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::layout::{Layout, child_type};
use crate::data::node::{Node, NodeBuffer, NullCount};
use crate::device::{ALIGNMENT, DevicePtr};
use crate::error::{Error, Result};
use crate::memory::Owner;
use crate::transfer::fix::{Fix, Piece};

/// The nodes and buffers of a transfer's result, and what is copied for them.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The nodes of the result; the children of each are next to each other, after it.
    pub(crate) nodes: Vec<PlanNode>,
    /// The buffers of the result.
    pub(super) regions: Vec<Region>,
    /// The bytes that [`Fix::Ready`] refers to.
    pub(crate) ready: Vec<u8>,
    /// The length of the slab in bytes, a multiple of 64. Of several slabs, that of all.
    pub(crate) bytes: usize,
    /// The offset of each slab but the first, in ascending order: offsets count through all slabs.
    later_slabs: Vec<usize>,
}

/// A node of a plan's result.
#[derive(Debug)]
pub(crate) struct PlanNode {
    pub(super) layout: Layout,
    /// Rows.
    pub(super) length: usize,
    /// Rows to skip; not 0 only where all runs are copied.
    pub(super) offset: usize,
    pub(super) nulls: NullCount,
    /// The node's parent, and the first of its children.
    pub(super) parent: usize,
    pub(super) first_child: usize,
    pub(super) n_children: usize,
    /// The node's buffers.
    pub(super) regions: Range<usize>,
}

/// A buffer of a plan's result: where its bytes come from, where they go, and how.
#[derive(Debug)]
pub(super) struct Region {
    /// The allocation of the source. Null if the buffer is missing.
    pub(super) base: DevicePtr,
    /// The first byte in that allocation.
    from: usize,
    pub(super) bytes: usize,
    /// What the host changes.
    fix: Fix,
    /// These are all bytes of a buffer that an earlier transfer wrote and padded with zeros, and they do not change.
    whole: bool,
    /// The first byte in the slab, once the plan is laid out.
    dst: usize,
    /// Another region with the same source and the same changes goes there too.
    shared: bool,
}

/// The base of regions that are present but have no source.
pub(super) const SLAB: DevicePtr = DevicePtr::new(std::ptr::dangling_mut());

impl PlanNode {
    /// A node without children, of buffers from number `first_region` on, which are still to be added.
    pub(super) fn new(layout: Layout, length: usize, parent: usize, first_region: usize) -> Self {
        Self {
            layout,
            length,
            offset: 0,
            nulls: NullCount::known(0),
            parent,
            first_child: 0,
            n_children: 0,
            regions: first_region..first_region,
        }
    }
}

/// Makes the result of flat nodes and their buffers, of this type.
pub(super) fn result(
    nodes: &[PlanNode],
    data_type: &DataType,
    mut buffers: Vec<NodeBuffer>,
) -> Arc<Node> {
    fn make(nodes: &[PlanNode], at: usize, of: &DataType, buffers: &mut [NodeBuffer]) -> Arc<Node> {
        let node = &nodes[at];
        let own = buffers[node.regions.clone()].iter_mut();
        let own = own.map(|buffer| std::mem::replace(buffer, NodeBuffer::absent()));
        let own = own.collect();
        let children = (0..node.n_children).map(|i| {
            let of = child_type(of, i).unwrap_or(&DataType::Null);
            make(nodes, node.first_child + i, of, buffers)
        });
        let children = children.collect();
        Arc::new(Node {
            // True once the transfer has completed.
            padded: true,
            offset: node.offset,
            validity_offset: node.offset,
            nulls: node.nulls.clone(),
            ..Node::new(of.clone(), node.length, own, children)
        })
    }
    make(nodes, 0, data_type, &mut buffers)
}

impl Region {
    /// Makes a buffer of `bytes` bytes at byte `from` of the source's allocation at `base`, which are copied as they are.
    pub(super) fn new(base: DevicePtr, from: usize, bytes: usize) -> Self {
        Self {
            base,
            from,
            bytes,
            fix: Fix::None,
            whole: false,
            dst: 0,
            shared: false,
        }
    }

    /// A missing buffer.
    pub(super) fn absent() -> Self {
        Self::empty(DevicePtr::NULL)
    }

    /// A buffer without bytes: missing if `base` is null, otherwise present.
    pub(super) fn empty(base: DevicePtr) -> Self {
        Self::new(base, 0, 0)
    }

    pub(super) fn fixed(self, fix: Fix) -> Self {
        Self { fix, ..self }
    }

    pub(super) fn whole(self, whole: bool) -> Self {
        Self { whole, ..self }
    }

    fn piece(&self) -> Piece {
        Piece {
            src: self.base.offset(self.from),
            dst: self.dst,
            dst_bytes: self.bytes,
            fix: self.fix,
        }
    }
}

impl Plan {
    /// Returns the bytes to allocate on a device, where buffers without bytes need an address too.
    pub(crate) fn device_bytes(&self) -> usize {
        match self.regions.iter().all(|region| region.base.is_null()) {
            true => self.bytes,
            false => self.bytes.max(ALIGNMENT),
        }
    }

    /// Returns what is copied, in ascending order of destination, each with whether its source is followed by zeros up to the next
    /// multiple of 64 bytes. Buffers that an earlier transfer put next to each other stay so, and are one piece.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (Piece, bool)> {
        let copied = |region: &&Region| region.bytes > 0 && !region.shared;
        let mut regions = self.regions.iter().filter(copied).peekable();
        std::iter::from_fn(move || {
            let first = regions.next()?;
            let mut piece = first.piece();
            while let Some(next) = regions.next_if(|next| self.follows(first, &piece, next)) {
                piece.dst_bytes = next.from + next.bytes - first.from;
            }
            Some((piece, first.whole))
        })
    }

    /// Whether a region continues the piece that begins with another one, on both sides of the copy.
    fn follows(&self, first: &Region, piece: &Piece, next: &Region) -> bool {
        let bytes = piece.dst_bytes.next_multiple_of(ALIGNMENT);
        first.whole
            && next.whole
            && next.base == first.base
            && next.from == first.from + bytes
            && next.dst == first.dst + bytes
            && self.in_slab(next.dst).0 == self.in_slab(first.dst).0
    }

    /// Returns what is copied for buffer `i` of a node, or `None` if the buffer has no bytes.
    pub(super) fn piece(&self, node: &PlanNode, i: usize) -> Option<Piece> {
        let region = &self.regions[node.regions.start + i];
        (region.bytes > 0).then(|| region.piece())
    }

    /// Returns the result of this type in slabs, each with its first address.
    pub(crate) fn place(
        self,
        data_type: &DataType,
        slabs: &[(DevicePtr, Arc<Owner>)],
    ) -> Arc<Node> {
        let later = &self.later_slabs;
        let buffers = self.regions.iter().map(|region| {
            if region.base.is_null() {
                return NodeBuffer::absent();
            }
            let (i, start) = slab_of(later, region.dst);
            let (base, owner) = &slabs[i];
            NodeBuffer::new(owner, *base, region.dst - start, Some(region.bytes))
        });
        result(&self.nodes, data_type, buffers.collect())
    }

    /// Returns the length in bytes of each slab.
    pub(super) fn slabs(&self) -> impl Iterator<Item = usize> {
        let starts = std::iter::once(&0).chain(&self.later_slabs);
        let ends = self.later_slabs.iter().chain([&self.bytes]);
        starts.zip(ends).map(|(start, end)| end - start)
    }

    /// Returns the slab of an offset, and the offset in it.
    #[inline]
    pub(super) fn in_slab(&self, offset: usize) -> (usize, usize) {
        let (i, start) = slab_of(&self.later_slabs, offset);
        (i, offset - start)
    }

    /// Groups the regions by slabs, so that each child of the root with `least` bytes or more has one, and those with fewer share
    /// some of about `least` bytes. `least` is raised if there would be more than about a hundred. Returns the number of each
    /// region's group.
    pub(super) fn columns(&self, least: usize) -> Vec<u32> {
        let mut bytes = vec![0usize; self.nodes.len()];
        // A parent comes before its children.
        let mut columns = vec![0; self.nodes.len()];
        for (i, node) in self.nodes.iter().enumerate() {
            let parent = node.parent;
            columns[i] = if parent == 0 { i } else { columns[parent] };
            let all = self.regions[node.regions.clone()].iter();
            let all =
                all.map(|region| region.bytes.saturating_add(ALIGNMENT - 1) & !(ALIGNMENT - 1));
            let column = &mut bytes[columns[i]];
            *column = all.fold(*column, usize::saturating_add);
        }
        // Few enough for the pool of idle slabs, however many columns there are.
        let all = bytes.iter().copied().fold(0, usize::saturating_add);
        let least = least.max(all / 64);
        // The group of small columns, and the bytes in it. The root's own buffers are in the first.
        let (mut last, mut shared, mut in_shared) = (0, 0, bytes[0]);
        let mut numbers = vec![0; self.nodes.len()];
        for (i, bytes) in bytes.into_iter().enumerate().skip(1) {
            if bytes < least && in_shared < least {
                numbers[i] = shared;
                in_shared += bytes;
                continue;
            }
            last += 1;
            numbers[i] = last;
            if bytes < least {
                (shared, in_shared) = (last, bytes);
            }
        }
        let mut groups = vec![0; self.regions.len()];
        for (node, column) in self.nodes.iter().zip(columns) {
            groups[node.regions.clone()].fill(numbers[column]);
        }
        groups
    }

    /// Assigns each region its offset in the slab, a multiple of `grain`. With `share`, regions that have the same source and
    /// the same changes get the same offset. The regions of each of the `groups` get a slab; without groups there is one slab.
    pub(super) fn lay_out(&mut self, share: bool, grain: usize, groups: &[u32]) -> Result<()> {
        let (mut one, mut several) = ([0], Vec::new());
        let ends = match groups.iter().max() {
            None => &mut one[..],
            Some(last) => {
                several.resize(1 + *last as usize, 0);
                &mut several[..]
            }
        };
        let group = |i: usize| groups.get(i).map_or(0, |group| *group as usize);
        let mut places = HashMap::new();
        let regions = self.regions.iter_mut().enumerate();
        for (i, region) in regions.filter(|(_, region)| region.bytes > 0) {
            let at: &mut usize = &mut ends[group(i)];
            isize::try_from(region.bytes).map_err(|_| too_large())?;
            let piece = region.piece();
            if share {
                match places.entry((piece.src, piece.dst_bytes, piece.fix)) {
                    Entry::Occupied(place) => {
                        region.dst = *place.get();
                        region.shared = true;
                        continue;
                    }
                    Entry::Vacant(place) => _ = place.insert(*at),
                }
            }
            // Both are at most `isize::MAX` plus 64, so the sum does not overflow.
            let end = (*at + piece.region()).checked_next_multiple_of(grain);
            let Some(end) = end.filter(|end| isize::try_from(*end).is_ok()) else {
                return Err(too_large());
            };
            region.dst = *at;
            *at = end;
        }
        // The slabs follow each other; those without bytes are none.
        for end in ends.iter_mut() {
            let start = self.bytes;
            self.bytes = start.checked_add(*end).ok_or_else(too_large)?;
            if start > 0 && *end > 0 {
                self.later_slabs.push(start);
            }
            *end = start;
        }
        isize::try_from(self.bytes).map_err(|_| too_large())?;
        if !self.later_slabs.is_empty() {
            let regions = self.regions.iter_mut().enumerate();
            for (i, region) in regions.filter(|(_, region)| region.bytes > 0) {
                region.dst += ends[group(i)];
            }
        }
        Ok(())
    }
}

/// Returns the number of the slab that has an offset, and where it begins.
#[inline]
fn slab_of(later_slabs: &[usize], offset: usize) -> (usize, usize) {
    match later_slabs {
        [] => (0, 0),
        later => {
            let i = later.partition_point(|start| *start <= offset);
            (i, i.checked_sub(1).map_or(0, |before| later[before]))
        }
    }
}

pub(super) fn too_large() -> Error {
    Error::argument("the rows do not fit in memory")
}
