//! Rules about host memory and the classification of addresses.

use arrow_device::arrow_buffer::Buffer;
use bytes::Bytes;

use super::kit::{Block, Host, LARGE, MOMENT, assert_bytes, down, finish, pattern, queue, up};
use super::{Subject, Verdict};
use arrow_device::DeviceBufferMut;
use arrow_device::device::{AddressClass, DevicePtr, PointerInfo};

pub(super) fn allocate(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let backend = device.backend();
    let queue = queue(device);
    let mut live = Vec::new();
    for bytes in [1, 63, 64, 65, LARGE] {
        let Some(ptr) = backend.allocate_host(bytes).expect("allocate_host") else {
            return Verdict::Skipped("the backend uses ordinary host memory");
        };
        assert!(!ptr.is_null());
        assert_eq!(ptr.address() % 64, 0, "{bytes} bytes at {ptr:?}");
        // SAFETY: the contract of `allocate_host` guarantees memory that is writable for its
        // length.
        unsafe { ptr.as_ptr().cast::<u8>().write_bytes(0x5C, bytes) };
        let block = Block::new(&queue, bytes);
        up(&queue, ptr, block.at(0), bytes);
        block.fill(&queue, 0x5D);
        down(&queue, block.at(0), ptr, bytes);
        finish(&queue);
        // SAFETY: the memory was written above, and `finish` has waited for the copies that use it.
        let there = unsafe { std::slice::from_raw_parts(ptr.as_ptr().cast::<u8>(), bytes) };
        assert_bytes(
            &vec![0x5D; bytes],
            there,
            "copied to memory of allocate_host",
        );
        let class = backend.classify(ptr, bytes).class;
        assert_ne!(class, AddressClass::Inaccessible, "its own host memory");
        live.push((ptr, bytes));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for (ptr, bytes) in live {
                // SAFETY: the memory was allocated above with this size, no copy uses it, and this
                // frees it once.
                unsafe { backend.free_host(ptr, bytes) };
            }
        });
    });
    // A size that cannot be allocated is refused.
    let answer = backend.allocate_host(usize::MAX & !63);
    assert!(matches!(answer, Err(_) | Ok(None)), "{answer:?}");
    Verdict::Kept
}

pub(super) fn buffer(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let queue = queue(device);
    device.trim();
    let before = device.stats();
    for bytes in [0, 1, 65, LARGE] {
        let data = pattern(bytes as u64, bytes);
        let mut host = device.host_buffer(bytes).expect("host_buffer");
        assert_eq!(host.as_device_ptr().address() % 64, 0);
        host.copy_from_slice(&data);
        let address = host.as_ptr();
        let buffer = Buffer::from(host);
        assert_bytes(&data, &buffer, "frozen into a buffer");
        assert!(bytes == 0 || buffer.as_ptr() == address, "copied");
        let cut = buffer.slice(bytes / 2);
        drop(buffer);
        std::thread::scope(|scope| {
            scope.spawn(move || drop(cut));
        });
        let mut host = device.host_buffer(bytes).expect("host_buffer");
        host.copy_from_slice(&data);
        let shared = Bytes::from_owner(host);
        assert_bytes(&data, &shared, "frozen into bytes");
    }
    let made = device.stats().since(&before).host_allocations;
    assert!(made <= 4, "{made} were made where 4 could be reused");

    // A freed host buffer is reused only once no copy reads it.
    let host = Host::with(device, &pattern(1, LARGE));
    let block = Block::new(&queue, LARGE);
    up(&queue, host.at(0), block.at(0), LARGE);
    finish(&queue);
    drop(host);
    let other = Host::with(device, &vec![0; LARGE]);
    let back = Host::empty(device, LARGE);
    down(&queue, block.at(0), back.at(0), LARGE);
    finish(&queue);
    assert_bytes(&pattern(1, LARGE), back.bytes(), "uploaded from it");
    assert_bytes(&vec![0; LARGE], other.bytes(), "another host buffer");
    Verdict::Kept
}

pub(super) fn direct(subject: &Subject) -> Verdict {
    let backend = subject.device.backend();
    for bytes in [0, 1, 64, LARGE, usize::MAX] {
        let direct = backend.copies_directly_from(DevicePtr::NULL, bytes);
        assert!(!direct, "{bytes} bytes at null");
    }
    Verdict::Kept
}

pub(super) fn classify(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let backend = device.backend();
    let queue = queue(device);
    let block = Block::new(&queue, LARGE);
    let inside = [(0, LARGE), (0, 1), (1, LARGE - 1), (LARGE - 1, 1), (64, 64)];
    for (offset, bytes) in inside {
        let class = backend.classify(block.at(offset), bytes).class;
        let known = matches!(class, AddressClass::Device | AddressClass::HostAccessible);
        assert!(
            known || (!subject.knows_its_memory && class == AddressClass::Unknown),
            "{bytes} bytes at {offset} of its own memory: {class:?}"
        );
    }
    let vouched = |address, bytes| {
        let class = backend.classify(address, bytes).class;
        matches!(class, AddressClass::Device | AddressClass::HostAccessible)
    };
    let endless = isize::MAX as usize;
    for bytes in [endless, usize::MAX] {
        assert!(!vouched(block.at(1), bytes), "more than there is: {bytes}");
    }
    if subject.knows_its_memory {
        assert!(!vouched(block.at(0), LARGE + (1 << 12)), "beyond the end");
        assert!(!vouched(block.at(1), LARGE), "beyond the end");
    }
    let garbage = [0usize, 1, 4096, usize::MAX - 63, usize::MAX];
    for address in garbage {
        let ptr = DevicePtr::new(std::ptr::without_provenance_mut(address));
        assert!(!vouched(ptr, 64), "address {address:#x}");
    }
    let (stack, heap) = ([0u8; 64], vec![0u8; 64]);
    for ptr in [stack.as_ptr(), heap.as_ptr()] {
        let class = backend
            .classify(DevicePtr::new(ptr.cast_mut().cast()), 64)
            .class;
        assert_ne!(class, AddressClass::Device, "memory of the host");
        assert_ne!(class, AddressClass::Inaccessible, "memory of the host");
    }
    let address = block.at(0);
    drop(block);
    finish(&queue);
    if subject.knows_its_memory {
        assert!(!vouched(address, LARGE), "freed memory");
    }
    Verdict::Kept
}

pub(super) fn allocation(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let backend = device.backend();
    let queue = queue(device);
    let block = Block::new(&queue, LARGE);
    let host = Host::empty(device, 4096);
    let heap = vec![0u8; 4096];
    let heap_at =
        |offset: usize| DevicePtr::new(heap.as_ptr().wrapping_add(offset).cast_mut().cast());
    let there = [
        (block.at(0), LARGE),
        (block.at(64), 64),
        (block.at(LARGE - 1), 1),
        (host.at(0), 4096),
        (host.at(64), 1),
        (heap_at(0), 4096),
        (heap_at(64), 64),
    ];
    // What is not there, or not all of it: that is for `classify` to say.
    let not_there = [
        (block.at(0), LARGE + (1 << 12)),
        (block.at(1), usize::MAX),
        (DevicePtr::NULL, 64),
    ];
    let asked = there.map(|asked| (asked, true)).into_iter();
    let asked = asked.chain(not_there.map(|asked| (asked, false)));
    for ((address, bytes), is_there) in asked {
        let PointerInfo { class, range, .. } = backend.classify(address, bytes);
        let (first, end) = (address.address(), address.range(bytes).end);
        assert!(
            range.start <= first && end <= range.end,
            "{bytes} bytes at {address:?} are not in {range:x?}"
        );
        if !is_there {
            continue;
        }
        // All of it, and what lies inside it.
        let length = range.end - range.start;
        let parts = [
            (range.start, length),
            (range.start, 1),
            (range.end - 1, 1),
            (range.start + length / 2, length - length / 2),
            (first, range.end - first),
        ];
        for (start, length) in parts {
            let part = DevicePtr::new(std::ptr::without_provenance_mut(start));
            assert_eq!(
                class,
                backend.classify(part, length).class,
                "{length} bytes at {part:?} of {range:x?}, which was returned for {address:?}"
            );
        }
    }
    Verdict::Kept
}

pub(super) fn view(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let queue = queue(device);
    let mut memory = DeviceBufferMut::allocate(&queue, LARGE).expect("allocate");
    let hold = subject.hold(&queue);
    memory.fill(0x3C).expect("fill");
    let buffer = memory.freeze().expect("freeze");
    assert_eq!(buffer.len(), LARGE);
    if !device.is_host_readable() {
        drop(hold);
        let copy = buffer.to_host().expect("to_host");
        assert_bytes(&vec![0x3C; LARGE], &copy, "a copy");
        return Verdict::Kept;
    }
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(MOMENT);
            drop(hold);
        });
        let address = buffer.address();
        let part = buffer.slice(64, LARGE - 64).expect("slice");
        let host = part.to_host().expect("to_host");
        assert_eq!(host.as_ptr().addr(), address.offset(64).address(), "copied");
        assert_bytes(&vec![0x3C; LARGE - 64], &host, "a host view");
        drop(buffer);
        assert_eq!(host[LARGE - 65], 0x3C, "a view outlives its buffer");
    });
    Verdict::Kept
}
