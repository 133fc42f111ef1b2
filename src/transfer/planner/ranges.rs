//! Plans binary, text, list and map arrays.

use crate::data::node::{NodeBuffer, View};
use crate::data::sizes::check_size;
use crate::device::DevicePtr;
use crate::error::{Error, Result};
use crate::transfer::fix::Fix;
use crate::transfer::plan::{Region, SLAB};
use crate::transfer::planner::{Extent, Need, Planner, is_whole};

impl<'a> Planner<'a> {
    /// Plans the offsets, and what they refer to. The first and the last offset are read if they are not known.
    pub(super) fn offsets(&mut self, node: usize, view: View<'a>, width: usize) -> Result<()> {
        let buffers = &view.node.buffers;
        let nested = !view.node.children.is_empty();
        let reachable = nested && self.extent == Extent::Reachable;
        if view.length == 0 {
            if reachable {
                let first = self.plan.nodes[node].regions.start;
                self.ready(first + 1, &[0; 8][..width]);
                return self.only_child(node, view.child(0));
            }
            return self.range(node, view, width, 0, 0);
        }
        if buffers[1].is_null() {
            return Err(Error::invalid(self.path(view, 1), "is null but has rows"));
        }
        if reachable {
            return self.whole_range(node, view, width, Ok(view.child(0)));
        }
        let at = |row: usize| buffers[1].address().offset(row * width);
        let (first, last) = (at(view.offset), at(view.offset + view.length));
        // Buffers of arrow-rs arrays may be longer than their rows need, so the offsets are always read.
        if self.readable {
            // SAFETY: there are `offset + length + 1` offsets, which was checked when the array was made; the host can read
            // them (`readable`), and they are ready (`plan_with` waited).
            let (first, last) = unsafe { (offset(first, width), offset(last, width)) };
            return self.range(node, view, width, first, last);
        }
        if view.is_uncut() && !self.is_exact() {
            if nested {
                return self.whole_range(node, view, width, Ok(view.child(0)));
            }
            if let Some(bytes) = buffers[2].bytes() {
                return self.whole_range(node, view, width, Err(bytes));
            }
            self.wait_for(node, view, Need::Last, &[(last, width)]);
        } else {
            self.wait_for(node, view, Need::Ends, &[(first, width), (last, width)]);
        }
        Ok(())
    }

    /// Adds the offsets unchanged, and everything that they can refer to: `target` is the child's rows, or a number of bytes.
    pub(super) fn whole_range(
        &mut self,
        node: usize,
        view: View<'a>,
        width: usize,
        target: Result<View<'a>, usize>,
    ) -> Result<()> {
        let buffers = &view.node.buffers;
        let first = self.plan.nodes[node].regions.start;
        let bytes = (view.length + 1) * width;
        let from = buffers[1].offset + view.offset * width;
        let offsets = Region::new(buffers[1].base, from, bytes);
        self.plan.regions[first + 1] = offsets.whole(is_whole(view));
        match target {
            Ok(child) => self.only_child(node, child)?,
            Err(bytes) => self.bytes(first + 2, view, &buffers[2], 0, bytes),
        }
        Ok(())
    }

    fn only_child(&mut self, node: usize, child: View<'a>) -> Result<()> {
        self.begin_children(node, 1);
        self.node(child, None, node)
    }

    /// Adds offsets that start at 0, and what lies between `first` and `last`.
    pub(super) fn range(
        &mut self,
        node: usize,
        view: View<'a>,
        width: usize,
        first: i64,
        last: i64,
    ) -> Result<()> {
        let buffers = &view.node.buffers;
        let region = self.plan.nodes[node].regions.start;
        if first < 0 || last < first {
            return Err(Error::invalid(
                self.path(view, 1),
                format!("offsets go from {first} to {last}"),
            ));
        }
        if view.length == 0 {
            self.ready(region + 1, &[0; 8][..width]);
        } else {
            let bytes = (view.length + 1) * width;
            let from = buffers[1].offset + view.offset * width;
            let offsets = Region::new(buffers[1].base, from, bytes);
            let width = width as u8;
            self.plan.regions[region + 1] = match first {
                0 => offsets.whole(is_whole(view)),
                base => offsets.fixed(Fix::Offsets { width, base }),
            };
        }
        if !view.node.children.is_empty() {
            let child = view.child(0);
            if u64::try_from(last).unwrap_or(0) > child.length as u64 {
                return Err(Error::invalid(
                    self.path(view, 1),
                    format!(
                        "offsets reach row {last} of a child of {} rows",
                        child.length
                    ),
                ));
            }
            let (first, rows) = (first as usize, (last - first) as usize);
            return self.only_child(node, child.slice(first, rows));
        }
        let at = || self.path(view, 2);
        match buffers[2].bytes() {
            None => {
                check_size(self.array.device(), buffers[2].address(), last, at)?;
            }
            Some(bytes) if last as usize > bytes => {
                let what = format!("offsets reach byte {last} of {bytes}");
                return Err(Error::invalid(at(), what));
            }
            Some(_) => {}
        }
        let (first, bytes) = (first as usize, (last - first) as usize);
        self.bytes(region + 2, view, &buffers[2], first, bytes);
        Ok(())
    }

    /// Sets a buffer to the `bytes` bytes from byte `first` on that offsets refer to. It is present even if it is empty,
    /// because some consumers reject a null pointer.
    fn bytes(
        &mut self,
        region: usize,
        view: View<'a>,
        source: &NodeBuffer,
        first: usize,
        bytes: usize,
    ) {
        let whole = source.bytes() == Some(bytes) && is_whole(view);
        self.plan.regions[region] = match bytes {
            0 => Region::empty(SLAB),
            _ => Region::new(source.base, source.offset + first, bytes).whole(whole),
        };
    }
}

/// Reads an offset of `width` bytes.
///
/// # Safety
/// There are `width` bytes (4 or 8) of readable host memory at `at`; it need not be aligned.
unsafe fn offset(at: DevicePtr, width: usize) -> i64 {
    let at = at.as_ptr().cast_const();
    // SAFETY: the caller guarantees `width` readable bytes at `at`; unaligned reads need no more.
    unsafe {
        match width {
            4 => i64::from(at.cast::<i32>().read_unaligned()),
            _ => at.cast::<i64>().read_unaligned(),
        }
    }
}
