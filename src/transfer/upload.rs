//! Host memory to device memory: one allocation, and copies that are queued as staging memory fills. Nothing waits, unless more
//! than [`RING`] bytes of it are being copied: then for the oldest, which bounds the staging memory.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

use crate::abi::guard;
use crate::data::DeviceArray;
use crate::data::node::Node;
use crate::device::{
    ALIGNMENT, CopyKind, CopyOp, Counters, DevicePtr, Queue, SyncEvent, TransferStats, lock,
};
use crate::error::Result;
use crate::memory::{DeviceBufferMut, HostBuffer};
use crate::transfer::copy::result;
use crate::transfer::plan::{Plan, Scope, plan};
use crate::transfer::region::{CopyRegion, DIRECT, Rewrite, stage};
use crate::transfer::staging;

/// The most bytes of a host buffer, which are one list of copies. Smaller uploads are divided by eight, so that copies and packing overlap
/// there too. With packing measured on a two-core AMD EPYC under load, at 7 to 10 GB/s, and a link computed for 6 to 50 GB/s, an upload
/// of 8 MiB took 0.77 to 1.54 ms with 1 MiB, 0.80 to 1.67 with 2, 0.83 to 1.95 with 4, and 0.94 to 2.52 with 8 or 16; from 64 MiB on
/// 1 to 4 MiB differed by up to 12 %, in no consistent order.
const CHUNK: usize = staging(2 << 20);
/// The least: a call for a copy takes as long as to pack a few KiB.
const SMALL_CHUNK: usize = staging(256 << 10);
/// The bytes of host buffers that one upload fills before it waits for its oldest copies.
const RING: usize = staging(128 << 20);
/// The number of full host buffers from which on the oldest is used again if its copies are done. Few of them stay in the processor's
/// cache: on the same machine packing ran at 9.1 to 12.2 GB/s over 2 or 4 MiB, at 7.4 to 11.3 over 8 MiB, and at 7.0 to
/// 8.9 over 32 to 192 MiB.
const REUSED: usize = 2;
/// The packed bytes for which one more thread is worth its start, of some tens of microseconds: packing them takes about 100.
const LEAST: usize = 5 << 18;
/// The most threads, so that each has several host buffers of the ring.
const MOST: usize = RING / CHUNK / 8;

/// Copies an array's rows from host-readable memory to `queue`'s device. The source is kept alive until the copies have completed.
pub(super) fn upload(array: &DeviceArray, queue: &Queue) -> Result<Arc<Node>> {
    let device = queue.device();
    let plan = plan(&[array], array.data_type(), Scope::Rows, Some(device), None)?;
    let memory = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    // SAFETY: planning waited for the source, which the host can read and `keep_until` keeps with the host buffers until the
    // copies are done, even after an error. The memory has room for the plan, and is freed in the queue's order.
    let (packed, buffers) = unsafe { pack(&plan, queue, memory.address()) };
    // Lists may read the source even after an error. The buffers return to their pool before the source is dropped.
    let event = packed.and_then(|()| queue.record());
    // Otherwise neither is read any more, and the buffers serve the next upload at once.
    if event.is_err() || !device.capabilities().copies_read_host_at_once {
        queue.keep_until(&event, (buffers, array.clone()));
    }
    Ok(result(plan, memory, event?))
}

/// Packs and copies all regions of a plan to memory at `base`. Returns the host buffers.
///
/// # Safety
/// The host can read the sources. They, the host buffers and the memory, which has room for the plan, live until all work
/// that the queue has been given is done.
unsafe fn pack(plan: &Plan, queue: &Queue, base: DevicePtr) -> (Result<()>, Vec<HostBuffer>) {
    // A region of all bytes is the only one: its copy takes the place of the packed one.
    let least = DIRECT.min(plan.bytes);
    let (mut straight, mut packed) = (Vec::new(), Vec::with_capacity(plan.regions.len()));
    for region in &plan.regions {
        let done = direct(queue, region, least);
        if done > 0 {
            let dst = base.offset(region.dst);
            straight.push(CopyOp::new(CopyKind::HostToDevice, region.src, dst, done));
        }
        if done < region.room() {
            packed.push(region.part(done, region.room()));
        }
    }
    let left = packed.iter().map(CopyRegion::room).sum::<usize>();
    let worth = (left + LEAST / 2) / LEAST;
    let threads = queue.device().packing_threads().min(MOST);
    let threads = threads.min(worth).max(1);
    let bytes = (left / (2 * threads).max(8)).next_multiple_of(SMALL_CHUNK);
    let bytes = bytes.clamp(SMALL_CHUNK, CHUNK);
    let packing = Packing {
        chunks: chunks(&packed, bytes, left),
        next: AtomicUsize::new(0),
        queue,
        base,
        most: RING / bytes / threads,
        reuses: left > REUSED * CHUNK * threads,
        done: Mutex::new((Ok(()), Vec::new())),
    };
    std::thread::scope(|scope| {
        // SAFETY: the caller guarantees what `run` asks for (see `# Safety`); the scope ends after this thread.
        let help = || TransferStats::scope(|| unsafe { packing.run(Vec::new()) }).1;
        let name = || Builder::new().name("arrow-device packing".to_owned());
        // Where no thread can be started, fewer pack.
        let start = |_| name().spawn_scoped(scope, help).ok();
        let helpers: Vec<_> = (1..threads).map_while(start).collect();
        // SAFETY: the caller guarantees what `run` asks for, for all threads alike (see `# Safety`).
        unsafe { packing.run(straight) };
        let stats = helpers.into_iter().flat_map(|helper| helper.join());
        stats.for_each(|stats| stats.add_to_scope());
    });
    let done = packing.done.into_inner();
    done.unwrap_or_else(PoisonError::into_inner)
}

/// Divides regions of `left` bytes into chunks of `bytes` bytes, a multiple of 64. What is less than half of one belongs to the one before.
fn chunks(regions: &[CopyRegion], bytes: usize, mut left: usize) -> Vec<Vec<CopyRegion>> {
    let (mut chunks, mut chunk, mut room) = (Vec::new(), Vec::new(), 0);
    for region in regions {
        let mut done = 0;
        while done < region.room() {
            if room == 0 {
                let is_last = left < bytes + bytes / 2;
                room = if is_last { left } else { bytes };
            }
            let part = room.min(region.room() - done);
            chunk.push(region.part(done, done + part));
            (done, room, left) = (done + part, room - part, left - part);
            if room == 0 {
                chunks.push(std::mem::take(&mut chunk));
            }
        }
    }
    chunks
}

/// Regions that are packed into host buffers and copied, by one thread or several.
struct Packing<'a> {
    /// What a host buffer holds.
    chunks: Vec<Vec<CopyRegion>>,
    /// The first one that no thread has taken yet.
    next: AtomicUsize,
    queue: &'a Queue,
    base: DevicePtr,
    /// The number of host buffers at which a thread waits for its oldest.
    most: usize,
    /// An event is recorded for each host buffer, so that it can be used again.
    reuses: bool,
    /// The first error, and the host buffers of the threads that have ended.
    done: Mutex<(Result<()>, Vec<HostBuffer>)>,
}

impl Packing<'_> {
    /// Packs chunks and queues their copies, the first together with `copies`, until none is left, or a thread has failed. A panic is an
    /// error, so that the host buffers are kept.
    ///
    /// # Safety
    /// The host can read the regions' sources, and the device can copy those of `copies`. They, the host buffers in `done`, and
    /// the memory at `base`, which has room for all regions, live until all work that the queue has been given is done.
    unsafe fn run(&self, mut copies: Vec<CopyOp>) {
        // Host buffers whose copies are queued, oldest first, with the event after which they are done.
        let mut ring = VecDeque::new();
        let packed = guard::callback("packing", || {
            while let Some(chunk) = self.chunks.get(self.next.fetch_add(1, Relaxed)) {
                let bytes = chunk.iter().map(CopyRegion::room).sum();
                let buffer = self.host_buffer(&mut ring, bytes)?;
                let past_cache = buffer.block.is_locked && !self.reuses;
                // SAFETY: the caller guarantees that the host can read the sources; the buffer is new or its copies are done.
                copies.append(&mut unsafe { stage(chunk, &buffer, self.base, past_cache) });
                let copied = &self.queue.device().counters().host_copied_bytes;
                Counters::add(copied, bytes);
                ring.push_back((buffer, None));
                // SAFETY: sources lie in the host buffer and in what the caller guarantees, who keeps all of them (see
                // `# Safety`); destinations lie in the memory at `base`, where the plan gave each region its room.
                unsafe { self.queue.copy(&copies) }?;
                copies.clear();
                if let Some((_, done)) = ring.back_mut().filter(|_| self.reuses) {
                    *done = self.queue.record()?;
                }
            }
            // SAFETY: the sources must live until the copies are done: without packed bytes they are all the caller's, who keeps them (see `# Safety`).
            unsafe { self.queue.copy(&copies) }
        });
        if packed.is_err() {
            self.next.store(self.chunks.len(), Relaxed);
        }
        let (first, buffers) = &mut *lock(&self.done);
        buffers.extend(ring.into_iter().map(|(buffer, _)| buffer));
        if first.is_ok() {
            *first = packed;
        }
    }

    /// Returns the oldest host buffer if its copies are done, or another one; waits for those copies if there are too many.
    fn host_buffer(
        &self,
        ring: &mut VecDeque<(HostBuffer, Option<SyncEvent>)>,
        bytes: usize,
    ) -> Result<HostBuffer> {
        let oldest = ring.front().filter(|_| self.reuses && ring.len() >= REUSED);
        if let Some((_, done)) = oldest.filter(|(buffer, _)| buffer.len() >= bytes) {
            let is_done = done.as_ref().map_or(Ok(true), SyncEvent::is_complete)?;
            if is_done || ring.len() >= self.most {
                let running = done.as_ref().filter(|_| !is_done);
                running.map_or(Ok(()), SyncEvent::wait)?;
                if let Some((buffer, _)) = ring.pop_front() {
                    return Ok(buffer);
                }
            }
        }
        self.queue.device().host_buffer(bytes)
    }
}

/// Returns how many bytes of a region of at least `least` bytes are copied directly from where they are: its whole 64-byte blocks,
/// if the device can do that. The rest is packed with its padding.
fn direct(queue: &Queue, region: &CopyRegion, least: usize) -> usize {
    if region.len < least || region.rewrite != Rewrite::None {
        return 0;
    }
    let bytes = region.len / ALIGNMENT * ALIGNMENT;
    // Packing the rest of a small region would cost one copy more than packing all of it.
    let has_rest = bytes < region.len && region.len < DIRECT;
    let backend = queue.device().backend();
    match bytes == 0 || has_rest || !backend.copies_directly_from(region.src, region.len) {
        true => 0,
        false => bytes,
    }
}

#[cfg(all(test, feature = "sim", target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use crate::error::Error;

    /// A panic while chunks are packed is an error of the upload, ends all threads, and leaves the host buffers to the caller, who keeps
    /// them until the copies are done.
    #[test]
    fn a_panic_keeps_the_host_buffers() {
        let queue = crate::Devices::simulated().unwrap().default_queue();
        let bytes = 6 * SMALL_CHUNK;
        let memory = DeviceBufferMut::allocate(&queue, bytes).unwrap();
        let source = vec![7_u8; bytes];
        let src = DevicePtr::new(source.as_ptr().cast_mut().cast());
        let region = CopyRegion::new(src, 0, bytes - 64);
        let mut chunks = chunks(&[region], SMALL_CHUNK, bytes - 64);
        // There are more bits than the result has room for.
        let bits = Rewrite::Bits { skip: 0, bits: 513 };
        chunks.push(vec![CopyRegion::new(src, 0, 64).rewritten(bits)]);
        let packing = Packing {
            chunks,
            next: AtomicUsize::new(0),
            queue: &queue,
            base: memory.address(),
            most: 64,
            reuses: false,
            done: Mutex::new((Ok(()), Vec::new())),
        };
        let before = queue.device().stats();
        // SAFETY: the source, the buffers and the device's memory live until the queue is done below.
        unsafe { packing.run(Vec::new()) };
        let copies = queue.device().stats().since(&before).copies;
        assert!(packing.next.into_inner() >= packing.chunks.len());
        let (packed, buffers) = packing.done.into_inner().unwrap();
        assert!(matches!(packed, Err(Error::Panic { .. })), "{packed:?}");
        assert_eq!((buffers.len(), copies), (6, 6));
        queue.synchronize().unwrap();
    }
}
