//! Clusters, and what their workers have done.

use std::sync::{Arc, Mutex};

use arrow_device::Device;
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device_datafusion::{DeviceExec, DeviceResolver};
use datafusion::common::tree_node::TreeNode;
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionContext;
use url::Url;

use crate::nodes::{Parts, Urls, Way, coordinator, start_worker};
use crate::{data, support};

/// A worker, with a device or without.
pub(crate) struct Worker {
    pub(crate) device: Device,
    pub(crate) sim: Arc<SimDevice>,
    pub(crate) parts: Parts,
    /// The plans of the tasks that it has got.
    plans: Arc<Mutex<Vec<Arc<dyn ExecutionPlan>>>>,
}

impl Worker {
    /// With a device.
    pub(crate) fn new(way: Way) -> Self {
        Self::with(way, SimConfig::default())
    }

    pub(crate) fn with(way: Way, config: SimConfig) -> Self {
        let sim = SimDevice::new(config).unwrap();
        let device = Device::new(sim.clone()).unwrap();
        let mut parts = Parts::new(way, DeviceResolver::of([device.clone()]));
        let plans: Arc<Mutex<Vec<_>>> = Arc::default();
        let list = plans.clone();
        parts.observe = Arc::new(move |event| list.lock().unwrap().push(event.plan.clone()));
        Self {
            device,
            sim,
            parts,
            plans,
        }
    }

    /// With the same rules or codec, but without a device.
    pub(crate) fn without_device(way: Way) -> Self {
        let mut this = Self::new(way);
        this.parts.devices = DeviceResolver::of([]);
        this
    }

    /// Without anything of this crate.
    pub(crate) fn plain() -> Self {
        let mut this = Self::new(Way::Coordinator);
        this.parts.devices = DeviceResolver::of([]);
        this.parts.codec = Default::default();
        this
    }

    /// The tasks that it has got since this was last asked, and how many of them had device nodes.
    pub(crate) fn tasks(&self) -> (usize, usize) {
        let plans = std::mem::take(&mut *self.plans.lock().unwrap());
        let on_device = |plan: &&Arc<dyn ExecutionPlan>| {
            let found = plan.exists(|node| Ok(DeviceExec::of(node).is_some()));
            found.unwrap()
        };
        (plans.len(), plans.iter().filter(on_device).count())
    }

    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        support::assert_clean(&self.device, &self.sim);
    }
}

/// Workers that are served, by the test's own runtime.
pub(crate) struct Cluster {
    pub(crate) way: Way,
    pub(crate) workers: Vec<Worker>,
    pub(crate) urls: Vec<Url>,
}

impl Cluster {
    pub(crate) async fn start(way: Way, workers: Vec<Worker>) -> Self {
        let mut urls = Vec::new();
        for worker in &workers {
            urls.push(start_worker(worker.parts.clone()).await.unwrap());
        }
        Self { way, workers, urls }
    }

    pub(crate) async fn two(way: Way) -> Self {
        Self::start(way, vec![Worker::new(way), Worker::new(way)]).await
    }

    /// A session with the tables of TPC-H.
    pub(crate) async fn session(&self) -> SessionContext {
        self.session_with(|builder| builder).await
    }

    pub(crate) async fn session_with(
        &self,
        extend: impl FnOnce(SessionStateBuilder) -> SessionStateBuilder,
    ) -> SessionContext {
        let context = coordinator(self.way, Urls(self.urls.clone()), extend).unwrap();
        data::register(&context, support::tables()).await.unwrap();
        context
    }

    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        self.workers.iter().for_each(Worker::assert_clean);
    }
}
