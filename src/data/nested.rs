//! Safe constructors of arrays that have no values of their own: null, struct and fixed-size list arrays. Nothing is
//! copied or allocated on the device, and nothing waits.

use std::sync::Arc;

use arrow_schema::{DataType, Field, FieldRef, Fields};

use crate::data::array::DeviceArray;
use crate::data::layout::check_rows;
use crate::data::node::{Buffers, Node};
use crate::data::validity::Validity;
use crate::device::Device;
use crate::error::{Error, Result};

impl DeviceArray {
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
        let masked = masked(validity.as_ref(), rows);
        check_columns(operation, &device, &fields, columns, rows, masked)?;
        // SAFETY: a struct has no values of its own, and those of its children are valid already.
        unsafe {
            let data_type = DataType::Struct(fields);
            Self::with_validity(operation, &device, data_type, rows, validity, &[], columns)
        }
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
    /// assert_eq!((vectors.len(), vectors.values().map(|v| v.len())), (2, Some(6)));
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if `size` is negative, if `values` does not have `rows * size` rows or is not of
    /// the field's type, if the length or device of the validity does not fit, and if the field is not nullable but
    /// `values` is known to have nulls in lists that are not null. A null count that is not known is not checked.
    pub fn new_fixed_size_list(
        field: FieldRef,
        size: i32,
        rows: usize,
        values: &DeviceArray,
        validity: Option<Validity>,
    ) -> Result<Self> {
        let operation = "DeviceArray::new_fixed_size_list";
        let device = values.device();
        let needed = usize::try_from(size).ok().and_then(|n| rows.checked_mul(n));
        let Some(needed) = needed else {
            return Err(Error::argument(format!(
                "{operation} on {device}: {rows} lists of {size} values; the size must not be negative, nor the number \
                 of values too large"
            )));
        };
        let masked = masked(validity.as_ref(), rows).saturating_mul(size as usize);
        let fault = fault(&field, values, device, needed, masked);
        if let Some(fault) = fault {
            return Err(Error::argument(format!(
                "{operation} on {device}: the array of values, field '{}', {fault}",
                field.name()
            )));
        }
        // SAFETY: a fixed-size list has no values of its own, and those of its child are valid already.
        unsafe {
            let data_type = DataType::FixedSizeList(field, size);
            let child = std::slice::from_ref(values);
            Self::with_validity(operation, device, data_type, rows, validity, &[], child)
        }
    }
}

/// The most rows that a validity masks: those in which a child's null does not show.
fn masked(validity: Option<&Validity>, rows: usize) -> usize {
    validity.map_or(0, |validity| validity.nulls.unwrap_or(rows))
}

/// Refuses columns that do not fit the fields of a struct of `rows` rows, at most `masked` of which are null.
pub(super) fn check_columns(
    operation: &str,
    device: &Device,
    fields: &Fields,
    columns: &[DeviceArray],
    rows: usize,
    masked: usize,
) -> Result<()> {
    if fields.len() != columns.len() {
        return Err(Error::argument(format!(
            "{operation} on {device}: {} columns for {} fields; pass one for each field",
            columns.len(),
            fields.len()
        )));
    }
    for (field, column) in fields.iter().zip(columns) {
        if let Some(fault) = fault(field, column, device, rows, masked) {
            return Err(Error::argument(format!(
                "{operation} on {device}: column '{}' {fault}",
                field.name()
            )));
        }
    }
    Ok(())
}

/// Returns why an array of `rows` rows cannot be the child that `field` describes, and what to do. `masked` is the most
/// of its rows that its parent's validity masks.
#[inline]
fn fault(
    field: &Field,
    child: &DeviceArray,
    device: &Device,
    rows: usize,
    masked: usize,
) -> Option<String> {
    if child.device() != device {
        return Some(format!("is on {}; copy it with to_device", child.device()));
    }
    if field.data_type() != child.data_type() {
        return Some(format!(
            "is of type {}, its field of type {}; pass the field of its type",
            child.data_type(),
            field.data_type()
        ));
    }
    if child.len() != rows {
        return Some(format!("has {} rows, not {rows}; slice it", child.len()));
    }
    match child.null_count() {
        Some(nulls) if nulls > masked && !field.is_nullable() => Some(format!(
            "has {nulls} nulls, but its field is not nullable; make the field nullable"
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use arrow_array::{Array, ArrayRef, Int32Array, StringArray, StructArray};
    use arrow_buffer::Buffer;

    use super::*;
    use crate::abi::FFI_ArrowDeviceArray;
    use crate::data::DeviceRecordBatch;
    use crate::device::Devices;
    use crate::interchange::{ExportOptions, ImportOptions, SyncPolicy};
    use crate::memory::DeviceBuffer;

    fn up(array: &dyn Array) -> DeviceArray {
        Devices::cpu().upload_array(array).unwrap()
    }

    fn field(name: &str, data_type: &DataType) -> FieldRef {
        Arc::new(Field::new(name, data_type.clone(), true))
    }

    fn again(array: FFI_ArrowDeviceArray, data_type: &DataType) -> DeviceArray {
        // SAFETY: the array comes from an export of this type.
        let again = unsafe {
            DeviceArray::import_as(array, field("", data_type), &ImportOptions::default())
        };
        again.unwrap()
    }

    /// A struct of a struct and a list, every buffer of which is an allocation of its own. Each part is exported, outlives
    /// all others, and is what arrow-rs has.
    #[test]
    fn parts_of_separate_memory() {
        let strings = StringArray::from(vec!["a", "", "ccc", "dd"]);
        let numbers = Int32Array::from(vec![Some(1), None, Some(3), Some(4)]);
        let fields = Fields::from(vec![
            field("s", &DataType::Utf8),
            field("n", &DataType::Int32),
        ]);
        let columns = [up(&strings), up(&numbers)];
        let validity = up(&numbers).validity();
        let inner = DeviceArray::new_struct(fields.clone(), &columns, validity).unwrap();
        let item = field("item", &DataType::Int32);
        let lists = DeviceArray::new_fixed_size_list(item, 1, 4, &up(&numbers), None).unwrap();
        let nulls = DeviceArray::new_null(&Devices::cpu(), 4).unwrap();
        let columns = [inner, lists, nulls];
        let schema = ["i", "l", "x"].iter().zip(&columns);
        let schema = schema.map(|(name, column)| field(name, column.data_type()));
        let schema = Arc::new(arrow_schema::Schema::new(schema.collect::<Vec<_>>()));
        let outer = DeviceRecordBatch::try_new(schema, &columns).unwrap();
        drop(columns);
        assert_eq!(outer.as_struct().owners().len(), 4);

        let options = ExportOptions::new(SyncPolicy::Event);
        let part = outer.slice(1, 3).unwrap().column(0).unwrap();
        assert_eq!(part.owners().len(), 3);
        let leaf = part.child(0).unwrap();
        assert_eq!(leaf.owners().len(), 1);
        let exported = [&part, &leaf].map(|array| array.export_array(&options).unwrap());
        let list = outer.column(1).unwrap().values().unwrap();
        assert_eq!(outer.column(2).unwrap().owners().len(), 0);
        let whole = outer.export_array(&options).unwrap();
        drop((outer, leaf));
        drop(whole);
        let [struct_, text] = exported;
        let host: Vec<ArrayRef> = vec![Arc::new(strings.clone()), Arc::new(numbers.clone())];
        let host = StructArray::new(fields, host, numbers.nulls().cloned()).slice(1, 3);
        let same = |expected: &dyn Array, found: &DeviceArray| {
            assert_eq!(expected.to_data(), found.to_host().unwrap().to_data());
        };
        same(&host, &part);
        same(&host, &again(struct_, host.data_type()));
        drop(part);
        same(&strings.slice(1, 3), &again(text, &DataType::Utf8));
        same(&numbers, &list);
    }

    /// A column is taken and its nulls are counted on several threads at once.
    #[test]
    fn children_on_several_threads() {
        let column = || {
            let bits = DeviceBuffer::from(Buffer::from_vec(vec![0b1011_u8]));
            let values = DeviceBuffer::from(Buffer::from_vec(vec![1u8, 2, 3, 4]));
            let validity = Validity::new(bits, 0, 4).unwrap();
            DeviceArray::from_values(DataType::UInt8, 4, values, Some(validity)).unwrap()
        };
        let schema = [field("a", &DataType::UInt8), field("b", &DataType::UInt8)];
        let schema = Arc::new(arrow_schema::Schema::new(schema.to_vec()));
        let batch = DeviceRecordBatch::try_new(schema, &[column(), column()]).unwrap();
        let early = batch.column(1).unwrap();
        thread::scope(|scope| {
            for i in [0, 1, 0, 1] {
                let batch = batch.clone();
                scope.spawn(move || {
                    let column = batch.column(i).unwrap();
                    assert_eq!(column.resolve_null_counts().unwrap(), 1);
                    drop(batch);
                    assert_eq!(column.null_count(), Some(1));
                });
            }
        });
        assert_eq!(batch.as_struct().child(0).unwrap().null_count(), Some(1));
        drop(batch);
        assert_eq!(early.null_count(), Some(1));
    }
}
