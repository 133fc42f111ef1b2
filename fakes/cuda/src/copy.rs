//! Copies and fills, as work of a queue.

use std::ops::Range;

use arrow_device::device::sim::SimMemory;
use arrow_device::device::{Backend, DevicePtr};

use crate::engine::{Engine, PAGEABLE_EAGER};
use crate::ffi::*;
use crate::memory::{Place, pointer};
use crate::registry::{Lane, Registry};

/// Which way a copy goes, as its function says.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// As the addresses say.
    Any,
    HostToDevice,
    DeviceToHost,
    /// Device to device, with both contexts named.
    Peer,
}

/// When the source of a copy is read, if it is pageable.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    /// As the engine's flags say.
    AsFlagged,
    DuringCall,
    InOrder,
}

enum Source {
    Device(DevicePtr),
    Host(DevicePtr),
    /// Read by the call.
    Bytes(Vec<u8>),
}

enum Target {
    Device(DevicePtr),
    Host(DevicePtr),
}

/// A checked copy.
pub(crate) struct Copy {
    source: Source,
    target: Target,
    bytes: usize,
}

impl Copy {
    /// Checks a copy. What cannot be known before it runs is checked then.
    pub(crate) fn new(
        registry: &Registry,
        engine: &Engine,
        way: Way,
        reads: Reads,
        (dst, src, bytes): (Address, Address, usize),
    ) -> Outcome<Self> {
        let wrong = |why: String| {
            engine.blame(format!(
                "copy of {bytes} bytes from {src:#x} to {dst:#x}: {why}"
            ));
            INVALID_VALUE
        };
        let dst = usize::try_from(dst).map_err(|_| INVALID_VALUE)?;
        let src = usize::try_from(src).map_err(|_| INVALID_VALUE)?;
        let ends = dst.checked_add(bytes).zip(src.checked_add(bytes));
        let (Some((dst_end, src_end)), true) = (ends, dst != 0 && src != 0) else {
            return Err(INVALID_VALUE);
        };
        if src < dst_end && dst < src_end {
            return Err(wrong("overlaps itself".into()));
        }
        let to = registry.memory.place(engine, dst, bytes).map_err(&wrong)?;
        let from = registry.memory.place(engine, src, bytes).map_err(&wrong)?;
        let (host_source, host_target) = match way {
            Way::Any => (true, true),
            Way::HostToDevice => (true, false),
            Way::DeviceToHost => (false, true),
            Way::Peer => (false, false),
        };
        // Page-locked and managed memory is both.
        let fits = |place, host: bool| match place {
            Place::Device => !host || way == Way::Any,
            Place::Pageable => host,
            Place::Managed | Place::Locked => true,
        };
        if !fits(from, host_source) || !fits(to, host_target) {
            return Err(wrong(format!("the wrong way, from {from:?} to {to:?}")));
        }
        // Drivers do not find memory of another device's pool by its address alone.
        let pooled = |address: usize| {
            let block = registry.memory.at(address as Address);
            block
                .filter(|block| block.pool.is_some())
                .map(|block| block.ordinal)
        };
        if let (Some(of), Some(other), true) = (pooled(src), pooled(dst), way != Way::Peer) {
            if of != other {
                let why = "between pools of two devices without naming their contexts";
                return Err(wrong(why.into()));
            }
        }
        let eager = match reads {
            Reads::AsFlagged => engine.has(PAGEABLE_EAGER),
            Reads::DuringCall => true,
            Reads::InOrder => false,
        };
        let source = match from {
            Place::Device => Source::Device(pointer(src)),
            Place::Pageable if eager => {
                // SAFETY: this is host memory, and the caller of the driver function guarantees
                // that it is readable during the call.
                let now =
                    unsafe { std::slice::from_raw_parts(pointer(src).as_ptr().cast(), bytes) };
                Source::Bytes(now.to_vec())
            }
            _ => Source::Host(pointer(src)),
        };
        let target = match to {
            Place::Device => Target::Device(pointer(dst)),
            _ => Target::Host(pointer(dst)),
        };
        Ok(Self {
            source,
            target,
            bytes,
        })
    }

    /// The host addresses that it uses when it runs.
    fn host(&self) -> impl Iterator<Item = Range<usize>> {
        let range = |ptr: DevicePtr| ptr.address()..ptr.address() + self.bytes;
        let source = match self.source {
            Source::Host(ptr) => Some(range(ptr)),
            _ => None,
        };
        let target = match self.target {
            Target::Host(ptr) => Some(range(ptr)),
            Target::Device(_) => None,
        };
        source.into_iter().chain(target)
    }

    fn run(&self, memory: &mut SimMemory<'_>) -> Result<(), String> {
        let bytes = self.bytes;
        let from = match (&self.source, &self.target) {
            (Source::Device(src), Target::Device(dst)) => {
                let bytes = memory.slice::<u8>(*src, bytes)?.to_vec();
                return memory.write(*dst, &bytes);
            }
            (Source::Device(src), Target::Host(_)) => memory.slice(*src, bytes)?.as_ptr(),
            (Source::Host(src), _) => src.as_ptr().cast_const().cast(),
            (Source::Bytes(now), _) => now.as_ptr(),
        };
        let to: *mut u8 = match self.target {
            Target::Host(dst) => dst.as_ptr().cast(),
            Target::Device(dst) => memory.slice_mut::<u8>(dst, bytes)?.as_mut_ptr(),
        };
        // SAFETY: device addresses have just been checked, and the engine runs nothing else. The
        // caller of the driver function guarantees that host memory lives until the copy has run
        // (page-locked memory that is freed earlier is a violation, and stays). `new` has checked
        // that the ranges do not overlap.
        unsafe { std::ptr::copy(from, to, bytes) };
        Ok(())
    }
}

/// Queues copies, which run last one first: their order must not matter.
pub(crate) fn queue(lane: &Lane, copies: Vec<Copy>) -> Outcome {
    let host: Vec<_> = copies.iter().flat_map(Copy::host).collect();
    lane.engine.launch(&lane.queue, host, move |memory| {
        copies.iter().rev().try_for_each(|copy| copy.run(memory))
    })
}

/// Queues a fill with one byte.
pub(crate) fn fill(
    registry: &Registry,
    lane: &Lane,
    dst: Address,
    byte: u8,
    bytes: usize,
) -> Outcome {
    let engine = &lane.engine;
    let wrong = |why: String| {
        engine.blame(format!("memset of {bytes} bytes at {dst:#x}: {why}"));
        INVALID_VALUE
    };
    let start = usize::try_from(dst).map_err(|_| INVALID_VALUE)?;
    if start == 0 || start.checked_add(bytes).is_none() {
        return Err(INVALID_VALUE);
    }
    let to = pointer(start);
    match registry
        .memory
        .place(engine, start, bytes)
        .map_err(&wrong)?
    {
        Place::Device => {
            // SAFETY: the engine checks the memory when the fill runs; the caller of the driver
            // function guarantees that nothing else uses it.
            let filled = unsafe { lane.queue.fill(to, byte, bytes) };
            filled.map_err(|error| engine.code_of(&error))
        }
        Place::Pageable => Err(wrong("pageable memory".into())),
        Place::Managed | Place::Locked => {
            let host = Some(start..start + bytes);
            engine.launch(&lane.queue, host, move |_| {
                // SAFETY: the bytes lie in page-locked or managed memory, which is not freed while
                // this work is queued.
                unsafe { to.as_ptr().cast::<u8>().write_bytes(byte, bytes) };
                Ok(())
            })
        }
    }
}

/// Whether this is an address of this simulated device or another.
pub(crate) fn is_device(engine: &Engine, address: usize, bytes: usize) -> bool {
    !engine.sim.copies_directly_from(pointer(address), bytes)
}
