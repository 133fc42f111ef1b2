//! Batches through an async stream, on one thread and on two, and what two threads need at least to hand them over.

use std::hint::black_box;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use arrow_device::async_stream::{
    AsyncDeviceRecordBatchStream, AsyncStreamHandler, DeviceRecordBatchStreamAdapter, Opening,
    Outcome, Produce, ProduceOptions, produce,
};
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, ExportOptions, ImportOptions, SyncPolicy};
use futures::StreamExt;
use futures::executor::block_on;
use futures::future::join;

use crate::batches::Result;

/// Times the measured part.
type Counted = fn(&mut dyn FnMut() -> Result<()>) -> Result<Duration>;

/// As many batches as Arrow C++ has on their way by itself.
const QUEUE: usize = 5;

type Opened = (AsyncStreamHandler, Opening);
type Produced = Produce<Adapter>;
type Adapter = DeviceRecordBatchStreamAdapter<futures::stream::Iter<Batches>>;
type Batches = Box<dyn Iterator<Item = arrow_device::Result<DeviceRecordBatch>> + Send>;

fn handler(queue: usize) -> Opened {
    // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
    unsafe { AsyncDeviceRecordBatchStream::handler(queue, ImportOptions::default()) }
}

fn produced(batch: &DeviceRecordBatch, n: usize, handler: AsyncStreamHandler) -> Produced {
    let (batch, schema) = (batch.clone(), batch.schema());
    let batches: Batches = Box::new((0..n).map(move |_| Ok(batch.clone())));
    let batches = futures::stream::iter(batches);
    let stream = DeviceRecordBatchStreamAdapter::new(schema, ArrowDeviceType::CPU, batches);
    produce(
        stream,
        handler.into_ffi(),
        ProduceOptions::new(ExportOptions::new(SyncPolicy::Event)),
    )
}

async fn consumed(opening: Opening, n: usize) -> Result<()> {
    let mut batches = opening.await?;
    let mut count = 0;
    while let Some(batch) = batches.next().await {
        drop(black_box(batch?));
        count += 1;
    }
    all(count, n)
}

fn all(count: usize, n: usize) -> Result<()> {
    if count == n {
        return Ok(());
    }
    Err(format!("{count} of {n} batches").into())
}

fn completed(outcome: arrow_device::Result<Outcome>) -> Result<()> {
    match outcome? {
        Outcome::Completed => Ok(()),
        other => Err(format!("{other:?}").into()),
    }
}

/// Both sides by turns on one thread.
pub(crate) fn one_thread(
    batch: &DeviceRecordBatch,
    n: usize,
    counted: Counted,
) -> Result<Duration> {
    counted(&mut || {
        let (handler, opening) = handler(QUEUE);
        let both = join(produced(batch, n, handler), consumed(opening, n));
        let (outcome, read) = block_on(both);
        completed(outcome)?;
        read
    })
}

/// Each side on a thread of its own.
pub(crate) fn two_threads(
    batch: &DeviceRecordBatch,
    n: usize,
    counted: Counted,
) -> Result<Duration> {
    threads(batch, n, QUEUE, counted)
}

/// The same with one batch at a time, which is requested once the one before has arrived.
pub(crate) fn single(batch: &DeviceRecordBatch, n: usize, counted: Counted) -> Result<Duration> {
    threads(batch, n, 1, counted)
}

fn threads(
    batch: &DeviceRecordBatch,
    n: usize,
    queue: usize,
    counted: Counted,
) -> Result<Duration> {
    counted(&mut || {
        let (handler, opening) = handler(queue);
        let produced = produced(batch, n, handler);
        let thread = thread::spawn(|| block_on(produced));
        let read = block_on(consumed(opening, n));
        completed(thread.join().map_err(|_| "the producer panicked")?)?;
        read
    })
}

/// The same batches through a channel of the standard library between two threads.
pub(crate) fn channel(batch: &DeviceRecordBatch, n: usize, counted: Counted) -> Result<Duration> {
    through_channel(batch, n, QUEUE, counted)
}

/// Each batch is taken before the next is sent, as where they are requested one by one.
pub(crate) fn channel_single(
    batch: &DeviceRecordBatch,
    n: usize,
    counted: Counted,
) -> Result<Duration> {
    through_channel(batch, n, 0, counted)
}

fn through_channel(
    batch: &DeviceRecordBatch,
    n: usize,
    queue: usize,
    counted: Counted,
) -> Result<Duration> {
    counted(&mut || {
        let batch = batch.clone();
        let (sender, receiver) = sync_channel(queue);
        let thread = thread::spawn(move || (0..n).try_for_each(|_| sender.send(batch.clone())));
        let count = receiver.into_iter().map(black_box).count();
        thread.join().map_err(|_| "the producer panicked")??;
        all(count, n)
    })
}
