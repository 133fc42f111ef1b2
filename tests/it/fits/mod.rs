//! Batches whose schema is not their stream's: what fits passes, with the stream's schema, and all else is refused, on every
//! way that a stream can take.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, DictionaryArray, RecordBatch, RecordBatchIterator, StringArray, make_array,
};
use arrow_data::ArrayData;
use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, DeviceRecordBatchStream};
use arrow_device::device::sim::SimMode;
use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader,
    DeviceRecordBatches, Devices, Error, ExportOptions, FFI_ArrowDeviceArrayStream, Result,
    SyncPolicy, export_reader, upload_reader, upload_reader_ahead, upload_stream,
};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef, TimeUnit, UnionMode};
use futures::executor::block_on;
use futures::future::join;
use futures::{StreamExt, TryStreamExt, stream};

use crate::async_stream::kit::{Opening, produce};
use crate::support::types::{field, fixed_list, map, required, run_ends, structure, union};
use crate::support::{Nulls, array, assert_same_batch};
use crate::support_c::sim::{Place, cpu, simulated};

mod cases;

use cases::{cases, strict};

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);

/// What comes out, until an error.
type Came = (Vec<RecordBatch>, Option<Error>);

fn until_error(items: impl IntoIterator<Item = Result<RecordBatch>>) -> Came {
    let mut came = vec![];
    for item in items {
        match item {
            Ok(batch) => came.push(batch),
            Err(e) => return (came, Some(e)),
        }
    }
    (came, None)
}

fn to_host(batches: impl Iterator<Item = Result<DeviceRecordBatch>>) -> Came {
    until_error(batches.map(|batch| batch?.to_host()))
}

/// A way for batches of the host.
type Way = fn(&Place, SchemaRef, Vec<RecordBatch>) -> Came;

const WAYS: [(&str, Way); 8] = [
    ("export_reader", |place, schema, batches| {
        let mut out = export_reader(host(schema, batches), &place.device).unwrap();
        to_host(opened(&mut out, place))
    }),
    ("upload_reader", |place, schema, batches| {
        to_host(upload_reader(host(schema, batches), &place.device))
    }),
    ("upload_reader_ahead", |place, schema, batches| {
        let reader = upload_reader_ahead(host(schema, batches), &place.device, 2);
        to_host(reader.unwrap())
    }),
    ("FFI_ArrowDeviceArrayStream", |place, schema, batches| {
        let reader = given(&place.device, schema, &batches);
        let mut out = FFI_ArrowDeviceArrayStream::new(reader, EVENT).unwrap();
        to_host(opened(&mut out, place))
    }),
    ("into_host_reader", |place, schema, batches| {
        let reader = given(&place.device, schema, &batches).into_host_reader();
        until_error(reader.map(|batch| Ok(batch?)))
    }),
    ("from_stream", |place, schema, batches| {
        let batches = stream::iter(batches.into_iter().map(Ok::<_, ArrowError>));
        let queue = place.device.default_queue();
        let items = block_on(upload_stream(batches, schema, queue).collect::<Vec<_>>());
        to_host(items.into_iter())
    }),
    ("into_host_stream", |place, schema, batches| {
        let down = adapted(&place.device, schema, &batches).into_host_stream();
        until_error(block_on(down.map_err(Error::from).collect::<Vec<_>>()))
    }),
    ("produce", |place, schema, batches| {
        // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
        let (handler, opening) =
            unsafe { AsyncDeviceRecordBatchStream::handler(2, place.options.clone()) };
        let sent = adapted(&place.device, schema, &batches);
        consumed(produce(sent, handler, EVENT), opening)
    }),
];

fn host(
    schema: SchemaRef,
    batches: Vec<RecordBatch>,
) -> impl arrow_array::RecordBatchReader + Send + 'static {
    RecordBatchIterator::new(batches.into_iter().map(Ok), schema)
}

fn opened(out: &mut FFI_ArrowDeviceArrayStream, place: &Place) -> DeviceRecordBatchStreamReader {
    // SAFETY: the stream is this crate's, and is not used again.
    let out = unsafe { FFI_ArrowDeviceArrayStream::from_raw(out) };
    // SAFETY: the stream is this crate's.
    unsafe { DeviceRecordBatchStreamReader::new(out, place.options.clone()) }.unwrap()
}

/// Batches that keep their own schemas.
fn uploaded(device: &Device, batches: &[RecordBatch]) -> Vec<Result<DeviceRecordBatch>> {
    batches.iter().map(|batch| device.upload(batch)).collect()
}

fn given(
    device: &Device,
    schema: SchemaRef,
    batches: &[RecordBatch],
) -> impl DeviceRecordBatchReader + Send + 'static {
    let device_type = device.id().device_type;
    DeviceRecordBatches::new(uploaded(device, batches), schema, device_type)
}

fn adapted(
    device: &Device,
    schema: SchemaRef,
    batches: &[RecordBatch],
) -> impl DeviceRecordBatchStream + 'static {
    let batches = stream::iter(uploaded(device, batches));
    DeviceRecordBatches::from_stream(batches, schema, device.id().device_type)
}

/// The error is the producer's own.
fn consumed(
    producing: impl Future<Output = Result<arrow_device::async_stream::Outcome>>,
    opening: Opening,
) -> Came {
    let consuming = async {
        let items = opening.await.unwrap();
        to_host(items.collect::<Vec<_>>().await.into_iter())
    };
    let (produced, (came, told)) = block_on(join(producing, consuming));
    assert_eq!(produced.is_err(), told.is_some());
    (came, produced.err())
}

/// The CPU, and a device whose work runs by itself: nobody here tells one to.
fn places() -> impl Iterator<Item = Place> {
    let sim = simulated(SimMode::Async);
    [Some(cpu()), sim].into_iter().flatten()
}

#[test]
fn on_every_way() {
    for place in places() {
        for case in cases() {
            let schema = case.schema();
            let odd = case.batch(Arc::new(Schema::new(case.got.clone())));
            let exact = match case.nulls {
                Nulls::Some if !case.declared.is_nullable() || !case.refused.is_empty() => {
                    RecordBatch::new_empty(schema.clone())
                }
                _ => case.batch(schema.clone()),
            };
            let sent = [exact.clone(), odd, exact.clone()];
            for (way, go) in WAYS {
                let context = format!("{}, {way}, {place}", case.name);
                let (came, e) = go(&place, schema.clone(), sent.to_vec());
                for batch in &came {
                    assert_eq!(batch.schema(), schema, "{context}");
                    assert_same_batch(&exact, batch, &context);
                }
                if case.refused.is_empty() {
                    assert!(e.is_none(), "{context}: {e:?}");
                    assert_eq!(came.len(), 3, "{context}");
                    continue;
                }
                assert_eq!(came.len(), 1, "{context}");
                let e = e.expect(&context);
                assert_eq!(e.errno(), libc::EINVAL, "{context}");
                let text = e.to_string();
                for word in case.refused {
                    assert!(text.contains(word), "{context}: {text}");
                }
            }
            // Columns are joined whatever their fields say, and the nulls in their own bitmaps are counted.
            let other = [
                "another name",
                "another extension",
                "an order",
                "runs with nulls",
            ];
            let other = other.contains(&case.name);
            let up: Result<Vec<_>> = uploaded(&place.device, &sent).into_iter().collect();
            let joined = up.and_then(|up| DeviceRecordBatch::concat(&schema, &up, None));
            let context = format!("{}, concat, {place}", case.name);
            match joined {
                Ok(joined) => {
                    assert!(case.refused.is_empty() || other, "{context}");
                    assert_eq!(joined.schema(), schema, "{context}");
                    for i in 0..3 {
                        let rows = joined.slice(i * exact.num_rows(), exact.num_rows());
                        let rows = rows.unwrap().to_host().expect(&context);
                        assert_same_batch(&exact, &rows, &context);
                    }
                }
                Err(e) => assert!(!case.refused.is_empty() && !other, "{context}: {e}"),
            }
        }
        place.assert_clean();
    }
}

/// A dictionary without a null key may hold null values.
#[test]
fn null_values_of_a_dictionary() {
    let values = StringArray::from(vec![Some("a"), None]);
    let texts =
        DictionaryArray::<arrow_array::types::Int8Type>::new(vec![0, 1].into(), Arc::new(values));
    let batch =
        RecordBatch::try_from_iter_with_nullable([("a", Arc::new(texts) as ArrayRef, true)])
            .unwrap();
    let batch = Devices::cpu().upload(&batch).unwrap();
    let declared = strict(batch.schema().field(0).data_type().clone());
    let reader = DeviceRecordBatches::new(
        [Ok(batch)],
        Arc::new(Schema::new(vec![declared])),
        Devices::cpu().id().device_type,
    );
    let e = reader
        .into_host_reader()
        .next()
        .unwrap()
        .unwrap_err()
        .to_string();
    assert!(e.contains("column 'a' may have nulls in"), "{e}");
}

/// Nothing is read to find out whether there are nulls: they are counted before, or the rows do not fit.
#[test]
fn nulls_that_nobody_counted() {
    for place in places() {
        let ints = array(&DataType::Int32, 100, Nulls::Some, 1);
        let first = (0..100)
            .find(|&i| arrow_array::Array::is_valid(&ints, i))
            .unwrap();
        let batch = RecordBatch::try_from_iter_with_nullable([("a", ints, true)]).unwrap();
        let batch = place
            .device
            .upload(&batch)
            .unwrap()
            .slice(first, 1)
            .unwrap();
        let declared = Arc::new(Schema::new(vec![strict(DataType::Int32)]));
        let before = place.device.stats();
        let read = |batch: &DeviceRecordBatch| {
            let device_type = place.device.id().device_type;
            let batches = [Ok(batch.clone())];
            let reader = DeviceRecordBatches::new(batches, declared.clone(), device_type);
            reader.into_host_reader().next().unwrap()
        };
        if place.sim.is_some() {
            let e = read(&batch).unwrap_err().to_string();
            assert!(e.contains("column 'a' may have nulls in"), "{e}");
            assert_eq!(place.device.stats(), before, "{place}");
        }
        let counted = batch.compact().unwrap();
        assert_eq!(read(&counted).unwrap().schema(), declared);
        drop((batch, counted));
        place.assert_clean();
    }
}
