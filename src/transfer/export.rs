//! What an export has to read or make: null counts that are not known, validity bitmaps that start at another bit of a byte than the
//! values (the C data interface has one offset for all buffers), and the offset that an array without rows must have and that
//! an import does without.

use std::sync::Arc;

use arrow_buffer::BooleanBufferBuilder;

use crate::data::DeviceArray;
use crate::data::layout::BufferKind;
use crate::data::node::{Node, NullCount, View};
use crate::data::numbers::{Numbers, resolve};
use crate::error::Result;
use crate::transfer::copy::{execute, to_host_buffer};
use crate::transfer::plan::{Planner, Scope, walk};

impl DeviceArray {
    /// Reads the bitmaps on the device's default queue, with one list of copies and one wait: the task's if this `polls`, else the host's.
    /// Bitmaps that move go to one fresh allocation, with one list of copies. Returns an array that exports as this one would. Its
    /// bitmaps start at the bit that the values' offset says, and the nulls in those that were read are known, to this array too.
    pub(crate) async fn to_exported(&self, counts: bool, polls: bool) -> Result<Self> {
        let plan = |numbers: &Numbers| {
            walk(&[self], Scope::Rows, None, numbers, |planner| {
                planner.exported(self.node(), counts)
            })
        };
        let plan = resolve(&mut Numbers::default(), &[self], None, polls, plan).await?;
        let device = self.device();
        // The device's memory is host memory, of which the device itself may have none to give: page-locked memory whose
        // backend is missing. The fresh bitmaps are the device's all the same, as the array is.
        let node = match device.is_host_readable() && device.is_synchronous() {
            true => to_host_buffer(plan, device)?,
            false => execute(plan, &[self], &device.default_queue())?,
        };
        Ok(self.like(device.clone(), node))
    }
}

/// Whether an export of a node reads bitmaps, or makes something. If it `counts`, it states all null counts.
pub(crate) fn export_reads(node: &Arc<Node>, counts: bool) -> bool {
    let view = View::whole(node);
    let mut children = node.children.iter();
    counts && view.null_count().is_none()
        || moves(view)
        || lacks_offset(node)
        || children.any(|child| export_reads(child, counts))
}

/// Whether an export moves a bitmap: if it has nulls and there is no whole number of bytes between its first bit and the bit that the
/// values' offset says.
fn moves(view: View<'_>) -> bool {
    let in_place = view.length == 0 || view.bitmap_shift().is_some();
    !in_place && view.node.bitmap().is_some() && view.null_count() != Some(0)
}

/// Whether a node has no rows and no offsets, so that one is made.
fn lacks_offset(node: &Node) -> bool {
    let kind = node.layout.buffers().get(1);
    node.length == 0
        && matches!(kind, Some(BufferKind::Offsets { .. }))
        && node.buffers[1].is_null()
}

impl<'a> Planner<'a> {
    /// A node and its descendants as they are exported.
    fn exported(&mut self, node: &'a Arc<Node>, counts: bool) -> Result<Arc<Node>> {
        let view = View::whole(node);
        let nulls = match counts || moves(view) {
            true => self.numbers.null_count(view),
            false => view.null_count(),
        };
        let mut exported = Node {
            nulls: NullCount::from(nulls),
            children: Vec::with_capacity(node.children.len()),
            ..Node::clone(node)
        };
        if lacks_offset(node) {
            // Of 64 bits, which are enough for one of 32.
            self.add_known(vec![0u8; 8])?;
            exported.buffers[1] = self.finish(true)?;
        }
        let bitmap = moves(view).then(|| self.numbers.bitmap(view));
        if let Some(bitmap) = bitmap.flatten() {
            let first = view.validity_offset % 8;
            let mut moved = BooleanBufferBuilder::new(view.offset + view.length);
            // Of rows that are skipped.
            moved.append_n(view.offset, false);
            moved.append_packed_range(first..first + view.length, bitmap);
            self.add_known(moved.finish().into_inner())?;
            exported.buffers[0] = self.finish(true)?;
            exported.validity_offset = exported.offset;
        }
        for child in &node.children {
            let child = self.exported(child, counts)?;
            exported.children.push(child);
        }
        Ok(Arc::new(exported))
    }
}
