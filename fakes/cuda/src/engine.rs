//! Engines: one simulated device for a group of ordinals.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::str::FromStr;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::Duration;

use arrow_device::Error;
use arrow_device::device::sim::{SimConfig, SimDevice, SimMemory, SimMode, SimQueue};
use arrow_device::device::{Backend, EventPtr, RawQueue};

use crate::ffi::*;
use crate::modes::{BlockingFree, HostFunctions};

pub(crate) const LAZY: u32 = 1;
pub(crate) const PAGEABLE_EAGER: u32 = 2;
pub(crate) const NO_POOLS: u32 = 4;
pub(crate) const NO_CONCURRENT_MANAGED: u32 = 8;
pub(crate) const NO_BATCH: u32 = 16;
pub(crate) const NO_VIRTUAL_MEMORY: u32 = 32;
pub(crate) const NO_DESCRIPTORS: u32 = 64;
pub(crate) const FREE_BLOCKS: u32 = 512;
pub(crate) const INSTANT: u32 = 2048;

/// The flags of an engine that is opened with `flags`: those of the environment are added. An
/// engine cannot be lazy and instant; what it was opened with prevails.
fn with_environment(flags: u32) -> u32 {
    static FLAGS: OnceLock<u32> = OnceLock::new();
    let more = *FLAGS.get_or_init(|| environment("FAKE_CUDA_FLAGS").unwrap_or(0));
    let contrary = match flags {
        flags if flags & LAZY != 0 => INSTANT,
        flags if flags & INSTANT != 0 => LAZY,
        _ => 0,
    };
    flags | (more & !contrary)
}

/// A queue of the simulated device.
pub(crate) type Queue = Arc<dyn RawQueue>;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// How many operations of a queue have not run.
pub(crate) fn pending(queue: &Queue) -> usize {
    let sim = queue.downcast_ref::<SimQueue>();
    sim.map_or(0, SimQueue::pending_operations)
}

/// A number that the environment sets.
pub(crate) fn environment<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

/// A failure that was ordered.
struct Fault {
    name: String,
    /// Calls until it happens; 1 is the next.
    calls: u32,
    code: Code,
}

#[derive(Default)]
struct Books {
    faults: Vec<Fault>,
    fired: u32,
    /// Those of functions that belong to no engine too, by threads whose context is of this one.
    calls: BTreeMap<&'static str, u64>,
    violations: Vec<String>,
}

pub(crate) struct Engine {
    pub(crate) sim: Arc<SimDevice>,
    pub(crate) flags: u32,
    pub(crate) capacity_bytes: usize,
    pub(crate) ordinals: Range<i32>,
    queue: Queue,
    /// All queues that streams were given.
    queues: Mutex<Vec<Weak<dyn RawQueue>>>,
    pub(crate) host_functions: Arc<HostFunctions>,
    books: Mutex<Books>,
    /// What all calls return; 0 while the library works.
    shut_down: AtomicI32,
    /// What a kernel ended the engine with; 0 if none has.
    code: AtomicI32,
}

/// What is asked of an engine before a call is carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind {
    /// Whether a failure of "any function" is for this one.
    pub(crate) any: bool,
    /// Whether a failed engine answers its lasting code.
    pub(crate) lasting: Lasting,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lasting {
    Ignored,
    /// Instead of doing anything.
    Before,
    /// After the books were kept.
    After,
}

impl Engine {
    pub(crate) fn new(
        ordinals: Range<i32>,
        flags: u32,
        capacity_bytes: u64,
    ) -> Result<Arc<Self>, Error> {
        let capacity_bytes = match usize::try_from(capacity_bytes) {
            Ok(0) => 1 << 30,
            Ok(bytes) => bytes,
            Err(_) => usize::MAX,
        };
        let flags = with_environment(flags);
        let mode = if flags & LAZY != 0 {
            SimMode::Deferred
        } else {
            SimMode::Async
        };
        let config = SimConfig {
            mode,
            ..SimConfig::default()
        };
        let sim = SimDevice::new(SimConfig {
            capacity_bytes,
            ..config
        })?;
        let queue = sim.default_queue()?;
        Ok(Arc::new(Self {
            sim,
            flags,
            capacity_bytes,
            ordinals,
            queue,
            queues: Mutex::default(),
            host_functions: Arc::default(),
            books: Mutex::default(),
            shut_down: AtomicI32::new(0),
            code: AtomicI32::new(0),
        }))
    }

    pub(crate) fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Counts a call; the code that it answers instead of being carried out, if any.
    pub(crate) fn admit(&self, name: &'static str, kind: Kind) -> Outcome {
        let mut books = lock(&self.books);
        *books.calls.entry(name).or_default() += 1;
        match self.shut_down.load(Ordering::SeqCst) {
            0 => {}
            code => return Err(code),
        }
        let mut failed = None;
        books.faults.retain_mut(|fault| {
            let meant = fault.name == name || (fault.name == "*" && kind.any);
            if !meant {
                return true;
            }
            fault.calls = fault.calls.saturating_sub(1);
            if fault.calls == 0 && failed.is_none() {
                failed = Some(fault.code);
                return false;
            }
            true
        });
        if let Some(code) = failed {
            books.fired += 1;
            return Err(code);
        }
        drop(books);
        match self.lasting() {
            Some(code) if kind.lasting == Lasting::Before => Err(code),
            _ => Ok(()),
        }
    }

    /// The code that this engine has failed with.
    pub(crate) fn lasting(&self) -> Option<Code> {
        // SAFETY: no copy is queued; an empty list only asks whether the device has failed.
        let alive = unsafe { self.queue.copy(&[]) };
        alive.err().map(|error| self.code_of(&error))
    }

    /// What an error of the simulated device is called here.
    pub(crate) fn code_of(&self, error: &Error) -> Code {
        match error {
            Error::OutOfMemory { .. } => OUT_OF_MEMORY,
            Error::InvalidArgument(_) => INVALID_VALUE,
            Error::Device { code: 2, .. } => ILLEGAL_ADDRESS,
            Error::Device { code: 3, .. } => match self.code.load(Ordering::SeqCst) {
                0 => LAUNCH_FAILED,
                code => code,
            },
            // A wait inside a host function.
            Error::Device { code: 4, .. } => NOT_PERMITTED,
            _ => UNKNOWN,
        }
    }

    /// What a kernel answers so that the engine fails with this code.
    pub(crate) fn failure(&self, code: Code, text: &str) -> String {
        let _ = self
            .code
            .compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst);
        text.into()
    }

    pub(crate) fn blame(&self, text: String) {
        lock(&self.books).violations.push(text);
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        lock(&self.books).violations.clone()
    }

    pub(crate) fn fail_nth(&self, name: String, calls: u32, code: Code) {
        lock(&self.books).faults.push(Fault { name, calls, code });
    }

    pub(crate) fn clear(&self) -> u32 {
        let mut books = lock(&self.books);
        books.faults.clear();
        std::mem::take(&mut books.fired)
    }

    pub(crate) fn calls(&self, name: &str) -> u64 {
        let books = lock(&self.books);
        match name {
            "*" => books.calls.values().sum(),
            name => books.calls.get(name).copied().unwrap_or(0),
        }
    }

    /// Counts a call of a function that belongs to no engine.
    pub(crate) fn count(&self, name: &'static str) {
        *lock(&self.books).calls.entry(name).or_default() += 1;
    }

    pub(crate) fn shut_down(&self, code: Code) {
        self.shut_down.store(code, Ordering::SeqCst);
    }

    pub(crate) fn new_queue(&self) -> Outcome<Queue> {
        let queue = self.sim.new_queue();
        let queue = queue.map_err(|error| self.code_of(&error))?;
        let mut queues = lock(&self.queues);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        Ok(queue)
    }

    /// Whether some stream has work.
    fn is_busy(&self) -> bool {
        let queues: Vec<Queue> = {
            let queues = lock(&self.queues);
            queues.iter().filter_map(Weak::upgrade).collect()
        };
        queues.iter().any(|queue| pending(queue) > 0)
    }

    /// Waits while a free blocks this engine. No lock may be held.
    pub(crate) fn pass_frees(&self) {
        self.host_functions.pass_frees();
    }

    /// Begins a free in no stream's order, which blocks if frees do: until no host function is
    /// queued, and all other calls until the result is dropped. No lock may be held.
    pub(crate) fn begin_free(&self) -> Option<BlockingFree> {
        if !self.has(FREE_BLOCKS) {
            return None;
        }
        let free = self.host_functions.begin_free();
        while self.host_functions.are_under_way() {
            // On a lazy engine this is what runs them. A failed engine drops them soon.
            if self.sim.synchronize().is_err() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        Some(free)
    }

    /// Waits until all work has run, on an engine that runs it at once. Work behind a host function
    /// that blocks is not waited for. No lock may be held.
    pub(crate) fn run_at_once(&self) {
        if !self.has(INSTANT) || self.has(LAZY) {
            return;
        }
        while self.is_busy() && self.lasting().is_none() && !self.host_functions.are_blocked() {
            std::thread::yield_now();
        }
    }

    /// Records an event.
    pub(crate) fn record(self: &Arc<Self>, queue: &Queue) -> Outcome<Arc<Recorded>> {
        let event = queue.record().map_err(|error| self.code_of(&error))?;
        let engine = self.clone();
        Ok(Arc::new(Recorded { engine, event }))
    }

    /// Queues work that uses these host addresses.
    pub(crate) fn launch(
        self: &Arc<Self>,
        queue: &Queue,
        host: impl IntoIterator<Item = Range<usize>>,
        work: impl FnOnce(&mut SimMemory<'_>) -> Result<(), String> + Send + 'static,
    ) -> Outcome {
        let Some(sim) = queue.downcast_ref::<SimQueue>() else {
            return Err(UNKNOWN);
        };
        let uses = Uses::new(self, host.into_iter().collect());
        let work = move |memory: &mut SimMemory<'_>| {
            let result = work(memory);
            drop(uses);
            result
        };
        // SAFETY: the caller of the driver function guarantees what CUDA requires of the memory; no
        // `DeviceBuffer` is made of it inside this library.
        let launched = unsafe { sim.launch(work) };
        launched.map_err(|error| self.code_of(&error))
    }

    /// Fails now. Waits for the operation that is running.
    pub(crate) fn fail(self: &Arc<Self>, code: Code) -> Outcome {
        let queue = self.new_queue()?;
        let engine = self.clone();
        self.launch(&queue, None, move |_| {
            Err(engine.failure(code, "broken by the test"))
        })?;
        let _ = self.record(&queue)?.wait();
        Ok(())
    }
}

/// An event of the simulated device.
pub(crate) struct Recorded {
    engine: Arc<Engine>,
    event: EventPtr,
}

impl Recorded {
    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn query(&self) -> Outcome<bool> {
        // SAFETY: the event is live until `Drop`.
        let done = unsafe { self.engine.sim.query_event(self.event) };
        done.map_err(|error| self.engine.code_of(&error))
    }

    /// Waits. No lock may be held.
    pub(crate) fn wait(&self) -> Outcome {
        // SAFETY: the event is live until `Drop`.
        let done = unsafe { self.engine.sim.wait_event(self.event) };
        done.map_err(|error| self.engine.code_of(&error))
    }

    /// Makes a queue of the same engine wait.
    pub(crate) fn order(&self, queue: &Queue) -> Outcome {
        // SAFETY: the event is live until `Drop`; the wait stays after that.
        let done = unsafe { queue.wait(self.event) };
        done.map(|waits| assert!(waits, "queues of one engine wait for each other's events"))
            .map_err(|error| self.engine.code_of(&error))
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: this engine recorded the event, and releases it only here.
        unsafe { self.engine.sim.release_event(self.event) };
    }
}

/// Host addresses that queued work uses, and whose work it is.
type HostUse = (Arc<Engine>, Vec<Range<usize>>);

/// The host addresses in use, by a number for each piece of work.
static HOST_USES: Mutex<Option<HashMap<u64, HostUse>>> = Mutex::new(None);

/// Whether queued work uses some of these host addresses. The work of a failed engine does not:
/// it is dropped, if perhaps a little later.
pub(crate) fn host_used(range: &Range<usize>) -> bool {
    let overlaps = |used: &Range<usize>| used.start < range.end && range.start < used.end;
    let uses = lock(&HOST_USES);
    let uses = uses.iter().flat_map(|uses| uses.values());
    let engines: Vec<Arc<Engine>> = uses
        .filter(|(_, ranges)| ranges.iter().any(overlaps))
        .map(|(engine, _)| engine.clone())
        .collect();
    engines.iter().any(|engine| engine.lasting().is_none())
}

/// Host addresses in use; not any more once dropped, whether or not the work ran.
struct Uses(Option<u64>);

impl Uses {
    fn new(engine: &Arc<Engine>, host: Vec<Range<usize>>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        if host.is_empty() {
            return Self(None);
        }
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let host_use = (engine.clone(), host);
        lock(&HOST_USES)
            .get_or_insert_default()
            .insert(id, host_use);
        Self(Some(id))
    }
}

impl Drop for Uses {
    fn drop(&mut self) {
        if let (Some(id), Some(uses)) = (self.0, lock(&HOST_USES).as_mut()) {
            uses.remove(&id);
        }
    }
}
