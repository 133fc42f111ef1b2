//! What is said where OpenCL is not, or not all of it: in processes of their own, which find another loader or none.
#![cfg(all(target_os = "linux", not(miri)))]

use std::fs;
use std::path::Path;
use std::process::Command;

use arrow_device::Devices;
use arrow_device_opencl::{devices, register};

/// Not a test: prints what it finds.
#[test]
#[ignore = "run by the others"]
fn find() {
    register(Devices::global());
    println!(
        "opened: {:?}",
        Devices::open("opencl:0").map_err(|e| e.to_string())
    );
    println!(
        "again: {:?}",
        Devices::open("opencl:0").map_err(|e| e.to_string())
    );
    println!(
        "listed: {:?}",
        devices().map_err(|e| e.to_string()).map(|d| d.len())
    );
}

/// Runs `find` with a variable set.
#[track_caller]
fn found(variable: &str, value: &Path) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["find", "--exact", "--ignored", "--nocapture"]);
    command
        .env_remove("OCL_ICD_FILENAMES")
        .env_remove("OCL_ICD_VENDORS");
    let output = command.env(variable, value).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

#[track_caller]
fn assert_says(text: &str, expected: &str) {
    let lines = text.lines().filter(|line| {
        ["opened", "again", "listed"]
            .iter()
            .any(|name| line.contains(name))
    });
    let lines: Vec<_> = lines.collect();
    assert_eq!(lines.len(), 3, "{text}");
    for line in lines {
        assert!(
            line.contains("device opencl:0 is not available: ") && line.contains(expected),
            "{line}"
        );
    }
}

#[test]
fn no_loader() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libOpenCL.so.1", "libOpenCL.so"] {
        fs::write(folder.path().join(name), "no library").unwrap();
    }
    let text = found("LD_LIBRARY_PATH", folder.path());
    assert_says(
        &text,
        "OpenCL's loader cannot be loaded; install it (Debian and Ubuntu: ocl-icd-libopencl1) and a driver",
    );
}

#[test]
fn a_loader_that_is_too_old() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("old.c");
    fs::write(&source, "int clGetPlatformIDs(void) { return -1001; }\n").unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let library = folder.path().join("libOpenCL.so.1");
    let compiled = Command::new(compiler)
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .status();
    assert!(compiled.unwrap().success());
    let text = found("LD_LIBRARY_PATH", folder.path());
    assert_says(
        &text,
        "OpenCL's loader has no clGetPlatformInfo: it is older than OpenCL 1.2, update it",
    );
}

#[test]
fn no_driver() {
    let folder = tempfile::tempdir().unwrap();
    // Of Debian's loader, and of Khronos's.
    let text = found("OCL_ICD_VENDORS", folder.path());
    let has_loader = !text.contains("cannot be loaded");
    if has_loader {
        assert_says(
            &text,
            "OpenCL's loader finds no driver; install the GPU's, or one for CPUs",
        );
    } else {
        eprintln!("skipped: there is no loader");
    }
}
