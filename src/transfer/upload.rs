//! Host memory to a device: one allocation, one list of copies, no wait. Large batches that must be
//! staged go in several lists, and beyond some of them the oldest is waited for: the ring bounds memory.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::data::DeviceArray;
use crate::data::tree::{Owners, Tree};
use crate::device::{ALIGNMENT, CopyKind, CopyOp, Counters, DevicePtr, Queue, SyncEvent};
use crate::error::Result;
use crate::memory::{DeviceBufferMut, HostSlab, Owner, Ready};
use crate::transfer::fix::{Piece, pack};
use crate::transfer::plan::Plan;
use crate::transfer::planner::{Extent, plan};

/// Bytes of one staging slab.
const CHUNK: usize = 4 << 20;
/// Pieces of at least this many bytes are copied straight from where they are, if the device can.
const DIRECT: usize = 1 << 20;
/// Staged bytes after which the copies so far are given to the queue.
const RING: usize = 64 << 20;
/// How many such lists may be under way before this thread waits for the oldest.
const RING_LISTS: usize = 2;

/// Copies an array's rows from ready, host-readable memory to `queue`'s device. The source is kept
/// until the copies have completed.
pub(crate) fn upload(array: &DeviceArray, queue: &Queue) -> Result<Tree> {
    let plan = plan(array, Extent::Rows, true)?;
    let slab = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    let mut stage = Stage {
        queue,
        base: slab.address(),
        left: plan.bytes,
        open: None,
        copies: Vec::new(),
        slabs: Vec::new(),
        staged: 0,
        lists: VecDeque::new(),
    };
    let submitted = plan
        .each(|piece| stage.piece(&piece, &plan.ready))
        .and_then(|()| stage.submit());
    // Earlier lists may read the source even after an error.
    // Whoever sees the source go finds the slabs in their pool.
    let sources = (std::mem::take(&mut stage.slabs), array.clone());
    let event = keep_until(queue, submitted, sources)?;
    Ok(result(array, plan, slab, event))
}

/// Keeps `sources` until `event`, recorded on `queue`; if that failed, until all work of the queue
/// so far is done.
pub(crate) fn keep_until<T: Send + 'static>(
    queue: &Queue,
    event: Result<Option<SyncEvent>>,
    sources: T,
) -> Result<Option<SyncEvent>> {
    match &event {
        Ok(Some(event)) => {
            let done = vec![event.clone()];
            queue.device().reaper().after(done, move || drop(sources));
        }
        Ok(None) => {}
        Err(_) => queue.keep_until_done(sources),
    }
    event
}

/// The tree over a filled slab.
pub(crate) fn result(
    array: &DeviceArray,
    plan: Plan,
    slab: DeviceBufferMut,
    event: Option<SyncEvent>,
) -> Tree {
    let base = slab.address();
    let device = slab.queue().device().clone();
    let ready = event.map_or(Ready::Now, Ready::Event);
    let owner = Owner::new(device, slab.into_memory(), ready);
    tree(array, plan, base, owner)
}

/// The tree that a plan makes of a slab at `base`, which holds all that was planned.
pub(crate) fn tree(array: &DeviceArray, plan: Plan, base: DevicePtr, owner: Owner) -> Tree {
    let (nodes, slots) = plan.place(base);
    Tree {
        device: owner.device().clone(),
        root: array.data_type().clone(),
        slots,
        nodes,
        owners: Owners::One(Arc::new(owner)),
    }
}

/// Packs pieces into staging slabs and collects the copies.
struct Stage<'a> {
    queue: &'a Queue,
    /// The device slab.
    base: DevicePtr,
    /// Bytes of the device slab not yet covered.
    left: usize,
    open: Option<Open>,
    copies: Vec<CopyOp>,
    slabs: Vec<HostSlab>,
    /// Bytes in `slabs`.
    staged: usize,
    /// Events of the lists under way.
    lists: VecDeque<SyncEvent>,
}

/// A staging slab being packed.
struct Open {
    slab: HostSlab,
    /// Bytes in use.
    used: usize,
    /// First byte that no copy covers yet, and where it goes in the device slab.
    from: usize,
    dst: usize,
}

impl Stage<'_> {
    #[inline]
    fn piece(&mut self, piece: &Piece, ready: &[u8]) -> Result<()> {
        let region = piece.region();
        let mut done = if piece.dst_bytes < DIRECT {
            0
        } else {
            self.direct(piece)
        };
        while done < region {
            let open = match &mut self.open {
                Some(open) => open,
                None => self.open()?,
            };
            if open.from == open.used {
                open.dst = piece.dst + done;
            }
            // Regions, chunks and what is left are multiples of 64, and so is every part.
            let room = &mut open.slab[open.used..];
            let part = room.len().min(region - done);
            let full = part == room.len();
            // SAFETY: the source is ready, host-readable memory (`upload`'s contract), and the slab
            // ours alone.
            unsafe { pack(piece, ready, done, &mut room[..part]) };
            open.used += part;
            done += part;
            self.left -= part;
            if full {
                self.close();
                if self.staged >= RING {
                    self.flush()?;
                }
            }
        }
        Ok(())
    }

    /// Begins a staging slab: a full one, or one for all that is left.
    #[inline(never)]
    fn open(&mut self) -> Result<&mut Open> {
        let slab = self.queue.device().host_slab(CHUNK.min(self.left))?;
        Ok(self.open.insert(Open {
            slab,
            used: 0,
            from: 0,
            dst: 0,
        }))
    }

    /// Copies the whole blocks of a large piece straight from where they are, if the device can.
    /// Answers how many bytes; the rest, with its padding, is packed.
    fn direct(&mut self, piece: &Piece) -> usize {
        let bytes = piece.straight() / ALIGNMENT * ALIGNMENT;
        let backend = self.queue.device().backend();
        if bytes == 0 || !backend.copies_directly_from(piece.src, piece.dst_bytes) {
            return 0;
        }
        self.cut();
        self.left -= bytes;
        self.copies.push(CopyOp {
            src: piece.src,
            dst: self.base.offset(piece.dst),
            bytes,
            kind: CopyKind::HostToDevice,
        });
        bytes
    }

    /// Adds the copy of what was packed since the last.
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

    /// Ends the slab being packed.
    fn close(&mut self) {
        self.cut();
        if let Some(open) = self.open.take() {
            let copied = &self.queue.device().counters().host_copied_bytes;
            Counters::add(copied, open.used);
            self.staged += open.slab.len();
            self.slabs.push(open.slab);
        }
    }

    /// Gives the copies so far to the queue and lets go of their slabs once they are done.
    fn flush(&mut self) -> Result<()> {
        let event = self.submit()?;
        let slabs = std::mem::take(&mut self.slabs);
        self.staged = 0;
        if let Some(event) = event {
            let done = vec![event.clone()];
            self.queue
                .device()
                .reaper()
                .after(done, move || drop(slabs));
            self.lists.push_back(event);
        }
        if self.lists.len() > RING_LISTS {
            if let Some(oldest) = self.lists.pop_front() {
                oldest.wait()?;
            }
        }
        Ok(())
    }

    /// Gives all copies so far to the queue.
    fn submit(&mut self) -> Result<Option<SyncEvent>> {
        self.close();
        let copies = std::mem::take(&mut self.copies);
        // SAFETY: sources are slabs and the array's own buffers, which the caller keeps until the
        // copies are done; destinations lie in the device slab.
        unsafe { self.queue.copy(&copies) }?;
        self.queue.record()
    }
}
