//! What only memory tells: null counts that are not known yet, which are counted in the validity bitmaps, and sizes that are stored in
//! device memory, those of text and binary values (the last offset) and of a view array's data buffers. Both stay unknown until
//! something needs them; then all that an array lacks are read together.

use std::sync::Arc;

use crate::data::array::DeviceArray;
use crate::data::gather::{Answers, Gathering, Request, int};
use crate::data::layout::BufferKind;
use crate::data::node::{Node, View};
use crate::device::{AddressClass, Device, DevicePtr, Queue};
use crate::error::{Error, Result};

impl DeviceArray {
    /// Counts the nulls of this array and of its descendants where they are not known yet, and returns those of
    /// the array's own validity bitmap. All bitmaps that are needed are copied to the host together, on the
    /// device's default queue, with one host wait; where the host can read them, nothing is copied.
    ///
    /// # Errors
    /// Returns the errors that the device reports.
    pub fn resolve_null_counts(&self) -> Result<usize> {
        let all = self.node().all().into_iter();
        let unknown = all.filter(|node| View::whole(node).null_count().is_none());
        Resolving::start(self, unknown.cloned().collect(), Vec::new(), None)?.finish(self)?;
        Ok(self.null_count().unwrap_or(0))
    }

    /// Reads the sizes of this array's buffers, and of its descendants', that are stored in device memory and not
    /// known yet. They are copied to the host together, on the device's default queue, with one host wait, and
    /// kept: [`buffer`](Self::buffer) returns such buffers afterwards. Where the host can read them, nothing is
    /// copied.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] with the buffer's path if a size is impossible, and the errors that the
    /// device reports.
    pub fn resolve_sizes(&self) -> Result<()> {
        Resolving::start(self, Vec::new(), unknown_sizes(self), None)?.finish(self)
    }

    /// Returns the size in bytes of the data buffer of a binary or text array. If it is not known yet, it is read on
    /// `queue` with one host wait, and kept.
    pub(super) fn read_bytes_on(&self, queue: &Queue) -> Result<usize> {
        let sizes = Sizes::of(self.device(), self.node()).into_iter().collect();
        Resolving::start(self, Vec::new(), sizes, Some(queue))?.finish(self)?;
        Ok(self.node().buffers[2].bytes().unwrap_or(0))
    }
}

/// Null counts and sizes of an array that are being read.
#[derive(Debug)]
pub(crate) struct Resolving {
    rows: Vec<Arc<Node>>,
    sizes: Vec<Sizes>,
    pub(crate) reading: Gathering,
}

impl Resolving {
    /// Starts to read the validity bitmaps of `rows`, each of which has one, and the sizes, on `queue`, or on the device's
    /// default queue. Waits only where the host reads them in place.
    pub(crate) fn start(
        array: &DeviceArray,
        rows: Vec<Arc<Node>>,
        sizes: Vec<Sizes>,
        queue: Option<&Queue>,
    ) -> Result<Self> {
        let bitmaps = rows.iter().map(|rows| bitmap(View::whole(rows)));
        let requests: Vec<_> = (bitmaps.chain(sizes.iter().map(|sizes| sizes.request))).collect();
        // SAFETY: bitmaps and sizes lie in the array's memory (`bitmap`, `Sizes::of`). Nobody writes to an array's memory: imports
        // and constructors demand it.
        let reading = unsafe { Gathering::of(array, &requests, queue) }?;
        Ok(Self {
            rows,
            sizes,
            reading,
        })
    }

    /// As [`start`](Self::start), on the default queue, for all nodes that have a validity bitmap, to check their null counts, and all
    /// sizes that are not known yet.
    pub(crate) fn start_all(array: &DeviceArray) -> Result<Self> {
        let all = array.node().all().into_iter();
        let rows = all.filter(|node| node.length > 0 && node.bitmap().is_some());
        Self::start(array, rows.cloned().collect(), unknown_sizes(array), None)
    }

    /// Waits for the reading (one host wait, if something is copied) and keeps the null counts of `array`, the one of
    /// [`start`](Self::start), and of all rows of its nodes, and then the sizes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if a node came with another null count, or if a size is impossible.
    pub(crate) fn finish(self, array: &DeviceArray) -> Result<()> {
        let answers = self.reading.finish()?;
        for (i, node) in self.rows.iter().enumerate() {
            let counted = nulls_of(&answers, i, View::whole(node));
            match node.nulls.get() {
                Some(stated) if stated != counted => {
                    let path = array.node().path(node).unwrap_or_default();
                    return Err(Error::invalid(
                        format!("{path}.null_count"),
                        format!("is {stated}, but the validity bitmap has {counted} nulls"),
                    ));
                }
                _ => node.nulls.set(counted),
            }
        }
        let mut sizes = self.sizes.iter().zip(self.rows.len()..);
        sizes.try_for_each(|(sizes, i)| {
            let path = |k| array.node().buffer_path(&sizes.node, k);
            sizes.set(array.device(), answers.bytes(i), path)
        })
    }
}

/// The bytes that hold the validity bits of `view`, which has a bitmap: one bit for each row of its node, which was checked when the
/// node was made.
fn bitmap(view: View<'_>) -> Request {
    let first = view.validity_offset;
    Request {
        address: view.node.buffers[0].address().offset(first / 8),
        bytes: (first % 8 + view.length).div_ceil(8),
        on_host: false,
    }
}

/// Returns the nulls of `view`, whose bits are answer `i`; see [`bitmap`].
fn nulls_of(bitmaps: &Answers, i: usize, view: View<'_>) -> usize {
    view.length - count_bits(bitmaps.bytes(i), view.validity_offset % 8, view.length)
}

/// Returns how many of the `bits` bits from bit `first` are set.
pub(crate) fn count_bits(bytes: &[u8], first: usize, bits: usize) -> usize {
    arrow_buffer::bit_chunk_iterator::UnalignedBitChunk::new(bytes, first, bits).count_ones()
}

/// Where the sizes of a node's buffers from number 2 on are stored.
#[derive(Debug)]
pub(crate) struct Sizes {
    pub(crate) request: Request,
    node: Arc<Node>,
    /// Bytes of each integer.
    width: usize,
}

impl Sizes {
    /// Returns `None` if the node has no unknown sizes. The request lies in the node's memory: the import checked
    /// that there are `offset + length + 1` offsets, and one size for each data buffer.
    pub(crate) fn of(device: &Device, node: &Arc<Node>) -> Option<Self> {
        let buffers = &node.buffers[..];
        let (address, width, count) = match (node.layout.buffers(), buffers) {
            ([_, BufferKind::Offsets { width }, BufferKind::Bytes], [_, offsets, data]) => {
                if data.bytes().is_none() && (offsets.is_null() || node.length == 0) {
                    data.set_bytes(0);
                }
                let width = usize::from(*width);
                let last = (node.offset + node.length) * width;
                (offsets.address().offset(last), width, 1)
            }
            (_, [_, _, data @ .., sizes]) if node.layout.variadic => {
                (sizes.address(), 8, data.len())
            }
            _ => return None,
        };
        if buffers[2..][..count]
            .iter()
            .all(|data| data.bytes().is_some())
        {
            return None;
        }
        let bytes = count * width;
        let class = || device.backend().classify(address, bytes).class;
        let request = Request {
            address,
            bytes,
            on_host: node.layout.variadic && class() == AddressClass::Host,
        };
        Some(Self {
            request,
            node: node.clone(),
            width,
        })
    }

    /// Keeps the sizes, from the bytes that were asked for. `path` names a buffer of the node, for errors.
    pub(crate) fn set(
        &self,
        device: &Device,
        stored: &[u8],
        path: impl Fn(usize) -> String,
    ) -> Result<()> {
        let buffers = self.node.buffers[2..].iter();
        for (k, (buffer, bytes)) in buffers.zip(stored.chunks(self.width)).enumerate() {
            let bytes = int(bytes, self.width);
            let bytes = check_size(device, buffer.address(), bytes, || path(2 + k))?;
            buffer.set_bytes(bytes);
        }
        Ok(())
    }
}

/// Lists all unknown sizes of an array and its descendants.
fn unknown_sizes(array: &DeviceArray) -> Vec<Sizes> {
    let all = array.node().all().into_iter();
    all.filter_map(|node| Sizes::of(array.device(), node))
        .collect()
}

/// Returns `bytes`, a size in bytes of the buffer at `address`, unless it is negative or more than the device
/// has there.
pub(crate) fn check_size(
    device: &Device,
    address: DevicePtr,
    bytes: i64,
    path: impl Fn() -> String,
) -> Result<usize> {
    let refuse = |what: String| Err(Error::invalid(path(), what));
    // The end must lie inside the address space too.
    let end = |n: usize| isize::try_from(address.address().saturating_add(n));
    let size = usize::try_from(bytes).ok();
    let Some(size) = size.filter(|n| isize::try_from(*n).is_ok() && end(*n).is_ok()) else {
        return refuse(format!("has a length of {bytes} bytes"));
    };
    if size == 0 {
        return Ok(0);
    }
    if address.is_null() {
        return refuse(format!("is null but {size} bytes long"));
    }
    if let Err(why) = device.backend().classify(address, size).check() {
        return refuse(format!(
            "claims {size} bytes at {address:?}, which {device} does not have{why}"
        ));
    }
    Ok(size)
}
