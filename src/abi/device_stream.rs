//! `ArrowDeviceArrayStream`.

use std::ffi::{c_char, c_int, c_void};
use std::{fmt, ptr};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::handover::{movable, released_by_callback};
use super::{ArrowDeviceType, FFI_ArrowDeviceArray};

/// `ArrowDeviceArrayStream.get_schema`: writes the schema, which is in host memory, to the second
/// argument; returns 0 or an errno.
pub type StreamGetSchema =
    unsafe extern "C-unwind" fn(*mut FFI_ArrowDeviceArrayStream, *mut FFI_ArrowSchema) -> c_int;

/// `ArrowDeviceArrayStream.get_next`: writes the next array to the second argument, or a released
/// one at the end; returns 0 or an errno.
pub type StreamGetNext = unsafe extern "C-unwind" fn(
    *mut FFI_ArrowDeviceArrayStream,
    *mut FFI_ArrowDeviceArray,
) -> c_int;

/// `ArrowDeviceArrayStream.get_last_error`: returns the message of the last error, valid until the
/// next call on the stream, or null.
pub type StreamGetLastError =
    unsafe extern "C-unwind" fn(*mut FFI_ArrowDeviceArrayStream) -> *const c_char;

/// `ArrowDeviceArrayStream.release`: frees what the stream owns and sets `release` to null.
pub type StreamRelease = unsafe extern "C-unwind" fn(*mut FFI_ArrowDeviceArrayStream);

/// `struct ArrowDeviceArrayStream`: arrays of one schema on one type of device, which a consumer
/// pulls one by one ("Device Stream Interface" of the specification).
///
/// The struct only carries the callbacks. Dropping it calls the producer's release callback, unless
/// it was released or moved away; a callback that panics does not unwind out of the drop. Arrays
/// from the stream have their own release and may outlive it.
///
/// The stream is `Send` but not `Sync`: a producer must allow calls from different threads, but not
/// from several at the same time ("Thread safety" of the C stream interface).
#[repr(C)]
pub struct FFI_ArrowDeviceArrayStream {
    pub(crate) device_type: ArrowDeviceType,
    pub(crate) get_schema: Option<StreamGetSchema>,
    pub(crate) get_next: Option<StreamGetNext>,
    pub(crate) get_last_error: Option<StreamGetLastError>,
    pub(crate) release: Option<StreamRelease>,
    pub(crate) private_data: *mut c_void,
}

// SAFETY: the C stream interface requires callbacks that do not depend on the calling thread, as
// long as calls do not overlap; ownership sees to that. Whoever made the struct (`from_parts`,
// `from_raw`) guaranteed it for the producer.
unsafe impl Send for FFI_ArrowDeviceArrayStream {}

impl FFI_ArrowDeviceArrayStream {
    /// Creates a stream from a producer's callbacks, all of which are mandatory.
    ///
    /// The callbacks should return an errno rather than unwind: consumers written in C cannot catch
    /// a panic.
    ///
    /// # Safety
    /// - The callbacks do what the specification requires, for this `private_data`, whatever
    ///   address the struct was moved to, on any thread (one call at a time).
    /// - Every array that `get_next` writes is on a device of type `device_type`.
    /// - `release` frees `private_data` and sets its struct's `release` to null
    ///   ([`mark_released`](Self::mark_released)).
    pub const unsafe fn from_parts(
        device_type: ArrowDeviceType,
        get_schema: StreamGetSchema,
        get_next: StreamGetNext,
        get_last_error: StreamGetLastError,
        release: StreamRelease,
        private_data: *mut c_void,
    ) -> Self {
        Self {
            device_type,
            get_schema: Some(get_schema),
            get_next: Some(get_next),
            get_last_error: Some(get_last_error),
            release: Some(release),
            private_data,
        }
    }

    /// Returns a released stream, all of whose members are zero: memory for a producer to write a
    /// stream to.
    pub const fn empty() -> Self {
        Self {
            device_type: ArrowDeviceType::new(0),
            get_schema: None,
            get_next: None,
            get_last_error: None,
            release: None,
            private_data: ptr::null_mut(),
        }
    }

    /// Returns the type of device that all arrays of the stream are on. The device id may differ
    /// between arrays.
    pub const fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    /// Returns the callback that writes the schema; `None` only if the stream is released or its
    /// producer breaks the rules.
    pub const fn get_schema(&self) -> Option<StreamGetSchema> {
        self.get_schema
    }

    /// Returns the callback that writes the next array; `None` as for
    /// [`get_schema`](Self::get_schema).
    pub const fn get_next(&self) -> Option<StreamGetNext> {
        self.get_next
    }

    /// Returns the callback that returns the message of the last error; `None` as for
    /// [`get_schema`](Self::get_schema).
    pub const fn get_last_error(&self) -> Option<StreamGetLastError> {
        self.get_last_error
    }

    /// Returns the pointer that belongs to the producer. Consumers must not use it.
    pub const fn private_data(&self) -> *mut c_void {
        self.private_data
    }
}

movable!(
    FFI_ArrowDeviceArrayStream,
    release,
    "Unless it is released, its callbacks are null or as [`from_parts`](Self::from_parts) requires."
);
released_by_callback!(FFI_ArrowDeviceArrayStream, "ArrowDeviceArrayStream.release");

impl Default for FFI_ArrowDeviceArrayStream {
    fn default() -> Self {
        Self::empty()
    }
}

impl fmt::Debug for FFI_ArrowDeviceArrayStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FFI_ArrowDeviceArrayStream")
            .field("device_type", &self.device_type)
            .field("released", &self.is_released())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::MaybeUninit;
    use std::sync::atomic::{AtomicUsize, Ordering};

    type Stream = FFI_ArrowDeviceArrayStream;

    unsafe extern "C-unwind" fn get_schema(_: *mut Stream, _: *mut FFI_ArrowSchema) -> c_int {
        libc::ENOTSUP
    }
    unsafe extern "C-unwind" fn get_next(_: *mut Stream, out: *mut FFI_ArrowDeviceArray) -> c_int {
        // SAFETY: the test passes memory for one struct.
        unsafe { FFI_ArrowDeviceArray::empty().write_to(out) };
        0
    }
    unsafe extern "C-unwind" fn get_last_error(_: *mut Stream) -> *const c_char {
        c"nothing to say".as_ptr()
    }
    unsafe extern "C-unwind" fn release(this: *mut Stream) {
        // SAFETY: the test's counter outlives the stream, which is being released.
        unsafe {
            (*(*this).private_data.cast::<AtomicUsize>()).fetch_add(1, Ordering::Relaxed);
            Stream::mark_released(this);
        }
    }
    unsafe extern "C-unwind" fn release_and_panic(this: *mut Stream) {
        // SAFETY: the test's counter outlives the stream.
        unsafe { (*(*this).private_data.cast::<AtomicUsize>()).fetch_add(1, Ordering::Relaxed) };
        panic!("release failed");
    }

    fn stream(release: StreamRelease, calls: &AtomicUsize) -> Stream {
        // SAFETY: the callbacks above keep to the interface; the tests keep the counter alive.
        unsafe {
            Stream::from_parts(
                ArrowDeviceType::new(99),
                get_schema,
                get_next,
                get_last_error,
                release,
                ptr::from_ref(calls).cast_mut().cast(),
            )
        }
    }

    #[test]
    fn moves_and_one_release() {
        let calls = AtomicUsize::new(0);
        let mut source = stream(release, &calls);
        // SAFETY: `source` is valid and the only copy.
        let taken = unsafe { Stream::from_raw(&raw mut source) };
        assert!(source.is_released() && source.get_next().is_none());
        assert!(source.private_data().is_null());
        drop(source);
        assert_eq!(taken.device_type().value(), 99);

        let mut out = MaybeUninit::<Stream>::uninit();
        // SAFETY: `out` is memory for one stream.
        unsafe { taken.write_to(out.as_mut_ptr()) };
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        // SAFETY: `out` was written above.
        drop(unsafe { out.assume_init() });
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn callbacks_come_back() {
        let calls = AtomicUsize::new(0);
        let mut s = stream(release, &calls);
        assert!(s.get_schema().is_some() && s.release().is_some());
        assert!(s.get_last_error().is_some() && !s.private_data().is_null());
        let mut array = FFI_ArrowDeviceArray::empty();
        let next = s.get_next().unwrap();
        // SAFETY: the stream's own callback, on valid structs.
        assert_eq!(unsafe { next(&raw mut s, &raw mut array) }, 0);
        assert!(array.is_released());
        assert!(format!("{s:?}").contains("unknown device type (99)"));
    }

    #[test]
    fn a_panicking_release_stays_inside_drop() {
        let calls = AtomicUsize::new(0);
        drop(stream(release_and_panic, &calls));
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        drop(Stream::default());
    }

    #[test]
    fn send_but_not_sync() {
        fn send<T: Send>() {}
        send::<Stream>();
        // Resolves only while there is one candidate, that is, while the type is not `Sync`.
        trait NotSync<Which> {
            fn holds() {}
        }
        impl<T: ?Sized> NotSync<()> for T {}
        impl<T: ?Sized + Sync> NotSync<u8> for T {}
        <Stream as NotSync<_>>::holds();
    }
}
