//! What only memory tells: null counts that are not known yet, which are counted in the validity bitmaps, and numbers that are stored in
//! device memory, such as the size of a text array's data (its last offset). They stay unknown until something needs them. Then a walk
//! over the arrays asks for them; all that it lacks are read together, and the walk is repeated.

use std::sync::{Arc, Mutex};

use arrow_buffer::bit_chunk_iterator::UnalignedBitChunk;

use crate::data::array::{DeviceArray, path};
use crate::data::layout::BufferKind;
use crate::data::node::{Node, View, owners};
use crate::device::{
    AddressClass, CopyKind, CopyOp, Device, DevicePtr, Queue, SyncEvent, completion, lock, now,
};
use crate::error::{Error, Result};
use crate::memory::{HostBuffer, Owner, Reading};

impl DeviceArray {
    /// Counts the nulls of this array and of its descendants where they are not known yet, and returns those of
    /// the array's own validity bitmap. All bitmaps that are needed are copied to the host together, on the
    /// device's default queue, with one host wait; where the host can read them, nothing is copied.
    ///
    /// # Errors
    /// Returns the errors that the device reports.
    pub fn resolve_null_counts(&self) -> Result<usize> {
        let walk = |numbers: &Numbers| {
            for node in self.node().all() {
                numbers.null_count(View::whole(node));
            }
            Ok(())
        };
        now(resolve(&mut Numbers::default(), &[self], None, false, walk))?;
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
        self.resolve_sizes_on(None)
    }

    /// As [`resolve_sizes`](Self::resolve_sizes), on `queue`.
    pub(super) fn resolve_sizes_on(&self, queue: Option<&Queue>) -> Result<()> {
        let walk = |numbers: &Numbers| numbers.all_sizes(self);
        let numbers = &mut Numbers::default();
        now(resolve(numbers, &[self], queue, false, walk))
    }
}

/// Repeats a walk over arrays of one device until it lacks nothing, and returns its result. What it lacks is read on `queue`, or on the
/// device's default queue, with one list of copies for each walk but the last. If it `polls`, the task waits for each; otherwise this
/// blocks its thread, with one host wait each, and is ready at once.
pub(crate) async fn resolve<T>(
    numbers: &mut Numbers,
    arrays: &[&DeviceArray],
    queue: Option<&Queue>,
    polls: bool,
    walk: impl Fn(&Numbers) -> Result<T>,
) -> Result<T> {
    loop {
        if let Some(result) = numbers.walk(&walk)? {
            return Ok(result);
        }
        if polls && numbers.reads_in_place(arrays[0].device()) {
            for array in arrays {
                completion(array.ready_event(queue)?).await?;
            }
        }
        let event = numbers.start(arrays, queue)?;
        completion(event.filter(|_| polls)).await?;
    }
}

type Owners = Vec<Arc<Owner>>;

/// What is known of the bytes of some arrays.
#[derive(Debug, Default)]
pub(crate) struct Numbers {
    /// The owners of the arrays' memory, once the host has waited for it.
    ready: Option<Owners>,
    /// The host can read all of that memory.
    readable: bool,
    /// Copies that are done, in ascending order, and the host buffer that they went to.
    known: Vec<(Vec<CopyOp>, HostBuffer)>,
    reading: Option<(Vec<CopyOp>, Reading)>,
    /// What the last walk asked for in vain.
    lacks: Mutex<Vec<Piece>>,
}

/// A piece of an array's memory.
#[derive(Clone, Copy, Debug)]
struct Piece {
    at: DevicePtr,
    bytes: usize,
    on_host: bool,
}

impl Numbers {
    /// All of some arrays that the host can read. Waits for their memory.
    pub(crate) fn in_place(arrays: &[&DeviceArray]) -> Result<Self> {
        let owners = owners(arrays.iter().map(|array| array.node()), |_| true);
        owners.iter().try_for_each(|owner| owner.wait_host())?;
        Ok(Self {
            ready: Some(owners),
            readable: arrays[0].device().is_host_readable(),
            ..Self::default()
        })
    }

    /// Returns the bytes at an address of the arrays' memory; `None` if they must be read first. With `on_host` that is memory of the
    /// host, whatever device the arrays are on. Callers ask only for what lies inside a node's buffers, whose sizes were checked when the
    /// node was made, or are stated by its producer (contract of the import).
    pub(crate) fn read(&self, at: DevicePtr, bytes: usize, on_host: bool) -> Option<&[u8]> {
        if bytes == 0 {
            return Some(&[]);
        }
        let place = match self.ready.is_some() && (on_host || self.readable) {
            true => Some(at),
            false => (self.known.iter()).find_map(|(copies, _)| place(copies, at, bytes)),
        };
        let Some(place) = place else {
            lock(&self.lacks).push(Piece { at, bytes, on_host });
            return None;
        };
        // SAFETY: either they are in host memory that is ready, to which nobody writes (imports and constructors demand it), or in a host
        // buffer, into which all copies are done and to which only this struct has access. `self` keeps owners and buffers alive.
        Some(unsafe { std::slice::from_raw_parts(place.as_ptr().cast(), bytes) })
    }

    /// Returns the bytes that hold the validity bits of rows that have a bitmap, the first one in bit `validity_offset % 8`; `None` if
    /// they must be read first.
    pub(crate) fn bitmap(&self, view: View<'_>) -> Option<&[u8]> {
        let first = view.validity_offset;
        let address = view.node.buffers[0].address().offset(first / 8);
        self.read(address, (first % 8 + view.length).div_ceil(8), false)
    }

    /// Returns the nulls of rows, and keeps their number if it was not known; `None` if their bitmap must be read first.
    pub(crate) fn null_count(&self, view: View<'_>) -> Option<usize> {
        view.null_count().or_else(|| {
            let nulls = self.count(view)?;
            if view.is_all() {
                view.node.nulls.set(nulls);
            }
            Some(nulls)
        })
    }

    fn count(&self, view: View<'_>) -> Option<usize> {
        let (bits, first) = (self.bitmap(view)?, view.validity_offset % 8);
        let set = UnalignedBitChunk::new(bits, first, view.length).count_ones();
        Some(view.length - set)
    }

    /// Keeps the sizes of a node's buffers that are stored in device memory, and returns whether they are known: otherwise they must be
    /// read first. The node is one of the arrays', or of their descendants'.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if one is impossible.
    pub(crate) fn sizes(&self, arrays: &[&DeviceArray], node: &Node) -> Result<bool> {
        let device = arrays[0].device();
        let (address, width, data) = match (node.layout.buffers(), &node.buffers[..]) {
            ([_, BufferKind::Offsets { width }, BufferKind::Bytes], [_, offsets, data @ ..]) => {
                if data[0].bytes().is_none() && (offsets.is_null() || node.length == 0) {
                    data[0].bytes.set(0);
                }
                let width = usize::from(*width);
                let last = (node.offset + node.length) * width;
                (offsets.address().offset(last), width, data)
            }
            (_, [_, _, data @ .., sizes]) if node.layout.variadic => (sizes.address(), 8, data),
            _ => return Ok(true),
        };
        if data.iter().all(|data| data.bytes().is_some()) {
            return Ok(true);
        }
        let bytes = data.len() * width;
        let class = || device.backend().classify(address, bytes).class;
        let on_host = node.layout.variadic && class() == AddressClass::Host;
        let Some(stored) = self.read(address, bytes, on_host) else {
            return Ok(false);
        };
        for (i, (buffer, stored)) in data.iter().zip(stored.chunks(width)).enumerate() {
            let path = || format!("{}.buffers[{}]", path(arrays, node), 2 + i);
            let bytes = int(stored, width);
            buffer
                .bytes
                .set(check_size(device, buffer.address(), bytes, path)?);
        }
        Ok(true)
    }

    /// Keeps the sizes of all nodes' buffers, unless they must be read first.
    pub(super) fn all_sizes(&self, array: &DeviceArray) -> Result<()> {
        let mut all = array.node().all().into_iter();
        all.try_for_each(|node| self.sizes(&[array], node).map(drop))
    }

    /// Counts the nulls of all nodes, those that came with a null count too, and keeps all sizes, unless they must be read first.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if a node came with another null count, or if a size is impossible.
    pub(crate) fn check(&self, array: &DeviceArray) -> Result<()> {
        for node in array.node().all() {
            let bitmap = node.bitmap().filter(|_| node.length > 0);
            let Some(counted) = bitmap.and_then(|_| self.count(View::whole(node))) else {
                continue;
            };
            if let Some(stated) = node.nulls.get().filter(|stated| *stated != counted) {
                return Err(Error::invalid(
                    format!("{}.null_count", path(&[array], node)),
                    format!("is {stated}, but the validity bitmap has {counted} nulls"),
                ));
            }
            node.nulls.set(counted);
        }
        self.all_sizes(array)
    }

    /// Returns the result of a walk, unless it lacks something. Waits for what is being read.
    pub(crate) fn walk<T>(&mut self, walk: impl FnOnce(&Self) -> Result<T>) -> Result<Option<T>> {
        if let Some((copies, reading)) = self.reading.take() {
            self.known.push((copies, reading.finish()?));
        }
        lock(&self.lacks).clear();
        let result = walk(self)?;
        Ok(lock(&self.lacks).is_empty().then_some(result))
    }

    /// Whether the host reads some of what the last walk lacked where it is, so that [`start`](Self::start) waits for the memory.
    pub(crate) fn reads_in_place(&self, device: &Device) -> bool {
        device.is_host_readable() || lock(&self.lacks).iter().any(|piece| piece.on_host)
    }

    /// Queues the copies of what the last walk over these arrays lacked, and returns the event after which they are done. Memory that the
    /// host can read is not copied; the call waits only for that. No byte is copied twice, however often the walk asked for it: a
    /// producer may list the same memory any number of times.
    pub(crate) fn start(
        &mut self,
        arrays: &[&DeviceArray],
        queue: Option<&Queue>,
    ) -> Result<Option<SyncEvent>> {
        let device = arrays[0].device();
        if self.reads_in_place(device) {
            let in_place = Self::in_place(arrays)?;
            (self.ready, self.readable) = (in_place.ready, in_place.readable);
        }
        let mut lacks = std::mem::take(&mut *lock(&self.lacks));
        lacks.retain(|piece| !piece.on_host && !self.readable);
        if lacks.is_empty() {
            return Ok(None);
        }
        lacks.sort_unstable_by_key(|piece| piece.at);
        // Pieces that share a byte lie in one allocation, and are read together.
        lacks.dedup_by(|next, last| {
            let skip = next.at.address() - last.at.address();
            let shares = skip < last.bytes;
            if shares {
                last.bytes = last.bytes.max(skip.saturating_add(next.bytes));
            }
            shares
        });
        let room = |piece: &Piece| piece.bytes.checked_next_multiple_of(8);
        let mut rooms = lacks.iter().map(room);
        let all = rooms.try_fold(0usize, |all, room| all.checked_add(room?));
        let too_many = || Error::argument("too many bytes to read back");
        let host = device.host_buffer(all.ok_or_else(too_many)?)?;
        let mut next = host.as_device_ptr();
        let copy = |piece: &Piece| {
            let dst = next;
            next = next.offset(room(piece).unwrap_or(0));
            CopyOp::new(CopyKind::DeviceToHost, piece.at, dst, piece.bytes)
        };
        let copies: Vec<_> = lacks.iter().map(copy).collect();
        let queue = queue.map_or_else(|| device.default_queue(), Queue::clone);
        let owners = owners(arrays.iter().map(|array| array.node()), |_| true);
        // SAFETY: each source is a union of overlapping pieces, which lie in memory of the owners (`read`), to which nobody writes: imports
        // and constructors demand it. The host buffer has room for each copy, and the reading keeps it and the owners alive.
        let reading = unsafe { Reading::start(&queue, owners, &copies, host) }?;
        let event = reading.event().cloned();
        self.reading = Some((copies, reading));
        Ok(event)
    }

    /// Whether something was copied, for which the host has waited.
    pub(crate) fn has_read(&self) -> bool {
        !self.known.is_empty()
    }
}

/// Where the bytes at an address went, if one of the copies, which are in ascending order, has them.
fn place(copies: &[CopyOp], at: DevicePtr, bytes: usize) -> Option<DevicePtr> {
    let after = copies.partition_point(|copy| copy.src <= at);
    let copy = &copies[after.checked_sub(1)?];
    let skip = at.address() - copy.src.address();
    let has_all = skip.saturating_add(bytes) <= copy.bytes;
    has_all.then(|| copy.dst.offset(skip))
}

/// Returns `bytes`, a size in bytes of the buffer at `address`, unless it is negative or more than the device
/// has there.
pub(crate) fn check_size(
    device: &Device,
    address: DevicePtr,
    bytes: i64,
    path: impl Fn() -> String,
) -> Result<usize> {
    // The end must lie inside the address space too.
    let fits = |n: &usize| isize::try_from(address.address().saturating_add(*n)).is_ok();
    let fault = match usize::try_from(bytes).ok().filter(fits) {
        None => format!("has a length of {bytes} bytes"),
        Some(0) => return Ok(0),
        Some(size) if address.is_null() => format!("is null but {size} bytes long"),
        Some(size) => match device.backend().classify(address, size).check() {
            Ok(()) => return Ok(size),
            Err(why) => {
                format!("claims {size} bytes at {address:?}, which {device} does not have{why}")
            }
        },
    };
    Err(Error::invalid(path(), fault))
}

/// Returns the signed integer of `width` bytes, in this machine's order of bytes, at the start of `bytes`.
pub(crate) fn int(bytes: &[u8], width: usize) -> i64 {
    let mut wide = [0; 8];
    wide[highest(width)].copy_from_slice(&bytes[..width]);
    // Shifting down extends the sign.
    i64::from_ne_bytes(wide) >> (64 - 8 * width)
}

/// Appends the lowest `width` bytes of `value`, in this machine's order of bytes.
pub(crate) fn push_int(to: &mut Vec<u8>, value: i64, width: usize) {
    let wide = (value << (64 - 8 * width)).to_ne_bytes();
    to.extend_from_slice(&wide[highest(width)]);
}

/// Where the highest `width` bytes of an integer of 8 bytes are.
const fn highest(width: usize) -> std::ops::Range<usize> {
    match cfg!(target_endian = "big") {
        true => 0..width,
        false => 8 - width..8,
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    /// Offsets, keys and run ends lie in memory as this machine writes them, whichever end comes first.
    #[test]
    fn integers_of_each_width() {
        for n in [0i64, 1, -1, 100, -127, 127] {
            let written: [&[u8]; 4] = [
                &(n as i8).to_ne_bytes(),
                &(n as i16 * 257).to_ne_bytes(),
                &(n as i32 * 0x0102_0304).to_ne_bytes(),
                &(n * 0x0102_0304_0506_0708).to_ne_bytes(),
            ];
            let values = [n, n * 257, n * 0x0102_0304, n * 0x0102_0304_0506_0708];
            for (value, bytes) in values.into_iter().zip(written) {
                assert_eq!(int(bytes, bytes.len()), value);
                let mut again = vec![];
                push_int(&mut again, value, bytes.len());
                assert_eq!(again, bytes);
            }
        }
    }
}
