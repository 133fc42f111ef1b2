//! CUDA devices: ARROW_DEVICE_CUDA, CUDA_HOST and CUDA_MANAGED. The public interface is
//! [`crate::cuda`].
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | how a device is opened |
//! | `driver.rs` | the driver library, loaded at run time |
//! | `runtime.rs` | a device's context, and what CUDA does differently from HIP, for [`gpu`] |

mod config;
mod driver;
mod runtime;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{CUcontext, CUdevice_attribute as Has, CUstream};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};

pub use self::config::{CudaConfig, CudaMemory};
use self::driver::Driver;
use self::runtime::Cuda;
use crate::abi::ArrowDeviceType;
use crate::device::backend::{DevicePtr, EventPtr, RawQueue, device_error};
use crate::device::gpu::{
    self, Context, EventCell, Gpu, GpuQueue, Library, PointerKind, RawEvent, RawStream, absent,
    number_of,
};
use crate::device::{DeviceId, Devices};
use crate::error::{Error, Result};

/// What a user can do about streams and memory of another context.
const ADVICE: &str = "; open the device with that one (CudaConfig::with_context)";

/// A CUDA device: what [`Backend::as_any`](crate::device::Backend::as_any) of its backend returns.
#[derive(Debug)]
pub struct CudaDevice {
    /// Calls of cudarc are made between its `enter` and the drop of what that returns.
    pub(crate) context: Arc<Context>,
    cuda: Arc<Cuda>,
    memory: CudaMemory,
    /// cudarc's handle of the primary context, once `cuda_context` has made it. Its stream makes
    /// cudarc order slices between streams, which it does from the first new stream on.
    cudarc: OnceLock<(Arc<CudaContext>, Arc<CudaStream>)>,
}

/// Opens a device.
fn open(config: &CudaConfig) -> Result<Gpu> {
    let id = DeviceId::new(config.memory.device_type(), config.ordinal as i64);
    let cuda = Arc::new(Cuda::new(id, config.context.clone())?);
    if config.memory == CudaMemory::Managed && !cuda.has(Has::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) {
        return Err(absent(id, "the device has no managed memory"));
    }
    Gpu::new(id, cuda.clone(), config.memory.kind(), |context| {
        Box::new(CudaDevice {
            context,
            cuda,
            memory: config.memory,
            cudarc: OnceLock::new(),
        })
    })
}

impl CudaDevice {
    /// Returns the device's number in the driver.
    pub fn ordinal(&self) -> usize {
        self.cuda.ordinal as usize
    }

    /// Returns which memory this device allocates.
    pub fn memory(&self) -> CudaMemory {
        self.memory
    }

    /// Returns the context. It belongs to the device: do not destroy it.
    pub fn cu_context(&self) -> CUcontext {
        self.cuda.raw
    }

    /// Returns the newest version of CUDA that the driver supports: 13000 for 13.0. `None` if the
    /// driver does not say.
    pub fn driver_version(&self) -> Option<i32> {
        self.cuda.driver.api().version()
    }

    /// Returns cudarc's handle of the context. For the primary context, the first call makes the
    /// handle and waits for the context's work: cudarc does so when it begins to order slices
    /// between streams. A context that was passed to [`CudaConfig::with_context`] is returned as it
    /// is.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if cudarc cannot retain the context.
    pub fn cuda_context(&self) -> Result<Arc<CudaContext>> {
        if let Some(context) = &self.cuda.given {
            return Ok(context.clone());
        }
        if let Some((context, _)) = self.cudarc.get() {
            return Ok(context.clone());
        }
        let id = self.context.id;
        let failed =
            |operation, e: DriverError| device_error(id, operation, e.0 as i32, e.to_string());
        // cudarc makes the context current; the guard undoes that.
        let _current = self.context.enter()?;
        let context =
            CudaContext::new(self.ordinal()).map_err(|e| failed("CudaContext::new", e))?;
        let stream = context
            .new_stream()
            .map_err(|e| failed("CudaContext::new_stream", e))?;
        // A handle that another thread made meanwhile is of the same primary context.
        Ok(self.cudarc.get_or_init(|| (context, stream)).0.clone())
    }

    /// Makes a queue of a stream.
    pub(crate) fn adopt_stream(&self, stream: Arc<CudaStream>) -> Result<Arc<dyn RawQueue>> {
        let raw = RawStream(stream.cu_stream().expose_provenance());
        let is_own = !raw.is_default() || stream.context().cu_ctx() == self.cu_context();
        let queue = Box::new(CudaQueue {
            stream: raw,
            given: Some(stream),
            lent: Arc::default(),
        });
        if !is_own {
            let id = self.context.id;
            return Err(Error::argument(format!(
                "{id}: the stream belongs to another context{ADVICE}"
            )));
        }
        // SAFETY: the queue keeps cudarc's stream, which keeps the raw one alive.
        let queue = unsafe { GpuQueue::given(self.context.clone(), raw, queue) }?;
        Ok(Arc::new(queue))
    }

    /// Makes a place for an event to which `sync_event` can point.
    pub(crate) fn adopt_event(&self, event: CudaEvent) -> Option<EventPtr> {
        let raw = RawEvent(event.cu_event().expose_provenance());
        EventCell::given(raw, Box::new(GivenEvent(Some(event)))).into_ptr()
    }

    /// Asks the driver for the context to which the memory at an address belongs. Returns `None` if
    /// it belongs to none (as memory of a pool does), or is not device memory.
    ///
    /// # Errors
    /// Returns [`Error::Device`] with the driver's error.
    pub fn context_of(&self, address: DevicePtr) -> Result<Option<CUcontext>> {
        let current = self.context.enter()?;
        let found = self.context.check(current.look_up(address.address()))?;
        Ok(match found.kind {
            PointerKind::Device(_, of) => of.map(std::ptr::with_exposed_provenance_mut),
            _ => None,
        })
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if let Some((context, stream)) = self.cudarc.take() {
            self.cuda.driver.let_go(context, stream);
        }
    }
}

/// A queue of a CUDA device: what [`RawQueue::as_any`] returns.
#[derive(Debug)]
pub struct CudaQueue {
    stream: RawStream,
    given: Option<Arc<CudaStream>>,
    /// Shared with the [`GpuQueue`].
    lent: Arc<AtomicBool>,
}

impl CudaQueue {
    /// Returns the stream. It belongs to the queue, or to the cudarc stream that the queue was made
    /// of: do not destroy it.
    pub fn cu_stream(&self) -> CUstream {
        std::ptr::with_exposed_provenance_mut(self.stream.0)
    }

    /// Says that others have the stream from now on, and may capture it.
    pub(crate) fn lend(&self) {
        self.lent.store(true, Ordering::Relaxed);
    }

    /// Returns the cudarc stream that the queue was made of, if it was made of one.
    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        self.given.as_ref()
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        if let Some(stream) = self.given.take() {
            let_go(stream.context().clone(), stream);
        }
    }
}

/// cudarc's event; present until `drop`.
struct GivenEvent(Option<CudaEvent>);

impl Drop for GivenEvent {
    fn drop(&mut self) {
        if let Some(event) = self.0.take() {
            let_go(event.context().clone(), event);
        }
    }
}

/// Drops something of cudarc's that lives in `of`, and leaves the caller's current context as it
/// was.
pub(crate) fn let_go<T>(of: Arc<CudaContext>, last: T) {
    match Driver::get() {
        Ok(driver) => driver.let_go(of, last),
        // cudarc's objects need a driver, so there is one.
        Err(_) => drop(last),
    }
}

/// Returns the number of CUDA devices.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`] with the reason if there is no driver.
pub fn device_count() -> Result<usize> {
    gpu::device_count::<Driver>(ArrowDeviceType::CUDA)
}

/// Registers the three CUDA device types with a set of devices. [`Devices::global`] has them
/// already.
pub fn register(devices: &Devices) {
    for memory in [CudaMemory::Device, CudaMemory::Host, CudaMemory::Managed] {
        devices.register(memory.device_type(), move |ordinal| {
            let id = DeviceId::new(memory.device_type(), ordinal);
            let ordinal = number_of("CUDA", id)?;
            CudaConfig::new(ordinal).with_memory(memory).open()
        });
    }
}
