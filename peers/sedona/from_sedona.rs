//! Streams of SedonaDB, read by us.

use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_device::Error;
use arrow_device::async_stream::{DeviceRecordBatchStream, Outcome, produce};
use arrow_schema::DataType;
use futures::{StreamExt, future, stream};
use sedona_extension::export_sendable_record_batch_stream::{
    SendableRecordBatchStream, drive_stream_to_handler,
};
use sedona_extension::import_sendable_record_batch_stream::ImportedAsyncDeviceStream;
use tokio::task::{JoinHandle, spawn};

use crate::kit::{
    Counted, Last, Opening, export, for_datafusion, handler, number, of_types, within,
};
use crate::support::{all_types, assert_same_batch, zero_column_batch};

/// A stream of theirs on its way to a handler of ours, on another task.
fn send(stream: SendableRecordBatchStream, depth: usize) -> (JoinHandle<()>, Opening) {
    let (handler, opening) = handler(depth);
    // SAFETY: the handler stays where it is until its release, and this producer alone gets it.
    let producing = unsafe { drive_stream_to_handler(stream, handler) };
    (spawn(producing), opening)
}

/// Reads to the end, or to an error and the end.
async fn read(opening: Opening) -> (Vec<RecordBatch>, Option<Error>) {
    let (mut batches, mut stream) = (vec![], within(opening).await.unwrap());
    assert!(stream.metadata().unwrap().is_empty());
    while let Some(next) = within(stream.next()).await {
        match next {
            Ok(batch) => batches.push(batch.to_host().unwrap()),
            Err(e) => {
                assert!(within(stream.next()).await.is_none());
                return (batches, Some(e));
            }
        }
    }
    (batches, None)
}

/// The errno and text of an error that a producer reported.
fn reported(e: &Error) -> (i32, &str) {
    match e {
        Error::AsyncProducer { errno, message, .. } => (*errno, message),
        e => panic!("{e:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_type() {
    // With a field's flags arrow-rs 58 loses whether the keys of a map are sorted.
    let types = all_types().into_iter().map(|(_, t)| t);
    let types: Vec<_> = types
        .filter(|t| !matches!(t, DataType::Map(_, true)))
        .collect();
    let (sent, schema) = of_types(&types);
    let batches = stream::iter(sent.clone()).map(Ok).boxed();
    let (producing, opening) = send(for_datafusion(batches, schema.clone()), 3);
    let (read, error) = read(opening).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(read.len(), sent.len());
    for (sent, read) in sent.iter().zip(&read) {
        assert_same_batch(sent, read, sent.num_rows());
    }
    producing.await.unwrap();
}

#[tokio::test]
async fn no_columns_and_no_batches() {
    let sent = zero_column_batch(5);
    for batches in [vec![sent.clone()], vec![]] {
        let expected = batches.clone();
        let batches = stream::iter(batches).map(Ok).boxed();
        let (producing, opening) = send(for_datafusion(batches, sent.schema()), 1);
        let (read, error) = read(opening).await;
        assert!(read == expected && error.is_none());
        producing.await.unwrap();
    }
}

/// They make no more than we requested.
#[tokio::test(flavor = "multi_thread")]
async fn back_pressure() {
    for depth in [1, 2, 5, 100] {
        let source = Counted::default();
        let (producing, opening) = send(source.theirs(500, Last::End), depth);
        let mut stream = within(opening).await.unwrap();
        for taken in 0..500 {
            if taken % 100 == 3 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert!(source.made() - taken <= depth as i64, "{depth}");
            let batch = within(stream.next()).await.unwrap().unwrap();
            assert_eq!(number(&batch.to_host().unwrap()), taken);
        }
        assert!(within(stream.next()).await.is_none());
        producing.await.unwrap();
        source.assert_gone();
    }
}

/// Both sides on one task, where neither may wait for the other.
#[tokio::test]
async fn on_one_task() {
    let source = Counted::default();
    let (handler, opening) = handler(2);
    // SAFETY: the handler stays where it is until its release, and this producer alone gets it.
    let producing = unsafe { drive_stream_to_handler(source.theirs(100, Last::End), handler) };
    let ((), (batches, error)) = within(future::join(producing, read(opening))).await;
    assert!(batches.len() == 100 && error.is_none());
    drop(batches);
    source.assert_gone();
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_outlive_both_sides() {
    let source = Counted::default();
    let (producing, opening) = send(source.theirs(5, Last::End), 5);
    let batches: Vec<_> = within(opening).await.unwrap().collect().await;
    producing.await.unwrap();
    assert_eq!(source.alive(), 5);
    for (expected, batch) in batches.iter().enumerate() {
        let batch = batch.as_ref().unwrap().to_host().unwrap();
        assert_eq!(number(&batch), expected as i64);
    }
    drop(batches);
    source.assert_gone();
}

/// Their code is 1, which is EPERM, whatever the error was; the text is that of DataFusion.
#[tokio::test(flavor = "multi_thread")]
async fn errors() {
    for before in [0, 1, 7] {
        let source = Counted::default();
        let (producing, opening) = send(source.theirs(before, Last::Error), 4);
        let (batches, error) = read(opening).await;
        assert_eq!(batches.len() as i64, before);
        let error = error.unwrap();
        let (errno, text) = reported(&error);
        assert!(errno == 1 && text.contains("the disk is gone"), "{error}");
        producing.await.unwrap();
        drop(batches);
        source.assert_gone();
    }
}

/// A driver that panics, or is dropped, reports it.
#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_goes_away() {
    for last in [Last::Panic, Last::Nothing] {
        let source = Counted::default();
        let (producing, opening) = send(source.theirs(3, last), 4);
        let mut stream = within(opening).await.unwrap();
        for expected in 0..3 {
            let batch = within(stream.next()).await.unwrap().unwrap();
            assert_eq!(number(&batch.to_host().unwrap()), expected);
        }
        producing.abort();
        let error = within(stream.next()).await.unwrap().unwrap_err();
        assert_eq!(
            reported(&error),
            (libc::ECANCELED, "Stream driver dropped unexpectedly")
        );
        assert!(within(stream.next()).await.is_none());
        assert!(producing.await.is_err());
        source.assert_gone();
    }
}

/// We go away: before the schema, before the first batch, after some, and while their source gives nothing.
#[tokio::test(flavor = "multi_thread")]
async fn dropped() {
    for round in 0..2000 {
        let source = Counted::default();
        let (count, last) = match round % 5 {
            0 => (2, Last::Nothing),
            _ => (i64::MAX, Last::End),
        };
        let (producing, opening) = send(source.theirs(count, last), 1 + round % 64);
        if round % 7 != 0 {
            let mut stream = within(opening).await.unwrap();
            for _ in 0..round % 3 {
                within(stream.next()).await.unwrap().unwrap();
            }
        } else {
            drop(opening);
        }
        within(producing).await.unwrap();
        source.assert_gone();
    }
}

/// Nobody polls their driver before it is dropped: it reports that all the same.
#[tokio::test]
async fn a_driver_that_is_never_polled() {
    let source = Counted::default();
    let (handler, opening) = handler(2);
    // SAFETY: the handler stays where it is until its release, and this producer alone gets it.
    drop(unsafe { drive_stream_to_handler(source.theirs(3, Last::End), handler) });
    let error = within(opening).await.unwrap_err();
    assert_eq!(reported(&error).0, libc::ECANCELED);
    source.assert_gone();
}

/// Our stream through SedonaDB is our stream.
#[tokio::test(flavor = "multi_thread")]
async fn there_and_back() {
    let source = Counted::default();
    // A stream that goes on must know its schema before it is polled.
    let (consumer, theirs) = ImportedAsyncDeviceStream::new_with_schema(3, source.schema());
    let giving = source.ours(300, Last::End);
    // SAFETY: their handler stays where it is until its release, and this producer alone gets it.
    let giving = spawn(unsafe { produce(giving, theirs.into_raw().cast(), export()) });
    let (producing, opening) = send(consumer.into_sendable(), 5);
    let (batches, error) = read(opening).await;
    assert!(error.is_none(), "{error:?}");
    assert!(batches.iter().map(number).eq(0..300));
    within(producing).await.unwrap();
    assert_eq!(within(giving).await.unwrap().unwrap(), Outcome::Completed);
    drop(batches);
    source.assert_gone();
}
