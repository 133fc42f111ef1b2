//! Batches on their way to the host, or to another device.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_array::{Array, RecordBatch, RecordBatchOptions};
use arrow_device::{Device, DeviceArray, DeviceRecordBatch, Queue, SyncEvent, TransferStats};
use arrow_schema::{DataType, SchemaRef};
use datafusion_execution::SendableRecordBatchStream;
use datafusion_physical_plan::coop::make_cooperative;
use datafusion_physical_plan::stream::RecordBatchStreamAdapter;
use futures::stream::poll_fn;
use tokio::runtime::Handle;

use super::memory::{DeviceReservation, Share};
use super::metrics::{DeviceMetrics, add_elsewhere, from_blocking, reserved, to_datafusion};
use super::stream::{Item, SendableDeviceStream, device_stream};
use arrow_device::{Error, Result};

/// Columns of fewer bytes, or of less than 1/64 of their batch, share host memory: one of its own would waste as much.
const SMALL_COLUMN: usize = 16 << 10;

/// Once so many bytes or batches that were moved are still being copied, the oldest is waited for, as by `upload_reader`.
const BYTES: usize = 128 << 20;
const COPIES: usize = 64;

/// Returns the stream with its batches on `device`. Those that are there already are passed on. A device that reaches the memory of
/// a batch's copies it directly, and others go through the host, one batch ahead of the reader.
pub(super) fn on_device(
    stream: SendableDeviceStream,
    device: &Device,
    memory: DeviceReservation,
) -> SendableDeviceStream {
    let (schema, device_type) = (stream.schema(), device.id().device_type);
    let (device, memory) = (device.clone(), Arc::new(memory));
    let (mut queues, runtime) = (Queues::default(), Handle::try_current().ok());
    let start = move |batch: DeviceRecordBatch| {
        if *batch.device() == device {
            return Ok(Coming::Here(batch));
        }
        let (from, to) = (queues.of(batch.device())?, queues.of(&device)?);
        let source = batch.device();
        let in_place = source.is_host_readable();
        let direct = !in_place && device.backend().relation(source.backend()).copies;
        let bytes = bytes_of(&batch);
        let mut share = Share::new(&memory, bytes)?;
        let runtime = runtime.clone().filter(|_| direct);
        Ok(Coming::Copied(Box::pin(async move {
            let moved = match runtime {
                // It may have to wait for sizes, or rewrite some bytes.
                Some(runtime) => {
                    // The share goes along: the copy goes on if nobody waits for it any more.
                    let copy = move || {
                        let (moved, counts) = TransferStats::scope(|| batch.to_device(&to));
                        (moved, counts, share)
                    };
                    let copied = runtime.spawn_blocking(copy).await;
                    let operation = "copying between devices after the end of the Tokio runtime";
                    let (moved, counts, kept) = copied.map_err(|e| from_blocking(e, operation))?;
                    add_elsewhere(&counts);
                    share = kept;
                    moved?
                }
                None if direct => batch.to_device(&to)?,
                None => {
                    let batch = batch.start_to_host(&from)?.await?;
                    if !in_place {
                        // On both sides.
                        share.resize(2 * host_bytes(&batch))?;
                    }
                    to.device().upload_on(&batch, &to)?
                }
            };
            share.resize(moved.get_array_memory_size())?;
            Ok((moved, share))
        })))
    };
    let mut moved = Moved {
        batches: Ahead::new(stream, start),
        under_way: VecDeque::new(),
    };
    device_stream(poll_fn(move |cx| moved.poll(cx)), schema, device_type)
}

/// Batches that are on one device.
struct Moved {
    batches: Ahead<DeviceRecordBatch>,
    /// The event and the bytes of each copy that was returned before it was done, oldest first.
    under_way: VecDeque<(SyncEvent, usize)>,
}

impl Moved {
    /// Is pending while too many copies are under way. One that failed counts as done: its reader gets the error.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some((oldest, _)) = self.under_way.front() {
            let bytes: usize = self.under_way.iter().map(|(_, bytes)| bytes).sum();
            let full = bytes >= BYTES || self.under_way.len() >= COPIES;
            let done = match full {
                true => oldest.notify(cx.waker()),
                false => oldest.is_complete(),
            };
            match done {
                Ok(false) if full => return Poll::Pending,
                Ok(false) => break,
                _ => drop(self.under_way.pop_front()),
            }
        }
        Poll::Ready(())
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        self.batches.returned = None;
        ready!(self.poll_room(cx));
        let next = ready!(reserved(|| self.batches.poll_next(cx)));
        // Only a copy has a share.
        if let (Some(Ok(batch)), Some(_)) = (&next, &self.batches.returned)
            && let Ok(Some(event)) = batch.as_struct().ready_event(None)
        {
            let bytes = batch.get_array_memory_size();
            self.under_way.push_back((event, bytes));
        }
        Poll::Ready(next)
    }
}

/// Downloads a device stream for DataFusion, one batch ahead of the reader. Batches of more than `rows` rows are passed on in slices, since
/// nodes on the host count on the batch size of their session.
pub(super) fn host_stream(
    stream: SendableDeviceStream,
    schema: SchemaRef,
    metrics: Option<DeviceMetrics>,
    memory: DeviceReservation,
    rows: usize,
) -> SendableRecordBatchStream {
    let (fitted, memory, mut queues) = (schema.clone(), Arc::new(memory), Queues::default());
    let own = memory.clone();
    let start = move |batch: DeviceRecordBatch| {
        let batch = batch.with_schema(fitted.clone())?;
        let queue = queues.of(batch.device())?;
        if batch.device().is_host_readable() {
            let download = batch.start_to_host(&queue)?;
            return Ok(Coming::InPlace(Box::pin(download)));
        }
        let mut share = Share::new(&memory, bytes_of(&batch))?;
        let download = download(&batch, &queue)?;
        Ok(Coming::Copied(Box::pin(async move {
            let batch = download.await?;
            share.resize(host_bytes(&batch))?;
            Ok((batch, share))
        })))
    };
    let mut staged = Staged {
        batches: Ahead::new(stream, start),
        metrics,
        memory: own,
        rows: rows.max(1),
        rest: None,
    };
    let batches = poll_fn(move |cx| staged.poll(cx));
    make_cooperative(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
}

/// Batches that are downloaded.
struct Staged {
    batches: Ahead<RecordBatch>,
    metrics: Option<DeviceMetrics>,
    memory: Arc<DeviceReservation>,
    /// The most rows of a batch that is passed on.
    rows: usize,
    /// What is left of a batch.
    rest: Option<RecordBatch>,
}

impl Staged {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<datafusion_common::Result<RecordBatch>>> {
        ready!(self.memory.poll_turn(cx));
        let Self {
            batches,
            metrics,
            rows,
            rest,
            ..
        } = self;
        let mut poll = || {
            let batch = match rest.take() {
                Some(rest) => rest,
                None => match ready!(batches.poll_next(cx)) {
                    Some(Ok(batch)) => batch,
                    end => return Poll::Ready(end),
                },
            };
            let (first, all) = (batch.num_rows().min(*rows), batch.num_rows());
            *rest = (first < all).then(|| batch.slice(first, all - first));
            Poll::Ready(Some(Ok(batch.slice(0, first))))
        };
        let polled = match metrics {
            Some(metrics) => metrics.poll(poll, RecordBatch::num_rows).0,
            None => poll(),
        };
        if let Poll::Ready(None | Some(Err(_))) = polled {
            self.memory.end_turn();
        }
        polled.map_err(|e| self.memory.named(to_datafusion(e)))
    }
}

/// Starts to download a batch whose larger columns get memory of their own each, so that who keeps one keeps no other's.
fn download(
    batch: &DeviceRecordBatch,
    queue: &Queue,
) -> Result<impl Future<Output = Result<RecordBatch>> + Send + use<>> {
    let columns: Vec<usize> = batch.columns().map(|column| bytes(&column)).collect();
    let least = SMALL_COLUMN.max(columns.iter().sum::<usize>() / 64);
    let (mut groups, mut small, mut in_small) = (Vec::new(), Vec::new(), 0);
    for (i, bytes) in columns.into_iter().enumerate() {
        if bytes >= least {
            groups.push(vec![i]);
            continue;
        }
        small.push(i);
        in_small += bytes;
        if in_small >= least {
            groups.push(std::mem::take(&mut small));
            in_small = 0;
        }
    }
    if !small.is_empty() || groups.is_empty() {
        groups.push(small);
    }
    let mut parts = Vec::with_capacity(groups.len());
    for group in groups {
        let download = batch.project(&group)?.start_to_host(queue)?;
        parts.push((group, download));
    }
    let (schema, rows) = (batch.schema(), batch.num_rows());
    Ok(async move {
        let mut columns = Vec::with_capacity(schema.fields().len());
        // All are polled: one that had to read sizes starts its copies then.
        std::future::poll_fn(|cx| {
            let mut waiting = Vec::new();
            for (group, mut download) in parts.drain(..) {
                match Pin::new(&mut download).poll(cx) {
                    Poll::Pending => waiting.push((group, download)),
                    Poll::Ready(part) => {
                        columns.extend(group.into_iter().zip(part?.into_parts().1))
                    }
                }
            }
            parts = waiting;
            match parts.is_empty() {
                true => Poll::Ready(Ok::<_, Error>(())),
                false => Poll::Pending,
            }
        })
        .await?;
        columns.sort_unstable_by_key(|(i, _)| *i);
        let columns = columns.into_iter().map(|(_, column)| column).collect();
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        Ok(RecordBatch::try_new_with_options(
            schema, columns, &options,
        )?)
    })
}

/// Estimates how many bytes the rows take in a copy. A slice of text or lists has as large a part of the column's bytes as of its rows.
fn bytes_of(batch: &DeviceRecordBatch) -> usize {
    batch.columns().map(|column| bytes(&column)).sum()
}

fn bytes(array: &DeviceArray) -> usize {
    use DataType::*;
    let (rows, data_type) = (array.len(), array.data_type());
    let buffer = |i| array.buffer(i).map_or(0, |buffer| buffer.len());
    let children = (0..array.num_children()).filter_map(|i| array.child(i));
    let children: usize = children.map(|child| bytes(&child)).sum();
    let from = |first| (first..array.num_buffers()).map(buffer).sum::<usize>() + children;
    let width = match data_type {
        FixedSizeBinary(size) => usize::try_from(*size).ok(),
        Dictionary(keys, _) => keys.primitive_width(),
        Utf8View | BinaryView => Some(size_of::<u128>()),
        Struct(_) | FixedSizeList(..) => Some(0),
        other => other.primitive_width(),
    };
    if let Some(width) = width {
        let validity = match array.null_count() {
            Some(0) => 0,
            _ => rows.div_ceil(8),
        };
        // What else there is moves as a whole, or is cut to these rows.
        return rows * width + validity + from(2);
    }
    let all_rows = match data_type {
        Utf8 | Binary | List(_) | Map(..) => (buffer(1) / 4).saturating_sub(1),
        LargeUtf8 | LargeBinary | LargeList(_) => (buffer(1) / 8).saturating_sub(1),
        Boolean => buffer(1) * 8,
        _ => rows,
    };
    match (from(0) as u128 * rows as u128).checked_div(all_rows as u128) {
        Some(part) if rows < all_rows => part as usize,
        _ => from(0),
    }
}

/// Returns the bytes of the buffers of a batch that came down.
fn host_bytes(batch: &RecordBatch) -> usize {
    let columns = batch.columns().iter();
    columns.map(|column| column.get_buffer_memory_size()).sum()
}

/// A queue of each device, made for its first copy.
#[derive(Default)]
struct Queues(Vec<Queue>);

impl Queues {
    fn of(&mut self, device: &Device) -> Result<Queue> {
        if let Some(queue) = self.0.iter().find(|queue| queue.device() == device) {
            return Ok(queue.clone());
        }
        let queue = match device.is_host_readable() {
            true => device.default_queue(),
            false => device.new_queue()?,
        };
        self.0.push(queue.clone());
        Ok(queue)
    }
}

type Copy<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// A batch on its way to where `T` is.
enum Coming<T> {
    /// It was there.
    Here(T),
    /// It becomes ready where it is: nothing is gained by asking for the next one meanwhile.
    InPlace(Copy<T>),
    Copied(Copy<(T, Share)>),
    Arrived(Result<(T, Share)>),
}

/// The batches of a stream, each copied while the reader has the one before. What they take is reserved until the reader asks for
/// the next one.
struct Ahead<T> {
    /// `None` after its end or an error.
    stream: Option<SendableDeviceStream>,
    start: Box<dyn FnMut(DeviceRecordBatch) -> Result<Coming<T>> + Send>,
    /// Oldest first. An error is the last.
    coming: VecDeque<Coming<T>>,
    /// Of the batch that was returned last.
    returned: Option<Share>,
}

impl<T> Ahead<T> {
    fn new(
        stream: SendableDeviceStream,
        start: impl FnMut(DeviceRecordBatch) -> Result<Coming<T>> + Send + 'static,
    ) -> Self {
        Self {
            stream: Some(stream),
            start: Box::new(start),
            coming: VecDeque::new(),
            returned: None,
        }
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<T>>> {
        self.returned = None;
        loop {
            // Batches at hand go on first, so that their copies overlap with the making of the next one.
            for coming in &mut self.coming {
                match coming {
                    Coming::Copied(copy) => {
                        if let Poll::Ready(arrived) = copy.as_mut().poll(cx) {
                            *coming = Coming::Arrived(arrived);
                        }
                    }
                    Coming::InPlace(copy) => {
                        if let Poll::Ready(ready) = copy.as_mut().poll(cx) {
                            *coming = match ready {
                                Ok(batch) => Coming::Here(batch),
                                Err(e) => Coming::Arrived(Err(e)),
                            };
                        }
                    }
                    Coming::Here(_) | Coming::Arrived(_) => {}
                }
            }
            let wanted = match self.coming.front() {
                Some(Coming::Here(_) | Coming::InPlace(_)) => false,
                _ => self.coming.len() < 2,
            };
            let Some(stream) = self.stream.as_mut().filter(|_| wanted) else {
                break;
            };
            match stream.as_mut().poll_next(cx) {
                Poll::Pending => break,
                Poll::Ready(None) => self.stream = None,
                Poll::Ready(Some(batch)) => {
                    let coming = batch.and_then(&mut self.start);
                    if coming.is_err() {
                        self.stream = None;
                    }
                    let coming = coming.unwrap_or_else(|e| Coming::Arrived(Err(e)));
                    self.coming.push_back(coming);
                }
            }
        }
        let oldest = match self.coming.pop_front() {
            None if self.stream.is_none() => return Poll::Ready(None),
            None => return Poll::Pending,
            Some(Coming::Here(batch)) => return Poll::Ready(Some(Ok(batch))),
            Some(Coming::Arrived(arrived)) => arrived,
            Some(coming) => {
                self.coming.push_front(coming);
                return Poll::Pending;
            }
        };
        Poll::Ready(Some(match oldest {
            Ok((batch, share)) => {
                self.returned = Some(share);
                Ok(batch)
            }
            Err(e) => {
                self.stream = None;
                self.coming.clear();
                Err(e)
            }
        }))
    }
}
