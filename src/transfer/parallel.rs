//! Packing of large uploads by several threads. Each fills whole staging slabs and queues their copies, in any order.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use crate::abi::guard::{call_foreign, callback};
use crate::device::{DevicePtr, Queue, TransferStats, lock};
use crate::error::{Error, Result};
use crate::transfer::fix::{Made, Piece};
use crate::transfer::helpers::{Job, offer};
use crate::transfer::plan::Plan;
use crate::transfer::stage::{CHUNK, DIRECT, RING, Slabs, Stage, direct};

/// The number of packed bytes from which on other threads help. With one thread an upload to an H200 was slower than a copy from
/// ordinary memory for each column from 1 to 4 MiB: 124 us and 119, 236 and 188, 447 and 380.
const LEAST: usize = 1 << 20;
/// The most threads that are used, so that each has several slabs of the ring.
const MOST: usize = RING / CHUNK / 8;
/// The bytes of the smallest slab that is worth a thread's time.
const SMALLEST: usize = CHUNK / 8;

/// Returns how many threads are to upload a plan of `bytes` bytes on `queue`.
pub(super) fn threads(queue: &Queue, bytes: usize) -> usize {
    if bytes < LEAST {
        return 1;
    }
    queue.device().packing_threads().min(MOST)
}

/// What is packed into the slabs of an upload.
struct Work {
    made: Made,
    parts: Vec<Part>,
    /// The parts of each slab.
    slabs: Vec<Range<usize>>,
    /// Bytes of every slab but the last.
    chunk: usize,
    /// Bytes of all parts.
    bytes: usize,
    /// The next slab that no thread has taken.
    next: AtomicUsize,
    /// The first error of a thread, after which no other slab is begun.
    failed: OnceLock<Error>,
    helpers: Mutex<Helpers>,
    ended: Condvar,
}

/// The other threads of an upload.
#[derive(Default)]
struct Helpers {
    /// `None` before it begins, and after its end: then a thread that comes late has nothing to do.
    queue: Option<Queue>,
    /// How many pack.
    active: usize,
    done: Vec<(Slabs, TransferStats)>,
}

/// Bytes `start..end` of a piece's region.
struct Part {
    piece: Piece,
    start: usize,
    end: usize,
}

/// Packs and copies all pieces of a plan to a device slab at `base`, with up to `threads` threads, of which this is one. What is
/// copied directly is queued first. Returns the staging slabs.
///
/// # Safety
/// The host can read the sources. They, the staging slabs and the device slab, which has room for the plan, live until all work
/// that the queue has been given is done.
pub(super) unsafe fn run(
    plan: &mut Plan,
    queue: &Queue,
    base: DevicePtr,
    threads: usize,
) -> (Result<()>, Slabs) {
    let chunk = (plan.bytes / (2 * threads)).next_multiple_of(SMALLEST);
    let mut work = Work::new(std::mem::take(&mut plan.made), chunk.min(CHUNK));
    let mut straight = Vec::new();
    for (piece, _) in plan.pieces() {
        let done = direct(queue, &piece, DIRECT);
        if done > 0 {
            straight.push((piece, done));
        }
        work.add(piece, done);
    }
    let threads = match work.bytes < LEAST {
        true => 1,
        false => threads.min(work.slabs.len()),
    };
    let (bytes, chunk) = (work.bytes, work.chunk);
    let slabs = RING / chunk / threads;
    let mut first = Stage::new(queue, base, bytes, chunk, slabs);
    for (piece, bytes) in &straight {
        // SAFETY: the caller guarantees what `copy` asks for (see `# Safety`); the device can copy from there (`direct`).
        unsafe { first.copy(piece, *bytes) };
    }
    // With little to pack, one list takes all.
    if work.slabs.len() != 1 {
        if let Err(e) = first.submit() {
            return (Err(e), first.into_slabs());
        }
    }
    lock(&work.helpers).queue = Some(queue.clone());
    let work = Arc::new(work);
    let job = |_| -> Job {
        let work = work.clone();
        Box::new(move || {
            let Some(queue) = work.begin() else { return };
            let packed = TransferStats::scope(|| {
                let mut stage = Stage::new(&queue, base, work.bytes, work.chunk, slabs);
                let pack = || {
                    // SAFETY: this thread has begun, so `run` waits for its end, and until then its caller guarantees what `pack` asks for.
                    unsafe { work.pack(&mut stage) };
                };
                work.check(call_foreign("packing", pack));
                stage.into_slabs()
            });
            drop(queue);
            work.end(packed);
        })
    };
    offer((1..threads).map(job).collect());
    // SAFETY: the caller guarantees what `pack` asks for (see `# Safety`).
    unsafe { work.pack(&mut first) };
    let mut slabs = first.into_slabs();
    for (more, stats) in work.close() {
        slabs.append(more);
        stats.add_to_scope();
    }
    let failed = work.failed.get().cloned();
    (failed.map_or(Ok(()), Err), slabs)
}

impl Work {
    fn new(made: Made, chunk: usize) -> Self {
        Self {
            made,
            parts: Vec::new(),
            slabs: Vec::new(),
            chunk,
            bytes: 0,
            next: AtomicUsize::new(0),
            failed: OnceLock::new(),
            helpers: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    /// Says that another thread begins to pack, and on which queue; `None` if there is nothing left for it.
    fn begin(&self) -> Option<Queue> {
        let mut helpers = lock(&self.helpers);
        let queue = helpers.queue.clone()?;
        helpers.active += 1;
        Some(queue)
    }

    fn end(&self, packed: (Slabs, TransferStats)) {
        let mut helpers = lock(&self.helpers);
        helpers.active -= 1;
        helpers.done.push(packed);
        drop(helpers);
        self.ended.notify_one();
    }

    /// Lets no other thread begin, and waits for those that have.
    fn close(&self) -> Vec<(Slabs, TransferStats)> {
        let mut helpers = lock(&self.helpers);
        let queue = helpers.queue.take();
        let is_packing = |helpers: &mut Helpers| helpers.active > 0;
        let ended = self.ended.wait_while(helpers, is_packing);
        let done = std::mem::take(&mut ended.unwrap_or_else(PoisonError::into_inner).done);
        drop(queue);
        done
    }

    /// Adds the bytes of a piece's region from `start` on, to the last slab and to others.
    fn add(&mut self, piece: Piece, mut start: usize) {
        let region = piece.region();
        while start < region {
            let room = self.chunk - self.bytes % self.chunk;
            let end = region.min(start + room);
            let i = self.parts.len();
            match self.slabs.last_mut().filter(|_| room < self.chunk) {
                Some(slab) => slab.end = i + 1,
                None => self.slabs.push(i..i + 1),
            }
            self.parts.push(Part { piece, start, end });
            self.bytes += end - start;
            start = end;
        }
    }

    /// Packs slabs and queues their copies until none is left, or a thread has failed. A panic is an error.
    ///
    /// # Safety
    /// As [`Stage::pack`], for all parts.
    unsafe fn pack(&self, stage: &mut Stage<'_>) {
        self.check(callback("packing", || {
            while self.failed.get().is_none() {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                let Some(slab) = self.slabs.get(i) else {
                    break;
                };
                stage.left = self.bytes - i * self.chunk;
                for part in &self.parts[slab.clone()] {
                    // What is copied directly leaves gaps.
                    stage.seek(part.piece.dst + part.start);
                    // SAFETY: the caller guarantees what `pack` asks for (see `# Safety`).
                    unsafe { stage.pack(&part.piece, &self.made, part.start, part.end) }?;
                }
            }
            Ok(())
        }));
    }

    /// Keeps a thread's error, if it is the first: it is the upload's.
    fn check(&self, packed: Result<()>) {
        if let Err(e) = packed {
            let _ = self.failed.set(e);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::fix::Fix;

    fn work(pieces: &[(usize, usize, Fix)]) -> Work {
        let mut work = Work::new(Made::default(), CHUNK);
        for (bytes, done, fix) in pieces {
            let piece = Piece {
                src: DevicePtr::NULL,
                dst: 0,
                dst_bytes: *bytes,
                fix: *fix,
                last: true,
            };
            work.add(piece, *done);
        }
        work
    }

    #[test]
    fn slabs_of_pieces() {
        let pieces = [
            (100, 0),
            (CHUNK - 128, 0),
            (64, 64),
            (2 * CHUNK + 1, 64),
            (7, 0),
        ];
        let work = work(&pieces.map(|(bytes, done)| (bytes, done, Fix::None)));
        let parts = work.parts.iter().map(|part| (part.start, part.end));
        let (middle, end) = (CHUNK + 64, 2 * CHUNK + 64);
        assert_eq!(
            parts.collect::<Vec<_>>(),
            [
                (0, 128),
                (0, CHUNK - 128),
                (64, middle),
                (middle, end),
                (0, 64)
            ]
        );
        assert_eq!(work.slabs, [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(work.bytes, 3 * CHUNK + 64);
    }

    /// The panic of a thread is the error of the upload, and the other threads begin no other slab.
    #[test]
    #[cfg(all(feature = "sim", target_os = "linux", not(miri)))]
    fn a_panic_is_an_error() {
        let queue = crate::Devices::simulated().unwrap().default_queue();
        let memory = crate::DeviceBufferMut::allocate(&queue, 64).unwrap();
        // There are no ready bytes.
        let work = work(&vec![(64, 0, Fix::Ready(1)); 3 * CHUNK / 64]);
        let mut stages = [0; 2].map(|_| Stage::new(&queue, memory.address(), work.bytes, CHUNK, 4));
        std::thread::scope(|scope| {
            for stage in &mut stages {
                // SAFETY: the pieces have no source; nothing is copied, because packing panics.
                scope.spawn(|| unsafe { work.pack(stage) });
            }
        });
        assert!(matches!(work.failed.get(), Some(Error::Panic { .. })));
        assert!((1..=2).contains(&work.next.into_inner()));
    }
}
