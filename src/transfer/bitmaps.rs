//! Validity bitmaps that an export has to read: to count nulls that are not known, and to move bitmaps that start at
//! another bit of a byte than the values. The C data interface has one offset for all buffers. Also the offset that an array
//! without rows must have, and that an import does without.

use std::sync::Arc;

use arrow_buffer::bit_mask::set_bits;

use crate::data::DeviceArray;
use crate::data::gather::Gathering;
use crate::data::layout::BufferKind;
use crate::data::nulls::{nulls_of, read_bitmaps};
use crate::data::parts::{Counted, Parts};
use crate::data::tree::{Node, Tree, View};
use crate::device::{ALIGNMENT, CopyKind, CopyOp, Counters, DeviceId, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, DeviceBufferMut, HostSlab, Memory, Owner, Ready};
use crate::transfer::upload::keep_until;

/// The bitmaps of an array that an export has to read.
#[derive(Debug)]
pub(crate) struct Bitmaps {
    as_batch: bool,
    /// The rows of each part, and what is done with its bitmap.
    parts: Vec<(View, Task)>,
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
}

/// What an export goes on with.
pub(crate) enum Resolved {
    /// The null counts of the parts whose bitmaps were read.
    Counted(Vec<Option<usize>>),
    /// An array that exports as the original would. Its bitmaps start at the bit that the values' offset says, and the
    /// nulls in those that were read are known.
    Moved(DeviceArray),
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

/// What an export does with the bitmap of part `i`. It is moved if it has nulls and there is no whole number of bytes
/// between its first bit and the bit that the values' offset says. With `count` unknown nulls are counted.
#[inline(never)]
fn task(parts: &Parts<'_>, i: usize, node: &Node, view: View, count: bool) -> Task {
    if lacks_offset(parts.tree(), node) {
        return Task::Offset;
    }
    let nulls = parts.null_count(i, node, view);
    if nulls == Some(0) {
        return Task::Nothing;
    }
    let is_batch = parts.is_batch() && i == 0;
    let in_place = is_batch || view.length == 0 || view.bitmap_shift().is_some();
    if !in_place && parts.tree().bitmap_of(node).is_some() {
        return Task::Move;
    }
    match count && nulls.is_none() {
        true => Task::Count,
        false => Task::Nothing,
    }
}

/// Whether a node without rows came without its offset. On the CPU every export has one to give.
fn lacks_offset(tree: &Tree, node: &Node) -> bool {
    let kind = node.layout.buffers().get(1);
    matches!(kind, Some(BufferKind::Offsets { .. }))
        && tree.slots_of(node)[1].is_null()
        && tree.device.id() != DeviceId::CPU
}

impl Bitmaps {
    /// Whether an export has to read bitmaps. With `count` it states all null counts.
    #[inline]
    pub(crate) fn needed(array: &DeviceArray, as_batch: bool, count: bool) -> bool {
        let parts = Parts::of(array, as_batch);
        let mut needed = false;
        parts.each(|i, node, view, _| {
            // Nodes without nulls, and whole ones with known nulls, need no closer look.
            let none = match i {
                0 => parts.null_count(i, node, view) == Some(0),
                _ => node.has_no_nulls(),
            };
            needed = needed
                || node.length == 0 && lacks_offset(parts.tree(), node)
                || !none && {
                    let known = node.nulls.get().is_some() && node.is_all(view);
                    let plain = known && view.offset == view.validity_offset;
                    !plain && task(&parts, i, node, view, count) != Task::Nothing
                };
        });
        needed
    }

    /// Queues the copies of the bitmaps on the device's default queue: one list. Waits only where the host reads them
    /// in place.
    pub(crate) fn start(array: &DeviceArray, as_batch: bool, count: bool) -> Result<Self> {
        let all = Parts::of(array, as_batch);
        let mut parts = Vec::with_capacity(all.len());
        all.each(|i, node, view, _| parts.push((view, task(&all, i, node, view, count))));
        let read = parts.iter().filter(|(_, task)| task.reads());
        let reading = read_bitmaps(array.tree(), read.map(|(view, _)| view), None)?;
        Ok(Self {
            as_batch,
            parts,
            reading,
        })
    }

    /// Waits for the bitmaps: one host wait. `array` is the one of [`start`](Self::start), and keeps the counts.
    /// Bitmaps that move go to one fresh allocation, with one list of copies.
    pub(crate) fn finish(self, array: &DeviceArray) -> Result<Resolved> {
        let bitmaps = self.reading.finish()?;
        let device = array.device();
        // The device's memory is host memory, of which the device itself may have none to give: page-locked memory whose
        // backend is missing. The fresh bitmaps are the device's all the same, as the array is.
        let in_place = device.is_host_readable() && device.is_synchronous();
        let (places, end, staged) = places(&self.parts, in_place)?;
        // In place the staging buffer is the memory.
        let mut staging = match places.is_empty() {
            true => None,
            false => Some(device.host_slab(if in_place { end } else { staged })?),
        };
        let bytes: &mut [u8] = staging.as_deref_mut().unwrap_or_default();
        bytes.fill(0);
        let mut counted = vec![Counted::default(); self.parts.len()];
        let is_bitmap = |place: &&Place| self.parts[place.part].1 == Task::Move;
        let mut moved = places.iter().filter(is_bitmap).peekable();
        let read = (self.parts.iter().enumerate()).filter(|(_, p)| p.1.reads());
        for (request, (part, (view, _))) in read.enumerate() {
            let nulls = match moved.next_if(|place| place.part == part) {
                Some(place) => {
                    let to = &mut bytes[place.staged..][..place.bytes];
                    Counters::add(&device.counters().host_copied_bytes, to.len());
                    let (bits, from) = (bitmaps.bytes(request), view.validity_offset % 8);
                    set_bits(to, bits, view.offset % 8, from, view.length)
                }
                None => nulls_of(&bitmaps, request, view),
            };
            array.keep_null_count(*view, nulls);
            counted[part].nulls = Some(nulls);
        }
        let Some(staging) = staging else {
            let nulls = counted.iter().map(|counted| counted.nulls);
            return Ok(Resolved::Counted(nulls.collect()));
        };
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
            let buffer = DeviceBuffer::from_parts(owner.clone(), base, place.start, bytes);
            counted[place.part].buffer = Some((usize::from(!is_bitmap(&place)), buffer));
        }
        let tree = Parts::of(array, self.as_batch).rebuild(array.data_type(), &counted)?;
        Ok(Resolved::Moved(DeviceArray::from_tree(Arc::new(tree))))
    }
}

/// Where the bitmaps that move go, the bytes of the fresh memory, and those of the staging buffer, which is the fresh
/// memory if it is `in_place`.
fn places(parts: &[(View, Task)], in_place: bool) -> Result<(Vec<Place>, usize, usize)> {
    let (mut places, mut end, mut staged) = (Vec::new(), 0usize, 0usize);
    for (part, (view, task)) in parts.iter().enumerate() {
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
