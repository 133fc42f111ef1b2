//! The objects behind the C interface, each with the calls that it takes part in.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::NonNull;

use arrow_device::device::{DevicePtr, EventPtr};

use crate::sys::raw::{self, Context, Device, Event, Queue};
use crate::sys::{Answer, Failed, Memory, PENDING, Properties, Sycl, UNKNOWN, enter};

impl Sycl {
    fn made<T: Object>(
        &'static self,
        call: &'static str,
        make: impl FnOnce(*mut *mut T) -> c_int,
    ) -> Answer<Owned<T>> {
        let missing = || Failed {
            call,
            code: -1,
            message: "it returned nothing".into(),
        };
        let object = self.make(call, make)?.ok_or_else(missing)?;
        Ok(Owned { sycl: self, object })
    }

    pub(crate) fn device_count(&self) -> Answer<usize> {
        let mut count = 0;
        // SAFETY: `count` is valid for the write of a number.
        self.call("sycl::device::get_devices", || unsafe {
            (self.ad_device_count)(&raw mut count)
        })?;
        Ok(count)
    }

    pub(crate) fn device(&'static self, index: usize) -> Answer<Owned<Device>> {
        // SAFETY: the pointer is valid for the write of a pointer, here and in all calls of `made` and `make`.
        self.made("sycl::device::get_devices", |to| unsafe {
            (self.ad_device_new)(index, to)
        })
    }

    /// The device of a queue, and its number.
    ///
    /// # Safety
    /// `queue` points to a live `sycl::queue`.
    pub(crate) unsafe fn device_of(
        &'static self,
        queue: *const c_void,
    ) -> Answer<(Owned<Device>, usize)> {
        let mut index = 0;
        // SAFETY: the caller guarantees a live queue (see `# Safety`); the others are valid for writes.
        let device = self.made("sycl::queue::get_device", |to| unsafe {
            (self.ad_device_of)(queue, to, &raw mut index)
        })?;
        Ok((device, index))
    }

    /// # Safety
    /// As [`device_of`](Self::device_of).
    pub(crate) unsafe fn context_of(&'static self, queue: *const c_void) -> Answer<Owned<Context>> {
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        self.made("sycl::queue::get_context", |to| unsafe {
            (self.ad_context_of)(queue, to)
        })
    }

    /// # Safety
    /// As [`device_of`](Self::device_of).
    pub(crate) unsafe fn is_in_order(&self, queue: *const c_void) -> Answer<bool> {
        let mut in_order = 0;
        // SAFETY: the caller guarantees a live queue (see `# Safety`); `in_order` is valid for a write.
        self.call("sycl::queue::is_in_order", || unsafe {
            (self.ad_queue_is_in_order)(queue, &raw mut in_order)
        })?;
        Ok(in_order != 0)
    }

    /// # Safety
    /// As [`device_of`](Self::device_of).
    pub(crate) unsafe fn adopt(&'static self, queue: *const c_void) -> Answer<Owned<Queue>> {
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        self.made("sycl::queue", |to| unsafe {
            (self.ad_queue_adopt)(queue, to)
        })
    }

    /// Makes later work of a queue wait for an event.
    ///
    /// # Safety
    /// `queue` points to a live `sycl::queue`, and `event` to a live event of its context.
    pub(crate) unsafe fn wait(&self, queue: *mut c_void, event: EventPtr) -> Answer<()> {
        // SAFETY: the caller guarantees both (see `# Safety`).
        self.call("sycl::handler::depends_on", || unsafe {
            (self.ad_wait)(queue, event.as_ptr().cast())
        })
    }

    /// Makes later work of a queue wait until the gate is opened; `None` where that is not possible.
    ///
    /// # Safety
    /// `queue` points to a live `sycl::queue`.
    pub(crate) unsafe fn gate(&'static self, queue: *mut c_void) -> Answer<Option<Gate>> {
        // SAFETY: the caller guarantees a live queue (see `# Safety`).
        let gate = self.make("clCreateUserEvent", |to| unsafe {
            (self.ad_gate_new)(queue, to)
        })?;
        Ok(gate.map(|gate| Gate { sycl: self, gate }))
    }

    /// # Safety
    /// `event` points to a live `sycl::event`.
    pub(crate) unsafe fn copy_event(&'static self, event: EventPtr) -> Answer<Owned<Event>> {
        // SAFETY: the caller guarantees a live event (see `# Safety`).
        self.made("sycl::event", |to| unsafe {
            (self.ad_event_copy)(event.as_ptr().cast(), to)
        })
    }

    /// Returns whether the event has completed. An error says that its work has failed.
    ///
    /// # Safety
    /// `event` points to a live `sycl::event`.
    pub(crate) unsafe fn is_complete(&self, event: EventPtr) -> Answer<bool> {
        let mut state = PENDING;
        // SAFETY: the caller guarantees a live event (see `# Safety`); `state` is valid for a write.
        self.call("sycl::event::wait", || unsafe {
            (self.ad_event_state)(event.as_ptr().cast(), &raw mut state)
        })?;
        Ok(state != PENDING)
    }
}

/// An object of the interface, which is deleted when this is dropped.
pub(crate) struct Owned<T: Object> {
    sycl: &'static Sycl,
    object: NonNull<T>,
}

// SAFETY: SYCL's objects may be used on any thread, and so may `ad_queue`, whose errors have a lock.
unsafe impl<T: Object> Send for Owned<T> {}
// SAFETY: SYCL's classes, and `ad_queue`, whose errors have a lock, are safe to use on several threads at once.
unsafe impl<T: Object> Sync for Owned<T> {}

/// How an object is deleted.
pub(crate) trait Object: Sized {
    fn delete(sycl: &Sycl) -> unsafe extern "C" fn(*mut Self);
}

impl Object for Device {
    fn delete(sycl: &Sycl) -> unsafe extern "C" fn(*mut Self) {
        sycl.ad_device_delete
    }
}

impl Object for Context {
    fn delete(sycl: &Sycl) -> unsafe extern "C" fn(*mut Self) {
        sycl.ad_context_delete
    }
}

impl Object for Event {
    fn delete(sycl: &Sycl) -> unsafe extern "C" fn(*mut Self) {
        sycl.ad_event_delete
    }
}

impl Object for Queue {
    fn delete(sycl: &Sycl) -> unsafe extern "C" fn(*mut Self) {
        sycl.ad_queue_delete
    }
}

impl<T: Object> Drop for Owned<T> {
    fn drop(&mut self) {
        // Leaked while the process ends, and in its children.
        if let Ok(_inside) = enter() {
            // SAFETY: the object is this value's own, and of the type that the function deletes.
            unsafe { T::delete(self.sycl)(self.object.as_ptr()) }
        }
    }
}

impl<T: Object> Owned<T> {
    fn get(&self) -> *mut T {
        self.object.as_ptr()
    }
}

/// What holds up a queue. Dropping it opens it.
pub(crate) struct Gate {
    sycl: &'static Sycl,
    gate: NonNull<raw::Gate>,
}

// SAFETY: OpenCL's events may be used on any thread.
unsafe impl Send for Gate {}

impl Drop for Gate {
    fn drop(&mut self) {
        // An error has no place to go, and none is known that leaves the gate closed. It stays closed while the process ends.
        // SAFETY: the gate is this value's own, and this is its last use.
        let _ = self.sycl.call("clSetUserEventStatus", || unsafe {
            (self.sycl.ad_gate_open)(self.gate.as_ptr())
        });
    }
}

impl Owned<Device> {
    pub(crate) fn properties(&self) -> Answer<Properties> {
        let mut properties = Properties::default();
        // SAFETY: the device is live, and `properties` valid for a write of its type.
        self.sycl.call("sycl::device::has", || unsafe {
            (self.sycl.ad_device_properties)(self.get(), &raw mut properties)
        })?;
        Ok(properties)
    }

    pub(crate) fn name(&self) -> Answer<String> {
        unsafe extern "C" fn take(to: *mut c_void, name: *const c_char, bytes: usize) {
            // SAFETY: `ad_device_name` passes `to` on, which is the `String` below, and a text of that many bytes.
            let (to, name) = unsafe {
                (
                    &mut *to.cast::<String>(),
                    std::slice::from_raw_parts(name.cast(), bytes),
                )
            };
            *to = String::from_utf8_lossy(name).into_owned();
        }
        let mut name = String::new();
        let to = (&raw mut name).cast();
        // SAFETY: the device is live, and `take` gets the address of `name`, which nothing else uses meanwhile.
        self.sycl.call("sycl::device::get_info", || unsafe {
            (self.sycl.ad_device_name)(self.get(), take, to)
        })?;
        Ok(name)
    }

    /// Returns the default context of the device's platform, or a new one.
    pub(crate) fn context(&self, own: bool) -> Answer<Owned<Context>> {
        // SAFETY: the device is live.
        self.sycl.made("sycl::context", |to| unsafe {
            (self.sycl.ad_context_new)(self.get(), own.into(), to)
        })
    }
}

impl Owned<Context> {
    pub(crate) fn is(&self, other: &Self) -> bool {
        let Ok(_inside) = enter() else {
            return false;
        };
        // SAFETY: both are live.
        unsafe { (self.sycl.ad_context_is)(self.get(), other.get()) != 0 }
    }

    pub(crate) fn queue(&self, device: &Owned<Device>) -> Answer<Owned<Queue>> {
        // SAFETY: both are live.
        self.sycl.made("sycl::queue", |to| unsafe {
            (self.sycl.ad_queue_new)(self.get(), device.get(), to)
        })
    }

    /// Allocates memory, aligned to 64 bytes; `None` if there is not enough.
    pub(crate) fn allocate(
        &self,
        device: &Owned<Device>,
        memory: Memory,
        bytes: usize,
    ) -> Answer<Option<DevicePtr>> {
        let call = match memory {
            Memory::Device => "sycl::aligned_alloc_device",
            Memory::Shared => "sycl::aligned_alloc_shared",
            Memory::Host => "sycl::aligned_alloc_host",
        };
        let allocate = self.sycl.ad_allocate;
        // SAFETY: both are live, and the pointer is valid for the write of a pointer.
        let base = self.sycl.make(call, |to| unsafe {
            allocate(self.get(), device.get(), memory as i32, 64, bytes, to)
        })?;
        Ok(base.map(|base| DevicePtr::new(base.as_ptr())))
    }

    /// Frees memory. May wait for work of the context.
    ///
    /// # Safety
    /// `base` is from `allocate` of this context, is freed once, and no work uses it any more.
    pub(crate) unsafe fn free(&self, base: DevicePtr) -> Answer<()> {
        // SAFETY: the context is live, and the caller guarantees the rest (see `# Safety`).
        self.sycl.call("sycl::free", || unsafe {
            (self.sycl.ad_free)(self.get(), base.as_ptr())
        })
    }

    /// Returns of which kind this context's memory at an address is; `None` if it is none of this context's.
    pub(crate) fn kind(&self, address: DevicePtr) -> Answer<Option<Memory>> {
        let mut memory = UNKNOWN;
        let ask = self.sycl.ad_memory_of;
        // SAFETY: the context is live; the address is looked up, not read; `memory` is valid for a write.
        self.sycl.call("sycl::get_pointer_type", || unsafe {
            ask(self.get(), address.as_ptr(), &raw mut memory)
        })?;
        Ok([Memory::Device, Memory::Shared, Memory::Host]
            .into_iter()
            .find(|kind| *kind as c_int == memory))
    }
}

impl Owned<Queue> {
    /// Returns the address of the `sycl::queue`, which lives as long as this.
    pub(crate) fn sycl_queue(&self) -> *mut c_void {
        // SAFETY: the queue is live; its address is computed, and SYCL not called.
        unsafe { (self.sycl.ad_queue_sycl)(self.get()) }
    }

    /// Fails with what SYCL has reported for work of this queue.
    pub(crate) fn check(&self) -> Answer<()> {
        // SAFETY: the queue is live.
        self.sycl.call("sycl::async_handler", || unsafe {
            (self.sycl.ad_queue_check)(self.get())
        })
    }

    /// # Safety
    /// Both ranges are valid for the device and for their bytes until the copy has completed.
    pub(crate) unsafe fn copy(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> Answer<()> {
        let copy = self.sycl.ad_queue_copy;
        // SAFETY: the queue is live, and the caller guarantees the memory (see `# Safety`).
        self.sycl.call("sycl::queue::memcpy", || unsafe {
            copy(self.get(), to.as_ptr(), from.as_ptr(), bytes)
        })
    }

    /// # Safety
    /// The range is valid for the device and for its bytes until the fill has completed.
    pub(crate) unsafe fn fill(&self, to: DevicePtr, byte: u8, bytes: usize) -> Answer<()> {
        let fill = self.sycl.ad_queue_fill;
        // SAFETY: the queue is live, and the caller guarantees the memory (see `# Safety`).
        self.sycl.call("sycl::queue::memset", || unsafe {
            fill(self.get(), to.as_ptr(), byte.into(), bytes)
        })
    }

    /// Waits for all work so far.
    pub(crate) fn finish(&self) -> Answer<()> {
        // SAFETY: the queue is live.
        self.sycl.call("sycl::queue::wait", || unsafe {
            (self.sycl.ad_queue_finish)(self.get())
        })
    }

    /// Returns an event after all work so far.
    pub(crate) fn record(&self) -> Answer<Owned<Event>> {
        let call = "sycl::queue::ext_oneapi_submit_barrier";
        // SAFETY: the queue is live.
        self.sycl.made(call, |to| unsafe {
            (self.sycl.ad_queue_record)(self.get(), to)
        })
    }
}

impl Owned<Event> {
    /// Returns the address of the `sycl::event`, which lives as long as this.
    pub(crate) fn ptr(&self) -> EventPtr {
        EventPtr::new(self.object.as_ptr().cast()).expect("no object is at the null address")
    }

    /// As [`Sycl::is_complete`].
    pub(crate) fn is_complete(&self) -> Answer<bool> {
        // SAFETY: the event is live.
        unsafe { self.sycl.is_complete(self.ptr()) }
    }
}
