//! Validity bitmaps that an export has to read: to count nulls that are not known, and to move bitmaps that start at
//! another bit of a byte than the values. The C data interface has one offset for all buffers. Also the offset that an array
//! without rows must have, and that an import does without.

use std::sync::Arc;

use arrow_buffer::bit_mask::set_bits;

use crate::data::DeviceArray;
use crate::data::gather::Gathering;
use crate::data::layout::BufferKind;
use crate::data::node::{Node, NodeBuffer, NullCount, View};
use crate::data::resolve::{nulls_of, read_bitmaps};
use crate::device::{ALIGNMENT, CopyKind, CopyOp, Counters, DeviceId, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBufferMut, HostSlab, Memory, Owner, Ready};
use crate::transfer::upload::keep_until;

/// The bitmaps of an array that an export has to read.
#[derive(Debug)]
pub(crate) struct Bitmaps {
    as_batch: bool,
    /// What is done with each part, in the order of [`View::each_part`].
    tasks: Vec<Task>,
    pub(crate) reading: Gathering,
}

/// What is done with the bitmap of a part.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Task {
    Nothing,
    Count,
    Move,
    /// There are no rows, and no offsets: one is made.
    Offset,
}

impl Task {
    fn reads(self) -> bool {
        matches!(self, Self::Count | Self::Move)
    }

    /// What an export does with a part, `nulls` of whose rows are null. A bitmap is moved if it has nulls and there is no whole
    /// number of bytes between its first bit and the bit that the values' offset says. With `count` unknown nulls are counted.
    fn of(array: &DeviceArray, view: View<'_>, nulls: Option<usize>, export: Export) -> Self {
        if lacks_offset(array, view.node) {
            return Self::Offset;
        }
        if nulls == Some(0) {
            return Self::Nothing;
        }
        let is_batch = export.as_batch && view == array.view();
        let in_place = is_batch || view.length == 0 || view.bitmap_shift().is_some();
        match export.counts && nulls.is_none() {
            _ if !in_place && view.node.bitmap().is_some() => Self::Move,
            true => Self::Count,
            false => Self::Nothing,
        }
    }
}

/// How an array is exported.
#[derive(Clone, Copy)]
pub(crate) struct Export {
    /// The root is exported at offset 0, and its rows are pushed down to its children.
    pub(crate) as_batch: bool,
    /// All null counts are stated.
    pub(crate) counts: bool,
}

/// Whether a node without rows came without its offset. On the CPU every export has one to give.
fn lacks_offset(array: &DeviceArray, node: &Node) -> bool {
    let kind = node.layout.buffers().get(1);
    node.length == 0
        && matches!(kind, Some(BufferKind::Offsets { .. }))
        && node.buffers[1].is_null()
        && array.device().id() != DeviceId::CPU
}

/// What was found in the bitmap of a part, and what replaces it or the offsets.
#[derive(Clone, Default)]
struct Found {
    nulls: Option<usize>,
    /// The number of the buffer, and the one in its place.
    buffer: Option<(usize, NodeBuffer)>,
}

/// Where a bitmap or an offset goes.
struct Place {
    part: usize,
    /// In the fresh memory, in bytes. The first bytes are of rows that are skipped.
    start: usize,
    skipped: usize,
    /// The bytes that hold the rows, and their place in the staging buffer.
    bytes: usize,
    staged: usize,
}

impl Bitmaps {
    /// Whether an export has to read bitmaps.
    pub(crate) fn needed(array: &DeviceArray, export: Export) -> bool {
        let mut needed = false;
        let mut look = |view: View<'_>, nulls| {
            needed = needed || Task::of(array, view, nulls, export) != Task::Nothing;
        };
        let (view, nulls) = (array.view(), array.null_count());
        view.each_part(nulls, export.as_batch, &mut look);
        needed
    }

    /// Queues the copies of the bitmaps on the device's default queue: one list. Waits only where the host reads them
    /// in place.
    pub(crate) fn start(array: &DeviceArray, export: Export) -> Result<Self> {
        let (mut tasks, mut read) = (Vec::new(), Vec::new());
        array
            .view()
            .each_part(array.null_count(), export.as_batch, &mut |view, nulls| {
                let task = Task::of(array, view, nulls, export);
                tasks.push(task);
                if task.reads() {
                    read.push(view);
                }
            });
        Ok(Self {
            as_batch: export.as_batch,
            tasks,
            reading: read_bitmaps(array, read.into_iter(), None)?,
        })
    }

    /// Waits for the bitmaps: one host wait. `array` is the one of [`start`](Self::start), and keeps the counts.
    /// Bitmaps that move go to one fresh allocation, with one list of copies. Returns an array that exports as the original
    /// would. Its bitmaps start at the bit that the values' offset says, and the nulls in those that were read are known.
    pub(crate) fn finish(self, array: &DeviceArray) -> Result<DeviceArray> {
        let bitmaps = self.reading.finish()?;
        let device = array.device();
        let mut parts = Vec::with_capacity(self.tasks.len());
        let mut list = |view, _| parts.push(view);
        array.view().each_part(None, self.as_batch, &mut list);
        // The device's memory is host memory, of which the device itself may have none to give: page-locked memory whose
        // backend is missing. The fresh bitmaps are the device's all the same, as the array is.
        let in_place = device.is_host_readable() && device.is_synchronous();
        let (places, end, staged) = places(&parts, &self.tasks, in_place)?;
        // In place the staging buffer is the memory.
        let mut staging = match places.is_empty() {
            true => None,
            false => Some(device.host_slab(if in_place { end } else { staged })?),
        };
        let bytes: &mut [u8] = staging.as_deref_mut().unwrap_or_default();
        bytes.fill(0);
        let mut found = vec![Found::default(); parts.len()];
        let mut moved = (places.iter())
            .filter(|place| self.tasks[place.part] == Task::Move)
            .peekable();
        let read = (parts.iter().enumerate()).filter(|(part, _)| self.tasks[*part].reads());
        for (request, (part, view)) in read.enumerate() {
            let nulls = match moved.next_if(|place| place.part == part) {
                Some(place) => {
                    let to = &mut bytes[place.staged..][..place.bytes];
                    Counters::add(&device.counters().host_copied_bytes, to.len());
                    let (bits, from) = (bitmaps.bytes(request), view.validity_offset % 8);
                    set_bits(to, bits, view.offset % 8, from, view.length)
                }
                None => nulls_of(&bitmaps, request, *view),
            };
            array.keep_null_count(*view, nulls);
            found[part].nulls = Some(nulls);
        }
        if let Some(staging) = staging {
            let (base, owner) = match in_place {
                true => {
                    let base = staging.as_device_ptr();
                    let memory = Memory::Slab(staging);
                    (base, Owner::new(device.clone(), memory, Ready::Now))
                }
                false => up(&device.default_queue(), &places, end, staging)?,
            };
            let owner = Arc::new(owner);
            for place in &places {
                let bytes = place.skipped + place.bytes;
                let buffer = NodeBuffer::new(&owner, base, place.start, Some(bytes));
                let number = usize::from(self.tasks[place.part] == Task::Offset);
                found[place.part].buffer = Some((number, buffer));
            }
        }
        let node = exported(
            array.view(),
            array.null_count(),
            self.as_batch,
            &mut found.into_iter(),
        );
        Ok(array.like(device.clone(), node))
    }
}

/// The rows of a part and its descendants, with what was found for each. What is the same stays the same node.
fn exported(
    view: View<'_>,
    nulls: Option<usize>,
    as_batch: bool,
    found: &mut impl Iterator<Item = Found>,
) -> Arc<Node> {
    let own = found.next().unwrap_or_default();
    let n = view.node.children.len();
    let child = |i| {
        let child = view.part(i, as_batch);
        exported(child, child.null_count(), false, found)
    };
    let children: Vec<_> = (0..n).map(child).collect();
    let nulls = own.nulls.or(nulls);
    let mut same = children.iter().zip(&view.node.children);
    let is_same = same.all(|(new, old)| Arc::ptr_eq(new, old));
    if own.buffer.is_none() && is_same && !as_batch {
        return view.to_node(nulls);
    }
    let mut node = Node {
        length: view.length,
        cut: view.node.cut || !view.is_all(),
        offset: view.offset,
        validity_offset: view.validity_offset,
        nulls: NullCount::from(nulls),
        children,
        ..Node::clone(view.node)
    };
    if as_batch {
        (node.offset, node.validity_offset) = (0, 0);
    }
    if let Some((i, buffer)) = own.buffer {
        node.buffers[i] = buffer;
        node.validity_offset = node.offset;
    }
    Arc::new(node)
}

/// Where the bitmaps that move go, the bytes of the fresh memory, and those of the staging buffer, which is the fresh
/// memory if it is `in_place`.
fn places(
    parts: &[View<'_>],
    tasks: &[Task],
    in_place: bool,
) -> Result<(Vec<Place>, usize, usize)> {
    let (mut places, mut end, mut staged) = (Vec::new(), 0usize, 0usize);
    for (part, (view, task)) in parts.iter().zip(tasks).enumerate() {
        let skipped = view.offset / 8;
        let bytes = match task {
            Task::Move => (view.offset % 8 + view.length).div_ceil(8),
            // Of 64 bits, which are enough for one of 32; the staging buffer is zeroed.
            Task::Offset => 8,
            Task::Nothing | Task::Count => continue,
        };
        if in_place {
            staged = end + skipped;
        }
        places.push(Place {
            part,
            start: end,
            skipped,
            bytes,
            staged,
        });
        staged += bytes.next_multiple_of(ALIGNMENT);
        end = (skipped + bytes)
            .checked_next_multiple_of(ALIGNMENT)
            .and_then(|bytes| end.checked_add(bytes))
            .ok_or_else(|| Error::argument("the validity bitmaps do not fit in memory"))?;
    }
    Ok((places, end, staged))
}

/// Copies the bitmaps to `bytes` bytes of fresh memory of `queue`'s device: one list, which runs later.
fn up(
    queue: &Queue,
    places: &[Place],
    bytes: usize,
    staging: HostSlab,
) -> Result<(DevicePtr, Owner)> {
    let mut slab = DeviceBufferMut::allocate(queue, bytes)?;
    // No copy covers the bits of rows that are skipped, and the padding.
    slab.fill(0)?;
    let base = slab.address();
    let copy = |place: &Place| CopyOp {
        src: staging.as_device_ptr().offset(place.staged),
        dst: base.offset(place.start + place.skipped),
        bytes: place.bytes,
        kind: CopyKind::HostToDevice,
    };
    let copies: Vec<_> = places.iter().map(copy).collect();
    // SAFETY: sources lie in the staging buffer, which `keep_until` keeps until the copies are done; destinations lie in
    // the slab, which has `bytes` bytes and is freed in the queue's order. `places` laid out both.
    let copied = unsafe { queue.copy(&copies) }.and_then(|()| queue.record());
    let ready = keep_until(queue, copied, staging)?.map_or(Ready::Now, Ready::Event);
    let owner = Owner::new(queue.device().clone(), slab.into_memory(), ready);
    Ok((base, owner))
}
