use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::*;

#[test]
fn deferred_work_waits_for_a_wait() {
    let Some(device) = deferred() else { return };
    let queue = device.default_queue().unwrap();
    let memory = queue.allocate(4).unwrap();
    let mut source = vec![1, 2, 3, 4];
    let mut target = vec![0; 4];
    upload(&queue, &source, memory).unwrap();
    download(&queue, memory, &mut target).unwrap();
    let event = queue.record().unwrap();
    fill(&queue, memory, 9, 4).unwrap();
    let later = queue.record().unwrap();
    std::thread::sleep(Duration::from_millis(10));
    assert!(!query(&device, event).unwrap());
    assert_eq!(target, [0; 4]);
    source[0] = 7; // read when it runs
    wait(&device, event).unwrap();
    assert_eq!(target, [7, 2, 3, 4]);
    assert!(query(&device, event).unwrap());
    assert!(!query(&device, later).unwrap(), "ran more than needed");
    device.synchronize().unwrap();
    assert!(query(&device, later).unwrap());
    release(&device, event);
    release(&device, later);
    assert_eq!(contents(&device, &queue, memory, 4), [9; 4]);
    free(&queue, memory, 4).unwrap();
    device.assert_clean();
}

#[test]
fn waiting_runs_what_other_queues_owe() {
    let Some(device) = deferred() else { return };
    let queues: Vec<_> = (0..3).map(|_| device.new_queue().unwrap()).collect();
    let memory = queues[0].allocate(1).unwrap();
    let (sender, order) = mpsc::channel();
    let mut last = None;
    // A chain across the queues, longer than any stack of calls.
    for i in 0..30_000usize {
        let queue = &queues[i % 3];
        if let Some(event) = last.take() {
            // SAFETY: live; released after, which leaves the wait in place.
            unsafe { queue.wait(event).unwrap() };
            release(&device, event);
        }
        let sender = sender.clone();
        sim(queue)
            .run(move |_| sender.send(i).map_err(|e| e.to_string()))
            .unwrap();
        last = queue.record().ok();
    }
    let event = last.unwrap();
    fill(&queues[2], memory, 1, 1).unwrap();
    assert!(order.try_recv().is_err());
    wait(&device, event).unwrap();
    assert!(order.try_iter().eq(0..30_000));
    assert_eq!(device.report().pending_operations, 1);
    release(&device, event);
    free(&queues[2], memory, 1).unwrap();
    device.synchronize().unwrap();
}

#[test]
fn events_order_queues() {
    let Some(device) = device(small()) else {
        return;
    };
    let (first, second) = (device.default_queue().unwrap(), device.new_queue().unwrap());
    for round in 0..50u8 {
        let memory = first.allocate(64).unwrap();
        let (go, gate) = mpsc::channel::<()>();
        sim(&first)
            .run(move |_| gate.recv().map_err(|e| e.to_string()))
            .unwrap();
        fill(&first, memory, round, 64).unwrap();
        let filled = first.record().unwrap();
        // SAFETY: live; released after.
        unsafe { second.wait(filled).unwrap() };
        let mut host = [99; 64];
        download(&second, memory, &mut host).unwrap();
        free(&second, memory, 64).unwrap();
        assert!(!query(&device, filled).unwrap());
        release(&device, filled);
        go.send(()).unwrap();
        finish(&device, &second).unwrap();
        assert_eq!(host, [round; 64]);
    }
    device.assert_clean();
}

/// Work that was queued first does not run first on another queue, so that a missing wait shows; and queues that wait for one
/// event of another go on when it is reached.
#[test]
fn queues_take_turns() {
    let Some(device) = device(small()) else {
        return;
    };
    let queues: Vec<_> = (0..20).map(|_| device.new_queue().unwrap()).collect();
    let (first, others) = queues.split_first().unwrap();
    let (go, gate) = mpsc::channel::<()>();
    let (sender, order) = mpsc::channel();
    let send = |queue, name: usize| {
        let sender = sender.clone();
        let kernel = move |_: &mut SimMemory<'_>| sender.send(name).map_err(|e| e.to_string());
        sim(queue).run(kernel).unwrap();
    };
    let gate = move |_: &mut SimMemory<'_>| gate.recv().map_err(|e| e.to_string());
    sim(first).run(gate).unwrap();
    (0..3).for_each(|_| send(first, 0));
    let event = first.record().unwrap();
    send(first, 100);
    for (i, queue) in others.iter().enumerate() {
        send(queue, i + 1);
        // SAFETY: live; released after.
        unsafe { queue.wait(event).unwrap() };
        send(queue, i + 101);
    }
    release(&device, event);
    go.send(()).unwrap();
    device.synchronize().unwrap();
    let order: Vec<_> = order.try_iter().collect();
    let at = |name| order.iter().position(|other| *other == name).unwrap();
    assert!((1..20).all(|i| at(i) < at(100)), "{order:?}");
    let event = order.iter().rposition(|name| *name == 0).unwrap();
    assert!((101..120).all(|i| event < at(i)), "{order:?}");
    assert!(at(1) < event, "{order:?}");
    assert_eq!(order.len(), 4 + 2 * 19);
    device.assert_clean();
}

#[test]
fn only_live_events_of_the_device_pass() {
    let (Some(device), Some(other)) = (deferred(), deferred()) else {
        return;
    };
    let queue = device.default_queue().unwrap();
    let mut local = 0u64;
    let foreign = other.default_queue().unwrap().record().unwrap();
    let released = queue.record().unwrap();
    release(&device, released);
    let lookalike = EventPtr::new((&raw mut local).cast()).unwrap();
    let garbage = EventPtr::new(std::ptr::without_provenance_mut(8)).unwrap();
    for event in [foreign, released, lookalike, garbage] {
        // SAFETY: looked up, not followed.
        let refused = unsafe { device.check_event(event) }.unwrap_err();
        assert!(matches!(refused, Error::InvalidArgument(_)));
        assert_eq!(code(query(&device, event)), MISUSE);
        assert_eq!(code(wait(&device, event)), MISUSE);
        // SAFETY: refused without following the pointer.
        assert_eq!(code(unsafe { queue.wait(event) }), MISUSE);
        release(&device, event);
    }
    assert_eq!(device.report().violations.len(), 16);

    let event = queue.record().unwrap();
    // SAFETY: live.
    unsafe { device.check_event(event) }.unwrap();
    assert_eq!(device.report().live_events, 1);
    release(&device, event);
    release(&other, foreign);
    other.assert_clean();
}

#[test]
fn kernels_see_memory() {
    let Some(device) = deferred() else { return };
    let queue = device.default_queue().unwrap();
    let [a, b, c] = [64, 64, 64].map(|bytes| queue.allocate(bytes).unwrap());
    sim(&queue)
        .run(move |m| {
            assert!(
                m.slice::<i32>(a.offset(2), 1)
                    .unwrap_err()
                    .contains("aligned")
            );
            assert!(m.slice::<i32>(DevicePtr::NULL, 0).unwrap().is_empty());
            m.write(a, &[1i32, 2, 3])?;
            m.write(b, &[10i32, 20, 30])?;
            let (x, y) = (m.slice::<i32>(a, 3)?, m.slice::<i32>(b, 3)?);
            let sums: Vec<i64> = x.iter().zip(y).map(|(x, y)| i64::from(x + y)).collect();
            m.write(c, &sums)?;
            (m.slice::<u8>(c, 1)? == [11])
                .then_some(())
                .ok_or("no".into())
        })
        .unwrap();
    let sums = contents(&device, &queue, c, 24);
    let expected: Vec<u8> = [11i64, 22, 33]
        .iter()
        .flat_map(|x| x.to_ne_bytes())
        .collect();
    assert_eq!(sums, expected);
    for memory in [a, b, c] {
        free(&queue, memory, 64).unwrap();
    }
    device.assert_clean();
}

#[test]
fn submissions_are_checked() {
    let Some(device) = deferred() else { return };
    let queue = device.default_queue().unwrap();
    let memory = queue.allocate(64).unwrap();
    assert!(queue.allocate(0).is_err());
    assert!(fill(&queue, DevicePtr::NULL, 0, 1).is_err());
    assert!(fill(&queue, memory, 0, 0).is_err());
    let copy = |src, dst, bytes| {
        let kind = CopyKind::DeviceToDevice;
        let copy = CopyOp {
            src,
            dst,
            bytes,
            kind,
        };
        // SAFETY: refused, all of them.
        unsafe { queue.copy(&[copy]) }
    };
    assert!(copy(DevicePtr::NULL, memory, 1).is_err());
    assert!(copy(memory, DevicePtr::NULL, 1).is_err());
    assert!(copy(memory, memory.offset(8), 0).is_err());
    assert!(copy(memory, memory.offset(8), 9).is_err());
    assert!(copy(memory, memory.offset(8), usize::MAX).is_err());
    // SAFETY: empty.
    unsafe { queue.copy(&[]).unwrap() };
    assert_eq!(device.report().pending_operations, 0);
}

#[test]
fn copies_can_be_slowed_down() {
    let Some(device) = device(SimConfig {
        bytes_per_second: Some(100_000),
        ..small()
    }) else {
        return;
    };
    let queue = device.default_queue().unwrap();
    let host = [1; 5000];
    let memory = queue.allocate(host.len()).unwrap();
    let start = Instant::now();
    upload(&queue, &host, memory).unwrap();
    let copied = queue.record().unwrap();
    assert!(!query(&device, copied).unwrap());
    wait(&device, copied).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(50));
    release(&device, copied);
    free(&queue, memory, host.len()).unwrap();
    device.synchronize().unwrap();
    device.assert_clean();
}

#[test]
fn threads_share_a_device() {
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Some(device) = device(SimConfig { mode, ..small() }) else {
            return;
        };
        let shared = device.default_queue().unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let (device, shared) = (&device, &shared);
                scope.spawn(move || {
                    let own = device.new_queue().unwrap();
                    for i in 0..50u8 {
                        let bytes = 100 + usize::from(i);
                        let memory = shared.allocate(bytes).unwrap();
                        fill(shared, memory, thread ^ i, bytes).unwrap();
                        let filled = shared.record().unwrap();
                        // SAFETY: live; released after.
                        unsafe { own.wait(filled).unwrap() };
                        release(device, filled);
                        let mut host = vec![0; bytes];
                        download(&own, memory, &mut host).unwrap();
                        let done = own.record().unwrap();
                        wait(device, done).unwrap();
                        assert!(query(device, done).unwrap());
                        release(device, done);
                        assert_eq!(host, vec![thread ^ i; bytes]);
                        free(&own, memory, bytes).unwrap();
                    }
                });
            }
        });
        device.synchronize().unwrap();
        device.assert_clean();
    }
}
