//! What a transfer moves: which bytes of which buffers, where they go, and what must be mended.
//!
//! A plan is made from the layout alone, and from a few numbers read from the source: one read for
//! each level of offsets in a cut nested array, all columns together, and none for what is uncut and
//! known. Every buffer starts at a multiple of 64 bytes of one slab and is padded to 64 with zeros.

use std::collections::VecDeque;

use arrow_schema::DataType;

use crate::data::DeviceArray;
use crate::data::build::placeholder;
use crate::data::hidden::{Answers, Request, check_size, count_bits, gather, int};
use crate::data::layout::{BufferKind, Layout, Nesting};
use crate::data::tree::{Node, Tree, View};
use crate::device::{ALIGNMENT, AddressClass, DevicePtr};
use crate::error::{Error, Result};
use crate::transfer::fix::{Fix, Piece};

/// Where everything goes.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Nodes of the result, at offset 0.
    pub(crate) nodes: Vec<Node>,
    /// One for each slot of the result: offset and length in bytes in the slab, if it is there.
    pub(crate) slots: Vec<Option<(usize, usize)>>,
    /// How many of them are for masks.
    masks: usize,
    /// In ascending order of destination.
    pub(crate) pieces: Vec<Piece>,
    /// Length of the slab in bytes, a multiple of 64.
    pub(crate) bytes: usize,
}

impl Plan {
    /// Bytes of a device slab: buffers without bytes need an address too.
    pub(crate) fn device_bytes(&self) -> usize {
        match self.slots.len() > self.masks {
            true => self.bytes.max(ALIGNMENT),
            false => self.bytes,
        }
    }
}

/// Rows of the source that become a node of the result.
type Work = (usize, View, Option<usize>);

struct Planner<'a> {
    tree: &'a Tree,
    compact: bool,
    plan: Plan,
    work: VecDeque<Work>,
    waiting: Vec<Waiting>,
    requests: Vec<Request>,
}

/// A node whose plan needs numbers from the source.
struct Waiting {
    node: usize,
    view: View,
    /// First of its requests.
    request: usize,
    need: Need,
}

#[derive(Clone, Copy)]
enum Need {
    /// First and last offset.
    Ends,
    /// The last offset of an array that starts at its buffers' start.
    Last,
    /// All run ends.
    Runs,
    /// The lengths of the variadic buffers.
    Sizes,
}

/// Plans the transfer of an array's rows. Where the source is host-readable this waits until it is
/// ready.
///
/// `compact`: offsets start at 0 and null counts become known, whatever that takes. Else an array
/// that the host cannot read keeps its offsets where it is whole, and its nulls uncounted.
pub(crate) fn plan(array: &DeviceArray, compact: bool) -> Result<Plan> {
    if array.device().is_host_readable() {
        array.wait()?;
    }
    let mut planner = Planner {
        tree: array.tree(),
        compact,
        plan: Plan::default(),
        work: VecDeque::new(),
        waiting: Vec::new(),
        requests: Vec::new(),
    };
    planner.plan.nodes.push(placeholder(0));
    planner
        .work
        .push_back((0, array.view(), array.null_count()));
    loop {
        while let Some((node, view, nulls)) = planner.work.pop_front() {
            planner.visit(node, view, nulls)?;
        }
        if planner.waiting.is_empty() {
            break;
        }
        let requests = std::mem::take(&mut planner.requests);
        // SAFETY: requests are made for rows inside their node's buffers, whose sizes the import
        // checked or arrow-rs vouches for.
        let answers = unsafe { gather(planner.tree, &requests) }?;
        for waiting in std::mem::take(&mut planner.waiting) {
            planner.resume(&waiting, &answers)?;
        }
    }
    Ok(planner.plan)
}

fn too_large() -> Error {
    Error::argument("the rows do not fit in memory")
}

impl<'a> Planner<'a> {
    fn visit(&mut self, node: usize, view: View, nulls: Option<usize>) -> Result<()> {
        let tree = self.tree;
        let layout = *tree.layout(view.node);
        let n_slots = tree.slots(view.node).len();
        let first_slot = self.plan.slots.len();
        self.plan.slots.resize(first_slot + n_slots, None);
        self.plan.masks += usize::from(layout.has_validity());
        let planned = &mut self.plan.nodes[node];
        planned.length = view.length;
        planned.layout = layout;
        planned.first_slot = first_slot as u32;
        planned.n_slots = n_slots as u32;
        self.validity(node, view, nulls)?;
        self.children(node, view, &layout);

        for (k, kind) in layout.buffers().iter().enumerate() {
            match *kind {
                BufferKind::Validity | BufferKind::Offsets { .. } | BufferKind::Bytes => {}
                BufferKind::Bits => {
                    let slot = &tree.slots(view.node)[k];
                    if view.length > 0 && !slot.is_null() {
                        self.bits(first_slot + k, view, slot.address(), view.offset)?;
                    }
                }
                BufferKind::Fixed { width, .. } => {
                    // Run ends of a cut array are planned in `resume`.
                    self.fixed(first_slot + k, view, k, width as usize)?;
                }
            }
        }
        match layout.nesting {
            _ if layout.variadic => self.variadic(node, view),
            Nesting::Runs if tree.is_uncut(view) => {
                self.child(node, 0, tree.child(view, 0));
                self.child(node, 1, tree.child(view, 1));
                Ok(())
            }
            Nesting::Runs => self.runs(node, view),
            _ => match layout.buffers().get(1) {
                Some(BufferKind::Offsets { width }) => {
                    self.offsets(node, view, usize::from(*width))
                }
                _ => Ok(()),
            },
        }
    }

    /// The mask and the null count.
    fn validity(&mut self, node: usize, view: View, mut nulls: Option<usize>) -> Result<()> {
        let tree = self.tree;
        let slots = tree.slots(view.node);
        let masked = tree.layout(view.node).has_validity() && !slots[0].is_null();
        if nulls.is_none() && masked && tree.device.is_host_readable() {
            let (skip, bits) = (view.validity_offset % 8, view.length);
            let src = slots[0].address().offset(view.validity_offset / 8);
            // SAFETY: a mask has one bit for each row of its node; it is ready (`plan` waited).
            let bytes = unsafe {
                std::slice::from_raw_parts(src.as_ptr().cast(), (skip + bits).div_ceil(8))
            };
            nulls = Some(bits - count_bits(bytes, skip, bits));
        }
        let slot = self.plan.nodes[node].first_slot as usize;
        self.plan.nodes[node].nulls = tree.nodes[view.node].nulls.of_part(nulls);
        if masked && nulls != Some(0) && view.length > 0 {
            self.bits(slot, view, slots[0].address(), view.validity_offset)?;
            let mask = self.plan.pieces.last_mut();
            if let Some(mask) = mask.filter(|_| nulls.is_none() && self.compact) {
                mask.counts = Some(node);
            }
        }
        Ok(())
    }

    /// Makes room for the children and plans those whose rows the type tells.
    fn children(&mut self, node: usize, view: View, layout: &Layout) {
        let first = self.plan.nodes.len();
        let n = layout.n_children();
        self.plan.nodes[node].first_child = first as u32;
        self.plan.nodes[node].n_children = n as u32;
        self.plan.nodes.extend((0..n).map(|_| placeholder(node)));
        for i in 0..n {
            let mut child = self.tree.child(view, i);
            match layout.nesting {
                Nesting::Ranges | Nesting::Runs => continue,
                Nesting::Anywhere if view.length == 0 => child.length = 0,
                _ => {}
            }
            self.child(node, i, child);
        }
    }

    fn child(&mut self, node: usize, i: usize, view: View) {
        let child = self.plan.nodes[node].first_child as usize + i;
        self.work
            .push_back((child, view, self.tree.null_count(view)));
    }

    fn fixed(&mut self, slot: usize, view: View, k: usize, width: usize) -> Result<()> {
        let source = &self.tree.slots(view.node)[k];
        let bytes = view.length.checked_mul(width).ok_or_else(too_large)?;
        if bytes == 0 || source.is_null() {
            return Ok(());
        }
        let src = source.address().offset(view.offset * width);
        self.piece(slot, src, bytes, bytes, Fix::None)
    }

    /// The bits of a view's rows, of which the first is bit `first` from `src`.
    fn bits(&mut self, slot: usize, view: View, src: DevicePtr, first: usize) -> Result<()> {
        let (skip, bits) = (first % 8, view.length);
        let src = src.offset(first / 8);
        let src_bytes = (skip + bits).div_ceil(8);
        let fix = if self.tree.nodes[view.node].padded && self.tree.is_uncut(view) {
            // Zeros follow the last row already.
            Fix::None
        } else {
            Fix::Bits { skip, bits }
        };
        self.piece(slot, src, src_bytes, bits.div_ceil(8), fix)
    }

    fn piece(
        &mut self,
        slot: usize,
        src: DevicePtr,
        src_bytes: usize,
        dst_bytes: usize,
        fix: Fix,
    ) -> Result<()> {
        let piece = Piece {
            src,
            src_bytes,
            dst: self.plan.bytes,
            dst_bytes,
            fix,
            counts: None,
        };
        let end = self.plan.bytes.checked_add(piece.region());
        self.plan.bytes = end
            .filter(|n| isize::try_from(*n).is_ok())
            .ok_or_else(too_large)?;
        self.plan.slots[slot] = Some((piece.dst, dst_bytes));
        self.plan.pieces.push(piece);
        Ok(())
    }

    fn ready(&mut self, slot: usize, bytes: Vec<u8>) -> Result<()> {
        let len = bytes.len();
        self.piece(slot, DevicePtr::NULL, 0, len, Fix::Ready(bytes.into()))
    }

    fn wait_for(&mut self, node: usize, view: View, need: Need, requests: &[(DevicePtr, usize)]) {
        self.waiting.push(Waiting {
            node,
            view,
            request: self.requests.len(),
            need,
        });
        self.requests
            .extend(requests.iter().map(|&(address, bytes)| Request {
                address,
                bytes,
                on_host: false,
            }));
    }

    /// Binary, text, lists and maps: the ends of the range, where they are not known.
    fn offsets(&mut self, node: usize, view: View, width: usize) -> Result<()> {
        let tree = self.tree;
        let slots = tree.slots(view.node);
        if view.length == 0 {
            return self.range(node, view, width, 0, 0);
        }
        if slots[1].is_null() {
            let path = tree.buffer_path(view.node, 1);
            return Err(Error::invalid(path, "is null but has rows"));
        }
        let at = |row: usize| (slots[1].address().offset(row * width), width);
        let last = at(view.offset + view.length);
        // Buffers of arrow-rs arrays may be longer than their rows need, so those are always asked.
        if tree.is_uncut(view) && !tree.device.is_host_readable() && !self.compact {
            if tree.nodes[view.node].n_children > 0 {
                let child = tree.child(view, 0);
                return self.whole_range(node, view, width, Ok(child));
            }
            if let Some(bytes) = slots[2].bytes() {
                return self.whole_range(node, view, width, Err(bytes));
            }
            self.wait_for(node, view, Need::Last, &[last]);
        } else {
            self.wait_for(node, view, Need::Ends, &[at(view.offset), last]);
        }
        Ok(())
    }

    /// Offsets as they are, and all that they can point to: a child's rows, or bytes.
    fn whole_range(
        &mut self,
        node: usize,
        view: View,
        width: usize,
        target: Result<View, usize>,
    ) -> Result<()> {
        let slots = self.tree.slots(view.node);
        let slot = self.plan.nodes[node].first_slot as usize;
        let bytes = (view.length + 1) * width;
        self.piece(slot + 1, slots[1].address(), bytes, bytes, Fix::None)?;
        match target {
            Ok(child) => self.child(node, 0, child),
            Err(0) => self.nothing(slot + 2, slot + 1),
            Err(bytes) => self.piece(slot + 2, slots[2].address(), bytes, bytes, Fix::None)?,
        }
        Ok(())
    }

    /// Offsets from 0, and what lies between `first` and `last`.
    fn range(
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
            self.ready(slot + 1, vec![0; width])?;
        } else {
            let src = slots[1].address().offset(view.offset * width);
            let bytes = (view.length + 1) * width;
            self.piece(
                slot + 1,
                src,
                bytes,
                bytes,
                Fix::Offsets { width, base: first },
            )?;
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
            self.child(node, 0, cut);
            return Ok(());
        }
        let at = || tree.buffer_path(view.node, 2);
        let end = check_size(tree, slots[2].address(), last, at)?;
        if let Some(bytes) = slots[2].bytes() {
            if end > bytes {
                return Err(Error::invalid(
                    at(),
                    format!("offsets reach byte {end} of {bytes}"),
                ));
            }
        }
        let (first, bytes) = (first as usize, (last - first) as usize);
        if bytes > 0 {
            self.piece(
                slot + 2,
                slots[2].address().offset(first),
                bytes,
                bytes,
                Fix::None,
            )?;
        } else {
            self.nothing(slot + 2, slot + 1);
        }
        Ok(())
    }

    /// A buffer of no bytes where another one is: some consumers take a null pointer amiss.
    fn nothing(&mut self, slot: usize, near: usize) {
        self.plan.slots[slot] = self.plan.slots[near].map(|(offset, _)| (offset, 0));
    }

    /// View types: all variadic buffers, or those that the rows refer to where the host can look.
    fn variadic(&mut self, node: usize, view: View) -> Result<()> {
        let tree = self.tree;
        let slots = tree.slots(view.node);
        let (variadic, sizes) = (&slots[2..slots.len() - 1], &slots[slots.len() - 1]);
        if variadic.iter().any(|slot| slot.bytes().is_none()) {
            self.wait_for(
                node,
                view,
                Need::Sizes,
                &[(sizes.address(), variadic.len() * 8)],
            );
            let request = self.requests.last_mut().expect("just pushed");
            let class = tree
                .device
                .backend()
                .classify(request.address, request.bytes);
            request.on_host = class == AddressClass::Host;
            return Ok(());
        }
        let used = tree.device.is_host_readable().then(|| {
            // SAFETY: the views are ready host memory with `offset + length` rows.
            unsafe { referenced(slots[1].address(), view, variadic.len()) }
        });
        let first = self.plan.nodes[node].first_slot as usize + 2;
        for (i, source) in variadic.iter().enumerate() {
            let bytes = source.bytes().unwrap_or(0);
            let wanted = used.as_ref().is_none_or(|used| used[i]);
            if wanted && bytes > 0 && view.length > 0 {
                self.piece(first + i, source.address(), bytes, bytes, Fix::None)?;
            }
        }
        Ok(())
    }

    fn runs(&mut self, node: usize, view: View) -> Result<()> {
        let run_ends = self.tree.child(view, 0);
        let width = run_end_width(self.tree, run_ends);
        let slot = &self.tree.slots(run_ends.node)[1];
        if view.length == 0 || slot.is_null() {
            return self.cut_runs(node, view, &[]);
        }
        let address = slot.address().offset(run_ends.offset * width);
        self.wait_for(
            node,
            view,
            Need::Runs,
            &[(address, run_ends.length * width)],
        );
        Ok(())
    }

    /// The runs that hold a view's rows; `bytes` are all run ends.
    fn cut_runs(&mut self, node: usize, view: View, bytes: &[u8]) -> Result<()> {
        let tree = self.tree;
        let (run_ends, values) = (tree.child(view, 0), tree.child(view, 1));
        let width = run_end_width(tree, run_ends);
        let ends: Vec<i64> = bytes.chunks_exact(width).map(|b| int(b, width)).collect();
        let (from, to) = (view.offset as i64, (view.offset + view.length) as i64);
        let first = ends.partition_point(|end| *end <= from);
        let last = ends.partition_point(|end| *end < to);
        let runs = if view.length == 0 {
            first..first
        } else {
            first..last + 1
        };
        if runs.end > ends.len().min(values.length) || runs.start > runs.end {
            return Err(Error::invalid(
                tree.path(run_ends.node),
                format!("run ends do not cover rows {from} to {to}"),
            ));
        }
        let mut cut = Vec::with_capacity(runs.len() * width);
        for end in &ends[runs.clone()] {
            let end = (*end).min(to).wrapping_sub(from);
            cut.extend_from_slice(&end.to_ne_bytes()[..width]);
        }
        let child = self.plan.nodes[node].first_child as usize;
        let slot = self.plan.slots.len();
        self.plan.slots.resize(slot + 2, None);
        self.plan.masks += 1;
        let planned = &mut self.plan.nodes[child];
        planned.length = runs.len();
        planned.layout = *tree.layout(run_ends.node);
        planned.first_slot = slot as u32;
        planned.n_slots = 2;
        if !cut.is_empty() {
            self.ready(slot + 1, cut)?;
        }
        let values = View {
            offset: values.offset + runs.start,
            length: runs.len(),
            validity_offset: values.validity_offset + runs.start,
            ..values
        };
        self.child(node, 1, values);
        Ok(())
    }

    fn resume(&mut self, waiting: &Waiting, answers: &Answers) -> Result<()> {
        let Waiting {
            node,
            view,
            request,
            need,
        } = *waiting;
        let tree = self.tree;
        let width = match tree.layout(view.node).buffers().get(1) {
            Some(BufferKind::Offsets { width }) => usize::from(*width),
            _ => 8,
        };
        match need {
            Need::Ends => {
                let first = answers.int(request, 0, width);
                let last = answers.int(request + 1, 0, width);
                self.range(node, view, width, first, last)
            }
            Need::Last => {
                let slot = &tree.slots(view.node)[2];
                let last = answers.int(request, 0, width);
                let at = || tree.buffer_path(view.node, 2);
                let bytes = check_size(tree, slot.address(), last, at)?;
                slot.set_bytes(bytes);
                self.whole_range(node, view, width, Err(bytes))
            }
            Need::Runs => self.cut_runs(node, view, answers.bytes(request)),
            Need::Sizes => {
                let slots = tree.slots(view.node);
                for (k, slot) in slots[2..slots.len() - 1].iter().enumerate() {
                    let at = || tree.buffer_path(view.node, 2 + k);
                    let bytes = answers.int(request, k, 8);
                    slot.set_bytes(check_size(tree, slot.address(), bytes, at)?);
                }
                self.variadic(node, view)
            }
        }
    }
}

/// Bytes of one run end.
fn run_end_width(tree: &Tree, run_ends: View) -> usize {
    match tree.data_type(run_ends.node) {
        DataType::Int16 => 2,
        DataType::Int32 => 4,
        _ => 8,
    }
}

/// Which of `n` variadic buffers a view's rows refer to. Rows that are null may refer to any.
///
/// # Safety
/// `views` is readable host memory for `offset + length` views of 16 bytes.
unsafe fn referenced(views: DevicePtr, view: View, n: usize) -> Vec<bool> {
    let mut used = vec![false; n];
    if n == 0 || views.is_null() {
        return used;
    }
    let first = views.as_ptr().cast::<u128>().cast_const();
    for row in view.offset..view.offset + view.length {
        // SAFETY: the caller's.
        let value = unsafe { first.add(row).read_unaligned() };
        // Length in the low 32 bits; if it is over 12, the buffer's index in the third.
        if value as u32 > 12 {
            if let Some(used) = used.get_mut((value >> 64) as u32 as usize) {
                *used = true;
            }
        }
    }
    used
}
