//! HIP's runtime library (`libamdhip64.so.7`) on the CUDA driver library, for tests.
//!
//! It exports the HIP calls that the ROCm backend uses and forwards each to the CUDA driver library
//! that it finds at run time as `libcuda.so`, else as `libcuda.so.1`:
//!
//! 1. on the stand-in for the driver (`fakes/cuda`), loaded first, the two are a fake HIP runtime on the
//!    simulated device: failures, counts and reports are the stand-in's, by CUDA's names of the calls;
//! 2. on the driver of an NVIDIA GPU it is to show the order, events and lifetimes of the ROCm backend on
//!    real asynchronous hardware. **This has not been run yet; nothing is proven by it.**
//!
//! It says nothing about AMD's own runtime: not which calls it has, what it answers, or how it orders.
//!
//! # Devices and contexts
//!
//! The current device is per thread, 0 at first. A device's primary context is retained at its first use
//! and kept. A call runs with the primary context of the *current device* current in CUDA, whatever
//! stream it is given, and leaves the caller's context stack as it was. So the driver refuses work on a
//! stream of another device, which HIP allows, and a missing `hipSetDevice` shows.
//!
//! `hipInit`, `hipSetDevice`, `hipGetDevice`, `hipGetDeviceCount`, `hipDeviceGetAttribute`,
//! `hipThreadExchangeStreamCaptureMode`, versions and errors use no device: they retain nothing.
//!
//! # Control functions
//!
//! | function | what it does |
//! |---|---|
//! | `i32 hip_on_cuda_release(i32 ordinal)` | Releases the retained primary context of that ordinal and forgets it. 0; -1 if there was none; else what the driver answered. |
//! | `i32 hip_on_cuda_version(i32 version)` | What the version calls answer from now on, and with it the numbers of `hipMemoryType`; 0 for the default. The version until now. |
//!
//! The default version is 70151831 (HIP 7.1); the environment variable `HIP_ON_CUDA_VERSION` sets
//! another. Below 60000000 the numbers are those of HIP 5, and an unknown address is
//! `hipErrorInvalidValue`; from then on it is `hipMemoryTypeUnregistered`. Below 70000000 each call is the
//! thread's last one for `hipGetLastError`, a success too; from then on only errors are.
//!
//! # Codes
//!
//! | the driver answers | HIP's code |
//! |---|---|
//! | a number that `hipError_t` of HIP 5.2 has | the same; the meanings agree |
//! | 800, not permitted: a call inside a host function | 900 `hipErrorStreamCaptureUnsupported`: HIP's one code for "not now" |
//! | another number that `CUresult` has | 999 `hipErrorUnknown` |
//! | a number that neither has | the same, so that tests can order it |
//!
//! Without a driver library, or if `cuInit` fails, all calls but those about errors answer 100
//! `hipErrorNoDevice`. (HIP 5.2.3 without a GPU answers so only from `hipGetDeviceCount`; from most
//! others 101, and it still tells its version.) A function that the driver lacks: 801
//! `hipErrorNotSupported`. After a panic: 999.
//!
//! # Less or other than HIP
//!
//! - `hipGraphDestroy` is left out: the stand-in makes no graphs and has no `cuGraphDestroy`. On a real
//!   driver a captured graph is leaked.
//! - Flags about the reach of caches (coherent memory, events that release to the device or the system)
//!   are checked and dropped.
//! - `hipStreamDestroy` always waits for the stream's work; HIP may.
//! - `hipFree` and `hipHostFree` wait only if the driver's own functions do; the stand-in's do not.
//! - `hipMemcpyBatchAsync` names no failed copy where the driver has the second form of the call.
//! - The members of `hipPointerAttribute_t` beyond the type are CUDA's; no allocation flags.
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
