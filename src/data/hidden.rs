//! What hides on a device: lengths in offsets, and null counts in masks. Both stay unknown until
//! asked for; then all of an array's are read at once: one list of copies, one host wait.

use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::array::DeviceArray;
use crate::data::layout::BufferKind;
use crate::data::parts::Parts;
use crate::data::tree::{Tree, View};
use crate::device::{AddressClass, CopyKind, CopyOp, Counters, DeviceId, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{HostSlab, Owner, Reading};

/// A small piece of an array's memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Request {
    pub(crate) address: DevicePtr,
    pub(crate) bytes: usize,
    /// Ordinary host memory, whatever device the array is of.
    pub(crate) on_host: bool,
}

/// The answers to a list of requests.
#[derive(Debug)]
pub(crate) struct Answers {
    slab: HostSlab,
    /// First byte and number of bytes of each.
    ranges: Vec<(usize, usize)>,
}

impl Answers {
    /// The bytes of request `i`, aligned to 8.
    pub(crate) fn bytes(&self, i: usize) -> &[u8] {
        let (start, bytes) = self.ranges[i];
        &self.slab[start..start + bytes]
    }

    /// Integer `k` of `width` bytes of request `i`; its bytes were asked for.
    pub(crate) fn int(&self, i: usize, k: usize, width: usize) -> i64 {
        int(&self.bytes(i)[k * width..], width)
    }
}

/// The little-endian signed integer of `width` bytes at the start of `bytes`.
pub(crate) fn int(bytes: &[u8], width: usize) -> i64 {
    let mut wide = [0; 8];
    wide[..width].copy_from_slice(&bytes[..width]);
    // Sign extension by shifting up and down again.
    let shift = 64 - 8 * width as u32;
    (i64::from_ne_bytes(wide) << shift) >> shift
}

/// A list of requests under way.
#[derive(Debug)]
pub(crate) struct Gathering {
    answers: Arrival,
    ranges: Vec<(usize, usize)>,
}

#[derive(Debug)]
enum Arrival {
    Here(HostSlab),
    /// With the owners of what is read.
    Coming(Reading<Vec<Arc<Owner>>>),
}

/// Reads all `requests` of a tree: one list of copies, one host wait.
///
/// # Safety
/// As [`Gathering::start`].
pub(crate) unsafe fn gather(tree: &Tree, requests: &[Request]) -> Result<Answers> {
    // SAFETY: the caller's.
    unsafe { Gathering::start(tree, requests, None) }?.finish()
}

impl Gathering {
    /// Gives the copies to `queue`, the device's default one if none is named. Waits only for memory
    /// that the host reads itself.
    ///
    /// # Safety
    /// Each request lies in the tree's memory (or, `on_host`, in host memory that the tree's owners
    /// keep alive) for its whole length.
    pub(crate) unsafe fn start(
        tree: &Tree,
        requests: &[Request],
        queue: Option<&Queue>,
    ) -> Result<Self> {
        let mut ranges = Vec::with_capacity(requests.len());
        let mut total = 0usize;
        for request in requests {
            ranges.push((total, request.bytes));
            total = request
                .bytes
                .checked_next_multiple_of(8)
                .and_then(|n| total.checked_add(n))
                .ok_or_else(|| Error::argument("too many bytes to read back"))?;
        }
        let device = &tree.device;
        let slab = device.host_slab(total)?;
        let owners = tree.owners.as_slice();
        let on_host = |r: &Request| r.on_host || device.is_host_readable();
        if requests.iter().any(on_host) {
            owners.iter().try_for_each(|owner| owner.wait_host())?;
        }
        let mut copies = Vec::new();
        for (request, (start, _)) in requests.iter().zip(&ranges) {
            if request.bytes == 0 {
                continue;
            }
            let dst = slab.as_device_ptr().offset(*start);
            if on_host(request) {
                Counters::add(&device.counters().host_copied_bytes, request.bytes);
                // SAFETY: the caller's; the memory is ready, and the slab has room.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        request.address.as_ptr().cast::<u8>(),
                        dst.as_ptr().cast(),
                        request.bytes,
                    );
                }
            } else {
                copies.push(CopyOp {
                    src: request.address,
                    dst,
                    bytes: request.bytes,
                    kind: CopyKind::DeviceToHost,
                });
            }
        }
        if copies.is_empty() {
            let answers = Arrival::Here(slab);
            return Ok(Self { answers, ranges });
        }
        let default;
        let queue = match queue {
            Some(queue) => queue,
            None => {
                default = device.default_queue();
                &default
            }
        };
        // SAFETY: the caller's; the slab has room for each.
        let reading = unsafe { Reading::start(queue, owners, &copies, slab, owners.to_vec()) }?;
        let answers = Arrival::Coming(reading);
        Ok(Self { answers, ranges })
    }

    /// When the answers are there; `None` if they are.
    #[cfg(feature = "async")]
    pub(crate) fn event(&self) -> Option<&crate::device::SyncEvent> {
        match &self.answers {
            Arrival::Here(_) => None,
            Arrival::Coming(reading) => reading.event(),
        }
    }

    /// The event was waited for: [`finish`](Self::finish) does not wait again.
    #[cfg(feature = "async")]
    pub(crate) fn waited(&mut self) {
        if let Arrival::Coming(reading) = &mut self.answers {
            reading.waited();
        }
    }

    /// Makes this thread wait for the answers: one host wait, if there are copies.
    pub(crate) fn finish(self) -> Result<Answers> {
        let slab = match self.answers {
            Arrival::Here(slab) => slab,
            Arrival::Coming(reading) => reading.finish()?.0,
        };
        let ranges = self.ranges;
        Ok(Answers { slab, ranges })
    }
}

/// Resolves all lengths of an array and its descendants that are still unknown: in place where the
/// host can read them, else with one read.
pub(crate) fn resolve_sizes(array: &DeviceArray) -> Result<()> {
    let tree = array.tree();
    let mut hidden = Vec::new();
    hidden_sizes(tree, array.view().node, &mut hidden);
    if hidden.is_empty() {
        return Ok(());
    }
    if tree.device.is_host_readable() {
        let mut owners = tree.owners.as_slice().iter();
        owners.try_for_each(|owner| owner.wait_host())?;
        // SAFETY: the memory is ready.
        return hidden
            .iter()
            .try_for_each(|sizes| unsafe { sizes.read(tree) });
    }
    let requests: Vec<_> = hidden.iter().map(|sizes| sizes.request).collect();
    // SAFETY: the import checked that offsets have `offset + length + 1` elements and that lengths
    // have one for each variadic buffer.
    let answers = unsafe { gather(tree, &requests) }?;
    let mut hidden = hidden.iter().enumerate();
    hidden.try_for_each(|(i, sizes)| sizes.set(tree, answers.bytes(i)))
}

/// Resolves the lengths of a node's own buffers.
///
/// # Safety
/// The host can read the tree's memory, and it is ready.
pub(crate) unsafe fn read_sizes(tree: &Tree, node: usize) -> Result<()> {
    // SAFETY: the caller's.
    Sizes::of(tree, node).map_or(Ok(()), |sizes| unsafe { sizes.read(tree) })
}

/// Refuses lengths (bytes) that cannot be: negative, or more than the device has at the address.
pub(crate) fn check_size(
    tree: &Tree,
    address: DevicePtr,
    bytes: i64,
    path: impl Fn() -> String,
) -> Result<usize> {
    let fits = isize::try_from(bytes).ok().filter(|n| *n >= 0);
    // Nor may the end lie outside the address space.
    let fits =
        fits.filter(|n| isize::try_from(address.address().saturating_add(*n as usize)).is_ok());
    let Some(bytes) = fits else {
        return Err(Error::invalid(
            path(),
            format!("has a length of {bytes} bytes"),
        ));
    };
    let bytes = bytes as usize;
    if bytes > 0 && address.is_null() {
        return Err(Error::invalid(
            path(),
            format!("is null but {bytes} bytes long"),
        ));
    }
    let usable = bytes == 0 || tree.device.id() == DeviceId::CPU || {
        let class = tree.device.backend().classify(address, bytes);
        !matches!(class, AddressClass::Host | AddressClass::Inaccessible)
    };
    if !usable {
        let why = tree.device.backend().explain(address, bytes);
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        return Err(Error::invalid(
            path(),
            format!(
                "claims {bytes} bytes at {address:?}, which {} does not have{why}",
                tree.device
            ),
        ));
    }
    Ok(bytes)
}

/// Where the lengths of some slots of a node come from: one request.
struct Sizes {
    request: Request,
    node: usize,
    first_slot: usize,
    /// Bytes of each integer.
    width: usize,
}

impl Sizes {
    /// `None`: the node has no lengths that are still unknown.
    fn of(tree: &Tree, node: usize) -> Option<Self> {
        let n = &tree.nodes[node];
        let slots = tree.slots(node);
        if let [_, BufferKind::Offsets { width }, BufferKind::Bytes] = *n.layout.buffers() {
            let width = usize::from(width);
            if slots[2].bytes().is_some() {
                return None;
            }
            if slots[1].is_null() || n.length == 0 {
                slots[2].set_bytes(0);
                return None;
            }
            return Some(Self {
                request: Request {
                    address: slots[1].address().offset((n.offset + n.length) * width),
                    bytes: width,
                    on_host: false,
                },
                node,
                first_slot: 2,
                width,
            });
        }
        if !n.layout.variadic {
            return None;
        }
        let (sizes, variadic) = (&slots[slots.len() - 1], &slots[2..slots.len() - 1]);
        let unknown = variadic.iter().any(|slot| slot.bytes().is_none());
        let (address, bytes) = (sizes.address(), variadic.len() * 8);
        unknown.then(|| Self {
            request: Request {
                address,
                bytes,
                on_host: tree.device.backend().classify(address, bytes) == AddressClass::Host,
            },
            node,
            first_slot: 2,
            width: 8,
        })
    }

    /// Reads them where they are.
    ///
    /// # Safety
    /// The host can read the tree's memory, and it is ready.
    unsafe fn read(&self, tree: &Tree) -> Result<()> {
        let Request { address, bytes, .. } = self.request;
        // SAFETY: the caller's; the import checked that offsets have `offset + length + 1` elements
        // and that lengths have one for each variadic buffer.
        let there = unsafe { std::slice::from_raw_parts(address.as_ptr().cast(), bytes) };
        self.set(tree, there)
    }

    /// `there`: what the request asked for.
    fn set(&self, tree: &Tree, there: &[u8]) -> Result<()> {
        let slots = &tree.slots(self.node)[self.first_slot..];
        for (k, (slot, bytes)) in slots.iter().zip(there.chunks(self.width)).enumerate() {
            let at = || tree.buffer_path(self.node, self.first_slot + k);
            let bytes = int(bytes, self.width);
            slot.set_bytes(check_size(tree, slot.address(), bytes, at)?);
        }
        Ok(())
    }
}

/// All lengths of a node and its descendants that are still unknown.
fn hidden_sizes(tree: &Tree, node: usize, hidden: &mut Vec<Sizes>) {
    hidden.extend(Sizes::of(tree, node));
    let n = &tree.nodes[node];
    for child in 0..n.n_children {
        hidden_sizes(tree, (n.first_child + child) as usize, hidden);
    }
}

/// The null counts of these [`Parts`] of an array; those that are unknown are counted from masks
/// that are read back together.
pub(crate) fn null_counts(array: &DeviceArray, views: Vec<View>) -> Result<Vec<usize>> {
    NullCounting::start(array, views)?.finish(array)
}

/// Null counts under way.
#[derive(Debug)]
pub(crate) struct NullCounting {
    views: Vec<View>,
    counts: Vec<Option<usize>>,
    /// Of the masks of those that are unknown.
    masks: Gathering,
}

impl NullCounting {
    /// Gives the copies of the masks to the device's default queue. Waits only where the host reads them
    /// itself.
    pub(crate) fn start(array: &DeviceArray, views: Vec<View>) -> Result<Self> {
        let tree = array.tree();
        let mut counts: Vec<_> = views.iter().map(|view| tree.null_count(*view)).collect();
        counts[0] = array.null_count();
        let requests: Vec<_> = (views.iter().zip(&counts))
            .filter(|(_, count)| count.is_none())
            .map(|(view, _)| mask_request(tree, view))
            .collect();
        // SAFETY: what `mask_request` asks for lies in the mask.
        let masks = unsafe { Gathering::start(tree, &requests, None) }?;
        Ok(Self {
            views,
            counts,
            masks,
        })
    }

    /// When the masks are there; `None` if they are.
    #[cfg(feature = "async")]
    pub(crate) fn event(&self) -> Option<&crate::device::SyncEvent> {
        self.masks.event()
    }

    /// The event was waited for: [`finish`](Self::finish) does not wait again.
    #[cfg(feature = "async")]
    pub(crate) fn waited(&mut self) {
        self.masks.waited();
    }

    /// Makes this thread wait for the masks, if there are any: one host wait. `array` is that of
    /// [`start`](Self::start); it keeps its own count, and those of whole nodes.
    pub(crate) fn finish(self, array: &DeviceArray) -> Result<Vec<usize>> {
        let answers = self.masks.finish()?;
        let tree = array.tree();
        let mut request = 0;
        let each = self.counts.into_iter().zip(&self.views).enumerate();
        let counts = each.map(|(i, (count, view))| {
            count.unwrap_or_else(|| {
                let nulls = nulls_in(answers.bytes(request), view);
                request += 1;
                tree.keep_null_count(*view, nulls);
                if i == 0 {
                    array.set_null_count(nulls);
                }
                nulls
            })
        });
        Ok(counts.collect())
    }
}

/// The bytes of the mask that hold a view's bits: a mask has one bit for each row of its node, and views
/// lie inside their node.
pub(crate) fn mask_request(tree: &Tree, view: &View) -> Request {
    Request {
        address: tree.slots(view.node)[0]
            .address()
            .offset(view.validity_offset / 8),
        bytes: (view.validity_offset % 8 + view.length).div_ceil(8),
        on_host: false,
    }
}

fn nulls_in(mask: &[u8], view: &View) -> usize {
    view.length - count_bits(mask, view.validity_offset % 8, view.length)
}

/// Refuses null counts that differ from the masks, and fills in those that are unknown.
pub(crate) fn check_null_counts(tree: &Tree) -> Result<()> {
    NullCheck::start(tree)?.finish(tree)
}

/// A check of all null counts under way.
#[derive(Debug)]
pub(crate) struct NullCheck {
    nodes: Vec<usize>,
    /// `None` if there are none.
    masks: Option<Gathering>,
}

impl NullCheck {
    /// As [`NullCounting::start`].
    pub(crate) fn start(tree: &Tree) -> Result<Self> {
        let masked = |&node: &usize| {
            let node = &tree.nodes[node];
            node.length > 0 && tree.bitmap_of(node).is_some()
        };
        let nodes: Vec<_> = (0..tree.nodes.len()).filter(masked).collect();
        let request = |&node: &usize| mask_request(tree, &tree.whole(node));
        let requests: Vec<_> = nodes.iter().map(request).collect();
        let masks = match requests.as_slice() {
            [] => None,
            // SAFETY: what `mask_request` asks for lies in the mask.
            requests => Some(unsafe { Gathering::start(tree, requests, None) }?),
        };
        Ok(Self { nodes, masks })
    }

    /// When the masks are there; `None` if they are.
    #[cfg(feature = "async")]
    pub(crate) fn event(&self) -> Option<&crate::device::SyncEvent> {
        self.masks.as_ref()?.event()
    }

    /// The event was waited for: [`finish`](Self::finish) does not wait again.
    #[cfg(feature = "async")]
    pub(crate) fn waited(&mut self) {
        if let Some(masks) = &mut self.masks {
            masks.waited();
        }
    }

    /// Makes this thread wait for the masks, if there are any: one host wait.
    pub(crate) fn finish(self, tree: &Tree) -> Result<()> {
        let Some(masks) = self.masks else {
            return Ok(());
        };
        let answers = masks.finish()?;
        for (k, node) in self.nodes.into_iter().enumerate() {
            let counted = nulls_in(answers.bytes(k), &tree.whole(node));
            let nulls = &tree.nodes[node].nulls;
            match nulls.get() {
                Some(stated) if stated != counted => {
                    return Err(Error::invalid(
                        format!("{}.null_count", tree.path(node)),
                        format!("is {stated}, but the mask has {counted} nulls"),
                    ));
                }
                _ => nulls.set(counted),
            }
        }
        Ok(())
    }
}

/// How many of `bits` bits from bit `first` are set.
pub(crate) fn count_bits(bytes: &[u8], first: usize, bits: usize) -> usize {
    arrow_buffer::bit_chunk_iterator::UnalignedBitChunk::new(bytes, first, bits).count_ones()
}

impl DeviceArray {
    /// Counts the nulls of this array and of all its descendants where they are unknown: their masks
    /// are read back together, with one host wait.
    ///
    /// # Errors
    /// What the device reports.
    pub fn resolve_null_counts(&self) -> Result<usize> {
        let parts = Parts::of(self, false);
        let unknown = |i| {
            let (node, view) = parts.get(i);
            parts.null_count(i, node, view).is_none()
        };
        if (0..parts.len()).any(unknown) {
            null_counts(self, parts.views())?;
        }
        Ok(self.null_count().unwrap_or(0))
    }

    /// Finds out all lengths of this array's buffers, and its descendants', that hide on the device:
    /// they are read back together, with one host wait, and kept.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] with the buffer's path if a length cannot be; what the device reports.
    pub fn resolve_sizes(&self) -> Result<()> {
        resolve_sizes(self)
    }
}

impl Tree {
    /// The path of a node from the root, for errors.
    pub(crate) fn path(&self, node: usize) -> String {
        if node == 0 {
            return "array".into();
        }
        let parent = self.nodes[node].parent as usize;
        let mut path = self.path(parent);
        if matches!(self.data_type(parent), DataType::Dictionary(_, _)) {
            path.push_str(".dictionary");
        } else {
            let position = node - self.nodes[parent].first_child as usize;
            path.push_str(&format!(".children[{position}]"));
        }
        path
    }

    pub(crate) fn buffer_path(&self, node: usize, buffer: usize) -> String {
        format!("{}.buffers[{buffer}]", self.path(node))
    }
}
