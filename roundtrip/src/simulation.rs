//! What a simulated device's figures are judged by: it copies on a processor, where a GPU has an engine for that.

use std::hint::black_box;
use std::time::Instant;

/// Bytes of the memcpy that is measured.
const COPY: usize = 64 << 20;

/// 10^9 bytes per second of one thread's memcpy, the best of a few.
pub(crate) fn memcpy() -> f64 {
    let (from, mut to) = (vec![1u8; COPY], vec![2u8; COPY]);
    let time = |to: &mut Vec<u8>| {
        let start = Instant::now();
        to.copy_from_slice(black_box(&from));
        black_box(to.as_ptr());
        start.elapsed()
    };
    let best = (0..5).map(|_| time(&mut to)).min().unwrap_or_default();
    COPY as f64 / best.as_secs_f64() / 1e9
}
