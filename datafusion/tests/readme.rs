//! The operator of the README: it compiles, it works, and it is the README's.

use std::sync::Arc;

// README {
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
// }

use arrow_device::Devices;
use arrow_device_datafusion::DeviceTransitions;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::{collect, displayable};
use datafusion::prelude::SessionContext;

#[test]
fn it_is_the_readmes() {
    let own = include_str!("readme.rs");
    let (_, own) = own.split_once("// README {\n").unwrap();
    let (own, _) = own.split_once("// }\n").unwrap();
    let readme = include_str!("../../README.md");
    assert!(readme.contains(own), "the README has another text");
    let lines = own.lines().filter(|line| !line.trim().is_empty()).count();
    assert!(lines < 60, "{lines} lines");
}

#[tokio::test]
async fn it_runs() {
    let context = SessionContext::new();
    let sql = "SELECT a, a * 2 AS b FROM (VALUES (1), (2), (NULL), (4)) AS t(a)";
    let plan = context.sql(sql).await.unwrap();
    let plan = plan.create_physical_plan().await.unwrap();
    let expected = collect(plan.clone(), context.task_ctx()).await.unwrap();
    let plan = head(plan, Devices::simulated().unwrap(), 3);
    let state = context.state();
    let plan = DeviceTransitions
        .optimize(plan, state.config_options())
        .unwrap();
    let text = displayable(&*plan).indent(false).to_string();
    let order = ["DeviceToHostExec", "HeadExec", "HostToDeviceExec"];
    let places = order.map(|name| text.find(name).expect(name));
    assert!(places.is_sorted(), "{text}");
    let result = collect(plan, context.task_ctx()).await.unwrap();
    assert_eq!(result, [expected[0].slice(0, 3)]);
}
