//! How many bytes the rows of an array or batch are.

use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::error::Result;
use crate::transfer::planner::{Extent, plan};

impl DeviceArray {
    /// Returns the bytes of these rows, without padding: those that [`to_host`](Self::to_host) copies if the host cannot
    /// read the memory. Nothing is copied or allocated on the device.
    ///
    /// What moves as a whole counts as a whole: dictionaries, the children of list views and dense unions, the data buffers
    /// of view arrays, and the data buffer or child of a binary, text, list or map array that is not a slice. A validity
    /// bitmap that is known to have no nulls does not count.
    ///
    /// Numbers that are stored in device memory are read where they are not known, as [`to_host`](Self::to_host) does: the
    /// last offset of binary and text arrays whose size is not known yet, and the first and last offsets of slices of
    /// binary, text, list and map arrays, with one host wait for each level of nesting, all columns together. For
    /// fixed-width, boolean and uploaded whole arrays nothing is read. Waits for memory that the host can read.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`](crate::Error::InvalidInput) if a number that is stored in device memory is
    /// impossible, and the errors that the device reports.
    pub fn get_slice_memory_size(&self) -> Result<usize> {
        let plan = plan(self, Extent::Rows, None, None)?;
        Ok(plan.buffer_bytes())
    }
}

impl DeviceRecordBatch {
    /// Returns the bytes of exactly these rows; see [`DeviceArray::get_slice_memory_size`].
    ///
    /// # Errors
    /// As [`DeviceArray::get_slice_memory_size`].
    pub fn get_slice_memory_size(&self) -> Result<usize> {
        self.as_struct().get_slice_memory_size()
    }
}
