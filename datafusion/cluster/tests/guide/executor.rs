use std::sync::Arc;

use arrow_device::{ArrowDeviceType, Devices};
use arrow_device_cluster::ballista::DeviceEngine;
use arrow_device_datafusion::{DeviceResolver, DeviceRule, DeviceSpec};
use ballista_core::utils::default_config_producer;
use ballista_executor::executor_process::{ExecutorProcessConfig, start_executor_process};

use crate::plugin::Filters;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Any simulated device; on a GPU, ArrowDeviceType::CUDA and "cuda:0".
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
    let devices = Arc::new(DeviceResolver::of([Devices::simulated()?]));

    // Rows of the host go up for the plugin's filters if they are 100,000 or more.
    let rule = DeviceRule::default().with_plugin(Arc::new(Filters)).with_uploads(device, 100_000);

    let config = ExecutorProcessConfig {
        scheduler_host: "localhost".to_string(),
        override_execution_engine: Some(Arc::new(DeviceEngine::new(rule))),
        override_config_producer: Some(Arc::new(move || {
            default_config_producer().with_extension(devices.clone())
        })),
        ..ExecutorProcessConfig::default()
    };
    start_executor_process(Arc::new(config)).await?;
    Ok(())
}
