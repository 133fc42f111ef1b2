//! Plans binary, text, list and map arrays.

use crate::data::layout::BufferKind;
use crate::data::node::View;
use crate::data::resolve::check_size;
use crate::device::DevicePtr;
use crate::error::{Error, Result};
use crate::transfer::fix::Fix;
use crate::transfer::planner::{Extent, Need, Parts, Planner, is_whole, region_of, request};

impl<'a> Planner<'a> {
    /// Plans the offsets, and what they refer to. The first and the last offset are read if they are not known.
    pub(super) fn offsets(&mut self, node: usize, parts: Parts<'a>) -> Result<()> {
        let (view, width) = (parts.first, width(parts.first));
        let buffers = &view.node.buffers;
        let nested = !view.node.children.is_empty();
        let reachable = nested && self.extent == Extent::Reachable;
        if view.length == 0 {
            if reachable {
                self.ready(node, 1, &[0; 8][..width]);
                return self.only_child(node, Parts::of([view.child(0)]));
            }
            return self.range(node, &parts, &[(0, 0)]);
        }
        let lacks = |view: &View<'_>| view.node.buffers[1].is_null();
        if let Some(view) = parts.iter().find(lacks) {
            return Err(Error::invalid(self.path(view, 1), "is null but has rows"));
        }
        if reachable {
            return self.whole_range(node, view, Ok(view.child(0)));
        }
        let at = |view: View<'_>, row: usize| {
            let offsets = view.node.buffers[1].address();
            offsets.offset((view.offset + row) * width)
        };
        // Buffers of arrow-rs arrays may be longer than their rows need, so the offsets are always read.
        if self.readable {
            // SAFETY: there are `offset + length + 1` offsets, which was checked when the array was made; the host can read
            // them (`readable`), and they are ready (`plan_with` waited).
            let end = |view, row| unsafe { offset(at(view, row), width) };
            let ends: Vec<_> = parts
                .iter()
                .map(|view| (end(view, 0), end(view, view.length)))
                .collect();
            return self.range(node, &parts, &ends);
        }
        if view.is_uncut() && !self.is_exact() {
            if nested {
                return self.whole_range(node, view, Ok(view.child(0)));
            }
            if let Some(bytes) = buffers[2].bytes() {
                return self.whole_range(node, view, Err(bytes));
            }
            let last = request(at(view, view.length), width);
            self.wait_for(node, parts, Need::Last, vec![last]);
        } else {
            let ends = parts
                .iter()
                .flat_map(|view| [at(view, 0), at(view, view.length)]);
            let ends = ends.map(|at| request(at, width)).collect();
            self.wait_for(node, parts, Need::Ends, ends);
        }
        Ok(())
    }

    /// Adds the offsets of one array unchanged, and everything that they can refer to: `target` is the child's rows, or a number of
    /// bytes.
    pub(super) fn whole_range(
        &mut self,
        node: usize,
        view: View<'a>,
        target: Result<View<'a>, usize>,
    ) -> Result<()> {
        let (buffers, width) = (&view.node.buffers, width(view));
        let offsets = region_of(&buffers[1], view.offset * width, (view.length + 1) * width);
        self.plan
            .fill(node, 1, true, [offsets.whole(is_whole(view))]);
        match target {
            Ok(child) => self.only_child(node, Parts::of([child]))?,
            Err(bytes) => {
                let whole = buffers[2].bytes() == Some(bytes) && is_whole(view);
                let region = region_of(&buffers[2], 0, bytes).whole(whole);
                self.plan.fill(node, 2, true, [region]);
            }
        }
        Ok(())
    }

    fn only_child(&mut self, node: usize, child: Option<Parts<'a>>) -> Result<()> {
        self.plan.begin_children(node, 1);
        child.map_or(Ok(()), |child| self.node(child, None))
    }

    /// Adds offsets that start at 0, and what lies between the first and the last one of each part.
    pub(super) fn range(
        &mut self,
        node: usize,
        parts: &Parts<'a>,
        ends: &[(i64, i64)],
    ) -> Result<()> {
        let (width, one) = (width(parts.first), parts.is_one());
        let nested = !parts.first.node.children.is_empty();
        let (mut offsets, mut targets, mut items) = (Vec::new(), Vec::new(), 0usize);
        for (view, &(first, last)) in parts.iter().zip(ends) {
            if first < 0 || last < first {
                return Err(Error::invalid(
                    self.path(view, 1),
                    format!("offsets go from {first} to {last}"),
                ));
            }
            self.check_end(view, last, nested)?;
            if view.length > 0 {
                // The first offset of a part is the last one of the part before.
                let skip = usize::from(!offsets.is_empty());
                let (from, n) = (view.offset + skip, view.length + 1 - skip);
                let region = region_of(&view.node.buffers[1], from * width, n * width);
                offsets.push(match first - items as i64 {
                    0 => region.whole(one && is_whole(view)),
                    base => region.fixed(Fix::Offsets {
                        width: width as u8,
                        base,
                    }),
                });
            }
            let rows = (last - first) as usize;
            targets.push((view, first as usize, rows));
            items = items.saturating_add(rows);
        }
        if width == 4 && !one {
            let what = if nested { "items" } else { "bytes" };
            let instead = "concatenate fewer arrays, or cast them to the large type";
            self.check_most(parts.first, items, i32::MAX as u64, what, instead)?;
        }
        match offsets.is_empty() {
            true => self.ready(node, 1, &[0; 8][..width]),
            false => self.plan.fill(node, 1, true, offsets),
        }
        if nested {
            let children = targets
                .iter()
                .map(|(view, first, rows)| view.child(0).slice(*first, *rows));
            return self.only_child(node, Parts::of(children));
        }
        // They are present even if they are empty, because some consumers reject a null pointer.
        let regions = targets.into_iter().map(|(view, first, bytes)| {
            let buffer = &view.node.buffers[2];
            let whole = one && buffer.bytes() == Some(bytes) && is_whole(view);
            region_of(buffer, first, bytes).whole(whole)
        });
        self.plan.fill(node, 2, true, regions);
        Ok(())
    }

    /// Refuses an offset beyond what it refers to.
    fn check_end(&self, view: View<'_>, last: i64, nested: bool) -> Result<()> {
        if nested {
            let rows = view.child(0).length;
            return match u64::try_from(last).unwrap_or(0) > rows as u64 {
                true => Err(Error::invalid(
                    self.path(view, 1),
                    format!("offsets reach row {last} of a child of {rows} rows"),
                )),
                false => Ok(()),
            };
        }
        let buffer = &view.node.buffers[2];
        let at = || self.path(view, 2);
        match buffer.bytes() {
            None => check_size(self.device, buffer.address(), last, at).map(drop),
            Some(bytes) if last as usize > bytes => {
                let what = format!("offsets reach byte {last} of {bytes}");
                Err(Error::invalid(at(), what))
            }
            Some(_) => Ok(()),
        }
    }
}

/// The bytes of one offset.
pub(super) fn width(view: View<'_>) -> usize {
    match view.layout().buffers().get(1) {
        Some(BufferKind::Offsets { width }) => usize::from(*width),
        _ => 8,
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
