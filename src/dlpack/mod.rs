//! Exchanges columns as [DLPack](https://dmlc.github.io/dlpack/latest/) tensors without copying them (feature `dlpack`).
//!
//! PyTorch, CuPy, JAX, NumPy and other libraries in the same process exchange memory in this way.
//!
//! ```
//! use arrow_array::{Array, ArrayRef, Int64Array};
//! use arrow_device::dlpack::{DlpackOptions, DlpackStream};
//! use arrow_device::{DeviceArray, Devices};
//!
//! let device = Devices::cpu();
//! let column = device.upload_array(&Int64Array::from(vec![1, 2, 3]))?;
//!
//! // Export. The argument of Python's __dlpack__(stream=...) says where the consumer will use the tensor.
//! // SAFETY: `None` names no stream that would have to be live.
//! let stream = unsafe { DlpackStream::from_number(None) };
//! let tensor = column.export_dlpack(&DlpackOptions::new(stream))?.into_versioned();
//!
//! // Import. The producer is given the queue's stream, and the tensor is imported on that queue.
//! let queue = device.default_queue();
//! assert_eq!(queue.dlpack_stream()?, None);
//! // SAFETY: the struct was just made, and nothing writes to the memory.
//! let again = unsafe { DeviceArray::import_dlpack(tensor, &queue) }?;
//! assert_eq!(again.to_host()?.len(), 3);
//! # Ok::<(), arrow_device::Error>(())
//! ```
//!
//! | | export | import |
//! | --- | --- | --- |
//! | values | [`DeviceArray::export_dlpack`](crate::DeviceArray::export_dlpack) | [`DeviceArray::import_dlpack`](crate::DeviceArray::import_dlpack) |
//! | a copy that the consumer may write to | [`DlpackOptions::copy`] | |
//! | any buffer, validity bitmaps too | [`DeviceBuffer::export_dlpack`](crate::DeviceBuffer::export_dlpack) | |
//! | structs before 1.0 | [`DlpackTensor::into_unversioned`] | [`DeviceArray::import_dlpack`](crate::DeviceArray::import_dlpack) |
//! | order | [`DlpackStream`]: the consumer's stream waits for the data | [`Queue::dlpack_stream`](crate::Queue::dlpack_stream): the producer makes the queue's stream wait |
//! | device | `DLDevice::try_from(id)` | `DeviceId::from(device)` |
//!
//! # Embeddings
//!
//! A column of `FixedSizeList<f32, N>`, one vector a row, is a matrix `[rows, N]` in its consumer, without a copy. So are slices of it. Float16 and
//! every other number serve as well, and a list of lists has a further dimension. The lists and their items must have no nulls.
//!
//! ```
//! use arrow_array::{FixedSizeListArray, types::Float32Type};
//! use arrow_device::Devices;
//! use arrow_device::dlpack::{DlpackOptions, DlpackStream};
//!
//! let vectors = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]].map(|v| Some(v.map(Some)));
//! let vectors = FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(vectors, 3);
//! let vectors = Devices::cpu().upload_array(&vectors)?;
//! let matrix = vectors.export_dlpack(&DlpackOptions::new(DlpackStream::NONE))?;
//! assert_eq!(matrix.shape(), [2, 3]); // torch.from_dlpack(..) @ query
//! assert_eq!(vectors.slice(1, 1)?.export_dlpack(&DlpackOptions::new(DlpackStream::NONE))?.shape(), [1, 3]);
//! # Ok::<(), arrow_device::Error>(())
//! ```
//!
//! # What DLPack cannot express
//!
//! - **Nulls.** A column with nulls is exported only if they are [ignored](DlpackOptions::nulls_ignored).
//! - **Bits.** DLPack's booleans are bytes, Arrow's are bits. Only the extension type `arrow.bool8` has DLPack's booleans, and
//!   both are exchanged for each other. A buffer of bits is exported as bytes.
//! - **Read-only memory**, before version 1.0. Exporting such a struct is `unsafe`: the caller guarantees that the consumer
//!   does not write.
//! - **When a consumer's work ends.** The memory is freed after all work of the device, unless the consumer is known to
//!   [order its work](DlpackOptions::release).
//! - **Which GPU** page-locked and managed memory belongs to: DLPack names device 0 for all of it. Here the default stream
//!   is that of the context that the device was opened with, and the deleter waits for that context's work. A consumer that
//!   uses such memory of another GPU than the first, or memory of a device in a context of its own, must order its work
//!   itself.
//! - **Which other streams wait.** Only the stream that was named waits for the data. A consumer that uses the memory on
//!   another stream must order that stream itself.
//!
//! The `data` of an exported tensor is the address of its first element, or null if it is empty. Its `byte_offset` is 0, and
//! it always has strides, which are mandatory since version 1.2.
//!
//! Devices of type METAL, OPENCL, VULKAN and WEBGPU are refused in both directions. For them DLPack's `data` is a buffer
//! object of the runtime, such as an `MTLBuffer`, and Arrow's `buffers[i]` is an address.

mod abi;
mod export;
mod import;
mod stream;

pub use abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};
#[cfg(feature = "pyo3")]
pub(crate) use export::delete;
pub use export::{DlpackOptions, DlpackTensor};
#[cfg(feature = "pyo3")]
pub(crate) use import::import;
pub use stream::DlpackStream;
