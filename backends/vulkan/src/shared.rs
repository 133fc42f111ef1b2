//! [`Shared`]: what a device and its queues share.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::device::DevicePtr;
use arrow_device::device::parts::{Block, Pool, Ranges, Worker};
use arrow_device::{Error, Result};

use crate::batch::Batch;
use crate::context::{Context, SharedQueue};
use crate::event::Events;
use crate::lane::{Lane, Point};
use crate::memory::{Buffer, Buffers, Memory, Place};
use crate::physical::VulkanDeviceInfo;
use crate::submit::Lanes;

/// How long an allocation waits, while there is no memory left, for work that uses what was freed.
const PATIENCE: Duration = Duration::from_secs(1);

/// Memory in the pool.
pub(crate) struct Idle {
    after: Point,
    buffer: Arc<Buffer>,
}

impl Idle {
    fn is_done(&self) -> bool {
        matches!(self.after.is_reached(), Ok(true))
    }
}

/// What a device and its queues share.
pub(crate) struct Shared {
    pub(crate) context: Arc<Context>,
    pub(crate) info: VulkanDeviceInfo,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) memory: Arc<Memory>,
    /// What is destroyed after all work.
    pub(crate) objects: ManuallyDrop<Objects>,
}

pub(crate) struct Objects {
    pub(crate) events: Events,
    /// Device memory in use.
    pub(crate) live: Buffers,
    /// Host memory in use.
    pub(crate) host: Buffers,
    /// Host memory with each byte four times, in order, from which small pieces are filled.
    pub(crate) bytes: Arc<Buffer>,
    pool: Pool<Idle>,
}

impl Shared {
    pub(crate) fn new(
        context: Context,
        info: VulkanDeviceInfo,
        queues: Vec<Arc<dyn SharedQueue>>,
        idle_bytes: usize,
    ) -> Result<Self> {
        let context = Arc::new(context);
        let memory = Arc::new(Memory::new(&context, info.max_allocation)?);
        let bytes = memory.allocate(4 * 256, Place::Host)?;
        for byte in 0..=u8::MAX {
            let four = bytes.base.offset(4 * usize::from(byte)).as_ptr();
            // SAFETY: the buffer has four bytes for each value, mapped and coherent, and nothing else uses them.
            unsafe { four.cast::<u8>().write_bytes(byte, 4) };
        }
        Ok(Self {
            lanes: Arc::new(Lanes::new(&context, queues)?),
            objects: ManuallyDrop::new(Objects {
                events: Events::new(&context),
                live: Ranges::new(),
                host: Ranges::new(),
                bytes: Arc::new(bytes),
                pool: Pool::new(idle_bytes),
            }),
            memory,
            info,
            context,
        })
    }

    /// Allocates memory for work of a lane.
    pub(crate) fn allocate(&self, lane: &Lane, bytes: usize) -> Result<DevicePtr> {
        let Objects { pool, live, .. } = &*self.objects;
        let rounded = Pool::<Idle>::rounded(bytes).unwrap_or(usize::MAX);
        let buffer = match pool.take(lane.number, rounded, Idle::is_done) {
            Some(block) => block.after.buffer,
            None => {
                self.free_idle(false);
                let least = bytes.max(self.memory.most);
                Arc::new(self.allocate_new(rounded.min(least))?)
            }
        };
        let base = buffer.base;
        live.insert(base, bytes, buffer);
        Ok(base)
    }

    /// Asks the driver for memory. If it has none left, what is in the pool is freed: at once what is done, and the rest once it
    /// is, for which this waits a while.
    fn allocate_new(&self, bytes: usize) -> Result<Buffer> {
        let start = Instant::now();
        loop {
            let made = self.memory.allocate(bytes, Place::Device);
            if bytes > self.memory.most || !matches!(made, Err(Error::OutOfMemory { .. })) {
                return made;
            }
            while !self.free_idle(true) {
                if self.objects.pool.is_empty() || start.elapsed() > PATIENCE {
                    return made;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Gives memory back after the work of a lane so far.
    pub(crate) fn free(&self, lane: &Arc<Lane>, base: DevicePtr) -> Result<()> {
        let Objects { pool, live, .. } = &*self.objects;
        // A batch of its own comes after what the lane was told to wait for, and what a program has submitted.
        // SAFETY: the batch does nothing.
        let number = unsafe { self.lanes.push(lane, Batch::default()) };
        // Otherwise the next batch does.
        let number = number.unwrap_or_else(|_| lane.owe());
        let Some((_, buffer)) = live.remove(base) else {
            let reason = format!("{base:?} is not the beginning of an allocation of this device");
            return Err(self.context.not_supported("free", reason));
        };
        let lane = lane.clone();
        let queue = lane.number;
        pool.give(Block {
            base,
            bytes: buffer.bytes,
            queue,
            after: Idle {
                after: Point { lane, number },
                buffer,
            },
        });
        if pool.is_over(1) {
            self.free_idle(false);
        }
        Ok(())
    }

    /// Frees memory that nothing uses any more: what is over the limits, or all of it. Returns whether there was any.
    pub(crate) fn free_idle(&self, all: bool) -> bool {
        let done = self.objects.pool.take_done(all, Idle::is_done);
        !done.is_empty()
    }

    /// Frees all memory that nothing uses any more.
    pub(crate) fn trim(&self) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        self.lanes.forget_ended();
        self.objects.events.recycle();
        self.free_idle(true);
    }
}

impl Drop for Shared {
    /// Destroys everything once the queues, which were dropped, have ended.
    fn drop(&mut self) {
        let Some(_inside) = self.context.enter_to_drop() else {
            return;
        };
        // SAFETY: the value is not used again.
        let objects = unsafe { ManuallyDrop::take(&mut self.objects) };
        let lanes = self.lanes.clone();
        if lanes.is_idle() {
            lanes.forget_ended();
            drop((objects, lanes));
            return;
        }
        // Not the context's worker, whose jobs must not block. Dropping this one does not wait.
        Worker::new("arrow-device vulkan end").push(move || {
            // After an error nothing runs any more, either.
            let _ = lanes.settle();
            drop((objects, lanes));
        });
    }
}
