//! Every value of host arrays, read as safe code reads them.

use arrow_array::cast::AsArray;
use arrow_array::{Array, OffsetSizeTrait};
use arrow_data::ArrayData;
use arrow_device::DeviceRecordBatch;
use arrow_schema::DataType;

use crate::support::compare::same;

/// Reads all bytes that an array and its descendants claim, and each value, if there are not too many.
///
/// # Panics
/// If one is not valid for its type.
pub(crate) fn read(array: &dyn Array) {
    bytes(&array.to_data());
    if comparable(array) {
        // Row by row through the accessors, whose bounds are checked, and bit by bit.
        same(array, array).expect("an array is what it is");
    }
}

/// The same for a batch of which no row was seen yet.
pub(crate) fn read_batch(batch: &DeviceRecordBatch) {
    let host = batch.to_host().expect("valid");
    host.columns().iter().for_each(|column| read(column));
}

fn bytes(data: &ArrayData) {
    let nulls = data.nulls().map(|nulls| nulls.buffer());
    for buffer in nulls.into_iter().chain(data.buffers()) {
        std::hint::black_box(buffer.iter().fold(0u8, |sum, byte| sum ^ byte));
    }
    if matches!(
        data.data_type(),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View
    ) {
        data.validate_values().expect("text is UTF-8");
    }
    assert!(data.null_count() <= data.len());
    data.child_data().iter().for_each(bytes);
}

/// Whether two arrays are few enough values to be compared one by one: lists may share theirs.
pub(crate) fn comparable(array: &dyn Array) -> bool {
    values(array, array.len()).is_some_and(|n| n < 20_000)
}

/// At most so many values does a comparison of this many rows look at.
fn values(array: &dyn Array, rows: usize) -> Option<usize> {
    use DataType as T;
    if rows > 20_000 {
        return None;
    }
    let items = match array.data_type() {
        T::List(_) => longest(array.as_list::<i32>().offsets().lengths()),
        T::LargeList(_) => longest(array.as_list::<i64>().offsets().lengths()),
        T::Map(_, _) => longest(array.as_map().offsets().lengths()),
        T::ListView(_) => longest(sizes(array.as_list_view::<i32>().sizes())),
        T::LargeListView(_) => longest(sizes(array.as_list_view::<i64>().sizes())),
        T::FixedSizeList(_, n) => *n as usize,
        _ => 1,
    };
    let rows_below = rows.checked_mul(items)?;
    let children = array.to_data();
    let mut children = children.child_data().iter();
    children.try_fold(rows, |sum, child| {
        let child = arrow_array::make_array(child.clone());
        sum.checked_add(values(&child, rows_below)?)
    })
}

fn longest(lengths: impl Iterator<Item = usize>) -> usize {
    lengths.max().unwrap_or(0)
}

fn sizes<O: OffsetSizeTrait>(sizes: &[O]) -> impl Iterator<Item = usize> {
    sizes.iter().map(|n| n.as_usize())
}
