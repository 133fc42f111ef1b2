//! Work that the host does for a device, on a thread of its own.

use std::mem::{replace, take};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::abi::guard;
use crate::device::lock;

/// How long an idle thread lives.
const IDLE: Duration = Duration::from_secs(2);
/// The shortest and the longest interval between polls.
const PAUSE: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
/// The longest interval if polling itself takes long.
const LONG_PAUSE: Duration = Duration::from_millis(10);

/// A thread for what the host does for a device: calls that may block where the backend must not, and events that have to be
/// polled. It is started when there is work, and ends when there has been none for two seconds. Each [`Device`](crate::Device)
/// has one by itself, which runs releases once their events have completed, and calls wakers.
///
/// - **One thread**, as long as the system starts one. A job that blocks delays all others, so no job may wait for what another of
///   the same worker does.
/// - **Panics** of a job are caught. The panic hook reports them; the other jobs run.
/// - **No thread.** If the system starts none, [`push`](Self::push) and [`watch`](Self::watch) run their job before they return,
///   and those that come meanwhile. Call them without a lock held that a job takes.
/// - **Drop** does not wait: what is left is still done, and the thread then ends.
/// - **Forks.** A child of the process that made the worker has not its thread: nobody pushes there.
pub(crate) struct Worker(Arc<Shared>);

/// Returns whether it has ended; otherwise it is called again.
type Job = Box<dyn FnMut() -> bool + Send>;

struct Shared {
    name: &'static str,
    state: Mutex<State>,
    /// Signalled when there is work, or the worker was dropped.
    wake: Condvar,
}

#[derive(Default)]
struct State {
    /// Jobs that the thread has not seen yet.
    jobs: Vec<Job>,
    running: bool,
    /// The worker was dropped.
    closed: bool,
}

impl Shared {
    /// Calls each job once, and keeps those that have not ended.
    fn round(&self, jobs: &mut Vec<Job>) {
        jobs.retain_mut(|job| {
            if let Ok(false) = guard::call_foreign("job", &mut *job) {
                return true;
            }
            // After a panic it still holds what it has not come to.
            let rest = replace(job, Box::new(|| true));
            let _ = guard::call_foreign("drop of a job", || drop(rest));
            false
        });
    }

    /// Runs jobs until there has been none for so long.
    fn run(&self, idle: Duration) {
        let (mut jobs, mut pause) = (Vec::new(), PAUSE.0);
        // When all jobs were asked, and how long that took.
        let (mut asked, mut took) = (Instant::now(), Duration::ZERO);
        loop {
            let state = lock(&self.state);
            let is_idle = jobs.is_empty();
            // Asking takes at most a part of this thread's time.
            let due = asked + pause.max((4 * took).min(LONG_PAUSE));
            let nothing = |state: &mut State| state.jobs.is_empty() && !(state.closed && is_idle);
            let time = match is_idle {
                true => idle,
                false => due.saturating_duration_since(Instant::now()),
            };
            let waited = self.wake.wait_timeout_while(state, time, nothing);
            let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if is_idle && state.jobs.is_empty() {
                state.running = false;
                return;
            }
            let mut new = take(&mut state.jobs);
            drop(state);
            if !new.is_empty() {
                // Only these are asked at once: many that wait would be asked for each that comes.
                pause = PAUSE.0;
                self.round(&mut new);
                jobs.append(&mut new);
            }
            let (start, before) = (Instant::now(), jobs.len());
            if start < due {
                continue;
            }
            self.round(&mut jobs);
            (asked, took) = (Instant::now(), start.elapsed());
            pause = match jobs.len() < before {
                true => PAUSE.0,
                false => (pause * 2).min(PAUSE.1),
            };
        }
    }
}

impl Worker {
    /// Makes a worker without a thread. `name` is that of its threads.
    pub(crate) fn new(name: &'static str) -> Self {
        Self(Arc::new(Shared {
            name,
            state: Mutex::default(),
            wake: Condvar::new(),
        }))
    }

    /// Runs `job` on the thread. Pushed jobs run one after the other, in the order in which they were pushed.
    pub(crate) fn push(&self, job: impl FnOnce() + Send + 'static) {
        self.watch(|| true, job);
    }

    /// Calls `poll` on the thread until it returns `true`, at growing intervals of up to a millisecond, then drops it and calls
    /// `then`. If `poll` panics, `then` is dropped without a call.
    pub(crate) fn watch(
        &self,
        poll: impl FnMut() -> bool + Send + 'static,
        then: impl FnOnce() + Send + 'static,
    ) {
        let mut job = Some((poll, then));
        let job: Job = Box::new(move || {
            let is_done = job.as_mut().is_none_or(|(poll, _)| poll());
            if let Some((poll, then)) = job.take_if(|_| is_done) {
                drop(poll);
                then();
            }
            is_done
        });
        let shared = &self.0;
        let mut state = lock(&shared.state);
        state.jobs.push(job);
        let is_first = !replace(&mut state.running, true);
        drop(state);
        shared.wake.notify_one();
        if is_first {
            let thread = shared.clone();
            let builder = std::thread::Builder::new().name(shared.name.into());
            // With a stack that is too large there is no thread.
            #[cfg(test)]
            let builder = builder.stack_size(tests::stack_bytes(shared.name));
            if builder.spawn(move || thread.run(IDLE)).is_err() {
                shared.run(Duration::ZERO);
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // In a child of the process it may be locked for ever. A thread that is not told ends later, since it has nothing to do.
        if let Ok(mut state) = self.0.state.try_lock() {
            state.closed = true;
            self.0.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    /// The name of workers that get no thread.
    const NO_THREAD: &str = "no thread";

    pub(super) fn stack_bytes(name: &str) -> usize {
        match name {
            NO_THREAD => usize::MAX / 4,
            _ => 1 << 20,
        }
    }

    /// Without a thread, jobs run before `push` and `watch` return, also those that a job pushes.
    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn jobs_run_here_if_there_is_no_thread() {
        let worker = Arc::new(Worker::new(NO_THREAD));
        let (sender, ran) = mpsc::channel();
        let (this, inner) = (worker.clone(), sender.clone());
        worker.push(move || {
            this.push(move || inner.send(2).unwrap());
            sender.send(1).unwrap();
        });
        assert_eq!((ran.try_recv(), ran.try_recv()), (Ok(1), Ok(2)));
        let mut polls = 0;
        let (sender, ran) = mpsc::channel();
        let poll = move || {
            polls += 1;
            polls == 5
        };
        worker.watch(poll, move || sender.send(()).unwrap());
        assert_eq!(ran.try_recv(), Ok(()));
    }

    #[test]
    fn jobs_run_in_order_on_one_thread() {
        let worker = Worker::new("a test");
        let (sender, ran) = mpsc::channel();
        for i in 0..100 {
            let sender = sender.clone();
            worker.push(move || sender.send((i, std::thread::current().id())).unwrap());
        }
        drop(sender);
        let ran: Vec<_> = ran.iter().collect();
        assert!(ran.iter().map(|(i, _)| *i).eq(0..100));
        assert!(ran.iter().all(|(_, thread)| *thread == ran[0].1));
        assert_ne!(ran[0].1, std::thread::current().id());
    }

    #[test]
    fn a_watch_holds_up_nothing() {
        let worker = Worker::new("a test");
        let (event, polls) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicUsize::new(0)),
        );
        let (sender, ran) = mpsc::channel();
        let (done, counted, sent) = (event.clone(), polls.clone(), sender.clone());
        // Owned by the poll, which is dropped before the other closure is called.
        let held = Arc::new(());
        let (own, is_dropped) = (held.clone(), Arc::downgrade(&held));
        drop(held);
        worker.watch(
            move || {
                let _ = &own;
                counted.fetch_add(1, Ordering::Relaxed);
                done.load(Ordering::Acquire)
            },
            move || {
                sent.send(is_dropped.upgrade().map_or("watched", |_| "held"))
                    .unwrap()
            },
        );
        worker.push(move || sender.send("pushed").unwrap());
        assert_eq!(ran.recv_timeout(LONG), Ok("pushed"));
        while polls.load(Ordering::Relaxed) < 3 {
            std::thread::yield_now();
        }
        event.store(true, Ordering::Release);
        assert_eq!(ran.recv_timeout(LONG), Ok("watched"));
    }

    #[test]
    fn panics_are_kept() {
        /// Panics when it is dropped.
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("a test of panics");
            }
        }
        let worker = Worker::new("a test");
        worker.push(|| panic!("a test of panics"));
        let bomb = Bomb;
        worker.push(move || drop(bomb));
        let bomb = Bomb;
        worker.watch(
            move || {
                let _ = &bomb;
                true
            },
            || {},
        );
        let called = Arc::new(AtomicBool::new(false));
        let call = called.clone();
        worker.watch(
            || panic!("a test of panics"),
            // What `poll` did not see done must not be taken for done.
            move || call.store(true, Ordering::Relaxed),
        );
        let (sender, ran) = mpsc::channel();
        worker.push(move || sender.send(()).unwrap());
        assert_eq!(ran.recv_timeout(LONG), Ok(()));
        assert!(!called.load(Ordering::Relaxed));
        assert_eq!(Arc::strong_count(&called), 1);
    }

    /// A job may push jobs.
    #[test]
    fn jobs_use_their_worker() {
        let worker = Arc::new(Worker::new("a test"));
        fn step(worker: &Arc<Worker>, left: usize, last: mpsc::Sender<()>) {
            let this = worker.clone();
            worker.push(move || match left {
                0 => last.send(()).unwrap(),
                left => step(&this, left - 1, last),
            });
        }
        let (sender, last) = mpsc::channel();
        step(&worker, 50, sender);
        assert_eq!(last.recv_timeout(LONG), Ok(()));
        // The last job may drop the last handle, on the worker's own thread.
        let (sender, ran) = mpsc::channel();
        let this = worker.clone();
        worker.push(move || {
            drop(this);
            sender.send(()).unwrap();
        });
        drop(worker);
        assert_eq!(ran.recv_timeout(LONG), Ok(()));
    }

    /// The drop waits for nothing, and what is left is still done. Then the thread ends.
    #[test]
    fn a_dropped_worker_ends_its_work() {
        let worker = Worker::new("a test");
        let shared = Arc::downgrade(&worker.0);
        let (go, wait) = mpsc::channel::<()>();
        let (sender, ran) = mpsc::channel();
        worker.push(move || wait.recv_timeout(LONG).unwrap());
        worker.push(move || sender.send(()).unwrap());
        drop(worker);
        go.send(()).unwrap();
        assert_eq!(ran.recv_timeout(LONG), Ok(()));
        let start = Instant::now();
        while shared.strong_count() > 0 {
            assert!(start.elapsed() < LONG, "the thread does not end");
            std::thread::yield_now();
        }
    }

    /// Threads push while the worker's thread is about to end: no job is left behind.
    #[test]
    fn no_job_is_left_behind() {
        let rounds = if cfg!(miri) { 3 } else { 300 };
        for _ in 0..rounds {
            let worker = Worker::new("a test");
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        for polls in 0..3 {
                            let ((sender, ran), mut left) = (mpsc::channel(), polls);
                            let poll = move || {
                                left -= 1;
                                left < 0
                            };
                            worker.watch(poll, move || sender.send(()).unwrap());
                            assert_eq!(ran.recv_timeout(LONG), Ok(()));
                        }
                    });
                }
            });
        }
    }
}
