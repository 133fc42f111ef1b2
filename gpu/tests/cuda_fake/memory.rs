//! What is allocated, copied and freed, and by which call.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Int32Array, Int64Array};
use arrow_buffer::Buffer;
use arrow_device::DeviceBufferMut;

use crate::block::Block;
use crate::fake::{Group, LAZY, MODES, NO_CONCURRENT_MANAGED, NO_POOLS, in_mode};
use crate::gpu_suite::host_memories;
use crate::rig::{Rig, assert_gone, hold};
use crate::support::{assert_same, assert_same_batch, wide_batch};
use crate::vendor::{DEVICE, HOST, MANAGED, MEMORIES, open_device};

fn longs(rows: usize) -> Int64Array {
    (0..rows as i64).collect()
}

/// How often each of some functions was called by `work`.
fn calls<const N: usize>(group: Group, names: [&str; N], work: impl FnOnce()) -> [u64; N] {
    let before = names.map(|name| group.calls(name));
    work();
    let mut i = 0;
    names.map(|name| {
        i += 1;
        group.calls(name) - before[i - 1]
    })
}

#[test]
fn warm_transfers_create_nothing() {
    for mode in MODES {
        let rig = Rig::new(mode);
        let batch = wide_batch(40, 200);
        let round = || {
            let up = rig.upload(&batch).unwrap();
            assert_same_batch(&batch, &up.to_host().unwrap(), "round");
            drop(up);
            rig.synchronize().unwrap();
        };
        round();
        // The release thread gives staging memory and events back, when it comes to it: there is enough for all rounds.
        let bytes = rig.stats().allocated_bytes as usize;
        drop([0; 16].map(|_| rig.host_buffer(bytes).unwrap()));
        drop([0; 80].map(|_| rig.default_queue().record().unwrap()));
        round();
        let created = [
            "cuEventCreate",
            "cuMemHostAlloc",
            "cuMemAlloc_v2",
            "cuMemPoolCreate",
            "cuStreamCreate",
        ];
        assert_eq!(calls(rig.group, created, round), [0; 5]);
        let before = rig.stats();
        let pool = [
            "cuMemAllocFromPoolAsync",
            "cuMemFreeAsync",
            "cuMemFree_v2",
            "cuMemFreeHost",
        ];
        let once = u64::from(!in_mode(NO_POOLS));
        assert_eq!(calls(rig.group, pool, round), [once, once, 0, 0]);
        let cost = rig.stats().since(&before);
        assert_eq!((cost.allocations, cost.host_allocations), (1, 0));
        rig.end();
    }
}

/// Memory that is page-locked already is copied straight: our host buffers, and what the driver knows.
#[test]
fn page_locked_sources() {
    let rows = 300_000;
    let bytes = rows * 8;
    for mode in MODES {
        let rig = Rig::new(mode);
        let mut host = rig.host_buffer(bytes).unwrap();
        for (i, value) in host.chunks_exact_mut(8).enumerate() {
            value.copy_from_slice(&(i as i64).to_ne_bytes());
        }
        let ours = Int64Array::new(Buffer::from(host).into(), None);

        let theirs = Block::pinned(rig.group.first, bytes).with(longs(rows).values());
        let ptr = std::ptr::NonNull::new(theirs.ptr.cast()).unwrap();
        // SAFETY: the buffer keeps the memory, which nobody writes any more.
        let buffer = unsafe { Buffer::from_custom_allocation(ptr, bytes, Arc::new(theirs)) };
        let theirs = Int64Array::new(buffer.into(), None);

        // The device knows its own.
        for (column, questions) in [(&ours, 0), (&theirs, 2)] {
            let before = rig.stats();
            let mut up = None;
            let [asked] = calls(rig.group, ["cuPointerGetAttributes"], || {
                up = Some(rig.upload_array(column).unwrap());
            });
            let cost = rig.stats().since(&before);
            assert!(asked <= questions, "{asked} questions");
            // All but what does not fill a block.
            assert!(cost.host_copied_bytes <= 64, "{cost:?}");
            assert_eq!(
                *column.to_data().buffers()[0],
                *up.unwrap().to_host().unwrap().to_data().buffers()[0]
            );
        }
        // Ordinary memory is staged.
        let before = rig.stats();
        drop(rig.upload_array(&longs(rows)).unwrap());
        assert!(rig.stats().since(&before).host_copied_bytes as usize >= bytes);
        drop((ours, theirs));
        rig.end();
    }
}

/// Page-locked and managed arrays are arrow arrays without a copy, and are not freed in a drop.
#[test]
fn host_readable_memory_becomes_arrow_memory() {
    for memory in host_memories() {
        for mode in MODES {
            let rig = Rig::with(mode, memory);
            let live = match memory {
                HOST => "pinned",
                _ => "managed",
            };
            let column = longs(1000);
            let up = rig.upload_array(&column).unwrap();
            let address = up.buffer(1).unwrap().address().address();
            let before = rig.stats();
            let host = up.to_host().unwrap();
            let cost = rig.stats().since(&before);
            assert_eq!((cost.copies, cost.bytes_to_host), (0, 0));
            assert_eq!(
                host.to_data().buffers()[0].as_ptr().addr(),
                address,
                "copied"
            );
            assert_eq!(*host, column as Int64Array);
            drop(up);
            rig.synchronize().unwrap();
            assert!(rig.group.live(live) > 0);

            // The last buffer gives the memory back for reuse; nothing waits.
            let free = [
                "cuMemFreeHost",
                "cuMemFree_v2",
                "cuCtxSynchronize",
                "cuEventSynchronize",
            ];
            let part = host.slice(5, 10);
            drop(host);
            assert_eq!(calls(rig.group, free, || drop(part)), [0; 4]);
            let allocate = ["cuMemHostAlloc", "cuMemAllocManaged"];
            let mut again = None;
            let new = calls(rig.group, allocate, || {
                let queue = rig.default_queue();
                again = Some(DeviceBufferMut::allocate(&queue, 8000).unwrap());
            });
            assert_eq!(new, [0; 2], "the block is used again");
            assert_eq!(again.as_ref().unwrap().address().address(), address);
            drop(again);
            rig.end();
        }
    }
}

/// A block that a queue still uses is not given to another one.
#[test]
fn blocks_are_used_again_in_order() {
    for (flags, memory) in [(0, HOST), (0, MANAGED), (NO_POOLS, DEVICE)] {
        let rig = Rig::with(flags, memory);
        let (one, two) = (rig.new_queue().unwrap(), rig.new_queue().unwrap());
        let held = hold(&one);
        let first = DeviceBufferMut::allocate(&one, 1000).unwrap();
        let address = first.address();
        drop(first);
        let other = DeviceBufferMut::allocate(&two, 1000).unwrap();
        assert_ne!(other.address(), address, "still in use by the first queue");
        let same = DeviceBufferMut::allocate(&one, 1000).unwrap();
        assert_eq!(same.address(), address, "the same queue runs in order");
        drop((same, held));
        rig.synchronize().unwrap();
        let later = DeviceBufferMut::allocate(&two, 1000).unwrap();
        assert_eq!(later.address(), address, "the first queue is done");
        drop((other, later, one, two));
        rig.end();
    }
}

/// What is kept is freed where memory runs out, and on `trim`.
#[test]
fn memory_that_is_kept_makes_room() {
    for (flags, memory) in [(0, DEVICE), (NO_POOLS, DEVICE)] {
        let group = Group::with_capacity(1, flags, 8 << 20);
        let rig = Rig::of(group, open_device(memory, group.ordinal()));
        let queue = rig.default_queue();
        drop(DeviceBufferMut::allocate(&queue, 5 << 20).unwrap());
        rig.synchronize().unwrap();
        // Too large to reuse the block, too large to stand beside it.
        let large = DeviceBufferMut::allocate(&queue, 6 << 20).unwrap();
        // The error names what was asked for, which the pool rounds up.
        let asked = (6 << 20) + 64;
        let e = DeviceBufferMut::allocate(&queue, asked).unwrap_err();
        assert!(
            matches!(e, arrow_device::Error::OutOfMemory { bytes, .. } if bytes == asked),
            "{e}"
        );
        assert!(e.to_string().contains("cuMemAlloc"), "{e}");
        drop(large);
        rig.synchronize().unwrap();
        drop(DeviceBufferMut::allocate(&queue, 6 << 20).unwrap());
        rig.trim();
        assert_eq!(group.live("device"), 0);
        drop(queue);
        rig.end();
    }
}

/// Uploads do not wait, whatever memory their source is.
#[test]
fn uploads_do_not_wait() {
    for memory in MEMORIES {
        let rig = Rig::with(0, memory);
        let queue = rig.new_queue().unwrap();
        let held = hold(&queue);
        let batch = wide_batch(10, 5000);
        let before = rig.stats();
        let up = rig.upload_on(&batch, &queue).unwrap();
        let column: ArrayRef = Arc::new(longs(1 << 20));
        let large = rig.upload_array_on(&column, &queue).unwrap();
        assert!(!up.is_ready().unwrap());
        assert_eq!(rig.stats().since(&before).host_waits, 0);
        drop(held);
        assert_same_batch(&batch, &up.to_host().unwrap(), "held");
        assert_eq!(*large.to_host().unwrap(), *column);
        drop((up, large, queue));
        rig.end();
    }
}

/// What the host packs for another device, or reads to plan a copy, has arrived in page-locked memory first. Nothing runs by itself
/// here.
#[test]
fn a_copy_out_of_page_locked_memory_that_is_not_ready() {
    let group = Group::open(1, LAZY);
    let [from, to] =
        [HOST, DEVICE].map(|memory| Rig::of(group, open_device(memory, group.ordinal())));
    let batch = wide_batch(8, 300);
    // All of the memory is one copy by the device; a part of it is packed by the host.
    for (offset, rows) in [(0, 300), (3, 290)] {
        let up = from.upload(&batch).unwrap();
        assert!(!up.is_ready().unwrap());
        let part = up.slice(offset, rows).unwrap();
        let there = part.to_device(&to.device).unwrap();
        assert_same_batch(
            &batch.slice(offset, rows),
            &there.to_host().unwrap(),
            "out of page-locked memory",
        );
        let up = from.upload(&batch).unwrap();
        assert!(!up.is_ready().unwrap());
        let compact = up.slice(offset, rows).unwrap().compact().unwrap();
        assert_same_batch(
            &batch.slice(offset, rows),
            &compact.to_host().unwrap(),
            "compacted",
        );
    }
    drop((from, to));
    assert_gone(group);
}

#[test]
fn managed_memory_that_the_host_must_not_touch_is_copied() {
    let rig = Rig::with(NO_CONCURRENT_MANAGED, MANAGED);
    assert!(!rig.is_host_readable());
    let ints: Int32Array = (0..100).map(|i| (i % 3 != 0).then_some(i)).collect();
    let up = rig.upload_array(&ints).unwrap();
    let before = rig.stats();
    assert_same(&ints, &up.to_host().unwrap(), "managed");
    assert!(rig.stats().since(&before).bytes_to_host > 0);
    drop(up);
    rig.end();
}
