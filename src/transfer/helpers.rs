//! Threads that help to pack large uploads. They are the process's, start when they are first needed, and stay: to start one takes
//! longer than to pack a MiB.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::Builder;

use crate::abi::guard;
use crate::device::lock;

pub(super) type Job = Box<dyn FnOnce() + Send>;

/// Where the threads take their jobs from, and how many there are.
struct Helpers {
    jobs: Sender<Job>,
    waiting: Arc<Mutex<Receiver<Job>>>,
    threads: usize,
}

static HELPERS: Mutex<Option<Helpers>> = Mutex::new(None);

/// Gives each job to a thread, once one has time. Nobody may rely on it: in a child of the process, or if no thread can be started,
/// no job is ever done.
pub(super) fn offer(jobs: Vec<Job>) {
    let mut helpers = lock(&HELPERS);
    let helpers = helpers.get_or_insert_with(|| {
        let (jobs, waiting) = channel();
        Helpers {
            jobs,
            waiting: Arc::new(Mutex::new(waiting)),
            threads: 0,
        }
    });
    while helpers.threads < jobs.len() {
        let waiting = helpers.waiting.clone();
        let run = move || {
            while let Ok(job) = { lock(&waiting).recv() } {
                let _ = guard::call_foreign("packing", job);
            }
        };
        let name = "arrow-device packing".to_owned();
        if Builder::new().name(name).spawn(run).is_err() {
            break;
        }
        helpers.threads += 1;
    }
    for job in jobs.into_iter().take(helpers.threads) {
        // The receiver lives as long as the sender.
        let _ = helpers.jobs.send(job);
    }
}
