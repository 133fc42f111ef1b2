//! Where two ranges of values first differ.

use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_array::{
    Array, GenericByteArray, GenericByteViewArray, OffsetSizeTrait, RunArray, UnionArray,
    downcast_primitive_array,
};
use arrow_buffer::{ArrowNativeType, BooleanBuffer, NullBuffer};
use arrow_schema::{DataType, UnionMode};

/// The first `k` below `n` for which row `i + k` of `a` differs from row `j + k` of `b`.
pub fn first_difference(
    a: &dyn Array,
    i: usize,
    b: &dyn Array,
    j: usize,
    n: usize,
) -> Option<usize> {
    if n == 0 {
        return None;
    }
    let inside = |len: usize, at: usize| at.checked_add(n).is_some_and(|end| end <= len);
    if !inside(a.len(), i) || !inside(b.len(), j) {
        return Some(0);
    }
    // Rows before the first one that is null on one side only have the same nulls.
    let other_null = match (a.nulls(), b.nulls()) {
        (None, None) => None,
        (a, b) => {
            let valid = |nulls: Option<&NullBuffer>, at| match nulls {
                Some(nulls) => nulls.inner().slice(at, n),
                None => BooleanBuffer::new_set(n),
            };
            first_bit(&valid(a, i), &valid(b, j))
        }
    };
    let n = other_null.unwrap_or(n);
    let other_value = match a.nulls().filter(|nulls| nulls.null_count() > 0) {
        None => first_value(a, i, b, j, n),
        Some(_) if equal_bytes(a, i, b, j, n) => None,
        Some(nulls) => {
            let valid = nulls.inner().slice(i, n);
            let mut runs = valid.set_slices();
            runs.find_map(|(start, end)| {
                first_value(a, i + start, b, j + start, end - start).map(|k| start + k)
            })
        }
    };
    other_value.or(other_null)
}

fn first_bit(a: &BooleanBuffer, b: &BooleanBuffer) -> Option<usize> {
    if a == b {
        return None;
    }
    a.iter().zip(b).position(|(a, b)| a != b)
}

/// [`first_difference`] in a range of rows that are valid on both sides and lie inside the arrays.
fn first_value(a: &dyn Array, i: usize, b: &dyn Array, j: usize, n: usize) -> Option<usize> {
    use DataType::*;
    match a.data_type() {
        Null => None,
        Boolean => match (a.as_boolean_opt(), b.as_boolean_opt()) {
            (Some(a), Some(b)) => first_bit(&a.values().slice(i, n), &b.values().slice(j, n)),
            _ => Some(0),
        },
        Utf8 => first_bytes::<Utf8Type>(a, i, b, j, n),
        LargeUtf8 => first_bytes::<LargeUtf8Type>(a, i, b, j, n),
        Binary => first_bytes::<BinaryType>(a, i, b, j, n),
        LargeBinary => first_bytes::<LargeBinaryType>(a, i, b, j, n),
        Utf8View => first_view::<StringViewType>(a, i, b, j, n),
        BinaryView => first_view::<BinaryViewType>(a, i, b, j, n),
        List(_) => first_list::<i32>(a, i, b, j, n),
        LargeList(_) => first_list::<i64>(a, i, b, j, n),
        ListView(_) => first_list_view::<i32>(a, i, b, j, n),
        LargeListView(_) => first_list_view::<i64>(a, i, b, j, n),
        Map(_, _) => match (a.as_map_opt(), b.as_map_opt()) {
            (Some(a), Some(b)) => {
                let sides = ((a.value_offsets(), i), (b.value_offsets(), j));
                first_in_lists(sides.0, a.entries(), sides.1, b.entries(), n)
            }
            _ => Some(0),
        },
        FixedSizeList(_, size) => {
            let size = usize::try_from(*size).unwrap_or(0);
            match (a.as_fixed_size_list_opt(), b.as_fixed_size_list_opt()) {
                (Some(a), Some(b)) => {
                    first_difference(a.values(), i * size, b.values(), j * size, n * size)
                        .map(|k| k / size)
                }
                _ => Some(0),
            }
        }
        Struct(_) => match (a.as_struct_opt(), b.as_struct_opt()) {
            (Some(a), Some(b)) if a.num_columns() == b.num_columns() => {
                let columns = a.columns().iter().zip(b.columns());
                columns
                    .filter_map(|(a, b)| first_difference(a, i, b, j, n))
                    .min()
            }
            _ => Some(0),
        },
        Union(_, mode) => first_union(a, i, b, j, n, *mode),
        Dictionary(key, _) => match key.as_ref() {
            Int8 => first_dictionary::<Int8Type>(a, i, b, j, n),
            Int16 => first_dictionary::<Int16Type>(a, i, b, j, n),
            Int32 => first_dictionary::<Int32Type>(a, i, b, j, n),
            Int64 => first_dictionary::<Int64Type>(a, i, b, j, n),
            UInt8 => first_dictionary::<UInt8Type>(a, i, b, j, n),
            UInt16 => first_dictionary::<UInt16Type>(a, i, b, j, n),
            UInt32 => first_dictionary::<UInt32Type>(a, i, b, j, n),
            UInt64 => first_dictionary::<UInt64Type>(a, i, b, j, n),
            _ => Some(0),
        },
        RunEndEncoded(ends, _) => match ends.data_type() {
            Int16 => first_run::<Int16Type>(a, i, b, j, n),
            Int32 => first_run::<Int32Type>(a, i, b, j, n),
            Int64 => first_run::<Int64Type>(a, i, b, j, n),
            _ => Some(0),
        },
        // Fixed width.
        _ if equal_bytes(a, i, b, j, n) => None,
        _ => Some(
            (0..n)
                .find(|k| !equal_bytes(a, i + k, b, j + k, 1))
                .unwrap_or(0),
        ),
    }
}

/// Whether two ranges of fixed-width values are the same bytes; false for all other types.
fn equal_bytes(a: &dyn Array, i: usize, b: &dyn Array, j: usize, n: usize) -> bool {
    fn bytes(array: &dyn Array, at: usize, n: usize) -> Option<&[u8]> {
        let (values, width) = downcast_primitive_array!(
            array => (array.values().inner().as_slice(), array.data_type().primitive_width()?),
            DataType::FixedSizeBinary(width) => {
                let values = array.as_fixed_size_binary_opt()?.value_data();
                (values, usize::try_from(*width).ok()?)
            }
            _ => return None
        );
        values.get(at * width..(at + n) * width)
    }
    matches!((bytes(a, i, n), bytes(b, j, n)), (Some(a), Some(b)) if a == b)
}

fn first_bytes<T: ByteArrayType>(
    a: &dyn Array,
    i: usize,
    b: &dyn Array,
    j: usize,
    n: usize,
) -> Option<usize> {
    fn bytes<T: ByteArrayType>(a: &GenericByteArray<T>, from: usize, to: usize) -> Option<&[u8]> {
        let offsets = a.value_offsets();
        let range = offsets.get(from)?.as_usize()..offsets.get(to)?.as_usize();
        a.value_data().get(range)
    }
    let (Some(a), Some(b)) = (a.as_bytes_opt::<T>(), b.as_bytes_opt::<T>()) else {
        return Some(0);
    };
    let length = |a: &GenericByteArray<T>, k: usize| {
        let offsets = a.value_offsets();
        offsets[k + 1]
            .as_usize()
            .wrapping_sub(offsets[k].as_usize())
    };
    if (0..n).all(|k| length(a, i + k) == length(b, j + k)) {
        let (a, b) = (bytes(a, i, i + n), bytes(b, j, j + n));
        if a.is_some() && a == b {
            return None;
        }
    }
    (0..n).find(|k| {
        let (a, b) = (bytes(a, i + k, i + k + 1), bytes(b, j + k, j + k + 1));
        a.is_none() || a != b
    })
}

fn first_view<T: ByteViewType>(
    a: &dyn Array,
    i: usize,
    b: &dyn Array,
    j: usize,
    n: usize,
) -> Option<usize> {
    fn same<T: ByteViewType>(
        a: &GenericByteViewArray<T>,
        i: usize,
        b: &GenericByteViewArray<T>,
        j: usize,
    ) -> Option<bool> {
        let (view_a, view_b) = (a.views().get(i)?, b.views().get(j)?);
        let (bytes_a, bytes_b) = (view_a.to_le_bytes(), view_b.to_le_bytes());
        Some(bytes(a, &bytes_a)? == bytes(b, &bytes_b)?)
    }
    /// Length; then up to 12 bytes of value, or prefix, buffer and offset.
    fn bytes<'a, T: ByteViewType>(
        array: &'a GenericByteViewArray<T>,
        view: &'a [u8; 16],
    ) -> Option<&'a [u8]> {
        let word = |at: usize| {
            let bytes = [view[at], view[at + 1], view[at + 2], view[at + 3]];
            u32::from_le_bytes(bytes) as usize
        };
        let length = word(0);
        if length <= 12 {
            return view.get(4..4 + length);
        }
        let data = array.data_buffers().get(word(8))?;
        let value = data.get(word(12)..word(12).checked_add(length)?)?;
        // A wrong prefix makes the value compare wrongly elsewhere.
        value.starts_with(&view[4..8]).then_some(value)
    }
    let (Some(a), Some(b)) = (a.as_byte_view_opt::<T>(), b.as_byte_view_opt::<T>()) else {
        return Some(0);
    };
    (0..n).find(|k| same(a, i + k, b, j + k) != Some(true))
}

fn first_list<O: OffsetSizeTrait>(
    a: &dyn Array,
    i: usize,
    b: &dyn Array,
    j: usize,
    n: usize,
) -> Option<usize> {
    match (a.as_list_opt::<O>(), b.as_list_opt::<O>()) {
        (Some(a), Some(b)) => {
            let sides = ((a.value_offsets(), i), (b.value_offsets(), j));
            first_in_lists(sides.0, a.values(), sides.1, b.values(), n)
        }
        _ => Some(0),
    }
}

/// For lists that lie one after another: `(offsets, first row)` and child of each side.
fn first_in_lists<O: OffsetSizeTrait>(
    (offsets_a, i): (&[O], usize),
    a: &dyn Array,
    (offsets_b, j): (&[O], usize),
    b: &dyn Array,
    n: usize,
) -> Option<usize> {
    let start = |offsets: &[O], k: usize| offsets.get(k).map_or(usize::MAX, |o| o.as_usize());
    let (first_a, first_b) = (start(offsets_a, i), start(offsets_b, j));
    // Rows before the first one whose end differs have the same lengths.
    let end_a = |k: usize| start(offsets_a, i + k + 1).wrapping_sub(first_a);
    let end_b = |k: usize| start(offsets_b, j + k + 1).wrapping_sub(first_b);
    let other_length = (0..n).find(|k| end_a(*k) != end_b(*k));
    let n = other_length.unwrap_or(n);
    let children = if n == 0 { 0 } else { end_a(n - 1) };
    match first_difference(a, first_a, b, first_b, children) {
        // The row that holds this child: the first one that ends behind it.
        Some(child) => (0..n).find(|k| end_a(*k) > child).or(Some(0)),
        None => other_length,
    }
}

fn first_list_view<O: OffsetSizeTrait>(
    a: &dyn Array,
    i: usize,
    b: &dyn Array,
    j: usize,
    n: usize,
) -> Option<usize> {
    let (Some(a), Some(b)) = (a.as_list_view_opt::<O>(), b.as_list_view_opt::<O>()) else {
        return Some(0);
    };
    (0..n).find(|k| {
        let (i, j) = (i + k, j + k);
        let (size, other) = (a.value_size(i).as_usize(), b.value_size(j).as_usize());
        let (start_a, start_b) = (a.value_offset(i).as_usize(), b.value_offset(j).as_usize());
        size != other || first_difference(a.values(), start_a, b.values(), start_b, size).is_some()
    })
}

fn first_union(
    a: &dyn Array,
    i: usize,
    b: &dyn Array,
    j: usize,
    n: usize,
    mode: UnionMode,
) -> Option<usize> {
    fn union(array: &dyn Array) -> Option<&UnionArray> {
        array.as_any().downcast_ref()
    }
    let (Some(a), Some(b)) = (union(a), union(b)) else {
        return Some(0);
    };
    let (types_a, types_b) = (&a.type_ids()[i..i + n], &b.type_ids()[j..j + n]);
    let other_type = (0..n).find(|k| types_a[*k] != types_b[*k]);
    let n = other_type.unwrap_or(n);
    let mut k = 0;
    while k < n {
        let id = types_a[k];
        // Values that lie side by side are compared together.
        let (at_a, at_b) = (a.value_offset(i + k), b.value_offset(j + k));
        let together = (k + 1..n)
            .take_while(|next| {
                types_a[*next] == id
                    && (mode == UnionMode::Sparse
                        || (a.value_offset(i + next) == at_a + (next - k)
                            && b.value_offset(j + next) == at_b + (next - k)))
            })
            .count()
            + 1;
        if let Some(skip) = first_difference(a.child(id), at_a, b.child(id), at_b, together) {
            return Some(k + skip);
        }
        k += together;
    }
    other_type
}

fn first_dictionary<K: ArrowDictionaryKeyType>(
    a: &dyn Array,
    i: usize,
    b: &dyn Array,
    j: usize,
    n: usize,
) -> Option<usize> {
    let (Some(a), Some(b)) = (a.as_dictionary_opt::<K>(), b.as_dictionary_opt::<K>()) else {
        return Some(0);
    };
    let (keys_a, keys_b) = (&a.keys().values()[i..i + n], &b.keys().values()[j..j + n]);
    let (a, b) = (a.values(), b.values());
    // The usual case, in one go where that is not more work than going row by row.
    let same_dictionary = || a.len() == b.len() && first_difference(a, 0, b, 0, a.len()).is_none();
    if keys_a == keys_b && a.len() <= n && same_dictionary() {
        return None;
    }
    (0..n).find(|k| {
        let (at_a, at_b) = (keys_a[*k].as_usize(), keys_b[*k].as_usize());
        first_difference(a, at_a, b, at_b, 1).is_some()
    })
}

fn first_run<R: RunEndIndexType>(
    a: &dyn Array,
    i: usize,
    b: &dyn Array,
    j: usize,
    n: usize,
) -> Option<usize> {
    fn runs<R: RunEndIndexType>(array: &dyn Array) -> Option<&RunArray<R>> {
        array.as_any().downcast_ref()
    }
    /// The run that holds a row, and how many rows it goes on.
    fn run<R: RunEndIndexType>(array: &RunArray<R>, row: usize) -> Option<(usize, usize)> {
        let run = array.get_physical_index(row);
        let end = array.run_ends().values().get(run)?.as_usize();
        let left = end.checked_sub(array.run_ends().offset() + row)?;
        Some((run, left.max(1)))
    }
    let (Some(a), Some(b)) = (runs::<R>(a), runs::<R>(b)) else {
        return Some(0);
    };
    let mut k = 0;
    while k < n {
        let (Some((run_a, left_a)), Some((run_b, left_b))) = (run(a, i + k), run(b, j + k)) else {
            return Some(k);
        };
        if first_difference(a.values(), run_a, b.values(), run_b, 1).is_some() {
            return Some(k);
        }
        k += left_a.min(left_b);
    }
    None
}
