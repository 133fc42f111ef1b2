//! A source that records what is asked of it.

use std::fmt;
use std::sync::{Arc, Mutex};

use arrow_device_datafusion::{
    DeviceSource, DeviceSpec, DeviceTable, ScanRequest, SendableDeviceStream,
};
use datafusion::arrow::array::{AsArray, BooleanArray, RecordBatch};
use datafusion::arrow::compute::filter_record_batch;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::common::{Constraints, Statistics};
use datafusion::logical_expr::TableProviderFilterPushDown;
use datafusion::physical_expr::{LexOrdering, Partitioning, PhysicalExpr};
use datafusion::physical_plan::execution_plan::Boundedness;

use crate::kit::*;

pub(crate) type Support = fn(&Arc<dyn PhysicalExpr>) -> TableProviderFilterPushDown;

/// What a source was asked for, in the order in which the partitions were opened.
#[derive(Clone, Default)]
pub(crate) struct Requests(Arc<Mutex<Vec<String>>>);

impl Requests {
    /// All requests so far, sorted.
    pub(crate) fn take(&self) -> Vec<String> {
        let mut requests = std::mem::take(&mut *self.0.lock().unwrap());
        requests.sort();
        requests
    }

    fn add(&self, request: String) {
        self.0.lock().unwrap().push(request);
    }
}

/// Uploads batches as they are asked for, and declares what a test says.
pub(crate) struct Watched {
    pub(crate) device: DeviceSpec,
    pub(crate) partitions: Vec<Vec<RecordBatch>>,
    pub(crate) partitioning: Option<Partitioning>,
    pub(crate) orderings: Vec<LexOrdering>,
    pub(crate) constraints: Option<Constraints>,
    pub(crate) boundedness: Boundedness,
    pub(crate) statistics: Box<dyn Fn(Option<usize>) -> Statistics + Send + Sync>,
    pub(crate) support: Support,
    /// Whether it returns only the columns that are asked for.
    pub(crate) projects: bool,
    pub(crate) requests: Requests,
    /// The rows of each batch that it returned.
    pub(crate) uploaded: Arc<Mutex<Vec<usize>>>,
}

impl Watched {
    pub(crate) fn new(sim: &Sim, partitions: &[Vec<RecordBatch>]) -> Self {
        let schema = partitions[0][0].schema();
        Self {
            device: sim.into(),
            partitions: partitions.to_vec(),
            partitioning: None,
            orderings: Vec::new(),
            constraints: None,
            boundedness: Boundedness::Bounded,
            statistics: Box::new(move |_| Statistics::new_unknown(&schema)),
            support: |_| TableProviderFilterPushDown::Unsupported,
            projects: true,
            requests: Requests::default(),
            uploaded: Arc::default(),
        }
    }

    pub(crate) fn table(self) -> Arc<DeviceTable> {
        Arc::new(DeviceTable::new(Arc::new(self)).unwrap())
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watched")
    }
}

/// The rows for which all filters are true, now.
fn filtered(batch: &RecordBatch, filters: &[Arc<dyn PhysicalExpr>]) -> RecordBatch {
    filters.iter().fold(batch.clone(), |batch, filter| {
        let keep = filter.evaluate(&batch).unwrap();
        let keep = keep.into_array(batch.num_rows()).unwrap();
        let keep: &BooleanArray = keep.as_boolean();
        filter_record_batch(&batch, keep).unwrap()
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
        let unknown = Partitioning::UnknownPartitioning(self.partitions.len());
        self.partitioning.clone().unwrap_or(unknown)
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
        (self.statistics)(partition)
    }

    fn supports_filter(&self, filter: &Arc<dyn PhysicalExpr>) -> TableProviderFilterPushDown {
        (self.support)(filter)
    }

    fn open(&self, request: ScanRequest) -> arrow_device::Result<SendableDeviceStream> {
        let filters: Vec<_> = request.filters.iter().map(ToString::to_string).collect();
        self.requests.add(format!(
            "{}: columns={:?} filters=[{}] fetch={:?}",
            request.partition,
            request.projection,
            filters.join(", "),
            request.fetch,
        ));
        assert!(self.device.fits(&request.device));
        let (asked, uploaded) = (request.clone(), self.uploaded.clone());
        let projection = asked.projection.clone().filter(|_| self.projects);
        let upload = move |batch: RecordBatch| {
            // A source that supports a filter may apply it, and this one always does.
            let mut batch = filtered(&batch, &asked.filters);
            uploaded.lock().unwrap().push(batch.num_rows());
            if let Some(projection) = &projection {
                batch = batch.project(projection)?;
            }
            asked.device.upload(&batch)
        };
        let batches = self.partitions[request.partition].clone();
        let batches: Box<dyn Iterator<Item = _> + Send> = match self.boundedness.is_unbounded() {
            true => Box::new(batches.into_iter().cycle().take(MANY)),
            false => Box::new(batches.into_iter()),
        };
        let batches = futures::stream::iter(batches.map(upload));
        match self.projects {
            true => Ok(request.stream(batches)),
            false => {
                use arrow_device::DeviceRecordBatches as Adapter;
                let device_type = request.device.id().device_type;
                Ok(Box::pin(Adapter::from_stream(
                    batches,
                    self.schema(),
                    device_type,
                )))
            }
        }
    }
}
