//! Reuse of memory that a library allocates slowly and frees only after waiting for the device:
//! page-locked and managed memory, and device memory where there are no pools.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::context::{Context, EventCell};
use super::entry::Current;
use super::runtime::Memory;
use crate::device::backend::DevicePtr;
use crate::device::lock;
use crate::device::order::Place;
use crate::error::Result;

/// How many bytes of idle blocks a synchronisation leaves for reuse at most.
const IDLE_LIMIT: usize = 256 << 20;
/// How many idle blocks it leaves at most.
const IDLE_BLOCKS: usize = 1024;
/// From this multiple of a limit on, a new block is allocated only after a wait for the device.
const FAR: usize = 4;
/// The most idle blocks of other queues whose events are queried.
const ASKED: usize = 8;
/// Blocks of at least this many bytes are rounded up to a multiple of it, so that they fit again.
const GRAIN: usize = 64 << 10;

/// Allocates memory of one kind, without a retry.
pub(super) fn allocate(
    context: &Context,
    memory: Memory,
    bytes: usize,
    current: &Current<'_>,
) -> Result<DevicePtr> {
    context.check_memory(current.allocate(memory, bytes), bytes)
}

/// An idle block.
struct Idle {
    ptr: DevicePtr,
    bytes: usize,
    /// The event after which other queues than its own may use the block.
    after: Box<EventCell>,
    place: Place,
}

/// Blocks of one kind of memory, by address.
pub(crate) struct Blocks {
    memory: Memory,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Blocks in use: address to length in bytes.
    live: BTreeMap<usize, usize>,
    /// The oldest first.
    idle: Vec<Idle>,
    idle_bytes: usize,
}

impl State {
    /// Whether there are more idle blocks than `times` the limits.
    fn is_over(&self, times: usize) -> bool {
        self.idle_bytes > times * IDLE_LIMIT || self.idle.len() > times * IDLE_BLOCKS
    }

    fn add(&mut self, idle: Idle) {
        self.idle_bytes = self.idle_bytes.saturating_add(idle.bytes);
        self.idle.push(idle);
    }

    fn remove(&mut self, i: usize) -> Idle {
        let idle = self.idle.remove(i);
        self.idle_bytes -= idle.bytes;
        idle
    }
}

impl Blocks {
    pub(super) fn new(memory: Memory) -> Self {
        Self {
            memory,
            state: Mutex::default(),
        }
    }

    /// Returns the number of bytes that are allocated for `bytes` bytes.
    fn round(&self, context: &Context, bytes: usize) -> Result<usize> {
        let grain = if bytes >= GRAIN { GRAIN } else { 256 };
        let rounded = bytes.checked_next_multiple_of(grain);
        rounded.ok_or_else(|| context.out_of_memory(context.api().allocate(self.memory), bytes))
    }

    /// Returns an idle block of at least `bytes` bytes, for work on `queue` from now on, if one
    /// fits.
    pub(super) fn reuse(
        &self,
        context: &Context,
        queue: u64,
        bytes: usize,
        current: &Current<'_>,
    ) -> Result<Option<DevicePtr>> {
        let bytes = self.round(context, bytes)?;
        let mut state = lock(&self.state);
        let Some(i) = fitting(&state, current, queue, bytes) else {
            return Ok(None);
        };
        let idle = state.remove(i);
        state.live.insert(idle.ptr.address(), idle.bytes);
        drop(state);
        context.recycle(idle.after);
        Ok(Some(idle.ptr))
    }

    /// Allocates a block of at least `bytes` bytes.
    pub(super) fn allocate(
        &self,
        context: &Context,
        bytes: usize,
        current: &Current<'_>,
    ) -> Result<DevicePtr> {
        let bytes = self.round(context, bytes)?;
        let ptr = allocate(context, self.memory, bytes, current)?;
        lock(&self.state).live.insert(ptr.address(), bytes);
        Ok(ptr)
    }

    /// Takes a block back after all work of a queue so far, which `after` stands for.
    pub(super) fn give_back(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        after: Box<EventCell>,
        place: Place,
    ) {
        let mut state = lock(&self.state);
        // Adopted memory is not in the map.
        let bytes = state.live.remove(&ptr.address()).unwrap_or(bytes);
        state.add(Idle {
            ptr,
            bytes,
            after,
            place,
        });
    }

    /// Forgets a block that does not belong to the device any more.
    pub(crate) fn forget(&self, ptr: DevicePtr) {
        lock(&self.state).live.remove(&ptr.address());
    }

    /// Whether there are no idle blocks.
    pub(super) fn is_empty(&self) -> bool {
        lock(&self.state).idle.is_empty()
    }

    /// Whether there are more idle blocks than are kept for reuse.
    pub(super) fn is_over(&self) -> bool {
        lock(&self.state).is_over(1)
    }

    /// Whether there are so many idle blocks that the device is waited for to free some.
    pub(super) fn is_far_over(&self) -> bool {
        lock(&self.state).is_over(FAR)
    }

    /// Frees idle blocks that nothing uses any more: the oldest, until the rest is within the
    /// limits, since perhaps no request fits them any more; or all.
    pub(super) fn free_idle(&self, context: &Context, all: bool) {
        let Ok(current) = context.enter_even_if_failed() else {
            return;
        };
        let mut done = Vec::new();
        {
            let mut state = lock(&self.state);
            let mut i = 0;
            while i < state.idle.len() && (all || state.is_over(1)) {
                // Of a failed device nothing runs any more.
                if context.has_failed() || is_done(&current, &state.idle[i].after) {
                    done.push(state.remove(i));
                } else {
                    i += 1;
                }
            }
        }
        for idle in done {
            // SAFETY: the block is from `allocate` for this kind of memory, was taken out of the
            // list, and its event has completed.
            if unsafe { current.try_free(self.memory, idle.ptr) } {
                context.recycle(idle.after);
            } else {
                lock(&self.state).add(idle);
            }
        }
    }
}

/// Returns the smallest idle block that fits, at most twice as large, that `queue` may use without
/// a wait.
fn fitting(state: &State, current: &Current<'_>, queue: u64, bytes: usize) -> Option<usize> {
    let most = bytes.saturating_mul(2);
    let fits = |idle: &Idle| (bytes..=most).contains(&idle.bytes);
    let smallest = |(_, idle): &(usize, &Idle)| idle.bytes;
    let fitting = || state.idle.iter().enumerate().filter(|(_, idle)| fits(idle));
    let own = fitting()
        .filter(|(_, idle)| idle.place.is_of(queue))
        .min_by_key(smallest);
    let (i, _) = own.or_else(|| {
        fitting()
            .take(ASKED)
            .filter(|(_, idle)| is_done(current, &idle.after))
            .min_by_key(smallest)
    })?;
    Some(i)
}

/// Whether one of our own events has completed.
fn is_done(current: &Current<'_>, event: &EventCell) -> bool {
    // SAFETY: the cell owns its event, which is live while the cell is.
    unsafe { current.query(event.raw()) == Ok(true) }
}
