//! The Arrow C Device data interface for arrow-rs: device memory with an owner, zero-copy exchange of
//! arrays, batches and streams, and staging to and from host memory.
//!
//! # The model
//!
//! | type | what it is |
//! | --- | --- |
//! | [`Device`] | memory, queues and counters; found through [`Devices`] |
//! | [`Queue`], [`SyncEvent`] | device work in order; a point in it |
//! | [`DeviceBuffer`] | memory of a device, with the owner that keeps it alive |
//! | [`DeviceArray`], [`DeviceRecordBatch`] | Arrow data in that memory, of any type |
//! | [`HostSlab`] | host memory that becomes an arrow `Buffer` without a copy |
//! | [`FFI_ArrowDeviceArray`], [`FFI_ArrowDeviceArrayStream`] | the C structs of the specification |
//!
//! ```
//! use arrow_array::record_batch;
//! use arrow_device::{DeviceRecordBatch, Devices, Error, SyncPolicy};
//! # fn main() -> Result<(), Error> {
//! let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
//! let device = Devices::cpu();                                 // never a silent fallback: you choose
//! let on_device = device.upload(&batch)?;                      // asynchronous; the CPU copies nothing
//! let (array, schema) = on_device.export(SyncPolicy::Event)?;  // for any consumer in the process
//! // SAFETY: both come from `export`.
//! let again = unsafe { DeviceRecordBatch::import(array, &schema) }?;
//! assert_eq!(again.to_host()?, batch);
//! # Ok(())
//! # }
//! ```
//!
//! **A device address never enters an arrow `Buffer`, `ArrayData` or `RecordBatch`.** Those promise that
//! the host may read them; safe code would crash. Device data has the types above, and memory that the
//! host can read becomes arrow data without a copy once its event has completed.
//!
//! **Work is asynchronous.** An upload, a copy between devices and a free are given to a queue and run
//! later. A buffer knows the event after which it may be read: a queue that reads it waits for the
//! event, a host read is one host wait, and an export hands the event on ([`SyncPolicy`]). An import
//! waits for nothing (but for a batch whose root has a mask that nobody has counted).
//!
//! **Kernels** get at values through loans: [`DeviceArray::values_on`] makes a queue wait until the
//! memory is ready and gives its address; dropping the loan records the use, so that the memory outlives
//! the work. [`DeviceBufferMut`] is memory for results, which [`DeviceArray::with_values`] makes an array of that
//! is null where the kernel's input is: slices included, without a copy of the validity bitmap ([`Validity`]).
//!
//! **Streams** are readers: [`DeviceRecordBatchReader`] on a device, [`arrow_array::RecordBatchReader`]
//! on the host. [`export_reader`] and [`FFI_ArrowDeviceArrayStream::new`] make C streams of them,
//! [`DeviceRecordBatchStreamReader`] reads anybody's, and
//! [`into_host_reader`](DeviceRecordBatchReader::into_host_reader) brings any of them to the host, by
//! default one batch ahead of the consumer.
//! Tasks have streams instead, and the async device stream: `async_stream` (feature `async`).
//!
//! # Modules
//!
//! Imports run one way, from the top line to the bottom line.
//!
//! | module | contents |
//! | --- | --- |
//! | `cuda/` | integration with cudarc: its contexts, streams, events and slices, in and out (feature `cuda`) |
//! | `rocm/` | integration with HIP: its streams and events, in and out (feature `rocm`) |
//! | `python/` | integration with Python: the Arrow PyCapsule interface (feature `pyo3`) |
//! | `dlpack/` | integration with DLPack: columns as tensors, out and in (feature `dlpack`) |
//! | `stream/` | readers; C streams in and out; host staging; the async device stream (feature `async`) |
//! | `interchange/` | C structs in and out: checks, ownership, the arena behind an export; what cuDF asks for |
//! | `transfer/` | upload, download, device to device, compact copies: a plan, then one list of copies |
//! | `data/` | layout of every type, arrays, batches, typed access |
//! | `memory/` | device buffers, host slabs, owners |
//! | [`device`] | the [`Backend`](device::Backend) trait, queues, events, counters, the registry; CPU, simulated device, CUDA and ROCm over what GPUs share |
//! | [`abi`], `error` | the C structs; the one error type |
//!
//! [`Device`] is a handle around a [`Backend`](device::Backend), so that counting, pooling and the
//! reaper stand once for all backends; a crate that adds a device implements the trait and passes the
//! suite of the crate `arrow-device-conformance`.
//!
//! # What is always true
//!
//! 1. No safe call reads device memory on the host.
//! 2. A host read happens after the event that guards the memory; a device read is ordered after it.
//! 3. Memory is released exactly once, on any thread; release never waits, never panics, never unwinds
//!    into C.
//! 4. The source of an asynchronous copy lives until the copy has completed.
//! 5. An import checks every count, pointer and size that can be checked without reading a buffer, and
//!    names the path of what it refuses. Whatever happens, the input is released exactly once.
//! 6. Unknown lengths and null counts stay unknown until asked for, and are then read for a whole array
//!    at once. A null count is known only if it was counted, or if an `unsafe` call vouched for it; an export
//!    counts those that are unknown, unless the caller allows unknown ones.
//! 7. What a transfer writes is padded to 64 bytes with zeros (foreign memory passes as it is:
//!    [`check_for_cudf`] reports, [`compact`](DeviceRecordBatch::compact) fixes); exports have `reserved` zero and exact
//!    null counts unless asked otherwise.
//! 8. An event is never dropped silently.
//! 9. Everything is counted: [`TransferStats`].
//!
//! # Features
//!
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `sim` | yes | `device::sim`, the simulated device (Linux) |
//! | `cuda` | no | `cuda`, NVIDIA GPUs; loaded at run time |
//! | `rocm` | no | `rocm`, AMD GPUs; loaded at run time, but building needs HIP's headers and library |
//! | `async` | no | `async_stream`, the async device stream over `futures` streams; no executor is imposed (Tokio is a dependency for `BlockingReader` only) |
//! | `pyo3` | no | `python`, the PyCapsule interface for devices |
//! | `dlpack` | no | `dlpack`, columns as DLPack tensors, out and in |
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

pub mod abi;
#[cfg(feature = "cuda")]
pub mod cuda;
mod data;
pub mod device;
#[cfg(feature = "dlpack")]
pub mod dlpack;
mod error;
mod interchange;
mod memory;
#[cfg(feature = "pyo3")]
pub mod python;
#[cfg(feature = "rocm")]
pub mod rocm;
mod stream;
mod transfer;

#[cfg(feature = "async")]
pub use stream::async_stream;

pub use abi::{ArrowDeviceType, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream};
pub use data::{DeviceArray, DeviceBits, DeviceRecordBatch, DeviceSlice, Validity};
pub use device::{Device, DeviceId, Devices, Queue, SyncEvent, TransferStats};
pub use error::{Error, Result};
pub use interchange::{
    ExportOptions, ImportOptions, NullCounts, ReleasePolicy, SyncPolicy, Validation, check_for_cudf,
};
pub use memory::{DeviceBuffer, DeviceBufferMut, HostSlab, Loan};
pub use stream::{
    DeviceArrayIterator, DeviceArrayReader, DeviceArrayStreamReader, DeviceRecordBatchIterator,
    DeviceRecordBatchReader, DeviceRecordBatchStreamReader, HostRecordBatchReader, UploadingReader,
    export_reader,
};
