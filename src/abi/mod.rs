//! The C structs of the Arrow C Device data interface, for code that exchanges them itself.
//!
//! Most programs use [`DeviceRecordBatch`](crate::DeviceRecordBatch) and the readers, which import
//! and export these structs.
//!
//! ```
//! use arrow_array::Int32Array;
//! use arrow_device::abi::FFI_ArrowDeviceArray;
//! use arrow_device::{Devices, SyncPolicy};
//!
//! let array = Devices::cpu().upload_array(&Int32Array::from(vec![1, 2, 3]))?;
//! let (mut produced, _schema) = array.export(SyncPolicy::Event)?;
//! // SAFETY: `produced` is a valid struct, and this is its only owner.
//! let taken = unsafe { FFI_ArrowDeviceArray::from_raw(&mut produced) };
//! assert!(produced.is_released());
//! assert_eq!(taken.array().len(), 3);
//! // Dropping `taken` calls the producer's release callback.
//! # Ok::<(), arrow_device::Error>(())
//! ```
//!
//! Each struct has the layout of the C definition. The members of those that are released on drop are private, because safe code
//! that could write them could cause undefined behaviour; code that makes or calls them itself casts the pointer to its own
//! definition of the struct, as bindings generated from C have it.
//!
//! | struct | bytes | made by | released by |
//! |---|---|---|---|
//! | [`FFI_ArrowDeviceArray`] | 128 | producer | the consumer: `release` of the embedded array; here, on drop |
//! | [`FFI_ArrowDeviceArrayStream`] | 48 | producer | the consumer: its `release`; here, on drop |
//! | [`FFI_ArrowAsyncTask`] | 16 | producer | the consumer: one call of `extract_data`; never on drop |
//! | [`FFI_ArrowAsyncProducer`] | 40 | producer | the producer, after the handler's release; no callback |
//! | [`FFI_ArrowAsyncDeviceStreamHandler`] | 48 | consumer | the producer: its `release`; never on drop |
//!
//! Sizes are those of 64-bit targets. The embedded `ArrowArray` (80 bytes) and the schema (72
//! bytes) are those of the C data interface; they appear as arrow-rs's
//! [`FFI_ArrowArray`](arrow_data::ffi::FFI_ArrowArray) and
//! [`FFI_ArrowSchema`](arrow_schema::ffi::FFI_ArrowSchema).
//!
//! **Moving.** `from_raw` moves a struct out of foreign memory and leaves a released one there, and [`std::ptr::write`] moves one
//! into foreign memory. Neither calls a callback, so each struct is released exactly once.
//!
//! **Unwinding.** Callbacks are typed `extern "C-unwind"`, so that unwinding out of one is defined.
//! In programs built with `panic = "unwind"`, a Rust panic in a callback becomes
//! [`Error::Panic`](crate::Error::Panic). A foreign exception (of C++, say), and a panic of another
//! copy of the Rust runtime, aborts the process, as everywhere in Rust.
//!
//! **Where the specification's text and `abi.h` differ**, this crate has the layout of `abi.h` and
//! follows the text's rules of behaviour:
//!
//! | | the text | `abi.h` and this crate |
//! |---|---|---|
//! | `ArrowAsyncProducer.release` | in the definition, but not described | no such member: 40 bytes |
//! | argument of `ArrowAsyncProducer.request` | `int64_t` and `uint64_t` | `int64_t` |
//! | `ArrowAsyncDeviceStreamHandler.producer` | a struct and a pointer | a pointer |
//! | first argument of `on_error` | a struct and a pointer | a pointer |

pub(crate) mod c_data;
mod device_array;
mod device_id;
pub(crate) mod guard;
mod streams;

pub use c_data::ForeignSchema;
pub use device_array::FFI_ArrowDeviceArray;
pub use device_id::{ArrowDeviceType, DeviceId};
pub(crate) use streams::{CStream, Callbacks};
pub use streams::{
    FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask,
    FFI_ArrowDeviceArrayStream,
};
#[cfg(feature = "async")]
pub(crate) use streams::{OnError, OnNextTask, OnSchema};

#[cfg(test)]
mod tests;
