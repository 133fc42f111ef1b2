//! Each of the tests in a process of its own, in which the first callback that throws ends the process.

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use crate::foreign_exceptions::thrown::{CASE, CPP, EXCEPTION, MADE_UP, THROWS, cpp_runtime};

/// Runs a test, or one case of it, in a child process that throws such exceptions.
fn abort_of(test: &str, exception: &str) {
    let (test, case) = test.split_once(' ').unwrap_or((test, ""));
    let child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            &format!("foreign_exceptions::{test}"),
            "--nocapture",
            "--test-threads",
            "1",
        ])
        .env(EXCEPTION, exception)
        .env(CASE, case)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stderr);
    let about = format!("{test} {case}: {:?}: {said}", child.status);
    assert_eq!(child.status.signal(), Some(libc::SIGABRT), "{about}");
    // Thrown once, and caught by the runtime: nothing ran on after it.
    assert_eq!(said.matches(THROWS).count(), 1, "{about}");
    assert!(
        said.contains("Rust cannot catch foreign exceptions"),
        "{about}"
    );
}

#[test]
fn an_exception_aborts() {
    for test in [
        "release",
        "on_the_release_thread",
        "owners_of_an_export",
        "get_schema",
        "get_next",
        "of_a_stream_that_fails get_last_error",
        "of_a_stream_that_fails release",
        "schema_release",
        "dlpack_deleter",
        "exported_streams",
        "nested",
        "during_a_panic",
        "asynchronous::consumers_throw on_schema",
        "asynchronous::consumers_throw on_next_task",
        "asynchronous::consumers_throw on_error",
        "asynchronous::consumers_throw release",
        "asynchronous::producers_throw request",
        "asynchronous::producers_throw extract_data",
        "asynchronous::producers_throw cancel",
    ] {
        abort_of(test, MADE_UP);
    }
}

#[test]
fn a_cpp_exception_aborts() {
    if cpp_runtime().is_null() {
        assert!(
            std::env::var_os("CI").is_none(),
            "CI needs a C++ runtime: no libstdc++.so.6"
        );
        // Not `eprintln!`, which the test harness hides.
        let line = b"C++ exceptions not tested: no libstdc++.so.6\n";
        std::io::stderr().write_all(line).unwrap();
        return;
    }
    abort_of("release", CPP);
    abort_of("get_next", CPP);
}
