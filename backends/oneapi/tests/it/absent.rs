//! What is said where SYCL is missing: its headers when the crate was built, or its library now.

use std::process::Command;

use arrow_device::{Devices, Error};
use arrow_device_oneapi::{OneApiConfig, device_count, register};

const CHILD: &str = "ARROW_DEVICE_TEST_ABSENT";

fn refusals() -> [Error; 3] {
    let devices = Devices::new();
    register(&devices);
    let id = "oneapi:0".parse().unwrap();
    [
        device_count().map(drop),
        OneApiConfig::new(0).open().map(drop),
        devices.get(id).map(drop),
    ]
    .map(Result::unwrap_err)
}

/// With `ARROW_DEVICE_SYCL` empty, as `backends/oneapi/test` does it, the crate is built without SYCL.
#[test]
fn without_headers() {
    if option_env!("ARROW_DEVICE_SYCL") != Some("") {
        return;
    }
    for refused in refusals() {
        assert!(matches!(refused, Error::DeviceNotAvailable { .. }));
        let refused = refused.to_string();
        for part in [
            "oneapi:0",
            "was built without SYCL",
            "intel-sycl-rt",
            "ARROW_DEVICE_SYCL",
            "build the program again",
        ] {
            assert!(
                refused.contains(part) || !cfg!(target_os = "linux"),
                "{refused}"
            );
        }
    }
}

#[test]
fn without_the_library() {
    if option_env!("ARROW_DEVICE_SYCL").is_none_or(str::is_empty) || !cfg!(target_os = "linux") {
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child
            .args(["absent::without_the_library", "--exact"])
            .env(CHILD, "1")
            .env("ARROW_DEVICE_SYCL", "/nonexistent");
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
        return;
    }
    for refused in refusals() {
        assert!(matches!(refused, Error::DeviceNotAvailable { .. }));
        let refused = refused.to_string();
        for part in [
            "oneapi:0",
            "libsycl.so.",
            "cannot be loaded",
            "intel-sycl-rt",
            "LD_LIBRARY_PATH",
            "/nonexistent/lib/libsycl.so",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
    }
}
