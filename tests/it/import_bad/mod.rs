//! Foreign arrays that break a rule: each is refused with an error that names the place, and every node is released
//! exactly once. "2.3.n" and "3.3.n" are known defects of other implementations that the case replays.

mod devices;
mod legal;
mod structure;
mod values;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::support::producer::Producer;
use crate::support::types::structure as struct_of;
use crate::support::{Nulls, array};
use crate::support_c::Foreign;
use crate::support_c::sim::Place;
use arrow_array::{ArrayRef, Int32Array};
use arrow_device::{
    DeviceArray, DeviceRecordBatch, DeviceRecordBatchStreamReader, FFI_ArrowDeviceArray,
    ImportOptions, Result,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Schema};

fn ints() -> ArrayRef {
    Arc::new(Int32Array::from(vec![Some(1), None, Some(3), Some(4)]))
}

fn of(data_type: DataType) -> ArrayRef {
    array(&data_type, 4, Nulls::Some, 3)
}

fn pair() -> ArrayRef {
    of(struct_of(vec![
        ("a", DataType::Int32),
        ("b", DataType::Utf8),
    ]))
}

thread_local! {
    /// Whether structs come out of a stream, as batches.
    static IN_STREAM: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test with single arrays, then with the same arrays in streams.
fn both_ways(test: fn()) {
    for in_stream in [false, true] {
        IN_STREAM.set(in_stream);
        test();
    }
}

/// Imports what must be refused, and checks text and releases.
#[track_caller]
fn refused(place: &Place, mut foreign: Foreign, expected: &str) {
    let device_type = foreign.device_array.device_type;
    let context = format!("{expected}, device type {device_type}, on {place}");
    // A released array is a stream's end.
    let released = foreign.device_array.array.release.is_none();
    let is_batch = matches!(foreign.data_type, DataType::Struct(_));
    let result = if IN_STREAM.get() && is_batch && !released {
        streamed(&mut foreign, &place.options).map(drop)
    } else {
        foreign.import(&place.options).map(drop)
    };
    let error = match result {
        Ok(_) => panic!("{context}: accepted"),
        Err(e) => e.to_string(),
    };
    assert!(
        error.contains(expected),
        "{context}: \"{error}\" lacks \"{expected}\""
    );
    assert!(
        foreign.device_array.array.release.is_none(),
        "{context}: not consumed"
    );
    foreign.assert_released(&context);
}

/// The one array of a stream: an error ends the reader, and the stream is released once.
fn streamed(foreign: &mut Foreign, options: &ImportOptions) -> Result<DeviceRecordBatch> {
    let field = foreign.field();
    let array = foreign.take();
    let device_type = array.device_type();
    let mut next = Some(array);
    let mut producer = Producer::new(&Schema::empty(), move |out| {
        let array = next.take().unwrap_or_else(FFI_ArrowDeviceArray::empty);
        // SAFETY: the consumer passes memory for one struct.
        unsafe { out.write(array) };
        0
    });
    let schema = field.clone();
    producer.schema = Box::new(move |out| {
        // SAFETY: the consumer passes memory for one struct.
        unsafe { out.write(FFI_ArrowSchema::try_from(schema.as_ref()).unwrap()) };
        0
    });
    let (stream, released) = producer.stream(device_type);
    // SAFETY: the stream keeps to the interface; what is wrong with its array is refused.
    let mut reader = unsafe { DeviceRecordBatchStreamReader::new(stream, options.clone()) }?;
    let result = reader.next().expect("the stream gives an array");
    if result.is_err() {
        assert!(reader.next().is_none(), "a reader that failed goes on");
    }
    drop(reader);
    assert_eq!(released.load(Ordering::SeqCst), 1, "release of the stream");
    result
}
