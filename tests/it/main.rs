//! The crate's tests through its public interface, in one program: what a test needs of its own process (a fork, a count of all
//! threads' memory, memory that is poisoned when it is freed) is beside it.

mod abi_c;
mod allocations;
mod arrays;
mod async_stream;
mod buffers;
mod compact;
mod concat;
mod costs;
mod counts;
mod counts_import;
mod cudf;
mod dlpack;
mod downloads;
mod export;
mod export_release;
mod faults;
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
mod interchange;
mod ipc;
mod kernel_suite;
mod metal;
mod miri_interchange;
mod misuse;
mod ordering;
mod packing;
mod pending;
mod properties;
#[cfg(all(target_os = "linux", not(miri)))]
mod sim_kernel;
mod simkit;
mod stream_suite;
mod streams;
mod support;
mod support_c;
mod support_self;
#[cfg(all(target_os = "linux", not(miri)))]
mod threads;
mod transfer;
mod validation;
mod validity;

use streams::rigs;
use support::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
