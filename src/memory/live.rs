//! [`LiveBytes`]: what was allocated in some piece of work and has not been freed.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

thread_local! {
    /// The count of the innermost scope on this thread.
    static SCOPE: RefCell<Option<LiveBytes>> = const { RefCell::new(None) };
}

/// Counts the bytes of device memory that were allocated in its [scopes](Self::scope) and have not been freed; for example, what
/// an operator of a query engine holds. Clones are the same count.
///
/// Unlike [`TransferStats::scope`](crate::TransferStats::scope), which counts what is done in a scope whatever memory it concerns,
/// this follows the allocations: a free on any thread, in any scope or in none, is subtracted from the count that the memory
/// belongs to, and memory that was allocated elsewhere is never subtracted.
///
/// ```
/// use arrow_device::{DeviceBufferMut, Devices, LiveBytes};
///
/// let queue = Devices::simulated()?.default_queue();
/// let input = DeviceBufferMut::allocate(&queue, 640)?;
/// let live = LiveBytes::default();
/// let output = live.scope(|| {
///     let scratch = DeviceBufferMut::allocate(&queue, 6400)?;
///     drop((input, scratch));
///     DeviceBufferMut::allocate(&queue, 64)
/// })?;
/// assert_eq!(live.get(), 64);
/// drop(output);
/// assert_eq!(live.get(), 0);
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct LiveBytes(Arc<AtomicUsize>);

impl LiveBytes {
    /// Runs `work`. Device memory that this thread allocates meanwhile belongs to this count until it is freed, except in scopes of
    /// other counts within `work`. In destructors of thread-local values that run after this crate's own, nothing is counted. A panic
    /// passes through.
    pub fn scope<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Outer(Option<LiveBytes>);
        impl Drop for Outer {
            fn drop(&mut self) {
                let outer = self.0.take();
                // The inner one is dropped after the borrow.
                let _inner = SCOPE.try_with(|scope| scope.replace(outer));
            }
        }
        // Once the scope itself is gone, as its thread ends, nothing is counted.
        let outer = SCOPE.try_with(|scope| scope.replace(Some(self.clone())));
        let _outer = outer.map(Outer);
        work()
    }

    /// Returns the count of the innermost scope on this thread, so that another thread can continue the work in a scope of it.
    ///
    /// ```
    /// use arrow_device::{DeviceBufferMut, Devices, LiveBytes};
    ///
    /// let live = LiveBytes::default();
    /// let buffer = live.scope(|| {
    ///     let current = LiveBytes::current().unwrap_or_default();
    ///     let allocate = || DeviceBufferMut::allocate(&Devices::cpu().default_queue(), 64);
    ///     std::thread::spawn(move || current.scope(allocate)).join().unwrap()
    /// })?;
    /// assert_eq!(live.get(), 64);
    /// assert!(LiveBytes::current().is_none());
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    pub fn current() -> Option<Self> {
        // A thread that is ending has no scope.
        let current = SCOPE.try_with(|scope| scope.borrow().clone());
        current.ok().flatten()
    }

    /// Returns the bytes now, padding included. Memory whose free has been queued is not counted, nor is memory that was taken out
    /// of its buffer ([`DeviceBuffer::into_raw`](crate::DeviceBuffer::into_raw)). Memory that work of another device uses
    /// may be freed a little after its last holder is dropped, by a thread of its device.
    pub fn get(&self) -> usize {
        self.0.load(Relaxed)
    }
}

/// An allocation's part in the count that it belongs to, until this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Counted(Option<(LiveBytes, usize)>);

impl Counted {
    /// Counts so many bytes that this thread has just allocated.
    pub(crate) fn new(bytes: usize) -> Self {
        Self(LiveBytes::current().map(|live| {
            live.0.fetch_add(bytes, Relaxed);
            (live, bytes)
        }))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some((live, bytes)) = &self.0 {
            live.0.fetch_sub(*bytes, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceBufferMut, Devices};

    fn allocated(bytes: usize) -> DeviceBufferMut {
        DeviceBufferMut::allocate(&Devices::cpu().default_queue(), bytes).unwrap()
    }

    #[test]
    fn frees_are_subtracted_wherever_they_happen() {
        let live = LiveBytes::default();
        let (buffer, frozen) = live.scope(|| (allocated(100), allocated(640).freeze().unwrap()));
        let outside = allocated(6400);
        assert_eq!(live.get(), 128 + 640);
        let other = LiveBytes::default();
        other.scope(|| drop(buffer));
        assert_eq!((live.get(), other.get()), (640, 0));
        let slice = frozen.clone();
        std::thread::spawn(move || drop(frozen)).join().unwrap();
        assert_eq!(live.get(), 640, "a holder is left");
        live.scope(|| drop(outside));
        assert_eq!(live.get(), 640, "not its memory");
        std::thread::spawn(move || drop(slice)).join().unwrap();
        assert_eq!(live.get(), 0);
    }

    #[test]
    fn the_innermost_scope_counts() {
        let (outer, inner) = (LiveBytes::default(), LiveBytes::default());
        let buffers = outer.scope(|| {
            let panics = || inner.scope(|| -> DeviceBufferMut { panic!("on purpose") });
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
            [inner.scope(|| allocated(64)), allocated(128)]
        });
        let after = allocated(256);
        assert_eq!((outer.get(), inner.get()), (128, 64));
        drop((buffers, after));
        assert_eq!((outer.get(), inner.get()), (0, 0));
    }

    #[test]
    fn what_shrinks_or_leaves_counts_less() {
        let live = LiveBytes::default();
        live.scope(|| {
            let mut buffer = allocated(640);
            buffer.truncate(10);
            buffer.shrink_to_fit().unwrap();
            assert_eq!(live.get(), 64);
            let queue = buffer.queue().clone();
            let (base, bytes) = buffer.freeze().unwrap().into_raw(&queue).unwrap();
            assert_eq!((bytes, live.get()), (64, 0));
            // SAFETY: these bytes were taken out of their only holder.
            unsafe { queue.free(base, bytes) };
        });
    }
}
