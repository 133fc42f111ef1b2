//! What is alive on this side: what was given out and not released, and the heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use arrow_device::device::sim::SimDevice;
pub(crate) use arrow_device_capi::counted;

use crate::answer::{answer, device, text};

/// Readers in streams that were given out, async ones too, and readers of foreign async streams.
static READERS: AtomicI64 = AtomicI64::new(0);
static HEAP: AtomicI64 = AtomicI64::new(0);

/// Counts a reader as long as it lives.
pub(crate) struct Counted;

impl Counted {
    pub(crate) fn reader() -> Self {
        READERS.fetch_add(1, SeqCst);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        READERS.fetch_sub(1, SeqCst);
    }
}

/// Buffers of cases that a peer, or work of a device, still holds.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_live_buffers() -> i64 {
    arrow_device_capi::live_buffers()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_live_readers() -> i64 {
    READERS.load(SeqCst)
}

/// Bytes on this library's heap.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_heap_bytes() -> i64 {
    HEAP.load(SeqCst)
}

/// Waits for all work of a device, and raises the error of a drop.
///
/// # Safety
/// `name` is null-terminated.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_settle(name: *const c_char) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `name` is null-terminated (see `# Safety`).
        let device = unsafe { device(name) }?;
        device.synchronize()?;
        device.trim();
        Ok(device.take_drop_error().map_or(Ok(()), Err)?)
    })
}

/// One of a device's counters, or of a simulated device's report, by name.
///
/// # Safety
/// The texts are null-terminated; `out` is valid for a write.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_stat(
    name: *const c_char,
    counter: *const c_char,
    out: *mut u64,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that both texts are null-terminated (see `# Safety`).
        let (device, counter) = unsafe { (device(name)?, text(counter)?) };
        let stats = device.stats();
        let report = || {
            let sim = device.backend().downcast_ref::<SimDevice>();
            sim.map(SimDevice::report).ok_or("is no simulated device")
        };
        let value = match counter {
            "queue_waits" => stats.queue_waits,
            "host_waits" => stats.host_waits,
            "live_allocations" => report()?.live_allocations as u64,
            "live_events" => report()?.live_events as u64,
            "violations" => report()?.violations.len() as u64,
            _ => return Err("there is no such counter".into()),
        };
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe { out.write(value) };
        Ok(())
    })
}

struct CountingHeap;

#[global_allocator]
static ALLOCATOR: CountingHeap = CountingHeap;

// SAFETY: every call goes to `System` unchanged; counting allocates nothing and does not unwind.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        let memory = unsafe { System.alloc(layout) };
        if !memory.is_null() {
            HEAP.fetch_add(layout.size() as i64, SeqCst);
        }
        memory
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HEAP.fetch_sub(layout.size() as i64, SeqCst);
        // SAFETY: the caller keeps the contract of `GlobalAlloc`, and `memory` came from `System`.
        unsafe { System.dealloc(memory, layout) }
    }
}
