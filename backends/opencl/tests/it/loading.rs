//! What is said where OpenCL is not, or not all of it: in processes of their own, which find another loader or none.

use std::fs;
use std::path::Path;
use std::process::Command;

use arrow_device::Devices;
use arrow_device_conformance::is_required;
use arrow_device_opencl::{devices, register};

use crate::rigs::REQUIRED;

/// Returns whether this is what is said to who opens or lists devices in a process with a variable set.
#[track_caller]
fn says(test: &str, variable: &str, value: &Path, expected: &str) -> bool {
    const FINDS: &str = "ARROW_DEVICE_TEST_FINDS";
    if std::env::var_os(FINDS).is_some() {
        register(Devices::global());
        let open = || Devices::open("opencl:0").map(drop);
        for refused in [open(), open(), devices().map(drop)] {
            println!("\nsays: {}", refused.unwrap_err());
        }
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    for other in ["OCL_ICD_FILENAMES", "OCL_ICD_VENDORS"] {
        command.env_remove(other);
    }
    command.args([test, "--exact", "--nocapture"]);
    let output = command.env(variable, value).env(FINDS, "1").output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let answers: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("says: "))
        .collect();
    assert!(output.status.success() && answers.len() == 3, "{text}");
    let is_absent = |line: &&str| line.contains("device opencl:0 is not available: ");
    assert!(answers.iter().all(is_absent), "{text}");
    answers.iter().all(|line| line.contains(expected))
}

#[test]
fn no_loader() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libOpenCL.so.1", "libOpenCL.so"] {
        fs::write(folder.path().join(name), "no library").unwrap();
    }
    let expected = "OpenCL's loader cannot be loaded; install it (Debian and Ubuntu: ocl-icd-libopencl1) and a driver";
    let test = "loading::no_loader";
    assert!(says(test, "LD_LIBRARY_PATH", folder.path(), expected));
}

#[test]
fn a_loader_that_is_too_old() {
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (
        folder.path().join("old.c"),
        folder.path().join("libOpenCL.so.1"),
    );
    fs::write(&source, "int clGetPlatformIDs(void) { return -1001; }\n").unwrap();
    let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
    let compiled = compiler
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source]);
    assert!(compiled.status().unwrap().success());
    let expected =
        "OpenCL's loader has no clGetPlatformInfo: it is older than OpenCL 1.2, update it";
    let test = "loading::a_loader_that_is_too_old";
    assert!(says(test, "LD_LIBRARY_PATH", folder.path(), expected));
}

#[test]
fn no_driver() {
    let folder = tempfile::tempdir().unwrap();
    let expected = "OpenCL's loader finds no driver; install the GPU's, or one for CPUs";
    // Of Debian's loader, and of Khronos's.
    let is_said = says(
        "loading::no_driver",
        "OCL_ICD_VENDORS",
        folder.path(),
        expected,
    );
    assert!(is_said || !is_required(REQUIRED), "there is no loader");
}
