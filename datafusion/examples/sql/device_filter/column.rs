//! Columns as arguments of kernels.

use arrow_device::device::DevicePtr;
use arrow_device::{DeviceArray, DeviceBuffer, Error, Queue, Result};
use datafusion::arrow::array::UInt64Array;
use datafusion::arrow::datatypes::{DataType, IntervalUnit};

/// How the values of a column lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// A bit for each row: booleans.
    Bits,
    /// `width` bytes for each row, in units of `unit` bytes, to which they are aligned.
    Fixed { width: usize, unit: usize },
    /// Bytes, with an offset for each row and one more, of 4 or 8 bytes.
    Offsets { width: usize },
    /// A view of 16 bytes for each row, which has the bytes, or says where in which buffer they are.
    Views,
}

impl Format {
    /// Returns `None` for types that the kernels do not support: nested types, dictionaries, run-end encoded columns, unions,
    /// and the type that has only nulls.
    pub(crate) fn of(data_type: &DataType) -> Option<Self> {
        use DataType::*;
        Some(match data_type {
            Boolean => Self::Bits,
            FixedSizeBinary(width) if *width > 0 => Self::Fixed {
                width: usize::try_from(*width).ok()?,
                unit: 1,
            },
            Utf8 | Binary => Self::Offsets { width: 4 },
            LargeUtf8 | LargeBinary => Self::Offsets { width: 8 },
            Utf8View | BinaryView => Self::Views,
            Interval(IntervalUnit::DayTime) => Self::Fixed { width: 8, unit: 4 },
            other => {
                let width = other.primitive_width()?;
                let unit = width.min(8);
                Self::Fixed { width, unit }
            }
        })
    }
}

/// A bitmap: the address of a byte, and the number of the bit in it that is row 0's. At address null is no bitmap, and all bits
/// count as set.
#[derive(Clone, Copy)]
pub(crate) struct Bits {
    pub(crate) at: DevicePtr,
    pub(crate) bit: usize,
}

/// The addresses of a column's rows, for a kernel.
#[derive(Clone, Copy)]
pub(crate) struct Column {
    pub(crate) rows: usize,
    pub(crate) format: Format,
    pub(crate) validity: Bits,
    /// Row 0 of the values, of the offsets or of the views. Of booleans, the bitmap.
    pub(crate) values: Bits,
    /// The bytes that offsets refer to. Of views, the addresses of the buffers that they refer to.
    pub(crate) data: DevicePtr,
}

/// A column of a batch that is not empty.
pub(crate) struct Input {
    array: DeviceArray,
    format: Format,
    /// The values, offsets or views.
    values: DeviceBuffer,
    /// The buffers that views refer to, and their addresses in device memory.
    buffers: Vec<DeviceBuffer>,
    addresses: Option<DeviceBuffer>,
}

impl Input {
    /// Of views, this uploads the addresses of their buffers.
    pub(crate) fn new(array: DeviceArray, queue: &Queue) -> Result<Self> {
        let unsupported = || {
            Error::InvalidArgument(format!("the filter's kernels do not support {array:?}").into())
        };
        let format = Format::of(array.data_type()).ok_or_else(unsupported)?;
        // The first buffer is the validity bitmap.
        let values = array.buffer(1).ok_or_else(unsupported)?;
        let (mut buffers, mut addresses) = (Vec::new(), None);
        if format == Format::Views {
            // A view never refers to a buffer that is missing, which is one without bytes.
            let others = (2..array.num_buffers()).map(|i| array.buffer(i));
            let of = |buffer: &Option<DeviceBuffer>| match buffer {
                Some(buffer) => buffer.address().address() as u64,
                None => 0,
            };
            let others: Vec<_> = others.collect();
            if !others.is_empty() {
                let table = UInt64Array::from_iter_values(others.iter().map(of));
                let table = queue.device().upload_array_on(&table, queue)?;
                addresses = table.buffer(1);
            }
            buffers = others.into_iter().flatten().collect();
        }
        Ok(Self {
            array,
            format,
            values,
            buffers,
            addresses,
        })
    }

    /// Lends the column to the kernels that `launch` queues.
    pub(crate) fn lend(
        &self,
        queue: &Queue,
        launch: impl FnOnce(Column) -> Result<()>,
    ) -> Result<()> {
        // The queue waits until all of them are ready.
        let validity = self.array.validity_on(queue)?;
        let values = self.values.on(queue)?;
        let buffers = self.buffers.iter().chain(&self.addresses);
        let buffers = buffers.map(|buffer| buffer.on(queue));
        let buffers: Vec<_> = buffers.collect::<Result<_>>()?;
        let bytes = match self.format {
            Format::Offsets { .. } => Some(self.array.bytes_on(queue)?),
            _ => None,
        };
        let data = match (&bytes, &self.addresses) {
            (Some(bytes), _) => bytes.address(),
            (None, Some(_)) => buffers[buffers.len() - 1].address(),
            (None, None) => DevicePtr::NULL,
        };
        let (width, unit) = match self.format {
            Format::Bits => (0, 1),
            Format::Fixed { width, unit } => (width, unit),
            Format::Offsets { width } => (width, width),
            Format::Views => (16, 8),
        };
        let first = values.address().offset(self.array.offset() * width);
        if first.address() % unit != 0 {
            let what = format!(
                "filter on {}: values of {} at {first:?} are not aligned to {unit} bytes; copy the batch with compact()",
                queue.device(),
                self.array.data_type()
            );
            return Err(Error::InvalidArgument(what.into()));
        }
        launch(Column {
            rows: self.array.len(),
            format: self.format,
            validity: match &validity {
                Some(bits) => Bits {
                    at: bits.address(),
                    bit: bits.bit_offset(),
                },
                None => Bits {
                    at: DevicePtr::NULL,
                    bit: 0,
                },
            },
            values: Bits {
                at: first,
                bit: self.array.offset(),
            },
            data,
        })
        // The loans end here. The memory is not freed before the kernels are done.
    }
}

/// Text or binary in device memory, for kernels that compare with it.
#[derive(Clone, Debug)]
pub(crate) struct Text(Option<DeviceBuffer>);

impl Text {
    /// Uploads bytes.
    pub(crate) fn upload(bytes: &[u8], queue: &Queue) -> Result<Self> {
        let array = datafusion::arrow::array::BinaryArray::from_vec(vec![bytes]);
        let array = queue.device().upload_array_on(&array, queue)?;
        Ok(Self(array.buffer(2).filter(|buffer| !buffer.is_empty())))
    }

    /// Lends the address and the number of bytes to the kernel that `launch` queues.
    pub(crate) fn lend(
        &self,
        queue: &Queue,
        launch: impl FnOnce(DevicePtr, usize) -> Result<()>,
    ) -> Result<()> {
        match &self.0 {
            None => launch(DevicePtr::NULL, 0),
            Some(buffer) => {
                let bytes = buffer.on(queue)?;
                launch(bytes.address(), bytes.len())
            }
        }
    }
}
