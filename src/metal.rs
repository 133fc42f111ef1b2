//! Memory that Metal devices share with the host, without Metal's framework.
//!
//! The specification does not say what the buffers of an array of type METAL are. Both producers that are known, nanoarrow and
//! ArrowMetal, put *host* addresses of shared memory into `buffers`: a program that has an `MTLBuffer` of storage mode "shared"
//! exports its contents, and one that receives such an array reads it with ordinary loads, or wraps it in an `MTLBuffer` without
//! a copy. This module takes part in that, on any system: to it, memory of type METAL is host memory with another name.
//!
//! - **Out:** [`shared_memory`] returns a device to upload to. Each buffer starts at a page of 16 KiB and fills whole pages, as
//!   `newBufferWithBytesNoCopy` demands, except the lengths of a view array's data buffers, which every export makes. Exports and streams carry type METAL, the device id, and no event.
//! - **In:** [`Devices::register`](crate::Devices::register) with [`shared_memory`], for any id: nanoarrow writes the registry
//!   id of the Metal device, ArrowMetal -1. An array with an event is refused, because only Metal's framework can wait for it.
//!
//! ```
//! use arrow_array::record_batch;
//! use arrow_device::{ArrowDeviceType, DeviceRecordBatch, Devices, SyncPolicy, metal};
//!
//! let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
//! let shared = metal::shared_memory(-1).upload(&batch)?;
//! let (array, schema) = shared.export(SyncPolicy::Event)?;
//! assert_eq!(array.device_type(), ArrowDeviceType::METAL);
//!
//! Devices::global().register(ArrowDeviceType::METAL, |id| Ok(metal::shared_memory(id)));
//! // SAFETY: both structs come from `export`, and the memory is host memory.
//! let imported = unsafe { DeviceRecordBatch::import(array, &schema, None) }?;
//! assert_eq!(imported.to_host()?, batch); // copies nothing
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! An import is sound only if the producer does the same. A producer that puts the address of an `MTLBuffer` object, or an address
//! that only the GPU knows, into `buffers` must not be read this way, and no check can tell: that is why imports do not do it
//! unless they are told to.
//!
//! What only a Mac can prove is listed as unproven on the crate's page about compatibility (`docs/compatibility.md`).

use crate::abi::{ArrowDeviceType, DeviceId};
use crate::device::{Device, host_memory};

/// Returns a device of type METAL with this id, whose memory is host memory. As long as it is used, an id has one such device.
///
/// An upload copies to one allocation, in which each buffer has whole pages of 16 KiB to itself, with zeros after the last byte.
/// So does [`compact`](crate::DeviceArray::compact). Nothing is asynchronous. Arrow arrays and buffers view the memory without a
/// copy.
///
/// ```
/// use arrow_array::Int32Array;
/// use arrow_device::metal;
/// let device = metal::shared_memory(0);
/// let queue = device.default_queue();
/// let array = device.upload_array(&Int32Array::from(vec![1, 2, 3]))?;
/// assert_eq!(array.values_on::<i32>(&queue)?.address().address() % (16 << 10), 0);
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub fn shared_memory(device_id: i64) -> Device {
    host_memory(DeviceId::new(ArrowDeviceType::METAL, device_id))
}
