//! Values survive every way between host and devices, whole and sliced.

use std::sync::Arc;

use crate::simkit::*;
use crate::support::*;
use arrow_array::{
    Array, ArrayRef, BooleanArray, Int64Array, RecordBatch, StructArray, make_array,
};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_device::device::sim::{SimConfig, SimMode};
use arrow_device::{Device, DeviceArray, DeviceRecordBatch, Devices};
use arrow_schema::{DataType, Field, Schema};

/// Up, down whole, and down in slices.
fn round_trip(device: &Device, array: &ArrayRef, context: &str) {
    let up = device.upload_array(array).unwrap();
    assert_eq!(up.device(), device);
    assert_eq!(up.data_type(), array.data_type());
    let down = up.to_host().unwrap_or_else(|e| panic!("{context}: {e}"));
    assert_same(array, &down, context);
    assert_valid(array, &down, context);
    for (offset, rows) in slices(array.len()) {
        let context = format!("{context}, slice({offset}, {rows})");
        let slice = up.slice(offset, rows).unwrap();
        assert_eq!(slice.len(), rows);
        let down = slice.to_host().unwrap_or_else(|e| panic!("{context}: {e}"));
        assert_same(&array.slice(offset, rows), &down, &context);
        if !device.is_host_readable() {
            assert_valid(array, &down, &context);
        }
        if rows > 4 && offset % 2 == 1 {
            let context = format!("{context}.slice(3, {})", rows - 4);
            let slice = slice.slice(3, rows - 4).unwrap();
            let down = slice.to_host().unwrap_or_else(|e| panic!("{context}: {e}"));
            assert_same(&array.slice(offset + 3, rows - 4), &down, &context);
        }
    }
}

fn all_round_trips(device: &Device, after_each: impl Fn()) {
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        for (case, array) in cases(&data_type, i as u64) {
            round_trip(device, &array, &format!("{device} {name}, {case}"));
        }
        after_each();
    }
    let tight = boolean_with_tight_nulls();
    round_trip(device, &tight, "boolean with tight nulls");
    after_each();
}

/// From 128 MiB on memory is written past the caches.
#[test]
fn more_than_caches_hold() {
    if cfg!(miri) {
        return;
    }
    let rows = (128 << 20) / 8 - 3000;
    let mut values: Vec<i64> = (0..4096).map(|i| i * 0x0101_0703_1105).collect();
    while values.len() < rows {
        values.extend_from_within(..values.len().min(rows - values.len()));
    }
    let mut bits: Vec<u8> = (0..=250).collect();
    while bits.len() * 8 < rows {
        bits.extend_from_within(..);
    }
    let bits = BooleanBuffer::new(Buffer::from_vec(bits), 0, rows);
    let columns: [(&str, ArrayRef); 2] = [
        ("a", Arc::new(Int64Array::new(values.into(), None))),
        (
            "b",
            Arc::new(BooleanArray::new(bits.clone(), Some(NullBuffer::new(bits)))),
        ),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let cpu = Devices::cpu();
    for (offset, less) in [(0, 0), (1, 0), (8, 8 + 5)] {
        let part = batch.slice(offset, rows - offset - less);
        let copied = cpu.upload(&part).unwrap().compact().unwrap();
        assert!(copied.to_host().unwrap() == part, "compact from {offset}");
    }
    let sim = Sim::new(SimMode::Async);
    let up = sim.upload(&batch).unwrap();
    assert!(up.to_host().unwrap() == batch, "up and down");
    drop(up);
    sim.assert_done();
    // Nobody else needs so much.
    cpu.trim();
}

#[test]
fn every_type_on_the_cpu() {
    all_round_trips(&Devices::cpu(), || ());
}

#[test]
fn every_type_on_an_asynchronous_device() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    all_round_trips(&sim, || sim.assert_done());
}

#[test]
fn every_type_on_a_deferred_device() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    all_round_trips(&sim, || sim.assert_done());
}

/// Between all kinds of devices, with slices on the way.
#[test]
fn every_type_from_device_to_device() {
    if cfg!(miri) {
        return;
    }
    let config = SimConfig::default().with_mode(SimMode::Deferred);
    let sims = [
        Sim::with(config.clone().with_peer_access(true)),
        Sim::with(
            config
                .clone()
                .with_peer_access(true)
                .with_mode(SimMode::Async),
        ),
        Sim::with(config),
    ];
    let cpu = Devices::cpu();
    let hop = |array: &DeviceArray, to: &Device, expected: &dyn Array, context: &str| {
        let there = array
            .to_device(to)
            .unwrap_or_else(|e| panic!("{context} to {to}: {e}"));
        assert_eq!(there.device(), to);
        let down = there.to_host().unwrap();
        assert_same(expected, &down, format!("{context} to {to}"));
        assert_valid(expected, &down, context);
        there
    };
    for (i, (name, data_type)) in all_types().into_iter().enumerate() {
        for (case, array) in cases(&data_type, 100 + i as u64) {
            let context = format!("{name}, {case}");
            let on_cpu = cpu.upload_array(&array).unwrap();
            let mut at = on_cpu.clone();
            for to in [&*sims[0], &*sims[1], &*sims[2], &*sims[0], &cpu] {
                at = hop(&at, to, &array, &context);
            }
            if array.len() > 12 {
                let rows = array.len() - 9;
                let part = array.slice(7, rows);
                let up = sims[0]
                    .upload_array(&array)
                    .unwrap()
                    .slice(7, rows)
                    .unwrap();
                hop(&up, &sims[1], &part, &context);
                hop(&up, &sims[2], &part, &context);
                hop(&up, &cpu, &part, &context);
                hop(&on_cpu.slice(7, rows).unwrap(), &sims[1], &part, &context);
            }
        }
        // One may hold host memory of another until it has run.
        sims.iter().for_each(|sim| sim.synchronize().unwrap());
        sims.iter().for_each(Sim::assert_done);
    }
}

fn batches() -> Vec<RecordBatch> {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    let long = batch(&types, 200, Nulls::Some, 5);
    let short = whole_batch(&types, 40, Nulls::Some, 6);
    let made = batch_variants(&short, 7).into_iter();
    let others = vec![
        batch(&types, 100, Nulls::None, 1),
        batch(&types, 100, Nulls::All, 2),
        batch(&types, 0, Nulls::Some, 3),
        long.slice(11, 101),
        long,
        wide_batch(100, 33),
        zero_column_batch(0),
        zero_column_batch(77),
    ];
    made.chain(others).collect()
}

#[test]
fn batches_round_trip() {
    let mut devices = vec![Devices::cpu()];
    let sims: Vec<_> = if cfg!(miri) {
        vec![]
    } else {
        MODES.map(Sim::new).into()
    };
    devices.extend(sims.iter().map(|sim| sim.device.clone()));
    for device in &devices {
        for (i, batch) in batches().iter().enumerate() {
            let context = format!("{device}, batch {i}");
            let up = device.upload(batch).unwrap();
            assert!(is_on(&up, device));
            assert_eq!(up.schema(), batch.schema());
            assert_eq!(
                (up.num_rows(), up.num_columns()),
                (batch.num_rows(), batch.num_columns())
            );
            let down = up.to_host().unwrap();
            assert_same_batch(batch, &down, &context);
            assert_valid_batch(&down, &context);
            for (offset, rows) in slices(batch.num_rows()) {
                let down = up.slice(offset, rows).unwrap().to_host().unwrap();
                let expected = batch.slice(offset, rows);
                assert_same_batch(
                    &expected,
                    &down,
                    format!("{context}, slice({offset}, {rows})"),
                );
            }
            columns_and_projections(&up, batch, &context);
        }
    }
    drop(devices);
    sims.iter().for_each(Sim::assert_done);
}

fn columns_and_projections(up: &DeviceRecordBatch, batch: &RecordBatch, context: &str) {
    let columns = batch.num_columns();
    assert!(up.column(columns).is_err());
    assert!(up.project(&[columns]).is_err());
    for i in (0..columns).step_by(7) {
        let column = up.column(i).unwrap();
        assert_eq!(column.field(), Some(&batch.schema().fields()[i]));
        assert_same(batch.column(i), &column.to_host().unwrap(), context);
        let name = batch.schema().field(i).name().clone();
        assert_same(
            batch.column(i),
            &up.column_by_name(&name).unwrap().to_host().unwrap(),
            context,
        );
    }
    let rows = batch.num_rows();
    let indices: Vec<usize> = (0..columns)
        .rev()
        .step_by(3)
        .chain((columns > 0).then_some(0))
        .collect();
    for indices in [indices, vec![]] {
        let expected = batch.project(&indices).unwrap();
        let projected = up.project(&indices).unwrap();
        assert_same_batch(&expected, &projected.to_host().unwrap(), context);
        // And a slice of a projection of a slice.
        if rows > 30 {
            let cut = up.slice(5, rows - 10).unwrap().project(&indices).unwrap();
            let cut = cut.slice(3, 17).unwrap();
            assert_same_batch(&expected.slice(8, 17), &cut.to_host().unwrap(), context);
        }
    }
}

#[test]
fn columns_of_several_batches_make_a_batch() {
    if cfg!(miri) {
        return;
    }
    let types = [
        DataType::Utf8,
        DataType::Boolean,
        DataType::Int32,
        crate::support::types::list(DataType::Utf8),
        crate::support::types::structure(vec![("a", DataType::Utf8)]),
        DataType::Utf8View,
    ];
    for mode in MODES {
        let (sim, other) = (Sim::new(mode), Sim::new(mode));
        let queue = sim.new_queue().unwrap();
        let a = batch(&types, 90, Nulls::Some, 1);
        let b = batch(&types, 50, Nulls::Some, 2).slice(5, 41);
        let on_a = sim.upload(&a).unwrap();
        let on_b = sim.upload_on(&b, &queue).unwrap();
        let mut fields = vec![];
        let mut columns = vec![];
        let mut expected = vec![];
        for (i, data_type) in types.iter().enumerate() {
            fields.push(Field::new(format!("a{i}"), data_type.clone(), true));
            columns.push(on_a.column(i).unwrap().slice(3 + i, 41).unwrap());
            expected.push(a.column(i).slice(3 + i, 41));
            fields.push(Field::new(format!("b{i}"), data_type.clone(), true));
            columns.push(on_b.column(i).unwrap());
            expected.push(b.column(i).clone());
        }
        let schema = Arc::new(Schema::new(fields));
        let expected = RecordBatch::try_new(schema.clone(), expected).unwrap();
        let both = DeviceRecordBatch::try_new(schema.clone(), &columns).unwrap();
        drop((on_a, on_b));
        assert_same_batch(
            &expected,
            &both.to_host().unwrap(),
            "columns of two batches",
        );
        let part = both.slice(7, 20).unwrap();
        let again = DeviceRecordBatch::try_new(schema.clone(), &part.columns().collect::<Vec<_>>());
        let again = again.unwrap().slice(1, 13).unwrap();
        assert_same_batch(&expected.slice(8, 13), &again.to_host().unwrap(), "rebuilt");
        let moved = again.to_device(&other).unwrap();
        assert!(is_on(&moved, &other));
        assert_same_batch(&expected.slice(8, 13), &moved.to_host().unwrap(), "moved");
        drop((columns, both, part, again, moved));
        sim.assert_done();
        other.assert_done();
    }
}

/// `ArrayData::slice` of arrow-rs 59 leaves a struct's offset although it has sliced the children,
/// and other makers of `ArrayData` slice no children. Both are told apart, and nothing else is read.
#[test]
fn struct_data_with_offsets() {
    let data_type = crate::support::types::structure(vec![
        ("a", DataType::Int32),
        (
            "b",
            crate::support::types::structure(vec![("c", DataType::Utf8)]),
        ),
    ]);
    let whole = array(&data_type, 50, Nulls::Some, 4);
    let expected = whole.slice(5, 20);
    let sliced = whole.to_data().slice(5, 20);
    let nulls = sliced.nulls().cloned();
    let sliced = sliced.into_builder().offset(5).nulls(nulls);
    // SAFETY: the data has the layout that arrow-rs 59 makes of such a slice.
    let sliced = unsafe { sliced.build_unchecked() };
    assert_eq!((sliced.offset(), sliced.child_data()[0].len()), (5, 20));
    let unsliced = whole.to_data().into_builder().offset(5).len(20);
    let unsliced = unsliced.nulls(sliced.nulls().cloned()).build().unwrap();
    assert_eq!(unsliced.child_data()[0].len(), 50);
    let short: Vec<_> = sliced.child_data().iter().map(|c| c.slice(0, 16)).collect();
    let short = sliced
        .clone()
        .into_builder()
        .len(14)
        .nulls(None)
        .child_data(short);
    // SAFETY: refused, which is what is tested. arrow-rs 59 accepts it: it does not add the offset.
    let short = unsafe { short.build_unchecked() };
    let items = whole.to_data().into_builder().len(9).offset(3).nulls(None);
    let items = items.build().unwrap();
    let fixed = DataType::FixedSizeList(crate::support::types::field("item", data_type), 5);
    let fixed = items
        .clone()
        .into_builder()
        .data_type(fixed)
        .child_data(vec![whole.to_data()]);
    // SAFETY: the array is only wrapped, which refuses it: its child is too short.
    let fixed = unsafe { fixed.build_unchecked() };

    let mut devices = vec![Devices::cpu()];
    let sim = (!cfg!(miri)).then(|| Sim::new(SimMode::Deferred));
    devices.extend(sim.as_ref().map(|sim| sim.device.clone()));
    for device in &devices {
        for data in [&sliced, &unsliced] {
            let up = device.upload_data(data.clone()).unwrap();
            assert_same(&expected, &up.to_host().unwrap(), "struct");
            let cut = up.slice(3, 7).unwrap().to_host().unwrap();
            assert_same(&expected.slice(3, 7), &cut, "struct, sliced");
        }
        assert!(device.upload_data(short.clone()).is_err());
        assert!(device.upload_data(fixed.clone()).is_err());
    }
    assert!(DeviceArray::from_host(short).is_err());
    drop(devices);
    if let Some(sim) = sim {
        sim.assert_done();
    }
}

/// Offsets, and masks that start at another bit, of data that `make_array` has not normalised.
#[test]
fn raw_data_with_offsets() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    for (name, data_type) in all_types() {
        let whole = array(&data_type, 60, Nulls::Some, 9);
        let slice = whole.to_data().slice(11, 40);
        let mut all: Vec<_> = variants(&whole, 9)
            .iter()
            .map(|made| {
                (
                    format!("{name}, {:?}", made.variant),
                    made.rows.clone(),
                    made.data(),
                )
            })
            .collect();
        if !name.contains("struct") {
            // `make_array` slices them twice
            all.push((name, make_array(slice.clone()), slice));
        }
        for (name, expected, data) in all {
            for device in [&sim.device, &Devices::cpu()] {
                let up = device.upload_data(data.clone()).unwrap();
                assert_same(&expected, &up.to_host().unwrap(), &name);
                if expected.len() > 24 {
                    let part = up.slice(5, 19).unwrap();
                    assert_same(&expected.slice(5, 19), &part.to_host().unwrap(), &name);
                }
            }
        }
    }
    sim.assert_done();
}

#[test]
fn to_the_device_where_it_is_costs_nothing() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let up = sim.upload(&wide_batch(8, 10)).unwrap();
    let before = sim.stats();
    let same = up.to_device(&sim).unwrap();
    assert_eq!(sim.stats(), before);
    let address = |b: &DeviceRecordBatch| b.column(0).unwrap().buffer(1).unwrap().address();
    assert_eq!(address(&same), address(&up));
    drop((up, same));
    sim.assert_done();
}

/// Structs that hold nulls are arrays, not batches.
#[test]
fn struct_arrays_become_batches() {
    let batch = wide_batch(8, 20);
    let rows = StructArray::from(batch.clone());
    let cpu = Devices::cpu();
    let array = cpu.upload_array(&rows).unwrap();
    let again = DeviceRecordBatch::try_from(array.clone()).unwrap();
    assert_same(
        &rows,
        &StructArray::from(again.to_host().unwrap()),
        "as a batch",
    );
    assert!(DeviceRecordBatch::try_from(array.child(0).unwrap()).is_err());
    let nullable = crate::support::array(rows.data_type(), 20, Nulls::Some, 3);
    let nullable = cpu.upload_array(&nullable).unwrap();
    assert!(DeviceRecordBatch::try_from(nullable).is_err());
}
