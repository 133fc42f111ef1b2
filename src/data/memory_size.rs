//! How much device memory arrays and batches keep.

use crate::data::array::DeviceArray;
use crate::data::batch::DeviceRecordBatch;
use crate::data::node::Node;

impl DeviceArray {
    /// Returns the bytes of device memory that the array keeps alive, each allocation once. Never reads device memory.
    ///
    /// Memory that this crate allocated counts as a whole with its padding, even if the array is a slice or one of several
    /// columns in it: [`compact`](Self::compact) makes an array that keeps only its rows. Of other memory (imported,
    /// wrapped) the bytes that buffers lie in count, each byte once; a buffer whose size is stored in device memory counts
    /// after [`resolve_sizes`](Self::resolve_sizes) only. For the bytes of the rows, see
    /// [`get_slice_memory_size`](Self::get_slice_memory_size).
    ///
    /// ```
    /// # #[cfg(all(target_os = "linux", not(miri)))]
    /// # fn main() -> arrow_device::Result<()> {
    /// use arrow_array::Int64Array;
    /// use arrow_device::Devices;
    /// let up = Devices::simulated()?.upload_array(&Int64Array::from(vec![7; 1000]))?;
    /// let slice = up.slice(10, 100)?;
    /// assert_eq!(slice.get_array_memory_size(), 8000);
    /// assert_eq!(slice.get_slice_memory_size()?, 800);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(all(target_os = "linux", not(miri))))]
    /// # fn main() {}
    /// ```
    pub fn get_array_memory_size(&self) -> usize {
        /// The addresses of buffers that are not in memory of this crate.
        fn foreign(node: &Node, ranges: &mut Vec<(usize, usize)>) {
            for buffer in &node.buffers {
                if matches!(&buffer.owner, Some(owner) if owner.allocated().is_none()) {
                    let (start, bytes) = (buffer.address().address(), buffer.bytes().unwrap_or(0));
                    ranges.push((start, start.saturating_add(bytes)));
                }
            }
            node.children
                .iter()
                .for_each(|child| foreign(child, ranges));
        }
        let mut ranges = Vec::new();
        foreign(self.node(), &mut ranges);
        ranges.sort_unstable();
        let owners = self.owners();
        let own = owners.iter().filter_map(|owner| owner.allocated());
        let (mut total, mut counted) = (own.sum(), 0);
        for (start, end) in ranges {
            total += end.saturating_sub(start.max(counted));
            counted = end.max(counted);
        }
        total
    }
}

impl DeviceRecordBatch {
    /// Returns the bytes of device memory that the batch keeps alive, each allocation once; see
    /// [`DeviceArray::get_array_memory_size`].
    pub fn get_array_memory_size(&self) -> usize {
        self.as_struct().get_array_memory_size()
    }
}
