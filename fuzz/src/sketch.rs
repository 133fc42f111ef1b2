//! Arrays in inputs: a type, an array of it node by node, and the bytes in which its buffers lie. Nothing is known of the values.

use arrow_data::{BufferSpec, layout};
use arrow_schema::DataType;

use crate::input::Input;
use crate::kinds;

/// Where a buffer begins, in bytes from the start of the arena; `None` for a null pointer.
pub(crate) type Place = Option<u16>;

/// In a place: one byte off, so that values are not aligned.
pub(crate) const ODD: u16 = 0x8000;

/// An array or a descendant, as a C struct has it.
#[derive(Debug)]
pub(crate) struct Node {
    pub length: i64,
    pub offset: i64,
    pub null_count: i64,
    /// Validity first, if the type has one; without out-of-line buffers.
    pub buffers: Vec<Place>,
    /// Out-of-line buffers of views, and how many bytes each is said to have.
    pub variadic: Vec<(Place, i64)>,
    pub children: Vec<Node>,
}

/// What a buffer of a type holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Holds {
    Bits,
    /// Values of as many bytes.
    Fixed(usize),
    /// Offsets of as many bytes each, one more than rows.
    Offsets(usize),
    /// What the last offset says.
    Bytes,
}

impl Holds {
    /// Bytes for `rows` rows; `None` if the last offset says it, or if it is more than anybody has.
    pub(crate) fn bytes(self, rows: u64) -> Option<usize> {
        let bytes = match self {
            Self::Bits => Some(rows.div_ceil(8)),
            Self::Fixed(width) => rows.checked_mul(width as u64),
            Self::Offsets(width) => rows.checked_add(1)?.checked_mul(width as u64),
            Self::Bytes => None,
        };
        usize::try_from(bytes?).ok()
    }
}

/// The buffers of a type but those out of line: arrow-rs's table, with the validity bitmap.
pub(crate) fn buffers(data_type: &DataType) -> Vec<Holds> {
    use DataType as T;
    let layout = layout(data_type);
    let validity = layout.can_contain_null_mask.then_some(Holds::Bits);
    let offsets = matches!(
        data_type,
        T::Utf8
            | T::LargeUtf8
            | T::Binary
            | T::LargeBinary
            | T::List(_)
            | T::LargeList(_)
            | T::Map(_, _)
    );
    let values = layout.buffers.iter().filter_map(|spec| match spec {
        BufferSpec::FixedWidth { byte_width, .. } if offsets => Some(Holds::Offsets(*byte_width)),
        BufferSpec::FixedWidth { byte_width, .. } => Some(Holds::Fixed(*byte_width)),
        BufferSpec::VariableWidth => Some(Holds::Bytes),
        BufferSpec::BitMap => Some(Holds::Bits),
        BufferSpec::AlwaysNull => None,
    });
    validity.into_iter().chain(values).collect()
}

/// Whether out-of-line buffers follow.
pub(crate) fn is_view(data_type: &DataType) -> bool {
    matches!(data_type, DataType::Utf8View | DataType::BinaryView)
}

impl Node {
    /// Reads an array of this type.
    pub(crate) fn read(input: &mut Input<'_>, data_type: &DataType) -> Self {
        let place = |input: &mut Input<'_>| Some(input.u16()).filter(|at| *at != u16::MAX);
        let (length, offset) = (input.count(), input.count());
        // -1 is the first: unknown.
        let null_count = match input.u8() {
            0 => -1,
            255 => input.count(),
            n => i64::from(n) - 1,
        };
        let buffers = buffers(data_type).iter().map(|_| place(input)).collect();
        let n = if is_view(data_type) {
            input.choice(5)
        } else {
            0
        };
        let variadic = (0..n).map(|_| (place(input), input.count())).collect();
        let children = kinds::children(data_type).into_iter();
        Self {
            length,
            offset,
            null_count,
            buffers,
            variadic,
            children: children.map(|t| Self::read(input, t)).collect(),
        }
    }

    /// The `n`th of this node and its descendants, parents first; `n` counts down to it.
    pub(crate) fn nth(&mut self, n: &mut usize) -> Option<&mut Self> {
        if *n == 0 {
            return Some(self);
        }
        *n -= 1;
        self.children.iter_mut().find_map(|child| child.nth(n))
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        1 + self.children.iter().map(Self::count).sum::<usize>()
    }
}

/// `bytes` bytes at a place, with zeros after the arena's end.
pub(crate) fn window(arena: &[u8], at: u16, bytes: usize) -> Option<Vec<u8>> {
    if bytes > LIMIT {
        return None;
    }
    let at = usize::from(at & !ODD).min(arena.len());
    let mut window = arena[at..arena.len().min(at + bytes)].to_vec();
    window.resize(bytes, 0);
    Some(window)
}

/// Most bytes of one buffer.
pub(crate) const LIMIT: usize = 1 << 16;

/// What the last of `rows + 1` offsets says.
pub(crate) fn last(offsets: &[u8], rows: u64) -> Option<i64> {
    let rows = usize::try_from(rows).ok()?;
    let width = offsets.len() / (rows + 1);
    let last = offsets.get(rows * width..)?;
    match width {
        4 => Some(i32::from_ne_bytes(last.try_into().ok()?).into()),
        _ => Some(i64::from_ne_bytes(last.try_into().ok()?)),
    }
}
