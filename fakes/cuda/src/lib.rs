//! A stand-in for the CUDA driver library (`libcuda.so`), on the simulated device, for tests.
//!
//! A test loads `libcuda_fake.so`, which cargo puts beside it; from then on `libcuda.so` is this
//! library, by its SONAME. (Its plain file name may find an older copy, which an earlier
//! `cargo build` has left one folder up.) It is stricter than a driver: what a real one might
//! accept is recorded as a violation, and appears in the report.
//!
//! # Engines
//!
//! Ordinals are handed out to tests in groups ([`fake_cuda_open`](control::fake_cuda_open)). The
//! ordinals of a group share one simulated device, the engine, so events, copies and failures cross
//! them. An ordinal that was not opened gets an engine of its own at its first use, with flags 0.
//! Handles are numbers that are never used twice; they are looked up and never followed.
//!
//! # Control functions
//!
//! | function | what it does |
//! |---|---|
//! | `i32 fake_cuda_open(i32 count, u32 flags, u64 capacity_bytes)` | Reserves `count` consecutive ordinals with one engine; returns the first one, or -1. Ordinal 0 is used only if no other is left. Flags: see below. A capacity of 0 means 1 GiB. |
//! | `i32 fake_cuda_close(i32 ordinal)` | Frees the ordinals of a group, for tests that need many; returns -1 while it has contexts. |
//! | `i32 fake_cuda_fail(i32 ordinal, const char *name, u32 nth, i32 code)` | Makes the `nth` call of that function from now (1: the next) return `code` and do nothing. `"*"`: any function except pushes, pops, and queries of attributes, error texts and pointers. |
//! | `u32 fake_cuda_clear(i32 ordinal)` | Cancels all failures that have not happened yet; returns how many have happened since the last time. |
//! | `u64 fake_cuda_calls(i32 ordinal, const char *name)` | Returns the number of calls of a function since the engine was opened; `"*"`: of all functions. A call that belongs to no engine counts for that of the calling thread's context. |
//! | `usize fake_cuda_thread_calls(u8 *text, usize bytes)` | Writes the calls that the calling thread has made since it began, of any engine or none: one function a line, with the number of its calls, as much as fits; returns the whole length. |
//! | `i32 fake_cuda_misreport(u64 address, usize bytes)` | From now on this length is reported for the block at the address, as for memory that a program has mapped by itself, of which a driver may report all the addresses that were reserved for it. |
//! | `i32 fake_cuda_uuid(i32 ordinal, u64 number)` | Sets the last 8 bytes of the device's UUID, by default the ordinal. |
//! | `i32 fake_cuda_break(i32 ordinal, i32 code)` | Makes the engine fail for good with this code and drops its queued work. Waits for the operation that is running now, if any. |
//! | `i32 fake_cuda_shutdown(i32 ordinal, i32 code)` | Unless `code` is 0, every call returns it (4: deinitialized) and does nothing, until this is called with 0. |
//! | `usize fake_cuda_report(i32 ordinal, u8 *text, usize bytes)` | Writes what is not clean, one item a line, as much as fits; returns the whole length, 0 if all is clean. |
//! | `u64 fake_cuda_live(i32 ordinal, const char *what)` | Returns how many there are of `device`, `pinned`, `managed`, `registered`, `events`, `streams`, `pools`, `contexts`, `pending` (queued operations), `mapped` (virtual memory), `handles` (of such memory), or how many bytes of addresses are `reserved`. |
//! | `i32 fake_cuda_green_stream(CUstream *stream)` | Makes a stream that belongs to a green context of the current context's device. |
//! | `i32 fake_cuda_drain(i32 ordinal)` | Runs all that is queued, and waits for it; returns 0, or the code with which the engine has failed. For the end of tests on lazy engines. |
//!
//! # Flags
//!
//! | flag | name | mode |
//! |---|---|---|
//! | 1 | `LAZY` | Nothing runs until a call waits for it: a device so slow that no event is complete. |
//! | 2 | `PAGEABLE_EAGER` | Pageable sources are read during the call. |
//! | 4 | `NO_POOLS` | There are no memory pools. |
//! | 8 | `NO_CONCURRENT_MANAGED` | The host must not use managed memory while the device works. |
//! | 16 | `NO_BATCH` | Lists of copies are not supported. |
//! | 32 | `NO_VIRTUAL_MEMORY` | A device says that it has no virtual memory management. |
//! | 64 | `NO_DESCRIPTORS` | A device says that its virtual memory cannot be exported. |
//! | 512 | `FREE_BLOCKS` | While host functions are queued or running, a free that is in no stream's order blocks, and all other calls of the engine with it. |
//! | 2048 | `INSTANT` | All work is complete when the call that queues it returns, except behind a host function that blocks. |
//!
//! # Environment variables
//!
//! They are read once. `FAKE_CUDA_INIT` is what `cuInit` returns, and `FAKE_CUDA_COUNT` the number
//! of devices (900 by default). `FAKE_CUDA_FLAGS`, a decimal number, is added to the flags of every engine, so that whole
//! programs run in a mode; only an engine that is opened lazy does not become instant, nor the
//! other way around.
//!
//! # How it runs work
//!
//! All work of a stream becomes operations of a queue of the simulated device, which checks each
//! access to device memory when it runs. An engine runs one operation at a time: a host function
//! that blocks holds up all streams of its group. On a lazy engine nothing runs until a call waits
//! for it.
//!
//! # Other processes
//!
//! Virtual memory (`cuMemCreate` and what belongs to it) is a memory file for each allocation, which every process maps that gets its
//! descriptor. The host's side of reserved addresses cannot be used until memory is mapped there and access to it is set: work that comes
//! too early or too late ends the process. As a driver may, a pointer's range is reported as all that was reserved.
//!
//! The state of an event for other processes is in a memory file of its owner's. Its handle cannot be opened after the owner's death. A
//! stream that waits for work of an owner that dies before that work has run ends with code 719, and so does its engine. A context can
//! have 64 of these events.
//!
//! # Failed engines and forks
//!
//! In a child of the process that initialised it (after `fork`), every call but those for error
//! texts returns 3 (not initialized) and does nothing.
//!
//! A failed engine returns its code from every call, but still records frees and destroys, so that
//! a report shows what was not freed.
#![allow(non_snake_case)] // the names of the driver's functions
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

mod api;
mod call;
mod control;
mod copy;
mod crossing;
mod emulation;
mod engine;
mod errors;
mod ffi;
mod kernels;
mod memory;
mod modes;
mod pages;
mod registry;
mod stack;
