//! Columns as arguments of kernels.

use arrow_device::device::DevicePtr;
use arrow_device::{DeviceArray, Error, Queue, Result};

use super::predicate::Kind;

/// The addresses of a column, for a kernel.
#[derive(Clone, Copy)]
pub(crate) struct Column {
    pub(crate) kind: Kind,
    /// The value of row 0.
    pub(crate) values: DevicePtr,
    /// The validity bitmap, or null if no row is null.
    pub(crate) mask: DevicePtr,
    /// The bit of row 0 in the validity bitmap.
    pub(crate) bit: usize,
    pub(crate) rows: usize,
}

impl Column {
    /// Lends a column to the kernel that `launch` queues.
    pub(crate) fn lend(
        column: &DeviceArray,
        queue: &Queue,
        launch: impl FnOnce(Self) -> Result<()>,
    ) -> Result<()> {
        let kind = Kind::of(column.data_type());
        // The first buffer is the validity bitmap, the second has the values.
        let (Some(kind), Some(buffer)) = (kind, column.buffer(1)) else {
            return Err(Error::InvalidArgument(
                format!("the kernels do not support {column:?}").into(),
            ));
        };
        // The queue waits until both are ready.
        let (values, mask) = (buffer.on(queue)?, column.validity_on(queue)?);
        launch(Self {
            kind,
            values: values.address().offset(column.offset() * kind.width()),
            mask: mask.as_ref().map_or(DevicePtr::NULL, |mask| mask.address()),
            bit: mask.as_ref().map_or(0, |mask| mask.bit_offset()),
            rows: column.len(),
        })
        // The loans end here. The memory is not freed before the kernel is done.
    }
}
