//! Tables that are read while a plan runs, and what was asked of them.

use datafusion::catalog::streaming::StreamingTable;
use datafusion::common::Result;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::streaming::PartitionStream;
use futures::channel::mpsc::{UnboundedReceiver, unbounded};

use crate::kit::*;

pub(crate) type Sent = arrow_device::Result<DeviceRecordBatch>;

/// A reader of the column of [`numbers`] that uploads what a closure gives, also if it is asked again after an error.
pub(crate) struct Reader {
    device: Device,
    next: Box<dyn FnMut() -> Option<arrow_device::Result<RecordBatch>> + Send>,
    gone: Arc<AtomicBool>,
}

impl Iterator for Reader {
    type Item = Sent;

    fn next(&mut self) -> Option<Sent> {
        let batch = (self.next)()?;
        Some(batch.and_then(|batch| self.device.upload(&batch)))
    }
}

impl DeviceRecordBatchReader for Reader {
    fn schema(&self) -> SchemaRef {
        numbers(0, 1).schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device.id().device_type
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.gone.store(true, SeqCst);
    }
}

/// A table of such readers, which are told their partition; how often they were asked, and whether one was let go.
pub(crate) fn readers_table(
    device: &Device,
    partitions: usize,
    next: impl Fn(usize, usize) -> Option<arrow_device::Result<RecordBatch>> + Send + Sync + 'static,
) -> (Arc<DeviceTable>, Arc<AtomicUsize>, Arc<AtomicBool>) {
    let (asked, gone) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
    let (of, counts, flag) = (device.clone(), asked.clone(), gone.clone());
    let next = Arc::new(next);
    let open = move |request: ScanRequest| {
        let (next, counts, mut at) = (next.clone(), counts.clone(), 0..);
        let next = move || {
            counts.fetch_add(1, SeqCst);
            next(request.partition, at.next()?)
        };
        Ok(Reader {
            device: of.clone(),
            next: Box::new(next),
            gone: flag.clone(),
        })
    };
    let schema = numbers(0, 1).schema();
    let table = DeviceTable::from_readers(schema, device.clone(), partitions, open);
    (Arc::new(table), asked, gone)
}

/// A table of one such reader, and how often it was asked.
pub(crate) fn reader_table(
    device: &Device,
    next: impl Fn(usize) -> Option<arrow_device::Result<RecordBatch>> + Send + Sync + 'static,
) -> (Arc<DeviceTable>, Arc<AtomicUsize>) {
    let (table, asked, _) = readers_table(device, 1, move |_, i| next(i));
    (table, asked)
}

/// More batches than any test reads: one that should be stopped fails, and does not hang.
pub(crate) const MANY: usize = 100_000;

/// A table of an endless reader, how often it was asked, and whether it was let go.
pub(crate) fn watched(device: &Device) -> (Arc<DeviceTable>, Arc<AtomicUsize>, Arc<AtomicBool>) {
    readers_table(device, 1, |_, i| {
        (i < MANY).then(|| Ok(numbers(i as i64 * 16, 16)))
    })
}

/// A table whose partitions are the streams that a closure makes, of the column of [`numbers`].
pub(crate) fn streams_table<S: Stream<Item = Sent> + Send + 'static>(
    device: &Device,
    partitions: usize,
    make: impl Fn(usize) -> S + Send + Sync + 'static,
) -> Arc<DeviceTable> {
    let schema = numbers(0, 1).schema();
    let open = move |request: ScanRequest| {
        let (schema, device_type) = (numbers(0, 1).schema(), request.device.id().device_type);
        let stream = make(request.partition);
        let stream = DeviceRecordBatches::from_stream(stream, schema, device_type);
        std::future::ready(Ok(stream))
    };
    let table = DeviceTable::from_streams(schema, device.clone(), partitions, open);
    Arc::new(table)
}

/// A table whose partitions give what is sent, once, and the senders.
pub(crate) fn sent(
    device: &Device,
    partitions: usize,
) -> (Arc<DeviceTable>, Vec<UnboundedSender<Sent>>) {
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..partitions).map(|_| unbounded()).unzip();
    let receivers: Vec<_> = receivers.into_iter().map(|r| Mutex::new(Some(r))).collect();
    let take = move |p: usize| -> UnboundedReceiver<Sent> {
        receivers[p].lock().unwrap().take().expect("one scan")
    };
    (streams_table(device, partitions, take), senders)
}

struct Partition<F>(SchemaRef, F);

impl<F> fmt::Debug for Partition<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Partition")
    }
}

impl<F, S> PartitionStream for Partition<F>
where
    F: Fn() -> S + Send + Sync + 'static,
    S: Stream<Item = Result<RecordBatch>> + Send + 'static,
{
    fn schema(&self) -> &SchemaRef {
        &self.0
    }

    fn execute(&self, _: Arc<TaskContext>) -> SendableRecordBatchStream {
        Box::pin(RecordBatchStreamAdapter::new(self.0.clone(), (self.1)()))
    }
}

/// A table on the host whose only partition is the stream that a closure makes.
pub(crate) fn stream_table<S: Stream<Item = Result<RecordBatch>> + Send + 'static>(
    schema: SchemaRef,
    make: impl Fn() -> S + Send + Sync + 'static,
) -> StreamingTable {
    let partition = Partition(schema.clone(), make);
    StreamingTable::try_new(schema, vec![Arc::new(partition)]).unwrap()
}

/// A table of numbers on the host whose only partition consists of what a closure returns, and how
/// often it was asked.
pub(crate) fn host_stream(
    next: impl Fn(usize) -> Option<Result<RecordBatch>> + Send + Sync + 'static,
) -> (Arc<StreamingTable>, Arc<AtomicUsize>) {
    host_stream_of(numbers(0, 1).schema(), next)
}

/// The same with another schema.
pub(crate) fn host_stream_of(
    schema: SchemaRef,
    next: impl Fn(usize) -> Option<Result<RecordBatch>> + Send + Sync + 'static,
) -> (Arc<StreamingTable>, Arc<AtomicUsize>) {
    let (asked, next) = (Arc::<AtomicUsize>::default(), Arc::new(next));
    let counts = asked.clone();
    let make = move || {
        let (next, asked) = (next.clone(), counts.clone());
        let mut at = 0..;
        futures::stream::iter(std::iter::from_fn(move || {
            asked.fetch_add(1, SeqCst);
            next(at.next()?)
        }))
    };
    (Arc::new(stream_table(schema, make)), asked)
}

/// The scan of a host table of so many batches of 16 numbers, after which an error follows.
pub(crate) async fn broken(
    good: usize,
    error: impl Fn() -> DataFusionError + Send + Sync + 'static,
) -> Plan {
    let (table, _) = host_stream(move |i| match i < good {
        true => Some(Ok(numbers(i as i64 * 16, 16))),
        false => Some(Err(error())),
    });
    scan(table).await
}
