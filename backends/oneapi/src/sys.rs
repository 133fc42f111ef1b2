//! The functions of `cpp/shim.cpp`, and the objects behind them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::OnceLock;

use arrow_device::device::engine::{Health, Inside};
use arrow_device::device::{CopyOp, DeviceId, DevicePtr, EventPtr, device_error};
use arrow_device::{Error, Result};
use libloading::Library;

use crate::library;

/// Which of SYCL's unified shared memory (USM) a device allocates. All three are ARROW_DEVICE_ONEAPI.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum OneApiMemory {
    /// The device's own memory (`sycl::malloc_device`).
    #[default]
    Device,
    /// Memory that moves between host and device (`sycl::malloc_shared`). The host can read it.
    Shared,
    /// Host memory that the device can read (`sycl::malloc_host`).
    Host,
}

impl OneApiMemory {
    /// SYCL's name of it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Shared => "shared",
            Self::Host => "host",
        }
    }
}

/// `ad_properties`.
#[repr(C)]
#[derive(Clone)]
pub(crate) struct Properties {
    pub(crate) index: usize,
    is_cpu: i32,
    memory: [i32; 3],
    name: [c_char; 256],
}

impl Properties {
    pub(crate) fn is_cpu(&self) -> bool {
        self.is_cpu != 0
    }

    pub(crate) fn has(&self, memory: OneApiMemory) -> bool {
        self.memory[memory as usize] != 0
    }

    pub(crate) fn name(&self) -> String {
        let bytes = self.name.iter().map(|byte| *byte as u8);
        let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// An object of the interface, with how it is deleted.
pub(crate) trait Object: Sized {
    fn delete(table: &Table) -> unsafe extern "C" fn(*mut Self);
}

macro_rules! objects {
    ($($name:ident: $delete:ident;)*) => {
        /// The objects.
        pub(crate) mod raw {
            $(#[repr(C)] #[derive(Debug)] pub(crate) struct $name(u8);)*
        }
        $(impl Object for $name {
            fn delete(table: &Table) -> unsafe extern "C" fn(*mut Self) {
                table.$delete
            }
        })*
    };
}

objects! {
    Device: ad_device_delete;
    Queue: ad_queue_delete;
    Event: ad_event_delete;
    Gate: ad_gate_open;
}

use raw::{Device, Event, Gate, Queue};

macro_rules! table {
    ($($name:ident: fn($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// The functions. Each is called inside of [`Sycl::enter`].
        pub(crate) struct Table {
            $($name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            _library: Library,
        }

        impl Table {
            fn of(library: Library) -> std::result::Result<Self, String> {
                Ok(Self {
                    // SAFETY: the types are those of shim.cpp, from which the library was made together with this crate.
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
    ad_device_new: fn(usize, c_int, *mut *mut Device, *mut Properties) -> c_int;
    ad_device_of: fn(*const c_void, *mut *mut Device, *mut Properties) -> c_int;
    ad_device_is_beside: fn(*const Device, *const Device) -> c_int;
    ad_device_delete: fn(*mut Device);
    ad_queue_new: fn(*const Device, *mut *mut Queue) -> c_int;
    ad_queue_adopt: fn(*const Device, *const c_void, *mut *mut Queue) -> c_int;
    ad_queue_sycl: fn(*mut Queue) -> *mut c_void;
    ad_queue_delete: fn(*mut Queue);
    ad_copy: fn(*mut Queue, *mut c_void, *const c_void, usize) -> c_int;
    ad_fill: fn(*mut Queue, *mut c_void, c_int, usize) -> c_int;
    ad_record: fn(*mut Queue, *mut *mut Event) -> c_int;
    ad_finish: fn(*mut Queue) -> c_int;
    ad_wait: fn(*mut Queue, *const Event) -> c_int;
    ad_gate_new: fn(*mut Queue, *mut *mut Gate) -> c_int;
    ad_gate_open: fn(*mut Gate);
    ad_event_copy: fn(*const c_void, *mut *mut Event) -> c_int;
    ad_event_sycl: fn(*mut Event) -> *mut c_void;
    ad_event_is_complete: fn(*mut Event, *mut c_int) -> c_int;
    ad_event_delete: fn(*mut Event);
    ad_allocate: fn(*const Device, c_int, usize, *mut *mut c_void) -> c_int;
    ad_free: fn(*const Device, *mut c_void) -> c_int;
    ad_memory_of: fn(*const Device, *const c_void, *mut c_int) -> c_int;
}

/// A device, and what is known of it.
pub(crate) type Found = (Owned<Device>, Properties);

/// `REFUSED`.
const REFUSED: c_int = -2;

/// SYCL, for a device, which errors name.
#[derive(Clone, Copy)]
pub(crate) struct Sycl {
    table: &'static Table,
    /// Of all that this process does with SYCL. It never fails: a device has its own.
    health: &'static Health,
    id: DeviceId,
}

impl Sycl {
    /// Returns the interface, loaded at the first call, or why it cannot be.
    pub(crate) fn get(id: DeviceId) -> Result<Self> {
        static LOADED: OnceLock<std::result::Result<(Table, Health), String>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| {
            let table = library::load().and_then(Table::of)?;
            // SYCL makes its own objects at its first use, and destroys them after what is registered later: what `Health` does at the
            // end of the process.
            let mut count = 0;
            // SAFETY: `count` is valid for the write of a number. An error is found again by the next call.
            unsafe { (table.ad_device_count)(&raw mut count) };
            Ok((table, Health::new(id)))
        });
        let loaded = loaded.as_ref().map_err(|why| absent(id, why.clone()));
        loaded.map(|(table, health)| Self { table, health, id })
    }

    /// Lets this thread into SYCL while the result lives: not in a child of the process that loaded it, and not while the process ends.
    fn enter(&self) -> Result<Inside> {
        self.health.enter().map_err(|e| match e {
            Error::Device {
                operation,
                code,
                message,
                ..
            } => device_error(self.id, operation, code, message),
            e => e,
        })
    }

    /// Makes a call, which the error names.
    fn call(&self, call: &'static str, make: impl FnOnce() -> c_int) -> Result<()> {
        let _inside = self.enter()?;
        let code = make();
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the message of this thread's failed call, a text that ends with NUL and stays until the next one fails.
        let text = unsafe { CStr::from_ptr((self.table.ad_message)()) };
        let text = text.to_string_lossy().into_owned();
        Err(match code {
            REFUSED => Error::InvalidArgument(format!("{}: {text}", self.id).into()),
            _ => device_error(self.id, call, code, text),
        })
    }

    /// Makes a call that sets a pointer. `None`: it has set null.
    fn make<T>(
        &self,
        call: &'static str,
        make: impl FnOnce(*mut *mut T) -> c_int,
    ) -> Result<Option<NonNull<T>>> {
        let mut object = std::ptr::null_mut();
        self.call(call, || make(&raw mut object))?;
        Ok(NonNull::new(object))
    }

    fn made<T: Object>(
        self,
        call: &'static str,
        make: impl FnOnce(*mut *mut T) -> c_int,
    ) -> Result<Owned<T>> {
        let missing = || device_error(self.id, call, -1, "it returned nothing");
        let object = self.make(call, make)?.ok_or_else(missing)?;
        Ok(Owned { sycl: self, object })
    }

    pub(crate) fn device_count(self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: `count` is valid for the write of a number.
        self.call("sycl::device::get_devices", || unsafe {
            (self.table.ad_device_count)(&raw mut count)
        })?;
        Ok(count)
    }

    /// Returns a device by its number, in the default context of its platform or in a new one.
    pub(crate) fn device(self, index: usize, own: bool) -> Result<Found> {
        // SAFETY: both pointers are valid for writes of their types.
        self.described(|to, properties| unsafe {
            (self.table.ad_device_new)(index, own.into(), to, properties)
        })
    }

    /// Returns the device and the context of a queue.
    ///
    /// # Safety
    /// `queue` is null, or points to a live `sycl::queue`.
    pub(crate) unsafe fn device_of(self, queue: *const c_void) -> Result<Found> {
        // SAFETY: the caller guarantees a live queue, or null (see `# Safety`); both pointers are valid for writes of their types.
        self.described(|to, properties| unsafe { (self.table.ad_device_of)(queue, to, properties) })
    }

    fn described(
        self,
        make: impl FnOnce(*mut *mut Device, *mut Properties) -> c_int,
    ) -> Result<Found> {
        let mut properties = Properties {
            index: 0,
            is_cpu: 0,
            memory: [0; 3],
            name: [0; 256],
        };
        let device = self.made("sycl::device", |to| make(to, &raw mut properties))?;
        Ok((device, properties))
    }

    /// Takes a share of an event.
    ///
    /// # Safety
    /// `event` points to a live `sycl::event`.
    pub(crate) unsafe fn share_event(self, event: EventPtr) -> Result<Owned<Event>> {
        // SAFETY: the caller guarantees a live event (see `# Safety`); the pointer is valid for a write.
        self.made("sycl::event", |to| unsafe {
            (self.table.ad_event_copy)(event.as_ptr(), to)
        })
    }
}

/// Returns [`Error::DeviceNotAvailable`].
pub(crate) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into().into(),
    }
}

/// As [`absent`], because a call has failed.
pub(crate) fn absent_after(device: DeviceId, failed: Error) -> Error {
    match failed {
        Error::Device {
            operation,
            code,
            message,
            ..
        } => absent(
            device,
            format!("{operation} failed: {message} (code {code})"),
        ),
        e => e,
    }
}

/// An object of the interface, which is deleted when this is dropped: it is leaked while the process ends, and in its children.
pub(crate) struct Owned<T: Object> {
    sycl: Sycl,
    object: NonNull<T>,
}

// SAFETY: SYCL's objects and OpenCL's events may be used on any thread, and the errors of queues have a lock.
unsafe impl<T: Object> Send for Owned<T> {}
// SAFETY: SYCL's classes are safe to use on several threads at once, and the errors of queues have a lock. A gate is only deleted.
unsafe impl<T: Object> Sync for Owned<T> {}

impl<T: Object> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.object.fmt(f)
    }
}

impl<T: Object> Drop for Owned<T> {
    fn drop(&mut self) {
        if let Ok(_inside) = self.sycl.health.enter_even_if_failed() {
            // SAFETY: the object is this value's own, and of the type that the function deletes.
            unsafe { T::delete(self.sycl.table)(self.get()) }
        }
    }
}

impl<T: Object> Owned<T> {
    fn get(&self) -> *mut T {
        self.object.as_ptr()
    }
}

impl Owned<Device> {
    /// Whether both are of one context.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        // SAFETY: both are live.
        let ask = || unsafe { (self.sycl.table.ad_device_is_beside)(self.get(), other.get()) != 0 };
        self.sycl.enter().is_ok_and(|_inside| ask())
    }

    /// Makes a queue.
    pub(crate) fn queue(&self) -> Result<Owned<Queue>> {
        // SAFETY: the device is live, and the pointer valid for a write.
        self.sycl.made("sycl::queue", |to| unsafe {
            (self.sycl.table.ad_queue_new)(self.get(), to)
        })
    }

    /// Copies a program's queue, if it is in order and of this context.
    ///
    /// # Safety
    /// `queue` is null, or points to a live `sycl::queue`.
    pub(crate) unsafe fn adopt(&self, queue: *const c_void) -> Result<Owned<Queue>> {
        // SAFETY: the device is live, the caller guarantees a live queue, or null (see `# Safety`), and the pointer is valid for a write.
        self.sycl.made("sycl::queue", |to| unsafe {
            (self.sycl.table.ad_queue_adopt)(self.get(), queue, to)
        })
    }

    /// Allocates memory, aligned to 64 bytes; `None` if there is not enough.
    pub(crate) fn allocate(&self, memory: OneApiMemory, bytes: usize) -> Result<Option<DevicePtr>> {
        let call = match memory {
            OneApiMemory::Device => "sycl::aligned_alloc_device",
            OneApiMemory::Shared => "sycl::aligned_alloc_shared",
            OneApiMemory::Host => "sycl::aligned_alloc_host",
        };
        let allocate = self.sycl.table.ad_allocate;
        // SAFETY: the device is live, and the pointer valid for a write.
        let base = self.sycl.make(call, |to| unsafe {
            allocate(self.get(), 1 + memory as c_int, bytes, to)
        })?;
        Ok(base.map(|base| DevicePtr::new(base.as_ptr())))
    }

    /// Frees memory. May wait for work of the context.
    ///
    /// # Safety
    /// `base` is from `allocate` of this device, is freed once, and no work of this crate uses it any more.
    pub(crate) unsafe fn free(&self, base: DevicePtr) -> Result<()> {
        // SAFETY: the device is live, and the caller guarantees the rest (see `# Safety`).
        self.sycl.call("sycl::free", || unsafe {
            (self.sycl.table.ad_free)(self.get(), base.as_ptr())
        })
    }

    /// Returns of which kind this context's memory at an address is; `None` if it is none of this context's.
    pub(crate) fn kind(&self, address: DevicePtr) -> Result<Option<OneApiMemory>> {
        let mut memory = 0;
        let ask = self.sycl.table.ad_memory_of;
        // SAFETY: the device is live; the address is looked up, not read; `memory` is valid for a write.
        self.sycl.call("sycl::get_pointer_type", || unsafe {
            ask(self.get(), address.as_ptr(), &raw mut memory)
        })?;
        Ok(match memory {
            1 => Some(OneApiMemory::Device),
            2 => Some(OneApiMemory::Shared),
            3 => Some(OneApiMemory::Host),
            _ => None,
        })
    }
}

impl Owned<Queue> {
    /// Returns the address of the `sycl::queue`, which lives as long as this.
    pub(crate) fn sycl_queue(&self) -> *mut c_void {
        // SAFETY: the queue is live; its address is computed, and SYCL not called.
        unsafe { (self.sycl.table.ad_queue_sycl)(self.get()) }
    }

    /// Queues a copy, in whichever direction.
    ///
    /// # Safety
    /// Both ranges are valid for the device and for their bytes until the copy has completed.
    pub(crate) unsafe fn copy(&self, copy: &CopyOp) -> Result<()> {
        let (to, from) = (copy.dst.as_ptr(), copy.src.as_ptr());
        // SAFETY: the queue is live, and the caller guarantees the memory (see `# Safety`).
        self.sycl.call("sycl::queue::memcpy", || unsafe {
            (self.sycl.table.ad_copy)(self.get(), to, from, copy.bytes)
        })
    }

    /// # Safety
    /// The range is valid for the device and for its bytes until the fill has completed.
    pub(crate) unsafe fn fill(&self, to: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the queue is live, and the caller guarantees the memory (see `# Safety`).
        self.sycl.call("sycl::queue::memset", || unsafe {
            (self.sycl.table.ad_fill)(self.get(), to.as_ptr(), byte.into(), bytes)
        })
    }

    /// Returns an event after all work so far, which makes progress from now on.
    pub(crate) fn record(&self) -> Result<Owned<Event>> {
        let call = "sycl::queue::ext_oneapi_submit_barrier";
        // SAFETY: the queue is live, and the pointer valid for a write.
        self.sycl.made(call, |to| unsafe {
            (self.sycl.table.ad_record)(self.get(), to)
        })
    }

    /// Makes this thread wait until no work so far runs any more, whether it has failed or not.
    pub(crate) fn finish(&self) -> Result<()> {
        // SAFETY: the queue is live.
        self.sycl.call("sycl::queue::wait", || unsafe {
            (self.sycl.table.ad_finish)(self.get())
        })
    }

    /// Makes later work wait for an event of the same context.
    pub(crate) fn wait(&self, event: &Owned<Event>) -> Result<()> {
        // SAFETY: both are live.
        self.sycl.call("sycl::handler::depends_on", || unsafe {
            (self.sycl.table.ad_wait)(self.get(), event.get())
        })
    }

    /// Makes later work wait until the gate is dropped; `None` where that is not possible.
    pub(crate) fn gate(&self) -> Result<Option<Owned<Gate>>> {
        let sycl = self.sycl;
        // SAFETY: the queue is live, and the pointer valid for a write.
        let gate = sycl.make("clCreateUserEvent", |to| unsafe {
            (sycl.table.ad_gate_new)(self.get(), to)
        })?;
        Ok(gate.map(|object| Owned { sycl, object }))
    }
}

impl Owned<Event> {
    /// Returns the address of the `sycl::event`, which lives as long as this.
    pub(crate) fn sycl_event(&self) -> *mut c_void {
        // SAFETY: the event is live; its address is computed, and SYCL not called.
        unsafe { (self.sycl.table.ad_event_sycl)(self.get()) }
    }

    /// Returns whether the work before the event has completed. An error says that work has failed.
    pub(crate) fn is_complete(&self) -> Result<bool> {
        let mut is_complete = 0;
        let ask = self.sycl.table.ad_event_is_complete;
        // SAFETY: the event is live; `is_complete` is valid for a write.
        self.sycl.call("sycl::event::wait", || unsafe {
            ask(self.get(), &raw mut is_complete)
        })?;
        Ok(is_complete != 0)
    }
}
