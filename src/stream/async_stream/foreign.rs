//! What the producer and a consumer call of each other: the consumer's handler, and the producer's structs.

use std::ffi::c_int;
use std::sync::{Arc, Mutex, Weak};
use std::{ptr, thread};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::demand::{Demand, Turn};
use crate::abi::guard::ReleaseFn;
use crate::abi::{
    ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask,
    FFI_ArrowDeviceArray, ForeignSchema, OnError, OnNextTask, OnSchema, guard,
};
use crate::device::lock;
use crate::error::{Error, Result};
use crate::interchange::schema::encode_metadata;

type Handler = FFI_ArrowAsyncDeviceStreamHandler;

/// A consumer's handler, and the producer's struct that it has. Dropping this ends the stream and releases the handler, once. Its
/// memory is the consumer's, and is not touched after that.
pub(super) struct ForeignHandler {
    pub(super) calls: Calls,
    pub(super) shared: Arc<Shared>,
}

/// A handler that is not released, and its callbacks. Copies are used while the [`ForeignHandler`] lives, and by its end.
#[derive(Clone, Copy)]
pub(super) struct Calls {
    this: *mut Handler,
    on_schema: OnSchema,
    on_next_task: OnNextTask,
    on_error: OnError,
    release: ReleaseFn<Handler>,
}

// SAFETY: the interface lets a producer call a handler from any thread, one call at a time.
unsafe impl Send for Calls {}

impl ForeignHandler {
    /// Takes over the handler at `this`, and sets its producer.
    ///
    /// # Safety
    /// `this` is null or points to a handler that nothing else uses, and that stays there until it is released.
    ///
    /// # Errors
    /// [`Error::Released`]; [`Error::InvalidInput`] for missing callbacks. The handler is released then.
    pub(super) unsafe fn new(this: *mut Handler, shared: Arc<Shared>) -> Result<Self> {
        if this.is_null() || !this.is_aligned() {
            return Err(Error::invalid("handler", "is null or misaligned"));
        }
        // SAFETY: the caller guarantees that a pointer that is not null points to a handler, which nothing else uses.
        let handler = unsafe { &mut *this };
        let Some(release) = handler.release else {
            return Err(Error::Released("the ArrowAsyncDeviceStreamHandler"));
        };
        let (Some(on_schema), Some(on_next_task), Some(on_error)) =
            (handler.on_schema, handler.on_next_task, handler.on_error)
        else {
            // SAFETY: the callback is the handler's own, which is not released; this is the last call.
            let _ = guard::call_foreign("release", || unsafe { release(this) });
            return Err(Error::invalid("handler", "lacks a callback"));
        };
        // `shared` lives until after the release.
        handler.producer = shared.as_producer();
        let calls = Calls {
            this,
            on_schema,
            on_next_task,
            on_error,
            release,
        };
        Ok(Self { calls, shared })
    }
}

impl Calls {
    /// Returns the consumer's answer, or `EIO` if it panics.
    pub(super) fn on_schema(self, mut schema: FFI_ArrowSchema) -> c_int {
        // The schema is released when it is dropped, unless the consumer has moved it out.
        let (this, call) = (self.this, self.on_schema);
        // SAFETY: the callback is the handler's own, which is not released, and `schema` lives during the call.
        let answer = guard::call_foreign("on_schema", || unsafe { call(this, &raw mut schema) });
        answer.unwrap_or(libc::EIO)
    }

    /// Returns the consumer's answer, like [`on_schema`](Self::on_schema). No task means the end.
    pub(super) fn on_next_task(self, task: Option<Arc<Task>>, metadata: &ForeignSchema) -> c_int {
        let (this, call) = (self.this, self.on_next_task);
        let metadata = metadata.metadata;
        // The struct has no drop: its share is the consumer's from here on.
        let mut ffi = task.clone().map(|task| FFI_ArrowAsyncTask {
            extract_data: Some(extract_data),
            private_data: Arc::into_raw(task).cast_mut().cast(),
        });
        let ffi = ffi.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        // SAFETY: the callback is the handler's own, which is not released. Task and metadata live during the call.
        let answer = guard::call_foreign("on_next_task", || unsafe { call(this, ffi, metadata) });
        let answer = answer.unwrap_or(libc::EIO);
        if answer != 0 {
            // Some consumers (SedonaDB) do not extract what they refuse.
            let array = task.and_then(|task| lock(&task.array).take());
            let _ = guard::call_foreign("on_next_task", || drop(array));
        }
        answer
    }

    pub(super) fn on_error(self, e: &Error) {
        // The `Display` of another crate's error may panic.
        let told = guard::call_foreign("on_error", || {
            let (text, metadata) = match e {
                // As the first producer reported it.
                Error::AsyncProducer {
                    message, metadata, ..
                } => (message.to_string(), encode_metadata(Some(metadata)).ok()),
                e => (e.to_string(), None),
            };
            (guard::c_text(text), metadata, e.errno())
        });
        let (text, metadata, errno) = told.unwrap_or((None, None, libc::EIO));
        let text = text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
        let metadata = metadata.as_ref().map_or(ptr::null(), |m| m.metadata);
        let (this, call) = (self.this, self.on_error);
        // SAFETY: the callback is the handler's own, which is not released. Text and metadata live during the call.
        // A panic cannot be reported: only the release follows.
        let _ = guard::call_foreign("on_error", || unsafe { call(this, errno, text, metadata) });
    }
}

impl Drop for ForeignHandler {
    fn drop(&mut self) {
        let error = match self.shared.demand.close() {
            // The consumer knows, or was told.
            Turn::Cancelled => None,
            Turn::Invalid(n) => Some(invalid_request(n)),
            Turn::Produce(_) => Some(Error::Cancelled {
                operation: "producing an async stream",
            }),
        };
        let (calls, shared) = (self.calls, self.shared.clone());
        let is_waking = shared.demand.is_waking();
        let end = move || {
            if let Some(e) = &error {
                calls.on_error(e);
            }
            // SAFETY: the callback is the handler's own, which is not released: this is the last call, of the one drop.
            let _ = guard::call_foreign("release", || unsafe { (calls.release)(calls.this) });
            drop(shared);
        };
        // A call of the consumer that is waking this task, on this thread or another: the handler must not be called within it, and the
        // waker may wait for a lock that this thread holds, as the release waits for that call. If no thread can be started, it is called
        // all the same.
        let thread = || thread::Builder::new().name("arrow-device async end".into());
        if !is_waking || thread().spawn(end.clone()).is_err() {
            end();
        }
    }
}

/// The error that answers an invalid request.
pub(super) fn invalid_request(n: i64) -> Error {
    Error::argument(format!("request({n}): the number must be at least 1"))
}

/// The producer's struct and what it points to. It lives until the handler is released and the last task is extracted,
/// since some consumers (Arrow C++) call `request` for tasks that they take after the release.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) demand: Demand,
    ffi: FFI_ArrowAsyncProducer,
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
    pub(super) fn task(self: &Arc<Self>, array: FFI_ArrowDeviceArray) -> Arc<Task> {
        Arc::new(Task {
            array: Mutex::new(Some(array)),
            _producer: self.clone(),
        })
    }
}

/// What a task's `private_data` points to. Its extraction gives the consumer's share back.
pub(super) struct Task {
    /// `None` once it was extracted or refused.
    array: Mutex<Option<FFI_ArrowDeviceArray>>,
    /// Which lives as long as its tasks.
    _producer: Arc<Shared>,
}

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
    if producer.is_null() {
        return;
    }
    // SAFETY: the caller guarantees that a pointer that is not null points to the struct of a live `Shared`, whose `private_data`
    // is the pointer of an `Arc` that has a share.
    let shared = unsafe {
        let shared = (*producer).private_data.cast_const().cast::<Shared>();
        Arc::increment_strong_count(shared);
        Arc::from_raw(shared)
    };
    let _ = guard::call_foreign(operation, move || call(&shared));
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
    // is moved out, so that a second call through the same struct finds nothing. It may have taken the callback out itself.
    let task = unsafe { task.replace(FFI_ArrowAsyncTask::empty()) };
    if task.private_data.is_null() {
        return libc::EINVAL;
    }
    // SAFETY: `Calls::on_next_task` made the pointer of the consumer's share, and the interface allows one extraction.
    let task = unsafe { Arc::from_raw(task.private_data.cast_const().cast::<Task>()) };
    let mut array = lock(&task.array).take();
    let answer = match &array {
        None if !out.is_null() => libc::ECANCELED,
        _ => 0,
    };
    if let Some(array) = array.take_if(|_| !out.is_null()) {
        // SAFETY: the interface requires an `out` that is null or valid for writes, and holds nothing to release.
        unsafe { out.write(array) };
    }
    let _ = guard::call_foreign("extract_data", || drop((array, task)));
    answer
}
