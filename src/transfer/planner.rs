//! What a transfer moves: which bytes of which buffers, and what the host must change in them.
//!
//! A plan follows from the layout, and from a few numbers that are read from the source: one read for each level of
//! offsets in a sliced nested array, all columns together, and none if the array is whole and its sizes are known.

mod ranges;
mod runs;

use std::borrow::Borrow;
use std::num::NonZeroU32;

use crate::data::DeviceArray;
use crate::data::gather::{Answers, Request, gather};
use crate::data::layout::{BufferKind, Nesting};
use crate::data::nulls::count_bits;
use crate::data::sizes::Sizes;
use crate::data::tree::{Node, NullCount, Slot, Tree, View};
use crate::device::DevicePtr;
use crate::error::{Error, Result};
use crate::transfer::fix::Fix;
use crate::transfer::plan::{Content, Draft, Plan, Source};

/// How much of an array a transfer moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Extent {
    /// Its rows. If the host cannot read the array, the offsets of whole arrays stay as they are, and nulls are
    /// not counted.
    Rows,
    /// Its rows, always with offsets from 0 and known null counts.
    Compact,
    /// All that safe calls can reach from it. [`DeviceArray::child`] returns the whole child of a list, list view,
    /// union or run-end encoded array, however few of the child's rows its own rows refer to.
    Reachable,
}

struct Planner<'a> {
    tree: &'a Tree,
    extent: Extent,
    /// Whether the host can read the source, which is ready then.
    readable: bool,
    /// A buffer without bytes. It may be absent, but Arrow C++ takes a null address for CPU memory: on a device
    /// it has an address.
    nothing: Source,
    draft: Draft,
    /// Nodes whose children are still to be planned, with their rows in the source.
    parents: Vec<(usize, View)>,
    waiting: Vec<Waiting>,
    requests: Vec<Request>,
}

/// A node whose plan needs numbers from the source.
struct Waiting {
    node: usize,
    view: View,
    /// The first of its requests.
    request: usize,
    need: Need,
}

#[derive(Clone, Copy)]
enum Need {
    /// The first and the last offset.
    Ends,
    /// All run ends.
    Runs,
    /// Sizes of buffers.
    Sizes(Sizes),
}

/// Plans the transfer of an array's rows to a slab on the host or on a device. If the host can read the source, this
/// waits until it is ready.
pub(crate) fn plan(array: &DeviceArray, extent: Extent, to_device: bool) -> Result<Plan> {
    // SAFETY: the requests of `plan_with` lie in the tree's memory (see there), to which nobody writes: imports and
    // constructors demand it.
    let read = |tree: &_, requests: &[_]| unsafe { gather(tree, requests) }.map(Some);
    let plan = plan_with(array, extent, to_device, read)?;
    plan.ok_or_else(|| Error::argument("the plan lacks numbers from the source"))
}

/// As [`plan`], with numbers that `read` returns. It is asked for elements of the rows' buffers, the sizes of which
/// were checked when the array was made, so that each request lies in the tree's memory. If it returns `None` there
/// is no plan; a later call starts over, with the same requests except for what became known meanwhile.
pub(crate) fn plan_with<A: Borrow<Answers>>(
    array: &DeviceArray,
    extent: Extent,
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
        extent,
        readable,
        nothing: match to_device {
            true => Source::EMPTY,
            false => Source::ABSENT,
        },
        draft: Draft::default(),
        parents: Vec::new(),
        waiting: Vec::new(),
        requests: Vec::new(),
    };
    if array.view().node == 0 {
        planner.draft.nodes.reserve(tree.nodes.len());
        planner.draft.buffers.reserve(tree.slots.len());
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
        planner.draft.join();
    }
    // A producer may name the same memory for any number of nodes.
    planner.draft.lay_out(extent == Extent::Reachable).map(Some)
}

impl<'a> Planner<'a> {
    /// Adds a node and those of its buffers that follow from its type. Its children come later, because siblings
    /// are next to each other. `nulls` is the null count, if more is known than the source's node says.
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
        let node = self.draft.nodes.len();
        let first_slot = self.draft.buffers.len();
        let mut kinds = layout.buffers();
        let mut rest = slots;
        let mut nulls = nulls;
        if let ([BufferKind::Validity, others @ ..], [bitmap, buffers @ ..]) = (kinds, slots) {
            (kinds, rest) = (others, buffers);
            if bitmap.is_null() {
                nulls = Some(0);
                self.draft.buffers.push(Source::ABSENT);
            } else {
                nulls = self.validity(view, bitmap, nulls);
            }
        } else {
            nulls = match layout.is_null_type() {
                true => Some(view.length),
                false => Some(0),
            };
        }
        self.draft.nodes.push(Node {
            // Once the transfer is done.
            padded: true,
            nulls: NullCount::from(nulls),
            ..Node::new(*layout, view.length, parent, first_slot, slots.len())
        });
        let content = as_it_is(source, view);
        let mut kinds = kinds.iter();
        for source in rest {
            match kinds.next() {
                Some(BufferKind::Fixed { width, .. }) if view.length > 0 && !source.is_null() => {
                    let width = *width as usize;
                    // `lay_out` refuses what does not fit.
                    let bytes = view.length.saturating_mul(width);
                    let buffer = Source::of(source, view.offset * width, bytes, content);
                    self.draft.buffers.push(buffer);
                }
                Some(BufferKind::Bits) if view.length > 0 && !source.is_null() => {
                    self.bits(view, source, view.offset, false);
                }
                // Offsets and what they point to are filled in below or later.
                _ => self.draft.buffers.push(self.nothing),
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

    /// As [`sibling`](Self::sibling), for callers where speed does not matter.
    fn node(&mut self, view: View, nulls: Option<usize>, parent: usize) -> Result<()> {
        self.sibling(&self.tree.nodes[view.node], view, nulls, parent)
    }

    /// Adds the children of a node whose siblings are there; for lists and maps the offsets too.
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
            Nesting::Runs if !self.is_whole(view) => self.runs(node, view),
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
                    let none = nesting == Nesting::Anywhere && view.length == 0;
                    if none && self.extent != Extent::Reachable {
                        child.length = 0;
                    }
                    self.node(child, None, node)?;
                }
                if nesting == Nesting::Runs {
                    // All runs are there, so the rows keep their offset.
                    self.draft.nodes[node].offset = view.offset;
                }
                Ok(())
            }
        }
    }

    /// Whether the children that a view's rows refer to are moved whole.
    fn is_whole(&self, view: View) -> bool {
        self.extent == Extent::Reachable || self.tree.is_uncut(view)
    }

    /// Says that the next `n` nodes are the children of `node`.
    fn begin_children(&mut self, node: usize, n: usize) {
        let first = self.draft.nodes.len();
        self.draft.nodes[node].first_child = first as u32;
        self.draft.nodes[node].n_children = n as u32;
    }

    /// Adds the validity bitmap of the next node; returns its null count.
    #[inline(never)]
    fn validity(&mut self, view: View, bitmap: &Slot, nulls: Option<usize>) -> Option<usize> {
        let nulls = nulls.or_else(|| self.tree.null_count(view)).or_else(|| {
            let (skip, bits) = (view.validity_offset % 8, view.length);
            let src = bitmap.address().offset(view.validity_offset / 8);
            let bytes = (skip + bits).div_ceil(8);
            self.readable.then(|| {
                // SAFETY: the bitmap has one bit for each row of its node, which was checked when the node was made; the
                // host can read it (`readable`), and it is ready (`plan_with` waited).
                let bitmap = unsafe { std::slice::from_raw_parts(src.as_ptr().cast(), bytes) };
                bits - count_bits(bitmap, skip, bits)
            })
        });
        if nulls == Some(0) || view.length == 0 {
            self.draft.buffers.push(Source::ABSENT);
        } else {
            let counts = nulls.is_none() && self.extent == Extent::Compact;
            self.bits(view, bitmap, view.validity_offset, counts);
        }
        nulls
    }

    /// Adds the bits of a view's rows, the first of which is bit `first` of `source`. With `counts` they are the
    /// validity bitmap of the next node, whose nulls are to be counted in it.
    #[inline(never)]
    fn bits(&mut self, view: View, source: &Slot, first: usize, counts: bool) {
        let node = &self.tree.nodes[view.node];
        let (skip, bits) = (first % 8, view.length);
        let mut content = as_it_is(node, view);
        if counts || (content == Content::Plain && (skip > 0 || bits % 8 > 0)) {
            let next = self.draft.nodes.len() as u32 + 1;
            content = self.draft.fix(Fix::Bits {
                skip: skip as u8,
                bits,
                counts: NonZeroU32::new(next).filter(|_| counts),
            });
        }
        let buffer = Source::of(source, first / 8, bits.div_ceil(8), content);
        self.draft.buffers.push(buffer);
    }

    /// Has the node wait for the answers to these requests.
    fn wait_for(&mut self, node: usize, view: View, need: Need, requests: &[Request]) {
        self.waiting.push(Waiting {
            node,
            view,
            request: self.requests.len(),
            need,
        });
        self.requests.extend(requests);
    }

    /// Adds the data buffers of a view array: all, or those that the rows refer to if the host can read the views.
    fn variadic(&mut self, node: usize, view: View) -> Result<()> {
        let tree = self.tree;
        if let Some(sizes) = Sizes::of(tree, view.node) {
            self.wait_for(node, view, Need::Sizes(sizes), &[sizes.request]);
            return Ok(());
        }
        let slots = tree.slots(view.node);
        let variadic = &slots[2..slots.len() - 1];
        let used = self.readable.then(|| {
            // SAFETY: the host can read the views (`readable`), which are ready (`plan_with` waited); that there are
            // `offset + length` of them was checked when the array was made.
            unsafe { referenced(slots[1].address(), view, variadic.len()) }
        });
        let content = as_it_is(&tree.nodes[view.node], view);
        let first = self.draft.nodes[node].first_slot as usize + 2;
        for (i, source) in variadic.iter().enumerate() {
            let bytes = source.bytes().unwrap_or(0);
            let wanted = used.as_ref().is_none_or(|used| used[i]);
            if wanted && bytes > 0 && view.length > 0 {
                self.draft.buffers[first + i] = Source::of(source, 0, bytes, content);
            }
        }
        Ok(())
    }

    /// Goes on with a node whose numbers are there.
    fn resume(&mut self, waiting: &Waiting, answers: &Answers) -> Result<()> {
        let Waiting {
            node,
            view,
            request,
            need,
        } = *waiting;
        match need {
            Need::Ends => {
                let width = self.offset_width(view);
                let first = answers.int(request, 0, width);
                let last = answers.int(request + 1, 0, width);
                self.range(node, view, width, first, last)
            }
            Need::Runs => self.cut_runs(node, view, answers.bytes(request)),
            Need::Sizes(sizes) => {
                sizes.set(self.tree, answers.bytes(request))?;
                match self.tree.layout(view.node).variadic {
                    true => self.variadic(node, view),
                    false => self.offsets(node, view, self.offset_width(view)),
                }
            }
        }
    }

    /// The bytes of an offset, where there is one more than rows.
    fn offset_width(&self, view: View) -> usize {
        match self.tree.layout(view.node).buffers().get(1) {
            Some(BufferKind::Offsets { width }) => usize::from(*width),
            _ => 0,
        }
    }
}

/// The content of buffers whose bytes need no change.
fn as_it_is(node: &Node, view: View) -> Content {
    let whole = !node.cut && view.offset == 0 && node.offset == 0 && view.length == node.length;
    match node.padded && whole {
        true => Content::Padded,
        false => Content::Plain,
    }
}

/// Returns which of `n` data buffers a view's rows refer to. Rows that are null may refer to any.
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
        // SAFETY: the caller guarantees `offset + length` readable views, and `row` is one of them.
        let value = unsafe { first.add(row).read_unaligned() };
        // The length is in the low 32 bits; if it is over 12, the buffer's index is in the third 32 bits.
        if value as u32 > 12 {
            if let Some(used) = used.get_mut((value >> 64) as u32 as usize) {
                *used = true;
            }
        }
    }
    used
}
