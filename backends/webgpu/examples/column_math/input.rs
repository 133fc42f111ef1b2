//! `lineitem`, from a Parquet file or made.

use std::fs::File;
use std::io::IsTerminal;
use std::path::Path;

use arrow_array::RecordBatch;
use arrow_schema::ArrowError;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tpchgen::generators::LineItemGenerator;
use tpchgen_arrow::LineItemArrow;

use crate::Result;
use crate::query::COLUMNS;

/// Rows of a batch: of 16 bytes each, 16 MiB, well below what any GPU can bind.
const ROWS: usize = 1 << 20;

/// Reads the columns of a Parquet file.
pub(crate) fn read(path: &Path) -> Result<Vec<RecordBatch>> {
    let in_file = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let file = File::open(path).map_err(|e| in_file(&e))?;
    let file = ParquetRecordBatchReaderBuilder::try_new(file).map_err(|e| in_file(&e))?;
    let columns = ProjectionMask::columns(file.parquet_schema(), COLUMNS);
    let batches = file
        .with_projection(columns)
        .with_batch_size(ROWS)
        .build()?;
    collect(&format!("Reading {}", path.display()), batches).map_err(|e| in_file(&e).into())
}

/// Makes the table of TPC-H at this scale.
pub(crate) fn generate(scale: f64) -> Result<Vec<RecordBatch>> {
    let made = LineItemArrow::new(LineItemGenerator::new(scale, 1, 1)).with_batch_size(ROWS);
    collect(&format!("Making lineitem at scale {scale}"), made)
}

/// Collects the query's columns, and shows how far it is.
fn collect(
    what: &str,
    batches: impl Iterator<Item = std::result::Result<RecordBatch, ArrowError>>,
) -> Result<Vec<RecordBatch>> {
    let (mut all, mut rows) = (Vec::new(), 0);
    let is_watched = std::io::stderr().is_terminal();
    for batch in batches {
        let batch = columns(&batch?)?;
        rows += batch.num_rows();
        if is_watched {
            eprint!("\r{what}: {rows} rows");
        }
        all.push(batch);
    }
    eprintln!("{}{what}: {rows} rows", if is_watched { "\r" } else { "" });
    Ok(all)
}

/// Returns the columns of the query, in its order and of its types.
fn columns(batch: &RecordBatch) -> Result<RecordBatch> {
    let found = COLUMNS.map(|name| batch.schema_ref().index_of(name));
    let found: Vec<usize> = found.into_iter().collect::<std::result::Result<_, _>>()?;
    let batch = batch.project(&found)?;
    for (field, expected) in batch.schema_ref().fields().iter().zip(crate::query::TYPES) {
        if *field.data_type() != expected {
            let (name, found) = (field.name(), field.data_type());
            return Err(format!("{name} is of type {found} where TPC-H has {expected}").into());
        }
    }
    Ok(batch)
}
