//! The C structs of the Arrow C Device data interface, for code that exchanges them itself.
//!
//! Most programs use [`DeviceRecordBatch`](crate::DeviceRecordBatch) and the readers, which import
//! and export these structs.
//!
//! ```
//! use arrow_array::{Array, Int32Array};
//! use arrow_device::abi::FFI_ArrowDeviceArray;
//!
//! let mut produced = FFI_ArrowDeviceArray::new_cpu(&Int32Array::from(vec![1, 2, 3]).to_data());
//! // SAFETY: `produced` is a valid struct, and this is its only owner.
//! let taken = unsafe { FFI_ArrowDeviceArray::from_raw(&mut produced) };
//! assert!(produced.is_released());
//! assert_eq!(taken.array().len(), 3);
//! // Dropping `taken` calls the producer's release callback.
//! ```
//!
//! Each struct has the layout of the C definition, checked when this crate is compiled. Its members
//! are private, because safe code that could write them could cause undefined behaviour;
//! constructors that take pointers are `unsafe`.
//!
//! | struct | bytes | made by | released by |
//! |---|---|---|---|
//! | [`FFI_ArrowDeviceArray`] | 128 | producer | the consumer: `release` of the embedded array; here, on drop |
//! | [`FFI_ArrowDeviceArrayStream`] | 48 | producer | the consumer: its `release`; here, on drop |
//! | [`FFI_ArrowAsyncTask`] | 16 | producer | the consumer: one call of `extract_data`; never on drop |
//! | [`FFI_ArrowAsyncProducer`] | 40 | producer | the producer, after the handler's release; no callback |
//! | [`FFI_ArrowAsyncDeviceStreamHandler`] | 48 | consumer | the producer: its `release`; here, on drop |
//!
//! Sizes are those of 64-bit targets. The embedded `ArrowArray` (80 bytes) and the schema (72
//! bytes) are those of the C data interface; they appear as arrow-rs's
//! [`FFI_ArrowArray`](arrow_data::ffi::FFI_ArrowArray) and
//! [`FFI_ArrowSchema`](arrow_schema::ffi::FFI_ArrowSchema).
//!
//! **Moving.** `from_raw` moves a struct out of foreign memory and leaves a released one there;
//! `write_to` moves one into foreign memory. Neither calls a callback, so each struct is released
//! exactly once.
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

mod async_handler;
mod async_stream;
pub(crate) mod c_data;
mod device_array;
mod device_id;
mod device_stream;
mod device_type;
mod foreign_schema;
pub(crate) mod guard;
mod handover;
#[cfg(any(test, target_pointer_width = "64"))]
mod layout;

pub use async_handler::{
    FFI_ArrowAsyncDeviceStreamHandler, HandlerOnError, HandlerOnNextTask, HandlerOnSchema,
    HandlerRelease,
};
pub use async_stream::{
    FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask, ProducerCancel, ProducerRequest, TaskExtractData,
};
pub use device_array::FFI_ArrowDeviceArray;
pub use device_id::DeviceId;
pub use device_stream::{
    FFI_ArrowDeviceArrayStream, StreamGetLastError, StreamGetNext, StreamGetSchema, StreamRelease,
};
pub use device_type::ArrowDeviceType;
pub use foreign_schema::ForeignSchema;
