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
    both_ways(|| {
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
    });
}

/// Data that is wrong in its values.
fn bad_values() -> Vec<(&'static str, ArrayData)> {
    use DataType::*;
    let with = |data_type, rows, buffers: Vec<Buffer>, children: Vec<ArrayData>| {
        let builder = ArrayData::builder(data_type).len(rows).buffers(buffers);
        // SAFETY: no arrow array is made of the data; its values are read by nothing but the checks
        // under test.
        unsafe { builder.child_data(children).build_unchecked() }
    };
    let numbers = |n: i32| Int32Array::from_iter_values(0..n).to_data();
    let i32s = |v: &[i32]| Buffer::from_vec(v.to_vec());
    let bytes = |v: &[u8]| Buffer::from(v);
    let texts = |t: DataType, offsets: &[i32], text: &[u8]| {
        with(
            t,
            offsets.len() - 1,
            vec![i32s(offsets), bytes(text)],
            vec![],
        )
    };
    let lists = |offsets: &[i32]| with(list(Int32), 2, vec![i32s(offsets)], vec![numbers(3)]);
    let two = vec![Int32, Int32];
    let sparse = |ids: &[u8]| {
        let data_type = union(UnionMode::Sparse, two.clone());
        with(data_type, 3, vec![bytes(ids)], vec![numbers(3), numbers(3)])
    };
    let dense = |offsets: &[i32]| {
        let buffers = vec![bytes(&[5, 0, 5]), i32s(offsets)];
        let data_type = union(UnionMode::Dense, two.clone());
        with(data_type, 3, buffers, vec![numbers(2), numbers(2)])
    };
    let keys = |keys: &[i32]| {
        let words = StringArray::from(vec!["a", "b"]).to_data();
        with(dictionary(Int32, Utf8), 2, vec![i32s(keys)], vec![words])
    };
    let runs = |ends: &[i32]| {
        let children = vec![Int32Array::from(ends.to_vec()).to_data(), numbers(3)];
        with(run_ends(Int32, Int32), 4, vec![], children)
    };
    // A view of 13 bytes.
    let view = |t, rest: u128| {
        let buffers = vec![Buffer::from_vec(vec![13 | rest]), bytes(&[b'a'; 20])];
        with(t, 1, buffers, vec![])
    };
    let (a, b) = (0x6161_6161 << 32, 0x6262_6262 << 32);
    vec![
        ("not UTF-8", texts(Utf8, &[0, 1, 2], b"\xffa")),
        ("cut character", texts(Utf8, &[0, 1, 2], "é".as_bytes())),
        ("offsets descend", texts(Utf8, &[0, 2, 1, 2], b"ab")),
        ("offset beyond the bytes", texts(Binary, &[0, 9, 2], b"ab")),
        ("negative offset", texts(Binary, &[0, -4, 2], b"ab")),
        ("list beyond its child", lists(&[0, 1, 9])),
        ("inner list offset", lists(&[0, 9, 3])),
        ("unknown type id", sparse(&[5, 9, 0])),
        ("union offset", dense(&[0, 0, 7])),
        ("negative union offset", dense(&[0, -1, 1])),
        ("key beyond the dictionary", keys(&[0, 2])),
        ("negative key", keys(&[0, -1])),
        ("run ends descend", runs(&[2, 1, 4])),
        ("run ends too low", runs(&[1, 2, 3])),
        ("run end 0", runs(&[0, 2, 4])),
        ("view beyond its buffer", view(Utf8View, a | 90 << 96)),
        ("view of no buffer", view(BinaryView, a | 4 << 64)),
        ("view prefix", view(BinaryView, b)),
    ]
}

#[test]
fn values_are_checked_when_asked() {
    both_ways(|| {
        use arrow_device::Validation;
        for place in places() {
            let full = ImportOptions {
                validation: Validation::Full,
                ..place.options.clone()
            };
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
    });
}

#[test]
fn full_validation_counts_nulls() {
    both_ways(|| {
        for mut place in places() {
            let full = arrow_device::Validation::Full;
            place.options = ImportOptions {
                validation: full,
                ..place.options.clone()
            };
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
                    refused(&place, foreign, "array.null_count");
                }
            }
            place.assert_clean();
        }
    });
}
