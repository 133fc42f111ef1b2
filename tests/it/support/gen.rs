//! Arrays of any type, from a seed.

use arrow_array::builder::make_view;
use arrow_array::{ArrayRef, make_array};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, UnionFields, UnionMode};

use super::rng::Rng;
use super::values::{fixed, value};

pub(crate) use super::cases::*;

/// Which rows are null. Unions and run-end encoded arrays have no validity of their own: their children get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nulls {
    /// No validity buffer anywhere.
    None,
    Some,
    All,
}

/// A valid array, the same one for the same arguments.
pub(crate) fn array(data_type: &DataType, rows: usize, nulls: Nulls, seed: u64) -> ArrayRef {
    make_array(node(
        &mut Rng::new(seed),
        data_type,
        rows,
        nulls,
        below(nulls),
    ))
}

/// What the levels below an array of these nulls have.
fn below(nulls: Nulls) -> Nulls {
    if nulls == Nulls::None {
        Nulls::None
    } else {
        Nulls::Some
    }
}

/// `own` is for this level, `deep` for those below.
fn node(rng: &mut Rng, data_type: &DataType, rows: usize, own: Nulls, deep: Nulls) -> ArrayData {
    use DataType::*;
    let mut buffers = vec![];
    let mut children = vec![];
    match data_type {
        Null => {}
        Boolean => buffers.push(BooleanBuffer::collect_bool(rows, |_| rng.one_in(2)).into_inner()),
        Utf8 | Binary => {
            let (offsets, values) = strings(rng, data_type, rows);
            buffers = vec![offsets.iter().map(|&o| o as i32).collect(), values.into()];
        }
        LargeUtf8 | LargeBinary => {
            let (offsets, values) = strings(rng, data_type, rows);
            buffers = vec![offsets.iter().map(|&o| o as i64).collect(), values.into()];
        }
        Utf8View | BinaryView => buffers = views(rng, data_type, rows),
        List(field) | LargeList(field) => {
            let (offsets, items) = offsets(rng, rows);
            buffers.push(if matches!(data_type, List(_)) {
                offsets.iter().map(|&o| o as i32).collect()
            } else {
                offsets.iter().map(|&o| o as i64).collect()
            });
            children.push(child(rng, field, items, deep));
        }
        Map(entries, sorted) => {
            let (offsets, items) = offsets(rng, rows);
            buffers.push(offsets.iter().map(|&o| o as i32).collect());
            children.push(map_entries(rng, entries.data_type(), *sorted, items, deep));
        }
        ListView(field) | LargeListView(field) => {
            let items = rows + rows / 2 + 5;
            let starts: Vec<usize> = (0..rows).map(|_| rng.below(items + 1)).collect();
            let sizes: Vec<usize> = starts
                .iter()
                .map(|s| rng.below((items - s).min(4) + 1))
                .collect();
            buffers = if matches!(data_type, ListView(_)) {
                [starts, sizes]
                    .map(|v| v.iter().map(|&x| x as i32).collect())
                    .into()
            } else {
                [starts, sizes]
                    .map(|v| v.iter().map(|&x| x as i64).collect())
                    .into()
            };
            children.push(child(rng, field, items, deep));
        }
        FixedSizeList(field, size) => children.push(child(rng, field, rows * *size as usize, deep)),
        Struct(fields) => children.extend(fields.iter().map(|f| child(rng, f, rows, deep))),
        Union(fields, mode) => (buffers, children) = union(rng, fields, *mode, rows, own, deep),
        Dictionary(key, value) => {
            let values = 1 + rng.below(rows.min(60) + 1);
            children.push(pad(rng, value, values, below(own), deep));
            let width = key.primitive_width().unwrap();
            let validity = validity(rng, rows, own);
            let spare = usize::from(values > 1 && rng.one_in(2)); // the first value may have no key
            let keys: Vec<u8> = (0..rows)
                .flat_map(|row| {
                    // A key under a null may be out of range.
                    let null = validity.as_ref().is_some_and(|v| v.is_null(row));
                    let key = if null {
                        rng.below(values + 5)
                    } else {
                        spare + rng.below(values - spare)
                    };
                    (key as u64).to_le_bytes().into_iter().take(width)
                })
                .collect();
            return finish(data_type, rows, validity, vec![keys.into()], children);
        }
        RunEndEncoded(ends, values) => {
            let mut run_ends = vec![];
            let mut end = 0;
            while end < rows {
                end += 1 + if rng.one_in(3) { 0 } else { rng.below(7) };
                run_ends.push(end);
            }
            if let Some(last) = run_ends.last_mut().filter(|_| rng.one_in(2)) {
                *last = rows; // otherwise the last run may go on beyond the array
            }
            let runs = run_ends.len();
            let ends_buffer = match ends.data_type() {
                Int16 => run_ends.iter().map(|&e| e as i16).collect(),
                Int32 => run_ends.iter().map(|&e| e as i32).collect(),
                _ => run_ends.iter().map(|&e| e as i64).collect(),
            };
            children.push(finish(
                ends.data_type(),
                runs,
                None,
                vec![ends_buffer],
                vec![],
            ));
            children.push(pad(rng, values.data_type(), runs, own, deep));
        }
        _ => {
            let bytes: Vec<u8> = (0..rows).flat_map(|_| fixed(rng, data_type)).collect();
            buffers.push(bytes.into());
        }
    }
    let has_validity = !matches!(data_type, Null | Union(..) | RunEndEncoded(..));
    let validity = if has_validity {
        validity(rng, rows, own)
    } else {
        None
    };
    finish(data_type, rows, validity, buffers, children)
}

fn finish(
    data_type: &DataType,
    rows: usize,
    nulls: Option<NullBuffer>,
    buffers: Vec<Buffer>,
    children: Vec<ArrayData>,
) -> ArrayData {
    let data = ArrayData::builder(data_type.clone()).len(rows).nulls(nulls);
    // Byte vectors need not be aligned for the type.
    let data = data
        .buffers(buffers)
        .child_data(children)
        .align_buffers(true)
        .build();
    data.unwrap_or_else(|e| panic!("{data_type}, {rows} rows: {e}"))
}

/// Bits that start anywhere in their buffer, with garbage around them.
fn validity(rng: &mut Rng, rows: usize, nulls: Nulls) -> Option<NullBuffer> {
    let lead = rng.below(10);
    let (null, valid) = (rng.below(rows), rng.below(rows));
    let inside = lead..lead + rows;
    let bits = BooleanBuffer::collect_bool(lead + rows + rng.below(10), |i| {
        let random = !rng.one_in(4);
        match nulls {
            Nulls::All if inside.contains(&i) => false,
            // At least one null, and one value in two rows or more.
            Nulls::Some if i == lead + null => false,
            Nulls::Some if i == lead + valid => true,
            _ => random,
        }
    });
    (nulls != Nulls::None).then(|| NullBuffer::new(bits.slice(lead, rows)))
}

fn child(rng: &mut Rng, field: &Field, rows: usize, deep: Nulls) -> ArrayData {
    let own = if !field.is_nullable() || rng.one_in(4) {
        Nulls::None
    } else {
        deep
    };
    pad(rng, field.data_type(), rows, own, deep)
}

/// Sometimes a slice of a longer array.
fn pad(rng: &mut Rng, data_type: &DataType, rows: usize, own: Nulls, deep: Nulls) -> ArrayData {
    if !rng.one_in(4) {
        return node(rng, data_type, rows, own, deep);
    }
    let (lead, trail) = (1 + rng.below(9), rng.below(3));
    // Sliced as an array: `make_array` of arrow 59 slices the outcome of `ArrayData::slice` of a struct again.
    make_array(node(rng, data_type, lead + rows + trail, own, deep))
        .slice(lead, rows)
        .to_data()
}

/// Offsets that need not start at 0, and a number of items that may go beyond the last.
fn offsets(rng: &mut Rng, rows: usize) -> (Vec<usize>, usize) {
    let limit = if rows > 4000 { 2 } else { 4 };
    let mut end = if rng.one_in(2) { rng.below(4) } else { 0 };
    let mut offsets = vec![end];
    for _ in 0..rows {
        end += if rng.one_in(32) {
            rng.below(12)
        } else {
            rng.below(limit)
        };
        offsets.push(end);
    }
    (offsets, end + if rng.one_in(2) { rng.below(4) } else { 0 })
}

fn strings(rng: &mut Rng, data_type: &DataType, rows: usize) -> (Vec<usize>, Vec<u8>) {
    let mut bytes = vec![b'#'; if rng.one_in(2) { rng.below(6) } else { 0 }];
    let mut offsets = vec![bytes.len()];
    for _ in 0..rows {
        bytes.extend(value(rng, data_type));
        offsets.push(bytes.len());
    }
    bytes.extend(vec![b'#'; rng.below(3)]);
    (offsets, bytes)
}

fn views(rng: &mut Rng, data_type: &DataType, rows: usize) -> Vec<Buffer> {
    let mut blocks = vec![b"##".to_vec(); if rows < 4 { 1 } else { 3 }];
    let mut views: Vec<u128> = vec![];
    for row in 0..rows {
        if row > 0 && rng.one_in(8) {
            views.push(views[rng.below(row)]); // two views of the same bytes
            continue;
        }
        let value = value(rng, data_type);
        let block = rng.below(blocks.len());
        views.push(make_view(&value, block as u32, blocks[block].len() as u32));
        if value.len() > 12 {
            blocks[block].extend(value);
        }
    }
    std::iter::once(Buffer::from_vec(views))
        .chain(blocks.into_iter().map(Buffer::from))
        .collect()
}

fn map_entries(
    rng: &mut Rng,
    entries: &DataType,
    sorted: bool,
    rows: usize,
    deep: Nulls,
) -> ArrayData {
    let DataType::Struct(fields) = entries else {
        panic!("map entries are {entries}")
    };
    let keys = match fields[0].data_type() {
        DataType::Utf8 if sorted => {
            let offsets = (0..=rows as i32).map(|i| i * 7).collect();
            let text: String = (0..rows).map(|i| format!("k{:06}", i * 3)).collect();
            finish(
                &DataType::Utf8,
                rows,
                None,
                vec![offsets, text.into_bytes().into()],
                vec![],
            )
        }
        DataType::Int32 if sorted => {
            let keys = (0..rows as i32).map(|i| i * 5 - 100).collect();
            finish(&DataType::Int32, rows, None, vec![keys], vec![])
        }
        other if sorted => panic!("no sorted map keys of type {other}"),
        _ => child(rng, &fields[0], rows, deep),
    };
    let values = child(rng, &fields[1], rows, deep);
    finish(entries, rows, None, vec![], vec![keys, values])
}

fn union(
    rng: &mut Rng,
    fields: &UnionFields,
    mode: UnionMode,
    rows: usize,
    own: Nulls,
    deep: Nulls,
) -> (Vec<Buffer>, Vec<ArrayData>) {
    let ids: Vec<i8> = fields.iter().map(|(id, _)| id).collect();
    let picks: Vec<usize> = (0..rows).map(|_| rng.below(ids.len())).collect();
    let mut buffers = vec![picks.iter().map(|&p| ids[p]).collect()];
    let mut lengths = vec![rows; ids.len()];
    if mode == UnionMode::Dense {
        // In order for each child, as the format asks: with gaps, and with rows that share a value.
        let mut next: Vec<usize> = ids.iter().map(|_| rng.below(3)).collect();
        lengths.fill(0);
        let offsets = picks.iter().map(|&p| {
            let offset = next[p];
            lengths[p] = offset + 1;
            next[p] += if rng.one_in(4) {
                0
            } else {
                1 + usize::from(rng.one_in(8))
            };
            offset as i32
        });
        buffers.push(offsets.collect());
        lengths
            .iter_mut()
            .for_each(|length| *length += rng.below(3));
    }
    let children = fields.iter().zip(lengths);
    let children = children
        .map(|((_, f), length)| pad(rng, f.data_type(), length, own, deep))
        .collect();
    (buffers, children)
}
