//! CUDA devices: ARROW_DEVICE_CUDA, CUDA_HOST and CUDA_MANAGED. The public way in is
//! [`crate::cuda`].
//!
//! | file | what is in it |
//! | --- | --- |
//! | `config.rs` | how a device is opened |
//! | `driver.rs` | the driver library, loaded at run time |
//! | `context.rs` | contexts, events, the memory pool, errors |
//! | `queue.rs` | streams as queues |
//! | `copy.rs` | lists of copies |
//! | `blocks.rs` | reuse of page-locked and managed memory, and its free |
//! | `pointer.rs` | whose memory an address is |

mod blocks;
mod config;
mod context;
mod copy;
mod driver;
mod pointer;
mod queue;

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{CUcontext, CUdevice_attribute};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};

use self::blocks::{After, Blocks, scrap};
pub use self::config::{CudaConfig, CudaMemory};
use self::context::{Context, event_of};
use self::driver::{Driver, code};
use self::pointer::{PointerKind, kind_of};
pub use self::queue::CudaQueue;
use self::queue::Shared;
use crate::abi::ArrowDeviceType;
use crate::device::backend::{AddressClass, Backend, DevicePtr, EventPtr, RawQueue, device_error};
use crate::device::{DeviceId, Devices};
use crate::error::{Error, Result};

/// Pieces of page-locked memory up to `SMALL` bytes may take up `RESERVE` bytes beyond the limit: an export's
/// lengths of views should lie where the device reaches them.
const SMALL: usize = 64 << 10;
const RESERVE: usize = 1 << 20;

/// The backend of a CUDA device. Found by downcasting [`Backend::as_any`].
pub struct CudaDevice {
    shared: Shared,
    host_readable: bool,
    queue: Arc<CudaQueue>,
    /// Page-locked memory for staging and downloads: address to length in bytes.
    page_locked: Arc<Mutex<PageLocked>>,
    page_locked_limit: usize,
    asked: Mutex<VecDeque<Asked>>,
    /// cudarc's handle of the primary context, once it was asked for. Its stream is there so that cudarc
    /// orders slices between streams: it does so from the first new stream on.
    cudarc: OnceLock<(Arc<CudaContext>, Arc<CudaStream>)>,
}

#[derive(Default)]
struct PageLocked {
    ranges: std::collections::BTreeMap<usize, usize>,
    bytes: usize,
}

/// A range that the driver was asked about: address, bytes, whether it is page-locked. A stale answer
/// costs time: a copy that is staged needlessly, or one that the driver stages by itself.
type Asked = (usize, usize, bool);

/// How many answers are kept.
const ASKED: usize = 32;

impl CudaDevice {
    fn new(config: &CudaConfig) -> Result<Self> {
        let id = DeviceId::new(config.memory.device_type(), config.ordinal as i64);
        let context = Arc::new(Context::new(id, config.context.clone())?);
        let host_readable = match config.memory {
            CudaMemory::Device => false,
            CudaMemory::Host => true,
            CudaMemory::Managed => {
                let managed = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY;
                if context.attribute(managed) == 0 {
                    return Err(Error::DeviceNotAvailable {
                        device: id,
                        reason: "the device has no managed memory".into(),
                    });
                }
                // Elsewhere the host must not touch any of it while the device works.
                context.reads_managed()
            }
        };
        let shared = Shared {
            blocks: Arc::new(Blocks::new(config.memory)),
            memory: config.memory,
            context,
        };
        Ok(Self {
            queue: Arc::new(CudaQueue::new(shared.clone())?),
            shared,
            host_readable,
            page_locked: Arc::default(),
            page_locked_limit: config.page_locked_limit,
            asked: Mutex::default(),
            cudarc: OnceLock::new(),
        })
    }

    /// The device's number in the driver.
    pub fn ordinal(&self) -> usize {
        self.context().ordinal as usize
    }

    /// Which memory.
    pub fn memory(&self) -> CudaMemory {
        self.shared.memory
    }

    /// The context. It is the device's: do not destroy it.
    pub fn cu_context(&self) -> CUcontext {
        self.context().raw()
    }

    /// The version of CUDA that the driver speaks: 13000 for 13.0. `None` if it does not say.
    pub fn driver_version(&self) -> Option<i32> {
        self.context().driver.version()
    }

    /// cudarc's handle of the context. Of the primary one, the first call makes one and waits for the
    /// context's work: cudarc does so when it begins to order slices between streams. A given context is
    /// answered as it is.
    ///
    /// # Errors
    /// [`Error::Device`] if cudarc cannot retain it.
    pub fn cuda_context(&self) -> Result<Arc<CudaContext>> {
        if let Some(context) = self.context().given() {
            return Ok(context.clone());
        }
        if let Some((context, _)) = self.cudarc.get() {
            return Ok(context.clone());
        }
        let failed = |operation, e: DriverError| {
            device_error(self.id(), operation, e.0 as i32, e.to_string())
        };
        // cudarc makes it current: the guard takes that back.
        let _current = self.context().enter("cuDevicePrimaryCtxRetain")?;
        let context =
            CudaContext::new(self.ordinal()).map_err(|e| failed("CudaContext::new", e))?;
        let stream = context
            .new_stream()
            .map_err(|e| failed("CudaContext::new_stream", e))?;
        // Another thread's is of the same primary context.
        Ok(self.cudarc.get_or_init(|| (context, stream)).0.clone())
    }

    fn context(&self) -> &Arc<Context> {
        &self.shared.context
    }

    /// Runs `calls`, which call cudarc, with the device's context current, and leaves the caller's
    /// as it was.
    pub(crate) fn with_current<T>(
        &self,
        operation: &'static str,
        calls: impl FnOnce() -> T,
    ) -> Result<T> {
        let _current = self.context().enter(operation)?;
        Ok(calls())
    }

    /// A block that is cudarc's from now on.
    pub(crate) fn forget(&self, base: DevicePtr) {
        self.shared.blocks.forget(base);
    }

    /// Takes back memory that anything may use.
    pub(crate) fn give_up(&self, base: DevicePtr) {
        self.shared.blocks.give_up(self.context(), base);
    }

    /// A stream as a queue.
    pub(crate) fn adopt_stream(&self, stream: Arc<CudaStream>) -> Result<CudaQueue> {
        CudaQueue::from_stream(self.shared.clone(), stream)
    }

    /// An event in the place to which `sync_event` points.
    pub(crate) fn adopt_event(&self, event: CudaEvent) -> Option<EventPtr> {
        Context::adopt_event(event).into_ptr()
    }

    /// Whether device memory of an ordinal, and of a context if it belongs to one, is this device's.
    fn is_own(&self, of: std::ffi::c_int, context: Option<CUcontext>) -> bool {
        of == self.context().ordinal && context.is_none_or(|raw| raw == self.cu_context())
    }

    /// The context that the memory at an address belongs to, by the driver's knowledge; `None` if it
    /// belongs to none (memory of a pool), or is not device memory.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn context_of(&self, address: DevicePtr) -> Result<Option<CUcontext>> {
        Ok(match self.kind_of(address, 1)? {
            Some(PointerKind::Device(_, context)) => context,
            _ => None,
        })
    }

    fn kind_of(&self, address: DevicePtr, bytes: usize) -> Result<Option<PointerKind>> {
        let current = self.context().enter("cuPointerGetAttributes")?;
        kind_of(self.context(), address.address(), bytes, &current)
    }

    fn page_locked(&self) -> std::sync::MutexGuard<'_, PageLocked> {
        self.page_locked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn asked(&self) -> std::sync::MutexGuard<'_, VecDeque<Asked>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY:
// - page-locked memory is host memory, and so is managed memory where the host and the device may use it
//   at once;
// - the driver vouches for the first and the last byte of what `classify` accepts; what it does not know is
//   `Host`, for which an import vouches; where it cannot answer, `Inaccessible`;
// - a completed event means that its stream's work is done and visible to the host;
// - `settle` answers when all work is done or the context is lost.
unsafe impl Backend for CudaDevice {
    fn id(&self) -> DeviceId {
        self.context().id
    }

    fn host_readable(&self) -> bool {
        self.host_readable
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(Arc::new(CudaQueue::new(self.shared.clone())?))
    }

    /// A `CUevent` cannot be told from anything else; that it is there can be seen.
    fn check_event(&self, event: EventPtr) -> Result<()> {
        let ptr = event.as_ptr().cast::<*mut ()>();
        if !ptr.is_aligned() {
            return Err(Error::argument(format!(
                "{ptr:p} is not the address of an event"
            )));
        }
        // SAFETY: `sync_event` points to a `CUevent` (contract of the import).
        if unsafe { event_of(event) }.is_null() {
            return Err(Error::argument("the event is a null handle"));
        }
        Ok(())
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        let _current = self.context().enter("cuEventQuery")?;
        // SAFETY: the caller's.
        match unsafe { (self.context().driver.cuEventQuery)(event_of(event)) } {
            code::NOT_READY => Ok(false),
            code => self.context().check("cuEventQuery", code).map(|()| true),
        }
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        let _current = self.context().enter("cuEventSynchronize")?;
        // SAFETY: the caller's.
        let code = unsafe { (self.context().driver.cuEventSynchronize)(event_of(event)) };
        self.context().check("cuEventSynchronize", code)
    }

    unsafe fn release_event(&self, event: EventPtr) {
        // SAFETY: the caller's: from `EventCell::into_ptr`, given back once.
        let cell = unsafe { Box::from_raw(event.as_ptr().cast::<context::EventCell>()) };
        self.context().recycle(cell);
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> AddressClass {
        use PointerKind as P;
        // What the driver cannot tell must not be touched.
        let Ok(Some(kind)) = self.kind_of(address, bytes) else {
            return AddressClass::Inaccessible;
        };
        match (self.memory(), kind) {
            (CudaMemory::Device, P::Device(of, context)) if self.is_own(of, context) => {
                AddressClass::Device
            }
            // Kernels of this context cannot reach it, or the host must be able to read it.
            (_, P::Device(..)) => AddressClass::Inaccessible,
            // Under the name of host memory it would be read while the device works.
            (CudaMemory::Host, P::Managed) if !self.context().reads_managed() => {
                AddressClass::Inaccessible
            }
            (_, P::Managed) | (_, P::Host { mapped: true }) => AddressClass::HostAccessible,
            (CudaMemory::Host, P::Host { mapped: false }) => AddressClass::HostAccessible,
            (_, P::Host { mapped: false } | P::Unknown) => AddressClass::Host,
        }
    }

    fn explain(&self, address: DevicePtr, bytes: usize) -> Option<String> {
        use PointerKind as P;
        let kind = match self.kind_of(address, bytes) {
            Ok(kind) => kind?,
            Err(e) => return Some(e.to_string()),
        };
        let text = match kind {
            P::Device(of, context) if self.memory() == CudaMemory::Device => {
                if of != self.context().ordinal {
                    format!("it is memory of CUDA device {of}")
                } else if self.is_own(of, context) {
                    return None;
                } else {
                    "it is memory of another context; open the device with that one \
                     (CudaConfig::with_context)"
                        .into()
                }
            }
            P::Device(of, _) => {
                format!("it is memory of CUDA device {of}, which the host cannot read")
            }
            P::Host { mapped: false } => "the device does not reach it at this address".into(),
            P::Unknown => "the driver does not know it: it is ordinary host memory, or none".into(),
            P::Managed if !self.context().reads_managed() => {
                "it is managed memory, which the host must not read while the device works".into()
            }
            P::Host { mapped: true } | P::Managed => return None,
        };
        Some(text)
    }

    fn allocate_host(&self, bytes: usize) -> Result<Option<DevicePtr>> {
        // What is page-locked itself needs no staging.
        if self.memory() == CudaMemory::Host || isize::try_from(bytes).is_err() {
            return Ok(None);
        }
        let reserve = if bytes <= SMALL { RESERVE } else { 0 };
        let limit = self.page_locked_limit.saturating_add(reserve);
        {
            let mut page_locked = self.page_locked();
            match page_locked.bytes.checked_add(bytes) {
                Some(all) if all <= limit => page_locked.bytes = all,
                _ => return Ok(None),
            }
        }
        let context = self.context();
        let allocated = context
            .enter("cuMemHostAlloc")
            .and_then(|current| blocks::allocate(context, CudaMemory::Host, bytes, &current));
        let mut page_locked = self.page_locked();
        match allocated {
            Ok(ptr) => {
                page_locked.ranges.insert(ptr.address(), bytes);
                Ok(Some(ptr))
            }
            Err(e) => {
                page_locked.bytes -= bytes;
                // Ordinary memory serves as well, slower.
                match e {
                    Error::OutOfMemory { .. } => Ok(None),
                    e => Err(e),
                }
            }
        }
    }

    unsafe fn free_host(&self, address: DevicePtr, bytes: usize) {
        self.page_locked().ranges.remove(&address.address());
        // Counted until it is really gone.
        let page_locked = self.page_locked.clone();
        let freed = move || {
            let mut page_locked = page_locked.lock().unwrap_or_else(PoisonError::into_inner);
            page_locked.bytes = page_locked.bytes.saturating_sub(bytes);
        };
        let (context, freed) = (self.context(), Box::new(freed));
        scrap(
            context,
            CudaMemory::Host,
            address,
            After::Nothing,
            Some(freed),
        );
    }

    fn copies_directly_from(&self, address: DevicePtr, bytes: usize) -> bool {
        let start = address.address();
        let Some(end) = start.checked_add(bytes) else {
            return false;
        };
        // Copies to page-locked memory are the host's own.
        if self.memory() == CudaMemory::Host {
            return start != 0;
        }
        let before = |ranges: &PageLocked| {
            let found = ranges.ranges.range(..=start).next_back();
            found.is_some_and(|(at, len)| end <= at + len)
        };
        if before(&self.page_locked()) {
            return true;
        }
        let known = |asked: &Asked| (asked.0, asked.1) == (start, bytes);
        if let Some((_, _, answer)) = self.asked().iter().find(|asked| known(asked)) {
            return *answer;
        }
        let kind = self.kind_of(address, bytes);
        let answer = matches!(kind, Ok(Some(PointerKind::Host { .. })));
        let mut asked = self.asked();
        if asked.len() == ASKED {
            asked.pop_front();
        }
        asked.push_back((start, bytes, answer));
        answer
    }

    /// Copies between CUDA devices of one process need no help of the host.
    fn reaches(&self, other: &dyn Backend) -> bool {
        let other = other.as_any().downcast_ref::<Self>();
        // Into host memory only from the own device: no call names the other's context there.
        other.is_some_and(|other| {
            self.memory() == CudaMemory::Device || other.ordinal() == self.ordinal()
        })
    }

    /// A stream waits for events of any device and context.
    fn accepts_events_of(&self, other: &dyn Backend) -> bool {
        other.as_any().is::<Self>()
    }

    unsafe fn stream_wait(&self, stream: usize, event: EventPtr) -> Result<bool> {
        let stream = std::ptr::with_exposed_provenance_mut(stream);
        // SAFETY: the caller's.
        unsafe { CudaQueue::wait_on_stream(self.context(), stream, event) }?;
        Ok(true)
    }

    fn synchronize(&self) -> Result<()> {
        self.context().synchronize()
    }

    fn settle(&self) -> Result<()> {
        match self.context().settle() {
            // At the end of the process there is no work any more, and nobody to tell.
            Err(_) if self.context().is_shut_down() => Ok(()),
            done => done,
        }
    }

    fn trim(&self) {
        self.shared.blocks.clear(self.context());
        let _ = self.context().trim_pool();
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        self.shared.blocks.clear(self.context());
        if let Some((context, stream)) = self.cudarc.take() {
            self.context().driver.let_go(context, || drop(stream));
        }
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaDevice").field(self.context()).finish()
    }
}

/// Drops something of cudarc's that lives in `of`, and leaves the caller's current context as it was.
pub(crate) fn let_go(of: Arc<CudaContext>, last: impl FnOnce()) {
    match Driver::get() {
        Ok(driver) => driver.let_go(of, last),
        // cudarc's objects need a driver, so there is one.
        Err(_) => last(),
    }
}

/// How many CUDA devices there are.
///
/// # Errors
/// [`Error::DeviceNotAvailable`] if there is no driver, and why.
pub fn device_count() -> Result<usize> {
    let absent = |reason: String| Error::DeviceNotAvailable {
        device: DeviceId::new(ArrowDeviceType::CUDA, 0),
        reason: reason.into(),
    };
    let driver = Driver::get().map_err(|why| absent(why.into()))?;
    match driver.device_count() {
        Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
        Err(code) => Err(absent(format!(
            "cuDeviceGetCount failed: {} (code {code})",
            driver.text(code)
        ))),
    }
}

/// Teaches a set the three CUDA device types. [`Devices::global`] knows them.
pub fn register(devices: &Devices) {
    for memory in [CudaMemory::Device, CudaMemory::Host, CudaMemory::Managed] {
        devices.register(memory.device_type(), move |ordinal| {
            let id = DeviceId::new(memory.device_type(), ordinal);
            let ordinal = usize::try_from(ordinal).map_err(|_| Error::DeviceNotAvailable {
                device: id,
                reason: "CUDA devices are numbered from 0".into(),
            })?;
            CudaConfig::new(ordinal).with_memory(memory).open()
        });
    }
}
