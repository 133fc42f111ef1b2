//! The memory of a device: what is allocated, and what waits for its next use.
//!
//! `sycl::free` waits until the device does not use the memory any more, and so may wait for other work too. Memory is therefore
//! freed by a thread of its own, and mostly not at all: it goes back to a pool.

use std::sync::Arc;

use arrow_device::device::parts::{Block, Pool, Ranges, Worker};
use arrow_device::device::{AddressClass, DeviceId, DevicePtr};
use arrow_device::{Error, Result};

use crate::object::Owned;
use crate::sys::{Memory, raw};

/// An event, as the pool asks about it. Work that has failed is over, too.
fn is_over(event: &Owned<raw::Event>) -> bool {
    event.is_complete().unwrap_or(true)
}

/// The memory of a device.
pub(crate) struct Blocks {
    id: DeviceId,
    device: Arc<Owned<raw::Device>>,
    context: Arc<Owned<raw::Context>>,
    kind: Memory,
    /// Each with the length of its block, which may be longer.
    live: Ranges<usize>,
    host: Ranges<()>,
    pool: Pool<Owned<raw::Event>>,
    frees: Worker,
}

impl Blocks {
    pub(crate) fn new(
        id: DeviceId,
        device: Arc<Owned<raw::Device>>,
        context: Arc<Owned<raw::Context>>,
        kind: Memory,
    ) -> Self {
        Self {
            id,
            device,
            context,
            kind,
            live: Ranges::new(),
            host: Ranges::new(),
            pool: Pool::new(),
            frees: Worker::new("arrow-device oneapi free"),
        }
    }

    /// Allocates memory for work on a queue from now on.
    pub(crate) fn allocate(&self, queue: u64, bytes: usize) -> Result<DevicePtr> {
        let out_of_memory = || Error::OutOfMemory {
            device: self.id,
            operation: "sycl::aligned_alloc",
            bytes,
        };
        if bytes == 0 {
            return Err(Error::InvalidArgument("0 bytes cannot be allocated".into()));
        }
        let rounded = Pool::<()>::rounded(bytes).filter(|bytes| *bytes <= isize::MAX as usize);
        let rounded = rounded.ok_or_else(out_of_memory)?;
        let (base, whole) = match self.pool.take(queue, rounded, is_over) {
            Some(block) => (block.base, block.bytes),
            None => {
                self.free_idle(false);
                (
                    self.new_block(self.kind, rounded)?
                        .ok_or_else(out_of_memory)?,
                    rounded,
                )
            }
        };
        self.live.insert(base, bytes, whole);
        Ok(base)
    }

    /// Allocates memory that is not in use, and, if the host can read it, initialised.
    fn new_block(&self, kind: Memory, bytes: usize) -> Result<Option<DevicePtr>> {
        let allocate = || self.context.allocate(&self.device, kind, bytes);
        let mut base = allocate().ok().flatten();
        if base.is_none() {
            self.free_idle(true);
            self.frees.finish();
            base = allocate().map_err(|failed| failed.on(self.id))?;
        }
        if let Some(base) = base.filter(|_| kind != Memory::Device) {
            // SAFETY: the memory is new, of this many bytes, and the host may write to shared and host memory that no work uses.
            unsafe { base.as_ptr().cast::<u8>().write_bytes(0, bytes) };
        }
        Ok(base)
    }

    /// Takes back memory of `allocate`, after work of a queue so far, which `after` stands for. If it is `None`, the memory is
    /// never used again.
    pub(crate) fn free(
        &self,
        base: DevicePtr,
        queue: u64,
        after: Option<Owned<raw::Event>>,
    ) -> Result<()> {
        let unknown = || {
            Error::InvalidArgument(
                format!("{base:?} is not memory that {} has allocated", self.id).into(),
            )
        };
        let (_, bytes) = self.live.remove(base).ok_or_else(unknown)?;
        if let Some(after) = after {
            self.pool.give(Block {
                base,
                bytes,
                queue,
                after,
            });
        }
        Ok(())
    }

    /// Frees memory that nothing uses any more: what is over the pool's limits, or all.
    pub(crate) fn free_idle(&self, all: bool) {
        for block in self.pool.take_done(all, is_over) {
            self.free_later(block.base);
        }
    }

    fn free_later(&self, base: DevicePtr) {
        let context = self.context.clone();
        self.frees.push(move || free_now(&context, base));
    }

    pub(crate) fn allocate_host(&self, bytes: usize) -> Result<DevicePtr> {
        let out_of_memory = || Error::OutOfMemory {
            device: self.id,
            operation: "sycl::aligned_alloc_host",
            bytes,
        };
        if bytes == 0 {
            return Err(Error::InvalidArgument("0 bytes cannot be allocated".into()));
        }
        if bytes > isize::MAX as usize {
            return Err(out_of_memory());
        }
        let base = self
            .new_block(Memory::Host, bytes)?
            .ok_or_else(out_of_memory)?;
        self.host.insert(base, bytes, ());
        Ok(base)
    }

    /// Frees memory of `allocate_host`, which no copy uses any more.
    pub(crate) fn free_host(&self, base: DevicePtr) {
        if self.host.remove(base).is_some() {
            self.free_later(base);
        }
    }

    /// Returns whose memory an address is. SYCL knows the kind of another's, but not its length.
    pub(crate) fn classify(
        &self,
        address: DevicePtr,
        bytes: usize,
    ) -> (AddressClass, std::ops::Range<usize>) {
        let live = self
            .live
            .classify_allocation(address, bytes, AddressClass::Device);
        let host = || {
            self.host
                .classify_allocation(address, bytes, AddressClass::HostAccessible)
        };
        let start = address.address();
        live.or_else(host)
            .unwrap_or((AddressClass::Unknown, start..start.saturating_add(bytes)))
    }

    /// Whether the bytes are of `allocate_host`.
    pub(crate) fn is_host(&self, address: DevicePtr, bytes: usize) -> bool {
        self.host.classify(address, bytes, AddressClass::Host) == Some(AddressClass::Host)
    }

    /// How many allocations of device and of host memory live, and how many frees are to be made.
    pub(crate) fn outstanding(&self) -> (usize, usize, usize) {
        (self.live.len(), self.host.len(), self.frees.pending())
    }
}

fn free_now(context: &Owned<raw::Context>, base: DevicePtr) {
    // An error has no place to go: the memory is lost.
    // SAFETY: the memory was allocated in this context, is out of the pool and of the table, and no work uses it.
    let _ = unsafe { context.free(base) };
}

/// The device's last handle is gone. Its work may still run.
impl Drop for Blocks {
    fn drop(&mut self) {
        for block in self.pool.take_all() {
            let (context, base, after) = (self.context.clone(), block.base, block.after);
            self.frees
                .watch(move || is_over(&after), move || free_now(&context, base));
        }
    }
}
