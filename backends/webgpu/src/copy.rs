//! Copies and fills: cut where buffers of an allocation meet, staged, and submitted.
//!
//! What lies in whole words (4 bytes) is copied by WebGPU's own copies, and the rest by the compute shader of `bytes.rs`. Transfers of
//! arrays are padded to 64 bytes and never need that.

use std::mem::take;
use std::ops::Range;
use std::sync::Arc;

use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use arrow_device::{Error, Result};
use wgpu::{BufferSize, BufferUsages, BufferViewMut};

use crate::bytes::{Job, What};
use crate::landing::{Down, Landing, Part};
use crate::memory::{Allocation, Place};
use crate::runtime::WgpuDevice;

/// The bytes of a word, which WebGPU copies.
const WORD: u64 = 4;

fn is_whole(values: &[u64]) -> bool {
    values.iter().all(|value| value % WORD == 0)
}

fn round_down(value: u64) -> u64 {
    value / WORD * WORD
}

/// The bytes before the first whole word of a range, the whole words, and the bytes after them.
fn words(offset: u64, bytes: u64) -> [Range<u64>; 3] {
    let end = offset + bytes;
    let first = offset.next_multiple_of(WORD).min(end);
    let last = round_down(end).max(first);
    [offset..first, first..last, last..end]
}

/// The most bytes of a list of uploads that are written by `wgpu::Queue::write_buffer_with`. Its buffers are new ones each time, which for
/// few bytes costs less than a command buffer.
const FEW: usize = 2 << 20;

/// A copy of whole words.
struct Move {
    from: wgpu::Buffer,
    src: u64,
    to: wgpu::Buffer,
    dst: u64,
    bytes: u64,
}

/// Copies for the next submission.
pub(crate) struct Batch<'a> {
    device: &'a WgpuDevice,
    clears: Vec<(wgpu::Buffer, Range<u64>)>,
    moves: Vec<Move>,
    /// Bytes that are still to be staged, for each direction.
    left_up: usize,
    left_down: usize,
    /// Whether uploads are so short that wgpu stages them, and whether it has staged some.
    are_few: bool,
    has_written: bool,
    up: Option<Up>,
    down: Option<Down>,
    /// Run after the copies of the same submission.
    jobs: Vec<Job>,
    /// Whether something was submitted.
    is_submitted: bool,
}

/// A staging buffer that is being written.
struct Up {
    buffer: wgpu::Buffer,
    view: BufferViewMut,
    used: usize,
}

/// A copy, with the memory of both sides on the device and where it begins there; `None` for the host's.
struct Copy<'a> {
    op: &'a CopyOp,
    src: Option<(Arc<Allocation>, usize)>,
    dst: Option<(Arc<Allocation>, usize)>,
}

impl WgpuDevice {
    /// Finds memory that work uses, all of which lies in one allocation.
    fn find(&self, address: DevicePtr, bytes: usize) -> Result<(Arc<Allocation>, usize)> {
        self.memories.find(address, bytes).ok_or_else(|| {
            let id = self.gpu.id();
            Error::InvalidArgument(
                format!("{bytes} bytes at {address:?}: that is not in memory of {id}").into(),
            )
        })
    }

    /// Submits copies. The sources in host memory have been read when this returns.
    ///
    /// # Safety
    /// As [`Runtime::copy`](arrow_device::device::engine::Runtime::copy).
    pub(crate) unsafe fn copy_all(&self, copies: &[CopyOp], under_way: &mut bool) -> Result<()> {
        // Before the first submission: none of the copies runs if this fails.
        let found: Vec<_> = copies
            .iter()
            .map(|op| {
                let find = |is_host, address| match is_host {
                    true => Ok(None),
                    false => self.find(address, op.bytes).map(Some),
                };
                Ok(Copy {
                    op,
                    src: find(op.kind == CopyKind::HostToDevice, op.src)?,
                    dst: find(op.kind == CopyKind::DeviceToHost, op.dst)?,
                })
            })
            .collect::<Result<_>>()?;
        let mut batch = Batch::new(self, copies);
        // SAFETY: the caller guarantees the memory.
        let queued = found.iter().try_for_each(|copy| unsafe { batch.add(copy) });
        let queued = queued.and_then(|()| batch.submit());
        *under_way = batch.is_submitted || batch.has_written;
        queued
    }

    /// Submits a fill.
    pub(crate) fn fill_all(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        let (memory, first) = self.find(dst, bytes)?;
        let mut batch = Batch::new(self, &[]);
        let mut done = 0;
        while done < bytes {
            let place = memory.locate(first + done);
            let (buffer, offset) = (place.buffer, place.offset);
            let part = place.bytes.min((bytes - done) as u64);
            let fill = |range: Range<u64>| Job {
                buffer: buffer.clone(),
                offset: range.start,
                bytes: range.end - range.start,
                what: What::Word(u32::from_le_bytes([byte; 4])),
            };
            match byte {
                0 => {
                    let [head, whole, tail] = words(offset, part);
                    if !whole.is_empty() {
                        batch.clears.push((buffer.clone(), whole));
                    }
                    let edges = [head, tail].into_iter().filter(|range| !range.is_empty());
                    batch.jobs.extend(edges.map(fill));
                }
                _ => batch.jobs.push(fill(offset..offset + part)),
            }
            done += part as usize;
        }
        batch.submit()
    }
}

impl<'a> Batch<'a> {
    fn new(device: &'a WgpuDevice, copies: &[CopyOp]) -> Self {
        // Edges need a few bytes more or less, for which there is another staging buffer.
        let total = |kind| {
            let bytes = copies
                .iter()
                .filter(|op| op.kind == kind)
                .map(|op| op.bytes);
            bytes.fold(0, usize::saturating_add)
        };
        let left_up = total(CopyKind::HostToDevice);
        Self {
            device,
            clears: Vec::new(),
            moves: Vec::new(),
            left_up,
            left_down: total(CopyKind::DeviceToHost),
            are_few: left_up <= FEW,
            has_written: false,
            up: None,
            down: None,
            jobs: Vec::new(),
            is_submitted: false,
        }
    }

    /// Adds a copy, part by part.
    ///
    /// # Safety
    /// As [`WgpuDevice::copy_all`].
    unsafe fn add(&mut self, copy: &Copy<'_>) -> Result<()> {
        let mut done = 0;
        while done < copy.op.bytes {
            let locate = |found: &Option<(Arc<Allocation>, usize)>| {
                let (memory, first) = found.as_ref()?;
                Some(memory.locate(first + done))
            };
            let (src, dst) = (locate(&copy.src), locate(&copy.dst));
            let left = |found: &Option<Place>| found.as_ref().map_or(u64::MAX, |at| at.bytes);
            let part = left(&src)
                .min(left(&dst))
                .min((copy.op.bytes - done) as u64);
            let (host_src, host_dst) = (copy.op.src.offset(done), copy.op.dst.offset(done));
            match (src, dst) {
                // SAFETY: the caller guarantees the source.
                (None, Some(dst)) => unsafe {
                    self.upload(host_src.as_ptr().cast(), &dst, part)?;
                },
                (Some(src), None) => self.download(&src, host_dst.as_ptr().cast(), part)?,
                (Some(src), Some(dst)) => self.across(src, &dst, part)?,
                (None, None) => {}
            }
            done += part as usize;
        }
        Ok(())
    }

    /// Adds an upload to one buffer.
    ///
    /// # Safety
    /// `src` is valid for reads of `bytes` bytes.
    unsafe fn upload(&mut self, src: *const u8, dst: &Place, bytes: u64) -> Result<()> {
        let [head, whole, tail] = words(dst.offset, bytes);
        for edge in [head, tail].into_iter().filter(|range| !range.is_empty()) {
            let mut word = [0; WORD as usize];
            for at in edge.clone() {
                // SAFETY: the byte is one of the source's, which the caller guarantees.
                word[(at % WORD) as usize] = unsafe { src.add((at - dst.offset) as usize).read() };
            }
            self.jobs.push(Job {
                buffer: dst.buffer.clone(),
                offset: edge.start,
                bytes: edge.end - edge.start,
                what: What::Word(u32::from_le_bytes(word)),
            });
        }
        if self.are_few && !whole.is_empty() {
            // SAFETY: the words are the source's.
            return unsafe {
                self.write(
                    src.add((whole.start - dst.offset) as usize),
                    &dst.buffer,
                    whole,
                )
            };
        }
        let mut at = whole.start;
        while at < whole.end {
            let mut up = match self.up.take() {
                Some(up) => up,
                None => self.open_up()?,
            };
            let room = up.buffer.size() as usize - up.used;
            let part = room.min((whole.end - at) as usize);
            // SAFETY: the bytes are the source's; the view has room for them, and nothing else writes to it.
            unsafe {
                let from = src.add((at - dst.offset) as usize);
                let mut to = up.view.slice(up.used..up.used + part);
                to.as_raw_element_ptr()
                    .as_ptr()
                    .copy_from_nonoverlapping(from, part);
            }
            let from = up.used as u64;
            self.moves.push(Move {
                from: up.buffer.clone(),
                src: from,
                to: dst.buffer.clone(),
                dst: at,
                bytes: part as u64,
            });
            up.used += part;
            at += part as u64;
            self.left_up = self.left_up.saturating_sub(part);
            let is_full = part == room;
            self.up = Some(up);
            if is_full {
                self.submit()?;
            }
        }
        Ok(())
    }

    /// Lets wgpu stage whole words of an upload.
    ///
    /// # Safety
    /// `src` is valid for reads of the words.
    unsafe fn write(&mut self, src: *const u8, to: &wgpu::Buffer, words: Range<u64>) -> Result<()> {
        let Some(size) = BufferSize::new(words.end - words.start) else {
            return Ok(());
        };
        let gpu = &self.device.gpu;
        self.has_written = true;
        let written = gpu.call("write_buffer_with", |_, queue| {
            let mut view = queue.write_buffer_with(to, words.start, size)?;
            let mut to = view.slice(..);
            // SAFETY: the caller guarantees the source; the view is as long, and nothing else writes to it.
            unsafe {
                to.as_raw_element_ptr()
                    .as_ptr()
                    .copy_from_nonoverlapping(src, size.get() as usize)
            };
            Some(())
        })?;
        written.ok_or_else(|| gpu.refused("write_buffer_with", "nothing was written"))
    }

    fn open_up(&self) -> Result<Up> {
        let gpu = &self.device.gpu;
        let buffer = self.device.staging.up(gpu, self.left_up)?;
        let view = gpu.caught("get_mapped_range_mut", || buffer.get_mapped_range_mut(..))?;
        let view = view.map_err(|e| gpu.refused("get_mapped_range_mut", e.to_string()))?;
        Ok(Up {
            buffer,
            view,
            used: 0,
        })
    }

    fn open_down(&self) -> Result<Down> {
        let WgpuDevice {
            gpu,
            staging,
            order,
            ..
        } = self.device;
        // What has arrived gives its buffers back: a large download, or one after the other, needs few more than are under way.
        let land = || order.advance(gpu, usize::MAX);
        let (buffer, home) = staging.down(gpu, self.left_down, land)?;
        Ok(Down {
            buffer,
            home,
            used: 0,
            parts: Vec::new(),
        })
    }

    /// Adds a download from one buffer. Whole words are copied to the staging buffer, and the bytes of them to the host.
    fn download(&mut self, src: &Place, dst: *mut u8, bytes: u64) -> Result<()> {
        let end = (src.offset + bytes).next_multiple_of(WORD);
        let mut at = round_down(src.offset);
        while at < end {
            let mut down = match self.down.take() {
                Some(down) => down,
                None => self.open_down()?,
            };
            let room = down.buffer.size() as usize - down.used;
            let part = room.min((end - at) as usize);
            self.moves.push(Move {
                from: src.buffer.clone(),
                src: at,
                to: down.buffer.clone(),
                dst: down.used as u64,
                bytes: part as u64,
            });
            let first = at.max(src.offset);
            let last = (at + part as u64).min(src.offset + bytes);
            down.parts.push(Part {
                from: down.used + (first - at) as usize,
                to: dst.wrapping_add((first - src.offset) as usize),
                bytes: (last - first) as usize,
            });
            down.used += part;
            at += part as u64;
            self.left_down = self.left_down.saturating_sub(part);
            let is_full = part == room;
            self.down = Some(down);
            if is_full {
                self.submit()?;
            }
        }
        Ok(())
    }

    /// Adds a copy from one buffer to one buffer.
    fn across(&mut self, mut src: Place, dst: &Place, bytes: u64) -> Result<()> {
        if src.buffer == dst.buffer {
            // WebGPU neither copies within a buffer nor reads and writes it in one dispatch.
            let start = round_down(src.offset);
            let size = (src.offset + bytes).next_multiple_of(WORD) - start;
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
            let buffer = self
                .device
                .gpu
                .create_buffer("copy", size as usize, usage, false)?;
            self.moves.push(Move {
                from: src.buffer,
                src: start,
                to: buffer.clone(),
                dst: 0,
                bytes: size,
            });
            let offset = src.offset - start;
            src = Place {
                buffer,
                offset,
                bytes: size - offset,
            };
        }
        if is_whole(&[src.offset, dst.offset, bytes]) {
            self.moves.push(Move {
                from: src.buffer,
                src: src.offset,
                to: dst.buffer.clone(),
                dst: dst.offset,
                bytes,
            });
            return Ok(());
        }
        self.jobs.push(Job {
            buffer: dst.buffer.clone(),
            offset: dst.offset,
            bytes,
            what: What::From(src.buffer, src.offset),
        });
        Ok(())
    }

    /// Submits all so far.
    fn submit(&mut self) -> Result<()> {
        let this = self.device;
        let (up, down) = (self.up.take(), self.down.take());
        let (clears, moves, jobs) = (
            take(&mut self.clears),
            take(&mut self.moves),
            take(&mut self.jobs),
        );
        let has_commands = !(clears.is_empty() && moves.is_empty() && jobs.is_empty());
        if !has_commands && !self.has_written {
            return Ok(());
        }
        let bytes = match jobs.is_empty() {
            true => None,
            false => Some(this.bytes()?),
        };
        self.is_submitted = true;
        let submission = this.gpu.call("submit", |device, queue| {
            let commands = has_commands.then(|| {
                let mut encoder = device.create_command_encoder(&Default::default());
                for (buffer, words) in &clears {
                    encoder.clear_buffer(buffer, words.start, Some(words.end - words.start));
                }
                for Move {
                    from,
                    src,
                    to,
                    dst,
                    bytes,
                } in &moves
                {
                    encoder.copy_buffer_to_buffer(from, *src, to, *dst, *bytes);
                }
                if let Some(bytes) = bytes {
                    bytes.encode(device, &mut encoder, &jobs);
                }
                encoder.finish()
            });
            let up = up.map(|Up { buffer, view, .. }| {
                drop(view);
                buffer.unmap();
                buffer
            });
            let submission = queue.submit(commands);
            if let Some(buffer) = up {
                this.staging.reuse(buffer);
            }
            submission
        })?;
        this.order.submitted(submission.clone());
        match down {
            // Only of what was accepted.
            Some(down) => this.gpu.call("map_async", |_, _| {
                this.order.arrives(Landing::new(down, submission));
            }),
            None => Ok(()),
        }
    }
}
