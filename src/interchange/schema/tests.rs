use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use arrow_schema::{Fields, IntervalUnit, TimeUnit};

use self::foreign::Foreign;
use super::*;

mod foreign;

/// Refused with `path` at the root, as second child and as values of a dictionary; the import
/// releases nothing.
#[track_caller]
fn refused(make: impl Fn() -> Foreign, path: &str) {
    let check = |schema: Foreign, root: &str| {
        let before = schema.releases.load(Relaxed);
        match schema.import() {
            Err(Error::InvalidInput { path: found, .. }) => {
                assert_eq!(found, format!("{root}{path}"));
            }
            other => panic!("{root}{path}: {other:?}"),
        }
        assert_eq!(schema.releases.load(Relaxed), before);
    };
    check(make(), "schema");
    let parent = Foreign::new("+s", vec![Foreign::leaf("n"), make()]);
    check(parent, "schema.children[1]");
    check(Foreign::leaf("i").dictionary(make()), "schema.dictionary");
    let list = Foreign::new("+l", vec![Foreign::leaf("C").dictionary(make())]);
    check(list, "schema.children[0].dictionary");
}

/// `make` again and again, each with another format.
#[track_caller]
fn formats_refused(formats: &[&str], children: &[&str], path: &str) {
    for format in formats {
        let children = || children.iter().map(|child| Foreign::leaf(child)).collect();
        refused(|| Foreign::new(format, children()), path);
    }
}

#[test]
fn releases_and_pointers() {
    refused(|| Foreign::leaf("i").released(), "");
    refused(
        || Foreign::leaf("i").change(|s| s.format = ptr::null()),
        ".format",
    );
    let list = || Foreign::new("+l", vec![Foreign::leaf("i")]);
    refused(
        || list().change(|s| s.children = ptr::null_mut()),
        ".children",
    );
    refused(
        || list().change(|s| s.private().list[0] = ptr::null_mut()),
        ".children[0]",
    );
    let misaligned = || list().change(|s| s.private().list[0] = ptr::without_provenance_mut(9));
    refused(misaligned, ".children[0]");
    refused(
        || list().change(|s| s.children = ptr::without_provenance_mut(9)),
        ".children",
    );
    let moved = || Foreign::new("+s", vec![list(), list().released()]);
    refused(moved, ".children[1]");
}

#[test]
fn text_that_is_not_utf8() {
    const BAD: &std::ffi::CStr = c"a\xFF";
    refused(
        || Foreign::leaf("i").change(|s| s.format = BAD.as_ptr()),
        ".format",
    );
    refused(
        || Foreign::leaf("i").change(|s| s.name = BAD.as_ptr()),
        ".name",
    );
}

#[test]
fn a_null_name_is_an_empty_one() {
    let field = Foreign::leaf("i")
        .change(|s| s.name = ptr::null())
        .import()
        .unwrap();
    assert_eq!(field, Field::new("", DataType::Int32, true));
}

#[test]
fn child_counts() {
    for count in [-1, i64::MIN, i64::MAX] {
        refused(
            || Foreign::new("+s", vec![]).change(|s| s.n_children = count),
            ".n_children",
        );
        refused(
            || Foreign::leaf("i").change(|s| s.n_children = count),
            ".n_children",
        );
    }
    let one = ["+l", "+L", "+vl", "+vL", "+m", "+w:2", "+ud:1", "+us:1"];
    formats_refused(&one, &[], ".n_children");
    formats_refused(&one, &["i", "i"], ".n_children");
    formats_refused(&["+r", "+ud:1,2"], &["i"], ".n_children");
    formats_refused(&["+r", "+us:1,2", "+us:"], &["i", "i", "i"], ".n_children");
    formats_refused(
        &["i", "n", "u", "vu", "w:3", "d:5,2", "tss:UTC"],
        &["i"],
        ".n_children",
    );
}

#[test]
fn formats() {
    let unknown = [
        "",
        "j",
        "ii",
        "+",
        "+x",
        "+v",
        "w",
        "w:",
        "w:x",
        "w:99999999999",
        "+w",
        "+ud",
    ];
    formats_refused(&unknown, &[], ".format");
    formats_refused(
        &["w:-1", "d:", "d:5", "d:x,2", "d:5,2,16", "d:5,2,64,1"],
        &[],
        ".format",
    );
    formats_refused(
        &["d:0,0", "d:39,0", "d:10,0,32", "d:19,0,64", "d:77,0,256"],
        &[],
        ".format",
    );
    formats_refused(
        &["tss", "ts", "tx", "tts:", "tiX", "+s:", "+l:", "i:"],
        &[],
        ".format",
    );
    formats_refused(
        &["+w:-1", "+w:", "+w:x", "+w:99999999999"],
        &["i"],
        ".format",
    );
    formats_refused(
        &["+us:-1", "+us:128", "+ud:x", "+ud:1 ", "+us:1,"],
        &["i"],
        ".format",
    );
    formats_refused(&["+us:1,1", "+ud:1,,2", "+ud:,1"], &["i", "i"], ".format");
    formats_refused(&["+r"], &["I", "i"], ".format");
    formats_refused(&["+m"], &["i"], ".format");
    let text = Foreign::leaf("_pli128").import().unwrap_err().to_string();
    let expected = "invalid input at schema.format: \"_pli128\" is not a format ";
    assert!(text.starts_with(expected), "{text}");
    let map = |n| {
        let entries = (0..n).map(|_| Foreign::leaf("i")).collect();
        Foreign::new("+m", vec![Foreign::new("+s", entries)])
    };
    assert!(map(2).import().is_ok());
    refused(|| map(1), ".format");
    refused(|| map(3), ".format");
}

#[test]
fn dictionaries_of_other_than_integers() {
    let values = || Foreign::leaf("u");
    for format in ["u", "f", "b", "tdD", "d:5,2"] {
        refused(|| Foreign::leaf(format).dictionary(values()), ".format");
    }
    refused(
        || Foreign::new("+l", vec![Foreign::leaf("i")]).dictionary(values()),
        ".format",
    );
    for format in ["c", "C", "s", "S", "i", "I", "l", "L"] {
        let field = Foreign::leaf(format)
            .dictionary(values())
            .flags(1)
            .import()
            .unwrap();
        assert!(matches!(field.data_type(), DataType::Dictionary(_, v) if **v == DataType::Utf8));
        assert_eq!(field.dict_is_ordered(), Some(true));
    }
}

/// Numbers, and texts without a length.
fn encode(parts: &[Result<i32, &[u8]>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        match part {
            Ok(n) => bytes.extend(n.to_ne_bytes()),
            Err(text) => bytes.extend(*text),
        }
    }
    bytes
}

#[test]
fn metadata() {
    let pair = [Ok(1), Err(&b"k"[..]), Ok(2), Err(&b"vw"[..])];
    let good = encode(&[&[Ok(2)], &pair[..], &[Ok(0), Ok(0)]].concat());
    let field = Foreign::leaf("i").metadata(&good).import().unwrap();
    let expected = [("k", "vw"), ("", "")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    assert_eq!(*field.metadata(), HashMap::from(expected));
    let none = Foreign::leaf("i")
        .metadata(&encode(&[Ok(0)]))
        .import()
        .unwrap();
    assert!(none.metadata().is_empty());

    for wrong in [
        encode(&[Ok(-1)]),
        encode(&[Ok(1), Ok(-1)]),
        encode(&[Ok(1), Ok(1), Err(b"k"), Ok(i32::MIN)]),
        encode(&[Ok(1), Ok(1), Err(b"\xFF"), Ok(0)]),
        encode(&[Ok(1), Ok(0), Ok(1), Err(b"\xFF")]),
    ] {
        refused(|| Foreign::leaf("i").metadata(&wrong), ".metadata");
    }
}

#[test]
fn depth_and_cycles() {
    let nested = |levels| {
        (0..levels).fold(Foreign::leaf("i"), |inner, _| {
            Foreign::new("+l", vec![inner])
        })
    };
    check_type(nested(64).import().unwrap().data_type()).unwrap();
    // Each takes Miri half a minute, or more.
    for &levels in if cfg!(miri) { &[65][..] } else { &[65, 1000] } {
        let e = nested(levels).import().unwrap_err();
        assert!(e.to_string().contains(TOO_DEEP));
    }
    if cfg!(miri) {
        return;
    }
    let through_dictionaries = (0..65).fold(Foreign::leaf("i"), |inner, _| {
        Foreign::leaf("i").dictionary(inner)
    });
    let e = through_dictionaries.import().unwrap_err();
    assert!(e.to_string().contains(TOO_DEEP));

    let cycle = Foreign::new("+l", vec![Foreign::leaf("i")]).change(|s| {
        let this = s.schema;
        s.private().list[0] = this;
    });
    let e = cycle.import().unwrap_err();
    assert!(e.to_string().contains(TOO_DEEP));
}

/// A struct of `n` times the same child.
#[cfg(not(miri))]
fn sharing(inner: Foreign, n: usize) -> Foreign {
    Foreign::new("+s", vec![inner]).change(|s| {
        let child = s.private().list[0];
        s.private().list.resize(n, child);
        s.children = s.private().list.as_mut_ptr();
        s.n_children = n as i64;
    })
}

/// A few structs that stand for very many fields.
#[cfg(not(miri))]
#[test]
fn shared_children_are_bounded() {
    let start = std::time::Instant::now();
    let doubled = |levels| (0..levels).fold(Foreign::leaf("i"), |inner, _| sharing(inner, 2));
    assert!(doubled(11).import().is_ok());
    for levels in [18, 63] {
        let e = doubled(levels).import().unwrap_err();
        assert!(e.to_string().contains("2^18"), "{e}");
    }
    // A chain, each of whose structs names the one below often.
    for n in [1 << 17, 1 << 19] {
        let chain = (0..63).fold(Foreign::leaf("n"), |inner, _| sharing(inner, n));
        let e = chain.import().unwrap_err();
        assert!(e.to_string().contains("2^18"), "{e}");
    }
    assert!(start.elapsed().as_secs() < 100, "{:?}", start.elapsed());
}

/// Many fields, each of which is a struct of its own.
#[cfg(not(miri))]
#[test]
fn wide_schemas() {
    let leaves = (0..50_000).map(|_| Foreign::leaf("i")).collect();
    let wide = Foreign::new("+s", leaves).import().unwrap();
    check_type(wide.data_type()).unwrap();
}

#[test]
fn unknown_flags_are_ignored() {
    for flags in [0, 2, 8, 10, -1, i64::MIN, i64::MIN | 2] {
        let field = Foreign::leaf("i").flags(flags).import().unwrap();
        assert_eq!(field.is_nullable(), flags & 2 != 0, "{flags}");
    }
}

fn field(name: &str, data_type: DataType, nullable: bool) -> Field {
    Field::new(name, data_type, nullable).with_metadata(HashMap::from([
        ("ARROW:extension:name".to_owned(), format!("of {name}")),
        ("with\0NUL".to_owned(), "é\0".to_owned()),
    ]))
}

fn map_of(sorted: bool) -> DataType {
    let entries: Fields = vec![
        field("k", DataType::Utf8, false),
        field("v", DataType::Int8, true),
    ]
    .into();
    DataType::Map(
        field("entries", DataType::Struct(entries), false).into(),
        sorted,
    )
}

fn types() -> Vec<DataType> {
    use DataType as T;
    let units = [
        TimeUnit::Second,
        TimeUnit::Millisecond,
        TimeUnit::Microsecond,
        TimeUnit::Nanosecond,
    ];
    let item = || Arc::new(field("item", T::Decimal128(38, -3), false));
    let mut types = vec![
        T::Null,
        T::Boolean,
        T::Int8,
        T::UInt8,
        T::Int16,
        T::UInt16,
        T::Int32,
    ];
    types.extend([
        T::UInt32,
        T::Int64,
        T::UInt64,
        T::Float16,
        T::Float32,
        T::Float64,
    ]);
    types.extend([
        T::Utf8,
        T::LargeUtf8,
        T::Utf8View,
        T::Binary,
        T::LargeBinary,
        T::BinaryView,
    ]);
    types.extend([
        T::FixedSizeBinary(0),
        T::FixedSizeBinary(7),
        T::Date32,
        T::Date64,
    ]);
    types.extend([
        T::Decimal32(9, 2),
        T::Decimal64(18, 2),
        T::Decimal256(76, 80),
    ]);
    types.extend([
        T::Time32(units[0]),
        T::Time32(units[1]),
        T::Time64(units[2]),
    ]);
    types.push(T::Time64(units[3]));
    for unit in units {
        types.push(T::Duration(unit));
        types.push(T::Timestamp(unit, None));
        types.push(T::Timestamp(unit, Some("Europe/Zürich:+01:00".into())));
    }
    types.extend(
        [
            IntervalUnit::YearMonth,
            IntervalUnit::DayTime,
            IntervalUnit::MonthDayNano,
        ]
        .map(T::Interval),
    );
    types.extend([T::List(item()), T::LargeList(item()), T::ListView(item())]);
    types.extend([T::LargeListView(item()), T::FixedSizeList(item(), 0)]);
    types.extend([map_of(false), map_of(true), T::Struct(Fields::empty())]);
    for mode in [UnionMode::Sparse, UnionMode::Dense] {
        let fields = [field("a", T::Utf8, true), field("b", map_of(true), false)];
        types.push(T::Union(
            UnionFields::try_new([0, 127], fields).unwrap(),
            mode,
        ));
    }
    let values = Arc::new(field("values", map_of(true), true));
    let run_ends = field("run_ends", T::Int16, false);
    types.push(T::RunEndEncoded(run_ends.into(), values));
    types.push(T::Dictionary(Box::new(T::UInt64), Box::new(T::LargeUtf8)));
    let deep = T::List(Arc::new(field("item", map_of(true), true)));
    types.push(T::Dictionary(Box::new(T::Int8), Box::new(deep)));
    types
}

#[test]
fn round_trips() {
    // Miri takes some types only.
    for data_type in types().into_iter().step_by(if cfg!(miri) { 5 } else { 1 }) {
        for nullable in [true, false] {
            let before = field("näme", data_type.clone(), nullable).with_dict_is_ordered(nullable);
            let schema = export_field(&before).unwrap();
            assert_eq!(import_field(&schema).unwrap(), before);
            // arrow-rs reads the same.
            assert_eq!(Field::try_from(&schema).unwrap(), before);
        }
    }
}

#[test]
fn a_schema_round_trips() {
    let fields: Vec<_> = types()
        .into_iter()
        .map(|t| field("same name", t, true).with_dict_is_ordered(true))
        .collect();
    let metadata = HashMap::from([("k".to_owned(), "v".to_owned())]);
    for schema in [Schema::new_with_metadata(fields, metadata), Schema::empty()] {
        let exported = export_schema(&schema).unwrap();
        assert_eq!(*import_schema(&exported).unwrap(), schema);
        assert_eq!(Schema::try_from(&exported).unwrap(), schema);
    }
}

/// arrow-rs writes a union of nothing, and cannot read it.
#[test]
fn empty_unions() {
    for mode in [UnionMode::Sparse, UnionMode::Dense] {
        let before = field("u", DataType::Union(UnionFields::empty(), mode), true);
        let schema = export_field(&before).unwrap();
        assert_eq!(import_field(&schema).unwrap(), before);
        assert!(Field::try_from(&schema).is_err());
    }
}

#[test]
fn a_batch_needs_a_struct() {
    let of = |schema: &Foreign| import_schema((**schema).as_ref());
    let path = |e| match e {
        Err(Error::InvalidInput { path, .. }) => path,
        other => panic!("{other:?}"),
    };
    assert_eq!(path(of(&Foreign::leaf("i"))), "schema.format");
    let dictionary = Foreign::leaf("i").dictionary(Foreign::new("+s", vec![]));
    assert_eq!(path(of(&dictionary)), "schema.format");
    let released = Foreign::new("+s", vec![]).released();
    assert_eq!(path(of(&released)), "schema");
    assert_eq!(path(import_schema(&FFI_ArrowSchema::empty())), "schema");
}

#[test]
fn what_c_cannot_express() {
    use DataType as T;
    let refused = |data_type: DataType, path: &str| {
        let columns = Schema::new(vec![Field::new("x", data_type.clone(), true)]);
        for (result, root) in [
            (export_field(&Field::new("x", data_type, true)), "schema"),
            (export_schema(&columns), "schema.children[0]"),
        ] {
            match result {
                Err(Error::InvalidInput { path: found, .. }) if path == "type" => {
                    assert_eq!(found, "schema");
                }
                Err(Error::InvalidInput { path: found, .. }) => {
                    assert_eq!(found, format!("{root}{path}"));
                }
                other => panic!("{other:?}"),
            }
        }
    };
    let nul = || Arc::new(Field::new("a\0b", T::Int8, true));
    let zone = T::Timestamp(TimeUnit::Second, Some("U\0C".into()));
    assert!(
        export_field(&nul())
            .unwrap_err()
            .to_string()
            .contains("schema.name")
    );
    refused(zone.clone(), ".format");
    refused(T::List(nul()), ".children[0].name");
    let values = Box::new(T::Struct(vec![field("a", zone, true)].into()));
    refused(
        T::Dictionary(Box::new(T::Int8), values),
        ".dictionary.children[0].format",
    );
    let union = UnionFields::try_new([1], [nul()]).unwrap();
    refused(T::Union(union, UnionMode::Dense), ".children[0].name");
    refused(T::Time32(TimeUnit::Nanosecond), "type");
    refused(T::FixedSizeList(nul(), -1), "type");
}

/// One long name, or one block of metadata, that becomes gigabytes.
#[cfg(not(miri))]
#[test]
fn what_fields_share_is_bounded() {
    let exceeds = |leaf: Foreign| {
        let e = sharing(leaf, 1000).import().map(drop).unwrap_err();
        let e = e.to_string();
        assert!(
            e.contains("]: more than 2^18 fields") && e.contains("512 bytes"),
            "{e}"
        );
    };
    let name = std::ffi::CString::new(vec![b'x'; 1 << 20]).unwrap();
    let long = Foreign::leaf("i").change(|s| s.name = name.as_ptr());
    exceeds(long);
    // Many short pairs.
    let mut block = 8192i32.to_ne_bytes().to_vec();
    for i in 0..8192 {
        block.extend_from_slice(&7i32.to_ne_bytes());
        block.extend_from_slice(format!("{i:07}").as_bytes());
        block.extend_from_slice(&0i32.to_ne_bytes());
    }
    let long = Foreign::leaf("i").change(|s| s.metadata = block.as_ptr().cast());
    exceeds(long);
}

#[cfg(feature = "async")]
#[test]
fn metadata_by_itself() {
    let back = |encoded: &[u8]| {
        // SAFETY: the bytes that the counts announce before the first fault are there.
        unsafe { decode_metadata(encoded.as_ptr().cast()) }
    };
    let entries = [("a", "1"), ("", ""), ("\u{e9}", "\0")];
    let metadata = HashMap::from(entries.map(|(k, v)| (k.to_owned(), v.to_owned())));
    let encoded = encode_metadata(Some(&metadata)).unwrap();
    // SAFETY: arrow-rs has encoded it.
    let decoded = unsafe { decode_metadata(encoded.metadata) };
    assert_eq!(decoded.unwrap(), metadata);
    for none in [None, Some(&HashMap::new())] {
        assert!(encode_metadata(none).unwrap().metadata.is_null());
    }
    // SAFETY: null means that there is no metadata.
    assert!(unsafe { decode_metadata(ptr::null()) }.unwrap().is_empty());
    assert!(back(&(-1i32).to_ne_bytes()).is_err());
    let wrong = encode(&[Ok(1), Ok(1), Err(&[0xff])]);
    assert!(back(&wrong).unwrap_err().contains("utf-8"));
}
