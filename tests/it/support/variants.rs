//! The same rows in other memory: slices, offsets, and children longer than their parents need.
//!
//! The columnar format leaves a producer much freedom in where rows lie. Whole arrays never use it, so a wrong
//! offset goes unseen with them.

use arrow_array::builder::make_view;
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_data::{ArrayData, ByteView};
use arrow_schema::{DataType, UnionMode};

use super::rng::Rng;
use super::values::{fixed, value};

/// How the rows of an array lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Variant {
    /// As they were made.
    Whole,
    /// Behind this many other rows and before some more.
    Sliced(usize),
    /// Every array below the root starts at an offset of its own, and goes on beyond what its parent needs: items
    /// that no list refers to, values without a key, buffers without a view.
    LongChildren,
    /// Both.
    Both(usize),
    /// No row, but some before and behind.
    Empty,
    /// All rows are null, between rows that are not.
    AllNull,
}

/// Those that keep the rows. Slices start at a byte of bitmaps, and within one; runs are cut in their middle.
pub(crate) const SAME_ROWS: [Variant; 5] = [
    Variant::Whole,
    Variant::Sliced(8),
    Variant::Both(11),
    Variant::LongChildren,
    Variant::Sliced(3),
];

/// An array in one of its variants.
pub(crate) struct Made {
    pub variant: Variant,
    /// The rows by arrow-rs alone: what a test must find.
    pub rows: ArrayRef,
    /// They begin at this row of `around`.
    pub offset: usize,
    /// The rows and those before and behind, laid out as C structs may be: with offsets at every level below, and
    /// children longer than their parents.
    pub around: ArrayData,
}

/// All variants of an array.
pub(crate) fn variants(array: &dyn Array, seed: u64) -> Vec<Made> {
    let more = [Variant::Empty, Variant::AllNull];
    let all = SAME_ROWS.into_iter().chain(more);
    all.filter_map(|variant| variant.of(array, seed)).collect()
}

/// The variants that keep the rows, of all columns.
pub(crate) fn batch_variants(batch: &RecordBatch, seed: u64) -> Vec<RecordBatch> {
    let of = |variant: Variant| map_columns(batch, |_, column| variant.of(column, seed));
    SAME_ROWS.into_iter().map(of).collect()
}

/// The batch with its columns in one variant after the other that keeps the rows.
pub(crate) fn mixed(batch: &RecordBatch, seed: u64) -> RecordBatch {
    let variant = |i: usize| SAME_ROWS[(i + seed as usize % 5) % SAME_ROWS.len()];
    map_columns(batch, |i, column| variant(i).of(column, seed + i as u64))
}

fn map_columns(batch: &RecordBatch, of: impl Fn(usize, &dyn Array) -> Option<Made>) -> RecordBatch {
    let columns = batch.columns().iter().enumerate();
    let columns = columns.map(|(i, column)| of(i, column).unwrap().array());
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(batch.schema(), columns.collect(), &options).unwrap()
}

impl Variant {
    /// `None` for `AllNull` of a type whose nulls are in its values.
    pub(crate) fn of(self, array: &dyn Array, seed: u64) -> Option<Made> {
        let rng = &mut Rng::new(seed ^ 0x51_1CE5);
        let mut data = array.to_data();
        let mut rows = array.slice(0, array.len());
        let (before, after) = match self {
            Self::Sliced(before) | Self::Both(before) => (before, 1 + rng.below(9)),
            Self::Empty => (array.len() / 2, array.len() - array.len() / 2),
            Self::AllNull => (5, 4),
            Self::Whole | Self::LongChildren => (0, 0),
        };
        let long = matches!(self, Self::LongChildren | Self::Both(_) | Self::AllNull);
        let around = match self {
            Self::Whole => {
                rows = make_array(data.clone());
                data
            }
            Self::Empty => {
                rows = array.slice(before, 0);
                surround(rng, &data, 0, 0, true)
            }
            _ => {
                if self == Self::AllNull {
                    if !has_validity(array.data_type()) {
                        return None;
                    }
                    // `ArrayData::validate` wants bits for the offset too.
                    let none = BooleanBuffer::new_unset(data.offset() + data.len());
                    let nulls = Some(NullBuffer::new(none.slice(0, data.len())));
                    data = data.into_builder().nulls(nulls).build().unwrap();
                    rows = make_array(data.clone());
                }
                let mut around = surround(rng, &data, before, after, long);
                // A validity bitmap without nulls in these rows, but with some beside them.
                if around.nulls().is_none() && has_validity(array.data_type()) && before > 0 {
                    let inside = before..before + array.len();
                    let bits = bits(around.len(), |i| inside.contains(&i) || i % 3 > 0);
                    around = around.into_builder().nulls(Some(bits)).build().unwrap();
                }
                around
            }
        };
        let offset = if self == Self::Whole { 0 } else { before };
        Some(Made {
            variant: self,
            rows,
            offset,
            around,
        })
    }
}

impl Made {
    /// As an array of arrow-rs, which keeps no offset where it can move pointers or children instead.
    pub(crate) fn array(&self) -> ArrayRef {
        arrow(&self.around).slice(self.offset, self.rows.len())
    }

    /// The rows with their offset, as a C struct has it.
    pub(crate) fn data(&self) -> ArrayData {
        window(&self.around, self.offset, self.rows.len())
    }
}

fn has_validity(data_type: &DataType) -> bool {
    use DataType::*;
    !matches!(data_type, Null | Union(..) | RunEndEncoded(..))
}

/// Validity that starts at bit 5 of its buffer.
fn bits(rows: usize, valid: impl Fn(usize) -> bool) -> NullBuffer {
    let bits = BooleanBuffer::collect_bool(5 + rows + 3, |i| i < 5 || valid(i - 5));
    NullBuffer::new(bits.slice(5, rows))
}

/// A part of the rows, by offset and length alone. (`ArrayData::slice` of arrow 59 slices a struct's children too.)
fn window(data: &ArrayData, from: usize, rows: usize) -> ArrayData {
    assert!(from + rows <= data.len());
    let nulls = data.nulls().map(|nulls| nulls.slice(from, rows));
    let window = data.clone().into_builder().offset(data.offset() + from);
    // SAFETY: `data` is valid and has these rows, as was just checked.
    unsafe { window.len(rows).nulls(nulls).build_unchecked() }
}

/// The array, from the leaves on: where the children of `data` are cut with their parent, `make_array` of arrow 59
/// would cut those of a struct twice.
fn arrow(data: &ArrayData) -> ArrayRef {
    let (offset, rows) = (data.offset(), data.len());
    let times = match data.data_type() {
        DataType::Struct(_) | DataType::Union(_, UnionMode::Sparse) => Some(1),
        DataType::FixedSizeList(_, size) => Some(*size as usize),
        _ => None,
    };
    let children = data.child_data().iter().map(arrow);
    let mut builder = data.clone().into_builder();
    builder = match times {
        None => builder.child_data(children.map(|child| child.to_data()).collect()),
        Some(times) => {
            let children = children.map(|child| child.slice(offset * times, rows * times));
            let ids = data
                .buffers()
                .iter()
                .map(|ids| ids.slice_with_length(offset, rows));
            let builder = builder.offset(0).buffers(ids.collect());
            builder.child_data(children.map(|child| child.to_data()).collect())
        }
    };
    // SAFETY: the data has the rows of `data`, which is valid.
    make_array(unsafe { builder.build_unchecked() })
}

/// The rows of `data` between others. `long`: as `Variant::LongChildren` has it.
fn surround(rng: &mut Rng, data: &ArrayData, before: usize, after: usize, long: bool) -> ArrayData {
    use DataType::*;
    let (data_type, from, n) = (data.data_type(), data.offset(), data.len());
    let rows = before + n + after;
    let inside = before..before + n;
    let mut buffers: Vec<Buffer> = vec![];
    let mut children = vec![];
    let nulls = data.nulls().map(|nulls| {
        let valid = |i| {
            if inside.contains(&i) {
                nulls.is_valid(i - before)
            } else {
                i % 3 > 0
            }
        };
        bits(rows, valid)
    });
    match data_type {
        Null => {}
        Boolean => {
            let values = BooleanBuffer::new(data.buffers()[0].clone(), from, n);
            let bit = |i| {
                if inside.contains(&i) {
                    values.value(i - before)
                } else {
                    i % 2 > 0
                }
            };
            buffers.push(BooleanBuffer::collect_bool(rows, bit).into_inner());
        }
        Utf8 | Binary | LargeUtf8 | LargeBinary => {
            let wide = matches!(data_type, LargeUtf8 | LargeBinary);
            let ends = numbers(&data.buffers()[0], wide, from, n + 1);
            let mut bytes = if long { b"##".to_vec() } else { vec![] };
            let mut offsets = vec![bytes.len()];
            for _ in 0..before {
                bytes.extend(value(rng, data_type));
                offsets.push(bytes.len());
            }
            offsets.extend(ends[1..].iter().map(|end| bytes.len() + end - ends[0]));
            bytes.extend(&data.buffers()[1][ends[0]..ends[n]]);
            for _ in 0..after {
                bytes.extend(value(rng, data_type));
                offsets.push(bytes.len());
            }
            bytes.extend(b"##".iter().take(if long { 2 } else { 0 }));
            buffers = vec![buffer(wide, offsets), bytes.into()];
        }
        Utf8View | BinaryView => {
            // The first of these buffers has views beside the rows, if any; the other none.
            let text = b"only of the rows beside".to_vec();
            let mut views = vec![make_view(&text, 0, 0); before];
            let own = data.buffers()[0].typed_data::<u128>()[from..from + n].iter();
            views.extend(own.map(|view| match ByteView::from(*view) {
                view if view.length > 12 => view.with_buffer_index(view.buffer_index + 1).as_u128(),
                _ => *view,
            }));
            views.extend(vec![make_view(&text, 0, 0); after]);
            buffers = vec![Buffer::from_vec(views), Buffer::from(text)];
            buffers.extend(data.buffers()[1..].iter().cloned());
            buffers.extend(long.then(|| Buffer::from(b"of no view".to_vec())));
        }
        List(_) | LargeList(_) | Map(..) => {
            let wide = matches!(data_type, LargeList(_));
            let ends = numbers(&data.buffers()[0], wide, from, n + 1);
            let items = window(&data.child_data()[0], ends[0], ends[n] - ends[0]);
            let spare = if long { 2 } else { 0 };
            let mut offsets = vec![spare];
            offsets.extend((0..before).map(|row| spare + row.div_ceil(2)));
            let first = offsets[before];
            offsets.extend(ends[1..].iter().map(|end| first + end - ends[0]));
            let last = offsets[before + n];
            offsets.extend((0..after).map(|row| last + (row + 2) / 2));
            let behind = after.div_ceil(2) + spare;
            buffers.push(buffer(wide, offsets));
            children.push(child(rng, &items, first, behind, long));
        }
        ListView(_) | LargeListView(_) => {
            let wide = matches!(data_type, LargeListView(_));
            let items = &data.child_data()[0];
            let spare = if long { 3 } else { 1 };
            let beside = |rows| std::iter::repeat_n(0, rows);
            let views = |i: usize, add: usize| {
                let own = numbers(&data.buffers()[i], wide, from, n);
                let own = own.into_iter().map(move |number| number + add);
                let all = beside(before).chain(own).chain(beside(after).map(|_| 1));
                buffer(wide, all.collect())
            };
            buffers = vec![views(0, spare), views(1, 0)];
            children.push(child(rng, items, spare, spare, long));
        }
        FixedSizeList(_, size) => {
            let size = *size as usize;
            let items = window(&data.child_data()[0], from * size, n * size);
            children.push(child(rng, &items, before * size, after * size, long));
        }
        Struct(_) | Union(_, UnionMode::Sparse) => {
            if let Union(fields, _) = data_type {
                let (id, _) = fields.iter().next().unwrap();
                let own = &data.buffers()[0][from..from + n];
                let beside = [vec![id as u8; before], vec![id as u8; after]];
                buffers.push([&beside[0], own, &beside[1]].concat().into());
            }
            for field in data.child_data() {
                let part = window(field, from, n);
                children.push(child(rng, &part, before, after, long));
            }
        }
        Union(fields, UnionMode::Dense) => {
            // Rows before are the first of their child, those behind the last.
            let k = fields.len();
            let ids: Vec<u8> = fields.iter().map(|(id, _)| id as u8).collect();
            let shift = |place: usize| (before + k - 1 - place) / k;
            let own = &data.buffers()[0][from..from + n];
            let places = own
                .iter()
                .map(|id| ids.iter().position(|i| i == id).unwrap());
            let own = numbers(&data.buffers()[1], false, from, n).into_iter();
            let mut pairs: Vec<_> = (0..before).map(|row| (row % k, row / k)).collect();
            pairs.extend(
                places
                    .zip(own)
                    .map(|(place, at)| (place, at + shift(place))),
            );
            let end = |place: usize| shift(place) + data.child_data()[place].len();
            pairs.extend((0..after).map(|row| (row % k, end(row % k) + row / k)));
            buffers.push(pairs.iter().map(|pair| ids[pair.0]).collect());
            buffers.push(buffer(
                false,
                pairs.into_iter().map(|pair| pair.1).collect(),
            ));
            for (place, values) in data.child_data().iter().enumerate() {
                children.push(child(rng, values, shift(place), after / k + 1, long));
            }
        }
        Dictionary(key, _) => {
            // Values without a key, as far as keys go.
            let values = &data.child_data()[0];
            let spare = if long && values.len() < 100 { 2 } else { 0 };
            let width = key.primitive_width().unwrap();
            let mut keys = vec![0u8; before * width];
            for row in from..from + n {
                let mut key = [0; 8];
                key[..width].copy_from_slice(&data.buffers()[0][row * width..][..width]);
                // What stands under a null wraps.
                let key = u64::from_le_bytes(key).wrapping_add(spare as u64);
                keys.extend(&key.to_le_bytes()[..width]);
            }
            keys.extend(vec![0; after * width]);
            buffers.push(keys.into());
            // The rows beside need a value.
            let needed = usize::from(values.is_empty() && before + after > 0);
            children.push(child(rng, values, spare, spare + needed, long));
        }
        RunEndEncoded(ends, _) => {
            let all: Vec<usize> = run_ends(&data.child_data()[0]);
            let first = all.partition_point(|end| *end <= from);
            let last = all.partition_point(|end| *end < from + n);
            let runs = if n == 0 { 0..0 } else { first..last + 1 };
            let mut own = all[runs.clone()].to_vec();
            own.iter_mut()
                .for_each(|end| *end = (*end - from).min(n) + before);
            // The rows beside share the first and the last run, except for a run at either end.
            let own_before = usize::from(before > 1 || (n == 0 && before > 0));
            let own_after = usize::from(after > 1 || (n == 0 && after > 0));
            if let Some(end) = own.last_mut() {
                *end += after.min(1);
            }
            let mut new = vec![if n == 0 { before } else { before / 2 }; own_before];
            new.extend(own);
            new.extend(vec![rows; own_after]);
            let values = window(&data.child_data()[1], runs.start, runs.len());
            let lead = if long { 4 } else { 0 };
            let new = [(0..lead).collect(), new].concat();
            let count = new.len() - lead;
            let new = match ends.data_type() {
                Int16 => new.iter().map(|end| *end as i16).collect(),
                Int32 => new.iter().map(|end| *end as i32).collect(),
                _ => new.iter().map(|end| *end as i64).collect(),
            };
            let builder = ArrayData::builder(ends.data_type().clone())
                .len(count)
                .offset(lead);
            children.push(builder.add_buffer(new).build().unwrap());
            // Values as many as runs, behind an offset of their own.
            let values = surround(rng, &values, lead + own_before, own_after, long);
            children.push(window(&values, lead, count));
        }
        _ => {
            let width = match data_type {
                FixedSizeBinary(width) => *width as usize,
                data_type => data_type.primitive_width().unwrap(),
            };
            let mut bytes = vec![];
            (0..before).for_each(|_| bytes.extend(fixed(rng, data_type)));
            bytes.extend(&data.buffers()[0][from * width..][..n * width]);
            (0..after).for_each(|_| bytes.extend(fixed(rng, data_type)));
            buffers.push(bytes.into());
        }
    }
    let made = ArrayData::builder(data_type.clone()).len(rows).nulls(nulls);
    // Byte vectors need not be aligned for the type.
    let made = made
        .buffers(buffers)
        .child_data(children)
        .align_buffers(true);
    made.build()
        .unwrap_or_else(|e| panic!("{data_type}, {before} and {after} around {n}: {e}"))
}

/// As `surround`. `long`: behind an offset, with rows at the end that nobody needs.
fn child(rng: &mut Rng, data: &ArrayData, before: usize, after: usize, long: bool) -> ArrayData {
    if !long {
        return surround(rng, data, before, after, false);
    }
    let (offset, more, hidden) = (1 + rng.below(9), 1 + rng.below(3), rng.below(3));
    let rows = before + data.len() + after + more;
    let longer = surround(rng, data, offset + before, after + more + hidden, true);
    window(&longer, offset, rows)
}

fn numbers(buffer: &Buffer, wide: bool, from: usize, n: usize) -> Vec<usize> {
    if buffer.is_empty() {
        return vec![0; n]; // offsets of no rows
    }
    if wide {
        let numbers = &buffer.typed_data::<i64>()[from..from + n];
        numbers.iter().map(|number| *number as usize).collect()
    } else {
        let numbers = &buffer.typed_data::<i32>()[from..from + n];
        numbers.iter().map(|number| *number as usize).collect()
    }
}

fn buffer(wide: bool, numbers: Vec<usize>) -> Buffer {
    if wide {
        numbers.into_iter().map(|number| number as i64).collect()
    } else {
        numbers.into_iter().map(|number| number as i32).collect()
    }
}

fn run_ends(data: &ArrayData) -> Vec<usize> {
    let (from, n) = (data.offset(), data.len());
    match data.data_type() {
        DataType::Int16 => {
            let ends = &data.buffers()[0].typed_data::<i16>()[from..from + n];
            ends.iter().map(|end| *end as usize).collect()
        }
        data_type => numbers(&data.buffers()[0], *data_type == DataType::Int64, from, n),
    }
}
