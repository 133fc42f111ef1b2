//! Async device streams whose other side throws: which callback, and what comes of it.

use arrow_device::async_stream::Outcome;
use arrow_device::{ArrowDeviceType, DeviceRecordBatches, Error, FFI_ArrowDeviceArray, SyncPolicy};
use futures::stream;

use crate::async_stream::kit::{
    FakeConsumer, FakeProducer, all, batch, block_on, numbers, produce,
};
use crate::async_stream::producer::options;
use crate::foreign_exceptions::assert_thrown;
use crate::foreign_exceptions::thrown::{Thrown, is_chosen};

#[test]
fn consumers_throw() {
    for (throws, story) in [
        ("on_schema", "SR"),
        ("on_next_task", "STR"),
        ("on_error", "STER"),
        ("release", "ST.R"),
    ] {
        if !is_chosen(throws) {
            continue;
        }
        let (consumer, thrown) = (FakeConsumer::requesting(9), Thrown::default());
        let throw = thrown.clone();
        let throw = move |_: &FakeConsumer| throw.throw();
        match throws {
            "on_schema" => consumer.on_schema(throw),
            "on_next_task" => consumer.on_task(throw),
            "on_error" => consumer.on_error(throw),
            _ => consumer.on_release(throw),
        }
        let mut items = vec![Ok(batch(0))];
        if throws == "on_error" {
            items.push(Err(Error::Cancelled { operation: "it" }));
        }
        let (schema, items) = (numbers(0, 1).schema(), stream::iter(items));
        let items = DeviceRecordBatches::from_stream(items, schema, ArrowDeviceType::CPU);
        let outcome = block_on(produce(items, consumer.handler(), options()));
        assert_eq!(consumer.story(), story, "{throws}");
        let errno = libc::EIO;
        match throws {
            "on_error" => assert!(matches!(outcome, Err(Error::Cancelled { .. }))),
            "release" => assert_eq!(outcome.unwrap(), Outcome::Completed),
            _ => assert_eq!(outcome.unwrap(), Outcome::Refused { errno }),
        }
        assert_eq!(thrown.count(), 1, "{throws}");
        consumer.assert_done();
    }
}

#[test]
fn producers_throw() {
    for throws in ["request", "extract_data", "cancel"] {
        if !is_chosen(throws) {
            continue;
        }
        let (producer, opening) = FakeProducer::open(2);
        let thrown = Thrown::default();
        let throw = thrown.clone();
        match throws {
            "request" => producer.on_request(move |_, _| throw.throw()),
            "cancel" => producer.on_cancel(move |_| throw.throw()),
            _ => {}
        }
        let opened = producer.schema();
        let throw = thrown.clone();
        match throws {
            // What it had written when it threw is the consumer's.
            "extract_data" => {
                let (array, _) = batch(0).export(SyncPolicy::Event).unwrap();
                let give = move |out: *mut FFI_ArrowDeviceArray| {
                    // SAFETY: the consumer passes memory for one struct.
                    unsafe { out.write(array) };
                    throw.throw()
                };
                producer.task_of(give, None)
            }
            _ => producer.task(&batch(0)),
        };
        producer.task(&batch(1));
        let mut stream = block_on(opening).unwrap();
        match throws {
            "request" => {
                assert_eq!(opened, libc::EIO);
                assert_thrown(all(&mut stream).into_iter().find_map(Result::err), throws);
            }
            "extract_data" => {
                let items = all(&mut stream);
                assert_eq!((opened, items.len()), (0, 1));
                assert_thrown(items.into_iter().find_map(Result::err), throws);
            }
            _ => assert_eq!(opened, 0),
        }
        drop(stream);
        // Whose schema was refused stops by itself.
        let cancels = usize::from(throws != "request");
        assert_eq!(producer.cancels(), cancels, "{throws}");
        producer.release();
        assert_eq!(thrown.count(), 1, "{throws}");
        producer.assert_balanced();
    }
}
