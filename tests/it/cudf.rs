//! What cuDF requires of an export beyond the C device data interface: null counts that are known (it takes -1 for "no nulls"),
//! bitmaps in memory that is aligned and padded with zeros, values aligned to their size.

use crate::simkit::layout::check_layout;
use crate::support::types::{dictionary, list, structure};
use crate::support::*;
use crate::support_c::sim::places;
use crate::support_c::{CArray, Foreign, c};
use arrow_array::StructArray;
use arrow_device::{DeviceRecordBatch, SyncPolicy};
use arrow_schema::DataType::*;

fn assert_taken(batch: &DeviceRecordBatch) {
    let (mut exported, _schema) = batch.export(SyncPolicy::Event).unwrap();
    all(&c(&mut exported).array);
}

fn all(array: &CArray) {
    assert!(array.null_count >= 0, "{array:?}");
    for i in 0..array.n_buffers as usize {
        // SAFETY: the export is live, and has as many buffers as it states.
        let address = unsafe { *array.buffers.add(i) };
        assert_eq!(address.addr() % 64, 0, "{array:?}, buffer {i}");
    }
    // SAFETY: the same of its children; the dictionary is null or live.
    let child = |i| unsafe { &**array.children.add(i) };
    (0..array.n_children as usize).map(child).for_each(all);
    // SAFETY: the export is live, so its dictionary is null or live.
    unsafe { array.dictionary.as_ref() }
        .into_iter()
        .for_each(all);
}

/// What [`upload`](arrow_device::Device::upload) and `compact` make, and their slices, whatever memory it came from.
#[test]
fn transfers_keep_to_what_cudf_requires() {
    let nested = structure(vec![("a", Int64), ("b", list(Decimal128(20, 2)))]);
    let keys = dictionary(Int32, Utf8);
    let types = [Boolean, Int8, Float64, Utf8, nested, list(Utf8), keys, Null];
    let whole = StructArray::from(whole_batch(&types, 141, Nulls::Some, 8));
    for place in places() {
        for made in SAME_ROWS.map(|variant| variant.of(&whole, 8).unwrap()) {
            let mut foreign = Foreign::part(&made.around, made.offset, 141, &place.device);
            // The rows of a batch are not null, whatever is beside them.
            foreign.set_buffer(&[], 0, std::ptr::null());
            (0..types.len()).for_each(|i| foreign.at(&[i]).null_count = -1);
            let imported = foreign.import_batch(&place.options).unwrap();
            for (offset, rows) in [(0, 141), (8, 64), (13, 100), (5, 0)] {
                let part = imported.slice(offset, rows).unwrap();
                let mut copies = vec![part.compact().unwrap()];
                // The CPU keeps memory that this crate has not written.
                if place.sim.is_some() {
                    copies.push(place.device.upload(&part.to_host().unwrap()).unwrap());
                }
                for copy in copies {
                    check_layout(copy.as_struct(), false, None, "for cuDF");
                    assert_taken(&copy);
                    assert_taken(&copy.slice(rows / 3, rows / 2).unwrap());
                }
            }
            drop(imported);
            foreign.assert_released_by(&place.device, "for cuDF");
        }
        place.assert_clean();
    }
}
