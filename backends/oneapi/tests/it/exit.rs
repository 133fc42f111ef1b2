//! The end of a process that uses a oneAPI device. Threads that are in SYCL while its library's destructors run crash: the process must
//! end, soon, without an error.

use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use arrow_array::Int64Array;
use arrow_device::device::EventPtr;
use arrow_device::{Device, Result};

use crate::fork_kit::{alone, is_alone};
use crate::gate::sycl_queue;
use crate::programs::{self, programs};
use crate::rigs;

/// Runs `work` in processes that end while what it has begun is pending.
fn ends_well(test: &str, work: fn(&Device)) {
    if !is_alone() && rigs::number().is_none() {
        return;
    }
    for round in 0..if is_alone() { 1 } else { 5 } {
        let start = Instant::now();
        alone(test, || {
            // SAFETY: the function only sleeps.
            unsafe { libc::atexit(linger) };
            work(&rigs::device().unwrap());
        });
        let took = start.elapsed();
        assert!(took < Duration::from_secs(10), "round {round}: {took:?}");
    }
}

fn upload(device: &Device) -> Result<()> {
    let queue = device.new_queue()?;
    let up = device.upload_array_on(&Int64Array::from_iter_values(0..10_000), &queue)?;
    up.to_host_on(&queue).map(drop)
}

/// Threads transfer while `main` returns. Afterwards they get errors.
#[test]
fn busy() {
    ends_well("exit::busy", |device| {
        for _ in 0..4 {
            let device = device.clone();
            std::thread::spawn(move || {
                loop {
                    let _ = upload(&device);
                }
            });
        }
        std::thread::sleep(Duration::from_millis(30));
    });
}

struct Called;

impl Wake for Called {
    fn wake(self: Arc<Self>) {}
}

/// Work that ends never, with wakers, frees and waits behind it.
#[test]
fn pending() {
    ends_well("exit::pending", |device| {
        let queue = device.new_queue().unwrap();
        // SAFETY: the queue is live. The event is never ended.
        unsafe { (programs().hold_by_event)(sycl_queue(&queue)) };
        let up = device
            .upload_array_on(&Int64Array::from_iter_values(0..10_000), &queue)
            .unwrap();
        let event = queue.record().unwrap().unwrap();
        event.notify(&Waker::from(Arc::new(Called))).unwrap();
        drop(up);
        device.trim();
        std::thread::spawn(move || event.wait());
        std::thread::sleep(Duration::from_millis(30));
    });
}

/// Threads that wait for work stay, since an error would be taken for its end: then its memory is freed.
#[test]
fn waiting() {
    ends_well("exit::waiting", |device| {
        let queue = device.new_queue().unwrap();
        // SAFETY: the queue is live. The event is never ended.
        unsafe { (programs().hold_by_event)(sycl_queue(&queue)) };
        let event = queue.record().unwrap().unwrap();
        // SAFETY: it ends the process.
        let ended = || unsafe { libc::_exit(1) };
        let settled = device.clone();
        std::thread::spawn(move || {
            let _ = settled.backend().settle();
            ended()
        });
        std::thread::spawn(move || {
            let _ = event.wait();
            ended()
        });
        std::thread::sleep(Duration::from_millis(30));
    });
}

/// Gives threads time while the process ends, after SYCL's own end.
extern "C" fn linger() {
    std::thread::sleep(Duration::from_millis(50));
}

/// A queue that waits for an event of another context, which never completes.
#[test]
fn foreign() {
    ends_well("exit::foreign", |device| {
        let mut held = std::ptr::null_mut();
        // SAFETY: the number is that of a device; `held` is valid for a write.
        let event = unsafe {
            let theirs = (programs().queue_new)(device.id().id, programs::OWN_CONTEXT);
            EventPtr::new((programs().event_held)(theirs, &raw mut held)).unwrap()
        };
        let queue = device.new_queue().unwrap();
        // SAFETY: the event lives as long as the process.
        unsafe { queue.raw().wait(event) }.unwrap();
        drop(
            device
                .upload_array_on(&Int64Array::from_iter_values(0..10_000), &queue)
                .unwrap(),
        );
        std::thread::sleep(Duration::from_millis(30));
    });
}

/// Devices, arrays and queues are kept beyond `main`.
#[test]
fn kept() {
    ends_well("exit::kept", |device| {
        upload(device).unwrap();
        std::mem::forget((
            device.clone(),
            device.upload_array(&Int64Array::from(vec![1])).unwrap(),
            device.new_queue().unwrap(),
        ));
    });
}
