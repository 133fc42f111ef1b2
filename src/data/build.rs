//! Building arrays from buffers, and from other arrays.

use std::sync::Arc;

use arrow_schema::DataType;
use smallvec::smallvec;

use crate::data::array::DeviceArray;
use crate::data::layout::{BufferKind, Layout, Nesting, check_rows, check_type, child_type};
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
        let layout = Layout::of(&data_type);
        let plain = layout.nesting == Nesting::Leaf && !layout.variadic;
        if !plain || layout.buffers().len() != 2 {
            return Err(Error::argument(format!(
                "{data_type} has more than a buffer of values; use DeviceArray::from_parts"
            )));
        }
        let (device, operation) = (values.device().clone(), "DeviceArray::from_values");
        let values = [Some(values)];
        // SAFETY: every bit pattern is a value of these types.
        unsafe {
            Self::with_validity(
                operation,
                &device,
                data_type,
                length,
                validity,
                &values,
                &[],
            )
        }
    }

    /// As [`from_parts`](Self::from_parts), for an array with this validity; `others` are the buffers after the bitmap.
    ///
    /// # Safety
    /// The values in `others` and their relation to the children must be valid, as for [`from_parts`](Self::from_parts).
    pub(super) unsafe fn with_validity(
        operation: &str,
        device: &Device,
        data_type: DataType,
        length: usize,
        validity: Option<Validity>,
        others: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        let (bitmap, bit_offset, nulls) = match validity {
            Some(validity) if validity.len != length || validity.buffer.device() != device => {
                return Err(Error::argument(format!(
                    "{operation} on {device}: {data_type} of {length} rows with a validity bitmap of {} rows on {}; \
                     pass one of the same rows and device",
                    validity.len,
                    validity.buffer.device()
                )));
            }
            Some(validity) => (Some(validity.buffer), validity.bit_offset, validity.nulls),
            None => (None, 0, Some(0)),
        };
        let mut buffers = Vec::with_capacity(1 + others.len());
        buffers.push(bitmap);
        buffers.extend_from_slice(others);
        // SAFETY: the caller guarantees the values (see `# Safety`). A `Validity` knows a null count only from an array
        // that has these rows of the bitmap and knows it (`Validity::nulls`); without a bitmap there are no nulls.
        unsafe { Self::assemble(data_type, length, nulls, bit_offset, &buffers, children) }
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
        // SAFETY: the caller guarantees values and null count (see `# Safety`); the bitmap starts at bit 0.
        unsafe { Self::assemble(data_type, length, nulls, 0, buffers, children) }
    }

    /// As [`from_parts`](Self::from_parts), for a validity bitmap that starts at bit `bit_offset` of its buffer.
    ///
    /// # Safety
    /// As [`from_parts`](Self::from_parts), for the bits from `bit_offset` on.
    unsafe fn assemble(
        data_type: DataType,
        length: usize,
        nulls: Option<usize>,
        bit_offset: usize,
        buffers: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        check_type(&data_type)?;
        check_rows(length)?;
        let layout = Layout::of(&data_type);
        let wrong = |what: String| Err(Error::argument(format!("{data_type}: {what}")));
        let kinds = layout.buffers();
        let fits = match layout.variadic {
            true => buffers.len() >= kinds.len(),
            false => buffers.len() == kinds.len(),
        };
        if !fits || children.len() != layout.n_children() {
            return wrong(format!(
                "{} buffers and {} children given, {} and {} needed",
                buffers.len(),
                children.len(),
                kinds.len(),
                layout.n_children()
            ));
        }
        let of_buffers = buffers.iter().flatten().map(DeviceBuffer::device);
        let mut devices = of_buffers.chain(children.iter().map(DeviceArray::device));
        let Some(device) = devices.next().cloned() else {
            return wrong("there is neither a buffer nor a child, so the device is unknown".into());
        };
        for (kind, buffer) in kinds.iter().zip(buffers) {
            let bytes = match kind {
                BufferKind::Validity if buffer.is_none() => None,
                BufferKind::Validity => kind.bytes(bit_offset.saturating_add(length)),
                _ => kind.bytes(length),
            };
            let needed = match bytes {
                Some(bytes) if length > 0 => bytes?,
                _ => 0,
            };
            let there = buffer.as_ref().map_or(0, DeviceBuffer::len);
            if there < needed {
                return wrong(format!(
                    "a buffer has {there} bytes where {length} rows need {needed}"
                ));
            }
        }
        let has_bitmap = layout.has_validity() && buffers[0].is_some();
        let may_have_nulls = has_bitmap || data_type == DataType::Null;
        if let Some(n) = nulls.filter(|n| *n > length || (*n > 0 && !may_have_nulls)) {
            return wrong(format!("{n} nulls in {length} rows"));
        }
        for (i, child) in children.iter().enumerate() {
            if child_type(&data_type, i) != Some(child.data_type()) {
                return wrong(format!("child {i} is of type {}", child.data_type()));
            }
            let needed = match layout.nesting {
                Nesting::RowByRow => length,
                Nesting::Times(n) => length
                    .checked_mul(n as usize)
                    .ok_or_else(|| Error::argument("too many rows"))?,
                _ => 0,
            };
            if child.len() < needed {
                let rows = child.len();
                return wrong(format!("child {i} has {rows} rows, {needed} needed"));
            }
        }
        let mut all: Buffers = buffers
            .iter()
            .map(|buffer| NodeBuffer::from(buffer.as_ref()))
            .collect();
        if layout.variadic {
            all.push(NodeBuffer::absent());
        }
        let mut others = buffers.iter().flatten().map(DeviceBuffer::device);
        if let Some(other) = others.find(|other| **other != device) {
            return Err(on_two_devices("buffers", &device, other));
        }
        let node = Node {
            validity_offset: bit_offset,
            nulls: NullCount::from(nulls),
            ..Node::new(data_type, length, all, nodes(&device, children)?)
        };
        Ok(Self::from_node(device, Arc::new(node)))
    }
}

/// A struct without a validity bitmap over `children`, which all have `rows` rows.
pub(crate) fn struct_array(
    device: &Device,
    data_type: DataType,
    rows: usize,
    children: &[DeviceArray],
) -> Result<DeviceArray> {
    let children = nodes(device, children)?;
    let node = Node::new(data_type, rows, smallvec![NodeBuffer::absent()], children);
    Ok(DeviceArray::from_node(device.clone(), Arc::new(node)))
}

/// The nodes of children, which must be on `device`.
fn nodes(device: &Device, children: &[DeviceArray]) -> Result<Vec<Arc<Node>>> {
    let node = |child: &DeviceArray| match child.device() == device {
        true => Ok(child.to_node()),
        false => Err(on_two_devices("arrays", device, child.device())),
    };
    children.iter().map(node).collect()
}

#[cold]
fn on_two_devices(what: &str, device: &Device, other: &Device) -> Error {
    Error::argument(format!("{what} of {device} and of {other} in one array"))
}
