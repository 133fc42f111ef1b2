//! Full validation: checks all values of an array that may be invalid.
//!
//! arrow-rs checks most values (`ArrayData::validate_values`). This walk checks what arrow-rs
//! relies on before it looks at values, and what it does not check.
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
use std::fmt::Write;

use arrow_buffer::ArrowNativeType;
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field};

use crate::abi::guard::call_foreign;
use crate::data::layout::{BufferKind, Layout, Nesting, check_type, child_type};
use crate::error::{Error, Result};

/// Checks that `data`, in host memory, is a valid array with valid descendants, from buffer sizes
/// to UTF-8. The only assumption is that buffers have the bytes that they claim.
///
/// The rules are those of arrow-rs: strings, views and offsets of null rows are checked too,
/// because safe calls reach them; dictionary keys of null rows are not.
///
/// # Errors
/// [`Error::InvalidInput`] with the path, and with arrow-rs's text if arrow-rs rejects the data.
pub(crate) fn validate_full(data: &ArrayData) -> Result<()> {
    // Bounds the depth of everything below.
    check_type(data.data_type())?;
    let mut walk = Walk {
        path: "array".to_owned(),
    };
    walk.node(data)
}

struct Walk {
    path: String,
}

impl Walk {
    fn refuse<T>(&self, member: &str, message: impl Into<Cow<'static, str>>) -> Result<T> {
        Err(Error::invalid(format!("{}{member}", self.path), message))
    }

    fn node(&mut self, data: &ArrayData) -> Result<()> {
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
            let parent = self.path.len();
            self.step(&layout, i);
            self.node(child)?;
            self.path.truncate(parent);
        }
        // Last: it reads the children.
        self.nullability(data)
    }

    fn step(&mut self, layout: &Layout, i: usize) {
        // Writing to a `String` does not fail.
        let _ = match layout.nesting {
            Nesting::Dictionary => write!(self.path, ".dictionary"),
            _ => write!(self.path, ".children[{i}]"),
        };
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
        let counted = nulls.len() - nulls.inner().count_set_bits();
        if counted != nulls.null_count() {
            let message = format!("{}, but there are {counted}", nulls.null_count());
            return self.refuse(".null_count", message);
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
            let at = |message: String| self.refuse(&format!(".children[{i}]"), message);
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
            _ => call_foreign("ArrayData::validate_values", || {
                whole_elements(data).validate_values()
            })?
            .or_else(|e| self.refuse("", e.to_string())),
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
        if nulls.null_count() == 0 || (0..nulls.len()).all(|j| nulls.is_valid(j) || under_null(j)) {
            return Ok(());
        }
        self.refuse(&format!(".children[{i}]"), unexpected(field))
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
    let runs = layout.nesting == Nesting::Runs;
    let mut buffers = kinds.iter().zip(data.buffers());
    if !runs && buffers.all(|(kind, buffer)| spare(kind, buffer.len()) == 0) {
        return Cow::Borrowed(data);
    }
    let mut whole = data.buffers().to_vec();
    for (kind, buffer) in kinds.iter().zip(&mut whole) {
        *buffer = buffer.slice_with_length(0, buffer.len() - spare(kind, buffer.len()));
    }
    let mut children = data.child_data().to_vec();
    if runs {
        // arrow-rs reads the run ends together with the array.
        children[0] = whole_elements(&data.child_data()[0]).into_owned();
    }
    let builder = data
        .clone()
        .into_builder()
        .buffers(whole)
        .child_data(children);
    // SAFETY: the result is only validated, which assumes nothing about values; `bitmap`, `buffers`
    // and `shape` have checked that no buffer or child is shorter than `data` says, and only bytes
    // after the last whole element were cut.
    Cow::Owned(unsafe { builder.build_unchecked() })
}

fn unexpected(field: &Field) -> String {
    format!("field {:?} is not nullable, but has nulls", field.name())
}

#[cfg(test)]
mod tests;
