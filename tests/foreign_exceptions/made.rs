//! Exceptions of a made-up language, raised as its runtime would.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};

/// Raises exceptions and counts them.
#[derive(Clone, Default)]
pub(crate) struct Thrown(Arc<Counts>);

#[derive(Default)]
struct Counts {
    raised: AtomicUsize,
    ended: AtomicUsize,
    last: AtomicPtr<Exception>,
}

/// `struct _Unwind_Exception`, and what is behind it.
#[repr(C, align(16))]
struct Exception {
    class: u64,
    cleanup: unsafe extern "C-unwind" fn(c_int, *mut Exception),
    private: [*mut c_void; 2],
    thrown: Thrown,
    /// How many exceptions its end throws, each in the end of the one before.
    depth: usize,
}

#[allow(improper_ctypes)] // The unwinder looks at the first four members.
unsafe extern "C-unwind" {
    fn _Unwind_RaiseException(exception: *mut Exception) -> c_int;
}

unsafe extern "C-unwind" fn cleanup(_: c_int, exception: *mut Exception) {
    // SAFETY: called once, by whoever ends what `raise` boxed.
    let Exception { thrown, depth, .. } = *unsafe { Box::from_raw(exception) };
    thrown.0.ended.fetch_add(1, SeqCst);
    if depth > 0 {
        thrown.throw_nested(depth - 1);
    }
}

impl Thrown {
    /// How many were raised, and ended.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.0.raised.load(SeqCst), self.0.ended.load(SeqCst))
    }

    /// How many hold this, exceptions included.
    pub(crate) fn holders(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    pub(crate) fn throw(&self) {
        self.raise(*b"MADEUP\0\0", 0)
    }

    pub(crate) fn throw_int(&self) -> c_int {
        self.raise(*b"MADEUP\0\0", 0)
    }

    pub(crate) fn throw_any<T>(&self) -> T {
        self.raise(*b"MADEUP\0\0", 0)
    }

    pub(crate) fn throw_nested(&self, depth: usize) {
        self.raise(*b"MADEUP\0\0", depth)
    }

    /// One that looks like C++'s, of no runtime.
    pub(crate) fn throw_cpp(&self) {
        self.raise(*b"GNUCC++\0", 0)
    }

    /// Ends the exception that was raised last and ended by nobody.
    pub(crate) fn end_last(&self) {
        let last = self.0.last.load(SeqCst);
        // SAFETY: the test knows that it is still there.
        unsafe { cleanup(0, last) }
    }

    fn raise<T>(&self, class: [u8; 8], depth: usize) -> T {
        self.0.raised.fetch_add(1, SeqCst);
        let exception = Box::into_raw(Box::new(Exception {
            class: u64::from_be_bytes(class),
            cleanup,
            private: [std::ptr::null_mut(); 2],
            thrown: self.clone(),
            depth,
        }));
        self.0.last.store(exception, SeqCst);
        // SAFETY: a whole exception, which ends with `cleanup`.
        let code = unsafe { _Unwind_RaiseException(exception) };
        panic!("nobody catches it: code {code}");
    }
}
