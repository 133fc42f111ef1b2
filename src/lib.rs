//! Arrow data in GPU memory, for [arrow-rs](https://docs.rs/arrow): arrays, batches and streams on a device, copies between
//! host and device, and exchange without copying through the
//! [Arrow C Device data interface](https://arrow.apache.org/docs/format/CDeviceDataInterface.html).
//!
//! # Model
//!
//! | type | what it is |
//! | --- | --- |
//! | [`Device`] | a CPU, a GPU or the simulated device; [`Devices`] finds it |
//! | [`Queue`], [`SyncEvent`] | a list of device work that runs in order (a CUDA or HIP stream), and a point in that order |
//! | [`DeviceBuffer`], [`DeviceBufferMut`] | memory of a device, and memory that nothing reads yet, for a kernel to write |
//! | [`DeviceArray`], [`DeviceRecordBatch`] | arrow data of any type in device memory |
//! | [`Download`] | a copy of such data to the host that was started: poll it, wait for it or await it |
//! | [`HostBuffer`] | host memory that a device copies to and from fast, and that becomes an arrow `Buffer` without a copy |
//! | [`FFI_ArrowDeviceArray`], [`FFI_ArrowDeviceArrayStream`] | the C structs of the interface |
//!
//! **Device data has types of its own.** An arrow `Buffer` promises that the host may read its bytes, and ordinary calls (`slice`,
//! `==`, `Debug`) do. Over device memory they would crash in safe code, so a device address never enters a `Buffer`, an
//! `ArrayData` or a `RecordBatch`. A [`DeviceBuffer`] cannot be read on the host at all. Memory that the host can read becomes
//! arrow data without a copy, once the work that fills it has completed.
//!
//! **Work is asynchronous.** An upload, a copy between devices and a free are queued and run later. Each buffer knows the event
//! after which it may be read. A queue that reads it waits for the event on the device, a host read waits once, and an export
//! passes the event on or waits for it, as the [`SyncPolicy`] says. An import does not wait, unless an array that becomes a batch
//! has a validity bitmap of its own whose nulls must be counted.
//!
//! **Nothing is copied unasked.** Every allocation, copy, byte, event and wait is counted: [`Device::stats`] returns the
//! [`TransferStats`].
//!
//! # Devices
//!
//! | device | name | found by |
//! | --- | --- | --- |
//! | the CPU | `cpu` | [`Devices::cpu`] |
//! | the simulated device | `sim` | [`Devices::simulated`] |
//! | NVIDIA GPUs: device, page-locked and managed memory | `cuda:N`, `cuda-host:N`, `cuda-managed:N` | [`Devices::gpu`], [`Devices::open`] |
//! | AMD GPUs: device and page-locked memory | `rocm:N`, `rocm-host:N` | [`Devices::gpu`], [`Devices::open`] |
//! | memory that Metal devices share with the host | `metal:N` | [`metal::shared_memory`] |
//!
//! No call falls back to another device: the program chooses. Drivers are loaded at the first use, so a program that is built
//! with GPU support starts without a GPU, and opening the device returns [`Error::DeviceNotAvailable`] with the reason.
//!
//! The simulated device lets programs and tests run without a GPU, and is as strict as one: the host cannot touch its
//! memory, its queues are asynchronous, and any operation can be made to fail (module `device::sim`). A crate adds another device
//! by implementing [`Backend`](device::Backend) and registering it with [`Devices::register`].
//!
//! # A first program
//!
//! ```
//! use arrow_array::record_batch;
//! use arrow_device::{DeviceRecordBatch, Devices, SyncPolicy};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
//!
//!     let device = Devices::cpu(); // or Devices::gpu(), Devices::simulated(), Devices::open("cuda:1")
//!     let on_device = device.upload(&batch)?; // returns before the copy is done; the CPU copies nothing
//!
//!     // Two C structs, which any consumer in this process can take over. Here this program does.
//!     let (array, schema) = on_device.export(SyncPolicy::Event)?;
//!     // SAFETY: `export` made both structs, and nothing else uses them.
//!     let imported = unsafe { DeviceRecordBatch::import(array, &schema, None) }?;
//!
//!     assert_eq!(imported.to_host()?, batch); // waits for the copy back
//!     Ok(())
//! }
//! ```
//!
//! # Kernels
//!
//! A kernel borrows a column: [`DeviceArray::values_on`] makes a queue wait until the memory is ready and returns its address.
//! Dropping the loan after the launch records the use, so that the memory outlives the kernel. The kernel writes into a
//! [`DeviceBufferMut`], and [`DeviceArray::with_values`] makes a column of it that is null where the kernel's input is.
//! [`DeviceArray::from_values`] takes a validity bitmap that the kernel wrote ([`Validity`]).
//!
//! ```
//! use arrow_array::{Array, Float64Array, record_batch};
//! use arrow_device::{DeviceBufferMut, Devices};
//! use arrow_schema::DataType;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Devices::cpu();
//! let queue = device.default_queue();
//! let batch = device.upload(&record_batch!(("price", Float64, [Some(1.0), None, Some(3.0)]))?)?;
//! let price = batch.column_by_name("price")?;
//!
//! let mut output = DeviceBufferMut::for_values::<f64>(&queue, price.len())?;
//! {
//!     let input = price.values_on::<f64>(&queue)?; // the queue waits for the upload
//!     let _addresses = (input.address(), output.address()); // for the kernel, which is launched here
//!     output.fill(0)?; // stands for the kernel
//! } // the loan ends: the memory of `price` stays until the kernel has run
//! let result = price.with_values(DataType::Float64, output.freeze()?)?; // null where `price` is
//!
//! let expected = Float64Array::from(vec![Some(0.0), None, Some(0.0)]);
//! assert_eq!(result.to_host()?.as_ref(), &expected as &dyn Array);
//! # Ok(())
//! # }
//! ```
//!
//! The modules `cuda` and `rocm` launch real kernels; on the simulated device a kernel is a closure (`Queue::as_sim`).
//!
//! # Streams
//!
//! A stream of batches on a device is a [`DeviceRecordBatchReader`], as one in host memory is an
//! [`arrow_array::RecordBatchReader`]. [`export_reader`] and [`FFI_ArrowDeviceArrayStream::new`] make C streams,
//! [`DeviceRecordBatchStreamReader`] reads the C stream of any producer, and
//! [`into_host_reader`](DeviceRecordBatchReader::into_host_reader) copies its batches to the host, by default one batch ahead of
//! the consumer. Async programs use the module `async_stream` (feature `async`), on any executor.
//!
//! ```
//! use arrow_array::{RecordBatchIterator, record_batch};
//! use arrow_device::{DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices, export_reader};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
//! let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
//! let mut stream = export_reader(reader, &Devices::cpu())?; // a C struct
//!
//! // SAFETY: `stream` is valid, and nothing else reads it.
//! let reader = unsafe { DeviceRecordBatchStreamReader::from_raw(&mut stream) }?;
//! for result in reader.into_host_reader() {
//!     assert_eq!(result?, batch);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | default | what it adds |
//! | --- | --- | --- |
//! | `arrow-58`, `arrow-59`, `arrow-60` | `arrow-59` | the major version of arrow-rs: exactly one; another with `default-features = false` |
//! | `sim` | yes | `device::sim`: the simulated device; Linux |
//! | `cuda` | no | `cuda`: NVIDIA GPUs, and [cudarc](https://docs.rs/cudarc)'s types in and out |
//! | `rocm` | no | `rocm`: AMD GPUs, and HIP's streams and events in and out; building needs HIP's headers and library |
//! | `async` | no | `async_stream`: the async device stream over `futures` streams |
//! | `dlpack` | no | `dlpack`: columns as DLPack tensors, in and out |
//! | `pyo3` | no | `python`: the Arrow PyCapsule interface for devices |
//!
//! The crate has no compute kernels.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

#[cfg(any(
    all(feature = "arrow-58", feature = "arrow-59"),
    all(feature = "arrow-58", feature = "arrow-60"),
    all(feature = "arrow-59", feature = "arrow-60"),
    not(any(feature = "arrow-58", feature = "arrow-59", feature = "arrow-60")),
))]
compile_error!(
    "arrow-device takes exactly one of its features `arrow-58`, `arrow-59`, which is on by default, and `arrow-60`: for another than the \
     default, set `default-features = false` in every dependency on arrow-device"
);

// The arrow crates, for crates on this one that serve every major version. Those of the default have their plain names; others get them.
#[cfg(feature = "arrow-59")]
pub use {arrow_array, arrow_buffer, arrow_data, arrow_schema};
#[cfg(feature = "arrow-58")]
pub extern crate arrow_array_58 as arrow_array;
#[cfg(feature = "arrow-60")]
pub extern crate arrow_array_60 as arrow_array;
#[cfg(feature = "arrow-58")]
pub extern crate arrow_buffer_58 as arrow_buffer;
#[cfg(feature = "arrow-60")]
pub extern crate arrow_buffer_60 as arrow_buffer;
#[cfg(feature = "arrow-58")]
pub extern crate arrow_data_58 as arrow_data;
#[cfg(feature = "arrow-60")]
pub extern crate arrow_data_60 as arrow_data;
#[cfg(feature = "arrow-58")]
pub extern crate arrow_schema_58 as arrow_schema;
#[cfg(feature = "arrow-60")]
pub extern crate arrow_schema_60 as arrow_schema;

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
pub mod metal;
#[cfg(feature = "pyo3")]
pub mod python;
#[cfg(feature = "rocm")]
pub mod rocm;
mod stream;
mod transfer;

#[cfg(feature = "async")]
pub use stream::async_stream::{self, upload_stream};

pub use abi::{ArrowDeviceType, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream};
pub use data::{DeviceArray, DeviceRecordBatch, Validity};
pub use device::{Device, DeviceId, Devices, Queue, SyncEvent, TransferStats};
pub use error::{Error, Result};
pub use interchange::{ExportOptions, ImportOptions, ReleasePolicy, SyncPolicy, Validation};
pub use memory::{DeviceBuffer, DeviceBufferMut, HostBuffer, Loan};
pub use stream::{
    DeviceRecordBatchReader, DeviceRecordBatchStreamReader, DeviceRecordBatches,
    HostRecordBatchReader, export_reader, upload_reader, upload_reader_ahead,
};
pub use transfer::Download;

#[cfg(doctest)]
#[path = "tests/pages.rs"]
mod pages;
