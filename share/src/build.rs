//! Arrays in memory that a publisher described: every position and length is checked against the memory's true size.

use std::collections::VecDeque;
use std::fmt;

use arrow_device::{DeviceArray, DeviceBuffer, DeviceRecordBatch, Validity};
use arrow_schema::{DataType, FieldRef, SchemaRef};

use crate::error::{Error, Result};
use crate::manifest::{Parts, Slot, children, is_cut, slots};

/// A walk over a description, and what it has not taken of it yet.
#[derive(Debug)]
pub(crate) struct Building<'a> {
    /// All of the allocation.
    pub(crate) memory: &'a DeviceBuffer,
    pub(crate) parts: Parts,
    /// All dictionaries of the schema, with the values that have come.
    pub(crate) dictionaries: &'a [(Slot, Option<DeviceArray>)],
    /// The number of the next dictionary.
    pub(crate) dictionary: usize,
    /// Whether the null counts are believed.
    pub(crate) trusted: bool,
}

impl Building<'_> {
    /// Makes a batch.
    ///
    /// # Safety
    /// The values in the memory are valid for their types, or they are [validated](DeviceArray::validated) before anything else is done with
    /// the batch than dropping it. If they are trusted, the null counts are right.
    pub(crate) unsafe fn batch(mut self, schema: &SchemaRef) -> Result<DeviceRecordBatch> {
        let rows = count(self.parts.rows)?;
        // SAFETY: the caller guarantees what `array` asks for.
        let column = |field: &FieldRef| unsafe { self.array(field.data_type()) };
        let columns = schema.fields().iter().map(column);
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let device = self.memory.device();
        self.end()?;
        DeviceRecordBatch::try_new_with_rows(device, schema.clone(), &columns, rows)
            .map_err(refused)
    }

    /// Makes the values of a dictionary.
    ///
    /// # Safety
    /// As [`batch`](Self::batch).
    pub(crate) unsafe fn values(mut self, data_type: &DataType) -> Result<DeviceArray> {
        // SAFETY: the caller guarantees what `array` asks for.
        let array = unsafe { self.array(data_type) }?;
        self.end()?;
        Ok(array)
    }

    /// # Safety
    /// As [`batch`](Self::batch).
    unsafe fn array(&mut self, data_type: &DataType) -> Result<DeviceArray> {
        let layout = arrow_data::layout(data_type);
        let [rows, nulls] = take(&mut self.parts.nodes)?;
        let [first, bit] = take(&mut self.parts.starts)?;
        let (len, first) = (count(rows)?, count(first)?);
        if is_cut(data_type) && first != 0 {
            return Error::broken(format!("{data_type} does not start at row 0"));
        }
        // From the buffers' start to the last row.
        let all = first.checked_add(len);
        let all = all.ok_or_else(|| Error::protocol("more rows than there can be"))?;
        let mut validity = None;
        if layout.can_contain_null_mask {
            if let Some(bits) = self.buffer()? {
                let skip = count(bit)?.checked_sub(first);
                let skip = skip.ok_or_else(|| Error::protocol("a bitmap starts before it"))?;
                let bits = Validity::new(bits, skip, all).map_err(refused)?;
                validity = Some(match usize::try_from(nulls) {
                    Ok(nulls) if self.trusted && first == 0 => {
                        if nulls > len {
                            return Error::broken("more nulls than rows");
                        }
                        // SAFETY: the caller vouches for the null counts if they are trusted.
                        unsafe { bits.with_null_count(nulls) }
                    }
                    _ => bits,
                });
            }
        }
        let mut buffers = layout.buffers.len();
        if layout.variadic {
            buffers = buffers.saturating_add(count(take(&mut self.parts.variadic)?)?);
        }
        let buffers = (0..buffers).map(|_| self.buffer());
        let buffers = buffers.collect::<Result<Vec<_>>>()?;
        let children = match data_type {
            DataType::Dictionary(_, values) => vec![self.dictionary(values)?],
            _ => {
                let children = children(data_type);
                // SAFETY: the caller guarantees the same of all descendants.
                let child = |child| unsafe { self.array(child) };
                children.map(child).collect::<Result<Vec<_>>>()?
            }
        };
        // SAFETY: the caller guarantees the values, or checks them first. The null count was checked against the rows above; where it is
        // not trusted, it is not known.
        let array = unsafe {
            DeviceArray::from_parts(
                self.memory.device(),
                data_type.clone(),
                all,
                validity,
                &buffers,
                &children,
            )
        };
        let array = array.map_err(refused)?;
        Ok(if first > 0 {
            array.slice(first, len)?
        } else {
            array
        })
    }

    fn buffer(&mut self) -> Result<Option<DeviceBuffer>> {
        let [at, bytes] = take(&mut self.parts.buffers)?;
        let (at, bytes) = (count(at)?, count(bytes)?);
        let some = (bytes > 0).then(|| self.memory.slice(at, bytes));
        some.transpose().map_err(refused)
    }

    /// Returns the values of the next dictionary, which came before.
    fn dictionary(&mut self, values: &DataType) -> Result<DeviceArray> {
        let mut inside = Vec::new();
        slots(values, &mut inside);
        self.dictionary += inside.len();
        let found = self.dictionaries.get(self.dictionary);
        self.dictionary += 1;
        let found = found.and_then(|(_, values)| values.clone());
        found.ok_or_else(|| Error::protocol("a dictionary has not come before its keys"))
    }

    /// Refuses a description that has more than the schema.
    fn end(self) -> Result<()> {
        let parts = self.parts;
        match parts.nodes.len() + parts.buffers.len() + parts.variadic.len() {
            0 => Ok(()),
            _ => Error::broken("more arrays or buffers than the schema has"),
        }
    }
}

fn take<T>(from: &mut VecDeque<T>) -> Result<T> {
    let missing = || Error::protocol("fewer arrays or buffers than the schema has");
    from.pop_front().ok_or_else(missing)
}

fn count<T: Copy + fmt::Display + TryInto<usize>>(number: T) -> Result<usize> {
    let count = number.try_into();
    count.map_err(|_| Error::protocol(format!("a length or start of {number}")))
}

/// What the core refuses of a description is the peer's mistake.
fn refused(e: arrow_device::Error) -> Error {
    match e {
        arrow_device::Error::InvalidArgument(_) | arrow_device::Error::InvalidInput { .. } => {
            Error::protocol(e.to_string())
        }
        e => Error::Device(e),
    }
}
