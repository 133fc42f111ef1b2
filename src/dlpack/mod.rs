//! Columns as [DLPack](https://dmlc.github.io/dlpack/latest/) tensors, out and in, without a copy: for
//! PyTorch, CuPy, JAX, NumPy and others in the same process.
//!
//! ```
//! use arrow_array::{Array, ArrayRef, Int64Array};
//! use arrow_device::dlpack::{DlpackOptions, DlpackStream};
//! use arrow_device::{DeviceArray, Devices};
//!
//! let device = Devices::cpu();
//! let column = device.upload_array(&Int64Array::from(vec![1, 2, 3]))?;
//!
//! // Out: the argument of Python's __dlpack__(stream=...) says where the consumer will use it.
//! // SAFETY: no stream.
//! let stream = unsafe { DlpackStream::from_number(None) };
//! let tensor = column.export_dlpack(&DlpackOptions::new(stream))?.into_versioned();
//!
//! // In: the producer is told the queue's stream, and the tensor is imported on that queue.
//! let queue = device.default_queue();
//! assert_eq!(queue.dlpack_stream()?, None);
//! // SAFETY: the struct was just made, and nobody writes to the memory.
//! let again = unsafe { DeviceArray::import_dlpack(tensor, &queue) }?;
//! assert_eq!(again.to_host()?.len(), 3);
//! # Ok::<(), arrow_device::Error>(())
//! ```
//!
//! | | out | in |
//! | --- | --- | --- |
//! | values | [`DeviceArray::export_dlpack`](crate::DeviceArray::export_dlpack) | [`DeviceArray::import_dlpack`](crate::DeviceArray::import_dlpack) |
//! | masks | [`DeviceArray::export_dlpack_validity`](crate::DeviceArray::export_dlpack_validity) | the same, as `UInt8` |
//! | any buffer | [`DeviceBuffer::export_dlpack`](crate::DeviceBuffer::export_dlpack) | |
//! | before 1.0 | [`DlpackTensor::into_unversioned`] | [`DeviceArray::import_dlpack_unversioned`](crate::DeviceArray::import_dlpack_unversioned) |
//! | order | [`DlpackStream`]: the consumer's stream waits for the data | [`Queue::dlpack_stream`](crate::Queue::dlpack_stream): the producer makes the queue's stream wait |
//! | device | [`DlpackTensor::device`] | [`DLDevice::id`] |
//!
//! # What DLPack cannot say
//!
//! - **Nulls.** A column with nulls goes out only if they are
//!   [ignored](DlpackOptions::with_nulls_ignored), with its mask beside it.
//! - **Bits.** Its booleans have a byte; bits go out as the bytes that hold them.
//! - **Immutable**, before 1.0. Such a struct is given out by `unsafe` code, which answers for the consumer.
//! - **When a consumer's work ends.** The memory is let go after all work of the device, unless the consumer
//!   is known to [order its work](DlpackOptions::with_release).
//! - **On which GPU** page-locked and managed memory is used: it names all of it device 0's. Here a default stream is
//!   that of the context that the device was opened with, and the deleter waits for that context's work. A consumer that
//!   uses such memory of another GPU than the first, or memory of a device in a context of its own, sees to the order
//!   itself.
//! - **Which streams follow.** Only the stream that was named waits for the data; a consumer that uses the
//!   memory on another one orders that one itself.
//!
//! A tensor goes out with the address of its first element as `data` and a `byte_offset` of 0; with strides, which since
//! 1.2 must be there; and if it is empty with null as `data`.
//!
//! Devices of type METAL, OPENCL, VULKAN and WEBGPU are refused in both directions: there DLPack's `data` is a buffer
//! object of the runtime (an `MTLBuffer`, for example), and Arrow's `buffers[i]` an address.

mod abi;
mod export;
mod import;
mod stream;
mod types;

#[cfg(feature = "pyo3")]
pub(crate) use abi::Managed;
pub use abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    Deleter,
};
pub use export::{DlpackOptions, DlpackTensor};
pub use stream::DlpackStream;
