//! What an export has to read or make: null counts that are not known, validity bitmaps that start at another bit of a byte than the
//! values (the C data interface has one offset for all buffers), and the offset that an array without rows must have and that
//! an import does without.

use std::sync::Arc;

use arrow_buffer::bit_mask::set_bits;

use crate::data::DeviceArray;
use crate::data::gather::{Gathering, Request};
use crate::data::layout::BufferKind;
use crate::data::node::{Node, NullCount, View};
use crate::data::resolve::count_bits;
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::transfer::copy::{execute, to_host_buffer};
use crate::transfer::plan::{Numbers, Planner, Scope, Walk, zeros};

/// How an array is exported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Export {
    /// The root is exported at offset 0, and its rows are pushed down to its children.
    pub(crate) as_batch: bool,
    /// All null counts are stated.
    pub(crate) counts: bool,
}

impl Export {
    /// As it is for children.
    fn below(self) -> Self {
        Self {
            as_batch: false,
            ..self
        }
    }
}

/// The bitmaps of an array that an export has to read.
#[derive(Debug)]
pub(crate) struct Bitmaps {
    export: Export,
    requests: Vec<Request>,
    pub(crate) reading: Gathering,
}

/// What is done with the bitmap of a part.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Task {
    Nothing,
    Count,
    Move,
    /// There are no rows, and no offsets: one is made.
    Offset,
}

impl Task {
    /// What an export does with a part. A bitmap is moved if it has nulls and there is no whole
    /// number of bytes between its first bit and the bit that the values' offset says. With `counts` unknown nulls are counted.
    fn of(array: &DeviceArray, view: View<'_>, export: Export) -> Self {
        let (node, nulls) = (view.node, view.null_count());
        let kind = node.layout.buffers().get(1);
        // On the CPU every export has an offset to give.
        if node.length == 0
            && matches!(kind, Some(BufferKind::Offsets { .. }))
            && node.buffers[1].is_null()
            && array.device().id() != DeviceId::CPU
        {
            return Self::Offset;
        }
        if nulls == Some(0) {
            return Self::Nothing;
        }
        let in_place = export.as_batch || view.length == 0 || view.bitmap_shift().is_some();
        match export.counts && nulls.is_none() {
            _ if !in_place && node.bitmap().is_some() => Self::Move,
            true => Self::Count,
            false => Self::Nothing,
        }
    }
}

impl Bitmaps {
    /// Whether an export has to read bitmaps.
    pub(crate) fn needed(array: &DeviceArray, export: Export) -> bool {
        fn needed(array: &DeviceArray, view: View<'_>, export: Export) -> bool {
            let mut children = 0..view.node.children.len();
            Task::of(array, view, export) != Task::Nothing
                || children.any(|i| needed(array, view.part(i, export.as_batch), export.below()))
        }
        needed(array, array.view(), export)
    }

    /// Queues the copies of the bitmaps on the device's default queue: one list. Waits only where the host reads them
    /// in place.
    pub(crate) fn start(array: &DeviceArray, export: Export) -> Result<Self> {
        let requests = match walk(array, export, &Numbers::default())? {
            Walk::Lacks(requests) => requests,
            Walk::Plan(_) => Vec::new(),
        };
        // SAFETY: a bitmap has one bit for each row of its node, which was checked when the node was made, and views lie
        // inside their node. Nobody writes to an array's memory: imports and constructors demand it.
        let reading = unsafe { Gathering::of(array, &requests, None) }?;
        Ok(Self {
            export,
            requests,
            reading,
        })
    }

    /// Waits for the bitmaps: one host wait. `array` is the one of [`start`](Self::start), and keeps the counts.
    /// Bitmaps that move go to one fresh allocation, with one list of copies. Returns an array that exports as the original
    /// would. Its bitmaps start at the bit that the values' offset says, and the nulls in those that were read are known.
    pub(crate) fn finish(self, array: &DeviceArray) -> Result<DeviceArray> {
        let mut numbers = Numbers::default();
        numbers.add(&self.requests, self.reading.finish()?);
        let Walk::Plan(plan) = walk(array, self.export, &numbers)? else {
            return Err(Error::argument("the array changed during its export"));
        };
        let device = array.device();
        // The device's memory is host memory, of which the device itself may have none to give: page-locked memory whose
        // backend is missing. The fresh bitmaps are the device's all the same, as the array is.
        let node = match device.is_host_readable() && device.is_synchronous() {
            true => to_host_buffer(plan, device)?,
            false => execute(plan, &[array], &device.default_queue())?,
        };
        Ok(array.like(device.clone(), node))
    }
}

/// Walks over an array, as [`plan::walk`](crate::transfer::plan::walk). The plan makes what is new in the array that is exported.
fn walk(array: &DeviceArray, export: Export, numbers: &Numbers) -> Result<Walk> {
    let arrays = [array];
    let mut planner = Planner::new(&arrays, Scope::Rows, None, numbers);
    // The array need not be ready, so that all bitmaps are asked for.
    planner.readable = false;
    let root = planner.exported(array, array.view(), export)?;
    Ok(planner.end(root))
}

impl<'a> Planner<'a> {
    /// The rows of a part and its descendants as they are exported. What is the same stays the same node.
    fn exported(
        &mut self,
        array: &DeviceArray,
        view: View<'a>,
        export: Export,
    ) -> Result<Arc<Node>> {
        let (mut own, mut nulls) = (None, view.null_count());
        let task = Task::of(array, view, export);
        if task == Task::Offset {
            // Of 64 bits, which are enough for one of 32.
            let offset = self.known(vec![0; 8]);
            own = Some((1, self.buffer(true, [offset])?));
        } else if task != Task::Nothing {
            let (first, bits) = (view.validity_offset, view.length);
            let bitmap = view.node.buffers[0].address().offset(first / 8);
            if let Some(bitmap) = self.read(bitmap, (first % 8 + bits).div_ceil(8), false) {
                let counted = bits - count_bits(bitmap, first % 8, bits);
                view.set_null_count(counted);
                nulls = Some(counted);
                if task == Task::Move {
                    let at = view.offset % 8;
                    let mut moved = vec![0; (at + bits).div_ceil(8)];
                    set_bits(&mut moved, bitmap, at, first % 8, bits);
                    let moved = self.known(moved);
                    // Of rows that are skipped.
                    let skipped = zeros(view.offset / 8);
                    own = Some((0, self.buffer(true, [skipped, moved])?));
                }
            }
        }
        let as_batch = export.as_batch;
        let mut children = Vec::with_capacity(view.node.children.len());
        for i in 0..view.node.children.len() {
            let child = view.part(i, as_batch);
            children.push(self.exported(array, child, export.below())?);
        }
        let mut same = children.iter().zip(&view.node.children);
        let is_same = same.all(|(new, old)| Arc::ptr_eq(new, old));
        if own.is_none() && is_same && !as_batch {
            let node = view.to_node();
            if let Some(nulls) = nulls {
                node.nulls.set(nulls);
            }
            return Ok(node);
        }
        let mut node = Node {
            length: view.length,
            cut: view.node.cut || !view.is_all(),
            offset: view.offset,
            validity_offset: view.validity_offset,
            nulls: NullCount::from(nulls),
            children,
            ..Node::clone(view.node)
        };
        if as_batch {
            (node.offset, node.validity_offset) = (0, 0);
        }
        if let Some((i, buffer)) = own {
            node.buffers[i] = buffer;
            node.validity_offset = node.offset;
        }
        Ok(Arc::new(node))
    }
}
