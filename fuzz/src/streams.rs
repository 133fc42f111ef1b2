//! C streams: producers that fail, repeat, return nothing, release early; consumers that ask on.

use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Weak};

use arrow_array::{ArrayRef, RecordBatch, StringArray, StructArray};
use arrow_data::ffi::FFI_ArrowArray;
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader,
    ExportOptions, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, Result, SyncPolicy,
    Validation, upload_reader,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field};

use crate::check::{read, read_batch};
use crate::input::Input;
use crate::simkit::watched;
use crate::support::c_stream::CStream;
use crate::world::{Place, World};

/// What one call of a producer does.
#[derive(Clone, Copy, Debug)]
struct Step {
    what: u8,
    code: i32,
}

impl Step {
    fn read(input: &mut Input<'_>) -> Self {
        let (what, code) = (input.u8(), input.u8());
        // Most often 0.
        let code = if code < 200 {
            0
        } else {
            [libc_errno(code), -1, i32::MIN][usize::from(code) % 3]
        };
        Self { what, code }
    }
}

fn libc_errno(code: u8) -> i32 {
    i32::from(code) % 133 + 1
}

/// A producer as C code would write one.
struct Producer {
    schemas: Vec<Step>,
    steps: Vec<Step>,
    texts: Vec<Option<CString>>,
    asked: usize,
    /// A struct, and the same on another device.
    batches: [DeviceRecordBatch; 2],
    label: (ArrowDeviceType, i64),
    released: Arc<AtomicUsize>,
}

type Stream = FFI_ArrowDeviceArrayStream;

impl Producer {
    fn schema(&mut self, out: *mut FFI_ArrowSchema) -> c_int {
        let step = pop(&mut self.schemas);
        let fields = match step.what % 8 {
            0 => return step.code,
            1 => Field::new("", DataType::Int32, true),
            2 => Field::new("", DataType::Utf8, true),
            // As another producer would panic: nothing is printed.
            3 => std::panic::resume_unwind(Box::new("a producer's schema")),
            _ => Field::new_struct("", fields(), true),
        };
        // SAFETY: `out` is the consumer's, for writing.
        unsafe { out.write(FFI_ArrowSchema::try_from(fields).expect("names are C's")) };
        step.code
    }

    fn next(&mut self, stream: *mut Stream, out: *mut FFI_ArrowDeviceArray) -> c_int {
        self.asked += 1;
        let step = pop(&mut self.steps);
        let export = |batch: &DeviceRecordBatch| {
            batch
                .export_array(&ExportOptions::new(SyncPolicy::Event))
                .expect("valid")
        };
        // SAFETY: `out` is the consumer's, for writing.
        let give = |array: FFI_ArrowDeviceArray| unsafe { out.write(array) };
        match step.what % 12 {
            0 => {}
            1 => give(FFI_ArrowDeviceArray::empty()),
            2 => give(export(&self.batches[1])),
            3 => {
                // Another label than the memory's: an error, or plain memory under a device's name.
                let mut array = export(&self.batches[0]);
                if array.sync_event().is_null() {
                    // SAFETY: the embedded array is the struct's first member, and is moved out of it.
                    let array = unsafe { FFI_ArrowArray::from_raw((&raw mut array).cast()) };
                    let (device_type, id) = self.label;
                    let event = std::ptr::null_mut();
                    // SAFETY: in host memory, and of a type of device whose memory is not read there, or not
                    // known.
                    give(unsafe { FFI_ArrowDeviceArray::new(array, device_type, id, event) });
                }
            }
            4 => {
                let columns = self.batches[0].column(0).expect("there is one");
                give(
                    columns
                        .export_array(&ExportOptions::new(SyncPolicy::Event))
                        .expect("valid"),
                );
            }
            5 => std::panic::resume_unwind(Box::new("a producer's array")),
            6 => {
                // It releases itself: nothing may be asked any more.
                // SAFETY: the stream's own callback, with the stream that it was given.
                unsafe { release(stream) };
                return step.code;
            }
            7 => give(export(&self.batches[0].slice(1, 2).expect("inside"))),
            _ => give(export(&self.batches[0])),
        }
        step.code
    }
}

fn pop(steps: &mut Vec<Step>) -> Step {
    steps.pop().unwrap_or(Step { what: 0, code: 0 })
}

/// The producer behind `private_data`; `None` if it has released itself.
///
/// # Safety
/// A stream of this file.
unsafe fn of<'a>(stream: *mut Stream) -> Option<&'a mut Producer> {
    // SAFETY: the caller gives one of this file's.
    unsafe {
        (*stream.cast::<CStream>())
            .private_data
            .cast::<Producer>()
            .as_mut()
    }
}

unsafe extern "C-unwind" fn get_schema(stream: *mut Stream, out: *mut FFI_ArrowSchema) -> c_int {
    // SAFETY: a stream of this file.
    unsafe { of(stream) }.map_or(22, |producer| producer.schema(out))
}

unsafe extern "C-unwind" fn get_next(stream: *mut Stream, out: *mut FFI_ArrowDeviceArray) -> c_int {
    // SAFETY: a stream of this file.
    let producer = unsafe { of(stream) };
    producer.map_or(22, |producer| producer.next(stream, out))
}

unsafe extern "C-unwind" fn get_last_error(stream: *mut Stream) -> *const c_char {
    // SAFETY: a stream of this file.
    let Some(producer) = (unsafe { of(stream) }) else {
        return std::ptr::null();
    };
    let text = producer
        .texts
        .get(producer.asked % producer.texts.len().max(1));
    text.and_then(|text| text.as_deref())
        .map_or(std::ptr::null(), CStr::as_ptr)
}

unsafe extern "C-unwind" fn release(stream: *mut Stream) {
    // SAFETY: a stream of this file, which its consumer releases once.
    unsafe {
        let producer = (*stream.cast::<CStream>()).private_data.cast::<Producer>();
        assert!(!producer.is_null(), "released twice");
        let producer = Box::from_raw(producer);
        producer.released.fetch_add(1, SeqCst);
        let stream = stream.cast::<CStream>();
        (*stream).release = None;
        (*stream).private_data = std::ptr::null_mut();
    }
}

fn fields() -> Vec<Field> {
    vec![
        Field::new("i", DataType::Int64, true),
        Field::new("s", DataType::Utf8, true),
    ]
}

/// Four rows, and what says when their memory is gone.
fn rows() -> (RecordBatch, Weak<Vec<i64>>) {
    let (numbers, memory) = watched(4);
    let texts = StringArray::from(vec![Some("a"), None, Some("ü"), Some("")]);
    let columns: Vec<ArrayRef> = vec![Arc::new(numbers), Arc::new(texts)];
    let rows = RecordBatch::from(StructArray::new(fields().into(), columns, None));
    (rows, memory)
}

/// | bytes | what |
/// | --- | --- |
/// | 1 | the device of the stream; how much is validated |
/// | 1 + ... | what the producer says as its schema, call by call |
/// | 1 + ... | what it answers when asked for an array |
/// | 1 + ... | its texts |
/// | rest | what the consumer does |
pub(crate) fn target(input: &mut Input<'_>) {
    let world = World::enter();
    let flags = input.u8();
    let place = &world.places[usize::from(flags) % 3];
    let other = &world.places[usize::from(flags / 4) % 3];
    let validation = [Validation::Full, Validation::Structure][usize::from(flags & 32 != 0)];
    let mut schemas = steps(&mut Input::new(input.text()));
    let steps = steps(&mut Input::new(input.text()));
    let mut texts = Input::new(input.text());
    // Most inputs get beyond the schema.
    if flags & 64 == 0 {
        schemas.push(Step { what: 7, code: 0 });
    }
    let text = |texts: &mut Input<'_>| {
        let text = texts
            .text()
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        (!text.is_empty()).then(|| CString::new(text).expect("no null byte"))
    };
    let texts: Vec<_> =
        std::iter::from_fn(|| (!texts.is_empty()).then(|| text(&mut texts))).collect();

    let (released, mut memory) = (Arc::new(AtomicUsize::new(0)), vec![]);
    let batches = [place, other].map(|place| {
        let (rows, watch) = rows();
        memory.push(watch);
        place.device.upload(&rows).expect("valid")
    });
    let producer = Producer {
        schemas,
        steps,
        texts,
        asked: 0,
        batches,
        label: [
            (ArrowDeviceType::CUDA_HOST, 0),
            (ArrowDeviceType::CUDA, 0),
            (ArrowDeviceType::EXT_DEV, place.device.id().id),
            (ArrowDeviceType::EXT_DEV, i64::MAX),
            (ArrowDeviceType::new(99), 0),
        ][usize::from(flags / 8) % 5],
        released: released.clone(),
    };
    let data = Box::into_raw(Box::new(producer)).cast();
    let device_type = place.device.id().device_type;
    // What the callbacks of this file do wrong is what consumers must expect.
    let stream = CStream {
        device_type,
        get_schema,
        get_next,
        get_last_error,
        release: Some(release),
        private_data: data,
    };
    consumed(&world, place, stream.into_ffi(), validation, input);
    world.assert_clean();
    assert_eq!(released.load(SeqCst), 1, "releases of the stream");
    // Page-locked memory without a backend has a thread of its own.
    world.eventually("both batches are gone", || {
        memory.iter().all(|rows| rows.strong_count() == 0)
    });
}

fn steps(input: &mut Input<'_>) -> Vec<Step> {
    let mut steps: Vec<_> =
        std::iter::from_fn(|| (!input.is_empty()).then(|| Step::read(input))).collect();
    steps.reverse();
    steps
}

/// Whether the reader goes on.
fn goes_on(item: Option<Result<DeviceRecordBatch>>) -> bool {
    match item {
        Some(Ok(batch)) => {
            read_batch(&batch);
            true
        }
        Some(Err(e)) => {
            let _ = (e.to_string(), e.errno());
            false
        }
        None => false,
    }
}

fn consumed(
    world: &World,
    place: &Place,
    stream: Stream,
    validation: Validation,
    input: &mut Input<'_>,
) {
    // SAFETY: arrays are valid; of the rest consumers expect anything.
    let reader =
        unsafe { DeviceRecordBatchStreamReader::new(stream, place.validating(validation)) };
    let Ok(mut reader) = reader else { return };
    for _ in 0..input.choice(4) {
        if !goes_on(reader.next()) {
            assert!(reader.next().is_none(), "a reader goes on after its end");
        }
    }
    let options = ExportOptions::new([SyncPolicy::Event, SyncPolicy::Wait][input.choice(2)]);
    match input.choice(4) {
        0 => {}
        1 => {
            let mut reader = reader.into_host_reader().with_prefetch(input.choice(4));
            for _ in 0..input.choice(8) {
                let Some(Ok(batch)) = reader.next() else {
                    assert!(reader.next().is_none(), "a reader goes on after its end");
                    break;
                };
                batch.columns().iter().for_each(|column| read(column));
            }
        }
        2 => consume(
            Stream::new(reader, options).expect("names came from C"),
            input,
        ),
        _ => {
            // Down, up to some device, out, in.
            let host = reader.into_host_reader().with_prefetch(input.choice(9));
            let to = &world.places[input.choice(3)];
            let up = upload_reader(host, &to.device);
            consume(Stream::new(up, options).expect("names came from C"), input);
        }
    }
}

/// A consumer that keeps to no order.
fn consume(mut stream: Stream, input: &mut Input<'_>) {
    let CStream {
        get_schema: schema,
        get_next: next,
        get_last_error: last_error,
        ..
    } = *CStream::of(&stream);
    let this = &raw mut stream;
    let mut failed = None;
    for _ in 0..12 {
        match input.choice(6) {
            0 => {
                let mut out = arrow_schema::ffi::FFI_ArrowSchema::empty();
                // SAFETY: our own stream, and memory for one schema.
                let code = unsafe { schema(this, &raw mut out) };
                if code == 0 {
                    Field::try_from(&out).expect("our own");
                }
            }
            // SAFETY: null is refused.
            1 => assert_ne!(unsafe { schema(this, std::ptr::null_mut()) }, 0),
            // SAFETY: null is refused.
            2 => assert_ne!(unsafe { next(this, std::ptr::null_mut()) }, 0),
            3 => {
                // SAFETY: our own stream.
                let text = unsafe { last_error(this) };
                if !text.is_null() {
                    // SAFETY: valid until the next call.
                    let _ = unsafe { CStr::from_ptr(text) }.to_bytes().len();
                }
            }
            _ => {
                let mut out = FFI_ArrowDeviceArray::empty();
                // SAFETY: our own stream, and memory for one array.
                let code = unsafe { next(this, &mut out) };
                assert!(code == 0 || out.is_released(), "an error with an array");
                if let Some(failed) = failed {
                    assert_eq!(failed, code, "an error that does not stay");
                }
                failed = failed.or((code != 0).then_some(code));
            }
        }
    }
    if input.bool() {
        let release = CStream::of(&stream).release.expect("not released yet");
        // SAFETY: our own stream; afterwards it is only released once more, which does nothing.
        unsafe {
            release(&raw mut stream);
            assert!(stream.is_released());
            release(&raw mut stream);
        }
    }
}
