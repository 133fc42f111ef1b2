//! Without a driver, and other environments: in processes of their own.

use std::process::Command;
use std::ptr::null_mut;

use crate::hip::*;

/// Runs one test of this binary in a process of its own.
fn child(test: &str, variable: &str, value: &std::ffi::OsStr) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--test-threads=1"]);
    let output = command.env("HIP_ON_CUDA_CHILD", test).env(variable, value);
    let output = output.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

fn is_child(test: &str) -> bool {
    std::env::var_os("HIP_ON_CUDA_CHILD").is_some_and(|child| child == *test)
}

#[test]
fn without_a_driver_there_is_no_device() {
    child(
        "no_driver::child_whose_driver_finds_nothing",
        "FAKE_CUDA_INIT",
        "100".as_ref(),
    );
    // Not the machine's own driver, if it has one.
    let nothing = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(nothing.path().join(name), "").unwrap();
    }
    child(
        "no_driver::child_without_a_driver_library",
        "LD_LIBRARY_PATH",
        nothing.path().as_os_str(),
    );
}

fn answers_of_nothing() {
    let mut count = 7;
    assert_eq!(hipGetDeviceCount(&mut count), 100);
    assert_eq!(count, 0);
    assert_eq!(hipGetLastError(), 100);
    let mut other = -7;
    let mut ptr = null_mut();
    let answers = [
        hipInit(0),
        hipRuntimeGetVersion(&mut other),
        hipGetDevice(&mut other),
        hipSetDevice(0),
        hipDeviceGetAttribute(&mut other, 85, 0),
        hipThreadExchangeStreamCaptureMode(&mut other),
        hipStreamGetDevice(null_mut(), &mut other),
        hipDeviceSynchronize(),
        hipMalloc(&mut ptr, 8),
        hipFree(null_mut()),
        hipEventCreateWithFlags(&mut ptr, 0xFFFF_FFFF),
        hipStreamQuery(null_mut()),
    ];
    assert_eq!(answers, [100; 12]);
    assert_eq!((other, ptr), (-7, null_mut()));
    assert_eq!(hip_on_cuda_release(0), -1);
    assert_eq!((hipGetLastError(), hipGetLastError()), (100, 0));
}

#[test]
fn child_whose_driver_finds_nothing() {
    if is_child("no_driver::child_whose_driver_finds_nothing") {
        answers_of_nothing();
    }
}

#[test]
fn child_without_a_driver_library() {
    if is_child("no_driver::child_without_a_driver_library") {
        library(true);
        answers_of_nothing();
    }
}

/// A driver that has almost nothing, and of the batch copies the first form.
const POOR_DRIVER: &str = "
int cuInit(unsigned flags) { return flags; }
int cuDevicePrimaryCtxRetain(void **ctx, int dev) { *ctx = (void *)8; return dev; }
int cuCtxPushCurrent_v2(void *ctx) { return ctx != (void *)8; }
int cuCtxPopCurrent_v2(void **ctx) { *ctx = (void *)8; return 0; }
int cuMemcpyBatchAsync(void *d, void *s, void *n, unsigned long count, void *a, void *i,
                       unsigned long attributes, unsigned long *failed, void *stream) {
    *failed = count * 10 + attributes;
    return stream == 0 ? 1 : 0;
}
";

#[test]
fn what_a_driver_lacks_is_not_supported() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("poor.c");
    std::fs::write(&source, POOR_DRIVER).unwrap();
    // Under the second name; the first one does not load.
    std::fs::write(dir.path().join("libcuda.so.1"), "").unwrap();
    let mut compiler = Command::new("cc"); // rustc has it for its linker
    compiler.args(["-shared", "-fPIC", "-o"]);
    let compiled = compiler.args([&dir.path().join("libcuda.so"), &source]);
    assert!(compiled.status().unwrap().success());
    child(
        "no_driver::child_with_a_poor_driver",
        "LD_LIBRARY_PATH",
        dir.path().as_os_str(),
    );
}

#[test]
fn child_with_a_poor_driver() {
    if !is_child("no_driver::child_with_a_poor_driver") {
        return;
    }
    library(true);
    assert_eq!(hipInit(0), 0);
    let mut count = 7;
    assert_eq!(hipGetDeviceCount(&mut count), 801);
    assert_eq!(count, 0);
    assert_eq!(hipDeviceSynchronize(), 801);
    assert_eq!(hipGetLastError(), 801);
    let batch = |failed: &mut usize, stream| {
        let (lists, sizes) = (null_mut(), null_mut());
        let (attributes, starts) = (null_mut(), null_mut());
        hipMemcpyBatchAsync(
            lists, lists, sizes, 4, attributes, starts, 0, failed, stream,
        )
    };
    let mut failed = 0;
    assert_eq!(batch(&mut failed, null_mut()), 1);
    assert_eq!(
        failed, 41,
        "the driver's own, with attributes as CUDA wants them"
    );
    assert_eq!(batch(&mut failed, 8 as Ptr), 0);
}

#[test]
fn the_environment_is_read() {
    let run = |test, variable, value: &str| child(test, variable, value.as_ref());
    run(
        "no_driver::child_of_hip_5",
        "HIP_ON_CUDA_VERSION",
        "50221153",
    );
    run("no_driver::child_without_devices", "FAKE_CUDA_COUNT", "0");
    run("no_driver::child_with_one_device", "FAKE_CUDA_COUNT", "1");
}

#[test]
fn child_of_hip_5() {
    if !is_child("no_driver::child_of_hip_5") {
        return;
    }
    let mut version = 0;
    assert_eq!(hipRuntimeGetVersion(&mut version), 0);
    assert_eq!(version, 50221153);
    assert_eq!(hip_on_cuda_version(60032830), 50221153);
    assert_eq!(hip_on_cuda_version(0), 60032830);
    assert_eq!(hipRuntimeGetVersion(&mut version), 0);
    assert_eq!(version, 50221153, "the default of this process");
}

#[test]
fn child_without_devices() {
    if !is_child("no_driver::child_without_devices") {
        return;
    }
    let mut count = 7;
    assert_eq!(hipGetDeviceCount(&mut count), 100);
    assert_eq!(count, 0);
    assert_eq!(hipSetDevice(0), 101);
}

#[test]
fn child_with_one_device() {
    if !is_child("no_driver::child_with_one_device") {
        return;
    }
    let mut count = 0;
    assert_eq!(hipGetDeviceCount(&mut count), 0);
    assert_eq!((count, hipSetDevice(0), hipSetDevice(1)), (1, 0, 101));
}
