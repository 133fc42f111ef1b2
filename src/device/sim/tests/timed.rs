//! Kernels that take time.

use std::time::{Duration, Instant};

use super::*;

/// Queues a kernel that takes this long.
fn sleep(queue: &Arc<dyn RawQueue>, time: Duration) {
    // SAFETY: it writes nothing.
    unsafe { sim(queue).launch_timed(move |ready| ready + time, |_| Ok(())) }.unwrap();
}

fn record(queue: &Arc<dyn RawQueue>) -> EventPtr {
    queue.record().unwrap()
}

#[test]
fn queues_take_time_side_by_side() {
    let Some(device) = device(small()) else {
        return;
    };
    let queues = [(); 20].map(|()| device.new_queue().unwrap());
    let time = Duration::from_millis(200);
    let begin = Instant::now();
    for queue in &queues {
        sleep(queue, time);
    }
    device.synchronize().unwrap();
    let took = begin.elapsed();
    assert!(took >= time, "{took:?}");
    assert!(took < 10 * time, "{took:?}, one after the other");
}

#[test]
fn a_kernel_is_ready_when_what_it_waits_for_has_ended() {
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Some(device) = device(small().with_mode(mode)) else {
            return;
        };
        let (one, two) = (device.new_queue().unwrap(), device.new_queue().unwrap());
        let (step, begin) = (Duration::from_millis(20), Instant::now());
        sleep(&one, step);
        sleep(&one, step);
        let event = record(&one);
        // SAFETY: live; released after, which leaves the wait in place.
        unsafe { two.wait(event).unwrap() };
        release(&device, event);
        let (sender, ready) = std::sync::mpsc::channel();
        let end = move |ready| {
            sender.send(ready).unwrap();
            ready + step
        };
        let memory = two.allocate(1).unwrap();
        // SAFETY: the memory is no arrow data.
        unsafe { sim(&two).launch_timed(end, move |m| m.write(memory, &[7u8])) }.unwrap();
        assert_eq!(contents(&device, &two, memory, 1), [7]);
        let ready = ready.recv().unwrap();
        assert!(
            ready >= begin + 2 * step,
            "before the work that it waits for"
        );
        assert!(begin.elapsed() >= 3 * step);
        // Ends add up to no more than the kernels' times, however late the worker wakes.
        assert!(ready <= Instant::now() - step);
        free(&two, memory, 1).unwrap();
        device.synchronize().unwrap();
        device.assert_clean();
    }
}

#[test]
fn a_device_closes_without_waiting_for_ends() {
    let Some(device) = device(small()) else {
        return;
    };
    let queue = device.default_queue().unwrap();
    let begin = Instant::now();
    sleep(&queue, Duration::from_secs(100));
    drop((queue, device));
    assert!(begin.elapsed() < Duration::from_secs(50));
}

#[test]
fn timed_kernels_fail_as_others_do() {
    for panics in [false, true] {
        let Some(device) = device(small()) else {
            return;
        };
        let queue = device.default_queue().unwrap();
        let end = move |ready| if panics { panic!("no end") } else { ready };
        // SAFETY: it writes nothing.
        unsafe { sim(&queue).launch_timed(end, |_| Err("failed".into())) }.unwrap();
        let error = device.synchronize().unwrap_err();
        assert!(
            matches!(error, Error::Device { code: KERNEL, .. }),
            "{error}"
        );
    }
}

#[test]
fn memory_that_is_not_filled_is_guarded_still() {
    let Some(device) = device(small().with_fill(false)) else {
        return;
    };
    let queue = device.default_queue().unwrap();
    let memory = queue.allocate(100).unwrap();
    assert_eq!(contents(&device, &queue, memory, 100), [0; 100]);
    fill(&queue, memory, 1, 100).unwrap();
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
