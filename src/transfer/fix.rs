//! Bit shifts and offset rebasing on the host: while packing for an upload, in place after a
//! download.

use crate::transfer::plan::{Fix, Piece};

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
        // SAFETY: the caller's; `bytes` is all that is asked for.
        unsafe { std::ptr::copy(src, dst, bytes) };
    } else {
        for i in 0..bytes {
            // SAFETY: indices stay below `bytes` and `source_bytes`.
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
    // For every arm: `start + there` is at most the piece's length, and the source was planned with
    // the bytes that this needs.
    match &piece.fix {
        Fix::None => {
            // SAFETY: see above.
            out.copy_from_slice(unsafe { std::slice::from_raw_parts(src.add(start), there) })
        }
        Fix::Ready(bytes) => out.copy_from_slice(&bytes[start..start + there]),
        Fix::Bits { skip, bits } => {
            let bits = (bits - start * 8).min(there * 8);
            // SAFETY: see above.
            unsafe { shift_bits(src.add(start), out.as_mut_ptr(), *skip, bits) }
        }
        // SAFETY: see above.
        Fix::Offsets { width, base } => unsafe {
            rebase(
                src.add(start),
                out.as_mut_ptr(),
                *width,
                there / width,
                *base,
            );
        },
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
