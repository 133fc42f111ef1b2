//! [`run_in_processes`]: what only a process of its own shows.

use std::env;
use std::process::Command;
use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
use super::Subject;
#[cfg(target_os = "linux")]
use super::ends::{PARTS, linger_at_the_end};

/// Names to a child what it is to do.
const PART: &str = "ARROW_DEVICE_CONFORMANCE_PART";
/// What a process that ends may take.
const LONGEST: Duration = Duration::from_secs(60);

/// Checks what ends a process or belongs to all of it, each in a process of its own, which runs this program's test `test` alone: that is
/// the one which calls this, named as `cargo test -- --list` does. On Linux.
///
/// - A child of a fork drops all that its parent has of the device, and uses nothing of it; the parent goes on.
/// - A process ends, soon and without an error, while copies run, while threads use the device, and while one drops it.
/// - Many small batches go through streams to the device and back, whose memory, open files and threads stay level.
///   `ARROW_DEVICE_SOAK_BATCHES` says how many, 5,000 by default.
///
/// `open` opens the subject in this process, which has `None` if there is no such device here, and in each of the others.
///
/// # Panics
/// Panics with the output of a process that fails.
#[cfg(target_os = "linux")]
pub fn run_in_processes(test: &str, open: impl Fn() -> Option<Subject>) {
    if let Ok(part) = env::var(PART) {
        let found = PARTS.iter().find(|(name, ..)| *name == part);
        let (_, _, run) = found.expect("a part of the suite");
        linger_at_the_end();
        return run(&open().expect("a device, as in the process before"));
    }
    if open().is_none() {
        return;
    }
    for (part, rounds, _) in PARTS {
        (0..rounds).for_each(|_| run_child(test, part));
    }
}

/// Runs the body of a test in a process of its own.
///
/// # Panics
/// Panics with the output of the process if the test fails there.
#[track_caller]
pub fn alone(test: &str, body: impl FnOnce()) {
    match env::var_os(PART) {
        Some(_) => body(),
        None => run_child(test, "alone"),
    }
}

/// As [`alone`], in five processes, each of which ends soon, whatever its threads do then.
///
/// # Panics
/// Panics with the output of a process that fails or takes long.
#[cfg(target_os = "linux")]
#[track_caller]
pub fn ends_well(test: &str, body: impl FnOnce()) {
    if env::var_os(PART).is_some() {
        linger_at_the_end();
        return body();
    }
    (0..5).for_each(|_| run_child(test, "alone"));
}

#[track_caller]
fn run_child(test: &str, part: &str) {
    let start = Instant::now();
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args([test, "--exact", "--test-threads=1", "--nocapture"]);
    let output = command.env(PART, part).output().expect("a process");
    let both = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&both);
    let passed = output.status.success() && text.contains("1 passed");
    assert!(passed, "{test}, {part}: {}: {text}", output.status);
    let took = start.elapsed();
    let is_soon = took < LONGEST || part == "soak" || part == "alone";
    assert!(is_soon, "{test}, {part}: it took {took:?}");
}
