//! Copies and fills: which buffers they concern, and their commands.

use std::sync::Arc;

use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use arrow_device::{Error, Result};
use ash::vk;

use crate::batch::{Batch, HostWork};
use crate::memory::{Buffer, Buffers, Place};
use crate::shared::{Objects, Shared};

/// A place in a buffer.
struct At {
    buffer: Arc<Buffer>,
    offset: usize,
}

/// Returns where all of `bytes` bytes lie.
fn find(buffers: &Buffers, address: DevicePtr, bytes: usize) -> Option<At> {
    let found = buffers.find(address)?;
    (bytes <= found.bytes - found.offset).then_some(At {
        buffer: found.value,
        offset: found.offset,
    })
}

impl Shared {
    /// Returns the buffer behind an address, and the offset.
    pub(crate) fn resolve(&self, address: DevicePtr, bytes: usize) -> Result<(vk::Buffer, u64)> {
        let at = self.at(address, bytes)?;
        Ok((at.buffer.raw, at.offset as u64))
    }

    fn at(&self, address: DevicePtr, bytes: usize) -> Result<At> {
        let Objects { live, host, .. } = &*self.objects;
        let found = find(live, address, bytes).or_else(|| find(host, address, bytes));
        found.ok_or_else(|| {
            let device = self.context.id;
            Error::InvalidArgument(
                format!(
                    "{bytes} bytes at {address:?} are in no VkBuffer that {device} knows; make the producer's VkBuffer known with \
                     VulkanDevice::wrap_buffer"
                )
                .into(),
            )
        })
    }
}

/// Copies between ordinary host memory and a staging buffer, by the host.
#[derive(Default)]
struct Staging {
    /// (ordinary memory, offset in the staging buffer, bytes)
    pieces: Vec<(DevicePtr, usize, usize)>,
    bytes: usize,
}

impl Staging {
    fn add(&mut self, ordinary: DevicePtr, bytes: usize) -> Result<usize> {
        let at = self.bytes;
        let end = at.checked_add(bytes);
        self.bytes = end.ok_or_else(|| {
            Error::InvalidArgument("copies of more bytes than there are addresses".into())
        })?;
        self.pieces.push((ordinary, at, bytes));
        Ok(at)
    }
}

/// Which way the host copies.
#[derive(Clone, Copy)]
enum Way {
    IntoStaging,
    OutOfStaging,
}

/// A list of copies as commands.
#[derive(Default)]
struct Plan {
    /// (source, destination, regions)
    copies: Vec<(vk::Buffer, vk::Buffer, Vec<vk::BufferCopy>)>,
    buffers: Vec<Arc<Buffer>>,
}

impl Plan {
    fn add(&mut self, src: &At, dst: &At, bytes: usize) {
        let region = vk::BufferCopy {
            src_offset: src.offset as u64,
            dst_offset: dst.offset as u64,
            size: bytes as u64,
        };
        let (from, to) = (src.buffer.raw, dst.buffer.raw);
        match self.copies.last_mut() {
            Some((src, dst, regions)) if *src == from && *dst == to => regions.push(region),
            _ => {
                self.buffers
                    .extend([src.buffer.clone(), dst.buffer.clone()]);
                self.copies.push((from, to, vec![region]));
            }
        }
    }

    /// # Safety
    /// As [`record_between`].
    unsafe fn record(&self, device: &ash::Device, commands: vk::CommandBuffer) {
        // SAFETY: the caller guarantees the command buffer. Each region lies within its buffers (`find`, `Staging`), whose usage allows
        // to copy from and to (VUID-vkCmdCopyBuffer-srcBuffer-00118, -dstBuffer-00120), and no destination overlaps another range of
        // the list (contract of `RawQueue::copy`; -pRegions-00117).
        let copies = || unsafe {
            for (src, dst, regions) in &self.copies {
                device.cmd_copy_buffer(commands, *src, *dst, regions);
            }
        };
        // SAFETY: the caller guarantees the command buffer, and the queue's family (see `# Safety`).
        unsafe { record_between(device, commands, copies) };
    }
}

/// Records transfers between barriers: after all earlier commands of the VkQueue, and before all later ones and the host.
///
/// # Safety
/// The command buffer is in the recording state, outside a render pass, and its pool's family runs compute or graphics commands.
unsafe fn record_between(
    device: &ash::Device,
    commands: vk::CommandBuffer,
    transfers: impl FnOnce(),
) {
    use vk::{AccessFlags as Access, PipelineStageFlags as Stage};
    let all = Access::MEMORY_READ | Access::MEMORY_WRITE;
    let before = vk::MemoryBarrier::default()
        .src_access_mask(all)
        .dst_access_mask(Access::TRANSFER_READ | Access::TRANSFER_WRITE);
    let after = vk::MemoryBarrier::default()
        .src_access_mask(Access::TRANSFER_WRITE)
        .dst_access_mask(all | Access::HOST_READ | Access::HOST_WRITE);
    let barrier = |from, to, barrier| {
        let (none, barriers) = (vk::DependencyFlags::empty(), [barrier]);
        // SAFETY: the caller guarantees the command buffer; each access is one of a stage of its side
        // (VUID-vkCmdPipelineBarrier-srcAccessMask-02815, -dstAccessMask-02816).
        unsafe { device.cmd_pipeline_barrier(commands, from, to, none, &barriers, &[], &[]) };
    };
    barrier(Stage::ALL_COMMANDS, Stage::TRANSFER, before);
    transfers();
    barrier(Stage::TRANSFER, Stage::ALL_COMMANDS | Stage::HOST, after);
}

impl Shared {
    /// Makes a staging buffer of the size, unless it is 0.
    fn stage(&self, bytes: usize) -> Result<Option<Arc<Buffer>>> {
        match bytes {
            0 => Ok(None),
            _ => Ok(Some(Arc::new(self.memory.allocate(bytes, Place::Host)?))),
        }
    }

    /// Prepares copies as a batch, and passes it to `push`.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](arrow_device::device::RawQueue::copy), for the time of the batch.
    pub(crate) unsafe fn copy<T>(
        &self,
        copies: &[CopyOp],
        push: impl FnOnce(Batch<'_>) -> Result<T>,
    ) -> Result<T> {
        let host = &self.objects.host;
        let (mut up, mut down) = (Staging::default(), Staging::default());
        // Where each copy begins and ends, or the offset in a staging buffer.
        let mut ends = Vec::with_capacity(copies.len());
        for op in copies {
            let end = |staged: &mut Staging, address| match find(host, address, op.bytes) {
                Some(at) => Ok(Err(at)),
                None => staged.add(address, op.bytes).map(Ok),
            };
            ends.push(match op.kind {
                CopyKind::HostToDevice => (end(&mut up, op.src)?, Err(self.at(op.dst, op.bytes)?)),
                CopyKind::DeviceToHost => {
                    (Err(self.at(op.src, op.bytes)?), end(&mut down, op.dst)?)
                }
                _ => (
                    Err(self.at(op.src, op.bytes)?),
                    Err(self.at(op.dst, op.bytes)?),
                ),
            });
        }
        let (from, to) = (self.stage(up.bytes)?, self.stage(down.bytes)?);
        let staged = |end, staging: &Option<Arc<Buffer>>| match (end, staging) {
            (Err(at), _) => Some(at),
            (Ok(offset), Some(buffer)) => Some(At {
                buffer: buffer.clone(),
                offset,
            }),
            // Bytes that are staged have a buffer.
            (Ok(_), None) => None,
        };
        let mut plan = Plan::default();
        for (op, (src, dst)) in copies.iter().zip(ends) {
            if let (Some(src), Some(dst)) = (staged(src, &from), staged(dst, &to)) {
                plan.add(&src, &dst, op.bytes);
            }
        }
        // SAFETY: `Lanes::push` passes a command buffer that records, of a family that `serves`.
        let mut record = |device: &ash::Device, commands| unsafe { plan.record(device, commands) };
        let by_host = |staging, buffer: Option<Arc<Buffer>>, way| {
            // SAFETY: the caller guarantees the ordinary memory until the copies have completed (contract of `RawQueue::copy`).
            buffer.map(|buffer| unsafe { host_work(staging, buffer, way) })
        };
        push(Batch {
            before: by_host(up, from, Way::IntoStaging),
            record: Some(&mut record),
            commands: &[],
            after: by_host(down, to, Way::OutOfStaging),
            buffers: plan.buffers.clone(),
        })
    }

    /// Prepares a fill as a batch, and passes it to `push`.
    ///
    /// # Safety
    /// As [`RawQueue::fill`](arrow_device::device::RawQueue::fill), for the time of the batch.
    pub(crate) unsafe fn fill<T>(
        &self,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
        push: impl FnOnce(Batch<'_>) -> Result<T>,
    ) -> Result<T> {
        let At { buffer, offset } = self.at(dst, bytes)?;
        let end = offset + bytes;
        // Vulkan fills whole words. What is left, at most three bytes on each side, is copied.
        let first = offset.next_multiple_of(4).min(end);
        let last = (end - end % 4).max(first);
        let table = At {
            buffer: self.objects.bytes.clone(),
            offset: 4 * usize::from(byte),
        };
        let mut plan = Plan::default();
        for (start, end) in [(offset, first), (last, end)] {
            if start < end {
                let (buffer, offset) = (buffer.clone(), start);
                plan.add(&table, &At { buffer, offset }, end - start);
            }
        }
        let word = u32::from_ne_bytes([byte; 4]);
        let mut record = |device: &ash::Device, commands| {
            // SAFETY: `Lanes::push` passes a command buffer that records, of a family that `serves`. The range lies within the buffer
            // (`at`) and consists of whole words (VUID-vkCmdFillBuffer-dstOffset-00025, -size-00028); the copies lie beside it.
            unsafe {
                record_between(device, commands, || {
                    if first < last {
                        let (at, size) = (first as u64, (last - first) as u64);
                        device.cmd_fill_buffer(commands, buffer.raw, at, size, word);
                    }
                    for (src, dst, regions) in &plan.copies {
                        device.cmd_copy_buffer(commands, *src, *dst, regions);
                    }
                });
            }
        };
        let buffers = vec![buffer.clone(), table.buffer.clone()];
        push(Batch {
            record: Some(&mut record),
            buffers,
            ..Batch::default()
        })
    }
}

/// Makes the work of the host that copies between ordinary memory and a staging buffer.
///
/// # Safety
/// The ordinary memory is valid for its length until the work has run, and nothing writes to it, or uses it if the work writes to
/// it, while it runs.
unsafe fn host_work(staging: Staging, buffer: Arc<Buffer>, way: Way) -> HostWork {
    Box::new(move || {
        for (ordinary, at, bytes) in staging.pieces {
            let ordinary = ordinary.as_ptr().cast::<u8>();
            let staged = buffer.base.offset(at).as_ptr().cast::<u8>();
            let (src, dst) = match way {
                Way::IntoStaging => (ordinary.cast_const(), staged),
                Way::OutOfStaging => (staged.cast_const(), ordinary),
            };
            // SAFETY: the caller guarantees the ordinary memory. The staging buffer is mapped and coherent, has room for all pieces,
            // and is used by this batch only, whose commands run at another time: after this or before it.
            unsafe { src.copy_to_nonoverlapping(dst, bytes) };
        }
    })
}
