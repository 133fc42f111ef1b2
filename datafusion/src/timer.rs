//! [`wake_at`]: a timer for tasks, whose runtime need not have timers; and how long rows wait for others.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;
use std::sync::mpsc::{SendError, Sender, channel};
use std::task::Waker;
use std::thread::Builder;
use std::time::{Duration, Instant};

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

/// How long something waits for more.
pub(super) struct Patience {
    since: Instant,
    wait: Duration,
    /// Who is woken in the end.
    timer: Option<Waker>,
}

impl Patience {
    pub(super) fn new(wait: Duration) -> Self {
        Self {
            since: Instant::now(),
            wait,
            timer: None,
        }
    }

    /// The wait begins.
    pub(super) fn begin(&mut self) {
        (self.since, self.timer) = (Instant::now(), None);
    }

    pub(super) fn is_over(&self) -> bool {
        self.since.elapsed() >= self.wait
    }

    /// Whether the wait is over. If not, it wakes the task then.
    pub(super) fn ends(&mut self, waker: &Waker) -> bool {
        let wakes = self
            .timer
            .as_ref()
            .is_some_and(|timer| timer.will_wake(waker));
        if !self.is_over() && !wakes {
            self.timer = Some(waker.clone());
            // Beyond what a clock can tell, it is for ever.
            if let Some(due) = self.since.checked_add(self.wait) {
                wake_at(due, waker);
            }
        }
        self.is_over()
    }
}
