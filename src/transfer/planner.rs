//! What a transfer moves: which bytes of which buffers, and what must be mended.
//!
//! A plan is made from the layout alone, and from a few numbers read from the source: one read for
//! each level of offsets in a cut nested array, all columns together, and none for what is uncut and
//! known. Every buffer starts at a multiple of 64 bytes of one slab and is padded to 64 with zeros.

mod runs;

use std::borrow::Borrow;
use std::num::NonZeroU32;

use crate::data::DeviceArray;
use crate::data::hidden::{Answers, Request, check_size, count_bits, gather};
use crate::data::layout::{BufferKind, Nesting};
use crate::data::tree::{Node, NullCount, Slot, Tree, View};
use crate::device::{AddressClass, DevicePtr};
use crate::error::{Error, Result};
use crate::transfer::fix::Fix;
use crate::transfer::plan::{PLAIN, Plan, SLAB, WHOLE};

struct Planner<'a> {
    tree: &'a Tree,
    compact: bool,
    /// The host can read the source, which is ready.
    readable: bool,
    /// What stands for a buffer without bytes. It may be null, but Arrow C++ takes null for the CPU's
    /// memory: on a device it is the slab.
    nothing: DevicePtr,
    plan: Plan,
    /// Nodes whose children are still to be planned, with their rows of the source.
    parents: Vec<(usize, View)>,
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

/// Plans the transfer of an array's rows to a slab on the host or on a device. Where the source is
/// host-readable this waits until it is ready.
///
/// `compact`: offsets start at 0 and null counts become known, whatever that takes. Else an array
/// that the host cannot read keeps its offsets where it is whole, and its nulls uncounted.
pub(crate) fn plan(array: &DeviceArray, compact: bool, to_device: bool) -> Result<Plan> {
    // SAFETY: `plan_with` asks for what lies in the tree.
    let read = |tree: &_, requests: &[_]| unsafe { gather(tree, requests) }.map(Some);
    let plan = plan_with(array, compact, to_device, read)?;
    plan.ok_or_else(|| Error::argument("a plan without its numbers"))
}

/// As [`plan`], where `read` gets the numbers: requests for rows inside their node's buffers, whose sizes
/// the import checked or arrow-rs vouches for, so that each lies in the tree's memory. If it has no answer
/// there is no plan either; to make one later is to start over. The requests are the same ones then, less
/// what became known meanwhile.
pub(crate) fn plan_with<A: Borrow<Answers>>(
    array: &DeviceArray,
    compact: bool,
    to_device: bool,
    mut read: impl FnMut(&Tree, &[Request]) -> Result<Option<A>>,
) -> Result<Option<Plan>> {
    let readable = array.device().is_host_readable();
    if readable {
        array.wait()?;
    }
    let tree = array.tree();
    let mut planner = Planner {
        tree,
        compact,
        readable,
        nothing: if to_device { SLAB } else { DevicePtr::NULL },
        plan: Plan::default(),
        parents: Vec::new(),
        waiting: Vec::new(),
        requests: Vec::new(),
    };
    if array.view().node == 0 {
        planner.plan.nodes.reserve(tree.nodes.len());
        planner.plan.slots.reserve(tree.slots.len());
    }
    planner.node(array.view(), array.null_count(), 0)?;
    let mut next = 0;
    loop {
        while let Some(&(node, view)) = planner.parents.get(next) {
            next += 1;
            planner.descend(node, view)?;
        }
        if planner.waiting.is_empty() {
            break;
        }
        let requests = std::mem::take(&mut planner.requests);
        let Some(answers) = read(tree, &requests)? else {
            return Ok(None);
        };
        for waiting in std::mem::take(&mut planner.waiting) {
            planner.resume(&waiting, answers.borrow())?;
        }
    }
    if tree.nodes.iter().any(|node| node.padded) {
        planner.plan.join();
    }
    planner.plan.lay_out()?;
    Ok(Some(planner.plan))
}

impl<'a> Planner<'a> {
    /// Adds a node with what its type tells of its buffers. Its children come later: siblings stand
    /// side by side. `nulls`: the null count, where more is known of it than the source's node tells.
    #[inline(always)]
    fn sibling(
        &mut self,
        source: &Node,
        view: View,
        nulls: Option<usize>,
        parent: usize,
    ) -> Result<()> {
        let tree = self.tree;
        let layout = &source.layout;
        let slots = tree.slots(view.node);
        let node = self.plan.nodes.len();
        let first_slot = self.plan.slots.len();
        let mut kinds = layout.buffers();
        let mut rest = slots;
        let mut nulls = nulls;
        if let ([BufferKind::Validity, others @ ..], [mask, buffers @ ..]) = (kinds, slots) {
            (kinds, rest) = (others, buffers);
            if mask.is_null() {
                nulls = Some(0);
                self.plan.slots.push(Slot::absent());
            } else {
                nulls = self.validity(view, mask, nulls);
            }
        } else {
            nulls = Some(if layout.is_null_type() {
                view.length
            } else {
                0
            });
        }
        self.plan.nodes.push(Node {
            length: view.length,
            layout: *layout,
            cut: false,
            // Once the transfer is done.
            padded: true,
            offset: 0,
            validity_offset: 0,
            nulls: NullCount::from(nulls),
            parent: parent as u32,
            first_child: 0,
            n_children: 0,
            first_slot: first_slot as u32,
            n_slots: slots.len() as u32,
        });
        let plain = plain(source, view);
        let mut kinds = kinds.iter();
        for source in rest {
            match kinds.next() {
                Some(_) if view.length == 0 || source.is_null() => self.nothing(),
                Some(BufferKind::Fixed { width, .. }) => {
                    let width = *width as usize;
                    // `lay_out` refuses what does not fit.
                    let bytes = view.length.saturating_mul(width);
                    let from = source.offset + view.offset * width;
                    let slot = Slot::new(source.base, from, Some(bytes), plain);
                    self.plan.slots.push(slot);
                }
                Some(BufferKind::Bits) => self.bits(view, source, view.offset, false),
                // Offsets and what they point to are filled in below or later.
                _ => self.nothing(),
            }
        }
        if source.n_children > 0 {
            self.parents.push((node, view));
            Ok(())
        } else if layout.variadic {
            self.variadic(node, view)
        } else if let Some(BufferKind::Offsets { width }) = layout.buffers().get(1) {
            self.offsets(node, view, usize::from(*width))
        } else {
            Ok(())
        }
    }

    /// Adds a slot without bytes, or one that is filled in later.
    fn nothing(&mut self) {
        let slot = Slot::new(self.nothing, 0, Some(0), PLAIN);
        self.plan.slots.push(slot);
    }

    /// As [`sibling`](Self::sibling), where speed does not matter.
    fn node(&mut self, view: View, nulls: Option<usize>, parent: usize) -> Result<()> {
        self.sibling(&self.tree.nodes[view.node], view, nulls, parent)
    }

    /// The children of a node, whose siblings are there; of lists and maps the offsets too.
    fn descend(&mut self, node: usize, view: View) -> Result<()> {
        let tree = self.tree;
        let layout = tree.layout(view.node);
        match layout.nesting {
            Nesting::Ranges => match layout.buffers().get(1) {
                Some(BufferKind::Offsets { width }) => {
                    self.offsets(node, view, usize::from(*width))
                }
                _ => Ok(()),
            },
            Nesting::Runs if !tree.is_uncut(view) => self.runs(node, view),
            Nesting::RowByRow => {
                let first = tree.nodes[view.node].first_child as usize;
                let n = layout.n_children();
                self.begin_children(node, n);
                // As `Tree::child`, for wide batches.
                for (i, source) in tree.nodes[first..][..n].iter().enumerate() {
                    let child = View {
                        node: first + i,
                        offset: source.offset + view.offset,
                        length: view.length,
                        validity_offset: source.validity_offset + view.offset,
                    };
                    self.sibling(source, child, None, node)?;
                }
                Ok(())
            }
            nesting => {
                let n = layout.n_children();
                self.begin_children(node, n);
                for i in 0..n {
                    let mut child = tree.child(view, i);
                    if nesting == Nesting::Anywhere && view.length == 0 {
                        child.length = 0;
                    }
                    self.node(child, None, node)?;
                }
                Ok(())
            }
        }
    }

    /// The next `n` nodes are the children of `node`.
    fn begin_children(&mut self, node: usize, n: usize) {
        let first = self.plan.nodes.len();
        self.plan.nodes[node].first_child = first as u32;
        self.plan.nodes[node].n_children = n as u32;
    }

    /// Adds the slot of the next node's mask; answers its null count.
    #[inline(never)]
    fn validity(&mut self, view: View, mask: &Slot, nulls: Option<usize>) -> Option<usize> {
        let nulls = nulls.or_else(|| self.tree.null_count(view)).or_else(|| {
            let (skip, bits) = (view.validity_offset % 8, view.length);
            let src = mask.address().offset(view.validity_offset / 8);
            let bytes = (skip + bits).div_ceil(8);
            self.readable.then(|| {
                // SAFETY: a mask has one bit for each row of its node; it is ready (`plan` waited).
                let mask = unsafe { std::slice::from_raw_parts(src.as_ptr().cast(), bytes) };
                bits - count_bits(mask, skip, bits)
            })
        });
        if nulls == Some(0) || view.length == 0 {
            self.plan.slots.push(Slot::absent());
        } else {
            let counts = nulls.is_none() && self.compact;
            self.bits(view, mask, view.validity_offset, counts);
        }
        nulls
    }

    /// Adds the bits of a view's rows, of which the first is bit `first` of `source`. `counts`: they are the
    /// mask of the next node, whose nulls are to be counted in it.
    #[inline(never)]
    fn bits(&mut self, view: View, source: &Slot, first: usize, counts: bool) {
        let node = &self.tree.nodes[view.node];
        let (skip, bits) = (first % 8, view.length);
        let owner = if counts || (plain(node, view) == PLAIN && (skip > 0 || bits % 8 > 0)) {
            let next = self.plan.nodes.len() as u32 + 1;
            self.plan.fix(Fix::Bits {
                skip: skip as u8,
                bits,
                counts: NonZeroU32::new(next).filter(|_| counts),
            })
        } else {
            plain(node, view)
        };
        let from = source.offset + first / 8;
        let slot = Slot::new(source.base, from, Some(bits.div_ceil(8)), owner);
        self.plan.slots.push(slot);
    }

    /// Bytes that have no source.
    fn ready(&mut self, slot: usize, bytes: &[u8]) {
        let fix = self.plan.fix(Fix::Ready(self.plan.ready.len()));
        self.plan.ready.extend_from_slice(bytes);
        self.plan.slots[slot] = Slot::new(SLAB, 0, Some(bytes.len()), fix);
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
        let at = |row: usize| slots[1].address().offset(row * width);
        let (first, last) = (at(view.offset), at(view.offset + view.length));
        // Buffers of arrow-rs arrays may be longer than their rows need, so those are always asked.
        if self.readable {
            // SAFETY: offsets are there for `offset + length + 1` rows, and ready (`plan` waited).
            let (first, last) = unsafe { (offset(first, width), offset(last, width)) };
            return self.range(node, view, width, first, last);
        }
        if tree.is_uncut(view) && !self.compact {
            if tree.nodes[view.node].n_children > 0 {
                let child = tree.child(view, 0);
                return self.whole_range(node, view, width, Ok(child));
            }
            if let Some(bytes) = slots[2].bytes() {
                return self.whole_range(node, view, width, Err(bytes));
            }
            self.wait_for(node, view, Need::Last, &[(last, width)]);
        } else {
            self.wait_for(node, view, Need::Ends, &[(first, width), (last, width)]);
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
        let owner = plain(&self.tree.nodes[view.node], view);
        self.plan.slots[slot + 1] = Slot::new(slots[1].base, slots[1].offset, Some(bytes), owner);
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
            self.ready(slot + 1, &[0; 8][..width]);
        } else {
            let bytes = (view.length + 1) * width;
            let from = slots[1].offset + view.offset * width;
            let owner = match first {
                0 => plain(&tree.nodes[view.node], view),
                base => self.plan.fix(Fix::Offsets {
                    width: width as u8,
                    base,
                }),
            };
            self.plan.slots[slot + 1] = Slot::new(slots[1].base, from, Some(bytes), owner);
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
        self.bytes(slot + 2, view, &slots[2], first, bytes);
        Ok(())
    }

    /// What offsets point to: `bytes` bytes from byte `first` on. Where that is nothing the slot is
    /// there all the same: some consumers take a null pointer amiss.
    fn bytes(&mut self, slot: usize, view: View, source: &Slot, first: usize, bytes: usize) {
        let owner = match source.bytes() {
            Some(all) if all == bytes => plain(&self.tree.nodes[view.node], view),
            _ => PLAIN,
        };
        self.plan.slots[slot] = match bytes {
            0 => Slot::new(SLAB, 0, Some(0), PLAIN),
            _ => Slot::new(source.base, source.offset + first, Some(bytes), owner),
        };
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
        let used = self.readable.then(|| {
            // SAFETY: the views are ready host memory with `offset + length` rows.
            unsafe { referenced(slots[1].address(), view, variadic.len()) }
        });
        let owner = plain(&tree.nodes[view.node], view);
        let first = self.plan.nodes[node].first_slot as usize + 2;
        for (i, source) in variadic.iter().enumerate() {
            let bytes = source.bytes().unwrap_or(0);
            let wanted = used.as_ref().is_none_or(|used| used[i]);
            if wanted && bytes > 0 && view.length > 0 {
                self.plan.slots[first + i] =
                    Slot::new(source.base, source.offset, Some(bytes), owner);
            }
        }
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

/// The owner of slots that need nothing done: of a view that is all of a node, and of others.
fn plain(node: &Node, view: View) -> u32 {
    let uncut = !node.cut && view.offset == 0 && node.offset == 0 && view.length == node.length;
    match node.padded && uncut {
        true => WHOLE,
        false => PLAIN,
    }
}

/// An offset of `width` bytes.
///
/// # Safety
/// It is readable host memory; it need not be aligned.
unsafe fn offset(at: DevicePtr, width: usize) -> i64 {
    let at = at.as_ptr().cast_const();
    // SAFETY: the caller's.
    unsafe {
        match width {
            4 => i64::from(at.cast::<i32>().read_unaligned()),
            _ => at.cast::<i64>().read_unaligned(),
        }
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
