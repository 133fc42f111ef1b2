//! Counts heap allocations of the current thread. A test binary installs it:
//! `#[global_allocator] static ALLOCATOR: CountingAllocator = CountingAllocator;`

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

pub struct CountingAllocator;

fn bump() {
    // No count while the thread shuts down.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call goes to `System` unchanged; counting allocates nothing and does not unwind.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        bump();
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        bump();
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        bump();
        // SAFETY: the caller keeps the contract of `GlobalAlloc::realloc`, and `ptr` came from `System`.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`, and `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Runs `f` and counts its allocations and reallocations on this thread.
///
/// Panics if the counting allocator is not installed.
pub fn count<R>(f: impl FnOnce() -> R) -> (R, usize) {
    let read = || ALLOCATIONS.with(Cell::get);
    let before = read();
    drop(black_box(Box::new(1u8)));
    assert_ne!(
        read(),
        before,
        "CountingAllocator is not the global allocator"
    );
    let before = read();
    let result = f();
    (result, read() - before)
}
