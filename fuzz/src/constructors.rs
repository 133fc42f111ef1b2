//! Arrays made of parts of others.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, FixedSizeListArray, StructArray};
use arrow_device::DeviceArray;
use arrow_schema::{DataType, Field, FieldRef, Fields};

use crate::exercise::nulls_of;
use crate::input::Input;
use crate::kinds;

/// What was done, its result, and the rows that it should have.
pub(crate) type Made = (&'static str, DeviceArray, ArrayRef);

/// The bitmap's bits start at the first.
fn starts_at_0(device: &DeviceArray) -> bool {
    let queue = device.device().default_queue();
    let bits = device.validity_on(&queue).expect("its own queue");
    device.offset() == 0 && bits.is_none_or(|bits| bits.bit_offset() == 0)
}

/// The same array from its own buffers and children.
pub(crate) fn from_parts(
    device: &DeviceArray,
    rows: &ArrayRef,
    input: &mut Input<'_>,
) -> Option<DeviceArray> {
    let nulls = [None, Some(nulls_of(rows))][input.choice(2)];
    if !starts_at_0(device) || device.num_buffers() + device.num_children() == 0 {
        return None;
    }
    device.resolve_sizes().expect("valid");
    let buffers: Vec<_> = (0..device.num_buffers())
        .map(|i| device.buffer(i))
        .collect();
    let children: Vec<_> = (0..device.num_children())
        .filter_map(|i| device.child(i))
        .collect();
    let data_type = device.data_type().clone();
    // SAFETY: values of an array of this type, in the same places.
    let made =
        unsafe { DeviceArray::from_parts(data_type, device.len(), nulls, &buffers, &children) };
    match made {
        Ok(made) => Some(made),
        // Nothing tells the device.
        Err(e) => {
            assert!(
                buffers.iter().all(Option::is_none) && children.is_empty(),
                "{e}"
            );
            None
        }
    }
}

/// The same array from its values and its validity, which may start within a byte.
pub(crate) fn from_values(device: &DeviceArray, input: &mut Input<'_>) -> Option<DeviceArray> {
    if device.offset() > 0 || device.num_buffers() != 2 || device.num_children() > 0 {
        return None;
    }
    let (data_type, values) = (device.data_type().clone(), device.buffer(1)?);
    match input.choice(2) {
        0 => DeviceArray::from_values(data_type, device.len(), values, device.validity()),
        _ => device.with_values(data_type, values),
    }
    .ok()
}

/// The fields of a struct of two such columns.
pub(crate) fn pair(data_type: &DataType) -> Fields {
    let field = |name| Field::new(name, data_type.clone(), true);
    vec![field("a"), field("b")].into()
}

/// The array and a copy of it in other memory, null where the array is.
pub(crate) fn new_struct(device: &DeviceArray, input: &mut Input<'_>) -> Option<DeviceArray> {
    if nodes(device.data_type()) > 40 {
        return None;
    }
    let columns = [device.clone(), device.compact().expect("valid")];
    let (fields, validity) = (pair(device.data_type()), device.validity());
    let made = DeviceArray::new_struct(fields, &columns, validity).expect("of equal length");
    // Each child keeps its own memory.
    let child = made.child(input.choice(2))?;
    assert!(child.get_array_memory_size() <= made.get_array_memory_size());
    Some(made)
}

pub(crate) fn struct_of(rows: &ArrayRef) -> Option<ArrayRef> {
    let columns = vec![rows.clone(), rows.clone()];
    let made = StructArray::try_new_with_length(
        pair(rows.data_type()),
        columns,
        rows.nulls().cloned(),
        rows.len(),
    );
    Some(Arc::new(made.expect("of equal length")))
}

fn nodes(data_type: &DataType) -> usize {
    let children = kinds::children(data_type);
    1 + children.iter().map(|t| nodes(t)).sum::<usize>()
}

/// Lists of some of the rows.
pub(crate) fn fixed_size_list(
    device: &DeviceArray,
    rows: &ArrayRef,
    input: &mut Input<'_>,
) -> Option<Made> {
    if nodes(device.data_type()) > 40 {
        return None;
    }
    let size = 1 + input.choice(4);
    let lists = rows.len() / size;
    let field: FieldRef = Arc::new(Field::new("item", device.data_type().clone(), true));
    let (values, rows) = (device.slice(0, lists * size), rows.slice(0, lists * size));
    let new = DeviceArray::new_fixed_size_list;
    let made = new(
        field.clone(),
        size as i32,
        lists,
        &values.expect("inside"),
        None,
    );
    let expected = FixedSizeListArray::try_new_with_length(field, size as i32, rows, None, lists);
    let expected = Arc::new(expected.expect("so many values"));
    Some((
        "new_fixed_size_list",
        made.expect("so many values"),
        expected,
    ))
}
