//! What hides on a device: lengths in offsets, and null counts in validity bitmaps. Both stay unknown until
//! asked for; then all of an array's are read at once: one list of copies, one host wait.

use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::array::DeviceArray;
use crate::data::layout::BufferKind;
use crate::data::parts::Parts;
use crate::data::tree::{Tree, View};
use crate::device::{AddressClass, CopyKind, CopyOp, DeviceId, DevicePtr, Queue};
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
    /// Address and number of bytes of each, in the slab or in the owners' memory.
    places: Vec<(DevicePtr, usize)>,
    /// What came from the device.
    _slab: Option<HostSlab>,
    _owners: Vec<Arc<Owner>>,
}

impl Answers {
    /// The bytes of request `i`; they may start at any address.
    pub(crate) fn bytes(&self, i: usize) -> &[u8] {
        let (at, bytes) = self.places[i];
        if bytes == 0 {
            return &[];
        }
        // SAFETY: the bytes lie in the slab, into which all copies have completed and which only this struct
        // has, or in host memory of the owners, which was waited for and to which nobody writes (contract of
        // `Gathering::start`). Both are kept here.
        unsafe { std::slice::from_raw_parts(at.as_ptr().cast(), bytes) }
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
    places: Vec<(DevicePtr, usize)>,
}

/// Both with the owners of what is read.
#[derive(Debug)]
enum Arrival {
    Here(Vec<Arc<Owner>>),
    Coming(Reading<Vec<Arc<Owner>>>),
}

/// Reads all `requests` of a tree: one list of copies, one host wait.
///
/// # Safety
/// As [`Gathering::start`].
pub(crate) unsafe fn gather(tree: &Tree, requests: &[Request]) -> Result<Answers> {
    // SAFETY: the caller guarantees that the requests lie in the tree's memory, as `start` asks.
    unsafe { Gathering::start(tree, requests, None) }?.finish()
}

impl Gathering {
    /// Gives the copies to `queue`, the device's default one if none is named. Waits only for memory
    /// that the host reads itself; that is not copied. Of the rest no byte is copied twice, however many
    /// requests it is part of: producers may name the same memory as often as they like.
    ///
    /// # Safety
    /// Each request lies in the tree's memory (or, `on_host`, in host memory that the tree's owners
    /// keep alive) for its whole length, and nobody writes to it before the owners release it.
    pub(crate) unsafe fn start(
        tree: &Tree,
        requests: &[Request],
        queue: Option<&Queue>,
    ) -> Result<Self> {
        let device = &tree.device;
        let owners = tree.owners.as_slice();
        let there = |r: &Request| r.on_host || device.is_host_readable() || r.bytes == 0;
        if requests.iter().any(|r| r.bytes > 0 && there(r)) {
            owners.iter().try_for_each(|owner| owner.wait_host())?;
        }
        let mut places: Vec<_> = requests.iter().map(|r| (r.address, r.bytes)).collect();
        let mut order: Vec<_> = (0..requests.len())
            .filter(|&i| !there(&requests[i]))
            .collect();
        if order.is_empty() {
            let answers = Arrival::Here(owners.to_vec());
            return Ok(Self { answers, places });
        }
        order.sort_unstable_by_key(|&i| requests[i].address);
        let too_many = || Error::argument("too many bytes to read back");
        // Of each copy: its source, its bytes, and its first byte in the slab.
        // The latter of each request too, in the same order.
        let mut copies: Vec<(DevicePtr, usize, usize)> = Vec::with_capacity(order.len());
        let mut starts = Vec::with_capacity(order.len());
        let mut total = 0usize;
        for &i in &order {
            let Request { address, bytes, .. } = requests[i];
            let start = match copies.last_mut() {
                // Two requests that share a byte lie in one allocation.
                Some((src, all, start)) if address.address() - src.address() < *all => {
                    let skip = address.address() - src.address();
                    *all = skip.checked_add(bytes).ok_or_else(too_many)?.max(*all);
                    *start + skip
                }
                _ => {
                    copies.push((address, bytes, total));
                    total
                }
            };
            starts.push(start);
            total = start
                .checked_add(bytes)
                .and_then(|end| end.checked_next_multiple_of(8))
                .ok_or_else(too_many)?
                .max(total);
        }
        let slab = device.host_slab(total)?;
        let to = slab.as_device_ptr();
        for (i, start) in order.into_iter().zip(starts) {
            places[i].0 = to.offset(start);
        }
        let copies: Vec<_> = (copies.into_iter())
            .map(|(src, bytes, start)| CopyOp {
                src,
                dst: to.offset(start),
                bytes,
                kind: CopyKind::DeviceToHost,
            })
            .collect();
        let default;
        let queue = match queue {
            Some(queue) => queue,
            None => {
                default = device.default_queue();
                &default
            }
        };
        // SAFETY: each source is a union of requests that overlap, which lie in memory of the tree's owners
        // (the caller's contract); the slab has room for each, and the reading keeps slab and owners.
        let reading = unsafe { Reading::start(queue, owners, &copies, slab, owners.to_vec()) }?;
        let answers = Arrival::Coming(reading);
        Ok(Self { answers, places })
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
        let (slab, owners) = match self.answers {
            Arrival::Here(owners) => (None, owners),
            Arrival::Coming(reading) => {
                let (slab, owners) = reading.finish()?;
                (Some(slab), owners)
            }
        };
        Ok(Answers {
            places: self.places,
            _slab: slab,
            _owners: owners,
        })
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
        // SAFETY: the host can read the device's memory, and every owner was waited for.
        return hidden
            .iter()
            .try_for_each(|sizes| unsafe { sizes.read(tree) });
    }
    let requests: Vec<_> = hidden.iter().map(|sizes| sizes.request).collect();
    // SAFETY: the import checked that offsets have `offset + length + 1` elements and that lengths
    // have one for each variadic buffer; nobody writes to an array's memory (contract of the import).
    let answers = unsafe { gather(tree, &requests) }?;
    let mut hidden = hidden.iter().enumerate();
    hidden.try_for_each(|(i, sizes)| sizes.set(tree, answers.bytes(i)))
}

/// Resolves the lengths of a node's own buffers.
///
/// # Safety
/// The host can read the tree's memory, and it is ready.
pub(crate) unsafe fn read_sizes(tree: &Tree, node: usize) -> Result<()> {
    // SAFETY: the caller guarantees that the host can read the tree's memory and that it is ready.
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
        // SAFETY: the caller guarantees that the memory is ready and readable; the import checked that offsets
        // have `offset + length + 1` elements and that lengths have one for each variadic buffer.
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

/// The null counts of these [`Parts`] of an array; those that are unknown are counted from validity
/// bitmaps that are read back together.
pub(crate) fn null_counts(array: &DeviceArray, views: Vec<View>) -> Result<Vec<usize>> {
    NullCounting::start(array, views)?.finish(array)
}

/// Null counts under way.
#[derive(Debug)]
pub(crate) struct NullCounting {
    views: Vec<View>,
    counts: Vec<Option<usize>>,
    /// The validity bitmaps of those that are unknown.
    bitmaps: Gathering,
}

impl NullCounting {
    /// Gives the copies of the bitmaps to the device's default queue. Waits only where the host reads them
    /// itself.
    pub(crate) fn start(array: &DeviceArray, views: Vec<View>) -> Result<Self> {
        let tree = array.tree();
        let mut counts: Vec<_> = views.iter().map(|view| tree.null_count(*view)).collect();
        counts[0] = array.null_count();
        let requests: Vec<_> = (views.iter().zip(&counts))
            .filter(|(_, count)| count.is_none())
            .map(|(view, _)| bitmap_request(tree, view))
            .collect();
        // SAFETY: what `bitmap_request` asks for lies in the validity bitmap, to which nobody writes.
        let bitmaps = unsafe { Gathering::start(tree, &requests, None) }?;
        Ok(Self {
            views,
            counts,
            bitmaps,
        })
    }

    /// When the bitmaps are there; `None` if they are.
    #[cfg(feature = "async")]
    pub(crate) fn event(&self) -> Option<&crate::device::SyncEvent> {
        self.bitmaps.event()
    }

    /// The event was waited for: [`finish`](Self::finish) does not wait again.
    #[cfg(feature = "async")]
    pub(crate) fn waited(&mut self) {
        self.bitmaps.waited();
    }

    /// Makes this thread wait for the bitmaps, if there are any: one host wait. `array` is that of
    /// [`start`](Self::start); it keeps its own count, and those of whole nodes.
    pub(crate) fn finish(self, array: &DeviceArray) -> Result<Vec<usize>> {
        let answers = self.bitmaps.finish()?;
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

/// The bytes of the validity bitmap that hold a view's bits: it has one bit for each row of its node, and
/// views lie inside their node.
pub(crate) fn bitmap_request(tree: &Tree, view: &View) -> Request {
    Request {
        address: tree.slots(view.node)[0]
            .address()
            .offset(view.validity_offset / 8),
        bytes: (view.validity_offset % 8 + view.length).div_ceil(8),
        on_host: false,
    }
}

fn nulls_in(bitmap: &[u8], view: &View) -> usize {
    view.length - count_bits(bitmap, view.validity_offset % 8, view.length)
}

/// Refuses null counts that differ from the validity bitmaps, and fills in those that are unknown.
pub(crate) fn check_null_counts(tree: &Tree) -> Result<()> {
    NullCheck::start(tree)?.finish(tree)
}

/// A check of all null counts under way.
#[derive(Debug)]
pub(crate) struct NullCheck {
    nodes: Vec<usize>,
    /// `None` if there are none.
    bitmaps: Option<Gathering>,
}

impl NullCheck {
    /// As [`NullCounting::start`].
    pub(crate) fn start(tree: &Tree) -> Result<Self> {
        let has_bitmap = |&node: &usize| {
            let node = &tree.nodes[node];
            node.length > 0 && tree.bitmap_of(node).is_some()
        };
        let nodes: Vec<_> = (0..tree.nodes.len()).filter(has_bitmap).collect();
        let request = |&node: &usize| bitmap_request(tree, &tree.whole(node));
        let requests: Vec<_> = nodes.iter().map(request).collect();
        let bitmaps = match requests.as_slice() {
            [] => None,
            // SAFETY: what `bitmap_request` asks for lies in the validity bitmap, to which nobody writes.
            requests => Some(unsafe { Gathering::start(tree, requests, None) }?),
        };
        Ok(Self { nodes, bitmaps })
    }

    /// When the bitmaps are there; `None` if they are.
    #[cfg(feature = "async")]
    pub(crate) fn event(&self) -> Option<&crate::device::SyncEvent> {
        self.bitmaps.as_ref()?.event()
    }

    /// The event was waited for: [`finish`](Self::finish) does not wait again.
    #[cfg(feature = "async")]
    pub(crate) fn waited(&mut self) {
        if let Some(bitmaps) = &mut self.bitmaps {
            bitmaps.waited();
        }
    }

    /// Makes this thread wait for the bitmaps, if there are any: one host wait.
    pub(crate) fn finish(self, tree: &Tree) -> Result<()> {
        let Some(bitmaps) = self.bitmaps else {
            return Ok(());
        };
        let answers = bitmaps.finish()?;
        for (k, node) in self.nodes.into_iter().enumerate() {
            let counted = nulls_in(answers.bytes(k), &tree.whole(node));
            let nulls = &tree.nodes[node].nulls;
            match nulls.get() {
                Some(stated) if stated != counted => {
                    return Err(Error::invalid(
                        format!("{}.null_count", tree.path(node)),
                        format!("is {stated}, but the validity bitmap has {counted} nulls"),
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
    /// Counts the nulls of this array and of all its descendants where they are unknown: their validity
    /// bitmaps are read back together, with one host wait.
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
