use std::sync::Arc;

use arrow_device::{ArrowDeviceType, Devices};
use arrow_device_cluster::distributed::DeviceDistributedExt;
use arrow_device_datafusion::{DeviceResolver, DeviceSpec, DeviceUploads};
use datafusion::error::DataFusionError;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::filter::FilterExec;
use datafusion_distributed::{Worker, WorkerQueryContext};
use tonic::transport::Server;

use crate::plugin::FilterOnDevice;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
    let devices = DeviceResolver::of([Devices::simulated()?]);
    let uploads = DeviceUploads::new(device, |node| node.is::<FilterExec>());
    let rules: Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> =
        vec![Arc::new(uploads.with_min_rows(100_000)), Arc::new(FilterOnDevice)];

    let worker = Worker::from_session_builder(move |query: WorkerQueryContext| {
        let builder = query.builder.with_device_resolver(devices.clone());
        let builder = builder.with_device_rules(rules.clone());
        async move { Ok::<_, DataFusionError>(builder.build()) }
    });
    let address = "0.0.0.0:8080".parse()?;
    Server::builder().add_service(worker.into_worker_server()).serve(address).await?;
    Ok(())
}
