use std::sync::Arc;

use arrow_device::{ArrowDeviceType, Devices};
use arrow_device_cluster::distributed::DeviceDistributedExt;
use arrow_device_datafusion::{DeviceResolver, DeviceRule, DeviceSpec};
use datafusion::error::DataFusionError;
use datafusion_distributed::{Worker, WorkerQueryContext};
use tonic::transport::Server;

use crate::plugin::Filters;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
    let devices = DeviceResolver::of([Devices::simulated()?]);
    let rule = DeviceRule::default().with_plugin(Arc::new(Filters)).with_uploads(device, 100_000);

    let worker = Worker::from_session_builder(move |query: WorkerQueryContext| {
        let builder = query.builder.with_device_resolver(devices.clone());
        let builder = builder.with_device_rule(rule.clone());
        async move { Ok::<_, DataFusionError>(builder.build()) }
    });
    let address = "0.0.0.0:8080".parse()?;
    Server::builder().add_service(worker.into_worker_server()).serve(address).await?;
    Ok(())
}
