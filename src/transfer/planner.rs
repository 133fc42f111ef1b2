//! Plans a transfer: which bytes of which buffers are copied, and what the host must change in them.
//!
//! A plan follows from the layout and from a few numbers that are read from the source: for slices of nested arrays one
//! read for each level of offsets, all columns together; for whole arrays whose sizes are known none.

mod ranges;
mod runs;

use std::borrow::Borrow;
use std::num::NonZeroU32;

use crate::data::DeviceArray;
use crate::data::gather::{Answers, Request, gather};
use crate::data::layout::{BufferKind, Nesting};
use crate::data::node::{NodeBuffer, NullCount, View};
use crate::data::nulls::count_bits;
use crate::data::sizes::check_size;
use crate::device::{ALIGNMENT, AddressClass, Device, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::transfer::fix::Fix;
use crate::transfer::plan::{Plan, PlanNode, Region, SLAB};

/// How much of an array a transfer copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Extent {
    /// Its rows. Where the host cannot read the array, the offsets of whole arrays are copied unchanged, and unknown null
    /// counts stay unknown.
    Rows,
    /// As `Rows`, to the host, where each column has a slab of its own: each child of the root. Those of fewer than
    /// [`SMALL_COLUMN`] bytes share some.
    #[cfg_attr(not(feature = "async"), allow(dead_code, reason = "of async streams"))]
    Columns,
    /// Its rows, with offsets that start at 0 and known null counts, even if that takes further reads.
    Compact,
    /// As `Compact`, for a plan that is merged with those of other arrays: every buffer has a piece of its own, and run
    /// ends are always read and made by the host.
    Concat,
    /// Everything that safe calls can reach from it. [`DeviceArray::child`] returns the whole child of a list, list view,
    /// dense union or run-end encoded array, however few of its rows the array refers to.
    Reachable,
}

/// Columns of fewer bytes share slabs: one of its own would waste as much.
const SMALL_COLUMN: usize = 16 << 10;

struct Planner<'a> {
    array: &'a DeviceArray,
    extent: Extent,
    /// The host can read the source, which is ready.
    readable: bool,
    /// The base of buffers without bytes. Null is legal, but Arrow C++ considers null to be the CPU's memory, so that it is
    /// the slab on a device.
    nothing: DevicePtr,
    plan: Plan,
    /// Nodes whose children are not planned yet, with their rows in the source.
    parents: Vec<(usize, View<'a>)>,
    waiting: Vec<Waiting<'a>>,
    requests: Vec<Request>,
}

/// A node whose plan needs numbers that are stored in the source.
struct Waiting<'a> {
    node: usize,
    view: View<'a>,
    /// The index of the first of its requests.
    request: usize,
    need: Need,
}

#[derive(Clone, Copy)]
enum Need {
    /// The first and the last offset.
    Ends,
    /// The last offset of an array that starts at the first row of its buffers.
    Last,
    /// All run ends.
    Runs,
    /// The sizes of the variadic buffers, in bytes.
    Sizes,
}

/// Plans the transfer of an array to the device `to`, or to a slab on the host. If the host can read the source, this waits until
/// it is ready. Numbers that are stored in device memory are read on `queue`, a queue of the source's device, or on its
/// default queue.
pub(crate) fn plan(
    array: &DeviceArray,
    extent: Extent,
    to: Option<&Device>,
    queue: Option<&Queue>,
) -> Result<Plan> {
    let read = |requests: &[_]| {
        // SAFETY: the requests of `plan_with` lie in the array's memory (see there), to which nobody writes: imports and
        // constructors demand it.
        unsafe { gather(array, requests, queue) }.map(Some)
    };
    let plan = plan_with(array, extent, to, read)?;
    plan.ok_or_else(|| Error::argument("a plan without its numbers"))
}

/// As [`plan`], but `read` reads the numbers. Each request lies in the array's memory: it is for rows inside a node's
/// buffers, whose sizes the import has checked or arrow-rs guarantees. If `read` returns `None`, so does this function. A
/// later call makes the same requests again, without those whose answers the array keeps.
pub(crate) fn plan_with<A: Borrow<Answers>>(
    array: &DeviceArray,
    extent: Extent,
    to: Option<&Device>,
    mut read: impl FnMut(&[Request]) -> Result<Option<A>>,
) -> Result<Option<Plan>> {
    let readable = array.device().is_host_readable();
    if readable {
        array.wait()?;
    }
    let mut planner = Planner {
        array,
        extent,
        readable,
        nothing: to.map_or(DevicePtr::NULL, |_| SLAB),
        plan: Plan::default(),
        parents: Vec::new(),
        waiting: Vec::new(),
        requests: Vec::new(),
    };
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
        let Some(answers) = read(&requests)? else {
            return Ok(None);
        };
        for waiting in std::mem::take(&mut planner.waiting) {
            planner.resume(&waiting, answers.borrow())?;
        }
    }
    let groups = match extent {
        Extent::Columns => planner.plan.columns(SMALL_COLUMN),
        _ => Vec::new(),
    };
    // A producer may refer to the same memory from any number of nodes, and all of it is reachable.
    let grain = to.map_or(ALIGNMENT, Device::alignment);
    let share = extent == Extent::Reachable;
    planner.plan.lay_out(share, grain, &groups)?;
    Ok(Some(planner.plan))
}

impl<'a> Planner<'a> {
    /// Adds a node, and those of its buffers that follow from its type. Its children are added later, because siblings
    /// must be next to each other. `nulls` is the null count, if the caller knows it.
    fn node(&mut self, view: View<'a>, nulls: Option<usize>, parent: usize) -> Result<()> {
        let layout = view.layout();
        let node = self.plan.nodes.len();
        let first_region = self.plan.regions.len();
        let mut kinds = layout.buffers();
        let mut rest = &view.node.buffers[..];
        let mut nulls = nulls;
        if let ([BufferKind::Validity, others @ ..], [bitmap, buffers @ ..]) = (kinds, rest) {
            (kinds, rest) = (others, buffers);
            if bitmap.is_null() {
                nulls = Some(0);
                self.plan.regions.push(Region::absent());
            } else {
                nulls = self.validity(view, bitmap, nulls);
            }
        } else {
            nulls = Some(if layout.is_null_type() {
                view.length
            } else {
                0
            });
        }
        self.plan.nodes.push(PlanNode {
            nulls: NullCount::from(nulls),
            ..PlanNode::new(*layout, view.length, parent, first_region)
        });
        let whole = is_whole(view);
        let mut kinds = kinds.iter();
        for source in rest {
            match kinds.next() {
                Some(_) if view.length == 0 || source.is_null() => self.nothing(),
                Some(BufferKind::Fixed { width, .. }) => {
                    let width = *width as usize;
                    // `lay_out` refuses buffers that do not fit in memory.
                    let bytes = view.length.saturating_mul(width);
                    let from = source.offset + view.offset * width;
                    let region = Region::new(source.base, from, bytes);
                    self.plan.regions.push(region.whole(whole));
                }
                Some(BufferKind::Bits) => self.bits(view, source, view.offset, false),
                // Offsets, and what they refer to, are filled in below or later.
                _ => self.nothing(),
            }
        }
        self.plan.nodes[node].regions.end = self.plan.regions.len();
        if !view.node.children.is_empty() {
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

    /// Adds a buffer without bytes, or one that is filled in later.
    fn nothing(&mut self) {
        self.plan.regions.push(Region::empty(self.nothing));
    }

    /// Adds the children of a node, whose siblings have been added, and the offsets of lists and maps.
    fn descend(&mut self, node: usize, view: View<'a>) -> Result<()> {
        let layout = view.layout();
        match layout.nesting {
            Nesting::Ranges => match layout.buffers().get(1) {
                Some(BufferKind::Offsets { width }) => {
                    self.offsets(node, view, usize::from(*width))
                }
                _ => Ok(()),
            },
            Nesting::Runs if self.extent == Extent::Concat || !self.is_whole(view) => {
                self.runs(node, view)
            }
            nesting => {
                let n = layout.n_children();
                self.begin_children(node, n);
                for i in 0..n {
                    let mut child = view.child(i);
                    let none = nesting == Nesting::Anywhere && view.length == 0;
                    if none && self.extent != Extent::Reachable {
                        child.length = 0;
                    }
                    self.node(child, None, node)?;
                }
                if nesting == Nesting::Runs {
                    // All runs are copied, so the array keeps its offset.
                    self.plan.nodes[node].offset = view.offset;
                }
                Ok(())
            }
        }
    }

    /// Whether offsets must start at 0 and null counts must be known.
    fn is_exact(&self) -> bool {
        matches!(self.extent, Extent::Compact | Extent::Concat)
    }

    /// Whether children are copied whole, with rows that the view does not refer to.
    fn is_whole(&self, view: View<'_>) -> bool {
        self.extent == Extent::Reachable || view.is_uncut()
    }

    /// Declares that the next `n` nodes are the children of `node`.
    fn begin_children(&mut self, node: usize, n: usize) {
        let first = self.plan.nodes.len();
        self.plan.nodes[node].first_child = first;
        self.plan.nodes[node].n_children = n;
    }

    /// Adds the validity bitmap of the next node; returns its null count.
    #[inline(never)]
    fn validity(
        &mut self,
        view: View<'a>,
        bitmap: &NodeBuffer,
        nulls: Option<usize>,
    ) -> Option<usize> {
        let nulls = nulls.or_else(|| view.null_count()).or_else(|| {
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
            self.plan.regions.push(Region::absent());
        } else {
            let counts = nulls.is_none() && self.is_exact();
            self.bits(view, bitmap, view.validity_offset, counts);
        }
        nulls
    }

    /// Adds the bits of a view's rows, which start at bit `first` of `source`. With `counts` they are the validity bitmap
    /// of the next node, and the host counts its nulls.
    #[inline(never)]
    fn bits(&mut self, view: View<'a>, source: &NodeBuffer, first: usize, counts: bool) {
        let (skip, bits) = (first % 8, view.length);
        let rewritten = skip > 0 || bits % 8 > 0;
        let from = source.offset + first / 8;
        let region = Region::new(source.base, from, bits.div_ceil(8));
        let region = if counts || (!is_whole(view) && rewritten) {
            let next = self.plan.nodes.len() as u32 + 1;
            region.fixed(Fix::Bits {
                skip: skip as u8,
                bits,
                counts: NonZeroU32::new(next).filter(|_| counts),
            })
        } else {
            region.whole(is_whole(view))
        };
        self.plan.regions.push(region);
    }

    /// Sets a buffer to bytes that are known already.
    fn ready(&mut self, slot: usize, bytes: &[u8]) {
        let fix = Fix::Ready(self.plan.ready.len());
        self.plan.ready.extend_from_slice(bytes);
        self.plan.regions[slot] = Region::new(SLAB, 0, bytes.len()).fixed(fix);
    }

    fn wait_for(
        &mut self,
        node: usize,
        view: View<'a>,
        need: Need,
        requests: &[(DevicePtr, usize)],
    ) {
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

    /// Adds the variadic buffers of a view type: those that the rows refer to if the host can read the views, otherwise all.
    fn variadic(&mut self, node: usize, view: View<'a>) -> Result<()> {
        let [_, views, variadic @ .., sizes] = &view.node.buffers[..] else {
            return Ok(());
        };
        if variadic.iter().any(|data| data.bytes().is_none()) {
            self.wait_for(
                node,
                view,
                Need::Sizes,
                &[(sizes.address(), variadic.len() * 8)],
            );
            let request = self.requests.last_mut().expect("just pushed");
            let backend = self.array.device().backend();
            let class = backend.classify(request.address, request.bytes);
            request.on_host = class == AddressClass::Host;
            return Ok(());
        }
        let used = self.readable.then(|| {
            // SAFETY: the host can read the views (`readable`), which are ready (`plan_with` waited); that there are
            // `offset + length` of them was checked when the array was made.
            unsafe { referenced(views.address(), view, variadic.len()) }
        });
        let first = self.plan.nodes[node].regions.start + 2;
        for (i, source) in variadic.iter().enumerate() {
            let bytes = source.bytes().unwrap_or(0);
            let wanted = used.as_ref().is_none_or(|used| used[i]);
            if wanted && bytes > 0 && view.length > 0 {
                self.plan.regions[first + i] =
                    Region::new(source.base, source.offset, bytes).whole(is_whole(view));
            }
        }
        Ok(())
    }

    fn resume(&mut self, waiting: &Waiting<'a>, answers: &Answers) -> Result<()> {
        let Waiting {
            node,
            view,
            request,
            need,
        } = *waiting;
        let width = match view.layout().buffers().get(1) {
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
                let last = answers.int(request, 0, width);
                let bytes = self.keep_size(view, 2, last)?;
                self.whole_range(node, view, width, Err(bytes))
            }
            Need::Runs => self.cut_runs(node, view, answers.bytes(request)),
            Need::Sizes => {
                for k in 0..view.node.buffers.len() - 3 {
                    self.keep_size(view, 2 + k, answers.int(request, k, 8))?;
                }
                self.variadic(node, view)
            }
        }
    }

    /// Keeps the size of buffer `i`, which was read.
    fn keep_size(&self, view: View<'_>, i: usize, bytes: i64) -> Result<usize> {
        let buffer = &view.node.buffers[i];
        let at = || self.path(view, i);
        let bytes = check_size(self.array.device(), buffer.address(), bytes, at)?;
        buffer.set_bytes(bytes);
        Ok(bytes)
    }

    /// The path of a buffer, for errors.
    #[cold]
    fn path(&self, view: View<'_>, buffer: usize) -> String {
        self.array.node().buffer_path(view.node, buffer)
    }
}

/// Whether an earlier transfer wrote the node, and the view is all of it.
fn is_whole(view: View<'_>) -> bool {
    view.node.padded && view.is_uncut()
}

/// Returns which of `n` variadic buffers a view's rows refer to, null rows included.
///
/// # Safety
/// `views` is readable host memory for `offset + length` views of 16 bytes.
unsafe fn referenced(views: DevicePtr, view: View<'_>, n: usize) -> Vec<bool> {
    let mut used = vec![false; n];
    if n == 0 || views.is_null() {
        return used;
    }
    let first = views.as_ptr().cast::<u128>().cast_const();
    for row in view.offset..view.offset + view.length {
        // SAFETY: the caller guarantees `offset + length` readable views, and `row` is one of them.
        let value = unsafe { first.add(row).read_unaligned() };
        // The low 32 bits are the length; if it is more than 12, bits 64 to 95 are the buffer's index.
        if value as u32 > 12 {
            if let Some(used) = used.get_mut((value >> 64) as u32 as usize) {
                *used = true;
            }
        }
    }
    used
}
