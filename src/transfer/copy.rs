//! Copies on a device, from a device to another one that reaches its memory, and in memory of the host. Unchanged bytes are copied
//! directly; the host makes the others in a host buffer. Every byte is written once.

use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::DeviceArray;
use crate::data::node::{Node, owners};
use crate::device::{CopyKind, CopyOp, Counters, Device, DeviceId, DevicePtr, Queue, SyncEvent};
use crate::error::Result;
use crate::memory::{DeviceBufferMut, Memory, Owner, Ready};
use crate::transfer::plan::{Plan, Scope, place, plan};
use crate::transfer::region::{CopyRegion, Rewrite, stage};

/// Copies rows of arrays of one device, at least one, to fresh memory of `queue`'s device, which is the arrays' own or reaches it: one
/// allocation, at most one fill, and one list of copies. They become an array of type `of`.
pub(super) fn copy(
    arrays: &[&DeviceArray],
    of: &DataType,
    scope: Scope,
    queue: &Queue,
) -> Result<Arc<Node>> {
    let (from, to) = (arrays[0].device(), queue.device());
    // Buffers without bytes need no address on the CPU.
    let destination = Some(to).filter(|to| to.id() != DeviceId::CPU);
    let reads_on = Some(queue).filter(|_| from == to);
    let plan = plan(arrays, of, scope, destination, reads_on)?;
    execute(plan, arrays, queue)
}

/// Copies what was planned of arrays of one device to `queue`'s device, as [`copy`] does.
pub(super) fn execute(plan: Plan, arrays: &[&DeviceArray], queue: &Queue) -> Result<Arc<Node>> {
    let (from, to) = (arrays[0].device(), queue.device());
    if to.has_all_host_memory() {
        return to_host_buffer(plan, to);
    }
    let memory = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    let mut event = None;
    if to.is_host_memory() {
        let counters = to.counters();
        if from == to {
            Counters::add(&counters.host_copied_bytes, plan.bytes);
        } else {
            Counters::add(&counters.copies, usize::from(plan.bytes > 0));
            Counters::add(&counters.bytes_to_device, plan.bytes);
        }
        // SAFETY: such a device allocates memory of the host, which nothing else uses.
        unsafe { fill(&plan, memory.address()) };
    } else {
        // SAFETY: the plan's sources lie in the arrays' buffers, in host memory that the plan keeps, or in that of the arrays. The memory
        // has room for the plan, and is freed in the queue's order.
        event = unsafe { run(&plan, arrays, queue, memory.address()) }?;
    }
    Ok(result(plan, memory, event))
}

/// Copies what was planned of memory that the host can read, and for which the plan waited, to a host buffer, which is memory of
/// `device`.
pub(super) fn to_host_buffer(mut plan: Plan, device: &Device) -> Result<Arc<Node>> {
    let buffer = device.host_buffer(plan.bytes)?;
    let base = buffer.as_device_ptr();
    // SAFETY: the buffer has room for the plan, and nothing else uses it.
    unsafe { fill(&plan, base) };
    Counters::add(&device.counters().host_copied_bytes, plan.bytes);
    let owner = Owner::new(device.clone(), Memory::Host(buffer), Ready::Now);
    place(&mut plan.root, base, &Arc::new(owner));
    Ok(plan.root)
}

/// Writes all regions of a plan for memory that the host can read, for which the plan waited.
///
/// # Safety
/// There is writable memory of the host with room for the plan at `base`, which nothing else uses.
unsafe fn fill(plan: &Plan, base: DevicePtr) {
    for region in &plan.regions {
        // SAFETY: the host can read the source, which is ready; the caller guarantees room for the result.
        unsafe { region.write(region.src, base.offset(region.dst)) };
    }
}

/// Writes a plan's regions with one list of copies: those that the host makes from a host buffer. The longest padding is filled with
/// zeros, and copied to the others by the same list. Returns the event after which the copies are done, until which the sources are
/// kept.
///
/// # Safety
/// What is copied as it is lies in memory of the arrays; the sources of the rest are memory that the host can read, and ready. The memory
/// at `base` is fresh memory of the queue's device with room for the plan, and is freed in the queue's order.
unsafe fn run(
    plan: &Plan,
    arrays: &[&DeviceArray],
    queue: &Queue,
    base: DevicePtr,
) -> Result<Option<SyncEvent>> {
    let on_device =
        |src, dst, bytes| CopyOp::new(CopyKind::DeviceToDevice, src, base.offset(dst), bytes);
    let as_it_is = |region: &&CopyRegion| region.rewrite == Rewrite::None;
    let (straight, made): (Vec<&_>, Vec<&_>) = plan.regions.iter().partition(as_it_is);
    let (mut copies, mut zeros) = (Vec::new(), Vec::new());
    for region in straight {
        // The padding comes along where the source has it.
        let bytes = region.len + if region.padded { region.pad } else { 0 };
        if bytes > 0 {
            copies.push(on_device(region.src, region.dst, bytes));
        }
        if bytes < region.room() {
            zeros.push((region.dst + bytes, region.room() - bytes));
        }
    }
    // A host that can read the sources, or has read some of them, knows that they are ready.
    let is_ready = arrays[0].device().is_host_readable() || plan.numbers.has_read();
    if !copies.is_empty() && !is_ready {
        for owner in owners(arrays.iter().map(|array| array.node()), |_| true) {
            owner.wait_on(queue)?;
        }
    }
    if let Some(longest) = zeros.iter().copied().max_by_key(|zeros| zeros.1) {
        let src = base.offset(longest.0);
        // SAFETY: the caller guarantees room for these zeros in the memory, which is freed after the fill.
        unsafe { queue.fill(src, 0, longest.1) }?;
        let others = zeros.iter().filter(|zeros| zeros.0 != longest.0);
        copies.extend(others.map(|(at, bytes)| on_device(src, *at, *bytes)));
    }
    let mut buffer = None;
    if !made.is_empty() {
        let room = made.iter().map(|region| region.room()).sum();
        let made_in = buffer.insert(queue.device().host_buffer(room)?);
        let copied = made.iter().map(|region| region.len).sum();
        Counters::add(&queue.device().counters().host_copied_bytes, copied);
        // SAFETY: the caller guarantees that the host can read the sources; the buffer has room for the results of all regions.
        copies.append(&mut unsafe { stage(made, made_in, base, false) });
    }
    // SAFETY: sources lie in memory of the arrays, in the host buffer, both of which `keep_until` keeps until the copies are done, and in
    // zeros that no copy writes. The caller guarantees that the memory has room for every destination, and is freed in the queue's order.
    let event = unsafe { queue.copy(&copies) }.and_then(|()| queue.record());
    let sources: Vec<_> = arrays.iter().map(|array| (*array).clone()).collect();
    // A list may be copied in part even after an error.
    queue.keep_until(&event, (sources, buffer));
    event
}

/// What a plan makes of device memory that is filled once `event` has completed.
pub(super) fn result(
    mut plan: Plan,
    memory: DeviceBufferMut,
    event: Option<SyncEvent>,
) -> Arc<Node> {
    let base = memory.address();
    let device = memory.queue.device().clone();
    let ready = event.map_or(Ready::Now, Ready::Event);
    let owner = Owner::new(device, memory.into_memory(), ready);
    place(&mut plan.root, base, &Arc::new(owner));
    plan.root
}
