//! Sequences of safe operations on arrays: whatever they are, rows are those that arrow-rs has.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchReader};
use arrow_device::{
    DeviceArray, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader,
    DeviceRecordBatches, ExportOptions, FFI_ArrowDeviceArrayStream, ReleasePolicy, SyncPolicy,
    Validation,
};
use arrow_schema::{DataType, Field, Schema, UnionMode};

use crate::check::{comparable, read};
use crate::exercise::{self, delay, nulls_of, other_queue};
use crate::foreign::Foreign;
use crate::input::Input;
use crate::kinds;
use crate::panics::caught;
use crate::sketch::Node;
use crate::support::compare::{same, same_batch};
use crate::support::r#gen::{Nulls, array};
use crate::world::{Place, World};

/// Steps of one input.
const STEPS: usize = 24;
/// Arrays that are held at a time.
const HELD: usize = 6;

/// | bytes | what |
/// | --- | --- |
/// | 1 | where the array goes first; whether it is generated |
/// | 1 + ... | operations |
/// | ... | a type, and rows, nulls and a seed, or an array of it and its arena |
pub(crate) fn target(input: &mut Input<'_>) {
    let world = World::enter();
    on(&world, input);
    world.assert_clean();
}

/// The same where other threads may use the devices, too.
pub(crate) fn on(world: &World, input: &mut Input<'_>) {
    let flags = input.u8();
    let mut steps = Input::new(input.text());
    let data_type = kinds::data_type(input);
    let (cpu, place) = (&world.places[0], world.place(flags.into()));
    let (first, foreign) = match flags & 4 {
        0 => (generated(input, &data_type), None),
        _ => {
            let node = Node::read(input, &data_type);
            let mut foreign = Foreign::new(&data_type, &node, input.rest(), cpu, false, true);
            let first = foreign.import(&cpu.validating(Validation::Full));
            let rows = first.ok().map(|array| array.to_host().expect("validated"));
            (rows, Some(foreign))
        }
    };
    if let Some(rows) = first.filter(|array| array.len() <= 600 && comparable(array)) {
        let up = place.device.upload_array(&rows);
        let held = Held {
            device: up.expect("a valid array goes up"),
            rows,
        };
        held.check("upload");
        run(world, held, true, &mut steps);
    }
    if let Some(foreign) = foreign {
        foreign.assert_released(world);
    }
}

/// What holds of an array that came from elsewhere, then operations on it.
pub(crate) fn imported(world: &World, array: &DeviceArray, input: &mut Input<'_>) {
    let (device, rows) = (array.clone(), exercise::array(world, array));
    if comparable(&rows) && world.place_of(array.device()).is_some() {
        run(world, Held { device, rows }, false, input);
    }
}

/// `ours`: this crate has laid the array out.
fn run(world: &World, first: Held, ours: bool, steps: &mut Input<'_>) {
    let mut held = vec![first];
    for _ in 0..STEPS {
        if steps.is_empty() {
            break;
        }
        let from = steps.choice(held.len());
        let Some(made) = step(world, &held, from, ours, steps) else {
            continue;
        };
        if held.len() == HELD {
            held.remove(1);
        }
        held.push(made);
    }
}

/// An array of arrow-rs, valid whatever the input.
pub(crate) fn generated(input: &mut Input<'_>, data_type: &DataType) -> Option<ArrayRef> {
    let (rows, seed) = (usize::from(input.u8()), u64::from(input.u16()));
    let nulls = [Nulls::Some, Nulls::None, Nulls::All][input.choice(3)];
    let (offset, less) = (usize::from(input.u8()).min(rows), usize::from(input.u8()));
    if items(data_type, rows as u64) > 100_000 {
        return None;
    }
    // Not every type is one that the generator can make.
    let array = caught(|| array(data_type, rows, nulls, seed))?;
    Some(array.slice(offset, (rows - offset).saturating_sub(less)))
}

/// At least as many values as the generator makes for so many rows: any child may be a slice of a longer one.
fn items(data_type: &DataType, rows: u64) -> u64 {
    let rows = rows.saturating_add(20);
    let times = match data_type {
        DataType::FixedSizeList(_, n) => u64::from(n.unsigned_abs()),
        DataType::Struct(_) | DataType::Union(_, _) => 1,
        DataType::FixedSizeBinary(_) => 1,
        _ => 4,
    };
    let below = kinds::children(data_type)
        .into_iter()
        .map(|t| items(t, rows.saturating_mul(times)));
    below.fold(rows, u64::saturating_add)
}

/// An array of a device, and its rows.
struct Held {
    device: DeviceArray,
    rows: ArrayRef,
}

impl Held {
    #[track_caller]
    fn check(&self, what: &str) {
        let (device, rows) = (&self.device, &self.rows);
        assert_eq!(device.len(), rows.len(), "{what}: {device:?}");
        if let Some(nulls) = device.null_count() {
            assert_eq!(
                nulls,
                nulls_of(rows),
                "{what}: the null count of {device:?}"
            );
        }
        let host = match other_queue(device.device()) {
            Some(queue) => device.start_to_host(&queue).and_then(|down| down.wait()),
            None => device.to_host(),
        };
        let host = host.unwrap_or_else(|e| panic!("{what}: {device:?}: {e}"));
        read(&host);
        same(rows, &host).unwrap_or_else(|e| panic!("{what}: {device:?}: {e}"));
    }
}

fn step(
    world: &World,
    held: &[Held],
    from: usize,
    ours: bool,
    input: &mut Input<'_>,
) -> Option<Held> {
    let Held { device, rows } = &held[from];
    let n = rows.len();
    // Bytes mean what they mean in kept inputs, except those of operations that no longer exist.
    let op = match input.u8() {
        byte @ 224.. => 14 + byte % 7,
        byte => byte % 14,
    };
    // Of others' arrays, children's rows beyond those that are needed are not validated.
    if !ours && !matches!(op, 0..=4 | 6 | 9 | 10) {
        return None;
    }
    let to = |input: &mut Input<'_>| &world.place(input.u8().into()).device;
    delay(&device.device().default_queue());
    let (name, device, rows) = match op {
        0 => {
            let (offset, length) = part(input, n);
            let slice = device.slice(offset, length).expect("inside");
            ("slice", slice, rows.slice(offset, length))
        }
        1 => {
            let i = input.choice(device.num_children().max(1));
            let child = device.child(i)?;
            let rows = child_of(rows, i);
            let rows = rows.unwrap_or_else(|| child.to_host().expect("a child is valid"));
            ("child", child, rows)
        }
        2 => ("compact", device.compact().expect("valid"), rows.clone()),
        3 => (
            "to_device",
            device.to_device(to(input)).expect("valid"),
            rows.clone(),
        ),
        4 => {
            let to = to(input);
            let queue = to.new_queue().expect("the device is alive");
            delay(&queue);
            let host = device.to_host().expect("valid");
            let up = to.upload_array_on(&host, &queue).expect("valid");
            ("upload_array_on", up, rows.clone())
        }
        5 => {
            device.resolve_sizes().expect("valid");
            let nulls = device.resolve_null_counts().expect("valid");
            assert_eq!(
                (nulls, device.null_count()),
                (nulls_of(rows), Some(nulls_of(rows))),
                "{device:?}"
            );
            ("resolve", device.clone(), rows.clone())
        }
        6 => (
            "export and import",
            exported(world, device, rows, input),
            rows.clone(),
        ),
        9 => batch(world, device, rows, input)?,
        10 => stream(world, device, rows, input)?,
        12 => {
            exercise::structure(device);
            exercise::loans(world, device);
            downloads(device, rows, input);
            return None;
        }
        13 => ("DLPack", through_dlpack(device, rows)?, rows.clone()),
        19 => concat(held, from, input)?,
        _ => return None,
    };
    let made = Held { device, rows };
    made.check(name);
    Some(made)
}

fn part(input: &mut Input<'_>, n: usize) -> (usize, usize) {
    let offset = usize::from(input.u8()).min(n);
    (offset, usize::from(input.u8()).min(n - offset))
}

fn place_of<'a>(world: &'a World, array: &DeviceArray) -> &'a Place {
    world.place_of(array.device()).expect("one of the world's")
}

/// The child, where arrow-rs and this crate say the same of which rows a child has.
fn child_of(rows: &ArrayRef, i: usize) -> Option<ArrayRef> {
    Some(match rows.data_type() {
        DataType::Struct(_) => rows.as_struct().column(i).clone(),
        DataType::FixedSizeList(_, _) => rows.as_fixed_size_list().values().clone(),
        DataType::Union(fields, UnionMode::Sparse) => {
            let (id, _) = fields.iter().nth(i)?;
            rows.as_union().child(id).clone()
        }
        _ => return None,
    })
}

fn exported(
    world: &World,
    device: &DeviceArray,
    rows: &ArrayRef,
    input: &mut Input<'_>,
) -> DeviceArray {
    let options = export_options(input);
    let unknown = input.bool();
    let options = match unknown {
        true => ExportOptions {
            counts_nulls: false,
            ..options
        },
        false => options,
    };
    let array = device.export_array(&options).expect("valid");
    let nulls = array.array().null_count() as i64;
    assert!(
        nulls == nulls_of(rows) as i64 || (unknown && nulls == -1),
        "exported {nulls} nulls of {}: {device:?}",
        nulls_of(rows)
    );
    let validation = [Validation::Full, Validation::Structure][input.choice(2)];
    let field = Field::new("again", device.data_type().clone(), true);
    // SAFETY: our own export.
    let again = unsafe {
        DeviceArray::import_as(
            array,
            field.into(),
            &place_of(world, device).validating(validation),
        )
    };
    again.unwrap_or_else(|e| panic!("our own export of {device:?}: {e}"))
}

fn export_options(input: &mut Input<'_>) -> ExportOptions {
    let sync = [SyncPolicy::Event, SyncPolicy::Wait][input.choice(2)];
    let release = [ReleasePolicy::Ordered, ReleasePolicy::Synchronize][input.choice(2)];
    ExportOptions {
        release,
        ..ExportOptions::new(sync)
    }
}

/// What was done, its result, and the rows that it should have.
type Made = (&'static str, DeviceArray, ArrayRef);

/// The array, a part of it, and another one of its type and device; or a batch of the first two. Only what is too much
/// for keys, run ends or offsets is refused.
fn concat(held: &[Held], from: usize, input: &mut Input<'_>) -> Option<Made> {
    let Held { device, rows } = &held[from];
    let (offset, length) = part(input, rows.len());
    let cut = device.slice(offset, length).expect("inside");
    let cut_rows = rows.slice(offset, length);
    let made = if input.bool() {
        let ((up, _), (cut, _)) = (batch_of(device, rows), batch_of(&cut, &cut_rows));
        let whole = match DeviceRecordBatch::concat(&up.schema(), &[up, cut], None) {
            Ok(whole) => whole.column(1).expect("there are two"),
            Err(e) => return too_many(&e),
        };
        ("concat of batches", whole, vec![rows.clone(), cut_rows])
    } else {
        let mut arrays = vec![device, &cut];
        let mut parts = vec![rows.clone(), cut_rows];
        let other = &held[input.choice(held.len())];
        if other.device.data_type() == device.data_type()
            && other.device.device() == device.device()
        {
            arrays.insert(0, &other.device);
            parts.insert(0, other.rows.clone());
        }
        match DeviceArray::concat(&arrays) {
            Ok(whole) => ("concat", whole, parts),
            Err(e) => return too_many(&e),
        }
    };
    let (name, whole, parts) = made;
    let host = whole.to_host().expect("valid");
    let mut start = 0;
    for part in &parts {
        let found = host.slice(start, part.len());
        same(part, &found).unwrap_or_else(|e| panic!("{name}: {whole:?}: {e}"));
        start += part.len();
    }
    assert_eq!(start, host.len(), "{name}: {whole:?}");
    // What follows must not double it again and again.
    let length = start.min(600);
    let whole = whole.slice(0, length).expect("inside");
    Some((name, whole, host.slice(0, length)))
}

/// Whether a refusal is one that random arrays deserve.
fn too_many(error: &arrow_device::Error) -> Option<Made> {
    let text = error.to_string();
    assert!(text.contains(", at most "), "{text}");
    None
}

/// The column twice, in a batch that goes some ways.
fn batch(
    world: &World,
    device: &DeviceArray,
    rows: &ArrayRef,
    input: &mut Input<'_>,
) -> Option<Made> {
    let (up, mut expected) = batch_of(device, rows);
    let (offset, length) = part(input, rows.len());
    let mut up = up.slice(offset, length).expect("inside");
    expected = expected.slice(offset, length);
    up = match input.choice(5) {
        0 => up.compact().expect("valid"),
        1 => up
            .to_device(&world.place(input.u8().into()).device)
            .expect("valid"),
        2 => {
            expected = expected.project(&[1]).expect("there are two");
            up.project(&[1]).expect("there are two")
        }
        3 => {
            let (array, schema) = up.export(SyncPolicy::Event).expect("valid");
            let options = place_of(world, up.as_struct()).validating(Validation::Full);
            // SAFETY: our own export.
            unsafe { DeviceRecordBatch::import(array, &schema, &options) }.expect("our own")
        }
        _ => DeviceRecordBatch::try_from(up.as_struct().clone()).expect("a batch's struct"),
    };
    let host = up.to_host().expect("valid");
    if host.schema() == expected.schema() {
        same_batch(&expected, &host).unwrap_or_else(|e| panic!("batch of {device:?}: {e}"));
    }
    let column = up.column(0).expect("there is one");
    Some(("column", column, expected.column(0).clone()))
}

fn batch_of(device: &DeviceArray, rows: &ArrayRef) -> (DeviceRecordBatch, RecordBatch) {
    let field = |name| Field::new(name, device.data_type().clone(), true);
    let schema = Arc::new(Schema::new(vec![field("a"), field("b")]));
    let up = DeviceRecordBatch::try_new(schema.clone(), &[device.clone(), device.clone()]);
    let expected = RecordBatch::try_new(schema, vec![rows.clone(), rows.clone()]);
    (up.expect("of the schema"), expected.expect("of the schema"))
}

/// Two batches through a C stream, to a device reader or to the host.
fn stream(
    world: &World,
    device: &DeviceArray,
    rows: &ArrayRef,
    input: &mut Input<'_>,
) -> Option<Made> {
    let (up, expected) = batch_of(device, rows);
    let half = rows.len() / 2;
    let parts = [(0, half), (half, rows.len() - half)];
    let batches: Vec<_> = parts.map(|(at, n)| up.slice(at, n)).into();
    let device_type = device.device().id().device_type;
    let reader = DeviceRecordBatches::new(batches, up.schema(), device_type);
    let stream =
        FFI_ArrowDeviceArrayStream::new(reader, export_options(input)).expect("names are C's");
    let options = place_of(world, device).validating(Validation::Structure);
    // SAFETY: our own stream.
    let mut reader =
        unsafe { DeviceRecordBatchStreamReader::new(stream, options) }.expect("our own");
    if input.bool() {
        let reader = reader.into_host_reader().with_prefetch(input.choice(3));
        assert_eq!(reader.schema(), expected.schema());
        for (host, (at, n)) in reader.zip(parts) {
            same_batch(&expected.slice(at, n), &host.expect("valid")).expect("the same rows");
        }
        return None;
    }
    let first = reader.next()?.expect("valid");
    Some((
        "stream",
        first.column(1).expect("there are two"),
        rows.slice(0, half),
    ))
}

/// A download on a queue of its own: waited for, polled, or dropped while it runs.
fn downloads(device: &DeviceArray, rows: &ArrayRef, input: &mut Input<'_>) {
    let queue = device.device().new_queue().expect("the device is alive");
    delay(&queue);
    let start = || device.start_to_host(&queue).expect("valid");
    let host = match input.choice(5) {
        0 => device.start_to_host(&queue).and_then(|down| down.wait()),
        1 => start().wait(),
        2 => {
            let mut download = start();
            while !download.is_ready().expect("valid") {
                device.device().synchronize().expect("it is alive");
            }
            download.wait()
        }
        3 => {
            let mut download = pin!(start());
            let mut cx = Context::from_waker(Waker::noop());
            loop {
                match download.as_mut().poll(&mut cx) {
                    Poll::Ready(host) => break host,
                    Poll::Pending => device.device().synchronize().expect("it is alive"),
                }
            }
        }
        _ => return drop(start()),
    };
    same(rows, &host.expect("valid")).unwrap_or_else(|e| panic!("download of {device:?}: {e}"));
}

fn through_dlpack(device: &DeviceArray, rows: &ArrayRef) -> Option<DeviceArray> {
    use arrow_device::dlpack::{DlpackOptions, DlpackStream};
    let tensor = device
        .export_dlpack(&DlpackOptions::new(DlpackStream::NONE))
        .ok()?;
    let queue = device.device().default_queue();
    // SAFETY: our own tensor, which nobody writes to.
    let again =
        unsafe { DeviceArray::import_dlpack(tensor.into_versioned(), &queue) }.expect("our own");
    // Times are integers there, bits bytes, and lists' fields have another name.
    (again.data_type() == rows.data_type()).then_some(again)
}
