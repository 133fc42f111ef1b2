//! Arrays that lie in staging memory already, such as what was read from a file: their bytes are copied to a device as they are.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use arrow_data::ArrayData;

use crate::data::host::wrap_batch;
use crate::data::tree::{Owners, Slot, Tree};
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{ALIGNMENT, CopyKind, CopyOp, Counters, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBufferMut, Owner, Ready};
use crate::transfer::upload::keep_until;

/// Staging memory, and other memory that is used again and again, by its first address. What was copied of it once is not copied again.
#[derive(Debug, Default)]
pub(crate) struct Staged(BTreeMap<usize, Region>);

#[derive(Debug)]
struct Region {
    memory: Buffer,
    kind: Kind,
    placed: Option<Arc<Placed>>,
}

/// How a region's memory gets to a device.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// In parts, from where they are.
    Staged,
    /// The same; all buffers begin at multiples of 64, and the bytes between them and up to the end are zero.
    Aligned,
    /// As a whole, by way of staging memory.
    Elsewhere,
}

/// A copy of parts of a region, in an allocation of a device.
#[derive(Debug)]
struct Placed {
    owner: Arc<Owner>,
    base: DevicePtr,
    runs: Vec<Run>,
}

/// Addresses of the host that were copied with one copy, and where that is in the allocation, in bytes.
#[derive(Debug)]
struct Run {
    from: Range<usize>,
    to: usize,
}

impl Placed {
    /// Returns where bytes of the host are in the allocation.
    fn find(&self, part: &Range<usize>) -> Option<usize> {
        let after = self
            .runs
            .partition_point(|run| run.from.start <= part.start);
        let run = self.runs.get(after.checked_sub(1)?)?;
        (part.end <= run.from.end).then(|| run.to + (part.start - run.from.start))
    }
}

/// Sorts and merges ranges of addresses where one copy can take them together: those that overlap, and in `aligned` memory those that
/// follow each other with nothing but padding between them. Returns the runs, and the bytes of all with their padding; `None` if
/// these do not fit in memory.
fn runs(mut ranges: Vec<Range<usize>>, aligned: bool) -> Option<(Vec<Run>, usize)> {
    ranges.sort_unstable_by_key(|range| (range.start, range.end));
    let mut runs: Vec<Run> = Vec::new();
    let mut bytes = 0usize;
    for range in ranges {
        let last = runs.last_mut().filter(|Run { from, .. }| {
            let padded = from.len().next_multiple_of(ALIGNMENT);
            range.start < from.end || (aligned && range.start - from.start <= padded)
        });
        let run = match last {
            Some(run) => {
                run.from.end = run.from.end.max(range.end);
                run
            }
            None => {
                runs.push(Run {
                    from: range,
                    to: bytes,
                });
                runs.last_mut()?
            }
        };
        let padded = run.from.len().checked_next_multiple_of(ALIGNMENT)?;
        bytes = run.to.checked_add(padded)?;
    }
    Some((runs, bytes))
}

/// Copies parts of a region to a fresh allocation of `queue`'s device: one copy for each run. The padding behind each is zero.
fn place(queue: &Queue, region: &Region, parts: Vec<Range<usize>>) -> Result<Placed> {
    let memory = &region.memory;
    // A part that begins elsewhere has no padding of its own.
    let mut begins = parts.iter().map(|part| part.start);
    let aligned = region.kind == Kind::Aligned && begins.all(|start| start % ALIGNMENT == 0);
    let (runs, bytes) = runs(parts, aligned).ok_or_else(too_long)?;
    let mut slab = DeviceBufferMut::allocate(queue, bytes)?;
    if !aligned {
        slab.fill(0)?;
    }
    let base = slab.address();
    let copy = |run: &Run| CopyOp {
        src: DevicePtr::new(memory.as_ptr().with_addr(run.from.start).cast_mut().cast()),
        dst: base.offset(run.to),
        bytes: match aligned {
            true => run.from.len().next_multiple_of(ALIGNMENT),
            false => run.from.len(),
        },
        kind: CopyKind::HostToDevice,
    };
    let copies: Vec<_> = runs.iter().map(copy).collect();
    // SAFETY: the sources lie in `memory`, which `keep_until` keeps until the copies are done, even after an error: each part does
    // (`Staged::find`), and so does the padding behind it, since all parts begin, and aligned memory ends, at multiples of 64.
    // The destinations are apart from each other and within `bytes` bytes of the slab, as `runs` laid them out; it is freed in the
    // queue's order.
    let copied = unsafe { queue.copy(&copies) }.and_then(|()| queue.record());
    let ready = keep_until(queue, copied, memory.clone())?.map_or(Ready::Now, Ready::Event);
    let owner = Owner::new(queue.device().clone(), slab.into_memory(), ready);
    let owner = Arc::new(owner);
    Ok(Placed { owner, base, runs })
}

/// Copies parts of host memory to staging memory, and from there to a fresh allocation of `queue`'s device; `None` if there are none.
///
/// # Safety
/// The parts are initialised memory that nobody writes meanwhile.
unsafe fn pack(queue: &Queue, mut parts: Vec<(DevicePtr, usize)>) -> Result<Option<Arc<Placed>>> {
    if parts.is_empty() {
        return Ok(None);
    }
    parts.sort_unstable_by_key(|(base, length)| (base.address(), *length));
    parts.dedup();
    let (mut packed, mut bytes) = (Vec::with_capacity(parts.len()), 0usize);
    for (base, length) in &parts {
        let (from, to) = (base.address()..base.address() + length, bytes);
        let padded = from.len().checked_next_multiple_of(ALIGNMENT);
        let end = padded.and_then(|padded| bytes.checked_add(padded));
        bytes = end.ok_or_else(too_long)?;
        packed.push(Run { from, to });
    }
    let mut slab = queue.device().host_slab(bytes)?;
    for ((base, length), Run { to, .. }) in parts.iter().zip(&packed) {
        let (src, end) = (base.as_ptr().cast::<u8>(), to + length);
        // SAFETY: the caller guarantees initialised bytes that nobody writes (see `# Safety`).
        slab[*to..end].copy_from_slice(unsafe { std::slice::from_raw_parts(src, *length) });
        slab[end..end.next_multiple_of(ALIGNMENT)].fill(0);
        Counters::add(&queue.device().counters().host_copied_bytes, *length);
    }
    let memory = slab.into_buffer();
    let all = memory.as_ptr().addr()..memory.as_ptr().addr() + bytes;
    let region = Region {
        memory,
        kind: Kind::Aligned,
        placed: None,
    };
    let placed = place(queue, &region, vec![all])?;
    Ok(Some(Arc::new(Placed {
        runs: packed,
        ..placed
    })))
}

fn too_long() -> Error {
    Error::argument("the buffers do not fit in memory")
}

/// The addresses of a buffer.
fn addresses(slot: &Slot) -> Range<usize> {
    let start = slot.address().address();
    start..start + slot.bytes().unwrap_or(0)
}

impl Staged {
    /// Adds staging memory. If it is `aligned`, all of its buffers begin at multiples of 64, and the bytes between them and up to its end
    /// are zero.
    /// Returns what [`remove`](Self::remove) takes.
    pub(crate) fn add(&mut self, memory: Buffer, aligned: bool) -> usize {
        let end = memory.as_ptr().addr() + memory.len();
        let kind = match aligned && end % ALIGNMENT == 0 {
            true => Kind::Aligned,
            false => Kind::Staged,
        };
        self.insert(memory, kind)
    }

    /// Adds those buffers of an array that lie in none of the memory added before. Appends what [`remove`](Self::remove) takes.
    pub(crate) fn add_array(&mut self, array: &ArrayData, added: &mut Vec<usize>) {
        let nulls = array.nulls().map(|nulls| nulls.buffer());
        for buffer in array.buffers().iter().chain(nulls) {
            let start = buffer.as_ptr().addr();
            if !buffer.is_empty() && self.find(&(start..start + buffer.len())).is_none() {
                added.push(self.insert(buffer.clone(), Kind::Elsewhere));
            }
        }
        for child in array.child_data() {
            self.add_array(child, added);
        }
    }

    fn insert(&mut self, memory: Buffer, kind: Kind) -> usize {
        let start = memory.as_ptr().addr();
        let region = Region {
            memory,
            kind,
            placed: None,
        };
        self.0.insert(start, region);
        start
    }

    /// Forgets memory.
    pub(crate) fn remove(&mut self, start: usize) {
        self.0.remove(&start);
    }

    /// Returns the first address of the region in which all of these lie.
    fn find(&self, part: &Range<usize>) -> Option<usize> {
        let (start, region) = self.0.range(..=part.start).next_back()?;
        (part.end <= start + region.memory.len()).then_some(*start)
    }

    /// As [`bring`](Self::bring), for a batch.
    pub(crate) fn bring_batch(
        &mut self,
        batch: &RecordBatch,
        queue: &Queue,
    ) -> Result<DeviceRecordBatch> {
        let host = wrap_batch(batch)?;
        let tree = queue.device().within(|| self.bring(host, queue))?;
        let array = DeviceArray::from_tree(Arc::new(tree));
        Ok(DeviceRecordBatch::from_struct(batch.schema(), array))
    }

    /// Copies an array of arrow-rs's to `queue`'s device. What lies in staging memory is copied from there as it is: one allocation
    /// and one list of copies for each region of which nothing was copied before. Other buffers are copied to staging memory first.
    fn bring(&mut self, host: Tree, queue: &Queue) -> Result<Tree> {
        let (mut parts, mut others) = (BTreeMap::<usize, Vec<_>>::new(), Vec::new());
        for slot in host.slots.iter().filter(|slot| slot.bytes() != Some(0)) {
            let part = addresses(slot);
            match self.find(&part) {
                Some(region) => parts.entry(region).or_default().push(part),
                None => others.push((slot.address(), part.len())),
            }
        }
        let (mut elsewhere, mut wholes) = (Vec::new(), Vec::new());
        for (start, parts) in &mut parts {
            let Some(region) = self.0.get_mut(start) else {
                continue;
            };
            let first = region.memory.as_ptr();
            let address = |start| DevicePtr::new(first.with_addr(start).cast_mut().cast());
            match &region.placed {
                // Another column may use more of a dictionary's memory.
                Some(placed) => {
                    let missing = parts.iter().filter(|part| placed.find(part).is_none());
                    others.extend(missing.map(|part| (address(part.start), part.len())));
                }
                None if region.kind == Kind::Elsewhere => {
                    elsewhere.push(*start);
                    wholes.push((address(*start), region.memory.len()));
                }
                None => {
                    let placed = place(queue, region, std::mem::take(parts))?;
                    region.placed = Some(Arc::new(placed));
                }
            }
        }
        // SAFETY: the regions hold their buffers, and the host array, which this call holds, the others; arrow-rs's buffers are
        // initialised and do not change.
        let (wholes, packed) = unsafe { (pack(queue, wholes)?, pack(queue, others)?) };
        for start in elsewhere {
            if let Some(region) = self.0.get_mut(&start) {
                region.placed.clone_from(&wholes);
            }
        }
        let mut owners = Vec::new();
        let (mut slots, mut indices) = (Vec::with_capacity(host.slots.len()), BTreeMap::new());
        for slot in &host.slots {
            let part = addresses(slot);
            let region = self
                .find(&part)
                .and_then(|start| self.0.get(&start)?.placed.as_ref());
            let found = [region, packed.as_ref()]
                .into_iter()
                .flatten()
                .find_map(|placed| Some((placed, placed.find(&part)?)));
            let Some((placed, offset)) = found.filter(|_| !part.is_empty()) else {
                slots.push(Slot::absent());
                continue;
            };
            let owner = *indices
                .entry(Arc::as_ptr(&placed.owner))
                .or_insert_with(|| {
                    owners.push(placed.owner.clone());
                    owners.len() as u32 - 1
                });
            slots.push(Slot::new(placed.base, offset, Some(part.len()), owner));
        }
        if owners.is_empty() {
            // No bytes at all: an array has an owner all the same.
            let nothing = DeviceBufferMut::allocate(queue, 0)?.into_memory();
            owners.push(Arc::new(Owner::new(
                queue.device().clone(),
                nothing,
                Ready::Now,
            )));
        }
        Ok(Tree {
            device: queue.device().clone(),
            slots,
            owners: Owners::from(owners),
            root: host.root,
            nodes: host.nodes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(ranges: &[Range<usize>], aligned: bool) -> (Vec<(Range<usize>, usize)>, usize) {
        let (runs, bytes) = runs(ranges.to_vec(), aligned).unwrap();
        (
            runs.into_iter().map(|run| (run.from, run.to)).collect(),
            bytes,
        )
    }

    #[test]
    fn neighbours_are_one_copy() {
        let parts = [640..700, 0..10, 64..128, 128..130, 256..300];
        assert_eq!(
            merged(&parts, true),
            (vec![(0..130, 0), (256..300, 192), (640..700, 256)], 320)
        );
        // What is not aligned in the file is aligned on the device.
        assert_eq!(
            merged(&[8..16, 16..24, 24..100], false),
            (vec![(8..16, 0), (16..24, 64), (24..100, 128)], 256)
        );
    }

    #[test]
    fn what_overlaps_is_one_copy() {
        for aligned in [true, false] {
            assert_eq!(
                merged(&[0..64, 0..64, 32..100], aligned),
                (vec![(0..100, 0)], 128)
            );
        }
        assert!(runs(vec![0..usize::MAX, 1..2], true).is_none());
    }

    #[test]
    fn parts_of_runs_are_found() {
        let queue = crate::Devices::cpu().default_queue();
        let nothing = DeviceBufferMut::allocate(&queue, 0).unwrap().into_memory();
        let owner = Owner::new(queue.device().clone(), nothing, Ready::Now);
        let (runs, _) = runs(vec![64..130, 256..300], true).unwrap();
        let placed = Placed {
            owner: Arc::new(owner),
            base: DevicePtr::NULL,
            runs,
        };
        let found = |part| placed.find(&part);
        assert_eq!(found(64..65), Some(0));
        assert_eq!(found(100..130), Some(36));
        assert_eq!(found(256..300), Some(128));
        for outside in [0..1, 63..65, 130..131, 100..131, 300..301] {
            assert_eq!(found(outside), None);
        }
    }
}
