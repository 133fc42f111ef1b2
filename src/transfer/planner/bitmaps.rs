//! Plans validity bitmaps and bits.

use crate::data::node::View;
use crate::data::resolve::count_bits;
use crate::error::{Error, Result};
use crate::transfer::fix::{Bits, Fix, Join};
use crate::transfer::plan::{Region, too_large};
use crate::transfer::planner::{Parts, Planner, is_whole, region_of};
use crate::transfer::staged::STAGED;

/// The most bytes of a bitmap that the host puts together at once.
const CHUNK: usize = STAGED / 16;
/// More bytes than any device has for a bitmap.
const MOST: u64 = 1 << 40;

impl<'a> Planner<'a> {
    /// Adds the validity bitmap of a node; returns its null count, without those that are counted in a bitmap on the way.
    pub(super) fn validity(
        &mut self,
        node: usize,
        parts: &Parts<'a>,
        nulls: Option<usize>,
    ) -> Result<Option<usize>> {
        let counts: Vec<_> = match parts.is_one() {
            true => Vec::new(),
            false => parts.iter().map(|view| self.nulls(view, None)).collect(),
        };
        if parts.is_one() {
            let view = parts.first;
            let nulls = self.nulls(view, nulls);
            if nulls != Some(0) && view.length > 0 {
                let counts = nulls.is_none() && self.is_exact();
                self.bits_of_one(node, view, 0, view.validity_offset, counts);
            }
            return Ok(nulls);
        }
        if counts.iter().any(|nulls| *nulls != Some(0)) {
            let parts = parts.iter().zip(&counts).map(|(view, nulls)| {
                let has = *nulls != Some(0);
                (view, has.then_some(view.validity_offset), nulls.is_none())
            });
            let parts: Vec<_> = parts.collect();
            self.join(node, 0, &parts)?;
        }
        Ok(Some(counts.into_iter().flatten().sum()))
    }

    /// Adds buffer `i`, of a bit for each row.
    pub(super) fn bits(&mut self, node: usize, parts: &Parts<'a>, i: usize) -> Result<()> {
        let is_null = |view: &View<'_>| view.length > 0 && view.node.buffers[i].is_null();
        if parts.is_one() {
            match is_null(&parts.first) || parts.first.length == 0 {
                true => self.plan.fill(node, i, self.nothing, []),
                false => self.bits_of_one(node, parts.first, i, parts.first.offset, false),
            }
            return Ok(());
        }
        if let Some(view) = parts.iter().find(is_null) {
            return Err(Error::invalid(self.path(view, i), "is null but has rows"));
        }
        let parts: Vec<_> = parts
            .iter()
            .map(|view| (view, Some(view.offset), false))
            .collect();
        self.join(node, i, &parts)
    }

    /// The nulls of rows, which are counted if the host can read the bitmap.
    fn nulls(&self, view: View<'a>, known: Option<usize>) -> Option<usize> {
        let Some(bitmap) = view.node.bitmap() else {
            return Some(0);
        };
        known.or_else(|| view.null_count()).or_else(|| {
            let (skip, bits) = (view.validity_offset % 8, view.length);
            let src = bitmap.address().offset(view.validity_offset / 8);
            let bytes = (skip + bits).div_ceil(8);
            self.readable.then(|| {
                // SAFETY: the bitmap has one bit for each row of its node, which was checked when the node was made; the
                // host can read it (`readable`), and it is ready (`plan_with` waited).
                let bitmap = unsafe { std::slice::from_raw_parts(src.as_ptr().cast(), bytes) };
                bits - count_bits(bitmap, skip, bits)
            })
        })
    }

    /// Adds bits of one array, which start at bit `first` of buffer `i`. With `counts` the host counts the nulls.
    fn bits_of_one(&mut self, node: usize, view: View<'a>, i: usize, first: usize, counts: bool) {
        let (skip, bits) = (first % 8, view.length);
        let region = region_of(&view.node.buffers[i], first / 8, bits.div_ceil(8));
        let rewritten = skip > 0 || bits % 8 > 0;
        let region = match counts || (!is_whole(view) && rewritten) {
            true => region.fixed(Fix::Bits {
                skip: skip as u8,
                bits,
                counts: counts.then_some(node as u32),
            }),
            false => region.whole(is_whole(view)),
        };
        self.plan.fill(node, i, true, [region]);
    }

    /// Adds buffer `i`, of the bits of several arrays: for each its rows, the first bit (none if all are set), and whether its nulls are
    /// still to be counted. As long as bits go to the places in their bytes that they have, they are copied; the host makes the rest.
    fn join(
        &mut self,
        node: usize,
        i: usize,
        parts: &[(View<'a>, Option<usize>, bool)],
    ) -> Result<()> {
        let length = self.plan.nodes[node].length;
        // Rows that take no memory may be more than there are bits anywhere.
        if length.div_ceil(8) as u64 > MOST {
            return Err(too_large());
        }
        let (mut regions, mut joined, mut at) = (Vec::new(), Vec::new(), 0);
        for (k, (view, first, counts)) in parts.iter().copied().enumerate() {
            let (bits, buffer) = (view.length, &view.node.buffers[i]);
            let end = bits % 8 == 0 || k + 1 == parts.len();
            match first {
                Some(first) if joined.is_empty() && end && first % 8 == 0 && !counts => {
                    let region = region_of(buffer, first / 8, bits.div_ceil(8));
                    regions.push(match bits % 8 {
                        0 => region,
                        _ => region.fixed(Fix::Bits {
                            skip: 0,
                            bits,
                            counts: None,
                        }),
                    });
                }
                _ => joined.push(Bits {
                    src: first.map(|first| buffer.address().offset(first / 8)),
                    skip: first.unwrap_or(0) % 8,
                    at,
                    bits,
                    counts,
                }),
            }
            at += bits;
        }
        // Everything from the first joined part on starts within the byte that it starts in.
        let (start, mut first) = (joined.first().map_or(at, |bits| bits.at) / 8, 0);
        for start in (start..length.div_ceil(8))
            .step_by(CHUNK)
            .take_while(|_| !joined.is_empty())
        {
            let stop = length.div_ceil(8).min(start + CHUNK);
            let range = start * 8..(stop * 8).min(length);
            while joined[first].at + joined[first].bits <= range.start {
                first += 1;
            }
            let needed = joined[first..]
                .iter()
                .take_while(|bits| bits.at < range.end);
            let needed = needed.map(|bits| cut(bits, &range));
            let join = Join {
                parts: needed.collect(),
                node,
            };
            let fix = Fix::Join(self.plan.made.joins.len() as u32);
            self.plan.made.joins.push(join);
            regions.push(Region::made(fix, stop - start));
        }
        self.plan.fill(node, i, true, regions);
        Ok(())
    }
}

/// Those of the bits that are among `range` of the result, counted from its start.
fn cut(bits: &Bits, range: &std::ops::Range<usize>) -> Bits {
    let start = bits.at.max(range.start);
    let end = (bits.at + bits.bits).min(range.end);
    let from = bits.skip + (start - bits.at);
    Bits {
        src: bits.src.map(|src| src.offset(from / 8)),
        skip: from % 8,
        at: start - range.start,
        bits: end - start,
        counts: bits.counts,
    }
}
