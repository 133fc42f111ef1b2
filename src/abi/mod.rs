//! The C structs of the Arrow C Device data interface.
//!
//! Each struct has the layout of the C definition, checked when this crate is compiled, and private
//! members: whoever could write one could make safe code undefined. Constructors that take
//! pointers are `unsafe` and say what the pointers must be.
//!
//! | struct | bytes | who makes it | who releases it, and how |
//! |---|---|---|---|
//! | [`FFI_ArrowDeviceArray`] | 128 | producer | consumer: `release` of the embedded array; here, on drop |
//! | [`FFI_ArrowDeviceArrayStream`] | 48 | producer | consumer: its `release`; here, on drop |
//! | [`FFI_ArrowAsyncTask`] | 16 | producer | consumer: one call of `extract_data`; never on drop |
//! | [`FFI_ArrowAsyncProducer`] | 40 | producer | producer, after the handler's release; no callback |
//! | [`FFI_ArrowAsyncDeviceStreamHandler`] | 48 | consumer | producer: its `release`; here, on drop |
//!
//! Sizes are those of 64-bit targets. The embedded `ArrowArray` (80 bytes) and the schema (72
//! bytes) are those of the C data interface; they appear as arrow-rs's
//! [`FFI_ArrowArray`](arrow_data::ffi::FFI_ArrowArray) and
//! [`FFI_ArrowSchema`](arrow_schema::ffi::FFI_ArrowSchema).
//!
//! **Moving.** `from_raw` takes a struct out of foreign memory and leaves a released one there,
//! `write_to` puts one into foreign memory. Neither calls a callback, and so each struct is released
//! exactly once.
//!
//! **Unwinding.** Callbacks are typed `extern "C-unwind"`, since foreign ones may throw. They run under
//! a guard: a Rust panic becomes [`Error::Panic`](crate::Error::Panic), and so does a foreign exception
//! (C++) on x86-64 Linux with glibc, in programs built with `panic = "unwind"`. Elsewhere an exception is
//! a defined abort of the process ("Rust cannot catch foreign exceptions, aborting"), and so is a panic of
//! another copy of the Rust runtime everywhere.
//!
//! **Where the specification's text and `abi.h` differ**, `abi.h` is the ABI and the text's rules of
//! behaviour hold:
//!
//! | | the text | `abi.h`, and here |
//! |---|---|---|
//! | `ArrowAsyncProducer.release` | in the definition, not described | no such member: 40 bytes |
//! | count of `ArrowAsyncProducer.request` | `int64_t` and `uint64_t` | `int64_t` |
//! | `ArrowAsyncDeviceStreamHandler.producer` | a struct and a pointer | a pointer |
//! | first argument of `on_error` | a struct and a pointer | a pointer |

mod async_handler;
mod async_stream;
// The modules above use all of the next two.
#[allow(dead_code)]
pub(crate) mod c_data;
mod device_array;
mod device_id;
mod device_stream;
mod device_type;
mod foreign_schema;
#[allow(dead_code)]
pub(crate) mod guard;
#[doc(hidden)]
pub mod layout;

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
