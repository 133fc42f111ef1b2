//! A source that records what is asked of it.

use arrow_device_datafusion::{DeviceSink, DeviceSource, InsertRequest};
use async_trait::async_trait;
use datafusion::arrow::compute::filter_record_batch;

use crate::kit::*;

pub(crate) type Support = fn(&Arc<dyn PhysicalExpr>) -> TableProviderFilterPushDown;

/// What a source was asked for and what became of its sinks, and the rows of each batch that it returned.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen(Arc<Mutex<(Vec<String>, Vec<usize>)>>);

impl Seen {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().unwrap().0.push(what.into());
    }

    /// What was noted since the last time.
    pub(crate) fn notes(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap().0)
    }

    /// The same, sorted: partitions may be opened in any order.
    pub(crate) fn requests(&self) -> Vec<String> {
        let mut requests = self.notes();
        requests.sort();
        requests
    }

    pub(crate) fn uploaded(&self) -> Vec<usize> {
        self.0.lock().unwrap().1.clone()
    }
}

/// Uploads batches as they are asked for, and declares what a test says.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) device: DeviceSpec,
    pub(crate) partitions: Vec<Vec<RecordBatch>>,
    pub(crate) partitioning: Partitioning,
    pub(crate) orderings: Vec<LexOrdering>,
    pub(crate) constraints: Option<Constraints>,
    pub(crate) boundedness: Boundedness,
    /// Of all rows, and of each partition's.
    pub(crate) statistics: [Statistics; 2],
    pub(crate) support: Support,
    /// Whether it returns only the columns that are asked for.
    pub(crate) projects: bool,
    seen: Seen,
}

impl Watched {
    pub(crate) fn new(sim: &Sim, partitions: &[Vec<RecordBatch>]) -> Self {
        let unknown = Statistics::new_unknown(&partitions[0][0].schema());
        Self {
            device: sim.into(),
            partitions: partitions.to_vec(),
            partitioning: Partitioning::UnknownPartitioning(partitions.len()),
            orderings: Vec::new(),
            constraints: None,
            boundedness: Boundedness::Bounded,
            statistics: [unknown.clone(), unknown],
            support: |_| TableProviderFilterPushDown::Unsupported,
            projects: true,
            seen: Seen::default(),
        }
    }

    pub(crate) fn table(self) -> Arc<DeviceTable> {
        Arc::new(DeviceTable::new(Arc::new(self)).unwrap())
    }
}

/// A table of such a source, once a closure has said what it declares.
pub(super) fn declaring(
    sim: &Sim,
    partitions: &[Vec<RecordBatch>],
    declare: impl FnOnce(&mut Watched),
) -> (Arc<DeviceTable>, Seen) {
    let mut source = Watched::new(sim, partitions);
    declare(&mut source);
    let seen = source.seen.clone();
    (source.table(), seen)
}

/// The rows for which all filters are true, now.
fn filtered(batch: &RecordBatch, filters: &[Arc<dyn PhysicalExpr>]) -> RecordBatch {
    filters.iter().fold(batch.clone(), |batch, filter| {
        let keep = filter.evaluate(&batch).unwrap();
        let keep = keep.into_array(batch.num_rows()).unwrap();
        filter_record_batch(&batch, keep.as_boolean()).unwrap()
    })
}

impl DeviceSource for Watched {
    fn schema(&self) -> SchemaRef {
        self.partitions[0][0].schema()
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn partitioning(&self) -> Partitioning {
        self.partitioning.clone()
    }

    fn orderings(&self) -> Vec<LexOrdering> {
        self.orderings.clone()
    }

    fn constraints(&self) -> Option<&Constraints> {
        self.constraints.as_ref()
    }

    fn boundedness(&self) -> Boundedness {
        self.boundedness
    }

    fn statistics(&self, partition: Option<usize>) -> Statistics {
        self.statistics[usize::from(partition.is_some())].clone()
    }

    fn supports_filter(&self, filter: &Arc<dyn PhysicalExpr>) -> TableProviderFilterPushDown {
        (self.support)(filter)
    }

    fn supports_insert(&self, op: InsertOp) -> bool {
        op == InsertOp::Append
    }

    fn insert(&self, request: InsertRequest) -> arrow_device::Result<Box<dyn DeviceSink>> {
        assert!(self.device.fits(&request.device));
        self.seen.note("started");
        let seen = self.seen.clone();
        Ok(Box::new(Sink { seen, rows: 0 }))
    }

    fn open(&self, request: ScanRequest) -> arrow_device::Result<SendableDeviceStream> {
        let filters: Vec<_> = request.filters.iter().map(ToString::to_string).collect();
        let (partition, columns, fetch) = (request.partition, &request.projection, request.fetch);
        let filters = filters.join(", ");
        let asked = format!("{partition}: columns={columns:?} filters=[{filters}] fetch={fetch:?}");
        self.seen.note(asked);
        assert!(self.device.fits(&request.device));
        let (asked, seen) = (request.clone(), self.seen.clone());
        let projection = columns.clone().filter(|_| self.projects);
        let upload = move |batch: RecordBatch| {
            // A source that supports a filter may apply it, and this one always does.
            let mut batch = filtered(&batch, &asked.filters);
            seen.0.lock().unwrap().1.push(batch.num_rows());
            if let Some(projection) = &projection {
                batch = batch.project(projection)?;
            }
            asked.device.upload(&batch)
        };
        let times = if self.boundedness.is_unbounded() {
            MANY
        } else {
            1
        };
        let batches = std::iter::repeat_n(self.partitions[partition].clone(), times).flatten();
        let batches = futures::stream::iter(batches.map(upload));
        if self.projects {
            return Ok(request.stream(batches));
        }
        let device_type = request.device.id().device_type;
        let whole = DeviceRecordBatches::from_stream(batches, self.schema(), device_type);
        Ok(Box::pin(whole))
    }
}

/// Takes 32 rows at most, which nobody reads.
struct Sink {
    seen: Seen,
    rows: usize,
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.seen.note("dropped");
    }
}

#[async_trait]
impl DeviceSink for Sink {
    async fn write(&mut self, batch: DeviceRecordBatch) -> arrow_device::Result<()> {
        tokio::task::yield_now().await;
        self.rows += batch.num_rows();
        if self.rows > 32 {
            return Err(Error::InvalidArgument("the sink is full".into()));
        }
        self.seen.note("written");
        Ok(())
    }

    async fn commit(self: Box<Self>) -> arrow_device::Result<()> {
        tokio::task::yield_now().await;
        self.seen.note("committed");
        Ok(())
    }
}
