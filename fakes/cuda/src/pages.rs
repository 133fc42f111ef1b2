//! Pages of the host's that are mapped by hand: what is behind virtual memory, and what processes share.

use std::ffi::{CStr, c_int};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

/// Makes a file without a name, of so many bytes, all zero.
pub(crate) fn memory_file(name: &CStr, bytes: usize) -> Option<File> {
    // SAFETY: the name ends with a NUL; the call makes a descriptor, or fails.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: the descriptor was just made, and nothing else has it.
    let file = (fd >= 0).then(|| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))?;
    file.set_len(bytes as u64).ok()?;
    Some(file)
}

/// Addresses of this process.
#[derive(Debug)]
pub(crate) struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns the addresses, which any thread may map and unmap, and never uses what is there.
unsafe impl Send for Pages {}
// SAFETY: a shared reference only maps and unmaps at its addresses, which the system does in an order of its own.
unsafe impl Sync for Pages {}

impl Pages {
    /// Takes up so many addresses, at which nothing is.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        map(ptr::null_mut(), bytes, libc::PROT_NONE, 0, None)
    }

    /// Maps a file to be read and written.
    pub(crate) fn of(file: &File, bytes: usize) -> Option<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        map(ptr::null_mut(), bytes, protection, 0, Some(file))
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Replaces the first so many bytes by those of a file, or by nothing. They cannot be used yet.
    pub(crate) fn map(&self, file: Option<&File>, bytes: usize) -> Option<()> {
        let start = self.start.as_ptr();
        let bytes = bytes.min(self.bytes);
        let mapped = map(start, bytes, libc::PROT_NONE, libc::MAP_FIXED, file)?;
        // The addresses stay this value's.
        std::mem::forget(mapped);
        Some(())
    }

    /// Sets who may use the first so many bytes.
    pub(crate) fn protect(&self, bytes: usize, protection: c_int) -> Option<()> {
        let bytes = bytes.min(self.bytes);
        // SAFETY: the addresses are this value's.
        let code = unsafe { libc::mprotect(self.start.as_ptr().cast(), bytes, protection) };
        (code == 0).then_some(())
    }
}

fn map(
    at: *mut u8,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    file: Option<&File>,
) -> Option<Pages> {
    let (kind, fd) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
        ),
    };
    // SAFETY: without an address the system chooses unused ones; with one, the caller owns as many bytes there.
    let start = unsafe { libc::mmap(at.cast(), bytes, protection, kind | flags, fd, 0) };
    let start = NonNull::new(start.cast::<u8>()).filter(|_| start != libc::MAP_FAILED)?;
    Some(Pages { start, bytes })
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the addresses are this value's, and whoever uses them holds it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
