//! Every Arrow type, and nested combinations that have caught implementations out.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_schema::{
    DataType, Field, FieldRef, Fields, IntervalUnit, TimeUnit, UnionFields, UnionMode,
};

const UNITS: [TimeUnit; 4] = [
    TimeUnit::Second,
    TimeUnit::Millisecond,
    TimeUnit::Microsecond,
    TimeUnit::Nanosecond,
];

pub(crate) fn field(name: &str, data_type: DataType) -> FieldRef {
    Arc::new(Field::new(name, data_type, true))
}

pub(crate) fn required(name: &str, data_type: DataType) -> FieldRef {
    Arc::new(Field::new(name, data_type, false))
}

pub(crate) fn list(item: DataType) -> DataType {
    DataType::List(field("item", item))
}

pub(crate) fn fixed_list(item: DataType, size: i32) -> DataType {
    DataType::FixedSizeList(field("item", item), size)
}

pub(crate) fn structure(fields: Vec<(&str, DataType)>) -> DataType {
    DataType::Struct(fields.into_iter().map(|(name, t)| field(name, t)).collect())
}

pub(crate) fn map(key: DataType, value: DataType, sorted: bool) -> DataType {
    let entries = DataType::Struct(Fields::from(vec![
        required("keys", key),
        field("values", value),
    ]));
    DataType::Map(required("entries", entries), sorted)
}

/// Type ids are neither contiguous nor in order.
pub(crate) fn union(mode: UnionMode, types: Vec<DataType>) -> DataType {
    let fields = types.into_iter().enumerate().map(|(i, t)| {
        let id = [5, 0, 42, 7, 127, 1][i];
        (id, field(&format!("u{id}"), t))
    });
    DataType::Union(fields.collect::<UnionFields>(), mode)
}

pub(crate) fn dictionary(key: DataType, value: DataType) -> DataType {
    DataType::Dictionary(Box::new(key), Box::new(value))
}

pub(crate) fn run_ends(run_end: DataType, value: DataType) -> DataType {
    DataType::RunEndEncoded(required("run_ends", run_end), field("values", value))
}

/// The types without children.
pub(crate) fn flat_types() -> Vec<(String, DataType)> {
    use DataType::*;
    let mut types = vec![
        Null,
        Boolean,
        Int8,
        Int16,
        Int32,
        Int64,
        UInt8,
        UInt16,
        UInt32,
        UInt64,
        Float16,
        Float32,
        Float64,
        Decimal32(9, 2),
        Decimal64(18, -3),
        Decimal128(38, 10),
        Decimal256(76, 20),
        Date32,
        Date64,
        Time32(TimeUnit::Second),
        Time32(TimeUnit::Millisecond),
        Time64(TimeUnit::Microsecond),
        Time64(TimeUnit::Nanosecond),
    ];
    for unit in UNITS {
        types.extend([
            Timestamp(unit, None),
            Timestamp(unit, Some("UTC".into())),
            Timestamp(unit, Some("+05:30".into())),
            Duration(unit),
        ]);
    }
    types.extend(
        [
            IntervalUnit::YearMonth,
            IntervalUnit::DayTime,
            IntervalUnit::MonthDayNano,
        ]
        .map(Interval),
    );
    types.extend([0, 1, 3, 16].map(FixedSizeBinary));
    types.extend([Binary, LargeBinary, Utf8, LargeUtf8, BinaryView, Utf8View]);
    types.into_iter().map(|t| (t.to_string(), t)).collect()
}

/// Every Arrow type, with a name for messages.
pub(crate) fn all_types() -> Vec<(String, DataType)> {
    use DataType::*;
    let mut all = flat_types();
    let mut add = |name: &str, data_type| all.push((name.to_owned(), data_type));

    add("list<i32>", list(Int32));
    add("list<utf8 required>", List(required("element", Utf8)));
    add("large_list<utf8>", LargeList(field("item", Utf8)));
    add("list_view<i32>", ListView(field("item", Int32)));
    add("large_list_view<i64>", LargeListView(field("item", Int64)));
    add("fixed_list<i16, 3>", fixed_list(Int16, 3));
    add("fixed_list<i16, 0>", fixed_list(Int16, 0));
    add(
        "fixed_list<i16 required, 1>",
        FixedSizeList(required("item", Int16), 1),
    );
    add("struct<>", Struct(Fields::empty()));
    add(
        "struct<i32, utf8, bool>",
        structure(vec![("a", Int32), ("b", Utf8), ("c", Boolean)]),
    );
    add("struct with field metadata", described());
    add("map<utf8, i32>", map(Utf8, Int32, false));
    add("map<utf8, i32> sorted", map(Utf8, Int32, true));
    add("map<i32, utf8> sorted", map(Int32, Utf8, true));
    for (name, mode) in [("sparse", UnionMode::Sparse), ("dense", UnionMode::Dense)] {
        add(
            &format!("{name} union<i32, utf8, bool>"),
            union(mode, vec![Int32, Utf8, Boolean]),
        );
        add(
            &format!("{name} union<null, f64>"),
            union(mode, vec![Null, Float64]),
        );
    }
    for key in [Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64] {
        add(&format!("dictionary<{key}, utf8>"), dictionary(key, Utf8));
    }
    add("dictionary<i16, i64>", dictionary(Int16, Int64));
    add(
        "dictionary<u32, large_binary>",
        dictionary(UInt32, LargeBinary),
    );
    for run_end in [Int16, Int32, Int64] {
        add(
            &format!("ree<{run_end}, utf8>"),
            run_ends(run_end.clone(), Utf8),
        );
        add(&format!("ree<{run_end}, i32>"), run_ends(run_end, Int32));
    }
    add_nested(&mut add);
    all
}

fn add_nested(add: &mut impl FnMut(&str, DataType)) {
    use DataType::*;
    let pair = || structure(vec![("x", Int64), ("y", Utf8)]);
    add("list<list<struct<i64, utf8>>>", list(list(pair())));
    add("large_list<large_list<list<bool>>>", {
        LargeList(field("item", LargeList(field("item", list(Boolean)))))
    });
    add(
        "struct<list<utf8>>",
        structure(vec![("l", list(Utf8)), ("n", Null)]),
    );
    add("struct<struct<struct<i32, utf8>, bool>>", {
        let inner = structure(vec![("i", Int32), ("s", Utf8)]);
        structure(vec![("o", structure(vec![("m", inner), ("b", Boolean)]))])
    });
    add("struct<required<struct<utf8>>>", {
        Struct(Fields::from(vec![
            required("r", structure(vec![("s", Utf8)])),
            required("i", Int32),
        ]))
    });
    add("list<dictionary<i8, utf8>>", list(dictionary(Int8, Utf8)));
    add("map<utf8, list<i32>>", map(Utf8, list(Int32), false));
    add(
        "map<i32, map<utf8, struct>>",
        map(Int32, map(Utf8, pair(), false), false),
    );
    add(
        "fixed_list<fixed_list<bool>>",
        fixed_list(fixed_list(Boolean, 5), 2),
    );
    add(
        "fixed_list<list<fixed_list<utf8>>>",
        fixed_list(list(fixed_list(Utf8, 2)), 2),
    );
    add(
        "fixed_list<struct<utf8>>",
        fixed_list(structure(vec![("s", Utf8)]), 2),
    );
    for (name, mode) in [("sparse", UnionMode::Sparse), ("dense", UnionMode::Dense)] {
        add(
            &format!("{name} union<struct, list>"),
            union(mode, vec![pair(), list(Int32)]),
        );
        let inner = union(UnionMode::Dense, vec![Utf8, Int8]);
        add(
            &format!("{name} union<dense union, utf8_view>"),
            union(mode, vec![inner, Utf8View]),
        );
    }
    add(
        "list<sparse union<i32, utf8>>",
        list(union(UnionMode::Sparse, vec![Int32, Utf8])),
    );
    add("list<ree<i32, utf8>>", list(run_ends(Int32, Utf8)));
    add("ree<i32, struct>", run_ends(Int32, pair()));
    add(
        "ree<i16, dictionary<i8, utf8>>",
        run_ends(Int16, dictionary(Int8, Utf8)),
    );
    add("dictionary<i32, struct>", dictionary(Int32, pair()));
    add("dictionary<u8, list<utf8>>", dictionary(UInt8, list(Utf8)));
    add("dictionary<i32, utf8_view>", dictionary(Int32, Utf8View));
    add("list<utf8_view>", list(Utf8View));
    add(
        "struct<binary_view, fixed_binary>",
        structure(vec![("v", BinaryView), ("f", FixedSizeBinary(3))]),
    );
    add("list_view<utf8>", ListView(field("item", Utf8)));
    add(
        "list_view<list_view<i32>>",
        ListView(field("item", ListView(field("item", Int32)))),
    );
    add(
        "large_list_view<struct>",
        LargeListView(field("item", pair())),
    );
}

/// Metadata on fields that are not at the top.
fn described() -> DataType {
    let note = |text: &str| HashMap::from([("note".to_owned(), text.to_owned())]);
    let item = Field::new("item", DataType::Int32, true).with_metadata(note("inner"));
    let id = Field::new("id", DataType::FixedSizeBinary(16), true).with_metadata(HashMap::from([
        ("ARROW:extension:name".to_owned(), "arrow.uuid".to_owned()),
        ("empty".to_owned(), String::new()),
    ]));
    let values =
        Field::new("values ü", DataType::List(Arc::new(item)), true).with_metadata(note("ütf"));
    DataType::Struct(Fields::from(vec![id, values]))
}
