//! An OpenCL loader for tests: it passes every call on to the real one, counts the references to objects and the memory that
//! the program owns, and fails or distorts a call on request.
//!
//! It has the functions that `arrow-device-opencl` uses, and what controls it:
//!
//! | function | effect |
//! | --- | --- |
//! | `fake_opencl_fail(name, nth, times, code)` | from the nth call from now on, so many calls of the function of this name (`*`: of any that can fail, on any thread but the backend's own) fail with the code, without reaching the real one. With the code 0 it reports success and returns nothing: a null object, no event, a count of 0; functions that return nothing else are then passed over |
//! | `fake_opencl_clear()` | takes that back; returns how many calls have failed since |
//! | `fake_opencl_calls(name)` | returns how many calls of a function that can fail were made |
//! | `fake_opencl_live()` | returns how many references and pieces of memory the program owns |
//! | `fake_opencl_misuses()` | returns how often it gave back what it does not own |
//!
//! Functions that give something back never fail: what they did not release would be lost.
#![cfg(unix)]
#![allow(non_snake_case, unreachable_pub)]
// The functions are OpenCL's, with the contracts of its specification.
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments, missing_docs)]

mod api;
mod control;
mod real;
mod usm;
