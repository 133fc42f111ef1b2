//! The end of a process with work that ends never. Threads that are in SYCL while its library's destructors run crash.

use std::sync::Arc;
use std::time::Duration;

use arrow_array::Int64Array;
use arrow_device::device::EventPtr;

use crate::exit::ends_well;
use crate::first::device;
use crate::gate::sycl_queue;
use crate::programs::{self, programs};
use crate::suite::Count;

/// Work that ends never, with wakers, frees and waits behind it.
#[test]
fn pending() {
    ends_well("waits::pending", |_| {
        let device = device().unwrap();
        let queue = device.new_queue().unwrap();
        // SAFETY: the queue is live. The event is never ended.
        unsafe { (programs().hold_by_event)(sycl_queue(&queue)) };
        let up = device
            .upload_array_on(&Int64Array::from_iter_values(0..10_000), &queue)
            .unwrap();
        let event = queue.record().unwrap().unwrap();
        event.notify(&Arc::new(Count::default()).into()).unwrap();
        drop(up);
        device.trim();
        std::thread::spawn(move || event.wait());
        std::thread::sleep(Duration::from_millis(30));
    });
}

/// Threads that wait for work stay, since an error would be taken for its end: then its memory is freed.
#[test]
fn waiting() {
    ends_well("waits::waiting", |_| {
        let device = device().unwrap();
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

/// A queue that waits for an event of another context, which never completes.
#[test]
fn foreign() {
    ends_well("waits::foreign", |_| {
        let device = device().unwrap();
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
