//! What [`run_in_processes`](super::run_in_processes) runs: forks, and the end of a process.

use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::abort;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use arrow_device::SyncPolicy;

use super::Subject;
use super::help::{assert_even, numbers};
use super::soak::soak;

/// Its name, in how many processes it runs, and what it does there.
pub(super) type Part = (&'static str, usize, fn(&Subject));

pub(super) const PARTS: [Part; 5] = [
    ("fork", 1, fork),
    ("exit while copies run", 5, exit_while_copies_run),
    ("exit while threads work", 5, exit_while_threads_work),
    ("exit while the device is dropped", 5, exit_while_dropped),
    ("soak", 1, soak),
];

/// Gives threads time while the process ends, after the end of a runtime that is loaded later.
pub(super) fn linger_at_the_end() {
    extern "C" fn linger() {
        thread::sleep(Duration::from_millis(50));
    }
    // SAFETY: the function only sleeps.
    assert_eq!(unsafe { libc::atexit(linger) }, 0);
}

fn fork(subject: &Subject) {
    let (device, sent) = (&subject.device, numbers(300));
    let queue = device.new_queue().expect("new_queue");
    let held = subject.hold(&queue);
    let up = device.upload_on(&sent, &queue).expect("upload");
    let download = up.start_to_host(&queue).expect("start_to_host");
    let exported = up.export(SyncPolicy::Event).ok();
    let event = queue.record().expect("record").expect("an event");
    let host = device.host_buffer(100 << 10).expect("host_buffer");
    drop(device.upload(&sent).expect("upload"));
    let mut all = Some((up, download, exported, event, host));
    let mut rest = Some((queue, device.clone()));
    in_a_child(|| {
        let (up, download, exported, event, host) = all.take().expect("taken once");
        let (queue, device) = rest.take().expect("taken once");
        let mut errors = vec![
            device.upload(&sent).map(drop),
            up.to_host().map(drop),
            device.new_queue().map(drop),
            queue.record().map(drop),
            event.wait(),
            event.is_complete().map(drop),
            device.synchronize(),
        ];
        let refused = subject.refused.as_ref().map(|refused| refused(&queue));
        errors.extend(refused.into_iter().flatten().map(Err));
        for (i, outcome) in errors.into_iter().enumerate() {
            let text = outcome.map_or_else(|e| e.to_string(), |()| "no error".into());
            assert!(text.contains("fork"), "call {i}: {text}");
        }
        drop((download, exported, host, event, up));
        device.trim();
        assert!(device.backend().is_over(), "something may run here");
        let error = device.take_drop_error();
        assert!(error.is_none(), "{error:?}");
        drop((queue, device));
    });
    drop(held);
    // The parent goes on as if nothing had happened.
    let (up, download, exported, event, host) = all.expect("taken in the child only");
    assert_eq!(download.wait().expect("a download"), sent);
    assert_eq!(up.to_host().expect("to_host"), sent);
    drop((up, exported, event, host, rest));
    assert_even(subject);
}

/// Runs `work` in a child of this process, which must end soon. What `work` changes, it changes there.
fn in_a_child(work: impl FnOnce()) {
    /// After so many seconds a signal ends a child that hangs.
    const SECONDS: u32 = 30;
    // SAFETY: the child runs `work`, and ends without running what the parent would at its end.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "no child");
    if child == 0 {
        // SAFETY: neither has a requirement.
        unsafe {
            libc::alarm(SECONDS);
            let done = catch_unwind(AssertUnwindSafe(work));
            libc::_exit(i32::from(done.is_err()));
        }
    }
    let mut status = 0;
    // SAFETY: `status` is valid for the write of an int.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    let signal = status & 0x7F;
    assert_eq!(status, 0, "the child failed, or signal {signal} ended it");
}

/// The device is kept, as one of the process-wide set is.
fn exit_while_copies_run(subject: &Subject) {
    let device = &subject.device;
    let up = device.upload(&numbers(500_000)).expect("upload");
    forget(up.start_to_host(None).expect("start_to_host"));
    forget(up.export(SyncPolicy::Event));
    forget((device.new_queue().expect("new_queue"), subject.clone()));
}

fn exit_while_threads_work(subject: &Subject) {
    let (begun, sees) = channel();
    for _ in 0..3 {
        let (device, begun) = (subject.device.clone(), begun.clone());
        thread::spawn(move || {
            let sent = numbers(500_000);
            loop {
                // Once the process ends it stays in here: an error could be taken for the end of work.
                if let Err(e) = device.upload(&sent).and_then(|up| up.to_host()) {
                    eprintln!("{e}");
                    abort();
                }
                let _ = begun.send(());
            }
        });
    }
    sees.recv().expect("a thread has begun");
}

/// Another thread drops the last handle of the device.
fn exit_while_dropped(subject: &Subject) {
    let subject = subject.clone();
    let up = subject.device.upload(&numbers(500_000)).expect("upload");
    let (begun, sees) = channel();
    thread::spawn(move || {
        let _ = begun.send(());
        drop((up, subject));
    });
    sees.recv().expect("the thread has begun");
}
