//! Every type in every layout, through every operation, on every kind of device: the rows stay, and lie as they should.

use crate::simkit::layout::{check_host_layout, check_layout, written_once};
use crate::simkit::*;
use crate::support::producer::into_arrow;
use crate::support::*;
use crate::support_c::export::{field, import, upload_data};
use crate::support_c::sim::{Place, cpu, places, simulated};
use arrow_array::{Array, RecordBatch, make_array};
use arrow_device::device::sim::{SimConfig, SimMode};
use arrow_device::{
    Device, DeviceArray, DeviceRecordBatch, Devices, ExportOptions, FFI_ArrowDeviceArray,
    ImportOptions, SyncPolicy, TransferStats, Validation,
};
use arrow_schema::DataType;

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);

/// Slices: all, from within a byte, some, none.
fn parts(rows: usize) -> Vec<(usize, usize)> {
    let mut parts = vec![(0, rows)];
    if rows > 1 {
        parts.extend([(1, rows - 1), (rows / 3, rows / 2)]);
    }
    if rows > 20 {
        parts.extend([(8, rows - 9), (rows, 0)]);
    }
    parts
}

/// Where arrays go from a place: one device that others copy from directly, one that is reached through the host, the CPU.
struct Elsewhere([Sim; 2], [Device; 3]);

impl Elsewhere {
    fn new() -> Self {
        let config = SimConfig {
            mode: SimMode::Deferred,
            ..SimConfig::default()
        };
        let sims = [
            Sim::with(SimConfig {
                peer_access: true,
                ..SimConfig::default()
            }),
            Sim::with(config),
        ];
        let [a, b] = sims.each_ref().map(|sim| sim.device.clone());
        Self(sims, [a, b, Devices::cpu()])
    }

    fn assert_done(&self, place: &Place) {
        // One may hold memory of another until it has run.
        let _ = place.device.synchronize();
        self.0.iter().for_each(|sim| sim.synchronize().unwrap());
        place.assert_clean();
        self.0.iter().for_each(Sim::assert_done);
    }
}

fn check(expected: &dyn Array, array: &DeviceArray, looks: bool, context: &str) {
    assert_eq!(array.len(), expected.len(), "{context}");
    assert_eq!(array.data_type(), expected.data_type(), "{context}");
    let down = array.to_host().unwrap_or_else(|e| panic!("{context}: {e}"));
    assert_same(expected, &down, context);
    if looks {
        assert_valid(expected, &down, context);
    }
}

/// A compact copy is one allocation, of which each byte is written once.
fn compact(array: &DeviceArray, looks: bool, context: &str) -> DeviceArray {
    let (copy, stats) = TransferStats::scope(|| array.compact());
    let copy = copy.unwrap_or_else(|e| panic!("{context}: {e}"));
    assert_eq!(copy.field(), array.field(), "{context}");
    let mut allocated = None;
    if !array.device().is_host_readable() {
        let allocations = u64::from(stats.allocated_bytes > 0);
        assert_eq!(stats.allocations, allocations, "{context}");
        written_once(&stats, context);
        // Never all of it goes through the host.
        let all = stats.allocated_bytes.max(1);
        assert!(stats.host_copied_bytes < all, "{context}");
        allocated = Some(stats.allocated_bytes);
    }
    if looks {
        check_layout(&copy, true, allocated, context);
    }
    copy
}

/// Out through the C structs and in again, twice, with one set of options or another.
fn out_and_in(array: &DeviceArray, place: &Place, n: usize) -> DeviceArray {
    let export = [
        EVENT,
        ExportOptions::new(SyncPolicy::Wait),
        ExportOptions {
            counts_nulls: false,
            ..EVENT
        },
    ][n / 3 % 3];
    let full = [Validation::default(), Validation::Full][n / 9 % 2];
    let once = import(
        array.export_array(&export).unwrap(),
        array.data_type(),
        place,
    );
    let exported = once.export_array(&export).unwrap();
    let options = ImportOptions {
        validation: full,
        ..place.options.clone()
    };
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
    unsafe { DeviceArray::import_as(exported, field(array.data_type()), &options) }.unwrap()
}

/// Each array comes down, is compacted, goes out and in, and moves to another device; so do its parts, in turn.
fn every_type(place: &Place) {
    let elsewhere = Elsewhere::new();
    let mut n = 0;
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        let tight = (i == 0).then(|| ("tight nulls".to_owned(), boolean_with_tight_nulls()));
        for (case, array) in cases(&data_type, i as u64).into_iter().chain(tight) {
            let up = place.device.upload_array(&array).unwrap();
            assert_eq!(*up.device(), place.device);
            for (k, (offset, rows)) in parts(array.len()).into_iter().enumerate() {
                n += 1;
                let context = format!("{} {name}, {case}, slice({offset}, {rows})", place.device);
                let (part, expected) = (up.slice(offset, rows).unwrap(), array.slice(offset, rows));
                let looks = n % 4 == 0;
                check(&expected, &part, looks, &context);
                if k == 0 || n % 3 == 0 {
                    let copy = compact(&part, n % 2 == 0, &context);
                    check(&expected, &copy, looks, &format!("{context}, compact"));
                }
                if k == 0 || n % 3 == 1 {
                    let again = out_and_in(&part, place, n);
                    check(&expected, &again, looks, &format!("{context}, out and in"));
                }
                if k == 0 || n % 3 == 2 {
                    let to = &elsewhere.1[n / 3 % 3];
                    let context = format!("{context}, moved to {to}");
                    let moved = part.to_device(to).unwrap();
                    assert_eq!(moved.device(), to, "{context}");
                    if looks && !to.is_host_readable() {
                        check_layout(&moved, false, None, &context);
                    }
                    check(&expected, &moved, looks, &context);
                }
                if k == 2 {
                    let (offset, rows) = (rows / 2, rows - rows / 2);
                    let twice = part.slice(offset, rows).unwrap();
                    let expected = expected.slice(offset, rows);
                    check(&expected, &twice, looks, &format!("{context}, cut twice"));
                }
            }
        }
        elsewhere.assert_done(place);
    }
}

#[test]
fn every_type_on_the_cpu() {
    every_type(&cpu());
}

#[test]
fn every_type_on_an_asynchronous_device() {
    simulated(SimMode::Async).iter().for_each(every_type);
}

#[test]
fn every_type_on_a_deferred_device() {
    simulated(SimMode::Deferred).iter().for_each(every_type);
}

/// Types of which more than the rows moves: values of dictionaries, items of list views and dense unions, buffers of views.
fn moves_more(data_type: &DataType) -> bool {
    let text = format!("{data_type:?}");
    let more = ["Dictionary", "ListView", "Dense", "Utf8View", "BinaryView"];
    more.iter().any(|t| text.contains(t))
}

fn buffers(array: &DeviceArray) -> usize {
    let own = (0..array.num_buffers()).filter(|i| array.buffer(*i).is_some());
    let below = (0..array.num_children()).map(|i| buffers(&array.child(i).unwrap()));
    own.count() + below.sum::<usize>()
}

/// Data with offsets at any level, as C structs have it. An upload is one allocation, and neither way moves rows beside a slice or
/// items that no row needs. What is written has zeros behind it, and lies apart.
#[test]
fn only_the_rows_move_and_lie_in_one_host_buffer() {
    let sims = MODES.map(Sim::new);
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        let sim = &sims[i % 2];
        for (nulls, rows) in [(Nulls::None, 100), (Nulls::Some, 77)] {
            let whole = array(&data_type, rows, nulls, 3);
            let mut bytes = vec![];
            for made in variants(&whole, 4) {
                let context = format!("{name}, {nulls:?}, {:?}", made.variant);
                let (up, stats) = TransferStats::scope(|| upload_data(sim, &made.data()));
                assert_eq!(stats.allocations, u64::from(stats.allocated_bytes > 0));
                assert_eq!((stats.host_waits, stats.queue_waits), (0, 0), "{context}");
                assert!(stats.bytes_to_device <= stats.allocated_bytes);
                check_layout(&up, false, Some(stats.allocated_bytes), &context);
                // Recycled memory, so that what is not written shows.
                sim.host_buffer(1 << 16).unwrap().fill(0xff);
                let (down, cost) = TransferStats::scope(|| up.to_host().unwrap());
                let room = 64 * buffers(&up) as u64;
                assert!(cost.bytes_to_host <= stats.allocated_bytes + room);
                assert_same(&made.rows, &down, &context);
                check_host_layout(&down.to_data(), &context);
                if SAME_ROWS.contains(&made.variant) {
                    bytes.push((stats.bytes_to_device, stats.allocated_bytes));
                    // As many rows of an array on the device.
                    let around = upload_data(sim, &made.around);
                    let room = 64 * buffers(&around) as u64;
                    let slice = around.slice(made.offset, rows).unwrap();
                    let (down, cost) = TransferStats::scope(|| slice.to_host().unwrap());
                    assert_same(&made.rows, &down, &context);
                    let most = stats.bytes_to_device + 2 * room;
                    assert!(
                        cost.bytes_to_host <= most || moves_more(&data_type),
                        "{context}: {cost:?}, not {most}"
                    );
                }
            }
            let same = bytes.iter().all(|b| *b == bytes[0]);
            assert!(same || moves_more(&data_type), "{name}: {bytes:?}");
        }
    }
    sims.iter().for_each(Sim::assert_done);
}

/// The CPU takes raw data as it is.
#[test]
fn raw_data_on_the_cpu() {
    for (name, data_type) in all_types() {
        for made in variants(&array(&data_type, 60, Nulls::Some, 9), 9) {
            let up = upload_data(&Devices::cpu(), &made.data());
            assert_same(&made.rows, &up.to_host().unwrap(), &name);
            for (offset, rows) in parts(made.rows.len()) {
                let part = up.slice(offset, rows).unwrap().to_host().unwrap();
                assert_same(&made.rows.slice(offset, rows), &part, &name);
            }
        }
    }
}

/// arrow-rs takes what we export on the CPU, and we take what it exports, masks at other bits than the values included.
#[test]
fn arrow_takes_ours_and_we_take_arrows() {
    let cpu = cpu();
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        for (case, array) in cases(&data_type, i as u64) {
            let context = format!("{name}, {case}");
            let exported = cpu.device.upload_array(&array).unwrap();
            let exported = into_arrow(exported.export_array(&EVENT).unwrap());
            let data_type = data_type.clone();
            // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
            let data = unsafe { arrow_array::ffi::from_ffi_and_data_type(exported, data_type) };
            assert_same(&array, &make_array(data.expect(&context)), &context);
            let theirs = arrow_data::ffi::FFI_ArrowArray::new(&array.to_data());
            let (cpu_type, none) = (arrow_device::ArrowDeviceType::CPU, std::ptr::null_mut());
            // SAFETY: the array is in host memory, and ready.
            let theirs = unsafe { FFI_ArrowDeviceArray::new(theirs, cpu_type, -1, none) };
            let ours = import(theirs, array.data_type(), &cpu);
            assert_same(&array, &ours.to_host().unwrap(), &context);
        }
    }
}

fn batches() -> Vec<RecordBatch> {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    vec![
        batch(&types, 60, Nulls::Some, 6),
        batch(&types, 40, Nulls::None, 1),
        batch(&types, 0, Nulls::Some, 3),
        wide_batch(100, 33).slice(3, 29),
        zero_column_batch(0),
        zero_column_batch(77),
    ]
}

#[test]
fn batches_of_every_type() {
    for place in places() {
        let elsewhere = Elsewhere::new();
        for (i, batch) in batches().into_iter().enumerate() {
            let up = place.device.upload(&batch).unwrap();
            columns_and_projections(&up, &batch);
            for (offset, rows) in parts(batch.num_rows()).into_iter().take(3) {
                let context = format!("{}, batch {i}, slice({offset}, {rows})", place.device);
                let (part, expected) = (up.slice(offset, rows).unwrap(), batch.slice(offset, rows));
                let schema = part.schema();
                let (array, _) = part.export(SyncPolicy::Event).unwrap();
                assert_eq!((array.array().offset(), array.array().null_count()), (0, 0));
                // SAFETY: the struct comes from an export of this crate, and the schema is the exported one.
                let imported =
                    unsafe { DeviceRecordBatch::import_as(array, schema.clone(), &place.options) };
                let columns: Vec<_> = part.columns().collect();
                let new = DeviceRecordBatch::try_new_with_rows;
                let again = [
                    part.compact(),
                    imported,
                    part.to_device(&elsewhere.1[i % 3]),
                    new(&place.device, schema.clone(), &columns, rows),
                    Ok(part.clone()),
                ];
                let ours = again
                    .each_ref()
                    .map(|b| b.as_ref().unwrap().device().clone());
                assert_eq!(ours[2], elsewhere.1[i % 3]);
                drop((part, columns));
                for (what, again) in again.into_iter().enumerate() {
                    let (again, context) = (again.unwrap(), format!("{context}, {what}"));
                    assert!(is_on(&again, &ours[what]), "{context}");
                    assert_eq!((again.schema(), again.num_rows()), (schema.clone(), rows));
                    let down = again.to_host().unwrap();
                    assert_same_batch(&expected, &down, &context);
                    assert_valid_batch(&down, &context);
                }
            }
        }
        elsewhere.assert_done(&place);
    }
}

fn columns_and_projections(up: &DeviceRecordBatch, batch: &RecordBatch) {
    let columns = batch.num_columns();
    assert!(up.column(columns).is_err() && up.project(&[columns]).is_err());
    for i in (0..columns).step_by(7) {
        let column = up.column(i).unwrap();
        let name = batch.schema_ref().field(i).name();
        assert_eq!(column.field(), Some(&batch.schema().fields()[i]));
        assert_same(batch.column(i), &column.to_host().unwrap(), name);
        let named = up.column_by_name(name).unwrap().to_host().unwrap();
        assert_same(batch.column(i), &named, name);
    }
    let some: Vec<usize> = (0..columns).rev().step_by(3).collect();
    for indices in [some, vec![]] {
        let expected = batch.project(&indices).unwrap();
        let projected = up.project(&indices).unwrap().to_host().unwrap();
        assert_same_batch(&expected, &projected, "projected");
        // And a slice of a projection of a slice.
        if batch.num_rows() > 25 {
            let cut = up.slice(5, 20).unwrap().project(&indices).unwrap();
            let cut = cut.slice(3, 15).unwrap().to_host().unwrap();
            assert_same_batch(&expected.slice(8, 15), &cut, "projected and cut");
        }
    }
}
