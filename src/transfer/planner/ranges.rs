//! Binary, text, list and map arrays.

use crate::data::gather::Request;
use crate::data::sizes::{Sizes, check_size};
use crate::data::tree::{Slot, View};
use crate::device::DevicePtr;
use crate::error::{Error, Result};
use crate::transfer::fix::Fix;
use crate::transfer::plan::{Content, Source};
use crate::transfer::planner::{Extent, Need, Planner, as_it_is};

impl Planner<'_> {
    /// Adds offsets and what they point to. The ends of the range are read first, unless they are known.
    pub(super) fn offsets(&mut self, node: usize, view: View, width: usize) -> Result<()> {
        let tree = self.tree;
        let slots = tree.slots(view.node);
        let nested = tree.nodes[view.node].n_children > 0;
        let reachable = nested && self.extent == Extent::Reachable;
        if view.length == 0 {
            if reachable {
                self.no_offsets(node, width);
                return self.only_child(node, tree.child(view, 0));
            }
            return self.range(node, view, width, 0, 0);
        }
        if slots[1].is_null() {
            let path = tree.buffer_path(view.node, 1);
            return Err(Error::invalid(path, "is null, but the array has rows"));
        }
        if reachable {
            return self.whole_range(node, view, width);
        }
        let at = |row: usize| slots[1].address().offset(row * width);
        let (first, last) = (at(view.offset), at(view.offset + view.length));
        // Buffers of arrow-rs arrays may be longer than their rows need, so the offsets themselves are read.
        if self.readable {
            // SAFETY: there are `offset + length + 1` offsets, which was checked when the array was made; the host can read
            // them (`readable`), and they are ready (`plan_with` waited).
            let (first, last) = unsafe { (offset(first, width), offset(last, width)) };
            return self.range(node, view, width, first, last);
        }
        if tree.is_uncut(view) && self.extent != Extent::Compact {
            if let Some(sizes) = Sizes::of(tree, view.node) {
                self.wait_for(node, view, Need::Sizes(sizes), &[sizes.request]);
                return Ok(());
            }
            return self.whole_range(node, view, width);
        }
        let request = |address| Request {
            address,
            bytes: width,
            on_host: false,
        };
        self.wait_for(node, view, Need::Ends, &[first, last].map(request));
        Ok(())
    }

    /// Adds offsets as they are, and all that they can point to: all rows of a child, or all bytes.
    fn whole_range(&mut self, node: usize, view: View, width: usize) -> Result<()> {
        let tree = self.tree;
        let slots = tree.slots(view.node);
        let content = as_it_is(&tree.nodes[view.node], view);
        self.offsets_from(node, view, width, content);
        if tree.nodes[view.node].n_children > 0 {
            return self.only_child(node, tree.child(view, 0));
        }
        self.bytes(node, view, &slots[2], 0, slots[2].bytes().unwrap_or(0));
        Ok(())
    }

    /// Adds the offsets of a view's rows, and the one after them.
    fn offsets_from(&mut self, node: usize, view: View, width: usize, content: Content) {
        let slot = self.draft.nodes[node].first_slot as usize;
        let source = &self.tree.slots(view.node)[1];
        let bytes = (view.length + 1) * width;
        self.draft.buffers[slot + 1] = Source::of(source, view.offset * width, bytes, content);
    }

    /// Adds the single offset of an array without rows.
    fn no_offsets(&mut self, node: usize, width: usize) {
        let slot = self.draft.nodes[node].first_slot as usize;
        self.draft.buffers[slot + 1] = self.draft.ready(&[0; 8][..width]);
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
        let nested = tree.nodes[view.node].n_children > 0;
        if first < 0 || last < first {
            return Err(Error::invalid(
                tree.buffer_path(view.node, 1),
                format!("offsets go from {first} to {last}"),
            ));
        }
        if view.length == 0 {
            self.no_offsets(node, width);
        } else {
            let content = match first {
                0 => as_it_is(&tree.nodes[view.node], view),
                base => self.draft.fix(Fix::Offsets {
                    width: width as u8,
                    base,
                }),
            };
            self.offsets_from(node, view, width, content);
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
        match slots[2].bytes() {
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
        self.bytes(node, view, &slots[2], first, bytes);
        Ok(())
    }

    /// Adds what offsets point to: `bytes` bytes from byte `first` on. If there are none, the buffer is there all the
    /// same: some consumers do not accept a null pointer.
    fn bytes(&mut self, node: usize, view: View, source: &Slot, first: usize, bytes: usize) {
        let content = match source.bytes() {
            Some(all) if all == bytes => as_it_is(&self.tree.nodes[view.node], view),
            _ => Content::Plain,
        };
        let slot = self.draft.nodes[node].first_slot as usize;
        self.draft.buffers[slot + 2] = match bytes {
            0 => Source::EMPTY,
            _ => Source::of(source, first, bytes, content),
        };
    }
}

/// Reads an offset of `width` bytes.
///
/// # Safety
/// There are `width` bytes (4 or 8) of readable host memory at `at`; it need not be aligned.
unsafe fn offset(at: DevicePtr, width: usize) -> i64 {
    let at = at.as_ptr().cast_const();
    // SAFETY: the caller guarantees `width` readable bytes at `at`, and unaligned reads need no alignment.
    unsafe {
        match width {
            4 => i64::from(at.cast::<i32>().read_unaligned()),
            _ => at.cast::<i64>().read_unaligned(),
        }
    }
}
