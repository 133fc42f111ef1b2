//! Columns as arguments of kernels.

use arrow_device::{DeviceArray, DeviceBuffer, Error, Queue, Result};
use datafusion::arrow::array::{BinaryArray, UInt64Array};
use datafusion::arrow::datatypes::{DataType, IntervalUnit};

use super::kernels::word;
use super::key::Kind;

/// How the values of a column lie in memory. The numbers are those of the CUDA kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// As many bytes for each row.
    Fixed = 0,
    /// Bytes, with an offset of 4 bytes for each row and one more.
    Offsets32 = 1,
    /// As before, with offsets of 8 bytes.
    Offsets64 = 2,
    /// A view of 16 bytes for each row, which has the bytes, or says where in which buffer they are.
    Views = 3,
    /// A bit for each row: booleans, which kernels read as they read validity.
    Bits = 4,
}

/// A layout, with the bytes of a value, an offset or a view, in units of `unit` bytes, to which they are aligned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    pub(crate) layout: Layout,
    pub(crate) width: usize,
    pub(crate) unit: usize,
}

impl Format {
    /// Returns `None` for types that the kernels do not support: nested types, dictionaries, run-end encoded columns, unions,
    /// and the type that has only nulls.
    pub(crate) fn of(data_type: &DataType) -> Option<Self> {
        use DataType::*;
        let (layout, width, unit) = match data_type {
            Boolean => (Layout::Bits, 0, 1),
            FixedSizeBinary(width) if *width > 0 => {
                (Layout::Fixed, usize::try_from(*width).ok()?, 1)
            }
            Utf8 | Binary => (Layout::Offsets32, 4, 4),
            LargeUtf8 | LargeBinary => (Layout::Offsets64, 8, 8),
            Utf8View | BinaryView => (Layout::Views, 16, 8),
            Interval(IntervalUnit::DayTime) => (Layout::Fixed, 8, 4),
            other => {
                let width = other.primitive_width()?;
                (Layout::Fixed, width, width.min(8))
            }
        };
        Some(Self {
            layout,
            width,
            unit,
        })
    }

    /// Whether rows have bytes of any number.
    pub(crate) fn is_text(self) -> bool {
        !matches!(self.layout, Layout::Fixed | Layout::Bits)
    }
}

/// A column as parameters of kernels. The default has no bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Column {
    pub(crate) rows: u64,
    /// That of its [`Kind`], if it has one.
    pub(crate) family: u64,
    pub(crate) layout: u64,
    /// Bytes of a value, if all have as many.
    pub(crate) width: u64,
    /// The address of the value, the offset or the view of row 0; of booleans, of the bitmap.
    pub(crate) values: u64,
    /// Of booleans, the bit of row 0.
    pub(crate) first_bit: u64,
    /// The address of the bytes that offsets refer to. Of views, that of the addresses of the buffers that they refer to.
    pub(crate) data: u64,
    /// The address of the validity bitmap, and the bit of row 0; at address 0 there is none, and no null.
    pub(crate) bits: u64,
    pub(crate) bit: u64,
}

/// A column that is not empty: of a batch that is lent to a queue, or of memory that is freed in the order of this queue.
pub(crate) struct Input {
    pub(crate) array: DeviceArray,
    pub(crate) format: Format,
    pub(crate) column: Column,
    /// Of views, the addresses of the buffers that they refer to.
    _table: Option<DeviceArray>,
}

impl Input {
    /// Of views, this uploads the addresses of their buffers.
    pub(crate) fn new(array: DeviceArray, queue: &Queue) -> Result<Self> {
        let unsupported = || Error::InvalidArgument(format!("no kernels for {array:?}").into());
        let format = Format::of(array.data_type()).ok_or_else(unsupported)?;
        // The first buffer is the validity bitmap.
        let values = array.buffer(1).ok_or_else(unsupported)?;
        let at = |buffer: &DeviceBuffer| word(buffer.address());
        let (mut data, mut table) = (0, None);
        match format.layout {
            Layout::Offsets32 | Layout::Offsets64 => {
                data = match array.buffer(2) {
                    Some(bytes) => at(&bytes),
                    // The size is read first.
                    None => word(array.bytes_on(queue)?.address()),
                };
            }
            Layout::Views if array.num_buffers() > 2 => {
                let others = (2..array.num_buffers()).map(|i| array.buffer(i));
                // A view never refers to a buffer that is missing, which is one without bytes.
                let all = others.map(|buffer| buffer.as_ref().map_or(0, at));
                let all = UInt64Array::from_iter_values(all);
                let all = table.insert(queue.device().upload_array_on(&all, queue)?);
                data = all.buffer(1).as_ref().map_or(0, at);
            }
            _ => {}
        }
        let (offset, unit) = (array.offset(), format.unit);
        let values = at(&values) + (offset * format.width) as u64;
        if !values.is_multiple_of(unit as u64) {
            let (device, of) = (queue.device(), array.data_type());
            let what = format!(
                "filter on {device}: values of {of} at {values:#x} are not aligned to {unit} bytes; copy the batch with compact()"
            );
            return Err(Error::InvalidArgument(what.into()));
        }
        let validity = array.validity();
        let column = Column {
            rows: array.len() as u64,
            family: Kind::of(array.data_type()).map_or(0, |kind| kind.family),
            layout: format.layout as u64,
            width: format.width as u64,
            values,
            first_bit: offset as u64,
            data,
            bits: validity.as_ref().map_or(0, |bits| at(bits.buffer())),
            bit: validity.map_or(0, |bits| bits.bit_offset() as u64),
        };
        Ok(Self {
            array,
            format,
            column,
            _table: table,
        })
    }
}

/// Uploads text or binary for kernels that compare with it. Without bytes it needs no memory.
pub(crate) fn upload_text(bytes: &[u8], queue: &Queue) -> Result<Option<DeviceBuffer>> {
    let array = BinaryArray::from_vec(vec![bytes]);
    let array = queue.device().upload_array_on(&array, queue)?;
    Ok(array.buffer(2).filter(|buffer| !buffer.is_empty()))
}
