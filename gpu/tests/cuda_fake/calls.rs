//! How many calls of the driver an operation costs the thread that makes it, beside those that make the context current for each.
//! Calls are counted by thread: the release thread makes others.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch};
use arrow_device::device::DevicePtr;
use arrow_device::{DeviceBufferMut, DeviceRecordBatch, ExportOptions, SyncPolicy};

use crate::block::Block;
use crate::fake::{Group, MODES, NO_BATCH, NO_POOLS, in_mode};
use crate::rig::{Rig, hold_running, soon};
use crate::support::{assert_same_batch, wide_batch};
use crate::support_c::Foreign;

/// Each call of a backend makes the context current, and leaves the thread as it was.
const ENTRY: [&str; 3] = [
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
];

/// The calls of a piece of work, by name.
#[derive(Debug)]
struct Calls(BTreeMap<String, u64>);

impl Calls {
    fn of<T>(work: impl FnOnce() -> T) -> (T, Self) {
        let before = Group::thread_calls();
        let done = work();
        let mut calls = Group::thread_calls();
        for (name, n) in before {
            *calls.get_mut(&name).unwrap() -= n;
        }
        calls.retain(|_, n| *n > 0);
        (done, Self(calls))
    }

    fn named(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// The questions whose memory an address is.
    fn lookups(&self) -> u64 {
        self.named("cuPointerGetAttributes")
    }

    #[track_caller]
    fn at_most(&self, limit: u64, what: impl fmt::Display) {
        let others = self
            .0
            .iter()
            .filter(|(name, _)| !ENTRY.contains(&name.as_str()));
        let all: u64 = others.map(|(_, n)| n).sum();
        assert!(all <= limit, "{what}: {all}, more than {limit}\n{self:#?}");
    }
}

/// A device that has staging memory, page-locked memory and events at hand.
fn warm(mode: u32) -> Rig {
    let rig = Rig::new(mode);
    for _ in 0..3 {
        let batch = wide_batch(40, 200);
        assert_same_batch(&batch, &rig.upload(&batch).unwrap().to_host().unwrap(), "");
    }
    rig.synchronize().unwrap();
    drop([0; 64].map(|_| rig.default_queue().record().unwrap()));
    rig
}

fn longs(columns: usize, rows: usize) -> RecordBatch {
    let column = |i: usize| {
        let values = Int64Array::from_iter_values((0..rows as i64).map(|n| n * i as i64));
        (format!("c{i}"), Arc::new(values) as ArrayRef)
    };
    RecordBatch::try_from_iter((0..columns).map(column)).unwrap()
}

#[test]
fn single_operations() {
    for mode in MODES {
        let rig = warm(mode);
        let queue = rig.default_queue();
        let limit = |what: &str, limit: u64, work: &mut dyn FnMut()| {
            let ((), calls) = Calls::of(work);
            calls.at_most(limit, format!("{what}, mode {mode}"));
        };
        // Without a pool its memory is asked for twice.
        let asked = 1 + u64::from(in_mode(NO_POOLS));
        // A driver that refuses lists gets a call for each copy, after the list, whose code has two texts.
        let no_lists = in_mode(NO_BATCH);
        let copies = |n: u64| if no_lists { n + 3 } else { 1 };
        let mut memory = None;
        limit("allocate", 1 + asked, &mut || {
            memory = Some(DeviceBufferMut::allocate(&queue, 1000).unwrap());
        });
        limit("free", 2, &mut || memory = None);
        let mut event = None;
        limit("record", 2, &mut || event = queue.record().unwrap());
        limit("wait", 1, &mut || event.as_ref().unwrap().wait().unwrap());
        limit("another wait", 0, &mut || {
            let event = event.as_ref().unwrap();
            event.wait().unwrap();
            assert!(event.is_complete().unwrap());
        });
        limit("synchronize a queue", 3, &mut || {
            queue.synchronize().unwrap()
        });

        // All columns are one copy each way.
        let batch = wide_batch(40, 200);
        let mut up = None;
        limit("upload", 4, &mut || up = Some(rig.upload(&batch).unwrap()));
        assert_same_batch(&batch, &up.unwrap().to_host().unwrap(), "upload");
        // Values only: sizes need no read.
        let batch = longs(40, 200);
        let up = rig.upload(&batch).unwrap();
        drop(up.to_host().unwrap());
        let mut down = None;
        limit("download", 4, &mut || down = Some(up.to_host().unwrap()));
        assert_eq!(down.unwrap(), batch);
        let mut started = None;
        limit("start of a download", 3, &mut || {
            started = Some(up.start_to_host(None).unwrap());
        });
        drop(started);
        let mut compact = None;
        // Values and their padding.
        let limit_of_compact = 4 + 2 + copies(2 * 40) + asked - 1;
        limit("compact", limit_of_compact, &mut || {
            compact = Some(up.slice(1, 50).unwrap().compact().unwrap());
        });
        drop((compact, up, event, queue));
        rig.end();
    }
}

/// The device knows its own memory, page-locked or not.
#[test]
fn an_import_of_own_memory_asks_nothing() {
    for mode in MODES {
        let rig = warm(mode);
        let import = |up: &DeviceRecordBatch| {
            let (array, schema) = up.export(SyncPolicy::Event).unwrap();
            let (again, calls) = Calls::of(|| {
                // SAFETY: both structs come from one export of this crate.
                unsafe { DeviceRecordBatch::import(array, &schema, &rig.options) }.unwrap()
            });
            calls.at_most(0, "an import");
            again
        };
        for columns in [1, 10, 100] {
            let batch = wide_batch(columns, 50);
            let again = import(&rig.upload(&batch).unwrap());
            assert_same_batch(&batch, &again.to_host().unwrap(), "imported");
        }
        let batch = longs(30, 50);
        let upload = |column: &ArrayRef| rig.upload_array(column).unwrap();
        let columns: Vec<_> = batch.columns().iter().map(upload).collect();
        let up = DeviceRecordBatch::try_new(batch.schema(), &columns).unwrap();
        drop(columns);
        let again = import(&up);
        assert_same_batch(&batch, &again.to_host().unwrap(), "of several allocations");
        drop((up, again));
        rig.end();
    }
}

/// What the driver reports of an allocation counts, and nothing beyond it.
#[test]
fn an_import_trusts_no_more_than_is_reported() {
    let ints: Int64Array = (0..100).map(|i| (i % 3 != 0).then_some(i)).collect();
    for mode in MODES {
        let rig = Rig::new(mode);
        let import = |block: &Block, values: usize| {
            let at = |bytes: usize| block.ptr.wrapping_byte_add(bytes).cast_const();
            let mut foreign = Foreign::new(&ints.to_data(), &rig.device);
            foreign.set_buffer(&[], 0, at(0));
            foreign.set_buffer(&[], 1, at(values));
            let (imported, calls) = Calls::of(|| foreign.import(&rig.options).map(drop));
            rig.synchronize().unwrap();
            assert!(soon(|| foreign.releases() == (1, 1)));
            (imported, calls)
        };
        let refused = |block: &Block| {
            let e = import(block, 232).0.unwrap_err();
            assert!(e.to_string().contains("array.buffers[1]"), "{e}");
        };
        // All in one allocation, up to its last byte.
        let whole = Block::device(rig.group.first, 1024);
        let (imported, calls) = import(&whole, 224);
        imported.unwrap();
        assert_eq!(calls.lookups(), 1, "{calls:?}");
        // The first buffer is known, and so is where the second begins, but not where it ends.
        refused(&whole);

        // Reported too long, as reserved addresses may be: the end of the range is somebody else's.
        let mapped = Block::device(rig.group.first, 1024);
        Group::misreport(mapped.ptr.addr(), 1 << 30);
        let (imported, calls) = import(&mapped, 224);
        imported.unwrap();
        assert!(calls.lookups() > 1, "{calls:?}");
        refused(&mapped);
        // Reported too short: the last byte counts.
        Group::misreport(mapped.ptr.addr(), 64);
        import(&mapped, 224).0.unwrap();
        refused(&mapped);
        drop((whole, mapped));
        rig.end();
    }
}

/// Page-locked memory between two pieces of it is not, whatever its first and last byte are.
#[test]
fn a_gap_in_page_locked_memory() {
    let rig = Rig::new(0);
    let block = Block::pinned(rig.group.first, 4 << 20);
    let direct = |bytes| {
        let ptr = DevicePtr::new(block.ptr);
        rig.backend().copies_directly_from(ptr, bytes)
    };
    Group::misreport(block.ptr.addr(), 1 << 20);
    assert!(!direct(2 << 20), "the driver has reported less");
    assert!(direct(1 << 20));
    drop(block);
    rig.end();
}

/// What was seen complete is not asked about again: an export of a ready batch, whatever it
/// consists of, makes no call.
#[test]
fn an_export_of_a_ready_batch() {
    let rig = warm(0);
    let batch = longs(30, 50);
    let upload = |column: &ArrayRef| rig.upload_array(column).unwrap();
    let own: Vec<_> = batch.columns().iter().map(upload).collect();
    let several = DeviceRecordBatch::try_new(batch.schema(), &own).unwrap();
    drop(own);
    // Without an event a foreign array is ready, too.
    let (array, schema) = rig
        .upload(&batch)
        .unwrap()
        .export(SyncPolicy::Wait)
        .unwrap();
    assert!(array.sync_event().is_null());
    // SAFETY: both structs come from one export of this crate.
    let again = unsafe { DeviceRecordBatch::import(array, &schema, &rig.options) }.unwrap();
    for up in [several, rig.upload(&batch).unwrap(), again] {
        up.as_struct().wait().unwrap();
        let ((), calls) = Calls::of(|| {
            for sync in [SyncPolicy::Event, SyncPolicy::Wait] {
                drop(up.export_array(&ExportOptions::new(sync)).unwrap());
            }
            assert!(up.as_struct().is_ready().unwrap());
            up.as_struct().wait().unwrap();
        });
        calls.at_most(0, "what was seen complete");
    }
    rig.end();
}

/// An event of a device that has failed is an error, unless it was seen complete before.
#[test]
fn a_failed_event_stays_an_error() {
    let rig = warm(0);
    let queue = rig.default_queue();
    let seen = queue.record().unwrap().unwrap();
    seen.wait().unwrap();
    let held = hold_running(&queue);
    let event = queue.record().unwrap().unwrap();
    assert!(!event.is_complete().unwrap());
    drop(held);
    rig.group.break_with(700);
    for _ in 0..2 {
        // It may have completed before.
        if event.is_complete().is_err() {
            assert!(event.is_complete().is_err());
            assert!(event.wait().is_err());
        }
    }
    assert!(queue.record().is_err());
    assert!(seen.is_complete().unwrap());
}
