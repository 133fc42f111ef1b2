//! References to objects of the runtime, which are given back when they are dropped.

use std::ffi::c_void;
use std::ptr::NonNull;

use opencl_sys::{cl_command_queue, cl_context, cl_event, cl_mem};

use crate::sys::{Answer, Cl, call};

macro_rules! object {
    ($(#[$doc:meta])* $name:ident: $handle:ident, $retain:ident, $release:ident) => {
        $(#[$doc])*
        pub(crate) struct $name {
            cl: &'static Cl,
            raw: NonNull<c_void>,
        }

        // SAFETY: the runtime's functions may be called on any thread with any object except kernels.
        unsafe impl Send for $name {}
        // SAFETY: a shared reference only calls those functions, which may run on several threads at once.
        unsafe impl Sync for $name {}

        impl $name {
            /// Takes over a reference.
            ///
            /// # Safety
            /// `raw` is a live object, one of whose references belongs to the result.
            #[allow(dead_code)] // not every kind of object is made here
            pub(crate) unsafe fn own(cl: &'static Cl, raw: NonNull<c_void>) -> Self {
                Self { cl, raw }
            }

            /// Takes a reference of its own. Null is refused by the runtime.
            ///
            /// # Safety
            /// `raw` is null or a live object.
            pub(crate) unsafe fn retain(cl: &'static Cl, raw: $handle) -> Answer<Self> {
                // SAFETY: the caller guarantees a live object, or null, which is an error.
                unsafe { call!(cl, $retain(raw)) }?;
                let raw = NonNull::new(raw).ok_or($crate::sys::Failed {
                    call: stringify!($retain),
                    code: opencl_sys::CL_INVALID_VALUE,
                })?;
                Ok(Self { cl, raw })
            }

            pub(crate) fn raw(&self) -> $handle {
                self.raw.as_ptr()
            }

            /// Gives the reference to the caller.
            #[allow(dead_code)] // not every kind of object is given away
            pub(crate) fn into_raw(self) -> $handle {
                std::mem::ManuallyDrop::new(self).raw()
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                if !self.cl.process.is_this() {
                    return;
                }
                // An error has no place to go.
                // SAFETY: this value owns a reference, which keeps the object alive until here.
                let _: Answer<()> = unsafe { call!(self.cl, $release(self.raw())) };
            }
        }
    };
}

object! {
    /// A context.
    ContextObject: cl_context, clRetainContext, clReleaseContext
}
object! {
    /// A command queue.
    CommandQueue: cl_command_queue, clRetainCommandQueue, clReleaseCommandQueue
}
object! {
    /// An event.
    Event: cl_event, clRetainEvent, clReleaseEvent
}
object! {
    /// A buffer.
    MemObject: cl_mem, clRetainMemObject, clReleaseMemObject
}
