use std::sync::Arc;

use arrow_array::builder::{
    FixedSizeBinaryBuilder, ListViewBuilder, MapBuilder, StringBuilder, StringViewBuilder,
};
use arrow_array::types::{Int16Type, Int32Type, UInt8Type};
use arrow_array::*;
use arrow_buffer::{Buffer, i256};
use arrow_data::ArrayDataBuilder;
use arrow_schema::{FieldRef, Fields, UnionFields, UnionMode};

use super::*;
use crate::device::now;
use crate::error::Error;

/// Any array, however wrong.
fn raw(builder: ArrayDataBuilder) -> ArrayData {
    // SAFETY: not sound; the tests do nothing with the result but validate it.
    unsafe { builder.build_unchecked() }
}

fn data(data_type: &DataType, len: usize, buffers: Vec<Buffer>) -> ArrayData {
    parts(data_type, len, 0, buffers, vec![])
}

fn parts(
    data_type: &DataType,
    len: usize,
    offset: usize,
    buffers: Vec<Buffer>,
    children: Vec<ArrayData>,
) -> ArrayData {
    let builder = ArrayDataBuilder::new(data_type.clone())
        .len(len)
        .offset(offset);
    raw(builder.buffers(buffers).child_data(children))
}

fn masked(data: ArrayData, mask: Vec<bool>) -> ArrayData {
    raw(data.into_builder().nulls(Some(mask.into())))
}

fn ints(values: &[i32]) -> ArrayData {
    Int32Array::from(values.to_vec()).to_data()
}

fn offsets(values: &[i32]) -> Buffer {
    Buffer::from_slice_ref(values)
}

fn field(name: &str, data_type: DataType, nullable: bool) -> FieldRef {
    Arc::new(Field::new(name, data_type, nullable))
}

#[track_caller]
fn good(data: &ArrayData) {
    check(data).unwrap();
}

/// Refused at `path`, at the root and below a struct, a list and a dictionary.
#[track_caller]
fn bad(data: &ArrayData, path: &str) {
    let at = |data: &ArrayData, root: &str| match check(data) {
        Err(Error::InvalidInput { path: found, .. }) => assert_eq!(found, format!("{root}{path}")),
        other => panic!("{root}{path}: {other:?}"),
    };
    at(data, "array");
    let inner = field("x", data.data_type().clone(), true);
    let first = field("first", DataType::Null, true);
    let n = data.len();
    // Rows that do not overflow already in the parent.
    let rows = if data.offset().checked_add(n).is_some() {
        n
    } else {
        0
    };
    let structs = DataType::Struct(vec![first, inner.clone()].into());
    let nulls = NullArray::new(rows).to_data();
    let parent = parts(&structs, rows, 0, vec![], vec![nulls, data.clone()]);
    at(&parent, "array.children[1]");
    let lists = DataType::List(inner);
    let list = parts(
        &lists,
        1,
        0,
        vec![offsets(&[0, 0])],
        vec![parent.child_data()[1].clone()],
    );
    at(&list, "array.children[0]");
    let words = DataType::Dictionary(Box::new(DataType::Int8), Box::new(data.data_type().clone()));
    let dictionary = parts(&words, 0, 0, vec![Buffer::default()], vec![data.clone()]);
    at(&dictionary, "array.dictionary");
}

fn union_fields() -> UnionFields {
    let fields = [
        Field::new("a", DataType::Int32, true),
        Field::new("b", DataType::Int32, true),
    ];
    UnionFields::try_new([3, 7], fields).unwrap()
}

fn union(mode: UnionMode, ids: &[i8], at: &[i32], children: [usize; 2]) -> ArrayData {
    let mut buffers = vec![Buffer::from_slice_ref(ids)];
    if mode == UnionMode::Dense {
        buffers.push(offsets(at));
    }
    let children = children.map(|n| ints(&vec![0; n])).to_vec();
    parts(
        &DataType::Union(union_fields(), mode),
        ids.len(),
        0,
        buffers,
        children,
    )
}

fn runs(len: usize, offset: usize, ends: &[i32]) -> ArrayData {
    let ends_field = field("run_ends", DataType::Int32, false);
    let data_type = DataType::RunEndEncoded(ends_field, field("values", DataType::Int32, true));
    parts(
        &data_type,
        len,
        offset,
        vec![],
        vec![ints(ends), ints(ends)],
    )
}

fn list_view(at: &[i32], sizes: &[i32], rows: usize) -> ArrayData {
    let data_type = DataType::ListView(field("item", DataType::Int32, true));
    let buffers = vec![offsets(at), offsets(sizes)];
    parts(&data_type, at.len(), 0, buffers, vec![ints(&vec![0; rows])])
}

fn large_list_view(at: i64, size: i64, rows: usize) -> ArrayData {
    let data_type = DataType::LargeListView(field("item", DataType::Int32, true));
    let buffers = vec![Buffer::from_slice_ref([at]), Buffer::from_slice_ref([size])];
    parts(&data_type, 1, 0, buffers, vec![ints(&vec![0; rows])])
}

fn list(at: &[i32], rows: usize) -> ArrayData {
    let data_type = DataType::List(field("item", DataType::Int32, true));
    parts(
        &data_type,
        at.len() - 1,
        0,
        vec![offsets(at)],
        vec![ints(&vec![0; rows])],
    )
}

fn map(nullable_keys: bool, keys: ArrayData) -> ArrayData {
    let fields: Fields = vec![
        field("keys", DataType::Int32, nullable_keys),
        field("values", DataType::Int32, true),
    ]
    .into();
    let entries = DataType::Struct(fields);
    let n = keys.len();
    let entry_data = parts(&entries, n, 0, vec![], vec![keys, ints(&vec![0; n])]);
    let data_type = DataType::Map(field("entries", entries, false), false);
    parts(
        &data_type,
        1,
        0,
        vec![offsets(&[0, n as i32])],
        vec![entry_data],
    )
}

fn keys(values: &[u8], words: usize) -> ArrayData {
    let data_type = DataType::Dictionary(Box::new(DataType::UInt8), Box::new(DataType::Int32));
    let buffers = vec![Buffer::from_slice_ref(values)];
    parts(
        &data_type,
        values.len(),
        0,
        buffers,
        vec![ints(&vec![0; words])],
    )
}

fn fixed_list(size: i32, len: usize, offset: usize, child: ArrayData, nullable: bool) -> ArrayData {
    let item = field("item", child.data_type().clone(), nullable);
    parts(
        &DataType::FixedSizeList(item, size),
        len,
        offset,
        vec![],
        vec![child],
    )
}

fn structs(len: usize, offset: usize, child: ArrayData, nullable: bool) -> ArrayData {
    let fields = vec![field("x", child.data_type().clone(), nullable)].into();
    parts(&DataType::Struct(fields), len, offset, vec![], vec![child])
}

/// `(length, prefix, buffer, offset)`.
fn view(length: u32, prefix: &[u8; 4], buffer: u32, offset: u32) -> u128 {
    let prefix = u32::from_le_bytes(*prefix);
    u128::from(length)
        | u128::from(prefix) << 32
        | u128::from(buffer) << 64
        | u128::from(offset) << 96
}

fn views(data_type: &DataType, view: u128, bytes: &[u8]) -> ArrayData {
    let buffers = vec![Buffer::from_slice_ref([view]), Buffer::from(bytes)];
    data(data_type, 1, buffers)
}

/// One array of each kind, with nulls where the type has them.
fn all_kinds() -> Vec<ArrayData> {
    let words = [
        Some("a"),
        None,
        Some("a string of more than twelve bytes"),
        Some("é"),
    ];
    let bytes = words.map(|w| w.map(str::as_bytes));
    let bits = vec![Some(true), None, Some(false), Some(true)];
    let numbers = vec![Some(1), None, Some(3), Some(4)];
    let wide = vec![Some(1), None, Some(3), Some(4)];
    let lists = vec![
        Some(vec![Some(1), None]),
        None,
        Some(vec![]),
        Some(vec![Some(4)]),
    ];
    let mut fixed = FixedSizeBinaryBuilder::new(3);
    fixed.append_value(b"abc").unwrap();
    fixed.append_null();
    let mut view_list = ListViewBuilder::new(StringViewBuilder::new());
    view_list.append_value([Some("a string of more than twelve bytes"), None]);
    view_list.append_null();
    let mut map = MapBuilder::new(None, StringBuilder::new(), StringBuilder::new());
    map.keys().append_value("k");
    map.values().append_null();
    map.append(true).unwrap();
    map.append(false).unwrap();
    let dictionary: DictionaryArray<UInt8Type> = words.into_iter().collect();
    let run: RunArray<Int16Type> = ["a", "a", "b", "c"].into_iter().collect();
    let arrays: Vec<ArrayRef> = vec![
        Arc::new(NullArray::new(4)),
        Arc::new(BooleanArray::from(bits)),
        Arc::new(Int8Array::from(vec![Some(1), None, Some(3)])),
        Arc::new(UInt16Array::from(vec![1, 2, 3])),
        Arc::new(Int32Array::from(numbers.clone())),
        Arc::new(Float64Array::from(vec![Some(1.5), None, Some(2.5)])),
        Arc::new(Decimal32Array::from(numbers.clone())),
        Arc::new(Decimal128Array::from(vec![Some(1), None])),
        Arc::new(Decimal256Array::from(vec![Some(i256::ONE), None])),
        Arc::new(Date64Array::from(wide.clone())),
        Arc::new(TimestampNanosecondArray::from(wide).with_timezone("UTC")),
        Arc::new(IntervalMonthDayNanoArray::new_null(3)),
        Arc::new(fixed.finish()),
        Arc::new(StringArray::from_iter(words)),
        Arc::new(LargeStringArray::from_iter(words)),
        Arc::new(BinaryArray::from_iter(bytes)),
        Arc::new(LargeBinaryArray::from_iter(bytes)),
        Arc::new(StringViewArray::from_iter(words)),
        Arc::new(BinaryViewArray::from_iter(bytes)),
        Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(
            lists.clone(),
        )),
        Arc::new(LargeListArray::from_iter_primitive::<Int32Type, _, _>(
            lists,
        )),
        Arc::new(FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(
            [Some(vec![Some(1), None]), None, Some(vec![None, Some(2)])],
            2,
        )),
        Arc::new(view_list.finish()),
        Arc::new(map.finish()),
        Arc::new(dictionary),
        Arc::new(run),
        Arc::new(StructArray::from(vec![(
            field("x", DataType::Int32, true),
            Arc::new(Int32Array::from(numbers)) as ArrayRef,
        )])),
    ];
    arrays.iter().map(|array| array.to_data()).collect()
}

#[test]
fn all_kinds_pass_whole_sliced_empty_and_nested() {
    for data in all_kinds() {
        for (skip, len) in [
            (0, data.len()),
            (1, data.len() - 1),
            (1, 1),
            (data.len(), 0),
            (0, 0),
        ] {
            // Through the array: it slices structs as their validity is sliced.
            let sliced = make_array(data.clone()).slice(skip, len).to_data();
            good(&sliced);
            sliced.validate_full().unwrap();
            if len > 0 {
                good(&structs(len, 0, sliced.clone(), true));
                good(&fixed_list(1, len, 0, sliced, true));
            }
        }
        good(&ArrayData::new_empty(data.data_type()));
        good(&ArrayData::new_null(data.data_type(), 3));
    }
    let ids = [3, 7, 3];
    good(&union(UnionMode::Sparse, &ids, &[], [3, 3]));
    good(&union(UnionMode::Dense, &ids, &[1, 0, 0], [2, 1]));
    good(&runs(4, 0, &[1, 4]));
    good(&runs(0, 0, &[]));
    good(&list_view(&[2, 0], &[1, 3], 3));
    good(&large_list_view(1, 2, 3));
}

#[test]
fn nulls_where_none_may_be() {
    let nulls = || masked(ints(&[1, 2, 3, 4]), vec![true, false, true, true]);
    good(&structs(4, 0, nulls(), true));
    bad(&structs(4, 0, nulls(), false), ".children[0]");
    // Outside of the rows, or under a null of the struct.
    good(&structs(2, 2, nulls(), false));
    good(&masked(
        structs(4, 0, nulls(), false),
        vec![true, false, true, true],
    ));
    bad(
        &masked(structs(4, 0, nulls(), false), vec![false, true, true, true]),
        ".children[0]",
    );
    good(&masked(structs(2, 1, nulls(), false), vec![false, true]));
    bad(
        &masked(structs(2, 1, nulls(), false), vec![true, false]),
        ".children[0]",
    );

    bad(&fixed_list(2, 2, 0, nulls(), false), ".children[0]");
    good(&fixed_list(2, 1, 1, nulls(), false));
    good(&masked(
        fixed_list(2, 2, 0, nulls(), false),
        vec![false, true],
    ));
    bad(
        &masked(fixed_list(2, 2, 0, nulls(), false), vec![true, false]),
        ".children[0]",
    );

    for nullable in [true, false] {
        let item = field("item", DataType::Int32, nullable);
        let lists = [
            (DataType::List(item.clone()), vec![offsets(&[0, 4])]),
            (DataType::ListView(item), vec![offsets(&[0]), offsets(&[4])]),
        ];
        for (data_type, buffers) in lists {
            let list = parts(&data_type, 1, 0, buffers, vec![nulls()]);
            if nullable {
                good(&list)
            } else {
                bad(&list, ".children[0]")
            }
        }
        good(&map(nullable, ints(&[1, 2])));
    }
    bad(&map(true, nulls()), ".children[0]");
    bad(&map(false, nulls()), ".children[0].children[0]");
    let entries = map(true, ints(&[1, 2]));
    let masked_entries = masked(entries.child_data()[0].clone(), vec![true, false]);
    let map = raw(entries.into_builder().child_data(vec![masked_entries]));
    bad(&map, ".children[0]");
}

#[test]
fn offset_rules() {
    good(&list(&[0, 2, 2, 3], 3));
    good(&list(&[1, 2], 3));
    // arrow-rs's check of values skips the first offset.
    good(&list(&[3], 3));
    bad(&list(&[4], 3), "");
    bad(&list(&[-1], 3), "");
    bad(
        &data(
            &DataType::LargeUtf8,
            0,
            vec![Buffer::from_slice_ref([1_i64]), Buffer::default()],
        ),
        "",
    );
    for wrong in [
        [-1, 2, 3],
        [0, -1, 3],
        [0, 2, 1],
        [2, 1, 3],
        [0, 4, 3],
        [0, 2, 4],
        [4, 4, 4],
    ] {
        bad(&list(&wrong, 3), "");
        let bytes = vec![offsets(&wrong), Buffer::from(b"abc")];
        bad(&data(&DataType::Binary, 2, bytes.clone()), "");
        bad(&data(&DataType::Utf8, 2, bytes.clone()), "");
        let nulls = vec![false; 2];
        bad(&masked(data(&DataType::Utf8, 2, bytes), nulls), "");
        let wide: Vec<i64> = wrong.iter().map(|&o| o.into()).collect();
        let bytes = vec![Buffer::from_slice_ref(&wide), Buffer::from(b"abc")];
        bad(&data(&DataType::LargeBinary, 2, bytes.clone()), "");
        bad(&data(&DataType::LargeUtf8, 2, bytes), "");
        let large = DataType::LargeList(field("item", DataType::Int32, true));
        let buffers = vec![Buffer::from_slice_ref(&wide)];
        bad(&parts(&large, 2, 0, buffers, vec![ints(&[0; 3])]), "");
        let map = map(false, ints(&[1, 2, 3]));
        let buffers = vec![offsets(&wrong)];
        bad(
            &parts(map.data_type(), 2, 0, buffers, map.child_data().to_vec()),
            "",
        );
    }
}

#[test]
fn list_views() {
    let wrong = [
        (-1, 1),
        (0, -1),
        (0, 4),
        (3, 1),
        (4, 0),
        (i32::MAX, i32::MAX),
    ];
    for (at, size) in wrong {
        bad(&list_view(&[0, at], &[3, size], 3), "");
        bad(
            &masked(list_view(&[0, at], &[3, size], 3), vec![true, false]),
            "",
        );
        bad(&large_list_view(at.into(), size.into(), 3), "");
    }
    // arrow-rs 59 panics when these are added.
    bad(&large_list_view(i64::MAX, i64::MAX, 3), "");
    good(&list_view(&[3], &[0], 3));
}

#[test]
fn strings() {
    let text = |data_type, at: &[i32], bytes: &[u8]| {
        data(
            data_type,
            at.len() - 1,
            vec![offsets(at), Buffer::from(bytes)],
        )
    };
    good(&text(&DataType::Utf8, &[0, 2, 3], "éa".as_bytes()));
    bad(&text(&DataType::Utf8, &[0, 1, 3], "éa".as_bytes()), "");
    bad(&text(&DataType::Utf8, &[1, 3], "éa".as_bytes()), "");
    good(&text(&DataType::Binary, &[0, 1, 3], "éa".as_bytes()));
    // Under a null, too, and then the error says the way out.
    for mask in [vec![true, false], vec![true, true]] {
        let has_null = mask.contains(&false);
        let array = masked(text(&DataType::Utf8, &[0, 1, 2], b"a\xFF"), mask);
        let refused = check(&array).unwrap_err().to_string();
        assert_eq!(
            refused.contains("import the column as binary"),
            has_null,
            "{refused}"
        );
    }
    // On the CPU an import uses a copy without them, and refuses what a row has.
    let validate = |array: &DeviceArray| now(validate(array, false));
    let texts = |valid| {
        masked(
            text(&DataType::Utf8, &[0, 1, 2], b"a\xFF"),
            vec![true, valid],
        )
    };
    let mended = validate(&DeviceArray::from_host(texts(false)).unwrap());
    let bytes = unwrap(&mended.unwrap().unwrap()).unwrap().buffers()[1].to_vec();
    assert_eq!(bytes, b"a\0");
    validate(&DeviceArray::from_host(texts(true)).unwrap()).unwrap_err();
    // One copy for columns that are the same, and no more than there is: others that name the same bytes are refused.
    let fields = ["a", "b"].map(|name| field(name, DataType::Utf8, true));
    let of = DataType::Struct(fields.to_vec().into());
    let both = |a: &ArrayData, b: &ArrayData| {
        let both = ArrayData::builder(of.clone()).len(2);
        DeviceArray::from_host(raw(both.child_data(vec![a.clone(), b.clone()]))).unwrap()
    };
    let one = texts(false);
    let mended = unwrap(&validate(&both(&one, &one)).unwrap().unwrap()).unwrap();
    let [a, b] = [0, 1].map(|i| mended.child_data()[i].buffers()[1].as_ptr());
    assert_eq!(a, b);
    let other = masked(one.clone(), vec![true, false]);
    validate(&both(&one, &other)).unwrap_err();
    // Bytes that are not UTF-8 matter where a string uses them only.
    good(&text(&DataType::Utf8, &[1, 2], b"\xFFa\xFF"));
    bad(&text(&DataType::Utf8, &[1, 3], b"\xFFa\xFF"), "");
    good(&text(&DataType::Binary, &[1, 3], b"\xFFa\xFF"));
}

#[test]
fn view_rules() {
    let long = b"thirteen long";
    let (text, binary) = (DataType::Utf8View, DataType::BinaryView);
    let inline = |bytes: [u8; 4]| view(3, &bytes, 0, 0);
    for data_type in [&text, &binary] {
        good(&views(data_type, view(13, b"thir", 0, 0), long));
        good(&views(data_type, inline(*b"abc\0"), long));
        for wrong in [
            view(13, b"thir", 1, 0),
            view(13, b"thir", u32::MAX, 0),
            view(13, b"thir", 0, 1),
            view(14, b"thir", 0, 0),
            view(u32::MAX, b"thir", 0, u32::MAX),
            view(13, b"thin", 0, 0),
            inline(*b"abcd"),
            view(3, b"abc\0", 0, 1),
        ] {
            bad(&views(data_type, wrong, long), "");
            bad(&masked(views(data_type, wrong, long), vec![false]), "");
        }
    }
    bad(&views(&text, inline(*b"ab\xFF\0"), long), "");
    good(&views(&binary, inline(*b"ab\xFF\0"), long));
    bad(
        &views(&text, view(13, b"thir", 0, 0), b"thirteen lon\xFF"),
        "",
    );
    good(&views(
        &binary,
        view(13, b"thir", 0, 0),
        b"thirteen lon\xFF",
    ));
}

#[test]
fn dictionary_keys() {
    good(&keys(&[0, 1], 2));
    bad(&keys(&[0, 2], 2), "");
    bad(&keys(&[0], 0), "");
    good(&masked(keys(&[0, 255], 2), vec![true, false]));
    bad(&masked(keys(&[0, 255], 2), vec![false, true]), "");
    good(&keys(&[], 0));
    let signed = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Int32));
    for keys in [&[255][..], &[255, 0], &[0, 128]] {
        let keys_of = vec![Buffer::from(keys)];
        let dictionary = parts(&signed, keys.len(), 0, keys_of, vec![ints(&[1])]);
        bad(&dictionary, "");
    }
    let wide = DataType::Dictionary(Box::new(DataType::UInt64), Box::new(DataType::Int32));
    let key = vec![Buffer::from_slice_ref([u64::MAX])];
    bad(&parts(&wide, 1, 0, key, vec![ints(&[1])]), "");
}

#[test]
fn run_ends() {
    good(&runs(3, 1, &[2, 4]));
    good(&runs(2, 0, &[2, 4]));
    for wrong in [&[2, 2][..], &[4, 2], &[0, 4], &[-1, 4], &[2, 3], &[]] {
        bad(&runs(4, 0, wrong), "");
    }
    bad(&runs(4, 1, &[2, 4]), "");
    let run = runs(4, 0, &[2, 4]);
    let with = |ends, values| parts(run.data_type(), 4, 0, vec![], vec![ends, values]);
    let nulls = masked(ints(&[2, 4]), vec![true, false]);
    bad(&with(nulls, ints(&[0, 0])), "");
    bad(&with(ints(&[2, 4]), ints(&[0])), "");
}

#[test]
fn unions() {
    for mode in [UnionMode::Sparse, UnionMode::Dense] {
        for id in [0, 4, -1, i8::MIN, i8::MAX] {
            bad(&union(mode, &[3, id], &[0, 0], [2, 2]), "");
        }
    }
    for offset in [-1, 1, i32::MAX] {
        bad(&union(UnionMode::Dense, &[3, 7], &[0, offset], [2, 1]), "");
    }
}
