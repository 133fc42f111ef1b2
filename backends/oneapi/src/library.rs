//! SYCL's library and this crate's own over it, loaded at run time.
//!
//! The own library (`cpp/`) is compiled when the crate is, and its bytes are part of the crate: nothing has to be installed beside
//! a program. It is loaded from a file in memory, and needs SYCL's library by name, which is found, in this order,
//! - where the program has it loaded already, or where the system looks for libraries (`LD_LIBRARY_PATH`, `ldconfig`),
//! - in the folder `lib` of the places where the build looks for headers, with the environment of the run.
//!
//! If `ARROW_DEVICE_SYCL` is set, only what is loaded already comes before that folder.

use libloading::Library;

/// Loads the C interface over SYCL. Both libraries stay loaded.
#[cfg(sycl)]
pub(crate) fn load() -> Result<Library, String> {
    use std::env;

    let shim = shim()?;
    let open = |path: &str, flags| {
        // SAFETY: the constructors of SYCL's library, which these load, rely on nothing of the caller's.
        unsafe { libloading::os::unix::Library::open(Some(path), flags) }
    };
    let keep = |library: libloading::os::unix::Library| std::mem::forget(library);
    let now = libc::RTLD_NOW | libc::RTLD_LOCAL;

    // A second copy of SYCL in a process has devices and contexts of its own.
    let loaded = open(SONAME, now | libc::RTLD_NOLOAD);
    let is_chosen = env::var_os("ARROW_DEVICE_SYCL").is_some();
    if let Ok(library) = loaded {
        keep(library);
    } else {
        let mut why = Vec::new();
        let system = (!is_chosen).then(|| SONAME.to_owned());
        let beside = roots()
            .into_iter()
            .map(|root| root.join("lib").join(SONAME).display().to_string());
        let mut places = system.into_iter().chain(beside);
        let found = places.find_map(|path| open(&path, now).map_err(|e| why.push(text(&e))).ok());
        keep(found.ok_or_else(|| {
            format!(
                "SYCL's library {SONAME} cannot be loaded; install intel-sycl-rt or oneAPI, and set LD_LIBRARY_PATH to its folder \
                 or ARROW_DEVICE_SYCL to the installation ({})",
                why.join("; ")
            )
        })?);
    }
    let library = open(&shim, now);
    let library = library
        .map(Library::from)
        .map_err(|e| format!("the library {SONAME} does not fit this crate: {}", text(&e)))?;
    check_version(&library).map_err(|found| {
        format!("the loader has returned another library than this crate's at {shim} (ad_version: {found}); report this")
    })?;
    Ok(library)
}

/// Checks that this is the library that was made together with this crate.
#[cfg(sycl)]
fn check_version(library: &Library) -> Result<(), String> {
    // SAFETY: whichever of this crate's libraries it is, the function has this type, and reads nothing.
    let version = unsafe {
        let ask = library.get::<unsafe extern "C" fn() -> u64>(b"ad_version\0");
        ask.map_err(|e| text(&e))?()
    };
    match version.to_string() == env!("ARROW_DEVICE_SYCL_VERSION") {
        true => Ok(()),
        false => Err(version.to_string()),
    }
}

/// Says what is missing.
#[cfg(not(sycl))]
pub(crate) fn load() -> Result<Library, String> {
    let linux = cfg!(all(target_os = "linux", target_pointer_width = "64"));
    Err(match linux {
        true => {
            "arrow-device-oneapi was built without SYCL, whose headers were not found; install intel-sycl-rt or oneAPI, set \
             ARROW_DEVICE_SYCL to the folder with its `include` and `lib`, and build the program again"
        }
        false => "arrow-device-oneapi supports SYCL on 64-bit Linux only",
    }
    .into())
}

#[cfg(sycl)]
const SONAME: &str = env!("ARROW_DEVICE_SYCL_SONAME");

/// Libloading's own text leaves out the system's.
#[cfg(sycl)]
fn text(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// The own library as a file in memory, which stays open: the loader takes a path for one that it has loaded, and no other file may get
/// the path of this one.
#[cfg(sycl)]
fn shim() -> Result<String, String> {
    use std::io::{Error, Write};
    use std::os::fd::{FromRawFd, IntoRawFd};

    const BYTES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/shim.so"));
    // SAFETY: the name is a text that ends with NUL.
    let descriptor =
        unsafe { libc::memfd_create(c"arrow-device-oneapi".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(format!("memfd_create failed: {}", Error::last_os_error()));
    }
    // SAFETY: the descriptor is new, and nobody else owns it.
    let mut file = unsafe { std::fs::File::from_raw_fd(descriptor) };
    file.write_all(BYTES)
        .map_err(|e| format!("a file in memory cannot be written: {e}"))?;
    Ok(format!("/proc/self/fd/{}", file.into_raw_fd()))
}

#[cfg(sycl)]
mod places {
    use std::env;
    use std::path::{Path, PathBuf};

    include!("places.rs");

    pub(super) fn all() -> Vec<PathBuf> {
        roots()
    }
}

#[cfg(sycl)]
use places::all as roots;
