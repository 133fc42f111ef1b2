//! What a vendor provides, and its library, loaded at run time.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;

use super::api::{Answer, Calls, Code, Failed, RawStream};
use crate::abi::ArrowDeviceType;
use crate::device::backend::{CopyOp, DevicePtr, Program};
use crate::device::{DeviceId, FORKED, Process, absent};
use crate::error::Result;

/// Which memory a device has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Device,
    /// Page-locked host memory.
    Host,
    Managed,
}

impl Kind {
    /// The memory of a vendor's device of this type.
    pub(super) fn of(device_type: ArrowDeviceType) -> Self {
        match device_type {
            ArrowDeviceType::CUDA_HOST | ArrowDeviceType::ROCM_HOST => Self::Host,
            ArrowDeviceType::CUDA_MANAGED => Self::Managed,
            _ => Self::Device,
        }
    }
}

/// What kind of memory an address lies in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PointerKind {
    /// Memory of the device of this ordinal; in which context, if it belongs to one (memory of a
    /// pool does not, and HIP has none).
    Device(c_int, Option<usize>),
    /// Page-locked host memory; whether a device reaches it under this very address.
    Host { mapped: bool },
    /// Managed memory.
    Managed,
    /// Nothing that the library knows: ordinary host memory, or no memory at all.
    Unknown,
}

/// What the library reports about an address: what it is, and the range of the allocation, all of which is memory; `None` if the library
/// does not tell.
pub(crate) type Found = (PointerKind, Option<Range<usize>>);

/// A vendor's library, which stays loaded.
pub(crate) trait Library: Send + Sync + 'static {
    const VENDOR: &'static str;
    /// What a user can do about streams and memory of another context.
    const ADVICE: &'static str;
    /// The flags of events without timing.
    const EVENT_FLAGS: c_uint;
    /// The flags of page-locked memory that serves all devices, and is not write-combined, since
    /// the host reads it.
    const HOST_FLAGS: c_uint;

    /// Returns the library, loaded at the first call, or why it cannot be used.
    fn get() -> Result<&'static Self, &'static str>;
    fn calls(&self) -> &Calls;
    /// Returns where the library was initialised. A child of that process must not call it.
    fn process(&self) -> Process;
    /// Returns the library's name and text for a code: "CUDA_ERROR_NO_DEVICE: no CUDA-capable
    /// device is detected".
    fn text(&self, code: Code) -> String;
    /// Whether a code means that a context, this one or another that the call named, is lost.
    fn is_lost(code: Code) -> bool;

    /// Makes calls without a current device, which leave no trace on the thread.
    fn quietly<T>(&self, calls: impl FnOnce() -> T) -> T {
        calls()
    }
}

/// One device of a vendor's library, in one context where there are such.
///
/// # Safety
/// The methods do what they say, and the library's functions are those that [`Calls`] names. Memory
/// that the library allocates is aligned to 64 bytes, and nothing else uses it. `look_up` returns
/// what the library reports. The methods after `leave` are called between `enter` and `leave` only:
/// [`Current`](super::context::Current) sees to it.
pub(crate) unsafe trait Vendor: fmt::Debug + Send + Sync + Sized + 'static {
    type Library: Library;
    /// What a thread had before the device became current.
    type Before: Copy;
    /// What keeps a stream that was given.
    type Given: Send + Sync + 'static;

    /// Returns how a program allocates the device's own memory; `None` if the library does.
    fn program(&self) -> Option<Program> {
        None
    }
    /// Makes the device current on this thread.
    fn enter(&self) -> Answer<Self::Before>;
    /// Makes current again what was before.
    fn leave(&self, before: Self::Before);

    /// Returns why a stream that is no default stream is not one of this context; `None` if it is.
    ///
    /// # Safety
    /// The stream is live.
    unsafe fn foreign(&self, stream: RawStream) -> Answer<Option<String>>;
    /// Returns what lies at an address, which is looked up and not followed.
    fn look_up(&self, address: usize) -> Answer<Found>;
    /// Returns what the library must be told to copy out of such memory (a context's address, or a
    /// device's number); `None` if it finds it by the address, as for all memory that kernels of this context reach.
    fn peer_of(&self, kind: PointerKind) -> Answer<Option<usize>>;
    /// Queues a copy.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); `from` is what `peer_of` returned for
    /// the source; the stream is live, or stands for a default stream.
    unsafe fn copy(&self, copy: &CopyOp, from: Option<usize>, stream: RawStream) -> Answer;
    /// Queues a list of copies, whose sources are read in the stream's order, in one call; `None` if
    /// the library has no such call. After an error some of them may have been queued.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); the stream is live, and no default
    /// stream.
    unsafe fn copy_list(&self, copies: &[&CopyOp], stream: RawStream) -> Option<Answer> {
        let _ = (copies, stream);
        None
    }
}

/// Makes an address of a library's memory, which is no Rust allocation.
pub(crate) fn to_ptr(address: usize) -> DevicePtr {
    DevicePtr::new(std::ptr::with_exposed_provenance_mut(address))
}

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

/// Whether a device attribute is set. The library may not know it: then it is not.
pub(crate) fn has<L: Library>(library: &L, attribute: c_int, device: c_int) -> bool {
    let (calls, mut value) = (library.calls(), 0);
    // SAFETY: `value` is valid for the write of an int.
    let ask = || unsafe { calls.device_attribute(&raw mut value, attribute, device) };
    library.quietly(ask).is_ok() && value != 0
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

/// Returns the library that the process has loaded already, under one of these names or with this SONAME, or else the first that can be opened
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
    #[cfg(all(unix, not(target_os = "aix")))]
    for name in names {
        use libloading::os::unix::{Library, RTLD_LAZY};
        // SAFETY: with `RTLD_NOLOAD` nothing is loaded, so no initialiser runs.
        if let Ok(library) = unsafe { Library::open(Some(*name), RTLD_LAZY | libc::RTLD_NOLOAD) } {
            return check(library.into());
        }
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
