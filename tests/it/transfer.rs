//! Values survive the way between host and devices: what the matrix of all types does not have.

use std::sync::Arc;

use crate::simkit::layout::check_layout;
use crate::simkit::*;
use crate::support::*;
use arrow_array::{Array, ArrayRef, Int32Array, RecordBatch, StructArray, UInt8Array};
use arrow_device::device::sim::{SimConfig, SimMode};
use arrow_device::{DeviceArray, DeviceRecordBatch, Devices, TransferStats, Validity};
use arrow_schema::{DataType, Field, Schema};

#[test]
fn columns_of_several_batches_make_a_batch() {
    use crate::support::types::{list, structure};
    let row = structure(vec![("a", DataType::Utf8)]);
    let text = list(DataType::Utf8);
    let types = [DataType::Boolean, text, row, DataType::Utf8View];
    let (a, b) = (
        batch(&types, 90, Nulls::Some, 1),
        batch(&types, 41, Nulls::Some, 2),
    );
    for mode in MODES {
        let (sim, other) = (Sim::new(mode), Sim::new(mode));
        let on_a = sim.upload(&a).unwrap().slice(3, 41).unwrap();
        let on_b = sim.upload_on(&b, &sim.new_queue().unwrap()).unwrap();
        let columns: Vec<_> = on_a.columns().chain(on_b.columns()).collect();
        let host = a.slice(3, 41);
        let host: Vec<_> = host.columns().iter().chain(b.columns()).cloned().collect();
        let named =
            |(i, c): (usize, &ArrayRef)| Field::new(format!("{i}"), c.data_type().clone(), true);
        let schema = Arc::new(Schema::new(
            host.iter().enumerate().map(named).collect::<Vec<_>>(),
        ));
        let expected = RecordBatch::try_new(schema.clone(), host).unwrap();
        let both = DeviceRecordBatch::try_new(schema, &columns).unwrap();
        drop((on_a, on_b, columns));
        assert_same_batch(&expected, &both.to_host().unwrap(), "of two batches");
        let moved = both.slice(7, 20).unwrap().to_device(&other).unwrap();
        assert!(is_on(&moved, &other));
        assert_same_batch(&expected.slice(7, 20), &moved.to_host().unwrap(), "moved");
        drop((both, moved));
        sim.assert_done();
        other.assert_done();
    }
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

/// Whole arrays whose offsets start elsewhere, over more bytes than their rows have.
#[test]
fn offsets_start_at_0() {
    let sim = Sim::new(SimMode::Deferred);
    let bytes_of = |array: &dyn Array| sim.upload_array(array).unwrap().buffer(1).unwrap();
    let offsets = bytes_of(&Int32Array::from(vec![3, 5, 9]));
    let text = bytes_of(&UInt8Array::from(b"___aabbbb____".to_vec()));
    let buffers = [Some(offsets.clone()), Some(text.clone())];
    // SAFETY: the offsets lie within the text, which is ASCII.
    let texts =
        unsafe { DeviceArray::from_parts(&sim, DataType::Utf8, 2, None, &buffers, &[]) }.unwrap();
    let items = sim.upload_array(&ints(12)).unwrap();
    let list = crate::support::types::list(DataType::Int32);
    // SAFETY: the offsets lie within the 12 items.
    let lists =
        unsafe { DeviceArray::from_parts(&sim, list, 2, None, &[Some(offsets.clone())], &[items]) };
    drop(buffers);
    for (array, buffer, bytes) in [(texts, 2, 6), (lists.unwrap(), 1, 12)] {
        let (copy, stats) = TransferStats::scope(|| array.compact().unwrap());
        check_layout(&copy, true, Some(stats.allocated_bytes), "offsets");
        assert_eq!(copy.buffer(buffer).unwrap().len(), bytes);
        let rows = copy.child(0).map(|child| child.len());
        assert!(rows.is_none_or(|rows| rows == 6));
        assert_same(
            &array.to_host().unwrap(),
            &copy.to_host().unwrap(),
            "offsets",
        );
    }
    // What a transfer wrote lies side by side, bitmap and offsets too, and the offsets change all the same.
    let other = Sim::new(SimMode::Deferred);
    let bits = bytes_of(&UInt8Array::from(vec![0b10]));
    let buffers = [Some(offsets), Some(text)];
    // SAFETY: the offsets lie within the text, which is ASCII; one of two rows is null.
    let texts = unsafe {
        let bits = Validity::new(bits, 0, 2).unwrap().with_null_count(1);
        DeviceArray::from_parts(&sim, DataType::Utf8, 2, Some(bits), &buffers, &[])
    };
    drop(buffers);
    let there = texts.unwrap().to_device(&other).unwrap();
    let copy = there.compact().unwrap();
    assert_same(
        &there.to_host().unwrap(),
        &copy.to_host().unwrap(),
        "of a copy",
    );
    assert_eq!(copy.buffer(2).unwrap().len(), 6);
    copy.to_host().unwrap().to_data().validate_full().unwrap();
    drop((there, copy));
    other.assert_done();
    sim.assert_done();
}

/// What nobody has counted stays so on the way to a peer.
#[test]
fn unknown_counts_stay_unknown() {
    let from = Sim::new(SimMode::Deferred);
    let to = Sim::with(SimConfig {
        peer_access: true,
        ..SimConfig::default()
    });
    let up = from.upload_array(&ints(50)).unwrap();
    let bits = up.buffer(0).map(|bits| Validity::new(bits, 0, 50).unwrap());
    let parts = [up.buffer(1)];
    // SAFETY: the parts are those of a valid array of this type and length.
    let unknown = unsafe { DeviceArray::from_parts(&from, DataType::Int32, 50, bits, &parts, &[]) };
    let there = unknown.unwrap().to_device(&to).unwrap();
    assert_eq!(there.null_count(), None);
    assert_eq!(there.resolve_null_counts().unwrap(), 10);
    drop((up, parts, there));
    from.synchronize().unwrap();
    to.assert_done();
    from.assert_done();
}
