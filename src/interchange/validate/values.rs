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
        T::Utf8View => views(data, true),
        T::BinaryView => views(data, false),
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

/// How many views are looked at together.
const CHUNK: usize = 256;

/// Whether all views refer to bytes that exist and start as the view says, and, if they are `texts`, to UTF-8.
fn views(data: &ArrayData, texts: bool) -> bool {
    let Some(views) = elements::<u128>(data, 0, data.len()) else {
        return false;
    };
    let values = Values::of(data, &views, texts);
    // Views that have their values in themselves, as bytes: a length of at most 12, which is ASCII and so ends what is before it,
    // the value, and zeros. The others are left out, as zeros.
    let mut inline = [0; CHUNK * size_of::<u128>()];
    views.chunks(CHUNK).all(|views| {
        let (mut unused, mut all) = (0, true);
        for (view, inline) in views.iter().zip(inline.chunks_exact_mut(size_of::<u128>())) {
            let length = *view as u32 as usize;
            let kept = match UNUSED.get(length) {
                Some(bits) => {
                    unused |= view & bits;
                    *view
                }
                None => {
                    all &= values.have(ByteView::from(*view), texts);
                    0
                }
            };
            inline.copy_from_slice(&kept.to_le_bytes());
        }
        all && unused == 0 && (!texts || is_text(&inline[..size_of_val(views)]))
    })
}

/// The buffers that views refer to.
struct Values<'a> {
    buffers: Vec<&'a [u8]>,
    /// Each as a text, if it is one from end to end, and if they were looked at as a whole.
    whole: Vec<Option<&'a str>>,
}

impl<'a> Values<'a> {
    fn of(data: &'a ArrayData, views: &[u128], texts: bool) -> Self {
        let buffers: Vec<_> = data.buffers()[1..].iter().map(Buffer::as_slice).collect();
        let mut whole = Vec::new();
        if texts {
            // At most twice as many bytes as the views have: others may share the buffers.
            let bytes = buffers
                .iter()
                .map(|buffer| buffer.len() as u64)
                .sum::<u64>();
            let lengths = views.iter().map(|view| u64::from(*view as u32));
            let used = lengths
                .filter(|length| *length > MAX_INLINE_VIEW_LEN.into())
                .sum::<u64>();
            if bytes / 2 <= used {
                whole = buffers
                    .iter()
                    .map(|buffer| std::str::from_utf8(buffer).ok())
                    .collect();
            }
        }
        Self { buffers, whole }
    }

    /// Whether the bytes of a view exist, start as it says, and are UTF-8 if it is one of `texts`.
    fn have(&self, view: ByteView, texts: bool) -> bool {
        let (buffer, start) = (view.buffer_index as usize, view.offset as usize);
        let Some(end) = start.checked_add(view.length as usize) else {
            return false;
        };
        let bytes = self
            .buffers
            .get(buffer)
            .and_then(|buffer| buffer.get(start..end));
        let starts = |bytes: &&[u8]| bytes.first_chunk() == Some(&view.prefix.to_le_bytes());
        bytes
            .filter(starts)
            .is_some_and(|bytes| match self.whole.get(buffer) {
                _ if !texts => true,
                Some(Some(whole)) => whole.is_char_boundary(start) && whole.is_char_boundary(end),
                _ => is_text(bytes),
            })
    }
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
