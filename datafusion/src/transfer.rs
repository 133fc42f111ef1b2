//! Batches on their way to the host, or to another device.

use std::collections::VecDeque;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_array::{Array, RecordBatch, RecordBatchOptions};
use arrow_device::{Device, DeviceArray, DeviceRecordBatch, Queue, SyncEvent};
use arrow_schema::{ArrowError, DataType, SchemaRef};
use datafusion_execution::SendableRecordBatchStream;
use datafusion_physical_plan::coop::make_cooperative;
use datafusion_physical_plan::stream::RecordBatchStreamAdapter;
use futures::future::{MaybeDone, maybe_done, try_join_all};
use futures::stream::{BoxStream, poll_fn};
use futures::{FutureExt, Stream, StreamExt, TryFutureExt};
use tokio::runtime::Handle;

use super::memory::{DeviceReservation, Share};
use super::metrics::{DeviceMetrics, on_blocking_thread, reserved, to_datafusion};
use super::stream::{SendableDeviceStream, device_stream};
use super::upload::{fitted, typed_as};
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
    let (mut from, mut queue, runtime) = (None, None, Handle::try_current().ok());
    let start = move |batch: DeviceRecordBatch| {
        if *batch.device() == device {
            return Ok(Box::pin(ready(Ok((batch, None)))) as Coming<_>);
        }
        let to = queue_of(&device, &mut queue)?;
        let source = batch.device();
        let in_place = source.is_host_readable();
        let direct = !in_place && device.backend().relation(source.backend()).copies;
        let from = (!direct).then(|| queue_of(source, &mut from)).transpose()?;
        let mut share = Share::new(&memory, bytes_of(&batch))?;
        let runtime = runtime.clone().filter(|_| direct);
        Ok(Box::pin(async move {
            let moved = match runtime {
                // It may have to wait for sizes, or rewrite some bytes.
                Some(runtime) => {
                    let operation = "copying between devices after the end of the Tokio runtime";
                    // The share goes along: the copy goes on if nobody waits for it any more.
                    let copy = move || (batch.to_device(&to), share);
                    let moved;
                    (moved, share) = on_blocking_thread(&runtime, operation, copy).await?;
                    moved?
                }
                None if direct => batch.to_device(&to)?,
                None => {
                    let batch = batch.start_to_host(from.as_ref())?.await?;
                    if !in_place {
                        // On both sides.
                        share.resize(2 * host_bytes(&batch))?;
                    }
                    to.device().upload_on(&batch, &to)?
                }
            };
            share.resize(moved.get_array_memory_size())?;
            Ok((moved, Some(share)))
        }) as Coming<_>)
    };
    let mut moved = ahead(stream, 2, start);
    let (mut under_way, mut returned) = (UnderWay::default(), None);
    let batches = poll_fn(move |cx| {
        drop(returned.take());
        ready!(under_way.poll_room(cx));
        let next = ready!(reserved(|| moved.poll_next_unpin(cx)));
        Poll::Ready(next.map(|arrived| {
            let (batch, share) = arrived?;
            if share.is_some() {
                under_way.add(&batch);
            }
            returned = share;
            Ok(batch)
        }))
    });
    device_stream(batches, schema, device_type)
}

/// The event and the bytes of each copy that was returned before it was done, oldest first.
#[derive(Default)]
struct UnderWay(VecDeque<(SyncEvent, usize)>);

impl UnderWay {
    fn add(&mut self, batch: &DeviceRecordBatch) {
        if let Ok(Some(event)) = batch.as_struct().ready_event(None) {
            self.0.push_back((event, batch.get_array_memory_size()));
        }
    }

    /// Is pending while too many copies are under way. One that failed counts as done: its reader gets the error.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Some((oldest, _)) = self.0.front() {
            let bytes: usize = self.0.iter().map(|(_, bytes)| bytes).sum();
            let full = bytes >= BYTES || self.0.len() >= COPIES;
            let done = match full {
                true => oldest.notify(cx.waker()),
                false => oldest.is_complete(),
            };
            match done {
                Ok(false) if full => return Poll::Pending,
                Ok(false) => break,
                _ => drop(self.0.pop_front()),
            }
        }
        Poll::Ready(())
    }
}

/// Downloads a device stream for DataFusion, one batch ahead of the reader. Batches of more than `rows` rows are passed on in slices, since
/// nodes on the host count on the batch size of their session.
pub(super) fn host_stream(
    stream: SendableDeviceStream,
    device: &Device,
    schema: SchemaRef,
    metrics: DeviceMetrics,
    memory: DeviceReservation,
    rows: usize,
) -> SendableRecordBatchStream {
    // Where batches are read in place, nothing is gained by asking for the next one meanwhile.
    let in_place = device.is_host_readable();
    let there = typed_as(&schema, &stream.schema());
    let schemas = (there.clone(), schema.clone());
    let (memory, device, mut queue) = (Arc::new(memory), device.clone(), None);
    let own = memory.clone();
    let start = move |batch: DeviceRecordBatch| {
        let batch = batch.with_schema(there.clone())?;
        if in_place {
            let download = batch.start_to_host(None)?;
            return Ok(Box::pin(async move { Ok((download.await?, None)) }) as Coming<_>);
        }
        let mut share = Share::new(&memory, bytes_of(&batch))?;
        let download = download(&batch, &queue_of(&device, &mut queue)?)?;
        Ok(Box::pin(async move {
            let batch = download.await?;
            share.resize(host_bytes(&batch))?;
            Ok((batch, Some(share)))
        }) as Coming<_>)
    };
    let mut staged = Some(Staged {
        batches: ahead(stream, if in_place { 1 } else { 2 }, start).boxed(),
        returned: None,
        metrics,
        memory: own,
        schemas,
        rows: rows.max(1),
        rest: None,
    });
    let batches = poll_fn(move |cx| {
        let Some(own) = &mut staged else {
            return Poll::Ready(None);
        };
        let next = ready!(own.poll(cx));
        // What it has reserved ends with it, and its query's turn.
        if !matches!(next, Some(Ok(_))) {
            staged = None;
        }
        Poll::Ready(next)
    });
    make_cooperative(Box::pin(RecordBatchStreamAdapter::new(schema, batches)))
}

/// Batches that are downloaded.
struct Staged {
    batches: BoxStream<'static, Arrived<RecordBatch>>,
    /// What is reserved for the batch that was returned last.
    returned: Option<Share>,
    metrics: DeviceMetrics,
    memory: Arc<DeviceReservation>,
    /// With the types that the batches had on the device, and the plan's.
    schemas: (SchemaRef, SchemaRef),
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
        let (there, wanted) = &self.schemas;
        let poll = || {
            let batch = match self.rest.take() {
                Some(rest) => rest,
                None => {
                    self.returned = None;
                    let Some((batch, share)) = ready!(self.batches.poll_next_unpin(cx)?) else {
                        return Poll::Ready(None);
                    };
                    self.returned = share;
                    batch
                }
            };
            let (mut first, all) = (batch.num_rows().min(self.rows), batch.num_rows());
            loop {
                // A slice counts its nulls.
                let part = (first < all).then(|| batch.slice(0, first));
                let passed = match fitted(part.unwrap_or_else(|| batch.clone()), there, wanted) {
                    // Fewer rows have fewer values, for which the keys of their dictionary may be enough.
                    Err(Error::Arrow(e)) if first > 1 && is_overflow(&e) => {
                        first = first.div_ceil(2);
                        continue;
                    }
                    passed => passed,
                };
                let more = first < all && passed.is_ok();
                self.rest = more.then(|| batch.slice(first, all - first));
                return Poll::Ready(Some(passed));
            }
        };
        let (polled, _) = self.metrics.poll(poll, RecordBatch::num_rows);
        polled.map_err(|e| self.memory.named(to_datafusion(e)))
    }
}

fn is_overflow(e: &ArrowError) -> bool {
    matches!(e, ArrowError::DictionaryKeyOverflowError)
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
        parts.push(download.map_ok(|part| (group, part)));
    }
    let (schema, rows) = (batch.schema(), batch.num_rows());
    Ok(async move {
        let mut columns = Vec::with_capacity(schema.fields().len());
        // All are polled: one that had to read sizes starts its copies then.
        for (group, part) in try_join_all(parts).await? {
            columns.extend(group.into_iter().zip(part.into_parts().1));
        }
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

/// A queue of a device, made for its first copy.
pub(super) fn queue_of(device: &Device, queue: &mut Option<Queue>) -> Result<Queue> {
    let own = match queue.take().filter(|own| own.device() == device) {
        Some(own) => own,
        None if device.is_host_readable() => device.default_queue(),
        None => device.new_queue()?,
    };
    Ok(queue.insert(own).clone())
}

/// A batch on its way to where `T` is, and what is reserved for it if it is a copy.
type Coming<T> = Pin<Box<dyn Future<Output = Arrived<T>> + Send>>;

type Arrived<T> = Result<(T, Option<Share>)>;

/// The batches of a stream, at most so many of which are on their way while the reader has the one before.
fn ahead<T: Send + 'static>(
    mut stream: SendableDeviceStream,
    most: usize,
    mut start: impl FnMut(DeviceRecordBatch) -> Result<Coming<T>> + Send + 'static,
) -> impl Stream<Item = Arrived<T>> + Send + Unpin + 'static {
    // Oldest first.
    let mut coming = VecDeque::new();
    poll_fn(move |cx| {
        let mut ended = false;
        loop {
            // Batches at hand go on first, so that their copies overlap with the making of the next one.
            for one in &mut coming {
                let _: Poll<()> = MaybeDone::poll_unpin(one, cx);
            }
            if ended || coming.len() == most {
                break;
            }
            match stream.poll_next_unpin(cx) {
                Poll::Pending => break,
                Poll::Ready(None) => ended = true,
                Poll::Ready(Some(batch)) => {
                    let one = batch.and_then(&mut start);
                    let one = one.unwrap_or_else(|e| Box::pin(ready(Err(e))));
                    coming.push_back(maybe_done(one));
                }
            }
        }
        let Some(oldest) = coming.front_mut() else {
            return if ended {
                Poll::Ready(None)
            } else {
                Poll::Pending
            };
        };
        let Some(arrived) = Pin::new(oldest).take_output() else {
            return Poll::Pending;
        };
        coming.pop_front();
        Poll::Ready(Some(arrived))
    })
}
