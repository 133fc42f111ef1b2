//! Reads the parts of a source, such as the row groups of a file, on several threads.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};

use crate::guard;

/// How many batches of a thread may wait: as many as a row group of a million rows has.
const AHEAD: usize = 16;

/// A batch, or `None` at the end of a part.
type Sent = Result<Option<RecordBatch>, ArrowError>;

/// The batches of all parts in order, and each part is read by a thread of several: the first of `n` threads reads the parts 0, `n`,
/// `2 * n` and so on. Each thread waits while 16 of its batches have not been taken.
///
/// An error or a panic ends the stream, after the batches before it, and its text names the part. Dropping this waits for no
/// thread: each ends once it has read the batch that it is at.
#[derive(Debug)]
pub struct Parts {
    schema: SchemaRef,
    /// One of each thread.
    batches: Vec<Receiver<Sent>>,
    /// Those that were not returned whole.
    left: Range<usize>,
}

impl Parts {
    /// Starts `threads` threads, at least one, which read `parts` parts, each with the reader that `open` returns for its number.
    ///
    /// # Errors
    /// That of the system if it starts no thread.
    pub fn read<R: RecordBatchReader>(
        schema: SchemaRef,
        parts: usize,
        threads: usize,
        open: impl Fn(usize) -> Result<R, ArrowError> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let open = Arc::new(open);
        let threads = threads.clamp(1, parts.max(1));
        let start = |first: usize| {
            let (sender, batches) = sync_channel(AHEAD);
            let open = open.clone();
            let read = move || {
                for part in (first..parts).step_by(threads) {
                    let read = guard::catch(|| send_all(open(part)?, &sender));
                    let end = read.unwrap_or_else(|panic| {
                        Err(ArrowError::ExternalError(
                            format!("panicked: {panic}").into(),
                        ))
                    });
                    let failed = end.is_err();
                    if sender.send(end).is_err() || failed {
                        break;
                    }
                }
            };
            thread::Builder::new()
                .name("reader of parts".into())
                .spawn(read)?;
            Ok(batches)
        };
        Ok(Self {
            schema,
            batches: (0..threads).map(start).collect::<io::Result<_>>()?,
            left: 0..parts,
        })
    }
}

/// Sends the batches of a part, until nobody takes them any more, and returns how the part has ended.
fn send_all(reader: impl RecordBatchReader, to: &SyncSender<Sent>) -> Sent {
    for batch in reader {
        if to.send(Ok(Some(batch?))).is_err() {
            break;
        }
    }
    Ok(None)
}

impl Iterator for Parts {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let part = self.left.clone().next()?;
            let thread = &self.batches[part % self.batches.len()];
            let e = match thread.recv() {
                Ok(Ok(Some(batch))) => return Some(Ok(batch)),
                Ok(Ok(None)) => {
                    self.left.next();
                    continue;
                }
                Ok(Err(e)) => e.to_string(),
                Err(e) => e.to_string(),
            };
            self.left = 0..0;
            // Ends the threads.
            self.batches.clear();
            let text = format!("part {part}: {e}");
            return Some(Err(ArrowError::ExternalError(text.into())));
        }
    }
}

impl RecordBatchReader for Parts {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::thread::sleep;
    use std::time::Duration;

    use arrow_array::{RecordBatchIterator, record_batch};

    use super::*;

    fn batch(id: usize) -> RecordBatch {
        record_batch!(("id", UInt64, [id as u64])).unwrap()
    }

    fn schema() -> SchemaRef {
        batch(0).schema()
    }

    /// The batches of a part: none for some.
    fn part(number: usize) -> impl Iterator<Item = Result<RecordBatch, ArrowError>> {
        (0..number * 7 % 5).map(move |i| Ok(batch(100 * number + i)))
    }

    /// Waits until a condition holds.
    fn until(condition: impl Fn() -> bool) {
        for _ in 0..5000 {
            if condition() {
                return;
            }
            sleep(Duration::from_millis(1));
        }
        panic!("timed out");
    }

    #[test]
    fn parts_keep_their_order() {
        for parts in [0, 1, 2, 23] {
            let all: Vec<_> = (0..parts).flat_map(part).map(Result::unwrap).collect();
            for threads in [0, 1, 2, 5, 40] {
                let open = |number: usize| {
                    // Later parts are read faster.
                    sleep(Duration::from_micros(300 / (number as u64 + 1)));
                    Ok(RecordBatchIterator::new(part(number), schema()))
                };
                let read = Parts::read(schema(), parts, threads, open).unwrap();
                assert_eq!(read.schema(), schema());
                let read: Vec<_> = read.map(Result::unwrap).collect();
                assert_eq!(read, all, "{parts} parts, {threads} threads");
            }
        }
    }

    type Fail = fn() -> Result<RecordBatch, ArrowError>;

    #[test]
    fn errors_and_panics_come_once_and_in_order() {
        let fails: [(&str, Fail); 2] = [
            ("the disk is gone", || {
                Err(ArrowError::ComputeError("the disk is gone".into()))
            }),
            ("panicked: out of order", || panic!("out of order")),
        ];
        for (text, fail) in fails {
            for (at, opens) in [(0, false), (3, true), (5, true), (6, false)] {
                let opened = Arc::new(AtomicUsize::new(0));
                let count = opened.clone();
                let open = move |number: usize| {
                    count.fetch_add(1, SeqCst);
                    if number == at && !opens {
                        fail()?;
                    }
                    let batches = (0..2).map(move |i| match i {
                        1 if number == at => fail(),
                        i => Ok(batch(100 * number + i)),
                    });
                    Ok(RecordBatchIterator::new(batches, schema()))
                };
                let mut read = Parts::read(schema(), 1000, 3, open).unwrap();
                for i in 0..2 * at + usize::from(opens) {
                    let expected = batch(100 * (i / 2) + i % 2);
                    assert_eq!(read.next().unwrap().unwrap(), expected);
                }
                let e = read.next().unwrap().unwrap_err().to_string();
                assert!(e.contains(&format!("part {at}: ")), "{e}");
                assert!(e.contains(text), "{e}");
                assert!(read.next().is_none() && read.next().is_none());
                // The threads end.
                until(|| Arc::strong_count(&opened) == 1);
                assert!(opened.load(SeqCst) < 1000);
            }
        }
    }

    /// What is read ahead of a consumer that has stopped is bounded, and a drop ends the threads.
    #[test]
    fn memory_is_bounded_and_a_drop_ends_the_threads() {
        for taken in [0, 5] {
            let made = Arc::new(AtomicUsize::new(0));
            let of_threads = made.clone();
            let open = move |_| {
                let made = of_threads.clone();
                let batches = (0..).map(move |i| {
                    made.fetch_add(1, SeqCst);
                    Ok(batch(i))
                });
                Ok(RecordBatchIterator::new(batches, schema()))
            };
            let mut read = Parts::read(schema(), 9, 3, open).unwrap();
            assert_eq!(read.by_ref().take(taken).count(), taken);
            let most = taken + 3 * (AHEAD + 1);
            until(|| made.load(SeqCst) == most);
            sleep(Duration::from_millis(20));
            assert_eq!(made.load(SeqCst), most);
            drop(read);
            until(|| Arc::strong_count(&made) == 1);
        }
    }
}
