//! Merges the plans of several arrays of one type into one.

mod shared;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::gather::{int, push_int};
use crate::data::layout::{BufferKind, Layout, Nesting, check_rows, child_type};
use crate::data::node::NullCount;
use crate::device::{ALIGNMENT, Device, DevicePtr};
use crate::error::{Error, Result};
use crate::transfer::concat::bits::{Segment, pieces};
use crate::transfer::fix::{Fix, Piece};
use crate::transfer::plan::{Plan, PlanNode, SLAB, too_large};
use crate::transfer::staged::{Content, Rewrite, STAGED, Straight, Task};

/// What a concatenation writes, and the nodes and buffers of its result.
pub(super) struct Merged {
    pub(super) nodes: Vec<PlanNode>,
    /// Where in the slab each buffer is; `None` if it is missing.
    pub(super) buffers: Vec<Option<Range<usize>>>,
    pub(super) content: Content,
    /// What [`Fix::Ready`] refers to.
    pub(super) ready: Vec<u8>,
    /// Length of the slab in bytes, a multiple of 64.
    pub(super) bytes: usize,
}

/// More bytes than any device has for a bitmap.
const MOST_BITMAP: u64 = 1 << 40;

/// Merges plans that were made with [`Extent::Concat`](crate::transfer::Extent) for arrays of type `root` on `device`.
pub(super) fn merge(
    root: &DataType,
    device: &Device,
    plans: &[Plan],
    to_device: bool,
) -> Result<Merged> {
    let mut merger = Merger {
        root,
        device,
        plans,
        nothing: to_device.then_some(0..0),
        merged: Merged {
            nodes: vec![placeholder(0)],
            buffers: Vec::new(),
            content: Content::default(),
            ready: Vec::new(),
            bytes: 0,
        },
        later: VecDeque::new(),
    };
    merger.later.push_back(Later {
        at: 0,
        data_type: root,
        parts: (0..plans.len())
            .map(|plan| Part { plan, node: 0 })
            .collect(),
        run_starts: None,
    });
    while let Some(later) = merger.later.pop_front() {
        merger.node(later)?;
    }
    Ok(merger.merged)
}

/// Room for a child of the node at `parent`, which is filled in later.
fn placeholder(parent: usize) -> PlanNode {
    PlanNode::new(Layout::of(&DataType::Null), 0, parent, 0)
}

/// A node of one of the plans.
#[derive(Clone, Copy, Debug)]
struct Part {
    plan: usize,
    node: usize,
}

/// A node of the result that is still to be made.
struct Later<'a> {
    at: usize,
    data_type: &'a DataType,
    /// What it is made of.
    parts: Vec<Part>,
    /// For run ends: how many rows come before those of each part.
    run_starts: Option<Vec<usize>>,
}

/// What is done with the values of a part.
enum Change {
    None,
    /// The number is added to each value.
    Add(usize),
    /// Views whose data buffer `i` becomes this element `i`.
    Views(Arc<[u32]>),
    /// Dense union offsets, to which the start of their type id's child is added.
    Union(Arc<[i32; 128]>),
}

struct Merger<'a> {
    root: &'a DataType,
    device: &'a Device,
    plans: &'a [Plan],
    /// Where buffers without bytes are: on the host they are missing; see the planner.
    nothing: Option<Range<usize>>,
    merged: Merged,
    later: VecDeque<Later<'a>>,
}

impl<'a> Merger<'a> {
    fn node_of(&self, part: Part) -> &'a PlanNode {
        &self.plans[part.plan].nodes[part.node]
    }

    fn child(&self, part: Part, i: usize) -> Part {
        let node = self.node_of(part).first_child + i;
        Part { node, ..part }
    }

    /// The number of rows of each part before the others, and of all.
    fn starts(&self, parts: &[Part]) -> Result<(Vec<usize>, usize)> {
        sums(parts.iter().map(|part| self.node_of(*part).length))
    }

    /// Buffer `i` of a part, if it has bytes.
    fn piece(&self, part: Part, i: usize) -> Option<Piece> {
        self.plans[part.plan].piece(self.node_of(part), i)
    }

    /// As [`piece`](Self::piece), for a buffer that rows need.
    fn needed(&self, at: usize, part: Part, i: usize) -> Result<Piece> {
        let path = || format!("{}.buffers[{i}]", self.path(at));
        let piece = self.piece(part, i);
        piece.ok_or_else(|| Error::invalid(path(), "is null but has rows"))
    }

    /// The path of a node of the result.
    #[cold]
    fn path(&self, at: usize) -> String {
        if at == 0 {
            return "array".into();
        }
        let parent = self.merged.nodes[at].parent;
        let path = self.path(parent);
        match self.type_of(parent) {
            DataType::Dictionary(_, _) => format!("{path}.dictionary"),
            _ => format!(
                "{path}.children[{}]",
                at - self.merged.nodes[parent].first_child
            ),
        }
    }

    /// Refuses more than `most` of `what`, which the type's integers cannot express.
    fn check_most(&self, at: usize, n: usize, most: u64, what: &str, instead: &str) -> Result<()> {
        if n as u64 <= most {
            return Ok(());
        }
        Err(Error::argument(format!(
            "concat on {}: {}, of type {}, would have {n} {what}, at most {most} are possible: {instead}",
            self.device,
            self.path(at),
            self.type_of(at)
        )))
    }

    /// The type of a node of the result.
    #[cold]
    fn type_of(&self, at: usize) -> &'a DataType {
        if at == 0 {
            return self.root;
        }
        let parent = self.merged.nodes[at].parent;
        let i = at - self.merged.nodes[parent].first_child;
        child_type(self.type_of(parent), i).unwrap_or(&DataType::Null)
    }

    /// Makes a node, with its buffers; its children come later.
    fn node(&mut self, later: Later<'a>) -> Result<()> {
        let Later {
            at,
            data_type,
            parts,
            run_starts,
        } = later;
        let layout = Layout::of(data_type);
        let (_, length) = self.starts(&parts)?;
        check_rows(length)?;
        // Parts without rows contribute nothing.
        let parts: Vec<_> = match &run_starts {
            Some(_) => parts,
            None => {
                let parts = parts.into_iter();
                parts
                    .filter(|part| self.node_of(*part).length > 0)
                    .collect()
            }
        };
        let known = parts
            .iter()
            .filter_map(|part| self.node_of(*part).nulls.get());
        let nulls = match layout.is_null_type() {
            true => length,
            false => known.sum(),
        };
        let first = self.merged.buffers.len();
        let parent = self.merged.nodes[at].parent;
        self.merged.nodes[at] = PlanNode {
            nulls: NullCount::known(nulls),
            ..PlanNode::new(layout, length, parent, first)
        };
        if let Some(starts) = run_starts {
            self.merged.buffers.push(None);
            self.run_ends(at, data_type, &parts, &starts, length)?;
        } else {
            match layout.nesting {
                Nesting::Leaf if layout.variadic => self.views(at, &parts, length)?,
                Nesting::Leaf => self.leaf(at, layout.buffers(), &parts, length)?,
                Nesting::RowByRow | Nesting::Times(_) => {
                    self.leaf(at, layout.buffers(), &parts, length)?;
                    let n = layout.n_children();
                    let children = (0..n).map(|i| self.children_of(&parts, i)).collect();
                    self.children(at, data_type, children);
                }
                Nesting::Ranges => {
                    let children = self.children_of(&parts, 0);
                    self.validity(at, &parts, length)?;
                    let (starts, items) = self.starts(&children)?;
                    self.offsets(at, &layout, &parts, length, &starts, items)?;
                    self.children(at, data_type, vec![children]);
                }
                Nesting::Dictionary => self.dictionary(at, data_type, &layout, &parts, length)?,
                Nesting::Anywhere => self.anywhere(at, data_type, &layout, &parts, length)?,
                Nesting::Runs => {
                    let (starts, _) = self.starts(&parts)?;
                    let ends = self.children_of(&parts, 0);
                    let values = self.children_of(&parts, 1);
                    self.children(at, data_type, vec![ends, values]);
                    let ends = self.later.len() - 2;
                    self.later[ends].run_starts = Some(starts);
                }
            }
        }
        self.merged.nodes[at].regions.end = self.merged.buffers.len();
        Ok(())
    }

    fn children_of(&self, parts: &[Part], i: usize) -> Vec<Part> {
        parts.iter().map(|part| self.child(*part, i)).collect()
    }

    /// Makes room for the children of a node, which are made later.
    fn children(&mut self, at: usize, data_type: &'a DataType, children: Vec<Vec<Part>>) {
        let first = self.merged.nodes.len();
        self.merged.nodes[at].first_child = first;
        self.merged.nodes[at].n_children = children.len();
        for (i, parts) in children.into_iter().enumerate() {
            self.merged.nodes.push(placeholder(at));
            self.later.push_back(Later {
                at: first + i,
                data_type: child_type(data_type, i).unwrap_or(&DataType::Null),
                parts,
                run_starts: None,
            });
        }
    }

    /// Ends the buffer of `bytes` bytes that starts where the slab ends so far.
    fn close(&mut self, bytes: usize) -> Result<()> {
        let start = self.merged.bytes;
        let fits = |n: &usize| isize::try_from(*n).is_ok();
        let end = start.checked_add(bytes).filter(fits);
        let end = end.ok_or_else(too_large)?;
        let padded = end.next_multiple_of(ALIGNMENT);
        let content = &mut self.merged.content;
        if padded > end {
            let last = content.tasks.last_mut();
            match last.filter(|task| task.dst + task.bytes == end) {
                Some(task) => task.zeros = padded - end,
                None => content.zeros.push((end, padded - end)),
            }
        }
        self.merged.buffers.push(Some(start..end));
        self.merged.bytes = padded;
        Ok(())
    }

    /// Adds a buffer without bytes.
    fn nothing(&mut self) {
        self.merged.buffers.push(self.nothing.clone());
    }

    fn straight(&mut self, src: DevicePtr, dst: usize, bytes: usize) {
        if bytes > 0 {
            let straight = Straight { src, dst, bytes };
            self.merged.content.straight.push(straight);
        }
    }

    /// Adds bytes that the host makes of those at `src`.
    fn fixed(&mut self, src: DevicePtr, dst: usize, bytes: usize, fix: Fix) {
        let piece = Piece {
            src,
            dst,
            dst_bytes: bytes,
            fix,
        };
        let content = &mut self.merged.content;
        let first = content.tasks.len();
        content.piece(&piece, 0);
        // Others may follow: `close` adds the padding.
        content.tasks[first..]
            .iter_mut()
            .for_each(|task| task.zeros = 0);
    }

    /// Adds bytes without a source.
    fn ready(&mut self, dst: usize, bytes: &[u8]) {
        let fix = Fix::Ready(self.merged.ready.len());
        self.merged.ready.extend_from_slice(bytes);
        self.fixed(SLAB, dst, bytes.len(), fix);
    }

    /// Adds the buffers that follow from the type alone.
    fn leaf(
        &mut self,
        at: usize,
        kinds: &[BufferKind],
        parts: &[Part],
        length: usize,
    ) -> Result<()> {
        for (i, kind) in kinds.iter().enumerate() {
            match kind {
                BufferKind::Validity => self.validity(at, parts, length)?,
                BufferKind::Bits => self.bits(at, i, parts, length)?,
                BufferKind::Fixed { width, .. } => {
                    self.values(at, i, parts, *width as usize, |_| Change::None)?;
                }
                BufferKind::Offsets { .. } => {
                    let layout = self.merged.nodes[at].layout;
                    let bytes = |part: &Part| self.piece(*part, 2).map_or(0, |p| p.dst_bytes);
                    let (starts, bytes) = sums(parts.iter().map(bytes))?;
                    self.offsets(at, &layout, parts, length, &starts, bytes)?;
                }
                BufferKind::Bytes => self.bytes(i, parts)?,
            }
        }
        Ok(())
    }

    /// Adds the validity bitmap. Rows of parts that have none are valid.
    fn validity(&mut self, at: usize, parts: &[Part], length: usize) -> Result<()> {
        if parts.iter().all(|part| self.piece(*part, 0).is_none()) {
            self.merged.buffers.push(None);
            return Ok(());
        }
        self.bits(at, 0, parts, length)
    }

    /// Adds buffer `i`, a bitmap.
    fn bits(&mut self, at: usize, i: usize, parts: &[Part], length: usize) -> Result<()> {
        if length == 0 {
            self.nothing();
            return Ok(());
        }
        let mut segments = Vec::with_capacity(parts.len());
        let mut start = 0;
        for part in parts {
            let node = self.node_of(*part);
            let piece = match i {
                0 => self.piece(*part, 0),
                _ => Some(self.needed(at, *part, i)?),
            };
            let skip = match piece.map(|piece| piece.fix) {
                Some(Fix::Bits { skip, .. }) => usize::from(skip),
                _ => 0,
            };
            segments.push(Segment {
                src: piece.map(|piece| piece.src),
                skip,
                at: start,
                bits: node.length,
                counts: i == 0 && node.nulls.get().is_none(),
            });
            start += node.length;
        }
        // Rows that take no memory may be more than there are bits anywhere.
        if length.div_ceil(8) as u64 > MOST_BITMAP {
            return Err(too_large());
        }
        pieces(&segments, self.merged.bytes, at, &mut self.merged.content);
        self.close(length.div_ceil(8))
    }

    /// Adds buffer `i` of values of `width` bytes.
    fn values(
        &mut self,
        at: usize,
        i: usize,
        parts: &[Part],
        width: usize,
        change: impl Fn(usize) -> Change,
    ) -> Result<()> {
        let mut dst = self.merged.bytes;
        for (k, part) in parts.iter().enumerate() {
            let rows = self.node_of(*part).length;
            if width == 0 {
                break;
            }
            let Piece { src, dst_bytes, .. } = self.needed(at, *part, i)?;
            debug_assert_eq!(dst_bytes, rows * width);
            match change(k) {
                Change::None | Change::Add(0) => self.straight(src, dst, dst_bytes),
                Change::Add(n) => {
                    let (width, base) = (width as u8, -(n as i64));
                    self.fixed(src, dst, dst_bytes, Fix::Offsets { width, base });
                }
                Change::Views(indices) => self.in_chunks(dst, dst_bytes, |at, _| Rewrite::Views {
                    views: src.offset(at),
                    indices: indices.clone(),
                }),
                Change::Union(starts) => {
                    let ids = self.needed(at, *part, 0)?.src;
                    self.in_chunks(dst, dst_bytes, |at, _| Rewrite::UnionOffsets {
                        offsets: src.offset(at),
                        ids: ids.offset(at / 4),
                        starts: starts.clone(),
                    });
                }
            }
            dst = dst.checked_add(dst_bytes).ok_or_else(too_large)?;
        }
        match dst - self.merged.bytes {
            0 => self.nothing(),
            bytes => self.close(bytes)?,
        }
        Ok(())
    }

    /// Adds bytes that the host makes in chunks, each by what `rewrite` says for its first byte and number of bytes.
    fn in_chunks(&mut self, dst: usize, bytes: usize, rewrite: impl Fn(usize, usize) -> Rewrite) {
        const CHUNK: usize = STAGED / 2;
        for start in (0..bytes).step_by(CHUNK) {
            let part = CHUNK.min(bytes - start);
            self.merged.content.tasks.push(Task {
                dst: dst + start,
                bytes: part,
                zeros: 0,
                rewrite: rewrite(start, part),
            });
        }
    }

    /// Adds buffer `i`, of bytes that offsets refer to. It is present even if it is empty, because some consumers reject a
    /// null pointer.
    fn bytes(&mut self, i: usize, parts: &[Part]) -> Result<()> {
        let mut dst = self.merged.bytes;
        for part in parts {
            if let Some(piece) = self.piece(*part, i) {
                self.straight(piece.src, dst, piece.dst_bytes);
                dst = dst.checked_add(piece.dst_bytes).ok_or_else(too_large)?;
            }
        }
        match dst - self.merged.bytes {
            // At the start of the slab: the end of the content may be the end of the allocation.
            0 => self.merged.buffers.push(Some(0..0)),
            bytes => self.close(bytes)?,
        }
        Ok(())
    }

    /// Adds the offsets, from 0 on. Those of each part start at the number in `starts`, and end at `end` in all.
    fn offsets(
        &mut self,
        at: usize,
        layout: &Layout,
        parts: &[Part],
        length: usize,
        starts: &[usize],
        end: usize,
    ) -> Result<()> {
        let Some(BufferKind::Offsets { width }) = layout.buffers().get(1).copied() else {
            return Ok(());
        };
        if width == 4 {
            let instead = "concatenate fewer arrays, or cast them to the large type";
            let what = match layout.nesting {
                Nesting::Ranges => "items",
                _ => "bytes",
            };
            self.check_most(at, end, i32::MAX as u64, what, instead)?;
        }
        let w = usize::from(width);
        let mut dst = self.merged.bytes;
        if length == 0 {
            self.ready(dst, &[0; 8][..w]);
            return self.close(w);
        }
        for (k, (part, start)) in parts.iter().zip(starts).enumerate() {
            let piece = self.needed(at, *part, 1)?;
            let base = match piece.fix {
                Fix::Offsets { base, .. } => base,
                _ => 0,
            };
            // The first offset of a part is the last one of the part before.
            let skip = if k == 0 { 0 } else { w };
            let (src, bytes) = (piece.src.offset(skip), piece.dst_bytes - skip);
            match base - *start as i64 {
                0 => self.straight(src, dst, bytes),
                base => self.fixed(src, dst, bytes, Fix::Offsets { width, base }),
            }
            dst = dst.checked_add(bytes).ok_or_else(too_large)?;
        }
        self.close(dst - self.merged.bytes)
    }

    /// Adds the run ends, which the plans have made from 0 on.
    fn run_ends(
        &mut self,
        at: usize,
        data_type: &DataType,
        parts: &[Part],
        starts: &[usize],
        runs: usize,
    ) -> Result<()> {
        let width = data_type.primitive_width().unwrap_or(8);
        let mut ends = Vec::with_capacity(runs * width);
        let mut last = 0;
        for (part, start) in parts.iter().zip(starts) {
            let Some(piece) = self.piece(*part, 1) else {
                continue;
            };
            let Fix::Ready(from) = piece.fix else {
                return Err(Error::argument("run ends that were not read"));
            };
            let made = &self.plans[part.plan].ready[from..][..piece.dst_bytes];
            for end in made.chunks_exact(width) {
                last = int(end, width) as usize + start;
                push_int(&mut ends, last as i64, width);
            }
        }
        let most = u64::MAX >> (65 - 8 * width);
        let instead = "concatenate fewer arrays, or cast them to wider run ends";
        self.check_most(at, last, most, "rows", instead)?;
        if ends.is_empty() {
            self.nothing();
            return Ok(());
        }
        let dst = self.merged.bytes;
        self.ready(dst, &ends);
        self.close(ends.len())
    }
}

/// The sum before each number, and the sum of all.
fn sums(numbers: impl Iterator<Item = usize>) -> Result<(Vec<usize>, usize)> {
    let mut starts = Vec::new();
    let mut sum = 0usize;
    for n in numbers {
        starts.push(sum);
        sum = sum.checked_add(n).ok_or_else(too_large)?;
    }
    Ok((starts, sum))
}
