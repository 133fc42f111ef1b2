//! The handler that a producer calls.

use std::ffi::{CStr, c_char, c_int};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::inbox::{Inbox, Opening, Reception, Violation};
use super::stream::Opened;
use super::task::Task;
use crate::abi::{
    FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask, ForeignSchema,
    ProducerCancel, ProducerRequest, guard,
};
use crate::error::{Error, Result};
use crate::interchange::schema::{decode_metadata, import_schema};

/// What the handler and the stream share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) inbox: Inbox<Opened, Task, Error, Producer>,
    /// Tasks that are requested at first: at least 1.
    queue_depth: i64,
    /// The handler's memory, if it is ours.
    memory: AtomicPtr<MaybeUninit<FFI_ArrowAsyncDeviceStreamHandler>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let memory = *self.memory.get_mut();
        if !memory.is_null() {
            // SAFETY: `into_raw` made it, and the handler in it was released: it held a share of this.
            drop(unsafe { Box::from_raw(memory) });
        }
    }
}

/// Producers add up what is requested, some without care: this much, and 1 for each task, never overflows.
const MAX_DEPTH: usize = 1 << 31;

/// A producer's own struct with its callbacks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Producer {
    this: *mut FFI_ArrowAsyncProducer,
    request: ProducerRequest,
    cancel: ProducerCancel,
}

// SAFETY: the interface lets a consumer call its producer on any thread.
unsafe impl Send for Producer {}

impl Producer {
    /// # Safety
    /// `this` is null or the producer of a handler whose `on_schema` is being called.
    unsafe fn of(this: *mut FFI_ArrowAsyncProducer) -> Result<Self> {
        if this.is_null() || !this.is_aligned() {
            return Err(Error::invalid("handler.producer", "is null or misaligned"));
        }
        // SAFETY: the caller's.
        let (request, cancel) = unsafe { ((*this).request(), (*this).cancel()) };
        let missing = |name: &'static str| move || Error::invalid(name, "is null");
        Ok(Self {
            this,
            request: request.ok_or_else(missing("producer.request"))?,
            cancel: cancel.ok_or_else(missing("producer.cancel"))?,
        })
    }

    /// # Safety
    /// The producer has not called the handler's release, or waits in it for this call.
    pub(super) unsafe fn request(self, n: i64) -> Result<()> {
        // SAFETY: the caller's; the producer vouches for its callback.
        guard::call_foreign("request", || unsafe { (self.request)(self.this, n) })
    }

    /// # Safety
    /// As [`request`](Self::request).
    pub(super) unsafe fn cancel(self) -> Result<()> {
        // SAFETY: as in `request`.
        guard::call_foreign("cancel", || unsafe { (self.cancel)(self.this) })
    }
}

/// The consumer's struct for a producer. Given to none it ends its stream with an error when dropped.
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
        // SAFETY: the callbacks below keep to the interface for a share of `Shared`, which they read
        // from the struct that they are called with.
        let handler = unsafe {
            FFI_ArrowAsyncDeviceStreamHandler::from_parts(
                on_schema,
                on_next_task,
                on_error,
                release,
                private,
            )
        };
        let this = Self {
            handler,
            shared: shared.clone(),
        };
        (this, shared)
    }

    /// The struct itself, for [`produce`](crate::async_stream::produce) or for memory of the caller's own,
    /// which must stay where it is until the producer has released it.
    pub fn into_ffi(self) -> FFI_ArrowAsyncDeviceStreamHandler {
        self.handler
    }

    /// The struct in memory of its own, for a C producer. The memory lives until the producer has called
    /// `release` and the stream was dropped; a producer does not touch a handler after its release.
    /// Given to no producer it leaks. A producer in Rust moves it out
    /// ([`FFI_ArrowAsyncDeviceStreamHandler::from_raw`]) or calls it where it is
    /// ([`produce_at`](crate::async_stream::produce_at)); it does not drop it in place, which would touch it after the
    /// release.
    pub fn into_raw(self) -> *mut FFI_ArrowAsyncDeviceStreamHandler {
        let memory = Box::into_raw(Box::new(MaybeUninit::new(self.handler)));
        self.shared.memory.store(memory, Ordering::Release);
        memory.cast()
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

/// Runs a callback's body; nothing unwinds out of it.
///
/// # Safety
/// `this` is null or a handler of ours that is not called elsewhere meanwhile.
unsafe fn answer(
    this: *mut FFI_ArrowAsyncDeviceStreamHandler,
    operation: &'static str,
    body: impl FnOnce(&Shared) -> c_int,
) -> c_int {
    // A share for the call: the producer may release from within a request.
    // SAFETY: the caller's; a handler that is not released has its share.
    let shared = unsafe {
        match this.as_ref() {
            Some(handler) if !handler.is_released() => {
                let shared = handler.private_data().cast_const().cast::<Shared>();
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

/// What is left in it if it is the last is foreign, and may unwind.
fn drop_share(operation: &'static str, shared: Arc<Shared>) {
    let _ = guard::callback(operation, || {
        drop(shared);
        Ok(())
    });
}

/// The stream ends with `e`.
fn refuse(shared: &Shared, e: Error) -> c_int {
    let errno = e.errno();
    shared.inbox.refuse(e);
    errno
}

unsafe extern "C-unwind" fn on_schema(
    this: *mut FFI_ArrowAsyncDeviceStreamHandler,
    schema: *mut FFI_ArrowSchema,
) -> c_int {
    // Taken at once, so that it is released whatever comes.
    let taken = (!schema.is_null() && schema.is_aligned())
        // SAFETY: the producer's: a valid schema, which it gives away.
        .then(|| unsafe { ForeignSchema::from_raw(schema) });
    // SAFETY: the producer's, and the members are read as the interface says.
    unsafe {
        answer(this, "on_schema", |shared| {
            let producer = Producer::of((*this).producer());
            match producer.and_then(|producer| Ok((producer, Opened::new(producer.this, taken)?))) {
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
    // SAFETY: within `on_schema`: the producer lives.
    let requested = unsafe { producer.request(shared.queue_depth) };
    let wanted = inbox.opened(producer, opened);
    match requested {
        Err(e) => refuse(shared, e),
        Ok(()) if wanted => 0,
        Ok(()) => libc::ECANCELED,
    }
}

impl Opened {
    /// # Safety
    /// `producer` is the producer of a handler whose `on_schema` is being called.
    unsafe fn new(
        producer: *mut FFI_ArrowAsyncProducer,
        schema: Option<ForeignSchema>,
    ) -> Result<Self> {
        let schema = schema.ok_or_else(|| Error::invalid("schema", "is null or misaligned"))?;
        // SAFETY: the caller's; metadata is null or encoded as the interface says.
        let (device_type, metadata) = unsafe {
            let metadata = decode_metadata((*producer).additional_metadata());
            ((*producer).device_type(), metadata)
        };
        Ok(Self {
            schema: import_schema(schema.as_ref())?,
            device_type,
            metadata: metadata.map_err(|e| Error::invalid("producer.additional_metadata", e))?,
        })
    }
}

unsafe extern "C-unwind" fn on_next_task(
    this: *mut FFI_ArrowAsyncDeviceStreamHandler,
    task: *mut FFI_ArrowAsyncTask,
    metadata: *const c_char,
) -> c_int {
    if !task.is_null() && !task.is_aligned() {
        // SAFETY: the producer's.
        let refuse_it = |s: &_| refuse(s, Error::invalid("task", "is misaligned"));
        // SAFETY: the producer's.
        return unsafe { answer(this, "on_next_task", refuse_it) };
    }
    // Taken at once, so that it is extracted whatever comes.
    // SAFETY: the producer's: a valid task, of which this is the only copy that is used.
    let task = (!task.is_null()).then(|| unsafe { Task::new(FFI_ArrowAsyncTask::from_raw(task)) });
    // SAFETY: the producer's; metadata is null or encoded as the interface says.
    unsafe {
        answer(this, "on_next_task", |shared| {
            let task = match task {
                None => None,
                Some(task) if !task.can_be_extracted() => {
                    return refuse(shared, Error::invalid("task.extract_data", "is null"));
                }
                Some(task) => match decode_metadata(metadata) {
                    Ok(metadata) => Some(task.with_metadata(metadata)),
                    Err(e) => return refuse(shared, Error::invalid("on_next_task.metadata", e)),
                },
            };
            match shared.inbox.task(task) {
                Reception::Taken => 0,
                Reception::Unwanted(task) => {
                    drop(task);
                    0
                }
                Reception::Refused(task) => {
                    drop(task);
                    libc::EINVAL
                }
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
    // SAFETY: the producer's; the text is null or ends with a null byte, metadata is null or encoded as the
    // interface says.
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
    // SAFETY: the producer's: a valid handler, released once.
    let shared = unsafe {
        match this.as_ref() {
            Some(handler) if !handler.is_released() => {}
            _ => return,
        }
        let shared = (*this).private_data().cast_const().cast::<Shared>();
        FFI_ArrowAsyncDeviceStreamHandler::mark_released(this);
        Arc::from_raw(shared)
    };
    // The struct is not touched from here on: it may be the share's.
    let _ = guard::callback("release", || {
        shared.inbox.release();
        Ok(())
    });
    drop_share("release", shared);
}
