//! NVIDIA GPUs, and conversions to and from the types of [cudarc](https://docs.rs/cudarc), which is
//! re-exported here.
//!
//! | device | name | memory |
//! | --- | --- | --- |
//! | ARROW_DEVICE_CUDA | `cuda:N` | the device's own memory, from a pool of this crate's |
//! | ARROW_DEVICE_CUDA_HOST | `cuda-host:N` | page-locked host memory |
//! | ARROW_DEVICE_CUDA_MANAGED | `cuda-managed:N` | managed memory |
//!
//! The driver's library is loaded at the first use: the one that the process has loaded already, or
//! else `libcuda.so.1` or `libcuda.so` (`nvcuda.dll` on Windows). Without a driver or a device,
//! opening a device returns [`Error::DeviceNotAvailable`](crate::Error::DeviceNotAvailable) with the reason; everything else works as
//! usual. The oldest supported version is CUDA 11.4, cudarc's oldest.
//!
//! cudarc loads the library by itself, at its own first use, and looks for `libcuda.so` first. If
//! the CUDA toolkit's folder `stubs` is on the library path, that is a stub, every call of which
//! returns `CUDA_ERROR_STUB_LIBRARY`: this crate uses the driver all the same, unless the stub was
//! loaded before it, but the conversions below fail. Remove the folder from the path; it serves
//! only to link programs.
//!
//! ```no_run
//! use arrow_array::{RecordBatch, record_batch};
//! use arrow_device::cuda::cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
//! use arrow_device::{DeviceArray, DeviceBufferMut, Devices, Error};
//! # fn load(_: std::sync::Arc<arrow_device::cuda::cudarc::driver::CudaContext>) -> CudaFunction { panic!("{}", "from a module") }
//! # fn main() -> Result<(), Error> {
//! let batch = record_batch!(("price", Float64, [1.0, 2.0, 3.0]))?;
//! let device = Devices::open("cuda:0")?;
//! let queue = device.new_queue()?;
//! let on_device = device.upload_on(&batch, &queue)?;
//! let kernel: CudaFunction = load(device.cuda_context()?);  // void twice(const double*, double*, size_t)
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
//! The example `cuda_kernel` is complete, nulls included. A program that loads a kernel's PTX
//! through cudarc enables cudarc's feature `nvrtc` itself, for the same version:
//! `cudarc = { version = "0.19", features = ["nvrtc"], default-features = false }`.
//!
//! # Conversions
//!
//! | type of cudarc's | becomes | and back |
//! | --- | --- | --- |
//! | `CudaContext` | a device: [`Device::from_cuda_context`](crate::Device::from_cuda_context) | [`Device::cuda_context`](crate::Device::cuda_context) |
//! | `CudaStream` | a queue: [`Queue::from_cuda_stream`](crate::Queue::from_cuda_stream) | [`Queue::cuda_stream`](crate::Queue::cuda_stream) |
//! | `CudaEvent` | an event: [`SyncEvent::from_cuda_event`](crate::SyncEvent::from_cuda_event) | [`SyncEvent::as_ptr`](crate::SyncEvent::as_ptr) points to the `CUevent` |
//! | `CudaSlice<T>` | a buffer: [`DeviceBuffer::from_cuda_slice`](crate::DeviceBuffer::from_cuda_slice) | [`DeviceBuffer::try_into_cuda_slice`](crate::DeviceBuffer::try_into_cuda_slice) |
//! | a kernel's argument | | loans ([`DeviceBuffer::on`](crate::DeviceBuffer::on), [`DeviceArray::values_on`](crate::DeviceArray::values_on), ...) and [`DeviceBufferMut`](crate::DeviceBufferMut) |
//!
//! [`DeviceArray::from_values`](crate::DeviceArray::from_values) makes a column of a buffer, and
//! [`DeviceArray::with_values`](crate::DeviceArray::with_values) one with the nulls of the kernel's
//! input. Each conversion keeps the order of streams and events, and no call of this crate changes
//! the current context (cudarc's own calls do). cudarc is part of this crate's interface: another
//! minor version of it is a breaking change.
//!
//! # How it works
//!
//! Work runs on streams that do not wait for the legacy default stream. Memory is allocated and
//! freed in the order of streams, from a pool that keeps it until
//! [`Device::trim`](crate::Device::trim). Events have no timing and are reused.
//!
//! Page-locked and managed memory, and device memory where there is no pool, is recycled. The
//! driver may wait for the device and for host functions when it frees such memory, and other
//! threads' calls wait with it. So it is freed only where the device is waited for in any case: by
//! [`Device::synchronize`](crate::Device::synchronize), which leaves up to 256 MiB for reuse, by
//! [`Device::trim`](crate::Device::trim), after the device was dropped, or when an allocation finds
//! too little. A device holds at most 2 GiB of page-locked memory for staging and downloads; beyond
//! that, or if the driver refuses page-locked memory for whatever reason, ordinary memory serves,
//! which is slower. If more than 1 GiB of other blocks is idle and none fits, the next allocation
//! waits for the device to free some.
//!
//! An allocation that finds too little memory waits for the device's work, which may free more,
//! frees what is idle, and tries again; only then it returns
//! [`Error::OutOfMemory`](crate::Error::OutOfMemory).
//!
//! The driver copies between host memories, as `cuda-host` does, in the order of the stream, and the
//! call returns when that is done: such copies wait for the stream's earlier work.
//!
//! # Streams that are given
//!
//! A stream that is being captured into a graph is refused when it becomes a queue
//! ([`Queue::from_cuda_stream`](crate::Queue::from_cuda_stream)), and a queue refuses work while its
//! stream is captured, because the work would run later, when its memory may be gone.
//! Captures of other streams stay as they are, but CUDA lets nobody wait for a whole context while
//! one of its streams is captured: [`Device::synchronize`](crate::Device::synchronize) is an error
//! then, and may end the capture. `trim`, an allocation that finds too little memory, and the end of a
//! device wait for the context too.
//!
//! A per-thread default stream, which is another one on each thread, and a stream of a green context
//! are refused too; use an ordinary stream of the device's context.
//!
//! Memory of a pool cannot be shared through the older interprocess handles (`cuIpcGetMemHandle`),
//! and kernels of another device reach it only after `cuMemPoolSetAccess`. This crate does not call
//! that function, because copies between devices do not need it and may go wrong after it
//! (reported for `cuMemcpyPeerAsync`).
//!
//! An import asks the driver once for each allocation; where the driver does not report its range,
//! about the first and the last byte of the buffer. It accepts memory of the device that the import
//! names, managed memory, and page-locked memory that the device reaches at that address. It
//! refuses ordinary host memory under each of CUDA's device types, and device memory that belongs
//! to another context, since only that context's kernels reach it.
//!
//! After a kernel has failed (with an illegal address, for example), CUDA refuses all further work
//! of that context for the rest of the process. Every call, frees included, returns the code and
//! its text; releases are still called once.
//!
//! CUDA sends no notification when an event completes. A thread polls the events that something
//! waits for without blocking ([`SyncEvent::notify`](crate::SyncEvent::notify), releases), at least
//! once per millisecond unless there are many.
//!
//! A thread that waits for the device asks it again and again, which returns soonest.
//!
//! After a `fork`, CUDA works in the parent only. In the child everything may be dropped or
//! released (nothing is freed, because it is the parent's, and nothing waits), every other use of a
//! device is an error that says so, and host arrays in page-locked or managed memory must not be
//! read. Do not fork while another thread is inside a call of this crate. A child that needs a
//! device is started with `exec` (Python's multiprocessing: the start method "spawn").

mod interop;

pub use crate::device::cuda::{device_count, register};
pub use cudarc;
