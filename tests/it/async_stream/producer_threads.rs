//! The producer when its consumer calls from many threads.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use arrow_device::async_stream::{AsyncDeviceRecordBatchStream, Outcome};
use arrow_device::{DeviceRecordBatch, ImportOptions, Result};
use futures::stream;

use crate::async_stream::kit::*;
use crate::async_stream::producer::{Running, adapted, cancelled, completed, options, producing};

#[test]
fn the_handler_is_called_by_who_polls_and_nobody_else() {
    let consumer = FakeConsumer::new();
    let mut produce = producing(40, &consumer);
    let polling = thread::spawn(move || {
        let outcome = block_on(&mut produce);
        (thread::current().id(), outcome)
    });
    eventually("the schema", || consumer.story() == "S");
    for _ in 0..4 {
        let other = consumer.clone();
        thread::spawn(move || (0..10).for_each(|_| other.request(1)))
            .join()
            .unwrap();
    }
    let (id, outcome) = polling.join().unwrap();
    completed(outcome);
    assert!(consumer.threads().iter().all(|thread| *thread == id));
    consumer.assert_done();
}

#[test]
fn requests_of_many_threads_add_up() {
    let consumer = FakeConsumer::new();
    let mut produce = producing(5_000, &consumer);
    assert!(poll(&mut produce).is_pending());
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..250).for_each(|_| consumer.request(1)));
        }
    });
    // A poll does not run for ever: it wakes itself for the rest.
    loop {
        let (wakes, waker) = Wakes::new();
        assert!(poll_with(&mut produce, &waker).is_pending());
        if wakes.count() == 0 {
            break;
        }
    }
    assert_eq!(consumer.received(), 2000);
    consumer.cancel();
    cancelled(block_on(produce));
    consumer.assert_done();
}

#[test]
fn a_cancel_of_another_thread_ends_a_stream_that_never_ends() {
    let consumer = FakeConsumer::requesting(i64::MAX);
    consumer.on_task(|this| FakeConsumer::refuse(this.take()));
    let produce = producing(i64::MAX, &consumer);
    let polling = thread::spawn(move || block_on(produce));
    eventually("some batches", || consumer.received() > 50);
    let others = [(); 4].map(|()| {
        let other = consumer.clone();
        thread::spawn(move || other.try_cancel())
    });
    others.into_iter().for_each(|t| t.join().unwrap());
    cancelled(polling.join().unwrap());
    consumer.assert_done();
}

/// An executor that gives up its thread: a poll does not run for ever, however much is ready.
#[test]
fn a_poll_with_unbounded_demand_comes_back_for_cancel() {
    let consumer = FakeConsumer::requesting(i64::MAX);
    consumer.on_task(|this| {
        if this.received() == 100 {
            this.cancel();
        }
        FakeConsumer::refuse(this.take())
    });
    cancelled(block_on(producing(i64::MAX, &consumer)));
    assert_eq!(consumer.received(), 100);
    consumer.assert_done();
}

/// The last waker is woken, by the stream and by the consumer.
#[test]
fn the_last_waker_is_woken() {
    type Slot = Arc<Mutex<(VecDeque<i64>, Option<std::task::Waker>)>>;
    let slot = Slot::default();
    let source = slot.clone();
    let batches = stream::poll_fn(move |context| {
        let mut slot = source.lock().unwrap();
        slot.1 = Some(context.waker().clone());
        match slot.0.pop_front() {
            Some(i) => std::task::Poll::Ready(Some(Ok(batch(i)) as Result<DeviceRecordBatch>)),
            None => std::task::Poll::Pending,
        }
    });
    let consumer = FakeConsumer::requesting(1);
    let mut produce: Running = Box::pin(produce(adapted(batches), consumer.handler(), options()));
    let ((_, first), (second, waker)) = (Wakes::new(), Wakes::new());
    assert!(poll_with(&mut produce, &first).is_pending());
    assert!(poll_with(&mut produce, &waker).is_pending());
    let woken = second.count();
    consumer.request(1);
    assert!(second.count() > woken, "by the consumer");
    let mut state = slot.lock().unwrap();
    state.0.push_back(5);
    let woken = second.count();
    state.1.take().unwrap().wake();
    drop(state);
    assert!(second.count() > woken, "by the stream");
    assert!(poll(&mut produce).is_pending());
    assert_eq!(number_of(&consumer.extract()), 5);
    drop(produce);
    consumer.assert_done();
}

/// Extraction, requests and cancels on other threads while the producer goes on, ends and goes away.
#[test]
fn anything_at_any_time() {
    let end = Instant::now() + Duration::from_millis(1000);
    let mut round = 0u64;
    let mut seen = [0; 3];
    // Enough on a slow machine, and under a sanitizer, too.
    let too_few = |round, seen: &[i32]| round <= 20 || seen.contains(&0) && round < 1000;
    while Instant::now() < end || too_few(round, &seen) {
        round += 1;
        let consumer = FakeConsumer::requesting(3);
        let (n, cancels, drops) = (round as i64 % 40, round % 3 == 0, round % 7 == 0);
        let mut produce = producing(n, &consumer);
        assert!(poll(&mut produce).is_pending() || consumer.released());
        let done = Arc::new(AtomicBool::new(consumer.released()));
        let mut others = Vec::new();
        for i in 0..3 {
            let (other, done) = (consumer.clone(), done.clone());
            others.push(thread::spawn(move || {
                let mut taken = 0;
                loop {
                    let over = done.load(SeqCst);
                    while let Some(task) = other.try_take() {
                        // A task in hand keeps the producer's struct.
                        other.request(1);
                        if cancels && i == 1 && taken == 2 {
                            other.cancel();
                        }
                        taken += 1;
                        match i {
                            0 => assert_eq!(FakeConsumer::refuse(task), 0),
                            _ => drop(other.extract_task(task)),
                        }
                    }
                    if over {
                        return;
                    }
                    thread::yield_now();
                }
            }));
        }
        let ended = done.clone();
        let polling = thread::spawn(move || {
            if ended.load(SeqCst) {
                return 0;
            }
            let outcome = match drops {
                true => {
                    drop(produce);
                    1
                }
                false => match block_on(produce) {
                    Ok(Outcome::Completed) => 0,
                    Ok(Outcome::Cancelled) => 2,
                    other => panic!("{other:?}"),
                },
            };
            ended.store(true, SeqCst);
            outcome
        });
        seen[polling.join().unwrap()] += 1;
        others.into_iter().for_each(|t| t.join().unwrap());
        // What is dropped while a call wakes it ends on a thread of its own.
        let soon = Instant::now() + Duration::from_secs(60);
        while !consumer.released() {
            assert!(Instant::now() < soon, "{:?}", consumer.story());
            thread::yield_now();
        }
        consumer.assert_done();
    }
    assert!(seen.iter().all(|n| *n > 0), "{round}: {seen:?}");
}

/// Polls hold a lock that wakers take, as an interpreter's: a release that waited for the consumer's request
/// within a poll would wait for ever, since the request wakes.
#[test]
fn a_release_does_not_wait_for_who_wakes_the_task() {
    struct Locking(Mutex<()>, AtomicBool, thread::ThreadId);
    impl Wake for Locking {
        fn wake(self: Arc<Self>) {
            self.1.store(true, SeqCst);
            // Who polls has it.
            if thread::current().id() != self.2 {
                drop(self.0.lock());
            }
        }
    }
    let here = thread::current().id();
    let lock = Arc::new(Locking(Mutex::new(()), AtomicBool::new(false), here));
    let (waker, woken) = (Waker::from(lock.clone()), lock.clone());
    let (ending, ended) = mpsc::channel();
    let mut polls = 0;
    let batches = stream::poll_fn(move |_| {
        polls += 1;
        match polls {
            1 => Poll::Ready(Some(Ok(batch(0)))),
            2 => Poll::Pending,
            _ => {
                // The end, while the consumer requests.
                ending.send(()).unwrap();
                eventually("a request", || woken.1.load(SeqCst));
                Poll::Ready(None)
            }
        }
    });
    // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
    let (handler, opening) =
        unsafe { AsyncDeviceRecordBatchStream::handler(1, ImportOptions::default()) };
    let mut produce = produce(adapted(batches), handler, options());
    let reader = thread::spawn(move || {
        let mut stream = block_on(opening).unwrap();
        ended.recv().unwrap();
        next(&mut stream).unwrap().unwrap();
    });
    loop {
        let held = lock.0.lock();
        lock.1.store(false, SeqCst);
        if poll_with(&mut produce, &waker).is_ready() {
            break;
        }
        drop(held);
        thread::yield_now();
    }
    reader.join().unwrap();
}

/// A consumer that knows the struct before the schema, which it need not, may cancel.
#[test]
fn a_cancel_before_the_schema_is_followed_by_the_release_alone() {
    let consumer = FakeConsumer::new();
    let handler = consumer.handler();
    let batches = adapted(stream::iter([Ok(batch(0))]));
    let mut produce = produce(batches, handler, options());
    // SAFETY: the handler stays there until its release, and the producer has set its struct.
    unsafe {
        let producer = (*handler).producer;
        (*producer).cancel.unwrap()(producer);
    }
    let outcome = poll(&mut produce);
    assert!(matches!(outcome, Poll::Ready(Ok(Outcome::Cancelled))));
    assert_eq!(consumer.story(), "R");
    drop(produce);
    consumer.assert_done();
}
