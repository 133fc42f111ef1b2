//! Full validation: checks all values of an array that may be invalid.
//!
//! An import has checked counts, lengths and the type, and null counts were counted. Most values are checked by arrow-rs
//! (`ArrayData::validate_values`), each array of the tree by itself, so that an error has its path. This walk adds what arrow-rs
//! leaves out, and relies on all the same: first offsets, list views, nulls where none may be, and a value for each run.
//!
//! Not used, and why:
//! - `ArrayData::validate`, which `validate_full` calls for each level once more, requires a validity bitmap with bits for
//!   `offset + len` rows, although a bitmap has its own offset, and so rejects valid data. It panics on list views whose offset and
//!   size overflow.
//! - `ArrayData::validate_nulls` expands a fixed-size list's bitmap in memory, to any size, and from the wrong row if the list has
//!   an offset.
//!
//! Not checked, because arrow-rs does not rely on it: whether decimals fit their precision and
//! times their day, the order of a dense union's offsets, and whether a map's keys are sorted.

use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::ops::Range;
use std::sync::Arc;

use arrow_buffer::{ArrowNativeType, Buffer, NullBuffer};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, FieldRef};

use crate::abi::guard::call_foreign;
use crate::data::DeviceArray;
use crate::data::host::unwrap;
use crate::data::layout::{BufferKind, Layout, child_field};
use crate::data::node::{Buffers, Node};
use crate::data::numbers::int;
use crate::device::Counters;
use crate::error::Result;
use crate::interchange::Path;
use crate::transfer::{Download, Scope};

/// Checks the values of an imported array whose null counts have been checked. Waits for the memory if there are values that
/// may be invalid, as a task if this `polls`; where the host cannot read it, those are copied to the host first.
///
/// Returns a copy to use instead if the array is on the CPU, and only texts under nulls are no UTF-8: there zeros are.
///
/// # Errors
/// As [`check`]; those that the device reports.
pub(super) async fn validate(array: &DeviceArray, polls: bool) -> Result<Option<DeviceArray>> {
    let Some(left) = doubtful(array) else {
        return Ok(None);
    };
    let queue = array.device().default_queue();
    let download = Download::of_scope(left, Scope::Reachable, queue);
    let left = match polls {
        true => Box::new(download).await?,
        false => download.wait()?,
    };
    mended(array, &unwrap(&left)?)
}

/// Checks what was left to check of an array, and else a copy of the array without texts under nulls.
fn mended(array: &DeviceArray, left: &ArrayData) -> Result<Option<DeviceArray>> {
    let Err(refused) = check(left) else {
        return Ok(None);
    };
    if !array.device().has_all_host_memory() {
        return Err(refused);
    }
    let data = unwrap(array)?;
    // No more than there is, however many columns name the same bytes.
    let room = texts(&data, &mut HashSet::new());
    let (mut left, mut copies) = (room, HashMap::new());
    match without_texts_under_nulls(&data, &mut left, &mut copies) {
        Some(data) if !copies.is_empty() && check(&data).is_ok() => {
            let copied = room - left;
            Counters::add(&array.device().counters().host_copied_bytes, copied);
            DeviceArray::from_host(data).map(Some)
        }
        _ => Err(refused),
    }
}

/// The bytes of all texts of an array; those that several columns name count once.
fn texts(data: &ArrayData, seen: &mut HashSet<usize>) -> usize {
    let own = match data.data_type() {
        DataType::Utf8 | DataType::LargeUtf8 => data.buffers().get(1),
        _ => None,
    };
    let own = own.filter(|texts| seen.insert(texts.as_ptr().addr()));
    let below = data.child_data().iter().map(|child| texts(child, seen));
    below.sum::<usize>() + own.map_or(0, Buffer::len)
}

/// The addresses of bytes, offsets and bitmap of a column of texts, and its rows: what a copy of its bytes depends on.
type Texts = ([*const u8; 3], [usize; 3]);

/// The same data with zeros for texts under nulls that are no UTF-8, which takes copies of these columns' bytes off `room`, one for columns
/// that are the same. `None` if that is too little, or there is no memory. The data is not checked.
fn without_texts_under_nulls(
    data: &ArrayData,
    room: &mut usize,
    copies: &mut HashMap<Texts, Buffer>,
) -> Option<ArrayData> {
    let mut buffers = data.buffers().to_vec();
    let nulls = data.nulls().filter(|nulls| nulls.null_count() > 0);
    let bad = match (data.data_type(), nulls) {
        (DataType::Utf8, Some(nulls)) => bad_texts::<i32>(data, nulls),
        (DataType::LargeUtf8, Some(nulls)) => bad_texts::<i64>(data, nulls),
        _ => Vec::new(),
    };
    if let Some(nulls) = nulls.filter(|_| !bad.is_empty()) {
        let addresses = [&buffers[1], &buffers[0], nulls.buffer()].map(Buffer::as_ptr);
        let key = (addresses, [data.offset(), data.len(), nulls.offset()]);
        let copy = match copies.entry(key) {
            Entry::Occupied(copy) => copy.into_mut(),
            Entry::Vacant(place) => {
                *room = room.checked_sub(buffers[1].len())?;
                let mut bytes = Vec::new();
                bytes.try_reserve_exact(buffers[1].len()).ok()?;
                bytes.extend_from_slice(&buffers[1]);
                bad.into_iter().for_each(|text| bytes[text].fill(0));
                place.insert(bytes.into())
            }
        };
        buffers[1] = copy.clone();
    }
    let children = data.child_data().iter();
    let children = children.map(|child| without_texts_under_nulls(child, room, copies));
    let builder = data.clone().into_builder();
    let builder = builder.child_data(children.collect::<Option<_>>()?);
    // SAFETY: only bytes of texts differ from valid data of the same layout, and the caller checks all values before anything reads
    // them.
    Some(unsafe { builder.buffers(buffers).build_unchecked() })
}

/// Where texts under nulls are that are no UTF-8.
fn bad_texts<O: ArrowNativeType>(data: &ArrayData, nulls: &NullBuffer) -> Vec<Range<usize>> {
    let bytes = &data.buffers()[1];
    let rows = data.buffer::<O>(0).windows(2).zip(nulls);
    let texts = rows
        .filter(|(_, is_valid)| !is_valid)
        .filter_map(|(ends, _)| {
            let text = ends[0].to_usize()?..ends[1].to_usize()?;
            let is_bad = |text: &Range<usize>| {
                let text = bytes.get(text.clone());
                text.is_some_and(|text| std::str::from_utf8(text).is_err())
            };
            Some(text).filter(is_bad)
        });
    texts.collect()
}

/// Returns what of an imported array may be invalid: `None` if no value can be, of numbers and bits, say. Such columns of a struct
/// that the host cannot read are left out: columns of nulls take their places.
fn doubtful(array: &DeviceArray) -> Option<DeviceArray> {
    let root = array.node();
    if !may_be_invalid(root, true) {
        return None;
    }
    let DataType::Struct(fields) = array.data_type() else {
        return Some(array.clone());
    };
    let column = |(field, column): (&FieldRef, &Arc<Node>)| {
        if may_be_invalid(column, field.is_nullable()) {
            return (field.clone(), column.clone());
        }
        let nulls = Node::new(DataType::Null, column.length, Buffers::new(), Vec::new());
        let field = Field::new(field.name(), DataType::Null, true);
        (Arc::new(field), Arc::new(nulls))
    };
    let columns = fields.iter().zip(&root.children).map(column);
    let (fields, children): (Vec<_>, Vec<_>) = columns.unzip();
    let left = Node {
        data_type: DataType::Struct(fields.into()),
        children,
        ..Node::clone(root)
    };
    let device = array.device().clone();
    Some(DeviceArray::from_node(device, Arc::new(left)))
}

/// Whether a node, whose field may be nullable, or one of its descendants may be invalid, although its structure is not.
fn may_be_invalid(node: &Node, nullable: bool) -> bool {
    use DataType as T;
    let takes_any_value = match &node.data_type {
        T::Null | T::Boolean | T::FixedSizeBinary(_) | T::FixedSizeList(_, _) | T::Struct(_) => {
            true
        }
        other => other.is_primitive(),
    };
    let has_nulls = node.nulls.get() != Some(0) && !node.layout.is_null_type();
    let child = |(i, child): (usize, &Arc<Node>)| {
        let field = child_field(&node.data_type, i);
        may_be_invalid(child, field.is_none_or(|field| field.is_nullable()))
    };
    !takes_any_value || has_nulls && !nullable || node.children.iter().enumerate().any(child)
}

/// Checks the values of `data`, in host memory, and of its descendants.
///
/// The rules are those of arrow-rs: strings, views and offsets of null rows are checked too,
/// because safe calls reach them; dictionary keys of null rows are not.
///
/// # Errors
/// [`Error::InvalidInput`] with the path, and with arrow-rs's text if arrow-rs rejects the data.
fn check(data: &ArrayData) -> Result<()> {
    node(data, &Path::Root("array"))
}

/// What else to say of texts that are none, in arrays with nulls: other implementations accept them under a null.
const UNDER_NULLS: &str = "; texts under nulls are checked too, because safe calls reach them: have the producer leave \
                           nothing there, or import the column as binary";

fn node(data: &ArrayData, path: &Path<'_>) -> Result<()> {
    call_foreign("validation", || values(data))?.or_else(|e| path.error("", e))?;
    for (i, child) in data.child_data().iter().enumerate() {
        let path = path.below(Layout::of(data.data_type()).nesting, i);
        node(child, &path)?;
        forbidden_nulls(data, i, child).map_or(Ok(()), |e| path.error("", e))?;
    }
    Ok(())
}

/// Checks the values of one array.
fn values(data: &ArrayData) -> Result<(), String> {
    use DataType as T;
    let (buffers, children) = (data.buffers(), data.child_data());
    match data.data_type() {
        T::ListView(_) => return list_view::<i32>(data),
        T::LargeListView(_) => return list_view::<i64>(data),
        T::RunEndEncoded(_, _) if children[0].null_count() != 0 => {
            return Err("run ends have nulls".into());
        }
        T::RunEndEncoded(_, _) if children[0].len() != children[1].len() => {
            let (ends, values) = (children[0].len(), children[1].len());
            return Err(format!("{ends} run ends, {values} values"));
        }
        _ => {}
    }
    if let [_, BufferKind::Offsets { width }, ..] = Layout::of(data.data_type()).buffers() {
        // arrow-rs compares each offset with the one before, and skips the first.
        let width = usize::from(*width);
        let limit = buffers
            .get(1)
            .map_or_else(|| children[0].len(), |bytes| bytes.len());
        let stored = buffers[0].chunks_exact(width).nth(data.offset());
        let first = stored.map_or(0, |first| int(first, width));
        if !usize::try_from(first).is_ok_and(|first| first <= limit) {
            return Err(format!("first offset {first} is not within 0 and {limit}"));
        }
    }
    data.validate_values().map_err(|e| {
        let text = e.to_string();
        match data.null_count() > 0 && text.contains("UTF") {
            true => text + UNDER_NULLS,
            false => text,
        }
    })
}

fn list_view<T: ArrowNativeType>(data: &ArrayData) -> Result<(), String> {
    let rows = data.child_data()[0].len();
    let lists = data.buffer::<T>(0).iter().zip(data.buffer::<T>(1));
    for (i, (offset, size)) in lists.take(data.len()).enumerate() {
        let end = offset.to_usize().zip(size.to_usize());
        let end = end.and_then(|(offset, size)| offset.checked_add(size));
        if end.is_none_or(|end| end > rows) {
            return Err(format!(
                "list {i}, offset {offset:?}, size {size:?}, is not within {rows} rows"
            ));
        }
    }
    Ok(())
}

/// What is wrong if child `i` has nulls where it must not have any: everywhere, but for null rows of a struct or fixed-size list.
fn forbidden_nulls(data: &ArrayData, i: usize, child: &ArrayData) -> Option<String> {
    use DataType as T;
    // How many of the child's rows are one row's.
    let (field, times) = match data.data_type() {
        T::Struct(fields) => (&fields[i], Some(1)),
        T::FixedSizeList(field, size) => (field, usize::try_from(*size).ok()),
        T::List(field) | T::LargeList(field) | T::ListView(field) | T::LargeListView(field) => {
            (field, None)
        }
        T::Map(_, _) => {
            let has_nulls = child.null_count() + child.child_data()[0].null_count() > 0;
            return has_nulls.then(|| "a map's entries or keys have nulls".into());
        }
        _ => return None,
    };
    let nulls = child.nulls().filter(|_| !field.is_nullable())?;
    let (first, rows) = match times {
        Some(times) => (data.offset() * times, data.len() * times),
        None => (0, child.len()),
    };
    let is_wrong =
        |j| nulls.is_null(first + j) && times.is_none_or(|times| !data.is_null(j / times));
    let wrong = (0..rows).any(is_wrong);
    wrong.then(|| format!("field {:?} is not nullable, but has nulls", field.name()))
}

#[cfg(test)]
mod tests;
