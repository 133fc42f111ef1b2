//! The real loader.

use std::sync::OnceLock;

use libloading::Library;

/// Names with a path: the bare name is that of this library.
const PATHS: &[&str] = &[
    "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
    "/usr/lib/aarch64-linux-gnu/libOpenCL.so.1",
    "/usr/lib64/libOpenCL.so.1",
    "/usr/lib/libOpenCL.so.1",
];

/// Returns the real loader: the one that `ARROW_DEVICE_REAL_OPENCL` names, or that of the system. Ends the process if there is
/// none, since a function of C has no other way to say so.
pub(crate) fn library() -> &'static Library {
    static REAL: OnceLock<Library> = OnceLock::new();
    REAL.get_or_init(|| {
        let named = std::env::var("ARROW_DEVICE_REAL_OPENCL").ok();
        let paths = named
            .iter()
            .map(String::as_str)
            .chain(PATHS.iter().copied());
        // SAFETY: libraries of these names are OpenCL's loader, whose initialisation asks nothing of its user.
        let loaded = paths
            .into_iter()
            .find_map(|path| unsafe { Library::new(path) }.ok());
        loaded.unwrap_or_else(|| {
            eprintln!("no OpenCL loader at {PATHS:?}; name one in ARROW_DEVICE_REAL_OPENCL");
            std::process::abort()
        })
    })
}

/// Returns a function of the real loader by its name, which ends with NUL.
///
/// # Safety
/// The function has the type `T`, an option of a function pointer.
pub(crate) unsafe fn function<T: Copy>(name: &str) -> T {
    // SAFETY: the caller guarantees the type.
    let found = unsafe { library().get::<T>(name.as_bytes()) };
    *found.unwrap_or_else(|_| absent(name))
}

pub(crate) fn absent(name: &str) -> ! {
    eprintln!("the OpenCL loader has no {name}");
    std::process::abort()
}

/// The function of the real loader, of the type that opencl-sys declares for it. To be used in an `unsafe` block.
macro_rules! real {
    ($name:ident: $type:ty) => {{
        let name = concat!(stringify!($name), "\0");
        $crate::real::function::<$type>(name).unwrap_or_else(|| $crate::real::absent(name))
    }};
}
pub(crate) use real;
