//! A scheduler, an executor with devices, and a client, on this machine.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::sync::Arc;

use arrow_device_datafusion::DeviceResolver;
use ballista::prelude::{SessionConfigExt, SessionContextExt};
use ballista_core::config::TaskSchedulingPolicy;
use ballista_core::utils::default_config_producer;
use ballista_executor::execution_engine::ExecutionEngine;
use ballista_executor::executor_process::ExecutorProcessConfig;
use ballista_scheduler::cluster::BallistaCluster;
use ballista_scheduler::config::SchedulerConfig;
use ballista_scheduler::scheduler_process::{create_scheduler, start_grpc_service_with_listener};
use ballista_scheduler::scheduler_server::SchedulerServer;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use datafusion_proto::protobuf::{LogicalPlanNode, PhysicalPlanNode};

pub(crate) type Scheduler = SchedulerServer<LogicalPlanNode, PhysicalPlanNode>;

/// Starts Ballista's own scheduler on a free port. It ends with the runtime.
pub(crate) async fn start_scheduler(config: SchedulerConfig) -> Result<(Scheduler, u16)> {
    let external = |e| DataFusionError::External(Box::new(e));
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let port = listener.local_addr()?.port();
    let config = SchedulerConfig {
        external_host: Ipv4Addr::LOCALHOST.to_string(),
        bind_port: port,
        ..config
    };
    let cluster = BallistaCluster::new_from_config(&config).await;
    let cluster = cluster.map_err(external)?;
    let scheduler = create_scheduler(cluster, Arc::new(config)).await;
    let scheduler: Scheduler = scheduler.map_err(external)?;
    tokio::spawn(start_grpc_service_with_listener(
        listener,
        scheduler.clone(),
    ));
    Ok((scheduler, port))
}

/// The number of executors that the scheduler knows.
pub(crate) async fn executors(scheduler: &Scheduler) -> usize {
    let executors = scheduler.state.executor_manager.get_executors_state().await;
    executors.map_or(0, |executors| executors.len())
}

/// The configuration of an executor with this engine and these devices.
pub(crate) fn executor(
    scheduler: u16,
    policy: TaskSchedulingPolicy,
    engine: Arc<dyn ExecutionEngine>,
    devices: DeviceResolver,
    work_dir: &Path,
) -> Result<ExecutorProcessConfig> {
    let devices = Arc::new(devices);
    Ok(ExecutorProcessConfig {
        external_host: Some(Ipv4Addr::LOCALHOST.to_string()),
        port: free_port()?,
        grpc_port: free_port()?,
        scheduler_host: Ipv4Addr::LOCALHOST.to_string(),
        scheduler_port: scheduler,
        task_scheduling_policy: policy,
        vcores: 2,
        work_dir: Some(work_dir.display().to_string()),
        executor_heartbeat_interval_seconds: 1,
        override_execution_engine: Some(engine),
        override_config_producer: Some(Arc::new(move || {
            default_config_producer().with_extension(devices.clone())
        })),
        ..ExecutorProcessConfig::default()
    })
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// A client, which knows nothing of devices.
pub(crate) async fn client(scheduler: u16, adaptive: bool) -> Result<SessionContext> {
    let config = SessionConfig::new_with_ballista()
        .with_target_partitions(4)
        .with_ballista_adaptive_query_planner(adaptive);
    client_with(scheduler, config).await
}

pub(crate) async fn client_with(scheduler: u16, config: SessionConfig) -> Result<SessionContext> {
    let state = SessionStateBuilder::new().with_default_features();
    let state = state.with_config(config).build();
    let url = format!("df://{}:{scheduler}", Ipv4Addr::LOCALHOST);
    SessionContext::remote_with_state(&url, state).await
}
