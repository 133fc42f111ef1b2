//! Full validation: checks all values of an array that may be invalid.
//!
//! arrow-rs checks most values (`ArrayData::validate_values`), unless a first look finds all of them valid ([`values`]).
//! This walk checks what arrow-rs relies on before it looks at values, and what it does not check.
//!
//! Not used, and why:
//! - `ArrayData::validate` requires a validity bitmap with bits for `offset + len` rows, although a
//!   bitmap has its own offset, and so rejects valid data. It accepts a struct's or fixed-size
//!   list's child that is `offset` rows too short, on which arrow-rs panics later. It panics on
//!   list views whose offset and size overflow. It runs once more for every level above.
//! - `ArrayData::validate_nulls` expands a fixed-size list's bitmap in memory, to any size, and
//!   from the wrong row if the list has an offset.
//!
//! Not checked, because arrow-rs does not rely on it: whether decimals fit their precision and
//! times their day, the order of a dense union's offsets, and whether a map's keys are sorted.

use std::borrow::Cow;

use arrow_buffer::ArrowNativeType;
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, UnionFields};

use crate::abi::guard::call_foreign;
use crate::data::DeviceArray;
use crate::data::layout::{BufferKind, Layout, Nesting, check_type, child_type};
use crate::error::{Error, Result};
use crate::interchange::path::Path;

pub(super) use subject::Subject;

/// Checks the values of an imported array whose null counts have been checked. Waits for the memory if there are values that
/// may be invalid; where the host cannot read it, those are copied to the host first.
///
/// # Errors
/// As [`check`]; those that the device reports.
pub(super) fn validate(array: &DeviceArray) -> Result<()> {
    match Subject::of(array)? {
        Some(subject) => {
            let checked = subject
                .array()
                .reachable_data()
                .and_then(|data| check(&data));
            checked.map_err(|e| subject.numbered(e))
        }
        None => Ok(()),
    }
}

/// Checks that `data`, in host memory, is a valid array with valid descendants, from buffer sizes
/// to UTF-8. The only assumptions are that buffers have the bytes that they claim, and that nulls
/// were counted: [`NullCounting`](crate::data::nulls::NullCounting) compares what was stated.
///
/// The rules are those of arrow-rs: strings, views and offsets of null rows are checked too,
/// because safe calls reach them; dictionary keys of null rows are not.
///
/// # Errors
/// [`Error::InvalidInput`] with the path, and with arrow-rs's text if arrow-rs rejects the data.
pub(super) fn check(data: &ArrayData) -> Result<()> {
    // Bounds the depth of everything below.
    check_type(data.data_type())?;
    let path = &Path::Root("array");
    Walk { path }.node(data)
}

/// What else to say of texts that are none, in arrays with nulls: other implementations accept them under a null.
const UNDER_NULLS: &str = "; texts under nulls are checked too, because safe calls reach them: have the producer leave \
                           nothing there, or import the column as binary";

struct Walk<'a> {
    path: &'a Path<'a>,
}

impl Walk<'_> {
    fn refuse<T>(&self, member: &str, message: impl Into<Cow<'static, str>>) -> Result<T> {
        Err(Error::invalid(self.path.text() + member, message))
    }

    /// As [`refuse`](Self::refuse), for child `i`.
    fn refuse_child<T>(&self, i: usize, message: impl Into<Cow<'static, str>>) -> Result<T> {
        self.refuse(&format!(".children[{i}]"), message)
    }

    fn node(&self, data: &ArrayData) -> Result<()> {
        let layout = Layout::of(data.data_type());
        // The rows that the buffers need.
        let rows = match data.offset().checked_add(data.len()) {
            Some(rows) if isize::try_from(rows).is_ok() => rows,
            _ => return self.refuse(".length", "offset and length overflow"),
        };
        self.bitmap(data, &layout)?;
        self.buffers(data, &layout, rows)?;
        self.shape(data, &layout, rows)?;
        self.first_offset(data, &layout)?;
        self.values(data)?;
        for (i, child) in data.child_data().iter().enumerate() {
            let path = &match layout.nesting {
                Nesting::Dictionary => Path::Dictionary(self.path),
                _ => Path::Child(self.path, i),
            };
            Walk { path }.node(child)?;
        }
        // Last: these read the children.
        self.runs(data)?;
        self.nullability(data)
    }

    fn bitmap(&self, data: &ArrayData, layout: &Layout) -> Result<()> {
        let Some(nulls) = data.nulls() else {
            return Ok(());
        };
        if !layout.has_validity() {
            return self.refuse("", format!("{} has no validity bitmap", data.data_type()));
        }
        if nulls.len() != data.len() {
            let message = format!("{} bits for {} rows", nulls.len(), data.len());
            return self.refuse(".buffers[0]", message);
        }
        Ok(())
    }

    /// Checks number, length and alignment of all buffers except the validity bitmap.
    fn buffers(&self, data: &ArrayData, layout: &Layout, rows: usize) -> Result<()> {
        let first = usize::from(layout.has_validity());
        let kinds = &layout.buffers()[first..];
        let buffers = data.buffers();
        if buffers.len() < kinds.len() || (buffers.len() > kinds.len() && !layout.variadic) {
            let (n, expected) = (buffers.len() + first, kinds.len() + first);
            return self.refuse(".n_buffers", format!("{n}; the type has {expected}"));
        }
        for (i, (kind, buffer)) in kinds.iter().zip(buffers).enumerate() {
            let at = |message: String| self.refuse(&format!(".buffers[{}]", i + first), message);
            let no_offsets =
                data.is_empty() && buffer.is_empty() && matches!(kind, BufferKind::Offsets { .. });
            let needed = match kind.bytes(rows) {
                Some(Ok(_)) if no_offsets => 0,
                Some(Ok(bytes)) => bytes,
                Some(Err(e)) => return at(e.to_string()),
                None => 0,
            };
            if buffer.len() < needed {
                return at(format!("{} bytes; {needed} are needed", buffer.len()));
            }
            // An empty slice of a buffer may be misaligned, and arrow-rs panics on that too.
            if !no_offsets && buffer.as_ptr().align_offset(kind.align()) != 0 {
                return at(format!("not aligned to {} bytes", kind.align()));
            }
        }
        Ok(())
    }

    /// Checks number, types and lengths of the children.
    fn shape(&self, data: &ArrayData, layout: &Layout, rows: usize) -> Result<()> {
        let children = data.child_data();
        if children.len() != layout.n_children() {
            let (n, expected) = (children.len(), layout.n_children());
            return self.refuse(".n_children", format!("{n}; the type has {expected}"));
        }
        let needed = match layout.nesting {
            Nesting::RowByRow => Some(rows),
            Nesting::Times(n) => match rows.checked_mul(n as usize) {
                Some(rows) => Some(rows),
                None => return self.refuse(".length", "the child's rows overflow"),
            },
            _ => None,
        };
        for (i, child) in children.iter().enumerate() {
            let at = |message: String| self.refuse_child(i, message);
            if child_type(data.data_type(), i) != Some(child.data_type()) {
                return at(format!(
                    "{} is not the type of a child of {}",
                    child.data_type(),
                    data.data_type()
                ));
            }
            match needed {
                Some(needed) if child.len() < needed => {
                    return at(format!("{} rows; {needed} are needed", child.len()));
                }
                _ => {}
            }
        }
        if let (Nesting::Runs, [run_ends, values]) = (layout.nesting, children) {
            if run_ends.null_count() != 0 {
                return self.refuse(".children[0]", "run ends have nulls");
            }
            if run_ends.len() != values.len() {
                let message = format!("{} run ends, {} values", run_ends.len(), values.len());
                return self.refuse(".children[1]", message);
            }
        }
        Ok(())
    }

    /// Checks the first offset, which `validate_values` skips; it compares the others with those
    /// before.
    fn first_offset(&self, data: &ArrayData, layout: &Layout) -> Result<()> {
        let Some(BufferKind::Offsets { width }) = layout.buffers().get(1).copied() else {
            return Ok(());
        };
        let limit = match data.child_data() {
            [child] => child.len(),
            _ => data.buffers()[1].len(),
        };
        // The buffer is long enough, unless there are no offsets: `buffers` has checked that.
        let width = usize::from(width);
        let start = data.offset() * width;
        let first = match data.buffers()[0].get(start..start + width) {
            Some(&[a, b, c, d]) => i32::from_ne_bytes([a, b, c, d]).into(),
            Some(&[a, b, c, d, e, f, g, h]) => i64::from_ne_bytes([a, b, c, d, e, f, g, h]),
            _ => return Ok(()),
        };
        match usize::try_from(first) {
            Ok(n) if n <= limit => Ok(()),
            _ => self.refuse(
                "",
                format!("first offset {first} is not within 0 and {limit}"),
            ),
        }
    }

    fn values(&self, data: &ArrayData) -> Result<()> {
        match data.data_type() {
            DataType::ListView(_) => self.list_view::<i32>(data),
            DataType::LargeListView(_) => self.list_view::<i64>(data),
            DataType::Union(fields, _) => self.union(data, fields),
            DataType::RunEndEncoded(_, _) => Ok(()),
            _ if values::are_valid(data) => Ok(()),
            _ => call_foreign("ArrayData::validate_values", || {
                whole_elements(data).validate_values()
            })?
            .or_else(|e| {
                let mut text = e.to_string();
                if data.null_count() > 0 && text.contains("UTF") {
                    text.push_str(UNDER_NULLS);
                }
                self.refuse("", text)
            }),
        }
    }

    fn list_view<T: ArrowNativeType>(&self, data: &ArrayData) -> Result<()> {
        let rows = data.child_data()[0].len();
        // There are at least `len` elements of each, aligned: `buffers` has checked that.
        let data = whole_elements(data);
        let offsets = &data.buffer::<T>(0)[..data.len()];
        let sizes = &data.buffer::<T>(1)[..data.len()];
        for (i, (offset, size)) in offsets.iter().zip(sizes).enumerate() {
            let end = match (offset.to_usize(), size.to_usize()) {
                (Some(offset), Some(size)) => offset.checked_add(size),
                _ => None,
            };
            if end.is_none_or(|end| end > rows) {
                return self.refuse(
                    "",
                    format!(
                        "list {i}, offset {offset:?}, size {size:?}, is not within {rows} rows"
                    ),
                );
            }
        }
        Ok(())
    }

    /// Checks type ids, and the offsets of a dense union. arrow-rs 59.1 does not.
    fn union(&self, data: &ArrayData, fields: &UnionFields) -> Result<()> {
        let ids = values::elements::<i8>(data, 0, data.len());
        let Some(ids) = ids else {
            return self.refuse(".buffers[0]", "too few type ids");
        };
        // By type id; those that no child has take no rows.
        let mut rows = [0; 1 << 8];
        let mut known = [false; 1 << 8];
        for ((id, _), child) in fields.iter().zip(data.child_data()) {
            let id = usize::from(id as u8);
            (rows[id], known[id]) = (child.len(), true);
        }
        let at = |id: &i8| usize::from(*id as u8);
        if !ids.iter().fold(true, |all, id| all & known[at(id)]) {
            let wrong = ids.iter().position(|id| !known[at(id)]).unwrap_or(0);
            let message = format!("row {wrong} has type id {}, which no field has", ids[wrong]);
            return self.refuse("", message);
        }
        if data.buffers().len() < 2 {
            return Ok(());
        }
        let Some(offsets) = values::elements::<i32>(data, 1, data.len()) else {
            return self.refuse(".buffers[1]", "too few offsets");
        };
        let is_within =
            |(id, offset): (&i8, &i32)| *offset >= 0 && (*offset as usize) < rows[at(id)];
        let mut pairs = ids.iter().zip(&offsets);
        if pairs.clone().fold(true, |all, pair| all & is_within(pair)) {
            return Ok(());
        }
        let wrong = pairs.position(|pair| !is_within(pair)).unwrap_or(0);
        let (id, offset) = (ids[wrong], offsets[wrong]);
        let message = format!(
            "row {wrong} has offset {offset}, but the child of type id {id} has {} rows",
            rows[at(&id)]
        );
        self.refuse("", message)
    }

    /// Checks run ends. arrow-rs 59.1 does not check that they reach the last row.
    fn runs(&self, data: &ArrayData) -> Result<()> {
        let DataType::RunEndEncoded(field, _) = data.data_type() else {
            return Ok(());
        };
        match field.data_type() {
            DataType::Int16 => self.run_ends::<i16>(data),
            DataType::Int32 => self.run_ends::<i32>(data),
            _ => self.run_ends::<i64>(data),
        }
    }

    fn run_ends<T: ArrowNativeType>(&self, data: &ArrayData) -> Result<()> {
        let ends = &data.child_data()[0];
        let Some(ends) = values::elements::<T>(ends, 0, ends.len()) else {
            return self.refuse(".children[0].buffers[1]", "too few run ends");
        };
        if ends.first().is_some_and(|first| *first <= T::default()) {
            return self.refuse("", format!("the first run ends at {:?}", ends[0]));
        }
        if !values::are_in_order(&ends, |end, next| end < next) {
            let falls = |pair: &[T]| pair[0] >= pair[1];
            let run = ends.windows(2).position(falls).unwrap_or(0);
            let next = ends.get(run + 1).copied().unwrap_or_default();
            let message = format!(
                "run {run} ends at {:?}, but the next one at {next:?}",
                ends[run]
            );
            return self.refuse("", message);
        }
        // `node` has checked that the sum is a number of rows.
        let rows = data.offset() + data.len();
        let last = ends
            .last()
            .map_or(0, |last| last.to_usize().unwrap_or(usize::MAX));
        if !data.is_empty() && last < rows {
            let message = format!("the last run ends at row {last} of {rows}");
            return self.refuse("", message);
        }
        Ok(())
    }

    /// Checks that children that must not have nulls have none, except in null rows of a struct or
    /// fixed-size list.
    fn nullability(&self, data: &ArrayData) -> Result<()> {
        let children = data.child_data();
        match data.data_type() {
            DataType::Struct(fields) => {
                for (i, (field, child)) in fields.iter().zip(children).enumerate() {
                    self.required(data, field, i, child, 1)?;
                }
                Ok(())
            }
            DataType::FixedSizeList(field, size) => {
                // Not negative: `check_type` accepted the type.
                let size = usize::try_from(*size).unwrap_or(0);
                self.required(data, field, 0, &children[0], size)
            }
            DataType::List(field)
            | DataType::LargeList(field)
            | DataType::ListView(field)
            | DataType::LargeListView(field)
                if !field.is_nullable() && children[0].null_count() != 0 =>
            {
                self.refuse(".children[0]", unexpected(field))
            }
            DataType::Map(_, _) => {
                let entries = &children[0];
                if entries.null_count() != 0 {
                    return self.refuse(".children[0]", "a map's entries have nulls");
                }
                if entries.child_data()[0].null_count() != 0 {
                    return self.refuse(".children[0].children[0]", "a map's keys have nulls");
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Checks a child whose field may not be nullable. Row `i` of `data` has `times` rows of
    /// `child`, which `shape` has found long enough.
    fn required(
        &self,
        data: &ArrayData,
        field: &Field,
        i: usize,
        child: &ArrayData,
        times: usize,
    ) -> Result<()> {
        let Some(nulls) = child.nulls().filter(|_| !field.is_nullable()) else {
            return Ok(());
        };
        let nulls = nulls.slice(data.offset() * times, data.len() * times);
        let under_null = |row: usize| data.is_null(row / times);
        if times == 1 && data.nulls().is_some_and(|rows| rows.contains(&nulls)) {
            return Ok(());
        }
        if nulls.null_count() == 0 || (0..nulls.len()).all(|j| nulls.is_valid(j) || under_null(j)) {
            return Ok(());
        }
        self.refuse_child(i, unexpected(field))
    }
}

/// Returns `data` without bytes after the last whole element of a buffer: arrow-rs panics on them
/// although padding is legal.
fn whole_elements(data: &ArrayData) -> Cow<'_, ArrayData> {
    let layout = Layout::of(data.data_type());
    let kinds = &layout.buffers()[usize::from(layout.has_validity())..];
    let spare = |kind: &BufferKind, bytes: usize| match kind {
        BufferKind::Fixed { width, .. } => bytes.checked_rem(*width as usize).unwrap_or(0),
        BufferKind::Offsets { width } => bytes % usize::from(*width),
        _ => 0,
    };
    let mut buffers = kinds.iter().zip(data.buffers());
    if buffers.all(|(kind, buffer)| spare(kind, buffer.len()) == 0) {
        return Cow::Borrowed(data);
    }
    let mut whole = data.buffers().to_vec();
    for (kind, buffer) in kinds.iter().zip(&mut whole) {
        *buffer = buffer.slice_with_length(0, buffer.len() - spare(kind, buffer.len()));
    }
    let builder = data.clone().into_builder().buffers(whole);
    // SAFETY: the result is only validated, which assumes nothing about values; `buffers` has
    // checked that no buffer is shorter than `data` says, and only bytes after the last whole
    // element were cut.
    Cow::Owned(unsafe { builder.build_unchecked() })
}

fn unexpected(field: &Field) -> String {
    format!("field {:?} is not nullable, but has nulls", field.name())
}

mod subject;
mod values;

#[cfg(test)]
mod tests;
