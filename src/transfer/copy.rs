//! Device memory to device memory: unchanged bytes directly, the others through the host.

use std::sync::Arc;

use crate::data::DeviceArray;
use crate::device::{Counters, DeviceId, Queue};
use crate::error::Result;
use crate::memory::{DeviceBufferMut, Memory, Owner, Ready};
use crate::transfer::fix::pack;
use crate::transfer::plan::Plan;
use crate::transfer::planner::{Extent, plan};
use crate::transfer::staged::{Content, Straight, Work};
use crate::transfer::upload::result;

/// Copies an array's rows to fresh memory of `queue`'s device, which is the array's own or reaches it: one
/// allocation, at most one fill, and what [`Work::run`] says.
pub(crate) fn copy(array: &DeviceArray, queue: &Queue, extent: Extent) -> Result<DeviceArray> {
    let to = queue.device();
    if to.is_host_memory() {
        return pack_all(array, queue, extent, &mut |_| Ok(()));
    }
    let reads_on = Some(queue).filter(|queue| queue.device() == array.device());
    let plan = plan(array, extent, Some(to), reads_on)?;
    copy_planned(array, queue, plan, false)
}

/// As [`copy`], to a device that is not the CPU, as planned already. With `ready` the caller has waited for the array.
pub(super) fn copy_planned(
    array: &DeviceArray,
    queue: &Queue,
    plan: Plan,
    ready: bool,
) -> Result<DeviceArray> {
    let slab = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    let content = content(&plan);
    let work = Work {
        queue,
        from: array.device(),
        owners: &array.owners(),
        ready: &plan.ready,
        nodes: &plan.nodes,
        is_ready: ready,
    };
    // SAFETY: the plan's sources lie in the array's buffers, in memory of its owners, which the array keeps alive. The slab
    // has `plan.device_bytes()` bytes, in which the plan gave each piece its own room, and is freed in the queue's order.
    let event = unsafe { work.run(slab.address(), content, array.clone()) }?;
    Ok(result(array, plan, slab, event))
}

/// As [`copy`], to memory of the host, which this thread packs itself.
pub(crate) fn pack_all(
    array: &DeviceArray,
    queue: &Queue,
    extent: Extent,
    admit: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<DeviceArray> {
    let to = queue.device();
    let on_cpu = to.id() == DeviceId::CPU;
    let plan = plan(array, extent, Some(to).filter(|_| !on_cpu), None)?;
    let counters = to.counters();
    if on_cpu {
        let mut slab = to.host_slab(plan.bytes)?;
        fill(&plan, &mut slab[..]);
        Counters::add(&counters.host_copied_bytes, plan.bytes);
        let base = slab.as_device_ptr();
        let owner = Owner::new(to.clone(), Memory::Slab(slab), Ready::Now);
        let node = plan.place(array.data_type(), &[(base, Arc::new(owner))]);
        return Ok(array.like(to.clone(), node));
    }
    admit(plan.device_bytes())?;
    let memory = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    if plan.bytes > 0 {
        let start = memory.address().as_ptr().cast::<u8>();
        // SAFETY: such a device allocates initialised host memory, of at least `plan.bytes` bytes, which nothing else uses.
        fill(&plan, unsafe {
            std::slice::from_raw_parts_mut(start, plan.bytes)
        });
    }
    if to == array.device() {
        Counters::add(&counters.host_copied_bytes, plan.bytes);
    } else {
        Counters::add(&counters.copies, usize::from(plan.bytes > 0));
        Counters::add(&counters.bytes_to_device, plan.bytes);
    }
    Ok(result(array, plan, memory, None))
}

/// Packs all pieces of a plan for host-readable memory, for which the plan waited.
fn fill(plan: &Plan, bytes: &mut [u8]) {
    for (piece, _) in plan.pieces() {
        let region = &mut bytes[piece.dst..][..piece.region()];
        // SAFETY: the host can read the source, and `plan` waited for it; `bytes` is fresh memory.
        unsafe { pack(&piece, &plan.ready, 0, region) };
    }
}

/// Whether the host has to read or to wait, because it rewrites some of the bytes.
pub(super) fn needs_host(plan: &Plan) -> bool {
    content(plan).waits()
}

/// Returns what is copied directly, and what the host makes.
fn content(plan: &Plan) -> Content {
    let mut content = Content::default();
    for (piece, padded) in plan.pieces() {
        let (straight, region) = (piece.straight(), piece.region());
        let all = straight == piece.dst_bytes;
        // The padding comes along where the source has it.
        let bytes = if all && padded { region } else { straight };
        if bytes > 0 {
            content.straight.push(Straight {
                src: piece.src,
                dst: piece.dst,
                bytes,
            });
        }
        if all && bytes < region {
            content.zeros.push((piece.dst + bytes, region - bytes));
        }
        content.piece(&piece, straight);
    }
    content
}
