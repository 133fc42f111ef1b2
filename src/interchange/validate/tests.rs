use std::sync::Arc;

use arrow_array::builder::{
    FixedSizeBinaryBuilder, ListViewBuilder, MapBuilder, StringBuilder, StringViewBuilder,
};
use arrow_array::types::{Int16Type, Int32Type, UInt8Type};
use arrow_array::*;
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, i256};
use arrow_data::ArrayDataBuilder;
use arrow_schema::{FieldRef, Fields, TimeUnit, UnionFields, UnionMode};

use super::*;

mod values;

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
    many_views(data_type, &[view], bytes)
}

fn many_views(data_type: &DataType, views: &[u128], bytes: &[u8]) -> ArrayData {
    data(
        data_type,
        views.len(),
        vec![Buffer::from_slice_ref(views), Buffer::from(bytes)],
    )
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

/// A mask of 4 bits in 1 byte, an array that starts at row 8.
#[test]
fn a_mask_has_its_own_offset() {
    let values = Buffer::from_slice_ref([0; 12]);
    let builder = ArrayDataBuilder::new(DataType::Int32).len(4).offset(8);
    let mask = NullBuffer::new(BooleanBuffer::new(Buffer::from([0b0101_u8]), 0, 4));
    let array = raw(builder.add_buffer(values).nulls(Some(mask)));
    good(&array);
    assert!(array.len() == 4 && array.null_count() == 2);
}

/// Buffers may be padded to any length.
#[test]
fn padding_after_the_last_element() {
    let padded = |values: &[i32]| {
        let mut bytes = Buffer::from_slice_ref(values).to_vec();
        bytes.extend([0xAB; 3]);
        // Aligned, as a vector of bytes may not be.
        Buffer::from_slice_ref(bytes)
    };
    let aligned = Buffer::from_slice_ref([view(1, b"a\0\0\0", 0, 0), 0xAB]);
    good(&data(
        &DataType::Utf8View,
        1,
        vec![aligned.slice_with_length(0, 19)],
    ));
    let text = vec![padded(&[0, 1]), Buffer::from(b"a")];
    good(&data(&DataType::Utf8, 1, text));
    let run = runs(4, 0, &[1, 4]);
    let ends = data(&DataType::Int32, 2, vec![padded(&[1, 4])]);
    good(&parts(
        run.data_type(),
        4,
        0,
        vec![],
        vec![ends, ints(&[0, 0])],
    ));
    let short = data(&DataType::Int32, 2, vec![padded(&[1, 3])]);
    bad(
        &parts(run.data_type(), 4, 0, vec![], vec![short, ints(&[0, 0])]),
        "",
    );
    let lists = list_view(&[0], &[1], 1);
    let item = vec![ints(&[0])];
    let at = |size| vec![padded(&[0]), padded(&[size])];
    good(&parts(lists.data_type(), 1, 0, at(1), item.clone()));
    bad(&parts(lists.data_type(), 1, 0, at(2), item), "");
}

#[test]
fn lengths_and_buffers() {
    let four = || vec![Buffer::from_slice_ref([0_i32; 4])];
    let int = DataType::Int32;
    good(&parts(&int, 3, 1, four(), vec![]));
    bad(&parts(&int, 4, 1, four(), vec![]), ".buffers[1]");
    bad(&parts(&int, 0, 5, four(), vec![]), ".buffers[1]");
    bad(&parts(&int, 2, usize::MAX, four(), vec![]), ".length");
    bad(
        &parts(&DataType::Null, isize::MAX as usize, 1, vec![], vec![]),
        ".length",
    );
    bad(
        &parts(&int, isize::MAX as usize, 0, four(), vec![]),
        ".buffers[1]",
    );
    bad(&data(&int, 4, vec![]), ".n_buffers");
    bad(&data(&int, 4, [four(), four()].concat()), ".n_buffers");
    bad(&data(&DataType::Utf8View, 0, vec![]), ".n_buffers");
    bad(
        &data(&DataType::Boolean, 9, vec![Buffer::from([0_u8])]),
        ".buffers[1]",
    );
    bad(&data(&int, 3, vec![four()[0].slice(1)]), ".buffers[1]");
    // Empty and misaligned: `make_array` would panic.
    bad(
        &data(&int, 0, vec![four()[0].slice_with_length(1, 0)]),
        ".buffers[1]",
    );
    bad(
        &data(&DataType::Utf8, 1, vec![offsets(&[0]), Buffer::default()]),
        ".buffers[1]",
    );
    good(&data(
        &DataType::Utf8,
        0,
        vec![Buffer::default(), Buffer::default()],
    ));
    bad(
        &data(&DataType::FixedSizeBinary(5), 4, four()),
        ".buffers[1]",
    );
    let sparse = union(UnionMode::Sparse, &[3, 3], &[], [2, 2]);
    let (data_type, children) = (sparse.data_type(), sparse.child_data().to_vec());
    let short = vec![Buffer::from([3_u8])];
    bad(&parts(data_type, 2, 0, short, children), ".buffers[0]");
}

#[test]
fn masks() {
    good(&masked(ints(&[1, 2]), vec![true, false]));
    bad(&masked(ints(&[1, 2]), vec![false]), ".buffers[0]");
    bad(&masked(NullArray::new(1).to_data(), vec![false]), "");
}

#[test]
fn children() {
    let child = || ints(&[1, 2, 3, 4]);
    good(&structs(3, 1, child(), true));
    bad(&structs(4, 1, child(), true), ".children[0]");
    bad(&structs(5, 0, child(), true), ".children[0]");
    good(&fixed_list(2, 1, 1, child(), true));
    bad(&fixed_list(2, 2, 1, child(), true), ".children[0]");
    #[cfg(target_pointer_width = "64")]
    bad(&fixed_list(i32::MAX, 1 << 40, 0, child(), true), ".length");
    bad(
        &union(UnionMode::Sparse, &[3, 3, 3], &[], [3, 2]),
        ".children[1]",
    );
    let data_type = fixed_list(2, 0, 0, child(), true).data_type().clone();
    bad(&data(&data_type, 0, vec![]), ".n_children");
    let other = StringArray::from(vec![""; 4]).to_data();
    bad(
        &parts(&data_type, 1, 0, vec![], vec![other]),
        ".children[0]",
    );
    // A list of nothing takes no rows.
    #[cfg(target_pointer_width = "64")]
    good(&fixed_list(0, 1 << 40, 0, child(), true));
}

#[test]
fn types_that_no_array_has() {
    let refused = |data_type| {
        let array = parts(&data_type, 0, 0, vec![], vec![]);
        let e = check(&array).unwrap_err();
        // By the type, before anything of the array is looked at.
        assert!(
            matches!(&e, Error::InvalidInput { path, .. } if path == "schema"),
            "{e}"
        );
    };
    refused(DataType::FixedSizeBinary(-1));
    refused(DataType::Dictionary(
        Box::new(DataType::Utf8),
        Box::new(DataType::Utf8),
    ));
    let item = field("item", DataType::Int8, false);
    refused(DataType::FixedSizeList(item.clone(), -1));
    refused(DataType::RunEndEncoded(item.clone(), item.clone()));
    refused(DataType::Map(item.clone(), false));
    let deep = (0..65).fold(DataType::Int8, |inner, _| {
        DataType::Struct(vec![field("x", inner, true)].into())
    });
    refused(deep);
    let deepest = (0..64).fold(ints(&[]), |inner, _| structs(0, 0, inner, true));
    good(&deepest);
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
    bad(&map(true, nulls()), ".children[0].children[0]");
    bad(&map(false, nulls()), ".children[0].children[0]");
    let entries = map(true, ints(&[1, 2]));
    let masked_entries = masked(entries.child_data()[0].clone(), vec![true, false]);
    let map = raw(entries.into_builder().child_data(vec![masked_entries]));
    bad(&map, ".children[0]");
}
