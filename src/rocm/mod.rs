//! AMD GPUs, through the HIP runtime, with the types of
//! [hip-runtime-sys](https://docs.rs/hip-runtime-sys), which is re-exported here.
//!
//! | device | name | memory |
//! | --- | --- | --- |
//! | ARROW_DEVICE_ROCM | `rocm:N` | the device's own memory, from a pool of this crate's |
//! | ARROW_DEVICE_ROCM_HOST | `rocm-host:N` | page-locked host memory |
//!
//! The runtime's library is loaded at the first use: the one that the process has loaded already,
//! or else `libamdhip64.so.7`, `.6`, `.5` or `.so`, from HIP 5.2 on. Without a library or a device,
//! opening a device returns
//! [`Error::DeviceNotAvailable`] with the reason; everything else works as usual. Building needs
//! HIP's headers and library, for hip-runtime-sys; the built program starts without them.
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
//! # Conversions
//!
//! | type of HIP's | becomes | and back |
//! | --- | --- | --- |
//! | `hipStream_t` | a queue: [`Queue::from_hip_stream`] | [`Queue::hip_stream`] |
//! | `hipEvent_t` | an event: [`SyncEvent::from_hip_event`] | [`SyncEvent::as_ptr`] points to the `hipEvent_t` |
//! | any memory | a buffer: [`DeviceBuffer::from_raw`](crate::DeviceBuffer::from_raw) | [`DeviceBuffer::address`](crate::DeviceBuffer::address), loans |
//!
//! # How it works
//!
//! The backend shares everything but the vendor's calls with CUDA's. Work runs on streams that do
//! not wait for the null stream. Memory is allocated and freed in the order of streams, from a pool
//! that keeps it until [`Device::trim`](crate::Device::trim), if the device has pools. Page-locked
//! memory, and device memory without a pool, is recycled, and freed as the module `cuda` describes:
//! where the device is waited for. Events have no timing, make host memory visible to the host, and
//! are reused. Every call makes the device current on its thread, and restores the thread's own
//! device afterwards.
//!
//! An import asks the runtime three times for each allocation that is not the device's own; where the runtime does not report its
//! range, about the first and the last byte of the buffer. It accepts memory of the device that the
//! import names, managed memory, and page-locked memory that the device reaches at that address.
//! HIP 6 has given its memory types other numbers; the runtime's version says which numbers hold.
//! For ordinary host memory HIP 5 returns "invalid value", and later versions may do so too: the
//! import accepts that as the answer.
//!
//! Errors are returned, and leave no last error of the thread (`hipGetLastError`) behind. If the
//! program has not read an earlier last error yet, that one stays, or a newer one in its place;
//! before HIP 7 every HIP call sets it, even on success.
//!
//! HIP waits when a stream is destroyed, so this crate destroys it later, after the stream's work.
//! What the module `cuda` says of streams that are captured and of per-thread default streams holds
//! for HIP's too: they are refused. Copies between host memories, as `rocm-host` does, wait for the
//! stream's earlier work. If the HIP library that the process has loaded has none of the names above
//! (some Python wheels rename theirs), it is not found, and a second one is loaded.
//!
//! A thread that waits for the device asks it again and again, which returns soonest. After a `fork`, devices work in the
//! parent only: in the child everything may be dropped or released (nothing is freed, and nothing
//! waits), every other use is an error that says so, and host arrays in page-locked memory must not
//! be read. Do not fork while another thread is inside a call of this crate.
//!
//! After a device has failed, every call, frees included, returns the code and its text; releases
//! are still called once. (AMD's runtime ends the process for many faults of a kernel.)

pub use crate::device::rocm::{device_count, register};
pub use hip_runtime_sys;

use std::any::Any;

use hip_runtime_sys::{hipEvent_t, hipStream_t};

use crate::device::engine::{Engine, Runtime};
use crate::device::gpu::{Event, Gpu, Origin, RawEvent, RawStream, Stream};
use crate::device::rocm::Rocm;
use crate::device::{Device, Queue, SyncEvent};
use crate::error::{Error, Result};

impl Queue {
    /// Makes a queue of a HIP stream: work given to either runs in one order. While the stream is
    /// captured into a graph, the queue refuses work; memory that would be freed in its order is
    /// freed when the device is waited for.
    ///
    /// `owner` is dropped when nothing needs the stream any more: neither the queue, nor memory that
    /// was allocated on it, which consumers of exports may hold for long, nor its work, of which the
    /// next new or dropped queue or wait for the device sees the end. Its drop may destroy the stream. For a stream that lives as long as the process, pass `Box::new(())`.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device is not a ROCm device, and
    /// [`Error::InvalidArgument`] for a stream of another device (which HIP 5.4 and earlier cannot
    /// tell), for one that is being captured, and for `hipStreamPerThread`. The owner is dropped
    /// then.
    ///
    /// # Safety
    /// The stream is of this device, or stands for a default stream, and lives until `owner` is
    /// dropped.
    pub unsafe fn from_hip_stream(
        device: &Device,
        stream: hipStream_t,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        let context = &Engine::<Gpu<Rocm>>::of(device)?.runtime().context;
        let raw = RawStream(stream.expose_provenance());
        // SAFETY: the caller guarantees a stream of this device that lives until `owner` is dropped (see `# Safety`).
        unsafe { Engine::<Gpu<Rocm>>::adopt(device, Stream::given(context, raw, owner)?) }
    }

    /// Returns the queue's stream, to launch kernels on. It belongs to the queue: do not destroy
    /// it, and do not use it after the queue is dropped.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the queue's device is not a ROCm device.
    pub fn hip_stream(&self) -> Result<hipStream_t> {
        let raw = Engine::<Gpu<Rocm>>::stream(self)?.lend();
        Ok(std::ptr::with_exposed_provenance_mut(raw.0))
    }
}

impl SyncEvent {
    /// Makes an event of a device from a recorded HIP event, which is destroyed when it is needed
    /// no more. It stands for the work before it on the stream on which it was recorded.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device is not a ROCm device, and
    /// [`Error::InvalidArgument`] for a null handle. The caller keeps the event then.
    ///
    /// # Safety
    /// The event is live, and nothing else records it again or destroys it.
    pub unsafe fn from_hip_event(device: &Device, event: hipEvent_t) -> Result<Self> {
        let engine = Engine::<Gpu<Rocm>>::of(device)?;
        if event.is_null() {
            return Err(Error::argument("a null event"));
        }
        // After an error the caller keeps the event, also in a child of the process.
        let _inside = engine.runtime().health().enter()?;
        // The caller guarantees a live event that it gives to this crate (see `# Safety`).
        let (context, raw) = (
            &engine.runtime().context,
            RawEvent(event.expose_provenance()),
        );
        engine.give_event(device, Event::new(context, raw, Origin::Given))
    }
}
