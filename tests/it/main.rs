//! The crate's tests through its public interface, in one program: what needs a process of its own (a count of all
//! threads' memory, memory that is poisoned when it is freed) is beside it.

include!("arrow.rs");

mod altered;
#[cfg(not(miri))]
mod arrays;
mod async_stream;
#[cfg(not(miri))]
mod buffers;
#[cfg(not(miri))]
mod concat;
#[cfg(not(miri))]
mod counts;
mod cudf;
mod dlpack;
#[cfg(not(miri))]
mod downloads;
mod export;
mod export_release;
#[cfg(not(miri))]
mod faults;
#[cfg(not(miri))]
mod fits;
#[cfg(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    target_os = "linux",
    target_env = "gnu",
    panic = "unwind",
    not(miri)
))]
mod foreign_exceptions;
#[cfg(all(target_os = "linux", not(miri)))]
mod fork;
#[cfg(target_os = "linux")]
mod hooks;
mod host_arrays;
mod hostile;
mod import_bad;
mod kernel_suite;
#[cfg(not(miri))]
mod matrix;
mod metal;
mod miri_interchange;
mod misuse;
#[cfg(not(miri))]
mod ordering;
#[cfg(not(miri))]
mod packing;
mod pending;
#[cfg(not(miri))]
mod properties;
mod queued;
mod schemas;
#[cfg(all(target_os = "linux", not(miri)))]
mod sim_kernel;
mod simkit;
#[cfg(not(miri))]
mod stream_suite;
#[cfg(not(miri))]
mod streams;
mod support;
mod support_c;
mod support_self;
#[cfg(all(target_os = "linux", not(miri)))]
mod threads;
#[cfg(not(miri))]
mod transfer;
mod validation;
mod validity;

#[cfg(not(miri))]
use streams::rigs;
use support::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
