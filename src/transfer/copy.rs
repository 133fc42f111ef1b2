//! Device memory to device memory: unchanged bytes directly, the others through the host.

use std::collections::HashSet;
use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::DeviceArray;
use crate::device::{Counters, Device, DeviceId, Queue};
use crate::error::Result;
use crate::memory::{DeviceBufferMut, Memory, Owner, Ready};
use crate::transfer::fix::pack;
use crate::transfer::plan::Plan;
use crate::transfer::planner::{Extent, plan};
use crate::transfer::staged::{Content, Work};
use crate::transfer::upload::result;

/// Copies an array's rows to fresh memory of `queue`'s device, which is the array's own or reaches it: one
/// allocation, at most one fill, and what [`Work::run`] says.
pub(crate) fn copy(array: &DeviceArray, queue: &Queue, extent: Extent) -> Result<DeviceArray> {
    let to = queue.device();
    let reads_on = Some(queue).filter(|queue| queue.device() == array.device());
    let plan = plan(array, extent, destination(queue), reads_on)?;
    let copied = match to.is_host_memory() {
        true => pack_planned(array.data_type(), array.device() == to, queue, plan)?,
        false => copy_planned(array.data_type(), &[array], queue, plan)?,
    };
    Ok(array.like(to.clone(), copied.to_node()))
}

/// The device to plan for: none if it is the CPU, whose buffers without bytes need no address.
pub(super) fn destination(queue: &Queue) -> Option<&Device> {
    Some(queue.device()).filter(|device| device.id() != DeviceId::CPU)
}

/// Copies what was planned of arrays on one device to another one, or to the same, as an array of this type.
pub(super) fn copy_planned(
    data_type: &DataType,
    arrays: &[&DeviceArray],
    queue: &Queue,
    plan: Plan,
) -> Result<DeviceArray> {
    let slab = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    let work = Work {
        queue,
        from: arrays[0].device(),
        owners: &owners(arrays),
        plan: &plan,
    };
    let sources: Vec<DeviceArray> = arrays.iter().map(|array| (*array).clone()).collect();
    // SAFETY: the plan's sources lie in the arrays' buffers, in memory of their owners, which the arrays keep alive. The slab
    // has `plan.device_bytes()` bytes, in which the plan gave each piece its own room, and is freed in the queue's order.
    let event = unsafe { work.run(slab.address(), Content::of(&plan), sources) }?;
    Ok(result(data_type, plan, slab, event))
}

/// The owners of all arrays, each once.
pub(super) fn owners(arrays: &[&DeviceArray]) -> Vec<Arc<Owner>> {
    if let [only] = arrays {
        return only.owners();
    }
    let mut seen = HashSet::new();
    let all = arrays.iter().flat_map(|array| array.owners());
    all.filter(|owner| seen.insert(Arc::as_ptr(owner)))
        .collect()
}

/// As [`copy_planned`], from memory that the host can read to memory of the host, which this thread packs itself. `local` says whether
/// the memory is of the queue's device already.
pub(super) fn pack_planned(
    data_type: &DataType,
    local: bool,
    queue: &Queue,
    plan: Plan,
) -> Result<DeviceArray> {
    let to = queue.device();
    let counters = to.counters();
    if to.id() == DeviceId::CPU {
        let mut slab = to.host_slab(plan.bytes)?;
        fill(&plan, &mut slab[..]);
        Counters::add(&counters.host_copied_bytes, plan.bytes);
        let base = slab.as_device_ptr();
        let owner = Owner::new(to.clone(), Memory::Slab(slab), Ready::Now);
        let node = plan.place(data_type, base, &Arc::new(owner));
        return Ok(DeviceArray::from_node(to.clone(), node));
    }
    let memory = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    if plan.bytes > 0 {
        let start = memory.address().as_ptr().cast::<u8>();
        // SAFETY: such a device allocates initialised host memory, of at least `plan.bytes` bytes, which nothing else uses.
        fill(&plan, unsafe {
            std::slice::from_raw_parts_mut(start, plan.bytes)
        });
    }
    if local {
        Counters::add(&counters.host_copied_bytes, plan.bytes);
    } else {
        Counters::add(&counters.copies, usize::from(plan.bytes > 0));
        Counters::add(&counters.bytes_to_device, plan.bytes);
    }
    Ok(result(data_type, plan, memory, None))
}

/// Packs all pieces of a plan for host-readable memory, for which the plan waited.
fn fill(plan: &Plan, bytes: &mut [u8]) {
    for (piece, _) in plan.pieces() {
        let region = &mut bytes[piece.dst..][..piece.region()];
        // SAFETY: the host can read the source, and `plan` waited for it; `bytes` is fresh memory.
        unsafe { pack(&piece, &plan.made, 0, region) };
    }
}
