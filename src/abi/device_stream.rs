//! `ArrowDeviceArrayStream`.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::{fmt, ptr};

use arrow_schema::ffi::FFI_ArrowSchema;

use super::guard::release_once;
use super::{ArrowDeviceType, FFI_ArrowDeviceArray};

/// `ArrowDeviceArrayStream.get_schema`: writes the schema, which is in host memory, to the second
/// argument; 0 or an errno.
pub type StreamGetSchema =
    unsafe extern "C-unwind" fn(*mut FFI_ArrowDeviceArrayStream, *mut FFI_ArrowSchema) -> c_int;

/// `ArrowDeviceArrayStream.get_next`: writes the next array to the second argument, a released one
/// at the end; 0 or an errno.
pub type StreamGetNext = unsafe extern "C-unwind" fn(
    *mut FFI_ArrowDeviceArrayStream,
    *mut FFI_ArrowDeviceArray,
) -> c_int;

/// `ArrowDeviceArrayStream.get_last_error`: the text of the last error, valid until the next call on
/// the stream, or null.
pub type StreamGetLastError =
    unsafe extern "C-unwind" fn(*mut FFI_ArrowDeviceArrayStream) -> *const c_char;

/// `ArrowDeviceArrayStream.release`: frees what the stream owns and sets `release` to null.
pub type StreamRelease = unsafe extern "C-unwind" fn(*mut FFI_ArrowDeviceArrayStream);

/// `struct ArrowDeviceArrayStream`: arrays of one schema on one type of device, pulled one by one
/// ("Device Stream Interface" of the specification).
///
/// The struct only carries the callbacks. Dropping it calls the producer's release callback, if it
/// was not released or moved away; a callback that panics does not unwind out of the drop. Arrays
/// that came out of the stream are owned by themselves and may outlive it.
///
/// The stream is `Send` but not `Sync`: a producer must allow calls from different threads, not
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

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<FFI_ArrowDeviceArrayStream>() == 48);
    assert!(align_of::<FFI_ArrowDeviceArrayStream>() == 8);
    assert!(offset_of!(FFI_ArrowDeviceArrayStream, device_type) == 0);
    assert!(offset_of!(FFI_ArrowDeviceArrayStream, get_schema) == 8);
    assert!(offset_of!(FFI_ArrowDeviceArrayStream, get_next) == 16);
    assert!(offset_of!(FFI_ArrowDeviceArrayStream, get_last_error) == 24);
    assert!(offset_of!(FFI_ArrowDeviceArrayStream, release) == 32);
    assert!(offset_of!(FFI_ArrowDeviceArrayStream, private_data) == 40);
};

// SAFETY: the C stream interface has the producer make its callbacks independent of the calling
// thread, as long as calls do not overlap; `&mut` and ownership see to that. Who made the struct
// (`from_parts`, `from_raw`) vouches for the producer.
unsafe impl Send for FFI_ArrowDeviceArrayStream {}

impl FFI_ArrowDeviceArrayStream {
    /// Assembles a stream of a producer's own making. All four callbacks are mandatory.
    ///
    /// The callbacks are typed `extern "C-unwind"` because a consumer must survive ones that
    /// unwind; these ones should still answer with an errno instead, since consumers written in C
    /// do not survive.
    ///
    /// # Safety
    /// - The callbacks do what the specification asks of them, for this `private_data`, whatever
    ///   address the struct was moved to, on any thread (one call at a time).
    /// - Every array that `get_next` gives out is on a device of type `device_type`.
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

    /// All zero: released. What a consumer gives a producer to write to.
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

    /// Moves the stream out of `source` and leaves an [empty](Self::empty) one there. A released
    /// source gives an empty stream.
    ///
    /// # Safety
    /// - `source` is valid for reads and writes, aligned, initialized, and used by nobody else
    ///   during the call; no copy of the struct is used afterwards.
    /// - Unless it is released, its callbacks are null or as [`from_parts`](Self::from_parts) asks.
    pub unsafe fn from_raw(source: *mut Self) -> Self {
        // SAFETY: the caller vouches for `source`. `replace` drops nothing.
        let taken = unsafe { ptr::replace(source, Self::empty()) };
        if taken.is_released() {
            return Self::empty();
        }
        taken
    }

    /// Moves the stream to `out`. What was there is overwritten, not released.
    ///
    /// # Safety
    /// `out` is valid for writes of `size_of::<Self>()` bytes and aligned. It need not be
    /// initialized; a stream that is there and not released leaks.
    pub unsafe fn write_to(self, out: *mut Self) {
        // SAFETY: the caller vouches for `out`.
        unsafe { out.write(self) }
    }

    /// Whether `release` is null: the stream was released or moved away.
    pub const fn is_released(&self) -> bool {
        self.release.is_none()
    }

    /// The type of device that all arrays of the stream are on. The device id may differ between
    /// arrays.
    pub const fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    /// The callback that gives the schema; `None` only if the stream is released or its producer
    /// breaks the rules.
    pub const fn get_schema(&self) -> Option<StreamGetSchema> {
        self.get_schema
    }

    /// The callback that gives the next array; `None` as for [`get_schema`](Self::get_schema).
    pub const fn get_next(&self) -> Option<StreamGetNext> {
        self.get_next
    }

    /// The callback that gives the last error's text; `None` as for
    /// [`get_schema`](Self::get_schema).
    pub const fn get_last_error(&self) -> Option<StreamGetLastError> {
        self.get_last_error
    }

    /// The release callback; `None` once released. Dropping the stream calls it.
    pub const fn release(&self) -> Option<StreamRelease> {
        self.release
    }

    /// The producer's own pointer. Consumers must not use it.
    pub const fn private_data(&self) -> *mut c_void {
        self.private_data
    }

    /// Sets `release` and `private_data` to null without calling anything: the last thing that a
    /// producer's release callback does.
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

impl Drop for FFI_ArrowDeviceArrayStream {
    fn drop(&mut self) {
        let this = ptr::from_mut(self);
        // SAFETY: `self` is the only copy of the struct (`from_raw` and `write_to` move), so its
        // callback has not run; whoever made the struct vouches that it may.
        let outcome = unsafe {
            release_once(
                "ArrowDeviceArrayStream.release",
                this,
                &raw mut (*this).release,
            )
        };
        // A drop cannot report it. The struct is released all the same.
        drop(outcome);
    }
}

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
        // SAFETY: the caller's `out` is memory for one struct.
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
        // SAFETY: as `release`.
        unsafe { (*(*this).private_data.cast::<AtomicUsize>()).fetch_add(1, Ordering::Relaxed) };
        panic!("release failed");
    }

    fn stream(release: StreamRelease, calls: &AtomicUsize) -> Stream {
        // SAFETY: the callbacks above; the tests keep the counter alive.
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
        // SAFETY: valid, and the only copy.
        let taken = unsafe { Stream::from_raw(&raw mut source) };
        assert!(source.is_released() && source.get_next().is_none());
        assert!(source.private_data().is_null());
        drop(source);
        assert_eq!(taken.device_type().value(), 99);

        let mut out = MaybeUninit::<Stream>::uninit();
        // SAFETY: `out` is memory for one stream.
        unsafe { taken.write_to(out.as_mut_ptr()) };
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        // SAFETY: written above.
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
