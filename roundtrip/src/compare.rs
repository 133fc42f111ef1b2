//! Compares what came back with what was sent: the schema with its metadata, the lengths, and every
//! value and null at any depth.
//!
//! The comparison is logical: offsets, padding, the order of a dictionary and the values under a
//! null do not matter. Floats are compared bit by bit. arrow-rs checks and compares the arrays; an
//! array that is not valid is a difference.

use arrow_array::{Array, RecordBatch};
use arrow_cast::display::array_value_to_string;
use arrow_schema::{DataType, Field, Fields, Schema};

use crate::guard;

/// How many differences are described.
const DESCRIBED: usize = 10;
/// How many differing rows are counted in one column of one batch.
const COUNTED_ROWS: usize = 100;

/// Differences found so far.
#[derive(Default, Debug)]
pub(crate) struct Findings {
    pub total: u64,
    /// The first ones.
    pub described: Vec<String>,
}

impl Findings {
    /// Counts a difference.
    pub(crate) fn add(&mut self, describe: impl FnOnce() -> String) {
        self.total += 1;
        if self.described.len() < DESCRIBED {
            self.described.push(describe());
        }
    }

    /// One line, if there are any.
    pub(crate) fn summary(&self) -> Option<String> {
        let first = self.described.first()?;
        Some(match self.total {
            1 => format!("1 difference: {first}"),
            n => format!("{n} differences, the first: {first}"),
        })
    }
}

/// Compares two schemas; `place` says where they are from.
pub(crate) fn compare_schemas(place: &str, sent: &Schema, got: &Schema, findings: &mut Findings) {
    let before = findings.total;
    if sent.metadata() != got.metadata() {
        findings.add(|| {
            format!(
                "{place}: schema metadata {:?} was sent, {:?} came back",
                sent.metadata(),
                got.metadata()
            )
        });
    }
    compare_fields(place, sent.fields(), got.fields(), findings);
    // Whatever the walk above does not know.
    if findings.total == before && sent != got {
        findings.add(|| format!("{place}: schema {sent} was sent, {got} came back"));
    }
}

fn compare_fields(place: &str, sent: &Fields, got: &Fields, findings: &mut Findings) {
    if sent.len() != got.len() {
        findings.add(|| {
            format!(
                "{place}: {} fields were sent, {} came back",
                sent.len(),
                got.len()
            )
        });
        return;
    }
    for (index, (sent, got)) in sent.iter().zip(got).enumerate() {
        compare_field(
            &format!("{place}, field {index} ({})", sent.name()),
            sent,
            got,
            findings,
        );
    }
}

fn compare_field(place: &str, sent: &Field, got: &Field, findings: &mut Findings) {
    let different = |what: &str, sent: String, got: String| {
        format!("{place}: {what} {sent} was sent, {got} came back")
    };
    if sent.name() != got.name() {
        findings.add(|| {
            let (sent, got) = (sent.name().clone(), got.name().clone());
            different("name", sent, got)
        });
    }
    if sent.is_nullable() != got.is_nullable() {
        let (sent, got) = (sent.is_nullable(), got.is_nullable());
        findings.add(|| different("nullable", sent.to_string(), got.to_string()));
    }
    if sent.metadata() != got.metadata() {
        let (sent, got) = (sent.metadata(), got.metadata());
        findings.add(|| different("metadata", format!("{sent:?}"), format!("{got:?}")));
    }
    // Not part of a field's equality.
    let ordered = |field: &Field| field.dict_is_ordered().unwrap_or(false);
    if ordered(sent) != ordered(got) {
        let (sent, got) = (ordered(sent), ordered(got));
        findings.add(|| different("ordered dictionary", sent.to_string(), got.to_string()));
    }
    let before = findings.total;
    if let (Some(sent), Some(got)) = (child_fields(sent), child_fields(got)) {
        compare_fields(place, &sent, &got, findings);
    }
    // Also differs if the children do, which is then said already.
    if findings.total == before && sent.data_type() != got.data_type() {
        let (sent, got) = (sent.data_type(), got.data_type());
        findings.add(|| different("type", sent.to_string(), got.to_string()));
    }
}

fn child_fields(field: &Field) -> Option<Fields> {
    match field.data_type() {
        DataType::Struct(fields) => Some(fields.clone()),
        DataType::List(f)
        | DataType::LargeList(f)
        | DataType::ListView(f)
        | DataType::LargeListView(f)
        | DataType::FixedSizeList(f, _)
        | DataType::Map(f, _) => Some(Fields::from(vec![f.clone()])),
        DataType::RunEndEncoded(ends, values) => {
            Some(Fields::from(vec![ends.clone(), values.clone()]))
        }
        DataType::Union(fields, _) => Some(fields.iter().map(|(_, f)| f.clone()).collect()),
        _ => None,
    }
}

/// Compares length, column types and values of two batches; schemas are compared apart.
pub(crate) fn compare_batches(
    place: &str,
    sent: &RecordBatch,
    got: &RecordBatch,
    findings: &mut Findings,
) {
    for (what, sent, got) in [
        ("rows", sent.num_rows(), got.num_rows()),
        ("columns", sent.num_columns(), got.num_columns()),
    ] {
        if sent != got {
            findings.add(|| format!("{place}: {sent} {what} were sent, {got} came back"));
            return;
        }
    }
    let fields = sent.schema_ref().fields().iter();
    let columns = sent.columns().iter().zip(got.columns());
    for ((index, field), (sent, got)) in fields.enumerate().zip(columns) {
        let place = format!("{place}, column {index} ({})", field.name());
        let compared = guard::catch(|| compare_columns(&place, sent, got, findings));
        if let Err(panic) = compared {
            findings.add(|| format!("{place}: cannot be compared: {panic}"));
        }
    }
}

fn compare_columns(place: &str, sent: &dyn Array, got: &dyn Array, findings: &mut Findings) {
    if sent.data_type() != got.data_type() {
        let (sent, got) = (sent.data_type(), got.data_type());
        findings.add(|| format!("{place}: an array of {sent} was sent, one of {got} came back"));
        return;
    }
    if sent.len() != got.len() {
        let (sent, got) = (sent.len(), got.len());
        findings.add(|| format!("{place}: {sent} values were sent, {got} came back"));
        return;
    }
    // Comparing an array relies on its being valid.
    if let Err(e) = got.to_data().validate_full() {
        findings.add(|| format!("{place}: the array that came back is not valid: {e}"));
        return;
    }
    let mut rows = 0;
    for _ in 0..COUNTED_ROWS {
        let Some(row) = first_difference(sent, got, rows) else {
            break;
        };
        findings.add(|| {
            let (sent, got) = (show(sent, row), show(got, row));
            let note = if sent == got { " (other bits)" } else { "" };
            format!("{place}, row {row}: {sent} was sent, {got} came back{note}")
        });
        rows = row + 1;
    }
}

/// Returns the first row, not before `from`, that differs between two valid arrays of the same type
/// and length.
fn first_difference(a: &dyn Array, b: &dyn Array, mut from: usize) -> Option<usize> {
    let same = |from, rows| *a.slice(from, rows) == *b.slice(from, rows);
    let mut rows = a.len() - from;
    if same(from, rows) {
        return None;
    }
    // The rows `from..from + rows` differ somewhere.
    while rows > 1 {
        let half = rows / 2;
        if same(from, half) {
            from += half;
            rows -= half;
        } else {
            rows = half;
        }
    }
    Some(from)
}

fn show(array: &dyn Array, row: usize) -> String {
    if array.is_null(row) {
        return "null".to_owned();
    }
    let text = guard::catch(|| array_value_to_string(array, row));
    match text {
        Ok(Ok(text)) => {
            let mut short: String = text.escape_debug().take(60).collect();
            if short.len() < text.len() {
                short.push_str("...");
            }
            format!("'{short}'")
        }
        _ => "a value that cannot be shown".to_owned(),
    }
}

#[cfg(test)]
mod support;
#[cfg(test)]
mod tests;
