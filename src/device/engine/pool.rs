//! Device memory that was freed and waits for its next use.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::backend::DevicePtr;
use crate::device::lock;

/// What a pool leaves idle at most.
const IDLE_BLOCKS: usize = 1024;
/// The most blocks of other queues whose events one [`Pool::take`] asks about, and the most pending ones at which
/// [`Pool::take_done`] looks for those to free.
const ASKED: usize = 8;
/// Blocks of at least this many bytes are rounded up to a multiple of it, smaller ones to a multiple of `SMALL_GRAIN`.
const GRAIN: usize = 64 << 10;
const SMALL_GRAIN: usize = 256;

/// Returns a number for a queue, which no other queue of the process has or had, unlike its handle or the address of its value:
/// a new queue may get those of one that was dropped.
pub(crate) fn queue_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory of one allocation that is in a [`Pool`], or comes out of it.
#[derive(Debug)]
pub(crate) struct Block<E> {
    /// The first byte.
    pub(crate) base: DevicePtr,
    /// The length in bytes, as it was asked for from the runtime.
    pub(crate) bytes: usize,
    /// The [number](queue_number) of the queue whose work used the block last.
    pub(crate) queue: u64,
    /// An event after that use. If the type has no `Drop` that releases the event, whoever takes the block out releases it.
    pub(crate) after: E,
}

/// Device memory that was freed and waits for its next use, in the order of queues.
///
/// A block that its queue's work has used goes back into the pool at once, with an event after that use. The same queue may
/// then take it again without a wait, since its work runs in order. Any other queue gets it only once the event has completed.
///
/// A block comes out with its old contents. The pool calls no runtime: it neither allocates nor frees, and asks about events by the
/// function that it is given, which must not use the pool: it is locked meanwhile.
pub(crate) struct Pool<E> {
    idle: Mutex<Idle<E>>,
    most_bytes: usize,
    most_blocks: usize,
}

struct Idle<E> {
    /// The oldest first.
    blocks: VecDeque<Block<E>>,
    /// Of all blocks.
    bytes: usize,
}

impl<E> Idle<E> {
    fn remove(&mut self, i: usize) -> Option<Block<E>> {
        let block = self.blocks.remove(i)?;
        self.bytes = self.bytes.saturating_sub(block.bytes);
        Some(block)
    }
}

impl<E> Pool<E> {
    /// Makes an empty pool that, after [`take_done`](Self::take_done), keeps at most so many bytes, in 1,024 blocks.
    pub(crate) const fn new(idle_bytes: usize) -> Self {
        let idle = Idle {
            blocks: VecDeque::new(),
            bytes: 0,
        };
        Self {
            idle: Mutex::new(idle),
            most_bytes: idle_bytes,
            most_blocks: IDLE_BLOCKS,
        }
    }

    /// Returns how many bytes to ask the runtime for if `bytes` bytes are needed, so that blocks of similar requests fit each
    /// other: the next multiple of 256, from 64 KiB on of 64 KiB. Returns `None` if there is none.
    pub(crate) const fn rounded(bytes: usize) -> Option<usize> {
        bytes.checked_next_multiple_of(if bytes >= GRAIN { GRAIN } else { SMALL_GRAIN })
    }

    /// Takes out a block of at least `bytes` bytes, at most twice as large, for work on `queue` from now on: the smallest of
    /// the queue's own (of equal ones the newest), or else the smallest of the oldest few of other queues for whose event `is_done`
    /// returns `true`.
    pub(crate) fn take(
        &self,
        queue: u64,
        bytes: usize,
        mut is_done: impl FnMut(&E) -> bool,
    ) -> Option<Block<E>> {
        let fits = |block: &Block<E>| (bytes..=bytes.saturating_mul(2)).contains(&block.bytes);
        let mut idle = lock(&self.idle);
        let fitting = || idle.blocks.iter().enumerate().filter(|(_, b)| fits(b));
        let own = fitting().rev().filter(|(_, block)| block.queue == queue);
        let found = own.min_by_key(|(_, block)| block.bytes).or_else(|| {
            let mut others: Vec<_> = fitting().take(ASKED).collect();
            others.sort_by_key(|(_, block)| block.bytes);
            others.into_iter().find(|(_, block)| is_done(&block.after))
        });
        let (i, _) = found?;
        idle.remove(i)
    }

    /// Puts a block into the pool, after work of its queue so far, which its event stands for.
    pub(crate) fn give(&self, block: Block<E>) {
        let mut idle = lock(&self.idle);
        idle.bytes = idle.bytes.saturating_add(block.bytes);
        idle.blocks.push_back(block);
    }

    /// Takes out blocks for whose event `is_done` returns `true`, for the caller to free: the oldest ones, until the rest is
    /// within the limits, since perhaps no request fits them any more, or until it has asked about a few pending ones; or
    /// with `all`, all of them.
    pub(crate) fn take_done(
        &self,
        all: bool,
        mut is_done: impl FnMut(&E) -> bool,
    ) -> Vec<Block<E>> {
        let mut idle = lock(&self.idle);
        let (mut done, mut pending) = (Vec::new(), 0);
        while all || (pending < ASKED && self.exceeds(&idle, 1)) {
            match idle.blocks.get(pending) {
                None => break,
                Some(block) if is_done(&block.after) => done.extend(idle.remove(pending)),
                Some(_) => pending += 1,
            }
        }
        done
    }

    /// Returns whether there is more in the pool than `times` its limits: with 1, it is worth freeing what is done; with more,
    /// waiting for the device first.
    pub(crate) fn is_over(&self, times: usize) -> bool {
        self.exceeds(&lock(&self.idle), times)
    }

    fn exceeds(&self, idle: &Idle<E>, times: usize) -> bool {
        idle.bytes > self.most_bytes.saturating_mul(times)
            || idle.blocks.len() > self.most_blocks.saturating_mul(times)
    }

    /// Returns whether there are no blocks in the pool.
    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.idle).blocks.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::queue_number;
    use super::*;

    /// The event is a number, by which tests name a block.
    fn block(after: usize, bytes: usize, queue: u64) -> Block<usize> {
        let base = DevicePtr::new(std::ptr::without_provenance_mut(0x1000 * (after + 1)));
        Block {
            base,
            bytes,
            queue,
            after,
        }
    }

    fn pool(blocks: &[(usize, usize, u64)]) -> Pool<usize> {
        let pool = Pool {
            most_blocks: 3,
            ..Pool::new(1000)
        };
        for (after, bytes, queue) in blocks {
            pool.give(block(*after, *bytes, *queue));
        }
        pool
    }

    fn idle_bytes(pool: &Pool<usize>) -> usize {
        lock(&pool.idle).bytes
    }

    fn names(blocks: Vec<Block<usize>>) -> Vec<usize> {
        blocks.into_iter().map(|block| block.after).collect()
    }

    #[test]
    fn the_smallest_that_fits_is_taken() {
        let pool = pool(&[
            (0, 300, 1),
            (1, 99, 1),
            (2, 100, 1),
            (3, 200, 1),
            (4, 100, 1),
            (5, 201, 1),
        ]);
        let take = || pool.take(1, 100, |_| panic!("an own block needs no event"));
        let taken: Vec<usize> = std::iter::from_fn(take).map(|block| block.after).collect();
        assert_eq!(taken, [4, 2, 3], "of equals the newest");
        assert_eq!(idle_bytes(&pool), 300 + 99 + 201);
    }

    #[test]
    fn blocks_of_other_queues_come_second_and_after_their_event() {
        let pool = pool(&[(0, 100, 2), (1, 120, 1), (2, 100, 2)]);
        let taken = |is_done: fn(&usize) -> bool| pool.take(1, 100, is_done).map(|b| b.after);
        assert_eq!(taken(|_| true), Some(1));
        assert_eq!(taken(|_| false), None);
        assert_eq!(taken(|after| *after == 2), Some(2));
        assert_eq!(taken(|_| true), Some(0));
        assert_eq!(taken(|_| true), None);
    }

    /// Few events are asked about, however many blocks there are: those of the oldest, which are done first, and of these the
    /// smallest first.
    #[test]
    fn few_events_are_asked_about() {
        let pool = Pool::new(usize::MAX);
        for after in 0..1000 {
            pool.give(block(after, 200 - after % 2, 2));
        }
        let asked = RefCell::new(Vec::new());
        let ask = |done: usize| {
            asked.borrow_mut().clear();
            let taken = pool.take(1, 100, |after| {
                asked.borrow_mut().push(*after);
                *after == done
            });
            (taken.map(|block| block.after), asked.borrow().clone())
        };
        assert_eq!(ask(999), (None, vec![1, 3, 5, 7, 0, 2, 4, 6]));
        // What is not done is in its place again.
        assert_eq!(ask(5), (Some(5), vec![1, 3, 5]));
        assert_eq!(ask(999), (None, vec![1, 3, 7, 0, 2, 4, 6, 8]));
        assert_eq!(idle_bytes(&pool), 199 * 499 + 200 * 500);
    }

    #[test]
    fn the_oldest_are_freed_down_to_the_limits() {
        let blocks = [
            (0, 10, 1),
            (1, 400, 1),
            (2, 300, 2),
            (3, 200, 1),
            (4, 150, 2),
        ];
        let pool = pool(&blocks);
        assert!(pool.is_over(1) && !pool.is_over(2));
        // The first is pending; then there are four, and with 1,050 bytes less 400 of them within both limits.
        let freed = pool.take_done(false, |after| *after > 0);
        assert_eq!(names(freed), [1, 2]);
        assert!(!pool.is_over(1));
        assert_eq!(names(pool.take_done(false, |_| true)), [0; 0]);
        assert_eq!(names(pool.take_done(true, |after| *after != 3)), [0, 4]);
        assert_eq!(idle_bytes(&pool), 200);
        assert_eq!(names(pool.take_done(true, |_| true)), [3]);
        assert!(pool.is_empty() && idle_bytes(&pool) == 0);
    }

    /// However many are pending, few are asked about on the way to what can be freed.
    #[test]
    fn few_pending_blocks_are_asked_about() {
        const N: usize = if cfg!(miri) { 100 } else { 1000 };
        const DONE: usize = N / 10;
        let pool = Pool::new(0);
        (0..N).for_each(|after| pool.give(block(after, 256, 1)));
        let asked = RefCell::new(0);
        let freed = |all: bool, done: fn(&usize) -> bool| {
            *asked.borrow_mut() = 0;
            let freed = pool.take_done(all, |after| {
                *asked.borrow_mut() += 1;
                done(after)
            });
            (names(freed).len(), *asked.borrow())
        };
        assert_eq!(freed(false, |_| false), (0, ASKED));
        assert_eq!(freed(false, |after| *after < DONE), (DONE, DONE + ASKED));
        assert_eq!(freed(true, |after| *after == N - 1), (1, N - DONE));
        assert_eq!(freed(false, |_| true), (N - DONE - 1, N - DONE - 1));
    }

    #[test]
    fn sizes_are_rounded() {
        let rounded =
            [1, 256, 257, (64 << 10) - 1, 64 << 10, (64 << 10) + 1].map(Pool::<()>::rounded);
        let expected = [256, 256, 512, 64 << 10, 64 << 10, 128 << 10].map(Some);
        assert_eq!(rounded, expected);
        assert_eq!(Pool::<()>::rounded(usize::MAX), None);
        assert_eq!(
            Pool::<()>::rounded(usize::MAX - 0xFFFF),
            Some(usize::MAX - 0xFFFF)
        );
    }

    #[test]
    fn a_panic_loses_no_block() {
        let pool = pool(&[(1, 100, 2), (2, 100, 2)]);
        let panicking = || pool.take_done(true, |_| panic!("a test of panics"));
        let panicking = std::panic::AssertUnwindSafe(panicking);
        assert!(std::panic::catch_unwind(panicking).is_err());
        assert_eq!(idle_bytes(&pool), 200);
        assert_eq!(names(pool.take_done(true, |_| true)), [1, 2]);
    }

    /// Queues on several threads: no block is in two places, and none is used by another queue before it is done.
    #[test]
    fn threads_take_turns_with_blocks() {
        const BLOCKS: usize = 6;
        let rounds = if cfg!(miri) { 20 } else { 20_000 };
        let pool = Pool::new(0);
        let in_use: [AtomicBool; BLOCKS] = Default::default();
        // A block's event is done once somebody has asked about it three times since its last use.
        let asked = [(); BLOCKS].map(|()| AtomicUsize::new(3));
        for after in 0..BLOCKS {
            pool.give(block(after, 100, queue_number()));
        }
        let is_done = |after: &usize| asked[*after].fetch_add(1, Ordering::Relaxed) >= 3;
        let taken = AtomicUsize::new(0);
        let hold = |block: &Block<usize>, queue: u64| {
            assert!(
                !in_use[block.after].swap(true, Ordering::AcqRel),
                "taken twice"
            );
            let done = asked[block.after].swap(0, Ordering::Relaxed) > 3;
            assert!(done || block.queue == queue, "taken before it was done");
            taken.fetch_add(1, Ordering::Relaxed);
        };
        let give = |block: Block<usize>, queue| {
            in_use[block.after].store(false, Ordering::Release);
            pool.give(Block { queue, ..block });
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let queue = queue_number();
                    for round in 0..rounds {
                        if let Some(block) = pool.take(queue, 100, is_done) {
                            hold(&block, queue);
                            give(block, queue);
                        }
                        if round % 16 == 0 {
                            for block in pool.take_done(round % 32 == 0, is_done) {
                                hold(&block, queue);
                                give(block, queue);
                            }
                        }
                    }
                });
            }
        });
        assert!(taken.into_inner() > rounds, "{} uses", rounds);
        let mut left = names(pool.take_done(true, |_| true));
        left.sort_unstable();
        assert_eq!(left, Vec::from_iter(0..BLOCKS));
    }
}
