//! The walk of a plan: what each type's buffers and children are copied from.

use std::sync::Arc;

use arrow_buffer::BooleanBufferBuilder;
use arrow_schema::DataType;
use smallvec::SmallVec;

use crate::data::layout::{BufferKind, Nesting, check_rows, child_type};
use crate::data::node::{Buffers, Node, NodeBuffer, NullCount, View};
use crate::data::numbers::{check_size, int};
use crate::error::{Error, Result, bail};
use crate::transfer::plan::{Parts, Planner, Scope, is_whole, too_large};
use crate::transfer::region::{CopyRegion, DIRECT, Rewrite};

/// More bytes than any device has for a bitmap.
const MOST: u64 = 1 << 40;

impl<'a> Planner<'a> {
    /// Returns the node of type `of` that the rows of the parts become.
    pub(super) fn node(&mut self, of: &DataType, parts: &[View<'a>]) -> Result<Arc<Node>> {
        let with_rows: Parts<'a>;
        let mut parts = parts;
        if parts.len() > 1 {
            let some = parts.iter().copied().filter(|view| view.length > 0);
            with_rows = some.collect();
            parts = if with_rows.is_empty() {
                &parts[..1]
            } else {
                &with_rows
            };
        }
        let view = parts[0];
        let layout = view.layout();
        let mut rows = parts.iter().map(|view| view.length);
        let length = rows.try_fold(0usize, |all, rows| all.checked_add(rows));
        let length = length.ok_or_else(too_large)?;
        check_rows(length)?;
        let children = Vec::with_capacity(layout.n_children());
        let mut node = Node {
            // True once the transfer has completed.
            padded: true,
            ..Node::new(of.clone(), length, Buffers::new(), children)
        };
        if layout.is_null_type() {
            node.nulls.set(length);
        }
        if layout.has_validity() {
            self.validity(parts, &mut node)?;
        }
        // All runs are copied, with rows that the part does not refer to.
        let all_runs = matches!(parts, [one] if self.scope == Scope::Reachable || one.is_uncut());
        match layout.nesting {
            Nesting::Leaf if layout.variadic => self.views(parts, &mut node)?,
            Nesting::Leaf => match layout.buffers() {
                [_, BufferKind::Bits] => {
                    self.check_present(parts, 1)?;
                    let values = self.bits(1, parts, |k| Some(parts[k].offset))?;
                    node.buffers.push(values);
                }
                [_, BufferKind::Fixed { .. }] => {
                    node.buffers.push(self.values(parts, 1, |_| 0)?);
                }
                [_, BufferKind::Offsets { .. }, _] => self.ranges(parts, &mut node)?,
                _ => {}
            },
            Nesting::Ranges => self.ranges(parts, &mut node)?,
            Nesting::Dictionary => self.dictionary(parts, &mut node)?,
            Nesting::Anywhere => self.anywhere(parts, &mut node)?,
            Nesting::Runs if !all_runs => self.runs(parts, &mut node)?,
            Nesting::RowByRow | Nesting::Times(_) | Nesting::Runs => {
                if let Some(BufferKind::Fixed { .. }) = layout.buffers().first() {
                    // The type ids of a sparse union.
                    node.buffers.push(self.values(parts, 0, |_| 0)?);
                }
                for i in 0..layout.n_children() {
                    let rows: Parts<'a> = parts.iter().map(|view| view.child(i)).collect();
                    self.child(&rows, &mut node)?;
                }
                if layout.nesting == Nesting::Runs {
                    // All runs are copied, so the array keeps its offset.
                    (node.offset, node.validity_offset) = (view.offset, view.offset);
                }
            }
        }
        Ok(Arc::new(node))
    }

    /// Adds the next child of a node.
    pub(super) fn child(&mut self, rows: &[View<'a>], node: &mut Node) -> Result<()> {
        let of = child_type(&node.data_type, node.children.len()).unwrap_or(&DataType::Null);
        let child = self.node(of, rows)?;
        node.children.push(child);
        Ok(())
    }

    /// Returns buffer `i`, of values of one width for each row; `more(k)` is added to those of part `k`.
    pub(super) fn values(
        &mut self,
        parts: &[View<'a>],
        i: usize,
        more: impl Fn(usize) -> usize,
    ) -> Result<NodeBuffer> {
        let Some(BufferKind::Fixed { width, .. }) = parts[0].layout().buffers().get(i) else {
            return Ok(NodeBuffer::absent());
        };
        let (width, one) = (*width as usize, parts.len() == 1);
        if !one && width > 0 {
            self.check_present(parts, i)?;
        }
        for (k, view) in parts.iter().enumerate() {
            let buffer = &view.node.buffers[i];
            if !buffer.is_null() {
                let (from, bytes) = (view.offset * width, view.length.saturating_mul(width));
                let region = CopyRegion::of(buffer, from, bytes).padded(one && is_whole(*view));
                let rewrite = Rewrite::add(width, more(k) as i64);
                self.add(region.rewritten(rewrite))?;
            }
        }
        self.finish(self.to_device)
    }

    /// Refuses rows whose buffer `i` is missing.
    pub(super) fn check_present(&self, parts: &[View<'a>], i: usize) -> Result<()> {
        let lacks = |view: &&View<'_>| view.length > 0 && view.node.buffers[i].is_null();
        match parts.iter().find(lacks) {
            Some(view) => Err(Error::invalid(self.path(*view, i), "is null but has rows")),
            None => Ok(()),
        }
    }

    /// Adds the validity bitmap of a node, and its null count. Nulls are counted if the host can read the bitmaps, or if they must be known.
    fn validity(&mut self, parts: &[View<'a>], node: &mut Node) -> Result<()> {
        let counts = self.readable || self.scope == Scope::Compact;
        let nulls = parts.iter().map(|view| match counts {
            true => self.numbers.null_count(*view),
            false => view.null_count(),
        });
        let nulls: SmallVec<[_; 1]> = nulls.collect();
        let all: Option<usize> = nulls.iter().copied().sum();
        node.nulls = NullCount::from(all);
        node.buffers.push(match all {
            Some(0) => NodeBuffer::absent(),
            _ => self.bits(0, parts, |k| {
                (nulls[k] != Some(0)).then_some(parts[k].validity_offset)
            })?,
        });
        Ok(())
    }

    /// Returns buffer `i`, of a bit for each row; the first one of part `k` is bit `first(k)` of its buffer, or all are set. The host makes
    /// those that go to another place in their bytes, or have others in them.
    fn bits(
        &mut self,
        i: usize,
        parts: &[View<'a>],
        first: impl Fn(usize) -> Option<usize>,
    ) -> Result<NodeBuffer> {
        let rows: usize = parts.iter().map(|view| view.length).sum();
        if rows == 0 {
            return self.finish(self.to_device);
        }
        // Rows that take no memory may be more than there are bits anywhere.
        if rows.div_ceil(8) as u64 > MOST {
            return Err(too_large());
        }
        let mut start = 0;
        let mut made = BooleanBufferBuilder::new(0);
        for (k, view) in parts.iter().enumerate() {
            let (buffer, mut bits, first) = (&view.node.buffers[i], view.length, first(k));
            let starts_byte = start % 8 == 0;
            start += bits;
            if let (Some(mut first), true) = (first, starts_byte) {
                let whole = parts.len() == 1 && is_whole(*view);
                let in_place = first % 8 == 0;
                if in_place && (bits % 8 == 0 || whole) {
                    let region = CopyRegion::of(buffer, first / 8, bits.div_ceil(8));
                    self.add(region.padded(whole))?;
                    continue;
                }
                if start == rows {
                    // The last byte has bits after the last row; those before it are copied by the device.
                    let copies = self.to_device && (!self.readable || bits / 8 >= DIRECT);
                    if in_place && copies && bits > 8 {
                        self.add(CopyRegion::of(buffer, first / 8, bits / 8))?;
                        (first, bits) = (first + bits / 8 * 8, bits % 8);
                    }
                    let region = CopyRegion::of(buffer, first / 8, bits.div_ceil(8));
                    let skip = (first % 8) as u8;
                    self.add(region.rewritten(Rewrite::Bits { skip, bits }))?;
                    continue;
                }
            }
            match first {
                None => made.append_n(bits, true),
                Some(first) => {
                    let (at, skip) = (buffer.address().offset(first / 8), first % 8);
                    let bytes = self.numbers.read(at, (skip + bits).div_ceil(8), false);
                    if let Some(bytes) = bytes {
                        made.append_packed_range(skip..skip + bits, bytes);
                    }
                }
            }
            if start % 8 == 0 || start == rows {
                self.add_known(made.finish().into_inner())?;
            }
        }
        self.finish(true)
    }

    /// Adds the offsets, and what they refer to.
    fn ranges(&mut self, parts: &[View<'a>], node: &mut Node) -> Result<()> {
        self.check_present(parts, 1)?;
        let (view, one) = (parts[0], parts.len() == 1);
        let nested = !view.node.children.is_empty();
        let Some(BufferKind::Offsets { width }) = view.layout().buffers().get(1) else {
            return Ok(());
        };
        let width = usize::from(*width);
        // Offsets that are copied as they are, with everything that they can refer to. Buffers of arrow-rs arrays may be longer than
        // their rows need, so that the offsets of host memory are always read.
        let uncut = one && view.is_uncut() && self.scope != Scope::Compact && !self.readable;
        let whole = one && nested && self.scope == Scope::Reachable || uncut && view.length > 0;
        // Of each part the first and the last offset.
        let mut ends = SmallVec::<[(i64, i64); 1]>::new();
        for view in parts {
            let offsets = view.node.buffers[1].address().offset(view.offset * width);
            if whole && nested {
                ends.push((0, view.child(0).length as i64));
            } else if whole {
                let known = self.know_sizes(*view)?;
                let bytes = view.node.buffers[2].bytes().filter(|_| known);
                ends.extend(bytes.map(|bytes| (0, bytes as i64)));
            } else if view.length == 0 {
                ends.push((0, 0));
            } else {
                let read = |at| Some(int(self.numbers.read(at, width, false)?, width));
                let (first, last) = (read(offsets), read(offsets.offset(view.length * width)));
                ends.extend(first.zip(last));
            }
        }
        if ends.len() < parts.len() {
            return Ok(());
        }
        let mut items = 0usize;
        for (k, (view, (first, last))) in parts.iter().zip(ends.iter().copied()).enumerate() {
            self.check_ends(*view, first, last)?;
            // The first offset of a part is the last one of the part before.
            let skip = usize::from(k > 0);
            let (from, n) = (view.offset + skip, view.length + 1 - skip);
            let region = CopyRegion::of(&view.node.buffers[1], from * width, n * width);
            let region = region.padded(one && is_whole(*view));
            let rewrite = Rewrite::add(width, (items as i64).wrapping_sub(first));
            match view.length {
                0 => self.add_known(vec![0u8; width])?,
                _ => self.add(region.rewritten(rewrite))?,
            }
            items = items.saturating_add((last - first) as usize);
        }
        if width == 4 && !one {
            let what = if nested { "items" } else { "bytes" };
            let instead = "concatenate fewer arrays, or cast them to the large type";
            self.check_most(view, items, i32::MAX as u64, what, instead)?;
        }
        node.buffers.push(self.finish(true)?);
        let targets = parts.iter().zip(ends);
        let targets = targets.map(|(view, (a, b))| (*view, a as usize, (b - a) as usize));
        if nested {
            let rows = targets.map(|(view, first, rows)| view.child(0).slice(first, rows));
            let rows: Parts<'a> = rows.collect();
            self.child(&rows, node)?;
        } else {
            // They are present even if they are empty, because some consumers reject a null pointer.
            for (view, first, bytes) in targets {
                let values = &view.node.buffers[2];
                let whole = one && values.bytes() == Some(bytes) && is_whole(view);
                self.add(CopyRegion::of(values, first, bytes).padded(whole))?;
            }
            node.buffers.push(self.finish(true)?);
        }
        Ok(())
    }

    /// Refuses offsets that are not in order, and one beyond what it refers to.
    fn check_ends(&self, view: View<'_>, first: i64, last: i64) -> Result<()> {
        let refuse = |i, what| Err(Error::invalid(self.path(view, i), what));
        if first < 0 || last < first {
            return refuse(1, format!("offsets go from {first} to {last}"));
        }
        if let Some(child) = view.node.children.first() {
            let rows = child.length;
            return match last as u64 > rows as u64 {
                true => refuse(
                    1,
                    format!("offsets reach row {last} of a child of {rows} rows"),
                ),
                false => Ok(()),
            };
        }
        let values = &view.node.buffers[2];
        match values.bytes() {
            Some(bytes) if last as u64 > bytes as u64 => {
                refuse(2, format!("offsets reach byte {last} of {bytes}"))
            }
            Some(_) => Ok(()),
            None => {
                let at = || self.path(view, 2);
                check_size(self.device, values.address(), last, at).map(drop)
            }
        }
    }

    /// Refuses more than `most` of `what`, which the integers of the type cannot express, in the result of several arrays.
    pub(super) fn check_most(
        &self,
        view: View<'_>,
        n: usize,
        most: u64,
        what: &str,
        instead: &str,
    ) -> Result<()> {
        if n as u64 <= most {
            return Ok(());
        }
        let (device, path, of) = (self.device, self.node_path(view), &view.node.data_type);
        bail!(
            "concat on {device}: {path}, of type {of}, would have {n} {what}, at most {most} are possible: {instead}"
        )
    }
}
