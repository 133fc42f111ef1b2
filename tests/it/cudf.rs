//! What keeps cuDF from reading a batch: one error for each rule and place.

use std::sync::Arc;

use crate::simkit::*;
use crate::support::types::{dictionary, fixed_list, list, map, run_ends, structure, union};
use crate::support::*;
use crate::support_c::export::join;
use crate::support_c::{Foreign, c};
use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, Int32Array, NullArray, RecordBatch, StructArray, UInt8Array};
use arrow_device::device::DevicePtr;
use arrow_device::device::sim::SimMode;
use arrow_device::{
    Device, DeviceArray, DeviceBuffer, DeviceBufferMut, DeviceRecordBatch, Devices, Error,
    ExportOptions, ImportOptions, SyncPolicy, TransferStats, check_for_cudf,
};
use arrow_schema::{DataType, Field, IntervalUnit, TimeUnit, UnionMode};

const DEVICE_TYPE: (&str, &str) = ("array.device_type", "rule 1");

/// Path and rule of each error.
fn found(batch: &DeviceRecordBatch) -> Vec<(String, String)> {
    let problem = |e| {
        let Error::InvalidInput { path, message } = e else {
            panic!("{e}");
        };
        let rule = message
            .strip_prefix("cuDF, ")
            .unwrap_or_else(|| panic!("{message}"));
        let (rule, what) = rule.split_once(": ").unwrap();
        assert!(!what.is_empty());
        (path.into_owned(), rule.to_owned())
    };
    check_for_cudf(batch).into_iter().map(problem).collect()
}

/// The errors, of which the first is that the batch is not on CUDA.
#[track_caller]
fn assert_found(batch: &DeviceRecordBatch, expected: &[(&str, &str)]) {
    let before = batch.device().stats();
    let found = found(batch);
    let mut cost = batch.device().stats().since(&before);
    // Of earlier sources.
    cost.frees = 0;
    // Other tests have the same CPU.
    if !batch.device().is_host_readable() {
        assert_eq!(cost, TransferStats::default());
    }
    let found: Vec<_> = found
        .iter()
        .map(|(p, r)| (p.as_str(), r.as_str()))
        .collect();
    assert_eq!(found, [&[DEVICE_TYPE], expected].concat());
}

fn supported() -> Vec<DataType> {
    use DataType::*;
    let mut types = vec![Null, Boolean, Float32, Float64, Date32, Utf8, LargeUtf8];
    types.extend([Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64]);
    use TimeUnit::{Microsecond, Millisecond, Nanosecond, Second};
    for unit in [Second, Millisecond, Microsecond, Nanosecond] {
        types.push(Timestamp(unit, None));
        types.push(Timestamp(unit, Some("UTC".into())));
        types.push(Duration(unit));
    }
    types.extend([Decimal32(9, 2), Decimal64(18, 3), Decimal128(38, 10)]);
    types.extend([Int8, Int16, Int32, Int64].map(|key| dictionary(key, Utf8)));
    let nested = structure(vec![("a", Int64), ("b", list(Decimal128(20, 2)))]);
    let in_dictionary = dictionary(Int32, structure(vec![("a", Boolean)]));
    types.extend([list(Boolean), list(list(Utf8)), nested, in_dictionary]);
    types
}

#[test]
fn supported_types_are_clean() {
    let mut devices = vec![Devices::cpu()];
    let sim = (!cfg!(miri)).then(|| Sim::new(SimMode::Deferred));
    devices.extend(sim.as_ref().map(|sim| sim.device.clone()));
    for device in &devices {
        for nulls in [Nulls::None, Nulls::Some, Nulls::All] {
            for rows in [0, 1, 100] {
                let up = device.upload(&batch(&supported(), rows, nulls, 3)).unwrap();
                // The CPU keeps memory that this crate has not written.
                let up = if device.is_host_readable() {
                    up.compact().unwrap()
                } else {
                    up
                };
                assert_eq!(found(&up), [("array.device_type".into(), "rule 1".into())]);
                if rows > 1 {
                    // Slices lie in the same memory; nulls in part of their rows are not counted.
                    let slice = up.slice(3, 50).unwrap();
                    let rules = found(&slice).into_iter().skip(1).map(|(_, rule)| rule);
                    assert!(rules.clone().all(|rule| rule == "rule 2"));
                    assert_eq!(rules.count() > 0, nulls == Nulls::Some);
                    assert_found(&slice.compact().unwrap(), &[]);
                }
            }
        }
    }
    for columns in [0, 1] {
        for device in &devices {
            let up = device.upload(&wide_batch(columns, 9)).unwrap();
            assert_found(&up.compact().unwrap(), &[]);
        }
    }
    drop(devices);
    sim.inspect(Sim::assert_done);
}

/// Of each type, whatever is in it: cuDF's own list.
#[test]
fn types_that_cudf_does_not_take() {
    use DataType::*;
    let cpu = Devices::cpu();
    let check = |data_type: DataType, expected: &[(&str, &str)]| {
        for rows in [0, 20] {
            let batch = batch(std::slice::from_ref(&data_type), rows, Nulls::None, 1);
            assert_found(&cpu.upload(&batch).unwrap().compact().unwrap(), expected);
        }
    };
    let item = |t| Arc::new(Field::new("item", t, true));
    let mut types = vec![
        Float16,
        Date64,
        Binary,
        LargeBinary,
        BinaryView,
        FixedSizeBinary(3),
    ];
    types.extend([
        Time32(TimeUnit::Second),
        Time64(TimeUnit::Nanosecond),
        Decimal256(76, 1),
    ]);
    types.extend([
        Interval(IntervalUnit::DayTime),
        map(Int32, Int32, false),
        run_ends(Int32, Int32),
    ]);
    types.extend([
        ListView(item(Int32)),
        LargeListView(item(Int32)),
        fixed_list(Int32, 2),
    ]);
    types.extend([UnionMode::Dense, UnionMode::Sparse].map(|mode| union(mode, vec![Int32, Utf8])));
    for data_type in types {
        check(data_type, &[("array.children[0]", "types")]);
    }
    check(LargeList(item(Int32)), &[("array.children[0]", "rule 5")]);
    for key in [UInt8, UInt16, UInt32, UInt64] {
        check(dictionary(key, Utf8), &[("array.children[0]", "rule 6")]);
    }
    check(Utf8View, &[("array.children[0]", "rule 7")]);
    // At any depth, and below what is not taken itself.
    check(
        list(structure(vec![("a", Int32), ("b", Binary)])),
        &[("array.children[0].children[0].children[1]", "types")],
    );
    check(
        dictionary(UInt8, list(Utf8View)),
        &[
            ("array.children[0]", "rule 6"),
            ("array.children[0].dictionary.children[0]", "rule 7"),
        ],
    );
    check(
        run_ends(Int16, Date64),
        &[
            ("array.children[0]", "types"),
            ("array.children[0].children[1]", "types"),
        ],
    );
}

#[test]
fn every_problem_says_what_to_do() {
    let types = [
        DataType::UInt8,
        DataType::Date64,
        map(DataType::Int8, DataType::Int8, false),
    ];
    let batch = batch(&types, 9, Nulls::Some, 1);
    // With a bitmap that an export hands on.
    let first: UInt8Array = (0..9).map(|i| (i % 2 > 0).then_some(i)).collect();
    let columns = [
        vec![Arc::new(first) as ArrayRef],
        batch.columns()[1..].to_vec(),
    ]
    .concat();
    let batch = RecordBatch::try_new(batch.schema(), columns).unwrap();
    let up = Devices::cpu().upload(&batch).unwrap();
    let texts: Vec<_> = check_for_cudf(&up).iter().map(Error::to_string).collect();
    assert_eq!(
        texts[0],
        "invalid input at array.device_type: cuDF, rule 1: the memory is of cpu, not of CUDA; to_device copies it there"
    );
    assert_eq!(
        texts[1],
        "invalid input at array.children[0].buffers[0]: cuDF, rule 3: not known to be padded to 64 bytes with zeros; compact() fixes it"
    );
    assert!(texts[2].ends_with("cast to a timestamp in milliseconds"));
    assert!(texts[3].contains("not supported by cuDF"));
}

fn each_device(test: impl Fn(&Device)) {
    test(&Devices::cpu());
    if !cfg!(miri) {
        for mode in MODES {
            let sim = Sim::new(mode);
            test(&sim);
            sim.assert_done();
        }
    }
}

/// Nothing else is wrong, and after `compact` nothing at all; values stay.
#[track_caller]
fn mended(column: DeviceArray, expected: &[(&str, &str)]) {
    let batch = join(&[column]);
    assert_found(&batch, expected);
    let before = batch.to_host().unwrap();
    let compact = batch.compact().unwrap();
    assert_found(&compact, &[]);
    assert_same_batch(&before, &compact.to_host().unwrap(), "compact");
}

/// Bytes in memory of a device that a transfer wrote.
fn bytes_on(device: &Device, bytes: &[u8]) -> DeviceBuffer {
    let bytes = UInt8Array::from(bytes.to_vec());
    let up = device.upload_array(&bytes).unwrap().compact().unwrap();
    up.buffer(1).unwrap()
}

/// A column of these parts.
fn of(data_type: DataType, rows: usize, buffers: &[Option<DeviceBuffer>]) -> DeviceArray {
    let nulls = buffers[0].is_none().then_some(0);
    // SAFETY: the callers' buffers hold valid values of this type.
    unsafe { DeviceArray::from_parts(data_type, rows, nulls, buffers, &[]) }.unwrap()
}

fn nullable(rows: i32) -> Int32Array {
    (0..rows).map(|i| (i % 3 > 0).then_some(i)).collect()
}

#[test]
fn rule_1_device_type() {
    each_device(|device| {
        let clean = device.upload(&wide_batch(1, 5)).unwrap().compact();
        assert_found(&clean.unwrap(), &[]);
    });
    // Page-locked memory without a backend keeps to the rule, if it is CUDA's.
    let field = Arc::new(Field::new("a", DataType::Int32, true));
    let column: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 3]));
    let rows = StructArray::from(vec![(field, column)]);
    for (device_type, errors) in [(3, 0), (11, 1), (1, 1)] {
        let mut foreign = Foreign::new(&rows.to_data(), &Devices::cpu());
        foreign.device_array.device_type = device_type;
        foreign.device_array.device_id = 777;
        let options = ImportOptions::default().with_devices(Devices::new());
        let imported = foreign.import_batch(&options).unwrap();
        assert_eq!(check_for_cudf(&imported).len(), errors, "{device_type}");
        drop(imported);
        foreign.assert_released("device types");
    }
}

#[test]
fn rule_2_null_counts() {
    each_device(|device| {
        let up = device.upload_array(&nullable(120)).unwrap();
        let whole = up.compact().unwrap();
        assert_found(&join(std::slice::from_ref(&whole)), &[]);
        // How many are in a part of the rows nobody has counted.
        let errors = [("array.children[0].null_count", "rule 2")];
        let slice = whole.slice(30, 64).unwrap();
        mended(slice.clone(), &errors);
        slice.resolve_null_counts().unwrap();
        assert_found(&join(&[slice]), &[]);
        let batch = join(&[whole]).slice(30, 64).unwrap();
        assert_found(&batch, &errors);
        // An export counts too.
        let options = ExportOptions::new(SyncPolicy::Event);
        let mut exported = batch.export_array(&options).unwrap();
        // SAFETY: the export is live and has one child.
        let child = unsafe { &**c(&mut exported).array.children };
        assert_eq!(child.null_count, 22);
    });
}

#[test]
fn rule_3_masks_and_booleans() {
    use DataType::*;
    each_device(|device| {
        let values = || Some(bytes_on(device, &[7; 64]));
        let bits = |at| Some(bytes_on(device, &[0b0101_1011; 70]).slice(at, 9).unwrap());
        for at in [0, 4, 1, 2, 61] {
            let counted = of(Int8, 60, &[bits(at), values()]);
            counted.resolve_null_counts().unwrap();
            mended(counted, &[("array.children[0].buffers[0]", "rule 3")]);
            let booleans = of(Boolean, 60, &[None, bits(at)]);
            mended(booleans, &[("array.children[0].buffers[1]", "rule 3")]);
        }
        // Padded, but written by work that nobody knows.
        let mut mask = DeviceBufferMut::allocate(&device.default_queue(), 8).unwrap();
        mask.fill(0xFF).unwrap();
        let written = of(Int8, 60, &[Some(mask.freeze().unwrap()), values()]);
        written.resolve_null_counts().unwrap();
        mended(written, &[("array.children[0].buffers[0]", "rule 3")]);
        // Rows of another array's bitmap, at a byte and within one: of the latter an export writes another.
        let up = device.upload_array(&nullable(120)).unwrap();
        let same = |first: usize| {
            let input = up.slice(first, 60).unwrap();
            input.resolve_null_counts().unwrap();
            input.with_values(Int8, bytes_on(device, &[7; 64])).unwrap()
        };
        mended(same(8), &[("array.children[0].buffers[0]", "rule 3")]);
        mended(same(32), &[("array.children[0].buffers[0]", "rule 3")]);
        mended(same(9), &[]);
        // No bits, nothing to pad.
        assert_found(&join(&[of(Int8, 60, &[None, values()])]), &[]);
    });
    // The text tells the two reasons apart.
    let text = |at| {
        let bits = bytes_on(&Devices::cpu(), &[1; 9]).slice(at, 8).unwrap();
        let problems = check_for_cudf(&join(&[of(Boolean, 60, &[None, Some(bits)])]));
        problems[1].to_string()
    };
    assert!(text(0).contains("not known to be padded"));
    assert!(text(1).contains("not aligned to 4 bytes"));
}

#[test]
fn rule_3_values_and_offsets() {
    use DataType::*;
    let values = ("array.children[0].buffers[1]", "rule 3");
    each_device(|device| {
        let at = |from, len| Some(bytes_on(device, &[0; 200]).slice(from, len).unwrap());
        for (data_type, width) in [(Int16, 2), (Int32, 4), (Float64, 8), (Decimal128(9, 1), 16)] {
            for from in [1, width / 2, width, width * 3 / 2] {
                let column = of(data_type.clone(), 3, &[None, at(from, 3 * width)]);
                mended(column, &[values][usize::from(from % width == 0)..]);
            }
        }
        let words = [0, 3, 3, 9i32].map(i32::to_ne_bytes).concat();
        let offsets = bytes_on(device, &[&[0, 0], &words[..]].concat());
        let offsets = offsets.slice(2, 16).unwrap();
        let text = bytes_on(device, b"abcdefghi");
        mended(of(Utf8, 3, &[None, Some(offsets), Some(text)]), &[values]);
        // Eight bytes are not enough for 128 bits.
        let nested = of(Decimal128(9, 1), 2, &[None, at(8, 32)]);
        let field = Field::new("d", Decimal128(9, 1), true);
        let rows = Struct(vec![field].into());
        // SAFETY: the array is a struct of one child, which has as many rows.
        let rows = unsafe { DeviceArray::from_parts(rows, 2, Some(0), &[None], &[nested]) };
        mended(
            rows.unwrap(),
            &[("array.children[0].children[0].buffers[1]", "rule 3")],
        );
    });
}

/// No import or constructor lets such arrays pass, except one whose base is null against its contract.
#[test]
fn rules_4_and_5_missing_buffers() {
    use DataType::*;
    each_device(|device| {
        let base = DevicePtr::NULL;
        // SAFETY: there is no memory at `base`, against the contract; nothing below reads a buffer.
        let null = |n| Some(unsafe { DeviceBuffer::from_raw(device, base, n, Box::new(()), None) });
        let missing = |data_type, buffers: &[_], rule| {
            let column = of(data_type, 3, buffers);
            assert_found(&join(&[column]), &[("array.children[0].buffers[1]", rule)]);
        };
        missing(Int32, &[None, null(12)], "rule 4");
        missing(Boolean, &[None, null(1)], "rule 4");
        missing(Utf8, &[None, null(16), null(0)], "rule 5");
        missing(LargeUtf8, &[None, null(32), null(0)], "rule 5");
        // No text at all is fine, and so is anything of no rows.
        let offsets = bytes_on(device, &[0; 16]);
        let text = of(Utf8, 3, &[None, Some(offsets), None]);
        assert_found(&join(&[text]), &[]);
        let empty = of(Int32, 0, &[None, null(0)]);
        assert_found(&join(&[empty]), &[]);
    });
}

#[test]
fn lengths() {
    let limit = i32::MAX as usize;
    each_device(|device| {
        let up = |rows| join(&[device.upload_array(&NullArray::new(rows)).unwrap()]);
        let (rows, root) = ("array.children[0].length", "array.length");
        assert_found(&up(limit - 1), &[]);
        assert_found(&up(limit), &[(root, "lengths"), (rows, "lengths")]);
        let far = up(3 * limit).slice(limit, 5).unwrap();
        assert_found(&far, &[(rows, "lengths")]);
        assert_found(&far.compact().unwrap(), &[]);
        let near = up(3 * limit).slice(limit - 6, 5).unwrap();
        assert_found(&near, &[]);
    });
}

/// Whatever memory a producer has, sliced or not: `compact` mends all that can be mended.
#[test]
fn foreign_batches() {
    let types = supported();
    let whole = StructArray::from(whole_batch(&types, 141, Nulls::Some, 8));
    for variant in SAME_ROWS {
        foreign_batch(&types, &variant.of(&whole, 8).unwrap());
    }
}

fn foreign_batch(types: &[DataType], made: &Made) {
    let whole = made.rows.as_struct();
    let mut devices = vec![(Devices::cpu(), None)];
    if !cfg!(miri) {
        devices.extend(MODES.map(|mode| {
            let sim = Sim::new(mode);
            (sim.device.clone(), Some(sim))
        }));
    }
    for (device, sim) in devices {
        let known = Devices::new();
        let _ = known.add(device.clone());
        let options = ImportOptions::default().with_devices(known);
        let mut foreign = Foreign::part(&made.around, made.offset, whole.len(), &device);
        // The rows of a batch are not null, whatever is beside them.
        foreign.set_buffer(&[], 0, std::ptr::null());
        for i in 0..types.len() {
            foreign.at(&[i]).null_count = -1;
        }
        let imported = foreign.import_batch(&options).unwrap();
        for (offset, rows) in [(0, 141), (0, 70), (8, 64), (13, 100)] {
            let slice = imported.slice(offset, rows).unwrap();
            let rules: Vec<_> = found(&slice).into_iter().map(|(_, rule)| rule).collect();
            for rule in ["rule 2", "rule 3"] {
                assert!(rules.iter().any(|r| r == rule), "{rule}: {rules:?}");
            }
            let compact = slice.compact().unwrap();
            assert_found(&compact, &[]);
            let expected = RecordBatch::from(whole.slice(offset, rows));
            let down = compact.to_host().unwrap();
            for (i, column) in expected.columns().iter().enumerate() {
                assert_same(column, down.column(i), format!("{device}, column {i}"));
            }
            // Slices of it are still where they should be.
            let part = compact.slice(5, 40).unwrap();
            part.as_struct().resolve_null_counts().unwrap();
            assert!(found(&part).iter().all(|(_, rule)| rule != "rule 3"));
        }
        drop(imported);
        if let Some(sim) = sim {
            drop(options);
            foreign.assert_released_by(&device, "foreign batch");
            drop(foreign);
            sim.assert_done();
        }
    }
}
