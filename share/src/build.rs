//! Arrays in memory that a publisher described: every position and length is checked against the memory's true size.

use std::fmt;

use arrow_device::{Device, DeviceArray, DeviceBuffer, DeviceRecordBatch, Validity};
use arrow_schema::{DataType, SchemaRef};

use crate::error::{Error, Result};
use crate::manifest::{Parts, children, is_cut, slots};

/// What is built, and in what.
#[derive(Clone, Copy)]
pub(crate) struct Building<'a> {
    pub(crate) device: &'a Device,
    /// All of the allocation.
    pub(crate) memory: &'a DeviceBuffer,
    /// The values of all dictionaries of the schema that have come.
    pub(crate) dictionaries: &'a [Option<DeviceArray>],
    /// Whether the null counts are believed.
    pub(crate) trusted: bool,
}

impl<'a> Building<'a> {
    /// Makes a batch.
    ///
    /// # Safety
    /// The values in the memory are valid for their types, or they are [validated](DeviceArray::validated) before anything else is done with
    /// the batch than dropping it. With `trusted`, the null counts are right.
    pub(crate) unsafe fn batch(
        self,
        parts: &'a Parts,
        schema: &SchemaRef,
    ) -> Result<DeviceRecordBatch> {
        let mut next = self.start(parts, 0);
        let columns = schema.fields().iter().map(|field| {
            // SAFETY: the caller guarantees what `array` asks for.
            unsafe { next.array(field.data_type()) }?
                .with_field(field.clone())
                .map_err(Error::from)
        });
        let columns = columns.collect::<Result<Vec<_>>>()?;
        next.end()?;
        let rows = count(parts.rows)?;
        let batch =
            DeviceRecordBatch::try_new_with_rows(self.device, schema.clone(), &columns, rows);
        batch.map_err(refused)
    }

    /// Makes the values of a dictionary, whose own dictionaries begin at `first`.
    ///
    /// # Safety
    /// As [`batch`](Self::batch).
    pub(crate) unsafe fn values(
        self,
        parts: &'a Parts,
        data_type: &DataType,
        first: usize,
    ) -> Result<DeviceArray> {
        let mut next = self.start(parts, first);
        // SAFETY: the caller guarantees what `array` asks for.
        let array = unsafe { next.array(data_type) }?;
        next.end()?;
        Ok(array)
    }

    fn start(self, parts: &'a Parts, first: usize) -> Next<'a> {
        Next {
            of: self,
            nodes: &parts.nodes,
            buffers: &parts.buffers,
            variadic: &parts.variadic,
            starts: &parts.starts,
            dictionary: first,
        }
    }
}

/// What a walk has not taken yet.
struct Next<'a> {
    of: Building<'a>,
    nodes: &'a [[i64; 2]],
    buffers: &'a [[i64; 2]],
    variadic: &'a [i64],
    starts: &'a [[u64; 2]],
    /// The number of the next dictionary.
    dictionary: usize,
}

impl Next<'_> {
    /// # Safety
    /// As [`Building::batch`].
    unsafe fn array(&mut self, data_type: &DataType) -> Result<DeviceArray> {
        let layout = arrow_data::layout(data_type);
        let ([rows, nulls], [first, bit]) = (take(&mut self.nodes)?, take(&mut self.starts)?);
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
                    Ok(nulls) if self.of.trusted && first == 0 => {
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
        let variadic = if layout.variadic {
            count(take(&mut self.variadic)?)?
        } else {
            0
        };
        if variadic > self.buffers.len() {
            return Err(missing());
        }
        let buffers = (0..layout.buffers.len() + variadic).map(|_| self.buffer());
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
                self.of.device,
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
        let [at, bytes] = take(&mut self.buffers)?;
        let (at, bytes) = (count(at)?, count(bytes)?);
        let some = (bytes > 0).then(|| self.of.memory.slice(at, bytes));
        some.transpose().map_err(refused)
    }

    /// Returns the values of the next dictionary, which came before.
    fn dictionary(&mut self, values: &DataType) -> Result<DeviceArray> {
        let mut inside = Vec::new();
        slots(values, &mut inside);
        self.dictionary += inside.len();
        let found = self.of.dictionaries.get(self.dictionary);
        self.dictionary += 1;
        let found = found.and_then(Option::as_ref).cloned();
        found.ok_or_else(|| Error::protocol("a dictionary has not come before its keys"))
    }

    /// Refuses a description that has more than the schema.
    fn end(self) -> Result<()> {
        let left = self.nodes.len() + self.buffers.len() + self.variadic.len();
        match left {
            0 => Ok(()),
            _ => Error::broken("more arrays or buffers than the schema has"),
        }
    }
}

fn take<T: Copy>(from: &mut &[T]) -> Result<T> {
    let (first, rest) = from.split_first().ok_or_else(missing)?;
    *from = rest;
    Ok(*first)
}

fn missing() -> Error {
    Error::protocol("fewer arrays or buffers than the schema has")
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
