//! What is said where OpenCL is not, or not all of it: in processes of their own, which find another loader or none.

use std::fs;
use std::path::Path;
use std::process::Command;

use arrow_device::Devices;
use arrow_device_opencl::{devices, register};

/// Returns what this test finds with a variable set. In the process in which it is, that is printed, and `None` returned.
#[track_caller]
fn found(test: &str, variable: &str, value: &Path) -> Option<String> {
    const FINDS: &str = "ARROW_DEVICE_TEST_FINDS";
    if std::env::var_os(FINDS).is_some() {
        register(Devices::global());
        let open = || Devices::open("opencl:0").map_err(|e| e.to_string());
        let list = || devices().map_err(|e| e.to_string());
        println!(
            "\nopened: {:?}\nagain: {:?}\nlisted: {:?}",
            open(),
            open(),
            list()
        );
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]);
    command
        .env_remove("OCL_ICD_FILENAMES")
        .env_remove("OCL_ICD_VENDORS");
    let output = command
        .env(variable, value)
        .env(FINDS, "1")
        .output()
        .unwrap();
    let both = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&both).into_owned();
    assert!(output.status.success(), "{text}");
    Some(text)
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
    let Some(text) = found("loading::no_loader", "LD_LIBRARY_PATH", folder.path()) else {
        return;
    };
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
    let Some(text) = found(
        "loading::a_loader_that_is_too_old",
        "LD_LIBRARY_PATH",
        folder.path(),
    ) else {
        return;
    };
    assert_says(
        &text,
        "OpenCL's loader has no clGetPlatformInfo: it is older than OpenCL 1.2, update it",
    );
}

#[test]
fn no_driver() {
    let folder = tempfile::tempdir().unwrap();
    // Of Debian's loader, and of Khronos's.
    let Some(text) = found("loading::no_driver", "OCL_ICD_VENDORS", folder.path()) else {
        return;
    };
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
