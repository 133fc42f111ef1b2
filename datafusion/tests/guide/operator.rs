use std::sync::Arc;

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{ArrowDeviceType, Device, DeviceRecordBatches};
use arrow_device_datafusion::{
    DeviceExec, DevicePlan, DeviceSpec, DeviceTransitions, SendableDeviceStream, execute_child,
};
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::{ExecutionPlan, PlanProperties, collect, displayable};
use datafusion::prelude::SessionContext;
use futures::StreamExt;

/// Returns the first rows of each batch.
#[derive(Clone, Debug)]
struct HeadExec {
    child: Arc<dyn ExecutionPlan>,
    device: DeviceSpec,
    rows: usize,
}

impl DevicePlan for HeadExec {
    fn name(&self) -> &str {
        "HeadExec"
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.child.properties() // the same schema, partitions and order
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
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
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let input = execute_child(&self.child, partition, device, context)?; // batches on the device
        let (schema, device_type, rows) = (input.schema(), input.device_type(), self.rows);
        let output = input.map(move |batch| {
            let batch = batch?; // work that fills it may still be queued; nothing waits here
            batch.slice(0, rows.min(batch.num_rows()))
        });
        let output = DeviceRecordBatches::from_stream(output, schema, device_type);
        Ok(Box::pin(output))
    }
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let context = SessionContext::new();
    let plan = context
        .sql("SELECT * FROM (VALUES (1), (2), (NULL), (4)) AS t(a)")
        .await?;
    let plan = plan.create_physical_plan().await?;
    let expected = collect(plan.clone(), context.task_ctx()).await?[0].slice(0, 3);

    let (child, device) = (plan, DeviceSpec::any(ArrowDeviceType::EXT_DEV));
    let head = HeadExec {
        child,
        device,
        rows: 3,
    };
    let plan: Arc<dyn ExecutionPlan> = Arc::new(DeviceExec::new(Arc::new(head)));
    // In a session: SessionStateBuilder::with_physical_optimizer_rule(Arc::new(DeviceTransitions))
    let plan = DeviceTransitions.optimize(plan, context.state().config_options())?;

    let text = displayable(&*plan).indent(false).to_string();
    let names = ["DeviceToHostExec", "HeadExec", "HostToDeviceExec"];
    assert!(
        names.map(|name| text.find(name).expect(name)).is_sorted(),
        "{text}"
    );
    assert_eq!(collect(plan, context.task_ctx()).await?, [expected]);
    Ok(())
}
