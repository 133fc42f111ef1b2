//! What kernels borrow.

use arrow_array::types::Int32Type;
use arrow_array::{Array, DictionaryArray, FixedSizeBinaryArray, Int32Array, StringArray};
use arrow_device::Devices;
use arrow_device::device::sim::SimMode;
use arrow_schema::DataType;

use crate::arrays::{counted, refused, strings};
use crate::simkit::Sim;
use crate::support::{Nulls, all_types, array, assert_same};
use crate::support_c::sim::places;

/// What kernels borrow of text, fixed-size binary, dictionaries and lists, slices included.
#[test]
fn typed_loans() {
    for place in places() {
        let (device, queue) = (&place.device, place.device.default_queue());
        let up = |array: &dyn Array| device.upload_array(array).unwrap();

        let strings = up(&strings()).slice(1, 3).unwrap();
        let (_, stats) = counted(|| {
            let (offsets, bytes) = (strings.offsets_on::<i32>(&queue), strings.bytes_on(&queue));
            let (offsets, bytes) = (offsets.unwrap(), bytes.unwrap());
            assert_eq!((offsets.len(), bytes.len()), (4, 8));
            assert_eq!(bytes.address(), strings.buffer(2).unwrap().address());
        });
        assert_eq!(
            (stats.copies, stats.allocations, stats.host_waits),
            (0, 0, 0)
        );
        assert_eq!(
            up(&StringArray::new_null(0))
                .bytes_on(&queue)
                .unwrap()
                .len(),
            0
        );

        let fixed = FixedSizeBinaryArray::try_from_iter([[1u8, 2, 3], [4, 5, 6], [7, 8, 9]].iter());
        let fixed = up(&fixed.unwrap());
        let part = fixed.slice(1, 2).unwrap();
        let bytes = part.bytes_on(&queue).unwrap();
        assert_eq!(bytes.len(), 6);
        assert_eq!(
            bytes.address(),
            fixed.buffer(1).unwrap().address().offset(3)
        );
        drop(bytes);

        let dictionary: DictionaryArray<Int32Type> = ["a", "b", "a"].into_iter().collect();
        let dictionary = up(&dictionary).slice(1, 2).unwrap();
        let keys = dictionary.values_on::<i32>(&queue).unwrap();
        assert_eq!((keys.len(), dictionary.child(0).unwrap().len()), (2, 2));
        drop(keys);
        let name = device.to_string();
        refused(
            dictionary.values_on::<i64>(&queue),
            &["Dictionary(Int32", "i64"],
        );
        refused(
            dictionary.bytes_on(&queue),
            &["bytes_on", &name, "Dictionary"],
        );
        let numbers = up(&Int32Array::from(vec![1, 2]));
        refused(numbers.bytes_on(&queue), &["bytes_on", &name, "Int32"]);
        let other = Sim::new(SimMode::Async);
        if place.sim.is_some() {
            refused(strings.bytes_on(&other.default_queue()), &[&name]);
        }

        let bools = up(&arrow_array::BooleanArray::from(vec![true, false]));
        drop((strings, fixed, part, dictionary, numbers, bools));
        place.assert_clean();
    }
}

/// What the rows of lists refer to is their child, as for arrow-rs.
#[test]
fn children_of_lists() {
    let cpu = Devices::cpu();
    for (name, data_type) in all_types() {
        let rows = array(&data_type, 20, Nulls::Some, 5).slice(3, 12);
        let values = cpu.upload_array(&rows).unwrap().child(0);
        let data = rows.to_data();
        match rows.data_type() {
            DataType::FixedSizeList(_, n) => {
                let values = values.unwrap();
                assert_eq!(values.len(), 12 * *n as usize, "{name}");
            }
            DataType::List(_)
            | DataType::LargeList(_)
            | DataType::ListView(_)
            | DataType::LargeListView(_)
            | DataType::Map(_, _) => {
                let whole = arrow_array::make_array(data.child_data()[0].clone());
                assert_same(&whole, &values.unwrap().to_host().unwrap(), name);
            }
            _ => {}
        }
    }
}
