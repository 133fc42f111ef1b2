//! Our streams, read by SedonaDB.

use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_device::async_stream::{DeviceRecordBatchStream, Outcome, produce};
use arrow_device::device::sim::SimDevice;
use arrow_device::{Devices, Error, Result};
use arrow_schema::DataType;
use datafusion_common::DataFusionError;
use datafusion_physical_plan::RecordBatchStream;
use futures::{StreamExt, future, stream};
use sedona_extension::extension::{FFI_ArrowAsyncTask, FFI_ArrowDeviceArray};
use sedona_extension::import_sendable_record_batch_stream::ImportedAsyncDeviceStream;
use tokio::task::{JoinHandle, spawn};

use crate::kit::{Counted, Last, eventually, export, number, of_types, upload, within};
use crate::support::{all_types, assert_same_batch, zero_column_batch};

type Producing = JoinHandle<Result<Outcome>>;

/// A stream of ours on its way to a consumer of theirs, on another task.
fn send<S>(stream: S, prefetch: u64) -> (Producing, ImportedAsyncDeviceStream)
where
    S: DeviceRecordBatchStream + Send + 'static,
{
    let (consumer, handler) = ImportedAsyncDeviceStream::new(prefetch);
    // SAFETY: theirs is a handler that stays where it is until its release, and this producer alone gets it.
    let producing = unsafe { produce(stream, handler.into_raw().cast(), export()) };
    (spawn(producing), consumer)
}

/// Reads to the end, or to an error and the end.
async fn read(consumer: &mut ImportedAsyncDeviceStream) -> (Vec<RecordBatch>, Option<String>) {
    let mut batches = vec![];
    while let Some(next) = within(consumer.next()).await {
        match next {
            Ok(batch) => batches.push(batch),
            Err(e) => {
                assert!(within(consumer.next()).await.is_none());
                return (batches, Some(text(e)));
            }
        }
    }
    (batches, None)
}

fn text(e: DataFusionError) -> String {
    e.strip_backtrace()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_type() {
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    let (sent, schema) = of_types(&types);
    let batches = stream::iter(sent.clone()).map(Ok).boxed();
    let (producing, mut consumer) = send(upload(batches, schema.clone(), &Devices::cpu()), 3);
    let (read, error) = read(&mut consumer).await;
    assert_eq!((read.len(), error), (sent.len(), None));
    for (sent, read) in sent.iter().zip(&read) {
        assert_same_batch(sent, read, sent.num_rows());
    }
    assert_eq!(consumer.schema(), schema);
    assert_eq!(producing.await.unwrap().unwrap(), Outcome::Completed);
}

#[tokio::test]
async fn no_columns_and_no_batches() {
    let sent = zero_column_batch(5);
    let batches = stream::iter([Ok(sent.clone())]).boxed();
    let (_, mut consumer) = send(upload(batches, sent.schema(), &Devices::cpu()), 1);
    let (batches, error) = read(&mut consumer).await;
    assert_eq!((batches, error), (vec![sent.clone()], None));

    let (_, mut consumer) = send(
        upload(stream::empty().boxed(), sent.schema(), &Devices::cpu()),
        1,
    );
    assert_eq!(read(&mut consumer).await, (vec![], None));
    assert_eq!(consumer.schema(), sent.schema());
}

/// At most as many batches are there as were requested, and one that is made ahead. Before their first poll nothing is requested.
#[tokio::test(flavor = "multi_thread")]
async fn back_pressure() {
    for prefetch in [1, 2, 5, 100] {
        let source = Counted::default();
        let (producing, mut consumer) = send(source.ours(500, Last::End), prefetch);
        let most = prefetch as i64 + 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(source.made() <= 1);
        for taken in 0..500 {
            let batch = within(consumer.next()).await.unwrap().unwrap();
            assert_eq!(number(&batch), taken);
            if taken % 100 == 3 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert!(source.made() - taken - 1 <= most, "{prefetch}");
        }
        assert!(within(consumer.next()).await.is_none());
        assert_eq!(producing.await.unwrap().unwrap(), Outcome::Completed);
        source.assert_gone();
    }
}

/// Both sides on one task, where neither may wait for the other.
#[tokio::test]
async fn on_one_task() {
    let source = Counted::default();
    let (mut consumer, handler) = ImportedAsyncDeviceStream::new(2);
    // SAFETY: theirs is a handler that stays where it is until its release, and this producer alone gets it.
    let producing = unsafe {
        produce(
            source.ours(100, Last::End),
            handler.into_raw().cast(),
            export(),
        )
    };
    let (outcome, (batches, error)) = within(future::join(producing, read(&mut consumer))).await;
    assert_eq!(outcome.unwrap(), Outcome::Completed);
    assert_eq!((batches.len(), error), (100, None));
    drop(batches);
    source.assert_gone();
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_outlive_both_sides() {
    let source = Counted::default();
    let (producing, mut consumer) = send(source.ours(5, Last::End), 5);
    let (batches, _) = read(&mut consumer).await;
    drop(consumer);
    assert_eq!(producing.await.unwrap().unwrap(), Outcome::Completed);
    assert_eq!(source.alive(), 5);
    let numbers: Vec<_> = batches.iter().map(number).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4]);
    drop(batches);
    source.assert_gone();
}

/// The batches before an error arrive, and then its text. The errno is lost there.
#[tokio::test(flavor = "multi_thread")]
async fn errors() {
    for before in [0, 1, 7] {
        let source = Counted::default();
        let (producing, mut consumer) = send(source.ours(before, Last::Error), 4);
        let (batches, error) = read(&mut consumer).await;
        assert_eq!(batches.len() as i64, before);
        let error = error.unwrap();
        assert!(error.contains("the disk is gone"), "{error}");
        assert!(matches!(producing.await.unwrap(), Err(Error::Arrow(_))));
        drop(batches);
        source.assert_gone();
    }
}

/// A producer that panics, or is dropped, is an error there and not the end.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_goes_away() {
    for last in [Last::Panic, Last::Nothing] {
        let source = Counted::default();
        let (producing, mut consumer) = send(source.ours(3, last), 4);
        for expected in 0..3 {
            let batch = within(consumer.next()).await.unwrap().unwrap();
            assert_eq!(number(&batch), expected);
        }
        producing.abort();
        let (batches, error) = read(&mut consumer).await;
        assert_eq!(batches, []);
        let error = error.unwrap();
        assert!(error.contains("producing an async stream"), "{error}");
        assert!(producing.await.is_err());
        source.assert_gone();
    }
}

/// Their `cancel` is no error on either side.
#[tokio::test(flavor = "multi_thread")]
async fn cancelled() {
    for taken in [1, 3, 40] {
        let source = Counted::default();
        let (producing, mut consumer) = send(source.ours(i64::MAX, Last::End), 4);
        for _ in 0..taken {
            within(consumer.next()).await.unwrap().unwrap();
        }
        consumer.cancel();
        assert_eq!(
            within(producing).await.unwrap().unwrap(),
            Outcome::Cancelled
        );
        // What was queued still arrives.
        let (batches, error) = read(&mut consumer).await;
        assert!(batches.len() <= 5 && error.is_none());
        drop(batches);
        source.assert_gone();
    }
}

/// As DataFusion ends a query. Their callback may refuse a batch that comes meanwhile (1), or see the cancel first.
#[tokio::test(flavor = "multi_thread")]
async fn dropped() {
    let mut refused = 0_usize;
    for round in 0..2000 {
        let source = Counted::default();
        let (producing, mut consumer) = send(source.ours(i64::MAX, Last::End), 1 + round % 64);
        for _ in 0..round % 7 {
            within(consumer.next()).await.unwrap().unwrap();
        }
        drop(consumer);
        match within(producing).await.unwrap().unwrap() {
            Outcome::Cancelled => {}
            outcome => {
                assert_eq!(outcome, Outcome::Refused { errno: 1 });
                refused += usize::from(round % 7 != 0);
            }
        }
        source.assert_gone();
    }
    println!("{refused} of 2000 were refused after the schema");
}

/// Their `on_schema` refuses: with an errno if the stream was cancelled, with 1 if it was dropped.
#[tokio::test]
async fn gone_before_the_schema() {
    for (errno, is_dropped) in [(libc::ECANCELED, false), (1, true)] {
        let source = Counted::default();
        let (consumer, handler) = ImportedAsyncDeviceStream::new(2);
        consumer.cancel();
        let kept = (!is_dropped).then_some(consumer);
        // SAFETY: theirs is a handler that stays where it is until its release, and this producer alone gets it.
        let producing = unsafe {
            produce(
                source.ours(3, Last::End),
                handler.into_raw().cast(),
                export(),
            )
        };
        let outcome = within(producing).await.unwrap();
        assert_eq!(outcome, Outcome::Refused { errno });
        if let Some(mut consumer) = kept {
            assert_eq!(read(&mut consumer).await, (vec![], None));
        }
        source.assert_gone();
    }
}

/// Memory of another device is refused and released, batch for batch: their stream goes on after an error.
#[tokio::test(flavor = "multi_thread")]
async fn memory_of_another_device() {
    let device = Devices::simulated().unwrap();
    let (sent, schema) = of_types(&[DataType::Int32, DataType::Utf8]);
    let count = sent.len();
    let batches = stream::iter(sent).map(Ok).boxed();
    let (producing, mut consumer) = send(upload(batches, schema, &device), 4);
    for _ in 0..count {
        let error = within(consumer.next()).await.unwrap().unwrap_err();
        assert!(text(error).contains("Unsupported device type: 12"));
    }
    assert!(within(consumer.next()).await.is_none());
    assert_eq!(producing.await.unwrap().unwrap(), Outcome::Completed);
    eventually("device memory is kept", || {
        let sim = device.backend().downcast_ref::<SimDevice>();
        sim.unwrap().report().live_allocations == 0
    });
}

/// A release without an end or an error is the end there. (Our producer reports an error before such a release.)
#[tokio::test]
async fn a_truncated_stream_looks_whole() {
    let (mut consumer, handler) = ImportedAsyncDeviceStream::new(2);
    let handler = handler.into_raw();
    // SAFETY: the handler is theirs and is not released yet.
    unsafe { ((*handler).release.unwrap())(handler) };
    assert_eq!(read(&mut consumer).await, (vec![], None));
}

/// What their consumer refuses it does not extract, not even with null. (Our producer drops the batch then.)
#[tokio::test]
async fn what_it_refuses_it_does_not_extract() {
    static EXTRACTED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn extract(_: *mut FFI_ArrowAsyncTask, _: *mut FFI_ArrowDeviceArray) -> i32 {
        EXTRACTED.fetch_add(1, SeqCst);
        0
    }
    let (consumer, handler) = ImportedAsyncDeviceStream::new(2);
    let handler = handler.into_raw();
    drop(consumer);
    let mut task = ManuallyDrop::new(FFI_ArrowAsyncTask {
        extract_data: Some(extract),
        private_data: ptr::null_mut(),
    });
    // SAFETY: the handler is theirs and is not released yet; the task is valid for the call.
    let answer = unsafe {
        let answer = ((*handler).on_next_task.unwrap())(handler, &mut *task, ptr::null());
        ((*handler).release.unwrap())(handler);
        answer
    };
    assert_eq!((answer, EXTRACTED.load(SeqCst)), (1, 0));
}
