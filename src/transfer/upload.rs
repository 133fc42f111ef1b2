//! Host memory to device memory: one allocation, and copies that are queued as staging slabs fill. Nothing waits, unless more
//! than [`RING`] bytes of slabs are being copied: then for the oldest, which bounds the staging memory.

use std::sync::Arc;

use arrow_schema::DataType;

use crate::abi::guard;
use crate::data::DeviceArray;
use crate::device::{DevicePtr, Queue, SyncEvent};
use crate::error::Result;
use crate::memory::{DeviceBufferMut, Owner, Ready};
use crate::transfer::parallel;
use crate::transfer::plan::Plan;
use crate::transfer::planner::{Extent, plan};
use crate::transfer::stage::{CHUNK, DIRECT, RING, Slabs, Stage, direct};

/// Copies an array's rows from host-readable memory to `queue`'s device. The source is kept alive until the copies have completed.
pub(crate) fn upload(array: &DeviceArray, queue: &Queue) -> Result<DeviceArray> {
    let plan = plan(array, Extent::Rows, Some(queue.device()), None)?;
    upload_plan(plan, array, queue)
}

/// As [`upload`], of a plan for `array`.
fn upload_plan(mut plan: Plan, array: &DeviceArray, queue: &Queue) -> Result<DeviceArray> {
    let slab = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    let threads = parallel::threads(queue, plan.bytes);
    // SAFETY: planning waited for the source, which the host can read and `keep_until` keeps with the staging slabs until the
    // copies are done, even after an error; the device slab, of `plan.device_bytes()` bytes, is freed in the queue's order.
    let (submitted, slabs) = unsafe {
        match threads {
            0 | 1 => on_this_thread(&plan, queue, slab.address()),
            _ => parallel::run(&mut plan, queue, slab.address(), threads),
        }
    };
    // Lists may read the source even after an error. The slabs are returned to their pool before the source is dropped.
    let event = submitted.and_then(|()| queue.record());
    let event = match event {
        // Neither is read any more, and the slabs serve the next upload at once.
        Ok(event) if queue.device().capabilities().copies_read_host_at_once => event,
        event => keep_until(queue, event, (slabs, array.clone()))?,
    };
    let uploaded = result(array.data_type(), plan, slab, event);
    Ok(array.like(queue.device().clone(), uploaded.to_node()))
}

/// Packs and copies all pieces of a plan to a device slab at `base`. Returns the staging slabs. A panic is an error, so that
/// the slabs are kept.
///
/// # Safety
/// The host can read the sources. They, the staging slabs and the device slab, which has room for the plan, live until all work
/// that the queue has been given is done.
unsafe fn on_this_thread(plan: &Plan, queue: &Queue, base: DevicePtr) -> (Result<()>, Slabs) {
    let mut stage = Stage::new(queue, base, plan.bytes, CHUNK, RING / CHUNK);
    // A piece of all bytes is the only one: its copy takes the place of the packed one.
    let least = DIRECT.min(plan.bytes);
    let submitted = guard::callback("packing", || {
        for (piece, _) in plan.pieces() {
            let done = direct(queue, &piece, least);
            // SAFETY: the caller guarantees what `copy` and `pack` ask for (see `# Safety`).
            unsafe {
                if done > 0 {
                    stage.copy(&piece, done);
                    stage.left -= done;
                }
                stage.pack(&piece, &plan.made, done, piece.region())
            }?;
        }
        stage.submit()
    });
    (submitted, stage.into_slabs())
}

/// Keeps `sources` until `event`, which was recorded on `queue`; if that failed, until all work that the queue has
/// been given is done.
pub(crate) fn keep_until<T: Send + 'static>(
    queue: &Queue,
    event: Result<Option<SyncEvent>>,
    sources: T,
) -> Result<Option<SyncEvent>> {
    match &event {
        Ok(Some(event)) => event.keep(sources),
        Ok(None) => {}
        Err(_) => queue.keep_until_done(sources),
    }
    event
}

/// What a plan makes of a device slab that is filled once `event` has completed: an array of this type.
pub(super) fn result(
    data_type: &DataType,
    plan: Plan,
    slab: DeviceBufferMut,
    event: Option<SyncEvent>,
) -> DeviceArray {
    let base = slab.address();
    let device = slab.queue().device().clone();
    let ready = event.map_or(Ready::Now, Ready::Event);
    let owner = Owner::new(device.clone(), slab.into_memory(), ready);
    let node = plan.place(data_type, base, &Arc::new(owner));
    DeviceArray::from_node(device, node)
}

#[cfg(all(test, feature = "sim", target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::transfer::fix::Fix;
    use crate::transfer::plan::Region;

    /// A panic while copies are queued leaves the staging slabs to the caller, who keeps them until the copies are done.
    #[test]
    fn a_panic_keeps_the_slabs() {
        let queue = crate::Devices::simulated().unwrap().default_queue();
        // Three pieces that are too short to be copied directly, and longer together than what is queued at once.
        let bytes = DIRECT / 8 * 5;
        let source = vec![7_u8; bytes];
        let src = DevicePtr::new(source.as_ptr().cast_mut().cast());
        let mut plan = Plan::default();
        let node = plan.node(0, 4);
        (0..3).for_each(|i| plan.fill(node, i, true, [Region::new(src, 0, bytes)]));
        // There are no ready bytes.
        plan.fill(node, 3, true, [Region::made(Fix::Ready(1), 64)]);
        plan.lay_out(false, 64).unwrap();
        let memory = DeviceBufferMut::allocate(&queue, plan.bytes).unwrap();
        let before = queue.device().stats();
        // SAFETY: the source, the slabs and the device's memory live until the queue is done below.
        let (submitted, slabs) = unsafe { on_this_thread(&plan, &queue, memory.address()) };
        let is_panic = matches!(submitted, Err(Error::Panic { .. }));
        let copies = queue.device().stats().since(&before).copies;
        queue.synchronize().unwrap();
        assert!(is_panic && copies > 0, "{copies} copies");
        drop(slabs);
    }
}
