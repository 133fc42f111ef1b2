use std::sync::Arc;

use arrow_device::{ArrowDeviceType, Devices};
use arrow_device_cluster::ballista::DeviceEngine;
use arrow_device_datafusion::{DeviceResolver, DeviceSpec, DeviceUploads};
use ballista_core::utils::default_config_producer;
use ballista_executor::executor_process::{ExecutorProcessConfig, start_executor_process};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::filter::FilterExec;

use crate::plugin::FilterOnDevice;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Any simulated device; on a GPU, ArrowDeviceType::CUDA and "cuda:0".
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
    let devices = Arc::new(DeviceResolver::of([Devices::simulated()?]));

    // Filters of 100,000 rows or more get their rows from the device. Then the plugin's rule replaces them.
    let uploads = DeviceUploads::new(device, |node| node.is::<FilterExec>());
    let rules: [Arc<dyn PhysicalOptimizerRule + Send + Sync>; 2] =
        [Arc::new(uploads.with_min_rows(100_000)), Arc::new(FilterOnDevice)];

    let config = ExecutorProcessConfig {
        scheduler_host: "localhost".to_string(),
        override_execution_engine: Some(Arc::new(DeviceEngine::new(rules))),
        override_config_producer: Some(Arc::new(move || {
            default_config_producer().with_extension(devices.clone())
        })),
        ..ExecutorProcessConfig::default()
    };
    start_executor_process(Arc::new(config)).await?;
    Ok(())
}
