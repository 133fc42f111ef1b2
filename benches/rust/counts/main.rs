//! Counts rather than times. `counts` prints a line for each figure of a row, separated by tabs: row, what, measured, limit. For
//! callgrind: `counts linear N`, and `counts cases CASE[,CASE...] KIND COLUMNS ROWS N`, where each case runs twice: what happens
//! once only is done in the first run, which is not for counting.

mod linear;

use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchIterator, StructArray};
use arrow_device::device::sim::{SimConfig, SimDevice, SimMemory, SimMode};
use arrow_device::{
    Device, DeviceArray, DeviceRecordBatch, Devices, ExportOptions, ImportOptions,
    Result as DeviceResult, SyncPolicy, TransferStats, Validation, upload_reader,
};
use arrow_device_benches::cases::{self, Input, Result};
use arrow_device_benches::{async_streams, batches};
use arrow_schema::DataType;

const OPTIONS: ExportOptions = ExportOptions::new(SyncPolicy::Event);
const MIB: u64 = 1 << 20;

/// Staging memory comes back in the background.
const SOON: Duration = Duration::from_millis(100);

fn figure(row: &str, what: &str, measured: f64, limit: f64) {
    println!("{row}\t{what}\t{measured}\t{limit}");
}

/// A simulated device, and options that find it.
fn simulated(mode: SimMode) -> Result<(Device, ImportOptions)> {
    let device = Device::new(SimDevice::new(SimConfig {
        mode,
        ..SimConfig::default()
    })?)?;
    let devices = Devices::new();
    devices.add(device.clone())?;
    Ok((
        device,
        ImportOptions {
            devices: Some(devices),
            ..Default::default()
        },
    ))
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

/// C1: packed columns, then ones that are large enough to be copied directly, each once the pools are warm.
fn uploads() -> Result<()> {
    let (device, _) = simulated(SimMode::Async)?;
    for (name, batch, direct) in [
        ("packed", batches::named("mixed", 1000, 1000)?, 0),
        ("direct", batches::named("integers", 8, 1 << 18)?, 8),
    ] {
        // Behind a kernel no copy is done early, so that the upload takes as many host buffers as any can.
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let kernel = move |_: &mut SimMemory<'_>| ended.recv().map_err(|end| end.to_string());
        // SAFETY: the kernel uses no memory.
        unsafe { device.default_queue().as_sim()?.launch(kernel) }?;
        let first = device.upload(&batch)?;
        end.send(())?;
        first.wait()?;
        sleep(SOON);
        let (up, first) = cost(&device, || Ok(device.upload(&batch)?))?;
        up.wait()?;
        let chunks = first.host_copied_bytes.div_ceil(MIB);
        for (what, measured, limit) in [
            ("allocations", first.allocations, 1),
            ("copies", first.copies, chunks + direct),
            ("events", first.events, first.copies + 1),
            ("host waits", first.host_waits, 0),
            ("host memory created once warm", first.host_allocations, 0),
        ] {
            figure(
                "C1",
                &format!("{name}: {what}"),
                measured as f64,
                limit as f64,
            );
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

/// C2: a slice of 1 % of 10 million rows, up and down. C3: the allocation of it, and of batches as they are.
fn bytes() -> Result<()> {
    const ROWS: usize = 10_000_000;
    let (device, _) = simulated(SimMode::Async)?;
    let batch = batches::named("mixed", 4, ROWS)?;
    let mut allocated = 0f64;
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
        allocated = allocated.max(per_buffer(up.allocated_bytes, (bytes, buffers)));
    }
    for (columns, rows) in [(1, 1), (7, 13), (100, 100), (1000, 1000)] {
        let batch = batches::named("mixed", columns, rows)?;
        let (_, up) = cost(&device, || Ok(device.upload(&batch)?))?;
        allocated = allocated.max(per_buffer(up.allocated_bytes, payloads(&batch)?));
    }
    figure("C3", "bytes of a buffer over its payload", allocated, 64.0);
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
    let full = ImportOptions {
        validation: Validation::Full,
        ..options.clone()
    };
    for (kind, columns) in [
        ("mixed", 8),
        ("struct", 1),
        ("list", 1),
        ("dictionary", 1),
        ("dense_union", 1),
    ] {
        let batch = batches::named(kind, columns, 10_000)?;
        let up = device.upload(&batch)?;
        let bytes = StructArray::from(batch).to_data().get_slice_memory_size()?;
        up.wait()?;
        let (imported, cost) = cost(&device, || round_trip(&up, &full))?;
        drop(imported);
        let times = cost.bytes_to_host as f64 / bytes as f64;
        let what = format!("{columns} {kind}: bytes that come down, of the batch's");
        figure("V2", &what, times, 1.05);
        figure(
            "V2",
            &format!("{columns} {kind}: host waits"),
            cost.host_waits as f64,
            2.0,
        );
    }
    Ok(())
}

/// Z1: out, in, and out again.
fn again() -> Result<()> {
    let batch = batches::named("mixed", 1000, 1000)?;
    for (name, (device, options)) in [
        ("CPU", (Devices::cpu(), ImportOptions::default())),
        ("simulated, running", simulated(SimMode::Async)?),
        ("simulated, held", simulated(SimMode::Deferred)?),
    ] {
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
    let held = |what: &str, limit: f64, kept: DeviceArray| -> Result<()> {
        device.synchronize()?;
        let (used, start) = (padded(&kept), Instant::now());
        // What a copy has read is given back on a thread of the device, as soon as the machine has time for it.
        while sim.report().live_bytes > used && start.elapsed().as_secs() < 2 {
            sleep(Duration::from_millis(1));
        }
        figure(
            "M1",
            what,
            sim.report().live_bytes as f64 / used as f64,
            limit,
        );
        Ok(())
    };
    let host = batches::named("mixed", 8, 10_000)?;
    let columns = host
        .columns()
        .iter()
        .map(|column| device.upload_array(column));
    let own =
        DeviceRecordBatch::try_new(host.schema(), &columns.collect::<DeviceResult<Vec<_>>>()?)?
            .column(1)?;
    held("a column of eight with memory of their own", 1.1, own)?;
    let column = device.upload(&host)?.column(1)?.compact()?;
    held("a column of an upload, compacted", 1.0, column)?;
    // Documented: the columns of an upload are one allocation.
    held(
        "a column of an upload, as it is",
        f64::INFINITY,
        device.upload(&host)?.column(1)?,
    )?;
    let slice = device.upload(&host)?.slice(777, 100)?.compact()?;
    held("a slice, compacted", 1.0, slice.as_struct().clone())?;
    drop(slice);

    // Each batch is dropped before the next one is read.
    const BATCHES: usize = 100_000;
    let small = batches::named("mixed", 4, 100)?;
    let one = padded(device.upload(&small)?.as_struct()) as f64;
    device.synchronize()?;
    let before = device.stats();
    let reader = (0..BATCHES).map(|_| Ok(small.clone()));
    let reader = RecordBatchIterator::new(reader, small.schema());
    let mut most = 0;
    for (i, batch) in upload_reader(reader, &device).enumerate() {
        let batch = batch?;
        if i % 1000 == 0 {
            most = most.max(sim.report().live_bytes);
        }
        drop(batch);
    }
    // The stream takes back what is copied, however far behind the device's own thread is, except what that is just dropping.
    let created = device.stats().since(&before).host_allocations as f64;
    device.synchronize()?;
    while sim.report().live_events > 0 {
        yield_now();
    }
    sleep(SOON);
    let idle = sim.report().live_host_bytes as f64 / (1u64 << 30) as f64;
    device.trim();
    let report = sim.report();
    let of = "100,000 batches of a stream";
    figure(
        "M1",
        &format!("{of}: batches on the device at a time"),
        most as f64 / one,
        64.0,
    );
    figure(
        "M1",
        &format!("{of}: staging memory that was created"),
        created,
        65.0,
    );
    figure(
        "M1",
        &format!("{of}: idle bytes afterwards, of the limit"),
        idle,
        1.0,
    );
    let left = report.live_bytes + report.live_host_bytes;
    figure("M1", "bytes that are left after trim", left as f64, 0.0);
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [] => [uploads, bytes, sizes, validation, again, fairness, memory]
            .into_iter()
            .try_for_each(|row| row()),
        ["linear", n] => linear::run(n.parse()?),
        ["cases", names, kind, columns, rows, n] => {
            let input = Input::new(batches::named(kind, columns.parse()?, rows.parse()?)?)?;
            for name in names.split(',') {
                let case = cases::case(name).ok_or_else(|| format!("no case is called {name}"))?;
                case(&input, 2)?;
                case(&input, n.parse()?)?;
            }
            Ok(())
        }
        _ => Err("usage: counts [linear N | cases CASE[,CASE...] KIND COLUMNS ROWS N]".into()),
    }
}
