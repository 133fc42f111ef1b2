//! Device memory to device memory: unchanged bytes directly, the others through the host.

use crate::data::DeviceArray;
use crate::data::nulls::count_bits;
use crate::data::tree::Tree;
use crate::device::{
    ALIGNMENT, CopyKind, CopyOp, Counters, DeviceId, DevicePtr, Devices, LARGE, Queue, copy_large,
};
use crate::error::Result;
use crate::memory::{DeviceBufferMut, HostSlab, Memory, Owner, Ready, read_back};
use crate::transfer::fix::{Fix, Piece, fix_in_place, pack};
use crate::transfer::plan::Plan;
use crate::transfer::planner::{Extent, plan};
use crate::transfer::upload::{keep_until, result, tree};

/// The most bytes that are on the host at a time.
const STAGED: usize = 16 << 20;

/// Copies an array's rows to fresh memory of `queue`'s device, which is the array's own or reaches it: one
/// allocation, one fill for the padding, one list of copies. Bytes that the host must change are copied to it
/// first, with one list and one wait for each [`STAGED`] bytes; all but the last of those also take a list and a
/// wait on the way back.
pub(crate) fn copy(array: &DeviceArray, queue: &Queue, extent: Extent) -> Result<Tree> {
    let to_host = queue.device().id() == DeviceId::CPU;
    let reads_on = Some(queue).filter(|queue| queue.device() == array.device());
    let plan = plan(array, extent, !to_host, reads_on)?;
    if to_host {
        return pack_all(array, plan);
    }
    let mut slab = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    // Padding that no copy covers must be zero.
    slab.fill(0)?;
    let base = slab.address();
    let (mut copies, groups) = divide(&plan, base);
    let mut staged = None;
    for (i, group) in groups.iter().enumerate() {
        let (staging, ups) = on_host(array, group, &plan, base, queue)?;
        if i + 1 < groups.len() {
            // SAFETY: sources lie in the staging slab, which `read_back` keeps; destinations lie in the device slab,
            // which is freed in the queue's order, and have the room that the plan gave them.
            unsafe { read_back(queue, &[], &ups, staging) }?;
        } else {
            copies.extend(ups);
            staged = Some(staging);
        }
    }
    // A host that can read the source, or has read some of it, knows that it is ready.
    let waited = array.device().is_host_readable()
        || groups.iter().flatten().any(|piece| piece.src_bytes() > 0);
    if !waited {
        for owner in array.owners() {
            owner.wait_on(queue)?;
        }
    }
    // SAFETY: sources lie in memory of the array's owners and in the staging slab, both of which `keep_until` keeps
    // until the copies are done; the device slab has `plan.device_bytes()` bytes, which is room for every piece, and is
    // freed in the queue's order.
    unsafe { queue.copy(&copies) }?;
    let event = keep_until(queue, queue.record(), (array.clone(), staged))?;
    Ok(result(array, plan, slab, event))
}

/// As [`copy`], to host memory, which this thread packs itself.
fn pack_all(array: &DeviceArray, plan: Plan) -> Result<Tree> {
    let cpu = Devices::cpu();
    let mut slab = cpu.host_slab(plan.bytes)?;
    let base = slab.as_device_ptr();
    let bytes = &mut slab[..];
    plan.each(|piece| {
        let region = &mut bytes[piece.dst..][..piece.region()];
        // SAFETY: the host can read the array, which is on the CPU too, and `plan` waited for it; the slab is fresh memory.
        unsafe {
            match plan.bytes >= LARGE {
                true => pack_large(piece, &plan.ready, region),
                false => pack(&piece, &plan.ready, 0, region),
            }
        }
        Ok(())
    })?;
    Counters::add(&cpu.counters().host_copied_bytes, plan.bytes);
    let owner = Owner::new(cpu, Memory::Slab(slab), Ready::Now);
    Ok(tree(array, plan, base, owner))
}

/// As [`pack`] for a whole region, bypassing the caches.
///
/// # Safety
/// As [`pack`].
#[inline(never)]
unsafe fn pack_large(piece: Piece, ready: &[u8], region: &mut [u8]) {
    let done = piece.straight() / ALIGNMENT * ALIGNMENT;
    // SAFETY: the caller guarantees a readable source of the piece's length, which does not overlap the region; `done` is
    // at most that length, and the region is at least as long.
    unsafe {
        copy_large(piece.src.as_ptr().cast(), region.as_mut_ptr(), done);
        pack(&piece, ready, done, &mut region[done..]);
    }
}

/// Returns the direct copies to a slab at `base`, and the other pieces in groups for the host.
fn divide(plan: &Plan, base: DevicePtr) -> (Vec<CopyOp>, Vec<Vec<Piece>>) {
    let mut copies = Vec::new();
    let mut groups: Vec<Vec<Piece>> = Vec::new();
    let mut room = 0;
    for piece in plan.pieces() {
        let mut done = piece.straight();
        if done > 0 {
            copies.push(CopyOp {
                src: piece.src,
                dst: base.offset(piece.dst),
                bytes: done,
                kind: CopyKind::DeviceToDevice,
            });
        }
        while done < piece.dst_bytes {
            let part = piece.part(done, STAGED.min(piece.dst_bytes - done));
            done += part.dst_bytes;
            if part.region() > room {
                groups.push(Vec::new());
                room = STAGED;
            }
            room = room.saturating_sub(part.region());
            if let Some(group) = groups.last_mut() {
                group.push(part);
            }
        }
    }
    (copies, groups)
}

/// Makes the results of pieces in staging memory; returns it with the copies from there to a slab at `base`.
fn on_host(
    array: &DeviceArray,
    pieces: &[Piece],
    plan: &Plan,
    base: DevicePtr,
    queue: &Queue,
) -> Result<(HostSlab, Vec<CopyOp>)> {
    let (from, to) = (array.device(), queue.device());
    let mut staging = to.host_slab(pieces.iter().map(Piece::region).sum())?;
    let mut at = 0;
    let mut downs = Vec::new();
    let mut ups = Vec::new();
    for piece in pieces {
        let staged = staging.as_device_ptr().offset(at);
        at += piece.region();
        if piece.src_bytes() > 0 {
            downs.push(CopyOp {
                src: piece.src,
                dst: staged,
                bytes: piece.src_bytes(),
                kind: CopyKind::DeviceToHost,
            });
        }
        ups.push(CopyOp {
            src: staged,
            dst: base.offset(piece.dst),
            bytes: piece.dst_bytes,
            kind: CopyKind::HostToDevice,
        });
    }
    let readable = from.is_host_readable();
    if !readable && !downs.is_empty() {
        let queue = if from == to {
            queue.clone()
        } else {
            from.default_queue()
        };
        // SAFETY: the plan's sources lie in the array's buffers, which the array's owners keep alive; the slab has room for
        // the region of each piece, which is at least its source's bytes.
        staging = unsafe { read_back(&queue, array.owners(), &downs, staging) }?;
    }
    let mut regions = &mut staging[..];
    for piece in pieces {
        let (region, rest) = regions.split_at_mut(piece.region());
        regions = rest;
        if readable {
            // SAFETY: the host can read the array's memory, and `plan` waited for it; the staging slab is fresh memory.
            unsafe { pack(piece, &plan.ready, 0, region) };
        } else {
            fix_in_place(piece, &plan.ready, region);
        }
        Counters::add(&to.counters().host_copied_bytes, piece.dst_bytes);
        if let Fix::Bits {
            counts: Some(next), ..
        } = piece.fix
        {
            // Parts of a bitmap follow each other; the bits after the last row are zero.
            let ones = count_bits(region, 0, piece.dst_bytes * 8);
            let node = &plan.nodes[next.get() as usize - 1];
            let nulls = node.nulls.get().unwrap_or(node.length);
            node.nulls.set(nulls.saturating_sub(ones));
        }
    }
    Ok((staging, ups))
}
