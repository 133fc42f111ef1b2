//! A stand-in for the CUDA driver library (`libcuda.so`), on the simulated device, for tests.
//!
//! A test loads `libcuda_fake.so`, which cargo puts beside it; from then on `libcuda.so` is this
//! library, by its SONAME. (By its plain file name an older one may be found, which an earlier
//! `cargo build` has left one folder up.) It is stricter than a driver: what a real one might forgive is recorded as a
//! violation and stands in the report.
//!
//! # Engines
//!
//! Ordinals are handed out to tests in groups ([`fake_cuda_open`](control::fake_cuda_open)). The
//! ordinals of a group share one simulated device, the engine: events, copies and failures cross
//! them. An ordinal that nobody opened gets an engine of its own at its first use, with flags 0.
//! Handles are numbers that are never used twice; they are looked up and never followed.
//!
//! # Control functions
//!
//! | function | what it does |
//! |---|---|
//! | `i32 fake_cuda_open(i32 count, u32 flags, u64 capacity_bytes)` | Reserves `count` consecutive ordinals with one engine; the first one, or -1. Ordinal 0 only if no other is left. Flags: 1 lazy, 2 pageable sources are read by the call, 4 no pools, 8 no concurrent managed access, 16 no batch copies. 0 bytes: 1 GiB. |
//! | `i32 fake_cuda_close(i32 ordinal)` | Gives the ordinals of a group back, for tests that need many; -1 while it has contexts. |
//! | `i32 fake_cuda_fail(i32 ordinal, const char *name, u32 nth, i32 code)` | The `nth` call of that function from now (1: the next) answers `code` and does nothing. `"*"`: any function but pushes, pops, and queries of attributes, error texts and pointers. |
//! | `u32 fake_cuda_clear(i32 ordinal)` | Takes all these orders back; how many failures there were since the last time. |
//! | `u64 fake_cuda_calls(i32 ordinal, const char *name)` | Calls of a function since the engine was opened; `"*"`: of all. |
//! | `i32 fake_cuda_break(i32 ordinal, i32 code)` | The engine fails with this lasting code; queued work is dropped. Waits for the operation that is running now, if any. |
//! | `i32 fake_cuda_shutdown(i32 ordinal, i32 on)` | While on, every call answers 4 (deinitialised) and does nothing. |
//! | `usize fake_cuda_report(i32 ordinal, u8 *text, usize bytes)` | Writes what is not clean, one item a line, as much as fits; the whole length. 0: clean. Ordinal -1: violations that belong to no engine. |
//! | `u64 fake_cuda_live(i32 ordinal, const char *what)` | How many of `device`, `pinned`, `managed`, `registered`, `events`, `streams`, `pools`, `contexts`, `pending` (queued operations). |
//! | `i32 fake_cuda_drain(i32 ordinal)` | Runs all that is queued, and waits for it; 0 or the lasting code. For the end of tests on lazy engines. |
//!
//! Environment, read once: `FAKE_CUDA_INIT` is what `cuInit` answers, `FAKE_CUDA_COUNT` the number
//! of devices (256); with `FAKE_CUDA_TRACE`, calls and what they answered go to stderr.
//!
//! # How it runs work
//!
//! Everything given to a stream becomes an operation of a queue of the simulated device, which
//! checks each access to device memory when it runs. An engine runs one operation at a time: a
//! host function that blocks holds all streams of its group. Nothing runs because of a call that
//! does not wait.
//!
//! A failed engine answers its lasting code, but still keeps the books of frees and destroys, so
//! that a report shows what nobody gave back.
#![allow(non_snake_case)] // the names of the driver's functions
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod api;
mod call;
mod control;
mod copy;
mod emulation;
mod engine;
mod errors;
mod ffi;
mod kernels;
mod memory;
mod registry;
mod stack;
