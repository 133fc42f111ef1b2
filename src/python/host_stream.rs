//! `struct ArrowArrayStream`. arrow-rs's type for it has callbacks out of which nothing may unwind.

use std::ptr;

use crate::abi::c_data::CArray;
use crate::abi::guard;
use crate::abi::{ArrowDeviceType, CStream, Callbacks, FFI_ArrowDeviceArray};

/// `struct ArrowArrayStream` of the C stream interface. Dropping it releases it.
#[repr(transparent)]
pub(super) struct HostStream(Callbacks<Self, CArray>);

// SAFETY: the C stream interface allows calls from any thread, one at a time.
unsafe impl Send for HostStream {}

impl HostStream {
    pub(super) const fn empty() -> Self {
        Self(Callbacks::empty())
    }
}

impl Drop for HostStream {
    fn drop(&mut self) {
        let this = ptr::from_mut(self);
        // SAFETY: `this` is a live struct that nothing else uses, and its `release` is its own callback. A moved or released
        // struct has none.
        let outcome = unsafe {
            guard::release_once("ArrowArrayStream.release", this, &raw mut (*this).0.release)
        };
        // A drop cannot report a panic of the callback. The struct is released all the same.
        drop(outcome);
    }
}

impl CStream for HostStream {
    const NAME: &'static str = "the ArrowArrayStream";
    type Array = CArray;

    fn new(_: ArrowDeviceType, callbacks: Callbacks<Self, CArray>) -> Self {
        Self(callbacks)
    }

    fn device_type(&self) -> ArrowDeviceType {
        ArrowDeviceType::CPU
    }

    fn callbacks(&self) -> &Callbacks<Self, CArray> {
        &self.0
    }

    fn array(mut array: FFI_ArrowDeviceArray) -> CArray {
        array.take_array()
    }

    fn device_array(array: CArray) -> FFI_ArrowDeviceArray {
        FFI_ArrowDeviceArray::assemble(array, ArrowDeviceType::CPU, -1, ptr::null_mut())
    }
}
