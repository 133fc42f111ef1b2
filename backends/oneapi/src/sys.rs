//! The functions of `cpp/shim.h`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use arrow_device::device::parts::Process;
use arrow_device::device::parts::exit::{self, Inside};
use arrow_device::device::{DeviceId, device_error};
use arrow_device::{Error, Result};
use libloading::Library;

use crate::library;

/// The objects of `shim.h`.
pub(crate) mod raw {
    #[repr(C)]
    pub(crate) struct Device(u8);
    #[repr(C)]
    pub(crate) struct Context(u8);
    #[repr(C)]
    pub(crate) struct Event(u8);
    #[repr(C)]
    pub(crate) struct Queue(u8);
    #[repr(C)]
    pub(crate) struct Gate(u8);
}

use raw::{Context, Device, Event, Gate, Queue};

/// `ad_properties`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Properties {
    is_cpu: i32,
    device_memory: i32,
    shared_memory: i32,
    host_memory: i32,
}

impl Properties {
    pub(crate) fn is_cpu(&self) -> bool {
        self.is_cpu != 0
    }

    pub(crate) fn has(&self, memory: Memory) -> bool {
        let answer = match memory {
            Memory::Device => self.device_memory,
            Memory::Shared => self.shared_memory,
            Memory::Host => self.host_memory,
        };
        answer != 0
    }
}

/// `ad_memory`, without the unknown one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
pub(crate) enum Memory {
    Device = 1,
    Shared = 2,
    Host = 3,
}

/// `AD_PENDING`.
pub(crate) const PENDING: c_int = 0;
/// `AD_UNKNOWN`.
pub(crate) const UNKNOWN: c_int = 0;

macro_rules! table {
    ($($name:ident: fn($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// The functions. They follow `shim.h`; each is called by [`Sycl::call`], or inside of [`enter`].
        pub(crate) struct Sycl { $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)* _library: Library }

        impl Sycl {
            fn of(library: Library) -> std::result::Result<Self, String> {
                Ok(Self {
                    // SAFETY: the types are those of shim.h, from which the library was made together with this crate.
                    $($name: unsafe { *library.get(concat!(stringify!($name), "\0").as_bytes()).map_err(|e| e.to_string())? },)*
                    _library: library,
                })
            }
        }
    };
}

table! {
    ad_message: fn() -> *const c_char;
    ad_device_count: fn(*mut usize) -> c_int;
    ad_device_new: fn(usize, *mut *mut Device) -> c_int;
    ad_device_of: fn(*const c_void, *mut *mut Device, *mut usize) -> c_int;
    ad_device_properties: fn(*const Device, *mut Properties) -> c_int;
    ad_device_name: fn(*const Device, unsafe extern "C" fn(*mut c_void, *const c_char, usize), *mut c_void) -> c_int;
    ad_device_delete: fn(*mut Device);
    ad_context_new: fn(*const Device, c_int, *mut *mut Context) -> c_int;
    ad_context_of: fn(*const c_void, *mut *mut Context) -> c_int;
    ad_context_is: fn(*const Context, *const Context) -> c_int;
    ad_context_delete: fn(*mut Context);
    ad_queue_new: fn(*const Context, *const Device, *mut *mut Queue) -> c_int;
    ad_queue_adopt: fn(*const c_void, *mut *mut Queue) -> c_int;
    ad_queue_is_in_order: fn(*const c_void, *mut c_int) -> c_int;
    ad_queue_sycl: fn(*mut Queue) -> *mut c_void;
    ad_queue_check: fn(*mut Queue) -> c_int;
    ad_queue_copy: fn(*mut Queue, *mut c_void, *const c_void, usize) -> c_int;
    ad_queue_fill: fn(*mut Queue, *mut c_void, c_int, usize) -> c_int;
    ad_queue_record: fn(*mut Queue, *mut *mut Event) -> c_int;
    ad_queue_finish: fn(*mut Queue) -> c_int;
    ad_queue_delete: fn(*mut Queue);
    ad_wait: fn(*mut c_void, *const Event) -> c_int;
    ad_gate_new: fn(*mut c_void, *mut *mut Gate) -> c_int;
    ad_gate_open: fn(*mut Gate) -> c_int;
    ad_event_copy: fn(*const Event, *mut *mut Event) -> c_int;
    ad_event_state: fn(*const Event, *mut c_int) -> c_int;
    ad_event_delete: fn(*mut Event);
    ad_allocate: fn(*const Context, *const Device, c_int, usize, usize, *mut *mut c_void) -> c_int;
    ad_free: fn(*const Context, *mut c_void) -> c_int;
    ad_memory_of: fn(*const Context, *const c_void, *mut c_int) -> c_int;
}

/// What a call of SYCL's has failed with.
#[derive(Debug)]
pub(crate) struct Failed {
    /// The call, in SYCL's names.
    pub(crate) call: &'static str,
    pub(crate) code: c_int,
    pub(crate) message: String,
}

/// The code of a call that was not made, because SYCL may not be called any more.
pub(crate) const NOT_CALLED: c_int = c_int::MIN;

pub(crate) type Answer<T> = std::result::Result<T, Failed>;

impl Failed {
    /// As an error of the device.
    pub(crate) fn on(self, device: DeviceId) -> Error {
        device_error(device, self.call, self.code, self.message)
    }

    /// Why there is no such device.
    pub(crate) fn absent(self, device: DeviceId) -> Error {
        absent(
            device,
            format!(
                "{} failed: {} (code {})",
                self.call, self.message, self.code
            ),
        )
    }
}

/// Returns [`Error::DeviceNotAvailable`].
pub(crate) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into().into(),
    }
}

/// The process in which SYCL was loaded.
static PROCESS: OnceLock<Process> = OnceLock::new();

/// Returns whether this is a child of the process in which SYCL was loaded, which has none of SYCL's threads.
pub(crate) fn is_child() -> bool {
    PROCESS.get().is_some_and(|process| !process.is_this())
}

/// Lets this thread into SYCL while the result lives, or says why not: in a child of the process, and on the thread that ends it. Any other
/// thread stays here then, so that none takes the error for the end of work.
pub(crate) fn enter() -> Answer<Inside> {
    let refused = |why: &str| Failed {
        call: "calling SYCL",
        code: NOT_CALLED,
        message: why.into(),
    };
    match is_child() {
        true => Err(refused("the process was forked after SYCL was loaded")),
        false => exit::enter().ok_or_else(|| refused("the process is ending")),
    }
}

impl Sycl {
    /// Returns the interface, loaded at the first call, or why it cannot be.
    pub(crate) fn get(device: DeviceId) -> Result<&'static Self> {
        static SYCL: OnceLock<std::result::Result<Sycl, String>> = OnceLock::new();
        let made = SYCL.get_or_init(|| {
            let sycl = library::load().and_then(Self::of)?;
            // SYCL makes its own objects at its first use, and destroys them after what is registered later.
            let mut count = 0;
            // SAFETY: `count` is valid for the write of a number. An error is found again by the next call.
            unsafe { (sycl.ad_device_count)(&raw mut count) };
            PROCESS.get_or_init(Process::this);
            exit::watch();
            Ok(sycl)
        });
        made.as_ref().map_err(|why| absent(device, why.clone()))
    }

    /// Makes a call, which the error names.
    pub(crate) fn call(&self, call: &'static str, make: impl FnOnce() -> c_int) -> Answer<()> {
        let _inside = enter()?;
        let code = make();
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the message of this thread's failed call, a text that ends with NUL and stays until the next one fails.
        let message = unsafe { CStr::from_ptr((self.ad_message)()) }
            .to_string_lossy()
            .into_owned();
        Err(Failed {
            call,
            code,
            message,
        })
    }

    /// Makes a call that sets a pointer. `None`: it has set null.
    pub(crate) fn make<T>(
        &self,
        call: &'static str,
        make: impl FnOnce(*mut *mut T) -> c_int,
    ) -> Answer<Option<NonNull<T>>> {
        let mut object = std::ptr::null_mut();
        self.call(call, || make(&raw mut object))?;
        Ok(NonNull::new(object))
    }
}
