//! The consumer when callbacks come from many threads, or from inside its own calls.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use arrow_device::async_stream::AsyncDeviceRecordBatchStream;
use libc::EPIPE;

use crate::async_stream::consumer::{act, good, opened, up_to_error};
use crate::async_stream::kit::*;
use crate::support::Rng;

fn elsewhere<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    thread::spawn(f).join().unwrap()
}

#[test]
fn callbacks_may_come_from_several_threads_in_turn() {
    let (producer, opening) = FakeProducer::open(8);
    let other = producer.clone();
    assert_eq!(elsewhere(move || other.schema()), 0);
    let mut stream = block_on(opening).unwrap();
    for i in 0..5 {
        let other = producer.clone();
        assert_eq!(elsewhere(move || other.task(&batch(i))), 0);
    }
    let other = producer.clone();
    assert_eq!(elsewhere(move || other.end()), 0);
    let other = producer.clone();
    elsewhere(move || other.release());
    (0..5).for_each(|i| assert_eq!(good(next(&mut stream)), i));
    assert!(next(&mut stream).is_none());
    producer.assert_balanced();
}

#[test]
fn a_stream_may_be_read_on_another_thread_than_it_is_fed() {
    let (producer, opening) = FakeProducer::open(3);
    let reader = thread::spawn(move || {
        let mut stream = block_on(opening).unwrap();
        let mut n = 0;
        while let Some(item) = next(&mut stream) {
            assert_eq!(number_of(&item.unwrap()), n);
            n += 1;
        }
        n
    });
    producer.schema();
    for i in 0..2000 {
        eventually("a request", || producer.requested() > i);
        assert_eq!(producer.task(&batch(i)), 0);
    }
    producer.end();
    producer.release();
    assert_eq!(reader.join().unwrap(), 2000);
    producer.assert_balanced();
}

/// Nobody may be inside the producer when `release` returns: its struct goes then.
#[test]
fn a_release_waits_for_a_call_in_another_thread() {
    for cancels in [false, true] {
        let (producer, mut stream) = opened(2);
        producer.task(&batch(0));
        let gate = Gate::default();
        let pass = gate.clone();
        match cancels {
            true => producer.on_cancel(move |_| pass.pass()),
            false => producer.on_request(move |_, _| pass.pass()),
        }
        let inside = thread::spawn(move || match cancels {
            true => drop(stream),
            false => assert_eq!(good(next(&mut stream)), 0),
        });
        gate.reached();
        let done = Arc::new(AtomicBool::new(false));
        let (other, told) = (producer.clone(), done.clone());
        let releasing = thread::spawn(move || {
            other.release();
            told.store(true, SeqCst);
        });
        thread::sleep(SHORT);
        assert!(!done.load(SeqCst), "released under a call");
        gate.open();
        releasing.join().unwrap();
        inside.join().unwrap();
        assert_eq!(producer.cancels(), usize::from(cancels));
        producer.assert_balanced();
    }
}

/// A callback is not held up by a call that another thread is in.
#[test]
fn tasks_and_errors_do_not_wait_for_a_request() {
    let (producer, mut stream) = opened(2);
    producer.task(&batch(0));
    let gate = Gate::default();
    let pass = gate.clone();
    producer.on_request(move |_, _| pass.pass());
    let reader = thread::spawn(move || {
        assert_eq!(good(next(&mut stream)), 0);
        up_to_error(stream)
    });
    gate.reached();
    assert_eq!(producer.task(&batch(1)), 0);
    producer.error(7, None, None);
    gate.open();
    producer.release();
    let (before, e) = reader.join().unwrap();
    assert_eq!((before, e.errno()), (vec![1], 7));
    producer.assert_balanced();
}

// ---- a producer that calls back from inside `request` and `cancel`

#[test]
fn tasks_from_inside_request_come_in_order() {
    let (producer, opening) = FakeProducer::open(3);
    let sent = Mutex::new(0);
    producer.on_request(move |producer, n| {
        for _ in 0..n {
            let i = *sent.lock().unwrap();
            *sent.lock().unwrap() += 1;
            assert_eq!(producer.task(&batch(i)), 0);
        }
    });
    assert_eq!(producer.schema(), 0);
    let mut stream = block_on(opening).unwrap();
    (0..1000).for_each(|i| assert_eq!(good(next(&mut stream)), i));
    drop(stream);
    producer.release();
    producer.assert_balanced();
}

/// What a producer does inside a call, and what the reader sees.
#[test]
fn anything_from_inside_request_and_cancel() {
    let cases: [(&[&str], c_int); 5] = [
        (&["the end"], 0),
        (&["an error"], 7),
        (&["a release"], EPIPE),
        (&["an error", "a release"], 7),
        (&["a task", "an error", "a release"], 7),
    ];
    for ((acts, expected), within) in cases
        .into_iter()
        .flat_map(|case| ["on_schema", "request", "cancel"].map(|within| (case, within)))
    {
        let (producer, opening) = FakeProducer::open(4);
        let all_acts = move |p: &FakeProducer| acts.iter().for_each(|what| _ = act(p, what));
        if within == "on_schema" {
            producer.on_request(move |producer, _| all_acts(producer));
        }
        let code = producer.schema();
        let found = block_on(opening).and_then(|mut stream| {
            assert_eq!(code, 0);
            if within != "on_schema" {
                producer.task(&batch(0));
                producer.task(&batch(1));
                producer.on_request(move |producer, _| all_acts(producer));
                producer.on_cancel(move |producer| all_acts(producer));
                assert_eq!(good(next(&mut stream)), 0);
            }
            if within == "request" {
                assert_eq!(good(next(&mut stream)), 1);
            }
            if within != "cancel" {
                while let Some(item) = next(&mut stream) {
                    assert_eq!(good(Some(Ok(item?))), 2);
                }
            }
            Ok(())
        });
        let found = found.map_or_else(|e| e.errno(), |()| 0);
        let expected = if within == "cancel" { 0 } else { expected };
        assert_eq!(found, expected, "{acts:?} within {within}");
        assert_eq!(producer.cancels(), usize::from(within == "cancel"));
        producer.release();
        producer.assert_balanced();
    }
}

/// An extraction that fails tells so with `on_error` at once, and releases.
#[test]
fn an_error_and_a_release_from_inside_extract_data() {
    let (producer, stream) = opened(3);
    let inner = producer.clone();
    producer.task_of(
        move |_| {
            inner.error(28, Some(c"told inside"), None);
            inner.release();
            28
        },
        None,
    );
    producer.task(&batch(1));
    let (before, e) = up_to_error(stream);
    assert!(before.is_empty());
    assert_eq!(e.errno(), 28);
    assert!(e.to_string().contains("told inside"), "{e}");
    assert_eq!(producer.cancels(), 0, "it was released");
    producer.assert_balanced();
}

/// Wakers run foreign code: what they do must find the stream usable.
struct DropsStream(Mutex<Option<AsyncDeviceRecordBatchStream>>, bool);

impl Wake for DropsStream {
    fn wake(self: Arc<Self>) {
        let stream = self.0.lock().unwrap().take();
        drop(stream);
        assert!(!self.1, "inside a waker");
    }
}

/// Or panic.
#[test]
fn a_waker_may_drop_the_stream() {
    for (what, panics) in ["a task", "an error", "a release"]
        .into_iter()
        .flat_map(|what| [(what, false), (what, true)])
    {
        let (producer, mut stream) = opened(3);
        let slot = Arc::new(DropsStream(Mutex::default(), panics));
        let waker = Waker::from(slot.clone());
        assert!(poll_next_with(&mut stream, &waker).is_pending());
        *slot.0.lock().unwrap() = Some(stream);
        let code = act(&producer, what);
        assert!(code == 0 || panics && code == libc::EIO, "{code}");
        assert!(slot.0.lock().unwrap().is_none(), "was woken");
        assert_eq!(producer.cancels(), usize::from(what == "a task"));
        producer.release();
        producer.assert_balanced();
    }
}

/// A producer that ends somehow at some time, on a thread of its own or inside calls, and a reader that goes away.
#[test]
fn a_producer_and_a_reader_that_do_anything_at_any_time() {
    let end = Instant::now() + Duration::from_secs(1);
    let mut rng = Rng::new(5);
    let mut rounds = 0;
    // Enough on a slow machine, and under a sanitizer, too.
    while Instant::now() < end || rounds <= 50 {
        rounds += 1;
        let (producer, opening) = FakeProducer::open(1 + rng.below(5));
        let (sends, how, reads) = (rng.below(20), rng.below(5), rng.below(25));
        let inside = rng.below(12);
        let calls = AtomicUsize::new(0);
        producer.on_request(move |producer, _| {
            if calls.fetch_add(1, SeqCst) == inside {
                producer.error(7, None, None);
            }
        });
        let feeding = {
            let producer = producer.clone();
            thread::spawn(move || {
                if producer.schema() != 0 {
                    return producer.release();
                }
                let start = Instant::now();
                for i in 0..sends as i64 {
                    while producer.requested() <= i && producer.cancels() == 0 {
                        if start.elapsed() > Duration::from_millis(3) {
                            return producer.release();
                        }
                        thread::yield_now();
                    }
                    producer.task(&batch(i));
                }
                match how {
                    0 => _ = producer.end(),
                    1 => producer.error(9, None, None),
                    2 => _ = producer.schema(),
                    3 => _ = producer.raw_task(&mut no_task(), None),
                    _ => {}
                }
                producer.release();
            })
        };
        if reads > 0 {
            let mut found = 0;
            if let Ok(mut stream) = block_on(opening) {
                while found < reads as i64 {
                    match next(&mut stream) {
                        Some(Ok(item)) => assert_eq!(number_of(&item), found),
                        Some(Err(_)) => {
                            assert!(next(&mut stream).is_none(), "an error is the last item");
                            break;
                        }
                        None => {
                            assert_eq!((how, found), (0, sends as i64), "a cut stream looks whole");
                            break;
                        }
                    }
                    found += 1;
                }
            }
        } else {
            drop(opening);
        }
        feeding.join().unwrap();
        producer.assert_balanced();
    }
}
