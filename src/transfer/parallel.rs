//! Packing of large uploads by several threads. Each fills whole staging slabs and queues their copies, in any order.

use std::iter::repeat_with;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, ScopedJoinHandle, scope};

use crate::abi::guard::{call_foreign, callback};
use crate::device::{DevicePtr, Queue, TransferStats};
use crate::error::{Error, Result};
use crate::transfer::fix::{Made, Piece};
use crate::transfer::plan::Plan;
use crate::transfer::stage::{CHUNK, DIRECT, RING, Slabs, Stage, direct};

/// The number of packed bytes from which on other threads help. A scoped thread took 0.03 to 0.06 ms to start and to join on a two-core
/// AMD EPYC under load, in which one thread packs half a MiB. With this number an upload of 14.3 MiB took 1.08 ms to an H200 beside 16
/// cores, and 1.70 ms packed by one thread. On two cores that were busy otherwise, a second thread lost from 2 to 8 MiB.
const LEAST: usize = 2 << 20;
/// The most threads that are used, so that each has several slabs of the ring.
const MOST: usize = RING / CHUNK / 8;

/// Returns how many threads are to upload a plan of `bytes` bytes on `queue`.
pub(super) fn threads(queue: &Queue, bytes: usize) -> usize {
    // On a per-thread stream the queue orders the work of its threads with an event at each change.
    if bytes < LEAST || !queue.raw().is_one_stream() {
        return 1;
    }
    queue.device().packing_threads().min(MOST)
}

/// What is packed into the slabs of an upload.
struct Work<'a> {
    made: &'a Made,
    parts: Vec<Part>,
    /// The parts of each slab. Every slab but the last has [`CHUNK`] bytes.
    slabs: Vec<Range<usize>>,
    /// Bytes of all parts.
    bytes: usize,
    /// The next slab that no thread has taken.
    next: AtomicUsize,
    /// The first error of a thread, after which no other slab is begun.
    failed: OnceLock<Error>,
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
    plan: &Plan,
    queue: &Queue,
    base: DevicePtr,
    threads: usize,
) -> (Result<()>, Slabs) {
    let mut work = Work::new(&plan.made);
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
    let slabs = RING / CHUNK / threads;
    let mut first = Stage::new(queue, base, work.bytes, slabs);
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
    let other = || Stage::new(queue, base, work.bytes, slabs);
    let mut others: Vec<_> = repeat_with(other).take(threads - 1).collect();
    scope(|scope| {
        let work = &work;
        let start = |stage| {
            // SAFETY: the caller guarantees what `pack` asks for (see `# Safety`).
            let pack = move || queue.device().within(|| unsafe { work.pack(stage) });
            let pack = move || TransferStats::scope(|| work.check(call_foreign("packing", pack)));
            let name = "arrow-device packing".to_owned();
            // Without the thread the others pack more.
            Builder::new().name(name).spawn_scoped(scope, pack).ok()
        };
        let threads: Vec<_> = others.iter_mut().filter_map(start).collect();
        // SAFETY: the caller guarantees what `pack` asks for (see `# Safety`).
        unsafe { work.pack(&mut first) };
        // Their panics are errors.
        for ((), stats) in threads.into_iter().flat_map(ScopedJoinHandle::join) {
            stats.add_to_scope();
        }
    });
    let mut slabs = first.into_slabs();
    for stage in others {
        slabs.append(stage.into_slabs());
    }
    (work.failed.into_inner().map_or(Ok(()), Err), slabs)
}

impl<'a> Work<'a> {
    fn new(made: &'a Made) -> Self {
        Self {
            made,
            parts: Vec::new(),
            slabs: Vec::new(),
            bytes: 0,
            next: AtomicUsize::new(0),
            failed: OnceLock::new(),
        }
    }

    /// Adds the bytes of a piece's region from `start` on, to the last slab and to others.
    fn add(&mut self, piece: Piece, mut start: usize) {
        let region = piece.region();
        while start < region {
            let room = CHUNK - self.bytes % CHUNK;
            let end = region.min(start + room);
            let i = self.parts.len();
            match self.slabs.last_mut().filter(|_| room < CHUNK) {
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
                stage.left = self.bytes - i * CHUNK;
                for part in &self.parts[slab.clone()] {
                    // What is copied directly leaves gaps.
                    stage.seek(part.piece.dst + part.start);
                    // SAFETY: the caller guarantees what `pack` asks for (see `# Safety`).
                    unsafe { stage.pack(&part.piece, self.made, part.start, part.end) }?;
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

    fn work<'a>(made: &'a Made, pieces: &[(usize, usize, Fix)]) -> Work<'a> {
        let mut work = Work::new(made);
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
        let made = Made::default();
        let work = work(&made, &pieces.map(|(bytes, done)| (bytes, done, Fix::None)));
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
        let made = Made::default();
        let work = work(&made, &vec![(64, 0, Fix::Ready(1)); 3 * CHUNK / 64]);
        let mut stages = [0; 2].map(|_| Stage::new(&queue, memory.address(), work.bytes, 4));
        scope(|scope| {
            for stage in &mut stages {
                // SAFETY: the pieces have no source; nothing is copied, because packing panics.
                scope.spawn(|| unsafe { work.pack(stage) });
            }
        });
        assert!(matches!(work.failed.get(), Some(Error::Panic { .. })));
        assert!((1..=2).contains(&work.next.into_inner()));
    }
}
