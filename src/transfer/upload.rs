//! Host memory to device memory: one allocation, one list of copies, no wait. Large batches that must be staged take
//! several lists; beyond a number of them the oldest is waited for, which bounds the staging memory.

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

/// The bytes of one staging slab.
const CHUNK: usize = 4 << 20;
/// Pieces of at least this many bytes are copied directly from where they are, if the device can do that. A direct piece costs up
/// to two copies more, its own and that of what was packed before it, and saves the host `DIRECT` bytes of packing. See
/// [`HostSlab`], whose documentation promises this number.
const DIRECT: usize = 1 << 20;
/// The staged bytes after which the copies so far are queued.
const RING: usize = 64 << 20;
/// How many such lists may be running before this thread waits for the oldest.
const RING_LISTS: usize = 2;

/// Copies an array's rows from host-readable memory to `queue`'s device. The source is kept alive until the copies
/// have completed.
pub(crate) fn upload(array: &DeviceArray, queue: &Queue) -> Result<Tree> {
    let plan = plan(array, Extent::Rows, true, None)?;
    let slab = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    let mut stage = Stage {
        queue,
        base: slab.address(),
        left: plan.bytes,
        // A piece of all bytes is the only one: its copy takes the place of the packed one.
        direct: DIRECT.min(plan.bytes),
        open: None,
        copies: Vec::new(),
        slabs: Vec::new(),
        staged: 0,
        lists: VecDeque::new(),
    };
    let submitted = plan
        .each(|piece| stage.piece(&piece, &plan.ready))
        .and_then(|()| stage.submit());
    // Earlier lists may read the source even after an error. The slabs are returned to their pool before the source is
    // dropped.
    let sources = (std::mem::take(&mut stage.slabs), array.clone());
    let event = keep_until(queue, submitted, sources)?;
    Ok(result(array, plan, slab, event))
}

/// Keeps `sources` until `event`, which was recorded on `queue`; if that failed, until all work that the queue has
/// been given is done.
pub(crate) fn keep_until<T: Send + 'static>(
    queue: &Queue,
    event: Result<Option<SyncEvent>>,
    sources: T,
) -> Result<Option<SyncEvent>> {
    match &event {
        Ok(Some(event)) => {
            let done = vec![event.clone()];
            queue.device().after(done, move || drop(sources));
        }
        Ok(None) => {}
        Err(_) => queue.keep_until_done(sources),
    }
    event
}

/// The tree over a device slab that is filled once `event` has completed.
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

/// The tree that a plan makes of a slab at `base`, which is filled or will be.
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
    /// Bytes of the device slab that no copy covers yet.
    left: usize,
    /// Pieces of at least this many bytes are copied directly.
    direct: usize,
    open: Option<Open>,
    copies: Vec<CopyOp>,
    slabs: Vec<HostSlab>,
    /// Bytes in `slabs`.
    staged: usize,
    /// The events of the lists that are running.
    lists: VecDeque<SyncEvent>,
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

impl Stage<'_> {
    #[inline]
    fn piece(&mut self, piece: &Piece, ready: &[u8]) -> Result<()> {
        let region = piece.region();
        let mut done = if piece.dst_bytes < self.direct {
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
            // Regions, chunks and what is left are multiples of 64 bytes, and so is every part.
            let room = &mut open.slab[open.used..];
            let part = room.len().min(region - done);
            let full = part == room.len();
            // SAFETY: the host can read the source, which `plan` waited for; nobody else uses the slab.
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

    /// Begins a staging slab of full size, or of the size of what is left.
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

    /// Adds a copy of the whole 64-byte blocks of a large piece directly from where they are, if the device can do
    /// that. Returns how many bytes that is; the rest is packed with its padding.
    fn direct(&mut self, piece: &Piece) -> usize {
        let bytes = piece.straight() / ALIGNMENT * ALIGNMENT;
        let backend = self.queue.device().backend();
        // Packing the rest of a small piece would cost one copy more than packing all of it.
        let has_rest = bytes < piece.dst_bytes;
        if has_rest && piece.dst_bytes < DIRECT {
            return 0;
        }
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

    /// Ends the slab that is being packed.
    fn close(&mut self) {
        self.cut();
        if let Some(open) = self.open.take() {
            let copied = &self.queue.device().counters().host_copied_bytes;
            Counters::add(copied, open.used);
            self.staged += open.slab.len();
            self.slabs.push(open.slab);
        }
    }

    /// Queues the copies so far; their slabs are dropped once they are done.
    fn flush(&mut self) -> Result<()> {
        let event = self.submit()?;
        let slabs = std::mem::take(&mut self.slabs);
        self.staged = 0;
        self.lists.extend(keep_until(self.queue, Ok(event), slabs)?);
        if self.lists.len() > RING_LISTS {
            if let Some(oldest) = self.lists.pop_front() {
                oldest.wait()?;
            }
        }
        Ok(())
    }

    /// Queues all copies so far.
    fn submit(&mut self) -> Result<Option<SyncEvent>> {
        self.close();
        let copies = std::mem::take(&mut self.copies);
        // SAFETY: sources are staging slabs and the array's own buffers, which `flush` and `upload` keep until the copies
        // are done; destinations lie in the device slab, where the plan gave each piece its room.
        unsafe { self.queue.copy(&copies) }?;
        self.queue.record()
    }
}
