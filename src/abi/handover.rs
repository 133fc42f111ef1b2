//! What the C structs have in common: they are moved between Rust and foreign memory, and released
//! once.
//!
//! Both macros implement ordinary methods for a struct, so that each method is written once.

/// Implements moving for a struct that has `empty()`. The named member is the callback, which is
/// null in a struct that was released or moved away; the text completes the safety rules of
/// `from_raw`.
macro_rules! movable {
    ($struct:ident, $($callback:ident).+, $contract:literal) => {
        impl $struct {
            /// Moves the struct out of `source` and leaves an [empty](Self::empty) one there.
            /// Returns an empty struct if `source` was released or moved away.
            ///
            /// # Safety
            /// - `source` is valid for reads and writes, aligned, initialized, and used by nobody
            ///   else during the call; no copy of the struct is used afterwards.
            #[doc = concat!("- ", $contract)]
            pub unsafe fn from_raw(source: *mut Self) -> Self {
                // SAFETY: the caller guarantees that `source` is valid for reads and writes and
                // holds a struct (see `# Safety`). `replace` drops nothing.
                let taken = unsafe { std::ptr::replace(source, Self::empty()) };
                if taken.$($callback).+.is_none() {
                    return Self::empty();
                }
                taken
            }

            /// Moves the struct to `out`. What was there is overwritten, not released.
            ///
            /// # Safety
            /// `out` is valid for writes of `size_of::<Self>()` bytes and aligned. It need not be
            /// initialized; a struct that is there and not released leaks.
            pub unsafe fn write_to(self, out: *mut Self) {
                // SAFETY: the caller guarantees that `out` is valid for writes and aligned (see
                // `# Safety`).
                unsafe { out.write(self) }
            }
        }
    };
}

/// Implements the release of a struct by its member `release`, whose name for errors is the text.
macro_rules! released_by_callback {
    ($struct:ident, $operation:literal) => {
        impl $struct {
            /// Returns whether `release` is null: the struct was released or moved away.
            pub const fn is_released(&self) -> bool {
                self.release.is_none()
            }

            /// Returns the release callback; `None` once released. Dropping the struct calls it.
            pub const fn release(&self) -> Option<unsafe extern "C-unwind" fn(*mut Self)> {
                self.release
            }

            /// Sets `release` and `private_data` to null without calling anything: the last thing
            /// that a release callback does.
            ///
            /// # Safety
            /// `this` is valid for writes and aligned. What `private_data` owned was freed or
            /// leaks.
            pub const unsafe fn mark_released(this: *mut Self) {
                // SAFETY: the caller guarantees that `this` is valid for writes and aligned (see
                // `# Safety`).
                unsafe {
                    (*this).release = None;
                    (*this).private_data = std::ptr::null_mut();
                }
            }
        }

        impl Drop for $struct {
            fn drop(&mut self) {
                let this = std::ptr::from_mut(self);
                // SAFETY: `self` is the only copy of the struct (`from_raw` and `write_to` move),
                // so its callback has not run; whoever made the struct (`from_parts`, `from_raw`)
                // guaranteed that it may run now.
                let outcome = unsafe {
                    $crate::abi::guard::release_once($operation, this, &raw mut (*this).release)
                };
                // A drop cannot report an error. The struct is released all the same.
                drop(outcome);
            }
        }
    };
}

pub(super) use {movable, released_by_callback};
