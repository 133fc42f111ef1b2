//! HIP's runtime library (`libamdhip64.so.7`) on the CUDA driver library, for tests.
//!
//! It exports the HIP calls that the ROCm backend uses and forwards each to the CUDA driver library
//! that the process has loaded, or else that is found as `libcuda.so.1` or `libcuda.so`:
//!
//! 1. on the stand-in for the driver (`fakes/cuda`), loaded first, the two are a fake HIP runtime
//!    on the simulated device: failures, counts and reports are the stand-in's, by CUDA's names of
//!    the calls;
//! 2. on the driver of an NVIDIA GPU it shows the order, events and lifetimes of the ROCm backend
//!    on real asynchronous hardware. **This has not been run yet; nothing is proven by it.**
//!
//! It says nothing about AMD's own runtime: which calls it has, what they return, or how it orders
//! work.
//!
//! # Devices and contexts
//!
//! The current device is per thread, 0 at first. A device's primary context is retained at its
//! first use and kept. A call runs with the primary context of the *current device* current in
//! CUDA, whatever stream it is given, and leaves the caller's context stack as it was. So the
//! driver refuses work on a stream of another device, which HIP allows, and a missing
//! `hipSetDevice` is noticed.
//!
//! `hipInit`, `hipSetDevice`, `hipGetDevice`, `hipGetDeviceCount`, `hipDeviceGetAttribute`,
//! `hipThreadExchangeStreamCaptureMode`, and the calls for versions and errors use no device, and
//! so retain no context.
//!
//! # Control functions
//!
//! | function | what it does |
//! |---|---|
//! | `i32 hip_on_cuda_release(i32 ordinal)` | Releases the retained primary context of that ordinal. Returns 0, -1 if there was none, or else the driver's code. |
//!
//! The default version is 70151831 (HIP 7.1); the environment variable `HIP_ON_CUDA_VERSION` sets
//! another. Below 60000000 the numbers are those of HIP 5, and for an unknown address
//! `hipPointerGetAttributes` returns `hipErrorInvalidValue`; from there on it reports
//! `hipMemoryTypeUnregistered`. Below 70000000 each call sets the thread's last error, even a
//! success; from there on only errors do.
//!
//! # Codes
//!
//! | the driver returns | HIP's code |
//! |---|---|
//! | 800, not permitted: a call inside a host function | 900 `hipErrorStreamCaptureUnsupported`: HIP's one code for "not now" |
//! | another number | the same, whose name is `hipErrorUnknown` if the table lacks it |
//!
//! Without a driver library, or if `cuInit` fails, all calls except those about errors return 100
//! `hipErrorNoDevice`. (In HIP 5.2.3 without a GPU only `hipGetDeviceCount` returns that; most
//! others return 101, and it still reports its version.) A call of a function that the driver lacks
//! returns 801 `hipErrorNotSupported`, and one that panics 999.
//!
//! # Differences from HIP
//!
//! - There is no `hipGraphDestroy`: the stand-in makes no graphs. On a real driver a captured graph
//!   leaks.
//! - Flags about the reach of caches (coherent memory, events that release to the device or the
//!   system) are checked and dropped.
//! - `hipStreamDestroy` always waits for the stream's work; HIP may.
//! - `hipFree` and `hipHostFree` wait only if the driver's own functions do; the stand-in's do not.
//! - The members of `hipPointerAttribute_t` other than the type are CUDA's, without allocation
//!   flags.
#![allow(non_snake_case)] // the names of the functions
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod api;
mod call;
mod contexts;
mod control;
mod driver;
mod errors;
mod ffi;
