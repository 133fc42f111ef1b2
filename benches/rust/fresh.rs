//! Memory that nobody has touched yet, straight from the system.

use std::ffi::c_void;
use std::ptr::null_mut;

use crate::batches::Result;

/// Bytes of a large page on most machines.
const PAGE: usize = 2 << 20;

/// A mapping of its own, in large pages where the system has them.
#[derive(Debug)]
pub struct Fresh {
    start: *mut c_void,
    bytes: usize,
}

impl Fresh {
    /// # Errors
    /// The system's.
    pub fn new(bytes: usize) -> Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping, at an address that the system chooses.
        let start = unsafe { libc::mmap(null_mut(), bytes + PAGE, access, private, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        // SAFETY: the mapping above. Without large pages it is only slower.
        #[cfg(target_os = "linux")]
        unsafe {
            libc::madvise(start, bytes + PAGE, libc::MADV_HUGEPAGE)
        };
        Ok(Self { start, bytes })
    }

    /// The memory, from the start of a large page on.
    pub fn bytes(&mut self) -> &mut [u8] {
        let before = self.start.addr().next_multiple_of(PAGE) - self.start.addr();
        let start = self.start.wrapping_byte_add(before).cast();
        // SAFETY: the mapping has a page more than the bytes, is all zero at first, and is borrowed from `self`, its only owner.
        unsafe { std::slice::from_raw_parts_mut(start, self.bytes) }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, and nothing refers to it any more.
        unsafe { libc::munmap(self.start, self.bytes + PAGE) };
    }
}
