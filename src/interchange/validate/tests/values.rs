//! What buffers hold.

use super::*;

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

/// Texts that are not ASCII, in views and in buffers.
#[test]
fn views_of_wide_texts() {
    let (text, binary) = (DataType::Utf8View, DataType::BinaryView);
    let inline = |bytes: &[u8; 12], length| {
        let low = u128::from_le_bytes(*[&[0; 4], &bytes[..]].concat().first_chunk().unwrap());
        low | u128::from(length as u32)
    };
    let whole = inline("äöüäöü".as_bytes().first_chunk().unwrap(), 12);
    let (cut, rest) = (
        inline(b"abcdefghijk\xC3", 12),
        inline(b"\xA4bcdefghijkl", 12),
    );
    let short = inline(b"ab\xC3\0\0\0\0\0\0\0\0\0", 3);
    let wide = "äöüäöüäöü".repeat(2);
    let long = |start: usize, length| {
        let prefix = wide.as_bytes()[start..].first_chunk().unwrap();
        view(length, prefix, 0, start as u32)
    };
    // The last bytes of the second one, which are not used, are no text.
    let much = [wide.as_bytes(), &[0xFF; 1000]].concat();
    for bytes in [wide.as_bytes(), &much] {
        good(&many_views(
            &text,
            &[whole, long(0, 36), long(2, 14), whole],
            bytes,
        ));
        for wrong in [cut, rest, short, long(0, 15), long(1, 15), long(1, 14)] {
            let views = [whole, wrong, whole, long(0, 36)];
            bad(&many_views(&text, &views, bytes), "");
            good(&many_views(&binary, &views, bytes));
        }
        bad(&many_views(&text, &[cut, rest], bytes), "");
    }
    // The first byte is no text.
    let bytes = [&[0xFF], wide.as_bytes()].concat();
    let prefix = bytes[1..].first_chunk().unwrap();
    good(&views(&text, view(36, prefix, 0, 1), &bytes));
    bad(&views(&text, view(35, prefix, 0, 1), &bytes), "");
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
    bad(&with(nulls, ints(&[0, 0])), ".children[0]");
    bad(&with(ints(&[2, 4]), ints(&[0])), ".children[1]");
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

#[test]
fn time_is_not_checked() {
    good(&data(
        &DataType::Time32(TimeUnit::Second),
        1,
        vec![offsets(&[86_400])],
    ));
}
