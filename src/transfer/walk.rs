//! The walk of a plan: what each type's buffers and children are copied from.

use std::sync::Arc;

use arrow_schema::DataType;
use smallvec::SmallVec;

use crate::data::layout::{BufferKind, Nesting, check_rows, child_type};
use crate::data::node::{Buffers, Node, NodeBuffer, NullCount, View};
use crate::data::resolve::{check_size, count_bits};
use crate::device::DevicePtr;
use crate::error::{Error, Result};
use crate::transfer::plan::{
    From, Parts, Planner, Scope, is_whole, of_buffer, too_large, unchanged,
};
use crate::transfer::region::{CopyRegion, DIRECT, Rewrite};

/// More bytes than any device has for a bitmap.
const MOST: u64 = 1 << 40;

/// Bits of one array that become a part of a bitmap.
#[derive(Clone, Copy)]
struct Run<'a> {
    view: View<'a>,
    /// The first one in the buffer; `None` if all bits are set.
    first: Option<usize>,
    /// Where the nulls are counted, if they are not known.
    counts: Option<u32>,
}

type Runs<'a> = SmallVec<[Run<'a>; 1]>;

impl<'a> Planner<'a> {
    /// Returns the node of type `of` that the rows of the parts become; `nulls` is the null count, if the caller knows it.
    pub(super) fn node(
        &mut self,
        of: &DataType,
        parts: &[View<'a>],
        nulls: Option<usize>,
    ) -> Result<Arc<Node>> {
        let with_rows: Parts<'a>;
        let parts = match parts {
            [_] => parts,
            _ => {
                let views = parts.iter().copied().filter(|view| view.length > 0);
                with_rows = views.collect();
                if with_rows.is_empty() {
                    &parts[..1]
                } else {
                    &with_rows
                }
            }
        };
        let view = parts[0];
        let layout = view.layout();
        let rows = parts
            .iter()
            .try_fold(0usize, |all, view| all.checked_add(view.length));
        let length = rows.ok_or_else(too_large)?;
        check_rows(length)?;
        let mut offset = 0;
        let (mut buffers, mut children) = (Buffers::new(), Vec::new());
        let nulls = match layout.has_validity() {
            true => {
                let (bitmap, nulls) = self.validity(parts, nulls)?;
                buffers.push(bitmap);
                nulls
            }
            false => Some(if layout.is_null_type() { length } else { 0 }),
        };
        match layout.nesting {
            Nesting::Leaf if layout.variadic => self.views(parts, &mut buffers)?,
            Nesting::Leaf => match layout.buffers() {
                [_, BufferKind::Bits] => buffers.push(self.bit_values(parts)?),
                [_, BufferKind::Fixed { .. }] => {
                    buffers.push(self.values(parts, 1, |_| Rewrite::None)?);
                }
                [_, BufferKind::Offsets { .. }, _] => {
                    self.ranges(of, parts, &mut buffers, &mut children)?;
                }
                _ => {}
            },
            Nesting::Ranges => self.ranges(of, parts, &mut buffers, &mut children)?,
            Nesting::Dictionary => self.dictionary(of, parts, &mut buffers, &mut children)?,
            Nesting::Anywhere => self.anywhere(of, parts, &mut buffers, &mut children)?,
            Nesting::Runs if !self.takes_all_runs(parts) => {
                self.runs(of, parts, &mut children)?;
            }
            Nesting::RowByRow | Nesting::Times(_) | Nesting::Runs => {
                if let Some(BufferKind::Fixed { .. }) = layout.buffers().first() {
                    // The type ids of a sparse union.
                    buffers.push(self.values(parts, 0, |_| Rewrite::None)?);
                }
                for i in 0..layout.n_children() {
                    let rows: Parts<'a> = parts.iter().map(|view| view.child(i)).collect();
                    children.push(self.child(of, i, &rows)?);
                }
                if layout.nesting == Nesting::Runs {
                    // All runs are copied, so the array keeps its offset.
                    offset = view.offset;
                }
            }
        }
        Ok(Arc::new(Node {
            data_type: of.clone(),
            layout: *layout,
            length,
            cut: false,
            // True once the transfer has completed.
            padded: true,
            offset,
            validity_offset: offset,
            nulls: NullCount::from(nulls),
            buffers,
            children,
        }))
    }

    /// Returns child `i` of a node of type `of`.
    pub(super) fn child(
        &mut self,
        of: &DataType,
        i: usize,
        parts: &[View<'a>],
    ) -> Result<Arc<Node>> {
        let of = child_type(of, i).unwrap_or(&DataType::Null);
        self.node(of, parts, None)
    }

    /// Whether all runs are copied, with rows that the parts do not refer to.
    fn takes_all_runs(&self, parts: &[View<'a>]) -> bool {
        matches!(parts, [one] if self.scope == Scope::Reachable || one.is_uncut())
    }

    /// Returns buffer `i`, of values of one width for each row; part `k` is changed by `rewrite(k)`.
    pub(super) fn values(
        &mut self,
        parts: &[View<'a>],
        i: usize,
        rewrite: impl Fn(usize) -> Rewrite,
    ) -> Result<NodeBuffer> {
        let Some(BufferKind::Fixed { width, .. }) = parts[0].layout().buffers().get(i) else {
            return Ok(NodeBuffer::absent());
        };
        let (width, one) = (*width as usize, parts.len() == 1);
        if !one && width > 0 {
            self.check_present(parts, i)?;
        }
        let present = parts
            .iter()
            .enumerate()
            .filter(|(_, view)| !view.node.buffers[i].is_null());
        let regions = present.map(|(k, view)| {
            let (from, bytes) = (view.offset * width, view.length.saturating_mul(width));
            let whole = one && is_whole(*view);
            let (base, region) = unchanged(&view.node.buffers[i], from, bytes, whole);
            (base, region.rewritten(rewrite(k)))
        });
        self.buffer(self.to_device, regions)
    }

    /// Refuses rows whose buffer `i` is missing.
    pub(super) fn check_present(&self, parts: &[View<'a>], i: usize) -> Result<()> {
        let lacks = |view: &&View<'_>| view.length > 0 && view.node.buffers[i].is_null();
        match parts.iter().find(lacks) {
            Some(view) => Err(Error::invalid(self.path(*view, i), "is null but has rows")),
            None => Ok(()),
        }
    }

    /// Returns the validity bitmap of a node and its null count, which is `nulls` if the caller knows it.
    fn validity(
        &mut self,
        parts: &[View<'a>],
        nulls: Option<usize>,
    ) -> Result<(NodeBuffer, Option<usize>)> {
        let (mut known, mut unknown, mut runs) = (0, false, Runs::new());
        for view in parts {
            let nulls = self.nulls(*view, nulls);
            let counts = (nulls.is_none() && self.is_exact()).then_some(self.counts.len() as u32);
            unknown |= nulls.is_none();
            known += nulls.unwrap_or(0);
            runs.push(Run {
                view: *view,
                first: (nulls != Some(0)).then_some(view.validity_offset),
                counts,
            });
        }
        if !unknown && known == 0 {
            return Ok((NodeBuffer::absent(), Some(0)));
        }
        if unknown && self.is_exact() {
            self.counts.push(known);
        }
        Ok((self.bits(0, &runs)?, (!unknown).then_some(known)))
    }

    /// The nulls of rows, which are counted if the host can read the bitmap.
    fn nulls(&mut self, view: View<'a>, known: Option<usize>) -> Option<usize> {
        let Some(bitmap) = view.node.bitmap() else {
            return Some(0);
        };
        if let Some(nulls) = known.or_else(|| view.null_count()) {
            return Some(nulls);
        }
        if !self.readable {
            return None;
        }
        let (skip, bits) = (view.validity_offset % 8, view.length);
        let bytes = (skip + bits).div_ceil(8);
        let bitmap = self.read(
            bitmap.address().offset(view.validity_offset / 8),
            bytes,
            false,
        )?;
        Some(bits - count_bits(bitmap, skip, bits))
    }

    /// Returns buffer 1, of a bit for each row.
    fn bit_values(&mut self, parts: &[View<'a>]) -> Result<NodeBuffer> {
        let runs: Runs<'a> = parts.iter().map(|view| Run::of(*view)).collect();
        match parts {
            [one] if one.length == 0 || one.node.buffers[1].is_null() => {
                self.buffer(self.to_device, [])
            }
            _ => {
                self.check_present(parts, 1)?;
                self.bits(1, &runs)
            }
        }
    }

    /// Returns buffer `i`, of these bits. The host makes those that go to another place in their bytes, or have others in them.
    fn bits(&mut self, i: usize, runs: &[Run<'a>]) -> Result<NodeBuffer> {
        let rows: usize = runs.iter().map(|run| run.view.length).sum();
        // Rows that take no memory may be more than there are bits anywhere.
        if rows.div_ceil(8) as u64 > MOST {
            return Err(too_large());
        }
        let (mut start, mut regions) = (0, SmallVec::<[From; 2]>::new());
        for Run {
            view,
            first,
            counts,
        } in runs.iter().copied()
        {
            let (mut bits, at, skip) = (view.length, start % 8, first.unwrap_or(0) % 8);
            start += bits;
            let of = |byte: usize, bits: usize| match first {
                Some(first) => of_buffer(&view.node.buffers[i], first / 8 + byte, bits.div_ceil(8)),
                None => (
                    DevicePtr::NULL,
                    CopyRegion::new(DevicePtr::NULL, bits.div_ceil(8)),
                ),
            };
            let in_place = first.is_some() && counts.is_none() && at == 0 && skip == 0;
            if in_place && (bits % 8 == 0 || runs.len() == 1 && is_whole(view)) {
                let (base, region) = of(0, bits);
                regions.push((base, region.padded(runs.len() == 1 && is_whole(view))));
                continue;
            }
            // The last byte has bits after the last row; those before it are copied by the device.
            let copies = self.to_device && (!self.readable || bits / 8 >= DIRECT);
            let mut done = 0;
            if in_place && copies && start == rows && bits > 8 {
                regions.push(of(0, bits / 8 * 8));
                (done, bits) = (bits / 8, bits % 8);
            }
            let (base, region) = of(done, at + bits);
            regions.push((
                base,
                region.rewritten(Rewrite::Bits {
                    skip: skip as u8,
                    at: at as u8,
                    bits,
                    counts,
                }),
            ));
        }
        self.buffer(true, regions)
    }

    /// Adds the offsets, and what they refer to, where the first and the last one must be known.
    fn ranges(
        &mut self,
        of: &DataType,
        parts: &[View<'a>],
        buffers: &mut Buffers,
        children: &mut Vec<Arc<Node>>,
    ) -> Result<()> {
        let (view, width) = (parts[0], offset_width(parts[0]));
        let nested = !view.node.children.is_empty();
        let reachable = nested && self.scope == Scope::Reachable;
        self.check_present(parts, 1)?;
        if let [_] = parts {
            // Buffers of arrow-rs arrays may be longer than their rows need, so that the offsets of host memory are always read.
            let whole = view.is_uncut() && !self.is_exact() && !self.readable;
            if view.length > 0 && (reachable || whole) {
                return self.whole_range(of, view, buffers, children);
            }
        }
        // Of each part the first and the last offset.
        let mut ends = SmallVec::<[(i64, i64); 1]>::new();
        for view in parts.iter().filter(|view| view.length > 0) {
            let offsets = view.node.buffers[1].address();
            let at = |row: usize| offsets.offset((view.offset + row) * width);
            let (first, last) = (
                self.read_int(at(0), width),
                self.read_int(at(view.length), width),
            );
            ends.extend(first.zip(last));
        }
        if view.length == 0 {
            ends.push((0, 0));
        } else if ends.len() < parts.len() {
            return Ok(());
        }
        let mut items = 0usize;
        let mut offsets = SmallVec::<[From; 1]>::new();
        for (view, (first, last)) in parts.iter().zip(ends.iter().copied()) {
            self.check_ends(*view, first, last, nested)?;
            // The first offset of a part is the last one of the part before.
            let skip = usize::from(!offsets.is_empty());
            let (from, n) = (view.offset + skip, view.length + 1 - skip);
            if view.length > 0 {
                let whole = parts.len() == 1 && is_whole(*view);
                let (base, region) =
                    unchanged(&view.node.buffers[1], from * width, n * width, whole);
                offsets.push(match (items as i64).wrapping_sub(first) {
                    0 => (base, region),
                    n => (
                        base,
                        region.rewritten(Rewrite::Add {
                            width: width as u8,
                            n,
                        }),
                    ),
                });
            }
            items = items.saturating_add((last - first) as usize);
        }
        if width == 4 && parts.len() > 1 {
            let what = if nested { "items" } else { "bytes" };
            let instead = "concatenate fewer arrays, or cast them to the large type";
            self.check_most(view, items, i32::MAX as u64, what, instead)?;
        }
        if offsets.is_empty() {
            let zero = self.known(vec![0; width]);
            offsets.push(zero);
        }
        buffers.push(self.buffer(true, offsets)?);
        let targets = parts
            .iter()
            .zip(ends)
            .map(|(view, (first, last))| (*view, first as usize, (last - first) as usize));
        if nested {
            let rows: Parts<'a> = match reachable {
                true => parts.iter().map(|view| view.child(0)).collect(),
                false => targets
                    .map(|(view, first, rows)| view.child(0).slice(first, rows))
                    .collect(),
            };
            children.push(self.child(of, 0, &rows)?);
            return Ok(());
        }
        // They are present even if they are empty, because some consumers reject a null pointer.
        let one = parts.len() == 1;
        let regions = targets.map(|(view, first, bytes)| {
            let buffer = &view.node.buffers[2];
            let whole = one && buffer.bytes() == Some(bytes) && is_whole(view);
            unchanged(buffer, first, bytes, whole)
        });
        buffers.push(self.buffer(true, regions)?);
        Ok(())
    }

    /// Adds the offsets of one array unchanged, and everything that they can refer to.
    fn whole_range(
        &mut self,
        of: &DataType,
        view: View<'a>,
        buffers: &mut Buffers,
        children: &mut Vec<Arc<Node>>,
    ) -> Result<()> {
        let (sources, width, whole) = (&view.node.buffers, offset_width(view), is_whole(view));
        let mut bytes = None;
        if view.node.children.is_empty() {
            bytes = sources[2].bytes();
            if bytes.is_none() {
                let last = sources[1]
                    .address()
                    .offset((view.offset + view.length) * width);
                let Some(last) = self.read_int(last, width) else {
                    return Ok(());
                };
                bytes = Some(self.keep_size(view, 2, last)?);
            }
        }
        let offsets = (view.offset * width, (view.length + 1) * width);
        let offsets = unchanged(&sources[1], offsets.0, offsets.1, whole);
        buffers.push(self.buffer(true, [offsets])?);
        match bytes {
            Some(bytes) => {
                let values = unchanged(&sources[2], 0, bytes, whole);
                buffers.push(self.buffer(true, [values])?);
            }
            None => children.push(self.child(of, 0, &[view.child(0)])?),
        }
        Ok(())
    }

    /// Refuses offsets that are not in order, and one beyond what it refers to.
    fn check_ends(&self, view: View<'_>, first: i64, last: i64, nested: bool) -> Result<()> {
        if first < 0 || last < first {
            return Err(Error::invalid(
                self.path(view, 1),
                format!("offsets go from {first} to {last}"),
            ));
        }
        if nested {
            let rows = view.child(0).length;
            return match last as u64 > rows as u64 {
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
            None => check_size(self.device(), buffer.address(), last, at).map(drop),
            Some(bytes) if last as usize > bytes => {
                let what = format!("offsets reach byte {last} of {bytes}");
                Err(Error::invalid(at(), what))
            }
            Some(_) => Ok(()),
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
        Err(Error::argument(format!(
            "concat on {}: {}, of type {}, would have {n} {what}, at most {most} are possible: {instead}",
            self.device(),
            self.node_path(view),
            view.node.data_type
        )))
    }
}

impl<'a> Run<'a> {
    /// The rows of a boolean array.
    fn of(view: View<'a>) -> Self {
        Self {
            view,
            first: Some(view.offset),
            counts: None,
        }
    }
}

/// The bytes of one offset.
fn offset_width(view: View<'_>) -> usize {
    match view.layout().buffers().get(1) {
        Some(BufferKind::Offsets { width }) => usize::from(*width),
        _ => 8,
    }
}
