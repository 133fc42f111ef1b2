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

/// SSE2, which every x86-64 has: wider stores are no faster, since whole lines are written either way.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn stream(src: *const u8, dst: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: the parts lie in the caller's `bytes` bytes one after the other; the stores are aligned,
    // since the head ends at a line's start. The fence orders them before all that follows, as plain
    // stores would be.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        let (mut from, mut to) = (src.add(head), dst.add(head));
        for _ in 0..lines {
            let line: [__m128i; 4] =
                std::array::from_fn(|i| _mm_loadu_si128(from.cast::<__m128i>().add(i)));
            for (i, part) in line.into_iter().enumerate() {
                _mm_stream_si128(to.cast::<__m128i>().add(i), part);
            }
            (from, to) = (from.add(LINE), to.add(LINE));
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
