//! [`Region`]: an allocation that other processes can map, and [`Mapping`]: what they map.

use std::any::Any;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use arrow_device::device::DevicePtr;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result, check_process, lock};

/// The kind of file system that memory files of ordinary pages are of.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

/// Memory of a file that has no name, mapped writable until it is handed out, or memory of a device that has a descriptor.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) start: DevicePtr,
    pub(crate) bytes: usize,
    pub(crate) file: OwnedFd,
    /// Which of this process's allocations it is.
    pub(crate) number: u64,
    /// Whether others cannot write to it any more, as far as that is possible.
    is_sealed: Mutex<bool>,
    _mapped: Box<dyn Any + Send + Sync>,
}

impl Region {
    /// Allocates at least `bytes` bytes, all zero, whose size cannot change.
    pub(crate) fn of_file(bytes: usize) -> Result<Self> {
        let io = Error::of("allocate shared memory");
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"arrow-device", flags).map_err(&io)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(&io)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(&io)?;
        // What has no addresses is refused before pages are taken for it.
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let mapping = Mapping::of(file.as_fd(), bytes, access, MapFlags::SHARED)?;
        // A system that lacks the pages says so here, and not by a signal to whoever touches them first.
        let flags = FallocateFlags::empty();
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&file, flags, 0, bytes as u64))
            .map_err(&io)?;
        // A child that has not called `exec` yet would have a writable mapping, too, which `freeze` does not allow.
        let start = mapping.start.as_ptr().cast();
        // SAFETY: the addresses are the mapping's; the advice does not change its content.
        unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxDontFork) }.map_err(&io)?;
        let start = DevicePtr::new(start);
        Ok(Self::new(start, bytes, file, mapping))
    }

    /// Allocates memory with this content, which nobody can write any more.
    pub(crate) fn of(content: &[u8]) -> Result<Self> {
        let this = Self::of_file(content.len())?;
        let start = this.start.as_ptr().cast::<u8>();
        // SAFETY: the memory is mapped writable, has as many bytes, and nobody else has it yet.
        unsafe { ptr::copy_nonoverlapping(content.as_ptr(), start, content.len()) };
        this.freeze()?;
        Ok(this)
    }

    /// What `mapped` keeps in this process's addresses.
    pub(crate) fn new(
        start: DevicePtr,
        bytes: usize,
        file: OwnedFd,
        mapped: impl Any + Send + Sync,
    ) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        Self {
            start,
            bytes,
            file,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            is_sealed: Mutex::default(),
            _mapped: Box::new(mapped),
        }
    }

    /// Lets [`find`] find the allocation by its address, which is returned, until that is [freed](free).
    pub(crate) fn publish(self) -> DevicePtr {
        let mut regions = lock(&REGIONS);
        let start = self.start;
        regions.insert(start.address(), Arc::new(self));
        start
    }

    /// Ends all writing to memory of the CPU: this process maps it read-only from now on, at the same address, and the system
    /// lets nobody write to it again.
    ///
    /// # Errors
    /// If somebody else has mapped it writable, or a device writes to it.
    pub(crate) fn freeze(&self) -> Result<()> {
        self.seal(|| {
            // The content stays: both mappings are of the file's pages, and a private one that is never written has no others.
            let flags = MapFlags::PRIVATE | MapFlags::FIXED;
            let start = self.start.as_ptr();
            // SAFETY: this replaces the mapping by one of the same bytes, so that references to them stay valid. Nobody writes any more:
            // the memory is that of a `DeviceBuffer`. After an error, the old mapping is still there, since the system checks its limits
            // before.
            unsafe { rustix::mm::mmap(start, self.bytes, ProtFlags::READ, flags, &self.file, 0) }?;
            rustix::fs::fcntl_add_seals(&self.file, SealFlags::WRITE | SealFlags::SEAL)
        })
    }

    /// Ends all writing of others: the device of this process may still fill the memory.
    pub(crate) fn keep_others_from_writing(&self) -> Result<()> {
        self.seal(|| {
            rustix::fs::fcntl_add_seals(&self.file, SealFlags::FUTURE_WRITE | SealFlags::SEAL)
        })
    }

    fn seal(&self, how: impl FnOnce() -> rustix::io::Result<()>) -> Result<()> {
        let mut is_sealed = lock(&self.is_sealed);
        if !*is_sealed {
            how().map_err(Error::of("seal shared memory"))?;
            *is_sealed = true;
        }
        Ok(())
    }
}

/// The published allocations by their addresses. All devices whose addresses are the process's own have different ones.
static REGIONS: Mutex<BTreeMap<usize, Arc<Region>>> = Mutex::new(BTreeMap::new());

/// Frees a published allocation, once nobody is about to send it.
pub(crate) fn free(start: DevicePtr) {
    // The child's copy of a region, and the addresses, stay as they are.
    if check_owner().is_ok() {
        let mut regions = lock(&REGIONS);
        let freed = regions.remove(&start.address());
        // Without the lock.
        drop(regions);
        drop(freed);
    }
}

/// Fails in a forked child of the process that has used [`REGIONS`] first, where they may be locked for ever.
pub(crate) fn check_owner() -> Result<()> {
    static PROCESS: OnceLock<u32> = OnceLock::new();
    check_process(*PROCESS.get_or_init(std::process::id))
}

/// Returns the published allocation in which these bytes lie, and where.
pub(crate) fn find(address: DevicePtr, bytes: usize) -> Option<(Arc<Region>, usize)> {
    check_owner().ok()?;
    let regions = lock(&REGIONS);
    let (start, region) = regions.range(..=address.address()).next_back()?;
    let within = address.address() - start;
    let fits = within.checked_add(bytes)? <= region.bytes;
    fits.then(|| (region.clone(), within))
}

/// Bytes of a memory file in this process's addresses.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) start: NonNull<u8>,
    bytes: usize,
    /// In a forked child, something else may be at the addresses.
    process: u32,
}

// SAFETY: it owns the addresses, which any thread may use and unmap; it never reads through them itself.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference only tells the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps memory that a peer passed, to be read. Its file has at least `bytes` bytes and always will; if it is `frozen`, nobody can
    /// write to it any more, and it has all its pages.
    ///
    /// # Errors
    /// Returns [`Error::Protocol`] if one of these is not so.
    pub(crate) fn of_peer(file: BorrowedFd<'_>, bytes: usize, frozen: bool) -> Result<Self> {
        let not_ours = |_| Error::protocol("the memory is no sealed memory file");
        let seals = rustix::fs::fcntl_get_seals(file).map_err(not_ours)?;
        // A file of large pages has seals, too, and may lack the pages.
        if rustix::fs::fstatfs(file).map_err(not_ours)?.f_type != TMPFS {
            return Error::broken("the memory has pages of another size");
        }
        let stat = rustix::fs::fstat(file).map_err(not_ours)?;
        let size = stat.st_size;
        if !seals.contains(SealFlags::SHRINK) {
            return Error::broken("the memory may shrink");
        }
        if frozen && !seals.contains(SealFlags::WRITE) {
            return Error::broken("the memory may still be written");
        }
        if bytes == 0 || !u64::try_from(size).is_ok_and(|size| bytes as u64 <= size) {
            return Error::broken(format!("{bytes} bytes of memory are described, not {size}"));
        }
        // A page that is missing is made when it is read, for which there may be no memory: that ends the process.
        if frozen && i128::from(stat.st_blocks) * 512 < i128::from(size) {
            return Error::broken("the memory has holes");
        }
        // Private: systems before 6.7 refuse a shared mapping of a sealed file. It has the file's pages as long as nobody writes, and
        // nobody can.
        Self::of(file, bytes, ProtFlags::READ, MapFlags::PRIVATE)
    }

    fn of(file: BorrowedFd<'_>, bytes: usize, access: ProtFlags, flags: MapFlags) -> Result<Self> {
        // SAFETY: a new mapping at addresses that the system chooses.
        let start = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, access, flags, file, 0) };
        let start = start.map_err(Error::of("map shared memory"))?;
        let start = NonNull::new(start.cast::<u8>());
        let start = start.ok_or_else(|| Error::protocol("memory at address 0"))?;
        Ok(Self {
            start,
            bytes,
            process: std::process::id(),
        })
    }

    /// Copies the content of memory that is frozen.
    pub(crate) fn to_vec(&self) -> Vec<u8> {
        // SAFETY: so many bytes are mapped, which nobody can write: the caller has asked for that in `of_peer`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }.to_vec()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // The child does not have this mapping, or leaves it to the system.
        if check_process(self.process).is_err() {
            return;
        }
        // SAFETY: the addresses are this mapping's, and whoever uses them holds it.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}
