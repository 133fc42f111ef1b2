//! The way to a device and back, which values of every type survive.

use arrow_array::RecordBatch;
use arrow_device::{Device, DeviceRecordBatch, ImportOptions, SyncPolicy};

use super::{
    Nulls, all_types, assert_same, assert_same_batch, batch, boolean_with_tight_nulls, cases,
};

/// One column of each type.
pub(crate) fn all_columns(rows: usize, seed: u64) -> RecordBatch {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    batch(&types, rows, Nulls::Some, seed)
}

/// Arrays of every type, whole and cut on the device; one of `share` of them.
pub(crate) fn every_type(device: &Device, share: usize) {
    let tight = ("tight nulls".to_owned(), boolean_with_tight_nulls());
    let types = all_types().into_iter().zip(0..);
    let all = types.flat_map(|((name, data_type), seed)| {
        let cases = cases(&data_type, seed).into_iter();
        cases.map(move |(case, array)| (format!("{name}, {case}"), array))
    });
    for (case, array) in all.chain([tight]).step_by(share) {
        let up = device.upload_array(&array).unwrap();
        assert_same(&array, &up.to_host().unwrap(), &case);
        let rows = array.len();
        for (offset, length) in [(1, rows.saturating_sub(2)), (rows / 3, rows / 2)] {
            if offset + length <= rows {
                let part = up.slice(offset, length).unwrap().to_host().unwrap();
                let case = format!("{case}, slice({offset}, {length})");
                assert_same(&array.slice(offset, length), &part, case);
            }
        }
    }
}

/// Batches of all types, cut on the host and on the device, and compacted there.
pub(crate) fn batches_whole_and_sliced_on_both_sides(device: &Device) {
    let all = all_columns(1000, 5);
    for (skip, rows) in [(0, 1000), (0, 0), (3, 517), (13, 64), (999, 1)] {
        let sent = all.slice(skip, rows);
        let up = device.upload(&sent).unwrap();
        let case = format!("{device}: {skip}, {rows}");
        assert_same_batch(&sent, &up.to_host().unwrap(), &case);
        let part = up.slice(rows / 3, rows / 2).unwrap();
        let sent = sent.slice(rows / 3, rows / 2);
        assert_same_batch(&sent, &part.to_host().unwrap(), format!("part of {case}"));
        let part = part.compact().unwrap().to_host().unwrap();
        assert_same_batch(&sent, &part, format!("compact part of {case}"));
    }
}

/// A cut batch of all types as C structs, with and without an event, which the devices of `options` import.
pub(crate) fn structs_out_and_in(device: &Device, options: &ImportOptions) {
    let sent = all_columns(300, 9);
    for policy in [SyncPolicy::Event, SyncPolicy::Wait] {
        let up = device.upload(&sent).unwrap();
        let (array, schema) = up.slice(7, 290).unwrap().export(policy).unwrap();
        drop(up);
        // SAFETY: both structs come from one export of this crate.
        let again = unsafe { DeviceRecordBatch::import(array, &schema, options) }.unwrap();
        let back = again.to_host().unwrap();
        assert_same_batch(&sent.slice(7, 290), &back, format!("{device}: {policy:?}"));
    }
}

/// A batch of all types to a second device, and a part of it back.
pub(crate) fn there_and_back(one: &Device, two: &Device) {
    let sent = all_columns(200, 3);
    let there = one.upload(&sent).unwrap().to_device(two).unwrap();
    let back = there.slice(5, 190).unwrap().to_device(one).unwrap();
    drop(there);
    let back = back.to_host().unwrap();
    assert_same_batch(&sent.slice(5, 190), &back, format!("{one:?} to {two:?}"));
}
