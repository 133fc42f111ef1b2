//! Which library is the driver: in processes of their own.

use std::path::Path;

use arrow_device::{Devices, Error};

use crate::fake::child::{build, folder, with_libraries};
use crate::support::{assert_same_batch, wide_batch};

/// As the toolkit's: it has all functions, and each returns CUDA_ERROR_STUB_LIBRARY.
const STUB: &str = "
#define STUB(name) int name(void) { return 34; }
STUB(cuInit) STUB(cuDeviceGetCount) STUB(cuDriverGetVersion) STUB(cuThreadExchangeStreamCaptureMode)
STUB(cuCtxSynchronize) STUB(cuStreamCreate) STUB(cuStreamDestroy_v2) STUB(cuStreamSynchronize)
STUB(cuStreamQuery) STUB(cuStreamIsCapturing) STUB(cuStreamWaitEvent) STUB(cuEventCreate)
STUB(cuEventDestroy_v2) STUB(cuEventRecord) STUB(cuEventQuery) STUB(cuEventSynchronize)
STUB(cuMemPoolCreate) STUB(cuMemPoolDestroy) STUB(cuMemPoolSetAttribute) STUB(cuMemPoolTrimTo)
STUB(cuMemAllocFromPoolAsync) STUB(cuMemFreeAsync) STUB(cuMemAlloc_v2) STUB(cuMemFree_v2)
STUB(cuMemHostAlloc) STUB(cuMemFreeHost) STUB(cuMemsetD8Async) STUB(cuDeviceGet)
STUB(cuDeviceGetAttribute) STUB(cuDevicePrimaryCtxRetain) STUB(cuDevicePrimaryCtxRelease_v2)
STUB(cuCtxPushCurrent_v2) STUB(cuCtxPopCurrent_v2) STUB(cuStreamGetCtx) STUB(cuMemAllocManaged)
STUB(cuPointerGetAttributes) STUB(cuMemcpyAsync) STUB(cuMemcpyPeerAsync) STUB(cuLaunchHostFunc)
STUB(cuGetErrorName) STUB(cuGetErrorString) STUB(cuMemGetAddressRange_v2)
";

/// Puts the stub into a folder, as `libcuda.so`, with the SONAME that the toolkit's has.
fn stub(folder: &Path) {
    build(folder, "libcuda.so", STUB, &["-Wl,-soname,libcuda.so.1"]);
}

/// Puts the stand-in into a folder, as the driver installs its library.
fn driver(folder: &Path) {
    let stand_in = std::env::current_exe()
        .unwrap()
        .with_file_name("libcuda_fake.so");
    std::os::unix::fs::symlink(stand_in, folder.join("libcuda.so.1")).unwrap();
}

/// Nothing is loaded yet: the name that the driver has comes first.
#[test]
fn the_driver_is_found_beside_the_stub() {
    if folder().is_some() {
        let device = Devices::open("cuda:0").unwrap();
        let batch = wide_batch(4, 100);
        let up = device.upload(&batch).unwrap();
        assert_same_batch(&batch, &up.to_host().unwrap(), "beside the stub");
        return;
    }
    let both = tempfile::tempdir().unwrap();
    stub(both.path());
    driver(both.path());
    with_libraries("loading::the_driver_is_found_beside_the_stub", both.path());
}

/// What the process has loaded comes before what the path has.
#[test]
fn the_library_that_is_loaded_comes_first() {
    if let Some(folder) = folder() {
        // SAFETY: the library has no initialisers.
        let stub = unsafe { libloading::Library::new(folder.join("libcuda.so")) }.unwrap();
        let e = Devices::open("cuda:0").unwrap_err();
        assert!(matches!(e, Error::DeviceNotAvailable { .. }), "{e:?}");
        for part in ["stub library", "code 34", "remove"] {
            assert!(e.to_string().contains(part), "{e}");
        }
        drop(stub);
        return;
    }
    let both = tempfile::tempdir().unwrap();
    stub(both.path());
    driver(both.path());
    with_libraries(
        "loading::the_library_that_is_loaded_comes_first",
        both.path(),
    );
}
