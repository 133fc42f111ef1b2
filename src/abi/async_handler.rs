//! The consumer's side of the async device stream: `ArrowAsyncDeviceStreamHandler`.

use std::ffi::{c_char, c_int, c_void};
use std::{fmt, mem, ptr};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::handover::{movable, released_by_callback};
use super::{FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask};

/// `ArrowAsyncDeviceStreamHandler.on_schema`: takes the schema; returns 0 or an errno.
pub type HandlerOnSchema = unsafe extern "C-unwind" fn(
    *mut FFI_ArrowAsyncDeviceStreamHandler,
    *mut FFI_ArrowSchema,
) -> c_int;

/// `ArrowAsyncDeviceStreamHandler.on_next_task`: takes a task, which is null at the end, and
/// metadata in the encoding of `ArrowSchema.metadata` or null; returns 0 or an errno.
pub type HandlerOnNextTask = unsafe extern "C-unwind" fn(
    *mut FFI_ArrowAsyncDeviceStreamHandler,
    *mut FFI_ArrowAsyncTask,
    *const c_char,
) -> c_int;

/// `ArrowAsyncDeviceStreamHandler.on_error`: takes an errno, a message or null, and metadata or
/// null.
pub type HandlerOnError = unsafe extern "C-unwind" fn(
    *mut FFI_ArrowAsyncDeviceStreamHandler,
    c_int,
    *const c_char,
    *const c_char,
);

/// `ArrowAsyncDeviceStreamHandler.release`: the producer's last call on a handler.
pub type HandlerRelease = unsafe extern "C-unwind" fn(*mut FFI_ArrowAsyncDeviceStreamHandler);

/// `struct ArrowAsyncDeviceStreamHandler`: the callbacks of a consumer, which a producer calls with
/// the schema, the tasks and errors ("The ArrowAsyncDeviceStreamHandler structure" of the
/// specification).
///
/// Dropping it calls its release callback, unless it was released or moved away. A callback that
/// panics does not unwind out of the drop.
#[repr(C)]
pub struct FFI_ArrowAsyncDeviceStreamHandler {
    pub(crate) on_schema: Option<HandlerOnSchema>,
    pub(crate) on_next_task: Option<HandlerOnNextTask>,
    pub(crate) on_error: Option<HandlerOnError>,
    pub(crate) release: Option<HandlerRelease>,
    pub(crate) producer: *mut FFI_ArrowAsyncProducer,
    pub(crate) private_data: *mut c_void,
}

// SAFETY: the specification lets a producer call a handler from any thread, one call at a time
// ("Thread safety"). Whoever made the struct (`from_parts`, `from_raw`) guaranteed that the
// consumer's callbacks allow it.
unsafe impl Send for FFI_ArrowAsyncDeviceStreamHandler {}

impl FFI_ArrowAsyncDeviceStreamHandler {
    /// Creates a handler from a consumer's callbacks, all of which are mandatory. `producer` is
    /// null until the producer [sets](Self::set_producer) it.
    ///
    /// # Safety
    /// - The callbacks do what the specification requires, for this `private_data`, on any thread
    ///   (one call at a time); `on_error` and `release` do not call the producer.
    /// - `release` frees `private_data` and sets its struct's `release` to null
    ///   ([`mark_released`](Self::mark_released)).
    pub const unsafe fn from_parts(
        on_schema: HandlerOnSchema,
        on_next_task: HandlerOnNextTask,
        on_error: HandlerOnError,
        release: HandlerRelease,
        private_data: *mut c_void,
    ) -> Self {
        Self {
            on_schema: Some(on_schema),
            on_next_task: Some(on_next_task),
            on_error: Some(on_error),
            release: Some(release),
            producer: ptr::null_mut(),
            private_data,
        }
    }

    /// Returns a released handler, all of whose members are zero.
    pub const fn empty() -> Self {
        Self {
            on_schema: None,
            on_next_task: None,
            on_error: None,
            release: None,
            producer: ptr::null_mut(),
            private_data: ptr::null_mut(),
        }
    }

    /// Sets the producer, which is done before any callback except `release` is called. Returns the
    /// previous pointer.
    ///
    /// # Safety
    /// `producer` is null, or valid until the handler's release callback is called.
    pub const unsafe fn set_producer(
        &mut self,
        producer: *mut FFI_ArrowAsyncProducer,
    ) -> *mut FFI_ArrowAsyncProducer {
        mem::replace(&mut self.producer, producer)
    }

    /// Returns the callback that takes the schema; `None` only if the handler is released or its
    /// consumer breaks the rules.
    pub const fn on_schema(&self) -> Option<HandlerOnSchema> {
        self.on_schema
    }

    /// Returns the callback that takes tasks; `None` as for [`on_schema`](Self::on_schema).
    pub const fn on_next_task(&self) -> Option<HandlerOnNextTask> {
        self.on_next_task
    }

    /// Returns the callback that takes an error; `None` as for [`on_schema`](Self::on_schema).
    pub const fn on_error(&self) -> Option<HandlerOnError> {
        self.on_error
    }

    /// Returns the producer, or null if it was not set yet. It must not be used before `on_schema`
    /// is called.
    pub const fn producer(&self) -> *mut FFI_ArrowAsyncProducer {
        self.producer
    }

    /// Returns the pointer that belongs to the consumer. Producers must not use it.
    pub const fn private_data(&self) -> *mut c_void {
        self.private_data
    }
}

movable!(
    FFI_ArrowAsyncDeviceStreamHandler,
    release,
    "Unless it is released, its callbacks are null or as [`from_parts`](Self::from_parts) requires, and the consumer does not depend on its address."
);
released_by_callback!(
    FFI_ArrowAsyncDeviceStreamHandler,
    "ArrowAsyncDeviceStreamHandler.release"
);

impl fmt::Debug for FFI_ArrowAsyncDeviceStreamHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FFI_ArrowAsyncDeviceStreamHandler")
            .field("released", &self.is_released())
            .field("producer", &self.producer)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::MaybeUninit;
    use std::sync::atomic::{AtomicUsize, Ordering};

    type Handler = FFI_ArrowAsyncDeviceStreamHandler;

    unsafe extern "C-unwind" fn on_schema(_: *mut Handler, _: *mut FFI_ArrowSchema) -> c_int {
        0
    }
    unsafe extern "C-unwind" fn on_next_task(
        _: *mut Handler,
        _: *mut FFI_ArrowAsyncTask,
        _: *const c_char,
    ) -> c_int {
        libc::ECANCELED
    }
    unsafe extern "C-unwind" fn on_error(
        _: *mut Handler,
        _: c_int,
        _: *const c_char,
        _: *const c_char,
    ) {
    }
    unsafe extern "C-unwind" fn release(this: *mut Handler) {
        // SAFETY: the test's counter outlives the handler, which is being released.
        unsafe {
            (*(*this).private_data.cast::<AtomicUsize>()).fetch_add(1, Ordering::Relaxed);
            Handler::mark_released(this);
        }
    }
    unsafe extern "C-unwind" fn release_and_panic(this: *mut Handler) {
        // SAFETY: the test's counter outlives the handler.
        unsafe { (*(*this).private_data.cast::<AtomicUsize>()).fetch_add(1, Ordering::Relaxed) };
        panic!("release failed");
    }

    fn handler(release: HandlerRelease, calls: &AtomicUsize) -> Handler {
        // SAFETY: the callbacks above keep to the interface; the tests keep the counter alive.
        unsafe {
            Handler::from_parts(
                on_schema,
                on_next_task,
                on_error,
                release,
                ptr::from_ref(calls).cast_mut().cast(),
            )
        }
    }

    #[test]
    fn moves_and_one_release() {
        let calls = AtomicUsize::new(0);
        let mut source = handler(release, &calls);
        // SAFETY: `source` is valid and the only copy.
        let mut taken = unsafe { Handler::from_raw(&raw mut source) };
        assert!(source.is_released() && source.private_data().is_null());
        drop(source);

        let mut producer = FFI_ArrowAsyncProducer::empty();
        // SAFETY: nothing here follows the pointer.
        assert!(unsafe { taken.set_producer(&raw mut producer) }.is_null());
        assert_eq!(taken.producer(), &raw mut producer);

        let mut out = MaybeUninit::<Handler>::uninit();
        // SAFETY: `out` is memory for one handler.
        unsafe { taken.write_to(out.as_mut_ptr()) };
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        // SAFETY: `out` was written above.
        drop(unsafe { out.assume_init() });
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn callbacks_come_back() {
        let calls = AtomicUsize::new(0);
        let mut h = handler(release, &calls);
        assert!(h.on_schema().is_some() && h.on_error().is_some() && h.release().is_some());
        let next = h.on_next_task().unwrap();
        // SAFETY: the handler's own callback; a null task is the end.
        let code = unsafe { next(&raw mut h, ptr::null_mut(), ptr::null()) };
        assert_eq!(code, libc::ECANCELED);
        assert!(format!("{h:?}").contains("released: false"));
    }

    #[test]
    fn a_panicking_release_stays_inside_drop() {
        let calls = AtomicUsize::new(0);
        drop(handler(release_and_panic, &calls));
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        drop(Handler::empty());
    }

    #[test]
    fn send() {
        fn send<T: Send>() {}
        send::<Handler>();
    }
}
