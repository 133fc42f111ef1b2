//! Plans binary, text, list and map arrays.

use crate::data::sizes::check_size;
use crate::data::tree::{Slot, View};
use crate::device::DevicePtr;
use crate::error::{Error, Result};
use crate::transfer::fix::Fix;
use crate::transfer::plan::{Copying, Region, SLAB};
use crate::transfer::planner::{Extent, Need, Planner, plain};

impl Planner<'_> {
    /// Plans the offsets, and what they refer to. The first and the last offset are read if they are not known.
    pub(super) fn offsets(&mut self, node: usize, view: View, width: usize) -> Result<()> {
        let tree = self.tree;
        let slots = tree.slots(view.node);
        let nested = tree.nodes[view.node].n_children > 0;
        let reachable = nested && self.extent == Extent::Reachable;
        if view.length == 0 {
            if reachable {
                let slot = self.plan.nodes[node].first_slot as usize;
                self.ready(slot + 1, &[0; 8][..width]);
                return self.only_child(node, tree.child(view, 0));
            }
            return self.range(node, view, width, 0, 0);
        }
        if slots[1].is_null() {
            let path = tree.buffer_path(view.node, 1);
            return Err(Error::invalid(path, "is null but has rows"));
        }
        if reachable {
            return self.whole_range(node, view, width, Ok(tree.child(view, 0)));
        }
        let at = |row: usize| slots[1].address().offset(row * width);
        let (first, last) = (at(view.offset), at(view.offset + view.length));
        // Buffers of arrow-rs arrays may be longer than their rows need, so the offsets are always read.
        if self.readable {
            // SAFETY: there are `offset + length + 1` offsets, which was checked when the array was made; the host can read
            // them (`readable`), and they are ready (`plan_with` waited).
            let (first, last) = unsafe { (offset(first, width), offset(last, width)) };
            return self.range(node, view, width, first, last);
        }
        if tree.is_uncut(view) && !self.is_exact() {
            if nested {
                let child = tree.child(view, 0);
                return self.whole_range(node, view, width, Ok(child));
            }
            if let Some(bytes) = tree.bytes(view.node, 2) {
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
        view: View,
        width: usize,
        target: Result<View, usize>,
    ) -> Result<()> {
        let slots = self.tree.slots(view.node);
        let slot = self.plan.nodes[node].first_slot as usize;
        let bytes = (view.length + 1) * width;
        let from = slots[1].offset + view.offset * width;
        let copying = plain(&self.tree.nodes[view.node], view);
        self.plan.regions[slot + 1] = Region::new(slots[1].base, from, bytes, copying);
        match target {
            Ok(child) => self.only_child(node, child)?,
            Err(bytes) => self.bytes(slot + 2, view, &slots[2], 0, bytes),
        }
        Ok(())
    }

    fn only_child(&mut self, node: usize, child: View) -> Result<()> {
        self.begin_children(node, 1);
        self.node(child, None, node)
    }

    /// Adds offsets that start at 0, and what lies between `first` and `last`.
    pub(super) fn range(
        &mut self,
        node: usize,
        view: View,
        width: usize,
        first: i64,
        last: i64,
    ) -> Result<()> {
        let tree = self.tree;
        let slots = tree.slots(view.node);
        let slot = self.plan.nodes[node].first_slot as usize;
        let nested = tree.nodes[view.node].n_children > 0;
        if first < 0 || last < first {
            return Err(Error::invalid(
                tree.buffer_path(view.node, 1),
                format!("offsets go from {first} to {last}"),
            ));
        }
        if view.length == 0 {
            self.ready(slot + 1, &[0; 8][..width]);
        } else {
            let bytes = (view.length + 1) * width;
            let from = slots[1].offset + view.offset * width;
            let copying = match first {
                0 => plain(&tree.nodes[view.node], view),
                base => self.plan.fix(Fix::Offsets {
                    width: width as u8,
                    base,
                }),
            };
            self.plan.regions[slot + 1] = Region::new(slots[1].base, from, bytes, copying);
        }
        if nested {
            let child = tree.child(view, 0);
            if u64::try_from(last).unwrap_or(0) > child.length as u64 {
                return Err(Error::invalid(
                    tree.buffer_path(view.node, 1),
                    format!(
                        "offsets reach row {last} of a child of {} rows",
                        child.length
                    ),
                ));
            }
            let (first, rows) = (first as usize, (last - first) as usize);
            let cut = View {
                offset: child.offset + first,
                length: rows,
                validity_offset: child.validity_offset + first,
                ..child
            };
            return self.only_child(node, cut);
        }
        let at = || tree.buffer_path(view.node, 2);
        match tree.bytes(view.node, 2) {
            None => {
                check_size(tree, slots[2].address(), last, at)?;
            }
            Some(bytes) if last as usize > bytes => {
                let what = format!("offsets reach byte {last} of {bytes}");
                return Err(Error::invalid(at(), what));
            }
            Some(_) => {}
        }
        let (first, bytes) = (first as usize, (last - first) as usize);
        self.bytes(slot + 2, view, &slots[2], first, bytes);
        Ok(())
    }

    /// Sets a buffer to the `bytes` bytes from byte `first` on that offsets refer to. It is present even if it is empty,
    /// because some consumers reject a null pointer.
    fn bytes(&mut self, slot: usize, view: View, source: &Slot, first: usize, bytes: usize) {
        let copying = match source.bytes() {
            Some(all) if all == bytes => plain(&self.tree.nodes[view.node], view),
            _ => Copying::PLAIN,
        };
        self.plan.regions[slot] = match bytes {
            0 => Region::empty(SLAB),
            _ => Region::new(source.base, source.offset + first, bytes, copying),
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
