//! Counts rather than times, measured anew: `counts` prints a line for each figure of a row,
//! separated by tabs: row, what, measured, limit.

#[allow(dead_code)] // bytes are counted by tests alone
#[path = "../../tests/it/support/alloc.rs"]
mod alloc;

use alloc::{CountingAllocator, count};
use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchIterator};
use arrow_device::device::sim::{FaultOp, SimConfig, SimDevice, SimMode};
use arrow_device::ipc::{IpcFileReader, IpcStreamReader};
use arrow_device::{
    Device, DeviceArray, DeviceRecordBatch, Devices, ExportOptions, ImportOptions,
    Result as DeviceResult, SyncPolicy, TransferStats, UploadingReader, Validation,
};
use arrow_device_benches::cases::Result;
use arrow_device_benches::{async_streams, batches, files};
use arrow_schema::DataType;
use std::io::Cursor;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const OPTIONS: ExportOptions = ExportOptions::new(SyncPolicy::Event);
const MIB: u64 = 1 << 20;

fn figure(row: &str, what: &str, measured: f64, limit: f64) {
    println!("{row}\t{what}\t{measured}\t{limit}");
}

/// A simulated device, and options that find it.
fn simulated(mode: SimMode) -> Result<(Device, ImportOptions)> {
    let device = Device::new(SimDevice::new(SimConfig::default().with_mode(mode))?)?;
    let devices = Devices::new();
    devices.add(device.clone())?;
    Ok((device, ImportOptions::default().with_devices(devices)))
}

/// What `work` adds to a device's counts.
fn cost<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<(T, TransferStats)> {
    let before = device.stats();
    let result = work()?;
    Ok((result, device.stats().since(&before)))
}

fn round_trip(batch: &DeviceRecordBatch, options: &ImportOptions) -> Result<DeviceRecordBatch> {
    let array = batch.export_array(&OPTIONS)?;
    // SAFETY: this crate has just exported the struct from a batch of this schema.
    Ok(unsafe { DeviceRecordBatch::import_as(array, batch.schema(), options) }?)
}

/// E4 and I3: the most that any width takes, once warm.
fn allocations() -> Result<()> {
    let all = batches::named("mixed", 1000, 20)?;
    let [mut exports, mut wrapped, mut imports] = [0; 3];
    let cpu = (Devices::cpu(), ImportOptions::default());
    for (device, options) in [cpu, simulated(SimMode::Async)?] {
        for columns in 1..=1000 {
            let host = all.project(&(0..columns).collect::<Vec<_>>())?;
            let (up, n) = count(|| device.upload(&host));
            if device.is_host_readable() {
                wrapped = n.max(wrapped);
            }
            let up = up?;
            drop(round_trip(&up, &options)?);
            let (array, n) = count(|| up.export_array(&OPTIONS));
            exports = n.max(exports);
            let (array, schema) = (array?, up.schema());
            // SAFETY: this crate has just exported the struct from a batch of this schema.
            let (imported, n) =
                count(|| unsafe { DeviceRecordBatch::import_as(array, schema, &options) });
            imports = n.max(imports);
            drop(imported?);
        }
    }
    figure("E4", "allocations of an export", exports as f64, 1.0);
    let what = "allocations before it, from arrow-rs's batch";
    figure("E4", what, wrapped as f64, f64::INFINITY);
    figure("I3", "allocations of an import", imports as f64, 4.0);
    Ok(())
}

/// C1: packed columns, then ones that are large enough to be copied directly, each once the pools
/// are warm.
fn uploads() -> Result<()> {
    let (device, _) = simulated(SimMode::Async)?;
    for (name, batch, direct) in [
        ("packed", batches::named("mixed", 1000, 1000)?, 0),
        ("direct", batches::named("integers", 8, 1 << 18)?, 8),
    ] {
        device.upload(&batch)?.wait()?;
        // Staging memory comes back in the background.
        std::thread::sleep(std::time::Duration::from_millis(100));
        let (up, first) = cost(&device, || Ok(device.upload(&batch)?))?;
        up.wait()?;
        let chunks = first.host_copied_bytes.div_ceil(MIB);
        let figures = [
            ("allocations", first.allocations, 1),
            ("copies", first.copies, chunks + direct),
            ("events", first.events, first.copies + 1),
            ("host waits", first.host_waits, 0),
            ("host memory created once warm", first.host_allocations, 0),
        ];
        for (what, measured, limit) in figures {
            let what = format!("{name}: {what}");
            figure("C1", &what, measured as f64, limit as f64);
        }
    }
    Ok(())
}

/// Bytes of the rows of a column of [`batches`], without anything else, and in how many buffers.
fn payload(column: &ArrayRef) -> Result<(usize, usize)> {
    let mask = usize::from(column.null_count() > 0);
    let (bytes, buffers) = match column.data_type() {
        DataType::Utf8 => {
            let ends = column.as_string::<i32>().value_offsets();
            let bytes = ends[column.len()] - ends[0];
            (ends.len() * 4 + usize::try_from(bytes)?, 2)
        }
        other => {
            let width = other.primitive_width().ok_or("no payload is known")?;
            (column.len() * width, 1)
        }
    };
    Ok((bytes + mask * column.len().div_ceil(8), buffers + mask))
}

/// Payload and buffers of all columns.
fn payloads(batch: &RecordBatch) -> Result<(usize, usize)> {
    batch
        .columns()
        .iter()
        .try_fold((0, 0), |(bytes, n), column| {
            let (more, buffers) = payload(column)?;
            Ok((bytes + more, n + buffers))
        })
}

/// C2: a slice of 1 % of 10 million rows, up and down. C3: the slab of it, and of batches as they
/// are.
fn bytes() -> Result<()> {
    const ROWS: usize = 10_000_000;
    let (device, _) = simulated(SimMode::Async)?;
    let batch = batches::named("mixed", 4, ROWS)?;
    let mut slab = 0f64;
    let per_buffer = |bytes: u64, (payload, buffers): (usize, usize)| {
        (bytes as f64 - payload as f64) / buffers as f64
    };
    for column in batch.columns() {
        let whole = device.upload_array(column)?;
        let (offset, rows) = (ROWS / 3 + 1, ROWS / 100);
        let part = column.slice(offset, rows);
        let (bytes, buffers) = payload(&part)?;
        let (_, up) = cost(&device, || Ok(device.upload_array(&part)?))?;
        let (_, down) = cost(&device, || Ok(whole.slice(offset, rows)?.to_host()?))?;
        for (way, moved) in [("up", up.bytes_to_device), ("down", down.bytes_to_host)] {
            let times = (moved as f64 - 64.0 * buffers as f64) / bytes as f64;
            let what = format!("{} {way}: times the payload", column.data_type());
            figure("C2", &what, times, 1.05);
        }
        slab = slab.max(per_buffer(up.allocated_bytes, (bytes, buffers)));
    }
    for (columns, rows) in [(1, 1), (7, 13), (100, 100), (1000, 1000)] {
        let batch = batches::named("mixed", columns, rows)?;
        let (_, up) = cost(&device, || Ok(device.upload(&batch)?))?;
        slab = slab.max(per_buffer(up.allocated_bytes, payloads(&batch)?));
    }
    figure("C3", "bytes of a buffer over its payload", slab, 64.0);
    Ok(())
}

/// D3: 300 columns of text, from an import to the host.
fn sizes() -> Result<()> {
    let batch = batches::named("text", 300, 1000)?;
    let (bytes, _) = payloads(&batch)?;
    let (device, options) = simulated(SimMode::Async)?;
    let imported = round_trip(&device.upload(&batch)?, &options)?;
    let (down, cost) = cost(&device, || Ok(imported.to_host()?))?;
    if down != batch {
        return Err("other values came back".into());
    }
    let read = (cost.bytes_to_host as f64 - bytes as f64) / 300.0;
    figure("D3", "host waits", cost.host_waits as f64, 2.0);
    figure("D3", "bytes a column for the sizes", read, 8.0);
    Ok(())
}

/// V2: a batch and nested columns that are validated on a simulated device.
fn validation() -> Result<()> {
    let (device, options) = simulated(SimMode::Async)?;
    let full = options.clone().with_validation(Validation::Full);
    let mixed = batches::named("mixed", 8, 10_000)?;
    let named = [("8 mixed columns", mixed)];
    let nested = ["struct", "list", "dictionary", "dense_union"];
    let nested = nested.map(|kind| Ok((kind, batches::named(kind, 1, 10_000)?)));
    let nested = nested.into_iter().collect::<Result<Vec<_>>>()?;
    for (name, batch) in named.into_iter().chain(nested) {
        let up = device.upload(&batch)?;
        let bytes = up.get_slice_memory_size()?;
        up.wait()?;
        let (imported, cost) = cost(&device, || round_trip(&up, &full))?;
        drop(imported);
        let times = cost.bytes_to_host as f64 / bytes as f64;
        figure(
            "V2",
            &format!("{name}: bytes that come down, of the batch's"),
            times,
            1.05,
        );
        figure(
            "V2",
            &format!("{name}: host waits"),
            cost.host_waits as f64,
            2.0,
        );
    }
    Ok(())
}

/// F1: files and streams to a simulated device, once warm.
fn files() -> Result<()> {
    let sim = SimDevice::new(SimConfig::default().with_mode(SimMode::Deferred))?;
    let device = Device::new(sim.clone())?;
    let batches = [100_000, 1000, 10].map(|rows| batches::named("mixed", 8, rows));
    let batches = batches
        .into_iter()
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let bytes = [files::file(&batches)?, files::stream(&batches)?];
    for (name, bytes) in ["file", "stream"].into_iter().zip(&bytes) {
        let read = || -> Result<_> {
            let batches: DeviceResult<Vec<_>> = match name {
                "file" => IpcFileReader::try_new(Cursor::new(bytes), &device)?.collect(),
                _ => IpcStreamReader::try_new(bytes.as_slice(), &device)?.collect(),
            };
            Ok(batches?)
        };
        let down = |read: Vec<DeviceRecordBatch>| -> Result<_> {
            let down = read.iter().map(|batch| batch.to_host());
            Ok(down.collect::<DeviceResult<Vec<_>>>()?)
        };
        if down(read()?)? != batches {
            return Err("other values came out of a file".into());
        }
        device.synchronize()?;
        // Staging memory comes back in the background.
        while sim.report().live_events > 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
        let (read, cost) = cost(&device, read)?;
        down(read)?;
        let figures = [
            ("bytes that the host copies", cost.host_copied_bytes, 0),
            ("copies of three batches", cost.copies, 3),
            ("allocations of three batches", cost.allocations, 3),
            ("host waits", cost.host_waits, 0),
            ("host memory created once warm", cost.host_allocations, 0),
        ];
        for (what, measured, limit) in figures {
            figure(
                "F1",
                &format!("{name}: {what}"),
                measured as f64,
                limit as f64,
            );
        }
        let more = cost.bytes_to_device as f64 / bytes.len() as f64;
        figure(
            "F1",
            &format!("{name}: bytes to the device, of those in it"),
            more,
            1.0,
        );
    }
    Ok(())
}

/// Z1: out, in, and out again.
fn again() -> Result<()> {
    let batch = batches::named("mixed", 1000, 1000)?;
    let cpu = (Devices::cpu(), ImportOptions::default());
    let places = [
        ("CPU", cpu),
        ("simulated, running", simulated(SimMode::Async)?),
        ("simulated, held", simulated(SimMode::Deferred)?),
    ];
    for (name, (device, options)) in places {
        let imported = round_trip(&device.upload(&batch)?, &options)?;
        let (array, cost) = cost(&device, || Ok(imported.export_array(&OPTIONS)?))?;
        drop(array);
        let copies = cost.copies + cost.host_copied_bytes;
        let waits = cost.host_waits + cost.queue_waits;
        figure("Z1", &format!("{name}: copies"), copies as f64, 0.0);
        figure("Z1", &format!("{name}: waits"), waits as f64, 0.0);
    }
    Ok(())
}

/// W1: small uploads that are all pending until the device runs: nanoseconds of each until its
/// memory is back, and the questions about its event.
fn pending(uploads: usize) -> Result<(f64, f64)> {
    let sim = SimDevice::new(SimConfig::default().with_mode(SimMode::Deferred))?;
    let device = Device::new(sim.clone())?;
    let batch = batches::named("integers", 1, 3)?;
    let start = Instant::now();
    for _ in 0..uploads {
        device.upload(&batch)?;
    }
    device.synchronize()?;
    while sim.report().live_events > 0 {
        std::thread::yield_now();
    }
    let time = start.elapsed().as_nanos() as f64;
    let questions = sim.faults().seen(FaultOp::Query) as f64;
    Ok((time / uploads as f64, questions / uploads as f64))
}

fn waiting() -> Result<()> {
    let (mut few, mut many, mut questions) = (f64::INFINITY, f64::INFINITY, 0f64);
    for _ in 0..3 {
        few = few.min(pending(2000)?.0);
        let (time, asked) = pending(16_000)?;
        (many, questions) = (many.min(time), questions.max(asked));
    }
    figure(
        "W1",
        "time of an upload: times that of 2,000",
        many / few,
        3.0,
    );
    figure("W1", "questions about its event", questions, 3.0);
    Ok(())
}

/// Bytes of an array's buffers, each padded to 64.
fn padded(array: &DeviceArray) -> usize {
    let buffers = (0..array.num_buffers()).filter_map(|i| array.buffer(i));
    let own: usize = buffers
        .map(|buffer| buffer.len().next_multiple_of(64))
        .sum();
    let children = (0..array.num_children()).filter_map(|i| array.child(i));
    own + children.map(|child| padded(&child)).sum::<usize>()
}

/// M1: bytes that are held, of what is used.
fn memory() -> Result<()> {
    let sim = SimDevice::new(SimConfig::default())?;
    let device = Device::new(sim.clone())?;
    let held = |kept: &DeviceArray| -> Result<f64> {
        device.synchronize()?;
        let (used, start) = (padded(kept), Instant::now());
        // What a copy has read is given back on a thread of the device, as soon as the machine has time for it.
        while sim.report().live_bytes > used && start.elapsed().as_secs() < 2 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        Ok(sim.report().live_bytes as f64 / used as f64)
    };
    let host = batches::named("mixed", 8, 10_000)?;
    let columns = host
        .columns()
        .iter()
        .map(|column| device.upload_array(column));
    let columns = columns.collect::<DeviceResult<Vec<_>>>()?;
    let own = DeviceRecordBatch::try_new(host.schema(), &columns)?;
    drop(columns);
    let kept = own.column(1)?;
    drop(own);
    figure(
        "M1",
        "a column of eight with memory of their own",
        held(&kept)?,
        1.1,
    );
    drop(kept);

    let batch = device.upload(&host)?;
    let kept = batch.column(1)?.compact()?;
    drop(batch);
    figure("M1", "a column of an upload, compacted", held(&kept)?, 1.0);
    drop(kept);
    let batch = device.upload(&host)?;
    let kept = batch.column(1)?;
    drop(batch);
    // Documented: the columns of an upload are one allocation.
    figure(
        "M1",
        "a column of an upload, as it is",
        held(&kept)?,
        f64::INFINITY,
    );
    drop(kept);
    let batch = device.upload(&host)?;
    let kept = batch.slice(777, 100)?.compact()?;
    drop(batch);
    figure("M1", "a slice, compacted", held(kept.as_struct())?, 1.0);
    drop(kept);
    let file = files::file(std::slice::from_ref(&host))?;
    let read = IpcFileReader::try_new(Cursor::new(&file), &device)?.next();
    let kept = read.ok_or("no batch")??;
    figure("M1", "a batch of an IPC file", held(kept.as_struct())?, 1.0);
    drop(kept);

    // Each batch is dropped before the next one is read.
    const BATCHES: usize = 100_000;
    let small = batches::named("mixed", 4, 100)?;
    let one = padded(device.upload(&small)?.as_struct()) as f64;
    device.synchronize()?;
    let before = device.stats();
    let reader = (0..BATCHES).map(|_| Ok(small.clone()));
    let reader = RecordBatchIterator::new(reader, small.schema());
    let mut most = 0;
    for (i, batch) in UploadingReader::new(reader, &device).enumerate() {
        let batch = batch?;
        if i % 1000 == 0 {
            most = most.max(sim.report().live_bytes);
        }
        drop(batch);
    }
    // The stream takes back what is copied, however far behind the device's own thread is, except what that is just dropping.
    let created = device.stats().since(&before).host_allocations;
    figure(
        "M1",
        "100,000 batches of a stream: batches on the device at a time",
        most as f64 / one,
        64.0,
    );
    figure(
        "M1",
        "100,000 batches of a stream: staging memory that was created",
        created as f64,
        65.0,
    );
    device.synchronize()?;
    while sim.report().live_events > 0 {
        std::thread::yield_now();
    }
    std::thread::sleep(std::time::Duration::from_millis(100));
    let idle = sim.report().live_host_bytes as f64;
    figure(
        "M1",
        "100,000 batches of a stream: idle bytes afterwards, of the limit",
        idle / (1u64 << 30) as f64,
        1.0,
    );
    device.trim();
    let report = sim.report();
    figure(
        "M1",
        "bytes that are left after trim",
        (report.live_bytes + report.live_host_bytes) as f64,
        0.0,
    );
    Ok(())
}

fn main() -> Result<()> {
    allocations()?;
    uploads()?;
    bytes()?;
    sizes()?;
    validation()?;
    files()?;
    again()?;
    waiting()?;
    fairness()?;
    memory()
}

/// A1: queues of five batches each.
fn fairness() -> Result<()> {
    let batch = Devices::cpu().upload(&batches::named("integers", 10, 1)?)?;
    let (lacking, most) = async_streams::fairness(&batch, 1000)?;
    let of = "two async streams on one thread";
    let what = format!("{of}: batches that one lacks when the other has ended");
    figure("A1", &what, lacking as f64, 10.0);
    let what = format!("{of}: batches between two turns of another task");
    figure("A1", &what, most as f64, 20.0);
    Ok(())
}
