//! The handler that a producer calls.

use std::cell::UnsafeCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Weak};
use std::{mem, ptr};

use arrow_schema::SchemaRef;
use arrow_schema::ffi::FFI_ArrowSchema;

use super::inbox::{Inbox, Kind, Refused};
use crate::abi::{
    ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask,
    FFI_ArrowDeviceArray, ForeignSchema, guard,
};
use crate::error::{Error, Result};
use crate::interchange::schema::{decode_metadata, import_schema};

type Handler = FFI_ArrowAsyncDeviceStreamHandler;

/// Producers add up what is requested, some without a check. This many, and one more for each task, never overflow.
const MAX_DEPTH: usize = 1 << 31;

/// What a handler and its stream share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) inbox: Inbox<Item, Producer>,
    /// Tasks to request in `on_schema`: at least 1.
    pub(super) queue_depth: i64,
    /// The struct, which is the producer's. It holds a share of this until its release.
    pub(super) handler: UnsafeCell<Handler>,
}

// SAFETY: the inbox is `Sync`, and nothing but the producer's calls, which do not overlap, uses the struct.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn new(queue_depth: usize) -> Arc<Self> {
        let shared = Arc::new_cyclic(|this: &Weak<Self>| Self {
            inbox: Inbox::new(),
            queue_depth: queue_depth.clamp(1, MAX_DEPTH) as i64,
            // The callbacks below keep to the interface for a handler whose `private_data` is a share of `Shared`. Their release
            // gives that share back.
            handler: UnsafeCell::new(Handler {
                on_schema: Some(on_schema),
                on_next_task: Some(on_next_task),
                on_error: Some(on_error),
                release: Some(release),
                producer: ptr::null_mut(),
                private_data: this.as_ptr().cast_mut().cast(),
            }),
        });
        mem::forget(shared.clone());
        shared
    }
}

/// What a producer sends.
#[derive(Debug)]
pub(super) enum Item {
    Schema(Opened),
    Task(Task, Metadata),
    End,
    Failed(Error),
}

pub(super) type Metadata = HashMap<String, String>;

/// What `on_schema` reports.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) schema: SchemaRef,
    pub(super) device_type: ArrowDeviceType,
    pub(super) metadata: Metadata,
}

/// The struct of a producer that has all its callbacks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Producer(*mut FFI_ArrowAsyncProducer);

// SAFETY: the interface lets a consumer call its producer on any thread.
unsafe impl Send for Producer {}

impl Producer {
    /// # Safety
    /// The producer has not called the handler's release, or waits in it for this call.
    pub(super) unsafe fn request(self, n: i64) -> Result<()> {
        // SAFETY: the caller guarantees that the producer's struct lives. The callback is the struct's own.
        guard::call_foreign("request", || unsafe {
            (*self.0).request.map_or((), |request| request(self.0, n))
        })
    }

    /// # Safety
    /// As for [`request`](Self::request).
    pub(super) unsafe fn cancel(self) -> Result<()> {
        // SAFETY: the caller guarantees that the producer's struct lives. The callback is the struct's own.
        guard::call_foreign("cancel", || unsafe {
            (*self.0).cancel.map_or((), |cancel| cancel(self.0))
        })
    }
}

/// A task, which is extracted exactly once: when it is dropped, with null.
#[derive(Debug)]
pub(super) struct Task(FFI_ArrowAsyncTask);

impl Task {
    /// Returns the array.
    pub(super) fn extract(mut self, declared: ArrowDeviceType) -> Result<FFI_ArrowDeviceArray> {
        let mut out = FFI_ArrowDeviceArray::empty();
        // What a failed call leaves in `out` is released when it is dropped.
        let errno = self.call(&raw mut out)?;
        if errno != 0 {
            return Err(Error::AsyncProducer {
                errno,
                message: "extract_data failed".into(),
                metadata: HashMap::new(),
            });
        }
        if out.is_released() {
            return Err(Error::invalid("extract_data", "returned no array"));
        }
        if out.device_type != declared {
            let what = format!("is {} in a stream of {declared}", out.device_type);
            return Err(Error::invalid("array.device_type", what));
        }
        Ok(out)
    }

    fn call(&mut self, out: *mut FFI_ArrowDeviceArray) -> Result<c_int> {
        // Taken out, so that there is no second call.
        let mut task = mem::replace(&mut self.0, FFI_ArrowAsyncTask::empty());
        match task.extract_data {
            Some(extract) => guard::call_foreign("extract_data", || {
                // SAFETY: `on_next_task` took the task over, which is valid and was not extracted. This is its only extraction, and
                // `out` is null or points to an empty struct.
                unsafe { extract(&raw mut task, out) }
            }),
            None => Ok(0),
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        // A drop cannot report an error.
        let _ = self.call(ptr::null_mut());
    }
}

/// Runs the body of a callback and returns its errno. An error ends the stream. Nothing unwinds out of it.
///
/// # Safety
/// `this` is null or points to a handler of this crate, released or not, that no other call uses.
unsafe fn answer(
    this: *mut Handler,
    operation: &'static str,
    body: impl FnOnce(&Shared) -> Result<()>,
) -> c_int {
    // SAFETY: the caller guarantees that `this` can be read if it is not null. A handler that is not released holds a share
    // in its `private_data`. A second one is counted for the call, because the producer may release the handler from
    // within a request.
    let shared = unsafe {
        match this.as_ref() {
            Some(handler) if handler.release.is_some() => {
                let shared = handler.private_data.cast_const().cast::<Shared>();
                Arc::increment_strong_count(shared);
                Arc::from_raw(shared)
            }
            _ => return libc::EINVAL,
        }
    };
    let errno = match guard::callback(operation, || body(&shared)) {
        Ok(()) => 0,
        Err(e) => {
            let errno = e.errno();
            let fail = || shared.inbox.push(Kind::Error, Item::Failed(e));
            let _ = guard::call_foreign(operation, fail);
            errno
        }
    };
    // The last share drops arrays and tasks of the producer, whose releases may unwind.
    let _ = guard::call_foreign(operation, || drop(shared));
    errno
}

unsafe extern "C-unwind" fn on_schema(this: *mut Handler, schema: *mut FFI_ArrowSchema) -> c_int {
    // Taken first, so that it is released whatever happens.
    let taken = (!schema.is_null() && schema.is_aligned())
        // SAFETY: the interface requires the producer to pass a valid schema, which the consumer takes over.
        .then(|| unsafe { ForeignSchema::from_raw(schema) });
    // SAFETY: the interface requires the producer to pass the handler that this callback was read from, one call at a time,
    // and to have set its `producer`, which lives until the release. Its metadata is null or encoded as the specification says.
    unsafe {
        answer(this, "on_schema", |shared| {
            let producer = Producer((*this).producer);
            let is_usable = !producer.0.is_null() && producer.0.is_aligned();
            if !is_usable || (*producer.0).request.is_none() || (*producer.0).cancel.is_none() {
                let what = "is null or misaligned, or lacks a callback";
                return Err(Error::invalid("handler.producer", what));
            }
            let schema = taken.ok_or_else(|| Error::invalid("schema", "is null or misaligned"))?;
            let metadata = decode_metadata((*producer.0).additional_metadata);
            let opened = Item::Schema(Opened {
                schema: import_schema(schema.as_ref())?,
                device_type: (*producer.0).device_type,
                metadata: metadata
                    .map_err(|e| Error::invalid("producer.additional_metadata", e))?,
            });
            let (n, mut requested) = (shared.queue_depth, Ok(()));
            let open = |producer: Producer| requested = producer.request(n);
            match shared.inbox.open(opened, n as u64, producer, open) {
                Ok(()) => requested,
                Err(Refused::Violation(callback, fault)) => Err(Error::invalid(callback, fault)),
                Err(Refused::Unwanted) => Err(Error::Cancelled {
                    operation: "reading an async stream",
                }),
            }
        })
    }
}

unsafe extern "C-unwind" fn on_next_task(
    this: *mut Handler,
    task: *mut FFI_ArrowAsyncTask,
    metadata: *const c_char,
) -> c_int {
    let is_misaligned = !task.is_aligned();
    // Taken first, so that it is extracted whatever happens.
    // SAFETY: the interface requires the producer to pass null or a valid task, and to use no other copy of it.
    let task = (!task.is_null() && !is_misaligned)
        .then(|| Task(unsafe { task.replace(FFI_ArrowAsyncTask::empty()) }));
    // SAFETY: the interface requires the producer to pass the handler that this callback was read from, one call at a time,
    // and metadata that is null or encoded as the specification says.
    unsafe {
        answer(this, "on_next_task", |shared| {
            let (kind, item) = match task {
                None if is_misaligned => return Err(Error::invalid("task", "is misaligned")),
                None => (Kind::End, Item::End),
                Some(task) if task.0.extract_data.is_none() => {
                    return Err(Error::invalid("task.extract_data", "is null"));
                }
                Some(task) => {
                    let metadata = decode_metadata(metadata)
                        .map_err(|e| Error::invalid("on_next_task.metadata", e))?;
                    (Kind::Task, Item::Task(task, metadata))
                }
            };
            // A task that is not taken is dropped, which extracts it with null.
            match shared.inbox.push(kind, item) {
                Err(Refused::Violation(callback, fault)) => Err(Error::invalid(callback, fault)),
                Ok(()) | Err(Refused::Unwanted) => Ok(()),
            }
        })
    }
}

unsafe extern "C-unwind" fn on_error(
    this: *mut Handler,
    code: c_int,
    message: *const c_char,
    metadata: *const c_char,
) {
    // SAFETY: the interface requires the producer to pass the handler that this callback was read from, one call at a time,
    // a message that is null or null-terminated, and metadata that is null or encoded as the specification says.
    unsafe {
        answer(this, "on_error", |_| {
            let mut text = guard::foreign_text(message);
            let metadata = decode_metadata(metadata).unwrap_or_else(|e| {
                text.push_str(&format!(" (with metadata that cannot be read: {e})"));
                Default::default()
            });
            Err(Error::AsyncProducer {
                errno: code,
                message: text.into(),
                metadata,
            })
        });
    }
}

unsafe extern "C-unwind" fn release(this: *mut Handler) {
    // SAFETY: the interface requires the producer to pass the handler that this callback was read from. While it is not
    // released, its `private_data` is the share that `Shared::new` put there.
    let shared: *const Shared = unsafe {
        match this.as_ref() {
            Some(handler) if handler.release.is_some() => handler.private_data.cast(),
            _ => return,
        }
    };
    // A producer that is called on another thread may report an error from there, which reads the struct.
    // SAFETY: the struct still holds its share.
    let _ = guard::call_foreign("release", || unsafe { &*shared }.inbox.release());
    // SAFETY: the interface requires the producer to use the struct no more, and the share was the struct's.
    let shared = unsafe {
        (*this).release = None;
        (*this).private_data = ptr::null_mut::<c_void>();
        Arc::from_raw(shared)
    };
    // From here on the struct is not touched, since the share may own its memory.
    let truncated = Error::AsyncProducer {
        errno: libc::EPIPE,
        message: "the handler was released before the stream's end".into(),
        metadata: HashMap::new(),
    };
    let fail = || shared.inbox.push(Kind::Error, Item::Failed(truncated));
    let _ = guard::call_foreign("release", fail);
    let _ = guard::call_foreign("release", || drop(shared));
}
