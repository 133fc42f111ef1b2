//! ROCm devices: ARROW_DEVICE_ROCM and ROCM_HOST, on the HIP runtime. The public way in is
//! [`crate::rocm`].
//!
//! | file | what is in it |
//! | --- | --- |
//! | `config.rs` | how a device is opened |
//! | `library.rs` | the runtime's library, loaded at run time |
//! | `device.rs` | a device, and its memory pool |
//! | `pointer.rs` | what the runtime says of an address, in its version's numbers |
//! | `runtime.rs` | the runtime's calls, as [`gpu`](super::gpu) wants them |

mod config;
mod device;
mod library;
mod pointer;
mod runtime;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use hip_runtime_sys::{hipEvent_t, hipStream_t};

pub use self::config::{RocmConfig, RocmMemory};
use self::device::Rocm;
use self::library::Hip;
use crate::abi::ArrowDeviceType;
use crate::device::backend::{EventPtr, RawQueue};
use crate::device::gpu::{
    EventCell, Gpu, GpuQueue, RawEvent, RawStream, Shared, absent, number_of,
};
use crate::device::{DeviceId, Devices};
use crate::error::Result;

/// A ROCm device: what its backend answers to [`Backend::as_any`](crate::device::Backend::as_any).
pub struct RocmDevice {
    shared: Shared,
    rocm: Arc<Rocm>,
    memory: RocmMemory,
}

/// Opens a device.
fn open(config: &RocmConfig) -> Result<Gpu> {
    let id = DeviceId::new(config.memory.device_type(), config.ordinal as i64);
    let (kind, limit) = (config.memory.kind(), config.page_locked_limit);
    let rocm = Arc::new(Rocm::new(id, kind)?);
    Gpu::new(id, rocm.clone(), kind, limit, |shared| {
        Box::new(RocmDevice {
            shared,
            rocm,
            memory: config.memory,
        })
    })
}

impl RocmDevice {
    /// The device's number in the runtime.
    pub fn ordinal(&self) -> usize {
        self.rocm.ordinal as usize
    }

    /// Which memory.
    pub fn memory(&self) -> RocmMemory {
        self.memory
    }

    /// The runtime's version, as it was when the device was opened: 50221153 for HIP 5.2.21153.
    pub fn runtime_version(&self) -> i32 {
        self.rocm.version
    }

    fn shared(&self) -> &Shared {
        &self.shared
    }

    /// A stream as a queue.
    ///
    /// # Safety
    /// The stream is of this device and live, or stands for a default stream, until `owner` is dropped.
    pub(crate) unsafe fn adopt_stream(
        &self,
        stream: hipStream_t,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn RawQueue>> {
        let raw = RawStream(stream.cast());
        let queue = Box::new(RocmQueue {
            stream: raw,
            _owner: Some(owner),
        });
        // SAFETY: the caller's; the queue keeps the owner.
        Ok(unsafe { GpuQueue::given(self.shared.clone(), raw, queue) }?)
    }

    /// An event in the place to which `sync_event` points.
    ///
    /// # Safety
    /// The event is live, and this crate's from now on.
    pub(crate) unsafe fn adopt_event(&self, event: hipEvent_t) -> Option<EventPtr> {
        let owner = GivenEvent {
            hip: self.rocm.hip,
            event: RawEvent(event.cast()),
        };
        EventCell::given(owner.event, Box::new(owner)).into_ptr()
    }
}

impl fmt::Debug for RocmDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RocmDevice")
            .field(&self.shared.context)
            .finish()
    }
}

/// A queue of a ROCm device: what it answers to [`RawQueue::as_any`](crate::device::RawQueue::as_any).
pub struct RocmQueue {
    stream: RawStream,
    /// Of a stream that was given.
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

impl RocmQueue {
    /// Of a stream of this crate's.
    fn new(stream: RawStream) -> Self {
        Self {
            stream,
            _owner: None,
        }
    }

    /// The stream. It is the queue's, or that of whoever gave it: do not destroy it. 2 stands for
    /// the calling thread's own stream.
    pub fn hip_stream(&self) -> hipStream_t {
        self.stream.0.cast()
    }
}

impl fmt::Debug for RocmQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RocmQueue({:p})", self.stream.0)
    }
}

/// An event that was given to this crate.
struct GivenEvent {
    hip: &'static Hip,
    event: RawEvent,
}

impl Drop for GivenEvent {
    fn drop(&mut self) {
        // SAFETY: it was given (contract of `adopt_event`), and is used no more. HIP destroys events
        // whatever device is current; there is nobody to tell of an error.
        let destroy = || unsafe { (self.hip.hipEventDestroy)(self.event.0.cast()) };
        self.hip.quietly(destroy);
    }
}

/// How many ROCm devices there are.
///
/// # Errors
/// [`Error::DeviceNotAvailable`](crate::Error::DeviceNotAvailable) if there is no HIP runtime, and why.
pub fn device_count() -> Result<usize> {
    let id = DeviceId::new(ArrowDeviceType::ROCM, 0);
    let hip = Hip::get().map_err(|why| absent(id, why))?;
    match hip.device_count() {
        Ok(count) => Ok(usize::try_from(count).unwrap_or(0)),
        Err(code) => {
            let text = hip.text(code);
            let reason = format!("hipGetDeviceCount failed: {text} (code {code})");
            Err(absent(id, reason))
        }
    }
}

/// Teaches a set the two ROCm device types. [`Devices::global`] knows them.
pub fn register(devices: &Devices) {
    for memory in [RocmMemory::Device, RocmMemory::Host] {
        devices.register(memory.device_type(), move |ordinal| {
            let id = DeviceId::new(memory.device_type(), ordinal);
            let ordinal = number_of("ROCm", id)?;
            RocmConfig::new(ordinal).with_memory(memory).open()
        });
    }
}
