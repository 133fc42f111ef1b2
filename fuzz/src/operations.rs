//! Sequences of safe operations on arrays: whatever they are, rows are those that arrow-rs has.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchReader};
use arrow_device::{
    DeviceArray, DeviceRecordBatch, DeviceRecordBatchIterator, DeviceRecordBatchReader,
    DeviceRecordBatchStreamReader, ExportOptions, FFI_ArrowDeviceArrayStream, NullCounts,
    ReleasePolicy, SyncPolicy, Validation,
};
use arrow_schema::{DataType, Field, Schema, UnionMode};

use crate::check::{comparable, read};
use crate::exercise::nulls_of;
use crate::input::Input;
use crate::panics::caught;
use crate::sketch::Node;
use crate::support::compare::{same, same_batch};
use crate::support::r#gen::{Nulls, array};
use crate::world::{Place, World};
use crate::{exercise, kinds};

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
    let flags = input.u8();
    let mut steps = Input::new(input.text());
    let data_type = kinds::data_type(input);
    let first = match flags & 4 {
        0 => generated(input, &data_type),
        _ => {
            let node = Node::read(input, &data_type);
            node.array(&data_type, input.rest(), 600)
        }
    };
    let Some(first) = first.filter(|array| comparable(array)) else {
        return;
    };
    let world = World::enter();
    let place = &world.places[usize::from(flags) % 3];
    let device = place
        .device
        .upload_array(&first)
        .expect("a valid array goes up");
    let mut held = vec![Held {
        device,
        rows: first,
    }];
    held[0].check("upload");
    for _ in 0..STEPS {
        if steps.is_empty() {
            break;
        }
        let from = steps.choice(held.len());
        let Some(made) = step(&world, &held, from, &mut steps) else {
            continue;
        };
        if held.len() == HELD {
            held.remove(1);
        }
        held.push(made);
    }
    drop(held);
    world.assert_clean();
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
        let host = device
            .to_host()
            .unwrap_or_else(|e| panic!("{what}: {device:?}: {e}"));
        read(&host);
        same(rows, &host).unwrap_or_else(|e| panic!("{what}: {device:?}: {e}"));
    }
}

fn step(world: &World, held: &[Held], from: usize, input: &mut Input<'_>) -> Option<Held> {
    let Held { device, rows } = &held[from];
    let n = rows.len();
    let op = input.choice(14);
    let (name, device, rows) = match op {
        0 => {
            let (offset, length) = part(input, n);
            let slice = device.slice(offset, length).expect("inside");
            ("slice", slice, rows.slice(offset, length))
        }
        1 => {
            let i = input.choice(device.num_children().max(1));
            let child = device.child(i)?;
            let rows =
                child_of(rows, i).unwrap_or_else(|| child.to_host().expect("a child is valid"));
            ("child", child, rows)
        }
        2 => ("compact", device.compact().expect("valid"), rows.clone()),
        3 => {
            let to = &world.places[input.choice(3)].device;
            (
                "to_device",
                device.to_device(to).expect("valid"),
                rows.clone(),
            )
        }
        4 => {
            let to = &world.places[input.choice(3)].device;
            let queue = to.new_queue().expect("the device is alive");
            let host = device.to_host_data().expect("valid");
            let up = to.upload_data_on(host, &queue).expect("valid");
            ("upload_data_on", up, rows.clone())
        }
        5 => {
            device.resolve_sizes().expect("valid");
            assert_eq!(
                device.resolve_null_counts().expect("valid"),
                nulls_of(rows),
                "{device:?}"
            );
            assert_eq!(device.null_count(), Some(nulls_of(rows)));
            ("resolve", device.clone(), rows.clone())
        }
        6 => (
            "export and import",
            exported(place_of(world, device), device, rows, input),
            rows.clone(),
        ),
        7 => ("from_parts", from_parts(device, rows, input)?, rows.clone()),
        8 => ("from_values", from_values(device, input)?, rows.clone()),
        9 => batch(world, device, rows, input)?,
        10 => stream(world, device, rows, input)?,
        11 => {
            let metadata = HashMap::from([("k".to_owned(), "ü".to_owned())]);
            let field =
                Field::new("named", device.data_type().clone(), true).with_metadata(metadata);
            let named = device
                .clone()
                .with_field(Arc::new(field))
                .expect("of the same type");
            let slice = named.slice(n / 2, n - n / 2).expect("inside");
            assert_eq!(slice.field().map(|f| f.name().as_str()), Some("named"));
            ("with_field", slice, rows.slice(n / 2, n - n / 2))
        }
        12 => {
            exercise::structure(device);
            exercise::loans(world, device);
            return None;
        }
        _ => ("DLPack", through_dlpack(device, rows)?, rows.clone()),
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
    let at = world
        .places
        .iter()
        .find(|place| place.device == *array.device());
    at.expect("one of the world's")
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
    place: &Place,
    device: &DeviceArray,
    rows: &ArrayRef,
    input: &mut Input<'_>,
) -> DeviceArray {
    let options = export_options(input);
    let unknown = input.bool();
    let options = match unknown {
        true => options.with_null_counts(NullCounts::AllowUnknown),
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
    let again = unsafe { DeviceArray::import_as(array, field.into(), &place.options(validation)) };
    again.unwrap_or_else(|e| panic!("our own export of {device:?}: {e}"))
}

fn export_options(input: &mut Input<'_>) -> ExportOptions {
    let sync = [SyncPolicy::Event, SyncPolicy::Wait][input.choice(2)];
    let release = [ReleasePolicy::Ordered, ReleasePolicy::Synchronize][input.choice(2)];
    ExportOptions::new(sync).with_release(release)
}

/// The bitmap's bits start at the first.
fn starts_at_0(device: &DeviceArray) -> bool {
    let queue = device.device().default_queue();
    let bits = device.validity_on(&queue).expect("its own queue");
    device.offset() == 0 && bits.is_none_or(|bits| bits.bit_offset() == 0)
}

/// The same array from its own buffers and children.
fn from_parts(device: &DeviceArray, rows: &ArrayRef, input: &mut Input<'_>) -> Option<DeviceArray> {
    let nulls = [None, Some(nulls_of(rows))][input.choice(2)];
    if !starts_at_0(device) || device.num_buffers() + device.num_children() == 0 {
        return None;
    }
    device.resolve_sizes().expect("valid");
    let buffers: Vec<_> = (0..device.num_buffers())
        .map(|i| device.buffer(i))
        .collect();
    let children: Vec<_> = (0..device.num_children())
        .filter_map(|i| device.child(i))
        .collect();
    let data_type = device.data_type().clone();
    // SAFETY: values of an array of this type, in the same places.
    let made =
        unsafe { DeviceArray::from_parts(data_type, device.len(), nulls, &buffers, &children) };
    match made {
        Ok(made) => Some(made),
        // Nothing tells the device.
        Err(e) => {
            assert!(
                buffers.iter().all(Option::is_none) && children.is_empty(),
                "{e}"
            );
            None
        }
    }
}

/// The same array from its values and its validity, which may start within a byte.
fn from_values(device: &DeviceArray, input: &mut Input<'_>) -> Option<DeviceArray> {
    if device.offset() > 0 || device.num_buffers() != 2 || device.num_children() > 0 {
        return None;
    }
    let (data_type, values) = (device.data_type().clone(), device.buffer(1)?);
    match input.choice(2) {
        0 => DeviceArray::from_values(data_type, device.len(), values, device.validity()),
        _ => device.with_values(data_type, values),
    }
    .ok()
}

type Made = (&'static str, DeviceArray, ArrayRef);

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
            .to_device(&world.places[input.choice(3)].device)
            .expect("valid"),
        2 => {
            expected = expected.project(&[1]).expect("there are two");
            up.project(&[1]).expect("there are two")
        }
        3 => {
            let (array, schema) = up.export(SyncPolicy::Event).expect("valid");
            let options = place_of(world, up.as_struct()).options(Validation::Full);
            // SAFETY: our own export.
            unsafe { DeviceRecordBatch::import_with(array, &schema, &options) }.expect("our own")
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
    let reader = DeviceRecordBatchIterator::new(batches, up.schema(), device_type);
    let stream =
        FFI_ArrowDeviceArrayStream::new(reader, export_options(input)).expect("names are C's");
    let options = place_of(world, device).options(Validation::Structure);
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
