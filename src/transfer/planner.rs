//! Plans a transfer: which bytes of which buffers are copied, and what the host must change in them. The rows of several arrays
//! of one type become one array, one after the other; most transfers have one.
//!
//! A plan follows from the layout and from a few numbers that are read from the sources: for slices of nested arrays one
//! read for each level of offsets, all columns together; for whole arrays whose sizes are known none.

mod anywhere;
mod bitmaps;
mod ranges;
mod runs;

use std::borrow::Borrow;

use arrow_schema::DataType;

use crate::data::DeviceArray;
use crate::data::gather::{Answers, Request, gather};
use crate::data::layout::{BufferKind, Nesting, check_rows};
use crate::data::node::{NodeBuffer, NullCount, View};
use crate::data::resolve::check_size;
use crate::device::{ALIGNMENT, Device, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::transfer::fix::Fix;
use crate::transfer::plan::{Plan, Region, too_large};

/// How much of an array a transfer copies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Extent {
    /// Its rows. Where the host cannot read the array, the offsets of whole arrays are copied unchanged, and unknown null
    /// counts stay unknown.
    Rows,
    /// Its rows, with offsets that start at 0 and known null counts, even if that takes further reads.
    Compact,
    /// Everything that safe calls can reach from it. [`DeviceArray::child`] returns the whole child of a list, list view,
    /// dense union or run-end encoded array, however few of its rows the array refers to.
    Reachable,
}

/// The rows that become a node, one part after the other: of one array, or of several.
#[derive(Clone, Debug)]
struct Parts<'a> {
    first: View<'a>,
    more: Vec<View<'a>>,
}

impl<'a> Parts<'a> {
    /// The views, of which there is at least one.
    fn of(views: impl IntoIterator<Item = View<'a>>) -> Option<Self> {
        let mut views = views.into_iter();
        Some(Self {
            first: views.next()?,
            more: views.collect(),
        })
    }

    fn iter(&self) -> impl Iterator<Item = View<'a>> + Clone + '_ {
        std::iter::once(self.first).chain(self.more.iter().copied())
    }

    fn map(&self, f: impl Fn(View<'a>) -> View<'a>) -> Self {
        Self {
            first: f(self.first),
            more: self.more.iter().map(|view| f(*view)).collect(),
        }
    }

    fn is_one(&self) -> bool {
        self.more.is_empty()
    }

    /// The parts that have rows, or the first one if none has.
    fn with_rows(self) -> Self {
        if self.is_one() {
            return self;
        }
        let first = self.first;
        let views: Vec<_> = self.iter().filter(|view| view.length > 0).collect();
        Self::of(views).unwrap_or(Self {
            first,
            more: Vec::new(),
        })
    }

    /// The rows of all.
    fn rows(&self) -> Result<usize> {
        let mut lengths = self.iter().map(|view| view.length);
        let rows = lengths.try_fold(0usize, usize::checked_add);
        rows.ok_or_else(too_large)
    }
}

struct Planner<'a> {
    arrays: &'a [&'a DeviceArray],
    device: &'a Device,
    extent: Extent,
    /// The host can read the sources, which are ready.
    readable: bool,
    /// Whether buffers without bytes have an address. Null is legal, but Arrow C++ considers null to be the CPU's memory, so that
    /// they have one on a device.
    nothing: bool,
    plan: Plan,
    /// Nodes whose children are not planned yet, with their rows in the sources.
    parents: Vec<(usize, Parts<'a>)>,
    waiting: Vec<Waiting<'a>>,
    requests: Vec<Request>,
}

/// A node whose plan needs numbers that are stored in the sources.
struct Waiting<'a> {
    node: usize,
    parts: Parts<'a>,
    /// The index of the first of its requests.
    request: usize,
    need: Need,
}

#[derive(Clone, Copy)]
enum Need {
    /// The first and the last offset of each part.
    Ends,
    /// The last offset of an array that starts at the first row of its buffers.
    Last,
    /// All run ends of each part.
    Runs,
    /// The sizes of the variadic buffers of each part, in bytes.
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
    let plan = plan_with(&[array], extent, to, read)?;
    plan.ok_or_else(|| Error::argument("a plan without its numbers"))
}

/// As [`plan`], for the rows of several arrays of one type and device, of which there is at least one; `read` reads the numbers. Each
/// request lies in the arrays' memory: it is for rows inside a node's
/// buffers, whose sizes the import has checked or arrow-rs guarantees. If `read` returns `None`, so does this function. A
/// later call makes the same requests again, without those whose answers the arrays keep.
pub(crate) fn plan_with<A: Borrow<Answers>>(
    arrays: &[&DeviceArray],
    extent: Extent,
    to: Option<&Device>,
    mut read: impl FnMut(&[Request]) -> Result<Option<A>>,
) -> Result<Option<Plan>> {
    let Some(parts) = Parts::of(arrays.iter().map(|array| array.view())) else {
        return Ok(None);
    };
    let device = arrays[0].device();
    let readable = device.is_host_readable();
    if readable {
        arrays.iter().try_for_each(|array| array.wait())?;
    }
    let nulls = match parts.is_one() {
        true => arrays[0].null_count(),
        false => None,
    };
    let mut planner = Planner {
        arrays,
        device,
        extent,
        readable,
        nothing: to.is_some(),
        plan: Plan::default(),
        parents: Vec::new(),
        waiting: Vec::new(),
        requests: Vec::new(),
    };
    planner.node(parts, nulls)?;
    let mut next = 0;
    loop {
        while let Some((node, parts)) = planner.parents.get(next).cloned() {
            next += 1;
            planner.descend(node, parts)?;
        }
        if planner.waiting.is_empty() {
            break;
        }
        let requests = std::mem::take(&mut planner.requests);
        let Some(answers) = read(&requests)? else {
            return Ok(None);
        };
        for waiting in std::mem::take(&mut planner.waiting) {
            planner.resume(waiting, answers.borrow())?;
        }
    }
    // A producer may refer to the same memory from any number of nodes, and all of it is reachable.
    let grain = to.map_or(ALIGNMENT, Device::alignment);
    let share = extent == Extent::Reachable;
    planner.plan.lay_out(share, grain)?;
    Ok(Some(planner.plan))
}

impl<'a> Planner<'a> {
    /// Adds a node, and those of its buffers that follow from its type. Its children are added later, because siblings
    /// must be next to each other. `nulls` is the null count, if the caller knows it.
    fn node(&mut self, parts: Parts<'a>, nulls: Option<usize>) -> Result<()> {
        let parts = parts.with_rows();
        let (view, length) = (parts.first, parts.rows()?);
        check_rows(length)?;
        let layout = view.layout();
        let n_buffers = match layout.variadic && !parts.is_one() {
            true => 3 + anywhere::data_buffers(&parts).0.len(),
            false => view.node.buffers.len(),
        };
        let node = self.plan.node(length, n_buffers);
        let nulls = match layout.has_validity() {
            true => self.validity(node, &parts, nulls)?,
            false => Some(if layout.is_null_type() { length } else { 0 }),
        };
        self.plan.nodes[node].nulls = NullCount::from(nulls);
        let is_leaf = view.node.children.is_empty();
        for (i, kind) in layout.buffers().iter().enumerate() {
            match kind {
                BufferKind::Fixed { .. } if is_leaf && !layout.variadic => {
                    self.values(node, &parts, i, |_| Fix::None)?;
                }
                BufferKind::Bits => self.bits(node, &parts, i)?,
                // The others depend on what they refer to.
                _ => {}
            }
        }
        if !is_leaf {
            self.parents.push((node, parts));
            Ok(())
        } else if layout.variadic {
            self.views(node, parts)
        } else if let Some(BufferKind::Offsets { .. }) = layout.buffers().get(1) {
            self.offsets(node, parts)
        } else {
            Ok(())
        }
    }

    /// Adds the children of a node, whose siblings have been added, and what refers to them.
    fn descend(&mut self, node: usize, parts: Parts<'a>) -> Result<()> {
        let layout = parts.first.layout();
        match layout.nesting {
            Nesting::Ranges => self.offsets(node, parts),
            Nesting::Runs if !(parts.is_one() && self.is_whole(parts.first)) => {
                self.runs(node, parts)
            }
            Nesting::Dictionary => self.dictionary(node, &parts),
            Nesting::Anywhere => self.anywhere(node, &parts),
            nesting => {
                if let Some(BufferKind::Fixed { .. }) = layout.buffers().first() {
                    // The type ids of a sparse union.
                    self.values(node, &parts, 0, |_| Fix::None)?;
                }
                let n = layout.n_children();
                self.plan.begin_children(node, n);
                for i in 0..n {
                    self.node(parts.map(|view| view.child(i)), None)?;
                }
                if nesting == Nesting::Runs {
                    // All runs are copied, so the array keeps its offset.
                    self.plan.nodes[node].offset = parts.first.offset;
                }
                Ok(())
            }
        }
    }

    /// Whether offsets must start at 0 and null counts must be known.
    fn is_exact(&self) -> bool {
        self.extent == Extent::Compact
    }

    /// Whether children are copied whole, with rows that the view does not refer to.
    fn is_whole(&self, view: View<'_>) -> bool {
        self.extent == Extent::Reachable || view.is_uncut()
    }

    /// Adds buffer `i`, of values of one width for each row, to which `fix` is applied, part by part.
    fn values(
        &mut self,
        node: usize,
        parts: &Parts<'a>,
        i: usize,
        fix: impl Fn(usize) -> Fix,
    ) -> Result<()> {
        let Some(BufferKind::Fixed { width, .. }) = parts.first.layout().buffers().get(i) else {
            return Ok(());
        };
        let width = *width as usize;
        let mut regions = Vec::new();
        for (k, view) in parts.iter().enumerate() {
            let source = &view.node.buffers[i];
            if source.is_null() && !parts.is_one() && view.length * width > 0 {
                return Err(Error::invalid(self.path(view, i), "is null but has rows"));
            }
            if source.is_null() {
                continue;
            }
            let from = source.offset + view.offset * width;
            let region = Region::new(source.base, from, view.length.saturating_mul(width));
            let region = region.fixed(fix(k)).whole(parts.is_one() && is_whole(view));
            if parts.is_one() {
                self.plan.fill(node, i, self.nothing, [region]);
                return Ok(());
            }
            regions.push(region);
        }
        self.plan.fill(node, i, self.nothing, regions);
        Ok(())
    }

    /// Sets a buffer to bytes that are known already.
    fn ready(&mut self, node: usize, i: usize, bytes: &[u8]) {
        let fix = Fix::Ready(self.plan.made.ready.len());
        self.plan.made.ready.extend_from_slice(bytes);
        self.plan
            .fill(node, i, true, [Region::made(fix, bytes.len())]);
    }

    /// Keeps a node until the answers to `requests` are there.
    fn wait_for(&mut self, node: usize, parts: Parts<'a>, need: Need, requests: Vec<Request>) {
        self.waiting.push(Waiting {
            node,
            parts,
            request: self.requests.len(),
            need,
        });
        self.requests.extend(requests);
    }

    fn resume(&mut self, waiting: Waiting<'a>, answers: &Answers) -> Result<()> {
        let Waiting {
            node,
            parts,
            request,
            need,
        } = waiting;
        match need {
            Need::Ends => {
                let width = ranges::width(parts.first);
                let end = |i| answers.int(request + i, 0, width);
                let n = 1 + parts.more.len();
                let ends: Vec<_> = (0..n).map(|k| (end(2 * k), end(2 * k + 1))).collect();
                self.range(node, &parts, &ends)
            }
            Need::Last => {
                let last = answers.int(request, 0, ranges::width(parts.first));
                let bytes = self.keep_size(parts.first, 2, last)?;
                self.whole_range(node, parts.first, Err(bytes))
            }
            Need::Runs => {
                let n = 1 + parts.more.len();
                let ends: Vec<_> = (0..n).map(|k| answers.bytes(request + k)).collect();
                self.cut_runs(node, &parts, &ends)
            }
            Need::Sizes => {
                for (k, view) in parts.iter().enumerate() {
                    let sizes = answers.bytes(request + k).len() / 8;
                    for i in 0..sizes {
                        self.keep_size(view, 2 + i, answers.int(request + k, i, 8))?;
                    }
                }
                self.views(node, parts)
            }
        }
    }

    /// Keeps the size of buffer `i`, which was read.
    fn keep_size(&self, view: View<'_>, i: usize, bytes: i64) -> Result<usize> {
        let buffer = &view.node.buffers[i];
        let at = || self.path(view, i);
        let bytes = check_size(self.device, buffer.address(), bytes, at)?;
        buffer.set_bytes(bytes);
        Ok(bytes)
    }

    /// Refuses more than `most` of `what`, which the integers of the type cannot express, in the result of several arrays.
    fn check_most(
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
            self.device,
            self.node_path(view),
            view.node.data_type
        )))
    }

    /// The path of a buffer, for errors.
    #[cold]
    fn path(&self, view: View<'_>, buffer: usize) -> String {
        format!("{}.buffers[{buffer}]", self.node_path(view))
    }

    /// The path of a node in the array that has it, for errors.
    #[cold]
    fn node_path(&self, view: View<'_>) -> String {
        let mut paths = self
            .arrays
            .iter()
            .filter_map(|array| array.node().path(view.node));
        paths.next().unwrap_or_else(|| "array".into())
    }
}

/// Whether an earlier transfer wrote the node, and the view is all of it.
fn is_whole(view: View<'_>) -> bool {
    view.node.padded && view.is_uncut()
}

/// A request for ordinary bytes of an array.
fn request(address: DevicePtr, bytes: usize) -> Request {
    Request {
        address,
        bytes,
        on_host: false,
    }
}

/// The bytes of an integer of the type, which is that of keys or run ends.
fn int_width(data_type: &DataType) -> usize {
    data_type.primitive_width().unwrap_or(8)
}

/// The bytes of a buffer from `from` on.
fn region_of(buffer: &NodeBuffer, from: usize, bytes: usize) -> Region {
    Region::new(buffer.base, buffer.offset + from, bytes)
}
