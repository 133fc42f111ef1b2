//! Foreign arrays that break a rule: each is refused with an error that names the place, and every node is released
//! exactly once. "2.3.n" and "3.3.n" are known defects of other implementations that the case replays.

mod support;
mod support_c;

use std::ptr;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Int32Array, StringArray, make_array};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_device::device::sim::SimMode;
use arrow_device::{Devices, ImportOptions};
use arrow_schema::{DataType, UnionMode};
use support::types::{dictionary, fixed_list, list, run_ends, structure, union};
use support::{Nulls, all_types, array, assert_same};
use support_c::sim::{Place, cpu, places, simulated};
use support_c::{DICTIONARY, Foreign};

fn ints() -> ArrayRef {
    Arc::new(Int32Array::from(vec![Some(1), None, Some(3), Some(4)]))
}

fn of(data_type: DataType) -> ArrayRef {
    array(&data_type, 4, Nulls::Some, 3)
}

fn pair() -> ArrayRef {
    of(structure(vec![
        ("a", DataType::Int32),
        ("b", DataType::Utf8),
    ]))
}

type Spoil = fn(&mut Foreign);

/// What is wrong, an array, how to spoil it, and what the error says.
fn cases() -> Vec<(&'static str, ArrayRef, Spoil, &'static str)> {
    use DataType::*;
    let view = || array(&Utf8View, 40, Nulls::None, 1);
    let deep = || of(structure(vec![("s", structure(vec![("i", Int32)]))]));
    let sparse = || of(union(UnionMode::Sparse, vec![Int32, Utf8]));
    let ree = || of(run_ends(Int32, Utf8));
    vec![
        // Released structs.
        (
            "released root",
            ints(),
            |f| f.release(&[]),
            "was already released",
        ),
        (
            "released child",
            pair(),
            |f| f.release(&[1]),
            "array.children[1]: is released",
        ),
        (
            "released grandchild",
            deep(),
            |f| f.release(&[0, 0]),
            "array.children[0].children[0]: is released",
        ),
        (
            "released dictionary",
            of(dictionary(Int8, Utf8)),
            |f| f.release(&[DICTIONARY]),
            "array.dictionary: is released",
        ),
        (
            "released dictionary of a child",
            of(list(dictionary(Int8, Utf8))),
            |f| f.release(&[0, DICTIONARY]),
            "array.children[0].dictionary: is released",
        ),
        // Null pointers (3.3.9).
        (
            "null buffers",
            ints(),
            |f| f.root().buffers = ptr::null_mut(),
            "array.buffers: is null",
        ),
        (
            "null buffers of a child",
            pair(),
            |f| f.at(&[1]).buffers = ptr::null_mut(),
            "array.children[1].buffers: is null",
        ),
        (
            "null children",
            pair(),
            |f| f.root().children = ptr::null_mut(),
            "array.children: is null",
        ),
        (
            "null child",
            pair(),
            |f| f.set_child(&[], 1, ptr::null_mut()),
            "array.children[1]: is null",
        ),
        (
            "null dictionary",
            of(dictionary(Int8, Utf8)),
            |f| f.root().dictionary = ptr::null_mut(),
            "array.dictionary: is null",
        ),
        (
            "unexpected dictionary",
            pair(),
            |f| f.root().dictionary = f.at(&[0]),
            "array.dictionary: is there",
        ),
        (
            "null values",
            ints(),
            |f| f.set_buffer(&[], 1, ptr::null()),
            "array.buffers[1]: is null",
        ),
        (
            "null offsets",
            of(Utf8),
            |f| f.set_buffer(&[], 1, ptr::null()),
            "array.buffers[1]: is null",
        ),
        (
            "null views",
            view(),
            |f| f.set_buffer(&[], 1, ptr::null()),
            "array.buffers[1]: is null",
        ),
        (
            "null view lengths",
            view(),
            |f| {
                let last = f.root().n_buffers as usize - 1;
                assert!(last > 2);
                f.set_buffer(&[], last, ptr::null());
            },
            "the lengths of the variadic buffers are missing",
        ),
        (
            "null type ids",
            sparse(),
            |f| f.set_buffer(&[], 0, ptr::null()),
            "array.buffers[0]: is null",
        ),
        // Counts (3.3.9).
        (
            "negative length",
            ints(),
            |f| f.root().length = -1,
            "array.length: is -1",
        ),
        (
            "least length",
            ints(),
            |f| f.root().length = i64::MIN,
            "array.length: is -",
        ),
        (
            "negative offset",
            ints(),
            |f| f.root().offset = -1,
            "array.offset: is -1",
        ),
        (
            "negative offset of a child",
            pair(),
            |f| f.at(&[0]).offset = -2,
            "array.children[0].offset: is -2",
        ),
        (
            "offset overflow",
            ints(),
            |f| f.root().offset = i64::MAX,
            "array.offset: ",
        ),
        (
            "bytes overflow",
            ints(),
            |f| f.root().length = i64::MAX / 2,
            "array.",
        ),
        (
            "offsets overflow",
            of(Utf8),
            |f| f.root().length = i64::MAX,
            "array.length: ",
        ),
        (
            "items overflow",
            of(fixed_list(Int32, 3)),
            |f| {
                f.data_type = fixed_list(Int32, 1 << 30);
                f.root().offset = i64::MAX / 2;
            },
            "array.length: ",
        ),
        (
            "null count -2",
            ints(),
            |f| f.root().null_count = -2,
            "array.null_count: is -2",
        ),
        (
            "least null count",
            ints(),
            |f| f.root().null_count = i64::MIN,
            "array.null_count: is -",
        ),
        (
            "more nulls than rows",
            ints(),
            |f| f.root().null_count = 5,
            "array.null_count: is 5 for 4 rows",
        ),
        (
            "null count of a child",
            pair(),
            |f| f.at(&[1]).null_count = 77,
            "array.children[1].null_count: is 77",
        ),
        (
            "negative n_buffers",
            ints(),
            |f| f.root().n_buffers = -1,
            "array.n_buffers: is -1",
        ),
        (
            "huge n_buffers",
            ints(),
            |f| f.root().n_buffers = i64::MAX,
            "array.n_buffers: is ",
        ),
        (
            "huge n_buffers of a view",
            view(),
            |f| f.root().n_buffers = i64::MAX,
            "array.n_buffers: is ",
        ),
        (
            "negative n_buffers of a view",
            view(),
            |f| f.root().n_buffers = i64::MIN,
            "array.n_buffers: is ",
        ),
        (
            "negative n_children",
            pair(),
            |f| f.root().n_children = -1,
            "array.n_children: is -1",
        ),
        (
            "huge n_children",
            pair(),
            |f| f.root().n_children = i64::MAX,
            "array.n_children: is ",
        ),
        (
            "children of a leaf",
            ints(),
            |f| f.root().n_children = 1,
            "array.n_children: is 1",
        ),
        // Children shorter than their parent needs (3.3.9).
        (
            "short struct child",
            pair(),
            |f| f.at(&[1]).length = 3,
            "array.children[1].length: is 3, but its parent needs 4 rows",
        ),
        (
            "short struct child, offset",
            pair(),
            |f| f.root().offset = 1,
            "array.children[0].length: is 4, but its parent needs 5 rows",
        ),
        (
            "short items",
            of(fixed_list(Int16, 3)),
            |f| f.at(&[0]).length = 11,
            "array.children[0].length: is 11, but its parent needs 12",
        ),
        (
            "short items, offset",
            of(fixed_list(Int16, 3)),
            |f| f.root().offset = 1,
            "array.children[0].length: is 12, but its parent needs 15",
        ),
        (
            "short sparse child",
            sparse(),
            |f| f.at(&[1]).length = 3,
            "array.children[1].length: is 3",
        ),
        (
            "no run ends",
            ree(),
            |f| f.at(&[0]).length = 0,
            "array.children[0].length: is 0",
        ),
        (
            "fewer values than runs",
            ree(),
            |f| f.at(&[1]).length = 0,
            "array.children[1].length: is 0",
        ),
        // Nulls where none can be.
        (
            "nulls in a sparse union",
            sparse(),
            |f| f.root().null_count = 1,
            "array.null_count: is 1",
        ),
        (
            "nulls in a dense union",
            of(union(UnionMode::Dense, vec![Int32, Utf8])),
            |f| f.root().null_count = 1,
            "array.null_count: is 1",
        ),
        (
            "nulls of runs",
            ree(),
            |f| f.root().null_count = 1,
            "array.null_count: is 1",
        ),
        (
            "null run ends",
            ree(),
            |f| {
                let ends = f.buffer(&[0], 1);
                f.set_buffer(&[0], 0, ends);
                f.at(&[0]).null_count = 1;
            },
            "array.children[0].null_count: run ends cannot be null",
        ),
    ]
}

/// Imports what must be refused, and checks text and releases.
#[track_caller]
fn refused(place: &Place, mut foreign: Foreign, expected: &str, context: &str) {
    let error = match foreign.import(&place.options) {
        Ok(_) => panic!("{context}: accepted"),
        Err(e) => e.to_string(),
    };
    assert!(
        error.contains(expected),
        "{context}: \"{error}\" lacks \"{expected}\""
    );
    assert!(
        foreign.device_array.array.release.is_none(),
        "{context}: not consumed"
    );
    foreign.assert_released(context);
}

#[test]
fn structure_is_checked() {
    for place in places() {
        for (name, data, spoil, expected) in cases() {
            let mut foreign = Foreign::new(&data.to_data(), &place.device);
            spoil(&mut foreign);
            refused(&place, foreign, expected, &format!("{name} on {place}"));
        }
        place.assert_clean();
    }
}

/// A callback that is not there means released, whatever the other members say.
#[test]
fn missing_release_callbacks() {
    for path in [&[1usize][..], &[]] {
        let place = cpu();
        let mut foreign = Foreign::new(&pair().to_data(), &place.device);
        let mut saved = *foreign.root();
        let callback = foreign.at(path).release.take();
        let root = foreign.root().release;
        let error = foreign.import(&place.options).unwrap_err().to_string();
        assert!(error.contains("released"), "{error}");
        let (released, _) = foreign.releases();
        assert_eq!(released, if root.is_some() { 2 } else { 0 });
        // What lost its callback is the test's to release.
        if root.is_some() {
            let lost = foreign.lost();
            lost.release = callback;
            // SAFETY: not released yet.
            unsafe { callback.unwrap()(lost) };
            foreign.assert_released("child");
        } else {
            saved.release = callback;
            *foreign.root() = saved;
            foreign.release(&[]);
            foreign.assert_released("root");
        }
    }
}

/// Every type refuses one buffer or child more or less, and nulls without a mask.
#[test]
fn every_type_has_its_counts() {
    for place in places() {
        for (name, data_type) in all_types() {
            let data = array(&data_type, 5, Nulls::None, 1).to_data();
            let n_buffers = Foreign::new(&data, &place.device).root().n_buffers;
            let n_children = Foreign::new(&data, &place.device).root().n_children;
            let variadic = matches!(data_type, DataType::Utf8View | DataType::BinaryView);
            let counts = if variadic {
                vec![0, 2]
            } else {
                vec![n_buffers - 1, n_buffers + 1]
            };
            for n in counts {
                let mut foreign = Foreign::new(&data, &place.device);
                foreign.root().n_buffers = n;
                let context = format!("{name} with {n} buffers");
                refused(
                    &place,
                    foreign,
                    &format!("array.n_buffers: is {n}"),
                    &context,
                );
            }
            for n in [n_children - 1, n_children + 1] {
                let mut foreign = Foreign::new(&data, &place.device);
                foreign.root().n_children = n;
                let context = format!("{name} with {n} children");
                refused(
                    &place,
                    foreign,
                    &format!("array.n_children: is {n}"),
                    &context,
                );
            }
            if data_type == DataType::Null {
                continue;
            }
            let mut foreign = Foreign::new(&data, &place.device);
            foreign.root().null_count = 1;
            refused(
                &place,
                foreign,
                "array.null_count: is 1, but there is no mask",
                &name,
            );
        }
        place.assert_clean();
    }
}

/// An array of one type under the schema of another.
#[test]
fn schema_and_array_differ() {
    use DataType::*;
    let place = cpu();
    let flat = structure(vec![("a", Int32)]);
    for (data, other, expected) in [
        (ints(), Utf8, "array.n_buffers"),
        (of(Utf8), Int32, "array.n_buffers"),
        (ints(), flat.clone(), "array.n_buffers"),
        (pair(), flat.clone(), "array.n_children"),
        (
            pair(),
            structure(vec![("a", Utf8), ("b", Utf8)]),
            "array.children[0].n_buffers",
        ),
        (ints(), dictionary(Int32, Utf8), "array.dictionary"),
        (of(dictionary(Int32, Utf8)), Int32, "array.dictionary"),
        (of(list(Int32)), fixed_list(Int32, 2), "array.n_buffers"),
        (array(&Null, 3, Nulls::None, 1), Int32, "array.n_buffers"),
    ] {
        let mut foreign = Foreign::new(&data.to_data(), &place.device);
        foreign.data_type = other.clone();
        refused(
            &place,
            foreign,
            expected,
            &format!("{} as {other}", data.data_type()),
        );
    }
}

/// Types and arrays that nest a thousand levels deep.
#[test]
fn nesting_is_bounded() {
    let place = cpu();
    let nest = |depth: usize| {
        let mut data = Int32Array::from(vec![1]).to_data();
        for _ in 0..depth {
            let data_type = fixed_list(data.data_type().clone(), 1);
            let builder = ArrayData::builder(data_type).len(1).add_child_data(data);
            // SAFETY: one list of one item.
            data = unsafe { builder.build_unchecked() };
        }
        data
    };
    // The deepest that is accepted.
    let mut foreign = Foreign::new(&nest(64), &place.device);
    drop(foreign.import(&place.options).unwrap());
    foreign.assert_released("64 levels");
    for depth in [65, 1000] {
        let foreign = Foreign::new(&nest(depth), &place.device);
        refused(
            &place,
            foreign,
            "schema: types nest deeper",
            &format!("{depth} levels"),
        );
    }
    // The array goes deeper than its type.
    let mut foreign = Foreign::new(&nest(1000), &place.device);
    foreign.data_type = fixed_list(DataType::Int32, 1);
    refused(&place, foreign, "array.children[0].n_buffers", "deep array");
    // A child that is its own parent is as deep as its type.
    let mut foreign = Foreign::new(&nest(3), &place.device);
    let loop_to = ptr::from_mut(foreign.at(&[0]));
    foreign.set_child(&[0], 0, loop_to);
    refused(
        &place,
        foreign,
        "array.children[0].children[0].children[0].n_buffers",
        "loop",
    );
}

/// Lengths that hide in the data: the import reads nothing and succeeds; asking for them is refused, and the device
/// survives it.
#[test]
fn hidden_lengths() {
    // Rows, offsets of `Utf8`.
    let text = |last: i32| {
        let offsets = Buffer::from_vec(vec![0, 1, last]);
        let builder = ArrayData::builder(DataType::Utf8).len(2);
        let builder = builder.add_buffer(offsets).add_buffer(Buffer::from(b"ab"));
        // SAFETY: never used as an arrow array.
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
        ];
        if on_sim {
            // Where the data tells nobody can know how much host memory there is.
            bad.push((
                Foreign::new(&text(1 << 20), &place.device),
                "last offset 1 MiB",
            ));
            bad.push((view(&[i64::MAX], &place), "view length i64::MAX"));
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
        // SAFETY: as above.
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
    // SAFETY: never used as arrow arrays.
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
    use arrow_device::Validation;
    for place in places() {
        let full = place.options.clone().with_validation(Validation::Full);
        for (name, data) in bad_values() {
            // As it is, and as the child of a struct.
            let data_type = structure(vec![("v", data.data_type().clone())]);
            let builder = ArrayData::builder(data_type).len(data.len());
            // SAFETY: never used as an arrow array.
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

/// Who may claim which device.
#[test]
fn devices() {
    let plain = || Foreign::new(&ints().to_data(), &Devices::cpu());
    let place = cpu();
    // 3.3.6, 2.3.6: types without a backend.
    for (device_type, expected) in [
        (0, "does not name this device type"),
        (99, "does not name this device type"),
        (-5, "does not name this device type"),
        (2, "this build has no CUDA backend"),
        (13, "this build has no CUDA backend"),
        (10, "this build has no ROCm backend"),
        (8, "no backend is registered"),
        (14, "no backend is registered"),
        (16, "no backend is registered"),
        (12, "no extension device with this id is registered"),
    ] {
        let mut foreign = plain();
        foreign.device_array.device_type = device_type;
        refused(
            &place,
            foreign,
            expected,
            &format!("device type {device_type}"),
        );
    }
    let mut foreign = plain();
    foreign.device_array.device_type = 12;
    foreign.device_array.device_id = 9_999_999;
    refused(&place, foreign, "9999999", "unknown extension device");
    // Page-locked memory is host memory, unless it must be waited for.
    let mut event = 0u64;
    for device_type in [3, 11] {
        let mut foreign = plain();
        foreign.device_array.device_type = device_type;
        foreign.device_array.device_id = 0;
        let imported = foreign.import(&place.options).unwrap();
        assert_eq!(imported.device().id().device_type.value(), device_type);
        assert_same(&ints(), &imported.to_host().unwrap(), "page-locked");
        drop(imported);
        foreign.assert_released("page-locked");
        let mut foreign = plain();
        foreign.device_array.device_type = device_type;
        foreign.device_array.sync_event = ptr::from_mut(&mut event).cast();
        refused(&place, foreign, "backend", "page-locked with an event");
    }
    let mut foreign = plain();
    foreign.device_array.sync_event = ptr::from_mut(&mut event).cast();
    refused(
        &place,
        foreign,
        "sync_event: the CPU has no events",
        "CPU with an event",
    );
    // Any id is the CPU, and `reserved` may hold anything.
    for id in [-1, 0, 7, i64::MIN] {
        let mut foreign = plain();
        foreign.device_array.device_id = id;
        foreign.device_array.reserved = [-1, i64::MAX, 0x5A];
        let imported = foreign.import(&place.options).unwrap();
        assert_eq!(imported.device(), &Devices::cpu());
        assert_same(&ints(), &imported.to_host().unwrap(), "CPU");
    }
}

/// Type 12 is everybody's test type: a simulated device takes only what is its own.
#[test]
fn simulated_devices_accept_their_own_only() {
    let (Some(place), Some(other)) = (simulated(SimMode::Async), simulated(SimMode::Async)) else {
        return;
    };
    let label = |foreign: &mut Foreign| {
        foreign.device_array.device_type = 12;
        foreign.device_array.device_id = place.device.id().id;
        foreign.device_array.sync_event = ptr::null_mut();
    };
    // Host memory, and memory of another simulated device, under this one's label.
    for from in [&cpu(), &other] {
        for data in [
            ints(),
            of(DataType::Utf8),
            array(&DataType::Utf8View, 40, Nulls::Some, 1),
        ] {
            let mut foreign = Foreign::new(&data.to_data(), &from.device);
            label(&mut foreign);
            refused(
                &place,
                foreign,
                "array.buffers[",
                &format!("{} of {from}", data.data_type()),
            );
        }
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        let mut wrong = Foreign::new(&ints().to_data(), &from.device);
        foreign.set_buffer(&[], 0, wrong.buffer(&[], 0));
        refused(&place, foreign, "array.buffers[0]", "mask elsewhere");
        // A buffer whose length only the data tells is found out when it is asked for.
        let mut foreign = Foreign::new(&of(DataType::Utf8).to_data(), &place.device);
        let mut wrong = Foreign::new(&of(DataType::Utf8).to_data(), &from.device);
        foreign.set_buffer(&[], 2, wrong.buffer(&[], 2));
        let imported = foreign.import(&place.options).unwrap();
        let error = imported.to_host().unwrap_err().to_string();
        assert!(error.contains("array.buffers[2]"), "{error}");
        place.device.synchronize().unwrap();
    }
    // Lengths of view buffers where nobody can read them.
    let views = array(&DataType::Utf8View, 40, Nulls::None, 1).to_data();
    let mut foreign = Foreign::new(&views, &place.device);
    let mut wrong = Foreign::new(&ints().to_data(), &other.device);
    let last = foreign.root().n_buffers as usize - 1;
    foreign.set_buffer(&[], last, wrong.buffer(&[], 1));
    refused(
        &place,
        foreign,
        &format!("array.buffers[{last}]"),
        "view lengths elsewhere",
    );
    // Rows beyond the allocation.
    let mut foreign = Foreign::new(&ints().to_data(), &place.device);
    foreign.root().length = 1000;
    refused(&place, foreign, "array.buffers[", "1000 rows of 4");
    // Events that are not this device's.
    let mut no_event = 0u64;
    let theirs = other.device.default_queue().record().unwrap().unwrap();
    let ours = place.device.default_queue().record().unwrap().unwrap();
    let stale = ours.as_ptr().as_ptr();
    drop(ours);
    for event in [
        ptr::from_mut(&mut no_event).cast(),
        theirs.as_ptr().as_ptr(),
        stale,
    ] {
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        foreign.device_array.sync_event = event;
        refused(&place, foreign, "sync_event", "foreign event");
    }
    drop(theirs);
    // The device is none the worse for it.
    let good = place.device.upload_array(&ints()).unwrap();
    assert_same(&ints(), &good.to_host().unwrap(), "after all");
    drop((good, wrong));
    place.assert_clean();
    other.assert_clean();
}

/// Batches: a struct whose rows cannot be null.
#[test]
fn batches() {
    let data_type = structure(vec![("a", DataType::Int32), ("b", DataType::Utf8)]);
    for place in places() {
        let data = array(&data_type, 100, Nulls::Some, 3).to_data();
        assert!(data.null_count() > 0);
        for null_count in [-1, data.null_count() as i64] {
            let mut foreign = Foreign::new(&data, &place.device);
            foreign.root().null_count = null_count;
            let error = foreign
                .import_batch(&place.options)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("array.null_count: the rows of a record batch"),
                "{error}"
            );
            foreign.assert_released("nulls");
        }
        // A struct array may have them.
        let mut foreign = Foreign::new(&data, &place.device);
        let imported = foreign.import(&place.options).unwrap();
        assert_same(&make_array(data), &imported.to_host().unwrap(), "struct");
        drop(imported);
        // 3.3.4: a mask without nulls, counted or not, and a root that starts at row 13.
        let plain = array(&data_type, 100, Nulls::None, 3);
        for null_count in [-1, 0] {
            let set = arrow_buffer::NullBuffer::new_valid(100);
            let masked = plain
                .to_data()
                .into_builder()
                .nulls(Some(set))
                .build()
                .unwrap();
            let mut foreign = Foreign::new(&masked, &place.device);
            let mask = foreign_mask(&mut foreign, &place);
            foreign.set_buffer(&[], 0, mask);
            let root = foreign.root();
            (root.null_count, root.offset, root.length) = (null_count, 13, 80);
            let batch = foreign.import_batch(&place.options).unwrap();
            assert_eq!(
                (batch.num_rows(), batch.column(0).unwrap().offset()),
                (80, 13)
            );
            let back = batch.to_host().unwrap();
            let expected = plain.slice(13, 80);
            for (i, column) in back.columns().iter().enumerate() {
                let expected = arrow_array::cast::AsArray::as_struct(&expected)
                    .column(i)
                    .clone();
                assert_same(&expected, column, format!("column {i} on {place}"));
            }
            drop((batch, back));
            foreign.assert_released("offset");
        }
        // Not a struct.
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        let schema = arrow_schema::ffi::FFI_ArrowSchema::try_from(&*foreign.field()).unwrap();
        // SAFETY: what is wrong is what imports check.
        let result = unsafe {
            arrow_device::DeviceRecordBatch::import_with(foreign.take(), &schema, &place.options)
        };
        result.unwrap_err();
        foreign.assert_released("no struct");
        place.assert_clean();
    }
}

/// A mask of ones for 100 rows.
fn foreign_mask(foreign: &mut Foreign, place: &Place) -> *const std::ffi::c_void {
    let ones = arrow_array::UInt8Array::from(vec![0xFF; 16]);
    let ones = place.device.upload_array(&ones).unwrap().buffer(1).unwrap();
    let address = ones.address().as_ptr();
    foreign.keep(ones);
    address
}

/// Legal oddities.
#[test]
fn oddities_are_accepted() {
    use DataType::*;
    for place in places() {
        // Null pointers where there is nothing to point to (3.3.5), out and in again.
        let empty_texts: ArrayRef = Arc::new(StringArray::from(vec!["", "", ""]));
        let mut foreign = Foreign::new(&empty_texts.to_data(), &place.device);
        foreign.set_buffer(&[], 2, ptr::null());
        let imported = foreign.import(&place.options).unwrap();
        assert_same(&empty_texts, &imported.to_host().unwrap(), "empty texts");
        let again = imported.export_array(&event()).unwrap();
        // SAFETY: of our export.
        let again =
            unsafe { arrow_device::DeviceArray::import_as(again, foreign.field(), &place.options) };
        assert_same(
            &empty_texts,
            &again.unwrap().to_host().unwrap(),
            "empty texts again",
        );
        drop(imported);
        foreign.assert_released("empty texts");
        // All types without rows and without any buffer.
        for (name, data_type) in all_types() {
            let empty = array(&data_type, 0, Nulls::None, 1);
            let mut foreign = Foreign::new(&empty.to_data(), &place.device);
            let n = foreign.root().n_buffers as usize;
            // The list of the lengths of variadic buffers is there.
            let variadic = matches!(data_type, Utf8View | BinaryView);
            for i in 0..n - usize::from(variadic) {
                foreign.set_buffer(&[], i, ptr::null());
            }
            let context = format!("{name} without rows on {place}");
            let imported = foreign.import(&place.options).expect(&context);
            assert_same(&empty, &imported.to_host().expect(&context), &context);
            drop(imported);
            foreign.assert_released(&context);
        }
        // Null counts of null arrays.
        for null_count in [-1, 0, 3] {
            let nulls = array(&Null, 3, Nulls::None, 1);
            let mut foreign = Foreign::new(&nulls.to_data(), &place.device);
            foreign.root().null_count = null_count;
            let imported = foreign.import(&place.options).unwrap();
            assert_eq!(imported.null_count(), Some(3));
            assert_same(&nulls, &imported.to_host().unwrap(), "nulls");
        }
        // Nobody counted: without a mask there are none, with one it is unknown until asked for.
        let mut foreign = Foreign::new(&Int32Array::from(vec![1, 2]).to_data(), &place.device);
        foreign.root().null_count = -1;
        assert_eq!(
            foreign.import(&place.options).unwrap().null_count(),
            Some(0)
        );
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        foreign.root().null_count = -1;
        let imported = foreign.import(&place.options).unwrap();
        assert_eq!(imported.null_count(), None);
        assert_same(&ints(), &imported.to_host().unwrap(), "uncounted");
        assert_eq!(imported.resolve_null_counts().unwrap(), 1);
        assert_eq!(imported.null_count(), Some(1));
        drop(imported);
        place.assert_clean();
    }
}

fn event() -> arrow_device::ExportOptions {
    arrow_device::ExportOptions::new(arrow_device::SyncPolicy::Event)
}

/// Values at odd addresses: typed access refuses, the host gets an aligned copy, which is counted.
#[test]
fn misaligned_values() {
    for place in places() {
        let bytes: Vec<u8> = [0u8]
            .into_iter()
            .chain((1..=3i64).flat_map(i64::to_le_bytes))
            .collect();
        let shifted = arrow_array::UInt8Array::from(bytes);
        let shifted = place
            .device
            .upload_array(&shifted)
            .unwrap()
            .buffer(1)
            .unwrap();
        let expected: ArrayRef = Arc::new(arrow_array::Int64Array::from(vec![1, 2, 3]));
        let mut foreign = Foreign::new(&expected.to_data(), &place.device);
        foreign.set_buffer(&[], 1, shifted.address().offset(1).as_ptr());
        if place.sim.is_none() {
            // Counters of its own.
            foreign.device_array.device_type = 3;
            foreign.device_array.device_id = 4711;
        }
        let imported = foreign.import(&place.options).unwrap();
        let device = imported.device().clone();
        let error = imported
            .values_on::<i64>(&device.default_queue())
            .unwrap_err();
        assert!(
            error.to_string().contains("not aligned to 8 bytes"),
            "{error}"
        );
        let before = device.stats();
        assert_same(&expected, &imported.to_host().unwrap(), "misaligned");
        let delta = device.stats().since(&before);
        let copied = if place.sim.is_some() { 0 } else { 24 };
        assert_eq!(delta.host_copied_bytes, copied, "{place}");
        drop((imported, shifted));
        foreign.assert_released("misaligned");
        place.assert_clean();
    }
}

/// An import that reads its options' devices only.
#[test]
fn devices_are_those_of_the_options() {
    let Some(place) = simulated(SimMode::Async) else {
        return;
    };
    let mut foreign = Foreign::new(&ints().to_data(), &place.device);
    let elsewhere = ImportOptions::default().with_devices(Devices::new());
    let error = foreign.import(&elsewhere).unwrap_err().to_string();
    assert!(error.contains(&place.device.id().to_string()), "{error}");
    foreign.assert_released("unknown device");
    drop(foreign);
    place.assert_clean();
}
