//! What only the data tells.

use super::*;
use crate::support::types::{dictionary, list, run_ends, structure, union};
use crate::support_c::sim::places;
use arrow_array::{Array, StringArray};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_schema::UnionMode;

/// Lengths that hide in the data: the import reads nothing and succeeds; asking for them is refused, and the device
/// survives it.
#[test]
fn hidden_lengths() {
    both_ways(hidden_lengths_cases);
}

fn hidden_lengths_cases() {
    // Rows, offsets of `Utf8`.
    let text = |last: i32| {
        let offsets = Buffer::from_vec(vec![0, 1, last]);
        let builder = ArrayData::builder(DataType::Utf8).len(2);
        let builder = builder.add_buffer(offsets).add_buffer(Buffer::from(b"ab"));
        // SAFETY: no arrow array is made of the data; its values are read by nothing but the checks
        // under test.
        unsafe { builder.build_unchecked() }
    };
    let view = |sizes: &[i64], place: &Place| {
        let data = array(&DataType::Utf8View, 40, Nulls::None, 1).to_data();
        let mut foreign = Foreign::new(&data, &place.device);
        let mut all: Vec<i64> = data.buffers()[1..].iter().map(|b| b.len() as i64).collect();
        all[..sizes.len()].copy_from_slice(sizes);
        foreign.set_sizes(&[], &all);
        foreign
    };
    for place in places() {
        let on_sim = place.sim.is_some();
        let mut bad = vec![
            (
                Foreign::new(&text(-50), &place.device),
                "last offset -50 (3.3.9)",
            ),
            (view(&[-1], &place), "view length -1 (3.3.9)"),
            (view(&[i64::MIN], &place), "least view length"),
            (view(&[i64::MAX], &place), "view length i64::MAX"),
        ];
        if on_sim {
            // Where the data tells nobody can know how much host memory there is.
            bad.push((
                Foreign::new(&text(1 << 20), &place.device),
                "last offset 1 MiB",
            ));
            bad.push((view(&[1 << 20], &place), "view length 1 MiB"));
        }
        for (mut foreign, name) in bad {
            let context = format!("{name} on {place}");
            let before = place.device.stats();
            let imported = foreign.import(&place.options).expect(&context);
            if on_sim {
                let delta = place.device.stats().since(&before);
                assert_eq!((delta.copies, delta.host_waits), (0, 0), "{context}");
            }
            for error in [
                imported.resolve_sizes().unwrap_err(),
                imported.to_host().unwrap_err(),
                imported.resolve_sizes().unwrap_err(),
            ] {
                let error = error.to_string();
                assert!(error.contains("array.buffers[2]: "), "{context}: {error}");
            }
            drop(imported);
            foreign.assert_released(&context);
            place.device.synchronize().expect(&context);
        }
        // In a child.
        let child = text(-1);
        let data_type = structure(vec![("n", DataType::Int32), ("s", DataType::Utf8)]);
        let builder = ArrayData::builder(data_type).len(2);
        let ints = Int32Array::from(vec![1, 2]).to_data();
        // SAFETY: the array is only exported and imported, never read as an arrow array.
        let data = unsafe { builder.child_data(vec![ints, child]).build_unchecked() };
        let mut foreign = Foreign::new(&data, &place.device);
        let batch = foreign.import_batch(&place.options).unwrap();
        let error = batch.to_host().unwrap_err().to_string();
        assert!(error.contains("array.children[1].buffers[2]: "), "{error}");
        drop(batch);
        place.assert_clean();
    }
}

/// Data that is wrong in its values, and where.
fn bad_values() -> Vec<(&'static str, ArrayData)> {
    use DataType::*;
    // SAFETY: no arrow array is made of the data; its values are read by nothing but the checks
    // under test.
    let build = |b: arrow_data::ArrayDataBuilder| unsafe { b.build_unchecked() };
    let with =
        |data_type: DataType, buffers: Vec<Buffer>, children: Vec<ArrayData>, rows: usize| {
            let builder = ArrayData::builder(data_type).len(rows).buffers(buffers);
            build(builder.child_data(children))
        };
    let numbers = |n: i32| Int32Array::from_iter_values(0..n).to_data();
    let words = || StringArray::from(vec!["a", "b"]).to_data();
    let i32s = |v: &[i32]| Buffer::from_vec(v.to_vec());
    let bytes = |v: &[u8]| Buffer::from(v);
    let sparse = union(UnionMode::Sparse, vec![Int32, Int32]);
    let dense = union(UnionMode::Dense, vec![Int32, Int32]);
    let (two, short) = (
        || vec![numbers(3), numbers(3)],
        || vec![numbers(2), numbers(2)],
    );
    let fixed_type = |keys: DataType| dictionary(keys, Utf8);
    vec![
        (
            "not UTF-8",
            with(Utf8, vec![i32s(&[0, 1, 2]), bytes(b"\xffa")], vec![], 2),
        ),
        (
            "cut character",
            with(
                Utf8,
                vec![i32s(&[0, 1, 2]), bytes("é".as_bytes())],
                vec![],
                2,
            ),
        ),
        (
            "offsets descend",
            with(Utf8, vec![i32s(&[0, 2, 1, 2]), bytes(b"ab")], vec![], 3),
        ),
        (
            "inner offset beyond the bytes",
            with(Binary, vec![i32s(&[0, 9, 2]), bytes(b"ab")], vec![], 2),
        ),
        (
            "negative inner offset",
            with(Binary, vec![i32s(&[0, -4, 2]), bytes(b"ab")], vec![], 2),
        ),
        (
            "list beyond its child",
            with(list(Int32), vec![i32s(&[0, 1, 9])], vec![numbers(3)], 2),
        ),
        (
            "inner list offset",
            with(list(Int32), vec![i32s(&[0, 9, 3])], vec![numbers(3)], 2),
        ),
        (
            "unknown type id",
            with(sparse, vec![bytes(&[5, 9, 0])], two(), 3),
        ),
        (
            "union offset",
            with(
                dense.clone(),
                vec![bytes(&[5, 0, 5]), i32s(&[0, 0, 7])],
                short(),
                3,
            ),
        ),
        (
            "negative union offset",
            with(
                dense,
                vec![bytes(&[5, 0, 5]), i32s(&[0, -1, 1])],
                short(),
                3,
            ),
        ),
        (
            "key beyond the dictionary",
            with(fixed_type(Int32), vec![i32s(&[0, 2])], vec![words()], 2),
        ),
        (
            "negative key",
            with(fixed_type(Int32), vec![i32s(&[0, -1])], vec![words()], 2),
        ),
        (
            "run ends descend",
            with(
                run_ends(Int32, Int32),
                vec![],
                vec![Int32Array::from(vec![2, 1, 4]).to_data(), numbers(3)],
                4,
            ),
        ),
        (
            "run ends too low",
            with(
                run_ends(Int32, Int32),
                vec![],
                vec![Int32Array::from(vec![1, 2, 3]).to_data(), numbers(3)],
                4,
            ),
        ),
        (
            "run end 0",
            with(
                run_ends(Int32, Int32),
                vec![],
                vec![Int32Array::from(vec![0, 4]).to_data(), numbers(2)],
                4,
            ),
        ),
        (
            "view beyond its buffer",
            with(
                Utf8View,
                vec![
                    Buffer::from_vec(vec![13u128 | 0x6161_6161 << 32 | 90 << 96]),
                    bytes(&[b'a'; 20]),
                ],
                vec![],
                1,
            ),
        ),
        (
            "view of no buffer",
            with(
                BinaryView,
                vec![
                    Buffer::from_vec(vec![13u128 | 0x6161_6161 << 32 | 4 << 64]),
                    bytes(&[b'a'; 20]),
                ],
                vec![],
                1,
            ),
        ),
        (
            "view prefix",
            with(
                BinaryView,
                vec![
                    Buffer::from_vec(vec![13u128 | 0x6262_6262 << 32]),
                    bytes(&[b'a'; 20]),
                ],
                vec![],
                1,
            ),
        ),
    ]
}

#[test]
fn values_are_checked_when_asked() {
    both_ways(values_are_checked_when_asked_cases);
}

fn values_are_checked_when_asked_cases() {
    use arrow_device::Validation;
    for place in places() {
        let full = place.options.clone().with_validation(Validation::Full);
        for (name, data) in bad_values() {
            // As it is, and as the child of a struct.
            let data_type = structure(vec![("v", data.data_type().clone())]);
            let builder = ArrayData::builder(data_type).len(data.len());
            // SAFETY: no arrow array is made of the data; its values are read by nothing but the
            // checks under test.
            let nested = unsafe { builder.add_child_data(data.clone()).build_unchecked() };
            for data in [data, nested] {
                let context = format!("{name} ({}) on {place}", data.data_type());
                let mut foreign = Foreign::new(&data, &place.device);
                assert!(foreign.import(&full).is_err(), "{context}: accepted");
                foreign.assert_released(&context);
                if matches!(data.data_type(), DataType::Struct(_)) {
                    let mut foreign = Foreign::new(&data, &place.device);
                    assert!(
                        foreign.import_batch(&full).is_err(),
                        "{context}: accepted as a batch"
                    );
                    foreign.assert_released(&context);
                }
                // Trusted otherwise: nothing is read.
                let mut foreign = Foreign::new(&data, &place.device);
                drop(foreign.import(&place.options).expect(&context));
                foreign.assert_released(&context);
                place.device.synchronize().expect(&context);
            }
        }
        place.assert_clean();
    }
}

/// Null counts that the mask contradicts, and values that no row shows but a child does.
#[test]
fn full_validation_looks_everywhere() {
    both_ways(full_validation_looks_everywhere_cases);
}

fn full_validation_looks_everywhere_cases() {
    use arrow_device::Validation;
    // Row 0 of the child is not UTF-8.
    let offsets = || Buffer::from_vec(vec![0, 1, 2]);
    let child = ArrayData::builder(DataType::Utf8).len(2);
    let child = child
        .add_buffer(offsets())
        .add_buffer(Buffer::from([0xFF, b'a']));
    // SAFETY: no arrow array is made of the data; its values are read by nothing but the checks
    // under test.
    let child = unsafe { child.build_unchecked() };
    let lists = ArrayData::builder(list(DataType::Utf8)).len(2);
    // SAFETY: the array is only exported and imported, never read as an arrow array.
    let lists = unsafe {
        lists
            .add_buffer(offsets())
            .add_child_data(child)
            .build_unchecked()
    };
    for mut place in places() {
        place.options = place.options.clone().with_validation(Validation::Full);
        for claim in [-1, 1, 0, 2, 4] {
            let mut foreign = Foreign::new(&ints().to_data(), &place.device);
            foreign.root().null_count = claim;
            let context = format!("{claim} nulls on {place}");
            if claim.abs() == 1 {
                let array = foreign.import(&place.options).expect(&context);
                assert_eq!(array.null_count(), Some(1), "{context}");
                drop(array);
                foreign.assert_released(&context);
            } else {
                refused(&place, foreign, "array.null_count", &context);
            }
        }
        for (offset, length) in [(0, 2), (1, 1), (0, 0)] {
            let mut foreign = Foreign::new(&lists, &place.device);
            let root = foreign.root();
            (root.offset, root.length) = (offset, length);
            let context = format!("rows {offset}, {length} on {place}");
            refused(&place, foreign, "array.children[0]", &context);
        }
        place.assert_clean();
    }
}
