//! Tests that fork: in a process of their own, for the harness has threads.
#![allow(dead_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::time::{Duration, Instant};

/// What a child may take, in seconds. One that hangs is ended by a signal.
const SECONDS: u32 = 30;

const ALONE: &str = "ARROW_DEVICE_TEST_FORKS";

/// Returns whether this is the process of [`alone`].
pub(crate) fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs a test's body in a process of its own, on the main thread.
#[track_caller]
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    if is_alone() {
        return body();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--test-threads=1", "--nocapture"]);
    let output = command.env(ALONE, "1").output().unwrap();
    let both = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&both);
    let passed = output.status.success() && text.contains("1 passed");
    assert!(passed, "{}: {text}", output.status);
}

/// Runs `work` in a child of this process and waits for it. What `work` changes, it changes there.
#[track_caller]
pub(crate) fn forked(work: impl FnOnce()) {
    let start = Instant::now();
    // SAFETY: the child runs `work`, and ends without running what the parent would at its end.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "no child");
    if child == 0 {
        // SAFETY: neither has a requirement; the first ends this process if it hangs.
        unsafe {
            libc::alarm(SECONDS);
            let done = catch_unwind(AssertUnwindSafe(work));
            libc::_exit(i32::from(done.is_err()));
        }
    }
    let mut status = 0;
    // SAFETY: `status` is valid for the write of an int.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(
        status,
        0,
        "the child failed, or was ended by signal {}",
        status & 0x7F
    );
    let took = start.elapsed();
    assert!(took < Duration::from_secs(4), "the child waited: {took:?}");
}
