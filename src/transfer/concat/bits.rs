//! Bitmaps that are put together from several.

use crate::device::DevicePtr;
use crate::transfer::staged::{Bits, Content, Rewrite, STAGED, Straight, Task};

/// The most bytes of a bitmap that the host makes at once.
const CHUNK: usize = STAGED / 16;

/// The bits of one part.
pub(super) struct Segment {
    /// The byte that holds the first bit; `None` if all bits are set.
    pub(super) src: Option<DevicePtr>,
    /// Bits to skip in that byte.
    pub(super) skip: usize,
    /// The first bit in the result: the end of the segment before.
    pub(super) at: usize,
    /// The number of bits.
    pub(super) bits: usize,
    /// The unset ones are nulls that nobody has counted yet.
    pub(super) counts: bool,
}

impl Segment {
    /// The bytes of the result that are bytes of the source.
    fn straight(&self) -> Option<(DevicePtr, std::ops::Range<usize>)> {
        let src = self.src.filter(|_| !self.counts)?;
        let bytes = self.at.div_ceil(8)..(self.at + self.bits) / 8;
        let same_bit = self.skip == self.at % 8 && !bytes.is_empty();
        // The first bit of the result's first whole byte, counted from the source's first byte.
        let from = self.skip + (bytes.start * 8).saturating_sub(self.at);
        same_bit.then(|| (src.offset(from / 8), bytes))
    }

    /// The bits of the segment among `bits` of the result, which are then counted from the start of `bits`.
    fn cut(&self, bits: &std::ops::Range<usize>) -> Bits {
        let start = self.at.max(bits.start);
        let end = (self.at + self.bits).min(bits.end);
        let from = self.skip + (start - self.at);
        Bits {
            src: self.src.map(|src| src.offset(from / 8)),
            skip: from % 8,
            at: start - bits.start,
            bits: end - start,
            counts: self.counts,
        }
    }
}

/// Adds the bitmap that `segments` make, from byte `dst` of the slab on. `node` is the node whose nulls are counted.
pub(super) fn pieces(segments: &[Segment], dst: usize, node: usize, content: &mut Content) {
    let end = segments.last().map_or(0, |last| last.at + last.bits);
    let mut done = 0;
    // The first segment that the bytes from `done` on may need.
    let mut first = 0;
    let mut on_host = |bytes: std::ops::Range<usize>, content: &mut Content| {
        for start in bytes.clone().step_by(CHUNK) {
            let stop = bytes.end.min(start + CHUNK);
            let bits = start * 8..(stop * 8).min(end);
            while segments[first].at + segments[first].bits <= bits.start {
                first += 1;
            }
            let needed = segments[first..].iter();
            let needed = needed.take_while(|segment| segment.at < bits.end);
            let needed = needed.filter(|segment| segment.bits > 0);
            content.tasks.push(Task {
                dst: dst + start,
                bytes: stop - start,
                zeros: 0,
                rewrite: Rewrite::Bits {
                    parts: needed.map(|segment| segment.cut(&bits)).collect(),
                    node,
                },
            });
        }
    };
    for segment in segments {
        if let Some((src, bytes)) = segment.straight() {
            on_host(done..bytes.start, content);
            content.straight.push(Straight {
                src,
                dst: dst + bytes.start,
                bytes: bytes.len(),
            });
            done = bytes.end;
        }
    }
    on_host(done..end.div_ceil(8), content);
}
