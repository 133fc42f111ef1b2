//! [`CopyRegion`]: where some bytes of a result come from, and what the host changes in them on the way.

use arrow_buffer::bit_mask::set_bits;

use crate::data::node::NodeBuffer;
use crate::device::{CopyKind, CopyOp, DevicePtr};
use crate::memory::HostBuffer;
use crate::transfer::staging;

/// Regions of at least this many bytes are copied directly from where they are, if the device can do that. That costs up
/// to two copies more, its own and that of what was packed before it, and saves the host `DIRECT` bytes of packing. The
/// documentation of [`HostBuffer`](crate::HostBuffer) promises this number.
pub(super) const DIRECT: usize = staging(1 << 20);

/// The bytes of a region from which on packing leaves the processor's cache alone, where host buffers are not filled twice.
const STREAMED: usize = 4 << 10;

/// Some bytes of one buffer of a transfer's result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyRegion {
    /// The allocation of the source.
    pub(super) base: DevicePtr,
    /// The first byte of the source.
    pub(super) src: DevicePtr,
    /// Byte offset in the memory of the result.
    pub(super) dst: usize,
    /// The bytes of the result.
    pub(super) len: usize,
    /// The zeros that follow, where a buffer ends.
    pub(super) pad: usize,
    /// The source is followed by so many zeros too.
    pub(super) padded: bool,
    pub(super) rewrite: Rewrite,
}

/// What the host changes in a region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Rewrite {
    /// Nothing.
    None,
    /// Nothing, but the source is memory of the host that the plan keeps.
    Made,
    /// The result is `bits` bits from bit `skip` of the source on.
    Bits { skip: u8, bits: usize },
    /// `n` is added to each integer of `width` bytes (1, 2, 4 or 8). Invalid offsets may wrap; they stay invalid, and
    /// nothing is read through them.
    Add { width: u8, n: i64 },
}

impl Rewrite {
    /// Adds `n` to each integer of `width` bytes.
    pub(super) fn add(width: usize, n: i64) -> Self {
        let width = width as u8;
        match n {
            0 => Self::None,
            n => Self::Add { width, n },
        }
    }
}

impl CopyRegion {
    /// `len` bytes from byte `offset` of an allocation on, that are copied as they are.
    pub(super) fn new(base: DevicePtr, offset: usize, len: usize) -> Self {
        Self {
            base,
            src: base.offset(offset),
            dst: 0,
            len,
            pad: 0,
            padded: false,
            rewrite: Rewrite::None,
        }
    }

    /// `len` bytes of a buffer from byte `from` on.
    pub(super) fn of(buffer: &NodeBuffer, from: usize, len: usize) -> Self {
        Self::new(buffer.base, buffer.offset + from, len)
    }

    pub(super) fn rewritten(self, rewrite: Rewrite) -> Self {
        Self { rewrite, ..self }
    }

    pub(super) fn padded(self, padded: bool) -> Self {
        Self { padded, ..self }
    }

    /// The bytes of the result with their padding.
    pub(super) fn room(&self) -> usize {
        self.len + self.pad
    }

    /// The bytes that are read from the arrays.
    pub(super) fn source(&self) -> usize {
        match self.rewrite {
            Rewrite::Made => 0,
            Rewrite::Bits { skip, bits } => (usize::from(skip) + bits).div_ceil(8),
            _ => self.len,
        }
    }

    /// Bytes `start..end` of the result and its padding as a region of their own. `start` is a multiple of 16, so that it divides no
    /// value that is rewritten.
    pub(super) fn part(&self, start: usize, end: usize) -> Self {
        let len = end.min(self.len).saturating_sub(start);
        let rewrite = match self.rewrite {
            _ if len == 0 => Rewrite::None,
            Rewrite::Bits { skip, bits } => Rewrite::Bits {
                skip,
                bits: (bits - start * 8).min(len * 8),
            },
            rewrite => rewrite,
        };
        Self {
            src: self.src.offset(start),
            dst: self.dst + start,
            len,
            pad: end - start - len,
            padded: false,
            rewrite,
            ..*self
        }
    }

    /// Writes the result and its padding to `out`.
    ///
    /// # Safety
    /// `src`, where the source's bytes are, is readable, and `out` is writable, each for its length. They do not overlap, or are
    /// the same; then `out` has room for the source too.
    #[inline]
    pub(super) unsafe fn write(&self, src: DevicePtr, out: DevicePtr) {
        let (src, out) = (
            src.as_ptr().cast::<u8>().cast_const(),
            out.as_ptr().cast::<u8>(),
        );
        // SAFETY: the caller guarantees so many bytes of either, and that they do not overlap unless they are the same.
        unsafe {
            if !matches!(self.rewrite, Rewrite::Bits { .. }) && !std::ptr::eq(src, out) {
                src.copy_to_nonoverlapping(out, self.len);
            }
            if !matches!(self.rewrite, Rewrite::None | Rewrite::Made) {
                self.change(src, out);
            }
            out.add(self.len).write_bytes(0, self.pad);
        }
    }

    /// Changes values that are at `out`, or writes bits there.
    ///
    /// # Safety
    /// As [`write`](Self::write).
    #[inline(never)]
    unsafe fn change(&self, src: *const u8, out: *mut u8) {
        let moved;
        let source = match self.rewrite {
            Rewrite::Bits { .. } => {
                // SAFETY: the caller guarantees the source's bytes.
                let source = unsafe { std::slice::from_raw_parts(src, self.source()) };
                match std::ptr::eq(src, out) {
                    true => {
                        moved = source.to_vec();
                        &moved
                    }
                    false => source,
                }
            }
            _ => &[],
        };
        // SAFETY: the caller guarantees so many bytes, and that nothing else uses them: bits that were there have moved.
        let result = unsafe { std::slice::from_raw_parts_mut(out, self.len) };
        match self.rewrite {
            Rewrite::None | Rewrite::Made => {}
            Rewrite::Bits { skip, bits } => {
                result.fill(0);
                set_bits(result, source, 0, skip.into(), bits);
            }
            Rewrite::Add { width, n } => add(result, width, n),
        }
    }
}

/// Adds `n` to every integer of `width` bytes. They need not be aligned.
fn add(values: &mut [u8], width: u8, n: i64) {
    macro_rules! each {
        ($t:ty) => {
            for bytes in values.chunks_exact_mut(size_of::<$t>()) {
                let old = <$t>::from_ne_bytes((&*bytes).try_into().unwrap_or_default());
                bytes.copy_from_slice(&old.wrapping_add(n as $t).to_ne_bytes());
            }
        };
    }
    match width {
        1 => each!(i8),
        2 => each!(i16),
        4 => each!(i32),
        _ => each!(i64),
    }
}

/// Writes regions to a host buffer, one behind the other, and returns the copies from there to a plan's memory at `base`. `past_cache`
/// says that only a device reads the buffer.
///
/// # Safety
/// The host can read the sources. The buffer has room for the regions, and nothing else uses it.
pub(super) unsafe fn stage<'a>(
    regions: impl IntoIterator<Item = &'a CopyRegion>,
    buffer: &HostBuffer,
    base: DevicePtr,
    past_cache: bool,
) -> Vec<CopyOp> {
    let (mut out, mut copies) = (buffer.as_device_ptr(), Vec::<CopyOp>::with_capacity(1));
    for region in regions {
        let mut src = region.src;
        // SAFETY: the caller guarantees the source, and room for the regions, of which this one comes after those before.
        unsafe {
            if past_cache && region.len >= STREAMED && region.rewrite == Rewrite::None {
                copy_past_cache(src.as_ptr().cast(), out.as_ptr().cast(), region.len);
                src = out;
            }
            region.write(src, out);
        }
        let (dst, bytes) = (base.offset(region.dst), region.room());
        match copies.last_mut() {
            Some(last) if last.dst.offset(last.bytes) == dst => last.bytes += bytes,
            _ => copies.push(CopyOp::new(CopyKind::HostToDevice, out, dst, bytes)),
        }
        out = out.offset(bytes);
    }
    copies
}

/// Copies to memory that only the device reads: the processor does not read it into its cache first. On an H200's host packing 2 MiB
/// took three quarters of the time, with blocks of 64 bytes; with 16 nearly all of it.
///
/// # Safety
/// As [`copy_to_nonoverlapping`](pointer::copy_to_nonoverlapping).
unsafe fn copy_past_cache(src: *const u8, out: *mut u8, len: usize) {
    let mut done = 0;
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller guarantees `len` bytes at each, and blocks are written where they are aligned. Every processor of this
    // architecture has the instructions; the fence comes before anybody else may use the memory.
    unsafe {
        use crate::device::ALIGNMENT;
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
        let is_aligned = out.cast::<__m128i>().is_aligned();
        while is_aligned && done + ALIGNMENT <= len {
            let from: *const __m128i = src.add(done).cast();
            let to: *mut __m128i = out.add(done).cast();
            let block = [0, 1, 2, 3].map(|i| _mm_loadu_si128(from.add(i)));
            (0..4).for_each(|i| _mm_stream_si128(to.add(i), block[i]));
            done += ALIGNMENT;
        }
        _mm_sfence();
    }
    // SAFETY: the caller guarantees `len` bytes at each, which do not overlap.
    unsafe {
        src.add(done)
            .copy_to_nonoverlapping(out.add(done), len - done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::numbers::{int, push_int};

    fn source(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i * 37 + i / 7) as u8).collect()
    }

    fn bit(bytes: &[u8], i: usize) -> bool {
        bytes[i / 8] >> (i % 8) & 1 == 1
    }

    fn region(from: &[u8], len: usize, rewrite: Rewrite) -> CopyRegion {
        let src = DevicePtr::new(from.as_ptr().cast_mut().cast());
        let mut region = CopyRegion::new(src, 0, len).rewritten(rewrite);
        region.pad = len.next_multiple_of(64) - len;
        region
    }

    /// The region and its padding, written `step` bytes at a time over what was there before.
    fn written(region: &CopyRegion, step: usize) -> Vec<u8> {
        let mut out = vec![0xAA; region.room()];
        for start in (0..out.len()).step_by(step) {
            let part = region.part(start, out.len().min(start + step));
            let out = DevicePtr::new(out[part.dst..].as_mut_ptr().cast());
            // SAFETY: every caller passes a source that is as long as its region says, and `out` is fresh.
            unsafe { part.write(part.src, out) };
        }
        out
    }

    #[test]
    fn bits_from_any_bit() {
        // No byte more than the bits need: Miri detects reads past them.
        for skip in 0..8u8 {
            let few = if cfg!(miri) { 7 } else { 1 };
            for bits in (1..150).step_by(few).chain([511, 512, 513, 520]) {
                let from = source((usize::from(skip) + bits).div_ceil(8));
                let rewrite = Rewrite::Bits { skip, bits };
                let region = region(&from, bits.div_ceil(8), rewrite);
                let all = written(&region, 4096);
                assert_eq!(all, written(&region, 64));
                let mut same = vec![0xAA; all.len().max(from.len())];
                same[..from.len()].copy_from_slice(&from);
                let out = DevicePtr::new(same.as_mut_ptr().cast());
                // SAFETY: the source is there, which has room for the result.
                unsafe { region.write(out, out) };
                assert_eq!(all, same[..all.len()], "in place: {skip}, {bits}");
                for i in 0..all.len() * 8 {
                    let expected = i < bits && bit(&from, usize::from(skip) + i);
                    assert_eq!(bit(&all, i), expected, "bit {i} of {bits} from {skip}");
                }
            }
        }
    }

    #[test]
    fn integers_from_any_address() {
        for (width, n) in [
            (4u8, -1i64 << 20),
            (8, -1 << 40),
            (4, 3),
            (8, -77),
            (1, 200),
            (2, 40_000),
        ] {
            let w = usize::from(width);
            for count in [1, 2, 15, 16, 17, 40] {
                let from = source(count * w + 1);
                let region = region(&from[1..], count * w, Rewrite::Add { width, n });
                let all = written(&region, 4096);
                assert_eq!(all, written(&region, 64));
                let (values, padding) = all.split_at(count * w);
                for (to, from) in values.chunks(w).zip(from[1..].chunks(w)) {
                    let mut more = Vec::new();
                    push_int(&mut more, int(from, w).wrapping_add(n), w);
                    assert_eq!(to, more);
                }
                assert!(padding.iter().all(|byte| *byte == 0));
            }
        }
    }

    #[test]
    fn plain_bytes_and_padding() {
        for bytes in (1..70).chain([127, 128, 129, 200]) {
            let from = source(bytes);
            for rewrite in [Rewrite::None, Rewrite::Made] {
                let region = region(&from, bytes, rewrite);
                let all = written(&region, 4096);
                assert_eq!(all, written(&region, 64));
                let (plain, padding) = all.split_at(bytes);
                assert_eq!(plain, from);
                assert!(padding.iter().all(|byte| *byte == 0));
            }
        }
    }
}
