//! Memory that a library allocates slowly and frees only after waiting for the device: page-locked
//! and managed memory, and device memory where there are no pools. Blocks are kept for reuse; the
//! excess is freed on a thread of its own, and so is everything else that cannot be freed at once.

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::api::{Answer, RawStream};
use super::context::{Context, EventCell};
use super::entry::Current;
use super::runtime::{Meaning, Memory};
use crate::device::backend::DevicePtr;
use crate::device::lock;
use crate::device::order::{Asked, Place, Round, new_queue_id};
use crate::error::Result;

/// How many bytes of idle blocks are kept at most.
const IDLE_LIMIT: usize = 256 << 20;
/// How many idle blocks are kept at most.
const IDLE_BLOCKS: usize = 1024;
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
    idle: Vec<Idle>,
    idle_bytes: usize,
}

impl Blocks {
    pub(super) fn new(memory: Memory) -> Self {
        Self {
            memory,
            state: Mutex::default(),
        }
    }

    /// Returns a block of at least `bytes` bytes, for work on `queue` from now on.
    pub(super) fn take(
        &self,
        context: &Context,
        queue: u64,
        bytes: usize,
        current: &Current<'_>,
    ) -> Result<DevicePtr> {
        let grain = if bytes >= GRAIN { GRAIN } else { 256 };
        let Some(bytes) = bytes.checked_next_multiple_of(grain) else {
            return Err(context.out_of_memory(context.api().allocate(self.memory), bytes));
        };
        let reused = self.reuse(current, queue, bytes);
        let (ptr, bytes) = match reused {
            Some(idle) => {
                context.recycle(idle.after);
                (idle.ptr, idle.bytes)
            }
            None => match allocate(context, self.memory, bytes, current) {
                Err(crate::Error::OutOfMemory { .. }) => {
                    // The memory may be idle here.
                    self.free_idle(context, current);
                    (allocate(context, self.memory, bytes, current)?, bytes)
                }
                allocated => (allocated?, bytes),
            },
        };
        lock(&self.state).live.insert(ptr.address(), bytes);
        Ok(ptr)
    }

    /// Takes the smallest idle block that fits, at most twice as large, that `queue` may use
    /// without a wait.
    fn reuse(&self, current: &Current<'_>, queue: u64, bytes: usize) -> Option<Idle> {
        let mut state = lock(&self.state);
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
        let idle = state.idle.remove(i);
        state.idle_bytes -= idle.bytes;
        Some(idle)
    }

    /// Takes a block back after all work of a queue so far, which `after` stands for.
    pub(super) fn give_back(
        &self,
        context: &Arc<Context>,
        ptr: DevicePtr,
        bytes: usize,
        after: Box<EventCell>,
        place: Place,
    ) {
        let mut state = lock(&self.state);
        // Adopted memory is not in the map.
        let bytes = state.live.remove(&ptr.address()).unwrap_or(bytes);
        let idle = Idle {
            ptr,
            bytes,
            after,
            place,
        };
        state.idle_bytes = state.idle_bytes.saturating_add(bytes);
        state.idle.push(idle);
        // The oldest ones are freed: perhaps no request fits them any more.
        let mut over = Vec::new();
        while state.idle_bytes > IDLE_LIMIT || state.idle.len() > IDLE_BLOCKS {
            let oldest = state.idle.remove(0);
            state.idle_bytes -= oldest.bytes;
            over.push(oldest);
        }
        drop(state);
        self.scrap(context, over);
    }

    /// Forgets a block that does not belong to the device any more.
    pub(crate) fn forget(&self, ptr: DevicePtr) {
        lock(&self.state).live.remove(&ptr.address());
    }

    /// Frees memory that queued work may still use, once all work of the device has ended.
    pub(super) fn give_up(&self, context: &Arc<Context>, ptr: DevicePtr) {
        self.forget(ptr);
        let waste = Waste::Memory(self.memory, ptr);
        scrap(context, waste, After::Everything, None);
    }

    /// Frees idle blocks that nothing uses any more, on this thread.
    fn free_idle(&self, context: &Context, current: &Current<'_>) {
        let mut state = lock(&self.state);
        let all = take(&mut state.idle);
        let (done, rest): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|idle| is_done(current, &idle.after));
        state.idle = rest;
        state.idle_bytes -= done.iter().map(|idle| idle.bytes).sum::<usize>();
        drop(state);
        for idle in done {
            context.recycle(idle.after);
            let _ = free(self.memory, idle.ptr, current);
        }
    }

    /// Hands all idle blocks to the thread that frees.
    pub(super) fn clear(&self, context: &Arc<Context>) {
        let idle = {
            let mut state = lock(&self.state);
            state.idle_bytes = 0;
            take(&mut state.idle)
        };
        self.scrap(context, idle);
    }

    fn scrap(&self, context: &Arc<Context>, blocks: Vec<Idle>) {
        let item = |idle: Idle| Scrap {
            context: context.clone(),
            waste: Waste::Memory(self.memory, idle.ptr),
            after: After::Event(idle.after, idle.place),
            freed: None,
        };
        add(Kind::Events, blocks.into_iter().map(item).collect());
    }
}

/// Whether one of our own events has completed.
fn is_done(current: &Current<'_>, event: &EventCell) -> bool {
    // SAFETY: the cell owns its event, which is live while the cell is.
    unsafe { current.query(event.raw()) == Ok(true) }
}

/// Frees memory; may wait for the device.
fn free(memory: Memory, ptr: DevicePtr, current: &Current<'_>) -> Answer {
    // A failed device keeps its memory until its context is released; the error has no place to go.
    // SAFETY: callers pass memory that `allocate` returned for this kind, that was taken out of the
    // books, and whose uses have completed.
    unsafe { current.free(memory, ptr) }
}

/// After what something may be freed.
pub(super) enum After {
    Nothing,
    Event(Box<EventCell>, Place),
    /// All work of the context.
    Everything,
}

/// Called once memory has been freed.
type Freed = Box<dyn FnOnce() + Send>;

/// A queue that frees memory in its order.
pub(super) trait FreesInOrder: Send + Sync {
    /// Returns the queue's number.
    fn id(&self) -> u64;

    /// Tries again to free what could not be freed before; returns whether it succeeded, or never
    /// will.
    ///
    /// # Safety
    /// As [`RawQueue::free`](crate::device::RawQueue::free).
    unsafe fn try_free(&self, base: DevicePtr, bytes: usize) -> bool;
}

/// What is freed on a thread of its own, because the library may wait for the device, or refuses
/// for now.
pub(super) enum Waste {
    Memory(Memory, DevicePtr),
    /// Our own stream.
    Stream(RawStream),
    /// Memory whose queue frees it in its order, once that is allowed: the queue's stream is being
    /// captured.
    OfQueue {
        queue: Arc<dyn FreesInOrder>,
        base: DevicePtr,
        bytes: usize,
    },
}

struct Scrap {
    context: Arc<Context>,
    waste: Waste,
    after: After,
    freed: Option<Freed>,
}

/// What waits to be freed.
#[derive(Default)]
struct Heap {
    items: Vec<Scrap>,
    /// A thread is at work and will look again.
    running: bool,
}

/// What the items of a heap wait for. Waiting for everything may take long, and must not hold up
/// other items.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Events,
    Everything,
}

/// A heap's context, by its address, and kind. Each context has its own thread, since the library
/// may block it because of that device. A context lives as long as it has items here.
type Key = (usize, Kind);

static HEAPS: Mutex<BTreeMap<Key, Heap>> = Mutex::new(BTreeMap::new());

fn heaps() -> MutexGuard<'static, BTreeMap<Key, Heap>> {
    lock(&HEAPS)
}

/// Frees something once it may be freed, on a thread of its own.
pub(super) fn scrap(context: &Arc<Context>, waste: Waste, after: After, freed: Option<Freed>) {
    let kind = match after {
        After::Everything => Kind::Everything,
        After::Nothing | After::Event(..) => Kind::Events,
    };
    let item = Scrap {
        context: context.clone(),
        waste,
        after,
        freed,
    };
    add(kind, vec![item]);
}

/// Hands items of one context to its thread for this kind.
fn add(kind: Kind, items: Vec<Scrap>) {
    let Some(first) = items.first() else {
        return;
    };
    if first.context.is_forked() {
        return;
    }
    let key = (Arc::as_ptr(&first.context).addr(), kind);
    let work: fn(Key) = match kind {
        Kind::Events => free_all,
        Kind::Everything => settle_all,
    };
    let mut heaps = heaps();
    let heap = heaps.entry(key).or_default();
    heap.items.extend(items);
    if !heap.running {
        let builder = std::thread::Builder::new().name("arrow-device gpu free".into());
        // If no thread can be started, the next call tries again: this thread must not wait.
        heap.running = builder.spawn(move || work(key)).is_ok();
    }
}

/// Takes the items that a heap has got since the last call. If there are none and `idle` is true,
/// removes the heap and returns `None`: its thread must end.
fn next_items(key: Key, idle: bool) -> Option<Vec<Scrap>> {
    let mut heaps = heaps();
    let items = heaps.get_mut(&key).map(|heap| take(&mut heap.items));
    let items = items.unwrap_or_default();
    if items.is_empty() && idle {
        heaps.remove(&key);
        return None;
    }
    Some(items)
}

/// Waits for all work of a context, once for all items that are there, which may be freed then.
fn settle_all(key: Key) {
    while let Some(mut items) = next_items(key, true) {
        if let Some(item) = items.first() {
            // Even after an error nothing runs any more.
            let _ = item.context.settle();
        }
        for item in &mut items {
            item.after = After::Nothing;
        }
        add(Kind::Events, items);
    }
}

/// Frees what is ready, queries the rest again, and ends when nothing is left. Of the events of
/// a queue, and of what the library would refuse for the same reason, only the first is tried
/// again.
fn free_all(key: Key) {
    let mut pause = Duration::from_micros(50);
    let (mut asked, mut ready) = (Asked::default(), Asked::default());
    let own = new_queue_id();
    while let Some(items) = next_items(key, asked.is_empty() && ready.is_empty()) {
        for item in items {
            match item.after {
                After::Event(_, place) => asked.add(place, item),
                _ => ready.add(Place::next(item.queue().unwrap_or(own)), item),
            }
        }
        let (mut gone, mut round, mut untold) = (false, Round::default(), Vec::new());
        while let Some(done) = asked.next_done(&mut round, Scrap::has_completed) {
            gone = true;
            for item in done {
                match item.after {
                    After::Everything => untold.push(item),
                    _ => ready.add(Place::next(item.queue().unwrap_or(own)), item),
                }
            }
        }
        add(Kind::Everything, untold);
        let mut round = Round::default();
        while ready.next_done(&mut round, Scrap::give_back).is_some() {
            gone = true;
        }
        if gone {
            pause = Duration::from_micros(50);
        } else {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }
}

impl Scrap {
    /// Returns the queue that frees it in its order.
    fn queue(&self) -> Option<u64> {
        match &self.waste {
            Waste::OfQueue { queue, .. } => Some(queue.id()),
            Waste::Memory(..) | Waste::Stream(_) => None,
        }
    }

    /// Returns whether its event has completed, or cannot be queried.
    fn has_completed(&mut self) -> bool {
        let After::Event(event, _) = &self.after else {
            return true;
        };
        let context = &self.context;
        // SAFETY: the cell owns its event, which is live while the cell is.
        let ask = |current: Current<'_>| unsafe { current.query(event.raw()) };
        let answer = context.enter_even_if_failed().map(ask);
        let later = match &answer {
            Ok(Ok(done)) => !done,
            Ok(Err(failed)) => context.meaning(failed.code) == Meaning::Passing,
            Err(_) => false,
        };
        if later {
            return false;
        }
        let after = match answer.and_then(|answer| context.check(answer)) {
            Ok(_) => After::Nothing,
            // The library cannot tell, so all work must have ended.
            Err(_) => After::Everything,
        };
        if let After::Event(event, _) = std::mem::replace(&mut self.after, after) {
            self.context.recycle(event);
        }
        true
    }

    /// Frees it. Returns false if the library refuses only for now.
    fn give_back(&mut self) -> bool {
        if !self.try_give_back() {
            return false;
        }
        if let Some(freed) = self.freed.take() {
            freed();
        }
        true
    }

    fn try_give_back(&self) -> bool {
        let context = &self.context;
        match &self.waste {
            Waste::Memory(memory, ptr) => {
                let Ok(current) = context.enter_even_if_failed() else {
                    return true;
                };
                let freed = free(*memory, *ptr, &current);
                !freed.is_err_and(|failed| context.meaning(failed.code) == Meaning::Passing)
            }
            Waste::Stream(stream) => {
                if let Ok(current) = context.enter_even_if_failed() {
                    // SAFETY: the stream was created by its queue, whose drop handed it over:
                    // nothing uses it any more.
                    unsafe { current.destroy_stream(*stream) };
                }
                true
            }
            // SAFETY: the memory comes from `RawQueue::free`, whose caller guarantees that it was
            // allocated on this device, is freed once, and that the queue's stream has waited for
            // its uses.
            Waste::OfQueue { queue, base, bytes } => unsafe { queue.try_free(*base, *bytes) },
        }
    }
}
