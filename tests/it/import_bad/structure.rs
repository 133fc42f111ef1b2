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

/// An array by the name that the tables below give it.
fn base(name: &str) -> ArrayRef {
    use DataType::*;
    let data_type = match name {
        "ints" => return ints(),
        "pair" => return pair(),
        "views" => return array(&Utf8View, 40, Nulls::None, 1),
        "deep" => structure(vec![("s", structure(vec![("i", Int32)]))]),
        "texts" => Utf8,
        "dictionary" => dictionary(Int8, Utf8),
        "dictionaries" => list(dictionary(Int8, Utf8)),
        "triples" => fixed_list(Int16, 3),
        "sparse" => union(UnionMode::Sparse, vec![Int32, Utf8]),
        "dense" => union(UnionMode::Dense, vec![Int32, Utf8]),
        "runs" => run_ends(Int32, Utf8),
        _ => unreachable!("{name}"),
    };
    of(data_type)
}

/// A place as errors name it.
fn place_of(path: &[usize]) -> String {
    let step = |i: &usize| match *i {
        DICTIONARY => ".dictionary".into(),
        i => format!(".children[{i}]"),
    };
    format!("array{}", path.iter().map(step).collect::<String>())
}

/// Numbers of a node: where, the member, its value, and what the error says beside that.
const NUMBERS: [(&str, &[usize], &str, i64, &str); 27] = [
    ("ints", &[], "length", -1, ""),
    ("ints", &[], "length", i64::MIN, ""),
    ("ints", &[], "offset", -1, ""),
    ("pair", &[0], "offset", -2, ""),
    ("ints", &[], "null_count", -2, ""),
    ("ints", &[], "null_count", i64::MIN, ""),
    ("ints", &[], "null_count", 5, " for 4 rows"),
    ("pair", &[1], "null_count", 77, ""),
    ("ints", &[], "n_buffers", -1, ""),
    ("ints", &[], "n_buffers", i64::MAX, ""),
    ("views", &[], "n_buffers", i64::MAX, ""),
    ("views", &[], "n_buffers", i64::MIN, ""),
    ("pair", &[], "n_children", -1, ""),
    ("pair", &[], "n_children", i64::MAX, ""),
    ("ints", &[], "n_children", 1, ""),
    // Children shorter than their parent needs (3.3.9).
    ("pair", &[1], "length", 3, ", but its parent needs 4 rows"),
    ("triples", &[0], "length", 11, ", but its parent needs 12"),
    ("sparse", &[1], "length", 3, ""),
    ("runs", &[0], "length", 0, ""),
    ("runs", &[1], "length", 0, ""),
    // Nulls where none can be.
    ("sparse", &[], "null_count", 1, ""),
    ("dense", &[], "null_count", 1, ""),
    ("runs", &[], "null_count", 1, ""),
    // Overflows, which errors name where they happen.
    ("ints", &[], "offset", i64::MAX, "offset: "),
    ("ints", &[], "length", i64::MAX, "array."),
    ("ints", &[], "length", i64::MAX / 2, "array."),
    ("texts", &[], "length", i64::MAX, "array."),
];

/// Null pointers (3.3.9), and what is released: where, and which member, buffer or child.
const MISSING: [(&str, &[usize], &str); 15] = [
    ("pair", &[1], "released"),
    ("deep", &[0, 0], "released"),
    ("dictionary", &[DICTIONARY], "released"),
    ("dictionaries", &[0, DICTIONARY], "released"),
    ("ints", &[], "buffers"),
    ("pair", &[1], "buffers"),
    ("pair", &[], "children"),
    ("dictionary", &[], "dictionary"),
    ("dictionaries", &[0], "dictionary"),
    ("pair", &[], "children[1]"),
    ("ints", &[], "buffers[1]"),
    ("texts", &[], "buffers[1]"),
    ("views", &[], "buffers[1]"),
    ("sparse", &[], "buffers[0]"),
    ("pair", &[0], "buffers[1]"),
];

type Spoil = fn(&mut Foreign);

/// Whatever else is wrong.
const OTHERS: [(&str, Spoil, &str); 7] = [
    ("ints", |f| f.release(&[]), "was already released"),
    (
        "pair",
        |f| f.root().dictionary = f.at(&[0]),
        "array.dictionary: is there",
    ),
    (
        "views",
        |f| {
            let last = f.root().n_buffers as usize - 1;
            f.set_buffer(&[], last, ptr::null());
        },
        "the lengths of the variadic buffers are missing",
    ),
    (
        "pair",
        |f| f.root().offset = 1,
        "array.children[0].length: is 4, but its parent needs 5 rows",
    ),
    (
        "triples",
        |f| f.root().offset = 1,
        "array.children[0].length: is 12, but its parent needs 15",
    ),
    (
        "triples",
        |f| {
            f.data_type = fixed_list(DataType::Int32, 1 << 30);
            f.root().offset = i64::MAX / 2;
        },
        "array.",
    ),
    (
        "runs",
        |f| {
            let ends = f.buffer(&[0], 1);
            f.set_buffer(&[0], 0, ends);
            f.at(&[0]).null_count = 1;
        },
        "array.children[0].null_count: run ends cannot be null",
    ),
];

#[test]
fn structure_is_checked() {
    both_ways(|| {
        for place in places() {
            for (name, path, member, value, text) in NUMBERS {
                let mut foreign = Foreign::new(&base(name).to_data(), &place.device);
                let node = foreign.at(path);
                *match member {
                    "length" => &mut node.length,
                    "offset" => &mut node.offset,
                    "null_count" => &mut node.null_count,
                    "n_buffers" => &mut node.n_buffers,
                    _ => &mut node.n_children,
                } = value;
                let path = place_of(path);
                let expected = match text.is_empty() || text.starts_with([' ', ',']) {
                    true => format!("{path}.{member}: is {value}{text}"),
                    false => text.into(),
                };
                refused(&place, foreign, &expected);
            }
            for (name, path, what) in MISSING {
                let mut foreign = Foreign::new(&base(name).to_data(), &place.device);
                match what {
                    "released" => foreign.release(path),
                    "buffers" => foreign.at(path).buffers = ptr::null_mut(),
                    "children" => foreign.at(path).children = ptr::null_mut(),
                    "dictionary" => foreign.at(path).dictionary = ptr::null_mut(),
                    "children[1]" => foreign.set_child(path, 1, ptr::null_mut()),
                    "buffers[0]" => foreign.set_buffer(path, 0, ptr::null()),
                    _ => foreign.set_buffer(path, 1, ptr::null()),
                }
                let path = place_of(path);
                let expected = match what {
                    "released" => format!("{path}: is released"),
                    _ => format!("{path}.{what}: is null"),
                };
                refused(&place, foreign, &expected);
            }
            for (name, spoil, expected) in OTHERS {
                let mut foreign = Foreign::new(&base(name).to_data(), &place.device);
                spoil(&mut foreign);
                refused(&place, foreign, expected);
            }
            place.assert_clean();
        }
    });
}

/// A callback that is not there means released, whatever the other members say.
#[test]
fn missing_release_callbacks() {
    both_ways(|| {
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
    });
}

/// Every type refuses one buffer or child more or less, and nulls without a mask.
#[test]
fn every_type_has_its_counts() {
    both_ways(|| {
        for place in places() {
            for (_, data_type) in all_types() {
                let data = array(&data_type, 5, Nulls::None, 1).to_data();
                let n_buffers = Foreign::new(&data, &place.device).root().n_buffers;
                let n_children = Foreign::new(&data, &place.device).root().n_children;
                let variadic = matches!(data_type, DataType::Utf8View | DataType::BinaryView);
                let counts = match data_type {
                    _ if variadic => vec![0, 2],
                    // One whose pointer is null is legal.
                    DataType::Null => vec![-1, 2],
                    _ => vec![n_buffers - 1, n_buffers + 1],
                };
                let children = [n_children - 1, n_children + 1];
                let counts = counts.into_iter().map(|n| ("n_buffers", n));
                for (member, n) in counts.chain(children.map(|n| ("n_children", n))) {
                    let mut foreign = Foreign::new(&data, &place.device);
                    match member {
                        "n_buffers" => foreign.root().n_buffers = n,
                        _ => foreign.root().n_children = n,
                    }
                    let expected = format!("array.{member}: is {n}");
                    refused(&place, foreign, &expected);
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
                );
            }
            place.assert_clean();
        }
    });
}

/// An array of one type under the schema of another.
#[test]
fn schema_and_array_differ() {
    both_ways(|| {
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
            refused(&place, foreign, expected);
        }
    });
}

/// Types and arrays that nest a thousand levels deep.
#[test]
fn nesting_is_bounded() {
    both_ways(|| {
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
            refused(&place, foreign, "types nest deeper");
        }
        // The array goes deeper than its type.
        let mut foreign = Foreign::new(&nest(1000), &place.device);
        foreign.data_type = fixed_list(DataType::Int32, 1);
        refused(&place, foreign, "array.children[0].n_buffers");
        // A child that is its own parent is as deep as its type.
        let mut foreign = Foreign::new(&nest(3), &place.device);
        let loop_to = ptr::from_mut(foreign.at(&[0]));
        foreign.set_child(&[0], 0, loop_to);
        refused(
            &place,
            foreign,
            "array.children[0].children[0].children[0].n_buffers",
        );
    });
}
