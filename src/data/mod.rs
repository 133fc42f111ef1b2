//! Arrays and record batches in device memory.

mod access;
pub(crate) mod array;
pub(crate) mod batch;
pub(crate) mod build;
pub(crate) mod fit;
pub(crate) mod host;
pub(crate) mod layout;
pub(crate) mod node;
pub(crate) mod numbers;

pub use access::Validity;
pub use array::DeviceArray;
pub use batch::DeviceRecordBatch;

/// A panic in foreign code leaves these types as they were: they are immutable except for caches,
/// each of which is there as a whole or not at all, and for lists of uses behind locks.
#[cfg(test)]
const _: () = {
    use std::panic::{RefUnwindSafe, UnwindSafe};
    const fn check<T: UnwindSafe + RefUnwindSafe>() {}
    check::<DeviceArray>();
    check::<DeviceRecordBatch>();
    check::<Validity>();
    check::<crate::memory::DeviceBuffer>();
};
