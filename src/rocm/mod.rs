//! AMD GPUs, on the HIP runtime, with the types of [hip-runtime-sys](https://docs.rs/hip-runtime-sys), which is
//! re-exported here.
//!
//! | device | name | memory |
//! | --- | --- | --- |
//! | ARROW_DEVICE_ROCM | `rocm:N` | the device's own, from a pool of its own |
//! | ARROW_DEVICE_ROCM_HOST | `rocm-host:N` | page-locked host memory |
//!
//! The runtime's library is loaded at the first use: the one that the process has loaded already, else
//! `libamdhip64.so.7`, `.6`, `.5` or `.so`, from HIP 5.2 on (`rocm-host` needs `hipLaunchHostFunc`, which 5.2 lacks).
//! Where there is none, or no device, opening one answers
//! [`Error::DeviceNotAvailable`] with the reason; nothing else changes. Building needs HIP's
//! headers and library, for hip-runtime-sys; the program that comes out starts without them.
//!
//! ```no_run
//! use arrow_array::record_batch;
//! use arrow_device::{Devices, Error};
//! # fn launch(_: arrow_device::rocm::hip_runtime_sys::hipStream_t, _: u64, _: usize) {}
//! # fn main() -> Result<(), Error> {
//! let batch = record_batch!(("price", Float64, [1.0, 2.0, 3.0]))?;
//! let device = Devices::open("rocm:0")?;
//! let queue = device.new_queue()?;
//! let on_device = device.upload_on(&batch, &queue)?;
//!
//! let prices = on_device.column_by_name("price")?;
//! {
//!     let values = prices.values_on::<f64>(&queue)?;       // the stream waits for the upload
//!     let address = values.address().address() as u64;
//!     launch(queue.hip_stream()?, address, values.len());  // a kernel of yours, on the queue's stream
//! }                                                        // the loan ends: the use is recorded
//! let back = on_device.to_host()?;
//! # let _ = back;
//! # Ok(())
//! # }
//! ```
//!
//! # What goes in and out
//!
//! | HIP's | becomes | and back |
//! | --- | --- | --- |
//! | `hipStream_t` | a queue: [`Queue::from_hip_stream`] | [`Queue::hip_stream`] |
//! | `hipEvent_t` | an event: [`SyncEvent::from_hip_event`] | [`SyncEvent::as_ptr`] points to the `hipEvent_t` |
//! | memory of anybody's | a buffer: [`DeviceBuffer::from_raw`](crate::DeviceBuffer::from_raw) | [`DeviceBuffer::address`](crate::DeviceBuffer::address), loans |
//!
//! # How it works
//!
//! As CUDA's backend does, with which it shares all but the calls: work runs on streams that do not wait for the
//! null stream; memory is allocated and freed in the order of streams, from a pool that keeps it until
//! [`Device::trim`](crate::Device::trim), where the device has pools; page-locked memory is recycled, and freed on
//! a thread of its own. Events have no timing, make host memory visible to the host, and are reused. Every call makes
//! the device current on its thread and leaves the thread's own as it was.
//!
//! An import asks the runtime about the first and the last byte of every buffer: the claimed device's own memory,
//! managed memory, and page-locked memory that the device reaches at that address are accepted. HIP has numbered its
//! types of memory anew in version 6; the runtime's version says which numbers hold. Of ordinary host memory HIP 5 says
//! "invalid value", and so may later ones: that is taken for an answer.
//!
//! Errors are answers of this crate's calls, and leave no last error of the thread (`hipGetLastError`) behind. If there was
//! one that the program has not asked for yet, it stays, or a newer one in its place; before HIP 7 every call of HIP puts its
//! own there, a success too.
//!
//! HIP waits when a stream is destroyed: that is done on a thread of its own, after the stream's work. Memory of a
//! stream that is being captured is freed once the capture has ended. Lists of copies are given to the runtime in one
//! call from HIP 7.1 on; where it refuses one, and before, they are single calls. If the HIP library that the process has
//! loaded goes by none of the names above (some Python wheels rename theirs), it is not found, and a second one is loaded.
//!
//! After a device has failed every call answers with the code and its text, frees included, and releases go on being
//! called once. (AMD's runtime ends the process for many a fault of a kernel.)

pub use crate::device::rocm::{
    RocmConfig, RocmDevice, RocmMemory, RocmQueue, device_count, register,
};
pub use hip_runtime_sys;

use std::any::Any;

use hip_runtime_sys::{hipEvent_t, hipStream_t};

use crate::device::{Device, Place, Queue, SyncEvent};
use crate::error::{Error, Result};

impl Device {
    /// The ROCm backend.
    ///
    /// # Errors
    /// [`Error::NotSupported`] if the device is none of ROCm's.
    pub fn as_rocm(&self) -> Result<&RocmDevice> {
        let rocm = self.backend().as_any().downcast_ref();
        rocm.ok_or_else(|| Error::NotSupported {
            device: self.id(),
            operation: "ROCm",
            reason: "it is not a ROCm device of this crate".into(),
        })
    }
}

impl Queue {
    /// A HIP stream as a queue of a device: what either is given runs in one order. `hipStreamPerThread` may
    /// be one too: what is given to it through this crate, on several threads, is ordered by events.
    ///
    /// `owner` is dropped when nothing needs the stream any more: the queue, and all memory that was allocated on it,
    /// which consumers of exports may hold for long. It may destroy the stream; for one that lives as long as the
    /// process it is `Box::new(())`.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for another device than ROCm's, [`Error::InvalidArgument`] for a
    /// stream of another device (HIP 5.4 and earlier do not tell). The owner is dropped then.
    ///
    /// # Safety
    /// The stream is of this device, or stands for a default stream, and lives until `owner` is dropped.
    pub unsafe fn from_hip_stream(
        device: &Device,
        stream: hipStream_t,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        // SAFETY: the caller's.
        let raw = unsafe { device.as_rocm()?.adopt_stream(stream, owner) }?;
        // SAFETY: the queue was just made by the device's backend.
        Ok(unsafe { device.wrap_queue(raw) })
    }

    /// The queue's stream, to launch kernels on. It is the queue's: do not destroy it, and use it no longer than the
    /// queue lives.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for a queue of another device than ROCm's.
    pub fn hip_stream(&self) -> Result<hipStream_t> {
        self.device().as_rocm()?;
        let queue = self.raw().as_any().downcast_ref::<RocmQueue>();
        let queue = queue.ok_or_else(|| Error::argument("not a queue of a ROCm device"))?;
        Ok(queue.hip_stream())
    }
}

impl SyncEvent {
    /// A recorded HIP event as an event of a device, which destroys it when it is needed no more. The work
    /// before it counts, on whatever stream it was recorded.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for another device than ROCm's, [`Error::InvalidArgument`] for a null handle: the
    /// event stays the caller's then.
    ///
    /// # Safety
    /// The event is live, and nobody records it again or destroys it.
    pub unsafe fn from_hip_event(device: &Device, event: hipEvent_t) -> Result<Self> {
        let rocm = device.as_rocm()?;
        if event.is_null() {
            return Err(Error::argument("a null event"));
        }
        // SAFETY: the caller's.
        let ptr = unsafe { rocm.adopt_event(event) };
        let ptr = ptr.ok_or_else(|| Error::argument("a null event"))?;
        // SAFETY: made by the device's backend for its own `release_event`, and given to nobody else.
        Ok(unsafe { Self::from_recorded(device.clone(), ptr, Place::alone()) })
    }
}
