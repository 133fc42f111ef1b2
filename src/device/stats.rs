//! [`TransferStats`]: counts of what a device did.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of everything that a [`Device`](crate::Device) did since it was created: every
        /// copy, allocation and wait.
        ///
        /// ```
        /// # use arrow_device::Devices;
        /// let device = Devices::cpu();
        /// let before = device.stats();
        /// // ... work ...
        /// assert_eq!(device.stats().since(&before).host_waits, 0);
        /// ```
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct TransferStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl TransferStats {
            /// Returns what was added since `earlier`, a snapshot of the same device.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }
        }

        /// The sum of both, for the cost of two pieces of work.
        impl std::ops::Add for TransferStats {
            type Output = Self;

            fn add(self, other: Self) -> Self {
                Self { $($name: self.$name.saturating_add(other.$name),)* }
            }
        }

        #[derive(Debug)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        impl Default for Counters {
            fn default() -> Self {
                Self { $($name: Counter { count: AtomicU64::new(0), field: |stats| &mut stats.$name },)* }
            }
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> TransferStats {
                TransferStats { $($name: self.$name.count.load(Relaxed),)* }
            }
        }
    };
}

stats! {
    /// Allocations of device memory.
    allocations,
    /// Bytes of device memory allocated.
    allocated_bytes,
    /// Frees of device memory.
    frees,
    /// New host buffers (page-locked where the device has such memory). Reused ones are not counted.
    host_allocations,
    /// Copies queued.
    copies,
    /// Bytes copied from host memory to the device.
    bytes_to_device,
    /// Bytes copied from the device to host memory.
    bytes_to_host,
    /// Bytes copied within the device, or directly from another device.
    bytes_on_device,
    /// Bytes that the host copied for this device: packing into staging memory, moving the bits of
    /// validity bitmaps, realigning values.
    host_copied_bytes,
    /// Fills queued.
    fills,
    /// Bytes of device memory filled.
    filled_bytes,
    /// Events recorded.
    events,
    /// Waits for an event that were queued.
    queue_waits,
    /// Waits of a host thread. Background threads hold up no other work: of theirs, only waits for a
    /// whole device are counted.
    host_waits,
    /// Errors of operations that cannot return one (a release, a drop). See
    /// [`Device::take_drop_error`](crate::Device::take_drop_error).
    drop_errors,
}

/// One count, and the field of a scope's counts that it belongs to.
#[derive(Debug)]
pub(crate) struct Counter {
    count: AtomicU64,
    field: fn(&mut TransferStats) -> &mut u64,
}

thread_local! {
    /// The counts of the innermost scope on this thread.
    static SCOPE: Cell<Option<TransferStats>> = const { Cell::new(None) };
}

impl Counters {
    pub(crate) fn add(counter: &Counter, n: usize) {
        counter.count.fetch_add(n as u64, Relaxed);
        // A thread that is ending has no scope.
        let _ = SCOPE.try_with(|scope| {
            if let Some(mut stats) = scope.get() {
                *(counter.field)(&mut stats) += n as u64;
                scope.set(Some(stats));
            }
        });
    }
}

impl TransferStats {
    /// Runs `work`, and returns its result and what this thread did meanwhile, on all devices
    /// together, with what threads did that helped it to pack an upload. Work of other threads is not
    /// included, even if `work` caused it (a foreign release on the release thread, for example).
    /// Scopes nest.
    ///
    /// ```
    /// # use arrow_device::{Devices, TransferStats};
    /// # use arrow_array::record_batch;
    /// let batch = record_batch!(("a", Int32, [1, 2, 3]))?;
    /// let (on_device, cost) = TransferStats::scope(|| Devices::cpu().upload(&batch));
    /// assert_eq!(cost.bytes_to_device, 0); // the CPU copies nothing
    /// # on_device?;
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    pub fn scope<T>(work: impl FnOnce() -> T) -> (T, Self) {
        /// Restores the outer scope and adds the inner counts to it, even after a panic.
        struct Outer(Option<TransferStats>);
        impl Drop for Outer {
            fn drop(&mut self) {
                let inner = SCOPE.get().unwrap_or_default();
                SCOPE.set(self.0.map(|outer| outer + inner));
            }
        }
        let outer = Outer(SCOPE.replace(Some(Self::default())));
        let done = work();
        let stats = SCOPE.get().unwrap_or_default();
        drop(outer);
        (done, stats)
    }

    /// Adds what another thread did on behalf of this one to this thread's scope. The devices have counted it.
    pub(crate) fn add_to_scope(&self) {
        SCOPE.set(SCOPE.get().map(|stats| stats + *self));
    }
}
