//! [`DevicePlacement`]: tasks with device nodes go to workers with devices.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow_device::ArrowDeviceType;
use arrow_device_datafusion::{DeviceExec, DeviceInsertExec, DeviceSpec};
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionConfig;
use datafusion_distributed::{
    DistributedLeafExec, NetworkBoundaryExt, RouteTasksEvent, RouteTasksEventResponse,
    RouteTasksHandler, get_distributed_worker_resolver,
};
use url::Url;

type Offers = dyn Fn() -> Result<Vec<(Url, Vec<DeviceSpec>)>> + Send + Sync;

/// Which worker has which devices, for a coordinator that sends plans with device nodes
/// ([`with_device_placement`](super::DeviceDistributedExt::with_device_placement)).
///
/// The tasks of a stage with device nodes go to the workers that offer all devices that its nodes want, in turn: a stage of more tasks
/// than there are such workers gives some of them several. Of the workers listed, only those count that the session's worker resolver
/// returns at that time. If none is left, the query fails with an error that says which devices are wanted and what is offered. Other
/// stages are placed as without it.
///
/// A worker should offer `DeviceSpec::any` of a type, however many devices of the type it has: its
/// [`DeviceResolver`](arrow_device_datafusion::DeviceResolver) distributes the partitions over them. The CPU need not be offered.
#[derive(Clone)]
pub struct DevicePlacement {
    offers: Arc<Offers>,
    /// How many tasks have been placed, so that the next go to other workers.
    placed: Arc<AtomicUsize>,
}

impl DevicePlacement {
    /// Makes a placement of a function that returns the workers that have devices. It is called for each stage with
    /// device nodes, so it should be quick.
    pub fn new(
        offers: impl Fn() -> Result<Vec<(Url, Vec<DeviceSpec>)>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            offers: Arc::new(offers),
            placed: Arc::new(AtomicUsize::new(0)),
        }
    }

    /// Makes a placement of a list of workers and their devices.
    pub fn of(workers: impl IntoIterator<Item = (Url, Vec<DeviceSpec>)>) -> Self {
        let workers: Vec<_> = workers.into_iter().collect();
        Self::new(move || Ok(workers.clone()))
    }

    /// The workers that are there and have all these devices.
    fn fitting(&self, wanted: &[DeviceSpec], config: &SessionConfig) -> Result<Vec<Url>> {
        let there = get_distributed_worker_resolver(config)?.get_urls()?;
        let offers = (self.offers)()?;
        let fits = |(url, devices): &&(Url, Vec<DeviceSpec>)| {
            let mut wanted = wanted.iter();
            there.contains(url) && wanted.all(|device| is_offered(device, devices))
        };
        let fitting: Vec<_> = offers
            .iter()
            .filter(fits)
            .map(|(url, _)| url.clone())
            .collect();
        match fitting.is_empty() {
            false => Ok(fitting),
            true => {
                let offer = |(url, devices): &(Url, Vec<DeviceSpec>)| {
                    let gone = if there.contains(url) {
                        ""
                    } else {
                        ", which the worker resolver does not return"
                    };
                    format!("{url} offers [{}]{gone}", names(devices))
                };
                let offers: Vec<_> = offers.iter().map(offer).collect();
                Err(DataFusionError::Execution(format!(
                    "no worker can run a stage that wants the devices [{}]: {}; see DevicePlacement",
                    names(wanted),
                    match offers.is_empty() {
                        true => "none offers any".to_owned(),
                        false => offers.join(", "),
                    }
                )))
            }
        }
    }

    fn route(&self, event: &RouteTasksEvent<'_>) -> Result<Option<RouteTasksEventResponse>> {
        let wanted = wanted(event.plan)?;
        if wanted.is_empty() {
            return Ok(None);
        }
        let workers = self.fitting(&wanted, event.task_ctx.session_config())?;
        let first = self.placed.fetch_add(event.task_count, Ordering::Relaxed);
        let urls =
            (0..event.task_count).map(|i| workers[first.wrapping_add(i) % workers.len()].clone());
        Ok(Some(RouteTasksEventResponse::new(urls.collect())))
    }
}

/// The devices of the nodes of a stage.
fn wanted(stage: &Arc<dyn ExecutionPlan>) -> Result<Vec<DeviceSpec>> {
    let mut wanted = Vec::new();
    stage.apply(|node| {
        // What is below belongs to another stage.
        if node.is_network_boundary() {
            return Ok(TreeNodeRecursion::Jump);
        }
        // Scans of tables on devices, divided among tasks.
        let leaf = node.downcast_ref().map(DistributedLeafExec::original);
        let node = leaf.unwrap_or(node);
        let insert = node.downcast_ref().map(DeviceInsertExec::device);
        let device = DeviceExec::of(node).map(DeviceExec::device).or(insert);
        let device = device.filter(|d| d.device_type() != ArrowDeviceType::CPU);
        if let Some(device) = device.filter(|device| !wanted.contains(*device)) {
            wanted.push(device.clone());
        }
        Ok(TreeNodeRecursion::Continue)
    })?;
    Ok(wanted)
}

fn is_offered(wanted: &DeviceSpec, offered: &[DeviceSpec]) -> bool {
    offered.iter().any(|offered| {
        let any = wanted.id().is_none() || offered.id().is_none();
        offered.device_type() == wanted.device_type() && (any || offered.id() == wanted.id())
    })
}

fn names(devices: &[DeviceSpec]) -> String {
    let names: Vec<_> = devices.iter().map(ToString::to_string).collect();
    names.join(", ")
}

impl RouteTasksHandler for DevicePlacement {
    fn handle(&self, event: RouteTasksEvent<'_>) -> Option<Result<RouteTasksEventResponse>> {
        self.route(&event).transpose()
    }
}

impl fmt::Debug for DevicePlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePlacement")
            .field("placed", &self.placed)
            .finish_non_exhaustive()
    }
}
