//! Upload, download, copies between devices, compact copies.
//!
//! What a slice moves: only its rows, for fixed-width, boolean, binary, text, list, fixed-size list, struct and map
//! arrays; dictionaries and the children of list views and dense unions whole; of view arrays the data buffers that its
//! rows refer to on upload, and all on download; of run-end encoded arrays the runs that hold its rows.
//!
//! From device to device, unchanged bytes are copied directly. Only three kinds of pieces are copied through the host,
//! which rewrites them: validity bitmaps that start within a byte, the last byte of bitmaps that have other bits after
//! their last row, and offsets that do not start at 0. An export moves validity bitmaps that start at another bit of a
//! byte than the values, through the host too.
//!
//! What a transfer wrote is padded to 64 bytes with zeros, and so are the bits after the last row. Buffers that one
//! transfer put next to each other stay so, and are one copy in the next one.

#[cfg(feature = "async")]
mod arriving;
mod bitmaps;
mod copy;
mod download;
mod fix;
mod plan;
mod planner;
mod row_bytes;
mod upload;

use std::borrow::Cow;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_data::ArrayData;

use crate::data::host::{to_array, to_batch, unwrap, wrap_batch, wrap_data};
use crate::data::tree::Tree;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{Device, DeviceId, Queue, SyncEvent};
use crate::error::Result;
#[cfg(feature = "async")]
pub(crate) use crate::transfer::arriving::Arriving;
pub(crate) use crate::transfer::bitmaps::{Bitmaps, Resolved};
use crate::transfer::download::Download;
pub(crate) use crate::transfer::planner::Extent;

impl Device {
    /// Copies a batch to this device: one allocation and one list of copies, which may run after this call returns. On
    /// the CPU device nothing is copied. Small buffers are packed into staging memory; beyond about 128 MiB of it the
    /// call waits for the oldest copies.
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
        if self.id() == DeviceId::CPU {
            let array = DeviceArray::from_tree(Arc::new(wrap_batch(batch)?));
            return Ok(DeviceRecordBatch::from_struct(batch.schema(), array));
        }
        self.upload_on(batch, &self.default_queue())
    }

    /// As [`upload`](Self::upload), on a queue of this device.
    ///
    /// # Errors
    /// As [`upload`](Self::upload). Also returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the queue
    /// belongs to another device.
    pub fn upload_on(&self, batch: &RecordBatch, queue: &Queue) -> Result<DeviceRecordBatch> {
        let array = self.bring(wrap_batch(batch)?, queue)?;
        Ok(DeviceRecordBatch::from_struct(batch.schema(), array))
    }

    /// Copies an array of any type to this device, as [`upload`](Self::upload) does a batch.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn upload_array(&self, array: &dyn Array) -> Result<DeviceArray> {
        self.upload_data(array.to_data())
    }

    /// Copies `ArrayData` of any type to this device, as [`upload`](Self::upload) does a batch.
    ///
    /// # Errors
    /// As [`upload`](Self::upload). Also returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if a child
    /// has fewer rows than its parent's offset and length require.
    pub fn upload_data(&self, data: ArrayData) -> Result<DeviceArray> {
        self.upload_data_on(data, &self.default_queue())
    }

    /// As [`upload_data`](Self::upload_data), on a queue of this device.
    ///
    /// # Errors
    /// As [`upload_on`](Self::upload_on) and [`upload_data`](Self::upload_data).
    pub fn upload_data_on(&self, data: ArrayData, queue: &Queue) -> Result<DeviceArray> {
        self.bring(wrap_data(data)?, queue)
    }

    /// Copies an array over host memory to this device.
    fn bring(&self, host: Tree, queue: &Queue) -> Result<DeviceArray> {
        crate::memory::check_queue(queue, self)?;
        let host = DeviceArray::from_tree(Arc::new(host));
        if self.id() == DeviceId::CPU {
            return Ok(host);
        }
        Ok(DeviceArray::from_tree(Arc::new(upload::upload(
            &host, queue,
        )?)))
    }
}

/// A copy of an array to the host that may still be running.
#[derive(Debug)]
pub(crate) struct ToHost {
    array: DeviceArray,
    /// `None` if the host can read the array where it is.
    download: Option<Download>,
}

impl ToHost {
    /// Returns the event after which [`finish`](Self::finish) has nothing to wait for, or `None` if it never has.
    pub(crate) fn event(&self) -> Option<&SyncEvent> {
        self.download.as_ref()?.event()
    }

    /// Returns the array in host memory: one host wait if there were copies.
    pub(crate) fn finish(self) -> Result<DeviceArray> {
        match self.download {
            Some(download) => self.array.like(Arc::new(download.finish()?)),
            None => Ok(self.array),
        }
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
        to_array(&*self.to_host_memory(Extent::Rows)?)
    }

    /// As [`to_host`](Self::to_host), but returns [`ArrayData`].
    ///
    /// # Errors
    /// As [`to_host`](Self::to_host).
    pub fn to_host_data(&self) -> Result<ArrayData> {
        unwrap(&*self.to_host_memory(Extent::Rows)?)
    }

    /// As [`to_host_data`](Self::to_host_data), with all that safe calls can reach from the array. Each buffer is copied
    /// at most once.
    pub(crate) fn reachable_data(&self) -> Result<ArrayData> {
        unwrap(&*self.to_host_memory(Extent::Reachable)?)
    }

    /// Returns this array if the host can read it, otherwise a copy on the CPU.
    fn to_host_memory(&self, extent: Extent) -> Result<Cow<'_, Self>> {
        if self.device().is_host_readable() {
            return Ok(Cow::Borrowed(self));
        }
        let started = self.start_to_host(extent, &self.device().default_queue())?;
        Ok(Cow::Owned(started.finish()?))
    }

    /// Starts what [`to_host_memory`](Self::to_host_memory) does, on `queue`. Waits only if sizes are stored in device
    /// memory.
    pub(crate) fn start_to_host(&self, extent: Extent, queue: &Queue) -> Result<ToHost> {
        let download = match self.device().is_host_readable() {
            true => None,
            false => Some(Download::start(self, extent, queue)?),
        };
        Ok(ToHost {
            array: self.clone(),
            download,
        })
    }

    /// Returns the array of `tree` with this array's field.
    fn like(&self, tree: Arc<Tree>) -> Result<Self> {
        let array = Self::from_tree(tree);
        match self.field() {
            Some(field) => array.with_field(field.clone()),
            None => Ok(array),
        }
    }

    /// Returns the array on `device`. If it is there already, nothing is copied. If `device` can reach the memory of this
    /// one, the array is copied directly, with one host wait if a piece must be rewritten; otherwise it is copied through
    /// the host.
    ///
    /// # Errors
    /// As [`to_host`](Self::to_host) and [`Device::upload`].
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        self.to_device_on(&device.default_queue())
    }

    /// As [`to_device`](Self::to_device), on a queue of the destination.
    ///
    /// # Errors
    /// As [`to_device`](Self::to_device).
    pub fn to_device_on(&self, queue: &Queue) -> Result<Self> {
        let (from, to) = (self.device(), queue.device());
        if from == to {
            return Ok(self.clone());
        }
        if !from.is_host_readable() && to.backend().reaches(from.backend()) {
            return self.like(Arc::new(copy::copy(self, queue, Extent::Rows)?));
        }
        let host = self.to_host_memory(Extent::Rows)?;
        if to.id() == DeviceId::CPU {
            // Host memory of another device (page-locked memory, say) becomes the CPU's.
            if *host.device() == *to {
                return Ok(host.into_owned());
            }
            return self.like(Arc::new(wrap_data(unwrap(&host)?)?));
        }
        self.like(Arc::new(upload::upload(&host, queue)?))
    }

    /// Copies exactly these rows to one fresh allocation on the same device. Every buffer starts at a multiple of 64
    /// bytes and is padded to 64 with zeros, zero bits follow the last row, offsets start at 0, array offsets are 0, and
    /// null counts are known. The copy does not keep the memory alive that a slice does, and fixes foreign memory for
    /// consumers that demand more than the format does (see [`check_for_cudf`](crate::check_for_cudf)).
    ///
    /// Dictionaries and the children of list views and dense unions are copied whole.
    ///
    /// If the host cannot read the memory, values are copied on the device. The ends of binary, text, list and map
    /// arrays are read first: one read for each level, all columns together. Validity bitmaps that must be rewritten or
    /// counted, and offsets that must be rebased, are copied to the host with one more read. Each read is one host wait.
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
        self.compact_on(&self.device().default_queue())
    }

    /// As [`compact`](Self::compact), on a queue of the array's device.
    ///
    /// # Errors
    /// As [`compact`](Self::compact). Also returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the queue
    /// belongs to another device.
    pub fn compact_on(&self, queue: &Queue) -> Result<Self> {
        crate::memory::check_queue(queue, self.device())?;
        self.like(Arc::new(copy::copy(self, queue, Extent::Compact)?))
    }
}

impl DeviceRecordBatch {
    /// Returns the batch's rows as an arrow-rs [`RecordBatch`]; see [`DeviceArray::to_host`].
    ///
    /// # Errors
    /// As [`DeviceArray::to_host`].
    pub fn to_host(&self) -> Result<RecordBatch> {
        to_batch(
            self.schema_ref(),
            &*self.as_struct().to_host_memory(Extent::Rows)?,
        )
    }

    /// Returns the batch on `device`; see [`DeviceArray::to_device`].
    ///
    /// # Errors
    /// As [`DeviceArray::to_device`].
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        self.to_device_on(&device.default_queue())
    }

    /// As [`to_device`](Self::to_device), on a queue of the destination.
    ///
    /// # Errors
    /// As [`to_device`](Self::to_device).
    pub fn to_device_on(&self, queue: &Queue) -> Result<Self> {
        let array = self.as_struct().to_device_on(queue)?;
        Ok(Self::from_struct(self.schema(), array))
    }

    /// Copies exactly these rows to one fresh allocation on the same device; see [`DeviceArray::compact`].
    ///
    /// # Errors
    /// As [`DeviceArray::compact`].
    pub fn compact(&self) -> Result<Self> {
        self.compact_on(&self.device().default_queue())
    }

    /// As [`compact`](Self::compact), on a queue of the batch's device.
    ///
    /// # Errors
    /// As [`DeviceArray::compact_on`].
    pub fn compact_on(&self, queue: &Queue) -> Result<Self> {
        let array = self.as_struct().compact_on(queue)?;
        Ok(Self::from_struct(self.schema(), array))
    }
}
