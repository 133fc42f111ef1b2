//! Calls of a foreign handler.

use std::ffi::{CString, c_int};
use std::ptr;

use arrow_schema::ffi::FFI_ArrowSchema;

use crate::abi::{
    FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask, HandlerOnError,
    HandlerOnNextTask, HandlerOnSchema, HandlerRelease, guard,
};
use crate::error::{Error, Result};
use crate::interchange::schema::encode_metadata;

/// A handler with all its callbacks, released once: when this is dropped at the latest.
#[derive(Debug)]
pub(super) struct ForeignHandler {
    place: Place,
    on_schema: HandlerOnSchema,
    on_next_task: HandlerOnNextTask,
    on_error: HandlerOnError,
}

/// Where the struct is. Dropping it releases the handler.
#[derive(Debug)]
enum Place {
    /// In memory of its own, from a `Box`: consumers may note the address that they are called with.
    Own(*mut FFI_ArrowAsyncDeviceStreamHandler),
    /// Where the consumer put it. Not touched after its release.
    Consumers(*mut FFI_ArrowAsyncDeviceStreamHandler, HandlerRelease),
}

// SAFETY: the interface lets a producer call a handler from any thread, one call at a time.
unsafe impl Send for ForeignHandler {}

impl ForeignHandler {
    /// Takes a handler over.
    ///
    /// # Errors
    /// [`Error::Released`]; [`Error::InvalidInput`] for missing callbacks. The handler is released then.
    pub(super) fn own(handler: FFI_ArrowAsyncDeviceStreamHandler) -> Result<Self> {
        if handler.is_released() {
            return Err(Error::Released("the ArrowAsyncDeviceStreamHandler"));
        }
        let place = Place::Own(Box::into_raw(Box::new(handler)));
        // SAFETY: a valid struct of ours.
        unsafe { Self::new(place) }
    }

    /// Uses the handler at `this`.
    ///
    /// # Safety
    /// `this` is null or points to a handler that nobody else uses, and that stays there until it is released.
    ///
    /// # Errors
    /// As [`own`](Self::own).
    pub(super) unsafe fn at(this: *mut FFI_ArrowAsyncDeviceStreamHandler) -> Result<Self> {
        if this.is_null() || !this.is_aligned() {
            return Err(Error::invalid("handler", "is null or misaligned"));
        }
        // SAFETY: the caller's.
        match unsafe { (*this).release() } {
            // SAFETY: the caller's.
            Some(release) => unsafe { Self::new(Place::Consumers(this, release)) },
            None => Err(Error::Released("the ArrowAsyncDeviceStreamHandler")),
        }
    }

    /// # Safety
    /// The struct at `place` is valid and not released.
    unsafe fn new(place: Place) -> Result<Self> {
        // SAFETY: the caller's.
        let handler = unsafe { &*place.this() };
        let missing = |name: &'static str| move || Error::invalid(name, "is null");
        let on_schema = handler.on_schema();
        let on_next_task = handler.on_next_task();
        let on_error = handler.on_error();
        // What returns early drops `place`.
        Ok(Self {
            on_schema: on_schema.ok_or_else(missing("handler.on_schema"))?,
            on_next_task: on_next_task.ok_or_else(missing("handler.on_next_task"))?,
            on_error: on_error.ok_or_else(missing("handler.on_error"))?,
            place,
        })
    }

    fn this(&mut self) -> *mut FFI_ArrowAsyncDeviceStreamHandler {
        self.place.this()
    }

    /// # Safety
    /// `producer` is valid until the handler is released.
    pub(super) unsafe fn set_producer(&mut self, producer: *mut FFI_ArrowAsyncProducer) {
        let this = self.this();
        // SAFETY: a valid struct (`own`, or `at`'s caller); the caller's.
        unsafe { (*this).set_producer(producer) };
    }

    /// The consumer's answer; `EIO` if it panics or throws.
    pub(super) fn on_schema(&mut self, schema: FFI_ArrowSchema) -> c_int {
        let this = self.this();
        // What the consumer leaves is released when this is dropped.
        let mut schema = schema;
        let call = self.on_schema;
        // SAFETY: the handler's own callback; the consumer moves the schema out.
        let answer = guard::call_foreign("on_schema", || unsafe { call(this, &raw mut schema) });
        answer.unwrap_or(libc::EIO)
    }

    /// As [`on_schema`](Self::on_schema). Without a task: the end.
    pub(super) fn on_next_task(
        &mut self,
        task: Option<FFI_ArrowAsyncTask>,
        metadata: Option<&[u8]>,
    ) -> c_int {
        let (this, call) = (self.this(), self.on_next_task);
        let metadata = metadata.map_or(ptr::null(), |m| m.as_ptr().cast());
        // Never dropped: the consumer has what is in it.
        let mut task = task;
        let task = task.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: the handler's own callback; task and metadata live during the call.
        let answer = guard::call_foreign("on_next_task", || unsafe { call(this, task, metadata) });
        answer.unwrap_or(libc::EIO)
    }

    pub(super) fn on_error(&mut self, e: &Error) {
        let (this, call) = (self.this(), self.on_error);
        // Errors of other crates are spelled out by their own code.
        let told = guard::call_foreign("on_error", || {
            let (text, metadata) = match e {
                // As the producer told it.
                Error::AsyncProducer {
                    message, metadata, ..
                } => (message.to_string(), encode_metadata(metadata)),
                e => (e.to_string(), Ok(None)),
            };
            let mut text = text.into_bytes();
            text.retain(|byte| *byte != 0);
            (CString::new(text).ok(), metadata.unwrap_or(None), e.errno())
        });
        let (text, metadata, errno) = told.unwrap_or((None, None, libc::EIO));
        let text = text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
        let metadata = metadata.as_ref().map_or(ptr::null(), |m| m.as_ptr().cast());
        // SAFETY: the handler's own callback; text and metadata live during the call. A panic of it has
        // nowhere to go: the release follows.
        let _ = guard::call_foreign("on_error", || unsafe { call(this, errno, text, metadata) });
    }

    /// The last call.
    pub(super) fn release(self) {
        drop(self);
    }
}

impl Place {
    fn this(&self) -> *mut FFI_ArrowAsyncDeviceStreamHandler {
        match self {
            Self::Own(this) | Self::Consumers(this, _) => *this,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        match self {
            // SAFETY: `own` made it; its drop releases the handler.
            Self::Own(this) => drop(unsafe { Box::from_raw(*this) }),
            Self::Consumers(this, release) => {
                // SAFETY: the handler's own callback, once: `self` is gone after this.
                let _ = guard::call_foreign("release", || unsafe { release(*this) });
            }
        }
    }
}
