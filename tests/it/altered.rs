//! A simulated device that answers some questions in another way, as other backends do.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex};

use arrow_device::Result;
use arrow_device::device::sim::SimDevice;
use arrow_device::device::{
    Backend, Capabilities, CopyOp, DevicePtr, EventPtr, PointerInfo, RawQueue,
};

/// Set what is to differ.
#[derive(Debug)]
pub(crate) struct Altered {
    pub sim: Arc<SimDevice>,
    pub capabilities: Capabilities,
    /// Whether copies read ordinary memory as fast as any. Then, and if not, it has no host memory of its own.
    pub direct: Option<bool>,
    /// How often each event was asked about.
    pub queries: Mutex<HashMap<EventPtr, usize>>,
    /// The next copy says that it is there, and stays until it is let go.
    pub stay: Arc<Mutex<Option<Stay>>>,
}

#[derive(Debug)]
pub(crate) struct Stay(pub SyncSender<()>, pub Receiver<()>);

impl Altered {
    pub(crate) fn new(sim: Arc<SimDevice>) -> Self {
        Self {
            capabilities: sim.capabilities(),
            direct: None,
            queries: Mutex::default(),
            stay: Arc::default(),
            sim,
        }
    }

    fn wrap(&self, queue: Arc<dyn RawQueue>) -> Arc<dyn RawQueue> {
        let stay = self.stay.clone();
        Arc::new(AlteredQueue { queue, stay })
    }
}

#[derive(Debug)]
struct AlteredQueue {
    queue: Arc<dyn RawQueue>,
    stay: Arc<Mutex<Option<Stay>>>,
}

// SAFETY: all work, memory and events are the simulated device's, to which every method passes its call on.
unsafe impl Backend for Altered {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }
    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.wrap(self.sim.default_queue()?))
    }
    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.wrap(self.sim.new_queue()?))
    }
    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.check_event(event) }
    }
    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        *self.queries.lock().unwrap().entry(event).or_default() += 1;
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.query_event(event) }
    }
    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.wait_event(event) }
    }
    unsafe fn release_event(&self, event: EventPtr) {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.release_event(event) }
    }
    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        self.sim.classify(address, bytes)
    }
    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        match self.direct {
            Some(_) => Ok(None),
            None => self.sim.allocate_host(bytes),
        }
    }
    unsafe fn free_host(&self, address: DevicePtr, bytes: usize) {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.free_host(address, bytes) }
    }
    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        match self.direct {
            Some(direct) => direct && !address.is_null(),
            None => self.sim.copies_directly_from(address, bytes),
        }
    }
    fn synchronize(&self) -> Result<()> {
        self.sim.synchronize()
    }
}

// SAFETY: every method passes its call on to a queue of the simulated device.
unsafe impl RawQueue for AlteredQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        self.queue.allocate(bytes)
    }
    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.queue.free(base, bytes) }
    }
    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let stay = self.stay.lock().unwrap().take();
        if let Some(Stay(here, go)) = stay {
            here.send(()).unwrap();
            let _ = go.recv();
        }
        // SAFETY: as this method's caller guarantees.
        unsafe { self.queue.copy(copies) }
    }
    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.queue.fill(dst, byte, bytes) }
    }
    fn record(&self) -> Result<EventPtr> {
        self.queue.record()
    }
    unsafe fn wait(&self, event: EventPtr) -> Result<bool> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.queue.wait(event) }
    }
}
