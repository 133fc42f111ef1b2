//! Null counts that are not known yet: they are counted in the validity bitmaps, all of an array's together.

use crate::data::array::DeviceArray;
use crate::data::gather::{Answers, Gathering, Request};
use crate::data::node::{Rows, View};
use crate::data::sizes::{Sizes, unknown_sizes};
use crate::device::Queue;
use crate::error::{Error, Result};
use crate::memory::check_queue;

impl DeviceArray {
    /// Counts the nulls of this array and of its descendants where they are not known yet, and returns those of
    /// the array's own validity bitmap. All bitmaps that are needed are copied to the host together, on the
    /// device's default queue, with one host wait; where the host can read them, nothing is copied.
    ///
    /// # Errors
    /// Returns the errors that the device reports.
    pub fn resolve_null_counts(&self) -> Result<usize> {
        self.count_unknown_nulls(None)
    }

    /// As [`resolve_null_counts`](Self::resolve_null_counts), on a queue of the array's device.
    ///
    /// # Errors
    /// As [`resolve_null_counts`](Self::resolve_null_counts). Also returns [`Error::InvalidArgument`] if the queue
    /// belongs to another device.
    pub fn resolve_null_counts_on(&self, queue: &Queue) -> Result<usize> {
        check_queue(queue, self.device())?;
        self.count_unknown_nulls(Some(queue))
    }

    fn count_unknown_nulls(&self, queue: Option<&Queue>) -> Result<usize> {
        let mut unknown = Vec::new();
        let mut list = |view: View<'_>, nulls: Option<usize>| {
            if nulls.is_none() {
                unknown.push(view.to_rows());
            }
        };
        self.view().each_part(self.null_count(), false, &mut list);
        if !unknown.is_empty() {
            NullCounting::start(self, unknown, queue)?.finish(self)?;
        }
        Ok(self.null_count().unwrap_or(0))
    }

    /// Returns the number of nulls in the array's own validity bitmap, which is read if necessary.
    #[cfg(feature = "dlpack")]
    pub(crate) fn count_own_nulls(&self) -> Result<usize> {
        if self.null_count().is_none() {
            NullCounting::start(self, vec![self.view().to_rows()], None)?.finish(self)?;
        }
        Ok(self.null_count().unwrap_or(0))
    }
}

/// Null counts whose bitmaps are being read, and sizes that come with them.
#[derive(Debug)]
pub(crate) struct NullCounting {
    rows: Vec<Rows>,
    sizes: Vec<Sizes>,
    pub(crate) reading: Gathering,
}

impl NullCounting {
    /// Starts to read the validity bitmaps of `rows`, each of which has one, on `queue`, or on the device's
    /// default queue. Waits only where the host reads them in place.
    pub(crate) fn start(
        array: &DeviceArray,
        rows: Vec<Rows>,
        queue: Option<&Queue>,
    ) -> Result<Self> {
        let reading = read_bitmaps(array, rows.iter().map(Rows::view), queue)?;
        let sizes = Vec::new();
        Ok(Self {
            rows,
            sizes,
            reading,
        })
    }

    /// As [`start`](Self::start), on the default queue, for all nodes that have a validity bitmap, together with the
    /// sizes that are not known yet. `None` if the array has none of either.
    pub(crate) fn start_all(array: &DeviceArray) -> Result<Option<Self>> {
        let rows = with_bitmaps(array);
        let sizes = unknown_sizes(array);
        if rows.is_empty() && sizes.is_empty() {
            return Ok(None);
        }
        let mut requests: Vec<_> = rows.iter().map(|rows| bitmap(rows.view())).collect();
        requests.extend(sizes.iter().map(|sizes| sizes.request));
        // SAFETY: the bitmaps lie in the array's memory (see `read_bitmaps`), and so do the sizes (`Sizes::of`). Nobody
        // writes to an array's memory: imports and constructors demand it.
        let reading = unsafe { Gathering::of(array, &requests, None) }?;
        Ok(Some(Self {
            rows,
            sizes,
            reading,
        }))
    }

    /// Waits for the reading (one host wait) and keeps the null counts of `array`, the one of
    /// [`start`](Self::start), and of all rows of its nodes, and then the sizes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if a node came with another null count, or if a size is impossible.
    pub(crate) fn finish(self, array: &DeviceArray) -> Result<()> {
        let bitmaps = self.reading.finish()?;
        for (i, rows) in self.rows.iter().enumerate() {
            let view = rows.view();
            let counted = nulls_of(&bitmaps, i, view);
            match view.node.nulls.get() {
                Some(stated) if view.is_all() && stated != counted => {
                    return Err(Error::invalid(
                        format!(
                            "{}.null_count",
                            array.node().path(view.node).unwrap_or_default()
                        ),
                        format!("is {stated}, but the validity bitmap has {counted} nulls"),
                    ));
                }
                _ => array.keep_null_count(view, counted),
            }
        }
        for (sizes, i) in self.sizes.iter().zip(self.rows.len()..) {
            sizes.set(array, bitmaps.bytes(i))?;
        }
        Ok(())
    }
}

/// The rows of all nodes that have a validity bitmap, to check their null counts.
fn with_bitmaps(array: &DeviceArray) -> Vec<Rows> {
    let mut all = Vec::new();
    let mut list = |view: View<'_>, _| {
        if view.node.length > 0 && view.node.bitmap().is_some() {
            all.push(view.to_rows());
        }
    };
    View::whole(array.node()).each_part(None, false, &mut list);
    all
}

/// The bytes that hold the validity bits of `view`, which has a bitmap.
fn bitmap(view: View<'_>) -> Request {
    let first = view.validity_offset;
    Request {
        address: view.node.buffers[0].address().offset(first / 8),
        bytes: (first % 8 + view.length).div_ceil(8),
        on_host: false,
    }
}

/// Starts to read the bytes that hold the validity bits of `views`, each of which has a bitmap; see
/// [`Gathering::start`].
pub(crate) fn read_bitmaps<'a>(
    array: &DeviceArray,
    views: impl Iterator<Item = View<'a>>,
    queue: Option<&Queue>,
) -> Result<Gathering> {
    let requests: Vec<_> = views.map(bitmap).collect();
    // SAFETY: a bitmap has one bit for each row of its node, which was checked when the node was made, and views lie
    // inside their node. Nobody writes to an array's memory: imports and constructors demand it.
    unsafe { Gathering::of(array, &requests, queue) }
}

/// Returns the nulls of `view`, whose bits are answer `i`; see [`read_bitmaps`].
pub(crate) fn nulls_of(bitmaps: &Answers, i: usize, view: View<'_>) -> usize {
    view.length - count_bits(bitmaps.bytes(i), view.validity_offset % 8, view.length)
}

/// Returns how many of the `bits` bits from bit `first` are set.
pub(crate) fn count_bits(bytes: &[u8], first: usize, bits: usize) -> usize {
    arrow_buffer::bit_chunk_iterator::UnalignedBitChunk::new(bytes, first, bits).count_ones()
}
