//! Copies on a device, from a device to another one that reaches its memory, and in memory of the host. Unchanged bytes are copied
//! directly; the host makes the others in a host buffer. Every byte is written once.

use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::DeviceArray;
use crate::data::node::{Node, owners};
use crate::device::{
    ALIGNMENT, CopyKind, CopyOp, Counters, Device, DeviceId, DevicePtr, Queue, SyncEvent,
};
use crate::error::Result;
use crate::memory::{DeviceBufferMut, HostSlab, Memory, Owner, Ready, read_back};
use crate::transfer::plan::{Plan, Scope, plan};
use crate::transfer::region::{CopyRegion, Rewrite};
use crate::transfer::staging;
use crate::transfer::upload::{keep_until, result};

/// The most bytes that are on the host at a time.
const STAGED: usize = staging(16 << 20);
/// The most of one region. A multiple of 64.
const PART: usize = STAGED / 16;

/// Copies rows of arrays of one device, at least one, to fresh memory of `queue`'s device, which is the arrays' own or reaches it: one
/// allocation, at most one fill, and what [`Copying::run`] says. They become an array of type `of`.
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
pub(super) fn execute(mut plan: Plan, arrays: &[&DeviceArray], queue: &Queue) -> Result<Arc<Node>> {
    let (from, to) = (arrays[0].device(), queue.device());
    if to.is_host_memory() {
        return on_host(plan, from == to, queue);
    }
    let memory = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    let copying = Copying {
        queue,
        from,
        owners: owners(arrays.iter().map(|array| array.node()), |_| true),
        base: memory.address(),
    };
    let sources: Vec<DeviceArray> = arrays.iter().map(|array| (*array).clone()).collect();
    // SAFETY: the plan's sources lie in the arrays' buffers, in memory of their owners, which the arrays keep alive. The memory
    // has room for the plan, and is freed in the queue's order.
    let event = unsafe { copying.run(&mut plan, sources) }?;
    Ok(result(plan, memory, event))
}

/// Copies what was planned of memory that the host can read, and for which the plan waited, to memory of the host, on this thread. `local`
/// says whether the memory is of the queue's device already.
fn on_host(plan: Plan, local: bool, queue: &Queue) -> Result<Arc<Node>> {
    let (to, counters) = (queue.device(), queue.device().counters());
    if to.id() == DeviceId::CPU {
        return to_host_buffer(plan, to);
    }
    if local {
        Counters::add(&counters.host_copied_bytes, plan.bytes);
    } else {
        Counters::add(&counters.copies, usize::from(plan.bytes > 0));
        Counters::add(&counters.bytes_to_device, plan.bytes);
    }
    let memory = DeviceBufferMut::allocate(queue, plan.device_bytes())?;
    // SAFETY: such a device allocates memory of the host, which nothing else uses.
    unsafe { fill(&plan, memory.address()) };
    Ok(result(plan, memory, None))
}

/// As [`on_host`], to a host buffer, which is memory of `device`.
pub(super) fn to_host_buffer(plan: Plan, device: &Device) -> Result<Arc<Node>> {
    let buffer = device.host_slab(plan.bytes)?;
    let base = buffer.as_device_ptr();
    // SAFETY: the buffer has room for the plan, and nothing else uses it.
    unsafe { fill(&plan, base) };
    Counters::add(&device.counters().host_copied_bytes, plan.bytes);
    let owner = Owner::new(device.clone(), Memory::Slab(buffer), Ready::Now);
    Ok(plan.place(base, &Arc::new(owner)))
}

/// Writes all regions of a plan for memory that the host can read, for which the plan waited.
///
/// # Safety
/// There is writable memory of the host with room for the plan at `base`, which nothing else uses.
unsafe fn fill(plan: &Plan, base: DevicePtr) {
    for region in &plan.regions {
        let (src, out) = (region.src.as_ptr(), base.offset(region.dst).as_ptr());
        // SAFETY: the host can read the source, which is ready; the caller guarantees room for the result.
        unsafe { region.write(&plan.tables, src.cast_const().cast(), out.cast()) };
    }
}

/// Where bytes come from, and the queue that writes them.
struct Copying<'a> {
    queue: &'a Queue,
    /// The device of the sources.
    from: &'a Device,
    /// The owners of the sources.
    owners: Vec<Arc<Owner>>,
    /// The memory of the result.
    base: DevicePtr,
}

impl Copying<'_> {
    /// Writes a plan's regions with one list of copies. What the host makes is read first, with one list and one wait for
    /// each [`STAGED`] bytes; all but the last of those also take a list and a wait on the way back. The longest
    /// padding is filled with zeros, and copied to the others by the same list. `sources` lives until the copies are done,
    /// of which the event is returned.
    ///
    /// # Safety
    /// The sources lie in memory of the owners, which `sources` keeps alive. The memory at `base` is fresh memory of the queue's
    /// device with room for the plan, and is freed in the queue's order.
    unsafe fn run<T: Send + 'static>(
        &self,
        plan: &mut Plan,
        sources: T,
    ) -> Result<Option<SyncEvent>> {
        let queue = self.queue;
        let on_device = |src, dst, bytes| CopyOp {
            src,
            dst: self.base.offset(dst),
            bytes,
            kind: CopyKind::DeviceToDevice,
        };
        let (mut copies, mut zeros, mut made) = (Vec::new(), Vec::new(), Vec::new());
        for region in &plan.regions {
            if region.rewrite != Rewrite::None {
                made.extend((0..region.len).step_by(PART).map(|start| {
                    let is_last = region.len - start <= PART;
                    region.part(start, if is_last { region.room() } else { start + PART })
                }));
                continue;
            }
            // The padding comes along where the source has it.
            let bytes = if region.padded {
                region.room()
            } else {
                region.len
            };
            if bytes > 0 {
                copies.push(on_device(region.src, region.dst, bytes));
            }
            if bytes < region.room() {
                zeros.push((region.dst + bytes, region.room() - bytes));
            }
        }
        let is_read = !copies.is_empty();
        if let Some(longest) = zeros.iter().copied().max_by_key(|zeros| zeros.1) {
            let src = self.base.offset(longest.0);
            // SAFETY: the caller guarantees room for these zeros in the memory, which is freed after the fill.
            unsafe { queue.fill(src, 0, longest.1) }?;
            let others = zeros.iter().filter(|zeros| zeros.0 != longest.0);
            copies.extend(others.map(|(at, bytes)| on_device(src, *at, *bytes)));
        }
        // A host that can read the source, or has read some of it, knows that it is ready.
        let was_read = made.iter().any(|region| region.source() > 0);
        if is_read && !was_read && !self.from.is_host_readable() {
            for owner in &self.owners {
                owner.wait_on(queue)?;
            }
        }
        let (mut staged, mut rest) = (None, &made[..]);
        while !rest.is_empty() {
            let (group, more) = rest.split_at(group(rest));
            // SAFETY: the caller guarantees that the sources lie in memory of the owners.
            let (buffer, ups) = unsafe { self.make(group, plan) }?;
            if more.is_empty() {
                copies.extend(ups);
                staged = Some(buffer);
            } else {
                // SAFETY: sources lie in the host buffer, which `read_back` keeps; destinations lie in the memory at `base`, which
                // is freed in the queue's order, and has room for them (the caller guarantees both).
                unsafe { read_back(queue, &[], &ups, buffer) }?;
            }
            rest = more;
        }
        // SAFETY: sources lie in memory that `sources` keeps alive (the caller guarantees it), in the host buffer, both of
        // which `keep_until` keeps until the copies are done, and in zeros that no copy writes. The caller guarantees that the memory
        // has room for every destination, and is freed in the queue's order.
        unsafe { queue.copy(&copies) }?;
        keep_until(queue, queue.record(), (sources, staged))
    }

    /// Makes regions in a host buffer, and counts the nulls in them; returns it with the copies from there to the memory at `base`.
    ///
    /// # Safety
    /// The sources lie in memory of the owners.
    unsafe fn make(
        &self,
        regions: &[CopyRegion],
        plan: &mut Plan,
    ) -> Result<(HostSlab, Vec<CopyOp>)> {
        let (from, to) = (self.from, self.queue.device());
        let room = |region: &CopyRegion| region.room().next_multiple_of(ALIGNMENT);
        let results: usize = regions.iter().map(room).sum();
        let sources: usize = regions.iter().map(CopyRegion::source).sum();
        let mut buffer = to.host_slab(results + sources)?;
        let start = buffer.as_device_ptr();
        // Results that follow each other in the memory do so here, and are one copy. The sources come after all results.
        let (mut ups, mut downs, mut places) = (Vec::<CopyOp>::new(), Vec::new(), Vec::new());
        let (mut end, mut next, mut source) = (0usize, 0, results);
        for region in regions {
            let shared = usize::from(region.shares_byte());
            if ups.is_empty() || region.dst + shared != next {
                (end, next) = (
                    end.next_multiple_of(ALIGNMENT) + shared,
                    region.dst + shared,
                );
                ups.push(CopyOp {
                    src: start.offset(end - shared),
                    dst: self.base.offset(region.dst),
                    bytes: shared,
                    kind: CopyKind::HostToDevice,
                });
            }
            let mut src = region.src;
            if region.source() > 0 && !from.is_host_readable() {
                src = start.offset(source);
                downs.push(CopyOp {
                    src: region.src,
                    dst: src,
                    bytes: region.source(),
                    kind: CopyKind::DeviceToHost,
                });
                source += region.source();
            }
            places.push((src, start.offset(end - shared)));
            let more = region.room() - shared;
            (end, next) = (end + more, next + more);
            if let Some(up) = ups.last_mut() {
                up.bytes += more;
            }
        }
        if !downs.is_empty() {
            let queue = match from == to {
                true => self.queue.clone(),
                false => from.default_queue(),
            };
            // SAFETY: the caller guarantees that the sources lie in memory of the owners; the buffer has room for all of them after
            // the results.
            buffer = unsafe { read_back(&queue, &self.owners, &downs, buffer) }?;
        }
        for (region, (src, out)) in regions.iter().zip(places) {
            let out: *mut u8 = out.as_ptr().cast();
            // SAFETY: where the host can read the sources, they are ready, because plans of such arrays wait for them; elsewhere
            // they were just copied to the buffer, after the results. There `out` has room for this one, and only for it.
            let result = unsafe {
                region.write(&plan.tables, src.as_ptr().cast_const().cast(), out);
                std::slice::from_raw_parts(out, region.len)
            };
            if let Some((i, nulls)) = region.nulls(result) {
                plan.counts[i] += nulls;
            }
            Counters::add(&to.counters().host_copied_bytes, region.len);
        }
        Ok((buffer, ups))
    }
}

/// Returns how many of the regions are made together: those of at most [`STAGED`] bytes, or one, with those that share a byte with it.
fn group(regions: &[CopyRegion]) -> usize {
    let mut bytes = 0;
    for (i, region) in regions.iter().enumerate() {
        bytes += region.room() + region.source();
        if i > 0 && bytes > STAGED && !region.shares_byte() {
            return i;
        }
    }
    regions.len()
}
