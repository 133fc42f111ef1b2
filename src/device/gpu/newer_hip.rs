//! What newer versions of HIP have, which hip-runtime-sys's bindings (of HIP 5.4) lack or have
//! otherwise. `fakes/hip/tests/bindings.rs` includes this file and compares it with the bindings of
//! HIP 7.14, so it names nothing of this crate.

use std::ffi::{c_int, c_void};

/// `hipMemcpyBatchAsync` as HIP 7.14 has it; 7.1 is expected to be the same. Destinations, sources, bytes, how many; attributes, the
/// first copy of each, how many; the copy that was refused; the stream.
pub(crate) type CopyList<Stream, Code, Attributes = c_void> = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut *mut c_void,
    *mut usize,
    usize,
    *mut Attributes,
    *mut usize,
    usize,
    *mut usize,
    Stream,
) -> Code;

/// `hipStreamGetDevice`, which 5.2 and 5.4 lack and 6.2 has.
pub(crate) type StreamDevice<Stream, Code> = unsafe extern "C" fn(Stream, *mut c_int) -> Code;

/// The numbers of `hipMemoryType` since HIP 6.
pub(crate) mod memory_type {
    use std::ffi::c_uint;

    pub(crate) const UNREGISTERED: c_uint = 0;
    pub(crate) const HOST: c_uint = 1;
    pub(crate) const DEVICE: c_uint = 2;
    pub(crate) const MANAGED: c_uint = 3;
}
