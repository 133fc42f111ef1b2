//! Upload, download, device to device, compact copies.
//!
//! What a slice moves: only its rows, for fixed-width, boolean, binary, text, list, fixed-size list,
//! struct and map arrays; dictionaries and the children of list views and dense unions whole; of view
//! arrays the buffers that its rows refer to on the way up, all on the way down; of run-end encoded
//! arrays the runs that hold its rows.
//!
//! From device to device, plain bytes are copied directly. Three kinds of pieces, and no others, are
//! copied through the host, which rewrites them: validity bitmaps that start within a byte, the last byte
//! of bitmaps that have other bits after their last row, and offsets that do not start at 0.
//!
//! An export of arrays whose validity bitmap starts at another bit of a byte than their values moves that bitmap,
//! by way of the host.
//!
//! Whatever a transfer wrote is padded to 64 bytes with zeros, the bits behind the last row included.
//! Buffers that one put side by side stay so, and are one copy the next time.

#[cfg(feature = "async")]
mod arriving;
mod copy;
mod download;
mod fix;
mod plan;
mod planner;
mod realign;
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
use crate::transfer::download::Download;
pub(crate) use crate::transfer::planner::Extent;
pub(crate) use crate::transfer::realign::{Realigning, is_misaligned};

impl Device {
    /// Brings a batch to this device: one allocation and one list of copies, which run later. The
    /// CPU takes it as it is, without a copy. Small buffers are packed into staging memory; beyond
    /// some 128 MiB of it the call waits for the oldest copies.
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
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), or what the device reports. Nothing is
    /// left allocated then.
    pub fn upload(&self, batch: &RecordBatch) -> Result<DeviceRecordBatch> {
        if self.id() == DeviceId::CPU {
            let array = DeviceArray::from_tree(Arc::new(wrap_batch(batch)?));
            return Ok(DeviceRecordBatch::from_struct(batch.schema(), array));
        }
        self.upload_on(batch, &self.default_queue())
    }

    /// As [`upload`](Self::upload), on a queue of this device.
    pub fn upload_on(&self, batch: &RecordBatch, queue: &Queue) -> Result<DeviceRecordBatch> {
        let array = self.bring(wrap_batch(batch)?, queue)?;
        Ok(DeviceRecordBatch::from_struct(batch.schema(), array))
    }

    /// Brings an array of any type to this device, as [`upload`](Self::upload) does a batch.
    pub fn upload_array(&self, array: &dyn Array) -> Result<DeviceArray> {
        self.upload_data(array.to_data())
    }

    /// Brings arrow data of any type to this device, as [`upload`](Self::upload) does a batch.
    pub fn upload_data(&self, data: ArrayData) -> Result<DeviceArray> {
        self.upload_data_on(data, &self.default_queue())
    }

    /// As [`upload_data`](Self::upload_data), on a queue of this device.
    pub fn upload_data_on(&self, data: ArrayData, queue: &Queue) -> Result<DeviceArray> {
        self.bring(wrap_data(data)?, queue)
    }

    /// An array over host memory to this device.
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

/// An array on its way to the host.
#[derive(Debug)]
pub(crate) struct ToHost {
    array: DeviceArray,
    /// `None` if the host can read the array where it is.
    download: Option<Download>,
}

impl ToHost {
    /// After which [`finish`](Self::finish) has nothing to wait for; `None` if it never has.
    pub(crate) fn event(&self) -> Option<&SyncEvent> {
        self.download.as_ref()?.event()
    }

    /// The array in host memory: one host wait if there were copies.
    pub(crate) fn finish(self) -> Result<DeviceArray> {
        match self.download {
            Some(download) => self.array.like(Arc::new(download.finish()?)),
            None => Ok(self.array),
        }
    }
}

impl DeviceArray {
    /// The array's rows as an arrow-rs array. Memory that the host can read is not copied; other
    /// memory is copied with one list of copies and one host wait, after one read of the sizes that
    /// are stored in it.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`](crate::Error::InvalidInput) if a size that is stored in device memory
    /// is impossible, and the errors that the device reports.
    pub fn to_host(&self) -> Result<ArrayRef> {
        to_array(&*self.to_host_memory(Extent::Rows)?)
    }

    /// As [`to_host`](Self::to_host), as [`ArrayData`].
    pub fn to_host_data(&self) -> Result<ArrayData> {
        unwrap(&*self.to_host_memory(Extent::Rows)?)
    }

    /// As [`to_host_data`](Self::to_host_data), with all that safe calls can reach from the array: each
    /// buffer comes down at most once.
    pub(crate) fn reachable_data(&self) -> Result<ArrayData> {
        unwrap(&*self.to_host_memory(Extent::Reachable)?)
    }

    /// This array if the host can read it, else a copy on the CPU.
    fn to_host_memory(&self, extent: Extent) -> Result<Cow<'_, Self>> {
        if self.device().is_host_readable() {
            return Ok(Cow::Borrowed(self));
        }
        let started = self.start_to_host(extent, &self.device().default_queue())?;
        Ok(Cow::Owned(started.finish()?))
    }

    /// Starts what [`to_host_memory`](Self::to_host_memory) does, on `queue`, without a wait unless
    /// sizes are stored in device memory.
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

    /// `tree` under this array's field.
    fn like(&self, tree: Arc<Tree>) -> Result<Self> {
        let array = Self::from_tree(tree);
        match self.field() {
            Some(field) => array.with_field(field.clone()),
            None => Ok(array),
        }
    }

    /// The array on `device`: itself if it is there already, without a copy; copied straight from
    /// device to device where `device` reaches this one, with one host wait if a piece must be
    /// rewritten; otherwise through the host.
    ///
    /// # Errors
    /// As [`to_host`](Self::to_host) and [`Device::upload`].
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        self.to_device_on(&device.default_queue())
    }

    /// As [`to_device`](Self::to_device), on a queue of the destination.
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
            // Host memory under another device's id (page-locked, say) becomes the CPU's.
            if *host.device() == *to {
                return Ok(host.into_owned());
            }
            return self.like(Arc::new(wrap_data(unwrap(&host)?)?));
        }
        self.like(Arc::new(upload::upload(&host, queue)?))
    }

    /// A copy of exactly these rows on the same device, in one fresh allocation: every buffer starts
    /// at a multiple of 64 bytes and is padded to 64 with zeros, zero bits follow the last row, offsets
    /// start at 0, array offsets are 0 and null counts are known. It keeps none of the memory that a
    /// slice keeps alive, and fixes foreign memory for consumers that ask for more than the format does
    /// ([`check_for_cudf`](crate::check_for_cudf)).
    ///
    /// Dictionaries and the children of list views and dense unions are copied whole.
    ///
    /// Where the host cannot read the memory, values are copied on the device. The ends of binary,
    /// text, list and map arrays are read first: one read for each level, all columns together. Validity
    /// bitmaps that must be rewritten or counted and offsets that must be rebased are copied to the host
    /// with one more read.
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
    /// As [`to_host`](Self::to_host) and [`Device::upload`];
    /// [`Error::NotSupported`](crate::Error::NotSupported) for page-locked memory whose backend is
    /// missing.
    pub fn compact(&self) -> Result<Self> {
        self.compact_on(&self.device().default_queue())
    }

    /// As [`compact`](Self::compact), on a queue of the array's device.
    pub fn compact_on(&self, queue: &Queue) -> Result<Self> {
        crate::memory::check_queue(queue, self.device())?;
        self.like(Arc::new(copy::copy(self, queue, Extent::Compact)?))
    }
}

impl DeviceRecordBatch {
    /// The batch's rows as an arrow-rs [`RecordBatch`]; see [`DeviceArray::to_host`].
    pub fn to_host(&self) -> Result<RecordBatch> {
        to_batch(
            self.schema(),
            &*self.as_struct().to_host_memory(Extent::Rows)?,
        )
    }

    /// The batch on `device`; see [`DeviceArray::to_device`].
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        self.to_device_on(&device.default_queue())
    }

    /// As [`to_device`](Self::to_device), on a queue of the destination.
    pub fn to_device_on(&self, queue: &Queue) -> Result<Self> {
        let array = self.as_struct().to_device_on(queue)?;
        Ok(Self::from_struct(self.schema().clone(), array))
    }

    /// A copy of exactly these rows on the same device, in one fresh allocation; see
    /// [`DeviceArray::compact`].
    pub fn compact(&self) -> Result<Self> {
        self.compact_on(&self.device().default_queue())
    }

    /// As [`compact`](Self::compact), on a queue of the batch's device.
    pub fn compact_on(&self, queue: &Queue) -> Result<Self> {
        let array = self.as_struct().compact_on(queue)?;
        Ok(Self::from_struct(self.schema().clone(), array))
    }
}
