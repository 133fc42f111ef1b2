//! Rules about device memory.

use super::kit::{
    Block, Host, LARGE, assert_bytes, content, down, fill, finish, queue, record, soon,
};
use super::{Subject, Verdict, poison};
use arrow_device::{DeviceBufferMut, Error};

pub(super) fn aligned(subject: &Subject) -> Verdict {
    let queue = subject.device.default_queue();
    let sizes = [1, 63, 64, 65, 4096, LARGE, 1, 127];
    let blocks = sizes.map(|bytes| Block::new(&queue, bytes));
    let mut ranges: Vec<_> = blocks
        .iter()
        .map(|block| (block.at(0).address(), block.bytes))
        .collect();
    for (address, bytes) in &ranges {
        assert_eq!(address % 64, 0, "{bytes} bytes at {address:#x}");
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "overlap: {pair:x?}");
    }
    // All bytes can be used.
    for (block, byte) in blocks.iter().zip(1u8..) {
        block.fill(&queue, byte);
    }
    for (block, byte) in blocks.iter().zip(1u8..) {
        let expected = vec![byte; block.bytes];
        assert_bytes(&expected, &content(&queue, block), "filled memory");
    }
    Verdict::Kept
}

pub(super) fn huge(subject: &Subject) -> Verdict {
    let queue = subject.device.default_queue();
    // Miri stops at sizes that only the system refuses.
    let bytes = if cfg!(miri) {
        usize::MAX & !63
    } else {
        isize::MAX as usize & !4095
    };
    for _ in 0..2 {
        let answer = queue.raw().allocate(bytes);
        assert!(
            matches!(
                answer,
                Err(Error::OutOfMemory { .. } | Error::Device { .. })
            ),
            "{answer:?}"
        );
    }
    assert!(queue.raw().allocate(0).is_err(), "memory of no bytes");
    for bytes in [bytes, usize::MAX] {
        let before = subject.device.stats();
        let answer = DeviceBufferMut::allocate(&queue, bytes);
        assert!(
            matches!(
                answer,
                Err(Error::OutOfMemory { .. } | Error::Device { .. })
            ),
            "{answer:?}"
        );
        assert_eq!(subject.device.stats().since(&before).allocations, 0);
    }
    let block = Block::new(&queue, 64);
    block.fill(&queue, 3);
    assert_bytes(
        &[3; 64],
        &content(&queue, &block),
        "memory allocated afterwards",
    );
    Verdict::Kept
}

pub(super) fn many(subject: &Subject) -> Verdict {
    let queue = subject.device.default_queue();
    let count = if cfg!(miri) { 50 } else { 1000 };
    let blocks: Vec<_> = (0..count)
        .map(|i| Block::new(&queue, 8 + i % 100))
        .collect();
    for (i, block) in blocks.iter().enumerate() {
        fill(&queue, block.at(0), i as u8, block.bytes);
    }
    let host = Host::empty(&subject.device, 200 * count);
    for (i, block) in blocks.iter().enumerate() {
        down(&queue, block.at(0), host.at(200 * i), block.bytes);
    }
    finish(&queue);
    for (i, block) in blocks.iter().enumerate() {
        let there = &host.bytes()[200 * i..][..block.bytes];
        assert_bytes(
            &vec![i as u8; block.bytes],
            there,
            format!("allocation {i}"),
        );
    }
    Verdict::Kept
}

pub(super) fn free_in_order(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let (queue, other) = (queue(device), queue(device));
    let host = Host::empty(device, LARGE);
    let block = Block::new(&queue, LARGE);
    block.fill(&queue, 0x11);
    let mut hold = subject.hold(&queue);
    down(&queue, block.at(0), host.at(0), LARGE);
    drop(block);
    // This could reuse the memory if it were already free.
    let next = Block::new(&other, LARGE);
    next.fill(&other, 0x77);
    hold.open();
    finish(&queue);
    assert_bytes(
        &vec![0x11; LARGE],
        host.bytes(),
        "memory freed after a copy",
    );
    finish(&other);
    assert_bytes(
        &vec![0x77; LARGE],
        &content(&other, &next),
        "the next allocation",
    );
    Verdict::Kept
}

pub(super) fn free_elsewhere(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let (one, two) = (queue(device), queue(device));
    let host = Host::empty(device, LARGE);
    let block = Block::new(&one, LARGE);
    block.fill(&one, 0x22);
    down(&one, block.at(0), host.at(0), LARGE);
    if !device.is_synchronous() {
        two.wait(&record(&one)).expect("wait");
    }
    std::thread::scope(|scope| {
        scope.spawn(|| block.free_on(&two));
    });
    finish(&two);
    assert_bytes(&vec![0x22; LARGE], host.bytes(), "memory freed elsewhere");
    Verdict::Kept
}

pub(super) fn shrink_to_fit(subject: &Subject) -> Verdict {
    let queue = queue(&subject.device);
    let mut memory = DeviceBufferMut::allocate(&queue, LARGE).expect("allocate");
    memory.fill(0x44).expect("fill");
    memory.truncate(100);
    let before = subject.device.stats();
    memory.shrink_to_fit().expect("shrink_to_fit");
    let cost = subject.device.stats().since(&before);
    assert_eq!((memory.len(), memory.capacity()), (100, 128));
    let counts = (cost.copies, cost.allocations, cost.frees);
    assert_eq!(counts, (1, 1, 1), "{cost:?}");
    assert_eq!(cost.host_waits, 0, "{cost:?}");
    let host = memory.freeze().and_then(|buffer| buffer.to_host());
    assert_bytes(&[0x44; 100], &host.expect("to_host"), "shrunk memory");
    Verdict::Kept
}

pub(super) fn initialised(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if !device.is_host_readable() {
        return Verdict::Skipped("the host cannot read the device's memory");
    }
    let queue = queue(device);
    for _ in 0..3 {
        for bytes in [64, 4096, LARGE] {
            let memory = DeviceBufferMut::allocate(&queue, bytes).expect("allocate");
            let buffer = memory.freeze().and_then(|buffer| buffer.to_host());
            // This reads all of it: here Miri and memory checkers stop.
            let poisoned = poison::shows(&buffer.expect("to_host"));
            assert!(!poisoned, "{bytes} bytes that nobody has written");
            // The next round may be given what was written here.
            let mut memory = DeviceBufferMut::allocate(&queue, bytes).expect("allocate");
            memory.fill(0x5B).expect("fill");
            drop(memory);
            finish(&queue);
        }
    }
    if poison::is_installed() || cfg!(miri) {
        return Verdict::Kept;
    }
    Verdict::Skipped("the test does not allocate with `Poisoning`, which shows unwritten memory")
}

/// Returns whether nothing is left of what was freed and released, or soon will be.
pub(super) fn is_balanced(subject: &Subject) -> bool {
    subject.device.synchronize().expect("synchronize");
    soon(subject.patience, || {
        // The release thread may be returning host memory to the pool.
        subject.device.trim();
        subject
            .balance
            .as_ref()
            .is_none_or(|balance| balance().is_ok())
    })
}

pub(super) fn balance(subject: &Subject) -> Verdict {
    let Some(balance) = &subject.balance else {
        return Verdict::Skipped("the subject has no balance check");
    };
    let balanced = is_balanced(subject);
    assert!(balanced, "{}", balance().err().unwrap_or_default());
    let error = subject.device.take_drop_error();
    assert!(error.is_none(), "an error while dropping: {error:?}");
    Verdict::Kept
}
