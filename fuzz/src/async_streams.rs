//! The async device stream: producers and consumers that call in hostile orders.
//!
//! The contract is that of memory alone: a handler is not called after its release, a producer's
//! struct not after the release and the last task's extraction, and `request` calls no handler. All
//! else may come at any time, twice, or never.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::task::{Context, Poll};

use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, DeviceRecordBatchStream};
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatches, Error, ExportOptions,
    FFI_ArrowDeviceArray, Result, SyncPolicy, Validation,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};
use futures::Stream;
use futures::future::BoxFuture;

use crate::check::{read, read_batch};
use crate::input::Input;
use crate::peers::{
    CountedSchema, FakeConsumer, FakeProducer, no_task, numbers, poll, poll_next, produce,
};
use crate::world::{Place, World};

/// | bytes | what |
/// | --- | --- |
/// | 1 | which side is hostile; the device; how much is validated |
/// | rest | calls of both sides in turn |
pub(crate) fn target(input: &mut Input<'_>) {
    let world = World::enter();
    let flags = input.u8();
    let place = &world.places[usize::from(flags / 2) % 3];
    match flags & 1 {
        0 => producer(place, flags, input),
        _ => consumer(&world, place, input),
    }
    world.assert_clean();
}

/// Steps of one input.
const STEPS: usize = 40;

type Host = Pin<Box<dyn Stream<Item = Result<arrow_array::RecordBatch, arrow_schema::ArrowError>>>>;

/// What our side of a stream from a hostile producer holds: one of these, or none.
#[derive(Default)]
struct Side {
    opening: Option<BoxFuture<'static, arrow_device::Result<AsyncDeviceRecordBatchStream>>>,
    stream: Option<AsyncDeviceRecordBatchStream>,
    host: Option<Host>,
}

impl Side {
    /// One poll. Whether something came.
    fn poll(&mut self) -> bool {
        if let Some(opening) = &mut self.opening {
            match poll(opening) {
                Poll::Ready(Ok(stream)) => self.stream = Some(stream),
                Poll::Ready(Err(e)) => told(&e),
                Poll::Pending => return false,
            }
            self.opening = None;
            return true;
        }
        if let Some(stream) = &mut self.stream {
            match poll_next(stream) {
                Poll::Ready(Some(Ok(item))) => read_batch(&item),
                Poll::Ready(end) => {
                    end.iter().for_each(|item| _ = item.as_ref().map_err(told));
                    let after = poll_next(stream);
                    assert!(matches!(after, Poll::Ready(None)), "goes on after its end");
                }
                Poll::Pending => return false,
            }
            return true;
        }
        let Some(host) = &mut self.host else {
            return false;
        };
        let item = poll_next(host);
        if let Poll::Ready(Some(Ok(batch))) = &item {
            batch.columns().iter().for_each(|column| read(column));
        }
        item.is_ready()
    }
}

fn told(e: &Error) {
    let _ = (e.to_string(), e.errno());
}

fn up(place: &Place, first: i64) -> DeviceRecordBatch {
    place.device.upload(&numbers(first, 5)).expect("valid")
}

fn producer(place: &Place, flags: u8, input: &mut Input<'_>) {
    let validation = [Validation::Full, Validation::Structure][usize::from(flags & 32 != 0)];
    let device_type = match flags & 192 {
        192 => ArrowDeviceType::new(99),
        _ => place.device.id().device_type,
    };
    let depth = input.choice(5);
    let (producer, opening) =
        FakeProducer::open_with(depth, device_type, place.validating(validation));
    let mut side = Side {
        opening: Some(opening),
        ..Side::default()
    };
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        let (op, code) = (input.choice(20), i32::from(input.i8()));
        let live = !producer.is_released();
        match op {
            0 => _ = side.poll(),
            1 => side = Side::default(),
            2 => {
                let stream = std::mem::take(&mut side).stream;
                side.host = stream.map(|stream| Box::pin(stream.into_host_stream()) as Host);
            }
            _ if !live => {}
            3 => _ = producer.schema(),
            4 => {
                let field = Field::new("i", DataType::Utf8, code % 2 == 0);
                _ = producer.schema_of(&Schema::new(vec![field]));
            }
            5 => {
                // Not a struct, or released, or without a producer.
                if code % 2 == 0 {
                    producer.connect();
                }
                let field = Field::new("i", DataType::Int64, true);
                _ = match code % 3 {
                    0 => producer.give(CountedSchema::of(
                        FFI_ArrowSchema::try_from(&field).expect("C's"),
                    )),
                    1 => {
                        let mut empty = FFI_ArrowSchema::empty();
                        // SAFETY: a released schema.
                        unsafe { producer.raw_schema(&mut empty) }
                    }
                    // SAFETY: null.
                    _ => unsafe { producer.raw_schema(ptr::null_mut()) },
                };
            }
            6..=8 => {
                let metadata = [None, Some(metadata(code))][usize::from(code % 5 == 0)].clone();
                _ = producer.task_with(&up(place, code.into()), metadata.as_deref());
            }
            9 => {
                // An array and a code, or a code alone.
                let array = up(place, 1)
                    .export_array(&ExportOptions::new(SyncPolicy::Event))
                    .expect("valid");
                let body = move |out: *mut FFI_ArrowDeviceArray| {
                    if code % 2 == 0 {
                        // SAFETY: a consumer gives memory for one struct.
                        unsafe { out.write(array) };
                    }
                    code / 16
                };
                _ = producer.task_of(body, None);
            }
            10 => {
                // Of another schema, or another device type.
                let wrong = Field::new("j", DataType::Utf8, true);
                let text = arrow_array::StringArray::from(vec!["x"]);
                let schema = Arc::new(Schema::new(vec![wrong]));
                let batch = arrow_array::RecordBatch::try_new(schema, vec![Arc::new(text)]);
                let batch = place.device.upload(&batch.expect("fits")).expect("valid");
                _ = producer.task(&batch);
            }
            11 => {
                _ = producer.task(
                    &arrow_device::Devices::cpu()
                        .upload(&numbers(1, 5))
                        .expect("valid"),
                )
            }
            12 => {
                let mut empty = no_task();
                _ = producer.raw_task(&mut empty, None);
            }
            13 => _ = producer.end(),
            14 => {
                let text =
                    [None, Some(c"broken"), Some(c"\xff\xfe")][code.unsigned_abs() as usize % 3];
                let metadata = (code % 4 == 0).then(|| metadata(code));
                producer.error(code, text, metadata.as_deref());
            }
            15 => producer.set_metadata(metadata(code)),
            16 if side.opening.is_some() && producer.log().is_empty() => {
                producer.without_callback(1 + usize::from(code % 2 == 0));
            }
            17 => producer.release(),
            _ => _ = side.poll(),
        }
    }
    // What has come is taken, or not.
    while input.bool() && side.poll() {}
    producer.release();
    drop(side);
    producer.assert_balanced();
}

/// Encoded metadata that ends early, or is not text, or is well.
fn metadata(code: i32) -> Vec<u8> {
    match code.unsigned_abs() % 4 {
        0 => crate::peers::encode(&[(b"k", b"v"), (b"", "ü".as_bytes())]),
        1 => crate::peers::encode(&[(b"k", &[0xff])]),
        2 => (-1i32).to_ne_bytes().to_vec(),
        _ => [1i32.to_ne_bytes(), i32::MIN.to_ne_bytes()].concat(),
    }
}

/// What a stream of ours gives to `produce`, and when.
struct Script {
    items: VecDeque<u8>,
    batches: [DeviceRecordBatch; 3],
}

impl Stream for Script {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(item) = self.items.pop_front() else {
            return Poll::Ready(None);
        };
        match item % 8 {
            0 => Poll::Ready(None),
            1 => Poll::Ready(Some(Err(Error::Released("what a test wants")))),
            2 => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            3 => Poll::Ready(Some(Ok(self.batches[1].clone()))),
            4 => Poll::Ready(Some(Ok(self.batches[2].clone()))),
            5 => std::panic::resume_unwind(Box::new("a stream's")),
            _ => Poll::Ready(Some(Ok(self.batches[0].clone()))),
        }
    }
}

/// Calls within callbacks, by the number of an answer.
fn answer(this: &FakeConsumer, answer: u8) -> i32 {
    match answer % 8 {
        1 => this.request(i64::from(answer / 8)),
        2 => this.request(i64::MAX),
        3 => this.cancel(),
        4 => return i32::from(answer),
        5 => this.request(0),
        6 => this.request(-i64::from(answer)),
        7 => std::panic::resume_unwind(Box::new("a consumer's")),
        _ => {}
    }
    0
}

fn consumer(world: &World, place: &Place, input: &mut Input<'_>) {
    let script = Input::new(input.text()).rest().to_vec();
    let other = world
        .places
        .iter()
        .find(|other| other.device != place.device);
    let other = other.expect("there are three");
    let wrong = Field::new("j", DataType::Boolean, true);
    let wrong = arrow_array::RecordBatch::new_empty(Arc::new(Schema::new(vec![wrong])));
    let batches = [
        up(place, 3),
        up(other, 4),
        place.device.upload(&wrong).expect("valid"),
    ];
    let schema = batches[0].schema();
    let script = Script {
        items: script.into(),
        batches,
    };
    let mut stream =
        DeviceRecordBatches::from_stream(script, schema, place.device.id().device_type);

    let consumer = FakeConsumer::with_options(place.validating(Validation::Structure));
    let answers = Arc::new((AtomicU8::new(input.u8()), AtomicU8::new(input.u8())));
    let (on_schema, on_task) = (answers.clone(), answers.clone());
    consumer.on_schema(move |this| answer(this, on_schema.0.load(SeqCst)));
    let refused = Arc::new(AtomicBool::new(false));
    let last = refused.clone();
    consumer.on_task(move |this| {
        // A panic refuses it, too.
        last.store(true, SeqCst);
        let code = answer(this, on_task.1.load(SeqCst));
        last.store(code != 0, SeqCst);
        code
    });
    let sync = [SyncPolicy::Event, SyncPolicy::Wait][input.choice(2)];
    if input.bool() {
        stream = stream.with_metadata([("k".to_owned(), "v".to_owned())].into());
    }
    let mut future = Some(produce(
        stream,
        consumer.handler(),
        ExportOptions::new(sync),
    ));
    let mut over = false;
    for _ in 0..STEPS {
        let (op, n) = (input.choice(10), input.i8());
        // The producer's struct lives until the release and the last task's extraction.
        let connected = consumer.story().starts_with('S') && !consumer.released();
        match op {
            0..=3 => {
                let Some(producing) = &mut future else {
                    continue;
                };
                if over {
                    continue;
                }
                // A stream's panic goes to who polls.
                match catch_unwind(AssertUnwindSafe(|| poll(producing))) {
                    Ok(Poll::Ready(result)) => {
                        assert!(consumer.released(), "over, and not released");
                        over = true;
                        let _ = result;
                    }
                    Ok(Poll::Pending) => {}
                    Err(_) => future = None,
                }
            }
            4 if connected => consumer.request(n.into()),
            5 if connected => consumer.cancel(),
            6 => {
                if let Some(task) = consumer.try_take() {
                    match consumer.try_extract(task) {
                        Some(batch) => read_batch(&batch),
                        None => assert!(refused.load(SeqCst), "a batch is gone"),
                    }
                }
            }
            7 => {
                if let Some(task) = consumer.try_take() {
                    assert_eq!(FakeConsumer::refuse(task), 0);
                }
            }
            8 if n < -100 => future = None,
            _ => answers.1.store(n as u8, SeqCst),
        }
    }
    drop(future);
    consumer.assert_done();
}
