use std::sync::Arc;

use arrow_device::Device;
use arrow_device::async_stream::{DeviceRecordBatchStream, DeviceRecordBatchStreamAdapter};
use arrow_device_datafusion::{DeviceExec, DevicePlan, SendableDeviceStream, execute_child};
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::physical_plan::{ExecutionPlan, PlanProperties};
use futures::StreamExt;

/// Gives the first rows of each batch.
#[derive(Clone, Debug)]
struct HeadExec {
    child: Arc<dyn ExecutionPlan>,
    device: Device,
    rows: usize,
}

impl DevicePlan for HeadExec {
    fn name(&self) -> &str {
        "HeadExec"
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.child.properties() // the same schema, partitions and order
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.child]
    }

    fn with_children(&self, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn DevicePlan>> {
        let (child, own) = (children[0].clone(), self.clone());
        Ok(Arc::new(Self { child, ..own }))
    }

    fn execute_device(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let input = execute_child(&self.child, partition, context)?; // batches on the device
        let (schema, device_type, rows) = (input.schema(), input.device_type(), self.rows);
        let output = input.map(move |batch| {
            let batch = batch?; // its values may not be there yet: work is queued, nothing waits
            batch.slice(0, rows.min(batch.num_rows()))
        });
        let output = DeviceRecordBatchStreamAdapter::new(schema, device_type, output);
        Ok(Box::pin(output))
    }
}

/// The operator in a plan; what is on the host goes up, once `DeviceTransitions` has run.
fn head(child: Arc<dyn ExecutionPlan>, device: Device, rows: usize) -> Arc<dyn ExecutionPlan> {
    let plan = HeadExec {
        child,
        device,
        rows,
    };
    Arc::new(DeviceExec::new(Arc::new(plan)))
}
