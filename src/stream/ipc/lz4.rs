//! How many bytes LZ4 frames decompress to: arrow-rs's decoder allocates what a frame makes, not what its buffer announces.

/// Takes `n` bytes off the front; `None` if there are fewer.
fn take<'a>(from: &mut &'a [u8], n: usize) -> Option<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(n)?;
    *from = rest;
    Some(taken)
}

/// Returns how many bytes a frame decompresses to, from the [lengths] in it; `None` if it is malformed.
///
/// [lengths]: https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md
pub(super) fn decompressed(mut frame: &[u8]) -> Option<u64> {
    let &[0x04, 0x22, 0x4D, 0x18, flags, _] = take(&mut frame, 6)? else {
        return None;
    };
    let has = |flag: u8| usize::from(flags & flag != 0);
    // The length of the content, the id of a dictionary, the header's checksum.
    take(&mut frame, 8 * has(8) + 4 * has(1) + 1)?;
    let mut sum = 0u64;
    while let Some(&[a, b, c, d]) = take(&mut frame, 4) {
        match u32::from_le_bytes([a, b, c, d]) {
            0 => break,
            size if size >> 31 == 1 => {
                sum += take(&mut frame, (size & (u32::MAX >> 1)) as usize)?.len() as u64;
            }
            size => sum = sum.checked_add(block(take(&mut frame, size as usize)?)?)?,
        }
        take(&mut frame, 4 * has(16))?;
    }
    Some(sum)
}

/// The same for a block: sequences of literals and a match, of which the last one lacks the match.
fn block(mut block: &[u8]) -> Option<u64> {
    let mut sum = 0;
    loop {
        let token = take(&mut block, 1)?[0];
        let literals = length(token >> 4, &mut block)?;
        take(&mut block, usize::try_from(literals).ok()?)?;
        sum += literals;
        if block.is_empty() {
            return Some(sum);
        }
        take(&mut block, 2)?;
        sum += length(token & 15, &mut block)? + 4;
    }
}

/// A length of four bits, to which further bytes are added as long as they are full.
fn length(bits: u8, block: &mut &[u8]) -> Option<u64> {
    let mut length = bits.into();
    let mut full = bits == 15;
    while full {
        let byte = take(block, 1)?[0];
        length += u64::from(byte);
        full = byte == u8::MAX;
    }
    Some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame with these flags, whose header has `more` bytes, of blocks with their sizes.
    fn frame(flags: u8, more: usize, blocks: &[&[u8]]) -> Option<u64> {
        let header = [
            &[0x04, 0x22, 0x4D, 0x18, flags, 0x40][..],
            &vec![0xAA; more],
        ]
        .concat();
        decompressed(&[&header[..], &blocks.concat()].concat())
    }

    #[test]
    fn frames() {
        let end: &[u8] = &[0; 4];
        assert_eq!(frame(0x40, 1, &[end]), Some(0));
        assert_eq!(frame(0x40, 1, &[]), Some(0));
        assert_eq!(frame(0x40, 0, &[]), None);
        // Three bytes as they are, twice; with checksums, a length and a dictionary.
        let plain: &[u8] = &[3, 0, 0, 0x80, 1, 2, 3];
        assert_eq!(frame(0x40, 1, &[plain, plain, end, plain]), Some(6));
        assert_eq!(frame(0x59, 13, &[plain, end, plain, end, end]), Some(6));
        assert_eq!(frame(0x40, 1, &[&plain[..6]]), None);
        // Two literals, a match of 4, one of 15 + 255 + 255 + 7 + 4, and 15 + 1 literals.
        let sequences = [
            &[0x20, b'a', b'b', 2, 0, 0x0F, 1, 0, 255, 255, 7, 0xF0, 1][..],
            &[b'c'; 16],
        ];
        let block = sequences.concat();
        let size = [block.len() as u8, 0, 0, 0];
        assert_eq!(
            frame(0x40, 1, &[&size, &block, end]),
            Some(2 + 4 + 536 + 16)
        );
        for cut in 1..block.len() {
            let size = [cut as u8, 0, 0, 0];
            let sum = frame(0x40, 1, &[&size, &block[..cut], end]);
            // A block that is cut behind literals is whole: its last sequence has no match.
            let expected = [(3, 2), (6, 6)].into_iter().find(|(at, _)| *at == cut);
            assert_eq!(sum, expected.map(|(_, sum)| sum), "{cut}");
        }
        assert_eq!(decompressed(&[0x02, 0x21, 0x4C, 0x18, 0, 0, 0, 0]), None);
    }
}
