//! ROCm devices: ARROW_DEVICE_ROCM and ROCM_HOST, on the HIP runtime. The public interface is
//! [`crate::rocm`].
//!
//! | file | contents |
//! | --- | --- |
//! | `config.rs` | how a device is opened |
//! | `library.rs` | the runtime's library, loaded at run time |
//! | `pointer.rs` | what the runtime reports about an address, in its version's numbers |
//! | `runtime.rs` | a device, and what HIP does differently from CUDA, for [`gpu`] |

mod config;
mod library;
mod pointer;
mod runtime;

use std::any::Any;
use std::sync::Arc;

use hip_runtime_sys::{hipEvent_t, hipStream_t};

pub use self::config::{RocmConfig, RocmMemory};
use self::library::Hip;
use self::runtime::Rocm;
use crate::abi::ArrowDeviceType;
use crate::device::backend::{EventPtr, RawQueue};
use crate::device::gpu::{
    self, Context, EventCell, Gpu, GpuQueue, Library, RawEvent, RawStream, number_of,
};
use crate::device::{DeviceId, Devices};
use crate::error::Result;

/// A ROCm device: what [`Backend::as_any`](crate::device::Backend::as_any) of its backend returns.
#[derive(Debug)]
pub struct RocmDevice {
    context: Arc<Context>,
    rocm: Arc<Rocm>,
    memory: RocmMemory,
}

/// Opens a device.
fn open(config: &RocmConfig) -> Result<Gpu> {
    let id = DeviceId::new(config.memory.device_type(), config.ordinal as i64);
    let rocm = Arc::new(Rocm::new(id)?);
    Gpu::new(id, rocm.clone(), config.memory.kind(), |context| {
        Box::new(RocmDevice {
            context,
            rocm,
            memory: config.memory,
        })
    })
}

impl RocmDevice {
    /// Returns the device's number in the runtime.
    pub fn ordinal(&self) -> usize {
        self.rocm.ordinal as usize
    }

    /// Returns which memory this device allocates.
    pub fn memory(&self) -> RocmMemory {
        self.memory
    }

    /// Returns the runtime's version when the device was opened: 50221153 for HIP 5.2.21153.
    pub fn runtime_version(&self) -> i32 {
        self.rocm.version
    }

    /// Makes a queue of a stream.
    ///
    /// # Safety
    /// The stream is of this device and live, or stands for a default stream, until `owner` is
    /// dropped.
    pub(crate) unsafe fn adopt_stream(
        &self,
        stream: hipStream_t,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn RawQueue>> {
        let raw = RawStream(stream.expose_provenance());
        let queue = Box::new(RocmQueue {
            stream: raw,
            _owner: Some(owner),
        });
        // SAFETY: the caller guarantees that the stream lives until `owner` is dropped (see
        // `# Safety`), which the queue keeps.
        let queue = unsafe { GpuQueue::given(self.context.clone(), raw, queue) }?;
        Ok(Arc::new(queue))
    }

    /// Makes a place for an event to which `sync_event` can point.
    ///
    /// # Safety
    /// The event is live, and belongs to this crate from now on.
    pub(crate) unsafe fn adopt_event(&self, event: hipEvent_t) -> Option<EventPtr> {
        let owner = GivenEvent {
            hip: self.rocm.hip,
            event: RawEvent(event.expose_provenance()),
        };
        EventCell::given(owner.event, Box::new(owner)).into_ptr()
    }
}

/// A queue of a ROCm device: what [`RawQueue::as_any`] returns.
#[derive(Debug)]
pub struct RocmQueue {
    stream: RawStream,
    /// The owner of a stream that was given.
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

impl RocmQueue {
    /// Returns the stream. It belongs to the queue, or to whoever gave it: do not destroy it.
    pub fn hip_stream(&self) -> hipStream_t {
        std::ptr::with_exposed_provenance_mut(self.stream.0)
    }
}

/// An event that was given to this crate.
struct GivenEvent {
    hip: &'static Hip,
    event: RawEvent,
}

impl Drop for GivenEvent {
    fn drop(&mut self) {
        if !self.hip.api().process.is_this() {
            return;
        }
        // HIP destroys events whatever device is current; an error has no place to go.
        // SAFETY: the caller of `adopt_event` gave the event to this crate, and nothing uses it any
        // more.
        let destroy = || unsafe { self.hip.api().destroy_event(self.event) };
        let _ = self.hip.quietly(destroy);
    }
}

/// Returns the number of ROCm devices.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`](crate::Error::DeviceNotAvailable) with the reason if there
/// is no HIP runtime.
pub fn device_count() -> Result<usize> {
    gpu::device_count::<Hip>(ArrowDeviceType::ROCM)
}

/// Registers the two ROCm device types with a set of devices. [`Devices::global`] has them already.
pub fn register(devices: &Devices) {
    for memory in [RocmMemory::Device, RocmMemory::Host] {
        devices.register(memory.device_type(), move |ordinal| {
            let id = DeviceId::new(memory.device_type(), ordinal);
            let ordinal = number_of("ROCm", id)?;
            RocmConfig::new(ordinal).with_memory(memory).open()
        });
    }
}
