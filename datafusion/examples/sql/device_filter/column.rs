//! Columns as arguments of kernels.

use arrow_device::{DeviceArray, DeviceBuffer, Error, Loan, Queue, Result, Validity};
use datafusion::arrow::array::{BinaryArray, UInt64Array};
use datafusion::arrow::datatypes::{DataType, IntervalUnit};

use super::kernels::word;

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

impl Format {
    /// The number that kernels know it by.
    fn layout(self) -> u64 {
        match self {
            Self::Bits | Self::Fixed { .. } => 0,
            Self::Offsets { width: 4 } => 1,
            Self::Offsets { .. } => 2,
            Self::Views => 3,
        }
    }

    /// The bytes of a row's value, offset or view, and those to which it is aligned.
    fn width(self) -> (usize, usize) {
        match self {
            Self::Bits => (0, 1),
            Self::Fixed { width, unit } => (width, unit),
            Self::Offsets { width } => (width, width),
            Self::Views => (16, 8),
        }
    }

    /// Whether rows have bytes of any number.
    pub(crate) fn is_text(self) -> bool {
        matches!(self, Self::Offsets { .. } | Self::Views)
    }
}

/// A column as parameters of kernels.
#[derive(Clone, Copy)]
pub(crate) struct Column {
    pub(crate) rows: u64,
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

/// A column of a batch that is not empty.
pub(crate) struct Input {
    array: DeviceArray,
    format: Format,
    /// The values, offsets or views.
    values: DeviceBuffer,
    validity: Option<Validity>,
    /// The buffers that views refer to, and their addresses in device memory.
    buffers: Vec<DeviceBuffer>,
}

/// A column that is lent to a queue. Its memory is not freed before the kernels are done that were queued until this is dropped.
pub(crate) struct Lent<'a> {
    pub(crate) column: Column,
    _loans: Vec<Loan<'a>>,
}

impl Input {
    /// Of views, this uploads the addresses of their buffers.
    pub(crate) fn new(array: DeviceArray, queue: &Queue) -> Result<Self> {
        let unsupported = || {
            Error::InvalidArgument(format!("the plugin's kernels do not support {array:?}").into())
        };
        let format = Format::of(array.data_type()).ok_or_else(unsupported)?;
        // The first buffer is the validity bitmap.
        let values = array.buffer(1).ok_or_else(unsupported)?;
        let mut buffers = Vec::new();
        if format == Format::Views && array.num_buffers() > 2 {
            // A view never refers to a buffer that is missing, which is one without bytes.
            let others: Vec<_> = (2..array.num_buffers()).map(|i| array.buffer(i)).collect();
            let of =
                |buffer: &Option<DeviceBuffer>| buffer.as_ref().map_or(0, |b| word(b.address()));
            let table = UInt64Array::from_iter_values(others.iter().map(of));
            let table = queue.device().upload_array_on(&table, queue)?;
            let others = others.into_iter().flatten();
            buffers = table.buffer(1).into_iter().chain(others).collect();
        }
        Ok(Self {
            validity: array.validity(),
            array,
            format,
            values,
            buffers,
        })
    }

    pub(crate) fn array(&self) -> &DeviceArray {
        &self.array
    }

    /// Lends the column to kernels, for which the queue waits until its memory is ready.
    pub(crate) fn on(&self, queue: &Queue) -> Result<Lent<'_>> {
        let mut loans = Vec::new();
        let mut lend = |loan| {
            loans.push(loan);
            loans
                .last()
                .map_or(0, |loan: &Loan<'_>| word(loan.address()))
        };
        let (width, unit) = self.format.width();
        let offset = self.array.offset();
        let values = lend(self.values.on(queue)?) + (offset * width) as u64;
        let bits = match &self.validity {
            Some(validity) => lend(validity.buffer().on(queue)?),
            None => 0,
        };
        let mut data = match self.format {
            Format::Offsets { .. } => lend(self.array.bytes_on(queue)?),
            _ => 0,
        };
        for (i, buffer) in self.buffers.iter().enumerate() {
            let at = lend(buffer.on(queue)?);
            data = if i == 0 { at } else { data };
        }
        if !values.is_multiple_of(unit as u64) {
            let what = format!(
                "filter on {}: values of {} at {values:#x} are not aligned to {unit} bytes; copy the batch with compact()",
                queue.device(),
                self.array.data_type()
            );
            return Err(Error::InvalidArgument(what.into()));
        }
        let column = Column {
            rows: self.array.len() as u64,
            layout: self.format.layout(),
            width: width as u64,
            values,
            first_bit: offset as u64,
            data,
            bits,
            bit: self.validity.as_ref().map_or(0, |v| v.bit_offset() as u64),
        };
        Ok(Lent {
            column,
            _loans: loans,
        })
    }
}

/// Uploads text or binary for kernels that compare with it. Without bytes it needs no memory.
pub(crate) fn upload_text(bytes: &[u8], queue: &Queue) -> Result<Option<DeviceBuffer>> {
    let array = BinaryArray::from_vec(vec![bytes]);
    let array = queue.device().upload_array_on(&array, queue)?;
    Ok(array.buffer(2).filter(|buffer| !buffer.is_empty()))
}
