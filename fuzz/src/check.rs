//! Every value of host arrays, read as safe code reads them.

use arrow_array::cast::AsArray;
use arrow_array::types::{BinaryViewType, StringViewType};
use arrow_array::{Array, OffsetSizeTrait, downcast_integer_array, downcast_run_array};
use arrow_schema::DataType;

/// Rows that are looked at: all, or those at the ends of what is too long.
pub(crate) fn rows(n: usize) -> impl Iterator<Item = usize> {
    const MOST: usize = 2048;
    let (head, tail) = if n <= MOST {
        (n, n)
    } else {
        (MOST / 2, n - MOST / 2)
    };
    (0..head).chain(tail..n)
}

/// Reads all values of an array and its descendants.
///
/// # Panics
/// If one is not valid for its type.
pub(crate) fn read(array: &dyn Array) {
    use DataType as T;
    assert!(array.null_count() <= array.len());
    let n = array.len();
    for i in rows(n) {
        std::hint::black_box(array.is_null(i));
    }
    match array.data_type() {
        T::Null => {}
        T::Boolean => {
            let array = array.as_boolean();
            rows(n).for_each(|i| _ = std::hint::black_box(array.value(i)));
        }
        T::Utf8 => text(n, |i| array.as_string::<i32>().value(i)),
        T::LargeUtf8 => text(n, |i| array.as_string::<i64>().value(i)),
        T::Binary => bytes(n, |i| array.as_binary::<i32>().value(i)),
        T::LargeBinary => bytes(n, |i| array.as_binary::<i64>().value(i)),
        T::Utf8View => text(n, |i| array.as_byte_view::<StringViewType>().value(i)),
        T::BinaryView => bytes(n, |i| array.as_byte_view::<BinaryViewType>().value(i)),
        T::FixedSizeBinary(_) => bytes(n, |i| array.as_fixed_size_binary().value(i)),
        T::List(_) => list::<i32>(array),
        T::LargeList(_) => list::<i64>(array),
        T::ListView(_) => list_view::<i32>(array),
        T::LargeListView(_) => list_view::<i64>(array),
        T::Map(_, _) => {
            let map = array.as_map();
            rows(n).for_each(|i| _ = std::hint::black_box(map.value(i).len()));
            read(map.entries());
        }
        T::FixedSizeList(_, _) => {
            let list = array.as_fixed_size_list();
            rows(n).for_each(|i| _ = std::hint::black_box(list.value(i).len()));
            read(list.values());
        }
        T::Struct(_) => array
            .as_struct()
            .columns()
            .iter()
            .for_each(|column| read(column)),
        T::Union(fields, _) => {
            let union = array.as_union();
            for i in rows(n) {
                let child = union.child(union.type_id(i));
                assert!(
                    union.value_offset(i) < child.len(),
                    "a union's row has no value"
                );
            }
            fields.iter().for_each(|(id, _)| read(union.child(id)));
        }
        T::Dictionary(_, _) => {
            let dictionary = array.as_any_dictionary();
            let (keys, values) = (dictionary.keys(), dictionary.values());
            let valid = |i: usize| array.is_valid(i);
            downcast_integer_array!(
                keys => for i in rows(n).filter(|i| valid(*i)) {
                    let key = i128::from(keys.value(i));
                    let all = 0..values.len() as i128;
                    assert!(all.contains(&key), "key {key} of {} values", values.len());
                },
                other => panic!("keys of type {other}")
            );
            read(values);
        }
        T::RunEndEncoded(_, _) => downcast_run_array!(
            array => {
                for i in rows(n) {
                    let at = array.get_physical_index(i);
                    assert!(at < array.values().len(), "row {i} is beyond the runs");
                }
                read(array.values());
            },
            other => panic!("{other} is not run-end encoded")
        ),
        _ => {
            // Primitive values: what `to_data` shows of them.
            let data = array.to_data();
            let width = array.data_type().primitive_width().expect("of fixed width");
            let start = data.offset() * width;
            let values = &data.buffers()[0].as_slice()[start..start + n * width];
            std::hint::black_box(values.iter().fold(0u8, |sum, byte| sum ^ byte));
        }
    }
}

fn text<'a>(n: usize, value: impl Fn(usize) -> &'a str) {
    for i in rows(n) {
        let bytes = value(i).as_bytes();
        assert!(
            std::str::from_utf8(bytes).is_ok(),
            "row {i} is not UTF-8: {bytes:?}"
        );
    }
}

fn bytes<'a>(n: usize, value: impl Fn(usize) -> &'a [u8]) {
    for i in rows(n) {
        std::hint::black_box(value(i).iter().fold(0u8, |sum, byte| sum ^ byte));
    }
}

fn list<O: OffsetSizeTrait>(array: &dyn Array) {
    let list = array.as_list::<O>();
    rows(list.len()).for_each(|i| _ = std::hint::black_box(list.value(i).len()));
    read(list.values());
}

fn list_view<O: OffsetSizeTrait>(array: &dyn Array) {
    let list = array.as_list_view::<O>();
    rows(list.len()).for_each(|i| _ = std::hint::black_box(list.value(i).len()));
    read(list.values());
}

/// Whether two arrays are few enough values to be compared one by one: lists may share theirs.
pub(crate) fn comparable(array: &dyn Array) -> bool {
    values(array, array.len()).is_some_and(|n| n < 20_000)
}

/// At most so many values does a comparison of this many rows look at.
fn values(array: &dyn Array, rows: usize) -> Option<usize> {
    use DataType as T;
    fn longest<O: OffsetSizeTrait>(offsets: &[O]) -> usize {
        offsets
            .windows(2)
            .map(|w| (w[1] - w[0]).as_usize())
            .max()
            .unwrap_or(0)
    }
    fn largest<O: OffsetSizeTrait>(sizes: &[O]) -> usize {
        sizes.iter().map(|n| n.as_usize()).max().unwrap_or(0)
    }
    if rows > 20_000 {
        return None;
    }
    let below = |child: &dyn Array, times: usize| values(child, rows.checked_mul(times)?);
    let children = match array.data_type() {
        T::List(_) => {
            let list = array.as_list::<i32>();
            below(list.values(), longest(list.value_offsets()))?
        }
        T::LargeList(_) => {
            let list = array.as_list::<i64>();
            below(list.values(), longest(list.value_offsets()))?
        }
        T::Map(_, _) => {
            let map = array.as_map();
            below(map.entries(), longest(map.value_offsets()))?
        }
        T::ListView(_) => {
            let list = array.as_list_view::<i32>();
            below(list.values(), largest(list.value_sizes()))?
        }
        T::LargeListView(_) => {
            let list = array.as_list_view::<i64>();
            below(list.values(), largest(list.value_sizes()))?
        }
        T::FixedSizeList(_, n) => below(array.as_fixed_size_list().values(), *n as usize)?,
        T::Struct(_) => {
            let mut sum = 0usize;
            for column in array.as_struct().columns() {
                sum = sum.checked_add(below(column, 1)?)?;
            }
            sum
        }
        T::Union(fields, _) => {
            let mut sum = 0usize;
            for (id, _) in fields.iter() {
                sum = sum.checked_add(below(array.as_union().child(id), 1)?)?;
            }
            sum
        }
        T::Dictionary(_, _) => below(array.as_any_dictionary().values(), 1)?,
        T::RunEndEncoded(_, _) => downcast_run_array!(
            array => below(array.values(), 1)?,
            _ => 0
        ),
        _ => 0,
    };
    rows.checked_add(children)
}
