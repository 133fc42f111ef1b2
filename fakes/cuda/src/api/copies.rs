//! Copies and fills.

use std::ffi::{c_int, c_uint, c_void};

use crate::api::home::Location;
use crate::api::streams::refuse_legacy;
use crate::call::{Of, WORK, call};
use crate::copy::{self, Copy, Reads, Way};
use crate::engine::{Engine, NO_BATCH};
use crate::ffi::*;
use crate::registry::{Lane, Registry, registry};

/// The legacy default stream.
const LEGACY: Handle = std::ptr::null_mut();

/// Queues one copy.
fn copy(way: Way, dst: Address, src: Address, bytes: usize, stream: Handle) -> Outcome {
    let mut registry = registry();
    let lane = registry.work_lane(stream)?;
    copy_on(&registry, &lane, way, dst, src, bytes)
}

fn copy_on(
    registry: &Registry,
    lane: &Lane,
    way: Way,
    dst: Address,
    src: Address,
    bytes: usize,
) -> Outcome {
    if bytes == 0 {
        return Ok(());
    }
    let copy = Copy::new(
        registry,
        &lane.engine,
        way,
        Reads::AsFlagged,
        (dst, src, bytes),
    )?;
    copy::queue(lane, vec![copy])
}

/// Copies on the legacy default stream, and waits.
fn copy_now(way: Way, dst: Address, src: Address, bytes: usize) -> Outcome {
    copy(way, dst, src, bytes, LEGACY)?;
    let mark = {
        let mut registry = registry();
        let lane = registry.work_lane(LEGACY)?;
        lane.engine.record(&lane.queue)?
    };
    mark.wait()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyAsync(
    dst: Address,
    src: Address,
    bytes: usize,
    hStream: Handle,
) -> Code {
    call("cuMemcpyAsync", WORK, Of::Handle(hStream), || {
        copy(Way::Any, dst, src, bytes, hStream)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    dst: Address,
    src: *const c_void,
    bytes: usize,
    hStream: Handle,
) -> Code {
    let src = src.expose_provenance() as Address;
    call("cuMemcpyHtoDAsync_v2", WORK, Of::Handle(hStream), || {
        copy(Way::HostToDevice, dst, src, bytes, hStream)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    dst: *mut c_void,
    src: Address,
    bytes: usize,
    hStream: Handle,
) -> Code {
    let dst = dst.expose_provenance() as Address;
    call("cuMemcpyDtoHAsync_v2", WORK, Of::Handle(hStream), || {
        copy(Way::DeviceToHost, dst, src, bytes, hStream)
    })
}

/// Any context may be current: that is how cudarc calls it.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyPeerAsync(
    dst: Address,
    dstContext: Handle,
    src: Address,
    srcContext: Handle,
    bytes: usize,
    hStream: Handle,
) -> Code {
    call("cuMemcpyPeerAsync", WORK, Of::Handle(hStream), || {
        let mut registry = registry();
        registry.current()?;
        registry.find(&registry.contexts, dstContext)?;
        registry.find(&registry.contexts, srcContext)?;
        let lane = registry.lane(hStream)?;
        copy_on(&registry, &lane, Way::Peer, dst, src, bytes)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyHtoD_v2(
    dst: Address,
    src: *const c_void,
    bytes: usize,
) -> Code {
    let src = src.expose_provenance() as Address;
    call("cuMemcpyHtoD_v2", WORK, Of::Current, || {
        copy_now(Way::HostToDevice, dst, src, bytes)
    })
}

fn fill(dst: Address, byte: u8, bytes: usize, stream: Handle) -> Outcome {
    let mut registry = registry();
    let lane = registry.work_lane(stream)?;
    if bytes == 0 {
        return Ok(());
    }
    copy::fill(&registry, &lane, dst, byte, bytes)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD8Async(
    dst: Address,
    uc: u8,
    bytes: usize,
    hStream: Handle,
) -> Code {
    call("cuMemsetD8Async", WORK, Of::Handle(hStream), || {
        fill(dst, uc, bytes, hStream)
    })
}

/// `CUmemcpyAttributes`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Attributes {
    order: c_int,
    source_hint: Location,
    target_hint: Location,
    flags: c_uint,
}

/// What a batch call is given.
struct Batch {
    targets: In<Address>,
    sources: In<Address>,
    sizes: In<usize>,
    count: usize,
    attributes: In<Attributes>,
    starts: In<usize>,
    attribute_count: usize,
}

/// A library is known that ends the process for longer lists.
const LONGEST_LIST: usize = 8192;

impl Batch {
    /// When each copy's source is read; `Err` if the attributes are not as they must be.
    fn orders(&self) -> Outcome<Vec<Reads>> {
        let attributes = self.attributes.list(self.attribute_count)?;
        let starts = self.starts.list(self.attribute_count)?;
        let ascending = starts.windows(2).all(|pair| pair[0] < pair[1]);
        let last = starts.last().copied().unwrap_or(usize::MAX);
        if starts.first() != Some(&0) || !ascending || last >= self.count {
            return Err(INVALID_VALUE);
        }
        let mut orders = Vec::new();
        for (attribute, start) in attributes.iter().zip(starts) {
            let order = match attribute.order {
                1 => Reads::InOrder,
                2 => Reads::DuringCall,
                3 => Reads::AsFlagged,
                _ => return Err(INVALID_VALUE),
            };
            if attribute.flags > 1 {
                return Err(INVALID_VALUE);
            }
            orders.resize(start, orders.last().copied().unwrap_or(order));
            orders.push(order);
        }
        orders.resize(self.count, orders.last().copied().ok_or(INVALID_VALUE)?);
        Ok(orders)
    }

    /// Queues all copies or none.
    fn run(&self, stream: Handle) -> Outcome {
        let mut registry = registry();
        let lane = registry.work_lane(stream)?;
        if lane.engine.has(NO_BATCH) {
            return Err(NOT_SUPPORTED);
        }
        refuse_legacy(stream)?;
        if self.count > LONGEST_LIST {
            let text = format!("a list of {} copies, which is too long", self.count);
            lane.engine.blame(text);
            return Err(INVALID_VALUE);
        }
        let orders = self.orders()?;
        let mut copies = Vec::new();
        for (index, reads) in orders.into_iter().enumerate() {
            let copy = self.copy(&registry, &lane.engine, index, reads);
            copies.push(copy?);
        }
        copy::queue(&lane, copies)
    }

    fn copy(
        &self,
        registry: &Registry,
        engine: &Engine,
        index: usize,
        reads: Reads,
    ) -> Outcome<Copy> {
        let dst = self.targets.at(index)?;
        let src = self.sources.at(index)?;
        let bytes = self.sizes.at(index)?;
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        Copy::new(registry, engine, Way::Any, reads, (dst, src, bytes))
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyBatchAsync_v2(
    dsts: In<Address>,
    srcs: In<Address>,
    sizes: In<usize>,
    count: usize,
    attrs: In<Attributes>,
    attrsIdxs: In<usize>,
    numAttrs: usize,
    hStream: Handle,
) -> Code {
    call("cuMemcpyBatchAsync_v2", WORK, Of::Handle(hStream), || {
        let batch = Batch {
            targets: dsts,
            sources: srcs,
            sizes,
            count,
            attributes: attrs,
            starts: attrsIdxs,
            attribute_count: numAttrs,
        };
        batch.run(hStream)
    })
}
