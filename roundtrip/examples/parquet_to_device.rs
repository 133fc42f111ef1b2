//! Reads a Parquet file to a device. Several row groups are decoded at the same time, while others are packed and copied:
//!
//! ```sh
//! cargo run --release -p roundtrip --example parquet_to_device -- FILE [COLUMN ...]
//! ```

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Instant;

use arrow_array::RecordBatchReader;
use arrow_device::{Devices, upload_reader};
use arrow_schema::ArrowError;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use roundtrip::parts::Parts;

/// The rows of a batch: large ones, since each is one transfer.
const ROWS: usize = 1 << 16;

/// Copies and the rest of the program need some cores, too.
#[allow(dead_code, reason = "a test includes this file")]
const MOST_THREADS: usize = 8;

/// A Parquet file whose footer was read.
pub(crate) struct ParquetFile {
    path: PathBuf,
    pub(crate) metadata: ArrowReaderMetadata,
    columns: ProjectionMask,
}

impl ParquetFile {
    /// Opens the file at `path`, of which the columns of these names are read, or all if there are none.
    pub(crate) fn open(path: &Path, columns: &[String]) -> Result<Self, ArrowError> {
        let metadata = ArrowReaderMetadata::load(&File::open(path)?, Default::default())?;
        let columns = match columns {
            [] => ProjectionMask::all(),
            _ => {
                let indices = columns.iter().map(|name| metadata.schema().index_of(name));
                let indices = indices.collect::<Result<Vec<_>, _>>()?;
                ProjectionMask::roots(metadata.parquet_schema(), indices)
            }
        };
        Ok(Self {
            path: path.into(),
            metadata,
            columns,
        })
    }

    /// A reader of some row groups.
    fn read(&self, row_groups: Vec<usize>) -> Result<ParquetRecordBatchReader, ArrowError> {
        // Each reader opens the file: clones of a `File` share one position.
        let file = File::open(&self.path)?;
        let builder =
            ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone());
        let builder = builder
            .with_batch_size(ROWS)
            .with_projection(self.columns.clone())
            .with_row_groups(row_groups);
        Ok(builder.build()?)
    }

    /// A reader of all row groups, as many at the same time as there are threads. Its errors name the row group as a part.
    pub(crate) fn into_row_groups(self, threads: usize) -> Result<Parts, ArrowError> {
        let schema = self.read(Vec::new())?.schema();
        let groups = self.metadata.metadata().num_row_groups();
        let open = move |group| self.read(vec![group]);
        Ok(Parts::read(schema, groups, threads, open)?)
    }
}

#[allow(dead_code, reason = "a test includes this file")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else {
        return Err("usage: parquet_to_device FILE [COLUMN ...]".into());
    };
    let columns: Vec<_> = arguments.collect();
    let device = Devices::gpu().or_else(|_| Devices::simulated())?;
    let threads = available_parallelism().map_or(1, |cores| cores.get().min(MOST_THREADS));
    let reader = ParquetFile::open(path.as_ref(), &columns)?.into_row_groups(threads)?;
    println!("{path} to {device}: {}", reader.schema());

    let (start, mut rows, mut last) = (Instant::now(), 0, None);
    for on_device in upload_reader(reader, &device) {
        let batch = on_device.map_err(|e| format!("{path}: {e}"))?;
        rows += batch.num_rows();
        // Work on the device would be queued here.
        last = Some(batch);
    }
    if let Some(last) = last {
        last.wait()?;
    }
    let bytes = device.stats().bytes_to_device;
    let seconds = start.elapsed().as_secs_f64();
    println!("{rows} rows, {bytes} bytes to the device in {seconds:.2} s");
    Ok(())
}
