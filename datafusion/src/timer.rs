//! [`wake_at`]: a timer for tasks, whose runtime need not have timers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;
use std::sync::mpsc::{SendError, Sender, channel};
use std::task::Waker;
use std::thread::Builder;
use std::time::Instant;

/// Wakes a task at a time, from a thread that all tasks share.
pub(super) fn wake_at(due: Instant, waker: &Waker) {
    static TIMER: LazyLock<Sender<(Instant, Waker)>> = LazyLock::new(|| {
        let (timer, tasks) = channel();
        let wake_all = move || {
            let mut waiting: Vec<(Instant, Waker)> = Vec::new();
            loop {
                let now = Instant::now();
                for (_, waker) in waiting.extract_if(.., |(due, _)| *due <= now) {
                    wake(waker);
                }
                let next = waiting.iter().map(|(due, _)| *due).min();
                let come = match next {
                    Some(due) => tasks.recv_timeout(due.saturating_duration_since(now)).ok(),
                    None => tasks.recv().ok(),
                };
                waiting.extend(come);
            }
        };
        // If it cannot be started, the channel ends.
        let _ = Builder::new()
            .name("arrow-device timer".into())
            .spawn(wake_all);
        timer
    });
    if let Err(SendError((_, waker))) = TIMER.send((due, waker.clone())) {
        waker.wake();
    }
}

/// Wakes a task, whose panic is not for those that are woken after it.
pub(super) fn wake(waker: Waker) {
    let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
}
