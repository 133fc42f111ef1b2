//! What operations cost: one table for the device, then heap memory, staging memory, and what is not copied.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::simkit::layout::check_host_layout;
use crate::simkit::*;
use crate::support::types::list;
use crate::support::*;
use crate::support_c::c;
use crate::support_c::sim::{Place, places, simulated};
use arrow_array::types::Int16Type;
use arrow_array::{
    Array, ArrayRef, DictionaryArray, Int64Array, RecordBatch, StringArray, StructArray,
};
use arrow_device::device::sim::{SimConfig, SimMode};
use arrow_device::{
    DeviceArray, DeviceRecordBatch, Devices, ExportOptions, ImportOptions, SyncPolicy,
    TransferStats, Validation, Validity,
};
use arrow_schema::DataType;

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);
const WAIT: ExportOptions = ExportOptions::new(SyncPolicy::Wait);
/// Any number of bytes or copies.
const ANY: u64 = u64::MAX;

fn nullable(rows: usize) -> ArrayRef {
    let values = (0..rows as i64).map(|i| (i % 3 > 0).then_some(i));
    Arc::new(Int64Array::from_iter(values))
}

fn plain(rows: usize) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(0..rows as i64))
}

/// Three bytes each.
fn texts(rows: usize) -> ArrayRef {
    let rows = (0..rows).map(|i| format!("{i:03}"));
    Arc::new(StringArray::from_iter_values(rows))
}

/// The array with a null count that nobody knows.
fn uncounted(up: &DeviceArray) -> DeviceArray {
    let bits = up
        .buffer(0)
        .map(|bits| Validity::new(bits, 0, up.len()).unwrap());
    let data_type = up.data_type().clone();
    // SAFETY: the parts are those of a valid array of this type and length.
    unsafe { DeviceArray::from_parts(up.device(), data_type, up.len(), bits, &[up.buffer(1)], &[]) }
        .unwrap()
}

/// Out and in: what an import does not know is read later.
fn again(up: &DeviceRecordBatch, options: &ImportOptions, counts: bool) -> DeviceRecordBatch {
    let mut exported = up.export_array(&EVENT).unwrap();
    let root = c(&mut exported).array;
    for i in (0..root.n_children as usize).filter(|_| !counts) {
        // SAFETY: the export is live and has these children.
        unsafe { (**root.children.add(i)).null_count = -1 };
    }
    // SAFETY: the struct comes from an export of this crate, and the type is the exported one.
    unsafe { DeviceRecordBatch::import_as(exported, up.schema(), options) }.unwrap()
}

type Work = Box<dyn Fn() -> Box<dyn Any>>;

fn work<T: Any>(work: impl Fn() -> T + 'static) -> Work {
    Box::new(move || Box::new(work()))
}

/// Operations; allocations, waits of queues and waits of the host; at most so many copies, bytes to the device and to the host.
type Row = (&'static str, Work, [u64; 3], [u64; 3]);

fn batches(place: &Place) -> Vec<Row> {
    let device = place.device.clone();
    let queue = device.new_queue().unwrap();
    let strings = batch(&vec![DataType::Utf8; 300], 40, Nulls::Some, 3);
    let nested = batch(&vec![list(list(DataType::Utf8)); 20], 60, Nulls::Some, 8);
    let large = RecordBatch::try_from_iter([("a", plain(160_000)), ("b", plain(160_000))]).unwrap();
    let up = device.upload(&strings).unwrap();
    let lists = device.upload(&nested).unwrap();
    let imported = again(&up, &place.options, true);
    let known = again(&up, &place.options, true);
    known.as_struct().resolve_sizes().unwrap();
    let full = ImportOptions {
        validation: Validation::Full,
        ..place.options.clone()
    };
    type Then = fn(&DeviceRecordBatch) -> Box<dyn Any>;
    let of = |f: Then, up: &DeviceRecordBatch| {
        let up = up.clone();
        work(move || f(&up))
    };
    let imported_then = |f: Then, options: &ImportOptions, counts| {
        let (up, options) = (up.clone(), options.clone());
        work(move || f(&again(&up, &options, counts)))
    };
    let unknown = |f: Then, options: &ImportOptions| imported_then(f, options, false);
    let import = |f: Then| imported_then(f, &place.options, true);
    let upload = |batch: &RecordBatch, f: Then| {
        let (device, batch) = (device.clone(), batch.clone());
        work(move || f(&device.upload(&batch).unwrap()))
    };
    let there = device.clone();
    let text = strings.clone();
    #[rustfmt::skip] // a table
    let rows: Vec<Row> = vec![
        ("upload", upload(&strings, |b| Box::new(b.clone())), [1, 0, 0], [1, ANY, 0]),
        ("upload of large columns", upload(&large, |b| Box::new(b.clone())), [1, 0, 0], [2, ANY, 0]),
        ("upload on a queue", work(move || there.upload_on(&text, &queue)), [1, 0, 0], [1, ANY, 0]),
        ("upload, export", upload(&strings, |b| Box::new(b.export_array(&EVENT))), [1, 0, 0], [1, ANY, 0]),
        ("upload, download", upload(&strings, |b| Box::new(b.to_host())), [1, 0, 1], [2, ANY, ANY]),
        ("download", of(|b| Box::new(b.to_host()), &up), [0, 0, 1], [1, 0, ANY]),
        // One read for each level of offsets, all columns together.
        ("download of a part", of(|b| Box::new(b.slice(7, 20).unwrap().to_host()), &up), [0, 0, 2], [ANY, 0, ANY]),
        ("download of nested parts", of(|b| Box::new(b.slice(11, 30).unwrap().to_host()), &lists), [0, 0, 4], [ANY, 0, ANY]),
        ("slice, project, column", of(|b| Box::new(b.slice(3, 9).unwrap().project(&[5, 1]).unwrap().column(1)), &up),
            [0; 3], [0; 3]),
        ("to where it is", of(|b| Box::new(b.to_device(b.device())), &up), [0; 3], [0; 3]),
        ("of columns", of(|b| {Box::new(DeviceRecordBatch::try_new(b.schema(), &b.columns().collect::<Vec<_>>())) }, &up),
            [0; 3], [0; 3]),
        ("export", of(|b| Box::new(b.export_array(&EVENT)), &up), [0; 3], [0; 3]),
        ("import", import(|b| Box::new(b.clone())), [0; 3], [0; 3]),
        ("export again", of(|b| Box::new(b.export_array(&EVENT)), &imported), [0; 3], [0; 3]),
        ("sizes of an import", import(|b| Box::new(b.as_struct().resolve_sizes())), [0, 1, 1], [300, 0, 1200]),
        ("sizes again", of(|b| Box::new(b.as_struct().resolve_sizes()), &known), [0; 3], [0; 3]),
        ("import, download", import(|b| Box::new(b.to_host())), [0, 2, 2], [ANY, 0, ANY]),
        ("download of known sizes", of(|b| Box::new(b.to_host()), &known), [0, 1, 1], [ANY, 0, ANY]),
        // An import's own event is waited for by the queue, by each list. Bitmaps that nobody has counted come with the sizes, or
        // with the data.
        ("uncounted, download", unknown(|b| Box::new(b.to_host()), &place.options), [0, 2, 2], [ANY, 0, ANY]),
        ("uncounted, export twice", unknown(|b| Box::new([b.export_array(&EVENT), b.export_array(&EVENT)]), &place.options),
            [0, 1, 1], [300, 0, 300 * 5]),
        ("uncounted, export, compact", unknown(|b| Box::new((b.export_array(&EVENT), b.compact())), &place.options),
            [1, 2, 2], [ANY, 0, ANY]),
        ("uncounted, checked", unknown(|b| Box::new(b.clone()), &full), [0, 2, 2], [ANY, 0, ANY]),
        ("uncounted, checked, export", unknown(|b| Box::new(b.export_array(&EVENT)), &full), [0, 2, 2], [ANY, 0, ANY]),
        ("compact", of(|b| Box::new(b.compact()), &up), [1, 0, 1], [ANY, 0, 2400]),
    ];
    rows
}

fn arrays(place: &Place) -> Vec<Row> {
    let device = &place.device;
    let queue = device.new_queue().unwrap();
    let up = |array: ArrayRef| device.upload_array(&array).unwrap();
    let cut = |array: &DeviceArray, rows: std::ops::Range<usize>| {
        let part = array.slice(rows.start, rows.len()).unwrap();
        part.resolve_null_counts().unwrap();
        part
    };
    let compact = |array: &DeviceArray| {
        let array = array.clone();
        work(move || array.compact().unwrap())
    };
    let concat =
        |arrays: [DeviceArray; 2]| work(move || DeviceArray::concat(&arrays.each_ref()).unwrap());
    let (values, nulls, text) = (up(plain(100)), up(nullable(100)), up(texts(64)));
    let words: DictionaryArray<Int16Type> = (0..32).map(|i| ["a", "b"][i % 2]).collect();
    let words = up(Arc::new(words));
    let config = SimConfig {
        mode: SimMode::Deferred,
        ..SimConfig::default()
    };
    let peer = Sim::with(SimConfig {
        peer_access: true,
        ..config.clone()
    });
    let stranger = Sim::with(config);
    let to = |array: &DeviceArray, sim: Sim| {
        let array = array.clone();
        work(move || {
            let there = array.to_device(&sim).unwrap();
            sim.synchronize().unwrap();
            there
        })
    };
    let here = device.clone();
    let concat_on_queue = work(move || {
        let batch = |rows| RecordBatch::try_from_iter([("a", nullable(rows))]).unwrap();
        let parts = [64, 7].map(|rows| here.upload(&batch(rows)).unwrap());
        DeviceRecordBatch::concat(&batch(1).schema(), &parts, &queue).unwrap()
    });
    #[rustfmt::skip] // a table
    let rows: Vec<Row> = vec![
        ("compact values", compact(&values), [1, 0, 0], [1, 0, 0]),
        ("compact nulls", compact(&nulls), [1, 0, 0], [1, 0, 0]),
        // The host sees what it rewrites: the last byte of a bitmap, or one that starts within a byte, or offsets.
        ("compact nulls from a byte", compact(&cut(&nulls, 8..58)), [1, 0, 1], [4, 64, 1]),
        ("compact nulls of bytes", compact(&cut(&nulls, 8..56)), [1, 0, 0], [2, 0, 0]),
        ("compact nulls from within a byte", compact(&cut(&nulls, 3..53)), [1, 0, 1], [3, 64, 7]),
        ("compact uncounted nulls", compact(&uncounted(&nulls)), [1, 0, 1], [4, 64, 13]),
        ("compact text", compact(&text), [1, 0, 1], [3, 0, 8]),
        ("compact a part of text", compact(&cut(&text, 10..20)), [1, 0, 2], [5, 64, 52]),
        ("compact no text", compact(&cut(&text, 10..10)), [1, 0, 0], [1, 64, 0]),
        ("concat values", concat([values.clone(), cut(&values, 3..53)]), [1, 0, 0], [2, 0, 0]),
        ("concat aligned nulls", concat([up(nullable(64)), up(nullable(8))]), [1, 0, 0], [4, 0, 0]),
        ("concat nulls", concat([nulls.clone(), up(nullable(28))]), [1, 0, 1], [5, 64, 17]),
        ("concat some nulls", concat([up(nullable(64)), up(plain(64))]), [1, 0, 0], [4, 64, 0]),
        ("concat text", concat([up(texts(16)), up(texts(15))]), [1, 0, 2], [9, 64, 76]),
        ("concat shared words", concat([words.clone(), cut(&words, 0..20)]), [1, 0, 1], [ANY, 0, 16]),
        ("upload, concat on a queue", concat_on_queue, [3, 2, 1], [ANY, ANY, 72]),
        // A peer copies what need not be rewritten; without access all goes through the host.
        ("to a peer", to(&nulls, peer), [1, 0, 2], [1, 0, 0]),
        ("to a stranger", to(&nulls, stranger), [1, 0, 2], [ANY, 896, 896]),
    ];
    rows
}

#[test]
fn of_operations() {
    for mode in MODES {
        let Some(place) = simulated(mode) else { return };
        for rows in [batches, arrays] {
            let (rows, mut wrong) = (rows(&place), vec![]);
            for (name, work, counts, most) in &rows {
                let end = Instant::now() + Duration::from_secs(10);
                let stats = loop {
                    let (result, stats) = TransferStats::scope(work);
                    drop(result);
                    place.device.synchronize().unwrap();
                    // Once warm, nothing new is made. Staging memory comes back in the background.
                    if stats.host_allocations == 0 {
                        break stats;
                    }
                    assert!(Instant::now() < end, "{mode:?}, {name}: {stats:?}");
                    std::thread::sleep(Duration::from_micros(200));
                };
                let found = [stats.allocations, stats.queue_waits, stats.host_waits];
                let moved = [stats.copies, stats.bytes_to_device, stats.bytes_to_host];
                let within = moved.iter().zip(most).all(|(moved, most)| moved <= most);
                // A wait has an event, and so has what is made.
                let events = stats.host_waits + stats.allocations + stats.queue_waits;
                if found != *counts || !within || stats.events > events {
                    wrong.push(format!("{mode:?}, {name}: {found:?}, {moved:?}, {stats:?}"));
                }
            }
            assert!(wrong.is_empty(), "{wrong:#?}");
            drop(rows);
            place.assert_clean();
        }
    }
}

/// Nothing is copied for the CPU, whichever way.
#[test]
fn of_the_cpu() {
    let cpu = Devices::cpu();
    let ints: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3, 4, 5]));
    let batch = RecordBatch::try_from_iter([("a", ints.clone())]).unwrap();
    let (down, stats) = TransferStats::scope(|| {
        let up = cpu.upload(&batch).unwrap().slice(1, 3).unwrap();
        again(&up, &ImportOptions::default(), true)
            .to_host()
            .unwrap()
    });
    assert_eq!(stats, TransferStats::default());
    let address = |array: &ArrayRef| array.to_data().buffers()[0].as_ptr().addr();
    assert_eq!(address(down.column(0)), address(&ints) + 8);
    // A compact copy is one host buffer, which is used again.
    let part = cpu
        .upload_array(&nullable(100))
        .unwrap()
        .slice(3, 50)
        .unwrap();
    for warm in [false, true] {
        cpu.trim();
        let kept = warm.then(|| part.compact().unwrap());
        drop(kept);
        let (copy, stats) = TransferStats::scope(|| part.compact().unwrap());
        assert_eq!(stats.host_copied_bytes, 64 + 448);
        assert!(
            stats.host_allocations <= 1 && stats.copies == 0,
            "{stats:?}"
        );
        assert_same(
            &nullable(100).slice(3, 50),
            &copy.to_host().unwrap(),
            "compact",
        );
    }
}

/// Heap allocations of upload to the CPU, export, import and release: a few for each column. Masks start at the same bit as their
/// values; others are repacked.
#[test]
fn of_heap_memory() {
    let rows = arrow_array::UInt32Array::from_iter_values(0..20);
    let all = arrow_select::take::take_record_batch(&wide_batch(1000, 20), &rows).unwrap();
    for place in places() {
        for (columns, export) in [1, 10, 100, 1000]
            .into_iter()
            .flat_map(|n| [(n, EVENT), (n, WAIT)])
        {
            let context = format!("{columns} columns on {}", place.device);
            let batch = all.project(&(0..columns).collect::<Vec<_>>()).unwrap();
            let (up, n) = count(|| place.device.upload(&batch).unwrap());
            assert!(
                n <= 8 + 4 * columns || place.sim.is_some(),
                "{context}: {n} to upload"
            );
            let import = |exported| {
                // SAFETY: the struct comes from an export of this crate, and the type is the exported one.
                unsafe { DeviceRecordBatch::import_as(exported, up.schema(), &place.options) }
                    .unwrap()
            };
            // Pools are warm after the first.
            drop(import(up.export_array(&export).unwrap()));
            let (exported, n) = count(|| up.export_array(&export).unwrap());
            assert!(n <= 8 + 4 * columns, "{context}: {n} to export");
            let (imported, n) = count(|| import(exported));
            assert!(n <= 8 + 4 * columns, "{context}: {n} to import");
            let exported = up.export_array(&export).unwrap();
            let ((), n) = count(|| drop((imported, exported)));
            // A list of events that are not complete yet.
            assert!(n <= 2, "{context}: {n} to release");
        }
        place.assert_clean();
    }
}

/// A download is one host buffer, which lives with its last buffer and then serves again.
#[test]
fn of_a_download() {
    let sim = Sim::new(SimMode::Async);
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    let batch = batch(&types, 100, Nulls::Some, 2);
    let up = sim.upload(&batch).unwrap();
    let sizes = up.as_struct().get_array_memory_size();
    let end = Instant::now() + Duration::from_secs(10);
    while sim.sim.report().live_host_allocations > 0 {
        assert!(Instant::now() < end, "staging memory does not come back");
        sim.synchronize().unwrap();
        sim.trim();
    }
    let (down, stats) = TransferStats::scope(|| up.to_host().unwrap());
    assert_eq!((stats.host_allocations, stats.host_copied_bytes), (1, 0));
    assert!(stats.bytes_to_host as usize <= sizes, "{stats:?}");
    check_host_layout(&StructArray::from(down.clone()).to_data(), "batch");
    let column = down.column(7).clone();
    drop(down);
    for kept in [Some(column), None] {
        let (_, stats) = TransferStats::scope(|| up.to_host().unwrap());
        assert_eq!(stats.host_allocations, u64::from(kept.is_some()));
        if let Some(kept) = kept {
            assert_same(batch.column(7), &kept, "last holder");
        }
    }
    drop(up);
    sim.assert_done();
}
