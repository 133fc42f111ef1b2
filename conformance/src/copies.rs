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

/// The bytes of each place of [`random`].
const ROOM: usize = if cfg!(miri) { 100 } else { 5000 };

/// Lists of copies and fills between two places of the host and two of the device, against a model.
pub(super) fn random(subject: &Subject) -> Verdict {
    let rounds = if cfg!(miri) { 3 } else { 100 };
    let device = &subject.device;
    let queue = queue(device);
    let mut state = 1_u64;
    let mut below = |end: usize| {
        // The upper bits of Knuth's generator.
        state = state.wrapping_mul(6364136223846793005);
        state = state.wrapping_add(1442695040888963407);
        (state >> 33) as usize % end
    };
    let hosts = [Host::heap(&[2; ROOM]), Host::with(device, &[3; ROOM])];
    let blocks = [Block::new(&queue, ROOM), Block::new(&queue, ROOM)];
    let at = |(place, offset): (usize, usize)| match place {
        0 | 1 => hosts[place].at(offset),
        _ => blocks[place - 2].at(offset),
    };
    let mut model = [2, 3, 2, 3].map(|byte| vec![byte; ROOM]);
    (0..2).for_each(|i| up(&queue, hosts[i].at(0), blocks[i].at(0), ROOM));
    for round in 0..rounds {
        // A runtime may read the host's memory as soon as a copy from it is queued.
        let mut is_written = [true; 2];
        for _ in 0..1 + below(16) {
            let longest = [8, 600, ROOM][below(3)];
            let (to, from) = ((below(4), below(ROOM)), (below(4), below(ROOM)));
            let bytes = (1 + below(longest)).min(ROOM - to.1).min(ROOM - from.1);
            let is_apart = from.0 != to.0 || from.1.abs_diff(to.1) >= bytes;
            if to.0 > 1 && below(4) == 0 {
                let byte = below(256) as u8;
                fill_bytes(&queue, at(to), byte, bytes);
                model[to.0][to.1..to.1 + bytes].fill(byte);
            } else if is_apart && (from.0 > 1 || to.0 > 1) {
                if from.0 < 2 && std::mem::take(&mut is_written[from.0]) {
                    finish(&queue);
                }
                if to.0 < 2 {
                    is_written[to.0] = true;
                }
                let kind = match (from.0 < 2, to.0 < 2) {
                    (true, _) => CopyKind::HostToDevice,
                    (_, true) => CopyKind::DeviceToHost,
                    _ => CopyKind::DeviceToDevice,
                };
                copy(&queue, &[op(kind, at(from), at(to), bytes)]);
                let part = model[from.0][from.1..from.1 + bytes].to_vec();
                model[to.0][to.1..to.1 + bytes].copy_from_slice(&part);
            }
        }
        finish(&queue);
        for i in 0..2 {
            let what = |place| format!("round {round}, place {i} {place}");
            assert_bytes(&model[i], hosts[i].bytes(), what("of the host"));
            let there = content(&queue, &blocks[i]);
            assert_bytes(&model[2 + i], &there, what("of the device"));
        }
    }
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
