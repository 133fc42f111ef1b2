//! Copies of more than caches hold.

/// From how many bytes in all a set of copies is more than most caches hold.
pub(crate) const LARGE: usize = 128 << 20;

/// Copies past the caches, which would read each line that is overwritten and push out what is in use.
/// Worth it only where all that is copied is [`LARGE`]: what was written must be fetched to be read.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy_large(src: *const u8, dst: *mut u8, bytes: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: the caller's.
    unsafe {
        stream(src, dst, bytes);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    // SAFETY: the caller's.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, bytes);
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn stream(src: *const u8, dst: *mut u8, bytes: usize) {
    let head = dst.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: the parts lie in the caller's `bytes` bytes one after the other; the head ends at a line's
    // start. The fence orders the lines before all that follows, as plain stores would be.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        let (from, to) = (src.add(head), dst.add(head));
        match std::arch::is_x86_feature_detected!("avx") {
            true => lines_avx(from, to, lines),
            false => lines_sse2(from, to, lines),
        }
        std::arch::x86_64::_mm_sfence();
        std::ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), bytes - tail);
    }
}

/// Bytes of a cache line, which is written whole.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const LINE: usize = 64;

/// A good tenth faster than [`lines_sse2`].
///
/// # Safety
/// Both are valid for so many lines, `to` is at a line's start, and the processor has AVX.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx")]
unsafe fn lines_avx(from: *const u8, to: *mut u8, lines: usize) {
    use std::arch::x86_64::{_mm256_loadu_si256, _mm256_stream_si256};
    for at in (0..lines).map(|line| line * LINE) {
        // SAFETY: the caller's.
        unsafe {
            let low = _mm256_loadu_si256(from.add(at).cast());
            let high = _mm256_loadu_si256(from.add(at + 32).cast());
            _mm256_stream_si256(to.add(at).cast(), low);
            _mm256_stream_si256(to.add(at + 32).cast(), high);
        }
    }
}

/// # Safety
/// Both are valid for so many lines, and `to` is at a line's start.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn lines_sse2(from: *const u8, to: *mut u8, lines: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    for at in (0..lines).map(|line| line * LINE) {
        // SAFETY: the caller's; every x86-64 has SSE2.
        unsafe {
            let line: [__m128i; 4] =
                std::array::from_fn(|i| _mm_loadu_si128(from.add(at + 16 * i).cast()));
            for (i, part) in line.into_iter().enumerate() {
                _mm_stream_si128(to.add(at + 16 * i).cast(), part);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::copy_large;

    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[test]
    fn lines_of_old_processors() {
        use super::{LINE, lines_sse2};
        #[repr(align(64))]
        struct Lines([u8; 4 * LINE]);
        let source = Lines(std::array::from_fn(|i| i as u8));
        let mut target = Lines([0xAA; 4 * LINE]);
        // SAFETY: both have more lines, also from the places that they start at.
        unsafe {
            lines_sse2(source.0.as_ptr().add(5), target.0.as_mut_ptr().add(LINE), 2);
            std::arch::x86_64::_mm_sfence();
        }
        assert_eq!(target.0[LINE..3 * LINE], source.0[5..][..2 * LINE]);
        let around = target.0[..LINE].iter().chain(&target.0[3 * LINE..]);
        assert!(around.into_iter().all(|byte| *byte == 0xAA));
    }

    #[test]
    fn any_place_and_length() {
        let source: Vec<u8> = (0..600).map(|i| (i * 7 % 251) as u8).collect();
        for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 17), (63, 63), (5, 64)] {
            for bytes in [0, 1, 15, 16, 63, 64, 65, 127, 128, 300, 500] {
                let mut target = vec![0xAA; 600];
                // SAFETY: both have 600 bytes.
                unsafe {
                    copy_large(
                        source.as_ptr().add(from),
                        target.as_mut_ptr().add(to),
                        bytes,
                    )
                };
                let (before, rest) = target.split_at(to);
                let (copied, behind) = rest.split_at(bytes);
                assert_eq!(copied, &source[from..][..bytes], "{from} {to} {bytes}");
                let untouched = before.iter().chain(behind).all(|byte| *byte == 0xAA);
                assert!(untouched, "{from} {to} {bytes}");
            }
        }
    }
}
