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
    notes: Vec<Note>,
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
    copying: Copying,
    /// The first byte in the slab, once the plan is laid out.
    dst: usize,
}

/// How the bytes of a [`Region`] are copied.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Copying(u32);

/// The base of regions that are present but have no source.
pub(super) const SLAB: DevicePtr = DevicePtr::new(std::ptr::dangling_mut());

/// What a plan states about a region besides its bytes.
#[derive(Clone, Copy, Debug)]
enum Note {
    Fix(Fix),
    /// The region and those that follow it are copied together; this is the number of bytes, of all of them.
    Run(usize),
}

impl Copying {
    /// The bytes are copied unchanged.
    pub(super) const PLAIN: Self = Self(0);
    /// The same, and they are all bytes of a buffer that an earlier transfer wrote and padded with zeros.
    pub(super) const WHOLE: Self = Self(1);
    /// The bytes are copied with those of another region: of the one before ([`Note::Run`]), or of one with the same source.
    const FOLLOWS: Self = Self(2);
    const FIRST_NOTE: u32 = 3;

    /// As note `i` of the plan says.
    #[inline]
    fn noted(i: usize) -> Self {
        Self(Self::FIRST_NOTE + i as u32)
    }

    /// The index of the note, if there is one.
    #[inline]
    fn note(self) -> Option<usize> {
        self.0.checked_sub(Self::FIRST_NOTE).map(|i| i as usize)
    }
}

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
    /// Makes a buffer of `bytes` bytes at byte `from` of the source's allocation at `base`.
    pub(super) fn new(base: DevicePtr, from: usize, bytes: usize, copying: Copying) -> Self {
        Self {
            base,
            from,
            bytes,
            copying,
            dst: 0,
        }
    }

    /// A missing buffer.
    pub(super) fn absent() -> Self {
        Self::empty(DevicePtr::NULL)
    }

    /// A buffer without bytes: missing if `base` is null, otherwise present.
    pub(super) fn empty(base: DevicePtr) -> Self {
        Self::new(base, 0, 0, Copying::PLAIN)
    }

    fn has_bytes(&self) -> bool {
        self.bytes > 0
    }

    /// What is copied, without what a note says.
    fn piece(&self) -> Piece {
        Piece {
            src: self.base.offset(self.from),
            dst: self.dst,
            dst_bytes: self.bytes,
            fix: Fix::None,
        }
    }

    /// As [`piece`](Self::piece), with what its note says. `None` if another region's piece includes it.
    #[inline(never)]
    fn noted(&self, notes: &[Note]) -> Option<Piece> {
        let mut piece = self.piece();
        if let Some(note) = self.copying.note() {
            match notes[note] {
                Note::Fix(fix) => piece.fix = fix,
                Note::Run(bytes) => piece.dst_bytes = bytes,
            }
        }
        (self.copying != Copying::FOLLOWS).then_some(piece)
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

    /// Returns what is copied, in ascending order of destination.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        let regions = self.regions.iter().filter(|region| region.has_bytes());
        regions.filter_map(|region| region.noted(&self.notes))
    }

    /// As [`pieces`](Self::pieces), each with whether its source is followed by zeros up to the next multiple of 64 bytes.
    pub(super) fn padded_pieces(&self) -> impl Iterator<Item = (Piece, bool)> {
        let regions = self.regions.iter().filter(|region| region.has_bytes());
        regions.filter_map(|region| {
            let padded = match region.copying.note() {
                Some(note) => matches!(self.notes[note], Note::Run(_)),
                None => region.copying == Copying::WHOLE,
            };
            region.noted(&self.notes).map(|piece| (piece, padded))
        })
    }

    /// Returns what is copied for buffer `i` of a node, or `None` if the buffer has no bytes.
    pub(super) fn piece(&self, node: &PlanNode, i: usize) -> Option<Piece> {
        let region = &self.regions[node.regions.start + i];
        region
            .has_bytes()
            .then(|| region.noted(&self.notes))
            .flatten()
    }

    /// Calls `work` with each of the [`pieces`](Self::pieces). This is faster than the iterator: the call for unchanged
    /// bytes, by far the most frequent, is compiled separately, so that the piece stays in registers.
    #[inline(always)]
    pub(crate) fn each(&self, mut work: impl FnMut(Piece) -> Result<()>) -> Result<()> {
        for region in self.regions.iter().filter(|region| region.has_bytes()) {
            if region.copying == Copying::PLAIN {
                work(region.piece())?;
            } else if let Some(piece) = region.noted(&self.notes) {
                work(piece)?;
            }
        }
        Ok(())
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

    /// Adds a note of what the host changes in a region's bytes.
    pub(super) fn fix(&mut self, fix: Fix) -> Copying {
        self.notes.push(Note::Fix(fix));
        Copying::noted(self.notes.len() - 1)
    }

    /// Combines buffers of one group that an earlier transfer wrote next to each other into one piece; they stay next to each
    /// other. Without `groups` all are of one.
    pub(super) fn join(&mut self, groups: &[u32]) {
        let mut run: Option<Run> = None;
        let regions = self.regions.iter_mut().enumerate();
        for (i, region) in regions.filter(|(_, region)| region.has_bytes()) {
            let group = groups.get(i).copied().unwrap_or(0);
            if region.copying != Copying::WHOLE {
                run = None;
                continue;
            }
            let (base, offset, bytes) = (region.base, region.from, region.bytes);
            let mut next = Run {
                base,
                start: offset,
                end: offset + bytes.next_multiple_of(ALIGNMENT),
                note: self.notes.len(),
                group,
            };
            match run {
                Some(run) if run.base == base && run.end == offset && run.group == group => {
                    (next.start, next.note) = (run.start, run.note);
                    self.notes[run.note] = Note::Run(offset + bytes - run.start);
                    region.copying = Copying::FOLLOWS;
                }
                _ => {
                    self.notes.push(Note::Run(bytes));
                    region.copying = Copying::noted(next.note);
                }
            }
            run = Some(next);
        }
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
        for (i, region) in regions.filter(|(_, region)| region.has_bytes()) {
            let at: &mut usize = &mut ends[group(i)];
            isize::try_from(region.bytes).map_err(|_| too_large())?;
            let mut piece = region.piece();
            let mut alone = region.copying != Copying::FOLLOWS;
            if let Some(note) = region.copying.note() {
                match self.notes[note] {
                    Note::Fix(fix) => piece.fix = fix,
                    Note::Run(_) => alone = false,
                }
            }
            if share && alone {
                match places.entry((piece.src, piece.dst_bytes, piece.fix)) {
                    Entry::Occupied(place) => {
                        region.dst = *place.get();
                        region.copying = Copying::FOLLOWS;
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
            for (i, region) in regions.filter(|(_, region)| region.has_bytes()) {
                region.dst += ends[group(i)];
            }
        }
        Ok(())
    }
}

/// Regions whose sources are next to each other in one allocation.
struct Run {
    /// The allocation, and the first byte and the end of the sources in it.
    base: DevicePtr,
    start: usize,
    end: usize,
    /// The index of the first region's note.
    note: usize,
    group: u32,
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
