//! The tests of the Vulkan backend. Those that need a process of their own start this program again.
#![cfg(not(miri))]

mod adoption;
mod conformance;
mod ends;
mod faults;
mod loading;
mod program;
mod rigs;
mod timeline;
mod watched;
