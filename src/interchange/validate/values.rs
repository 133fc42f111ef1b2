//! A first look at values, in loops without branches: most data is valid throughout. Data that does not pass here may be
//! valid all the same, and arrow-rs looks at it again, row by row, and says what is wrong.

use arrow_buffer::{ArrowNativeType, Buffer, ScalarBuffer};
use arrow_data::{ArrayData, ByteView, MAX_INLINE_VIEW_LEN};
use arrow_schema::DataType;

/// Whether all values of `data` itself are found valid, as `ArrayData::validate_values` checks them; its children are not
/// looked at. Each buffer that the type has is there, at whatever length.
pub(super) fn are_valid(data: &ArrayData) -> bool {
    use DataType as T;
    match data.data_type() {
        T::Utf8 => text::<i32>(data),
        T::LargeUtf8 => text::<i64>(data),
        T::Binary => ascending::<i32>(data, data.buffers()[1].len()).is_some(),
        T::LargeBinary => ascending::<i64>(data, data.buffers()[1].len()).is_some(),
        T::List(_) | T::Map(_, _) => ascending::<i32>(data, data.child_data()[0].len()).is_some(),
        T::Utf8View => views::<true>(data),
        T::BinaryView => views::<false>(data),
        T::LargeList(_) => ascending::<i64>(data, data.child_data()[0].len()).is_some(),
        T::Dictionary(key, _) => match **key {
            T::Int8 => keys::<i8>(data),
            T::Int16 => keys::<i16>(data),
            T::Int32 => keys::<i32>(data),
            T::Int64 => keys::<i64>(data),
            T::UInt8 => keys::<u8>(data),
            T::UInt16 => keys::<u16>(data),
            T::UInt32 => keys::<u32>(data),
            T::UInt64 => keys::<u64>(data),
            _ => false,
        },
        _ => false,
    }
}

/// `n` elements of buffer `i` from the array's offset. `None` if the buffer does not have them, aligned.
pub(super) fn elements<T: ArrowNativeType>(
    data: &ArrayData,
    i: usize,
    n: usize,
) -> Option<ScalarBuffer<T>> {
    let buffer = &data.buffers()[i];
    let end = data.offset().checked_add(n)?.checked_mul(size_of::<T>())?;
    let aligned = buffer.as_ptr().align_offset(align_of::<T>()) == 0;
    (aligned && end <= buffer.len()).then(|| ScalarBuffer::new(buffer.clone(), data.offset(), n))
}

/// The offsets, if there are some, and each is at least the one before and at most `limit`.
fn ascending<T: ArrowNativeType>(data: &ArrayData, limit: usize) -> Option<ScalarBuffer<T>> {
    let offsets = elements::<T>(data, 0, data.len().checked_add(1)?)?;
    let (first, last) = (offsets.first()?, offsets.last()?);
    let within = *first >= T::default() && last.to_usize()? <= limit;
    (within && are_in_order(&offsets, |a, b| a <= b)).then_some(offsets)
}

/// Whether all neighbours are in order.
pub(super) fn are_in_order<T: Copy>(values: &[T], in_order: impl Fn(T, T) -> bool) -> bool {
    let next = values.iter().skip(1);
    let pairs = values.iter().zip(next);
    pairs.fold(true, |all, (a, b)| all & in_order(*a, *b))
}

/// Whether the bytes are UTF-8, and each text starts and ends at a character's boundary.
fn text<T: ArrowNativeType>(data: &ArrayData) -> bool {
    let bytes = data.buffers()[1].as_slice();
    let Some(offsets) = ascending::<T>(data, bytes.len()) else {
        return false;
    };
    // Every byte is a character then.
    bytes.is_ascii()
        || std::str::from_utf8(bytes).is_ok_and(|text| {
            let mut ends = offsets.iter().map(|end| end.as_usize());
            ends.all(|end| text.is_char_boundary(end))
        })
}

/// The bits of a view that are 0 if its value has so many bytes and is in the view itself.
const UNUSED: [u128; MAX_INLINE_VIEW_LEN as usize + 1] = {
    let mut unused = [0; MAX_INLINE_VIEW_LEN as usize + 1];
    let mut length = 0;
    while length < MAX_INLINE_VIEW_LEN as usize {
        unused[length] = u128::MAX << (32 + 8 * length);
        length += 1;
    }
    unused
};

/// The bits of a view that are set in no ASCII text.
const NOT_ASCII: u128 = u128::from_ne_bytes([0x80; 16]);

/// Whether all views refer to bytes that exist and start as the view says, and, if they are texts, to UTF-8.
fn views<const TEXTS: bool>(data: &ArrayData) -> bool {
    let Some(views) = elements::<u128>(data, 0, data.len()) else {
        return false;
    };
    let buffers: Vec<_> = data.buffers()[1..].iter().map(Buffer::as_slice).collect();
    let (mut unused, mut all) = (0, true);
    for view in &views {
        let length = *view as u32 as usize;
        if let Some(bits) = UNUSED.get(length) {
            unused |= view & bits;
            if TEXTS && view & NOT_ASCII != 0 {
                all &= std::str::from_utf8(&view.to_le_bytes()[4..][..length]).is_ok();
            }
            continue;
        }
        let view = ByteView::from(*view);
        let start = view.offset as usize;
        let buffer = buffers.get(view.buffer_index as usize);
        let bytes = buffer.and_then(|buffer| buffer.get(start..start.checked_add(length)?));
        let starts = |bytes: &&[u8]| bytes.first_chunk() == Some(&view.prefix.to_le_bytes());
        all &= bytes
            .filter(starts)
            .is_some_and(|bytes| !TEXTS || is_text(bytes));
    }
    all && unused == 0
}

fn is_text(bytes: &[u8]) -> bool {
    bytes.is_ascii() || std::str::from_utf8(bytes).is_ok()
}

/// Whether all keys, those of null rows included, refer to values of the dictionary.
fn keys<T: ArrowNativeType + Ord>(data: &ArrayData) -> bool {
    let Some(keys) = elements::<T>(data, 0, data.len()) else {
        return false;
    };
    let Some(first) = keys.first() else {
        return true;
    };
    let extremes = keys.iter();
    let (least, most) = extremes.fold((*first, *first), |(least, most), key| {
        (least.min(*key), most.max(*key))
    });
    let most = most.to_usize();
    least >= T::default() && most.is_some_and(|most| most < data.child_data()[0].len())
}
