//! Calls of a consumer's handler.

use std::ffi::{CString, c_int};
use std::ptr;

use arrow_schema::ffi::FFI_ArrowSchema;

use crate::abi::{
    FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask, OnError,
    OnNextTask, OnSchema, guard,
};
use crate::error::{Error, Result};
use crate::interchange::metadata::encode_metadata;

/// A handler with all its callbacks. It is released once, when this is dropped.
#[derive(Debug)]
pub(super) struct ForeignHandler {
    place: Place,
    on_schema: OnSchema,
    on_next_task: OnNextTask,
    on_error: OnError,
}

/// Where the struct is. Dropping it releases the handler.
#[derive(Debug)]
enum Place {
    /// In memory from a `Box`, since a consumer may store the address that it is called with.
    Own(*mut FFI_ArrowAsyncDeviceStreamHandler),
    /// In the consumer's memory, which is not touched after the release.
    Consumers(
        *mut FFI_ArrowAsyncDeviceStreamHandler,
        guard::ReleaseFn<FFI_ArrowAsyncDeviceStreamHandler>,
    ),
}

// SAFETY: the interface lets a producer call a handler from any thread, one call at a time.
unsafe impl Send for ForeignHandler {}

impl ForeignHandler {
    /// Takes over a handler.
    ///
    /// # Errors
    /// [`Error::Released`]; [`Error::InvalidInput`] for missing callbacks. The handler is released then.
    pub(super) fn own(handler: FFI_ArrowAsyncDeviceStreamHandler) -> Result<Self> {
        if handler.is_released() {
            return Err(Error::Released("the ArrowAsyncDeviceStreamHandler"));
        }
        let place = Place::Own(Box::into_raw(Box::new(handler)));
        // SAFETY: the struct was just boxed, nothing else points to it, and it is not released.
        unsafe { Self::new(place) }
    }

    /// Uses the handler at `this`.
    ///
    /// # Safety
    /// `this` is null or points to a handler that nothing else uses, and that stays there until it is released.
    ///
    /// # Errors
    /// The same as for [`own`](Self::own).
    pub(super) unsafe fn at(this: *mut FFI_ArrowAsyncDeviceStreamHandler) -> Result<Self> {
        if this.is_null() || !this.is_aligned() {
            return Err(Error::invalid("handler", "is null or misaligned"));
        }
        // SAFETY: the caller guarantees that a pointer that is not null points to a handler.
        match unsafe { (*this).release } {
            // SAFETY: the caller guarantees that the handler is used by nothing else and stays there until its release.
            Some(release) => unsafe { Self::new(Place::Consumers(this, release)) },
            None => Err(Error::Released("the ArrowAsyncDeviceStreamHandler")),
        }
    }

    /// # Safety
    /// The struct at `place` is valid, not released and used by nothing else.
    unsafe fn new(place: Place) -> Result<Self> {
        // SAFETY: the caller guarantees that the struct at `place` is valid.
        let handler = unsafe { &*place.this() };
        let missing = |name: &'static str| move || Error::invalid(name, "is null");
        // An early return drops `place`, which releases the handler.
        Ok(Self {
            on_schema: handler.on_schema.ok_or_else(missing("handler.on_schema"))?,
            on_next_task: handler
                .on_next_task
                .ok_or_else(missing("handler.on_next_task"))?,
            on_error: handler.on_error.ok_or_else(missing("handler.on_error"))?,
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
        // SAFETY: `new` requires a valid struct, which stays valid until this releases it. The caller guarantees that
        // `producer` lives as long.
        unsafe { (*this).producer = producer };
    }

    /// Returns the consumer's answer, or `EIO` if it panics.
    pub(super) fn on_schema(&mut self, schema: FFI_ArrowSchema) -> c_int {
        let this = self.this();
        // Released when it is dropped, unless the consumer has moved it out.
        let mut schema = schema;
        let call = self.on_schema;
        // SAFETY: the callback is the handler's own, which is not released, and `schema` lives during the call.
        let answer = guard::call_foreign("on_schema", || unsafe { call(this, &raw mut schema) });
        answer.unwrap_or(libc::EIO)
    }

    /// Returns the consumer's answer, like [`on_schema`](Self::on_schema). No task means the end.
    pub(super) fn on_next_task(
        &mut self,
        task: Option<FFI_ArrowAsyncTask>,
        metadata: Option<&[u8]>,
    ) -> c_int {
        let (this, call) = (self.this(), self.on_next_task);
        let metadata = metadata.map_or(ptr::null(), |m| m.as_ptr().cast());
        // The struct has no drop: its content is the consumer's from here on.
        let mut task = task;
        let task = task.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: the callback is the handler's own, which is not released. Task and metadata live during the call.
        let answer = guard::call_foreign("on_next_task", || unsafe { call(this, task, metadata) });
        answer.unwrap_or(libc::EIO)
    }

    pub(super) fn on_error(&mut self, e: &Error) {
        let (this, call) = (self.this(), self.on_error);
        // The `Display` of another crate's error may panic.
        let told = guard::call_foreign("on_error", || {
            let (text, metadata) = match e {
                // As the first producer reported it.
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
        // SAFETY: the callback is the handler's own, which is not released. Text and metadata live during the call.
        // A panic cannot be reported: only the release follows.
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
            // SAFETY: `ForeignHandler::own` made the pointer from a box, which only this drops. That releases the handler.
            Self::Own(this) => drop(unsafe { Box::from_raw(*this) }),
            Self::Consumers(this, release) => {
                // SAFETY: the callback is the handler's own, which is not released; this is its only call, in a drop.
                let _ = guard::call_foreign("release", || unsafe { release(*this) });
            }
        }
    }
}
