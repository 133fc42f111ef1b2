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
use crate::landing::{Landing, Part};
use crate::memory::Located;
use crate::shared::Shared;
use crate::staging::Shelf;

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
    shared: &'a Shared,
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

/// A staging buffer that downloads are copied to.
struct Down {
    buffer: wgpu::Buffer,
    home: Arc<Shelf>,
    used: usize,
    parts: Vec<Part>,
}

impl Shared {
    /// Finds an address that work uses.
    fn find(&self, address: DevicePtr) -> Result<Located> {
        let found = self.memory.find(address);
        found.ok_or_else(|| self.not_there(address))
    }

    /// Returns an error unless all bytes lie in one allocation.
    fn check_range(&self, address: DevicePtr, bytes: usize) -> Result<()> {
        let found = self.memory.allocation(address);
        let left = found.map_or(0, |found| found.bytes - found.offset);
        match bytes <= left {
            true => Ok(()),
            false => Err(self.not_there(address.offset(left))),
        }
    }

    fn not_there(&self, address: DevicePtr) -> Error {
        let id = self.gpu.id;
        Error::InvalidArgument(format!("{address:?} is not in memory of {id}").into())
    }

    /// Submits copies. The sources in host memory have been read when this returns.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](arrow_device::device::RawQueue::copy).
    pub(crate) unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        self.gpu.check()?;
        // Before the first submission: none of the copies runs if this fails.
        for op in copies {
            if op.kind != CopyKind::HostToDevice {
                self.check_range(op.src, op.bytes)?;
            }
            if op.kind != CopyKind::DeviceToHost {
                self.check_range(op.dst, op.bytes)?;
            }
        }
        let up = copies.iter().filter(|op| op.kind == CopyKind::HostToDevice);
        let sources: Vec<_> = up
            .map(|op| op.src.address()..op.src.address() + op.bytes)
            .collect();
        if !sources.is_empty() {
            self.timeline.finish_writes(&sources)?;
        }
        let mut batch = Batch::new(self, copies);
        // SAFETY: the caller guarantees the memory.
        let queued = copies.iter().try_for_each(|op| unsafe { batch.add(op) });
        let queued = queued.and_then(|()| batch.submit());
        if queued.is_err() && (batch.is_submitted || batch.has_written) {
            // None may be under way after an error, nor land: not if the device has failed either.
            let _ = self.timeline.settle();
        }
        queued
    }

    /// Submits a fill.
    pub(crate) fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        self.gpu.check()?;
        let mut batch = Batch::new(self, &[]);
        let mut done = 0;
        while done < bytes {
            let Located {
                buffer,
                offset,
                left,
            } = self.find(dst.offset(done))?;
            let part = left.min((bytes - done) as u64);
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
                    batch.jobs.extend(
                        [head, tail]
                            .into_iter()
                            .filter(|range| !range.is_empty())
                            .map(fill),
                    );
                }
                _ => batch.jobs.push(fill(offset..offset + part)),
            }
            done += part as usize;
        }
        batch.submit()
    }
}

impl<'a> Batch<'a> {
    fn new(shared: &'a Shared, copies: &[CopyOp]) -> Self {
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
            shared,
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
    /// As [`Shared::copy`].
    unsafe fn add(&mut self, op: &CopyOp) -> Result<()> {
        let mut done = 0;
        while done < op.bytes {
            let (src, dst) = (op.src.offset(done), op.dst.offset(done));
            let left = (op.bytes - done) as u64;
            let part = match op.kind {
                CopyKind::HostToDevice => {
                    let dst = self.shared.find(dst)?;
                    let part = left.min(dst.left);
                    // SAFETY: the caller guarantees the source.
                    unsafe { self.upload(src.as_ptr().cast(), &dst, part) }?;
                    part
                }
                CopyKind::DeviceToHost => {
                    let src = self.shared.find(src)?;
                    let part = left.min(src.left);
                    self.download(&src, dst.as_ptr().cast(), part)?;
                    part
                }
                _ => {
                    let (src, dst) = (self.shared.find(src)?, self.shared.find(dst)?);
                    let part = left.min(src.left).min(dst.left);
                    self.across(src, &dst, part)?;
                    part
                }
            };
            done += part as usize;
        }
        Ok(())
    }

    /// Adds an upload to one buffer.
    ///
    /// # Safety
    /// `src` is valid for reads of `bytes` bytes.
    unsafe fn upload(&mut self, src: *const u8, dst: &Located, bytes: u64) -> Result<()> {
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
        let gpu = &self.shared.gpu;
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
        written.ok_or_else(|| {
            gpu.check_alive()
                .err()
                .unwrap_or_else(|| gpu.error("write_buffer_with", "nothing was written"))
        })
    }

    fn open_up(&self) -> Result<Up> {
        let gpu = &self.shared.gpu;
        let buffer = self.shared.staging.up(gpu, self.left_up)?;
        let view = gpu.caught("get_mapped_range_mut", || buffer.get_mapped_range_mut(..))?;
        let view = view.map_err(|e| {
            let mapping = gpu.error("get_mapped_range_mut", e.to_string());
            gpu.check_alive().err().unwrap_or(mapping)
        })?;
        Ok(Up {
            buffer,
            view,
            used: 0,
        })
    }

    /// Adds a download from one buffer. Whole words are copied to the staging buffer, and the bytes of them to the host.
    fn download(&mut self, src: &Located, dst: *mut u8, bytes: u64) -> Result<()> {
        let end = (src.offset + bytes).next_multiple_of(WORD);
        let mut at = round_down(src.offset);
        while at < end {
            let mut down = match self.down.take() {
                Some(down) => down,
                None => {
                    let (buffer, home) =
                        self.shared.staging.down(&self.shared.gpu, self.left_down)?;
                    let (used, parts) = (0, Vec::new());
                    Down {
                        buffer,
                        home,
                        used,
                        parts,
                    }
                }
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
    fn across(&mut self, mut src: Located, dst: &Located, bytes: u64) -> Result<()> {
        if src.buffer == dst.buffer {
            // WebGPU neither copies within a buffer nor reads and writes it in one dispatch.
            let start = round_down(src.offset);
            let size = (src.offset + bytes).next_multiple_of(WORD) - start;
            let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
            let buffer = self
                .shared
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
            src = Located {
                buffer,
                offset,
                left: size - offset,
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
        let shared = self.shared;
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
            false => Some(shared.bytes()?),
        };
        self.is_submitted = true;
        let submission = shared.gpu.call("submit", |device, queue| {
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
                shared.staging.reuse(buffer);
            }
            submission
        })?;
        shared.timeline.submitted(submission.clone());
        match down {
            // Only of what was accepted.
            Some(Down {
                buffer,
                home,
                parts,
                ..
            }) => shared.gpu.call("map_async", |_, _| {
                let timeline = &shared.timeline;
                timeline.arrives(|told| Landing::new(buffer, home, parts, submission, told));
            }),
            None => Ok(()),
        }
    }
}
