//! What an export has to read or make: null counts that are not known, validity bitmaps that start at another bit of a byte than the
//! values (the C data interface has one offset for all buffers), and the offset that an array without rows must have and that
//! an import does without.

use std::sync::Arc;

use arrow_buffer::BooleanBufferBuilder;

use crate::data::DeviceArray;
use crate::data::layout::BufferKind;
use crate::data::node::{Node, NullCount, View};
#[cfg(feature = "async")]
use crate::data::numbers::resolve_async;
use crate::data::numbers::{Numbers, resolve};
use crate::device::{Device, DeviceId};
use crate::error::Result;
use crate::transfer::copy::{execute, to_host_buffer};
use crate::transfer::plan::{Plan, Planner, Scope};

/// How an array is exported.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Export {
    /// The root is exported at offset 0, and its rows are pushed down to its children.
    pub(crate) as_batch: bool,
    /// All null counts are stated.
    pub(crate) counts: bool,
}

impl Export {
    /// Whether it reads bitmaps, or makes something.
    pub(crate) fn reads(self, array: &DeviceArray) -> bool {
        self.reads_part(array.device(), array.view())
    }

    fn reads_part(self, device: &Device, view: View<'_>) -> bool {
        let mut children = (0..view.node.children.len()).map(|i| view.part(i, self.as_batch));
        self.counts && view.null_count().is_none()
            || self.moves(view)
            || lacks_offset(device, view)
            || children.any(|child| self.below().reads_part(device, child))
    }

    /// Whether it moves the bitmap of a part: if that has nulls and there is no whole number of bytes between its first bit and the bit
    /// that the values' offset says.
    fn moves(self, view: View<'_>) -> bool {
        let in_place = self.as_batch || view.length == 0 || view.bitmap_shift().is_some();
        !in_place && view.node.bitmap().is_some() && view.null_count() != Some(0)
    }

    /// Reads the bitmaps on the device's default queue, with one list of copies and one host wait. Bitmaps that move go to one fresh
    /// allocation, with one list of copies. Returns an array that exports as the original would. Its bitmaps start at the bit that the
    /// values' offset says, and the nulls in those that were read are known; where nodes are whole, the original knows them too.
    pub(crate) fn resolved(self, array: &DeviceArray) -> Result<DeviceArray> {
        let walk = |numbers: &Numbers| self.walk(array, numbers);
        let plan = resolve(&mut Numbers::default(), &[array], None, walk)?;
        self.made(array, plan)
    }

    /// As [`resolved`](Self::resolved). A poll does not wait for the bitmaps.
    #[cfg(feature = "async")]
    pub(crate) async fn resolved_async(self, array: &DeviceArray) -> Result<DeviceArray> {
        let plan = resolve_async(array, |numbers| self.walk(array, numbers)).await?;
        self.made(array, plan)
    }

    /// Plans what is new in the array that is exported.
    fn walk(self, array: &DeviceArray, numbers: &Numbers) -> Result<Plan> {
        let arrays = [array];
        let mut planner = Planner::new(&arrays, Scope::Rows, None, numbers);
        let root = planner.exported(array.view(), self)?;
        Ok(planner.end(root))
    }

    /// The array that is exported.
    fn made(self, array: &DeviceArray, plan: Plan) -> Result<DeviceArray> {
        let device = array.device();
        // The device's memory is host memory, of which the device itself may have none to give: page-locked memory whose
        // backend is missing. The fresh bitmaps are the device's all the same, as the array is.
        let node = match device.is_host_readable() && device.is_synchronous() {
            true => to_host_buffer(plan, device)?,
            false => execute(plan, &[array], &device.default_queue())?,
        };
        Ok(array.like(device.clone(), node))
    }

    /// As it is for children.
    fn below(self) -> Self {
        Self {
            as_batch: false,
            ..self
        }
    }
}

/// Whether a part has no rows and no offsets, so that one is made. On the CPU every export has an offset to give.
fn lacks_offset(device: &Device, view: View<'_>) -> bool {
    let node = view.node;
    let kind = node.layout.buffers().get(1);
    node.length == 0
        && matches!(kind, Some(BufferKind::Offsets { .. }))
        && node.buffers[1].is_null()
        && device.id() != DeviceId::CPU
}

impl<'a> Planner<'a> {
    /// The rows of a part and its descendants as they are exported.
    fn exported(&mut self, view: View<'a>, export: Export) -> Result<Arc<Node>> {
        let (moves, node) = (export.moves(view), view.node);
        let nulls = match moves || export.counts {
            true => self.numbers.null_count(view),
            false => view.null_count(),
        };
        let mut node = Node {
            length: view.length,
            cut: node.cut || !view.is_all(),
            offset: view.offset,
            validity_offset: view.validity_offset,
            nulls: NullCount::from(nulls),
            children: Vec::with_capacity(node.children.len()),
            ..Node::clone(node)
        };
        if lacks_offset(self.device, view) {
            // Of 64 bits, which are enough for one of 32.
            let offset = self.known(vec![0u8; 8]);
            node.buffers[1] = self.buffer(true, [offset])?;
        }
        let bitmap = moves.then(|| self.numbers.bitmap(view));
        if let Some(bitmap) = bitmap.flatten() {
            let first = view.validity_offset % 8;
            let mut moved = BooleanBufferBuilder::new(view.offset + view.length);
            // Of rows that are skipped.
            moved.append_n(view.offset, false);
            moved.append_packed_range(first..first + view.length, bitmap);
            let moved = self.known(moved.finish().into_inner());
            node.buffers[0] = self.buffer(true, [moved])?;
            node.validity_offset = node.offset;
        }
        if export.as_batch {
            (node.offset, node.validity_offset) = (0, 0);
        }
        for i in 0..view.node.children.len() {
            let child = view.part(i, export.as_batch);
            let child = self.exported(child, export.below())?;
            node.children.push(child);
        }
        Ok(Arc::new(node))
    }
}
