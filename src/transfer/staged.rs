//! Writing a slab of device memory: unchanged bytes are copied directly, the host makes the others in staging memory.
//! Every byte is written once.

use std::sync::Arc;

use arrow_buffer::bit_mask::set_bits;

use crate::data::nulls::count_bits;
use crate::device::{ALIGNMENT, CopyKind, CopyOp, Counters, Device, DevicePtr, Queue, SyncEvent};
use crate::error::Result;
use crate::memory::{HostSlab, Owner, read_back};
use crate::transfer::fix::{Fix, Piece, fix_in_place, pack};
use crate::transfer::plan::PlanNode;
use crate::transfer::staging;
use crate::transfer::upload::keep_until;

/// The most bytes that are on the host at a time.
pub(super) const STAGED: usize = staging(16 << 20);

/// The content of a slab.
#[derive(Debug, Default)]
pub(super) struct Content {
    pub(super) straight: Vec<Straight>,
    /// Byte offset and number of the bytes that are zero: fewer than 64 each.
    pub(super) zeros: Vec<(usize, usize)>,
    pub(super) tasks: Vec<Task>,
}

/// Bytes that are copied as they are.
#[derive(Debug)]
pub(super) struct Straight {
    pub(super) src: DevicePtr,
    /// Byte offset in the slab.
    pub(super) dst: usize,
    pub(super) bytes: usize,
}

/// Bytes that the host makes.
#[derive(Debug)]
pub(super) struct Task {
    /// Byte offset in the slab.
    pub(super) dst: usize,
    pub(super) bytes: usize,
    /// The number of zero bytes that follow: fewer than 64, or those of a piece's region.
    pub(super) zeros: usize,
    pub(super) rewrite: Rewrite,
}

/// How the host makes bytes.
#[derive(Debug)]
pub(super) enum Rewrite {
    Piece(Piece),
    /// A bitmap, from bits of several; all other bits are zero. The nulls found are added to those of `node`.
    Bits {
        parts: Vec<Bits>,
        node: usize,
    },
    /// Views whose data buffer `i` becomes `indices[i]`.
    Views {
        views: DevicePtr,
        indices: Arc<[u32]>,
    },
    /// Offsets of a dense union, to each of which `starts` of its row's type id is added.
    UnionOffsets {
        offsets: DevicePtr,
        ids: DevicePtr,
        starts: Arc<[i32; 128]>,
    },
}

/// Bits of a bitmap.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bits {
    /// The byte that holds the first bit; `None` if all bits are set.
    pub(super) src: Option<DevicePtr>,
    /// Bits to skip in that byte.
    pub(super) skip: usize,
    /// The first bit in the result.
    pub(super) at: usize,
    /// The number of bits.
    pub(super) bits: usize,
    /// The unset ones are nulls that nobody has counted yet.
    pub(super) counts: bool,
}

impl Bits {
    /// The number of bytes of the source.
    fn bytes(&self) -> usize {
        match self.src {
            Some(_) => (self.skip + self.bits).div_ceil(8),
            None => 0,
        }
    }
}

impl Content {
    /// Whether [`Work::run`] waits: the host reads some of the sources, or makes more than fits in its memory at a time.
    pub(super) fn waits(&self) -> bool {
        self.tasks.iter().any(Task::reads) || groups(&self.tasks).len() > 1
    }

    /// Adds bytes `done..` of a piece, made by the host, with the padding of its region.
    pub(super) fn piece(&mut self, piece: &Piece, mut done: usize) {
        let end = piece.dst + piece.region();
        while done < piece.dst_bytes {
            let part = piece.part(done, STAGED.min(piece.dst_bytes - done));
            done += part.dst_bytes;
            let zeros = match done == piece.dst_bytes {
                true => end - part.dst - part.dst_bytes,
                false => 0,
            };
            self.tasks.push(Task {
                dst: part.dst,
                bytes: part.dst_bytes,
                zeros,
                rewrite: Rewrite::Piece(part),
            });
        }
    }
}

impl Task {
    /// The source that is staged where the result is made.
    fn source(&self) -> Option<(DevicePtr, usize)> {
        match &self.rewrite {
            Rewrite::Piece(piece) => Some((piece.src, piece.src_bytes())).filter(|s| s.1 > 0),
            Rewrite::Bits { .. } => None,
            Rewrite::Views { views, .. } => Some((*views, self.bytes)),
            Rewrite::UnionOffsets { offsets, .. } => Some((*offsets, self.bytes)),
        }
    }

    /// The other sources.
    fn others(&self) -> Vec<(DevicePtr, usize)> {
        match &self.rewrite {
            Rewrite::Piece(_) | Rewrite::Views { .. } => Vec::new(),
            Rewrite::Bits { parts, .. } => {
                let sources = parts
                    .iter()
                    .filter_map(|part| Some((part.src?, part.bytes())));
                sources.collect()
            }
            Rewrite::UnionOffsets { ids, .. } => vec![(*ids, self.bytes / 4)],
        }
    }

    /// Whether the task has a source.
    fn reads(&self) -> bool {
        self.source().is_some() || !self.others().is_empty()
    }

    /// The number of bytes for the result and the source that is staged there.
    fn region(&self) -> usize {
        let source = self.source().map_or(0, |(_, bytes)| bytes);
        let result = self.bytes + self.zeros;
        result.max(source).next_multiple_of(ALIGNMENT)
    }

    /// Makes the result at the start of `region`, and zeroes the rest. The source that belongs there is there.
    ///
    /// # Safety
    /// `others` are the addresses of the other sources, in order, readable by the host for their lengths, and outside
    /// of `region`.
    unsafe fn make(
        &self,
        ready: &[u8],
        nodes: &[PlanNode],
        others: &[DevicePtr],
        region: &mut [u8],
    ) {
        match &self.rewrite {
            Rewrite::Piece(piece) => {
                fix_in_place(piece, ready, region);
                count_nulls(piece, nodes, region);
                return;
            }
            Rewrite::Bits { parts, node } => {
                region.fill(0);
                let mut others = others.iter();
                let mut found = 0;
                for part in parts {
                    let Some(from) = part.src.and_then(|_| others.next()) else {
                        set_ones(region, part.at, part.bits);
                        continue;
                    };
                    // SAFETY: the caller guarantees that the source, which is one of `others`, is readable for its length and
                    // outside of the region.
                    let from = unsafe {
                        std::slice::from_raw_parts(from.as_ptr().cast::<u8>(), part.bytes())
                    };
                    let unset = set_bits(region, from, part.at, part.skip, part.bits);
                    found += if part.counts { unset } else { 0 };
                }
                if found > 0 {
                    let nulls = &nodes[*node].nulls;
                    nulls.set(nulls.get().unwrap_or(0) + found);
                }
                return;
            }
            Rewrite::Views { indices, .. } => {
                for view in region[..self.bytes].chunks_exact_mut(16) {
                    // Length, prefix, index and offset; at most 12 bytes are in the view itself.
                    let [length, _, index, _] = words(view);
                    if length > 12 {
                        if let Some(new) = indices.get(index as usize) {
                            view[8..12].copy_from_slice(&new.to_ne_bytes());
                        }
                    }
                }
            }
            Rewrite::UnionOffsets { starts, .. } => {
                let rows = self.bytes / 4;
                let ids = others.first().filter(|_| rows > 0);
                let ids = ids.map_or(&[][..], |ids| {
                    // SAFETY: the caller guarantees that the type ids, the only other source, are readable for their length,
                    // which is one byte for each offset, and outside of the region.
                    unsafe { std::slice::from_raw_parts(ids.as_ptr().cast::<i8>(), rows) }
                });
                for (offset, id) in region.chunks_exact_mut(4).zip(ids) {
                    let start = usize::try_from(*id).map_or(0, |id| starts[id]);
                    let old = i32::from_ne_bytes([offset[0], offset[1], offset[2], offset[3]]);
                    offset.copy_from_slice(&old.wrapping_add(start).to_ne_bytes());
                }
            }
        }
        region[self.bytes..].fill(0);
    }

    /// Makes the result at the start of `region`, from sources that the host reads where they are.
    ///
    /// # Safety
    /// The sources are readable host memory for their lengths, and outside of `region`, which has room for the result
    /// and the source that belongs there.
    pub(super) unsafe fn make_in_place(&self, ready: &[u8], nodes: &[PlanNode], region: &mut [u8]) {
        if let Rewrite::Piece(piece) = &self.rewrite {
            // SAFETY: the caller guarantees a readable source of the piece's length outside of the region.
            unsafe { pack(piece, ready, 0, region) };
            region[self.bytes..].fill(0);
            return count_nulls(piece, nodes, region);
        }
        if let Some((src, bytes)) = self.source() {
            // SAFETY: the caller guarantees a readable source outside of the region, which has room for it.
            unsafe {
                let src = src.as_ptr().cast::<u8>().cast_const();
                src.copy_to_nonoverlapping(region[..bytes].as_mut_ptr(), bytes);
            }
        }
        let others: Vec<_> = self.others().into_iter().map(|(src, _)| src).collect();
        // SAFETY: these are the addresses of the other sources, which the caller guarantees to be readable and outside of
        // the region.
        unsafe { self.make(ready, nodes, &others, region) }
    }
}

/// The four integers of a view.
fn words(view: &[u8]) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(view.chunks_exact(4)) {
        *word = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    words
}

/// Sets `bits` bits from bit `at` on.
fn set_ones(bytes: &mut [u8], at: usize, bits: usize) {
    let (first, last) = (at.div_ceil(8), (at + bits) / 8);
    let mut each = |bits: std::ops::Range<usize>| {
        bits.for_each(|bit| bytes[bit / 8] |= 1 << (bit % 8));
    };
    if first >= last {
        return each(at..at + bits);
    }
    each(at..first * 8);
    each(last * 8..at + bits);
    bytes[first..last].fill(0xFF);
}

/// Counts the nulls of a part of a node's validity bitmap, if they are to be counted.
fn count_nulls(piece: &Piece, nodes: &[PlanNode], region: &[u8]) {
    if let Fix::Bits {
        counts: Some(next), ..
    } = piece.fix
    {
        // Parts of a bitmap follow each other; the bits after the last row are zero.
        let ones = count_bits(region, 0, piece.dst_bytes * 8);
        let node = &nodes[next.get() as usize - 1];
        let nulls = node.nulls.get().unwrap_or(node.length);
        node.nulls.set(nulls.saturating_sub(ones));
    }
}

/// Where the bytes of a slab come from, and the queue that writes them.
pub(super) struct Work<'a> {
    pub(super) queue: &'a Queue,
    /// The device of the sources.
    pub(super) from: &'a Device,
    /// The owners of the sources.
    pub(super) owners: &'a [Arc<Owner>],
    /// What [`Fix::Ready`] refers to.
    pub(super) ready: &'a [u8],
    /// The nodes of the result, whose null counts are completed.
    pub(super) nodes: &'a [PlanNode],
    /// The sources are known to be ready.
    pub(super) is_ready: bool,
}

impl Work<'_> {
    /// Writes a slab at `base` with one list of copies. What the host makes is read first, with one list and one wait for
    /// each [`STAGED`] bytes; all but the last of those also take a list and a wait on the way back. The longest piece of
    /// padding is filled with zeros, and copied to the others by the same list. `sources` lives until the copies are done,
    /// of which the event is returned.
    ///
    /// # Safety
    /// The sources lie in memory of the owners, which `sources` keeps alive. The slab is fresh memory of the queue's device,
    /// has room for all of the content, which does not overlap, and is freed in the queue's order.
    pub(super) unsafe fn run<T: Send + 'static>(
        &self,
        base: DevicePtr,
        content: Content,
        sources: T,
    ) -> Result<Option<SyncEvent>> {
        let queue = self.queue;
        let mut copies = Vec::with_capacity(content.straight.len() + content.zeros.len());
        copies.extend(content.straight.iter().map(|straight| CopyOp {
            src: straight.src,
            dst: base.offset(straight.dst),
            bytes: straight.bytes,
            kind: CopyKind::DeviceToDevice,
        }));
        if let Some(longest) = content.zeros.iter().max_by_key(|zeros| zeros.1) {
            let src = base.offset(longest.0);
            // SAFETY: the caller guarantees room for these zeros in the slab, which is freed after the fill.
            unsafe { queue.fill(src, 0, longest.1) }?;
            let others = content.zeros.iter().filter(|zeros| zeros.0 != longest.0);
            copies.extend(others.map(|(at, bytes)| CopyOp {
                src,
                dst: base.offset(*at),
                bytes: *bytes,
                kind: CopyKind::DeviceToDevice,
            }));
        }
        // A host that can read the source, or has read some of it, knows that it is ready.
        let waited =
            self.is_ready || self.from.is_host_readable() || content.tasks.iter().any(Task::reads);
        let mut staged = None;
        let mut groups = groups(&content.tasks).into_iter().peekable();
        while let Some(group) = groups.next() {
            // SAFETY: the caller guarantees that the sources lie in memory of the owners.
            let (staging, ups) = unsafe { self.on_host(group, base) }?;
            if groups.peek().is_some() {
                // SAFETY: sources lie in the staging slab, which `read_back` keeps; destinations lie in the device slab, which
                // is freed in the queue's order, and has room for them (the caller guarantees both).
                unsafe { read_back(queue, &[], &ups, staging) }?;
            } else {
                copies.extend(ups);
                staged = Some(staging);
            }
        }
        if !waited {
            for owner in self.owners {
                owner.wait_on(queue)?;
            }
        }
        // SAFETY: sources lie in memory that `sources` keeps alive (the caller guarantees it), in the staging slab, both of
        // which `keep_until` keeps until the copies are done, and in the zeros of the device slab, which no copy writes. The
        // caller guarantees that the device slab has room for every destination, and is freed in the queue's order.
        unsafe { queue.copy(&copies) }?;
        keep_until(queue, queue.record(), (sources, staged))
    }

    /// Makes the results of `tasks` in staging memory; returns it with the copies from there to a slab at `base`.
    ///
    /// # Safety
    /// The sources lie in memory of the owners.
    unsafe fn on_host(&self, tasks: &[Task], base: DevicePtr) -> Result<(HostSlab, Vec<CopyOp>)> {
        let (from, to) = (self.from, self.queue.device());
        let readable = from.is_host_readable();
        let mut staging = to.host_slab(tasks.iter().map(room).sum())?;
        let start = staging.as_device_ptr();
        let (mut downs, mut ups) = (Vec::new(), Vec::new());
        // Where the other sources of all tasks are, in order.
        let mut others = Vec::new();
        let mut at = 0;
        for task in tasks {
            ups.push(CopyOp {
                src: start.offset(at),
                dst: base.offset(task.dst),
                bytes: task.bytes + task.zeros,
                kind: CopyKind::HostToDevice,
            });
            let mut down = |(src, bytes), at| {
                let dst = start.offset(at);
                downs.push(CopyOp {
                    src,
                    dst,
                    bytes,
                    kind: CopyKind::DeviceToHost,
                });
                dst
            };
            if let Some(source) = task.source() {
                down(source, at);
            }
            at += task.region();
            for source in task.others() {
                others.push(down(source, at));
                at += source.1.next_multiple_of(ALIGNMENT);
            }
        }
        if !readable && !downs.is_empty() {
            let queue = match from == to {
                true => self.queue.clone(),
                false => from.default_queue(),
            };
            // SAFETY: the caller guarantees that the sources lie in memory of the owners; the slab has room for the sources of
            // each task (`room`).
            staging = unsafe { read_back(&queue, self.owners, &downs, staging) }?;
        }
        let mut rest = &mut staging[..];
        let mut others = &others[..];
        for task in tasks {
            let (here, next) = rest.split_at_mut(room(task));
            rest = next;
            let (region, _) = here.split_at_mut(task.region());
            let (own, next) = others.split_at(task.others().len());
            others = next;
            // SAFETY: where the host can read the sources, they are ready, because plans of such arrays wait for them; the
            // staging slab is fresh memory. Elsewhere they were just copied to the slab, beyond the region.
            unsafe {
                match readable {
                    true => task.make_in_place(self.ready, self.nodes, region),
                    false => task.make(self.ready, self.nodes, own, region),
                }
            }
            Counters::add(&to.counters().host_copied_bytes, task.bytes);
        }
        Ok((staging, ups))
    }
}

/// The staging memory that a task takes, in bytes.
fn room(task: &Task) -> usize {
    let others = task.others().into_iter();
    task.region()
        + others
            .map(|(_, bytes)| bytes.next_multiple_of(ALIGNMENT))
            .sum::<usize>()
}

/// Divides tasks into groups that are staged together: of at most [`STAGED`] bytes, or of one task.
fn groups(tasks: &[Task]) -> Vec<&[Task]> {
    let mut groups = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, task) in tasks.iter().enumerate() {
        let more = room(task);
        if i > start && bytes + more > STAGED {
            groups.push(&tasks[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes += more;
    }
    if start < tasks.len() {
        groups.push(&tasks[start..]);
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ones_anywhere() {
        for at in 0..20 {
            for bits in 0..40 {
                let mut bytes = [0; 8];
                set_ones(&mut bytes, at, bits);
                let expected = ((1u64 << bits) - 1) << at;
                assert_eq!(u64::from_le_bytes(bytes), expected, "{bits} from {at}");
            }
        }
    }
}
