//! A context: what all work of a device goes through, its events and its memory pool.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUevent, CUmemAllocationType, CUmemLocationType,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUstreamCaptureMode,
};
use cudarc::driver::{CudaContext, CudaEvent};

use super::copy;
use super::driver::{Code, Driver, code};
use crate::device::DeviceId;
use crate::device::backend::{EventPtr, device_error};
use crate::error::{Error, Result};

/// More idle events than this are destroyed.
const IDLE_EVENTS: usize = 4096;
/// A context that answers with errors for so long is lost.
const LOST: Duration = Duration::from_secs(5);

/// A call that asks for memory: its name, and its name with the code for none.
pub(super) type MemoryCall = (&'static str, &'static str);

/// The names of a call that asks for memory.
macro_rules! memory_call {
    ($name:literal) => {
        ($name, concat!($name, " (CUDA_ERROR_OUT_OF_MEMORY, code 2)"))
    };
}
pub(super) use memory_call;

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
    /// The driver has refused a list of copies.
    pub(super) no_batch: AtomicBool,
    /// Boxed: `sync_event` holds a cell's address.
    #[allow(clippy::vec_box)]
    events: Mutex<Vec<Box<EventCell>>>,
    /// Primary contexts of other devices, by ordinal, retained.
    others: Mutex<Vec<(c_int, CUdevice, CUcontext)>>,
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
    given: Option<CudaEvent>,
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

/// While it lives the context is current on this thread, and calls are allowed that would spoil other
/// libraries' stream captures: this crate refuses streams that are captured, and touches no others'. Not
/// `Send`.
pub(super) struct Current<'a> {
    context: &'a Context,
    capture_mode: CUstreamCaptureMode,
    not_send: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let driver = self.context.driver;
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed on this thread by `enter`. cudarc may have set another context in its
        // place; that one goes.
        unsafe { (driver.cuCtxPopCurrent_v2)(&raw mut popped) };
        // SAFETY: the thread's own mode, as it was.
        unsafe { (driver.cuThreadExchangeStreamCaptureMode)(&raw mut self.capture_mode) };
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
                    // Perhaps for now only: not the device that is missing.
                    code => {
                        let text = driver.text(code);
                        let call = "cuDevicePrimaryCtxRetain";
                        return Err(device_error(id, call, code, text));
                    }
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
            no_batch: AtomicBool::new(false),
            events: Mutex::new(Vec::new()),
            others: Mutex::new(Vec::new()),
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

    /// Whether the host may read managed memory while the device works.
    pub(super) fn reads_managed(&self) -> bool {
        let both = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        self.attribute(both) != 0
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
            0 => self.enter_even_if_failed(),
            code => Err(self.error(operation, code)),
        }
    }

    /// As [`enter`](Self::enter), to free what a failed device still has.
    pub(super) fn enter_even_if_failed(&self) -> Result<Current<'_>> {
        // SAFETY: the context lives as long as `self`.
        match unsafe { (self.driver.cuCtxPushCurrent_v2)(self.raw) } {
            0 => {}
            code => {
                // The context itself is refused.
                self.mark(code);
                return Err(self.error("cuCtxPushCurrent", code));
            }
        }
        let mut capture_mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the thread's mode, which is written back in `drop`.
        unsafe { (self.driver.cuThreadExchangeStreamCaptureMode)(&raw mut capture_mode) };
        Ok(Current {
            context: self,
            capture_mode,
            not_send: PhantomData,
        })
    }

    /// The error that a code stands for. If the context is lost it is failed from now on.
    pub(super) fn check(&self, operation: &'static str, code: Code) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        if code::is_final(code) {
            self.confirm();
        }
        Err(self.error(operation, code))
    }

    /// Asks this context itself whether it is lost: a code may be another one's, whose event or memory
    /// was named.
    fn confirm(&self) {
        if let Ok(_current) = self.enter_even_if_failed() {
            // SAFETY: the legacy default stream is always there; a query gives it no work.
            self.mark(unsafe { (self.driver.cuStreamQuery)(std::ptr::null_mut()) });
        }
    }

    /// Notes a code of this context's own.
    fn mark(&self, code: Code) {
        if code::is_final(code) {
            let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
            let _ = self.failed.compare_exchange(0, code, success, failure);
        }
    }

    /// As [`check`](Self::check), for a call that asked for memory. It has two names: the second one
    /// says the code as well, which this error has no other place for.
    pub(super) fn check_memory(&self, call: MemoryCall, code: Code, bytes: usize) -> Result<()> {
        if code == code::OUT_OF_MEMORY {
            return Err(self.out_of_memory(call.1, bytes));
        }
        self.check(call.0, code)
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
        if self.has_failed() {
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

    /// Gives idle pool memory back to the driver.
    pub(super) fn trim_pool(&self) -> Result<()> {
        let Some(pool) = self.pool else { return Ok(()) };
        let _current = self.enter("cuMemPoolTrimTo")?;
        // SAFETY: the pool is ours.
        let code = unsafe { (self.driver.cuMemPoolTrimTo)(pool, 0) };
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
            return self.driver.let_go(context, move || drop(event));
        }
        let mut idle = self.idle_events();
        if idle.len() < IDLE_EVENTS {
            idle.push(cell);
            return;
        }
        drop(idle);
        self.destroy_event(&cell);
    }

    fn destroy_event(&self, cell: &EventCell) {
        if let Ok(_current) = self.enter_even_if_failed() {
            // SAFETY: created here, and used no more. What waits for it goes on to do so.
            unsafe { (self.driver.cuEventDestroy_v2)(cell.raw) };
        }
    }

    #[allow(clippy::vec_box)]
    fn idle_events(&self) -> std::sync::MutexGuard<'_, Vec<Box<EventCell>>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cell of an event that is somebody else's.
    pub(super) fn adopt_event(event: CudaEvent) -> Box<EventCell> {
        Box::new(EventCell {
            raw: event.cu_event(),
            given: Some(event),
        })
    }

    /// Makes this thread wait for all work of the context. Asks the driver even if the context has
    /// failed.
    pub(super) fn synchronize(&self) -> Result<()> {
        let code = {
            let _current = self.enter_even_if_failed()?;
            // SAFETY: the context is current.
            unsafe { (self.driver.cuCtxSynchronize)() }
        };
        self.check("cuCtxSynchronize", code)?;
        match self.failed.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(self.error("cuCtxSynchronize", code)),
        }
    }

    /// As [`synchronize`](Self::synchronize), until it succeeds or the context is lost: then nothing of
    /// it runs any more.
    pub(super) fn settle(&self) -> Result<()> {
        let start = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let done = self.synchronize();
            let e = match done {
                Err(e) if !self.has_failed() => e,
                done => {
                    if done.is_err() {
                        copy::stop_jobs(self);
                    }
                    return done;
                }
            };
            // What cannot be asked now (a stream is being captured) can be later. That a context which
            // answers with another error for so long is lost is an assumption: no driver says so.
            if let Error::Device { code, .. } = e {
                if !code::is_passing(code) && start.elapsed() > LOST {
                    let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
                    let _ = self.failed.compare_exchange(0, code, success, failure);
                }
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(100));
        }
    }

    /// The primary context of another device, for copies out of its memory. Kept as long as this one.
    pub(super) fn primary_of(&self, ordinal: c_int) -> Result<CUcontext> {
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, _, raw)) = others.iter().find(|(of, ..)| *of == ordinal) {
            return Ok(*raw);
        }
        let (mut device, mut raw): (CUdevice, _) = (0, std::ptr::null_mut());
        // SAFETY: `device` is written.
        let code = unsafe { (self.driver.cuDeviceGet)(&raw mut device, ordinal) };
        self.check("cuDeviceGet", code)?;
        // SAFETY: `raw` is written; released in `drop`.
        let code = unsafe { (self.driver.cuDevicePrimaryCtxRetain)(&raw mut raw, device) };
        self.check("cuDevicePrimaryCtxRetain", code)?;
        others.push((ordinal, device, raw));
        Ok(raw)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if copy::has_jobs(self) {
            // Nobody waited for them.
            let _ = self.settle();
        }
        let events = std::mem::take(
            self.events
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for cell in &events {
            self.destroy_event(cell);
        }
        if let (Some(pool), Ok(_current)) = (self.pool, self.enter_even_if_failed()) {
            // SAFETY: made in `new`; memory that is still being freed in stream order stays until then.
            unsafe { (self.driver.cuMemPoolDestroy)(pool) };
        }
        let others = self
            .others
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for (_, device, _) in others.drain(..) {
            // SAFETY: retained in `primary_of`.
            unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(device) };
        }
        match self.given.take() {
            Some(context) => self.driver.let_go(context, || ()),
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
