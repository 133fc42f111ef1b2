//! What a device was asked to do, counted.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of everything a [`Device`](crate::Device) did since it was created. Nothing is
        /// copied, allocated or waited for without standing here.
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
            /// What was added since `earlier`, a snapshot of the same device.
            #[must_use]
            pub fn since(&self, earlier: &Self) -> Self {
                Self { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> TransferStats {
                TransferStats { $($name: self.$name.load(Relaxed),)* }
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
    /// Host slabs newly created (page-locked where the device has such memory); reuse is not counted.
    host_allocations,
    /// Copies given to a queue.
    copies,
    /// Bytes copied from host memory to the device.
    bytes_to_device,
    /// Bytes copied from the device to host memory.
    bytes_to_host,
    /// Bytes copied within the device or from a device that it reaches.
    bytes_on_device,
    /// Bytes that the host itself copied on this device's behalf: packing into staging memory,
    /// repacking masks, realigning values.
    host_copied_bytes,
    /// Fills given to a queue.
    fills,
    /// Events recorded.
    events,
    /// Waits given to a queue.
    queue_waits,
    /// Waits of a host thread that asked for work; waits in the background hold up nobody and are
    /// not counted.
    host_waits,
    /// Errors in places that cannot report them (a release, a drop). See
    /// [`Device::take_drop_error`](crate::Device::take_drop_error).
    drop_errors,
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Relaxed);
    }
}
