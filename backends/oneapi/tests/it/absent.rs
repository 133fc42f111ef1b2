//! What is said where SYCL is missing: its headers when the crate was built, or its library now.

use std::process::Command;

use arrow_device::{Devices, Error};
use arrow_device_oneapi::{OneApiConfig, device_count, register};

const CHILD: &str = "ARROW_DEVICE_TEST_ABSENT";

#[track_caller]
fn refused(why: &[&str]) {
    let devices = Devices::new();
    register(&devices);
    let id = "oneapi:0".parse().unwrap();
    let all = [
        device_count().map(drop),
        OneApiConfig::new(0).open().map(drop),
        devices.get(id).map(drop),
    ];
    for refused in all.map(Result::unwrap_err) {
        assert!(matches!(refused, Error::DeviceNotAvailable { .. }));
        let refused = refused.to_string();
        for part in why.iter().chain(&["oneapi:0", "intel-sycl-rt"]) {
            assert!(refused.contains(part), "{refused}");
        }
    }
}

/// With `ARROW_DEVICE_SYCL` empty, as `backends/oneapi/test` does it, the crate is built without SYCL.
#[test]
fn without_headers() {
    if option_env!("ARROW_DEVICE_SYCL") == Some("") {
        refused(&[
            "was built without SYCL",
            "ARROW_DEVICE_SYCL",
            "build the program again",
        ]);
    }
}

#[test]
fn without_the_library() {
    if option_env!("ARROW_DEVICE_SYCL").is_none_or(str::is_empty) {
        return;
    }
    if std::env::var_os(CHILD).is_some() {
        return refused(&[
            "cannot be loaded",
            "LD_LIBRARY_PATH",
            "/nonexistent/lib/libsycl.so.",
        ]);
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["absent::without_the_library", "--exact"]);
    let child = child
        .env(CHILD, "1")
        .env("ARROW_DEVICE_SYCL", "/nonexistent");
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}
