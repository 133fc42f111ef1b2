//! [`ParallelReader`]: the parts of a source, read by several threads and returned in order.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};

use crate::abi::guard;
use crate::device::{DeviceId, Devices, Process, lock};
use crate::error::{Error, Result};
use crate::stream::read_ahead::start;
use crate::transfer::upload_bytes;

/// Why a reader that the parent process has begun cannot be used.
const FORKED: &str = "the process was forked after the first batch was asked for, and a reader of several threads cannot be used after \
     fork, because its threads exist in the parent only";
/// The most threads that are used by default.
const MOST_THREADS: usize = 8;
/// The bytes of batches that may wait by default: seven parts of 64 MiB, while an eighth is returned.
const MOST_BYTES: usize = 512 << 20;
/// What a batch counts at least, and a part that was begun: so that small ones are bounded, too.
const LEAST_BYTES: usize = 4096;

/// Reads the parts of a source on several threads and returns their batches in order: row groups of a Parquet file, or several
/// files. It is a [`RecordBatchReader`] in host memory.
///
/// With [`UploadingReader`](crate::UploadingReader), all steps of the way to a device overlap: these threads decode, the
/// consumer's thread packs, and the device copies. With [`read_ahead`](crate::UploadingReader::read_ahead), another thread packs.
///
/// ```
/// use arrow_array::{RecordBatchIterator, record_batch};
/// use arrow_device::{Devices, ParallelReader, UploadingReader};
///
/// let schema = record_batch!(("id", Int64, [0]))?.schema();
/// // Called once for each part, on the thread that reads it. For Parquet, it opens the file and selects the row group.
/// let open = |part: i64| {
///     let batch = record_batch!(("id", Int64, [part]))?;
///     Ok(RecordBatchIterator::new([Ok(batch.clone())], batch.schema()))
/// };
/// let reader = ParallelReader::new(schema, 0..8, open);
/// for on_device in UploadingReader::new(reader, &Devices::cpu()) {
///     assert_eq!(on_device?.num_rows(), 1);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Order and memory
/// Each thread reads one part at a time and takes the next one when it is done. Nothing happens before the first batch is asked
/// for; then up to 8 threads are started, one for each core ([`with_threads`](Self::with_threads)). Batches of later parts wait
/// until all earlier ones were returned. Once the waiting batches have 512 MiB ([`with_max_bytes`](Self::with_max_bytes)), the
/// threads wait, except for one batch of the part that is being returned. Each thread holds one batch more. To keep
/// `n` threads busy, the limit must hold `n - 1` whole parts: use more and smaller parts if memory is short. A batch
/// counts as many bytes as its upload moves, and at least 4 KiB. Each part that was begun counts 4 KiB more.
///
/// # Errors and panics
/// If a part fails or panics, the batches before it are returned, then one [`Error::Part`] with its number, and then the stream
/// ends. No other part is begun. If the system starts no thread, that error is the only item. In a child of the process that
/// has read from it (`fork`), there are no threads: the next item is an error there, and the last.
///
/// Dropping does not wait for the threads. Each drops its reader once the current call has returned, and ends. Panics in the drop of
/// a batch that nobody takes any more are lost.
pub struct ParallelReader {
    schema: SchemaRef,
    threads: usize,
    max_bytes: usize,
    state: State,
}

/// Opens a part.
type Open = Box<dyn FnOnce() -> Result<Box<dyn RecordBatchReader>, ArrowError> + Send>;
type Parts = Box<dyn Iterator<Item = Open> + Send>;

enum State {
    Idle(Parts),
    /// With the process of the threads.
    Running(Arc<Shared>, Process),
    Ended,
}

impl ParallelReader {
    /// Reads the `parts`, each with the reader that `open` returns for it. Both are called on the threads that read: `parts`
    /// for one item at a time, when a thread is free, `open` by several at once. Only the size hint of `parts` is asked for on the
    /// thread that asks for the first batch.
    ///
    /// All batches must [fit](crate::DeviceRecordBatchReader#schemas) `schema`, and get it.
    ///
    /// For a list of readers that are `Send`, pass `Ok` as `open`.
    pub fn new<I, R>(
        schema: SchemaRef,
        parts: I,
        open: impl Fn(I::Item) -> Result<R, ArrowError> + Send + Sync + 'static,
    ) -> Self
    where
        I: IntoIterator<IntoIter: Send + 'static, Item: Send + 'static>,
        R: RecordBatchReader + 'static,
    {
        let open = Arc::new(open);
        let parts = parts.into_iter().map(move |part| -> Open {
            let open = open.clone();
            Box::new(move || Ok(Box::new(open(part)?)))
        });
        Self {
            schema,
            threads: 0,
            max_bytes: MOST_BYTES,
            state: State::Idle(Box::new(parts)),
        }
    }

    /// Sets how many parts are read at the same time, each by a thread. 0 is the default: one for each core, but at most 8. Has
    /// no effect once the first batch was asked for.
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Sets after how many bytes of waiting batches the threads wait: 512 MiB by default. Has no effect once the first
    /// batch was asked for.
    #[must_use]
    pub fn with_max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    fn threads(&self, parts: &Parts) -> usize {
        let threads = match self.threads {
            0 => available_parallelism().map_or(1, |cores| cores.get().min(MOST_THREADS)),
            threads => threads,
        };
        let parts = parts.size_hint().1.unwrap_or(usize::MAX);
        threads.min(parts.max(1))
    }

    fn start(&self, parts: Parts) -> Result<Arc<Shared>> {
        let threads = self.threads(&parts);
        let shared = Arc::new(Shared {
            schema: self.schema.clone(),
            max_bytes: self.max_bytes,
            parts: Mutex::new(parts),
            queue: Mutex::new(Queue::default()),
            filled: Condvar::new(),
            room: Condvar::new(),
        });
        for i in 0..threads {
            let of_thread = shared.clone();
            match start("arrow-device reading", move || of_thread.run()) {
                Ok(()) => {}
                // The others read more.
                Err(_) if i > 0 => break,
                Err(e) => {
                    let text = format!("no thread to read on: {e}");
                    return Err(ArrowError::IoError(text, e).into());
                }
            }
        }
        Ok(shared)
    }

    fn read(&mut self) -> Result<Option<RecordBatch>> {
        let (shared, process) = match std::mem::replace(&mut self.state, State::Ended) {
            State::Idle(parts) => (self.start(parts)?, Process::this()),
            State::Running(shared, process) => (shared, process),
            State::Ended => return Ok(None),
        };
        if !process.is_this() {
            return Err(Error::NotSupported {
                device: DeviceId::CPU,
                operation: "next",
                reason: FORKED.into(),
            });
        }
        let next = shared.pop();
        match next {
            Ok(Some(_)) => self.state = State::Running(shared, process),
            // What later parts have read is dropped.
            _ => discard(shared.close()),
        }
        next
    }
}

/// What the threads and the consumer share.
struct Shared {
    schema: SchemaRef,
    max_bytes: usize,
    /// Locked before the queue.
    parts: Mutex<Parts>,
    queue: Mutex<Queue>,
    /// The consumer waits for this.
    filled: Condvar,
    /// The threads wait for this.
    room: Condvar,
}

#[derive(Default)]
struct Queue {
    /// The parts that were begun and not returned whole. Batches of the first are returned.
    parts: VecDeque<Part>,
    /// The number of the first of them.
    first: usize,
    /// Of all batches and parts.
    bytes: usize,
    /// No other part is begun: there is none, or one has failed.
    all_begun: bool,
    /// The number of the first part that has failed: later ones are not read any more.
    failed: Option<usize>,
    /// Nothing is taken any more.
    closed: bool,
}

#[derive(Default)]
struct Part {
    /// With the bytes of each.
    batches: VecDeque<(RecordBatch, usize)>,
    /// How it ended. `None` while it is being read.
    end: Option<Result<()>>,
}

impl Queue {
    /// Whether no batch of a part is taken any more.
    fn is_over(&self, part: usize) -> bool {
        self.closed || self.failed.is_some_and(|failed| failed < part)
    }

    /// A part that was begun and is taken.
    fn part(&mut self, number: usize) -> Option<&mut Part> {
        self.parts.get_mut(number.checked_sub(self.first)?)
    }

    /// Whether a batch of a part has to wait. If it is what the consumer waits for, it does not.
    fn is_full(&self, part: usize, bytes: usize, most: usize) -> bool {
        let is_next = part == self.first
            && (self.parts.front()).is_some_and(|first| first.batches.is_empty());
        !is_next && self.bytes.saturating_add(bytes) > most
    }

    /// Ends a part. Returns what is not needed, to be dropped without the lock: an error may be foreign.
    #[must_use]
    fn end(&mut self, number: usize, end: Result<()>) -> Option<Result<()>> {
        if end.is_err() {
            self.all_begun = true;
            self.failed = Some(self.failed.map_or(number, |failed| failed.min(number)));
        }
        match self.part(number) {
            Some(part) => part.end.replace(end),
            None => Some(end),
        }
    }

    /// Adds a part, and returns its number.
    fn begin(&mut self) -> usize {
        self.parts.push_back(Part::default());
        self.bytes += LEAST_BYTES;
        self.first + self.parts.len() - 1
    }
}

impl Shared {
    /// Reads parts until there are no others.
    fn run(&self) {
        while let Some((number, open)) = self.begin() {
            let end = guard::callback("reading a part", || self.read(number, open));
            let unused = lock(&self.queue).end(number, end);
            drop(unused);
            self.filled.notify_all();
            // Others may be reading what is not needed after an error.
            self.room.notify_all();
        }
    }

    /// Takes the next part, once there is room.
    fn begin(&self) -> Option<(usize, Open)> {
        drop(self.wait_for_room(|queue| {
            !queue.all_begun
                && !queue.closed
                && !queue.parts.is_empty()
                && queue.bytes >= self.max_bytes
        }));
        let mut parts = lock(&self.parts);
        let queue = lock(&self.queue);
        if queue.all_begun || queue.closed {
            return None;
        }
        drop(queue);
        let next = guard::call_foreign("the iterator of parts", || parts.next());
        let mut queue = lock(&self.queue);
        let mut unused = None;
        match next {
            // Meanwhile a part has failed, or the stream was dropped: what came is dropped without the lock.
            _ if queue.all_begun || queue.closed => {}
            Ok(Some(open)) => return Some((queue.begin(), open)),
            Ok(None) => queue.all_begun = true,
            Err(e) => {
                let number = queue.begin();
                unused = queue.end(number, Err(e));
            }
        }
        drop(queue);
        drop(unused);
        self.filled.notify_all();
        self.room.notify_all();
        None
    }

    fn read(&self, number: usize, open: Open) -> Result<()> {
        let reader = open()?;
        if lock(&self.queue).is_over(number) {
            return Ok(());
        }
        for batch in reader {
            let mut batch = batch?;
            if batch.schema_ref() != &self.schema {
                let on_cpu = Devices::cpu().upload(&batch)?;
                batch = on_cpu.fitted(&self.schema)?.to_host()?;
            }
            // If the batch cannot be uploaded, the upload says so.
            let bytes = upload_bytes(&batch).unwrap_or_else(|_| batch.get_array_memory_size());
            if !self.push(number, batch, bytes.max(LEAST_BYTES)) {
                break;
            }
        }
        Ok(())
    }

    /// Adds a batch, once there is room. Returns whether it is still wanted.
    fn push(&self, number: usize, batch: RecordBatch, bytes: usize) -> bool {
        let mut queue = self.wait_for_room(|queue| {
            !queue.is_over(number) && queue.is_full(number, bytes, self.max_bytes)
        });
        if queue.is_over(number) {
            // The drop of the batch runs foreign code: not under the lock.
            drop(queue);
            return false;
        }
        if let Some(part) = queue.part(number) {
            part.batches.push_back((batch, bytes));
            queue.bytes += bytes;
        }
        drop(queue);
        self.filled.notify_all();
        true
    }

    /// Waits for the next batch.
    fn pop(&self) -> Result<Option<RecordBatch>> {
        let mut queue = lock(&self.queue);
        loop {
            let Some(part) = queue.parts.front_mut() else {
                if queue.all_begun {
                    return Ok(None);
                }
                queue = self.wait_for_batches(queue);
                continue;
            };
            if let Some((batch, bytes)) = part.batches.pop_front() {
                queue.bytes -= bytes;
                self.room.notify_all();
                return Ok(Some(batch));
            }
            let Some(end) = part.end.take() else {
                queue = self.wait_for_batches(queue);
                continue;
            };
            let part = queue.first;
            end.map_err(|e| Error::Part {
                part,
                source: Arc::new(e),
            })?;
            queue.parts.pop_front();
            queue.first += 1;
            queue.bytes -= LEAST_BYTES;
            self.room.notify_all();
        }
    }

    /// Says that nothing will be taken any more, and returns what was read, for [`discard`].
    fn close(&self) -> VecDeque<Part> {
        let mut queue = lock(&self.queue);
        queue.closed = true;
        let parts = std::mem::take(&mut queue.parts);
        drop(queue);
        self.room.notify_all();
        parts
    }

    fn wait_for_room(&self, condition: impl Fn(&Queue) -> bool) -> MutexGuard<'_, Queue> {
        self.room
            .wait_while(lock(&self.queue), |queue| condition(queue))
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_batches<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.filled
            .wait(queue)
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops what nobody takes any more: batches whose owners may be foreign, and errors. Panics are lost: what is returned is more
/// important, and a reader may be dropped while a thread panics.
fn discard(parts: VecDeque<Part>) {
    for Part { batches, end } in parts {
        for (batch, _) in batches {
            let _ = guard::call_foreign("drop of a batch", || drop(batch));
        }
        let _ = guard::call_foreign("drop of an error", || drop(end));
    }
}

impl Iterator for ParallelReader {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.read().transpose()?.map_err(ArrowError::from))
    }
}

impl RecordBatchReader for ParallelReader {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}

impl Drop for ParallelReader {
    fn drop(&mut self) {
        if let State::Running(shared, process) = &self.state {
            // In a child the threads do not exist, and one of them may have held a lock.
            if process.is_this() {
                discard(shared.close());
            }
        }
    }
}

impl fmt::Debug for ParallelReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParallelReader")
            .field("schema", &self.schema)
            .field("threads", &self.threads)
            .field("max_bytes", &self.max_bytes)
            .field("ended", &matches!(self.state, State::Ended))
            .finish_non_exhaustive()
    }
}
