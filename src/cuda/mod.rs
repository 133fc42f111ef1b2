//! NVIDIA GPUs, and the way to and from [cudarc](https://docs.rs/cudarc), which is re-exported here.
//!
//! | device | name | memory |
//! | --- | --- | --- |
//! | ARROW_DEVICE_CUDA | `cuda:N` | the device's own, from a pool of its own |
//! | ARROW_DEVICE_CUDA_HOST | `cuda-host:N` | page-locked host memory |
//! | ARROW_DEVICE_CUDA_MANAGED | `cuda-managed:N` | managed memory |
//!
//! The driver's library is loaded at the first use. Where there is none, or no device, opening one
//! answers [`Error::DeviceNotAvailable`] with the reason; nothing else
//! changes. cudarc's oldest version is CUDA 11.4.
//!
//! ```no_run
//! use arrow_array::{RecordBatch, record_batch};
//! use arrow_device::cuda::cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
//! use arrow_device::{DeviceArray, DeviceBufferMut, Devices, Error};
//! # fn load(_: &arrow_device::cuda::CudaDevice) -> CudaFunction { panic!("{}", "from a module") }
//! # fn main() -> Result<(), Error> {
//! let batch = record_batch!(("price", Float64, [1.0, 2.0, 3.0]))?;
//! let device = Devices::open("cuda:0")?;
//! let queue = device.new_queue()?;
//! let on_device = device.upload_on(&batch, &queue)?;
//! let kernel: CudaFunction = load(device.as_cuda()?);      // void twice(const double*, double*, size_t)
//!
//! let prices = on_device.column_by_name("price")?;
//! let mut twice = DeviceBufferMut::allocate(&queue, 3 * 8)?;
//! {
//!     let values = prices.values_on::<f64>(&queue)?;       // the stream waits for the upload
//!     let rows = values.len();
//!     let stream = queue.cuda_stream()?;
//!     let mut launch = stream.launch_builder(&kernel);
//!     launch.arg(&values).arg(&mut twice).arg(&rows);
//!     // SAFETY: the arguments are the kernel's, and it stays within `rows`.
//!     unsafe { launch.launch(LaunchConfig::for_num_elems(3)) }.unwrap();
//! }                                                        // the loan ends: the use is recorded
//! let column = prices.with_values(prices.data_type().clone(), twice.freeze()?)?; // null where `prices` is
//! # let _ = column;
//! # Ok(())
//! # }
//! ```
//!
//! The example `cuda_kernel` is the whole of it, nulls included. To load a kernel's PTX through cudarc a program
//! names cudarc's feature `nvrtc` itself, on the same version: `cudarc = { version = "0.19", features = ["nvrtc"],
//! default-features = false }`.
//!
//! # What goes in and out
//!
//! | cudarc's | becomes | and back |
//! | --- | --- | --- |
//! | `CudaContext` | a device: [`CudaConfig::with_context`] | [`CudaDevice::cuda_context`] |
//! | `CudaStream` | a queue: [`Queue::from_cuda_stream`](crate::Queue::from_cuda_stream) | [`Queue::cuda_stream`](crate::Queue::cuda_stream) |
//! | `CudaEvent` | an event: [`SyncEvent::from_cuda_event`](crate::SyncEvent::from_cuda_event) | [`SyncEvent::as_ptr`](crate::SyncEvent::as_ptr) points to the `CUevent` |
//! | `CudaSlice<T>` | a buffer: [`DeviceBuffer::from_cuda_slice`](crate::DeviceBuffer::from_cuda_slice) | [`DeviceBuffer::try_into_cuda_slice`](crate::DeviceBuffer::try_into_cuda_slice) |
//! | a kernel's argument | | loans ([`DeviceBuffer::on`](crate::DeviceBuffer::on), [`DeviceArray::values_on`](crate::DeviceArray::values_on), ...) and [`DeviceBufferMut`](crate::DeviceBufferMut) |
//!
//! A buffer becomes a column with [`DeviceArray::from_values`](crate::DeviceArray::from_values), or with the nulls of
//! the kernel's input with [`DeviceArray::with_values`](crate::DeviceArray::with_values). Streams and
//! events keep their order in each of these; no call of this crate leaves another context current than it found
//! (cudarc's own do). cudarc is part of this crate's interface: another minor version of it is a breaking change.
//!
//! # How it works
//!
//! Work runs on streams that do not wait for the legacy default stream. Memory is allocated and freed in
//! the order of streams, from a pool that keeps it until [`Device::trim`](crate::Device::trim); page-locked
//! and managed memory is recycled, and freed on a thread of its own, since the driver waits for the device
//! then. Events have no timing and are reused. An import asks the driver about the first and the last byte of
//! every buffer: the claimed device's own memory, managed memory, and page-locked memory that the device
//! reaches at that address are accepted. Ordinary host memory is refused under all of CUDA's names, and so is
//! device memory that belongs to another context, whose kernels alone reach it.
//!
//! After a kernel has failed (an illegal address, say), CUDA refuses everything of that context for the rest of
//! the process: every call answers with the code and its text, frees included, and releases go on being called once.
//!
//! CUDA tells nobody when an event completes: who waits for one without a thread
//! ([`SyncEvent::notify`](crate::SyncEvent::notify), releases) is served by a thread that asks again and
//! again, every millisecond at the longest unless it has much to ask about.
//!
//! A per-thread default stream may be a queue: what is given to it through this crate, on several threads, is
//! ordered by events. Kernels that the program itself launches on such a stream must be launched, and their loans
//! dropped, on one thread.

mod kernel;
mod slices;
mod streams;

pub use crate::device::cuda::{
    CudaConfig, CudaDevice, CudaMemory, CudaQueue, device_count, register,
};
pub use cudarc;
pub use streams::QueueStream;

use crate::device::Device;
use crate::error::{Error, Result};

impl Device {
    /// The CUDA backend.
    ///
    /// # Errors
    /// [`Error::NotSupported`] if the device is none of CUDA's.
    pub fn as_cuda(&self) -> Result<&CudaDevice> {
        let cuda = self.backend().as_any().downcast_ref();
        cuda.ok_or_else(|| Error::NotSupported {
            device: self.id(),
            operation: "CUDA",
            reason: "it is not a CUDA device of this crate".into(),
        })
    }
}
