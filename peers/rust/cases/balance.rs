//! What is alive on this side: what was given out and not released, and the heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::{c_char, c_int};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use arrow_buffer::{Buffer, NullBuffer};
use arrow_data::ArrayData;
use arrow_device::device::sim::SimDevice;
use arrow_device::{Device, TransferStats};

use super::answer::{Failure, Outcome, answer, device, put, text};

static BUFFERS: AtomicI64 = AtomicI64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);
/// Held arrays and open readers and streams.
static HANDLES: AtomicI64 = AtomicI64::new(0);
static HEAP: AtomicI64 = AtomicI64::new(0);

/// Counts one thing as long as it lives.
pub(super) struct Counted(&'static AtomicI64, i64);

impl Counted {
    fn new(counter: &'static AtomicI64, n: i64) -> Self {
        counter.fetch_add(n, SeqCst);
        Self(counter, n)
    }

    pub(super) fn handle() -> Self {
        Self::new(&HANDLES, 1)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, SeqCst);
    }
}

/// What keeps a counted buffer's memory.
struct Guard {
    _buffer: Buffer,
    _one: Counted,
    _bytes: Counted,
}

fn counted_buffer(buffer: &Buffer) -> Buffer {
    let Some(address) = NonNull::new(buffer.as_ptr().cast_mut()) else {
        return buffer.clone();
    };
    let guard = Guard {
        _buffer: buffer.clone(),
        _one: Counted::new(&BUFFERS, 1),
        _bytes: Counted::new(&BYTES, buffer.len() as i64),
    };
    // SAFETY: the guard holds the buffer, and so the memory.
    unsafe { Buffer::from_custom_allocation(address, buffer.len(), Arc::new(guard)) }
}

/// The same data, whose buffers are counted until the last user of each has let go. Nothing is copied.
pub(super) fn counted(data: &ArrayData) -> ArrayData {
    let nulls = data.nulls().map(|nulls| {
        let bits = nulls.inner();
        let inner = counted_buffer(bits.inner());
        NullBuffer::new(arrow_buffer::BooleanBuffer::new(
            inner,
            bits.offset(),
            bits.len(),
        ))
    });
    let builder = ArrayData::builder(data.data_type().clone())
        .len(data.len())
        .offset(data.offset())
        .nulls(nulls)
        .buffers(data.buffers().iter().map(counted_buffer).collect())
        .child_data(data.child_data().iter().map(counted).collect());
    // SAFETY: the data is that of `data`, which is valid, in buffers with other owners.
    unsafe { builder.build_unchecked() }
}

/// How many buffers of cases a peer, or work of a device, still holds.
#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_live_buffers() -> i64 {
    BUFFERS.load(SeqCst)
}

/// Their bytes.
#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_live_bytes() -> i64 {
    BYTES.load(SeqCst)
}

/// How many handles (`peers_held_*`, `peers_reader_*`) and streams of `peers_stream` and `peers_array_stream` are open.
#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_live_handles() -> i64 {
    HANDLES.load(SeqCst)
}

/// Bytes on this library's heap.
#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_heap_bytes() -> i64 {
    HEAP.load(SeqCst)
}

/// Waits for all work of a device.
///
/// # Safety
/// `name` is null or null-terminated.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_settle(name: *const c_char) -> c_int {
    // SAFETY: the caller guarantees that `name` is null or null-terminated (see `# Safety`).
    answer(|| Ok(unsafe { device(name) }?.synchronize()?))
}

/// One of a device's counters, or of a simulated device's report, by name.
///
/// # Safety
/// The texts are null or null-terminated; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_stat(
    name: *const c_char,
    counter: *const c_char,
    out: *mut u64,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that both texts are null or null-terminated (see `# Safety`).
        let (device, counter) = unsafe { (device(name)?, text(counter, "counter")?) };
        let value = match counted_by(&device.stats(), counter) {
            Some(value) => value,
            None => reported(&device, counter)?,
        };
        // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
        unsafe { put(out, value, "out") }
    })
}

fn counted_by(stats: &TransferStats, counter: &str) -> Option<u64> {
    Some(match counter {
        "allocations" => stats.allocations,
        "frees" => stats.frees,
        "copies" => stats.copies,
        "bytes_to_device" => stats.bytes_to_device,
        "bytes_to_host" => stats.bytes_to_host,
        "bytes_on_device" => stats.bytes_on_device,
        "events" => stats.events,
        "queue_waits" => stats.queue_waits,
        "host_waits" => stats.host_waits,
        "drop_errors" => stats.drop_errors,
        _ => return None,
    })
}

fn reported(device: &Device, counter: &str) -> Outcome<u64> {
    let unknown = || Failure::invalid(format!("{device} has no counter {counter}"));
    let sim = device.backend().as_any().downcast_ref::<SimDevice>();
    let report = sim.ok_or_else(unknown)?.report();
    Ok(match counter {
        "live_allocations" => report.live_allocations,
        "live_events" => report.live_events,
        "pending_operations" => report.pending_operations,
        "violations" => report.violations.len(),
        _ => return Err(unknown()),
    } as u64)
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
