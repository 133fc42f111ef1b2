//! Copies of an array with one difference each, to show that a comparison or a test sees it.

use arrow_array::{Array, ArrayRef, make_array};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_data::{ArrayData, ByteView};
use arrow_schema::{DataType, UnionMode};

/// Every way to change the logical value of `row` by one bit, one list length, one key or one null, with what was
/// changed. Empty where the row has nothing to change (a null of a required field, an empty list of empty lists).
pub(crate) fn differences(array: &dyn Array, row: usize) -> Vec<(String, ArrayRef)> {
    let changed = changes(&array.to_data(), row, true);
    changed
        .into_iter()
        .map(|(what, data)| (what, make_array(data)))
        .collect()
}

type Changes = Vec<(String, ArrayData)>;

fn with_buffer(data: &ArrayData, index: usize, change: impl FnOnce(&mut [u8])) -> ArrayData {
    let mut buffers = data.buffers().to_vec();
    let mut bytes = buffers[index].to_vec();
    change(&mut bytes);
    buffers[index] = Buffer::from(bytes);
    data.clone()
        .into_builder()
        .buffers(buffers)
        .align_buffers(true)
        .build()
        .unwrap()
}

fn changes(data: &ArrayData, row: usize, nullable: bool) -> Changes {
    use DataType::*;
    let mut all = vec![];
    let is_null = data.is_null(row);
    let has_validity = !matches!(data.data_type(), Null | Union(..) | RunEndEncoded(..));
    // A valid key may point to a null value: that difference is planted below, in the values.
    let indirect = matches!(data.data_type(), Dictionary(..));
    if nullable && has_validity && !indirect {
        let bits = BooleanBuffer::collect_bool(data.len() + data.offset(), |i| {
            (i < data.len() && data.is_valid(i)) != (i == row)
        });
        let nulls = NullBuffer::new(bits.slice(0, data.len()));
        let flipped = data
            .clone()
            .into_builder()
            .nulls(Some(nulls))
            .build()
            .unwrap();
        all.push((
            if is_null {
                "null to value"
            } else {
                "value to null"
            }
            .to_owned(),
            flipped,
        ));
    }
    if is_null {
        return all;
    }
    let at = data.offset() + row;
    match data.data_type() {
        Null => {}
        Boolean => all.push((
            "bool".into(),
            with_buffer(data, 0, |b| b[at / 8] ^= 1 << (at % 8)),
        )),
        Utf8 | Binary => {
            let offsets = data.buffers()[0].typed_data::<i32>();
            all.extend(bytes(data, offsets[at] as usize, offsets[at + 1] as usize));
        }
        LargeUtf8 | LargeBinary => {
            let offsets = data.buffers()[0].typed_data::<i64>();
            all.extend(bytes(data, offsets[at] as usize, offsets[at + 1] as usize));
        }
        Utf8View | BinaryView => all.extend(view(data, at)),
        List(f) | Map(f, _) => {
            let offsets = data.buffers()[0].typed_data::<i32>();
            let items = offsets[at] as usize..offsets[at + 1] as usize;
            all.extend(in_items(data, items, f.is_nullable()));
        }
        LargeList(f) => {
            let offsets = data.buffers()[0].typed_data::<i64>();
            let items = offsets[at] as usize..offsets[at + 1] as usize;
            all.extend(in_items(data, items, f.is_nullable()));
        }
        ListView(f) => {
            let [start, size] = [0, 1].map(|i| data.buffers()[i].typed_data::<i32>()[at] as usize);
            if size > 0 {
                let shorter = (size as i32 - 1).to_le_bytes();
                let data = with_buffer(data, 1, |b| b[at * 4..][..4].copy_from_slice(&shorter));
                all.push(("list view size".into(), data));
            }
            all.extend(in_items(data, start..start + size, f.is_nullable()));
        }
        LargeListView(f) => {
            let [start, size] = [0, 1].map(|i| data.buffers()[i].typed_data::<i64>()[at] as usize);
            all.extend(in_items(data, start..start + size, f.is_nullable()));
        }
        FixedSizeList(f, size) => {
            let size = *size as usize;
            all.extend(in_items(data, at * size..(at + 1) * size, f.is_nullable()));
        }
        Struct(fields) => {
            for (i, field) in fields.iter().enumerate() {
                all.extend(in_child(data, i, at, field.is_nullable()));
            }
        }
        Union(fields, mode) => {
            let id = data.buffers()[0].typed_data::<i8>()[at];
            let child = fields.iter().position(|(other, _)| other == id).unwrap();
            let index = match mode {
                UnionMode::Sparse => at,
                UnionMode::Dense => data.buffers()[1].typed_data::<i32>()[at] as usize,
            };
            all.extend(in_child(data, child, index, true));
            let (other, _) = fields.iter().find(|(other, _)| *other != id).unwrap();
            if *mode == UnionMode::Sparse {
                all.push((
                    "type id".into(),
                    with_buffer(data, 0, |b| b[at] = other as u8),
                ));
            }
        }
        Dictionary(key, _) => {
            let width = key.primitive_width().unwrap();
            let mut bytes = [0; 8];
            bytes[..width].copy_from_slice(&data.buffers()[0].as_slice()[at * width..][..width]);
            all.extend(in_child(
                data,
                0,
                u64::from_le_bytes(bytes) as usize,
                nullable,
            ));
        }
        RunEndEncoded(..) => {
            let runs = &data.child_data()[0];
            let end = |i: usize| {
                let i = runs.offset() + i;
                match runs.data_type() {
                    Int16 => runs.buffers()[0].typed_data::<i16>()[i] as usize,
                    Int32 => runs.buffers()[0].typed_data::<i32>()[i] as usize,
                    _ => runs.buffers()[0].typed_data::<i64>()[i] as usize,
                }
            };
            let run = (0..runs.len()).find(|run| end(*run) > at).unwrap();
            all.extend(in_child(data, 1, run, nullable));
        }
        data_type => {
            let width = match data_type {
                FixedSizeBinary(width) => *width as usize,
                data_type => data_type.primitive_width().unwrap(),
            };
            // The lowest bit, and the highest: a sign, or a bit of a NaN.
            for (name, byte, bit) in [
                ("lowest bit", 0, 1),
                ("highest bit", width.max(1) - 1, 0x80),
            ] {
                if width > 0 {
                    all.push((
                        name.into(),
                        with_buffer(data, 0, |b| b[at * width + byte] ^= bit),
                    ));
                }
            }
        }
    }
    all
}

/// Changes an ASCII letter, or any byte of a binary, at both ends of a value.
fn bytes(data: &ArrayData, start: usize, end: usize) -> Changes {
    let text = matches!(data.data_type(), DataType::Utf8 | DataType::LargeUtf8);
    let values = &data.buffers()[1].as_slice()[start..end];
    let fits = |byte: &u8| !text || byte.is_ascii();
    let ends = [values.iter().position(fits), values.iter().rposition(fits)];
    let changed = |at: usize| {
        (
            format!("byte {at}"),
            with_buffer(data, 1, |b| b[start + at] ^= 1),
        )
    };
    ends.into_iter().flatten().map(changed).collect()
}

fn view(data: &ArrayData, at: usize) -> Changes {
    let view = ByteView::from(data.buffers()[0].typed_data::<u128>()[at]);
    let (buffer, start) = match view.length {
        0..=12 => (0, at * 16 + 4),
        _ => (1 + view.buffer_index as usize, view.offset as usize),
    };
    let text = matches!(data.data_type(), DataType::Utf8View);
    let values = &data.buffers()[buffer].as_slice()[start..][..view.length as usize];
    let last = values.iter().rposition(|byte| !text || byte.is_ascii());
    // The prefix of a long view repeats its first bytes.
    let last = last.filter(|last| view.length <= 12 || *last >= 4);
    let changed = |last: usize| {
        (
            format!("view byte {last}"),
            with_buffer(data, buffer, |b| b[start + last] ^= 1),
        )
    };
    last.map(changed).into_iter().collect()
}

/// The first and the last item.
fn in_items(data: &ArrayData, items: std::ops::Range<usize>, nullable: bool) -> Changes {
    if items.is_empty() {
        return vec![];
    }
    let mut all = in_child(data, 0, items.start, nullable);
    if items.len() > 1 {
        all.extend(in_child(data, 0, items.end - 1, nullable));
    }
    all
}

fn in_child(data: &ArrayData, child: usize, index: usize, nullable: bool) -> Changes {
    let changed = changes(&data.child_data()[child], index, nullable);
    let changed = changed.into_iter().map(|(what, changed)| {
        let mut children = data.child_data().to_vec();
        children[child] = changed;
        let data = data
            .clone()
            .into_builder()
            .child_data(children)
            .build()
            .unwrap();
        (format!("child {child} at {index}: {what}"), data)
    });
    changed.collect()
}
