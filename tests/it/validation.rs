//! What [`Validation::Full`] accepts is valid wherever safe calls reach: arrays with one byte spoiled
//! somewhere and cut anywhere, on a device whose memory the host cannot read.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::async_stream::kit::produce;
use crate::support::producer::Producer;
use crate::support::types::{fixed_list, list, structure};
use crate::support::{Nulls, Rng, arb_data_type, array};
use crate::support_c::sim::{Place, simulated};
use crate::support_c::{DICTIONARY, Foreign};
use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, Int64Array, StringArray, StructArray, make_array};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_device::async_stream::AsyncDeviceRecordBatchStream;
use arrow_device::device::sim::SimMode;
use arrow_device::{
    DeviceArray, DeviceRecordBatch, DeviceRecordBatchStreamReader, DeviceRecordBatches,
    ExportOptions, FFI_ArrowDeviceArray, ImportOptions, Result, SyncPolicy, Validation,
};
use arrow_schema::{DataType, Field, Schema};
use futures::StreamExt;
use futures::executor::block_on;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

/// How an array comes in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Array,
    Batch,
    Stream,
    AsyncStream,
}

const WAYS: [Way; 4] = [Way::Array, Way::Batch, Way::Stream, Way::AsyncStream];

/// Imports, and says what safe calls start from. All ways but the first take structs.
fn import(foreign: &mut Foreign, way: Way, options: &ImportOptions) -> Result<DeviceArray> {
    let DataType::Struct(fields) = &foreign.data_type else {
        return foreign.import(options);
    };
    let schema = Arc::new(Schema::new(fields.clone()));
    let rows = |batch: DeviceRecordBatch| batch.as_struct().clone();
    match way {
        Way::Array => foreign.import(options),
        Way::Batch => foreign.import_batch(options).map(rows),
        Way::Stream => {
            let array = foreign.take();
            let device_type = array.device_type();
            let mut next = Some(array);
            let producer = Producer::new(&schema, move |out| {
                let array = next.take().unwrap_or_else(FFI_ArrowDeviceArray::empty);
                // SAFETY: the consumer passes memory for one struct.
                unsafe { out.write(array) };
                0
            });
            let (stream, _) = producer.stream(device_type);
            // SAFETY: the stream keeps to the interface; its values are checked.
            let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) };
            reader?.next().expect("the stream gives a batch").map(rows)
        }
        Way::AsyncStream => {
            let trusted = ImportOptions {
                validation: Validation::Structure,
                ..options.clone()
            };
            let batch = foreign.import_batch(&trusted)?;
            // SAFETY: the handler goes to this crate's own producer, which keeps to the interface;
            // the values are checked.
            let (handler, opening) =
                unsafe { AsyncDeviceRecordBatchStream::handler(1, options.clone()) };
            let device_type = batch.device().id().device_type;
            let batches = futures::stream::iter([Ok(batch)]);
            let batches = DeviceRecordBatches::from_stream(batches, schema, device_type);
            let sync = ExportOptions::new(SyncPolicy::Event);
            let producing = produce(batches, handler, sync);
            let consuming = async { opening.await?.next().await.expect("a batch") };
            let (_, batch) = block_on(futures::future::join(producing, consuming));
            batch.map(rows)
        }
    }
}

/// An array and all that its children and theirs give.
fn reachable(array: &DeviceArray, visit: &mut impl FnMut(&DeviceArray) -> bool) -> bool {
    let mut children = (0..array.num_children()).map(|i| array.child(i).unwrap());
    visit(array) && children.all(|child| reachable(&child, visit))
}

/// Whether arrow-rs takes the array's rows, strings included.
fn is_valid(array: &DeviceArray) -> bool {
    // arrow-rs panics on some values.
    let valid = catch_unwind(AssertUnwindSafe(|| match array.to_host() {
        Ok(array) => array.to_data().validate_full().is_ok() && texts_are_utf8(array.to_data()),
        Err(_) => false,
    }));
    valid.unwrap_or(false)
}

/// Reads what a program would. Children are visited on their own.
fn texts_are_utf8(data: ArrayData) -> bool {
    let text = |text: &str| std::str::from_utf8(text.as_bytes()).is_ok();
    let rows = 0..data.len();
    let array = match data.data_type() {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => make_array(data),
        _ => return true,
    };
    match array.data_type() {
        DataType::Utf8 => rows
            .into_iter()
            .all(|i| text(array.as_string::<i32>().value(i))),
        DataType::LargeUtf8 => rows
            .into_iter()
            .all(|i| text(array.as_string::<i64>().value(i))),
        _ => rows
            .into_iter()
            .all(|i| text(array.as_string_view().value(i))),
    }
}

/// The nodes of an array, as paths of child indices.
fn paths(data: &ArrayData) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for (i, child) in data.child_data().iter().enumerate() {
        all.extend(
            paths(child)
                .into_iter()
                .map(|path| [&[i], &path[..]].concat()),
        );
    }
    all
}

/// Data whose values may be wrong.
fn unchecked(
    data_type: DataType,
    rows: usize,
    buffers: Vec<Buffer>,
    children: Vec<ArrayData>,
) -> ArrayData {
    let data = ArrayData::builder(data_type).len(rows).buffers(buffers);
    // SAFETY: no arrow array is made of the data; its values are read by nothing but the checks
    // under test.
    unsafe { data.child_data(children).build_unchecked() }
}

/// `data` with another node at `path`.
fn replaced(
    data: &ArrayData,
    path: &[usize],
    change: &mut impl FnMut(&ArrayData) -> ArrayData,
) -> ArrayData {
    let Some((&i, rest)) = path.split_first() else {
        return change(data);
    };
    let mut children = data.child_data().to_vec();
    children[i] = replaced(&children[i], rest, change);
    let builder = data.clone().into_builder().child_data(children);
    // SAFETY: no arrow array is made of the data; its values are read by nothing but the checks
    // under test.
    unsafe { builder.build_unchecked() }
}

/// `data` with another byte somewhere: in a string, a key, an offset, a number.
fn spoiled(data: &ArrayData, rng: &mut Rng) -> ArrayData {
    let mut nodes = paths(data);
    // Not what any byte is a value of, unless there is nothing else.
    let is_checked = |path: &Vec<usize>| {
        let at = path.iter().fold(data, |data, i| &data.child_data()[*i]);
        at.data_type().is_nested()
            || matches!(
                at.data_type(),
                DataType::Dictionary(_, _)
                    | DataType::Utf8
                    | DataType::LargeUtf8
                    | DataType::Utf8View
                    | DataType::Binary
                    | DataType::BinaryView
            )
    };
    nodes.sort_by_key(|path| !is_checked(path));
    let checked = nodes.iter().filter(|path| is_checked(path)).count();
    let path = &nodes[rng.below(checked.max(1))];
    replaced(data, path, &mut |data| {
        let mut buffers = data.buffers().to_vec();
        let n = rng.below(buffers.len());
        let Some(buffer) = buffers.get_mut(n).filter(|buffer| !buffer.is_empty()) else {
            return data.clone();
        };
        let mut bytes = buffer.to_vec();
        let byte = &mut bytes[rng.below(buffer.len())];
        *byte = match rng.below(4) {
            0 => 0xFF,
            1 => byte.wrapping_add(1),
            2 => *byte ^ 1 << rng.below(8),
            _ => rng.next() as u8,
        };
        *buffer = Buffer::from(&bytes[..]);
        let builder = data.clone().into_builder().buffers(buffers);
        // SAFETY: no arrow array is made of the data; its values are read by nothing but the checks
        // under test.
        unsafe { builder.build_unchecked() }
    })
}

/// Cuts to make in the C structs: where, rows to skip, rows to drop at the end.
type Cuts = Vec<(Vec<usize>, usize, usize)>;

fn cuts(data: &ArrayData, rng: &mut Rng) -> Cuts {
    let mut nodes = paths(data);
    // The root more often than others, whose parents may need the rows.
    let mut places = vec![vec![]; rng.below(2)];
    if rng.one_in(2) {
        places.push(nodes.swap_remove(rng.below(nodes.len())));
    }
    let mut cut = |path: Vec<usize>| {
        let at = path.iter().fold(data, |data, i| &data.child_data()[*i]);
        let skip = rng.below(at.len() + 1);
        let drop = if rng.one_in(2) {
            0
        } else {
            rng.below(at.len() - skip + 1)
        };
        (path, skip, drop)
    };
    places.into_iter().map(&mut cut).collect()
}

/// `data` in the hands of a foreign producer.
fn produced(data: &ArrayData, cuts: &Cuts, place: &Place) -> Foreign {
    let mut foreign = Foreign::new(data, &place.device);
    for (path, skip, drop) in cuts {
        let (mut node, mut at) = (data, vec![]);
        for &i in path {
            let is_dictionary = matches!(node.data_type(), DataType::Dictionary(_, _));
            at.push(if is_dictionary { DICTIONARY } else { i });
            node = &node.child_data()[i];
        }
        let array = foreign.at(&at);
        let (skip, drop) = (*skip as i64, *drop as i64);
        if array.length >= skip + drop {
            array.offset += skip;
            array.length -= skip + drop;
            array.null_count = -1;
        }
    }
    foreign
}

/// Any type that has strings or children; for batches a struct.
fn arb_type(runner: &mut TestRunner, way: Way) -> DataType {
    let mut any = || arb_data_type(3).new_tree(runner).unwrap().current();
    let nested = loop {
        let data_type = any();
        if data_type.is_nested() || matches!(data_type, DataType::Dictionary(_, _)) {
            break data_type;
        }
    };
    match way {
        Way::Array => nested,
        _ => structure(vec![("a", nested), ("b", any())]),
    }
}

/// The import accepts what arrow-rs accepts of everything that safe calls reach, and nothing else.
#[test]
fn full_validation_is_what_safe_calls_reach() {
    let modes = [SimMode::Async, SimMode::Deferred];
    let places: Vec<_> = modes.into_iter().filter_map(simulated).collect();
    if places.is_empty() {
        return;
    }
    let (mut runner, mut rng) = (TestRunner::deterministic(), Rng::new(4));
    let cases = std::env::var("PROPTEST_CASES").map_or(500, |n| n.parse().unwrap());
    let (mut accepted, mut refused) = (0, 0);
    let mut wrong = vec![];
    for case in 0..cases {
        let way = WAYS[rng.below(4)];
        // Deferred work runs when a thread waits for it, which a task does not.
        let place = match way {
            Way::AsyncStream => &places[0],
            _ => &places[rng.below(2)],
        };
        let data_type = arb_type(&mut runner, way);
        let nulls = [Nulls::None, Nulls::Some][rng.below(2)];
        let mut data = array(&data_type, rng.below(13), nulls, rng.next()).to_data();
        if way != Way::Array {
            data = data.into_builder().nulls(None).build().unwrap();
        }
        if !rng.one_in(5) {
            data = spoiled(&data, &mut rng);
        }
        let cuts = cuts(&data, &mut rng);
        let [mut first, mut second] = [(), ()].map(|()| produced(&data, &cuts, place));
        let trusted = import(&mut first, way, &place.options);
        let valid = trusted.is_ok_and(|array| reachable(&array, &mut is_valid));
        let full = ImportOptions {
            validation: Validation::Full,
            ..place.options.clone()
        };
        let checked = import(&mut second, way, &full);
        match checked {
            Ok(array) if valid && reachable(&array, &mut is_valid) => accepted += 1,
            // Run ends count as a whole, those without rows too.
            Err(_) if !valid || data_type.to_string().contains("RunEnd") => refused += 1,
            outcome => wrong.push(format!(
                "case {case}: {data_type} by {way:?}, cut by {cuts:?}: {outcome:?}"
            )),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(
        accepted > cases / 3 && refused > cases / 6,
        "{accepted}, {refused}"
    );
    places.iter().for_each(Place::assert_clean);
}

/// A list of two lists of one string each, the first of them not UTF-8.
fn bad_first_text() -> ArrayData {
    let offsets = || Buffer::from_vec(vec![0, 1, 2]);
    let buffers = vec![offsets(), Buffer::from([0xFF, b'a'])];
    let texts = unchecked(DataType::Utf8, 2, buffers, vec![]);
    unchecked(list(DataType::Utf8), 2, vec![offsets()], vec![texts])
}

/// Cuts by an ancestor, by a list without items, and by a parent that needs fewer rows.
#[test]
fn rows_that_an_ancestor_cuts_off_are_checked() {
    // Deferred work runs when a thread waits for it, which a task does not.
    for (mode, ways) in [(SimMode::Async, &WAYS[..]), (SimMode::Deferred, &WAYS[..3])] {
        let Some(place) = simulated(mode) else { return };
        let full = ImportOptions {
            validation: Validation::Full,
            ..place.options.clone()
        };
        let one = |data_type, rows, child| unchecked(data_type, rows, vec![], vec![child]);
        let text = list(DataType::Utf8);
        let in_struct = structure(vec![("l", text.clone())]);
        let in_structs = structure(vec![("s", in_struct.clone())]);
        let row = one(in_struct.clone(), 2, bad_first_text());
        let cases = [
            // Skipped, not needed, none at all.
            (row.clone(), 1, 1),
            (row.clone(), 2, 0),
            (row.clone(), 0, 0),
            (one(in_structs, 2, row), 1, 1),
            (one(fixed_list(text.clone(), 1), 2, bad_first_text()), 1, 1),
            (one(fixed_list(text.clone(), 2), 1, bad_first_text()), 1, 0),
            (one(fixed_list(text, 0), 3, bad_first_text()), 0, 3),
        ];
        for (data, offset, length) in cases {
            let is_struct = matches!(data.data_type(), DataType::Struct(_));
            for way in &ways[..if is_struct { ways.len() } else { 1 }] {
                let context = format!("{} by {way:?}: {offset}, {length}", data.data_type());
                let mut foreign = Foreign::new(&data, &place.device);
                (foreign.root().offset, foreign.root().length) = (offset, length);
                let error = import(&mut foreign, *way, &full)
                    .map(|_| ())
                    .expect_err(&context);
                let error = error.to_string();
                assert!(
                    error.contains("children[0].children[0]: "),
                    "{context}: {error}"
                );
                assert!(
                    error.contains("UTF-8") || error.contains("UTF8"),
                    "{context}: {error}"
                );
                foreign.assert_released(&context);
            }
        }
        place.assert_clean();
    }
}

/// Any bits are a number.
#[test]
fn columns_of_numbers_stay_on_the_device() {
    for (mode, ways) in [(SimMode::Async, &WAYS[..]), (SimMode::Deferred, &WAYS[..3])] {
        let Some(place) = simulated(mode) else { return };
        let full = ImportOptions {
            validation: Validation::Full,
            ..place.options.clone()
        };
        // Every third row is null.
        let numbers = || -> ArrayRef {
            let rows = (0..640).map(|i| (i % 3 > 0).then_some(i));
            Arc::new(Int64Array::from_iter(rows))
        };
        let pair: ArrayRef = Arc::new(StructArray::from(vec![(
            crate::support::types::field("n", DataType::Int64),
            numbers(),
        )]));
        let texts: ArrayRef = Arc::new(StringArray::from_iter_values(
            (0..640).map(|i| format!("{i:04}")),
        ));
        let of = |columns: Vec<ArrayRef>| {
            let fields = columns
                .iter()
                .map(|column| crate::support::types::field("f", column.data_type().clone()));
            let fields: Vec<_> = fields.collect();
            StructArray::new(fields.into(), columns, None).to_data()
        };
        let bitmap = 640 / 8;
        let text = 4 * 641 + 640 * 4 + 4;
        for (columns, down, waits) in [
            (vec![numbers(), pair.clone()], 2 * bitmap, 1),
            (vec![numbers(), texts.clone(), pair], 2 * bitmap + text, 2),
            (vec![texts], text, 2),
        ] {
            for way in ways {
                let context = format!("{} columns by {way:?}", columns.len());
                let mut foreign = Foreign::new(&of(columns.clone()), &place.device);
                let before = place.device.stats();
                drop(import(&mut foreign, *way, &full).expect(&context));
                let came = place.device.stats().since(&before);
                assert_eq!(came.bytes_to_host, down, "{context}");
                if *way != Way::AsyncStream {
                    assert_eq!(came.host_waits, waits, "{context}");
                }
                foreign.assert_released_by(&place.device, &context);
            }
        }
        place.assert_clean();
    }
}

/// By its number in the batch, where only some columns come down, too.
#[test]
fn what_is_wrong_with_a_column_is_found_under_its_number() {
    for (mode, ways) in [(SimMode::Async, &WAYS[..]), (SimMode::Deferred, &WAYS[..3])] {
        let Some(place) = simulated(mode) else { return };
        let full = ImportOptions {
            validation: Validation::Full,
            ..place.options.clone()
        };
        let of = |fields: Vec<Field>, columns: Vec<ArrayData>| {
            let rows = columns[0].len();
            let batch = unchecked(DataType::Struct(fields.into()), rows, vec![], columns);
            Foreign::new(&batch, &place.device)
        };
        let number = |nullable| Field::new("n", DataType::Int64, nullable);
        let text = Field::new("s", DataType::Utf8, true);
        let numbers = || Int64Array::from(vec![Some(1), None, Some(3)]).to_data();
        let texts = |offsets: [i32; 4]| {
            let buffers = vec![Buffer::from_slice_ref(offsets), Buffer::from(b"ab")];
            unchecked(DataType::Utf8, 3, buffers, vec![])
        };
        let fine = || texts([0, 1, 1, 2]);
        for way in ways {
            let refused = |mut foreign: Foreign, path: &str| {
                let e = import(&mut foreign, *way, &full).map(|_| ());
                let e = e.expect_err(&format!("{path} by {way:?}")).to_string();
                assert!(e.contains(path), "{path} by {way:?}: {e}");
                foreign.assert_released_by(&place.device, path);
            };
            // Found by the plan of what comes down.
            for (offsets, rows, buffer) in [([0, 3, 1, 2], 2, 1), ([0, 3, 9, 2], 1, 2)] {
                // Of the second, this one exports row 1 alone, whose 6 bytes are in the allocation.
                if *way == Way::AsyncStream && buffer == 2 {
                    continue;
                }
                let columns = vec![numbers(), texts(offsets)];
                let mut foreign = of(vec![number(true), text.clone()], columns);
                (foreign.root().offset, foreign.root().length) = (1, rows);
                refused(foreign, &format!("array.children[1].buffers[{buffer}]: "));
            }
            // By its values.
            let bad = bad_first_text();
            let lists = Field::new("l", bad.data_type().clone(), true);
            let two = Int64Array::from(vec![1, 2]).to_data();
            let foreign = of(vec![number(true), lists], vec![two, bad]);
            refused(foreign, "children[1].children[0]: ");
            // Every value of the column is fine, but one is null.
            let columns = || vec![fine(), numbers()];
            let foreign = of(vec![text.clone(), number(false)], columns());
            refused(foreign, "array.children[1]: ");
            // It states another number of nulls.
            let mut foreign = of(vec![text.clone(), number(true)], columns());
            foreign.at(&[1]).null_count = 2;
            refused(foreign, "array.children[1].null_count: ");
        }
        place.assert_clean();
    }
}
