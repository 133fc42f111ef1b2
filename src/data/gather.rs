//! Small reads of device memory: sizes, ends of ranges, validity bitmaps. All that one step needs is read
//! with one list of copies and one host wait.

use std::ops::Range;
use std::sync::Arc;

use crate::data::array::DeviceArray;
use crate::device::{CopyKind, CopyOp, Device, DevicePtr, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::memory::{HostSlab, Owner, Reading};

/// A small piece of an array's memory.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Request {
    pub(crate) address: DevicePtr,
    pub(crate) bytes: usize,
    /// Whether the memory is ordinary host memory, whatever device the array is on.
    pub(crate) on_host: bool,
}

/// The answers to a list of requests.
#[derive(Debug)]
pub(crate) struct Answers {
    /// Address and number of bytes of each answer, in the slab or in the owners' memory.
    places: Vec<(DevicePtr, usize)>,
    /// What was copied from the device.
    _slab: HostSlab,
    _owners: Vec<Arc<Owner>>,
}

impl Answers {
    /// Returns the bytes of request `i`, which may start at any address.
    pub(crate) fn bytes(&self, i: usize) -> &[u8] {
        let (at, bytes) = self.places[i];
        if bytes == 0 {
            return &[];
        }
        // SAFETY: the bytes lie in the slab, into which all copies have completed and to which only this
        // struct has access, or in host memory of the owners, whose events `Gathering::start` waited for and to
        // which nobody writes (its contract). `self` keeps both alive.
        unsafe { std::slice::from_raw_parts(at.as_ptr().cast(), bytes) }
    }
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
const fn highest(width: usize) -> Range<usize> {
    match cfg!(target_endian = "big") {
        true => 0..width,
        false => 8 - width..8,
    }
}

/// A list of requests whose copies may still be running.
#[derive(Debug)]
pub(crate) struct Gathering {
    places: Vec<(DevicePtr, usize)>,
    reading: Reading<Vec<Arc<Owner>>>,
}

impl Gathering {
    /// As [`start`](Self::start), for the memory of an array.
    ///
    /// # Safety
    /// As [`start`](Self::start), for the array's owners.
    pub(crate) unsafe fn of(
        array: &DeviceArray,
        requests: &[Request],
        queue: Option<&Queue>,
    ) -> Result<Self> {
        // SAFETY: the caller keeps to the contract of `start`.
        unsafe { Self::start(array.device(), array.owners(), requests, queue) }
    }

    /// Queues the copies on `queue`, or on the device's default queue. Memory that the host can read is not
    /// copied; the call waits only for that. No byte is copied twice, however many requests name it: a producer
    /// may list the same memory any number of times.
    ///
    /// # Safety
    /// Each request lies in memory of the owners (or, `on_host`, in host memory that they keep alive)
    /// for its whole length, and nobody writes to it before the owners release it.
    pub(crate) unsafe fn start(
        device: &Device,
        owners: Vec<Arc<Owner>>,
        requests: &[Request],
        queue: Option<&Queue>,
    ) -> Result<Self> {
        let in_place = |r: &Request| r.on_host || device.is_host_readable() || r.bytes == 0;
        if requests.iter().any(|r| r.bytes > 0 && in_place(r)) {
            owners.iter().try_for_each(|owner| owner.wait_host())?;
        }
        let too_many = || Error::argument("too many bytes to read back");
        let mut order: Vec<_> = (0..requests.len()).collect();
        order.retain(|&i| !in_place(&requests[i]));
        order.sort_unstable_by_key(|&i| requests[i].address);
        // Of each copy the source, the bytes and the first byte in the slab; the latter of each request too, in `order`.
        let mut copies: Vec<(DevicePtr, usize, usize)> = Vec::with_capacity(order.len());
        let (mut starts, mut room) = (Vec::with_capacity(order.len()), 0usize);
        for &i in &order {
            let Request { address, bytes, .. } = requests[i];
            let skip = |src: DevicePtr| address.address() - src.address();
            // Two requests that share a byte lie in one allocation, and are read together.
            if copies.last().is_none_or(|(src, all, _)| skip(*src) >= *all) {
                copies.push((address, 0, room));
            }
            if let Some((src, all, start)) = copies.last_mut() {
                let end = skip(*src).checked_add(bytes).ok_or_else(too_many)?;
                *all = end.max(*all);
                starts.push(*start + skip(*src));
                let end = start.checked_add(*all);
                room = end
                    .and_then(|end| end.checked_next_multiple_of(8))
                    .ok_or_else(too_many)?;
            }
        }
        let slab = match room {
            0 => HostSlab::new(0)?, // the host reads all of it in place
            room => device.host_slab(room)?,
        };
        let base = slab.as_device_ptr();
        let mut places: Vec<_> = requests.iter().map(|r| (r.address, r.bytes)).collect();
        for (i, start) in order.into_iter().zip(starts) {
            places[i].0 = base.offset(start);
        }
        let copies: Vec<_> = (copies.into_iter())
            .map(|(src, bytes, start)| CopyOp {
                src,
                dst: base.offset(start),
                bytes,
                kind: CopyKind::DeviceToHost,
            })
            .collect();
        let queue = queue.map_or_else(|| device.default_queue(), Queue::clone);
        let sources = owners.clone();
        // SAFETY: each source is a union of overlapping requests, which lie in memory of the owners (this function's contract); the
        // slab has room for each copy, and the reading keeps slab and owners alive.
        let reading = unsafe { Reading::start(&queue, &owners, &copies, slab, sources) }?;
        Ok(Self { places, reading })
    }

    /// Returns the event after which the answers are there, or `None` if they are there already.
    pub(crate) fn event(&self) -> Option<&SyncEvent> {
        self.reading.event()
    }

    /// Says that the event was waited for: [`finish`](Self::finish) does not wait again.
    pub(crate) fn waited(&mut self) {
        self.reading.waited();
    }

    /// Waits for the copies, if there are any: one host wait.
    pub(crate) fn finish(self) -> Result<Answers> {
        let (slab, owners) = self.reading.finish()?;
        Ok(Answers {
            places: self.places,
            _slab: slab,
            _owners: owners,
        })
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
