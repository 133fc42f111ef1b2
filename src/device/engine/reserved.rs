//! Addresses at which there is no memory.

use std::ffi::c_void;

use crate::device::DeviceId;
use crate::device::backend::{DevicePtr, out_of_memory};
use crate::device::engine::ranges::Ranges;
use crate::error::{Error, Result};

/// All that are reserved in this process.
static RESERVED: Ranges<()> = Ranges::new();

/// Addresses at which there is no memory, for memory that has a handle and no address. A load or a store there ends the process;
/// a system call with such an address fails. Dropping the value gives the addresses back.
///
/// The addresses are those of nothing else while this lives, the end (`bytes` bytes after the base) included. They are aligned
/// to a page, take no memory, and are limited in number by the system's limit of mappings at most. Available on Unix and
/// Windows.
///
/// ```
/// use arrow_device::abi::ArrowDeviceType;
/// use arrow_device::device::{DeviceId, engine::Reserved};
///
/// # if cfg!(miri) { return Ok(()) }
/// let device = DeviceId::new(ArrowDeviceType::OPENCL, 0);
/// let reserved = Reserved::new(device, 1 << 20)?; // stands for a handle of the runtime
/// assert_eq!(reserved.base().address() % 4096, 0);
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Debug)]
pub struct Reserved {
    base: DevicePtr,
    /// As was asked for.
    pub(crate) bytes: usize,
}

impl Reserved {
    /// Reserves addresses for `bytes` bytes. Errors name the device.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes, and [`Error::OutOfMemory`] if the system has no such range of addresses: other systems
    /// than Unix and Windows have none.
    pub fn new(device: DeviceId, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::argument("0 bytes of addresses"));
        }
        // The end is reserved too, so that it is not the base of something else.
        let base = bytes.checked_add(1).and_then(system::reserve);
        let base = base.ok_or_else(|| out_of_memory(device, "reserve addresses", bytes))?;
        let base = DevicePtr::new(base);
        RESERVED.insert(base, bytes + 1, ());
        Ok(Self { base, bytes })
    }

    /// Returns whether some of `bytes` bytes at an address are at reserved addresses, of whichever device.
    pub fn covers(address: DevicePtr, bytes: usize) -> bool {
        RESERVED.overlaps(address, bytes)
    }

    /// Returns the first address.
    pub fn base(&self) -> DevicePtr {
        self.base
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        RESERVED.remove(self.base);
        // SAFETY: `reserve` returned the base for as many bytes in `new`, and this is the only owner.
        unsafe { system::release(self.base.as_ptr(), self.bytes + 1) };
    }
}

#[cfg(unix)]
mod system {
    use super::c_void;

    pub(super) fn reserve(bytes: usize) -> Option<*mut c_void> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
        // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        (base != libc::MAP_FAILED).then_some(base)
    }

    /// # Safety
    /// `base` is from [`reserve`] with `bytes`, and is released once.
    pub(super) unsafe fn release(base: *mut c_void, bytes: usize) {
        // SAFETY: the caller guarantees a whole mapping that nothing else owns (see `# Safety`).
        unsafe { libc::munmap(base, bytes) };
    }
}

#[cfg(windows)]
mod system {
    use super::c_void;

    const MEM_RESERVE: u32 = 0x2000;
    const MEM_RELEASE: u32 = 0x8000;
    const PAGE_NOACCESS: u32 = 1;

    // Nothing else in this crate's dependencies needs windows-sys, and these two have not changed since Windows 2000.
    #[link(name = "kernel32")]
    unsafe extern "system" {
        fn VirtualAlloc(
            address: *mut c_void,
            size: usize,
            kind: u32,
            protection: u32,
        ) -> *mut c_void;
        fn VirtualFree(address: *mut c_void, size: usize, kind: u32) -> i32;
    }

    pub(super) fn reserve(bytes: usize) -> Option<*mut c_void> {
        // SAFETY: the system chooses the address, so nothing else is there.
        let base = unsafe { VirtualAlloc(std::ptr::null_mut(), bytes, MEM_RESERVE, PAGE_NOACCESS) };
        (!base.is_null()).then_some(base)
    }

    /// # Safety
    /// `base` is from [`reserve`], and is released once.
    pub(super) unsafe fn release(base: *mut c_void, _bytes: usize) {
        // SAFETY: the caller guarantees a whole reservation that nothing else owns (see `# Safety`). Its size must be 0 here.
        unsafe { VirtualFree(base, 0, MEM_RELEASE) };
    }
}

#[cfg(not(any(unix, windows)))]
mod system {
    use super::c_void;

    pub(super) fn reserve(_bytes: usize) -> Option<*mut c_void> {
        None
    }

    /// # Safety
    /// There is nothing to release.
    pub(super) unsafe fn release(_base: *mut c_void, _bytes: usize) {}
}

#[cfg(all(test, any(unix, windows), not(miri)))]
mod tests {
    use super::*;
    use crate::abi::ArrowDeviceType;

    const DEVICE: DeviceId = DeviceId::new(ArrowDeviceType::OPENCL, 0);

    #[test]
    fn ranges_do_not_overlap_and_are_given_back() {
        let reserved: Vec<Reserved> = (1..=64)
            .map(|i| Reserved::new(DEVICE, i * 64 * 1024).unwrap())
            .collect();
        let mut ranges: Vec<_> = reserved.iter().map(|r| r.base().range(r.bytes)).collect();
        ranges.sort_by_key(|range| range.start);
        // The end belongs to nothing else either.
        assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        assert!(ranges.iter().all(|range| range.start % 4096 == 0));
        let (base, end) = (reserved[3].base(), reserved[3].base().offset(4 * 64 * 1024));
        for (address, bytes) in [(base, 1), (end, 1), (base, usize::MAX)] {
            assert!(Reserved::covers(address, bytes));
        }
        let local = DevicePtr::new((&raw const end).cast_mut().cast());
        assert!(!Reserved::covers(local, size_of_val(&end)));
        drop(reserved);
        // More in all than there are addresses: 2^47 bytes, or 2^32.
        let bytes = 1 << if usize::BITS == 64 { 38 } else { 24 };
        for _ in 0..1000 {
            Reserved::new(DEVICE, bytes).unwrap();
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(matches!(
            Reserved::new(DEVICE, 0),
            Err(Error::InvalidArgument(_))
        ));
        for bytes in [usize::MAX, usize::MAX / 2] {
            let refused = Reserved::new(DEVICE, bytes);
            assert!(
                matches!(refused, Err(Error::OutOfMemory { device: DEVICE, bytes: b, .. }) if b == bytes),
                "{refused:?}"
            );
        }
    }

    /// Reads and writes at the addresses, each in a child process, which the system ends.
    #[test]
    fn a_touch_ends_the_process() {
        const TOUCH: &str = "ARROW_DEVICE_TEST_TOUCH";
        const BYTES: usize = 3 * 4096;
        if let Ok(touch) = std::env::var(TOUCH) {
            let reserved = Reserved::new(DEVICE, BYTES).unwrap();
            let address = |offset| reserved.base().offset(offset).as_ptr().cast::<u8>();
            #[cfg(unix)]
            {
                let no_core = libc::rlimit {
                    rlim_cur: 0,
                    rlim_max: 0,
                };
                // SAFETY: the struct outlives the call, and no other thread of this process changes signals. No core file is
                // written, and no handler, of a sanitizer for example, is run.
                unsafe {
                    libc::setrlimit(libc::RLIMIT_CORE, &no_core);
                    libc::signal(libc::SIGSEGV, libc::SIG_DFL);
                    libc::signal(libc::SIGBUS, libc::SIG_DFL);
                }
            }
            // SAFETY: none: that the access does not return is what the test shows. It is volatile, so it is not left out.
            unsafe {
                match touch.as_str() {
                    "read" => drop(address(0).read_volatile()),
                    "write" => address(BYTES - 1).write_volatile(1),
                    "read the end" => drop(address(BYTES).read_volatile()),
                    _ => {}
                }
            }
            return;
        }
        let run = |touch: &str| {
            let (_, module) = module_path!().split_once("::").unwrap();
            let name = format!("{module}::a_touch_ends_the_process");
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let child = child
                .args([&name, "--exact", "--test-threads=1"])
                .env(TOUCH, touch);
            child.output().unwrap().status
        };
        assert!(run("nothing").success());
        for touch in ["read", "write", "read the end"] {
            let status = run(touch);
            #[cfg(unix)]
            {
                use std::os::unix::process::ExitStatusExt;
                let signal = status.signal();
                assert!(
                    matches!(signal, Some(libc::SIGSEGV | libc::SIGBUS)),
                    "{touch}: {status}"
                );
            }
            #[cfg(windows)]
            assert_eq!(status.code(), Some(0xC000_0005_u32 as i32), "{touch}"); // access violation
        }
    }
}
