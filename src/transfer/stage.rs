//! Packing pieces into staging slabs, from which they are copied as the slabs fill.

use std::collections::VecDeque;

use crate::device::{ALIGNMENT, CopyKind, CopyOp, Counters, DevicePtr, Queue, SyncEvent};
use crate::error::Result;
use crate::memory::HostSlab;
use crate::transfer::fix::{Made, Piece, pack};
use crate::transfer::staging;

/// The bytes of one staging slab.
pub(super) const CHUNK: usize = staging(2 << 20);
/// The packed bytes after which the copies so far are queued, of large uploads; of smaller ones a quarter of their bytes, so that copies
/// and packing overlap there too. With packing measured on a two-core AMD EPYC under load, at 7 to
/// 10 GB/s, and a link computed for 6 to 50 GB/s, an upload of 8 MiB took 0.77 to 1.54 ms with 1 MiB, 0.80 to 1.67 with 2, 0.83
/// to 1.95 with 4, and 0.94 to 2.52 with 8 or 16; from 64 MiB on 1 to 4 MiB differed by up to 12 %, in no consistent order.
const PIECE: usize = staging(1 << 20);
/// The same of small uploads: a call for a copy takes as long as to pack a few KiB.
const SMALL_PIECE: usize = staging(256 << 10);
/// The bytes of the slabs that one upload fills before it waits for its oldest copies.
pub(super) const RING: usize = staging(128 << 20);
/// The number of full slabs from which on the oldest is used again if its copies are done. Few slabs stay in the processor's
/// cache: on the same machine packing ran at 9.1 to 12.2 GB/s over 2 or 4 MiB of slabs, at 7.4 to 11.3 over 8 MiB, and at 7.0 to
/// 8.9 over 32 to 192 MiB.
const REUSED: usize = 2;
/// The same while slabs must be created, so that as many as the device may need are there the next time.
const REUSED_COLD: usize = 8;
/// Pieces of at least this many bytes are copied directly from where they are, if the device can do that. A direct piece costs up
/// to two copies more, its own and that of what was packed before it, and saves the host `DIRECT` bytes of packing. See
/// [`HostSlab`], whose documentation promises this number.
pub(super) const DIRECT: usize = staging(1 << 20);

/// Packs pieces into staging slabs, and queues the copies.
///
/// The slabs of queued copies stay in the stage, whose holder keeps it until all work that the queue has been given is done.
pub(super) struct Stage<'a> {
    queue: &'a Queue,
    /// The device slab.
    base: DevicePtr,
    /// Bytes that are still to be packed.
    pub(super) left: usize,
    /// The bytes of a staging slab, and of a copy.
    chunk: usize,
    piece: usize,
    open: Option<Open>,
    /// Copies that are not queued yet.
    copies: Vec<CopyOp>,
    /// Slabs whose copies are queued, oldest first.
    full: VecDeque<Full>,
    /// An event is recorded for each slab, so that slabs can be used again: if each stage of an upload fills more than `REUSED`.
    reuses: bool,
    /// The number of full slabs at which this thread waits for the oldest.
    most: usize,
    /// The last slab was not created for this upload.
    is_warm: bool,
}

/// A staging slab being packed.
struct Open {
    slab: HostSlab,
    /// Bytes in use.
    used: usize,
    /// The first byte that no copy covers yet, and its place in the device slab.
    from: usize,
    dst: usize,
}

/// A staging slab whose copies are queued.
struct Full {
    slab: HostSlab,
    /// Completes after them; recorded if the slab may be used again.
    copied: Option<SyncEvent>,
}

/// The slabs of an upload, to be kept until its copies are done.
pub(super) struct Slabs(VecDeque<Full>);

impl Slabs {
    /// Adds the slabs of another thread.
    pub(super) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }
}

impl<'a> Stage<'a> {
    /// Makes a stage for an upload of `left` bytes, of which other stages may pack a part and some may be copied directly, with at
    /// most `slabs` slabs, its share of the ring, of `chunk` bytes, of copies that run.
    pub(super) fn new(
        queue: &'a Queue,
        base: DevicePtr,
        left: usize,
        chunk: usize,
        slabs: usize,
    ) -> Self {
        let piece = (left / 4).next_multiple_of(SMALL_PIECE);
        Self {
            queue,
            base,
            left,
            chunk,
            piece: piece.clamp(SMALL_PIECE, PIECE),
            open: None,
            copies: Vec::new(),
            full: VecDeque::new(),
            reuses: left > REUSED * RING / slabs,
            most: slabs,
            is_warm: true,
        }
    }

    /// Packs bytes `done..end` of a piece's region, with its padding. Both are multiples of 64.
    ///
    /// # Safety
    /// The host can read the piece's source, and both the source and the device slab live until the copies are done. The plan
    /// gave the piece its place in the device slab.
    #[inline]
    pub(super) unsafe fn pack(
        &mut self,
        piece: &Piece,
        made: &Made,
        mut done: usize,
        end: usize,
    ) -> Result<()> {
        let piece_bytes = self.piece;
        while done < end {
            let open = match &mut self.open {
                Some(open) => open,
                None => self.open()?,
            };
            if open.from == open.used {
                open.dst = piece.dst + done;
            }
            // Regions, chunks and what is left are multiples of 64 bytes, and so is every part.
            let next = (open.used / piece_bytes + 1) * piece_bytes;
            // Less than half a piece is no copy of its own.
            let stop = match next + piece_bytes / 2 > open.slab.len() {
                true => open.slab.len(),
                false => next,
            };
            let part = (stop - open.used).min(end - done);
            let full = part == stop - open.used;
            // SAFETY: the caller guarantees that the host can read the source; the part lies in the slab, fresh memory of this stage,
            // which no queued copy reads from `used` on.
            unsafe {
                let room = open.slab.part_mut(open.used..open.used + part);
                pack(piece, made, done, room);
            }
            open.used += part;
            done += part;
            self.left -= part;
            if full {
                self.submit()?;
            }
        }
        Ok(())
    }

    /// Adds a copy of the first `bytes` bytes of a piece directly from where they are.
    ///
    /// # Safety
    /// The device can copy from there, and the caller guarantees what [`pack`](Self::pack) asks for.
    pub(super) unsafe fn copy(&mut self, piece: &Piece, bytes: usize) {
        self.cut();
        self.copies.push(CopyOp {
            src: piece.src,
            dst: self.base.offset(piece.dst),
            bytes,
            kind: CopyKind::HostToDevice,
        });
    }

    /// Ends the last copy unless it continues at byte `dst` of the device slab.
    pub(super) fn seek(&mut self, dst: usize) {
        let open = self.open.as_ref();
        if open.is_some_and(|open| open.dst + open.used - open.from != dst) {
            self.cut();
        }
    }

    /// Begins a staging slab of full size, or of the size of what is left.
    #[inline(never)]
    fn open(&mut self) -> Result<&mut Open> {
        let slab = self.slab(self.chunk.min(self.left))?;
        Ok(self.open.insert(Open {
            slab,
            used: 0,
            from: 0,
            dst: 0,
        }))
    }

    /// Returns the oldest full slab if its copies are done, or another one; waits for those copies if there are too many slabs.
    fn slab(&mut self, bytes: usize) -> Result<HostSlab> {
        // There, copies are done once they are queued.
        if self.queue.device().is_synchronous() {
            if let Some(Full { mut slab, .. }) = self.full.pop_front() {
                slab.truncate(bytes);
                return Ok(slab);
            }
        }
        let least = if self.is_warm { REUSED } else { REUSED_COLD };
        let oldest = self.full.front().filter(|_| self.full.len() >= least);
        if let Some(copied) = oldest.and_then(|full| full.copied.as_ref()) {
            let is_done = copied.is_complete()?;
            if !is_done && self.full.len() >= self.most {
                copied.wait()?;
            }
            if is_done || self.full.len() >= self.most {
                if let Some(Full { mut slab, .. }) = self.full.pop_front() {
                    slab.truncate(bytes);
                    return Ok(slab);
                }
            }
        }
        let (slab, is_idle) = self.queue.device().idle_or_new_slab(bytes)?;
        self.is_warm = is_idle;
        Ok(slab)
    }

    /// Adds a copy of what was packed since the last one.
    fn cut(&mut self) {
        if let Some(open) = self.open.as_mut().filter(|open| open.from < open.used) {
            self.copies.push(CopyOp {
                src: open.slab.as_device_ptr().offset(open.from),
                dst: self.base.offset(open.dst),
                bytes: open.used - open.from,
                kind: CopyKind::HostToDevice,
            });
            open.from = open.used;
        }
    }

    /// Queues all copies so far. A slab that is full, or the last one, stays until they are done.
    #[inline(never)]
    pub(super) fn submit(&mut self) -> Result<()> {
        self.cut();
        let is_last = self.left == 0;
        let full = self
            .open
            .take_if(|open| is_last || open.used == open.slab.len());
        let copied = &self.queue.device().counters().host_copied_bytes;
        let is_full = full.is_some();
        if let Some(open) = full {
            Counters::add(copied, open.used);
            self.full.push_back(Full {
                slab: open.slab,
                copied: None,
            });
        }
        let copies = &self.copies;
        // SAFETY: sources are staging slabs, which the stage keeps, whose holder keeps it until the copies are done, and sources
        // of pieces, for which the callers of `pack` and `copy` guarantee the same; destinations lie in the device slab, where
        // the plan gave each piece its room.
        unsafe { self.queue.copy(copies) }?;
        self.copies.clear();
        if is_full && !is_last && self.reuses {
            let event = self.queue.record()?;
            if let Some(full) = self.full.back_mut() {
                full.copied = event;
            }
        }
        Ok(())
    }

    /// Ends the stage; its slabs must be kept until all work that the queue has been given is done, of which the events of
    /// single slabs say nothing more.
    pub(super) fn into_slabs(mut self) -> Slabs {
        for full in &mut self.full {
            full.copied = None;
        }
        self.full.extend(self.open.map(|open| Full {
            slab: open.slab,
            copied: None,
        }));
        Slabs(self.full)
    }
}

/// Returns how many bytes of a piece of at least `least` bytes are copied directly from where they are: its whole 64-byte blocks,
/// if the device can do that. The rest is packed with its padding.
pub(super) fn direct(queue: &Queue, piece: &Piece, least: usize) -> usize {
    if piece.dst_bytes < least {
        return 0;
    }
    let bytes = piece.straight() / ALIGNMENT * ALIGNMENT;
    // Packing the rest of a small piece would cost one copy more than packing all of it.
    let has_rest = bytes < piece.dst_bytes;
    let backend = queue.device().backend();
    if bytes == 0
        || has_rest && piece.dst_bytes < DIRECT
        || !backend.copies_directly_from(piece.src, piece.dst_bytes)
    {
        return 0;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::TransferStats;
    use crate::memory::DeviceBufferMut;
    use crate::transfer::fix::Fix;

    /// On a synchronous device one slab is enough.
    #[test]
    fn a_synchronous_device_uses_one_slab() {
        let queue = crate::Devices::cpu().default_queue();
        let bytes = 4 * CHUNK + 64;
        let source: Vec<_> = (0..bytes).map(|i| (i / 64) as u8).collect();
        let memory = DeviceBufferMut::allocate(&queue, bytes).unwrap();
        let piece = Piece {
            src: DevicePtr::new(source.as_ptr().cast_mut().cast()),
            dst: 0,
            dst_bytes: bytes,
            fix: Fix::None,
            last: true,
        };
        let made = Made::default();
        let mut stage = Stage::new(&queue, memory.address(), bytes, CHUNK, RING / CHUNK);
        // SAFETY: the source and the device's memory have `bytes` bytes, and nothing is copied after the call.
        let (packed, stats) =
            TransferStats::scope(|| unsafe { stage.pack(&piece, &made, 0, bytes) });
        packed.unwrap();
        assert_eq!(stats.host_copied_bytes, bytes as u64);
        assert_eq!(stage.into_slabs().0.len(), 1);
        // SAFETY: the host may read the CPU's memory, which the copies have filled.
        let copied =
            unsafe { std::slice::from_raw_parts(memory.address().as_ptr().cast::<u8>(), bytes) };
        assert!(copied == source);
    }
}
