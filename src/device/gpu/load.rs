//! A vendor's library, loaded at run time.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int};
use std::mem::ManuallyDrop;

use super::api::Failed;
use super::runtime::Library;
use crate::abi::ArrowDeviceType;
use crate::device::{DeviceId, FORKED};
use crate::error::{Error, Result};

/// Returns a vendor's library, and how many devices it has.
fn counted<L: Library>(id: DeviceId) -> Result<(&'static L, c_int)> {
    let library = L::get().map_err(|why| absent(id, why))?;
    if !library.process().is_this() {
        return Err(absent(id, FORKED));
    }
    let mut count = 0;
    // SAFETY: `count` is valid for the write of an int.
    let counted = library.quietly(|| unsafe { library.calls().count_devices(&raw mut count) });
    counted.map_err(|Failed { call, code }| {
        let text = library.text(code);
        absent(id, format!("{call} failed: {text} (code {code})"))
    })?;
    Ok((library, count))
}

/// Returns the number of a vendor's devices, of which `device_type` is one type.
pub(crate) fn device_count<L: Library>(device_type: ArrowDeviceType) -> Result<usize> {
    let (_, count) = counted::<L>(DeviceId::new(device_type, 0))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Returns a vendor's library, and the number that the device has there.
pub(crate) fn find<L: Library>(id: DeviceId) -> Result<(&'static L, c_int)> {
    let (library, count) = counted::<L>(id)?;
    let ordinal = c_int::try_from(id.id).ok();
    if let Some(ordinal) = ordinal.filter(|n| (0..count).contains(n)) {
        return Ok((library, ordinal));
    }
    let vendor = L::VENDOR;
    let reason = match count {
        0 => format!("there is no {vendor} device"),
        1 => format!("there is one {vendor} device, 0"),
        n => format!("there are {n} {vendor} devices, 0 to {}", n - 1),
    };
    Err(absent(id, reason))
}

/// Returns [`Error::DeviceNotAvailable`].
pub(crate) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into().into(),
    }
}

/// Joins a library's name and text for a code, which are null if it does not know the code.
///
/// # Safety
/// Each pointer is null or points to a text that ends with NUL and stays as it is during the call.
pub(crate) unsafe fn text(name: *const c_char, text: *const c_char) -> String {
    let read = |text: *const c_char| {
        // SAFETY: the pointer is not null, so the caller guarantees a text that ends with NUL (see
        // `# Safety`).
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
    };
    match (read(name), read(text)) {
        // HIP 5 has no texts and repeats the name.
        (Some(name), Some(text)) if name != text => format!("{name}: {text}"),
        (Some(name), _) => name.into_owned(),
        _ => "a code that the library does not name".into(),
    }
}

/// Returns the first of these libraries that the process has loaded already, under this name or
/// with this SONAME.
fn loaded(names: &[&str]) -> Option<libloading::Library> {
    #[cfg(all(unix, not(target_os = "aix")))]
    for name in names {
        use libloading::os::unix::{Library, RTLD_LAZY};
        // SAFETY: with `RTLD_NOLOAD` nothing is loaded, so no initialiser runs.
        if let Ok(library) = unsafe { Library::open(Some(*name), RTLD_LAZY | libc::RTLD_NOLOAD) } {
            return Some(library.into());
        }
    }
    let _ = names;
    None
}

/// Returns the library that the process has loaded already, or else the first that can be opened
/// and passes the check. Beside one that is loaded no other is tried: it would not know the
/// memory, streams and events that the process has from the first.
///
/// All that are opened stay loaded, even if they are refused: they may have started threads. An
/// error is the reason of the last one that could be opened and did not, or `advice` and why the
/// first one could not be opened.
pub(crate) fn load<T>(
    names: &[&str],
    advice: &str,
    check: impl Fn(&libloading::Library) -> Result<T, String>,
) -> Result<T, String> {
    let check = |library| check(&ManuallyDrop::new(library));
    if let Some(library) = loaded(names) {
        return check(library);
    }
    let mut why = None;
    for name in names {
        // SAFETY: the names are those of GPU vendors' libraries, whose initialisers may run on any
        // thread.
        match unsafe { libloading::Library::new(*name) }.map(check) {
            Ok(Ok(loaded)) => return Ok(loaded),
            // A library that is there says more than one that is not.
            Ok(Err(text)) => why = Some(text),
            Err(e) if why.is_none() => {
                // The system's own text is the source of the library's.
                let text = e
                    .source()
                    .map_or_else(|| e.to_string(), ToString::to_string);
                why = Some(format!("{advice} ({text})"));
            }
            Err(_) => {}
        }
    }
    Err(why.unwrap_or_default())
}
