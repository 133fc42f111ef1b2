//! Upload, download, copies between devices, compact copies, concatenation.
//!
//! What a slice moves: only its rows, for fixed-width, boolean, binary, text, list, fixed-size list, struct and map
//! arrays; dictionaries and the children of list views and dense unions whole; of view arrays the data buffers that its
//! rows refer to on upload, and all on download; of run-end encoded arrays the runs that hold its rows.
//!
//! From device to device, unchanged bytes are copied directly. Only three kinds of regions are read first and rewritten by the
//! host: validity bitmaps that start within a byte, the last byte of bitmaps that have other bits after
//! their last row, and offsets that do not start at 0. A concatenation also rewrites what refers to rows or buffers of one
//! input: offsets, dictionary keys, run ends, views. An export moves validity bitmaps that start at another bit of a
//! byte than the values, through the host too.
//!
//! What a transfer wrote is padded to 64 bytes with zeros, and so are the bits after the last row. Buffers that one
//! transfer put next to each other stay so, and are one copy in the next one.

mod concat;
mod copy;
mod download;
mod export;
mod nested;
mod plan;
mod region;
mod upload;
mod walk;

use arrow_array::{Array, ArrayRef, RecordBatch, cast::AsArray, types::UInt8Type};
use arrow_buffer::Buffer;
use arrow_schema::DataType;

use crate::data::host::{to_array, unwrap, wrap_batch};
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{Device, Queue};
use crate::error::Result;
use crate::memory::{DeviceBuffer, check_queue, queue_for};
use crate::transfer::copy::copy;
pub use crate::transfer::download::Download;
pub(crate) use crate::transfer::download::DownloadQueues;
pub(crate) use crate::transfer::export::export_reads;
pub(crate) use crate::transfer::plan::Scope;
use crate::transfer::upload::upload;

/// The size of staging memory. A fuzzer's inputs are small, and so is this there: what they make takes several steps.
const fn staging(bytes: usize) -> usize {
    if cfg!(fuzzing) { bytes >> 11 } else { bytes }
}

impl Device {
    /// Copies a batch to this device: one allocation, and copies that may run after this call returns. On the CPU device
    /// nothing is copied. Buffers are packed into staging memory, except page-locked ones of 1 MiB or more, which are copied from
    /// where they are (see [`HostBuffer`](crate::HostBuffer)).
    ///
    /// Each part of the packed bytes, of 256 KiB to 2 MiB, is a copy that is queued at once, so that it runs while the
    /// next one is packed. From 2 MiB of packed bytes on, several threads pack ([`set_packing_threads`](Device::set_packing_threads)).
    /// Staging memory whose copies are done is used again; beyond 128 MiB of copies that run, the call waits for the oldest.
    ///
    /// The columns share the allocation, which is freed when the last of them is dropped. To keep one column without the
    /// others, [`compact`](DeviceArray::compact) it, or upload it by itself.
    ///
    /// ```
    /// # use arrow_device::{Devices, Error};
    /// # use arrow_array::{RecordBatch, record_batch};
    /// # fn main() -> Result<(), Error> {
    /// let batch = record_batch!(("id", Int64, [1, 2, 3]), ("name", Utf8, ["a", "b", "c"]))?;
    /// let on_device = Devices::cpu().upload(&batch)?;
    /// assert_eq!(on_device.slice(1, 2)?.to_host()?, batch.slice(1, 2));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`](crate::Error::OutOfMemory),
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a batch whose columns have other types than its
    /// schema says, and the errors that the device reports. Nothing stays allocated then.
    pub fn upload(&self, batch: &RecordBatch) -> Result<DeviceRecordBatch> {
        self.upload_on(batch, &self.default_queue())
    }

    /// As [`upload`](Self::upload), on a queue of this device.
    ///
    /// # Errors
    /// As [`upload`](Self::upload). Also returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the queue
    /// belongs to another device.
    pub fn upload_on(&self, batch: &RecordBatch, queue: &Queue) -> Result<DeviceRecordBatch> {
        check_queue(queue, self)?;
        let array = wrap_batch(batch)?.host_to_device(queue)?;
        Ok(DeviceRecordBatch::from_struct(batch.schema(), array))
    }

    /// Copies an array of any type to this device, as [`upload`](Self::upload) does a batch.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn upload_array(&self, array: &dyn Array) -> Result<DeviceArray> {
        self.upload_array_on(array, &self.default_queue())
    }

    /// As [`upload_array`](Self::upload_array), on a queue of this device.
    ///
    /// # Errors
    /// As [`upload_on`](Self::upload_on).
    pub fn upload_array_on(&self, array: &dyn Array, queue: &Queue) -> Result<DeviceArray> {
        check_queue(queue, self)?;
        DeviceArray::from_host(array.to_data())?.host_to_device(queue)
    }
}

impl From<&Device> for Queue {
    /// Returns the device's default queue.
    fn from(device: &Device) -> Self {
        device.default_queue()
    }
}

impl From<&Queue> for Queue {
    fn from(queue: &Queue) -> Self {
        queue.clone()
    }
}

impl DeviceArray {
    /// Returns the array's rows as an arrow-rs array. Memory that the host can read is not copied, but waited for; other
    /// memory is copied with one list of copies and one host wait, after one read of the sizes that are stored in
    /// device memory. What is copied together, the columns of a batch for example, shares one piece of host memory, and
    /// each part keeps all of it; to keep one column without the others, download it by itself.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`](crate::Error::InvalidInput) if a size that is stored in device memory is
    /// impossible, and the errors that the device reports.
    pub fn to_host(&self) -> Result<ArrayRef> {
        self.start_to_host(None)?.wait()
    }

    /// Starts to copy the array's rows to the host as [`to_host`](Self::to_host) does, without blocking. If sizes are stored in
    /// device memory and not known yet, this queues the read of them, and the next call on the [`Download`] that finds it
    /// done queues the copies. Memory that the host can read is not copied; if several parts of it, or memory of another
    /// library, are not ready yet, the queue waits for them, and one event is recorded. All reads and copies are work of `queue`, or of
    /// the device's default queue for `None`.
    ///
    /// ```
    /// use arrow_array::Int32Array;
    /// use arrow_device::Devices;
    /// # fn main() -> arrow_device::Result<()> {
    /// let device = Devices::simulated()?;
    /// let array = device.upload_array(&Int32Array::from(vec![1, 2, 3]))?;
    /// let mut download = array.start_to_host(None)?;
    /// while !download.is_ready()? {
    ///     std::thread::yield_now(); // other work of this thread
    /// }
    /// assert_eq!(download.wait()?.len(), 3); // does not block any more
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`to_host`](Self::to_host). Also returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the queue
    /// belongs to another device.
    pub fn start_to_host<'a>(
        &self,
        queue: impl Into<Option<&'a Queue>>,
    ) -> Result<Download<ArrayRef>> {
        let queue = queue_for(queue.into(), self.device())?;
        Download::new(self.clone(), None, queue, |array, _| to_array(array)).started()
    }

    /// Returns the array on another device: `to` is that device, or a queue of it. If it is there already, nothing is copied. If the
    /// device can reach the memory of this one, the array is copied directly, with a host wait for each read of what must be rewritten;
    /// otherwise it is copied through the host.
    ///
    /// # Errors
    /// As [`to_host`](Self::to_host) and [`Device::upload`].
    pub fn to_device(&self, to: impl Into<Queue>) -> Result<Self> {
        let queue = &to.into();
        let (from, to) = (self.device(), queue.device());
        if from == to {
            return Ok(self.clone());
        }
        if !from.is_host_readable() && to.backend().relation(from.backend()).copies {
            return self.copied(queue, Scope::Rows);
        }
        Download::of_scope(self.clone(), Scope::Rows, from.default_queue())
            .wait()?
            .host_to_device(queue)
    }

    /// Returns this array, which the host can read, on the device of `queue`. Waits for it if it is not ready.
    fn host_to_device(&self, queue: &Queue) -> Result<Self> {
        let to = queue.device();
        if self.device() == to {
            return Ok(self.clone());
        }
        let node = if to.has_all_host_memory() {
            // Host memory of another device (page-locked memory, say) becomes the CPU's.
            Self::from_host(unwrap(self)?)?.node().clone()
        } else if to.is_host_memory() {
            return self.copied(queue, Scope::Rows);
        } else {
            upload(self, queue)?
        };
        Ok(self.like(to.clone(), node))
    }

    /// Returns a copy on the device of `queue`, which is the array's own or reaches it, or whose memory and the array's the host can
    /// read.
    fn copied(&self, queue: &Queue, scope: Scope) -> Result<Self> {
        let node = copy(&[self], self.data_type(), scope, queue)?;
        Ok(self.like(queue.device().clone(), node))
    }

    /// Copies exactly these rows to one fresh allocation on the same device. Every buffer starts at a multiple of 64
    /// bytes and is padded to 64 with zeros, zero bits follow the last row, offsets start at 0, array offsets are 0, and
    /// null counts are known. The copy does not keep the memory alive that a slice does, and makes foreign
    /// memory fit for consumers that demand more than the format does (cuDF).
    ///
    /// Dictionaries and the children of list views and dense unions are copied whole.
    ///
    /// If the host cannot read the memory, values are copied on the device. The ends of binary, text, list and map
    /// arrays are read first: one read for each level, all columns together. Validity bitmaps that must be rewritten or
    /// counted are copied to the host with the first of them, and offsets that must be rebased with the read after their ends. Each
    /// read is one host wait.
    ///
    /// ```
    /// # use arrow_array::record_batch;
    /// # use arrow_device::{Devices, Error};
    /// let batch = record_batch!(("id", Int64, [1, 2, 3]), ("name", Utf8, ["a", "b", "c"]))?;
    /// let part = Devices::cpu().upload(&batch)?.slice(1, 2)?;
    /// let own = part.compact()?;
    /// assert_eq!(own.column(0)?.offset(), 0);
    /// assert_eq!(own.to_host()?, part.to_host()?);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`to_host`](Self::to_host) and [`Device::upload`]. Also returns
    /// [`Error::NotSupported`](crate::Error::NotSupported) for page-locked memory whose backend is missing.
    pub fn compact(&self) -> Result<Self> {
        self.copied(&self.device().default_queue(), Scope::Compact)
    }
}

impl DeviceBuffer {
    /// Returns the bytes as an arrow buffer. Memory that the host can read is not copied, but waited for. Other memory is copied
    /// into a host buffer of the device's pool ([`Device::host_buffer`]) on the device's default queue: one copy and one host wait.
    ///
    /// ```
    /// use arrow_device::{DeviceBufferMut, Devices};
    /// # fn main() -> arrow_device::Result<()> {
    /// let device = Devices::simulated()?;
    /// let mut sums = DeviceBufferMut::for_values::<i64>(&device.default_queue(), 2)?;
    /// sums.fill(0)?; // stands for a kernel
    /// assert_eq!(sums.freeze()?.to_host()?.typed_data::<i64>(), [0, 0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::OutOfMemory`](crate::Error::OutOfMemory), or the device's own error.
    pub fn to_host(&self) -> Result<Buffer> {
        let bytes = DeviceArray::from_values(DataType::UInt8, self.len(), self.clone(), None)?;
        let bytes = bytes.to_host()?;
        Ok(bytes.as_primitive::<UInt8Type>().values().inner().clone())
    }
}

impl DeviceRecordBatch {
    /// Returns the batch's rows as an arrow-rs [`RecordBatch`]; see [`DeviceArray::to_host`].
    ///
    /// # Errors
    /// As [`DeviceArray::to_host`].
    pub fn to_host(&self) -> Result<RecordBatch> {
        self.start_to_host(None)?.wait()
    }

    /// Starts to copy the batch's rows to the host without blocking; see [`DeviceArray::start_to_host`] and [`Download`].
    ///
    /// # Errors
    /// As [`DeviceArray::start_to_host`].
    pub fn start_to_host<'a>(
        &self,
        queue: impl Into<Option<&'a Queue>>,
    ) -> Result<Download<RecordBatch>> {
        let queue = queue_for(queue.into(), self.device())?;
        Download::lazy(self, queue).started()
    }

    /// Returns the batch on another device; see [`DeviceArray::to_device`].
    ///
    /// # Errors
    /// As [`DeviceArray::to_device`].
    pub fn to_device(&self, to: impl Into<Queue>) -> Result<Self> {
        let array = self.as_struct().to_device(to)?;
        Ok(Self::from_struct(self.schema(), array))
    }

    /// Copies exactly these rows to one fresh allocation on the same device; see [`DeviceArray::compact`].
    ///
    /// # Errors
    /// As [`DeviceArray::compact`].
    pub fn compact(&self) -> Result<Self> {
        let array = self.as_struct().compact()?;
        Ok(Self::from_struct(self.schema(), array))
    }
}
