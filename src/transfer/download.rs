//! [`Download`]: device memory to host memory: reads of sizes, then one list of copies into one host buffer.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;

use crate::data::host::to_batch;
use crate::data::numbers::Numbers;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{CopyKind, CopyOp, Counters, Device, Devices, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::memory::{Memory, Owner, Reading, Ready};
use crate::transfer::plan::{Parts, Plan, Scope, place, walk};
use crate::transfer::region::Rewrite;

/// A copy of an array (`T` is [`ArrayRef`](arrow_array::ArrayRef)) or of a batch ([`RecordBatch`]) to the host that was started and may still be
/// running. [`DeviceArray::start_to_host`] and [`DeviceRecordBatch::start_to_host`] make one.
///
/// Poll it ([`is_ready`](Self::is_ready)), block on it ([`wait`](Self::wait)) or await it: it is a [`Future`], which the device
/// wakes on any executor and whose polls never block. Dropping it gives up the data; the memory that the copies use stays alive
/// until they have completed.
///
/// ```
/// use arrow_array::record_batch;
/// use arrow_device::Devices;
/// # fn main() -> arrow_device::Result<()> {
/// let device = Devices::simulated()?;
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// let download = device.upload(&batch)?.start_to_host(None)?; // nothing waits yet
/// // ... other work of this thread ...
/// assert_eq!(download.wait()?, batch);
/// # Ok(())
/// # }
/// ```
#[must_use = "the data is lost if the download is dropped"]
#[derive(Debug)]
pub struct Download<T> {
    array: DeviceArray,
    scope: Scope,
    queues: DownloadQueues,
    /// What the next step has to wait for.
    wait: Option<SyncEvent>,
    state: State,
    /// Makes the data of the array that has arrived.
    make: fn(&DeviceArray, Option<&SchemaRef>) -> Result<T>,
    schema: Option<SchemaRef>,
}

/// How far a download is. Between two steps there is an event to wait for.
#[derive(Debug)]
enum State {
    /// Numbers that are known, and those that are being read.
    Planning(Numbers),
    Copies(Plan, Reading),
    /// The host reads the array where it is.
    InPlace,
    Over,
}

impl<T> Download<T> {
    pub(super) fn new(
        array: DeviceArray,
        schema: Option<SchemaRef>,
        queues: impl Into<DownloadQueues>,
        make: fn(&DeviceArray, Option<&SchemaRef>) -> Result<T>,
    ) -> Self {
        Self {
            array,
            scope: Scope::Rows,
            queues: queues.into(),
            wait: None,
            state: State::Planning(Numbers::default()),
            make,
            schema,
        }
    }

    /// Takes the steps before the first wait, unless the host reads the array where it is. Does not block.
    pub(super) fn started(mut self) -> Result<Self> {
        if !self.is_in_place() {
            self.drive(|_, _| Ok(false))?;
        }
        Ok(self)
    }

    /// Returns whether [`wait`](Self::wait) would return at once. Never blocks. Once sizes that are stored in device memory have
    /// been read, this starts the copies.
    ///
    /// # Errors
    /// Returns the errors that the device reports, and [`Error::InvalidInput`] if a size that is
    /// stored in device memory is impossible. The download is over then: later calls return an error.
    pub fn is_ready(&mut self) -> Result<bool> {
        self.drive(|event, _| event.is_complete())
    }

    /// Blocks this thread until the data has arrived, and returns it. That is one host wait for the copies, none if
    /// [`is_ready`](Self::is_ready) has returned `true`, and one more for each read of sizes that is still running or not started.
    ///
    /// # Errors
    /// As [`DeviceArray::to_host`].
    pub fn wait(mut self) -> Result<T> {
        if self.is_in_place() && matches!(self.state, State::Planning(_)) {
            // Who reads the array waits for it.
            self.state = State::InPlace;
        }
        self.drive(|event, _| event.wait().map(|()| true))?;
        self.take()
    }

    /// As the future, which then returns the data at once, as [`wait`](Self::wait) does.
    pub(crate) fn poll_arrived(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let arrived = self.drive(|event, _| match event.poll(cx) {
            Poll::Ready(done) => done.map(|()| true),
            Poll::Pending => Ok(false),
        });
        match arrived {
            Ok(false) => Poll::Pending,
            arrived => Poll::Ready(arrived.map(drop)),
        }
    }

    /// Whether a poll has found that the data has arrived.
    #[cfg(feature = "async")]
    pub(crate) fn has_arrived(&self) -> bool {
        self.wait.is_none() && matches!(self.state, State::Copies(..) | State::InPlace)
    }

    /// Whether nothing is gained by an early start: the host reads the memory in place.
    pub(crate) fn is_in_place(&self) -> bool {
        self.array.device().is_host_readable()
    }

    /// Takes steps as long as `passes` says that what they wait for has completed, or makes this thread wait for it; it is also told
    /// whether the copies are queued. Returns whether the data has arrived. An error ends the download.
    fn drive(&mut self, mut passes: impl FnMut(&SyncEvent, bool) -> Result<bool>) -> Result<bool> {
        let mut go = || {
            loop {
                let queued = matches!(self.state, State::Copies(..) | State::InPlace);
                if let Some(event) = &self.wait {
                    if !passes(event, queued)? {
                        return Ok(false);
                    }
                }
                self.wait = None;
                if queued {
                    return Ok(true);
                }
                self.step()?;
            }
        };
        let arrived = go();
        if arrived.is_err() {
            // The copies may still run: dropping the state keeps what they use, and nothing reads it.
            self.state = State::Over;
            self.wait = None;
        }
        arrived
    }

    /// Takes the next step, once what it has to wait for has completed: plans, and starts the copies, or else a read of the numbers that the
    /// plan lacks. Does not block.
    fn step(&mut self) -> Result<()> {
        let State::Planning(mut numbers) = std::mem::replace(&mut self.state, State::Over) else {
            return Err(over());
        };
        let (array, queue) = (&self.array, &self.queues.copies);
        let event = if self.is_in_place() {
            self.state = State::InPlace;
            array.ready_event(queue)?
        } else {
            let (of, scope) = (array.data_type(), self.scope);
            let rows = Parts::from([array.view()]);
            let planned = numbers.walk(|numbers| {
                walk(&[array], scope, None, numbers, |planner| {
                    planner.node(of, &rows)
                })
            })?;
            match planned {
                Some(plan) => {
                    let reading = copy(&plan, array, queue)?;
                    let event = reading.event().cloned();
                    self.state = State::Copies(plan, reading);
                    event
                }
                None if numbers.reads_in_place(array.device()) && !array.is_ready()? => {
                    self.state = State::Planning(numbers);
                    array.ready_event(queue)?
                }
                None => {
                    let event = numbers.start(&[array], Some(&self.queues.sizes))?;
                    self.state = State::Planning(numbers);
                    event
                }
            }
        };
        self.wait = event;
        Ok(())
    }

    /// Returns the data, whose copies were waited for. Later calls return an error.
    fn take(&mut self) -> Result<T> {
        let array = match std::mem::replace(&mut self.state, State::Over) {
            State::InPlace => self.array.clone(),
            State::Copies(plan, reading) => arrived(&self.array, plan, reading)?,
            _ => return Err(over()),
        };
        (self.make)(&array, self.schema.as_ref())
    }
}

fn over() -> Error {
    Error::argument("the download is over: it has returned its data or an error")
}

/// Queues the copies of a plan to one buffer of the device's pool. Does not wait.
fn copy(plan: &Plan, array: &DeviceArray, queue: &Queue) -> Result<Reading> {
    let buffer = array.device().host_buffer(plan.bytes)?;
    let base = buffer.as_device_ptr();
    let copied = plan.regions.iter().filter(|region| region.source() > 0);
    let copies = copied.map(|region| {
        let (dst, bytes) = (base.offset(region.dst), region.source());
        CopyOp::new(CopyKind::DeviceToHost, region.src, dst, bytes)
    });
    let copies: Vec<_> = copies.collect();
    // SAFETY: the plan's sources lie in the array's buffers, in memory of its owners; its destinations lie in the buffer, which has
    // room for each region and its source.
    unsafe { Reading::start(queue, array.owners(), &copies, buffer) }
}

/// Changes what was copied where it must be, and returns the array that it is.
fn arrived(array: &DeviceArray, mut plan: Plan, reading: Reading) -> Result<DeviceArray> {
    let buffer = reading.finish()?;
    let base = buffer.as_device_ptr();
    for region in &plan.regions {
        let out = base.offset(region.dst);
        let src = match region.rewrite {
            Rewrite::Made => region.src,
            _ => out,
        };
        let is_changed = !matches!(
            region.rewrite,
            Rewrite::None | Rewrite::Bits { skip: 0, .. }
        );
        if is_changed {
            Counters::add(&array.device().counters().host_copied_bytes, region.len);
        }
        // SAFETY: the copies into the buffer are done, where the plan gave the region and its source room of their own.
        unsafe { region.write(src, out) };
    }
    let owner = Owner::new(Devices::cpu(), Memory::Host(buffer), Ready::Now);
    place(&mut plan.root, base, &Arc::new(owner));
    Ok(array.like(Devices::cpu(), plan.root))
}

impl Download<RecordBatch> {
    /// Makes a download of a batch that starts with its first poll.
    pub(crate) fn lazy(batch: &DeviceRecordBatch, queues: impl Into<DownloadQueues>) -> Self {
        let (array, schema) = (batch.as_struct().clone(), batch.schema());
        Self::new(array, Some(schema), queues, |array, schema| {
            let schema = schema.ok_or_else(over)?;
            to_batch(schema, array)
        })
    }

    /// As [`lazy`](Self::lazy), but queues the copies before this returns, unless the host reads the batch where it is. Blocks for sizes
    /// that are stored in device memory.
    pub(crate) fn queued(batch: &DeviceRecordBatch, queues: DownloadQueues) -> Result<Self> {
        let mut this = Self::lazy(batch, queues);
        if !this.is_in_place() {
            this.drive(|event, queued| Ok(!queued && event.wait().map(|()| true)?))?;
        }
        Ok(this)
    }
}

impl Download<DeviceArray> {
    /// Makes a download to an array on the CPU, or to the array itself if the host can read it, that starts with its first poll.
    pub(crate) fn of_scope(array: DeviceArray, scope: Scope, queue: Queue) -> Self {
        let this = Self::new(array, None, queue, |array, _| Ok(array.clone()));
        Self { scope, ..this }
    }
}

impl<T> Future for Download<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        ready!(self.poll_arrived(cx))?;
        Poll::Ready(self.take())
    }
}

/// The queues of a download, which belong to the array's device.
#[derive(Clone, Debug)]
pub(crate) struct DownloadQueues {
    pub(crate) copies: Queue,
    /// For reads of sizes that are stored in device memory, which come before the copies.
    sizes: Queue,
}

impl DownloadQueues {
    /// Makes queues for downloads one after the other. Sizes are not read behind the copies of an earlier download: a wait
    /// for them would be one for those.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let (copies, sizes) = (device.new_queue()?, device.new_queue()?);
        Ok(Self { copies, sizes })
    }
}

impl From<Queue> for DownloadQueues {
    fn from(copies: Queue) -> Self {
        let sizes = copies.clone();
        Self { copies, sizes }
    }
}
