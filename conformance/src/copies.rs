//! Rules about copies and fills.

use super::kit::{
    Block, Host, LARGE, across, assert_bytes, content, copy, down, fill as fill_bytes, finish, op,
    pattern, queue, up,
};
use super::{Subject, Verdict};
use arrow_device::device::CopyKind;

/// Copies: (offset, bytes).
const CUTS: [(usize, usize); 10] = [
    (0, 1),
    (1, 1),
    (0, 63),
    (1, 63),
    (63, 2),
    (7, 64),
    (64, 65),
    (13, 127),
    (0, LARGE),
    (1, LARGE - 2),
];

pub(super) fn exact(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let queue = device.default_queue();
    for (i, (offset, bytes)) in CUTS.into_iter().enumerate() {
        let room = offset + bytes + 5;
        let data = pattern(i as u64, room);
        let host = Host::with(device, &data);
        let (one, two) = (Block::new(&queue, room), Block::new(&queue, room + 3));
        one.fill(&queue, 0xAA);
        two.fill(&queue, 0xBB);
        // To the device at another offset than from the host, within the device, and back.
        up(&queue, host.at(offset), one.at(3), bytes);
        across(&queue, one.at(3), two.at(offset), bytes);
        let back = Host::empty(device, room);
        down(&queue, two.at(offset), back.at(1), bytes);
        finish(&queue);

        let what = |place| format!("{bytes} bytes at {offset}, {place}");
        let part = &data[offset..offset + bytes];
        let around = |byte, room, at: usize| {
            let mut all = vec![byte; room];
            all[at..at + bytes].copy_from_slice(part);
            all
        };
        assert_bytes(&around(0xEE, room, 1), back.bytes(), what("on the host"));
        let there = content(&queue, &one);
        assert_bytes(&around(0xAA, room, 3), &there, what("on the device"));
        let there = content(&queue, &two);
        assert_bytes(
            &around(0xBB, room + 3, offset),
            &there,
            what("within the device"),
        );
    }
    Verdict::Kept
}

pub(super) fn list(subject: &Subject) -> Verdict {
    const COPIES: usize = if cfg!(miri) { 40 } else { 1000 };
    const STRIDE: usize = 32;
    let device = &subject.device;
    let queue = queue(device);
    let data = pattern(7, COPIES * STRIDE);
    let host = Host::with(device, &data);
    let block = Block::new(&queue, COPIES * STRIDE);
    block.fill(&queue, 0);
    // Lengths from 1 to `STRIDE`, places in reverse.
    let place = |i: usize| (COPIES - 1 - i) * STRIDE;
    let bytes = |i: usize| 1 + i % STRIDE;
    let ups: Vec<_> = (0..COPIES)
        .map(|i| {
            let (src, dst) = (host.at(i * STRIDE), block.at(place(i)));
            op(CopyKind::HostToDevice, src, dst, bytes(i))
        })
        .collect();
    copy(&queue, &ups);
    // A list may mix kinds.
    let (half, two) = (Host::empty(device, 64), Block::new(&queue, 64));
    two.fill(&queue, 9);
    let mixed = [
        op(CopyKind::DeviceToHost, block.at(place(0)), half.at(0), 1),
        op(CopyKind::HostToDevice, host.at(0), two.at(1), 1),
        op(CopyKind::DeviceToDevice, block.at(place(31)), two.at(2), 32),
    ];
    copy(&queue, &mixed);
    let back = Host::empty(device, COPIES * STRIDE);
    let downs: Vec<_> = (0..COPIES)
        .map(|i| {
            let (src, dst) = (block.at(place(i)), back.at(i * STRIDE));
            op(CopyKind::DeviceToHost, src, dst, bytes(i))
        })
        .collect();
    copy(&queue, &downs);
    finish(&queue);
    for i in 0..COPIES {
        let row = i * STRIDE..i * STRIDE + bytes(i);
        let what = format!("copy {i} of {COPIES}");
        assert_bytes(&data[row.clone()], &back.bytes()[row], what);
    }
    assert_eq!(half.bytes()[0], data[0], "download in a mixed list");
    let two = content(&queue, &two);
    assert_eq!(two[..2], [9, data[0]], "upload in a mixed list");
    let row = &data[31 * STRIDE..32 * STRIDE];
    assert_bytes(row, &two[2..34], "copy within the device in a mixed list");
    Verdict::Kept
}

pub(super) fn order(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let queue = queue(device);
    let (first, second) = (pattern(1, LARGE), pattern(2, LARGE));
    let (one, two) = (Host::with(device, &first), Host::with(device, &second));
    let (early, late) = (Host::empty(device, LARGE), Host::empty(device, LARGE));
    let (a, b) = (Block::new(&queue, LARGE), Block::new(&queue, LARGE));
    let mut hold = subject.hold(&queue);
    a.fill(&queue, 0);
    up(&queue, one.at(0), a.at(0), LARGE);
    across(&queue, a.at(0), b.at(0), LARGE);
    down(&queue, a.at(0), early.at(0), LARGE);
    up(&queue, two.at(0), a.at(0), LARGE);
    fill_bytes(&queue, a.at(0), 0xCC, 1);
    down(&queue, a.at(0), late.at(0), LARGE);
    hold.open();
    finish(&queue);
    assert_bytes(&first, early.bytes(), "read before the second upload");
    assert_bytes(
        &first,
        &content(&queue, &b),
        "copied before the second upload",
    );
    assert_eq!(late.bytes()[0], 0xCC, "filled after the second upload");
    assert_bytes(
        &second[1..],
        &late.bytes()[1..],
        "read after the second upload",
    );
    Verdict::Kept
}

pub(super) fn heap(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let queue = device.default_queue();
    let data = pattern(3, LARGE);
    let (host, back) = (Host::heap(&data), Host::heap(&vec![0; LARGE]));
    let block = Block::new(&queue, LARGE);
    up(&queue, host.at(0), block.at(0), LARGE);
    down(&queue, block.at(0), back.at(0), LARGE);
    finish(&queue);
    assert_bytes(&data, back.bytes(), "ordinary host memory");
    Verdict::Kept
}

pub(super) fn fill(subject: &Subject) -> Verdict {
    let queue = subject.device.default_queue();
    for (offset, bytes) in CUTS {
        let room = offset + bytes + 5;
        let block = Block::new(&queue, room);
        block.fill(&queue, 0x55);
        fill_bytes(&queue, block.at(offset), 0x99, bytes);
        let mut expected = vec![0x55; room];
        expected[offset..offset + bytes].fill(0x99);
        let what = format!("fill of {bytes} bytes at {offset}");
        assert_bytes(&expected, &content(&queue, &block), what);
    }
    Verdict::Kept
}
