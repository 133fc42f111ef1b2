//! CUDA devices: ARROW_DEVICE_CUDA, CUDA_HOST and CUDA_MANAGED. The public way in is
//! [`crate::cuda`].
//!
//! | file | what is in it |
//! | --- | --- |
//! | `config.rs` | how a device is opened |
//! | `driver.rs` | the driver library, loaded at run time |
//! | `context.rs` | a device's context, and its memory pool |
//! | `runtime.rs` | the driver's calls, as [`gpu`](super::gpu) wants them |

mod config;
mod context;
mod driver;
mod runtime;

use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUcontext, CUdevice_attribute, CUstream};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};

pub use self::config::{CudaConfig, CudaMemory};
use self::context::Cuda;
use self::driver::Driver;
use crate::abi::ArrowDeviceType;
use crate::device::backend::{DevicePtr, EventPtr, RawQueue, device_error};
use crate::device::gpu::{
    EventCell, Gpu, GpuQueue, PointerKind, RawEvent, RawStream, Shared, absent, number_of,
};
use crate::device::{DeviceId, Devices};
use crate::error::{Error, Result};

/// What to do about streams and memory of another context.
const ADVICE: &str = "; open the device with that one (CudaConfig::with_context)";

/// A CUDA device: what its backend answers to [`Backend::as_any`](crate::device::Backend::as_any).
pub struct CudaDevice {
    shared: Shared,
    cuda: Arc<Cuda>,
    memory: CudaMemory,
    /// cudarc's handle of the primary context, once it was asked for. Its stream is there so that cudarc
    /// orders slices between streams: it does so from the first new stream on.
    cudarc: OnceLock<(Arc<CudaContext>, Arc<CudaStream>)>,
}

/// Opens a device.
fn open(config: &CudaConfig) -> Result<Gpu> {
    let id = DeviceId::new(config.memory.device_type(), config.ordinal as i64);
    let cuda = Arc::new(Cuda::new(id, config.context.clone())?);
    let managed = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY;
    if config.memory == CudaMemory::Managed && cuda.attribute(managed) == 0 {
        return Err(absent(id, "the device has no managed memory"));
    }
    let (kind, limit) = (config.memory.kind(), config.page_locked_limit);
    Gpu::new(id, cuda.clone(), kind, limit, |shared| {
        Box::new(CudaDevice {
            shared,
            cuda,
            memory: config.memory,
            cudarc: OnceLock::new(),
        })
    })
}

impl CudaDevice {
    /// The device's number in the driver.
    pub fn ordinal(&self) -> usize {
        self.cuda.ordinal as usize
    }

    /// Which memory.
    pub fn memory(&self) -> CudaMemory {
        self.memory
    }

    /// The context. It is the device's: do not destroy it.
    pub fn cu_context(&self) -> CUcontext {
        self.cuda.raw()
    }

    /// The version of CUDA that the driver speaks: 13000 for 13.0. `None` if it does not say.
    pub fn driver_version(&self) -> Option<i32> {
        self.cuda.driver.version()
    }

    /// cudarc's handle of the context. Of the primary one, the first call makes one and waits for the
    /// context's work: cudarc does so when it begins to order slices between streams. A given context is
    /// answered as it is.
    ///
    /// # Errors
    /// [`Error::Device`] if cudarc cannot retain it.
    pub fn cuda_context(&self) -> Result<Arc<CudaContext>> {
        if let Some(context) = self.cuda.given() {
            return Ok(context.clone());
        }
        if let Some((context, _)) = self.cudarc.get() {
            return Ok(context.clone());
        }
        let id = self.shared.context.id;
        let failed =
            |operation, e: DriverError| device_error(id, operation, e.0 as i32, e.to_string());
        // cudarc makes it current: the guard takes that back.
        let _current = self.shared.context.enter("cuDevicePrimaryCtxRetain")?;
        let context =
            CudaContext::new(self.ordinal()).map_err(|e| failed("CudaContext::new", e))?;
        let stream = context
            .new_stream()
            .map_err(|e| failed("CudaContext::new_stream", e))?;
        // Another thread's is of the same primary context.
        Ok(self.cudarc.get_or_init(|| (context, stream)).0.clone())
    }

    fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Runs `calls`, which call cudarc, with the device's context current, and leaves the caller's
    /// as it was.
    pub(crate) fn with_current<T>(
        &self,
        operation: &'static str,
        calls: impl FnOnce() -> T,
    ) -> Result<T> {
        let _current = self.shared.context.enter(operation)?;
        Ok(calls())
    }

    /// A block that is cudarc's from now on.
    pub(crate) fn forget(&self, base: DevicePtr) {
        self.shared.forget(base);
    }

    /// Takes back memory that anything may use.
    pub(crate) fn give_up(&self, base: DevicePtr) {
        self.shared.give_up(base);
    }

    /// A stream as a queue.
    pub(crate) fn adopt_stream(&self, stream: Arc<CudaStream>) -> Result<Arc<dyn RawQueue>> {
        let raw = RawStream(stream.cu_stream().cast());
        let is_own = !raw.is_default() || stream.context().cu_ctx() == self.cu_context();
        let queue = Box::new(CudaQueue {
            stream: stream.cu_stream(),
            given: Some(stream),
        });
        if !is_own {
            let id = self.shared.context.id;
            return Err(Error::argument(format!(
                "{id}: the stream is of another context{ADVICE}"
            )));
        }
        // SAFETY: the queue keeps cudarc's stream, which is live as long as that.
        Ok(unsafe { GpuQueue::given(self.shared.clone(), raw, queue) }?)
    }

    /// An event in the place to which `sync_event` points.
    pub(crate) fn adopt_event(&self, event: CudaEvent) -> Option<EventPtr> {
        let raw = RawEvent(event.cu_event().cast());
        EventCell::given(raw, Box::new(GivenEvent(Some(event)))).into_ptr()
    }

    /// The context that the memory at an address belongs to, by the driver's knowledge; `None` if it
    /// belongs to none (memory of a pool), or is not device memory.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn context_of(&self, address: DevicePtr) -> Result<Option<CUcontext>> {
        let context = &self.shared.context;
        let current = context.enter("cuPointerGetAttributes")?;
        Ok(
            match context.check(current.kind_of_byte(address.address()))? {
                PointerKind::Device(_, of) => of.map(std::ptr::with_exposed_provenance_mut),
                _ => None,
            },
        )
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let Some((context, stream)) = self.cudarc.take() {
            self.cuda.driver.let_go(context, || drop(stream));
        }
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaDevice")
            .field(&self.shared.context)
            .finish()
    }
}

/// A queue of a CUDA device: what it answers to [`RawQueue::as_any`](crate::device::RawQueue::as_any).
pub struct CudaQueue {
    stream: CUstream,
    given: Option<Arc<CudaStream>>,
}

// SAFETY: streams may be used on any thread.
unsafe impl Send for CudaQueue {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for CudaQueue {}

impl CudaQueue {
    fn new(stream: CUstream) -> Self {
        let given = None;
        Self { stream, given }
    }

    /// The stream. It is the queue's, or that of whoever gave it: do not destroy it. 2 stands for
    /// the calling thread's own stream.
    pub fn cu_stream(&self) -> CUstream {
        self.stream
    }

    /// The stream that was given, if one was.
    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        self.given.as_ref()
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        if let Some(stream) = self.given.take() {
            let of = stream.context().clone();
            let_go(of, move || drop(stream));
        }
    }
}

impl fmt::Debug for CudaQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaQueue({:p})", self.stream)
    }
}

/// An event of cudarc's; present until it is dropped.
struct GivenEvent(Option<CudaEvent>);

impl Drop for GivenEvent {
    fn drop(&mut self) {
        if let Some(event) = self.0.take() {
            let of = event.context().clone();
            let_go(of, move || drop(event));
        }
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
    let id = DeviceId::new(ArrowDeviceType::CUDA, 0);
    let driver = Driver::get().map_err(|why| absent(id, why))?;
    match driver.device_count() {
        Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
        Err(code) => {
            let text = driver.text(code);
            let reason = format!("cuDeviceGetCount failed: {text} (code {code})");
            Err(absent(id, reason))
        }
    }
}

/// Teaches a set the three CUDA device types. [`Devices::global`] knows them.
pub fn register(devices: &Devices) {
    for memory in [CudaMemory::Device, CudaMemory::Host, CudaMemory::Managed] {
        devices.register(memory.device_type(), move |ordinal| {
            let id = DeviceId::new(memory.device_type(), ordinal);
            let ordinal = number_of("CUDA", id)?;
            CudaConfig::new(ordinal).with_memory(memory).open()
        });
    }
}
