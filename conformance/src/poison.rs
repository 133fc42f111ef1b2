//! [`Poisoning`]: an allocator that shows memory which nobody has written.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

/// No value of a sample, and no address.
const POISON: [u8; 8] = [0xD1, 0x5E, 0xA5, 0xED, 0xBA, 0xDC, 0x0F, 0xFE];

static INSTALLED: AtomicBool = AtomicBool::new(false);

/// The system's allocator, which fills fresh memory with a pattern unless zeros were asked for.
///
/// Memory of a host-readable device must hold values at once. If a backend takes it from Rust's
/// allocator and forgets to write it, nothing may show for years. In a test with this allocator,
/// the rule `allocate.initialised` finds the pattern.
///
/// It sees Rust's allocations only. The rule is kept, without evidence, where the memory comes from
/// a runtime's own allocator: a backend must write such memory before it returns it, or be certain
/// that the runtime does.
///
/// ```
/// use arrow_device::Devices;
/// use arrow_device_conformance::{Poisoning, Subject, run};
///
/// #[global_allocator]
/// static ALLOCATOR: Poisoning = Poisoning;
///
/// run(&Subject::new(Devices::cpu()));
/// ```
#[derive(Clone, Copy, Default, Debug)]
pub struct Poisoning;

// SAFETY: all memory is the system allocator's, of the layout that was asked for. It may be written
// before it is returned.
unsafe impl GlobalAlloc for Poisoning {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller guarantees a layout of more than 0 bytes (see `GlobalAlloc::alloc`).
        let memory = unsafe { System.alloc(layout) };
        // Miri knows by itself what was written.
        if memory.is_null() || cfg!(miri) {
            return memory;
        }
        INSTALLED.store(true, Ordering::Relaxed);
        let bytes = layout.size();
        let mut done = bytes.min(POISON.len());
        // SAFETY: the memory was just allocated with `bytes` bytes, of which the first `done` are
        // written; each step copies them behind themselves.
        unsafe {
            memory.copy_from_nonoverlapping(POISON.as_ptr(), done);
            while done < bytes {
                let more = done.min(bytes - done);
                memory.add(done).copy_from_nonoverlapping(memory, more);
                done += more;
            }
        }
        memory
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller guarantees a layout of more than 0 bytes (see `GlobalAlloc::alloc_zeroed`).
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller guarantees memory of this allocator with this layout, freed once (see
        // `GlobalAlloc::dealloc`), and all of it is the system allocator's.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Whether the process allocates with [`Poisoning`].
pub(super) fn is_installed() -> bool {
    INSTALLED.load(Ordering::Relaxed)
}

/// Whether an allocation shows the pattern anywhere. Reads all of it.
pub(super) fn shows(memory: &[u8]) -> bool {
    memory.chunks_exact(8).any(|word| word == POISON)
}
