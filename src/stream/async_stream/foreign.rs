//! What the producer and a consumer call of each other: the consumer's handler, and the producer's structs.

use std::ffi::{CString, c_int};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Weak};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::demand::Demand;
use crate::abi::{
    ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask,
    FFI_ArrowDeviceArray, ForeignSchema, OnError, OnNextTask, OnSchema, guard,
};
use crate::error::{Error, Result};
use crate::interchange::schema::encode_metadata;

type Handler = FFI_ArrowAsyncDeviceStreamHandler;

/// A handler with all its callbacks, which is valid and used by nothing else until it is released: once, when this is dropped.
#[derive(Debug)]
pub(super) struct ForeignHandler {
    this: *mut Handler,
    /// The memory at `this` is from a `Box`, since a consumer may store the address that it is called with. Otherwise it is the
    /// consumer's, and is not touched after the release.
    is_own: bool,
    on_schema: OnSchema,
    on_next_task: OnNextTask,
    on_error: OnError,
}

// SAFETY: the interface lets a producer call a handler from any thread, one call at a time.
unsafe impl Send for ForeignHandler {}

impl ForeignHandler {
    /// Takes over a handler.
    ///
    /// # Errors
    /// [`Error::Released`]; [`Error::InvalidInput`] for missing callbacks. The handler is released then.
    pub(super) fn own(handler: Handler) -> Result<Self> {
        if handler.is_released() {
            return Err(released());
        }
        let this = Box::into_raw(Box::new(handler));
        // SAFETY: the struct was just boxed, nothing else points to it, and it is not released.
        unsafe { Self::new(this, true) }
    }

    /// Uses the handler at `this`.
    ///
    /// # Safety
    /// `this` is null or points to a handler that nothing else uses, and that stays there until it is released.
    ///
    /// # Errors
    /// The same as for [`own`](Self::own).
    pub(super) unsafe fn at(this: *mut Handler) -> Result<Self> {
        if this.is_null() || !this.is_aligned() {
            return Err(Error::invalid("handler", "is null or misaligned"));
        }
        // SAFETY: the caller guarantees that a pointer that is not null points to a handler, which nothing else uses and which stays
        // there until its release.
        unsafe {
            match (*this).is_released() {
                true => Err(released()),
                false => Self::new(this, false),
            }
        }
    }

    /// # Safety
    /// The struct at `this` is valid, not released and used by nothing else until its release. It is boxed if it is `own`.
    unsafe fn new(this: *mut Handler, own: bool) -> Result<Self> {
        // SAFETY: the caller guarantees a valid struct.
        let handler = unsafe { &*this };
        let path = match (handler.on_schema, handler.on_next_task, handler.on_error) {
            (Some(on_schema), Some(on_next_task), Some(on_error)) => {
                return Ok(Self {
                    this,
                    is_own: own,
                    on_schema,
                    on_next_task,
                    on_error,
                });
            }
            (None, ..) => "handler.on_schema",
            (_, None, _) => "handler.on_next_task",
            (.., None) => "handler.on_error",
        };
        // SAFETY: the caller guarantees a struct that is not released, and nothing uses it after this.
        unsafe { release(this, own) };
        Err(Error::invalid(path, "is null"))
    }

    /// # Safety
    /// `producer` is valid until the handler is released.
    pub(super) unsafe fn set_producer(&mut self, producer: *mut FFI_ArrowAsyncProducer) {
        // SAFETY: the struct is valid until this releases it. The caller guarantees that `producer` lives as long.
        unsafe { (*self.this).producer = producer };
    }

    /// Returns the consumer's answer, or `EIO` if it panics.
    pub(super) fn on_schema(&mut self, mut schema: FFI_ArrowSchema) -> c_int {
        // The schema is released when it is dropped, unless the consumer has moved it out.
        let (this, call) = (self.this, self.on_schema);
        // SAFETY: the callback is the handler's own, which is not released, and `schema` lives during the call.
        let answer = guard::call_foreign("on_schema", || unsafe { call(this, &raw mut schema) });
        answer.unwrap_or(libc::EIO)
    }

    /// Returns the consumer's answer, like [`on_schema`](Self::on_schema). No task means the end.
    pub(super) fn on_next_task(
        &mut self,
        mut task: Option<FFI_ArrowAsyncTask>,
        metadata: &ForeignSchema,
    ) -> c_int {
        let (this, call) = (self.this, self.on_next_task);
        let metadata = metadata.metadata;
        // The struct has no drop: its content is the consumer's from here on.
        let task = task.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: the callback is the handler's own, which is not released. Task and metadata live during the call.
        let answer = guard::call_foreign("on_next_task", || unsafe { call(this, task, metadata) });
        answer.unwrap_or(libc::EIO)
    }

    pub(super) fn on_error(&mut self, e: &Error) {
        let (this, call) = (self.this, self.on_error);
        // The `Display` of another crate's error may panic.
        let told = guard::call_foreign("on_error", || {
            let (text, metadata) = match e {
                // As the first producer reported it.
                Error::AsyncProducer {
                    message, metadata, ..
                } => (message.to_string(), encode_metadata(Some(metadata)).ok()),
                e => (e.to_string(), None),
            };
            let mut text = text.into_bytes();
            text.retain(|byte| *byte != 0);
            (CString::new(text).ok(), metadata, e.errno())
        });
        let (text, metadata, errno) = told.unwrap_or((None, None, libc::EIO));
        let text = text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
        let metadata = metadata
            .as_ref()
            .map_or(ptr::null(), |schema| schema.metadata);
        // SAFETY: the callback is the handler's own, which is not released. Text and metadata live during the call.
        // A panic cannot be reported: only the release follows.
        let _ = guard::call_foreign("on_error", || unsafe { call(this, errno, text, metadata) });
    }
}

impl Drop for ForeignHandler {
    fn drop(&mut self) {
        // SAFETY: `new` requires a struct that is not released, and nothing uses it after this drop.
        unsafe { release(self.this, self.is_own) }
    }
}

fn released() -> Error {
    Error::Released("the ArrowAsyncDeviceStreamHandler")
}

/// Releases a handler, and frees its memory if it is `own`.
///
/// # Safety
/// The struct at `this` is valid, not released, and not used after this. It is boxed if it is `own`.
unsafe fn release(this: *mut Handler, own: bool) {
    // SAFETY: the caller guarantees a valid struct.
    if let Some(release) = unsafe { (*this).release } {
        // SAFETY: the callback is the handler's own, which is not released; this is the last call.
        let _ = guard::call_foreign("release", || unsafe { release(this) });
    }
    if own {
        // SAFETY: the caller guarantees a box, which only this frees. What was in it is released.
        drop(unsafe { Box::from_raw(this.cast::<MaybeUninit<Handler>>()) });
    }
}

/// The producer's struct and what it points to. It lives until the handler is released and the last task is extracted,
/// since some consumers (Arrow C++) call `request` for tasks that they take after the release.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) demand: Demand,
    ffi: FFI_ArrowAsyncProducer,
    /// For shares of this during the consumer's calls.
    this: Weak<Self>,
    /// What `ffi` points to.
    _metadata: ForeignSchema,
}

// SAFETY: `ffi`, which is not `Sync` for its pointers, is only read; they point to this struct and its metadata, which do
// not change.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn new(device_type: ArrowDeviceType, metadata: ForeignSchema) -> Arc<Self> {
        Arc::new_cyclic(|this: &Weak<Self>| {
            // The callbacks below keep to the interface for a `private_data` that points to a live `Shared`, as this one does. The
            // metadata is encoded as the specification says, and its bytes do not move with the schema.
            let ffi = FFI_ArrowAsyncProducer {
                device_type,
                request: Some(request),
                cancel: Some(cancel),
                additional_metadata: metadata.metadata,
                private_data: this.as_ptr().cast_mut().cast(),
            };
            Self {
                demand: Demand::new(),
                ffi,
                this: this.clone(),
                _metadata: metadata,
            }
        })
    }

    /// The pointer for `handler.producer`, through which nothing is written.
    pub(super) fn as_producer(self: &Arc<Self>) -> *mut FFI_ArrowAsyncProducer {
        // SAFETY: `Arc::as_ptr` points to a live `Shared`, of which this takes a member's address.
        unsafe { (&raw const (*Arc::as_ptr(self)).ffi).cast_mut() }
    }

    /// A task that moves `array` to the consumer.
    pub(super) fn task(self: &Arc<Self>, array: FFI_ArrowDeviceArray) -> FFI_ArrowAsyncTask {
        FFI_ArrowAsyncTask {
            extract_data: Some(extract_data),
            private_data: Box::into_raw(Box::new((array, self.clone()))).cast(),
        }
    }
}

/// A task's `private_data`.
type Task = (FFI_ArrowDeviceArray, Arc<Shared>);

/// Runs `call` with a share of what the consumer calls: the waker of the producer's task may drop the task, whose share may be the
/// last one. A waker may panic, too.
///
/// # Safety
/// `producer` is null or the struct of a live [`Shared`].
unsafe fn call(
    producer: *mut FFI_ArrowAsyncProducer,
    operation: &'static str,
    call: impl FnOnce(&Shared),
) {
    // SAFETY: the caller guarantees that a pointer that is not null points to the struct of a live `Shared`, to which its
    // `private_data` points.
    let shared = unsafe {
        let producer = producer.as_ref();
        producer.and_then(|producer| (*producer.private_data.cast::<Shared>()).this.upgrade())
    };
    if let Some(shared) = shared {
        let _ = guard::call_foreign(operation, move || call(&shared));
    }
}

unsafe extern "C-unwind" fn request(producer: *mut FFI_ArrowAsyncProducer, n: i64) {
    // SAFETY: the interface lets the consumer pass the struct until the release and for tasks after it; `Shared` lives as
    // long.
    unsafe { call(producer, "request", |shared| shared.demand.request(n)) };
}

unsafe extern "C-unwind" fn cancel(producer: *mut FFI_ArrowAsyncProducer) {
    // SAFETY: the interface lets the consumer pass the struct until the release, and `Shared` lives longer.
    unsafe { call(producer, "cancel", |shared| shared.demand.cancel()) };
}

unsafe extern "C-unwind" fn extract_data(
    task: *mut FFI_ArrowAsyncTask,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    if task.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: the interface requires the consumer to pass a task of this producer, valid for reads and writes. Its content
    // is moved out, so that a second call through the same struct finds nothing.
    let task = unsafe { task.replace(FFI_ArrowAsyncTask::empty()) };
    if task.extract_data.is_none() {
        return libc::EINVAL;
    }
    // SAFETY: `Shared::task` made the pointer from a box, and the interface allows one extraction.
    let (array, producer) = *unsafe { Box::from_raw(task.private_data.cast::<Task>()) };
    if out.is_null() {
        let _ = guard::call_foreign("extract_data", || drop(array));
    } else {
        // SAFETY: the interface requires an `out` that is null or valid for writes, and holds nothing to release.
        unsafe { out.write(array) };
    }
    let _ = guard::call_foreign("extract_data", || drop(producer));
    0
}
