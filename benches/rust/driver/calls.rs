//! Rows N1 to N4, and F1's part: calls of the driver, counted.

use std::io::Cursor;
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_device::ipc::IpcFileReader;
use arrow_device::{DeviceRecordBatch, ExportOptions, SyncPolicy};
use arrow_device_benches::cases::Result;
use arrow_device_benches::{batches, files};

use crate::fake::Fake;

pub(crate) const OPTIONS: ExportOptions = ExportOptions::new(SyncPolicy::Event);

/// Calls that copy.
const COPIES: [&str; 4] = [
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuMemcpyBatchAsync_v2",
    "cuMemcpyHtoDAsync_v2",
];

/// Calls that tell what an address is.
const QUERIES: [&str; 4] = [
    "cuPointerGetAttribute",
    "cuPointerGetAttributes",
    "cuMemGetAddressRange_v2",
    "cuMemHostGetDevicePointer_v2",
];

fn figure(row: &str, what: &str, measured: f64, limit: f64) {
    println!("{row}\t{what}\t{measured}\t{limit}");
}

fn of_all(fake: &Fake, names: &[&str]) -> Result<u64> {
    names.iter().map(|name| fake.calls_of(name)).sum()
}

/// Runs `work` again and again, and returns the fewest of what it adds to the counts. What is left
/// of the last time ends in the background, which only adds.
fn fewest<T, const N: usize>(
    fake: &Fake,
    count: impl Fn(&Fake) -> Result<[u64; N]>,
    mut work: impl FnMut() -> Result<T>,
    mut after: impl FnMut(T) -> Result<()>,
) -> Result<[u64; N]> {
    let mut fewest = [u64::MAX; N];
    for _ in 0..12 {
        let before = count(fake)?;
        let result = work()?;
        let added: [u64; N] = std::array::from_fn({
            let now = count(fake)?;
            move |i| now[i] - before[i]
        });
        fewest = fewest.min(added);
        after(result)?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(fewest)
}

/// All calls of an upload, and those that copy.
fn upload(fake: &Fake, batch: &RecordBatch) -> Result<[u64; 2]> {
    let count = |fake: &Fake| Ok([fake.own_calls()?, of_all(fake, &COPIES)?]);
    fewest(
        fake,
        count,
        || Ok(fake.device.upload(batch)?),
        |up| Ok(up.wait()?),
    )
}

/// N1 and N2.
fn uploads(fake: &Fake) -> Result<()> {
    let small = batches::named("mixed", 10, 100)?;
    let [calls, _] = upload(fake, &small)?;
    figure("N1", "driver calls", calls as f64, 8.0);

    let all = batches::named("integers", 8, 1 << 21)?;
    let [few, few_copies] = upload(fake, &all.slice(0, all.num_rows() / 4))?;
    let [many, many_copies] = upload(fake, &all)?;
    if many_copies <= few_copies {
        return Err("a larger upload has no more lists of copies".into());
    }
    let each = (many - few) as f64 / (many_copies - few_copies) as f64;
    let mib = all.get_array_memory_size() >> 20;
    let what = format!("driver calls, {mib} MiB beside {} MiB", mib / 4);
    figure("N2", &what, each, 2.0);
    Ok(())
}

fn import(fake: &Fake, batch: &DeviceRecordBatch) -> Result<u64> {
    let mut fewest = u64::MAX;
    for _ in 0..12 {
        let array = batch.export_array(&OPTIONS)?;
        let before = of_all(fake, &QUERIES)?;
        // SAFETY: this crate has just exported the struct from a batch of this schema.
        let imported =
            unsafe { DeviceRecordBatch::import_as(array, batch.schema(), &fake.options) }?;
        let after = of_all(fake, &QUERIES)?;
        fewest = fewest.min(after - before);
        drop(imported);
    }
    Ok(fewest)
}

/// F1: a file to the stand-in, once warm.
fn file(fake: &Fake) -> Result<()> {
    let batch = batches::named("mixed", 8, 100_000)?;
    let bytes = files::file(std::slice::from_ref(&batch))?;
    let count = |fake: &Fake| {
        let stats = fake.device.stats();
        let created = stats.host_allocations;
        Ok([of_all(fake, &COPIES)?, stats.host_copied_bytes, created])
    };
    let read = || {
        let mut reader = IpcFileReader::try_new(Cursor::new(&bytes), &fake.device)?;
        Ok(reader.next().ok_or("no batch")??)
    };
    let same = |up: DeviceRecordBatch| match up.to_host()? == batch {
        true => Ok(()),
        false => Err("other values came out of a file".into()),
    };
    let [lists, copied, created] = fewest(fake, count, read, same)?;
    figure(
        "F1",
        "stand-in driver: lists of copies of a batch",
        lists as f64,
        1.0,
    );
    figure(
        "F1",
        "stand-in driver: bytes that the host copies",
        copied as f64,
        0.0,
    );
    let what = "stand-in driver: host memory created once warm";
    figure("F1", what, created as f64, 0.0);
    Ok(())
}

/// N3 and N4.
fn interchange(fake: &Fake) -> Result<()> {
    for columns in [1, 1000] {
        let batch = fake
            .device
            .upload(&batches::named("mixed", columns, 1000)?)?;
        batch.wait()?;
        // All of the batch is one allocation.
        let queries = import(fake, &batch)?;
        let what = format!("pointer queries, {columns} columns");
        figure("N3", &what, queries as f64, 1.0);
        let count = |fake: &Fake| Ok([fake.own_calls()?]);
        let export = || Ok(batch.export_array(&OPTIONS)?);
        let [calls] = fewest(fake, count, export, |_| Ok(()))?;
        let what = format!("driver calls, {columns} columns");
        figure("N4", &what, calls as f64, 0.0);
    }
    Ok(())
}

pub(crate) fn print() -> Result<()> {
    let fake = Fake::open(0, 0)?;
    // All calls are this thread's.
    fake.device.set_packing_threads(1);
    uploads(&fake)?;
    file(&fake)?;
    interchange(&fake)
}
