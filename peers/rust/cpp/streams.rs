//! Streams: readers that give, fail and panic; and readers of what the other side gives.

use std::ffi::c_int;
use std::sync::atomic::{AtomicIsize, Ordering::SeqCst};

use arrow_array::{RecordBatch, RecordBatchIterator};
use arrow_device::{
    DeviceRecordBatchReader, DeviceRecordBatchStreamReader, ExportOptions,
    FFI_ArrowDeviceArrayStream, UploadingReader,
};
use arrow_schema::ArrowError;

use super::answer::{Failure, answer};
use super::batches::make;
use super::{options, policy, queue, spelling, write};
use crate::sim::PeersSim;
use crate::support::same_batch;

/// Readers in streams that were not released.
static READERS: AtomicIsize = AtomicIsize::new(0);

struct Counted<I>(I);

impl<I> Counted<I> {
    fn new(batches: I) -> Self {
        READERS.fetch_add(1, SeqCst);
        Self(batches)
    }
}

impl<I: Iterator> Iterator for Counted<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        self.0.next()
    }
}

impl<I> Drop for Counted<I> {
    fn drop(&mut self) {
        READERS.fetch_sub(1, SeqCst);
    }
}

/// How many readers of [`peers_cpp_stream`] live.
#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_readers() -> isize {
    READERS.load(SeqCst)
}

/// What a reader answers with in place of batch `k`.
fn failure(how: c_int, k: u64) -> ArrowError {
    let text = format!("batch {k} cannot be made");
    match how {
        5 => ArrowError::ComputeError(text),
        12 => ArrowError::MemoryError(text),
        22 => ArrowError::InvalidArgumentError(text),
        95 => ArrowError::NotYetImplemented(text),
        // A panic, without the hook's words on the terminal.
        _ => std::panic::resume_unwind(Box::new(text)),
    }
}

/// A stream of `count` batches of a kind, with seeds from 0. `fail_at`, unless negative: in place of this batch comes
/// an error with errno `how`, or a panic if that is 0.
///
/// # Safety
/// `sim` is null or live; `out` is valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_stream(
    kind: usize,
    count: u64,
    fail_at: i64,
    how: c_int,
    sim: *const PeersSim,
    wait: bool,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    answer(|| {
        let schema = make(kind, 0)?.schema();
        let batches = (0..count).map(move |k| {
            if k as i64 == fail_at {
                return Err(failure(how, k));
            }
            make(kind, k).map_err(|_| ArrowError::ComputeError("no such kind".into()))
        });
        let reader = RecordBatchIterator::new(Counted::new(batches), schema);
        // SAFETY: the caller guarantees that `sim` is null or alive (see `# Safety`).
        let reader = UploadingReader::new_on(reader, queue(unsafe { sim.as_ref() })?);
        let stream = FFI_ArrowDeviceArrayStream::new(reader, ExportOptions::new(policy(wait)))?;
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe { write(out, stream) }
    })
}

/// Reads a stream of Arrow C++'s, which is consumed, and compares its batches with those of a kind, with seeds from 0. `stop`, unless
/// negative: the stream is closed after this many. `later`: batches are looked at only after the stream is gone.
///
/// # Safety
/// `sim` is null or live; `stream` keeps to the C device stream interface.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_stream_check(
    kind: usize,
    count: u64,
    stop: i64,
    later: bool,
    sim: *const PeersSim,
    stream: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes a stream that it gives away (see `# Safety`).
        let (sim, stream) = unsafe { (sim.as_ref(), FFI_ArrowDeviceArrayStream::from_raw(stream)) };
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`).
        let mut reader =
            unsafe { DeviceRecordBatchStreamReader::new(stream, options(sim, false)) }?;
        if reader.schema() != spelling::batch(&make(kind, 0)?).schema() {
            let text = format!("schema: actual {:?}", reader.schema());
            return Err(Failure::differs(text));
        }
        let compare = |k: u64, batch: RecordBatch| {
            let compared = same_batch(&spelling::batch(&make(kind, k)?), &batch);
            compared.map_err(|text| Failure::differs(format!("batch {k}: {text}")))
        };
        let mut kept = Vec::new();
        let wanted = u64::try_from(stop).unwrap_or(count);
        let mut read = 0;
        while stop < 0 || read < wanted {
            let Some(batch) = reader.next() else { break };
            if batch.is_err() && reader.next().is_some() {
                return Err(Failure::differs("goes on after an error"));
            }
            match later {
                true => kept.push(batch?),
                false => compare(read, batch?.to_host()?)?,
            }
            read += 1;
        }
        if read != wanted {
            return Err(Failure::differs(format!("{read} batches, not {wanted}")));
        }
        drop(reader);
        for (k, batch) in (0..).zip(kept) {
            compare(k, batch.to_host()?)?;
        }
        Ok(())
    })
}
