//! Streams that are dropped in every state leave no memory behind.

include!("it/arrow.rs");

#[path = "it/async_stream/kit/mod.rs"]
mod kit;
#[path = "it/simkit/mod.rs"]
mod simkit;
#[path = "it/support/mod.rs"]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::SeqCst};

use arrow_device::async_stream::AsyncDeviceRecordBatchStream;
use arrow_device::{ArrowDeviceType, DeviceRecordBatches, ExportOptions, SyncPolicy};
use futures::stream;
use kit::{FakeConsumer, FakeProducer, batch, numbers, poll, poll_next, produce};

/// Counts the bytes that live, of all threads.
struct Live;

static BYTES: AtomicIsize = AtomicIsize::new(0);

// SAFETY: every call goes to `System` unchanged; counting allocates nothing and does not unwind.
unsafe impl GlobalAlloc for Live {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size() as isize, SeqCst);
        // SAFETY: the caller keeps to the contract of `GlobalAlloc::alloc`, which is passed on unchanged.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as isize, SeqCst);
        // SAFETY: the caller keeps to the contract of `GlobalAlloc::dealloc`, which is passed on unchanged.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Live = Live;

/// What lives after a thousand runs lived after a few. Other threads' bytes count too: the test harness's main
/// thread may only now note down that this test runs. What is left behind by the runs is left each time.
#[track_caller]
fn leaves_nothing(what: &str, mut run: impl FnMut()) {
    for _ in 0..10 {
        run();
    }
    let mut left = [0; 3];
    for left in &mut left {
        let before = BYTES.load(SeqCst);
        for _ in 0..1000 {
            run();
        }
        *left = BYTES.load(SeqCst) - before;
        if *left == 0 {
            return;
        }
    }
    panic!("{what}: bytes of 1000 streams, three times: {left:?}");
}

fn opened(n: i64) -> (FakeProducer, AsyncDeviceRecordBatchStream) {
    let (producer, opening) = FakeProducer::open(8);
    assert_eq!(producer.schema(), 0);
    for i in 0..n {
        assert_eq!(producer.task(&batch(i)), 0);
    }
    (producer, kit::block_on(opening).unwrap())
}

fn consumers() {
    leaves_nothing("an opening", || drop(FakeProducer::open(1)));
    leaves_nothing("a schema that nobody takes", || {
        let (producer, opening) = FakeProducer::open(1);
        producer.set_metadata(kit::encode(&[(b"k", b"v")]));
        producer.schema();
        drop((opening, producer));
    });
    leaves_nothing("queued tasks, the stream first", || {
        let (producer, mut stream) = opened(5);
        assert!(poll_next(&mut stream).is_ready());
        drop(stream);
        drop(producer);
    });
    leaves_nothing("queued tasks, the producer first", || {
        let (producer, mut stream) = opened(5);
        assert!(poll_next(&mut stream).is_ready());
        drop(producer);
        drop(stream);
    });
    leaves_nothing("a stream that was read", || {
        let (producer, mut stream) = opened(3);
        producer.end();
        producer.release();
        for _ in 0..4 {
            assert!(poll_next(&mut stream).is_ready());
        }
    });
    leaves_nothing("errors", || {
        let (producer, mut stream) = opened(1);
        producer.error(5, Some(c"no"), Some(&kit::encode(&[(b"k", b"v")])));
        producer.error(6, Some(c"again"), None);
        producer.release();
        for _ in 0..3 {
            assert!(poll_next(&mut stream).is_ready());
        }
    });
    leaves_nothing("an error that nobody takes", || {
        let (producer, stream) = opened(1);
        producer.error(5, Some(c"no"), None);
        drop(stream);
    });
    leaves_nothing("a failed extraction", || {
        let (producer, mut stream) = opened(0);
        producer.task_of(|_| 5, None);
        producer.task(&batch(1));
        assert!(poll_next(&mut stream).is_ready());
    });
    leaves_nothing("refused tasks", || {
        let (producer, _stream) = opened(8);
        producer.task(&batch(8));
        producer.schema();
    });
}

fn producers() {
    let producing = |n: i64, consumer: &FakeConsumer| {
        let items: Vec<_> = (0..n).map(|i| Ok(batch(i))).collect();
        let batches = DeviceRecordBatches::from_stream(
            stream::iter(items),
            numbers(0, 1).schema(),
            ArrowDeviceType::CPU,
        );
        let batches = batches.with_metadata(kit::map(&[("k", "v")]));
        let options = ExportOptions::new(SyncPolicy::Event);
        Box::pin(produce(batches, consumer.handler(), options))
    };
    leaves_nothing("a produce that is never polled", || {
        drop(producing(2, &FakeConsumer::requesting(1)));
    });
    leaves_nothing("a produce without demand", || {
        let consumer = FakeConsumer::new();
        assert!(poll(&mut producing(2, &consumer)).is_pending());
    });
    leaves_nothing("tasks that are refused after the producer's end", || {
        let consumer = FakeConsumer::requesting(2);
        let mut produce = producing(4, &consumer);
        assert!(poll(&mut produce).is_pending());
        drop(produce);
        consumer.assert_done();
    });
    leaves_nothing("tasks that are taken after the producer's end", || {
        let consumer = FakeConsumer::requesting(9);
        assert!(poll(&mut producing(2, &consumer)).is_ready());
        drop(consumer.extract());
        // While a task is left the producer's struct is there.
        consumer.request(1);
        let (code, array) = FakeConsumer::extract_raw(consumer.take());
        assert_eq!(code, 0);
        drop(array);
    });
    leaves_nothing("a cancellation", || {
        let consumer = FakeConsumer::requesting(2);
        let mut produce = producing(4, &consumer);
        assert!(poll(&mut produce).is_pending());
        consumer.cancel();
        assert!(poll(&mut produce).is_ready());
        consumer.assert_done();
    });
    leaves_nothing("refusals", || {
        let consumer = FakeConsumer::requesting(2);
        consumer.on_task(|_| 5);
        assert!(poll(&mut producing(4, &consumer)).is_ready());
        consumer.assert_done();
    });
}

/// One test, so that nothing else allocates meanwhile.
#[test]
fn streams_that_are_dropped_leave_nothing() {
    consumers();
    producers();
}
