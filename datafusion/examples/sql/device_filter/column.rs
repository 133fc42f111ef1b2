//! Columns as kernels take them.

use arrow_device::device::DevicePtr;
use arrow_device::{DeviceArray, Error, Queue, Result};

use super::predicate::Kind;

/// A column's addresses, for a kernel.
#[derive(Clone, Copy)]
pub(crate) struct Column {
    pub(crate) kind: Kind,
    /// Of row 0.
    pub(crate) values: DevicePtr,
    /// Null if no row is.
    pub(crate) mask: DevicePtr,
    /// The bit of row 0 in the mask.
    pub(crate) bit: usize,
    pub(crate) rows: usize,
}

impl Column {
    /// Lends a column to the kernel that `launch` gives to the queue.
    pub(crate) fn lend(
        column: &DeviceArray,
        queue: &Queue,
        launch: impl FnOnce(Self) -> Result<()>,
    ) -> Result<()> {
        let kind = Kind::of(column.data_type());
        // The C data interface has the mask first, then the values.
        let (Some(kind), Some(buffer)) = (kind, column.buffer(1)) else {
            return Err(Error::InvalidArgument(
                format!("no kernel takes {column:?}").into(),
            ));
        };
        // The queue waits until both may be read.
        let (values, mask) = (buffer.on(queue)?, column.validity_on(queue)?);
        launch(Self {
            kind,
            values: values.address().offset(column.offset() * kind.width()),
            mask: mask.as_ref().map_or(DevicePtr::NULL, |mask| mask.address()),
            bit: mask.as_ref().map_or(0, |mask| mask.bit_offset()),
            rows: column.len(),
        })
        // Here the loans end: the memory will not be freed before the kernel is done.
    }
}
