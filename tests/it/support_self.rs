//! What the other tests rely on: arrays of every type of Arrow, and a comparison that sees every difference.

use std::collections::BTreeSet;

use crate::support::*;
use arrow_array::Array;

const TYPES: &str = "Null Boolean Int8 Int16 Int32 Int64 UInt8 UInt16 UInt32 UInt64 Float16 Float32 Float64 \
    Timestamp Date32 Date64 Time32 Time64 Duration Interval Binary FixedSizeBinary LargeBinary BinaryView Utf8 \
    LargeUtf8 Utf8View List ListView FixedSizeList LargeList LargeListView Struct Union Dictionary Decimal32 \
    Decimal64 Decimal128 Decimal256 Map RunEndEncoded";

#[test]
fn every_type_of_arrow_is_there_and_valid() {
    let kind = |data_type| {
        let text = format!("{data_type:?}");
        let end = text.find(|c: char| !c.is_alphanumeric());
        text[..end.unwrap_or(text.len())].to_owned()
    };
    let kinds: BTreeSet<String> = all_types().into_iter().map(|(_, t)| kind(t)).collect();
    assert_eq!(kinds, TYPES.split_whitespace().map(String::from).collect());
    for (name, data_type) in all_types() {
        for (case, array) in cases(&data_type, 7) {
            let valid = array.to_data().validate_full();
            valid.unwrap_or_else(|e| panic!("{name}, {case}: {e}"));
            assert_eq!(array.data_type(), &data_type);
        }
    }
}

#[test]
fn differences_are_seen_and_other_memory_is_not() {
    for (name, data_type) in all_types() {
        let rows = array(&data_type, 30, Nulls::Some, 8);
        for made in variants(&rows, 5) {
            let context = format!("{name}, {:?}", made.variant);
            assert_same(&made.rows, &made.array(), &context);
            made.data().validate_full().expect(&context);
        }
        for row in [0, 7, 29] {
            for (what, other) in differences(&rows, row) {
                assert!(same(&rows, &other).is_err(), "{name}, row {row}: {what}");
            }
        }
    }
}
