//! The plan of a transfer: where each buffer's bytes come from, and where in one slab they go. Every buffer starts at a
//! multiple of 64 bytes and is padded to a multiple of 64 with zeros.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::layout::child_type;
use crate::data::node::{Node, NodeBuffer, NullCount};
use crate::device::{ALIGNMENT, DevicePtr};
use crate::error::{Error, Result};
use crate::memory::Owner;
use crate::transfer::fix::{Fix, Made, Piece};

/// The nodes and buffers of a transfer's result, and what is copied for them.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The nodes of the result; the children of each are next to each other, after it.
    pub(crate) nodes: Vec<PlanNode>,
    /// The buffers of the result.
    buffers: Vec<PlanBuffer>,
    /// What they are copied from: those of one buffer are next to each other, in order.
    regions: Vec<Region>,
    /// What the changes refer to.
    pub(crate) made: Made,
    /// The length of the slab in bytes, a multiple of 64.
    pub(crate) bytes: usize,
}

/// A node of a plan's result.
#[derive(Debug)]
pub(crate) struct PlanNode {
    /// Rows.
    pub(super) length: usize,
    /// Rows to skip; not 0 only where all runs are copied.
    pub(super) offset: usize,
    pub(super) nulls: NullCount,
    /// The first of its children.
    first_child: usize,
    n_children: usize,
    buffers: Range<usize>,
}

/// A buffer of a plan's result.
#[derive(Debug, Default)]
struct PlanBuffer {
    /// Whether it has an address, even if it has no bytes.
    present: bool,
    bytes: usize,
    regions: Range<usize>,
    /// The first byte in the slab, once the plan is laid out.
    dst: usize,
    /// Another buffer has the same source and the same changes, and is in the same place.
    shared: bool,
}

/// Where some bytes of a buffer come from, and how.
#[derive(Debug)]
pub(super) struct Region {
    /// The allocation of the source, and the first byte in it.
    base: DevicePtr,
    from: usize,
    bytes: usize,
    /// What the host changes.
    fix: Fix,
    /// These are all bytes of a buffer that an earlier transfer wrote and padded with zeros, and they do not change.
    whole: bool,
}

impl Region {
    /// `bytes` bytes from byte `from` of the source's allocation at `base`, which are copied as they are.
    pub(super) fn new(base: DevicePtr, from: usize, bytes: usize) -> Self {
        Self {
            base,
            from,
            bytes,
            fix: Fix::None,
            whole: false,
        }
    }

    /// `bytes` bytes that have no source.
    pub(super) fn made(fix: Fix, bytes: usize) -> Self {
        Self::new(DevicePtr::new(std::ptr::dangling_mut()), 0, bytes).fixed(fix)
    }

    pub(super) fn fixed(self, fix: Fix) -> Self {
        Self { fix, ..self }
    }

    pub(super) fn whole(self, whole: bool) -> Self {
        Self { whole, ..self }
    }
}

impl Plan {
    /// Adds a node with room for `buffers` buffers, which are missing until they are filled. Its children come later.
    pub(super) fn node(&mut self, length: usize, buffers: usize) -> usize {
        let first = self.buffers.len();
        self.buffers
            .resize_with(first + buffers, PlanBuffer::default);
        self.nodes.push(PlanNode {
            length,
            offset: 0,
            nulls: NullCount::known(0),
            first_child: 0,
            n_children: 0,
            buffers: first..first + buffers,
        });
        self.nodes.len() - 1
    }

    /// Declares that the next `n` nodes are the children of `node`.
    pub(super) fn begin_children(&mut self, node: usize, n: usize) {
        self.nodes[node].first_child = self.nodes.len();
        self.nodes[node].n_children = n;
        // Growing step by step takes longer than all else that is done for small columns.
        self.nodes.reserve(n);
        self.buffers.reserve(3 * n);
        self.regions.reserve(3 * n);
    }

    /// The number of a node's buffers.
    pub(super) fn n_buffers(&self, node: usize) -> usize {
        self.nodes[node].buffers.len()
    }

    /// Says what buffer `i` of a node is copied from. Without bytes it is there if it is to be `present`.
    pub(super) fn fill(
        &mut self,
        node: usize,
        i: usize,
        present: bool,
        regions: impl IntoIterator<Item = Region>,
    ) {
        let start = self.regions.len();
        let regions = regions.into_iter().filter(|region| region.bytes > 0);
        self.regions.extend(regions);
        let regions = start..self.regions.len();
        let bytes = self.regions[regions.clone()]
            .iter()
            .map(|region| region.bytes);
        // `lay_out` refuses buffers that do not fit in memory.
        let bytes = bytes.fold(0, usize::saturating_add);
        self.buffers[self.nodes[node].buffers.start + i] = PlanBuffer {
            present: present || bytes > 0,
            bytes,
            regions,
            ..PlanBuffer::default()
        };
    }

    /// Returns the bytes of all buffers.
    pub(super) fn buffer_bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.bytes).sum()
    }

    /// Returns the bytes to allocate on a device, where buffers without bytes need an address too.
    pub(crate) fn device_bytes(&self) -> usize {
        match self.buffers.iter().any(|buffer| buffer.present) {
            true => self.bytes.max(ALIGNMENT),
            false => self.bytes,
        }
    }

    /// Returns what is copied, in ascending order of destination, each with whether its source is followed by zeros up to the next
    /// multiple of 64 bytes. Buffers that an earlier transfer put next to each other stay so, and are one piece.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (Piece, bool)> {
        let copied = self.buffers.iter().filter(|buffer| !buffer.shared);
        let regions = copied.flat_map(move |buffer| {
            let mut at = buffer.dst;
            let last = buffer.regions.end.wrapping_sub(1);
            buffer.regions.clone().map(move |i| {
                let region = &self.regions[i];
                let dst = at;
                at += region.bytes;
                (region, dst, i == last)
            })
        });
        let mut regions = regions.peekable();
        std::iter::from_fn(move || {
            let (first, dst, last) = regions.next()?;
            let mut piece = Piece {
                src: first.base.offset(first.from),
                dst,
                dst_bytes: first.bytes,
                fix: first.fix,
                last,
            };
            while let Some((next, ..)) =
                regions.next_if(|(next, to, _)| follows(first, &piece, next, *to))
            {
                piece.dst_bytes = next.from + next.bytes - first.from;
            }
            Some((piece, first.whole))
        })
    }

    /// Returns the result of this type in a slab whose first address is `base`.
    pub(crate) fn place(
        self,
        data_type: &DataType,
        base: DevicePtr,
        owner: &Arc<Owner>,
    ) -> Arc<Node> {
        self.placed(0, data_type, base, owner)
    }

    fn placed(&self, at: usize, of: &DataType, base: DevicePtr, owner: &Arc<Owner>) -> Arc<Node> {
        let node = &self.nodes[at];
        let buffers = self.buffers[node.buffers.clone()].iter().map(|buffer| {
            if !buffer.present {
                return NodeBuffer::absent();
            }
            NodeBuffer::new(owner, base, buffer.dst, Some(buffer.bytes))
        });
        let children = (0..node.n_children).map(|i| {
            let of = child_type(of, i).unwrap_or(&DataType::Null);
            self.placed(node.first_child + i, of, base, owner)
        });
        Arc::new(Node {
            // True once the transfer has completed.
            padded: true,
            offset: node.offset,
            validity_offset: node.offset,
            nulls: node.nulls.clone(),
            ..Node::new(
                of.clone(),
                node.length,
                buffers.collect(),
                children.collect(),
            )
        })
    }

    /// Assigns each buffer its offset in the slab, a multiple of `grain`. With `share`, buffers that have the same source and
    /// the same changes get the same offset.
    pub(super) fn lay_out(&mut self, share: bool, grain: usize) -> Result<()> {
        let (mut places, at) = (HashMap::new(), &mut self.bytes);
        for buffer in self.buffers.iter_mut().filter(|buffer| buffer.bytes > 0) {
            isize::try_from(buffer.bytes).map_err(|_| too_large())?;
            let mut room = buffer.bytes;
            if let [region] = &self.regions[buffer.regions.clone()] {
                let (src, fix) = (region.base.offset(region.from), region.fix);
                // Where it is changed in place, the source has room too.
                room = match fix {
                    Fix::Bits { skip, bits, .. } => {
                        room.max((usize::from(skip) + bits).div_ceil(8))
                    }
                    _ => room,
                };
                if share {
                    match places.entry((src, region.bytes, fix)) {
                        Entry::Occupied(place) => {
                            (buffer.dst, buffer.shared) = (*place.get(), true);
                            continue;
                        }
                        Entry::Vacant(place) => _ = place.insert(*at),
                    }
                }
            }
            let end = room
                .checked_next_multiple_of(grain)
                .and_then(|room| at.checked_add(room));
            let Some(end) = end.filter(|end| isize::try_from(*end).is_ok()) else {
                return Err(too_large());
            };
            buffer.dst = *at;
            *at = end;
        }
        Ok(())
    }
}

/// Whether a region, which goes to `dst`, continues the piece that begins with another one, on both sides of the copy.
fn follows(first: &Region, piece: &Piece, next: &Region, dst: usize) -> bool {
    let bytes = piece.dst_bytes.next_multiple_of(ALIGNMENT);
    first.whole
        && next.whole
        && next.base == first.base
        && next.from == first.from + bytes
        && dst == piece.dst + bytes
}

pub(super) fn too_large() -> Error {
    Error::argument("the rows do not fit in memory")
}
