//! Writing what inputs are read from.

use std::collections::VecDeque;
use std::ops::Range;

use arrow_buffer::BooleanBuffer;
use arrow_data::ArrayData;
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, FieldRef, UnionMode};

use crate::kinds::{DEPTH, FLAT, KEYS, MOST, NESTED, RUN_ENDS, children};
use crate::sketch::{ODD, buffers, has_validity, is_view};

/// Appends what [`Input::count`](crate::input::Input::count) reads as `n`.
fn count(out: &mut Vec<u8>, n: i64) {
    match n {
        0..=251 => out.push(n as u8),
        252..=65535 => {
            out.push(252);
            out.extend((n as u16).to_le_bytes());
        }
        _ => {
            out.push(253);
            out.extend(n.to_le_bytes());
        }
    }
}

/// Appends what [`kinds::data_type`](crate::kinds::data_type) reads as this type, or as one with the same buffers and children.
/// `None` if it nests too deep or has too many children.
pub fn data_type(out: &mut Vec<u8>, data_type: &DataType) -> Option<()> {
    put_at(out, data_type, 0, &mut 1)
}

fn put_at(out: &mut Vec<u8>, data_type: &DataType, depth: usize, types: &mut usize) -> Option<()> {
    use DataType as T;
    let same = |t: &DataType| t == data_type;
    let alike = |t: &DataType| {
        std::mem::discriminant(t) == std::mem::discriminant(data_type)
            && t.primitive_width() == data_type.primitive_width()
            && !matches!(data_type, T::FixedSizeBinary(_))
    };
    let flat = FLAT
        .iter()
        .position(same)
        .or_else(|| FLAT.iter().position(alike));
    if let Some(tag) = flat {
        out.push(tag as u8);
        return Some(());
    }
    if depth == DEPTH || *types >= MOST {
        return None;
    }
    let mut one = |out: &mut Vec<u8>, tag: u8, field: &Field| {
        out.push(NESTED + tag);
        put_field(out, field, depth, types)
    };
    match data_type {
        T::List(f) => one(out, 0, f),
        T::LargeList(f) => one(out, 1, f),
        T::ListView(f) => one(out, 2, f),
        T::LargeListView(f) => one(out, 3, f),
        T::FixedSizeList(f, size) => {
            out.push(NESTED + 4);
            count(out, (*size).into());
            put_field(out, f, depth, types)
        }
        T::Struct(fields) => {
            out.push(NESTED + 5);
            put_fields(out, fields.iter(), 6, depth, types)
        }
        T::Map(entries, sorted) => {
            let T::Struct(fields) = entries.data_type() else {
                return None;
            };
            out.push(NESTED + 6 + u8::from(*sorted));
            fields
                .iter()
                .try_for_each(|f| put_field(out, f, depth + 1, types))
        }
        T::Union(fields, mode) => {
            out.push(NESTED + 8 + u8::from(*mode == UnionMode::Dense));
            let fields: Vec<_> = fields.iter().map(|(_, f)| f).collect();
            put_fields(out, fields.into_iter(), 4, depth, types)?;
            out.push(0);
            Some(())
        }
        T::Dictionary(key, values) => {
            out.push(NESTED + 10);
            out.push(KEYS.iter().position(|k| k == &**key)? as u8);
            *types += 1;
            put_at(out, values, depth + 1, types)
        }
        T::RunEndEncoded(ends, values) => {
            out.push(NESTED + 12);
            out.push(RUN_ENDS.iter().position(|e| e == ends.data_type())? as u8);
            *types += 1;
            put_field(out, values, depth, types)
        }
        _ => None,
    }
}

fn put_field(out: &mut Vec<u8>, field: &Field, depth: usize, types: &mut usize) -> Option<()> {
    *types += 1;
    out.push(u8::from(!field.is_nullable()));
    put_at(out, field.data_type(), depth + 1, types)
}

fn put_fields<'a>(
    out: &mut Vec<u8>,
    mut fields: impl ExactSizeIterator<Item = &'a FieldRef>,
    most: usize,
    depth: usize,
    types: &mut usize,
) -> Option<()> {
    if fields.len() > most {
        return None;
    }
    out.push(fields.len() as u8);
    fields.try_for_each(|f| put_field(out, f, depth, types))
}

/// Appends what [`kinds::data_type`](crate::kinds::data_type) and [`Node::read`](crate::sketch::Node::read) read as this array, its bytes to `arena`.
/// `None` if it does not fit.
pub fn array(out: &mut Vec<u8>, arena: &mut Vec<u8>, data: &ArrayData) -> Option<()> {
    data_type(out, data.data_type())?;
    put_node(out, arena, data)
}

fn put_node(out: &mut Vec<u8>, arena: &mut Vec<u8>, data: &ArrayData) -> Option<()> {
    let rows = data.len() + data.offset();
    count(out, data.len() as i64);
    count(out, data.offset() as i64);
    out.push(u8::try_from(data.null_count() + 1).unwrap_or(0));
    let mut place = |out: &mut Vec<u8>, bytes: &[u8]| {
        arena.resize(arena.len().next_multiple_of(16), 0);
        let at = arena.len();
        arena.extend_from_slice(bytes);
        out.extend((at as u16).to_le_bytes());
        (arena.len() < usize::from(ODD)).then_some(())
    };
    let mut values = data.buffers().iter();
    for (i, kind) in buffers(data.data_type()).into_iter().enumerate() {
        if i == 0 && has_validity(data.data_type()) {
            match data.nulls() {
                None => out.extend(u16::MAX.to_le_bytes()),
                Some(nulls) => {
                    let bit = |i: usize| i < data.offset() || nulls.is_valid(i - data.offset());
                    place(out, BooleanBuffer::collect_bool(rows, bit).values())?;
                }
            }
            continue;
        }
        let buffer = values.next()?;
        let used: Range<usize> = 0..kind
            .bytes(rows as u64)
            .unwrap_or(buffer.len())
            .min(buffer.len());
        let mut bytes = buffer[used].to_vec();
        if let (DataType::Union(fields, _), 0) = (data.data_type(), i) {
            // As `kinds` numbers them.
            for id in &mut bytes {
                *id = 7 * fields.iter().position(|(known, _)| known == *id as i8)? as u8;
            }
        }
        place(out, &bytes)?;
    }
    if is_view(data.data_type()) {
        let rest: Vec<_> = values.collect();
        if rest.len() > 4 {
            return None;
        }
        out.push(rest.len() as u8);
        for buffer in rest {
            place(out, buffer)?;
            count(out, buffer.len() as i64);
        }
    }
    data.child_data()
        .iter()
        .try_for_each(|child| put_node(out, arena, child))
}

/// Appends a tree that `Graph::read` reads as this type.
pub fn schema(out: &mut Vec<u8>, data_type: &DataType) -> Option<()> {
    // Level by level, as children have numbers.
    let mut queue = VecDeque::from([data_type]);
    let mut nodes = vec![];
    let mut next = 1;
    while let Some(data_type) = queue.pop_front() {
        let c = FFI_ArrowSchema::try_from(data_type).ok()?;
        let format = c.format().as_bytes();
        let children = children(data_type);
        let dictionary = matches!(data_type, DataType::Dictionary(_, _));
        let mut node = vec![1 + if dictionary { 48 } else { 0 }, 255, format.len() as u8];
        node.extend_from_slice(format);
        let listed = if dictionary { 0 } else { children.len() as u8 };
        if listed > 6 {
            return None;
        }
        node.push(listed);
        for _ in &children {
            node.extend([next, 0]);
            next += 1;
        }
        node.extend([0, 2, 0]);
        nodes.push(node);
        queue.extend(children);
    }
    let n = u8::try_from(nodes.len() - 1).ok().filter(|n| *n < 24)?;
    out.push(n);
    nodes.into_iter().for_each(|node| out.extend(node));
    Some(())
}
