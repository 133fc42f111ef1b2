//! [`wake_at`]: a timer for tasks, whose runtime need not have timers; and how long rows wait for others.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::thread::Builder;
use std::time::{Duration, Instant};

/// The tasks that are woken at a time.
static WAITING: Mutex<Vec<(Instant, Waker)>> = Mutex::new(Vec::new());
static CHANGED: Condvar = Condvar::new();

/// Wakes a task at a time, from a thread that all tasks share; at once if that cannot be started.
pub(super) fn wake_at(due: Instant, waker: &Waker) {
    static RUNS: LazyLock<bool> = LazyLock::new(|| {
        let thread = Builder::new().name("arrow-device timer".into());
        thread.spawn(wake_all).is_ok()
    });
    let own = waker.clone();
    if !*RUNS {
        return own.wake();
    }
    let mut waiting = unpoisoned(&WAITING);
    match waiting.iter_mut().find(|(_, one)| one.will_wake(&own)) {
        // It is woken then, and may wait again.
        Some((at, _)) if *at <= due => return,
        Some((at, _)) => *at = due,
        None => waiting.push((due, own)),
    }
    CHANGED.notify_one();
}

fn wake_all() {
    let mut waiting = unpoisoned(&WAITING);
    loop {
        let now = Instant::now();
        let due: Vec<_> = waiting.extract_if(.., |(due, _)| *due <= now).collect();
        let next = waiting.iter().map(|(due, _)| *due).min();
        waiting = if !due.is_empty() {
            drop(waiting);
            due.into_iter().for_each(|(_, waker)| wake(waker));
            unpoisoned(&WAITING)
        } else if let Some(next) = next {
            let waited = CHANGED.wait_timeout(waiting, next - now);
            waited.unwrap_or_else(PoisonError::into_inner).0
        } else {
            let waited = CHANGED.wait(waiting);
            waited.unwrap_or_else(PoisonError::into_inner)
        };
    }
}

/// A panic while a lock is held leaves nothing half done.
pub(super) fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes a task, whose panic is not for those that are woken after it.
pub(super) fn wake(waker: Waker) {
    let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
}

/// How long something waits for more.
pub(super) struct Patience {
    since: Instant,
    wait: Duration,
}

impl Patience {
    pub(super) fn new(wait: Duration) -> Self {
        let since = Instant::now();
        Self { since, wait }
    }

    /// The wait begins.
    pub(super) fn begin(&mut self) {
        self.since = Instant::now();
    }

    pub(super) fn is_over(&self) -> bool {
        self.since.elapsed() >= self.wait
    }

    /// Whether the wait is over. If not, it wakes the task then.
    pub(super) fn ends(&self, waker: &Waker) -> bool {
        let over = self.is_over();
        // Beyond what a clock can tell, it is for ever.
        if !over && let Some(due) = self.since.checked_add(self.wait) {
            wake_at(due, waker);
        }
        over
    }
}
