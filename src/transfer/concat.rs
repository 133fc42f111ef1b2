//! Concatenation of arrays and batches of one device.

use std::sync::Arc;

use arrow_schema::{DataType, SchemaRef};

use crate::data::fit::Fit;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{Device, Queue};
use crate::error::{Error, Result, bail};
use crate::memory::queue_for;
use crate::transfer::copy::copy;
use crate::transfer::plan::Scope;

impl DeviceArray {
    /// Copies the rows of `arrays`, one array after the other, to one fresh allocation on their device. Their types must
    /// [fit](crate::DeviceRecordBatchReader#schemas) that of the first, which the result has. The result is laid out as that of
    /// [`compact`](Self::compact): offsets start at 0, null counts are known, and every buffer is padded with zeros to a multiple
    /// of 64 bytes. It has the field of the first array, nullable if there are nulls.
    ///
    /// Dictionaries, the children of list views and dense unions, and the data buffers of view arrays are kept once if
    /// several arrays share their memory, and are otherwise copied whole, one after the other. Where the host can read the
    /// memory, a dictionary of types without children whose values equal those of the one kept before it, nulls included, is not
    /// kept again. Elsewhere that would take a read, so equal values in other memory are not merged, and nowhere are single values.
    ///
    /// If the host cannot read the memory, values are copied on the device with one list of copies, which may run after
    /// this call returns. First the ends of binary, text, list and map arrays are read, all run ends, and the type ids and offsets of
    /// dense unions whose children are not shared: one read for
    /// each level, all columns of all arrays together. So is what must be rewritten: offsets, of all arrays except the first;
    /// dictionary keys, views and list-view offsets that refer to something that is not shared, of all arrays except the
    /// first; bitmaps that do not begin or end at a whole byte, or whose nulls are not counted yet. The
    /// host also makes the run ends, and the set bits of arrays without a bitmap where another array has one. Each read is
    /// one host wait. If the host can read the memory, this waits until all arrays are ready.
    ///
    /// ```
    /// # use arrow_array::{Array, record_batch};
    /// # use arrow_device::{DeviceArray, Devices, Error};
    /// let batch = record_batch!(("name", Utf8, ["a", "b", "c"]))?;
    /// let names = Devices::cpu().upload(&batch)?.column(0)?;
    /// let again = DeviceArray::concat(&[&names.slice(1, 2)?, &names])?;
    /// assert_eq!((again.len(), again.to_host()?.len()), (5, 5));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if there is no array, if types do not fit or devices differ, or if the result has more
    /// values than its offsets, run ends or dictionary keys can express; each names the field. Also returns the errors of
    /// [`compact`](Self::compact). Nothing stays allocated then.
    pub fn concat(arrays: &[&Self]) -> Result<Self> {
        let device = device_of(arrays)?;
        let first = arrays[0];
        for (i, array) in arrays.iter().enumerate() {
            let (got, declared) = (array.data_type(), first.data_type());
            if got != declared {
                let (path, rows) = (format!("concat on {device}: array"), format!("array {i}"));
                let fit = Fit(&rows, "array 0");
                fit.types(&path, array.view(), [got, declared], true)?;
            }
        }
        let queue = device.default_queue();
        let node = copy(arrays, first.data_type(), Scope::Compact, &queue)?;
        let whole = first.like(device.clone(), node);
        let nulls = whole.null_count() != Some(0) && *whole.data_type() != DataType::Null;
        match whole.field() {
            Some(field) if nulls && !field.is_nullable() => {
                let field = field.as_ref().clone().with_nullable(true);
                whole.with_field(Arc::new(field))
            }
            _ => Ok(whole),
        }
    }
}

impl DeviceRecordBatch {
    /// Copies the rows of `batches`, one batch after the other, to one fresh allocation on their device, on `queue` or the device's default
    /// queue; see [`DeviceArray::concat`]. The result has `schema`, which the types of the columns must fit, whatever they are called.
    ///
    /// ```
    /// # use arrow_array::record_batch;
    /// # use arrow_device::{DeviceRecordBatch, Devices, Error};
    /// let batch = record_batch!(("id", Int64, [1, 2]), ("name", Utf8, ["a", "b"]))?;
    /// let up = Devices::cpu().upload(&batch)?;
    /// let twice = DeviceRecordBatch::concat(&batch.schema(), &[up.clone(), up], None)?;
    /// assert_eq!(twice.slice(2, 2)?.to_host()?, batch);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`DeviceArray::concat`]. Also returns [`Error::InvalidArgument`] if a batch has another number of columns than
    /// the schema, if a column whose field is not nullable has nulls, or if the queue belongs to another device.
    pub fn concat<'a>(
        schema: &SchemaRef,
        batches: &[Self],
        queue: impl Into<Option<&'a Queue>>,
    ) -> Result<Self> {
        let arrays: Vec<_> = batches.iter().map(Self::as_struct).collect();
        let device = device_of(&arrays)?;
        let queue = &queue_for(queue.into(), device)?;
        for (i, array) in arrays.iter().enumerate() {
            let (got, declared) = (array.num_children(), schema.fields().len());
            if got != declared {
                bail!("concat on {device}: batch {i} has {got} columns, the schema {declared}");
            }
            for (k, field) in schema.fields().iter().enumerate() {
                let view = array.view().child(k);
                let (got, declared) = (&view.node.data_type, field.data_type());
                if got != declared {
                    let path = format!("concat on {device}: column '{}'", field.name());
                    let batch = format!("batch {i}");
                    let fit = Fit(&batch, "the schema");
                    fit.types(&path, view, [got, declared], true)?;
                }
            }
        }
        let root = DataType::Struct(schema.fields().clone());
        let node = copy(&arrays, &root, Scope::Compact, queue)?;
        let array = DeviceArray::from_node(device.clone(), node);
        for (field, column) in schema.fields().iter().zip(&array.node().children) {
            let nulls = column.nulls.get().unwrap_or(0);
            if !field.is_nullable() && nulls > 0 && !column.layout.is_null_type() {
                let name = field.name();
                bail!(
                    "concat on {device}: column '{name}' has {nulls} nulls, but its field is not nullable: use a schema whose field is"
                );
            }
        }
        Ok(Self::from_struct(schema.clone(), array))
    }
}

/// The device of the inputs, of which there is at least one.
fn device_of<'a>(inputs: &[&'a DeviceArray]) -> Result<&'a Device> {
    let none = "concat: there is nothing to concatenate, so type and device are unknown; pass at least one";
    let first = inputs.first().ok_or_else(|| Error::argument(none))?;
    let device = first.device();
    match inputs.iter().position(|input| input.device() != device) {
        None => Ok(device),
        Some(i) => {
            let other = inputs[i].device();
            bail!("concat on {device}: input {i} is on {other}; copy it with to_device first")
        }
    }
}
