//! Columns as arguments of kernels.

use arrow_device::{DeviceArray, DeviceBuffer, Error, Loan, Queue, Result, Validity};
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

/// A column as parameters of kernels.
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

/// A column of a batch that is not empty.
pub(crate) struct Input {
    array: DeviceArray,
    pub(crate) format: Format,
    /// The values, offsets or views.
    values: DeviceBuffer,
    validity: Option<Validity>,
    /// The buffers that views refer to, and their addresses in device memory.
    buffers: Vec<DeviceBuffer>,
}

/// A column that is lent to a queue. Its memory is not freed before the kernels are done that were queued until this is dropped.
#[derive(Default)]
pub(crate) struct Lent<'a> {
    pub(crate) column: Column,
    _loans: Vec<Loan<'a>>,
}

impl Input {
    /// Of views, this uploads the addresses of their buffers.
    pub(crate) fn new(array: DeviceArray, queue: &Queue) -> Result<Self> {
        let unsupported = || Error::InvalidArgument(format!("no kernels for {array:?}").into());
        let format = Format::of(array.data_type()).ok_or_else(unsupported)?;
        // The first buffer is the validity bitmap.
        let values = array.buffer(1).ok_or_else(unsupported)?;
        let mut buffers = Vec::new();
        if format.layout == Layout::Views && array.num_buffers() > 2 {
            // A view never refers to a buffer that is missing, which is one without bytes.
            let others: Vec<_> = (2..array.num_buffers()).map(|i| array.buffer(i)).collect();
            let at = others
                .iter()
                .map(|buffer: &Option<DeviceBuffer>| buffer.as_ref());
            let at = at.map(|buffer| buffer.map_or(0, |buffer| word(buffer.address())));
            let table = UInt64Array::from_iter_values(at);
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

    /// As [`on`](Self::on), or a column of no bytes.
    pub(crate) fn lend<'a>(input: Option<&'a Self>, queue: &Queue) -> Result<Lent<'a>> {
        input.map_or_else(|| Ok(Lent::default()), |input| input.on(queue))
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
        let (width, unit) = (self.format.width, self.format.unit);
        let offset = self.array.offset();
        let values = lend(self.values.on(queue)?) + (offset * width) as u64;
        let bits = match &self.validity {
            Some(validity) => lend(validity.buffer().on(queue)?),
            None => 0,
        };
        let mut data = match self.format.layout {
            Layout::Offsets32 | Layout::Offsets64 => lend(self.array.bytes_on(queue)?),
            _ => 0,
        };
        for (i, buffer) in self.buffers.iter().enumerate() {
            let at = lend(buffer.on(queue)?);
            data = if i == 0 { at } else { data };
        }
        if !values.is_multiple_of(unit as u64) {
            let (device, of) = (queue.device(), self.array.data_type());
            let what = format!(
                "filter on {device}: values of {of} at {values:#x} are not aligned to {unit} bytes; copy the batch with compact()"
            );
            return Err(Error::InvalidArgument(what.into()));
        }
        let column = Column {
            rows: self.array.len() as u64,
            family: Kind::of(self.array.data_type()).map_or(0, |kind| kind.family),
            layout: self.format.layout as u64,
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
