//! A context: what all work of a device goes through, its events and its memory pool.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUevent, CUmemAllocationType, CUmemLocationType,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool,
};
use cudarc::driver::{CudaContext, CudaEvent};

use super::copy;
use super::driver::{Code, Driver, code};
use crate::device::DeviceId;
use crate::device::backend::{EventPtr, device_error};
use crate::error::{Error, Result};

/// More idle events than this are destroyed.
const IDLE_EVENTS: usize = 4096;

/// A device's context. All calls go through [`Context::enter`], which makes it current for the call
/// and leaves the caller's current context as it was.
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    /// For errors.
    pub(super) id: DeviceId,
    /// The device's number in the driver.
    pub(super) ordinal: c_int,
    device: CUdevice,
    raw: CUcontext,
    /// The context's owner; `None`: the primary one, retained here.
    given: Option<Arc<CudaContext>>,
    /// The memory pool, where the device has such.
    pub(super) pool: Option<CUmemoryPool>,
    /// The code after which nothing works any more; 0 before.
    failed: AtomicI32,
    /// Boxed: `sync_event` holds a cell's address.
    #[allow(clippy::vec_box)]
    events: Mutex<Vec<Box<EventCell>>>,
}

// SAFETY: the handles may be used on any thread; each call makes the context current there.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Context {}

/// An event in the place to which `sync_event` points.
#[repr(C)]
pub(super) struct EventCell {
    raw: CUevent,
    /// Whose event it is; `None`: ours.
    given: Option<Arc<CudaEvent>>,
}

// SAFETY: an event may be used on any thread.
unsafe impl Send for EventCell {}

impl EventCell {
    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }

    pub(super) fn into_ptr(self: Box<Self>) -> Option<EventPtr> {
        // The handle is the first member.
        EventPtr::new(Box::into_raw(self).cast())
    }
}

/// The event that `sync_event` points to.
///
/// # Safety
/// `event` points to a live `CUevent`.
pub(super) unsafe fn event_of(event: EventPtr) -> CUevent {
    // SAFETY: the caller's.
    unsafe { event.as_ptr().cast::<CUevent>().read() }
}

/// While it lives the context is current on this thread. Not `Send`.
pub(super) struct Current<'a>(&'a Context, std::marker::PhantomData<*const ()>);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed on this thread by `enter`. cudarc may have set another context in its
        // place; that one goes.
        unsafe { (self.0.driver.cuCtxPopCurrent_v2)(&raw mut popped) };
    }
}

impl Context {
    /// The primary context of a device, or the one that is given.
    pub(super) fn new(id: DeviceId, given: Option<Arc<CudaContext>>) -> Result<Self> {
        let absent = |reason: String| Error::DeviceNotAvailable {
            device: id,
            reason: reason.into(),
        };
        let driver = Driver::get().map_err(|why| absent(why.into()))?;
        let failed = |call: &str, code| {
            absent(format!(
                "{call} failed: {} (code {code})",
                driver.text(code)
            ))
        };
        let count = driver
            .device_count()
            .map_err(|code| failed("cuDeviceGetCount", code))?;
        let ordinal = c_int::try_from(id.id)
            .ok()
            .filter(|n| (0..count).contains(n));
        let ordinal = ordinal.ok_or_else(|| {
            absent(match count {
                0 => "there is no CUDA device".into(),
                1 => "there is one CUDA device, 0".into(),
                n => format!("there are {n} CUDA devices, 0 to {}", n - 1),
            })
        })?;
        let mut device: CUdevice = 0;
        // SAFETY: `device` is written.
        match unsafe { (driver.cuDeviceGet)(&raw mut device, ordinal) } {
            0 => {}
            code => return Err(failed("cuDeviceGet", code)),
        }
        let raw = match &given {
            Some(context) if context.ordinal() as i64 != id.id => {
                let ordinal = context.ordinal();
                return Err(Error::argument(format!(
                    "a context of CUDA device {ordinal} for {id}"
                )));
            }
            Some(context) => context.cu_ctx(),
            None => {
                let mut raw = std::ptr::null_mut();
                // SAFETY: `raw` is written; released in `drop`.
                match unsafe { (driver.cuDevicePrimaryCtxRetain)(&raw mut raw, device) } {
                    0 => raw,
                    code => return Err(failed("cuDevicePrimaryCtxRetain", code)),
                }
            }
        };
        // From here on `drop` gives everything back.
        let mut context = Self {
            driver,
            id,
            ordinal,
            device,
            raw,
            given,
            pool: None,
            failed: AtomicI32::new(0),
            events: Mutex::new(Vec::new()),
        };
        if context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) == 0 {
            return Err(absent("the device has no unified addressing".into()));
        }
        context.pool = context.new_pool()?;
        Ok(context)
    }

    /// A device attribute; 0 if the driver does not know it.
    pub(super) fn attribute(&self, attribute: CUdevice_attribute) -> c_int {
        let mut value = 0;
        // SAFETY: `value` is written.
        let code =
            unsafe { (self.driver.cuDeviceGetAttribute)(&raw mut value, attribute, self.device) };
        if code == 0 { value } else { 0 }
    }

    /// A pool of our own that keeps freed memory until it is trimmed: the default one gives it back
    /// at every synchronisation, and is everybody's. Pools are the device's, not a context's.
    fn new_pool(&self) -> Result<Option<CUmemoryPool>> {
        let supported = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        if self.attribute(supported) == 0 {
            return Ok(None);
        }
        let _current = self.enter("cuMemPoolCreate")?;
        // SAFETY: all members are integers or pointers, for which zero is a value.
        let mut props: CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        // The second member: its name depends on the version of the bindings.
        // SAFETY: `CUmemLocation` is a C struct of the type and an int, the device.
        unsafe {
            (&raw mut props.location)
                .cast::<c_int>()
                .add(1)
                .write(self.device);
        }
        let mut pool = std::ptr::null_mut();
        // SAFETY: `pool` is written.
        let code = unsafe { (self.driver.cuMemPoolCreate)(&raw mut pool, &raw const props) };
        self.check("cuMemPoolCreate", code)?;
        let mut keep = u64::MAX;
        // SAFETY: the attribute is a 64-bit number of bytes.
        let code = unsafe {
            (self.driver.cuMemPoolSetAttribute)(
                pool,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut keep).cast::<c_void>(),
            )
        };
        if let Err(e) = self.check("cuMemPoolSetAttribute", code) {
            // SAFETY: just made, and empty.
            unsafe { (self.driver.cuMemPoolDestroy)(pool) };
            return Err(e);
        }
        Ok(Some(pool))
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    pub(super) fn given(&self) -> Option<&Arc<CudaContext>> {
        self.given.as_ref()
    }

    /// Makes the context current for as long as the answer lives.
    pub(super) fn enter(&self, operation: &'static str) -> Result<Current<'_>> {
        match self.failed.load(Ordering::Acquire) {
            0 => self.enter_even_if_failed(operation),
            code => Err(self.error(operation, code)),
        }
    }

    /// As [`enter`](Self::enter), to free what a failed device still has.
    pub(super) fn enter_even_if_failed(&self, operation: &'static str) -> Result<Current<'_>> {
        // SAFETY: the context lives as long as `self`.
        let code = unsafe { (self.driver.cuCtxPushCurrent_v2)(self.raw) };
        self.check(operation, code)?;
        Ok(Current(self, std::marker::PhantomData))
    }

    /// The error that a code stands for. After a code that nothing works after the context is failed.
    pub(super) fn check(&self, operation: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        if code::is_final(code) {
            let _ = self
                .failed
                .compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire);
        }
        Err(self.error(operation, code))
    }

    /// As [`check`](Self::check), for a call that asked for memory.
    pub(super) fn check_memory(
        &self,
        operation: &'static str,
        code: Code,
        bytes: usize,
    ) -> Result<()> {
        if code == code::OUT_OF_MEMORY {
            return Err(self.out_of_memory(operation, bytes));
        }
        self.check(operation, code)
    }

    pub(super) fn out_of_memory(&self, operation: &'static str, bytes: usize) -> Error {
        Error::OutOfMemory {
            device: self.id,
            operation,
            bytes,
        }
    }

    fn error(&self, operation: &'static str, code: Code) -> Error {
        let mut text = self.driver.text(code);
        if code::is_final(code) {
            text.push_str("; the device cannot be used any more in this process");
        }
        device_error(self.id, operation, code, text)
    }

    /// Whether nothing works any more.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire) != 0
    }

    /// Whether the driver has shut down, and so taken everything back.
    pub(super) fn is_shut_down(&self) -> bool {
        self.failed.load(Ordering::Acquire) == code::DEINITIALIZED
    }

    /// Gives idle pool memory beyond `keep` bytes back to the driver.
    pub(super) fn trim_pool(&self, keep: usize) -> Result<()> {
        let Some(pool) = self.pool else { return Ok(()) };
        let _current = self.enter("cuMemPoolTrimTo")?;
        // SAFETY: the pool is ours.
        let code = unsafe { (self.driver.cuMemPoolTrimTo)(pool, keep) };
        self.check("cuMemPoolTrimTo", code)
    }

    /// An event to be recorded. The context is current.
    pub(super) fn event(&self, _: &Current<'_>) -> Result<Box<EventCell>> {
        let idle = self.idle_events().pop();
        if let Some(cell) = idle {
            return Ok(cell);
        }
        let mut raw = std::ptr::null_mut();
        const DISABLE_TIMING: c_uint = 2;
        // SAFETY: `raw` is written.
        let code = unsafe { (self.driver.cuEventCreate)(&raw mut raw, DISABLE_TIMING) };
        self.check("cuEventCreate", code)?;
        Ok(Box::new(EventCell { raw, given: None }))
    }

    /// Keeps an event for reuse.
    pub(super) fn recycle(&self, cell: Box<EventCell>) {
        if let Some(event) = cell.given {
            let context = event.context().clone();
            return self.let_go(context, move || drop(event));
        }
        let mut idle = self.idle_events();
        if idle.len() < IDLE_EVENTS {
            idle.push(cell);
            return;
        }
        drop(idle);
        self.destroy_event(&cell);
    }

    /// Runs `last`, which drops something of cudarc's that lives in `context`, without leaving that
    /// context current: cudarc makes it current for every call.
    pub(super) fn let_go(&self, context: Arc<CudaContext>, last: impl FnOnce()) {
        let push = |raw| {
            // SAFETY: `context` keeps it alive.
            unsafe { (self.driver.cuCtxPushCurrent_v2)(raw) == 0 }
        };
        let pop = || {
            let mut popped = std::ptr::null_mut();
            // SAFETY: takes off what `push` put there, or what cudarc put in its place.
            unsafe { (self.driver.cuCtxPopCurrent_v2)(&raw mut popped) };
        };
        let pushed = push(context.cu_ctx());
        last();
        // Destroying a context takes it off the stack by itself; releasing a primary one does not.
        match Arc::into_inner(context) {
            Some(context) if !context.is_primary() => return drop(context),
            context => drop(context),
        }
        if pushed {
            pop();
        }
    }

    fn destroy_event(&self, cell: &EventCell) {
        if let Ok(_current) = self.enter_even_if_failed("cuEventDestroy") {
            // SAFETY: created here, and used no more. What waits for it goes on to do so.
            unsafe { (self.driver.cuEventDestroy_v2)(cell.raw) };
        }
    }

    #[allow(clippy::vec_box)]
    fn idle_events(&self) -> std::sync::MutexGuard<'_, Vec<Box<EventCell>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cell of an event that is somebody else's.
    pub(super) fn adopt_event(event: Arc<CudaEvent>) -> Box<EventCell> {
        Box::new(EventCell {
            raw: event.cu_event(),
            given: Some(event),
        })
    }

    /// Makes this thread wait for all work of the context. An error is final.
    pub(super) fn synchronize(&self) -> Result<()> {
        let mut pause = std::time::Duration::from_millis(1);
        loop {
            let current = self.enter("cuCtxSynchronize")?;
            // SAFETY: the context is current.
            let code = unsafe { (self.driver.cuCtxSynchronize)() };
            drop(current);
            match self.check("cuCtxSynchronize", code) {
                // Not now (a stream is being captured, say): work may go on, so it must be waited for.
                Err(_) if !self.has_failed() => std::thread::sleep(pause),
                done => return done,
            }
            pause = (pause * 2).min(std::time::Duration::from_millis(100));
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if copy::has_jobs(self) {
            // Nobody waited for them. An error is final: they are not called any more.
            let _ = self.synchronize();
            copy::forget_jobs(self);
        }
        let events = std::mem::take(
            self.events
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for cell in &events {
            self.destroy_event(cell);
        }
        if let (Some(pool), Ok(_current)) =
            (self.pool, self.enter_even_if_failed("cuMemPoolDestroy"))
        {
            // SAFETY: made in `new`; memory that is still being freed in stream order stays until then.
            unsafe { (self.driver.cuMemPoolDestroy)(pool) };
        }
        match self.given.take() {
            Some(context) => self.let_go(context, || ()),
            // SAFETY: retained in `new`.
            None => unsafe {
                (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device);
            },
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({} {:p})", self.id, self.raw)
    }
}
