//! Results of kernels that are null where their input is, slices included: one bitmap, several arrays.

use std::sync::Arc;

use crate::simkit::*;
use crate::support::*;
use crate::support_c::Foreign;
use arrow_array::{Array, ArrayRef, FixedSizeListArray, Int32Array, Int64Array, StructArray};
use arrow_buffer::NullBuffer;
use arrow_device::device::sim::{SimMemory, SimMode};
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceBuffer, DeviceRecordBatch, Devices, Error,
    ExportOptions, ImportOptions, SyncPolicy, Validation, Validity,
};
use arrow_schema::{DataType, Field, Fields, Schema};
use proptest::prelude::*;

const ROWS: usize = 90;

/// Numbers, of which every fifth is null and a run of twenty.
fn input() -> Int32Array {
    let null = |i: &i32| i % 5 == 0 || (30..50).contains(i);
    (0..ROWS as i32).map(|i| (!null(&i)).then_some(i)).collect()
}

/// What a kernel of one input makes of it.
fn expected(input: &dyn Array) -> Int64Array {
    let values: Vec<i64> = (0..input.len() as i64).map(|i| i * 3 - 7).collect();
    Int64Array::new(values.into(), input.nulls().cloned())
}

/// The values of [`expected`], in memory of a device.
fn values_on(device: &Device, rows: usize) -> DeviceBuffer {
    let values = expected(&Int32Array::from(vec![0; rows]));
    match device.upload_array(&values).unwrap().buffer(1) {
        Some(buffer) => buffer,
        None => arrow_buffer::Buffer::default().into(),
    }
}

/// The CPU and simulated devices, with what finds them.
fn places() -> Vec<(Option<Sim>, Device, ImportOptions)> {
    let mut places = vec![(None, Devices::cpu(), ImportOptions::default())];
    if !cfg!(miri) {
        places.extend(MODES.map(|mode| {
            let sim = Sim::new(mode);
            let devices = Devices::new();
            devices.add(sim.device.clone()).unwrap();
            let device = sim.device.clone();
            let options = ImportOptions {
                devices: Some(devices),
                ..Default::default()
            };
            (Some(sim), device, options)
        }));
    }
    places
}

/// Out and in again.
fn through(array: &DeviceArray, export: &ExportOptions, options: &ImportOptions) -> DeviceArray {
    let field = Arc::new(Field::new("", array.data_type().clone(), true));
    let exported = array.export_array(export).unwrap();
    // SAFETY: the struct is an export of valid data, and the type is the exported one.
    unsafe { DeviceArray::import_as(exported, field, options) }.unwrap()
}

fn batch_through(batch: &DeviceRecordBatch, options: &ImportOptions) -> DeviceRecordBatch {
    let exported = batch.export_array(&EXACT).unwrap();
    // SAFETY: the struct is an export of valid data, and the schema is the exported one.
    unsafe { DeviceRecordBatch::import_as(exported, batch.schema(), options) }.unwrap()
}

const EXACT: ExportOptions = ExportOptions::new(SyncPolicy::Event);

/// All ways out of `array`, which is to have these values and nulls.
fn check(expected: &dyn Array, array: &DeviceArray, options: &ImportOptions, context: &str) {
    let full = ImportOptions {
        validation: Validation::Full,
        ..options.clone()
    };
    let down = array.to_host().unwrap();
    assert_same(expected, &down, context);
    assert_valid(expected, &down, context);
    let compact = array.compact().unwrap();
    assert_eq!(compact.offset(), 0, "{context}");
    assert_eq!(
        compact.null_count(),
        Some(expected.null_count()),
        "{context}"
    );
    assert_same(
        expected,
        &compact.to_host().unwrap(),
        format!("{context}, compact"),
    );
    for export in [
        EXACT,
        ExportOptions::new(SyncPolicy::Wait),
        ExportOptions {
            counts_nulls: false,
            ..EXACT
        },
    ] {
        let context = format!("{context}, {export:?}");
        let again = through(array, &export, &full);
        // Full validation has counted.
        assert_eq!(again.null_count(), Some(expected.null_count()), "{context}");
        assert_same(expected, &again.to_host().unwrap(), &context);
        let again = through(&again, &export, options);
        assert_same(expected, &again.to_host().unwrap(), &context);
    }
}

#[test]
fn the_same_nulls_as_a_sliced_input() {
    for (sim, device, options) in places() {
        let up = device.upload_array(&input()).unwrap();
        let offsets = if cfg!(miri) {
            vec![0, 3, 8]
        } else {
            (0..=17).collect()
        };
        for offset in offsets {
            for rows in [0, 1, 5, 8, 64, ROWS - offset] {
                let context = format!("{rows} rows from {offset} on {device}");
                let part = input().slice(offset, rows);
                let column = up.slice(offset, rows).unwrap();
                let values = values_on(&device, rows);
                let out = column.with_values(DataType::Int64, values.clone()).unwrap();
                let expected = expected(&part);
                assert_eq!((out.offset(), out.len()), (0, rows), "{context}");
                assert_eq!(out.null_count(), column.null_count(), "{context}");
                // The long way is the same.
                let validity = column.validity();
                let long = DeviceArray::from_values(DataType::Int64, rows, values, validity);
                let long = long.unwrap();
                assert_same(&expected, &long.to_host().unwrap(), &context);
                // The bitmap is the input's: bits where they were.
                {
                    let queue = device.default_queue();
                    let bits = |array: &DeviceArray| {
                        let bits = array.validity_on(&queue).unwrap().unwrap();
                        (bits.address(), bits.bit_offset())
                    };
                    assert_eq!(bits(&out), bits(&column), "{context}");
                }
                check(&expected, &out, &options, &context);
                for (skip, rest) in slices(rows) {
                    let context = format!("{context}, then slice({skip}, {rest})");
                    let part = out.slice(skip, rest).unwrap();
                    let expected = expected.slice(skip, rest);
                    if rows == 64 {
                        check(&expected, &part, &options, &context);
                    }
                    let again = through(&part, &EXACT, &options);
                    assert_eq!(again.null_count(), Some(expected.null_count()), "{context}");
                    assert_same(&expected, &again.to_host().unwrap(), &context);
                    // What a kernel makes of the result.
                    let values = values_on(&device, rest);
                    let of_result = self::expected(&expected);
                    let next = part.with_values(DataType::Int64, values).unwrap();
                    assert_same(&of_result, &next.to_host().unwrap(), &context);
                }
            }
        }
        drop(up);
        sim.iter().for_each(Sim::assert_done);
    }
}

/// Beside its input below structs and lists, cut again; batches are among `any_order_of_steps`.
#[test]
fn below_structs_and_lists() {
    for (sim, device, options) in places() {
        let up = device.upload_array(&input()).unwrap();
        for offset in [0, 1, 7, 8, 9, 16, 17] {
            let rows = 60;
            let context = format!("from {offset} on {device}");
            let part = input().slice(offset, rows);
            let column = up.slice(offset, rows).unwrap();
            let values = values_on(&device, rows);
            let out = column.with_values(DataType::Int64, values).unwrap();
            let fields = Fields::from(vec![
                Field::new("in", DataType::Int32, true),
                Field::new("out", DataType::Int64, true),
            ]);
            let data_type = DataType::Struct(fields.clone());
            let columns: Vec<ArrayRef> = vec![Arc::new(part.clone()), Arc::new(expected(&part))];
            let host = StructArray::new(fields, columns, None);
            let item = Arc::new(Field::new("item", data_type.clone(), true));
            let host = FixedSizeListArray::new(item.clone(), 4, Arc::new(host), None);
            let of_four = DataType::FixedSizeList(item, 4);
            let children = [column, out];
            // SAFETY: no row is null, the children have as many rows as the structs, and the structs four times as many as the
            // lists.
            let lists = unsafe {
                let rows = DeviceArray::from_parts(&device, data_type, rows, None, &[], &children);
                DeviceArray::from_parts(&device, of_four, 15, None, &[], &[rows.unwrap()])
            };
            let lists = lists.unwrap();
            check(&host, &lists, &options, &context);
            for (skip, rest) in slices(15) {
                let context = format!("{context}, slice({skip}, {rest})");
                let part = lists.slice(skip, rest).unwrap();
                let again = through(&part, &EXACT, &options);
                let host = host.slice(skip, rest);
                assert_same(&host, &again.to_host().unwrap(), &context);
                // A child alone.
                let child = part.child(0).unwrap().child(1).unwrap();
                let (down, again) = (child.to_host(), through(&child, &EXACT, &options));
                assert_same(&down.unwrap(), &again.to_host().unwrap(), &context);
            }
        }
        drop(up);
        sim.iter().for_each(Sim::assert_done);
    }
}

/// What an export costs: nothing where bitmap and values are whole bytes apart; else one read, one host wait,
/// one copy back, whatever the number of columns, and the nulls of all columns are counted with it.
#[test]
fn what_an_export_copies() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let up = sim.upload_array(&input()).unwrap();
    let of = |offset: usize| {
        let column = up.slice(offset, 64).unwrap();
        column
            .with_values(DataType::Int64, values_on(&sim, 64))
            .unwrap()
    };
    let allowed = ExportOptions {
        counts_nulls: false,
        ..EXACT
    };
    for offset in [0, 8, 16] {
        let out = of(offset);
        let before = sim.stats();
        drop(out.export_array(&allowed).unwrap());
        // A part that starts within a byte starts there in both.
        drop(out.slice(3, 20).unwrap().export_array(&allowed).unwrap());
        let cost = sim.stats().since(&before);
        assert_eq!((cost.copies, cost.allocations, cost.host_waits), (0, 0, 0));
        // Only the count needs the bits.
        drop(out.export_array(&EXACT).unwrap());
        let cost = sim.stats().since(&before);
        assert_eq!((cost.copies, cost.allocations, cost.host_waits), (1, 0, 1));
        assert!(out.null_count().is_some());
    }
    for export in [allowed, EXACT] {
        let columns = [of(1), of(5), of(8), of(13)];
        let fields = ["a", "b", "c", "d"].map(|name| Field::new(name, DataType::Int64, true));
        let schema = Arc::new(Schema::new(fields.to_vec()));
        let batch = DeviceRecordBatch::try_new(schema, &columns).unwrap();
        for again in [false, true] {
            let before = sim.stats();
            drop(batch.export_array(&export).unwrap());
            let cost = sim.stats().since(&before);
            let context = format!("{export:?}, {again}");
            assert_eq!((cost.allocations, cost.host_waits), (1, 1), "{context}");
            // Three or four parts of one bitmap, which overlap and are read together; three bitmaps of 64 rows,
            // each from some bit of a byte, are written with their padding.
            assert_eq!(cost.copies, 1 + 1, "{context}");
            assert!(cost.bytes_to_device <= 3 * 64 && cost.bytes_to_host <= 10);
        }
        let nulls = input().slice(1, 64).null_count();
        assert_eq!(batch.column(0).unwrap().null_count(), Some(nulls));
    }
    drop(up);
    sim.assert_done();
}

#[test]
fn what_does_not_fit_is_refused() {
    let cpu = Devices::cpu();
    let column = cpu.upload_array(&input()).unwrap().slice(1, 10).unwrap();
    let values = || values_on(&cpu, 10);
    let is_argument = |made: arrow_device::Result<DeviceArray>| {
        assert!(matches!(made, Err(Error::InvalidArgument(_))), "{made:?}");
    };
    // Rows of another number.
    is_argument(DeviceArray::from_values(
        DataType::Int64,
        9,
        values(),
        column.validity(),
    ));
    let fewer = column.slice(0, 9).unwrap().validity();
    is_argument(DeviceArray::from_values(
        DataType::Int64,
        10,
        values(),
        fewer,
    ));
    is_argument(column.with_values(DataType::Int64, values_on(&cpu, 9)));
    is_argument(column.with_values(DataType::Utf8, values()));
    let bits = DeviceBuffer::from(arrow_buffer::Buffer::from_vec(vec![0xff_u8; 2]));
    assert!(Validity::new(bits.clone(), 9, 8).is_err());
    assert!(Validity::new(bits.clone(), usize::MAX, 2).is_err());
    assert!(Validity::new(bits.clone(), 2, usize::MAX).is_err());
    assert!(Validity::new(bits, 9, 7).is_ok());
    // These have nulls, and no bitmap that says where.
    for data_type in [
        DataType::Null,
        crate::support::types::union(arrow_schema::UnionMode::Sparse, vec![DataType::Int32]),
        crate::support::types::run_ends(DataType::Int32, DataType::Int32),
    ] {
        let other = cpu
            .upload_array(&array(&data_type, 10, Nulls::Some, 1))
            .unwrap();
        assert!(other.validity().is_none());
        is_argument(other.with_values(DataType::Int64, values()));
    }
    // No bitmap, no nulls.
    let none = cpu.upload_array(&Int32Array::from(vec![1; 10])).unwrap();
    let out = none.with_values(DataType::Int64, values()).unwrap();
    assert_eq!(
        (out.null_count(), out.validity().is_none()),
        (Some(0), true)
    );
    if cfg!(miri) {
        return;
    }
    let (a, b) = (Sim::new(SimMode::Deferred), Sim::new(SimMode::Deferred));
    let up = a.upload_array(&input()).unwrap().slice(1, 10).unwrap();
    is_argument(up.with_values(DataType::Int64, values()));
    assert!(up.validity_on(&b.default_queue()).is_err());
    let queue = a.default_queue();
    {
        let bits = up.validity_on(&queue).unwrap().unwrap();
        assert_eq!((bits.bit_offset(), bits.len()), (1, 10));
    }
    drop(up);
    a.assert_done();
    b.assert_done();
}

/// Page-locked memory whose backend is missing has no memory to give, and is host memory: a bitmap that must be moved
/// is moved there, under the same device.
#[test]
fn page_locked_memory_without_a_backend() {
    let options = ImportOptions {
        devices: Some(Devices::new()),
        ..Default::default()
    };
    let import = |array: &dyn Array| {
        let mut foreign = Foreign::new(&array.to_data(), &Devices::cpu());
        foreign.device_array.device_type = ArrowDeviceType::CUDA_HOST.value();
        foreign.device_array.device_id = 3;
        let imported = foreign.import(&options).unwrap();
        (foreign, imported)
    };
    let host = input().slice(1, ROWS - 1);
    let expected = expected(&host);
    let (from, input) = import(&input());
    let (of_values, values) = import(&Int64Array::new(expected.values().clone(), None));
    let column = input.slice(1, ROWS - 1).unwrap();
    let out = column
        .with_values(DataType::Int64, values.buffer(1).unwrap())
        .unwrap();
    for export in [
        EXACT,
        ExportOptions::new(SyncPolicy::Wait),
        ExportOptions {
            counts_nulls: false,
            ..EXACT
        },
    ] {
        let exported = out.export_array(&export).unwrap();
        let device = (exported.device_type(), exported.device_id());
        assert_eq!(device, (ArrowDeviceType::CUDA_HOST, 3));
        drop(exported);
        let again = through(&out, &export, &options);
        assert_same(&expected, &again.to_host().unwrap(), "page-locked");
    }
    // What was moved outlives what it was made of.
    let moved = through(&out, &EXACT, &options);
    drop((input, column, out, values));
    assert_same(&expected, &moved.to_host().unwrap(), "page-locked");
    drop(moved);
    from.assert_released("input");
    of_values.assert_released("values");
}

/// A bitmap outlives the array that it came from, and the work that reads it.
#[test]
fn a_validity_keeps_its_memory() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let up = sim.upload_array(&input()).unwrap();
    let values = values_on(&sim, 40);
    let column = (up.slice(9, 40).unwrap())
        .with_values(DataType::Int64, values)
        .unwrap();
    drop(up);
    let queue = sim.new_queue().unwrap();
    let out = arrow_device::DeviceBufferMut::allocate(&queue, 8).unwrap();
    {
        let bits = column.validity_on(&queue).unwrap().unwrap();
        let (from, bit, to) = (bits.address(), bits.bit_offset(), out.address());
        launch(&queue, move |m: &mut SimMemory<'_>| {
            let bits = m.slice::<u8>(from, 12)?;
            let set = |i: &usize| bits[(bit + i) / 8] >> ((bit + i) % 8) & 1 == 1;
            let set = (0..40).filter(set).count() as u64;
            m.write(to, &[set])
        })
        .unwrap();
    }
    drop(column);
    let out = out.freeze().unwrap();
    let out = DeviceArray::from_values(DataType::UInt64, 1, out, None).unwrap();
    let expected = 40 - input().slice(9, 40).null_count() as u64;
    let down = out.to_host().unwrap();
    assert_same(
        &arrow_array::UInt64Array::from(vec![expected]),
        &down,
        "counted",
    );
    drop((out, down));
    sim.assert_done();
}

/// What is done to an array, and to what it is compared with.
#[derive(Clone, Debug)]
enum Step {
    /// Fractions of the rows.
    Slice(f64, f64),
    WithValues,
    Through(bool),
    Compact,
    Count,
    Nested,
}

fn arb_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0.0..=1.0, 0.0..=1.0).prop_map(|(at, rows)| Step::Slice(at, rows)),
        4 => Just(Step::WithValues),
        2 => any::<bool>().prop_map(Step::Through),
        1 => Just(Step::Compact),
        1 => Just(Step::Count),
        1 => Just(Step::Nested),
    ]
}

#[test]
fn any_order_of_steps() {
    if cfg!(miri) {
        return;
    }
    let few = match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(96),
    };
    let places = places();
    let steps = proptest::collection::vec(arb_step(), 1..9);
    let bits = proptest::collection::vec(any::<bool>(), 0..200);
    proptest!(few, |(bits in bits, steps in steps)| {
        for (_, device, options) in &places {
            let nulls = NullBuffer::from(bits.clone());
            let mut host = Int64Array::new(vec![5; bits.len()].into(), Some(nulls));
            let mut up = device.upload_array(&host).unwrap();
            for step in &steps {
                match *step {
                    Step::Slice(at, rows) => {
                        let at = (at * host.len() as f64) as usize;
                        let rows = (rows * (host.len() - at) as f64) as usize;
                        (host, up) = (host.slice(at, rows), up.slice(at, rows).unwrap());
                    }
                    Step::WithValues => {
                        host = expected(&host);
                        let values = values_on(device, host.len());
                        up = up.with_values(DataType::Int64, values).unwrap();
                    }
                    Step::Through(exact) => {
                        let allowed = ExportOptions { counts_nulls: false, ..EXACT };
                        up = through(&up, if exact { &EXACT } else { &allowed }, options);
                    }
                    Step::Compact => up = up.compact().unwrap(),
                    Step::Count => {
                        prop_assert_eq!(up.resolve_null_counts().unwrap(), host.null_count());
                    }
                    Step::Nested => {
                        let fields = vec![Field::new("a", DataType::Int64, true)];
                        let schema = Arc::new(Schema::new(fields));
                        let columns = std::slice::from_ref(&up);
                        let batch = DeviceRecordBatch::try_new(schema, columns).unwrap();
                        let at = host.len() / 5;
                        let batch = batch.slice(at, host.len() - at).unwrap();
                        host = host.slice(at, host.len() - at);
                        up = batch_through(&batch, options).column(0).unwrap();
                    }
                }
                let nulls = up.null_count();
                prop_assert!(nulls.is_none_or(|n| n == host.null_count()), "{nulls:?}");
                if let Err(e) = same(&host, &up.to_host().unwrap()) {
                    return Err(TestCaseError::fail(format!("{device}, {step:?}: {e}")));
                }
            }
        }
    });
    for (sim, ..) in &places {
        sim.iter().for_each(Sim::assert_done);
    }
}
