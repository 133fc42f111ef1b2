//! Validity bitmaps that start at another bit than the values, moved for an export: the C data interface
//! has one offset for all buffers.

use std::sync::Arc;

use arrow_buffer::bit_mask::set_bits;

use crate::data::DeviceArray;
use crate::data::hidden::{Gathering, bitmap_request, count_bits};
use crate::data::parts::{Counted, Parts};
use crate::data::tree::{Node, View};
use crate::device::{ALIGNMENT, CopyKind, CopyOp, Counters, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, DeviceBufferMut, HostSlab, Memory, Owner, Ready};
use crate::transfer::upload::keep_until;

/// Whether an export of `array` has to move bitmaps; see [`Realigning`].
#[inline]
pub(crate) fn is_misaligned(array: &DeviceArray, as_batch: bool) -> bool {
    let nodes = &array.tree().nodes;
    nodes.iter().any(|n| n.offset != n.validity_offset) && {
        let parts = Parts::of(array, as_batch);
        (0..parts.len()).any(|i| {
            let (node, view) = parts.get(i);
            moves(&parts, i, node, view)
        })
    }
}

/// Whether the bitmap of part `i` must be moved: it matters, and no whole number of bytes lies between its
/// first bit and where the values' offset says that it is.
fn moves(parts: &Parts<'_>, i: usize, node: &Node, view: View) -> bool {
    let is_batch = parts.is_batch() && i == 0;
    view.length > 0
        && view.bitmap_shift().is_none()
        && !is_batch
        && parts.tree().bitmap_of(node).is_some()
        && parts.null_count(i, node, view) != Some(0)
}

/// Bitmaps on their way to the host, which moves them.
#[derive(Debug)]
pub(crate) struct Realigning {
    as_batch: bool,
    /// The rows of each part, and what is to be done.
    parts: Vec<(View, Task)>,
    bitmaps: Gathering,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Task {
    Nothing,
    Count,
    Move,
}

/// Where a bitmap goes.
struct Place {
    part: usize,
    /// In the fresh memory, in bytes: the bitmap, of which the first bytes are of rows that are skipped.
    start: usize,
    skipped: usize,
    /// What holds the rows: bytes, and where they are in the staging buffer.
    bytes: usize,
    staged: usize,
}

impl Realigning {
    /// Gives the copies of the bitmaps to the device's default queue: one list. `count`: of those whose nulls
    /// are not known too. Waits only where the host reads them itself.
    pub(crate) fn start(array: &DeviceArray, as_batch: bool, count: bool) -> Result<Self> {
        let all = Parts::of(array, as_batch);
        let parts: Vec<_> = (0..all.len())
            .map(|i| {
                let (node, view) = all.get(i);
                let unknown = || all.null_count(i, node, view).is_none();
                let task = match moves(&all, i, node, view) {
                    true => Task::Move,
                    false if count && unknown() => Task::Count,
                    false => Task::Nothing,
                };
                (view, task)
            })
            .collect();
        let read = parts.iter().filter(|(_, task)| *task != Task::Nothing);
        let requests: Vec<_> = read
            .map(|(view, _)| bitmap_request(array.tree(), view))
            .collect();
        // SAFETY: what `bitmap_request` asks for lies in the bitmap, to which nobody writes.
        let bitmaps = unsafe { Gathering::start(array.tree(), &requests, None) }?;
        Ok(Self {
            as_batch,
            parts,
            bitmaps,
        })
    }

    /// When the bitmaps are there; `None` if they are.
    #[cfg(feature = "async")]
    pub(crate) fn event(&self) -> Option<&crate::device::SyncEvent> {
        self.bitmaps.event()
    }

    /// The event was waited for: [`finish`](Self::finish) does not wait again.
    #[cfg(feature = "async")]
    pub(crate) fn waited(&mut self) {
        self.bitmaps.waited();
    }

    /// Makes this thread wait for the bitmaps: one host wait. Returns an array that exports as `array`, that of
    /// [`start`](Self::start), would: its bitmaps are where the values' offsets say, and the nulls in those that
    /// were read are known. Bitmaps that moved lie in one fresh allocation, and share one copy to it.
    pub(crate) fn finish(self, array: &DeviceArray) -> Result<DeviceArray> {
        let answers = self.bitmaps.finish()?;
        let device = array.device();
        // The device's memory is host memory, of which the device itself may have none to give: page-locked memory
        // whose backend is missing. The fresh bitmaps are the device's all the same, as the array is.
        let in_place = device.is_host_readable() && device.is_synchronous();
        let (mut places, mut end, mut staged) = (Vec::new(), 0usize, 0usize);
        for (part, (view, _)) in (self.parts.iter().enumerate()).filter(|(_, p)| p.1 == Task::Move)
        {
            let skipped = view.offset / 8;
            let bytes = (view.offset % 8 + view.length).div_ceil(8);
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
                .ok_or_else(|| Error::argument("the bitmaps do not fit in memory"))?;
        }
        // In place the staging buffer is the memory.
        let mut staging = device.host_slab(if in_place { end } else { staged })?;
        staging.fill(0);
        let mut counted = vec![Counted::default(); self.parts.len()];
        let mut moved = places.iter().peekable();
        let read = (self.parts.iter().enumerate()).filter(|(_, p)| p.1 != Task::Nothing);
        for (request, (part, (view, _))) in read.enumerate() {
            let (bits, from) = (answers.bytes(request), view.validity_offset % 8);
            let nulls = match moved.next_if(|place| place.part == part) {
                Some(place) => {
                    let to = &mut staging[place.staged..][..place.bytes];
                    Counters::add(&device.counters().host_copied_bytes, to.len());
                    set_bits(to, bits, view.offset % 8, from, view.length)
                }
                None => view.length - count_bits(bits, from, view.length),
            };
            array.tree().keep_null_count(*view, nulls);
            if part == 0 {
                array.set_null_count(nulls);
            }
            counted[part].nulls = Some(nulls);
        }
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
            let bitmap = DeviceBuffer::from_parts(owner.clone(), base, place.start, bytes);
            counted[place.part].bitmap = Some(bitmap);
        }
        let tree = Parts::of(array, self.as_batch).rebuild(array.data_type(), &counted)?;
        Ok(DeviceArray::from_tree(Arc::new(tree)))
    }
}

/// Copies the bitmaps to `bytes` bytes of fresh memory of `queue`'s device, one list that runs later.
fn up(
    queue: &Queue,
    places: &[Place],
    bytes: usize,
    staging: HostSlab,
) -> Result<(DevicePtr, Owner)> {
    let mut slab = DeviceBufferMut::allocate(queue, bytes)?;
    // What no copy covers: bits of rows that are skipped, and padding.
    slab.fill(0)?;
    let base = slab.address();
    let copy = |place: &Place| CopyOp {
        src: staging.as_device_ptr().offset(place.staged),
        dst: base.offset(place.start + place.skipped),
        bytes: place.bytes,
        kind: CopyKind::HostToDevice,
    };
    let copies: Vec<_> = places.iter().map(copy).collect();
    // SAFETY: sources lie in the staging buffer, which is kept until the copies are done; destinations lie in
    // `bytes` bytes of the slab, which is freed in the queue's order. `finish` laid out both.
    let copied = unsafe { queue.copy(&copies) }.and_then(|()| queue.record());
    let ready = keep_until(queue, copied, staging)?.map_or(Ready::Now, Ready::Event);
    let owner = Owner::new(queue.device().clone(), slab.into_memory(), ready);
    Ok((base, owner))
}
