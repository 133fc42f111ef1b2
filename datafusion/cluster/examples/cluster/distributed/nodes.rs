//! A coordinator and workers with devices, on this machine.

use std::net::Ipv4Addr;
use std::sync::Arc;

use arrow_device::ArrowDeviceType;
use arrow_device_cluster::codec::DeviceCodec;
use arrow_device_cluster::distributed::DeviceDistributedExt;
use arrow_device_datafusion::{DeviceOptions, DeviceResolver, DeviceRule, DeviceSpec};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_distributed::{
    DistributedExt, SessionStateBuilderExt, Worker, WorkerPlanRewriteEvent,
    WorkerPlanRewriteEventResponse, WorkerQueryContext, WorkerResolver,
};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use url::Url;

use crate::codec::FilterCodec;
use crate::device_filter::FilterPlugin;

pub(crate) const SIM: DeviceSpec = DeviceSpec::any(ArrowDeviceType::EXT_DEV);

/// Who inserts the device operators.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    Workers,
    Coordinator,
}

/// The plugin: filters go to simulated devices, whatever the number of rows.
pub(crate) fn rule() -> DeviceRule {
    let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::default()));
    rule.with_uploads(SIM, 0)
}

/// What travels, if the coordinator inserts the operators.
pub(crate) fn codec() -> DeviceCodec {
    DeviceCodec::new().with_plan(Arc::new(FilterCodec::default()))
}

/// The workers, at fixed addresses.
#[derive(Clone)]
pub(crate) struct Urls(pub(crate) Vec<Url>);

impl WorkerResolver for Urls {
    fn get_urls(&self) -> Result<Vec<Url>> {
        Ok(self.0.clone())
    }
}

/// What a worker is made of.
#[derive(Clone)]
pub(crate) struct Parts {
    pub(crate) devices: DeviceResolver,
    /// Without plugins if the coordinator inserts the operators.
    pub(crate) rule: DeviceRule,
    pub(crate) codec: DeviceCodec,
    pub(crate) extend: Arc<dyn Fn(SessionStateBuilder) -> SessionStateBuilder + Send + Sync>,
    /// Is called with the plan of each task, as it runs.
    pub(crate) observe: Arc<dyn Fn(&WorkerPlanRewriteEvent<'_>) + Send + Sync>,
}

impl Parts {
    pub(crate) fn new(way: Way, devices: DeviceResolver) -> Self {
        Self {
            devices,
            rule: match way {
                Way::Workers => rule(),
                Way::Coordinator => DeviceRule::default(),
            },
            codec: codec(),
            extend: Arc::new(|builder| builder),
            observe: Arc::new(|_| ()),
        }
    }
}

/// Starts a worker on a free port. It ends with the runtime.
pub(crate) async fn start_worker(parts: Parts) -> Result<Url> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    let worker = Worker::from_session_builder(move |query: WorkerQueryContext| {
        let parts = parts.clone();
        let observe = move |event: WorkerPlanRewriteEvent<'_>| {
            (parts.observe)(&event);
            Ok(WorkerPlanRewriteEventResponse::new(event.plan))
        };
        let builder = query.builder.with_device_resolver(parts.devices);
        let builder = builder
            .with_device_codec(parts.codec)
            .with_device_rule(parts.rule)
            .with_distributed_worker_plan_rewrite_handler(observe);
        // What the coordinator has set for device nodes.
        let builder = (parts.extend)(builder)
            .with_distributed_option_extension_from_headers::<DeviceOptions>(&query.headers);
        async move { Ok::<_, DataFusionError>(builder?.build()) }
    });
    let server = tonic::transport::Server::builder().add_service(worker.into_worker_server());
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    Url::parse(&url).map_err(|e| DataFusionError::External(Box::new(e)))
}

/// A session that distributes its queries over these workers, with what else is given. It has no device.
pub(crate) fn coordinator(
    way: Way,
    workers: impl WorkerResolver + 'static,
    extend: impl FnOnce(SessionStateBuilder) -> SessionStateBuilder,
) -> Result<SessionContext> {
    let config = SessionConfig::new().with_target_partitions(4);
    let builder = SessionStateBuilder::new()
        .with_default_features()
        .with_config(config);
    let builder = match way {
        Way::Workers => builder.with_distributed_planner(),
        Way::Coordinator => builder.with_device_plans(Some(rule()), codec()),
    };
    let builder = builder
        .with_device_resolver(DeviceResolver::of([]))
        .with_distributed_worker_resolver(workers)
        // The tables are small, and their scans are to be divided.
        .with_distributed_file_scan_config_bytes_per_partition(1)?;
    let builder = extend(builder);
    Ok(SessionContext::new_with_state(builder.build()))
}
