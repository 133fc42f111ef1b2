//! Arrays from buffers, and from other arrays. Nothing is copied or allocated on the device, and nothing waits.

use std::sync::Arc;

use arrow_schema::DataType;

use crate::data::access::Validity;
use crate::data::array::DeviceArray;
use crate::data::layout::{
    BufferKind, Layout, Nesting, check_rows, check_type, child_field, child_type,
};
use crate::data::node::{Node, NodeBuffer, NullCount};
use crate::device::Device;
use crate::error::{Error, Result, bail};
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
        let layout = Layout::of(&data_type);
        let plain = layout.nesting == Nesting::Leaf && !layout.variadic;
        if !plain || layout.buffers().len() != 2 {
            bail!("{data_type} has more than a buffer of values; use DeviceArray::from_parts");
        }
        let (operation, values) = ("DeviceArray::from_values", [Some(values)]);
        // SAFETY: every bit pattern is a value of these types.
        unsafe { Self::assemble(operation, None, data_type, length, validity, &values, &[]) }
    }

    /// Makes an array of a type whose values are those of its children, a struct or a fixed-size list. It shares the children's memory,
    /// which may come from several allocations and be ready at different times.
    ///
    /// A struct has a child of `length` rows for each field. Row `i` of a fixed-size list of `size` items is the `size` rows of its only
    /// child from `i * size` on. `validity` says which rows are null; without it none is. Null rows have values all the same.
    ///
    /// For a struct of rows that cannot be null, or without children, see
    /// [`DeviceRecordBatch::try_new_with_rows`](crate::DeviceRecordBatch::try_new_with_rows), which
    /// [becomes](From) an array.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use arrow_array::Float32Array;
    /// use arrow_device::{DeviceArray, Devices};
    /// use arrow_schema::{DataType, Field, Fields};
    /// let device = Devices::cpu();
    /// let xs = device.upload_array(&Float32Array::from(vec![1.0, 2.0, 3.0, 4.0]))?;
    /// let ys = device.upload_array(&Float32Array::from(vec![Some(4.0), None, Some(6.0), None]))?;
    /// let field = |name, nullable| Field::new(name, DataType::Float32, nullable);
    /// let fields = Fields::from(vec![field("x", false), field("y", true)]);
    /// let points = DeviceArray::from_children(DataType::Struct(fields), 4, &[xs.clone(), ys.clone()], ys.validity())?;
    /// assert_eq!(points.to_host()?.null_count(), 2);
    ///
    /// let pairs = DataType::FixedSizeList(Arc::new(field("item", false)), 2);
    /// let pairs = DeviceArray::from_children(pairs, 2, &[xs], None)?;
    /// assert_eq!(pairs.to_host()?.len(), 2);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for any other type; if the number, types, lengths or devices of the children, or the length or
    /// device of the validity, do not fit together; if there is neither a child nor a validity; and if a child whose
    /// field is not nullable is known to have nulls in rows that are not null in the array. Null counts that are not
    /// known are not checked. Returns [`Error::InvalidInput`] if a fixed size is negative.
    pub fn from_children(
        data_type: DataType,
        length: usize,
        children: &[DeviceArray],
        validity: Option<Validity>,
    ) -> Result<Self> {
        let operation = "DeviceArray::from_children";
        if Layout::of(&data_type).buffers() != [BufferKind::Validity] {
            bail!("{operation}: {data_type} has values of its own; use DeviceArray::from_parts");
        }
        // SAFETY: these types have no values of their own, and those of the children are valid already.
        unsafe { Self::assemble(operation, None, data_type, length, validity, &[], children) }
    }

    /// Makes an array of any type from its buffers and children, at offset 0.
    ///
    /// `others` are the buffers after the validity bitmap, in the order of the C data interface; those of a view type are the views and
    /// all data buffers. A buffer without bytes may be `None`. A dictionary's values are its child. For whoever
    /// receives arrays as descriptions of memory, [`validated`](Self::validated) checks the values afterwards.
    ///
    /// ```
    /// use arrow_buffer::Buffer;
    /// use arrow_device::{DeviceArray, Devices};
    /// use arrow_schema::DataType;
    /// let parts = [Buffer::from_vec(vec![0i32, 2, 9]), Buffer::from(b"text")];
    /// let parts = parts.map(|part| Some(part.into()));
    /// // SAFETY: the values are checked before anything else is done with the array.
    /// let array = unsafe { DeviceArray::from_parts(&Devices::cpu(), DataType::Utf8, 2, None, &parts, &[]) }?;
    /// assert!(array.validated().is_err()); // the second text ends at byte 9 of 4
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Safety
    /// The values must be valid for the type once the buffers are ready: offsets ascend and stay inside the
    /// values, text is UTF-8, and keys, type ids, views and run ends refer to values that exist. Sizes that
    /// follow from the type are checked. Until the values have been checked, nothing that reads them may be called.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if counts, lengths, types or devices do not fit together.
    pub unsafe fn from_parts(
        device: &Device,
        data_type: DataType,
        length: usize,
        validity: Option<Validity>,
        others: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        let (operation, on) = ("DeviceArray::from_parts", Some(device));
        // SAFETY: the caller guarantees the values (see `# Safety`), and who made the validity the null count.
        unsafe { Self::assemble(operation, on, data_type, length, validity, others, children) }
    }

    /// Makes an array at offset 0, on `device`, or where its parts are. `others` are the buffers
    /// without the validity bitmap.
    ///
    /// # Safety
    /// The values in `others` and their relation to the children must be valid, as for [`from_parts`](Self::from_parts). A
    /// null count that the validity knows is right.
    pub(super) unsafe fn assemble(
        operation: &str,
        device: Option<&Device>,
        data_type: DataType,
        rows: usize,
        validity: Option<Validity>,
        others: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        check_rows(rows)?;
        check_type(&data_type)?;
        let (layout, validity) = (Layout::of(&data_type), validity.as_ref());
        let bitmap = validity.map(|validity| &validity.buffer);
        let buffers = others.iter().flatten().chain(bitmap);
        let mut of_buffers = buffers.map(DeviceBuffer::device);
        let of_children = || children.first().map(Self::device);
        let Some(device) = device.or_else(|| of_buffers.next()).or_else(of_children) else {
            bail!(
                "{operation}: there is neither a buffer nor a child, so the device is unknown; a batch of \
                 DeviceRecordBatch::try_new_with_rows converts to an array"
            );
        };
        let wrong = |what: String| {
            let what = format!("{operation} on {device}: {data_type} of {rows} rows: {what}");
            Err(Error::argument(what))
        };
        let kinds = &layout.buffers()[usize::from(layout.has_validity())..];
        let fits = others.len() == kinds.len() || layout.variadic && others.len() > kinds.len();
        if !fits || children.len() != layout.n_children() {
            let (n, children, of, fields) = (
                others.len(),
                children.len(),
                kinds.len(),
                layout.n_children(),
            );
            return wrong(format!(
                "{n} buffers after the bitmap and {children} children, not {of} and {fields}"
            ));
        }
        if validity.is_some() && !layout.has_validity() {
            return wrong("the type has no validity bitmap".into());
        }
        let unfit = |of: &&Validity| of.len != rows || of.nulls.is_some_and(|nulls| nulls > rows);
        if let Some(Validity { len, nulls, .. }) = validity.filter(unfit) {
            let nulls = nulls.unwrap_or(0);
            return wrong(format!("the validity bitmap has {len} rows, {nulls} nulls"));
        }
        for (i, buffer) in others.iter().enumerate() {
            let needed = kinds.get(i).filter(|_| rows > 0);
            let needed = needed.and_then(|kind| kind.bytes(rows)).unwrap_or(Ok(0))?;
            let bytes = buffer.as_ref().map_or(0, DeviceBuffer::len);
            if bytes < needed {
                return wrong(format!("a buffer has {bytes} bytes, {needed} needed"));
            }
        }
        if let Some(other) = of_buffers.find(|other| *other != device) {
            return wrong(format!("a buffer is on {other}"));
        }
        // The rows of a child for each row, where that is fixed.
        let times = match layout.nesting {
            Nesting::RowByRow => Some(1),
            Nesting::Times(n) => Some(n as usize),
            _ => None,
        };
        let Some(exact) = rows.checked_mul(times.unwrap_or(0)) else {
            return wrong("its child would have too many rows".into());
        };
        let nulls = validity.map_or(Some(0), |validity| validity.nulls);
        // The most rows of a child whose nulls do not show, because the parent is null there.
        let masked = nulls.unwrap_or(rows).saturating_mul(times.unwrap_or(1));
        for (i, child) in children.iter().enumerate() {
            let field = child_field(&data_type, i);
            let of_type = child.data_type();
            let fault = match child.null_count() {
                _ if child.device() != device => {
                    format!("is on {}; copy it with to_device", child.device())
                }
                _ if child_type(&data_type, i) != Some(of_type) => {
                    format!("is of type {of_type}; pass the field of its type")
                }
                _ if times.is_some() && child.len() != exact => {
                    format!("has {} rows, not {exact}; slice it", child.len())
                }
                // Children of a union have nulls in rows of other children, and lists need not refer to all rows.
                Some(n)
                    if n > masked
                        && times.is_some()
                        && layout.has_validity()
                        && field.is_some_and(|field| !field.is_nullable()) =>
                {
                    format!("has {n} nulls, but its field is not nullable; make the field nullable")
                }
                _ => continue,
            };
            let name = field.map_or("dictionary", |field| field.name());
            return wrong(format!("the array of '{name}' {fault}"));
        }
        let bitmap = layout.has_validity().then(|| NodeBuffer::from(bitmap));
        let others = others.iter().map(|buffer| buffer.as_ref().into());
        let sizes = layout.variadic.then(NodeBuffer::absent);
        let children = children.iter().map(|child| child.node().clone());
        let buffers = bitmap.into_iter().chain(others).chain(sizes).collect();
        let node = Node {
            validity_offset: validity.map_or(0, |validity| validity.bit_offset),
            nulls: NullCount::from(nulls),
            ..Node::new(data_type, rows, buffers, children.collect())
        };
        Ok(Self::from_node(device.clone(), Arc::new(node)))
    }
}

#[cfg(test)]
mod tests;
