//! [`Plan`]: which bytes a transfer copies, where they go, and the array that they become. The rows of several arrays of one type
//! become one array, one after the other; most transfers have one.
//!
//! A plan follows from the types, the rows and a few numbers that are stored in the arrays' memory. Where the host cannot read
//! that, one walk over the arrays lists the numbers that it lacks; once they are read, all of a level together, the next walk
//! goes further. Whole arrays of known sizes take one walk and no read.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_buffer::Buffer;
use arrow_schema::DataType;
use smallvec::SmallVec;

use crate::data::DeviceArray;
use crate::data::array::path;
use crate::data::node::{Node, NodeBuffer, View};
use crate::data::numbers::{Numbers, resolve};
use crate::device::{ALIGNMENT, Device, DevicePtr, Queue, now};
use crate::error::{Error, Result};
use crate::memory::Owner;
use crate::transfer::region::{CopyRegion, Rewrite};

/// How much of an array a transfer copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scope {
    /// Its rows. Where the host cannot read the array, the offsets of whole arrays are copied unchanged, and unknown null
    /// counts stay unknown.
    Rows,
    /// Its rows, with offsets that start at 0 and known null counts, even if that takes further reads.
    Compact,
    /// Everything that safe calls can reach from it. [`DeviceArray::child`] returns the whole child of a list, list view,
    /// dense union or run-end encoded array, however few of its rows the array refers to.
    Reachable,
}

/// What is copied, and what it becomes. Every buffer starts at a multiple of 64 bytes, or of the device's alignment, and is padded to
/// a multiple of 64 with zeros.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The result, whose buffers have their offsets, and get their memory by [`place`].
    pub(super) root: Arc<Node>,
    /// In ascending order of destination.
    pub(super) regions: Vec<CopyRegion>,
    /// The bytes of all buffers and their padding.
    pub(crate) bytes: usize,
    /// Some buffer has an address, if without bytes.
    has_buffers: bool,
    /// The sources of [`Rewrite::Made`].
    made: Vec<Buffer>,
    /// What was read for it, with the sources of what a copy on a device rewrites.
    pub(super) numbers: Numbers,
}

/// Plans the transfer of arrays of one device, at least one, which become an array of type `of` on the device `to`, or on the host.
/// Memory that the host can read is waited for. Numbers are read on `queue`, a queue of the arrays' device, or on its default queue.
pub(super) fn plan(
    arrays: &[&DeviceArray],
    of: &DataType,
    scope: Scope,
    to: Option<&Device>,
    queue: Option<&Queue>,
) -> Result<Plan> {
    let mut numbers = match arrays[0].device().is_host_readable() {
        true => Numbers::in_place(arrays)?,
        false => Numbers::default(),
    };
    let parts: Parts<'_> = arrays.iter().map(|array| array.view()).collect();
    let walk = |numbers: &Numbers| {
        walk(arrays, scope, to, numbers, |planner| {
            planner.node(of, &parts)
        })
    };
    let plan = now(resolve(&mut numbers, arrays, queue, false, walk))?;
    Ok(Plan { numbers, ..plan })
}

/// Plans what `root` walks over, as far as the numbers are known; where the host can read the arrays, they are known to be in place.
pub(super) fn walk<'a>(
    arrays: &'a [&'a DeviceArray],
    scope: Scope,
    to: Option<&Device>,
    numbers: &'a Numbers,
    root: impl FnOnce(&mut Planner<'a>) -> Result<Arc<Node>>,
) -> Result<Plan> {
    let device = arrays[0].device();
    let mut planner = Planner {
        arrays,
        device,
        scope,
        readable: device.is_host_readable(),
        to_device: to.is_some(),
        grain: to.map_or(ALIGNMENT, Device::alignment),
        numbers,
        plan: Plan {
            root: arrays[0].node().clone(),
            regions: Vec::new(),
            bytes: 0,
            has_buffers: false,
            made: Vec::new(),
            numbers: Numbers::default(),
        },
        end: 0,
        room: 0,
        shared: None,
        places: HashMap::new(),
    };
    planner.plan.root = root(&mut planner)?;
    Ok(planner.plan)
}

impl Plan {
    /// Returns the bytes to allocate on a device, where buffers without bytes need an address too.
    pub(super) fn device_bytes(&self) -> usize {
        match self.has_buffers {
            true => self.bytes.max(ALIGNMENT),
            false => self.bytes,
        }
    }
}

/// Gives the result of a plan, which has the only reference to it, its memory: what `owner` owns, which starts at `base`.
pub(super) fn place(result: &mut Arc<Node>, base: DevicePtr, owner: &Arc<Owner>) {
    let Some(node) = Arc::get_mut(result) else {
        return;
    };
    for buffer in &mut node.buffers {
        if !buffer.is_null() && buffer.owner.is_none() {
            (buffer.base, buffer.owner) = (base, Some(owner.clone()));
        }
    }
    let children = node.children.iter_mut();
    children.for_each(|child| place(child, base, owner));
}

/// The rows that become a node, one part after the other: of one array, or of several.
pub(super) type Parts<'a> = SmallVec<[View<'a>; 1]>;

/// A walk over arrays.
pub(super) struct Planner<'a> {
    arrays: &'a [&'a DeviceArray],
    pub(super) device: &'a Device,
    pub(super) scope: Scope,
    /// The host can read the sources, which are ready.
    pub(super) readable: bool,
    /// Whether the result is on a device. There buffers without bytes have an address: null is legal, but Arrow C++ considers null
    /// to be the CPU's memory.
    pub(super) to_device: bool,
    /// Buffers start at multiples of so many bytes.
    grain: usize,
    pub(super) numbers: &'a Numbers,
    /// What was planned so far. The root is not its own yet.
    plan: Plan,
    /// Of the buffer that is planned now: its end, where the source of its only region would end, and the place of another buffer that has
    /// its bytes.
    end: usize,
    room: usize,
    shared: Option<usize>,
    /// Where regions went that may be asked for again.
    places: HashMap<(DevicePtr, usize, Rewrite), usize>,
}

/// Whether an earlier transfer wrote the node, and the view is all of it.
pub(super) fn is_whole(view: View<'_>) -> bool {
    view.node.padded && view.is_uncut()
}

fn on_host(bytes: &[u8]) -> DevicePtr {
    DevicePtr::new(bytes.as_ptr().cast_mut().cast())
}

pub(super) fn too_large() -> Error {
    Error::argument("the rows do not fit in memory")
}

impl<'a> Planner<'a> {
    /// Adds a region to the buffer that is planned now. A copy on a device takes what is rewritten from the host, where it is read first:
    /// what was not yet is left out.
    pub(super) fn add(&mut self, mut region: CopyRegion) -> Result<()> {
        if region.len == 0 {
            return Ok(());
        }
        let rewritten = !matches!(region.rewrite, Rewrite::None | Rewrite::Made);
        if rewritten && self.to_device && !self.readable {
            match self.numbers.read(region.src, region.source(), false) {
                Some(bytes) => region.src = on_host(bytes),
                None => return Ok(()),
            }
        }
        region.dst = self.end;
        self.end = add(region.dst, region.len)?;
        // Where it is changed in place, the source has room too.
        self.room = match region.dst == self.plan.bytes {
            true => add(region.dst, region.source())?,
            false => 0,
        };
        if self.scope == Scope::Reachable {
            // A producer may refer to the same memory from any number of nodes, and all of it is reachable.
            let key = (region.src, region.len, region.rewrite);
            let place = *self.places.entry(key).or_insert(region.dst);
            if place != region.dst {
                self.shared = Some(place);
                return Ok(());
            }
        }
        match self.plan.regions.last_mut() {
            // What continues the last region on both sides of the copy is added to it: buffers that an earlier transfer put next to each
            // other stay so.
            Some(last)
                if last.padded
                    && region.padded
                    && (last.rewrite, region.rewrite) == (Rewrite::None, Rewrite::None)
                    && region.base == last.base
                    && region.dst == last.dst + last.room()
                    && region.src == last.src.offset(last.room()) =>
            {
                last.len = region.dst + region.len - last.dst;
            }
            _ => self.plan.regions.push(region),
        }
        Ok(())
    }

    /// Ends the buffer that is planned now, which has no memory yet. Without bytes it is there if it is to be `present`.
    pub(super) fn finish(&mut self, present: bool) -> Result<NodeBuffer> {
        let (start, end, shared) = (self.plan.bytes, self.end, self.shared.take());
        let mut buffer = NodeBuffer::absent();
        if end == start && !present {
            return Ok(buffer);
        }
        self.plan.has_buffers = true;
        buffer.base = DevicePtr::new(std::ptr::dangling_mut());
        buffer.bytes.set(end - start);
        if shared.is_some() || end == start {
            buffer.offset = shared.unwrap_or(0);
            self.end = start;
            return Ok(buffer);
        }
        buffer.offset = start;
        let padded = end.max(self.room).checked_next_multiple_of(ALIGNMENT);
        let padded = padded.ok_or_else(too_large)?;
        if let Some(last) = self.plan.regions.last_mut() {
            last.pad = padded - end;
        }
        let next = padded.checked_next_multiple_of(self.grain);
        self.end = add(next.ok_or_else(too_large)?, 0)?;
        self.plan.bytes = self.end;
        Ok(buffer)
    }

    /// Adds bytes that are known to the buffer that is planned now.
    pub(super) fn add_known(&mut self, bytes: impl Into<Buffer>) -> Result<()> {
        let bytes = bytes.into();
        let region = CopyRegion::new(on_host(&bytes), 0, bytes.len());
        self.plan.made.push(bytes);
        self.add(region.rewritten(Rewrite::Made))
    }

    /// Finds out the sizes of a node's buffers that are not known yet. Returns whether they are known now.
    pub(super) fn know_sizes(&self, view: View<'a>) -> Result<bool> {
        self.numbers.sizes(self.arrays, view.node)
    }

    /// The path of a buffer, for errors.
    #[cold]
    pub(super) fn path(&self, view: View<'_>, buffer: usize) -> String {
        format!("{}.buffers[{buffer}]", self.node_path(view))
    }

    /// The path of a node in the array that has it, for errors.
    #[cold]
    pub(super) fn node_path(&self, view: View<'_>) -> String {
        path(self.arrays, view.node)
    }
}

/// The sum, if there may be so many bytes.
fn add(a: usize, b: usize) -> Result<usize> {
    let sum = a.checked_add(b);
    let sum = sum.filter(|sum| isize::try_from(*sum).is_ok());
    sum.ok_or_else(too_large)
}
