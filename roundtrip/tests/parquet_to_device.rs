//! Parquet files to a device by row groups, as the example does it.

#[path = "../examples/parquet_to_device.rs"]
mod example;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{
    ArrayRef, Float64Array, Int64Array, RecordBatch, RecordBatchReader, StringArray,
};
use arrow_device::{DeviceRecordBatchReader, Devices, upload_reader};
use arrow_schema::ArrowError;
use example::ParquetFile;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tempfile::TempDir;

fn batch(first: i64, rows: i64) -> RecordBatch {
    let ids = first..first + rows;
    let prices = ids.clone().map(|id| (id % 7 != 0).then_some(id as f64));
    let columns: [(&str, ArrayRef); 3] = [
        ("id", Arc::new(Int64Array::from_iter_values(ids.clone()))),
        ("price", Arc::new(Float64Array::from_iter(prices))),
        (
            "name",
            Arc::new(StringArray::from_iter_values(
                ids.map(|id| format!("customer {}", id % 100)),
            )),
        ),
    ];
    RecordBatch::try_from_iter_with_nullable(columns.map(|(name, column)| (name, column, true)))
        .unwrap()
}

/// Writes a file with row groups of these lengths.
fn write(folder: &TempDir, row_groups: &[i64]) -> PathBuf {
    let path = folder.path().join("file.parquet");
    let file = File::create(&path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch(0, 0).schema(), None).unwrap();
    let mut first = 0;
    for rows in row_groups {
        writer.write(&batch(first, *rows)).unwrap();
        writer.flush().unwrap();
        first += rows;
    }
    writer.close().unwrap();
    path
}

/// What is in the file, read by one reader.
fn expected(path: &Path, columns: &[usize]) -> RecordBatch {
    let builder = ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap();
    let reader = builder.with_batch_size(1 << 20).build().unwrap();
    let schema = reader.schema();
    let all: Vec<_> = reader.map(|batch| batch.unwrap()).collect();
    assert!(all.len() < 2);
    let all = all.into_iter().next();
    let all = all.unwrap_or_else(|| RecordBatch::new_empty(schema));
    all.project(columns).unwrap()
}

/// To the simulated device and back: the batches' rows in order.
fn there_and_back(file: ParquetFile) -> Result<(Vec<usize>, Vec<RecordBatch>), ArrowError> {
    let reader = file.into_row_groups(3)?;
    let uploads = upload_reader(reader, &Devices::simulated()?);
    let back = uploads
        .into_host_reader()
        .collect::<Result<Vec<_>, ArrowError>>()?;
    Ok((back.iter().map(RecordBatch::num_rows).collect(), back))
}

fn assert_same(path: &Path, names: &[&str], columns: &[usize], rows: &[usize]) {
    let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
    let file = ParquetFile::open(path, &names).unwrap();
    let (of_batches, back) = there_and_back(file).unwrap();
    assert_eq!(of_batches, rows);
    let expected = expected(path, columns);
    let mut first = 0;
    for back in back {
        assert_eq!(back, expected.slice(first, back.num_rows()));
        first += back.num_rows();
    }
    assert_eq!(first, expected.num_rows());
}

#[test]
fn row_groups_of_different_lengths() {
    let folder = TempDir::new().unwrap();
    // The fourth has two batches.
    let path = write(&folder, &[1000, 1, 5000, 70_000, 3]);
    let rows = [1000, 1, 5000, 65_536, 4464, 3];
    assert_same(&path, &[], &[0, 1, 2], &rows);
    assert_same(&path, &["name"], &[2], &rows);
    assert_same(&path, &["price", "id"], &[0, 1], &rows);
    let e = ParquetFile::open(&path, &["cost".into()]).err().unwrap();
    assert!(e.to_string().contains("cost"), "{e}");
}

#[test]
fn files_without_rows() {
    let folder = TempDir::new().unwrap();
    assert_same(&write(&folder, &[]), &[], &[0, 1, 2], &[]);
    assert_same(&write(&folder, &[]), &["id"], &[0], &[]);
}

/// What comes before a damaged row group is returned, and the error has the row group's number.
#[test]
fn a_damaged_row_group() {
    let folder = TempDir::new().unwrap();
    let path = write(&folder, &[1000; 5]);
    let file = ParquetFile::open(&path, &[]).unwrap();
    let group = file.metadata.metadata().row_group(3);
    let start = group.column(0).byte_range().0 as usize;
    let end = start + group.compressed_size() as usize;
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[start..end].fill(0xff);
    std::fs::write(&path, bytes).unwrap();

    let reader = file.into_row_groups(2).unwrap();
    let uploads = upload_reader(reader, &Devices::simulated().unwrap());
    let results: Vec<_> = uploads.collect();
    assert_eq!(results.len(), 4);
    let rows: Vec<_> = results[..3]
        .iter()
        .map(|on_device| on_device.as_ref().unwrap().num_rows())
        .collect();
    assert_eq!(rows, [1000; 3]);
    let e = results[3].as_ref().unwrap_err().to_string();
    assert!(e.contains("part 3: "), "{e}");
}
