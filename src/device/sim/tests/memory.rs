use super::super::memory::FRESH;
use super::*;

/// How a child process ends that reads one byte.
#[cfg(target_os = "linux")]
fn read_in_child(address: *const u8) -> i32 {
    let mut status = 0;
    // SAFETY: the child only makes plain system calls and the read that is tested.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let no_core = libc::rlimit {
                rlim_cur: 0,
                rlim_max: 0,
            };
            libc::setrlimit(libc::RLIMIT_CORE, &no_core);
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            let _ = address.read_volatile();
            libc::_exit(0);
        }
        assert!(child > 0);
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
    }
    status
}

#[test]
#[cfg(target_os = "linux")]
fn host_reads_are_fatal() {
    let Some(device) = deferred() else { return };
    let queue = device.default_queue().unwrap();
    let memory = queue.allocate(64).unwrap();
    let status = read_in_child(memory.as_ptr().cast());
    assert!(libc::WIFSIGNALED(status), "{status}");
    assert_eq!(libc::WTERMSIG(status), libc::SIGSEGV);
    // The same byte is there for the engine.
    let (_memory, byte) = device.core.locate(memory, 1).unwrap();
    assert_eq!(read_in_child(byte), 0);
    free(&queue, memory, 64).unwrap();
}

#[test]
#[cfg(target_os = "linux")]
fn system_calls_refuse_device_memory() {
    let Some(device) = deferred() else { return };
    let queue = device.default_queue().unwrap();
    let memory = queue.allocate(64).unwrap();
    let mut pipe = [0; 2];
    // SAFETY: plain system calls; the kernel checks the address itself.
    unsafe {
        assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
        assert_eq!(libc::write(pipe[1], memory.as_ptr(), 64), -1);
        let error = std::io::Error::last_os_error();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        for end in pipe {
            libc::close(end);
        }
    }
}

#[test]
fn copies_round_trip_in_both_modes() {
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Some(device) = device(SimConfig { mode, ..small() }) else {
            return;
        };
        let queue = device.default_queue().unwrap();
        for bytes in [1, 63, 64, 65, 100_000] {
            let (a, b) = (
                queue.allocate(bytes).unwrap(),
                queue.allocate(bytes).unwrap(),
            );
            assert_eq!(a.address() % 64, 0);
            let host: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
            upload(&queue, &host, a).unwrap();
            let within = CopyOp {
                src: a,
                dst: b,
                bytes,
                kind: CopyKind::DeviceToDevice,
            };
            // SAFETY: live until waited for.
            unsafe { queue.copy(&[within]).unwrap() };
            assert_eq!(contents(&device, &queue, b, bytes), host);
            free(&queue, a, bytes).unwrap();
            free(&queue, b, bytes).unwrap();
        }
        device.assert_clean();
    }
}

#[test]
fn memory_is_filled_and_quarantined() {
    let config = SimConfig {
        mode: SimMode::Deferred,
        capacity_bytes: 1 << 16,
        ..small()
    };
    let Some(device) = device(config) else { return };
    let queue = device.default_queue().unwrap();
    let mut seen = std::collections::BTreeSet::new();
    loop {
        let next = queue.allocate(100).unwrap();
        assert_eq!(contents(&device, &queue, next, 100), [FRESH; 100]);
        fill(&queue, next, 1, 100).unwrap();
        free(&queue, next, 100).unwrap();
        device.synchronize().unwrap();
        if !seen.insert(next.address()) {
            break;
        }
    }
    // One takes up 192 bytes with those between two.
    assert_eq!(seen.len(), (1 << 16) / 192);
    device.assert_clean();
}

#[test]
fn capacity_ends_and_comes_back() {
    let config = SimConfig {
        mode: SimMode::Deferred,
        capacity_bytes: 1 << 16,
        ..small()
    };
    let Some(device) = device(config) else { return };
    let queue = device.default_queue().unwrap();
    for _ in 0..3 {
        let most = (1 << 16) - 128;
        let memory = queue.allocate(most).unwrap();
        for bytes in [1, usize::MAX] {
            let error = queue.allocate(bytes).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { bytes: b, .. } if b == bytes));
        }
        free(&queue, memory, most).unwrap();
        device.synchronize().unwrap();
        // Freed in pieces and out of order, it is whole again.
        let pieces: Vec<_> = (0..5).map(|_| queue.allocate(5000).unwrap()).collect();
        for i in [1, 3, 2, 0, 4] {
            free(&queue, pieces[i], 5000).unwrap();
        }
        device.synchronize().unwrap();
    }
    device.assert_clean();
}

#[test]
fn bad_accesses_end_the_device() {
    type Misuse = fn(&Arc<dyn RawQueue>, DevicePtr) -> Result<()>;
    static HOST: [u8; 8] = [0; 8];
    let misuses: [(&str, Misuse); 8] = [
        ("freed", |q, memory| {
            free(q, memory, 100)?;
            fill(q, memory, 0, 1)
        }),
        (
            "4 bytes past the end of an allocation of 100",
            |q, memory| fill(q, memory.offset(96), 0, 8),
        ),
        ("not allocated", |q, memory| {
            fill(q, memory.offset(4096), 0, 1)
        }),
        ("not allocated", |q, memory| {
            fill(
                q,
                DevicePtr::new(memory.as_ptr().wrapping_byte_sub(1)),
                0,
                1,
            )
        }),
        ("not an address of this device", |q, memory| {
            let host = DevicePtr::new(HOST.as_ptr().cast_mut().cast());
            download(q, host, &mut [0])?;
            fill(q, memory, 0, 1)
        }),
        ("not an address of this device", |q, _| {
            fill(q, DevicePtr::new(HOST.as_ptr().cast_mut().cast()), 0, 1)
        }),
        ("not host memory", |q, memory| {
            let copy = CopyOp {
                src: memory,
                dst: memory.offset(50),
                bytes: 10,
                kind: CopyKind::HostToDevice,
            };
            // SAFETY: refused when it runs.
            unsafe { q.copy(&[copy]) }
        }),
        ("not allocated", |q, memory| {
            sim(q).run(move |m| {
                let _ = m.slice::<u8>(memory.offset(1 << 12), 1);
                Ok(())
            })
        }),
    ];
    for (why, misuse) in misuses {
        let Some(device) = deferred() else { return };
        let queue = device.default_queue().unwrap();
        let memory = queue.allocate(100).unwrap();
        misuse(&queue, memory).unwrap();
        let error = finish(&device, &queue).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("invalid access at"), "{text}");
        assert!(text.contains(why), "{why}: {text}");
        assert_eq!(code(device.synchronize()), INVALID_ACCESS);
        assert_eq!(code(queue.allocate(1)), INVALID_ACCESS);
        assert_eq!(code(queue.record()), INVALID_ACCESS);
        let report = device.report();
        assert_eq!(report.violations.len(), 1, "{report:?}");
        assert!(report.error.is_some() && !report.is_clean());
        if report.live_allocations == 1 {
            free(&queue, memory, 100).unwrap(); // works on a failed device too
        }
        assert_eq!(device.report().live_allocations, 0);
    }
}

#[test]
fn wrong_frees_are_counted() {
    let Some(device) = deferred() else { return };
    let queue = device.default_queue().unwrap();
    let memory = queue.allocate(100).unwrap();
    assert_eq!(code(free(&queue, memory, 99)), MISUSE);
    assert_eq!(code(free(&queue, memory.offset(64), 100)), MISUSE);
    assert_eq!(code(free(&queue, DevicePtr::NULL, 100)), MISUSE);
    assert_eq!(device.report().live_bytes, 100);
    free(&queue, memory, 100).unwrap();
    assert_eq!(code(free(&queue, memory, 100)), MISUSE);
    device.synchronize().unwrap();
    assert_eq!(code(free(&queue, memory, 100)), MISUSE);
    let report = device.report();
    assert_eq!(report.violations.len(), 5, "{report:?}");
    assert_eq!(report.live_allocations, 0);
}

#[test]
fn frees_without_a_queue_run_nothing() {
    let Some(device) = deferred() else { return };
    let queue = device.default_queue().unwrap();
    let (used, unused) = (queue.allocate(8).unwrap(), queue.allocate(8).unwrap());
    fill(&queue, used, 1, 8).unwrap();
    // SAFETY: what breaks the rules is refused, now or when it runs, which is what is tested.
    let free_now = |base, bytes| unsafe { device.free_now(base, bytes) };
    free_now(unused, 8).unwrap();
    assert_eq!(code(free_now(unused, 8)), MISUSE);
    assert_eq!(code(free_now(used, 4)), MISUSE);
    assert_eq!(device.report().live_allocations, 1);
    free_now(used, 8).unwrap();
    assert_eq!(device.report().pending_operations, 1);
    assert_eq!(code(device.synchronize()), INVALID_ACCESS);
    assert_eq!(device.report().pending_operations, 0);
    let report = device.report();
    assert_eq!((report.live_allocations, report.violations.len()), (0, 3));
}

#[test]
fn host_memory_is_tracked() {
    let Some(device) = deferred() else { return };
    let queue = device.default_queue().unwrap();
    let host = device.allocate_host(100).unwrap().unwrap();
    assert_eq!(host.address() % 64, 0);
    // SAFETY: just allocated, 100 bytes.
    let bytes = unsafe { std::slice::from_raw_parts(host.as_ptr().cast::<u8>(), 100) };
    assert_eq!(bytes, [FRESH; 100]);
    assert_eq!(device.report().live_host_bytes, 100);
    assert!(device.allocate_host(0).is_err());

    let memory = queue.allocate(100).unwrap();
    upload(&queue, bytes, memory).unwrap();
    // SAFETY: what breaks the rules is noted and refused.
    unsafe {
        device.free_host(host, 100); // under a queued copy
        device.free_host(host, 99);
        assert_eq!(device.report().live_host_allocations, 1);
        device.synchronize().unwrap();
        device.free_host(host, 100);
        assert_eq!(device.report().live_host_allocations, 0);
        device.free_host(host, 100);
    }
    assert_eq!(device.report().violations.len(), 3);
}

#[test]
fn addresses_are_classified() {
    let (Some(device), Some(other)) = (deferred(), deferred()) else {
        return;
    };
    let queue = device.default_queue().unwrap();
    let memory = queue.allocate(100).unwrap();
    use AddressClass::{Device, Host, Inaccessible};
    let classify = |address, bytes| device.classify(address, bytes).class;
    assert_eq!(classify(memory, 100), Device);
    assert_eq!(classify(memory.offset(60), 40), Device);
    assert_eq!(classify(memory.offset(100), 0), Device);
    assert_eq!(classify(memory, 101), Inaccessible);
    assert_eq!(classify(memory, usize::MAX), Inaccessible);
    assert_eq!(classify(memory.offset(1 << 20), 1), Inaccessible);
    assert_eq!(classify(DevicePtr::NULL, 0), Inaccessible);
    assert_eq!(other.classify(memory, 100).class, Inaccessible);
    let local = [0u8; 4];
    let host = DevicePtr::new(local.as_ptr().cast_mut().cast());
    assert_eq!(classify(host, 4), Host);
    assert!(device.copies_directly_from(host, 4));
    assert!(!device.copies_directly_from(memory, 4));
    assert!(!other.copies_directly_from(memory, 4));
    assert!(!device.capabilities().host_readable);
    free(&queue, memory, 100).unwrap();
    assert_eq!(classify(memory, 100), Inaccessible, "freed by its owner");
}

#[test]
fn peers_copy_only_with_access() {
    let Some(source) = deferred() else { return };
    for access in [false, true] {
        let Some(device) = device(SimConfig {
            peer_access: access,
            ..small()
        }) else {
            return;
        };
        assert_eq!(device.relation(&*source).copies, access);
        assert!(device.relation(&*device).copies);
        let (from, to) = (
            source.default_queue().unwrap(),
            device.default_queue().unwrap(),
        );
        let (src, dst) = (from.allocate(64).unwrap(), to.allocate(64).unwrap());
        fill(&from, src, 9, 64).unwrap();
        source.synchronize().unwrap();
        let copy = |src, bytes| CopyOp {
            src,
            dst,
            bytes,
            kind: CopyKind::DeviceToDevice,
        };
        // SAFETY: live until waited for.
        unsafe { to.copy(&[copy(src, 64)]).unwrap() };
        if !access {
            assert_eq!(code(finish(&device, &to)), INVALID_ACCESS);
            continue;
        }
        assert_eq!(contents(&device, &to, dst, 64), [9; 64]);
        // The peer's memory is checked as the device's own.
        // SAFETY: refused when it runs.
        unsafe { to.copy(&[copy(src.offset(1), 64)]).unwrap() };
        let error = finish(&device, &to).unwrap_err();
        assert!(error.to_string().contains("past the end"), "{error}");
        assert!(source.synchronize().is_ok());
    }
}

#[test]
fn memory_that_is_not_filled_is_guarded_still() {
    let Some(device) = device(SimConfig {
        memory: Some(|bytes| (bytes <= 128).then(|| of_a_program(0))),
        ..small()
    }) else {
        return;
    };
    let queue = device.default_queue().unwrap();
    let memory = queue.allocate(100).unwrap();
    fill(&queue, memory, 1, 100).unwrap();
    assert_eq!(contents(&device, &queue, memory, 100), [1; 100]);
    free(&queue, memory, 100).unwrap();
    device.synchronize().unwrap();
    device.assert_clean();
    let mut host = [0];
    download(&queue, memory, &mut host).unwrap();
    let error = device.synchronize().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Device {
                code: INVALID_ACCESS,
                ..
            }
        ),
        "{error}"
    );
}

#[repr(align(64))]
struct Lines([u8; 128]);

/// 128 bytes of a program's memory from `at` on.
fn of_a_program(at: usize) -> SimBacking {
    let mut lines = Box::new(Lines([0; 128]));
    let start = std::ptr::NonNull::new(lines.0[at..].as_mut_ptr()).unwrap();
    let owner = Arc::new(std::sync::Mutex::new(lines));
    // SAFETY: the owner keeps the bytes, and locks them only once nothing is queued.
    unsafe { SimBacking::new(start, 128 - at, owner) }
}

/// A program's memory: a device allocates it, adopts it, and says whose it is.
#[test]
fn memory_of_a_program() {
    let config = SimConfig {
        mode: SimMode::Deferred,
        memory: Some(|bytes| (bytes <= 128).then(|| of_a_program(0))),
        ..SimConfig::default()
    };
    let Ok(device) = SimDevice::new(config) else {
        return;
    };
    assert!(device.adopt(of_a_program(8)).is_err());
    let queue = device.default_queue().unwrap();
    assert!(matches!(
        queue.allocate(192),
        Err(Error::OutOfMemory { .. })
    ));
    let own = queue.allocate(64).unwrap();
    let adopted = device.adopt(of_a_program(0)).unwrap();
    // SAFETY: the memory is live until it is freed below, in order.
    unsafe { queue.fill(own, 7, 64) }.unwrap();
    device.synchronize().unwrap();
    let (owner, at) = device.backing(own.offset(8), 56).unwrap();
    assert!(device.backing(own.offset(8), 64).is_none());
    let bytes = owner.downcast::<std::sync::Mutex<Box<Lines>>>().unwrap();
    // Fresh memory is poisoned, except what is adopted.
    assert_eq!(
        (at, bytes.lock().unwrap().0[..64].to_vec()),
        (8, vec![7; 64])
    );
    let (owner, _) = device.backing(adopted, 128).unwrap();
    let bytes = owner.downcast::<std::sync::Mutex<Box<Lines>>>().unwrap();
    assert_eq!(bytes.lock().unwrap().0[0], 0);
    // SAFETY: both are freed once, and nothing uses them.
    unsafe { device.free_now(adopted, 128) }.unwrap();
    assert_eq!(Arc::strong_count(&bytes), 1);
    free(&queue, own, 64).unwrap();
    device.synchronize().unwrap();
    device.assert_clean();
}
