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
    use std::mem::forget;

    use libloading::os::unix::Library as System;

    const SONAME: &str = env!("ARROW_DEVICE_SYCL_SONAME");
    let open = |path: &str, flags| {
        // SAFETY: the constructors of SYCL's library, which these load, rely on nothing of the caller's.
        unsafe { System::open(Some(path), flags | libc::RTLD_NOW | libc::RTLD_LOCAL) }
    };

    // A second copy of SYCL in a process has devices and contexts of its own.
    if let Ok(library) = open(SONAME, libc::RTLD_NOLOAD) {
        forget(library);
    } else {
        let mut why = Vec::new();
        let is_chosen = env::var_os("ARROW_DEVICE_SYCL").is_some();
        let system = (!is_chosen).then(|| SONAME.to_owned());
        let beside = places::roots()
            .into_iter()
            .map(|root| root.join("lib").join(SONAME).display().to_string());
        let mut paths = system.into_iter().chain(beside);
        let found = paths.find_map(|path| open(&path, 0).map_err(|e| why.push(text(&e))).ok());
        forget(found.ok_or_else(|| {
            format!(
                "SYCL's library {SONAME} cannot be loaded; install intel-sycl-rt or oneAPI, and set LD_LIBRARY_PATH to its folder \
                 or ARROW_DEVICE_SYCL to the installation ({})",
                why.join("; ")
            )
        })?);
    }
    let path = in_memory(include_bytes!(concat!(env!("OUT_DIR"), "/shim.so")))?;
    if let Ok(other) = open(&path, libc::RTLD_NOLOAD) {
        forget(other);
        return Err(format!(
            "the loader takes {path} for another library, whose file was closed; close no files of others"
        ));
    }
    let library = open(&path, 0);
    library
        .map(Library::from)
        .map_err(|e| format!("the library {SONAME} does not fit this crate: {}", text(&e)))
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

/// Libloading's own text leaves out the system's.
#[cfg(sycl)]
fn text(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the path of a file in memory, which stays open: the loader takes a path for one that it has loaded, so no other file may get
/// this one.
#[cfg(sycl)]
fn in_memory(bytes: &[u8]) -> Result<String, String> {
    use std::io::{Error, Write};
    use std::os::fd::{FromRawFd, IntoRawFd};

    // SAFETY: the name is a text that ends with NUL.
    let descriptor =
        unsafe { libc::memfd_create(c"arrow-device-oneapi".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(format!("memfd_create failed: {}", Error::last_os_error()));
    }
    // SAFETY: the descriptor is new, and nobody else owns it.
    let mut file = unsafe { std::fs::File::from_raw_fd(descriptor) };
    file.write_all(bytes)
        .map_err(|e| format!("a file in memory cannot be written: {e}"))?;
    // With the number of the process debuggers find the file too: `self` would be theirs.
    let process = std::process::id();
    Ok(format!("/proc/{process}/fd/{}", file.into_raw_fd()))
}

#[cfg(sycl)]
mod places {
    use std::env;
    use std::path::{Path, PathBuf};

    include!("places.rs");
}
