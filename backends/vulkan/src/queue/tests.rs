use std::sync::mpsc::{Sender, channel};
use std::thread::{ThreadId, current};
use std::time::{Duration, Instant};

use super::*;
use crate::VulkanConfig;
use crate::batch::HostWork;

const LONG: Duration = Duration::from_secs(60);

/// Tells which thread does it.
fn work(ran: &Sender<ThreadId>) -> Option<HostWork> {
    let ran = ran.clone();
    Some(Box::new(move || ran.send(current().id()).unwrap()))
}

/// A call for one queue takes no longer because of the copies of another: the thread does only the copy that it has just queued.
#[test]
fn nobody_copies_for_another_queue() {
    let device = match VulkanConfig::new(0).open() {
        Ok(device) => device,
        Err(e) => {
            let is_required = std::env::var_os("ARROW_DEVICE_VULKAN_REQUIRED");
            assert!(is_required.is_none_or(|value| value == "0"), "{e}");
            eprintln!("skipped: {e}");
            return;
        }
    };
    let queues = [(); 2].map(|()| device.new_queue().unwrap());
    let [one, other] = [0, 1].map(|at| VulkanQueue::of(&queues[at]).unwrap());
    let lanes = &one.shared.lanes;
    let push = |queue: &VulkanQueue, before, after| {
        let batch = Batch {
            before,
            after,
            ..Batch::default()
        };
        // SAFETY: there are no commands, and the work of the host is valid at any time.
        unsafe { lanes.push(&queue.lane, batch) }.unwrap();
    };
    let (before, ran_before) = channel();
    push(one, work(&before), None);
    assert_eq!(ran_before.try_recv(), Ok(current().id()));

    let (after, ran_after) = channel();
    let open = Arc::new(AtomicBool::new(false));
    lanes.wait(&one.lane, Wait::Host(open.clone()));
    push(one, work(&before), work(&after));
    open.store(true, Ordering::Release);
    // Finds that the batch can be submitted.
    push(other, None, None);
    assert_ne!(ran_before.recv_timeout(LONG).unwrap(), current().id());
    let start = Instant::now();
    let thread = loop {
        push(other, None, None);
        if let Ok(thread) = ran_after.try_recv() {
            break thread;
        }
        assert!(start.elapsed() < LONG, "nobody copies");
    };
    assert_ne!(thread, current().id());
}
