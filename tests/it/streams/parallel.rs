//! Readers whose parts are read by several threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread::{ThreadId, current, sleep};
use std::time::Duration;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchIterator, RecordBatchReader, UInt8Array};
use arrow_buffer::Buffer;
use arrow_device::{Error, ParallelReader, UploadingReader};
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};

use crate::simkit::{MODES, Sim};
use crate::streams::{batch, until};
use crate::support::assert_same_batch;

type Item = Result<RecordBatch, ArrowError>;

/// What a batch counts at least.
const LEAST_BYTES: usize = 4096;

fn schema() -> SchemaRef {
    batch(0, 0).schema()
}

/// A part.
fn reader<I: Iterator<Item = Item>>(
    batches: impl IntoIterator<IntoIter = I>,
) -> RecordBatchIterator<I> {
    RecordBatchIterator::new(batches.into_iter(), schema())
}

/// The batches of a part: as many as its number says in some order, which is none for some.
fn part(number: usize) -> Vec<RecordBatch> {
    let n = number * 7 % 5;
    (0..n)
        .map(|i| batch(1 + i + number % 3, 1000 * number + i))
        .collect()
}

fn oks(batches: Vec<RecordBatch>) -> impl Iterator<Item = Item> {
    batches.into_iter().map(Ok)
}

fn disk() -> ArrowError {
    ArrowError::ComputeError("the disk is gone".into())
}

/// The number of the part, and its error.
#[track_caller]
fn of_part(e: ArrowError) -> (usize, Error) {
    match Error::from(e) {
        Error::Part { part, source } => (part, (*source).clone()),
        e => panic!("{e}"),
    }
}

/// Counts what is alive of something.
struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, SeqCst);
        Self(count.clone())
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[test]
fn parts_keep_their_order() {
    for (parts, bytes) in [
        (0, 1 << 20),
        (1, 1 << 20),
        (2, 0),
        (23, 0),
        (23, 20_000),
        (23, 1 << 20),
    ] {
        let all: Vec<_> = (0..parts).flat_map(part).collect();
        for threads in [1, 2, 5, 0] {
            let open = |number: usize| {
                // Later parts are read faster.
                sleep(Duration::from_micros(300 / (number as u64 + 1)));
                Ok(reader(oks(part(number))))
            };
            let read = ParallelReader::new(schema(), 0..parts, open)
                .with_threads(threads)
                .with_max_bytes(bytes);
            assert_eq!(read.schema(), schema());
            let read: Vec<_> = read.map(|b| b.unwrap()).collect();
            assert_eq!(read, all, "{parts} parts, {threads} threads, {bytes} bytes");
        }
    }
}

/// Readers that are there, of different lengths, in place of functions that open them.
#[test]
fn readers_that_are_there() {
    let readers: Vec<_> = (0..9).map(|number| reader(oks(part(number)))).collect();
    let read = ParallelReader::new(schema(), readers, Ok).with_threads(3);
    assert!(read.map(|b| b.unwrap()).eq((0..9).flat_map(part)));
}

/// Nothing is called before the first batch is asked for, and everything on other threads.
#[test]
fn nothing_happens_before_it_is_asked_for() {
    let calls = Arc::new(Mutex::new(Vec::<ThreadId>::new()));
    let (of_parts, of_open, of_batches) = (calls.clone(), calls.clone(), calls.clone());
    let note = |calls: &Mutex<Vec<_>>| calls.lock().unwrap().push(current().id());
    let parts = (0..2).inspect(move |_| note(&of_parts));
    let open = move |number: usize| {
        note(&of_open);
        let of_batches = of_batches.clone();
        Ok(reader(
            oks(vec![batch(1, number)]).inspect(move |_| note(&of_batches)),
        ))
    };
    let mut read = ParallelReader::new(schema(), parts, open);
    sleep(Duration::from_millis(20));
    assert!(calls.lock().unwrap().is_empty());
    assert_eq!(read.by_ref().count(), 2);
    assert!(read.next().is_none() && read.next().is_none());
    let calls = calls.lock().unwrap();
    assert_eq!(calls.len(), 6);
    assert!(!calls.contains(&current().id()));
}

/// Each of three parts is read only when all three are.
#[test]
fn parts_are_read_at_the_same_time() {
    let barrier = Arc::new(Barrier::new(3));
    let open = move |number: usize| {
        let barrier = barrier.clone();
        let batches = (0..4_usize).map(move |i| {
            barrier.wait();
            Ok(batch(1, 10 * number + i))
        });
        Ok(reader(batches))
    };
    let read = ParallelReader::new(schema(), 0..3, open).with_threads(3);
    assert_eq!(read.filter(Result::is_ok).count(), 12);
}

/// How a part fails.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fails {
    AtOpen,
    AtNext,
    Fields,
    PanicAtOpen,
    PanicAtNext,
    PanicOfParts,
    PanicAtDrop,
}

struct Bomb(bool);

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(!self.0, "out of order");
    }
}

#[test]
fn errors_and_panics_come_once_and_in_order() {
    use Fails::*;
    for fails in [
        AtOpen,
        AtNext,
        Fields,
        PanicAtOpen,
        PanicAtNext,
        PanicOfParts,
        PanicAtDrop,
    ] {
        for (at, threads) in [(0, 1), (3, 1), (3, 2), (5, 4)] {
            let opened = Arc::new(AtomicUsize::new(0));
            let count = opened.clone();
            let parts = (0..1000).inspect(move |number| {
                assert!(*number != at || fails != PanicOfParts, "out of order");
            });
            let open = move |number: usize| {
                count.fetch_add(1, SeqCst);
                let is_it = number == at;
                match fails {
                    AtOpen if is_it => return Err(disk()),
                    PanicAtOpen if is_it => panic!("out of order"),
                    _ => {}
                }
                let bomb = Bomb(is_it && fails == PanicAtDrop);
                let ends = (0..1).filter_map(move |_| {
                    let _held = &bomb;
                    match fails {
                        AtNext if is_it => Some(Err(disk())),
                        PanicAtNext if is_it => panic!("out of order"),
                        _ => None,
                    }
                });
                let schema = match fails {
                    Fields if is_it => {
                        Schema::new(vec![Field::new("b", DataType::Int64, true)]).into()
                    }
                    _ => schema(),
                };
                let batches = [batch(2, number), batch(3, number)].map(|batch| {
                    RecordBatch::try_new(schema.clone(), batch.columns().to_vec()).unwrap()
                });
                let batches: Box<dyn Iterator<Item = Item>> =
                    Box::new(oks(batches.to_vec()).chain(ends));
                Ok(RecordBatchIterator::new(batches, schema))
            };
            let mut read = ParallelReader::new(schema(), parts, open).with_threads(threads);
            let before = match fails {
                AtNext | PanicAtNext | PanicAtDrop => 2 * at + 2,
                _ => 2 * at,
            };
            let context = format!("{fails:?}, part {at}, {threads} threads");
            for i in 0..before {
                assert_eq!(
                    read.next().unwrap().unwrap(),
                    batch(2 + i % 2, i / 2),
                    "{context}"
                );
            }
            let e = read.next().unwrap().unwrap_err();
            let text = e.to_string();
            assert!(text.contains(&format!("part {at}: ")), "{context}: {text}");
            let (part, e) = of_part(e);
            assert_eq!(part, at, "{context}");
            let expected = match fails {
                AtOpen | AtNext => "the disk is gone",
                Fields => "column 'a' is called 'b'",
                _ => "panicked: out of order",
            };
            assert!(e.to_string().contains(expected), "{context}: {e}");
            let errno = if fails == Fields {
                libc::EINVAL
            } else {
                libc::EIO
            };
            assert_eq!(e.errno(), errno, "{context}");
            assert!(read.next().is_none() && read.next().is_none(), "{context}");
            // The threads end.
            until(|| Arc::strong_count(&opened) == 1);
            assert!(opened.load(SeqCst) < 1000, "{context}");
        }
    }
}

/// The first part that fails is reported, though a later one has failed before it. No other part is begun then.
#[test]
fn the_first_of_several_errors_is_reported() {
    let opened = Arc::new(AtomicUsize::new(0));
    let count = opened.clone();
    let (failed, wait) = mpsc::channel::<()>();
    let (failed, wait) = (Mutex::new(Some(failed)), Mutex::new(wait));
    let open = move |number: usize| {
        count.fetch_add(1, SeqCst);
        if number > 0 {
            // Ends the wait of the first.
            drop(failed.lock().unwrap().take());
            return Err(ArrowError::ComputeError("later".into()));
        }
        let _ = wait.lock().unwrap().recv();
        sleep(Duration::from_millis(20));
        Ok(reader(vec![Ok(batch(1, 1)), Err(disk())]))
    };
    let mut read = ParallelReader::new(schema(), 0..1000, open).with_threads(2);
    assert_eq!(read.next().unwrap().unwrap(), batch(1, 1));
    let (part, e) = of_part(read.next().unwrap().unwrap_err());
    assert_eq!((part, e.to_string().contains("disk is gone")), (0, true));
    assert!(read.next().is_none());
    until(|| Arc::strong_count(&opened) == 1);
    assert_eq!(opened.load(SeqCst), 2);
}

/// A slow part lets the others run into the bound. They go on when it is done.
#[test]
fn memory_is_bounded_while_one_part_is_slow() {
    let rows = 1000;
    let bytes = 8 * rows;
    for (threads, most) in [(2, 10 * bytes), (4, 10 * bytes), (4, 0)] {
        let produced = Arc::new(AtomicUsize::new(0));
        let count = produced.clone();
        let (release, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        let open = move |number: usize| {
            if number == 0 {
                let _ = released.lock().unwrap().recv();
            }
            let count = count.clone();
            let batches = (0..6_usize).map(move |i| {
                count.fetch_add(1, SeqCst);
                Ok(batch(rows, 10 * number + i))
            });
            Ok(reader(batches))
        };
        let mut read = ParallelReader::new(schema(), 0..8, open)
            .with_threads(threads)
            .with_max_bytes(most);
        let released = std::thread::spawn({
            let produced = produced.clone();
            move || {
                let least = if most == 0 { 0 } else { 6 };
                until(|| produced.load(SeqCst) >= least);
                sleep(Duration::from_millis(30));
                let ahead = produced.load(SeqCst);
                // Each of the other threads holds one that has no room.
                assert!(
                    ahead <= most / bytes + threads,
                    "{ahead} batches, {threads} threads"
                );
                drop(release);
            }
        });
        for i in 0..48 {
            // As far ahead later, when the consumer is slow.
            let ahead = produced.load(SeqCst);
            assert!(
                ahead <= i + most / bytes + 1 + threads,
                "{ahead} after {i} batches"
            );
            assert_eq!(
                read.next().unwrap().unwrap(),
                batch(rows, 10 * (i / 6) + i % 6)
            );
            sleep(Duration::from_micros(500));
        }
        assert!(read.next().is_none());
        released.join().unwrap();
    }
}

/// Nor do parts pile up that have few rows, or none.
#[test]
fn empty_parts_are_bounded() {
    for rows in [None, Some(0), Some(1)] {
        let opened = Arc::new(AtomicUsize::new(0));
        let count = opened.clone();
        let (release, released) = mpsc::channel::<()>();
        let released = Mutex::new(released);
        let open = move |number: usize| {
            if count.fetch_add(1, SeqCst) == 0 {
                let _ = released.lock().unwrap().recv();
            }
            Ok(reader(oks(rows
                .map(|rows| batch(rows, number))
                .into_iter()
                .collect())))
        };
        let mut read = ParallelReader::new(schema(), 0..300, open)
            .with_threads(3)
            .with_max_bytes(100 * LEAST_BYTES);
        let asking = std::thread::spawn(move || {
            let first = read.next();
            drop(read);
            first
        });
        until(|| opened.load(SeqCst) >= 45);
        sleep(Duration::from_millis(30));
        let ahead = opened.load(SeqCst);
        assert!(ahead <= 103, "{ahead} parts");
        drop(release);
        let first = asking
            .join()
            .unwrap()
            .map(|batch| batch.unwrap().num_rows());
        assert_eq!(first, rows);
    }
}

/// Dropping does not wait for a part that is stuck, whose thread drops it later.
#[test]
fn dropping_waits_for_nobody() {
    for taken in [0, 1, 2, 7] {
        let alive = Arc::new(AtomicUsize::new(0));
        let count = alive.clone();
        let stuck = Arc::new(AtomicBool::new(true));
        let waiting = stuck.clone();
        let open = move |number: usize| {
            let (held, waiting) = (Alive::new(&count), waiting.clone());
            // Endless behind the third, and stuck in its first batch.
            let n = if number > 2 { usize::MAX } else { 3 };
            let batches = (0..n).map(move |i| {
                let _held = &held;
                while number > 2 && waiting.load(SeqCst) {
                    sleep(Duration::from_millis(1));
                }
                Ok(batch(1, 10 * number + i))
            });
            Ok(reader(batches))
        };
        let mut read = ParallelReader::new(schema(), 0.., open).with_threads(3);
        let kept: Vec<_> = read.by_ref().take(taken).map(|b| b.unwrap()).collect();
        assert_eq!(kept.len(), taken);
        drop(read);
        stuck.store(false, SeqCst);
        until(|| Arc::strong_count(&alive) == 1);
        assert_eq!(alive.load(SeqCst), 0);
    }
}

/// Bytes whose drop panics.
struct Mine(Arc<AtomicUsize>);

impl AsRef<[u8]> for Mine {
    fn as_ref(&self) -> &[u8] {
        &[1, 2, 3]
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
        panic!("a batch's memory, on purpose");
    }
}

/// Batches that wait when a part fails, or when the reader is dropped, and whose owners panic.
#[test]
fn what_nobody_takes_may_panic_in_its_drop() {
    for fails in [true, false] {
        let (panics, made) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (mines, count) = (panics.clone(), made.clone());
        let of_bytes = |bytes: bytes::Bytes| {
            let column = UInt8Array::new(Buffer::from(bytes).into(), None);
            RecordBatch::try_from_iter([("a", Arc::new(column) as ArrayRef)]).unwrap()
        };
        let first = of_bytes(bytes::Bytes::from_static(&[7]));
        let schema = first.schema();
        let of = schema.clone();
        let open = move |number: usize| {
            let (count, mines, first) = (count.clone(), mines.clone(), first.clone());
            let batches: Box<dyn Iterator<Item = Item>> = match number {
                0 => Box::new((0..2).map(move |i| match i {
                    0 => Ok(first.clone()),
                    _ => {
                        // When the third is made, two wait.
                        until(|| count.load(SeqCst) == 3);
                        Err(disk())
                    }
                })),
                _ => Box::new((0..3).map(move |_| {
                    count.fetch_add(1, SeqCst);
                    Ok(of_bytes(bytes::Bytes::from_owner(Mine(mines.clone()))))
                })),
            };
            Ok(RecordBatchIterator::new(batches, of.clone()))
        };
        let mut read = ParallelReader::new(schema, 0..2, open).with_threads(2);
        assert_eq!(read.next().unwrap().unwrap().num_rows(), 1);
        until(|| made.load(SeqCst) == 3);
        if fails {
            let (part, e) = of_part(read.next().unwrap().unwrap_err());
            assert_eq!(
                (part, e.to_string().contains("the disk is gone")),
                (0, true)
            );
            assert!(read.next().is_none());
        }
        drop(read);
        until(|| panics.load(SeqCst) == 3);
    }
}

/// The iterator of parts returns one after the stream was dropped.
#[test]
fn nothing_is_opened_after_a_drop() {
    let opened = Arc::new(AtomicUsize::new(0));
    let (go, wait) = mpsc::channel::<()>();
    let parts = (0..3).inspect(move |number| {
        if *number == 1 {
            wait.recv().unwrap();
        }
    });
    let counted = opened.clone();
    let open = move |_| {
        counted.fetch_add(1, SeqCst);
        Ok(reader([Ok(batch(1, 0))]))
    };
    let mut read = ParallelReader::new(schema(), parts, open).with_threads(1);
    assert_eq!(read.next().unwrap().unwrap().num_rows(), 1);
    drop(read);
    go.send(()).unwrap();
    // The thread has ended.
    until(|| Arc::strong_count(&opened) == 1);
    assert_eq!(opened.load(SeqCst), 1);
}

#[test]
fn parts_go_to_a_device() {
    let all: Vec<_> = (0..23).flat_map(part).collect();
    for mode in MODES {
        for ahead in [false, true] {
            let sim = Sim::new(mode);
            let open = |number: usize| Ok(reader(oks(part(number))));
            let read = ParallelReader::new(schema(), 0..23, open).with_threads(2);
            let up = UploadingReader::new(read, &sim);
            let up: Box<dyn Iterator<Item = _>> = match ahead {
                true => Box::new(up.read_ahead(2)),
                false => Box::new(up),
            };
            let mut n = 0;
            for (up, sent) in up.zip(&all) {
                assert_same_batch(sent, &up.unwrap().to_host().unwrap(), n);
                n += 1;
            }
            assert_eq!(n, all.len());
            // The error is the same on this side.
            let open = |number: usize| match number {
                2 => Err(disk()),
                _ => Ok(reader(oks(part(number)))),
            };
            let read = ParallelReader::new(schema(), 0..23, open).with_threads(2);
            let e = UploadingReader::new(read, &sim)
                .find_map(Result::err)
                .unwrap();
            assert!(matches!(e, Error::Part { part: 2, .. }), "{e}");
            sim.assert_done();
        }
    }
}
