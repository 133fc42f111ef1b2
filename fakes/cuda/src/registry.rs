//! What exists: engines, and the objects behind handles.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::ThreadId;

use crate::crossing::Crossing;
use crate::emulation::Emulation;
use crate::engine::{Engine, Queue, Recorded, environment, lock, pending};
use crate::ffi::*;
use crate::memory::Memory;
use crate::pages::Pages;
use crate::stack;

pub(crate) struct Context {
    pub(crate) engine: Arc<Engine>,
    pub(crate) ordinal: i32,
    /// How often a primary context is retained; `None` for others.
    pub(crate) retained: Option<usize>,
    /// The queue of the legacy default stream.
    legacy: Option<Queue>,
    /// The queues of the per-thread default streams.
    per_thread: HashMap<ThreadId, Queue>,
    /// Queues of destroyed streams, which still run what they were given.
    retired: Vec<Queue>,
}

pub(crate) struct Stream {
    pub(crate) context: usize,
    pub(crate) queue: Queue,
    /// The context that stands for its green context; 0 if it is of none.
    pub(crate) green: usize,
}

pub(crate) struct Event {
    pub(crate) context: usize,
    /// The last record of this process.
    pub(crate) recorded: Option<Arc<Recorded>>,
    /// Its state for other processes, if it is made for them.
    pub(crate) crossing: Option<Arc<Crossing>>,
}

/// Memory that may be mapped.
pub(crate) struct Physical {
    pub(crate) file: Arc<File>,
    pub(crate) bytes: usize,
    pub(crate) ordinal: i32,
    pub(crate) is_shareable: bool,
}

/// Addresses that are reserved.
#[derive(Clone)]
pub(crate) struct Reservation {
    pub(crate) engine: Arc<Engine>,
    pub(crate) pages: Arc<Pages>,
    pub(crate) bytes: usize,
}

pub(crate) struct Pool {
    pub(crate) ordinal: i32,
    /// The default pool of its device, which always exists.
    pub(crate) default: bool,
}

pub(crate) struct Module {
    pub(crate) context: usize,
    pub(crate) kernels: Vec<String>,
}

#[derive(Clone, Copy)]
pub(crate) struct Function {
    pub(crate) module: usize,
    pub(crate) context: usize,
    pub(crate) emulation: Emulation,
}

/// Objects of one kind that have not been destroyed.
pub(crate) struct Table<T> {
    kind: &'static str,
    live: BTreeMap<usize, T>,
}

impl<T> Table<T> {
    const fn new(kind: &'static str) -> Self {
        let live = BTreeMap::new();
        Self { kind, live }
    }

    pub(crate) fn peek(&self, handle: usize) -> Option<&T> {
        self.live.get(&handle)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.live.iter().map(|(handle, object)| (*handle, object))
    }

    /// Takes out those that `which` accepts.
    pub(crate) fn extract(&mut self, which: impl Fn(usize, &T) -> bool) -> Vec<(usize, T)> {
        let all = std::mem::take(&mut self.live).into_iter();
        let (out, rest) = all.partition(|(handle, object)| which(*handle, object));
        self.live = rest;
        BTreeMap::into_iter(out).collect()
    }
}

pub(crate) struct Registry {
    engines: BTreeMap<i32, Arc<Engine>>,
    pub(crate) contexts: Table<Context>,
    pub(crate) streams: Table<Stream>,
    pub(crate) events: Table<Event>,
    pub(crate) pools: Table<Pool>,
    pub(crate) physical: Table<Physical>,
    pub(crate) modules: Table<Module>,
    pub(crate) functions: Table<Function>,
    /// Retained primary contexts by ordinal.
    pub(crate) primary: BTreeMap<i32, usize>,
    /// The engines of all handles that there ever were.
    owners: BTreeMap<usize, Arc<Engine>>,
    pub(crate) memory: Memory,
    /// By their first address.
    pub(crate) reserved: BTreeMap<usize, Reservation>,
    /// The numbers of devices whose UUIDs a test has set.
    pub(crate) uuids: BTreeMap<i32, u64>,
    next_handle: usize,
}

/// The one registry. It is never held while work runs, while waiting, or while calling foreign
/// code. Locks inside it: those of an engine's books, of the host uses, of a simulated device's
/// state.
pub(crate) fn registry() -> MutexGuard<'static, Registry> {
    static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
        engines: BTreeMap::new(),
        contexts: Table::new("context"),
        streams: Table::new("stream"),
        events: Table::new("event"),
        pools: Table::new("memory pool"),
        physical: Table::new("memory handle"),
        modules: Table::new("module"),
        functions: Table::new("function"),
        primary: BTreeMap::new(),
        owners: BTreeMap::new(),
        memory: Memory::new(),
        reserved: BTreeMap::new(),
        uuids: BTreeMap::new(),
        next_handle: 0,
    });
    lock(&REGISTRY)
}

/// Records a violation, if it belongs to an engine.
pub(crate) fn blame(engine: Option<&Arc<Engine>>, text: String) {
    if let Some(engine) = engine {
        engine.blame(text);
    }
}

/// How many devices there are.
pub(crate) fn device_count() -> i32 {
    static COUNT: OnceLock<i32> = OnceLock::new();
    *COUNT.get_or_init(|| environment("FAKE_CUDA_COUNT").map_or(900, |count: i32| count.max(0)))
}

/// A stream as work is given to it.
pub(crate) struct Lane {
    pub(crate) context: usize,
    pub(crate) engine: Arc<Engine>,
    pub(crate) queue: Queue,
}

/// The legacy default stream, under both of its names.
pub(crate) fn is_legacy(stream: Handle) -> bool {
    number(stream) <= 1
}

fn is_default(stream: Handle) -> bool {
    number(stream) <= 2
}

impl Registry {
    /// A new handle, which belongs to this engine for good.
    pub(crate) fn new_handle(&mut self, engine: &Arc<Engine>) -> usize {
        self.next_handle += 1;
        let handle = 0x0CDA_0000_0000 + self.next_handle * 16;
        self.owners.insert(handle, engine.clone());
        handle
    }

    /// The engine that a handle belongs or belonged to.
    pub(crate) fn owner(&self, handle: usize) -> Option<Arc<Engine>> {
        self.owners.get(&handle).cloned()
    }

    /// The engine of an ordinal, if it was used before.
    pub(crate) fn engine(&self, ordinal: i32) -> Option<Arc<Engine>> {
        self.engines.get(&ordinal).cloned()
    }

    /// The engine of an ordinal, opened if need be.
    pub(crate) fn open_engine(&mut self, ordinal: i32) -> Outcome<Arc<Engine>> {
        if !(0..device_count()).contains(&ordinal) {
            return Err(INVALID_DEVICE);
        }
        match self.engine(ordinal) {
            Some(engine) => Ok(engine),
            None => self.open(ordinal..ordinal + 1, 0, 0).ok_or(OUT_OF_MEMORY),
        }
    }

    /// Opens an engine for the first run of unused ordinals. 0 is taken last: it is what programs
    /// use that know nothing of engines.
    pub(crate) fn open_group(
        &mut self,
        count: i32,
        flags: u32,
        capacity_bytes: u64,
    ) -> Option<i32> {
        let total = device_count();
        if !(1..=total).contains(&count) {
            return None;
        }
        let is_free =
            |first: &i32| (*first..*first + count).all(|o| !self.engines.contains_key(&o));
        let first = (1..=total - count).chain([0]).find(is_free)?;
        self.open(first..first + count, flags, capacity_bytes)?;
        Some(first)
    }

    /// Gives up an engine: its ordinals are free again. `None` while it has contexts. The answer is
    /// to be dropped without the lock, since that may wait for the engine's thread.
    pub(crate) fn close_group(&mut self, engine: &Arc<Engine>) -> Option<Vec<Arc<Engine>>> {
        let mut contexts = self.contexts.iter();
        if contexts.any(|(_, context)| Arc::ptr_eq(&context.engine, engine)) {
            return None;
        }
        drop(contexts);
        let ordinals = engine.ordinals.clone();
        self.pools
            .extract(|_, pool| ordinals.contains(&pool.ordinal));
        let mut kept = Vec::new();
        for ordinal in ordinals {
            kept.extend(self.engines.remove(&ordinal));
        }
        self.owners.retain(|_, owner| !Arc::ptr_eq(owner, engine));
        Some(kept)
    }

    fn open(&mut self, ordinals: Range<i32>, flags: u32, bytes: u64) -> Option<Arc<Engine>> {
        match Engine::new(ordinals.clone(), flags, bytes) {
            Ok(engine) => {
                self.engines
                    .extend(ordinals.map(|ordinal| (ordinal, engine.clone())));
                Some(engine)
            }
            Err(error) => {
                eprintln!("no simulated device: {error}");
                None
            }
        }
    }

    /// The engine of the calling thread's current context.
    pub(crate) fn current_engine(&self) -> Option<Arc<Engine>> {
        let context = self.contexts.peek(stack::current()?)?;
        Some(context.engine.clone())
    }

    /// The calling thread's current context, which work needs.
    pub(crate) fn current(&self) -> Outcome<(usize, &Context)> {
        let handle = stack::current().ok_or(INVALID_CONTEXT)?;
        let context = self.contexts.peek(handle);
        Ok((handle, context.ok_or(CONTEXT_IS_DESTROYED)?))
    }

    /// The object behind a handle; anything else is a violation.
    pub(crate) fn find<'a, T>(
        &self,
        table: &'a Table<T>,
        handle: Handle,
    ) -> Outcome<(usize, &'a T)> {
        let handle = number(handle);
        match table.live.get(&handle) {
            Some(object) => Ok((handle, object)),
            None => Err(self.unknown(table.kind, handle)),
        }
    }

    fn unknown(&self, kind: &str, handle: usize) -> Code {
        let owner = self.owner(handle);
        let why = match owner {
            Some(_) => "destroyed, or of another kind",
            None => "unknown",
        };
        let engine = owner.or_else(|| self.current_engine());
        blame(engine.as_ref(), format!("{kind} {handle:#x}: {why}"));
        INVALID_HANDLE
    }

    /// Adds an object; its handle.
    pub(crate) fn insert<T>(
        &mut self,
        table: fn(&mut Self) -> &mut Table<T>,
        engine: &Arc<Engine>,
        object: T,
    ) -> Handle {
        let new = self.new_handle(engine);
        table(self).live.insert(new, object);
        handle(new)
    }

    /// Takes an object out of its table; anything unknown is a violation.
    pub(crate) fn remove<T>(
        &mut self,
        table: fn(&mut Self) -> &mut Table<T>,
        handle: Handle,
    ) -> Outcome<T> {
        let objects = table(self);
        let kind = objects.kind;
        match objects.live.remove(&number(handle)) {
            Some(object) => Ok(object),
            None => Err(self.unknown(kind, number(handle))),
        }
    }

    /// Changes an object that is known to be there.
    pub(crate) fn change<T>(table: &mut Table<T>, handle: usize, with: impl FnOnce(&mut T)) {
        if let Some(object) = table.live.get_mut(&handle) {
            with(object);
        }
    }

    pub(crate) fn new_context(
        &mut self,
        engine: &Arc<Engine>,
        ordinal: i32,
        retained: Option<usize>,
    ) -> Handle {
        let context = Context {
            engine: engine.clone(),
            ordinal,
            retained,
            legacy: None,
            per_thread: HashMap::new(),
            retired: Vec::new(),
        };
        self.insert(|r| &mut r.contexts, engine, context)
    }

    /// The queue of a stream. The default streams are those of the current context.
    pub(crate) fn lane(&mut self, stream: Handle) -> Outcome<Lane> {
        if !is_default(stream) {
            let (_, Stream { context, queue, .. }) = self.find(&self.streams, stream)?;
            let (context, queue) = (*context, queue.clone());
            let engine = self.owner(context).ok_or(INVALID_HANDLE)?;
            return Ok(Lane {
                context,
                engine,
                queue,
            });
        }
        let (handle, context) = self.current()?;
        let engine = context.engine.clone();
        let thread = std::thread::current().id();
        let existing = match number(stream) {
            2 => context.per_thread.get(&thread),
            _ => context.legacy.as_ref(),
        };
        let queue = match existing {
            Some(queue) => queue.clone(),
            None => {
                let queue = engine.new_queue()?;
                let kept = queue.clone();
                Self::change(&mut self.contexts, handle, |context| match number(stream) {
                    2 => drop(context.per_thread.insert(thread, kept)),
                    _ => context.legacy = Some(kept),
                });
                queue
            }
        };
        Ok(Lane {
            context: handle,
            engine,
            queue,
        })
    }

    /// As [`lane`](Self::lane), for giving it work: its context must be current.
    pub(crate) fn work_lane(&mut self, stream: Handle) -> Outcome<Lane> {
        let lane = self.lane(stream)?;
        let (current, _) = self.current()?;
        if current == lane.context {
            Ok(lane)
        } else {
            Err(INVALID_CONTEXT)
        }
    }

    /// Keeps the queue of a destroyed stream for as long as it has work.
    pub(crate) fn retire(&mut self, stream: Stream) {
        Self::change(&mut self.contexts, stream.context, |context| {
            context.retired.retain(|queue| pending(queue) > 0);
            context.retired.push(stream.queue);
        });
    }

    /// All queues of a context that have work.
    pub(crate) fn busy_queues(&self, handle: usize) -> Vec<Queue> {
        let Some(context) = self.contexts.peek(handle) else {
            return Vec::new();
        };
        let streams = self.streams.iter();
        let streams = streams.filter(|(_, stream)| stream.context == handle);
        let own = context.legacy.iter().chain(context.per_thread.values());
        own.chain(&context.retired)
            .chain(streams.map(|(_, stream)| &stream.queue))
            .filter(|queue| pending(queue) > 0)
            .cloned()
            .collect()
    }

    /// Ends a context. What still lives in it is freed, and a violation.
    pub(crate) fn end_context(&mut self, handle: usize) {
        let Some(Context {
            engine,
            ordinal,
            retained,
            ..
        }) = self.contexts.live.remove(&handle)
        else {
            return;
        };
        let mut left = Vec::new();
        if retained.is_some() {
            self.primary.remove(&ordinal);
        }
        let streams = self.streams.extract(|_, s| s.context == handle);
        left.extend(
            streams
                .iter()
                .map(|(stream, _)| format!("stream {stream:#x}")),
        );
        let events = self.events.extract(|_, e| e.context == handle);
        left.extend(events.iter().map(|(event, _)| format!("event {event:#x}")));
        self.modules.extract(|_, m| m.context == handle);
        self.functions.extract(|_, f| f.context == handle);
        left.extend(self.memory.end_context(handle));
        for what in left {
            engine.blame(format!("{what} outlived its context {handle:#x}"));
        }
    }
}
