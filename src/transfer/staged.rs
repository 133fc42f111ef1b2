//! Writing a slab of device memory: unchanged bytes are copied directly, the host makes the others in staging memory.
//! Every byte is written once.

use std::sync::Arc;

use crate::data::resolve::count_bits;
use crate::device::{ALIGNMENT, CopyKind, CopyOp, Counters, Device, DevicePtr, Queue, SyncEvent};
use crate::error::Result;
use crate::memory::{HostSlab, Owner, read_back};
use crate::transfer::fix::{Fix, Made, Piece, fix_in_place, pack};
use crate::transfer::plan::{Plan, PlanNode};
use crate::transfer::staging;
use crate::transfer::upload::keep_until;

/// The most bytes that are on the host at a time.
pub(super) const STAGED: usize = staging(16 << 20);

/// The content of a slab.
#[derive(Debug, Default)]
pub(super) struct Content {
    straight: Vec<Straight>,
    /// Byte offset and number of the bytes that are zero: fewer than 64 each.
    zeros: Vec<(usize, usize)>,
    tasks: Vec<Task>,
}

/// Bytes that are copied as they are.
#[derive(Debug)]
struct Straight {
    src: DevicePtr,
    /// Byte offset in the slab.
    dst: usize,
    bytes: usize,
}

/// Bytes that the host makes.
#[derive(Debug)]
struct Task {
    piece: Piece,
    /// The number of zero bytes that follow: those of a region that ends its buffer.
    zeros: usize,
}

impl Content {
    /// Returns what of a plan is copied directly, and what the host makes.
    pub(super) fn of(plan: &Plan) -> Self {
        let mut content = Self::default();
        for (piece, padded) in plan.pieces() {
            let (straight, region) = (piece.straight(), piece.region());
            let all = straight == piece.dst_bytes;
            // The padding comes along where the source has it.
            let bytes = if all && padded { region } else { straight };
            if bytes > 0 {
                content.straight.push(Straight {
                    src: piece.src,
                    dst: piece.dst,
                    bytes,
                });
            }
            if all && bytes < region {
                content.zeros.push((piece.dst + bytes, region - bytes));
            }
            content.tasks(&piece, straight);
        }
        content
    }

    /// Adds bytes `done..` of a piece, made by the host, with the padding of its region.
    fn tasks(&mut self, piece: &Piece, mut done: usize) {
        while done < piece.dst_bytes {
            let part = piece.part(done, STAGED.min(piece.dst_bytes - done));
            done += part.dst_bytes;
            let zeros = match part.last {
                true => piece.dst + piece.region() - part.dst - part.dst_bytes,
                false => 0,
            };
            self.tasks.push(Task { piece: part, zeros });
        }
    }
}

impl Task {
    /// The bytes of the source that is staged where the result is made.
    fn source(&self) -> usize {
        self.piece.src_bytes()
    }

    /// The other sources.
    fn others(&self, made: &Made) -> Vec<(DevicePtr, usize)> {
        match self.piece.fix {
            Fix::Union { ids, .. } => vec![(ids, self.piece.dst_bytes / 4)],
            Fix::Join(i) => {
                let parts = made.joins[i as usize].parts.iter();
                parts
                    .filter_map(|part| Some((part.src?, part.bytes())))
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    /// Whether the task has a source.
    fn reads(&self, made: &Made) -> bool {
        self.source() > 0 || !self.others(made).is_empty()
    }

    /// The number of bytes for the result and the source that is staged there.
    fn region(&self) -> usize {
        let result = self.piece.dst_bytes + self.zeros;
        result.max(self.source()).next_multiple_of(ALIGNMENT)
    }

    /// The staging memory that the task takes, in bytes.
    fn room(&self, made: &Made) -> usize {
        let others = self.others(made).into_iter();
        self.region()
            + others
                .map(|(_, bytes)| bytes.next_multiple_of(ALIGNMENT))
                .sum::<usize>()
    }

    /// Makes the result at the start of `region`, and zeroes the rest. With `others` its sources have been staged, its own at the start
    /// of the region, and the others there; without, the host reads them where they are.
    ///
    /// # Safety
    /// The sources are readable by the host for their lengths, and outside of `region`, except the task's own if it is staged.
    unsafe fn make(
        &self,
        made: &Made,
        nodes: &[PlanNode],
        others: Option<&[DevicePtr]>,
        region: &mut [u8],
    ) {
        let bytes = self.piece.dst_bytes;
        let found = match (others, self.piece.fix) {
            // SAFETY: the caller guarantees the sources.
            (Some(others), _) => unsafe { fix_in_place(&self.piece, made, others, region) },
            (None, Fix::Join(_)) => {
                let others: Vec<_> = self.others(made).into_iter().map(|(src, _)| src).collect();
                // SAFETY: these are the addresses of the sources, which the caller guarantees.
                unsafe { fix_in_place(&self.piece, made, &others, region) }
            }
            (None, _) => {
                // SAFETY: the caller guarantees the sources.
                unsafe { pack(&self.piece, made, 0, &mut region[..bytes]) };
                region[bytes..].fill(0);
                0
            }
        };
        self.count(made, nodes, found, region);
    }

    /// Counts the nulls of a part of a node's validity bitmap, if they are to be counted.
    fn count(&self, made: &Made, nodes: &[PlanNode], found: usize, region: &[u8]) {
        match self.piece.fix {
            Fix::Bits {
                counts: Some(node), ..
            } => {
                // Parts of a bitmap follow each other; the bits after the last row are zero.
                let ones = count_bits(region, 0, self.piece.dst_bytes * 8);
                let node = &nodes[node as usize];
                let nulls = node.nulls.get().unwrap_or(node.length);
                node.nulls.set(nulls.saturating_sub(ones));
            }
            Fix::Join(i) if found > 0 => {
                let nulls = &nodes[made.joins[i as usize].node].nulls;
                nulls.set(nulls.get().unwrap_or(0) + found);
            }
            _ => {}
        }
    }
}

/// Where the bytes of a slab come from, and the queue that writes them.
pub(super) struct Work<'a> {
    pub(super) queue: &'a Queue,
    /// The device of the sources.
    pub(super) from: &'a Device,
    /// The owners of the sources.
    pub(super) owners: &'a [Arc<Owner>],
    /// Its nodes' null counts are completed.
    pub(super) plan: &'a Plan,
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
        let made = &self.plan.made;
        let reads = || content.tasks.iter().any(|task| task.reads(made));
        let waited = self.from.is_host_readable() || reads();
        let mut staged = None;
        let mut groups = groups(&content.tasks, made).into_iter().peekable();
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
        let (from, to, made) = (self.from, self.queue.device(), &self.plan.made);
        let readable = from.is_host_readable();
        let mut staging = to.host_slab(tasks.iter().map(|task| task.room(made)).sum())?;
        let start = staging.as_device_ptr();
        let (mut downs, mut ups) = (Vec::new(), Vec::new());
        // Where the other sources of all tasks are, in order.
        let mut others = Vec::new();
        let mut at = 0;
        for task in tasks {
            ups.push(CopyOp {
                src: start.offset(at),
                dst: base.offset(task.piece.dst),
                bytes: task.piece.dst_bytes + task.zeros,
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
            if task.source() > 0 {
                down((task.piece.src, task.source()), at);
            }
            at += task.region();
            for source in task.others(made) {
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
            let (here, next) = rest.split_at_mut(task.room(made));
            rest = next;
            let (region, _) = here.split_at_mut(task.region());
            let (own, next) = others.split_at(task.others(made).len());
            others = next;
            // SAFETY: where the host can read the sources, they are ready, because plans of such arrays wait for them; the
            // staging slab is fresh memory. Elsewhere they were just copied to the slab, beyond the region.
            unsafe { task.make(made, &self.plan.nodes, (!readable).then_some(own), region) };
            Counters::add(&to.counters().host_copied_bytes, task.piece.dst_bytes);
        }
        Ok((staging, ups))
    }
}

/// Divides tasks into groups that are staged together: of at most [`STAGED`] bytes, or of one task.
fn groups<'a>(tasks: &'a [Task], made: &Made) -> Vec<&'a [Task]> {
    let mut groups = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, task) in tasks.iter().enumerate() {
        let more = task.room(made);
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
