//! The operator: keeps the rows that pass, and some of their columns. No value is copied to the
//! host.

use std::fmt;
use std::future::ready;
use std::sync::Arc;

use arrow_device::async_stream::{DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter};
use arrow_device::{Device, DeviceRecordBatch};
use arrow_device_datafusion::{DevicePlan, SendableDeviceStream, execute_child, to_datafusion};
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use datafusion::physical_plan::{ExecutionPlan, PlanProperties, displayable};
use futures::{StreamExt, TryStreamExt};

use super::kernels::{Filter, Kernels};

/// A filter with a projection on a device.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFilterExec {
    /// DataFusion's node, which this one replaces and whose properties it has.
    host: FilterExec,
    device: Device,
    filter: Arc<Filter>,
}

impl DeviceFilterExec {
    /// Returns `None` if the kernels do not support what `host` does: a predicate other than
    /// comparisons of columns with literals, or columns without a fixed width.
    pub(crate) fn in_place_of(
        host: &FilterExec,
        device: &Device,
        kernels: Kernels,
    ) -> Option<Self> {
        let filter = Filter::new(host, kernels).map(Arc::new);
        filter.map(|filter| Self {
            host: host.clone(),
            device: device.clone(),
            filter,
        })
    }
}

impl DevicePlan for DeviceFilterExec {
    fn name(&self) -> &str {
        "DeviceFilterExec"
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = displayable(&self.host).one_line().to_string();
        write!(f, ", {}", host.trim().trim_start_matches("FilterExec: "))
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.host.properties()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.host.children()
    }

    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>> {
        let host = FilterExecBuilder::from(&self.host).with_input(children[0].clone());
        let host = host.build()?;
        Ok(Arc::new(Self {
            host,
            ..self.clone()
        }))
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn expressions(&self) -> Vec<&Arc<dyn PhysicalExpr>> {
        vec![self.host.predicate()]
    }

    fn fetch(&self) -> Option<usize> {
        self.host.fetch()
    }

    fn execute_device(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let input = execute_child(self.host.input(), partition, context)?;
        let (schema, device_type) = (self.host.schema(), input.device_type());
        let (queue, filter) = (
            self.device.new_queue().map_err(to_datafusion)?,
            self.filter.clone(),
        );
        let output = input
            .try_filter(|batch| ready(batch.num_rows() > 0))
            .map(move |batch| batch.and_then(|batch| filter.launch(&batch, &queue)))
            // The number of rows that pass is known once the kernels have run. The task waits for
            // it without blocking its thread, and the next batch's kernels are queued meanwhile.
            .map(|launched| async { launched?.finish().await })
            .buffered(2)
            .try_filter(|batch| ready(batch.num_rows() > 0));
        let output = DeviceRecordBatchStreamAdapter::new(schema, device_type, output);
        Ok(match self.fetch() {
            None => Box::pin(output),
            Some(rows) => first(rows, Box::pin(output)),
        })
    }
}

/// The first `rows` rows of a stream. The rest is not read.
fn first(rows: usize, stream: SendableDeviceStream) -> SendableDeviceStream {
    let (schema, device_type) = (stream.schema(), stream.device_type());
    let output = futures::stream::try_unfold((stream, rows), async |(mut stream, left)| {
        if left == 0 {
            return Ok(None);
        }
        let Some(batch) = stream.try_next().await? else {
            return Ok(None);
        };
        let batch: DeviceRecordBatch = batch.slice(0, left.min(batch.num_rows()))?;
        let left = left - batch.num_rows();
        Ok(Some((batch, (stream, left))))
    });
    Box::pin(DeviceRecordBatchStreamAdapter::new(
        schema,
        device_type,
        output,
    ))
}
