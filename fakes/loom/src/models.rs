use std::future::{Future, poll_fn};
use std::task::{Context, Poll, Wake, Waker};

use loom::future::block_on;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use loom::thread;

use crate::demand::{Demand, Turn};
use crate::inbox::{Inbox, Kind, Refused};

/// What a producer sends.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Item {
    Schema,
    Task(u32),
    End,
    Failed,
}

type Stream = Inbox<Item, ()>;

impl Stream {
    fn task(&self, i: u32) -> Result<(), Refused> {
        self.push(Kind::Task, Item::Task(i))
    }

    fn end(&self) -> Result<(), Refused> {
        self.push(Kind::End, Item::End)
    }

    fn fail(&self) -> Result<(), Refused> {
        self.push(Kind::Error, Item::Failed)
    }

    fn opened(&self, wanted: u64) -> Result<(), Refused> {
        self.open(Item::Schema, wanted, (), |()| ())
    }
}

/// Checks all orders with at most three preemptions; all orders would take minutes.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Returns an opened stream that requested so many items, and whose schema was taken.
fn opened(wanted: u64) -> Arc<Stream> {
    let inbox = Arc::new(Stream::new());
    assert_eq!(inbox.opened(wanted), Ok(()));
    let schema = inbox.poll(Waker::noop());
    assert_eq!(schema, Poll::Ready(Some(Item::Schema)));
    inbox
}

async fn next(inbox: &Stream) -> Option<Item> {
    poll_fn(|cx| inbox.poll(cx.waker())).await
}

#[test]
fn no_item_and_no_wake_is_lost() {
    check(|| {
        let inbox = opened(2);
        let producer = inbox.clone();
        let calls = thread::spawn(move || {
            assert_eq!((producer.task(1), producer.end()), (Ok(()), Ok(())));
            producer.release();
        });
        block_on(async {
            assert_eq!(next(&inbox).await, Some(Item::Task(1)));
            assert_eq!(next(&inbox).await, Some(Item::End));
            assert_eq!(next(&inbox).await, None);
        });
        calls.join().unwrap();
    });
}

#[test]
fn an_error_comes_after_the_items_before_it() {
    check(|| {
        let inbox = opened(1);
        let producer = inbox.clone();
        let calls = thread::spawn(move || {
            assert_eq!((producer.task(1), producer.fail()), (Ok(()), Ok(())));
            producer.release();
        });
        block_on(async {
            assert_eq!(next(&inbox).await, Some(Item::Task(1)));
            assert_eq!(next(&inbox).await, Some(Item::Failed));
            assert_eq!(next(&inbox).await, None);
        });
        calls.join().unwrap();
    });
}

/// The waiting task is woken by the schema.
#[test]
fn a_schema_wakes() {
    loom::model(|| {
        let inbox = Arc::new(Stream::new());
        let producer = inbox.clone();
        let calls = thread::spawn(move || assert_eq!(producer.opened(1), Ok(())));
        assert_eq!(block_on(next(&inbox)), Some(Item::Schema));
        calls.join().unwrap();
    });
}

/// The waiting task is woken by an error instead of the schema.
#[test]
fn an_error_instead_of_the_schema_wakes() {
    loom::model(move || {
        let inbox = Arc::new(Stream::new());
        let producer = inbox.clone();
        let calls = thread::spawn(move || {
            assert_eq!(producer.fail(), Ok(()));
            producer.release();
        });
        assert_eq!(block_on(next(&inbox)), Some(Item::Failed));
        calls.join().unwrap();
    });
}

/// The producer is not called while its release returns, or later.
#[test]
fn no_call_outlives_the_release() {
    loom::model(|| {
        let inbox = opened(1);
        let alive = Arc::new(AtomicBool::new(true));
        let (producer, freed) = (inbox.clone(), alive.clone());
        let calls = thread::spawn(move || {
            producer.release();
            freed.store(false, SeqCst);
        });
        let call = |()| {
            assert!(alive.load(SeqCst));
            thread::yield_now();
            assert!(alive.load(SeqCst));
        };
        inbox.request(1, call);
        drop(inbox.abandon(call));
        calls.join().unwrap();
    });
}

/// Each item that is queued or comes late is returned to one side, once; the producer is cancelled
/// unless it has ended.
#[test]
fn an_abandoned_stream_gives_everything_back() {
    loom::model(|| {
        let inbox = opened(2);
        let (producer, cancelled) = (inbox.clone(), Arc::new(AtomicUsize::new(0)));
        let seen = cancelled.clone();
        let calls = thread::spawn(move || {
            let mut back = 0;
            for task in [1, 2] {
                back += match producer.task(task) {
                    Err(Refused::Unwanted) => 1,
                    Ok(()) => 0,
                    other => panic!("{other:?}"),
                };
            }
            producer.release();
            back
        });
        let rest = inbox.abandon(|()| _ = seen.fetch_add(1, SeqCst));
        let queued = rest.len();
        let back = calls.join().unwrap();
        assert_eq!(queued + back, 2);
        // A stream that was abandoned before the last task came was not released yet.
        let told = cancelled.load(SeqCst);
        assert!(told == 1 || (told == 0 && back == 0));
    });
}

/// A stream is dropped while its schema arrives: the producer is refused or cancelled.
#[test]
fn an_opening_is_refused_or_cancelled() {
    loom::model(|| {
        let inbox = Arc::new(Stream::new());
        let producer = inbox.clone();
        let cancelled = Arc::new(AtomicUsize::new(0));
        let calls = thread::spawn(move || match producer.opened(1) {
            Ok(()) => false,
            Err(Refused::Unwanted) => true,
            other => panic!("{other:?}"),
        });
        drop(inbox.abandon(|()| _ = cancelled.fetch_add(1, SeqCst)));
        let refused = calls.join().unwrap();
        assert_eq!(usize::from(refused) + cancelled.load(SeqCst), 1);
    });
}

#[test]
fn no_request_and_no_cancellation_is_missed() {
    check(|| {
        let demand = Arc::new(Demand::new());
        let (asks, cancels) = (demand.clone(), demand.clone());
        let ask = thread::spawn(move || asks.request(1));
        let cancel = thread::spawn(move || cancels.cancel());
        let asked = || match demand.turn() {
            Turn::Produce(true) => Poll::Ready(()),
            _ => Poll::Pending,
        };
        let _ = block_on(poll_fn(|cx| demand.poll(cx, |_| asked())));
        let then = block_on(poll_fn(|cx| demand.poll(cx, |_| Poll::<()>::Pending)));
        assert_eq!(then, Err(Turn::Cancelled));
        ask.join().unwrap();
        cancel.join().unwrap();
    });
}

/// Both sides together: each item is requested before it comes, and all come.
#[test]
fn both_sides_keep_each_other_going() {
    check(|| {
        let inbox = opened(1);
        let demand = Arc::new(Demand::new());
        demand.request(1);
        let (to, asked) = (inbox.clone(), demand.clone());
        let producer = thread::spawn(move || {
            // One future for all, as the producer's: a request may come when it has just found none.
            let mut sending = Box::pin(async {
                for item in [1, 2] {
                    let requested = |_: &mut Context<'_>| match asked.turn() {
                        Turn::Produce(true) => Poll::Ready(()),
                        _ => Poll::Pending,
                    };
                    poll_fn(requested).await;
                    asked.take_one();
                    assert_eq!(to.task(item), Ok(()));
                }
            });
            let sent = poll_fn(|cx| asked.poll(cx, |cx| sending.as_mut().poll(cx)));
            assert_eq!(block_on(sent), Ok(()));
            assert_eq!(to.end(), Ok(()));
            asked.close();
            to.release();
        });
        block_on(async {
            for item in [1, 2] {
                assert_eq!(next(&inbox).await, Some(Item::Task(item)));
                inbox.request(1, |()| demand.request(1));
            }
            assert_eq!(next(&inbox).await, Some(Item::End));
        });
        producer.join().unwrap();
    });
}

/// Two requests whose sum overflows, and two invalid ones.
#[test]
fn sums_saturate_and_faults_are_kept() {
    loom::model(|| {
        let demand = Arc::new(Demand::new());
        let other = demand.clone();
        let ask = thread::spawn(move || other.request(i64::MAX));
        demand.request(i64::MAX);
        ask.join().unwrap();
        assert_eq!(demand.turn(), Turn::Produce(true));
        demand.request(0);
        demand.request(-1);
        assert_eq!(demand.turn(), Turn::Invalid(0));
        demand.close();
    });
}

/// After the close, unless a call of the consumer is waking the task at that moment, none does.
#[test]
fn nothing_wakes_after_the_close() {
    struct Inside(AtomicBool);
    impl Wake for Inside {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.store(true, SeqCst);
            thread::yield_now();
            self.0.store(false, SeqCst);
        }
    }
    check(|| {
        let demand = Arc::new(Demand::new());
        let inside = std::sync::Arc::new(Inside(AtomicBool::new(false)));
        let asks = demand.clone();
        let waker = Waker::from(inside.clone());
        let _ = demand.poll(&mut Context::from_waker(&waker), |_| Poll::<()>::Pending);
        let ask = thread::spawn(move || asks.request(1));
        demand.close();
        if !demand.is_waking() {
            assert!(!inside.0.load(SeqCst));
            thread::yield_now();
            assert!(!inside.0.load(SeqCst));
        }
        ask.join().unwrap();
    });
}
