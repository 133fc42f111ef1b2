//! How many calls of the driver an operation costs the thread that makes it. Calls are counted by
//! thread: the reaper's thread makes others.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch, StringViewArray};
use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use arrow_device::{DeviceBufferMut, DeviceRecordBatch, ExportOptions, Queue, SyncPolicy};

use crate::block::Block;
use crate::fake::{Group, NO_LISTS, NO_POOLS, PINS, POOL_CREATION_FAILS, in_mode};
use crate::rig::{MODES, Rig, all_done, assert_gone, hold_running, soon};
use crate::support::{assert_same, assert_same_batch, wide_batch};
use crate::support_c::Foreign;
use crate::vendor::{self, Config};

/// The calls of a piece of work, by name.
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
        vendor::without_their_own(&mut calls);
        (done, Self(calls))
    }

    fn all(&self) -> u64 {
        self.0.values().sum()
    }

    fn named(&self, names: &[&str]) -> u64 {
        let of = |name: &&str| self.0.get(*name).copied();
        names.iter().filter_map(of).sum()
    }

    /// The questions whose memory an address is.
    fn lookups(&self) -> u64 {
        self.named(&["cuPointerGetAttributes"])
    }

    #[track_caller]
    fn at_most(&self, limit: u64, what: impl fmt::Display) {
        assert!(self.all() <= limit, "{what}: more than {limit}\n{self}");
    }
}

impl fmt::Display for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} calls", self.all())?;
        self.0
            .iter()
            .try_for_each(|(name, n)| writeln!(f, "{n:6} {name}"))
    }
}

/// Entering and leaving: push, capture mode, capture mode, pop.
const ENTRY: [&str; 3] = [
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
];

const COPIES: [&str; 3] = [
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuMemcpyBatchAsync_v2",
];

/// A device that has staging memory, page-locked memory and events at hand.
fn warm(mode: u32) -> Rig {
    let rig = Rig::new(mode | PINS);
    for _ in 0..3 {
        let batch = wide_batch(40, 200);
        assert_same_batch(&batch, &rig.upload(&batch).unwrap().to_host().unwrap(), "");
    }
    rig.synchronize().unwrap();
    drop([0; 64].map(|_| rig.default_queue().record().unwrap()));
    rig
}

/// Drops a device, of which nothing is left. There are not many ordinals.
#[track_caller]
fn end(rig: Rig) {
    let group = rig.group;
    rig.assert_done();
    rig.end();
    group.close();
}

fn longs(columns: usize, rows: usize) -> RecordBatch {
    let column = |i: usize| {
        let values = Int64Array::from_iter_values((0..rows as i64).map(|n| n * i as i64));
        (format!("c{i}"), Arc::new(values) as ArrayRef)
    };
    RecordBatch::try_from_iter((0..columns).map(column)).unwrap()
}

/// Push, capture mode, capture query, allocate, copy, record, capture mode, pop.
#[test]
fn a_small_upload() {
    for mode in MODES {
        let rig = warm(mode);
        let batch = wide_batch(40, 200);
        let (up, calls) = Calls::of(|| rig.upload(&batch).unwrap());
        calls.at_most(8, format!("an upload, mode {mode}"));
        assert_eq!(calls.named(&COPIES), 1, "{calls}");
        assert_same_batch(&batch, &up.to_host().unwrap(), "upload");
        drop(up);
        end(rig);
    }
}

/// Each list is two calls, the copies and their event.
#[test]
fn further_copy_lists() {
    for mode in MODES {
        let rig = warm(mode);
        let queue = rig.default_queue();
        let memory = DeviceBufferMut::allocate(&queue, 6400).unwrap();
        let slab = rig.host_slab(6400).unwrap();
        let copies = |n: usize| -> Vec<CopyOp> {
            let copy = |i: usize| CopyOp {
                src: slab.as_device_ptr().offset(64 * i),
                dst: memory.address().offset(64 * i),
                bytes: 64,
                kind: CopyKind::HostToDevice,
            };
            (0..n).map(copy).collect()
        };
        // A driver that refuses lists gets a call for each copy.
        let most = if in_mode(NO_LISTS) { 1 } else { 100 };
        for copies in [copies(1), copies(most)] {
            let lists = |n: usize| {
                let list = || {
                    // SAFETY: slab and memory have 6400 bytes, and live until the queue is done.
                    unsafe { queue.raw().copy(&copies) }.unwrap();
                    let event = queue.raw().record().unwrap();
                    // SAFETY: the event was just recorded, and nothing else has it.
                    unsafe { rig.backend().release_event(event) };
                };
                let work = || rig.backend().within(&mut || (0..n).for_each(|_| list()));
                Calls::of(work).1
            };
            lists(1).at_most(7, "one list");
            lists(5).at_most(7 + 2 * 4, "five lists");
        }
        queue.synchronize().unwrap();
        drop((memory, slab, queue));
        end(rig);
    }
}

/// An upload in several lists. Waits for staging memory come on top.
#[test]
fn a_large_upload() {
    let rig = warm(0);
    // Each further thread enters the context once, and takes events that others of them give back.
    rig.set_packing_threads(1);
    let batch = longs(3, 3 << 20);
    // What it needs of staging memory is there.
    drop(rig.upload(&batch).unwrap().to_host().unwrap());
    rig.synchronize().unwrap();
    let (up, calls) = Calls::of(|| rig.upload(&batch).unwrap());
    let waits = calls.named(&["cuEventSynchronize", "cuEventQuery", "cuMemHostAlloc"]);
    let lists = calls.named(&["cuEventRecord"]);
    calls.at_most(
        8 + 2 * (lists - 1) + waits + calls.named(&COPIES).saturating_sub(lists),
        format!("{lists} lists"),
    );
    assert_same_batch(&batch, &up.to_host().unwrap(), "upload");
    drop(up);
    end(rig);
}

/// One question for each allocation, whatever the number of buffers.
#[test]
fn an_import_of_one_allocation() {
    for mode in MODES {
        let rig = warm(mode);
        for columns in [1, 10, 100] {
            let batch = wide_batch(columns, 50);
            let up = rig.upload(&batch).unwrap();
            let (array, schema) = up.export(SyncPolicy::Event).unwrap();
            let (again, calls) = Calls::of(|| {
                // SAFETY: both structs come from one export of this crate.
                unsafe { DeviceRecordBatch::import_with(array, &schema, &rig.options) }.unwrap()
            });
            // The lengths of view buffers are in page-locked memory of their own.
            let views = batch.columns().iter().filter(|column| {
                matches!(
                    column.data_type(),
                    arrow_schema::DataType::Utf8View | arrow_schema::DataType::BinaryView
                )
            });
            let allocations = 1 + views.count() as u64;
            let limit = allocations * vendor::LOOKUPS;
            assert!(calls.lookups() <= limit, "{columns} columns\n{calls}");
            assert!(calls.named(&ENTRY) <= 4, "{columns} columns\n{calls}");
            assert_same_batch(&batch, &again.to_host().unwrap(), "imported");
            drop((up, again));
        }
        end(rig);
    }
}

/// Columns in allocations of their own.
#[test]
fn an_import_of_several_allocations() {
    for mode in MODES {
        let rig = warm(mode);
        let batch = longs(30, 50);
        let column = |column: &ArrayRef| rig.upload_array(column).unwrap();
        let columns: Vec<_> = batch.columns().iter().map(column).collect();
        let up = DeviceRecordBatch::try_new(batch.schema(), &columns).unwrap();
        drop(columns);
        let (array, schema) = up.export(SyncPolicy::Event).unwrap();
        let (again, calls) = Calls::of(|| {
            // SAFETY: both structs come from one export of this crate.
            unsafe { DeviceRecordBatch::import_with(array, &schema, &rig.options) }.unwrap()
        });
        assert!(calls.lookups() <= 30 * vendor::LOOKUPS, "{calls}");
        assert!(calls.named(&ENTRY) <= 4, "{calls}");
        assert_same_batch(&batch, &again.to_host().unwrap(), "imported");
        drop((up, again));
        end(rig);
    }
}

/// What the driver reports of an allocation counts, and nothing beyond it.
#[test]
fn an_import_trusts_no_more_than_is_reported() {
    let ints: Int64Array = (0..100).map(|i| (i % 3 != 0).then_some(i)).collect();
    for mode in MODES {
        let rig = Rig::new(mode);
        let import = |validity: *const std::ffi::c_void, values: *const std::ffi::c_void| {
            let mut foreign = Foreign::new(&ints.to_data(), &rig.device);
            foreign.set_buffer(&[], 0, validity);
            foreign.set_buffer(&[], 1, values);
            let (imported, calls) = Calls::of(|| foreign.import(&rig.options).map(drop));
            rig.synchronize().unwrap();
            assert!(soon(|| foreign.releases() == (1, 1)));
            (imported, calls)
        };
        let at = |block: &Block, bytes: usize| block.ptr.wrapping_byte_add(bytes).cast_const();

        // All in one allocation, up to its last byte.
        let whole = Block::device(rig.group.first, 1024);
        let (imported, calls) = import(at(&whole, 0), at(&whole, 224));
        imported.unwrap();
        assert_eq!(calls.lookups(), vendor::LOOKUPS, "{calls}");
        // The first buffer is known, and so is where the second begins, but not where it ends.
        let (imported, _) = import(at(&whole, 0), at(&whole, 232));
        let e = imported.unwrap_err();
        assert!(e.to_string().contains("array.buffers[1]"), "{e}");

        // Reported too long, as reserved addresses may be: the end of the range is somebody else's.
        let mapped = Block::device(rig.group.first, 1024);
        Group::misreport(mapped.ptr.addr(), 1 << 30);
        let (imported, calls) = import(at(&mapped, 0), at(&mapped, 224));
        imported.unwrap();
        assert!(calls.lookups() > vendor::LOOKUPS, "{calls}");
        let (imported, _) = import(at(&mapped, 0), at(&mapped, 232));
        let e = imported.unwrap_err();
        assert!(e.to_string().contains("array.buffers[1]"), "{e}");
        // Reported too short: the last byte counts.
        Group::misreport(mapped.ptr.addr(), 64);
        import(at(&mapped, 0), at(&mapped, 224)).0.unwrap();
        let (imported, _) = import(at(&mapped, 0), at(&mapped, 232));
        imported.unwrap_err();
        drop((whole, mapped));
        end(rig);
    }
}

/// Where the lengths of a view array's buffers lie is asked like everything else.
#[test]
fn an_import_of_view_lengths() {
    let texts = ["short", "one that is longer than twelve bytes"];
    let array = StringViewArray::from_iter_values(texts);
    let rig = warm(0);
    let up = rig.upload_array(&array).unwrap();
    let exported = up.export_array(&ExportOptions::new(SyncPolicy::Event));
    let (again, calls) = Calls::of(|| {
        let field = Arc::new(arrow_schema::Field::new(
            "v",
            array.data_type().clone(),
            true,
        ));
        // SAFETY: the struct comes from an export of this crate, with this type.
        unsafe { arrow_device::DeviceArray::import_as(exported.unwrap(), field, &rig.options) }
    });
    let again = again.unwrap();
    assert!(calls.lookups() <= 2 * vendor::LOOKUPS, "{calls}");
    assert_same(&array, &again.to_host().unwrap(), "views");
    drop((up, again));
    end(rig);
}

/// Page-locked memory between two pieces of it is not, whatever its first and last byte are.
#[test]
fn a_gap_in_page_locked_memory() {
    let rig = Rig::new(PINS);
    let block = Block::pinned(rig.group.first, 4 << 20);
    let direct = |bytes| {
        let ptr = DevicePtr::new(block.ptr);
        rig.backend().copies_directly_from(ptr, bytes)
    };
    Group::misreport(block.ptr.addr(), 1 << 20);
    assert!(!direct(2 << 20), "the driver has reported less");
    assert!(direct(1 << 20));
    let (_, calls) = Calls::of(|| {
        assert!(direct(1000) && direct(1 << 20));
    });
    assert_eq!(calls.all(), 0, "{calls}");
    drop(block);
    end(rig);
}

/// What was seen complete is not asked about again: an export of a ready batch, whatever it
/// consists of, makes no call.
#[test]
fn an_export_of_a_ready_batch() {
    for mode in MODES {
        let rig = warm(mode);
        let batch = longs(30, 50);
        let upload = |column: &ArrayRef| rig.upload_array(column).unwrap();
        let own = || batch.columns().iter().map(upload).collect::<Vec<_>>();
        let several = DeviceRecordBatch::try_new(batch.schema(), &own()).unwrap();
        let one = rig.upload(&batch).unwrap();
        for up in [several, one] {
            up.as_struct().wait().unwrap();
            for sync in [SyncPolicy::Event, SyncPolicy::Wait] {
                let (exported, calls) =
                    Calls::of(|| up.export_array(&ExportOptions::new(sync)).unwrap());
                assert_eq!(calls.all(), 0, "{sync:?}\n{calls}");
                drop(exported);
            }
            let (_, calls) = Calls::of(|| {
                assert!(up.as_struct().is_ready().unwrap());
                up.as_struct().wait().unwrap();
            });
            assert_eq!(calls.all(), 0, "{calls}");
            drop(up);
        }
        // Without an event a foreign array is ready, and goes out again for nothing.
        let up = rig.upload(&batch).unwrap();
        let options = ExportOptions::new(SyncPolicy::Wait);
        let exported = up.export_array(&options).unwrap();
        assert!(exported.sync_event().is_null());
        // SAFETY: the struct comes from an export of this crate, with this schema.
        let again = unsafe { DeviceRecordBatch::import_as(exported, batch.schema(), &rig.options) }
            .unwrap();
        let (exported, calls) = Calls::of(|| again.export_array(&options).unwrap());
        assert_eq!(calls.all(), 0, "{calls}");
        drop((up, again, exported));
        end(rig);
    }
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

/// The other operations.
#[test]
fn single_operations() {
    for mode in MODES {
        let rig = warm(mode);
        let queue = rig.default_queue();
        let limit = |what: &str, limit: u64, work: &mut dyn FnMut()| {
            let ((), calls) = Calls::of(work);
            calls.at_most(limit, format!("{what}, mode {mode}"));
        };
        // Without a pool the device is entered twice.
        let entries = if in_mode(NO_POOLS | POOL_CREATION_FAILS) {
            2
        } else {
            1
        };
        let mut memory = None;
        limit("allocate", 1 + 5 * entries, &mut || {
            memory = Some(DeviceBufferMut::allocate(&queue, 1000).unwrap());
        });
        limit("free", 6, &mut || memory = None);
        let mut event = None;
        limit("record", 6, &mut || event = queue.record().unwrap());
        limit("wait", 5, &mut || event.as_ref().unwrap().wait().unwrap());
        limit("another wait", 0, &mut || {
            let event = event.as_ref().unwrap();
            event.wait().unwrap();
            assert!(event.is_complete().unwrap());
        });
        limit("synchronize a queue", 7, &mut || {
            queue.synchronize().unwrap()
        });

        // Values only: sizes need no read.
        let batch = longs(40, 200);
        let up = rig.upload(&batch).unwrap();
        drop(up.to_host().unwrap());
        let mut down = None;
        limit("download", 8, &mut || down = Some(up.to_host().unwrap()));
        assert_eq!(down.unwrap(), batch);
        let mut started = None;
        limit("start of a download", 7, &mut || {
            started = Some(up.start_to_host().unwrap());
        });
        drop(started);
        let mut compact = None;
        // A driver that refuses lists gets calls for each column's values and their padding, after the
        // list, whose code has two texts.
        let compact_limit = match in_mode(NO_LISTS) {
            true => 9 + 2 * 40 + 3,
            false => 9,
        };
        let extra = 2 * vendor::LOOKUPS + 5 * (entries - 1);
        limit("compact", compact_limit + extra, &mut || {
            compact = Some(up.slice(1, 50).unwrap().compact().unwrap());
        });
        drop(compact);
        drop((up, event, queue));
        end(rig);
    }
}

/// Scopes of two devices in each other, errors and panics: the thread is as it was.
#[test]
fn scopes_leave_nothing_behind() {
    for mode in MODES {
        let group = Group::open(2, mode);
        let [one, two] = [0, 1].map(|i| Rig::of(group, &Config::new(group.ordinal() + i)));
        let batch = longs(5, 100);
        let up = |rig: &Rig| {
            let up = rig.upload(&batch).unwrap();
            assert_same_batch(&batch, &up.to_host().unwrap(), "in a scope");
        };
        one.backend().within(&mut || {
            up(&one);
            two.backend().within(&mut || {
                up(&two);
                up(&one);
                one.backend().within(&mut || up(&two));
                up(&two);
            });
            up(&one);
        });
        vendor::assert_untouched();
        let (panicked, calls) = Calls::of(|| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                one.backend().within(&mut || {
                    one.synchronize().unwrap();
                    std::panic::resume_unwind(Box::new("on purpose"));
                });
            }))
        });
        assert!(panicked.is_err());
        assert_eq!(calls.named(&ENTRY[2..]), 2, "{calls}");
        vendor::assert_untouched();
        // Whatever fails in it, also the entry itself.
        for name in ["cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing"] {
            one.group.fail(name, 1, 1);
            one.backend().within(&mut || drop(one.upload(&batch)));
            one.group.clear();
            vendor::assert_untouched();
        }
        let ((), calls) = Calls::of(|| one.backend().within(&mut || ()));
        assert_eq!(calls.all(), 0, "nothing was called\n{calls}");
        all_done(&[&one, &two]);
        drop((one, two));
        assert_gone(group);
        group.close();
    }
}

/// Whether a stream is captured is asked once in a scope; of a stream that was given, whose owner may
/// begin a capture at any time, before each operation.
pub(crate) fn captures_are_noticed(
    rig: &Rig,
    given: &Queue,
    begin: impl FnOnce(),
    end: impl FnOnce(),
) {
    let own = rig.new_queue().unwrap();
    for (queue, questions) in [(&own, 1), (given, 3)] {
        let ((), calls) = Calls::of(|| {
            rig.backend().within(&mut || {
                for _ in 0..3 {
                    drop(queue.record().unwrap());
                }
            });
        });
        assert_eq!(calls.named(&["cuStreamIsCapturing"]), questions, "{calls}");
    }
    let (mut begin, mut refused) = (Some(begin), None);
    rig.backend().within(&mut || {
        drop(given.record().unwrap());
        if let Some(begin) = begin.take() {
            begin();
        }
        refused = given.record().err();
    });
    end();
    assert!(refused.unwrap().to_string().contains("captured"));
}
