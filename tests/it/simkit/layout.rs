//! What this crate lays out in device memory, byte by byte.

use arrow_data::ArrayData;
use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use arrow_device::{DeviceArray, DeviceBuffer, Queue, TransferStats};
use arrow_schema::DataType;

/// All bytes of a buffer, its padding included.
fn raw(buffer: &DeviceBuffer, queue: &Queue) -> Vec<u8> {
    let mut bytes = vec![0xEE; buffer.len().next_multiple_of(64)];
    let loan = buffer.on(queue).unwrap();
    let op = CopyOp {
        src: loan.address(),
        dst: DevicePtr::new(bytes.as_mut_ptr().cast()),
        bytes: bytes.len(),
        kind: CopyKind::DeviceToHost,
    };
    // SAFETY: padded memory of this crate; waited for below.
    unsafe { queue.raw().copy(&[op]) }.unwrap();
    drop(loan);
    queue.synchronize().unwrap();
    bytes
}

fn every_part(array: &DeviceArray, visit: &mut impl FnMut(&DeviceArray)) {
    visit(array);
    for i in 0..array.num_children() {
        every_part(&array.child(i).unwrap(), visit);
    }
}

/// Bits `bits..` of a bitmap.
fn zero_from(bytes: &[u8], bits: usize) -> bool {
    (bits..bytes.len() * 8).all(|i| bytes[i / 8] >> (i % 8) & 1 == 0)
}

/// 64-byte aligned, padded with zeros, zero bits behind the last row, all within `allocated` bytes;
/// offset 0, and counts known if `counts`.
pub(crate) fn check_layout(
    array: &DeviceArray,
    counts: bool,
    allocated: Option<u64>,
    context: &str,
) {
    use DataType::*;
    let queue = array.device().default_queue();
    let mut ranges = vec![];
    let mut empty = vec![];
    every_part(array, &mut |part| {
        let (t, rows) = (part.data_type(), part.len());
        assert_eq!(part.offset(), 0, "{context}, {t}");
        assert!(!counts || part.null_count().is_some(), "{context}, {t}");
        for i in 0..part.num_buffers() {
            let Some(buffer) = part.buffer(i) else {
                continue;
            };
            if buffer.is_empty() {
                empty.push(buffer.address().address());
                continue;
            }
            let context = format!("{context}, {t}, buffer {i}");
            let address = buffer.address().address();
            assert_eq!(address % 64, 0, "{context}");
            let bytes = raw(&buffer, &queue);
            ranges.push(address..address + bytes.len());
            assert!(zero_from(&bytes, buffer.len() * 8), "{context}: {bytes:?}");
            let mask = i == 0 && !matches!(t, Union(_, _));
            if mask || (i == 1 && *t == Boolean) {
                assert_eq!(buffer.len(), rows.div_ceil(8), "{context}");
                assert!(zero_from(&bytes, rows), "{context}: {bytes:?}");
            }
            if mask && counts {
                let ones: u32 = bytes.iter().map(|b| b.count_ones()).sum();
                assert_eq!(part.null_count(), Some(rows - ones as usize), "{context}");
            }
            let offsets = matches!(
                t,
                Utf8 | LargeUtf8 | Binary | LargeBinary | List(_) | LargeList(_) | Map(_, _)
            );
            if i == 1 && offsets && counts {
                let width = if matches!(t, LargeUtf8 | LargeBinary | LargeList(_)) {
                    8
                } else {
                    4
                };
                assert_eq!(bytes[..width], [0; 8][..width], "{context}");
            }
        }
    });
    let first = ranges.iter().map(|r| r.start).min();
    let last = ranges.iter().map(|r| r.end).max();
    if let (Some(first), Some(last), Some(allocated)) = (first, last, allocated) {
        assert!(last - first <= allocated as usize, "{context}: {ranges:?}");
        let inside = |at: &usize| (first..last).contains(at);
        assert!(empty.iter().all(inside), "{context}: {empty:?}, {ranges:?}");
        // Masks that start within a byte may take one block more on their way.
        let bytes: usize = ranges.iter().map(|r| r.len()).sum();
        assert!(allocated as usize <= bytes + 64 * ranges.len(), "{context}");
    }
}

/// What a download lays out: all buffers in one host buffer, 64-byte aligned and apart from each other, padded with zeros, with zero bits
/// behind the last row of a mask.
pub(crate) fn check_host_layout(data: &ArrayData, context: &str) {
    fn all<'a>(data: &'a ArrayData, ranges: &mut Vec<&'a [u8]>, context: &str) {
        let mask = data.nulls().map(|nulls| nulls.buffer());
        ranges.extend(data.buffers().iter().chain(mask).map(|b| b.as_slice()));
        if let Some(last) = mask
            .and_then(|mask| mask.last())
            .filter(|_| data.len() % 8 != 0)
        {
            assert_eq!(last >> (data.len() % 8), 0, "{context}: bits of no row");
        }
        data.child_data()
            .iter()
            .for_each(|child| all(child, ranges, context));
    }
    let mut ranges = vec![];
    all(data, &mut ranges, context);
    ranges.retain(|bytes| !bytes.is_empty());
    ranges.sort_unstable_by_key(|bytes| bytes.as_ptr().addr());
    for (i, bytes) in ranges.iter().enumerate() {
        assert_eq!(bytes.as_ptr().addr() % 64, 0, "{context}");
        let padded = bytes.len().next_multiple_of(64);
        // SAFETY: a download's host buffer is padded to 64 bytes behind every buffer.
        let padded = unsafe { std::slice::from_raw_parts(bytes.as_ptr(), padded) };
        assert!(
            padded[bytes.len()..].iter().all(|byte| *byte == 0),
            "{context}"
        );
        if let Some(next) = ranges.get(i + 1) {
            let gap = next.as_ptr().addr() as isize - padded.as_ptr_range().end.addr() as isize;
            assert!(
                (0..=128).contains(&gap),
                "{context}: {gap} bytes between buffers"
            );
        }
    }
}

/// Every byte of the fresh memory was written once: copied or filled. Memory of buffers without bytes is not written.
#[track_caller]
pub(crate) fn written_once(stats: &TransferStats, context: &str) {
    let written = stats.bytes_on_device + stats.bytes_to_device + stats.filled_bytes;
    let empty = stats.allocated_bytes == 64 && written == 0;
    assert!(
        empty || written == stats.allocated_bytes,
        "{context}: {stats:?}"
    );
    // One piece of padding.
    assert!(
        stats.fills <= 1 && stats.filled_bytes < 64,
        "{context}: {stats:?}"
    );
}
