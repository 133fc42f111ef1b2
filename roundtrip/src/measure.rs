//! How many bytes of data a batch holds.

use arrow_array::cast::AsArray;
use arrow_array::types::{BinaryViewType, ByteViewType, StringViewType};
use arrow_array::{Array, GenericByteViewArray, OffsetSizeTrait, RecordBatch};
use arrow_schema::DataType;

/// Bytes of the rows of `batch` in the Arrow format: values, offsets and validity, without
/// padding; dictionaries, runs and the children of dense unions and list views count whole.
pub fn batch_bytes(batch: &RecordBatch) -> u64 {
    let columns = batch.columns().iter();
    columns
        .map(|column| array_bytes(column, column.len()))
        .sum()
}

fn array_bytes(array: &dyn Array, rows: usize) -> u64 {
    use DataType::*;
    let bits = |n: usize| n.div_ceil(8) as u64;
    let validity = array.nulls().map_or(0, |_| bits(rows));
    let values = match array.data_type() {
        Null => 0,
        Boolean => bits(rows),
        FixedSizeBinary(width) => rows as u64 * u64::try_from(*width).unwrap_or(0),
        Utf8 => variable(array.as_string::<i32>().value_offsets()),
        LargeUtf8 => variable(array.as_string::<i64>().value_offsets()),
        Binary => variable(array.as_binary::<i32>().value_offsets()),
        LargeBinary => variable(array.as_binary::<i64>().value_offsets()),
        Utf8View => views(array.as_byte_view::<StringViewType>()),
        BinaryView => views(array.as_byte_view::<BinaryViewType>()),
        List(_) => {
            let list = array.as_list::<i32>();
            lists(list.value_offsets(), list.values())
        }
        LargeList(_) => {
            let list = array.as_list::<i64>();
            lists(list.value_offsets(), list.values())
        }
        Map(_, _) => {
            let map = array.as_map();
            lists(map.value_offsets(), map.entries())
        }
        ListView(_) => 8 * rows as u64 + whole(array.as_list_view::<i32>().values()),
        LargeListView(_) => 16 * rows as u64 + whole(array.as_list_view::<i64>().values()),
        FixedSizeList(_, _) => whole(array.as_fixed_size_list().values()),
        Struct(_) => {
            let columns = array.as_struct().columns().iter();
            columns.map(|c| whole(c)).sum()
        }
        Union(fields, _) => {
            let union = array.as_union();
            let offsets = union.offsets().map_or(0, |_| 4 * rows as u64);
            let children = fields.iter().map(|(id, _)| whole(union.child(id)));
            rows as u64 + offsets + children.sum::<u64>()
        }
        Dictionary(_, _) => match array.as_any_dictionary_opt() {
            Some(dictionary) => {
                let keys = dictionary.keys().data_type().primitive_width();
                (rows * keys.unwrap_or(0)) as u64 + whole(dictionary.values())
            }
            None => 0,
        },
        // Two children: run ends and values.
        RunEndEncoded(_, _) => {
            let data = array.to_data();
            let children = data.child_data().iter();
            children
                .map(|child| whole(&arrow_array::make_array(child.clone())))
                .sum()
        }
        fixed => (rows * fixed.primitive_width().unwrap_or(0)) as u64,
    };
    validity + values
}

fn whole(array: &dyn Array) -> u64 {
    array_bytes(array, array.len())
}

/// Offsets and the bytes between them.
fn variable<O: OffsetSizeTrait>(offsets: &[O]) -> u64 {
    let (_, used) = used(offsets);
    size_of_val(offsets) as u64 + used as u64
}

/// Offsets and the part of the child between them.
fn lists<O: OffsetSizeTrait>(offsets: &[O], child: &dyn Array) -> u64 {
    let (start, used) = used(offsets);
    size_of_val(offsets) as u64 + whole(&child.slice(start, used))
}

fn used<O: OffsetSizeTrait>(offsets: &[O]) -> (usize, usize) {
    match (offsets.first(), offsets.last()) {
        (Some(first), Some(last)) => (first.as_usize(), last.as_usize() - first.as_usize()),
        _ => (0, 0),
    }
}

/// Views and the values too long to lie in them.
fn views<T: ByteViewType>(array: &GenericByteViewArray<T>) -> u64 {
    let lengths = array.views().iter().map(|view| u64::from(*view as u32));
    let long: u64 = lengths.filter(|length| *length > 12).sum();
    size_of_val::<[u128]>(array.views()) as u64 + long
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use arrow_array::types::Int32Type;
    use arrow_array::{ArrayRef, DictionaryArray, Int32Array, ListArray, StringViewArray};

    #[test]
    fn a_slice_counts_only_its_rows() {
        let numbers: ArrayRef = Arc::new(Int32Array::from(vec![Some(1), None, Some(3)]));
        assert_eq!(whole(&numbers), 13);
        assert_eq!(whole(&numbers.slice(1, 1)), 5);
        let lists: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([
            Some(vec![Some(1), Some(2)]),
            Some(vec![Some(3)]),
        ]));
        assert_eq!(whole(&lists.slice(1, 1)), 8 + 4);
        let views: ArrayRef = Arc::new(StringViewArray::from(vec!["short", "longer than twelve"]));
        assert_eq!(whole(&views), 32 + 18);
        let words: DictionaryArray<Int32Type> = ["a", "b", "a"].into_iter().collect();
        assert_eq!(whole(&words), 12 + 12 + 2);
    }
}
