//! Work of growing amounts, of which each part should cost the same in all: `linear N [TIMES]` does every case with `N` parts, and
//! prints its name and the nanoseconds of a part, the least of so many times.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Wake, Waker};
use std::time::Duration;

use arrow_array::{Array, ArrayRef, Int32Array, RecordBatch, RecordBatchIterator, StructArray};
use arrow_device::device::sim::{FaultOp, SimConfig, SimDevice, SimMode};
use arrow_device::device::{Backend, EventPtr, Notify, RawQueue};
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceBufferMut, DeviceId, DeviceRecordBatch,
    DeviceRecordBatchIterator, DeviceRecordBatchReader, Devices, ExportOptions, ImportOptions,
    Result as DeviceResult, SyncPolicy, UploadingReader,
};
use arrow_device_benches::batches;
use arrow_device_benches::cases::{Result, counted};
use arrow_schema::Field;

const OPTIONS: ExportOptions = ExportOptions::new(SyncPolicy::Event);

type Case = fn(usize) -> Result<Duration>;

const CASES: &[(&str, Case)] = &[
    ("pending uploads", pending),
    ("pending downloads", downloads),
    ("live arrays", live),
    ("columns up", columns_up),
    ("columns down", columns_down),
    ("columns exported", columns_exported),
    ("each column exported", each_exported),
    ("each owned column exported", each_owned_exported),
    ("columns imported", columns_imported),
    ("columns compacted", columns_compacted),
    ("each column down", each_down),
    ("each owned column down", each_owned_down),
    ("children", children),
    ("batches up", batches_up),
    ("batches down", batches_down),
    ("batches concatenated", batches_concatenated),
    ("devices", devices),
    ("events", events),
    ("uses", uses),
    ("queues", queues),
    ("gaps in memory", gaps),
];

fn simulated(mode: SimMode) -> Result<(Arc<SimDevice>, Device)> {
    let sim = SimDevice::new(SimConfig::default().with_mode(mode))?;
    Ok((sim.clone(), Device::new(sim)?))
}

/// Times the work, which callgrind counts too; what it makes is dropped afterwards.
fn timed<T>(work: impl FnOnce() -> Result<T>) -> Result<Duration> {
    let (mut work, mut kept) = (Some(work), None);
    let took = counted(&mut || {
        if let Some(work) = work.take() {
            kept = Some(work()?);
        }
        Ok(())
    })?;
    drop(kept);
    Ok(took)
}

/// A waker that counts its calls.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Woken {
    fn wait(&self, times: usize) {
        while self.0.load(Ordering::SeqCst) < times {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Runs all that the device has to do, and waits until what was kept for it is dropped: the event is the last that the thread for
/// that sees.
fn finish(device: &Device) -> Result<()> {
    let woken = Arc::new(Woken::default());
    let event = device.default_queue().record()?.ok_or("an event")?;
    if !event.notify(&Waker::from(woken.clone()))? {
        device.synchronize()?;
        woken.wait(1);
    }
    Ok(())
}

/// As [`finish`], and nothing of that thread is left to be counted along with what comes next.
fn settle(device: &Device) -> Result<()> {
    finish(device)?;
    std::thread::sleep(Duration::from_millis(20));
    Ok(())
}

fn pending(n: usize) -> Result<Duration> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let batch = batches::named("integers", 1, 3)?;
    timed(|| {
        for _ in 0..n {
            device.upload(&batch)?;
        }
        finish(&device)?;
        Ok(())
    })
}

fn downloads(n: usize) -> Result<Duration> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let up = device.upload(&batches::named("integers", 1, 3)?)?;
    up.wait()?;
    timed(|| {
        let all = (0..n)
            .map(|_| up.start_to_host())
            .collect::<DeviceResult<Vec<_>>>()?;
        for down in all {
            drop(down.wait()?);
        }
        Ok(())
    })
}

fn live(n: usize) -> Result<Duration> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let batch = batches::named("integers", 1, 3)?;
    timed(|| {
        let mut all = Vec::new();
        for _ in 0..n {
            all.push(device.upload(&batch)?);
        }
        for batch in &all {
            batch.wait()?;
        }
        drop(all);
        finish(&device)?;
        Ok(())
    })
}

fn columns_up(n: usize) -> Result<Duration> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let batch = batches::named("mixed", n, 3)?;
    timed(|| {
        let up = device.upload(&batch)?;
        up.wait()?;
        Ok(up)
    })
}

fn up(n: usize) -> Result<DeviceRecordBatch> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let up = device.upload(&batches::named("mixed", n, 3)?)?;
    settle(&device)?;
    Ok(up)
}

/// Columns that were uploaded each by itself.
fn owned(n: usize) -> Result<DeviceRecordBatch> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let batch = batches::named("integers", n, 3)?;
    let columns = batch
        .columns()
        .iter()
        .map(|column| device.upload_array(column));
    let columns = columns.collect::<DeviceResult<Vec<_>>>()?;
    settle(&device)?;
    Ok(DeviceRecordBatch::try_new(batch.schema(), &columns)?)
}

fn columns_down(n: usize) -> Result<Duration> {
    let up = up(n)?;
    timed(|| Ok(up.to_host()?))
}

fn columns_exported(n: usize) -> Result<Duration> {
    let up = up(n)?;
    timed(|| Ok(up.export_array(&OPTIONS)?))
}

fn each(batch: &DeviceRecordBatch, work: impl Fn(DeviceArray) -> Result<()>) -> Result<Duration> {
    timed(|| (0..batch.num_columns()).try_for_each(|i| work(batch.column(i)?)))
}

fn each_exported(n: usize) -> Result<Duration> {
    each(&up(n)?, |column| {
        drop(column.export(SyncPolicy::Event)?);
        Ok(())
    })
}

fn each_owned_exported(n: usize) -> Result<Duration> {
    each(&owned(n)?, |column| {
        drop(column.export(SyncPolicy::Event)?);
        Ok(())
    })
}

fn each_down(n: usize) -> Result<Duration> {
    each(&up(n)?, |column| {
        drop(column.to_host()?);
        Ok(())
    })
}

fn each_owned_down(n: usize) -> Result<Duration> {
    each(&owned(n)?, |column| {
        drop(column.to_host()?);
        Ok(())
    })
}

fn columns_imported(n: usize) -> Result<Duration> {
    let batch = up(n)?;
    let devices = Devices::new();
    devices.add(batch.device().clone())?;
    let options = ImportOptions::default().with_devices(devices);
    let (array, schema) = batch.export(SyncPolicy::Event)?;
    // SAFETY: both come from the export above.
    timed(|| Ok(unsafe { DeviceRecordBatch::import_with(array, &schema, &options) }?))
}

fn columns_compacted(n: usize) -> Result<Duration> {
    let up = up(n)?;
    timed(|| {
        let own = up.compact()?;
        own.wait()?;
        Ok(own)
    })
}

fn children(n: usize) -> Result<Duration> {
    let column: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3]));
    let fields = (0..n).map(|i| {
        Arc::new(Field::new(
            format!("f{i}"),
            column.data_type().clone(),
            true,
        ))
    });
    let array = StructArray::new(
        fields.collect::<Vec<_>>().into(),
        vec![column.clone(); n],
        None,
    );
    let (_, device) = simulated(SimMode::Deferred)?;
    timed(|| {
        let up = device.upload_array(&array)?;
        for i in 0..up.num_children() {
            drop(up.child(i));
        }
        let (array, schema) = up.export(SyncPolicy::Event)?;
        drop((array, schema));
        Ok(up.to_host()?)
    })
}

fn some(n: usize) -> Result<(arrow_schema::SchemaRef, impl Iterator<Item = RecordBatch>)> {
    let batch = batches::named("mixed", 4, 3)?;
    Ok((batch.schema(), (0..n).map(move |_| batch.clone())))
}

fn batches_up(n: usize) -> Result<Duration> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let (schema, batches) = some(n)?;
    timed(|| {
        let reader = RecordBatchIterator::new(batches.map(Ok), schema);
        let all = UploadingReader::new(reader, &device).collect::<DeviceResult<Vec<_>>>()?;
        device.synchronize()?;
        Ok(all)
    })
}

fn batches_down(n: usize) -> Result<Duration> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let (schema, mut batches) = some(1)?;
    let up = device.upload(&batches.next().ok_or("a batch")?)?;
    timed(|| {
        let all = (0..n).map(move |_| Ok(up.clone()));
        let reader = DeviceRecordBatchIterator::new(all, schema, ArrowDeviceType::EXT_DEV);
        Ok(reader
            .into_host_reader()
            .collect::<std::result::Result<Vec<_>, _>>()?)
    })
}

fn batches_concatenated(n: usize) -> Result<Duration> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let (schema, batches) = some(n)?;
    let all = batches
        .map(|batch| device.upload(&batch))
        .collect::<DeviceResult<Vec<_>>>()?;
    timed(|| {
        let one = DeviceRecordBatch::concat(&schema, &all)?;
        one.wait()?;
        Ok(one)
    })
}

/// A device of another name.
#[derive(Debug)]
struct Named(DeviceId, Arc<SimDevice>);

// SAFETY: every method passes its call on to the simulated device.
unsafe impl Backend for Named {
    fn id(&self) -> DeviceId {
        self.0
    }
    fn host_readable(&self) -> bool {
        self.1.host_readable()
    }
    fn default_queue(&self) -> DeviceResult<Arc<dyn RawQueue>> {
        self.1.default_queue()
    }
    fn new_queue(&self) -> DeviceResult<Arc<dyn RawQueue>> {
        self.1.new_queue()
    }
    unsafe fn query_event(&self, event: EventPtr) -> DeviceResult<bool> {
        // SAFETY: as the caller guarantees.
        unsafe { self.1.query_event(event) }
    }
    unsafe fn wait_event(&self, event: EventPtr) -> DeviceResult<()> {
        // SAFETY: as the caller guarantees.
        unsafe { self.1.wait_event(event) }
    }
    unsafe fn notify_event(&self, event: EventPtr, waker: &Waker) -> DeviceResult<Notify> {
        // SAFETY: as the caller guarantees.
        unsafe { self.1.notify_event(event, waker) }
    }
    unsafe fn release_event(&self, event: EventPtr) {
        // SAFETY: as the caller guarantees.
        unsafe { self.1.release_event(event) }
    }
    fn synchronize(&self) -> DeviceResult<()> {
        self.1.synchronize()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn devices(n: usize) -> Result<Duration> {
    let (sim, _) = simulated(SimMode::Deferred)?;
    let devices = Devices::new();
    timed(|| {
        let id = |i: usize| DeviceId::new(ArrowDeviceType::OPENCL, i as i64);
        for i in 0..n {
            devices.add(Device::new(Arc::new(Named(id(i), sim.clone())))?)?;
        }
        for i in 0..n {
            drop(devices.get(id(i))?);
        }
        Ok(devices)
    })
}

fn events(n: usize) -> Result<Duration> {
    let (sim, device) = simulated(SimMode::Deferred)?;
    let queue = device.default_queue();
    timed(|| {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        let mut all = Vec::new();
        for _ in 0..n {
            let event = queue.record()?.ok_or("an event")?;
            event.notify(&waker)?;
            all.push(event);
        }
        // Until all are registered: those that have completed before cost less.
        while sim.faults().seen(FaultOp::Query) < 2 * n as u64 {
            std::thread::sleep(Duration::from_millis(10));
        }
        device.synchronize()?;
        woken.wait(n);
        Ok(all)
    })
}

fn uses(n: usize) -> Result<Duration> {
    let (_, device) = simulated(SimMode::Deferred)?;
    let up = device.upload_array(&Int32Array::from(vec![1, 2, 3]))?;
    let queue = device.new_queue()?;
    timed(|| {
        for _ in 0..n {
            drop(up.values_on::<i32>(&queue)?);
        }
        drop(up);
        finish(&device)?;
        Ok(())
    })
}

/// On one queue, beside so many others.
fn queues(n: usize) -> Result<Duration> {
    let (_, device) = simulated(SimMode::Async)?;
    let batch = batches::named("integers", 1, 3)?;
    timed(|| {
        let all = (0..n)
            .map(|_| device.new_queue())
            .collect::<DeviceResult<Vec<_>>>()?;
        for queue in &all {
            device.upload_on(&batch, queue)?;
            device.upload(&batch)?;
        }
        finish(&device)?;
        Ok(all)
    })
}

/// Allocations for which no gap between others has room.
fn gaps(n: usize) -> Result<Duration> {
    let config = SimConfig::default()
        .with_mode(SimMode::Deferred)
        .with_quarantine_bytes(0);
    let device = Device::new(SimDevice::new(config)?)?;
    let queue = device.default_queue();
    let allocate = |bytes| DeviceBufferMut::allocate(&queue, bytes);
    timed(|| {
        let small = (0..n)
            .map(|_| allocate(64))
            .collect::<DeviceResult<Vec<_>>>()?;
        let live: Vec<_> = small.into_iter().step_by(2).collect();
        device.synchronize()?;
        let large = (0..n)
            .map(|_| allocate(640))
            .collect::<DeviceResult<Vec<_>>>()?;
        Ok((live, large))
    })
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(n) = arguments.first() else {
        return Err("usage: linear N [TIMES]".into());
    };
    let (n, times) = (
        n.parse::<usize>()?,
        arguments.get(1).map_or(Ok(1), |times| times.parse())?,
    );
    for (case, run) in CASES {
        let mut best = Duration::MAX;
        for _ in 0..times {
            best = best.min(run(n)?);
        }
        println!("{case}\t{:.0}", best.as_nanos() as f64 / n as f64);
    }
    Ok(())
}
