//! Compares what came back with what was sent: schema with metadata, lengths, and every value and
//! null at any depth.
//!
//! The comparison is logical: offsets, paddings, the order of a dictionary and the bytes under a
//! null do not matter. Values are compared bit by bit, so that NaNs and zeros keep their kind.
//! Nothing is assumed of the arrays that came back; what does not fit counts as a difference.

use arrow_array::{Array, RecordBatch};
use arrow_cast::display::array_value_to_string;
use arrow_schema::{DataType, Field, Fields, Schema};

mod values;

use values::first_difference;

use crate::guard;

/// How many differences are described.
const DESCRIBED: usize = 10;
/// How many differing rows are counted in one column of one batch.
const COUNTED_ROWS: usize = 100;

/// Differences found so far.
#[derive(Default, Debug)]
pub struct Findings {
    pub total: u64,
    /// The first ones.
    pub described: Vec<String>,
}

impl Findings {
    /// Counts a difference.
    pub fn add(&mut self, describe: impl FnOnce() -> String) {
        self.total += 1;
        if self.described.len() < DESCRIBED {
            self.described.push(describe());
        }
    }
}

/// Compares two schemas; `place` says where they are from.
pub fn compare_schemas(place: &str, sent: &Schema, got: &Schema, findings: &mut Findings) {
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
pub fn compare_batches(
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
    let (mut row, mut counted) = (0, 0);
    while counted < COUNTED_ROWS {
        let left = sent.len() - row;
        let Some(skip) = first_difference(sent, row, got, row, left) else {
            break;
        };
        row += skip;
        findings.add(|| {
            let (sent, got) = (show(sent, row), show(got, row));
            let note = if sent == got { " (other bits)" } else { "" };
            format!("{place}, row {row}: {sent} was sent, {got} came back{note}")
        });
        row += 1;
        counted += 1;
    }
    if counted == 0 && sent.null_count() != got.null_count() {
        let (sent, got) = (sent.null_count(), got.null_count());
        findings.add(|| format!("{place}: a null count of {sent} was sent, {got} came back"));
    }
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
mod samples;
#[cfg(test)]
mod tests;
