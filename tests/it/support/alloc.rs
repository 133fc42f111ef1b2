//! Counts heap allocations of the current thread, and their bytes. A test binary installs it:
//! `#[global_allocator] static ALLOCATOR: CountingAllocator = CountingAllocator;`

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    /// Bytes allocated, and bytes freed.
    static BYTES: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

pub(crate) struct CountingAllocator;

fn bump(allocated: usize, freed: usize) {
    // No count while the thread shuts down.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
    add(allocated, freed);
}

fn add(allocated: usize, freed: usize) {
    let sum = |(a, f): (usize, usize)| (a + allocated, f + freed);
    let _ = BYTES.try_with(|bytes| bytes.set(sum(bytes.get())));
}

// SAFETY: every call goes to `System` unchanged; counting allocates nothing and does not unwind.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        bump(layout.size(), 0);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        bump(layout.size(), 0);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        bump(new_size, layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::realloc`, and `ptr` came from `System`.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        add(0, layout.size());
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`, and `ptr` came from `System`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Runs `f` and counts its allocations and reallocations on this thread.
///
/// Panics if the counting allocator is not installed.
pub(crate) fn count<R>(f: impl FnOnce() -> R) -> (R, usize) {
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

/// Runs `f`; how many bytes this thread allocated meanwhile, and how many of them, or of older ones, it
/// has not freed.
pub(crate) fn bytes<R>(f: impl FnOnce() -> R) -> (R, usize, isize) {
    let before = BYTES.with(Cell::get);
    let result = f();
    let after = BYTES.with(Cell::get);
    let (allocated, freed) = (after.0 - before.0, after.1 - before.1);
    (result, allocated, allocated as isize - freed as isize)
}
