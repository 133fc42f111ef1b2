//! Other versions of HIP, and libraries that are not as they should be: in processes of their own.

use std::path::Path;

use arrow_device::{Devices, Error, Queue};

use crate::fake::child::{build, child, folder, with_libraries};

/// HIP 5 numbers its types of memory otherwise, and calls it an error to be asked about ordinary memory.
#[test]
fn the_numbers_of_each_version() {
    for version in ["50422804", "60342134"] {
        let tests = [
            "imports::",
            "gpu_suite::foreign",
            "own::the_threads",
            "transfer::structs",
        ];
        child(&tests, "test result: ok. 8 passed", |command| {
            command.env("HIP_ON_CUDA_VERSION", version);
        });
    }
}

/// A HIP of which nothing works but what opens a device, and which lacks what came after 5.2.
const POOR: &str = r#"
#ifndef VERSION
#define VERSION 50221153
#endif
#define STUB(name) int name(void) { return 0; }
static _Thread_local int current;
int hipRuntimeGetVersion(int *version) { *version = VERSION; return 0; }
int hipGetDeviceCount(int *count) { *count = 2; return 0; }
int hipGetDevice(int *ordinal) { *ordinal = current; return 0; }
int hipSetDevice(int ordinal) { current = ordinal; return 0; }
#ifdef POOLS
int hipDeviceGetAttribute(int *value, int attribute, int ordinal) { *value = attribute == 88; return 0; }
#else
int hipDeviceGetAttribute(int *value, int attribute, int ordinal) { *value = 0; return 0; }
#endif
int hipMallocFromPoolAsync(void **ptr, unsigned long bytes, void *pool, void *stream) { *ptr = 0; return 0; }
int hipStreamCreateWithFlags(void **stream, unsigned flags) { *stream = (void *)4096; return flags != 1; }
int hipStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int hipMalloc(void **ptr, unsigned long bytes) { *ptr = 0; return 2; }
const char *hipGetErrorName(int code) { return code == 2 ? "hipErrorOutOfMemory" : "hipErrorUnknown"; }
const char *hipGetErrorString(int code) { return 0; }
STUB(hipDeviceSynchronize) STUB(hipStreamDestroy) STUB(hipStreamSynchronize) STUB(hipStreamQuery)
STUB(hipStreamWaitEvent) STUB(hipThreadExchangeStreamCaptureMode) STUB(hipEventCreateWithFlags)
STUB(hipEventDestroy) STUB(hipEventRecord) STUB(hipEventQuery) STUB(hipEventSynchronize)
STUB(hipMemPoolCreate) STUB(hipMemPoolDestroy) STUB(hipMemPoolSetAttribute) STUB(hipMemPoolTrimTo)
STUB(hipFree) STUB(hipHostMalloc) STUB(hipHostFree)
STUB(hipPointerGetAttributes) STUB(hipMemcpyAsync) STUB(hipMemcpyPeerAsync) STUB(hipMemsetD8Async)
STUB(hipGetLastError) STUB(hipPeekAtLastError) STUB(hipMemGetAddressRange)
STUB(hipMallocManaged)
#ifndef OLDER
STUB(hipFreeAsync)
#endif
"#;

/// Builds the poor library in a folder, under a file's name.
fn build_poor(folder: &Path, file: &str, options: &[&str]) {
    build(folder, file, POOR, options);
}

/// Files that are no libraries, under names of HIP's: the machine's own are not found then.
fn nothing(folder: &Path, ends: &[&str]) {
    for end in ends {
        std::fs::write(folder.join(format!("libamdhip64.so{end}")), "").unwrap();
    }
}

#[track_caller]
fn absent(name: &str, parts: &[&str]) {
    let e = Devices::open(name).unwrap_err();
    assert!(matches!(e, Error::DeviceNotAvailable { .. }), "{e:?}");
    let text = e.to_string();
    for part in [name].iter().chain(parts) {
        assert!(text.contains(part), "{text} lacks {part}");
    }
}

#[test]
fn no_library() {
    if folder().is_some() {
        let first = "libamdhip64.so.7";
        absent("rocm:0", &["cannot be loaded", "install ROCm", first]);
        absent("rocm-host:0", &["install ROCm"]);
        let e = arrow_device::rocm::device_count().unwrap_err();
        assert!(e.to_string().contains("install ROCm"), "{e}");
        let e = Devices::gpu().unwrap_err().to_string();
        assert!(e.contains("no GPU") && e.contains("install ROCm"), "{e}");
        return;
    }
    let none = tempfile::tempdir().unwrap();
    nothing(none.path(), &[".7", ".6", ".5", ""]);
    with_libraries("versions::no_library", none.path());
}

#[test]
fn a_library_that_is_too_old() {
    if folder().is_some() {
        return absent("rocm:0", &["has no hipFreeAsync", "older than 5.2"]);
    }
    let old = tempfile::tempdir().unwrap();
    build_poor(old.path(), "libamdhip64.so.7", &["-DOLDER"]);
    nothing(old.path(), &[".6", ".5", ""]);
    with_libraries("versions::a_library_that_is_too_old", old.path());
}

/// A library of 5.2, which does not tell whose a stream is.
#[test]
fn a_library_of_5_2() {
    if folder().is_some() {
        absent("rocm:2", &["there are 2 ROCm devices, 0 to 1"]);
        let device = Devices::open("rocm:1").unwrap();
        assert!(format!("{:?}", device.backend()).contains("HIP 50221153"));
        // SAFETY: this library cannot tell whose a stream is, and refuses the allocation below
        // before the stream is used.
        let queue = unsafe { Queue::from_hip_stream(&device, 8192 as *mut _, Box::new(())) };
        let queue = queue.unwrap();
        let e = arrow_device::DeviceBufferMut::allocate(&queue, 64).unwrap_err();
        let text = e.to_string();
        assert!(matches!(e, Error::OutOfMemory { .. }), "{text}");
        assert!(text.contains("hipMalloc"), "{text}");
        return;
    }
    let poor = tempfile::tempdir().unwrap();
    build_poor(poor.path(), "libamdhip64.so.5", &[]);
    nothing(poor.path(), &[".7", ".6"]);
    with_libraries("versions::a_library_of_5_2", poor.path());
}

/// HIP 5.2 answers 0 where its pool has no memory, and null.
#[test]
fn a_pool_that_gives_nothing() {
    if folder().is_some() {
        let device = Devices::open("rocm:0").unwrap();
        let queue = device.default_queue();
        let e = arrow_device::DeviceBufferMut::allocate(&queue, 64).unwrap_err();
        assert!(matches!(e, Error::OutOfMemory { .. }), "{e}");
        assert!(e.to_string().contains("hipMallocFromPoolAsync"), "{e}");
        return;
    }
    let poor = tempfile::tempdir().unwrap();
    build_poor(poor.path(), "libamdhip64.so.7", &["-DPOOLS"]);
    with_libraries("versions::a_pool_that_gives_nothing", poor.path());
}

/// Two runtimes in one process would not know of each other's memory.
#[test]
fn the_library_that_is_loaded_comes_first() {
    if let Some(folder) = folder() {
        // SAFETY: the library has no initialisers.
        let loaded = unsafe { libloading::Library::new(folder.join("theirs.so")) }.unwrap();
        let device = Devices::open("rocm:0").unwrap();
        assert!(format!("{:?}", device.backend()).contains("HIP 50221153"));
        drop(loaded);
        return;
    }
    let two = tempfile::tempdir().unwrap();
    let soname = "-Wl,-soname,libamdhip64.so.5";
    build_poor(two.path(), "theirs.so", &[soname]);
    // A newer one, which would be found by its name.
    build_poor(two.path(), "libamdhip64.so.7", &["-DVERSION=70125405"]);
    with_libraries(
        "versions::the_library_that_is_loaded_comes_first",
        two.path(),
    );
}
