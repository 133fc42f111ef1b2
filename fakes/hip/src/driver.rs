//! The CUDA driver library and its functions.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::errors;
use crate::ffi::*;

/// `hipHostFn_t` and `CUhostFn`.
pub(crate) type HostFn = Option<unsafe extern "C" fn(*mut c_void)>;

macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        /// The driver's functions, by their own names; null where it lacks one.
        pub(crate) struct Driver {
            $($name: Option<unsafe extern "C" fn($($type),*) -> Code>,)*
            /// Stays loaded.
            _library: Library,
        }

        impl Driver {
            fn new(library: Library) -> Self {
                Self {
                    // SAFETY: the function has this type in all CUDA drivers that have the name;
                    // the library stays loaded with the pointer beside it.
                    $($name: unsafe { library.get(stringify!($name)) }.ok().map(|found| *found),)*
                    _library: library,
                }
            }

            $(
                /// # Safety
                /// What CUDA asks of the arguments: pointers are valid for what is read and
                /// written.
                #[allow(clippy::too_many_arguments)]
                pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> Outcome {
                    let function = self.$name.ok_or(NOT_SUPPORTED)?;
                    // SAFETY: the caller guarantees valid arguments (see `# Safety`).
                    match unsafe { function($($arg),*) } {
                        0 => Ok(()),
                        code => Err(errors::of_cuda(code)),
                    }
                }
            )*
        }
    };
}

functions! {
    cuInit(flags: c_uint);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int);
    cuDevicePrimaryCtxRelease_v2(device: c_int);
    cuCtxPushCurrent_v2(context: Handle);
    cuCtxPopCurrent_v2(context: *mut Handle);
    cuCtxGetDevice(device: *mut c_int);
    cuCtxSynchronize();
    cuStreamCreate(stream: *mut Handle, flags: c_uint);
    cuStreamDestroy_v2(stream: Handle);
    cuStreamSynchronize(stream: Handle);
    cuStreamQuery(stream: Handle);
    cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint);
    cuStreamGetCtx(stream: Handle, context: *mut Handle);
    cuStreamIsCapturing(stream: Handle, status: *mut c_int);
    cuStreamBeginCapture_v2(stream: Handle, mode: c_int);
    cuStreamEndCapture(stream: Handle, graph: *mut Handle);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
    cuLaunchHostFunc(stream: Handle, function: HostFn, data: *mut c_void);
    cuEventCreate(event: *mut Handle, flags: c_uint);
    cuEventDestroy_v2(event: Handle);
    cuEventRecord(event: Handle, stream: Handle);
    cuEventQuery(event: Handle);
    cuEventSynchronize(event: Handle);
    cuMemAlloc_v2(pointer: *mut Address, bytes: usize);
    cuMemFree_v2(pointer: Address);
    cuMemHostAlloc(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemAllocManaged(pointer: *mut Address, bytes: usize, flags: c_uint);
    cuMemFreeHost(pointer: *mut c_void);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemGetAddressRange_v2(start: *mut Address, bytes: *mut usize, pointer: Address);
    cuMemPoolCreate(pool: *mut Handle, properties: *const c_void);
    cuMemPoolDestroy(pool: Handle);
    cuMemPoolSetAttribute(pool: Handle, attribute: c_int, value: *mut c_void);
    cuMemPoolTrimTo(pool: Handle, kept_bytes: usize);
    cuMemAllocFromPoolAsync(pointer: *mut Address, bytes: usize, pool: Handle, stream: Handle);
    cuMemFreeAsync(pointer: Address, stream: Handle);
    cuPointerGetAttributes(count: c_uint, names: *const c_int, values: *const *mut c_void,
        pointer: Address);
    cuMemcpyAsync(target: Address, source: Address, bytes: usize, stream: Handle);
    cuMemcpyPeerAsync(target: Address, target_context: Handle, source: Address,
        source_context: Handle, bytes: usize, stream: Handle);
    cuMemsetD8Async(target: Address, value: u8, bytes: usize, stream: Handle);
    cuModuleLoadData(module: *mut Handle, image: *const c_void);
    cuModuleUnload(module: Handle);
    cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
    cuLaunchKernel(function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint, shared_bytes: c_uint, stream: Handle,
        parameters: *mut *mut c_void, extra: *mut *mut c_void);
}

/// For `dlopen` of Linux: only what is loaded already.
const RTLD_NOLOAD: c_int = 4;

/// The driver, initialised at the first call.
pub(crate) fn driver() -> Outcome<&'static Driver> {
    static DRIVER: OnceLock<Option<Driver>> = OnceLock::new();
    let driver = DRIVER.get_or_init(|| {
        let names = ["libcuda.so.1", "libcuda.so"];
        // One that is loaded is found by its SONAME; the stand-in's is the second.
        let loaded = names.into_iter().find_map(|name| {
            use libloading::os::unix::{Library, RTLD_LAZY};
            // SAFETY: nothing is loaded, so no initialiser runs.
            unsafe { Library::open(Some(name), RTLD_LAZY | RTLD_NOLOAD) }.ok()
        });
        let open = || {
            names.into_iter().find_map(|name| {
                // SAFETY: the initialisers of a library of this name are the driver's or the
                // stand-in's.
                unsafe { Library::new(name) }.ok()
            })
        };
        let found = loaded.map(Library::from).or_else(open);
        let driver = Driver::new(found?);
        // SAFETY: the function takes no pointers.
        let initialised = unsafe { driver.cuInit(0) };
        initialised.is_ok().then_some(driver)
    });
    driver.as_ref().ok_or(NO_DEVICE)
}
