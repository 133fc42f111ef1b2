//! L1: work of growing amounts, of which each part should cost the same in all. Callgrind counts the instructions of each case.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use arrow_array::{ArrayRef, Int32Array, RecordBatch, RecordBatchIterator, StructArray};
use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceRecordBatch, DeviceRecordBatchReader,
    DeviceRecordBatches, Devices, ImportOptions, Result as DeviceResult, SyncPolicy, upload_reader,
};
use arrow_device_benches::batches::{self, Result};
use arrow_device_benches::cases::counted;
use arrow_schema::Field;

/// A case, for so many parts.
type Case = fn(usize) -> Result<()>;

const CASES: &[(&str, Case)] = &[
    ("pending uploads", |n| {
        let (device, batch) = (device(SimMode::Deferred)?, batch("integers", 1)?);
        work(|| {
            (0..n).try_for_each(|_| device.upload(&batch).map(drop))?;
            finish(&device)
        })
    }),
    ("pending downloads", |n| {
        let up = up("integers", 1)?;
        work(|| {
            let all = collect((0..n).map(|_| up.start_to_host(None)))?;
            Ok(all.into_iter().try_for_each(|down| down.wait().map(drop))?)
        })
    }),
    ("live arrays", |n| {
        let (device, batch) = (device(SimMode::Deferred)?, batch("integers", 1)?);
        work(|| {
            let all = collect((0..n).map(|_| device.upload(&batch)))?;
            all.iter().try_for_each(|batch| batch.wait())?;
            drop(all);
            finish(&device)
        })
    }),
    ("columns up", |n| {
        let (device, batch) = (device(SimMode::Deferred)?, batch("mixed", n)?);
        work(|| there(device.upload(&batch)?))
    }),
    ("columns down", |n| {
        let up = up("mixed", n)?;
        work(|| Ok(up.to_host()?))
    }),
    ("columns exported", |n| {
        let up = up("mixed", n)?;
        work(|| Ok(up.export(SyncPolicy::Event)?))
    }),
    ("columns imported", |n| {
        let up = up("mixed", n)?;
        let devices = Devices::new();
        devices.add(up.device().clone())?;
        let options = ImportOptions {
            devices: Some(devices),
            ..Default::default()
        };
        let (array, schema) = up.export(SyncPolicy::Event)?;
        // SAFETY: both come from the export above.
        work(|| Ok(unsafe { DeviceRecordBatch::import(array, &schema, &options) }?))
    }),
    ("columns compacted", |n| {
        let up = up("mixed", n)?;
        work(|| there(up.compact()?))
    }),
    ("each column exported", |n| each(&up("mixed", n)?, export)),
    ("each owned column exported", |n| each(&owned(n)?, export)),
    ("each column down", |n| each(&up("mixed", n)?, down)),
    ("each owned column down", |n| each(&owned(n)?, down)),
    ("children", |n| {
        let column: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3]));
        let field = |i| Field::new(format!("f{i}"), column.data_type().clone(), true);
        let fields: Vec<_> = (0..n).map(field).collect();
        let array = StructArray::new(fields.into(), vec![column.clone(); n], None);
        let device = device(SimMode::Deferred)?;
        work(|| {
            let up = device.upload_array(&array)?;
            (0..up.num_children()).for_each(|i| drop(up.child(i)));
            drop(up.export(SyncPolicy::Event)?);
            Ok(up.to_host()?)
        })
    }),
    ("batches up", |n| {
        let (device, batch) = (device(SimMode::Deferred)?, batch("mixed", 4)?);
        let schema = batch.schema();
        let batches = (0..n).map(move |_| Ok(batch.clone()));
        work(|| {
            let reader = RecordBatchIterator::new(batches, schema);
            let all = collect(upload_reader(reader, &device))?;
            device.synchronize()?;
            Ok(all)
        })
    }),
    ("batches down", |n| {
        let (up, device_type) = (up("mixed", 4)?, ArrowDeviceType::EXT_DEV);
        let schema = up.schema();
        let all = (0..n).map(move |_| Ok(up.clone()));
        work(|| {
            let reader = DeviceRecordBatches::new(all, schema, device_type);
            let host = reader.into_host_reader();
            Ok(host.collect::<std::result::Result<Vec<_>, _>>()?)
        })
    }),
    ("batches concatenated", |n| {
        let (device, batch) = (device(SimMode::Deferred)?, batch("mixed", 4)?);
        let all = collect((0..n).map(|_| device.upload(&batch)))?;
        work(|| there(DeviceRecordBatch::concat(&batch.schema(), &all, None)?))
    }),
    ("events", |n| {
        let device = device(SimMode::Deferred)?;
        let queue = device.default_queue();
        work(|| {
            let all = collect((0..n).map(|_| queue.record()))?;
            for event in all.iter().flatten() {
                event.notify(Waker::noop())?;
            }
            finish(&device)?;
            Ok(all)
        })
    }),
    ("uses", |n| {
        let device = device(SimMode::Deferred)?;
        let up = device.upload_array(&Int32Array::from(vec![1, 2, 3]))?;
        let queue = device.new_queue()?;
        work(|| {
            (0..n).try_for_each(|_| up.values_on::<i32>(&queue).map(drop))?;
            drop(up);
            finish(&device)
        })
    }),
    // On one queue, beside so many others.
    ("queues", |n| {
        let (device, batch) = (device(SimMode::Async)?, batch("integers", 1)?);
        work(|| {
            let all = collect((0..n).map(|_| device.new_queue()))?;
            for queue in &all {
                device.upload_on(&batch, queue)?;
                device.upload(&batch)?;
            }
            finish(&device)?;
            Ok(all)
        })
    }),
];

fn collect<T>(all: impl Iterator<Item = DeviceResult<T>>) -> Result<Vec<T>> {
    Ok(all.collect::<DeviceResult<_>>()?)
}

fn device(mode: SimMode) -> Result<Device> {
    Ok(Device::new(SimDevice::new(SimConfig {
        mode,
        ..SimConfig::default()
    })?)?)
}

fn batch(kind: &str, columns: usize) -> Result<RecordBatch> {
    Ok(batches::named(kind, columns, 3)?)
}

/// A batch that is there, with nothing left to do.
fn up(kind: &str, columns: usize) -> Result<DeviceRecordBatch> {
    let device = device(SimMode::Deferred)?;
    let up = device.upload(&batch(kind, columns)?)?;
    settle(&device)?;
    Ok(up)
}

/// Columns that were uploaded each by itself.
fn owned(n: usize) -> Result<DeviceRecordBatch> {
    let (device, batch) = (device(SimMode::Deferred)?, batch("integers", n)?);
    let columns = batch.columns().iter();
    let columns = collect(columns.map(|column| device.upload_array(column)))?;
    settle(&device)?;
    Ok(DeviceRecordBatch::try_new(batch.schema(), &columns)?)
}

fn there(batch: DeviceRecordBatch) -> Result<DeviceRecordBatch> {
    batch.wait()?;
    Ok(batch)
}

fn each(batch: &DeviceRecordBatch, part: fn(DeviceArray) -> Result<()>) -> Result<()> {
    work(|| (0..batch.num_columns()).try_for_each(|i| part(batch.column(i)?)))
}

fn export(column: DeviceArray) -> Result<()> {
    Ok(column.export(SyncPolicy::Event).map(drop)?)
}

fn down(column: DeviceArray) -> Result<()> {
    Ok(column.to_host().map(drop)?)
}

/// Does what callgrind counts; what it makes is dropped afterwards.
fn work<T>(work: impl FnOnce() -> Result<T>) -> Result<()> {
    let (mut work, mut kept) = (Some(work), None);
    counted(&mut || {
        kept = work.take().map(|work| work()).transpose()?;
        Ok(())
    })?;
    drop(kept);
    Ok(())
}

struct Woken(Thread, AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.1.store(true, SeqCst);
        self.0.unpark();
    }
}

/// Runs all that the device has to do, and waits until what was kept for it is dropped: the event is the last that the thread for
/// that sees.
fn finish(device: &Device) -> Result<()> {
    let woken = Arc::new(Woken(thread::current(), AtomicBool::new(false)));
    let event = device.default_queue().record()?.ok_or("an event")?;
    if !event.notify(&Waker::from(woken.clone()))? {
        device.synchronize()?;
        while !woken.1.load(SeqCst) {
            thread::park();
        }
    }
    Ok(())
}

/// As [`finish`], and nothing of that thread is left to be counted along with what comes next.
fn settle(device: &Device) -> Result<()> {
    finish(device)?;
    thread::sleep(Duration::from_millis(20));
    Ok(())
}

/// Does every case with `n` parts, and prints its name.
pub(crate) fn run(n: usize) -> Result<()> {
    CASES.iter().try_for_each(|(name, case)| {
        case(n)?;
        println!("{name}");
        Ok(())
    })
}
