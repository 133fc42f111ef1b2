//! Pointers, counts, lengths, shapes.

use super::*;
use crate::support::all_types;
use crate::support::types::{dictionary, fixed_list, list, run_ends, structure, union};
use crate::support_c::DICTIONARY;
use crate::support_c::sim::{cpu, places};
use arrow_array::Array;
use arrow_data::ArrayData;
use arrow_schema::UnionMode;
use std::ptr;

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
            "array.",
        ),
        (
            "items overflow",
            of(fixed_list(Int32, 3)),
            |f| {
                f.data_type = fixed_list(Int32, 1 << 30);
                f.root().offset = i64::MAX / 2;
            },
            "array.",
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

#[test]
fn structure_is_checked() {
    both_ways(structure_is_checked_cases);
}

fn structure_is_checked_cases() {
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
    both_ways(missing_release_callbacks_cases);
}

fn missing_release_callbacks_cases() {
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
            // SAFETY: the struct is live, and its callback has not been called yet.
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
    both_ways(every_type_has_its_counts_cases);
}

fn every_type_has_its_counts_cases() {
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
                "array.null_count: is 1, but there is no validity bitmap",
                &name,
            );
        }
        place.assert_clean();
    }
}

/// An array of one type under the schema of another.
#[test]
fn schema_and_array_differ() {
    both_ways(schema_and_array_differ_cases);
}

fn schema_and_array_differ_cases() {
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
    both_ways(nesting_is_bounded_cases);
}

fn nesting_is_bounded_cases() {
    let place = cpu();
    let nest = |depth: usize| {
        let mut data = Int32Array::from(vec![1]).to_data();
        for _ in 0..depth {
            let data_type = fixed_list(data.data_type().clone(), 1);
            let builder = ArrayData::builder(data_type).len(1).add_child_data(data);
            // SAFETY: there is one list of one item, which the child has.
            data = unsafe { builder.build_unchecked() };
        }
        data
    };
    // The deepest that is accepted.
    let mut foreign = Foreign::new(&nest(64), &place.device);
    drop(foreign.import(&place.options).unwrap());
    foreign.assert_released("64 levels");
    for depth in [65, 1000] {
        // arrow-rs, which writes the stream's schema here, needs a deep stack for the deep one.
        if depth > 65 && super::IN_STREAM.get() {
            continue;
        }
        let foreign = Foreign::new(&nest(depth), &place.device);
        refused(
            &place,
            foreign,
            "types nest deeper",
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
