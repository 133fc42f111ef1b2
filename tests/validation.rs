//! What [`Validation::Full`] accepts is valid wherever safe calls reach: arrays with one byte spoiled
//! somewhere and cut anywhere, on a device whose memory the host cannot read.

mod support;
mod support_c;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow_array::StringArray;
use arrow_array::cast::AsArray;
use arrow_array::{Array, Int32Array, make_array};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_device::async_stream::{
    AsyncDeviceRecordBatchStream, DeviceRecordBatchStreamAdapter, ProduceOptions, produce,
};
use arrow_device::device::sim::SimMode;
use arrow_device::{
    DeviceArray, DeviceRecordBatch, DeviceRecordBatchStreamReader, ExportOptions,
    FFI_ArrowDeviceArray, ImportOptions, Result, SyncPolicy, Validation,
};
use arrow_schema::{DataType, Schema};
use futures::StreamExt;
use futures::executor::block_on;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use support::producer::Producer;
use support::types::{fixed_list, list, structure};
use support::{Nulls, Rng, arb_data_type, array};
use support_c::sim::{Place, simulated};
use support_c::{DICTIONARY, Foreign};

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
                // SAFETY: `out` is the consumer's, for writing.
                unsafe { array.write_to(out) };
                0
            });
            let (stream, _) = producer.stream(device_type);
            // SAFETY: the stream keeps to the interface; its values are checked.
            let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) };
            reader?.next().expect("the stream gives a batch").map(rows)
        }
        Way::AsyncStream => {
            let trusted = options.clone().with_validation(Validation::Structure);
            let batch = foreign.import_batch(&trusted)?;
            // SAFETY: the producer is ours; the values are checked.
            let (handler, opening) =
                unsafe { AsyncDeviceRecordBatchStream::handler(1, options.clone()) };
            let device_type = batch.device().id().device_type;
            let batches = futures::stream::iter([Ok(batch)]);
            let batches = DeviceRecordBatchStreamAdapter::new(schema, device_type, batches);
            let sync = ProduceOptions::new(ExportOptions::new(SyncPolicy::Event));
            let producing = produce(batches, handler.into_ffi(), sync);
            let consuming = async { opening.await?.next().await.expect("a batch") };
            let (_, batch) = block_on(futures::future::join(producing, consuming));
            batch.map(|batch| rows(batch.batch))
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
    let valid = catch_unwind(AssertUnwindSafe(|| match array.to_host_data() {
        Ok(data) => data.validate_full().is_ok() && texts_are_utf8(data),
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
    // SAFETY: never used as an arrow array.
    unsafe { builder.build_unchecked() }
}

/// `data` with another byte somewhere: in a string, a key, an offset, a number.
fn spoiled(data: &ArrayData, rng: &mut Rng) -> ArrayData {
    let nodes = paths(data);
    let path = &nodes[rng.below(nodes.len())];
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
        // SAFETY: never used as an arrow array.
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

/// The import's decision is what arrow-rs says of everything that safe calls reach.
#[test]
fn full_validation_is_what_safe_calls_reach() {
    let modes = [SimMode::Async, SimMode::Deferred];
    let places: Vec<_> = modes.into_iter().filter_map(simulated).collect();
    if places.is_empty() {
        return;
    }
    let (mut runner, mut rng) = (TestRunner::deterministic(), Rng::new(4));
    let (mut accepted, mut refused, mut exposed) = (0, 0, 0);
    let cases = std::env::var("PROPTEST_CASES").map_or(1500, |n| n.parse().unwrap());
    // A spoiled value may panic in arrow-rs, which `is_valid` catches.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = catch_unwind(AssertUnwindSafe(|| {
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
            let spoil = !rng.one_in(4);
            if spoil {
                data = spoiled(&data, &mut rng);
            }
            let cuts = cuts(&data, &mut rng);
            let context = format!("case {case}: {data_type} by {way:?}, {cuts:?}, {data:?}");
            let make = || produced(&data, &cuts, place);

            let mut foreign = make();
            let trusted = import(&mut foreign, way, &place.options);
            let full = place.options.clone().with_validation(Validation::Full);
            let Ok(trusted) = trusted else {
                let mut foreign = make();
                assert!(
                    import(&mut foreign, way, &full).is_err(),
                    "{context}: accepted"
                );
                continue;
            };
            let valid = reachable(&trusted, &mut is_valid);
            drop((trusted, foreign));
            let mut foreign = make();
            match import(&mut foreign, way, &full) {
                Ok(array) => {
                    accepted += 1;
                    if !valid || !reachable(&array, &mut is_valid) {
                        exposed += 1;
                        eprintln!("EXPOSED {context}");
                    }
                }
                Err(e) => {
                    refused += 1;
                    if valid {
                        eprintln!("REFUSED {context}: {e}");
                    }
                }
            }
        }
    }));
    std::panic::set_hook(hook);
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
    eprintln!("{accepted} {refused} {exposed}");
    assert_eq!(exposed, 0);
    places.iter().for_each(Place::assert_clean);
}
