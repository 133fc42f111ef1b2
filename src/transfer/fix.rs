//! Bit shifts and offset rebasing on the host: while packing for an upload, in place after a
//! download.

use crate::device::{ALIGNMENT, DevicePtr};

/// One buffer's bytes.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) src: DevicePtr,
    /// Bytes to read.
    pub(crate) src_bytes: usize,
    /// Byte offset in the slab.
    pub(crate) dst: usize,
    /// Bytes that the result has.
    pub(crate) dst_bytes: usize,
    pub(crate) fix: Fix,
    /// The node whose nulls are to be counted in this mask.
    pub(crate) counts: Option<usize>,
}

/// What the host does to a piece on its way.
#[derive(Debug)]
pub(crate) enum Fix {
    None,
    /// `bits` bits start at bit `skip` of the source.
    Bits {
        skip: usize,
        bits: usize,
    },
    /// `base` is taken from every offset.
    Offsets {
        width: usize,
        base: i64,
    },
    /// The bytes are here; there is no source.
    Ready(Box<[u8]>),
}

impl Piece {
    /// Bytes that the piece takes in the slab.
    pub(crate) fn region(&self) -> usize {
        self.src_bytes
            .max(self.dst_bytes)
            .next_multiple_of(ALIGNMENT)
    }

    /// Whether the source's bytes are the result's.
    pub(crate) fn is_plain(&self) -> bool {
        match self.fix {
            Fix::None => true,
            // But for the bits behind the last row.
            Fix::Bits { skip, .. } => skip == 0,
            Fix::Offsets { base, .. } => base == 0,
            Fix::Ready(_) => false,
        }
    }

    /// How many leading bytes of the result are the source's as they stand. The host sees to the rest.
    pub(crate) fn straight(&self) -> usize {
        match self.fix {
            _ if self.counts.is_some() => 0,
            Fix::None | Fix::Offsets { base: 0, .. } => self.dst_bytes,
            // The bits behind the last row must become zero.
            Fix::Bits { skip: 0, bits } => bits / 8,
            _ => 0,
        }
    }

    /// Bytes `start..start + bytes` of the result as a piece of their own. Both are multiples of 64,
    /// but where the piece ends; where it is bits, `start` may be any.
    pub(crate) fn part(&self, start: usize, bytes: usize) -> Self {
        let (src_bytes, fix) = match &self.fix {
            Fix::None => (bytes, Fix::None),
            &Fix::Bits { skip, bits } => {
                let bits = (bits - start * 8).min(bytes * 8);
                ((skip + bits).div_ceil(8), Fix::Bits { skip, bits })
            }
            &Fix::Offsets { width, base } => (bytes, Fix::Offsets { width, base }),
            Fix::Ready(all) => (0, Fix::Ready(all[start..start + bytes].into())),
        };
        Self {
            src: self.src.offset(start),
            src_bytes,
            dst: self.dst + start,
            dst_bytes: bytes,
            fix,
            counts: self.counts,
        }
    }
}

/// Copies `bits` bits that start at bit `skip` (0 to 7) of `src` to the start of `dst`; the rest of
/// the last byte is zero. Goes upwards, so that `dst` may be `src`.
///
/// # Safety
/// `src` is readable for `(skip + bits)` bits, `dst` writable for `bits` bits, both rounded up to
/// bytes; they do not overlap unless `dst <= src`.
unsafe fn shift_bits(src: *const u8, dst: *mut u8, skip: usize, bits: usize) {
    let bytes = bits.div_ceil(8);
    let source_bytes = (skip + bits).div_ceil(8);
    if skip == 0 {
        // SAFETY: `bytes` bytes of each, by the caller's contract.
        unsafe { std::ptr::copy(src, dst, bytes) };
    } else {
        for i in 0..bytes {
            // SAFETY: `i` is below `bytes`, which is at most `source_bytes`, and what is read after
            // `i` is below that.
            unsafe {
                let low = *src.add(i) >> skip;
                let high = if i + 1 < source_bytes {
                    *src.add(i + 1) << (8 - skip)
                } else {
                    0
                };
                *dst.add(i) = low | high;
            }
        }
    }
    if bits % 8 != 0 {
        // SAFETY: `bits` is not 0, so there is a last byte.
        unsafe { *dst.add(bytes - 1) &= (1 << (bits % 8)) - 1 };
    }
}

/// Writes `count` offsets less `base`. Goes upwards, so that `dst` may be `src`; neither needs to be
/// aligned.
///
/// # Safety
/// `src` is readable and `dst` writable for `count` integers of `width` bytes (4 or 8).
unsafe fn rebase(src: *const u8, dst: *mut u8, width: usize, count: usize, base: i64) {
    // Offsets that do not ascend wrap: they were wrong before, and nothing is read through them.
    for i in 0..count {
        // SAFETY: the caller's; `i` is below `count`.
        unsafe {
            let (src, dst) = (src.add(i * width), dst.add(i * width));
            if width == 4 {
                let value = src.cast::<i32>().read_unaligned();
                dst.cast::<i32>()
                    .write_unaligned(value.wrapping_sub(base as i32));
            } else {
                let value = src.cast::<i64>().read_unaligned();
                dst.cast::<i64>().write_unaligned(value.wrapping_sub(base));
            }
        }
    }
}

/// Writes bytes `start..start + out.len()` of a piece's region, padding included, from its source in
/// host memory. `start` is a multiple of 64.
///
/// # Safety
/// The piece's source is readable host memory for its length.
pub(crate) unsafe fn pack(piece: &Piece, start: usize, out: &mut [u8]) {
    let there = piece.dst_bytes.saturating_sub(start).min(out.len());
    let (out, padding) = out.split_at_mut(there);
    padding.fill(0);
    if there == 0 {
        return;
    }
    let src = piece.src.as_ptr().cast::<u8>().cast_const();
    match &piece.fix {
        Fix::None => {
            // SAFETY: `start + there` is at most the piece's length, and the source is readable for it.
            let bytes = unsafe { std::slice::from_raw_parts(src.add(start), there) };
            out.copy_from_slice(bytes);
        }
        Fix::Ready(bytes) => out.copy_from_slice(&bytes[start..start + there]),
        Fix::Bits { skip, bits } => {
            let bits = (bits - start * 8).min(there * 8);
            // SAFETY: the source is readable for `skip + bits` bits of the whole piece, `out` has
            // `there` bytes, and they do not overlap.
            unsafe { shift_bits(src.add(start), out.as_mut_ptr(), *skip, bits) }
        }
        Fix::Offsets { width, base } => {
            // SAFETY: as for `None`; lengths of offsets are multiples of their width.
            unsafe {
                rebase(
                    src.add(start),
                    out.as_mut_ptr(),
                    *width,
                    there / width,
                    *base,
                )
            }
        }
    }
}

/// Turns a piece's raw bytes, copied to the start of `region`, into what they should be, and zeroes
/// the padding.
pub(crate) fn mend(piece: &Piece, region: &mut [u8]) {
    let ptr = region.as_mut_ptr();
    match &piece.fix {
        Fix::None => {}
        Fix::Ready(bytes) => region[..bytes.len()].copy_from_slice(bytes),
        // SAFETY: the region holds the piece's source bytes, and the result is no longer.
        Fix::Bits { skip, bits } => unsafe { shift_bits(ptr, ptr, *skip, *bits) },
        // SAFETY: as above.
        Fix::Offsets { width, base } => unsafe {
            rebase(ptr, ptr, *width, piece.dst_bytes / width, *base);
        },
    }
    region[piece.dst_bytes..].fill(0);
}
