//! The handler that a producer calls.

use std::ffi::{CStr, c_char, c_int};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::inbox::{Inbox, Opening, Reception, Violation};
use super::shared::{Opened, Producer, Shared};
use super::task::Task;
use crate::abi::{FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncTask, ForeignSchema, guard};
use crate::error::Error;
use crate::interchange::metadata::decode_metadata;

/// Producers add up what is requested, some without a check. This many, and one more for each task, never overflow.
const MAX_DEPTH: usize = 1 << 31;

/// The consumer's side of an async device stream, which a producer calls. Dropping it without giving it to a producer ends
/// its stream with an error.
#[derive(Debug)]
pub struct AsyncStreamHandler {
    handler: FFI_ArrowAsyncDeviceStreamHandler,
    shared: Arc<Shared>,
}

impl AsyncStreamHandler {
    pub(super) fn new(queue_depth: usize) -> (Self, Arc<Shared>) {
        let shared = Arc::new(Shared {
            inbox: Inbox::new(),
            queue_depth: queue_depth.clamp(1, MAX_DEPTH) as i64,
            memory: AtomicPtr::new(ptr::null_mut()),
        });
        let private = Arc::into_raw(shared.clone()).cast_mut().cast();
        // The callbacks below keep to the interface for a handler whose `private_data` is a share of `Shared`. Their release gives
        // that share back.
        let handler = FFI_ArrowAsyncDeviceStreamHandler {
            on_schema: Some(on_schema),
            on_next_task: Some(on_next_task),
            on_error: Some(on_error),
            release: Some(release),
            producer: ptr::null_mut(),
            private_data: private,
        };
        let this = Self {
            handler,
            shared: shared.clone(),
        };
        (this, shared)
    }

    /// Returns the struct itself, for memory of the caller's own, which must stay where it is until the producer has released
    /// the handler. ([`produce`](crate::async_stream::produce) accepts the handler as it is.)
    pub fn into_ffi(self) -> FFI_ArrowAsyncDeviceStreamHandler {
        self.handler
    }

    /// Moves the struct into memory of its own, for a C producer. The memory is freed once the producer has called
    /// `release` and the stream has been dropped. If no producer gets the handler, it leaks.
    ///
    /// A producer in Rust moves the handler out ([`FFI_ArrowAsyncDeviceStreamHandler::from_raw`]) or calls it where it is
    /// ([`produce_at`](crate::async_stream::produce_at)). It must not drop the handler in place, which would touch the
    /// memory after the release.
    pub fn into_raw(self) -> *mut FFI_ArrowAsyncDeviceStreamHandler {
        let memory = Box::into_raw(Box::new(MaybeUninit::new(self.handler)));
        self.shared.memory.store(memory, Ordering::Release);
        memory.cast()
    }
}

impl From<AsyncStreamHandler> for FFI_ArrowAsyncDeviceStreamHandler {
    fn from(handler: AsyncStreamHandler) -> Self {
        handler.into_ffi()
    }
}

impl From<Violation> for Error {
    fn from(violation: Violation) -> Self {
        let (path, message) = match violation {
            Violation::Schema => ("on_schema", "was called a second time, or after an end"),
            Violation::BeforeSchema => ("on_next_task", "was called before on_schema"),
            Violation::AfterEnd => ("on_next_task", "was called after the end"),
            Violation::Unrequested => ("on_next_task", "has more tasks than were requested"),
            Violation::Released => {
                return Self::AsyncProducer {
                    errno: libc::EPIPE,
                    message: "the handler was released before the stream's end".into(),
                    metadata: Default::default(),
                };
            }
        };
        Self::invalid(path, message)
    }
}

/// Runs the body of a callback and returns its errno. Nothing unwinds out of it.
///
/// # Safety
/// `this` is null or points to a handler of this crate, released or not, that no other call uses.
unsafe fn answer(
    this: *mut FFI_ArrowAsyncDeviceStreamHandler,
    operation: &'static str,
    body: impl FnOnce(&Shared) -> c_int,
) -> c_int {
    // SAFETY: the caller guarantees that `this` can be read if it is not null. A handler that is not released holds a share
    // in its `private_data`. A second one is counted for the call, because the producer may release the handler from
    // within a request.
    let shared = unsafe {
        match this.as_ref() {
            Some(handler) if !handler.is_released() => {
                let shared = handler.private_data.cast_const().cast::<Shared>();
                Arc::increment_strong_count(shared);
                Arc::from_raw(shared)
            }
            _ => return libc::EINVAL,
        }
    };
    let answer = guard::callback(operation, || Ok(body(&shared)));
    drop_share(operation, shared);
    answer.unwrap_or(libc::EIO)
}

/// The last share drops arrays and tasks of the producer, whose releases may unwind.
fn drop_share(operation: &'static str, shared: Arc<Shared>) {
    let _ = guard::callback(operation, || {
        drop(shared);
        Ok(())
    });
}

/// Ends the stream with `e` and returns its errno.
fn refuse(shared: &Shared, e: Error) -> c_int {
    let errno = e.errno();
    shared.inbox.refuse(e);
    errno
}

unsafe extern "C-unwind" fn on_schema(
    this: *mut FFI_ArrowAsyncDeviceStreamHandler,
    schema: *mut FFI_ArrowSchema,
) -> c_int {
    // Taken first, so that it is released whatever happens.
    let taken = (!schema.is_null() && schema.is_aligned())
        // SAFETY: the interface requires the producer to pass a valid schema, which the consumer takes over.
        .then(|| unsafe { ForeignSchema::from_raw(schema) });
    // SAFETY: the interface requires the producer to pass the handler that this callback was read from, one call at a time,
    // and to have set its `producer`, which lives until the release.
    unsafe {
        answer(this, "on_schema", |shared| {
            let opened = Producer::of((*this).producer)
                .and_then(|producer| Ok((producer, Opened::new(producer, taken)?)));
            match opened {
                Ok((producer, opened)) => open(shared, producer, opened),
                Err(e) => refuse(shared, e),
            }
        })
    }
}

fn open(shared: &Shared, producer: Producer, opened: Opened) -> c_int {
    let inbox = &shared.inbox;
    match inbox.open(shared.queue_depth as u64) {
        Opening::Abandoned => return libc::ECANCELED,
        Opening::Refused => return libc::EINVAL,
        Opening::Request => {}
    }
    // SAFETY: `on_schema` is being called, so the producer has not released the handler before this call.
    let requested = unsafe { producer.request(shared.queue_depth) };
    let wanted = inbox.opened(producer, opened);
    match requested {
        Err(e) => refuse(shared, e),
        Ok(()) if wanted => 0,
        Ok(()) => libc::ECANCELED,
    }
}

unsafe extern "C-unwind" fn on_next_task(
    this: *mut FFI_ArrowAsyncDeviceStreamHandler,
    task: *mut FFI_ArrowAsyncTask,
    metadata: *const c_char,
) -> c_int {
    let is_misaligned = !task.is_aligned();
    // Taken first, so that it is extracted whatever happens.
    // SAFETY: the interface requires the producer to pass null or a valid task, and to use no other copy of it.
    let task = (!task.is_null() && !is_misaligned)
        .then(|| unsafe { Task::new(task.replace(FFI_ArrowAsyncTask::empty())) });
    // SAFETY: the interface requires the producer to pass the handler that this callback was read from, one call at a time,
    // and metadata that is null or encoded as the specification says.
    unsafe {
        answer(this, "on_next_task", |shared| {
            let task = match task {
                None if is_misaligned => {
                    return refuse(shared, Error::invalid("task", "is misaligned"));
                }
                None => None,
                Some(task) if !task.can_be_extracted() => {
                    return refuse(shared, Error::invalid("task.extract_data", "is null"));
                }
                Some(task) => match decode_metadata(metadata) {
                    Ok(metadata) => Some(task.with_metadata(metadata)),
                    Err(e) => return refuse(shared, Error::invalid("on_next_task.metadata", e)),
                },
            };
            // A task that is not taken is dropped here, which extracts it with null.
            match shared.inbox.task(task) {
                Reception::Taken | Reception::Unwanted(_) => 0,
                Reception::Refused(_) => libc::EINVAL,
            }
        })
    }
}

unsafe extern "C-unwind" fn on_error(
    this: *mut FFI_ArrowAsyncDeviceStreamHandler,
    code: c_int,
    message: *const c_char,
    metadata: *const c_char,
) {
    // SAFETY: the interface requires the producer to pass the handler that this callback was read from, one call at a time,
    // a message that is null or null-terminated, and metadata that is null or encoded as the specification says.
    unsafe {
        answer(this, "on_error", |shared| {
            let mut text = match message.is_null() {
                true => "the producer gives no text".to_owned(),
                false => CStr::from_ptr(message).to_string_lossy().into_owned(),
            };
            let metadata = decode_metadata(metadata).unwrap_or_else(|e| {
                text.push_str(&format!(" (with metadata that cannot be read: {e})"));
                Default::default()
            });
            shared.inbox.reported(Error::AsyncProducer {
                errno: code,
                message: text.into(),
                metadata,
            });
            0
        });
    }
}

unsafe extern "C-unwind" fn release(this: *mut FFI_ArrowAsyncDeviceStreamHandler) {
    // SAFETY: the interface requires the producer to pass the handler that this callback was read from, and to use it no
    // more. While it is not released, its `private_data` is the share that `AsyncStreamHandler::new` put there.
    let shared = unsafe {
        match this.as_ref() {
            Some(handler) if !handler.is_released() => {}
            _ => return,
        }
        let shared = (*this).private_data.cast_const().cast::<Shared>();
        (*this).release = None;
        Arc::from_raw(shared)
    };
    // From here on the struct is not touched, since the share may own its memory.
    let _ = guard::callback("release", || {
        shared.inbox.release();
        Ok(())
    });
    drop_share("release", shared);
}
