//! Arrays from buffers, and from other arrays. Nothing is copied or allocated on the device, and nothing waits.

use std::sync::Arc;

use arrow_schema::{DataType, FieldRef, Fields};
use smallvec::smallvec;

use crate::data::array::DeviceArray;
use crate::data::layout::{
    BufferKind, Layout, Nesting, check_rows, check_type, child_field, child_type,
};
use crate::data::node::{Buffers, Node, NodeBuffer, NullCount};
use crate::data::validity::Validity;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::DeviceBuffer;

impl DeviceArray {
    /// Makes an array of a type for which every bit pattern is a valid value (integers, floats, decimals, dates,
    /// times, intervals, booleans, fixed-size binary) from its buffers, at offset 0.
    ///
    /// `validity` says which rows are null; without it no row is null. To take over the nulls of an input, pass
    /// its [`validity`](Self::validity), or use [`with_values`](Self::with_values). The null count is known only
    /// if the validity knows it; otherwise operations that need it count it.
    ///
    /// Nothing is copied. An export may have to copy the bitmap if it starts within a byte; see
    /// [`export`](Self::export).
    ///
    /// ```
    /// use arrow_buffer::Buffer;
    /// use arrow_device::{DeviceArray, DeviceBuffer};
    /// use arrow_schema::DataType;
    /// let values = DeviceBuffer::from(Buffer::from_vec(vec![1i32, 2, 3]));
    /// let array = DeviceArray::from_values(DataType::Int32, 3, values, None)?;
    /// assert_eq!(array.to_host()?.len(), 3);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for any other type, if the validity has another number of rows, if the
    /// values are too short, or if the buffers are on two devices.
    pub fn from_values(
        data_type: DataType,
        length: usize,
        values: DeviceBuffer,
        validity: Option<Validity>,
    ) -> Result<Self> {
        check_type(&data_type)?;
        let layout = Layout::of(&data_type);
        let plain = layout.nesting == Nesting::Leaf && !layout.variadic;
        if !plain || layout.buffers().len() != 2 {
            return Err(Error::argument(format!(
                "{data_type} has more than a buffer of values; use DeviceArray::from_parts"
            )));
        }
        let (device, operation) = (values.device().clone(), "DeviceArray::from_values");
        let others = [Some(values)];
        // SAFETY: every bit pattern is a value of these types.
        unsafe {
            Self::assemble(
                operation,
                &device,
                data_type,
                length,
                validity,
                &others,
                &[],
            )
        }
    }

    /// Makes a null array of `rows` rows, which has no memory.
    ///
    /// ```
    /// use arrow_device::{DeviceArray, Devices};
    /// let nulls = DeviceArray::new_null(&Devices::cpu(), 3)?;
    /// assert_eq!(nulls.to_host()?.len(), 3);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for more than `i64::MAX` rows.
    pub fn new_null(device: &Device, rows: usize) -> Result<Self> {
        check_rows(rows)?;
        let node = Node::new(DataType::Null, rows, Buffers::new(), Vec::new());
        Ok(Self::from_node(device.clone(), Arc::new(node)))
    }

    /// Makes a struct array of `columns`, one for each field. It shares their memory, which may come from several
    /// allocations and be ready at different times. `validity` says which rows of the struct are null; without it none is.
    ///
    /// For a struct of rows that cannot be null, or without columns, see
    /// [`DeviceRecordBatch::try_new_with_rows`](crate::DeviceRecordBatch::try_new_with_rows), which
    /// [becomes](From) an array.
    ///
    /// ```
    /// use arrow_array::Int32Array;
    /// use arrow_device::{DeviceArray, Devices};
    /// use arrow_schema::{DataType, Field, Fields};
    /// let device = Devices::cpu();
    /// let xs = device.upload_array(&Int32Array::from(vec![1, 2, 3]))?;
    /// let ys = device.upload_array(&Int32Array::from(vec![Some(4), None, Some(6)]))?;
    /// let field = |name, nullable| Field::new(name, DataType::Int32, nullable);
    /// let fields = Fields::from(vec![field("x", false), field("y", true)]);
    /// let points = DeviceArray::new_struct(fields, &[xs, ys.clone()], ys.validity())?;
    /// assert_eq!(points.to_host()?.null_count(), 1);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the number, types, lengths or devices of the columns, or the length or
    /// device of the validity, do not fit together; if there is neither a column nor a validity; and if a column whose
    /// field is not nullable is known to have nulls in rows that are not null in the struct. Null counts that are not
    /// known are not checked.
    pub fn new_struct(
        fields: Fields,
        columns: &[DeviceArray],
        validity: Option<Validity>,
    ) -> Result<Self> {
        let operation = "DeviceArray::new_struct";
        let (device, rows) = match (columns.first(), &validity) {
            (Some(first), _) => (first.device().clone(), first.len()),
            (None, Some(validity)) => (validity.buffer.device().clone(), validity.len),
            (None, None) => {
                return Err(Error::argument(format!(
                    "{operation}: without columns and validity, device and number of rows are unknown; use \
                     DeviceRecordBatch::try_new_with_rows and convert the batch"
                )));
            }
        };
        Self::of_columns(operation, &device, fields, rows, validity, columns)
    }

    /// A struct of these columns.
    pub(super) fn of_columns(
        operation: &str,
        device: &Device,
        fields: Fields,
        rows: usize,
        validity: Option<Validity>,
        columns: &[DeviceArray],
    ) -> Result<Self> {
        let data_type = DataType::Struct(fields);
        // SAFETY: a struct has no values of its own, and those of its children are valid already.
        unsafe { Self::assemble(operation, device, data_type, rows, validity, &[], columns) }
    }

    /// Makes a fixed-size list array: row `i` is the `size` rows of `values` from `i * size` on. It shares the memory of
    /// `values`. `validity` says which lists are null; without it none is. The values of a null list are there all the
    /// same.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use arrow_array::Float32Array;
    /// use arrow_device::{DeviceArray, Devices};
    /// use arrow_schema::{DataType, Field};
    /// let values = Float32Array::from(vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    /// let values = Devices::cpu().upload_array(&values)?;
    /// let item = Arc::new(Field::new("item", DataType::Float32, false));
    /// let vectors = DeviceArray::new_fixed_size_list(item, 3, 2, &values, None)?;
    /// assert_eq!((vectors.len(), vectors.child(0).map(|v| v.len())), (2, Some(6)));
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] if `size` is negative, and [`Error::InvalidArgument`] if `values` does not have `rows * size` rows or is not of
    /// the field's type, if the length or device of the validity does not fit, and if the field is not nullable but
    /// `values` is known to have nulls in lists that are not null. A null count that is not known is not checked.
    pub fn new_fixed_size_list(
        field: FieldRef,
        size: i32,
        rows: usize,
        values: &DeviceArray,
        validity: Option<Validity>,
    ) -> Result<Self> {
        let (operation, device) = ("DeviceArray::new_fixed_size_list", values.device());
        let data_type = DataType::FixedSizeList(field, size);
        let child = std::slice::from_ref(values);
        // SAFETY: a fixed-size list has no values of its own, and those of its child are valid already.
        unsafe { Self::assemble(operation, device, data_type, rows, validity, &[], child) }
    }

    /// Makes an array of any type from its buffers and children, at offset 0.
    ///
    /// The buffers are in the order of the C data interface; those of a view type are the bitmap, the views and
    /// all data buffers. A validity bitmap starts at bit 0 of its buffer. A buffer without bytes may be `None`. A
    /// dictionary's values are its child.
    ///
    /// `nulls` is the number of null rows in the array's validity bitmap, or `None` if it is not known. It is only
    /// checked against the number of rows: exports state it, and arrow-rs relies on it.
    ///
    /// # Safety
    /// - The values must be valid for the type once the buffers are ready: offsets ascend and stay inside the
    ///   values, text is UTF-8, and keys, type ids, views and run ends refer to values that exist. Sizes that
    ///   follow from the type are checked.
    /// - `nulls`, if it is given, is the number of unset bits among the first `length` bits of the bitmap.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if counts, lengths, types or devices do not fit together.
    pub unsafe fn from_parts(
        data_type: DataType,
        length: usize,
        nulls: Option<usize>,
        buffers: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        let operation = "DeviceArray::from_parts";
        check_type(&data_type)?;
        let of_buffers = buffers.iter().flatten().map(DeviceBuffer::device);
        let mut devices = of_buffers.chain(children.iter().map(Self::device));
        let Some(device) = devices.next() else {
            return Err(Error::argument(format!(
                "{operation}: there is neither a buffer nor a child, so the device is unknown"
            )));
        };
        let bitmaps = usize::from(Layout::of(&data_type).has_validity());
        let Some((bitmap, others)) = buffers.split_at_checked(bitmaps) else {
            return Err(Error::argument(format!(
                "{operation}: the first buffer of {data_type} is its bitmap, which may be None"
            )));
        };
        let bitmap = bitmap.first().and_then(Option::as_ref);
        let may_have_nulls = bitmap.is_some() || data_type == DataType::Null;
        let most = if may_have_nulls { length } else { 0 };
        if let Some(nulls) = nulls.filter(|nulls| *nulls > most) {
            return Err(Error::argument(format!(
                "{operation}: {nulls} nulls in {length} rows of {data_type}, which can have {most}"
            )));
        }
        let validity = bitmap.map(|buffer| Validity {
            buffer: buffer.clone(),
            bit_offset: 0,
            len: length,
            nulls,
        });
        // SAFETY: the caller guarantees the values and the null count (see `# Safety`).
        unsafe {
            Self::assemble(
                operation, device, data_type, length, validity, others, children,
            )
        }
    }

    /// Makes an array at offset 0. `others` are the buffers without the validity bitmap.
    ///
    /// # Safety
    /// The values in `others` and their relation to the children must be valid, as for [`from_parts`](Self::from_parts). A
    /// null count that the validity knows is right.
    unsafe fn assemble(
        operation: &str,
        device: &Device,
        data_type: DataType,
        rows: usize,
        validity: Option<Validity>,
        others: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        check_type(&data_type)?;
        check_rows(rows)?;
        let layout = Layout::of(&data_type);
        let wrong = |what: String| {
            let what = format!("{operation} on {device}: {data_type} of {rows} rows: {what}");
            Error::argument(what)
        };
        let kinds = &layout.buffers()[usize::from(layout.has_validity())..];
        let fits = others.len() == kinds.len() || layout.variadic && others.len() > kinds.len();
        if !fits || children.len() != layout.n_children() {
            return Err(wrong(format!(
                "{} buffers after the bitmap and {} children, not {} and {}",
                others.len(),
                children.len(),
                kinds.len(),
                layout.n_children()
            )));
        }
        let (bitmap, bit_offset, nulls) = match &validity {
            Some(validity) if validity.len != rows => {
                let what = format!("the validity bitmap has {} rows", validity.len);
                return Err(wrong(what));
            }
            Some(validity) => (Some(&validity.buffer), validity.bit_offset, validity.nulls),
            None => (None, 0, Some(0)),
        };
        let mut all = Buffers::new();
        let mut add = |kind: Option<BufferKind>, skip: usize, buffer: Option<&DeviceBuffer>| {
            let needed = kind.and_then(|kind| kind.bytes(rows.saturating_add(skip)));
            let needed = needed.filter(|_| rows > 0).unwrap_or(Ok(0))?;
            let bytes = buffer.map_or(0, DeviceBuffer::len);
            match buffer.map(DeviceBuffer::device) {
                Some(other) if other != device => Err(wrong(format!("a buffer is on {other}"))),
                _ if bytes < needed => Err(wrong(format!(
                    "a buffer has {bytes} bytes, {needed} needed"
                ))),
                _ => {
                    all.push(NodeBuffer::from(buffer));
                    Ok(())
                }
            }
        };
        if layout.has_validity() {
            add(bitmap.map(|_| BufferKind::Validity), bit_offset, bitmap)?;
        }
        for (i, buffer) in others.iter().enumerate() {
            add(kinds.get(i).copied(), 0, buffer.as_ref())?;
        }
        if layout.variadic {
            all.push(NodeBuffer::absent());
        }
        // The rows that children must have, and the most of them whose nulls do not show, because the parent is null there.
        let times = match layout.nesting {
            Nesting::RowByRow => Some(1),
            Nesting::Times(n) => Some(n as usize),
            _ => None,
        };
        let too_many = || wrong("its child would have too many rows".into());
        let exact = times
            .map(|n| rows.checked_mul(n).ok_or_else(too_many))
            .transpose()?;
        let masked = nulls.unwrap_or(rows).saturating_mul(times.unwrap_or(1));
        for (i, child) in children.iter().enumerate() {
            let field = child_field(&data_type, i);
            let is_nullable = field.is_none_or(|field| field.is_nullable());
            let fault = match child.null_count() {
                _ if child.device() != device => {
                    format!("is on {}; copy it with to_device", child.device())
                }
                _ if child_type(&data_type, i) != Some(child.data_type()) => {
                    format!(
                        "is of type {}; pass the field of its type",
                        child.data_type()
                    )
                }
                _ if exact.is_some_and(|rows| child.len() != rows) => {
                    let rows = exact.unwrap_or(0);
                    format!("has {} rows, not {rows}; slice it", child.len())
                }
                // Children of a union have nulls in rows of other children, and lists need not refer to all rows.
                Some(n)
                    if n > masked && !is_nullable && exact.is_some() && layout.has_validity() =>
                {
                    format!("has {n} nulls, but its field is not nullable; make the field nullable")
                }
                _ => continue,
            };
            let name = field.map_or("dictionary", |field| field.name());
            return Err(wrong(format!("the array of '{name}' {fault}")));
        }
        let children = children.iter().map(|child| child.node().clone());
        let mut node = Node::new(data_type, rows, all, children.collect());
        node.validity_offset = bit_offset;
        node.nulls = NullCount::from(nulls);
        Ok(Self::from_node(device.clone(), Arc::new(node)))
    }
}

/// A struct without a validity bitmap over `children`, which are on `device` and have `rows` rows.
pub(crate) fn struct_array(
    device: &Device,
    data_type: DataType,
    rows: usize,
    children: &[DeviceArray],
) -> DeviceArray {
    let children = children.iter().map(|child| child.node().clone());
    let bitmap = smallvec![NodeBuffer::absent()];
    let node = Node::new(data_type, rows, bitmap, children.collect());
    DeviceArray::from_node(device.clone(), Arc::new(node))
}

#[cfg(test)]
mod tests;
