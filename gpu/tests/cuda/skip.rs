//! This program without a device, and with one that is required. Each test runs it again.

use std::process::{Command, Output};

use crate::places::{REQUIRE, SKIPPED};

/// This program, with these tests, as if there were no CUDA device.
fn without_devices(tests: &[&str], require: Option<&str>) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    // Hides all devices from a real driver, and from the stand-in.
    command.args(tests).env("CUDA_VISIBLE_DEVICES", "-1");
    command.env("FAKE_CUDA_INIT", "100");
    match require {
        Some(list) => command.env(REQUIRE, list),
        None => command.env_remove(REQUIRE),
    };
    command.output().unwrap()
}

#[test]
fn without_a_device_one_line_says_why() {
    for list in [None, Some(""), Some("rocm, cuda-host,cudax")] {
        let output = without_devices(&["--skip=skip::", "--skip=on_the_stand_in"], list);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{list:?}: {text}");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1, "{list:?}: {text}");
        let reason = lines[0].strip_prefix(SKIPPED);
        assert!(reason.is_some_and(|why| why.len() > 10), "{text}");
    }
}

#[test]
fn without_a_device_that_is_required_the_tests_fail() {
    for list in ["cuda", "rocm, cuda", "cuda,sim"] {
        let one = "gpu_suite::transfer::structs_out_and_in";
        let output = without_devices(&[one, "--exact"], Some(list));
        assert!(!output.status.success(), "{list}");
        let both = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&both);
        let expected = format!("{REQUIRE} asks for CUDA: ");
        assert!(text.contains(&expected), "{list}: {text}");
        assert!(!text.contains(SKIPPED), "{list}: {text}");
    }
}
