//! The consumer's side of the async device stream: `ArrowAsyncDeviceStreamHandler`.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{self, offset_of};
use std::{fmt, ptr};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::guard::release_once;
use super::{FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask};

/// `ArrowAsyncDeviceStreamHandler.on_schema`: takes the schema; 0 or an errno.
pub type HandlerOnSchema = unsafe extern "C-unwind" fn(
    *mut FFI_ArrowAsyncDeviceStreamHandler,
    *mut FFI_ArrowSchema,
) -> c_int;

/// `ArrowAsyncDeviceStreamHandler.on_next_task`: takes a task, null at the end, and metadata in the
/// encoding of `ArrowSchema.metadata` or null; 0 or an errno.
pub type HandlerOnNextTask = unsafe extern "C-unwind" fn(
    *mut FFI_ArrowAsyncDeviceStreamHandler,
    *mut FFI_ArrowAsyncTask,
    *const c_char,
) -> c_int;

/// `ArrowAsyncDeviceStreamHandler.on_error`: takes an errno, a text or null, and metadata or null.
pub type HandlerOnError = unsafe extern "C-unwind" fn(
    *mut FFI_ArrowAsyncDeviceStreamHandler,
    c_int,
    *const c_char,
    *const c_char,
);

/// `ArrowAsyncDeviceStreamHandler.release`: the producer's last call on a handler.
pub type HandlerRelease = unsafe extern "C-unwind" fn(*mut FFI_ArrowAsyncDeviceStreamHandler);

/// `struct ArrowAsyncDeviceStreamHandler`: what a consumer gives a producer, which then calls it
/// ("The ArrowAsyncDeviceStreamHandler structure" of the specification).
///
/// Dropping it calls its release callback, if it was not released or moved away: that is the
/// producer's last call on it, or the consumer's if it never gave the handler away. A callback that
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

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<FFI_ArrowAsyncDeviceStreamHandler>() == 48);
    assert!(align_of::<FFI_ArrowAsyncDeviceStreamHandler>() == 8);
    assert!(offset_of!(FFI_ArrowAsyncDeviceStreamHandler, on_schema) == 0);
    assert!(offset_of!(FFI_ArrowAsyncDeviceStreamHandler, on_next_task) == 8);
    assert!(offset_of!(FFI_ArrowAsyncDeviceStreamHandler, on_error) == 16);
    assert!(offset_of!(FFI_ArrowAsyncDeviceStreamHandler, release) == 24);
    assert!(offset_of!(FFI_ArrowAsyncDeviceStreamHandler, producer) == 32);
    assert!(offset_of!(FFI_ArrowAsyncDeviceStreamHandler, private_data) == 40);
};

// SAFETY: the specification lets a producer call a handler from any thread, one call at a time
// ("Thread safety"); who made it vouches for the consumer's callbacks.
unsafe impl Send for FFI_ArrowAsyncDeviceStreamHandler {}

impl FFI_ArrowAsyncDeviceStreamHandler {
    /// Assembles a handler of a consumer's own making. All four callbacks are mandatory;
    /// `producer` stays null until the producer [sets](Self::set_producer) it.
    ///
    /// # Safety
    /// - The callbacks do what the specification asks of them, for this `private_data`, on any
    ///   thread (one call at a time); `on_error` and `release` call nothing of the producer.
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

    /// All zero: released.
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

    /// Moves the handler out of `source` and leaves an [empty](Self::empty) one there. A released
    /// source gives an empty handler.
    ///
    /// # Safety
    /// - `source` is valid for reads and writes, aligned, initialized, and used by nobody else
    ///   during the call; no copy of the struct is used afterwards.
    /// - Unless it is released, its callbacks are null or as [`from_parts`](Self::from_parts) asks.
    /// - The consumer does not depend on the handler's address.
    pub unsafe fn from_raw(source: *mut Self) -> Self {
        // SAFETY: the caller vouches for `source`. `replace` drops nothing.
        let taken = unsafe { ptr::replace(source, Self::empty()) };
        if taken.is_released() {
            return Self::empty();
        }
        taken
    }

    /// Moves the handler to `out`. What was there is overwritten, not released.
    ///
    /// # Safety
    /// `out` is valid for writes of `size_of::<Self>()` bytes and aligned. It need not be
    /// initialized; a handler that is there and not released leaks.
    pub unsafe fn write_to(self, out: *mut Self) {
        // SAFETY: the caller vouches for `out`.
        unsafe { out.write(self) }
    }

    /// Connects the handler with its producer: before any callback but `release` is called.
    /// Gives back the pointer that was there.
    ///
    /// # Safety
    /// `producer` is null, or valid until the handler's release callback is called.
    pub const unsafe fn set_producer(
        &mut self,
        producer: *mut FFI_ArrowAsyncProducer,
    ) -> *mut FFI_ArrowAsyncProducer {
        mem::replace(&mut self.producer, producer)
    }

    /// Whether `release` is null: the handler was released or moved away.
    pub const fn is_released(&self) -> bool {
        self.release.is_none()
    }

    /// The callback that takes the schema; `None` only if the handler is released or its consumer
    /// breaks the rules.
    pub const fn on_schema(&self) -> Option<HandlerOnSchema> {
        self.on_schema
    }

    /// The callback that takes tasks; `None` as for [`on_schema`](Self::on_schema).
    pub const fn on_next_task(&self) -> Option<HandlerOnNextTask> {
        self.on_next_task
    }

    /// The callback that takes an error; `None` as for [`on_schema`](Self::on_schema).
    pub const fn on_error(&self) -> Option<HandlerOnError> {
        self.on_error
    }

    /// The release callback; `None` once released. Dropping the handler calls it.
    pub const fn release(&self) -> Option<HandlerRelease> {
        self.release
    }

    /// The producer, or null as long as none has connected itself. Do not follow it before
    /// `on_schema` is called.
    pub const fn producer(&self) -> *mut FFI_ArrowAsyncProducer {
        self.producer
    }

    /// The consumer's own pointer. Producers must not use it.
    pub const fn private_data(&self) -> *mut c_void {
        self.private_data
    }

    /// Sets `release` and `private_data` to null without calling anything: the last thing that a
    /// consumer's release callback does.
    ///
    /// # Safety
    /// `this` is valid for writes and aligned. What `private_data` owned was freed or leaks.
    pub const unsafe fn mark_released(this: *mut Self) {
        // SAFETY: the caller vouches for `this`.
        unsafe {
            (*this).release = None;
            (*this).private_data = ptr::null_mut();
        }
    }
}

impl Drop for FFI_ArrowAsyncDeviceStreamHandler {
    fn drop(&mut self) {
        let this = ptr::from_mut(self);
        // SAFETY: `self` is the only copy of the struct (`from_raw` and `write_to` move), so its
        // callback has not run; whoever made the struct vouches that it may.
        let outcome = unsafe {
            release_once(
                "ArrowAsyncDeviceStreamHandler.release",
                this,
                &raw mut (*this).release,
            )
        };
        // A drop cannot report it. The struct is released all the same.
        drop(outcome);
    }
}

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
        // SAFETY: as `release`.
        unsafe { (*(*this).private_data.cast::<AtomicUsize>()).fetch_add(1, Ordering::Relaxed) };
        panic!("release failed");
    }

    fn handler(release: HandlerRelease, calls: &AtomicUsize) -> Handler {
        // SAFETY: the callbacks above; the tests keep the counter alive.
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
        // SAFETY: valid, and the only copy.
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
        // SAFETY: written above.
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
