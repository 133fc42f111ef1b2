//! Which buffers and children a type has, and how long they are, from the type alone: nothing here reads a
//! buffer. Sources: "Physical Memory Layout" of the columnar format, and "Buffers" of the C data interface. A new
//! Arrow type is one entry in [`Layout::of`], or none if its values have a fixed width.

use arrow_schema::{DataType, IntervalUnit, UnionMode};

use crate::error::{Error, Result};

/// The deepest nesting of types that is accepted.
pub(crate) const MAX_DEPTH: usize = 64;

/// The most nodes that a type may have, including the root. Types may share their children; each use counts.
pub(crate) const MAX_NODES: usize = 1 << 18;

/// What one buffer holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BufferKind {
    /// One validity bit per element.
    Validity,
    /// One value bit per element.
    Bits,
    /// `width` bytes per element, aligned to `align` bytes when typed.
    Fixed { width: u32, align: u8 },
    /// One `i32` or `i64` per element, and one more; each has `width` bytes.
    Offsets { width: u8 },
    /// Bytes; the last offset is their number.
    Bytes,
}

/// Which rows of its children an array's rows refer to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Nesting {
    /// No children.
    Leaf,
    /// The same rows (struct, sparse union).
    RowByRow,
    /// This many rows for each row (fixed-size list).
    Times(u32),
    /// The rows between two offsets (list, map).
    Ranges,
    /// Any rows (list view, dense union).
    Anywhere,
    /// Any rows of the dictionary.
    Dictionary,
    /// Run ends and values.
    Runs,
}

/// A type's physical layout.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Layout {
    buffers: [BufferKind; 3],
    n_buffers: u8,
    /// Any number of data buffers follow, and in the C data interface a buffer of their sizes.
    pub(crate) variadic: bool,
    pub(crate) nesting: Nesting,
    n_children: u32,
}

impl Layout {
    pub(crate) fn of(data_type: &DataType) -> Self {
        use BufferKind::{Bits, Bytes, Offsets, Validity};
        use DataType as T;
        use Nesting::{Anywhere, Leaf, Ranges, RowByRow, Runs, Times};
        let fixed = |width: u32, align| BufferKind::Fixed { width, align };
        let [offsets, long_offsets] = [4, 8].map(|width| Offsets { width });
        let (kinds, nesting, n_children): (&[BufferKind], _, _) = match data_type {
            T::Null => (&[], Leaf, 0),
            T::Boolean => (&[Validity, Bits], Leaf, 0),
            // Two 32-bit numbers.
            T::Interval(IntervalUnit::DayTime) => (&[Validity, fixed(8, 4)], Leaf, 0),
            T::Interval(IntervalUnit::MonthDayNano) => (&[Validity, fixed(16, 8)], Leaf, 0),
            T::FixedSizeBinary(width) => (&[Validity, fixed(unsigned(*width), 1)], Leaf, 0),
            T::Binary | T::Utf8 => (&[Validity, offsets, Bytes], Leaf, 0),
            T::LargeBinary | T::LargeUtf8 => (&[Validity, long_offsets, Bytes], Leaf, 0),
            T::BinaryView | T::Utf8View => (&[Validity, fixed(16, 16)], Leaf, 0),
            T::List(_) | T::Map(_, _) => (&[Validity, offsets], Ranges, 1),
            T::LargeList(_) => (&[Validity, long_offsets], Ranges, 1),
            T::ListView(_) => (&[Validity, fixed(4, 4), fixed(4, 4)], Anywhere, 1),
            T::LargeListView(_) => (&[Validity, fixed(8, 8), fixed(8, 8)], Anywhere, 1),
            T::FixedSizeList(_, size) => (&[Validity], Times(unsigned(*size)), 1),
            T::Struct(fields) => (&[Validity], RowByRow, fields.len()),
            T::Union(fields, UnionMode::Sparse) => (&[fixed(1, 1)], RowByRow, fields.len()),
            T::Union(fields, UnionMode::Dense) => {
                (&[fixed(1, 1), fixed(4, 4)], Anywhere, fields.len())
            }
            T::Dictionary(key, _) => {
                return Self {
                    nesting: Nesting::Dictionary,
                    n_children: 1,
                    ..Self::of(key)
                };
            }
            T::RunEndEncoded(_, _) => (&[], Runs, 2),
            // All others are fixed-width values, aligned to their size; arrow-rs knows it.
            t => {
                let width = t.primitive_width().map_or(0, |width| width as u8);
                (&[Validity, fixed(width.into(), width.min(16))], Leaf, 0)
            }
        };
        let mut buffers = [Bits; 3];
        for (buffer, kind) in buffers.iter_mut().zip(kinds) {
            *buffer = *kind;
        }
        Self {
            buffers,
            n_buffers: kinds.len() as u8,
            variadic: matches!(data_type, T::BinaryView | T::Utf8View),
            nesting,
            // No type has more: a union has at most 128, and a struct's fields are one allocation of pointers.
            n_children: u32::try_from(n_children).unwrap_or(u32::MAX),
        }
    }

    /// The buffers in the order of the C data interface, without data buffers of view types.
    pub(crate) fn buffers(&self) -> &[BufferKind] {
        &self.buffers[..usize::from(self.n_buffers)]
    }

    /// Whether the type says that all rows are null.
    pub(crate) fn is_null_type(&self) -> bool {
        self.n_buffers == 0 && matches!(self.nesting, Nesting::Leaf)
    }

    pub(crate) fn n_children(&self) -> usize {
        self.n_children as usize
    }

    pub(crate) fn has_validity(&self) -> bool {
        self.buffers().first() == Some(&BufferKind::Validity)
    }
}

impl BufferKind {
    /// The bytes that `rows` rows from the buffer's start take; `None` if they depend on the data.
    ///
    /// # Errors
    /// If the number of bytes does not fit in memory.
    pub(crate) fn bytes(self, rows: usize) -> Option<Result<usize>> {
        let bytes = match self {
            Self::Validity | Self::Bits => Some(rows.div_ceil(8)),
            Self::Fixed { width, .. } => rows.checked_mul(width as usize),
            Self::Offsets { width } => {
                let offsets = rows.checked_add(1);
                offsets.and_then(|n| n.checked_mul(usize::from(width)))
            }
            Self::Bytes => return None,
        };
        let fits = bytes.filter(|&n| isize::try_from(n).is_ok());
        Some(fits.ok_or_else(|| Error::argument(format!("{rows} rows do not fit in memory"))))
    }

    /// The alignment in bytes that typed access requires.
    pub(crate) fn align(self) -> usize {
        match self {
            Self::Validity | Self::Bits | Self::Bytes => 1,
            Self::Fixed { align, .. } => usize::from(align.max(1)),
            Self::Offsets { width } => usize::from(width),
        }
    }
}

/// The type of child `i`; a dictionary's values are its child 0.
pub(crate) fn child_type(data_type: &DataType, i: usize) -> Option<&DataType> {
    use DataType as T;
    match data_type {
        T::Dictionary(_, values) => (i == 0).then_some(values),
        _ => child_field(data_type, i).map(|field| field.data_type()),
    }
}

/// The field of child `i`; a dictionary has none.
pub(crate) fn child_field(data_type: &DataType, i: usize) -> Option<&arrow_schema::FieldRef> {
    use DataType as T;
    match data_type {
        T::List(field)
        | T::LargeList(field)
        | T::ListView(field)
        | T::LargeListView(field)
        | T::FixedSizeList(field, _)
        | T::Map(field, _) => (i == 0).then_some(field),
        T::Struct(fields) => fields.get(i),
        T::Union(fields, _) => fields.iter().nth(i).map(|(_, field)| field),
        T::RunEndEncoded(run_ends, values) => match i {
            0 => Some(run_ends),
            1 => Some(values),
            _ => None,
        },
        _ => None,
    }
}

/// A size that [`check_type`] found not to be negative.
fn unsigned(size: i32) -> u32 {
    u32::try_from(size).unwrap_or(0)
}

/// Refuses numbers of rows that the C data interface cannot express.
pub(crate) fn check_rows(rows: usize) -> Result<()> {
    match i64::try_from(rows) {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::argument(format!("{rows} rows are too many"))),
    }
}

/// Refuses types that no array can have: negative sizes, run ends or keys of a wrong type, maps whose entries are
/// not a struct of two fields, nesting deeper than [`MAX_DEPTH`], more than [`MAX_NODES`] nodes.
pub(crate) fn check_type(data_type: &DataType) -> Result<()> {
    /// `nodes` is the number of those seen so far.
    fn check(data_type: &DataType, depth: usize, nodes: &mut usize) -> Option<&'static str> {
        *nodes += 1;
        match (depth > MAX_DEPTH, *nodes > MAX_NODES) {
            (true, _) => return Some(TOO_DEEP),
            (_, true) => return Some(TOO_MANY),
            _ => {}
        }
        // First: the layout of a dictionary is that of its keys, which may be a dictionary themselves.
        fault(data_type).or_else(|| {
            let mut children = (0..).map_while(|i| child_type(data_type, i));
            children.find_map(|child| check(child, depth + 1, nodes))
        })
    }
    let fault = check(data_type, 0, &mut 0);
    fault.map_or(Ok(()), |fault| Err(Error::invalid("schema", fault)))
}

/// The message for types that exceed [`MAX_DEPTH`].
pub(crate) const TOO_DEEP: &str = "types nest deeper than 64 levels";

/// The message for types that exceed [`MAX_NODES`].
pub(crate) const TOO_MANY: &str = "more than 2^18 fields, those of nested types included";

/// Returns why no array can have this type; its descendants are not looked at.
pub(crate) fn fault(data_type: &DataType) -> Option<&'static str> {
    use DataType as T;
    match data_type {
        T::FixedSizeBinary(size) | T::FixedSizeList(_, size) if *size < 0 => {
            Some("a fixed size is negative")
        }
        T::Dictionary(key, _) if !key.is_dictionary_key_type() => {
            Some("dictionary keys must be integers")
        }
        T::RunEndEncoded(run_ends, _)
            if !matches!(run_ends.data_type(), T::Int16 | T::Int32 | T::Int64) =>
        {
            Some("run ends must be int16, int32 or int64")
        }
        T::Map(entries, _) => match entries.data_type() {
            T::Struct(fields) if fields.len() == 2 => None,
            _ => Some("a map's entries must be a struct of keys and values"),
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_schema::{Field, Fields, TimeUnit, UnionFields};
    use std::sync::Arc;

    /// Types that safe code can make, deeper than a stack.
    #[test]
    fn keys_that_are_dictionaries() {
        let mut deep = DataType::Int8;
        for _ in 0..50_000 {
            deep = DataType::Dictionary(Box::new(deep), Box::new(DataType::Int8));
        }
        let error = check_type(&deep).unwrap_err().to_string();
        assert!(
            error.contains("dictionary keys must be integers"),
            "{error}"
        );
        // One by one, since a drop of the whole would need the stack that a check does without.
        while let DataType::Dictionary(keys, _) = deep {
            deep = *keys;
        }
    }

    /// Our table agrees with arrow-rs's own layout for every type.
    #[test]
    fn agrees_with_arrow() {
        let item = Arc::new(Field::new("item", DataType::Int8, true));
        let pair: Fields = vec![
            Field::new("k", DataType::Int8, false),
            Field::new("v", DataType::Int8, true),
        ]
        .into();
        let union = UnionFields::try_new([0], [Field::new("a", DataType::Int8, true)]).unwrap();
        let types = [
            DataType::Null,
            DataType::Boolean,
            DataType::Int8,
            DataType::UInt16,
            DataType::Float16,
            DataType::Int32,
            DataType::Float64,
            DataType::Decimal32(5, 1),
            DataType::Decimal64(12, 1),
            DataType::Decimal128(20, 1),
            DataType::Decimal256(50, 1),
            DataType::Date32,
            DataType::Date64,
            DataType::Time32(TimeUnit::Second),
            DataType::Time64(TimeUnit::Nanosecond),
            DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into())),
            DataType::Duration(TimeUnit::Second),
            DataType::Interval(IntervalUnit::YearMonth),
            DataType::Interval(IntervalUnit::DayTime),
            DataType::Interval(IntervalUnit::MonthDayNano),
            DataType::FixedSizeBinary(7),
            DataType::Utf8,
            DataType::LargeBinary,
            DataType::Utf8View,
            DataType::BinaryView,
            DataType::List(item.clone()),
            DataType::LargeList(item.clone()),
            DataType::ListView(item.clone()),
            DataType::LargeListView(item.clone()),
            DataType::FixedSizeList(item.clone(), 3),
            DataType::Struct(pair.clone()),
            DataType::Map(
                Arc::new(Field::new("entries", DataType::Struct(pair), false)),
                false,
            ),
            DataType::Union(union.clone(), UnionMode::Sparse),
            DataType::Union(union, UnionMode::Dense),
            DataType::Dictionary(Box::new(DataType::UInt16), Box::new(DataType::Utf8)),
            DataType::RunEndEncoded(
                Arc::new(Field::new("run_ends", DataType::Int32, false)),
                item,
            ),
        ];
        for data_type in types {
            let ours = Layout::of(&data_type);
            let theirs = arrow_data::layout(&data_type);
            assert_eq!(
                ours.has_validity(),
                theirs.can_contain_null_mask,
                "{data_type}"
            );
            assert_eq!(ours.is_null_type(), data_type == DataType::Null);
            assert_eq!(ours.variadic, theirs.variadic, "{data_type}");
            let kinds: Vec<_> = ours
                .buffers()
                .iter()
                .filter(|k| **k != BufferKind::Validity)
                .collect();
            assert_eq!(kinds.len(), theirs.buffers.len(), "{data_type}");
            for (kind, spec) in kinds.into_iter().zip(&theirs.buffers) {
                match (kind, spec) {
                    (
                        BufferKind::Fixed { width, align },
                        arrow_data::BufferSpec::FixedWidth {
                            byte_width,
                            alignment,
                        },
                    ) => {
                        assert_eq!(*width as usize, *byte_width, "{data_type}");
                        // Some targets align wide numbers to less than their size.
                        let natural = align_of::<i64>() == 8 && align_of::<i128>() == 16;
                        let (ours, theirs) = (usize::from(*align), *alignment);
                        assert!(ours == theirs || !natural && ours > theirs, "{data_type}");
                    }
                    (
                        BufferKind::Offsets { width },
                        arrow_data::BufferSpec::FixedWidth { byte_width, .. },
                    ) => assert_eq!(usize::from(*width), *byte_width, "{data_type}"),
                    (BufferKind::Bits, arrow_data::BufferSpec::BitMap)
                    | (BufferKind::Bytes, arrow_data::BufferSpec::VariableWidth) => {}
                    other => panic!("{data_type}: {other:?}"),
                }
            }
        }
    }
}
