//! Threads on one device: while one is in a copy, which may take long, the others go on.

use std::any::Any;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use arrow_array::{RecordBatch, record_batch};
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::device::{AddressClass, Backend, CopyOp, DevicePtr, EventPtr, Notify, RawQueue};
use arrow_device::{
    Device, DeviceId, DeviceRecordBatch, Devices, ImportOptions, Result, SyncPolicy,
};

/// A simulated device of whose copies one stays in the call that queues it.
#[derive(Debug)]
struct Slow {
    sim: Arc<SimDevice>,
    /// The next copy says that it is there, and stays until it is let go.
    next: Arc<Mutex<Option<Stay>>>,
}

#[derive(Debug)]
struct Stay(SyncSender<()>, Receiver<()>);

#[derive(Debug)]
struct SlowQueue {
    queue: Arc<dyn RawQueue>,
    next: Arc<Mutex<Option<Stay>>>,
}

impl Slow {
    fn wrap(&self, queue: Arc<dyn RawQueue>) -> Arc<dyn RawQueue> {
        let next = self.next.clone();
        Arc::new(SlowQueue { queue, next })
    }
}

// SAFETY: every method passes its call on to the simulated device.
unsafe impl Backend for Slow {
    fn id(&self) -> DeviceId {
        self.sim.id()
    }
    fn host_readable(&self) -> bool {
        false
    }
    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.wrap(self.sim.default_queue()?))
    }
    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.wrap(self.sim.new_queue()?))
    }
    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.query_event(event) }
    }
    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.wait_event(event) }
    }
    unsafe fn notify_event(&self, event: EventPtr, waker: &Waker) -> Result<Notify> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.notify_event(event, waker) }
    }
    unsafe fn release_event(&self, event: EventPtr) {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.release_event(event) }
    }
    fn classify(&self, address: DevicePtr, bytes: usize) -> AddressClass {
        self.sim.classify(address, bytes)
    }
    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        self.sim.allocate_host(bytes)
    }
    unsafe fn free_host(&self, address: DevicePtr, bytes: usize) {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.sim.free_host(address, bytes) }
    }
    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        self.sim.copies_directly_from(address, bytes)
    }
    fn synchronize(&self) -> Result<()> {
        self.sim.synchronize()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

// SAFETY: every method passes its call on to a queue of the simulated device.
unsafe impl RawQueue for SlowQueue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        self.queue.allocate(bytes)
    }
    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.queue.free(base, bytes) }
    }
    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let stay = self.next.lock().unwrap().take();
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
    unsafe fn wait(&self, event: EventPtr) -> Result<()> {
        // SAFETY: as this method's caller guarantees.
        unsafe { self.queue.wait(event) }
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// All that producers and consumers do on a device.
fn work(device: &Device, imports: &ImportOptions) -> Result<()> {
    let host = record_batch!(("a", Int64, [1, 2, 3]), ("b", Utf8, ["x", "y", "z"]))?;
    let queue = device.new_queue()?;
    let there = device.upload_on(&host, &queue)?;
    there.wait()?;
    assert_eq!(there.to_host()?, host);
    assert_eq!(there.compact()?.to_host()?, host);
    let (array, schema) = there.export(SyncPolicy::Event)?;
    // SAFETY: both were just exported from a batch.
    let again = unsafe { DeviceRecordBatch::import_with(array, &schema, imports) }?;
    assert_eq!(again.to_host()?, host);
    assert_eq!(
        device.upload(&host)?.slice(1, 2)?.to_host()?,
        host.slice(1, 2)
    );
    drop((there, again));
    device.host_slab(1 << 20)?;
    device.set_idle_slab_limit(1 << 30);
    device.trim();
    device.synchronize()
}

/// No lock of a device is held over a copy: neither of an upload, nor of a download, nor on the device.
#[test]
fn a_copy_holds_up_nobody() {
    type Copy = fn(&Device, &RecordBatch, &DeviceRecordBatch) -> Result<()>;
    let copies: [(&str, Copy); 3] = [
        ("upload", |device, host, _| device.upload(host)?.wait()),
        ("download", |_, _, there| there.to_host().map(drop)),
        ("compact", |_, _, there| there.compact()?.wait()),
    ];
    for (name, copy) in copies {
        let sim = SimDevice::new(SimConfig::default()).unwrap();
        let next = Arc::default();
        let slow = Slow {
            sim: sim.clone(),
            next,
        };
        let next = slow.next.clone();
        let device = Device::new(Arc::new(slow)).unwrap();
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let imports = ImportOptions::default().with_devices(devices);
        let host = record_batch!(("a", Int64, [4, 5, 6])).unwrap();
        let there = device.upload(&host).unwrap();

        let ((here, is_here), (go, held)) = (sync_channel(1), sync_channel(1));
        *next.lock().unwrap() = Some(Stay(here, held));
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| copy(&device, &host, &there).unwrap());
            is_here.recv_timeout(Duration::from_secs(60)).unwrap();
            let (done, is_done) = channel();
            let others = [0; 2].map(|_| {
                let (done, device, imports) = (done.clone(), &device, &imports);
                scope.spawn(move || {
                    work(device, imports).unwrap();
                    done.send(()).unwrap();
                })
            });
            let went_on = others
                .iter()
                .all(|_| is_done.recv_timeout(Duration::from_secs(30)).is_ok());
            let is_held = !slow.is_finished();
            go.send(()).unwrap();
            assert!(went_on, "{name} holds a lock over its copy");
            assert!(is_held, "{name} did not copy");
        });
        drop(there);
        device.synchronize().unwrap();
        device.trim();
        assert_eq!(sim.report().violations, [""; 0]);
    }
}
