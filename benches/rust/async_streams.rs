//! Batches through an async stream, on one thread and on two, and what two threads need at least to hand them over.

use std::cell::Cell;
use std::future::poll_fn;
use std::hint::black_box;
use std::rc::Rc;
use std::sync::mpsc::sync_channel;
use std::task::Poll;
use std::thread;
use std::time::Duration;

use arrow_device::abi::FFI_ArrowAsyncDeviceStreamHandler;
use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, Outcome, produce};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatches, ExportOptions, ImportOptions,
    SyncPolicy,
};
use futures::StreamExt;
use futures::executor::{LocalPool, block_on};
use futures::future::{BoxFuture, join, try_join_all};
use futures::task::LocalSpawnExt;

use crate::batches::Result;

/// Times the measured part.
type Counted = fn(&mut dyn FnMut() -> Result<()>) -> Result<Duration>;

/// As many batches as Arrow C++ has on their way by itself.
pub(crate) const QUEUE: usize = 5;

type Opening = BoxFuture<'static, arrow_device::Result<AsyncDeviceRecordBatchStream>>;
type Opened = (*mut FFI_ArrowAsyncDeviceStreamHandler, Opening);

fn handler(queue: usize) -> Opened {
    // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
    unsafe { AsyncDeviceRecordBatchStream::handler(queue, ImportOptions::default()) }
}

fn produced(
    batch: &DeviceRecordBatch,
    n: usize,
    handler: *mut FFI_ArrowAsyncDeviceStreamHandler,
) -> impl Future<Output = arrow_device::Result<Outcome>> + Unpin + Send + use<> {
    let (batch, schema) = (batch.clone(), batch.schema());
    let batches = futures::stream::iter((0..n).map(move |_| Ok(batch.clone())));
    let stream = DeviceRecordBatches::from_stream(batches, schema, ArrowDeviceType::CPU);
    let options = ExportOptions::new(SyncPolicy::Event);
    // SAFETY: the handler is one of `handler`, and goes to this producer alone.
    unsafe { produce(stream, handler, options) }
}

/// Counts the batches as they arrive.
async fn consumed(opening: Opening, n: usize, count: &Cell<usize>) -> Result<()> {
    let mut batches = opening.await?;
    while let Some(batch) = batches.next().await {
        drop(black_box(batch?));
        count.set(count.get() + 1);
    }
    all(count.get(), n)
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
        let count = Cell::new(0);
        let both = join(produced(batch, n, handler), consumed(opening, n, &count));
        let (outcome, read) = block_on(both);
        completed(outcome)?;
        read
    })
}

/// How fair two streams of `n` batches are to each other and to another task, all on one thread: how many batches the second stream
/// lacks when the first has ended, and the most batches of both that arrive between two turns of that task.
///
/// # Errors
/// Those of the streams.
pub fn fairness(batch: &DeviceRecordBatch, n: usize) -> Result<(usize, usize)> {
    let arrived = Rc::new([Cell::new(0), Cell::new(0)]);
    let lacking = Rc::new(Cell::new(None));
    let mut pool = LocalPool::new();
    let mut tasks = Vec::new();
    for i in 0..2 {
        let (handler, opening) = handler(QUEUE);
        let produced = produced(batch, n, handler);
        tasks.push(
            pool.spawner()
                .spawn_local_with_handle(async { completed(produced.await) })?,
        );
        let (arrived, lacking) = (arrived.clone(), lacking.clone());
        tasks.push(pool.spawner().spawn_local_with_handle(async move {
            let read = consumed(opening, n, &arrived[i]).await;
            lacking.set(lacking.get().or(Some(n - arrived[1 - i].get())));
            read
        })?);
    }
    let most = Rc::new(Cell::new(0));
    tasks.push(pool.spawner().spawn_local_with_handle({
        let most = most.clone();
        async move {
            let mut before = 0;
            poll_fn(|context| {
                let now = arrived[0].get() + arrived[1].get();
                most.set(most.get().max(now - before));
                before = now;
                if now == 2 * n {
                    return Poll::Ready(Ok(()));
                }
                context.waker().wake_by_ref();
                Poll::Pending
            })
            .await
        }
    })?);
    pool.run_until(try_join_all(tasks))?;
    Ok((lacking.get().ok_or("no stream has ended")?, most.get()))
}

/// Each side on a thread of its own, with so many batches on their way.
pub(crate) fn threads(
    batch: &DeviceRecordBatch,
    n: usize,
    queue: usize,
    counted: Counted,
) -> Result<Duration> {
    counted(&mut || {
        let (handler, opening) = handler(queue);
        let produced = produced(batch, n, handler);
        let thread = thread::spawn(|| block_on(produced));
        let read = block_on(consumed(opening, n, &Cell::new(0)));
        completed(thread.join().map_err(|_| "the producer panicked")?)?;
        read
    })
}

/// The same batches through a channel of the standard library between two threads.
pub(crate) fn channel(
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
