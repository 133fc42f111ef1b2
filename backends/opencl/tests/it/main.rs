//! The tests of the OpenCL backend. Those that need a process of their own start this program again.
#![cfg(not(miri))]

mod adoption;
mod conformance;
mod failed_events;
#[cfg(unix)]
mod interop;
#[cfg(target_os = "linux")]
mod loading;
mod rigs;
