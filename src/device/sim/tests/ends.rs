//! How devices end: by failing, and by being dropped.

use std::sync::{Weak, mpsc};
use std::time::{Duration, Instant};

use super::*;

#[test]
fn a_failing_kernel_ends_the_device() {
    for mode in [SimMode::Async, SimMode::Deferred] {
        for panics in [false, true] {
            let Some(device) = device(SimConfig { mode, ..small() }) else {
                return;
            };
            let (queue, other) = (device.default_queue().unwrap(), device.new_queue().unwrap());
            let memory = queue.allocate(1).unwrap();
            let (go, gate) = mpsc::channel::<()>();
            sim(&queue)
                .run(move |_| {
                    gate.recv().map_err(|e| e.to_string())?;
                    assert!(!panics, "it broke");
                    Err("it broke".into())
                })
                .unwrap();
            let event = queue.record().unwrap();
            free(&queue, memory, 1).unwrap();
            // SAFETY: live.
            unsafe { other.wait(event).unwrap() };
            let held = Arc::new(());
            let kernel = held.clone();
            sim(&other)
                .run(move |_| {
                    drop(kernel);
                    Ok(())
                })
                .unwrap();
            let after = other.record().unwrap();
            go.send(()).unwrap();
            let error = wait(&device, event).unwrap_err();
            assert!(error.to_string().contains("it broke"), "{error}");
            for result in [
                wait(&device, after),
                query(&device, event).map(|_| ()),
                fill(&other, memory, 0, 1),
                device.synchronize(),
                device.new_queue().map(|_| ()),
            ] {
                assert_eq!(code(result), KERNEL);
            }
            release(&device, event);
            release(&device, after);
            device.assert_clean();
            let report = device.report();
            assert_eq!(report.pending_operations, 0);
            let freed = device.core.locate(memory, 1);
            assert!(freed.is_err(), "the queued free has run");
            let end = Instant::now() + Duration::from_secs(10);
            while Arc::strong_count(&held) > 1 && Instant::now() < end {
                std::thread::yield_now();
            }
            assert_eq!(Arc::strong_count(&held), 1);
        }
    }
}

#[test]
fn a_kernel_cannot_wait() {
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Some(device) = device(SimConfig { mode, ..small() }) else {
            return;
        };
        let queue = device.default_queue().unwrap();
        let (sender, result) = mpsc::channel();
        let own = device.clone();
        let kernel =
            move |_: &mut SimMemory<'_>| sender.send(own.synchronize()).map_err(|e| e.to_string());
        sim(&queue).run(kernel).unwrap();
        device.synchronize().unwrap();
        assert_eq!(code(result.recv().unwrap()), MISUSE);
    }
}

#[test]
fn drop_finishes_or_drops_pending_work() {
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Some(device) = device(SimConfig { mode, ..small() }) else {
            return;
        };
        let queue = device.default_queue().unwrap();
        let core = Arc::downgrade(&device.core);
        let memory = queue.allocate(8).unwrap();
        let mut host = vec![0; 8];
        let (go, gate) = mpsc::channel::<()>();
        sim(&queue)
            .run(move |_| gate.recv().map_err(|e| e.to_string()))
            .unwrap();
        fill(&queue, memory, 5, 8).unwrap();
        download(&queue, memory, &mut host).unwrap();
        drop(device); // the queue keeps it going
        fill(&queue, memory, 6, 8).unwrap();
        let (end, ended) = mpsc::channel::<()>();
        sim(&queue)
            .run(move |_| end.send(()).map_err(|e| e.to_string()))
            .unwrap();
        go.send(()).unwrap();
        drop(queue);
        assert_gone(&core);
        // A count of handles orders nothing; this comes after the copy, or after all was dropped.
        assert_eq!(ended.recv().is_ok(), mode == SimMode::Async);
        let expected = if mode == SimMode::Async { 5 } else { 0 };
        assert_eq!(host, [expected; 8]);
    }
}

#[test]
fn the_worker_may_drop_the_last_handle() {
    let Some(device) = device(small()) else {
        return;
    };
    let queue = device.default_queue().unwrap();
    let core = Arc::downgrade(&device.core);
    let (go, gate) = mpsc::channel::<()>();
    sim(&queue)
        .run(move |_| {
            gate.recv().map_err(|e| e.to_string())?;
            drop(device);
            Ok(())
        })
        .unwrap();
    drop(queue);
    assert!(core.upgrade().is_some());
    go.send(()).unwrap();
    assert_gone(&core);
}

/// Nothing keeps a device: it has run what was queued.
fn assert_gone(core: &Weak<Core>) {
    let end = Instant::now() + Duration::from_secs(10);
    while core.strong_count() > 0 && Instant::now() < end {
        std::thread::yield_now();
    }
    assert_eq!(core.strong_count(), 0);
}

/// What a kernel or a waker panics with may itself panic when it is dropped; the worker outlives
/// both.
#[test]
fn panics_that_panic_again_do_not_end_the_worker() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("the payload's destructor ran");
        }
    }
    // A worker that has ended would be waited for for ever.
    let waited = |wait: Box<dyn FnOnce() -> Result<()> + Send>| {
        let (sender, done) = mpsc::channel();
        std::thread::spawn(move || sender.send(wait()));
        done.recv_timeout(Duration::from_secs(10))
            .expect("the worker has ended")
    };
    let Some(device) = device(small()) else {
        return;
    };
    let queue = device.default_queue().unwrap();
    sim(&queue).run(|_| std::panic::panic_any(Bomb)).unwrap();
    let same = device.clone();
    let failed = waited(Box::new(move || same.synchronize()));
    assert_eq!(code(failed), KERNEL);
    device.assert_clean();
}
