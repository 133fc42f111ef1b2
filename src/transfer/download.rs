//! A device's memory to the host: one list of copies, one host wait, one slab.

use crate::data::DeviceArray;
use crate::data::hidden::read_back;
use crate::data::tree::Tree;
use crate::device::{CopyKind, CopyOp, Counters, Devices, Queue};
use crate::error::Result;
use crate::memory::{Memory, Owner, Ready};
use crate::transfer::fix::{Fix, mend};
use crate::transfer::planner::plan;
use crate::transfer::upload::tree;

/// Copies an array's rows to the CPU. All its buffers share one slab of the source device's pool.
pub(crate) fn download(array: &DeviceArray, queue: &Queue) -> Result<Tree> {
    let plan = plan(array, false, false)?;
    let mut slab = array.device().host_slab(plan.bytes)?;
    let base = slab.as_device_ptr();
    let copies: Vec<_> = plan
        .pieces()
        .filter(|piece| !matches!(piece.fix, Fix::Ready(_)))
        .map(|piece| CopyOp {
            src: piece.src,
            dst: base.offset(piece.dst),
            bytes: piece.src_bytes(),
            kind: CopyKind::DeviceToHost,
        })
        .collect();
    if !copies.is_empty() {
        // SAFETY: the plan's sources lie in the array's buffers, its destinations in the slab.
        slab = unsafe { read_back(queue, &array.owners(), &copies, slab) }?;
    }
    for piece in plan.pieces() {
        if !piece.is_plain() {
            let copied = &array.device().counters().host_copied_bytes;
            Counters::add(copied, piece.dst_bytes);
        }
        mend(
            &piece,
            &plan.ready,
            &mut slab[piece.dst..][..piece.region()],
        );
    }
    let owner = Owner::new(Devices::cpu(), Memory::Slab(slab), Ready::Now);
    Ok(tree(array, plan, base, owner))
}
