//! The memory of a device: what is allocated, and what waits for its next use.
//!
//! `sycl::free` waits until the device does not use the memory any more, and so may wait for other work too. Memory is therefore
//! freed by a thread of its own, and mostly not at all: it goes back to a pool.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::device::parts::{Block, Failure, Pool, Ranges, Worker};
use arrow_device::device::{AddressClass, DeviceId, DevicePtr, PointerInfo};
use arrow_device::{Error, Result};

use crate::object::Owned;
use crate::sys::{self, Memory, NOT_CALLED, enter, raw};

/// Which of SYCL's unified shared memory (USM) a device allocates. All three are ARROW_DEVICE_ONEAPI.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum OneApiMemory {
    /// The device's own memory (`sycl::malloc_device`).
    #[default]
    Device,
    /// Memory that moves between host and device (`sycl::malloc_shared`). The host can read it.
    Shared,
    /// Host memory that the device can read (`sycl::malloc_host`).
    Host,
}

impl OneApiMemory {
    pub(crate) fn kind(self) -> sys::Memory {
        match self {
            Self::Device => sys::Memory::Device,
            Self::Shared => sys::Memory::Shared,
            Self::Host => sys::Memory::Host,
        }
    }

    /// SYCL's name of it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Shared => "shared",
            Self::Host => "host",
        }
    }
}

/// What the last use of a block has to come to: an event of a queue.
pub(crate) struct After {
    pub(crate) event: Owned<raw::Event>,
    pub(crate) queue: Arc<Owned<raw::Queue>>,
}

impl After {
    /// Returns whether the event has failed. It may then have ended before the work that it stands for.
    fn has_failed(&self) -> bool {
        let failed = self.event.is_complete().err();
        failed.is_some_and(|failed| failed.code != NOT_CALLED)
    }

    /// Waits for the end of the work if the event has failed. Returns whether it has ended.
    fn has_ended(&self) -> bool {
        matches!(self.event.is_complete(), Ok(true)) || self.queue.finish().is_ok()
    }
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
    pool: Pool<After>,
    frees: Worker,
    failure: Arc<Failure>,
}

impl Blocks {
    pub(crate) fn new(
        id: DeviceId,
        device: Arc<Owned<raw::Device>>,
        context: Arc<Owned<raw::Context>>,
        kind: Memory,
        failure: Arc<Failure>,
    ) -> Self {
        Self {
            id,
            device,
            context,
            kind,
            live: Ranges::new(),
            host: Ranges::new(),
            pool: Pool::default(),
            frees: Worker::new("arrow-device oneapi free"),
            failure,
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
            return Err(self.empty());
        }
        let rounded = Pool::<()>::rounded(bytes).filter(|bytes| *bytes <= isize::MAX as usize);
        let rounded = rounded.ok_or_else(out_of_memory)?;
        // Before the pool's lock: no thread stays in there while the process ends.
        let _inside = enter().map_err(|failed| failed.on(self.id))?;
        let is_over = |after: &After| self.is_over(after);
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

    fn empty(&self) -> Error {
        let id = self.id;
        Error::InvalidArgument(
            format!("{id}: 0 bytes cannot be allocated; ask for at least one").into(),
        )
    }

    /// Allocates memory that is not in use, and, if the host can read it, initialised.
    fn new_block(&self, kind: Memory, bytes: usize) -> Result<Option<DevicePtr>> {
        let allocate = || self.context.allocate(&self.device, kind, bytes);
        let mut base = allocate().ok().flatten();
        if base.is_none() {
            self.free_idle(true);
            self.wait_for_frees();
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
    pub(crate) fn free(&self, base: DevicePtr, queue: u64, after: Option<After>) -> Result<()> {
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
            if self.pool.is_over(1) {
                self.free_idle(false);
            }
        }
        Ok(())
    }

    /// Frees memory that nothing uses any more: what is over the pool's limits, or all.
    pub(crate) fn free_idle(&self, all: bool) {
        let Ok(_inside) = enter() else { return };
        for block in self.pool.take_done(all, |after| self.is_over(after)) {
            self.free_later(block.base);
        }
        if self.failure.is_set() {
            for block in self.pool.take_done(true, After::has_failed) {
                self.free_after(block.base, block.after);
            }
        }
    }

    /// Returns whether the work has ended. If it has failed, the device has, and the block is freed after its queue has ended.
    fn is_over(&self, after: &After) -> bool {
        match after.event.is_complete() {
            Ok(is_complete) => is_complete,
            Err(failed) => {
                if failed.code != NOT_CALLED {
                    self.failure.set(failed.on(self.id));
                }
                false
            }
        }
    }

    /// Frees memory once the event has ended, and, if it has failed, the queue's work.
    fn free_after(&self, base: DevicePtr, after: After) {
        let context = self.context.clone();
        let after = Arc::new(after);
        let asked = after.clone();
        let ended = move || matches!(asked.event.is_complete(), Ok(true)) || asked.has_failed();
        self.frees.watch(ended, move || {
            if after.has_ended() {
                free_now(&context, base);
            }
        });
    }

    /// Waits for frees, but not long: they may wait for work.
    fn wait_for_frees(&self) {
        const PATIENCE: Duration = Duration::from_secs(1);
        let start = Instant::now();
        while self.frees.pending() > 0 && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_micros(100));
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
            return Err(self.empty());
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

    /// Returns whose memory an address is. SYCL knows the kind of another's, but not its length. The host will read what a device of
    /// shared or host memory imports, so that must be known to be of these kinds.
    pub(crate) fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let live = || self.live.classify(address, bytes, AddressClass::Device);
        let host = || {
            self.host
                .classify(address, bytes, AddressClass::HostAccessible)
        };
        let others = || {
            let other = |class| PointerInfo::new(class, address.range(bytes));
            let refused = |class, what: &str| {
                other(class).with_reason(format!(
                    "{what}, and the host reads what this device imports; open the device with OneApiMemory::Device"
                ))
            };
            match self.context.kind(address) {
                _ if self.kind == Memory::Device => other(AddressClass::Unknown),
                Ok(Some(Memory::Shared | Memory::Host)) => other(AddressClass::Unknown),
                // SYCL cannot tell ordinary memory from that of another context.
                Ok(None) => refused(
                    AddressClass::Host,
                    "SYCL does not know it as shared or host memory of this device's context",
                ),
                Ok(Some(Memory::Device)) => refused(
                    AddressClass::Inaccessible,
                    "it is memory of the kind device",
                ),
                Err(_) => other(AddressClass::Inaccessible),
            }
        };
        live().or_else(host).unwrap_or_else(others)
    }

    /// Whether the bytes are of `allocate_host`.
    pub(crate) fn is_host(&self, address: DevicePtr, bytes: usize) -> bool {
        let found = self.host.classify(address, bytes, AddressClass::Host);
        found.is_some_and(|found| found.class == AddressClass::Host)
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
            self.free_after(block.base, block.after);
        }
    }
}
