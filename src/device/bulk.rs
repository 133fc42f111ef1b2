//! Copies of more bytes than the caches hold.

/// The number of bytes, of all pieces together, from which a copy is made past the caches.
pub(crate) const LARGE: usize = 128 << 20;

/// Copies past the caches, which would otherwise read each line before it is overwritten. `memcpy`
/// does so only for one piece of that size: where many smaller pieces make up [`LARGE`] bytes, this
/// is about 1.5 times as fast. It is not for fewer bytes: what was written must be fetched from
/// memory to be read.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy_large(src: *const u8, dst: *mut u8, bytes: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the processor has AVX; the caller guarantees the rest, which is the same (see
        // `# Safety`).
        return unsafe { stream(src, dst, bytes) };
    }
    // SAFETY: the caller guarantees that both ranges are valid and do not overlap (see `# Safety`).
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) }
}

/// # Safety
/// As [`std::ptr::copy_nonoverlapping`]; the processor has AVX.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx")]
unsafe fn stream(src: *const u8, dst: *mut u8, bytes: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    /// Bytes of a cache line, which is written whole.
    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(bytes);
    let tail = bytes - (bytes - head) % LINE;
    // SAFETY: the caller guarantees that both ranges are valid for `bytes` bytes and do not overlap
    // (see `# Safety`). The head, the lines and the tail lie in them one after the other, and the
    // head ends at the start of a line. The fence orders the lines before all later stores, as
    // plain stores would be.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        for at in (head..tail).step_by(LINE) {
            let low = _mm256_loadu_si256(src.add(at).cast());
            let high = _mm256_loadu_si256(src.add(at + 32).cast());
            _mm256_stream_si256(dst.add(at).cast(), low);
            _mm256_stream_si256(dst.add(at + 32).cast(), high);
        }
        _mm_sfence();
        std::ptr::copy_nonoverlapping(src.add(tail), dst.add(tail), bytes - tail);
    }
}

#[cfg(test)]
mod tests {
    use super::copy_large;

    #[test]
    fn any_place_and_length() {
        let source: Vec<u8> = (0..600).map(|i| (i * 7 % 251) as u8).collect();
        for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 17), (63, 63), (5, 64)] {
            for bytes in [0, 1, 15, 16, 63, 64, 65, 127, 128, 300, 500] {
                let mut target = vec![0xAA; 600];
                // SAFETY: both have 600 bytes, of which the ranges are a part.
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
