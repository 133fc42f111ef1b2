//! Where record batches come from: files and generated tables.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use tpchgen::generators as tpch;
use tpchgen_arrow as tables;

use super::guard;
use super::ipc;

type BoxReader = Box<dyn RecordBatchReader + Send>;

/// Readers and generators allocate memory for whole batches, so they are never asked for more rows
/// than this at once.
const MOST_ROWS_AT_ONCE: usize = 1 << 20;

/// A source that was recognised, but not opened.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file of this format.
    File(PathBuf, Format),
    /// A table to generate, and its scale factor.
    Table(&'static str, f64),
}

/// What a file contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// Arrow IPC, the file format.
    IpcFile,
    /// Arrow IPC, the streaming format.
    IpcStream,
    /// Parquet.
    Parquet,
    /// Delimited text with a header, and its delimiter.
    Csv(u8),
}

/// An opened source.
pub struct Input {
    /// As [`Source::name`].
    pub name: String,
    /// About how many rows will come.
    pub rows: Option<u64>,
    /// The record batches, none with more rows than asked for. After an error it ends.
    pub reader: Box<dyn RecordBatchReader + Send>,
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Input({})", self.name)
    }
}

/// Recognises the files by their content, or lists the TPC-H tables if there are none.
pub fn sources(files: &[PathBuf], scale: f64) -> Result<Vec<Source>, String> {
    if files.is_empty() {
        return Ok(TABLES.map(|name| Source::Table(name, scale)).to_vec());
    }
    let recognise = |path: &PathBuf| match format_of(path) {
        Ok(format) => Ok(Source::File(path.clone(), format)),
        Err(e) => Err(format!("{}: {e}", path.display())),
    };
    files.iter().map(recognise).collect()
}

impl Source {
    /// The file's path or the table's name.
    pub fn name(&self) -> String {
        match self {
            Self::File(path, _) => path.display().to_string(),
            Self::Table(name, _) => (*name).to_owned(),
        }
    }

    /// Opens the source for batches of at most `batch_rows` rows.
    pub fn open(&self, batch_rows: usize) -> Result<Input, String> {
        let at_once = batch_rows.min(MOST_ROWS_AT_ONCE);
        let name = self.name();
        let opened = guard::catch(|| match self {
            Self::File(path, format) => open_file(path, *format, at_once),
            Self::Table(name, scale) => open_table(name, *scale, at_once),
        });
        match opened.unwrap_or_else(|panic| Err(unreadable(&panic))) {
            Ok((reader, rows)) => Ok(Input {
                name,
                rows,
                reader: Box::new(Cut::new(reader, batch_rows)),
            }),
            Err(e) => Err(format!("{name}: {e}")),
        }
    }
}

/// What to say of an input whose reader panicked.
fn unreadable(panic: &str) -> String {
    format!("cannot be read, it is probably damaged: {panic}")
}

/// Recognises a file by its first bytes, or else by its name.
fn format_of(path: &Path) -> Result<Format, String> {
    let metadata = path.metadata().map_err(|e| e.to_string())?;
    if metadata.is_dir() {
        return Err("is a directory".to_owned());
    }
    if !metadata.is_file() {
        return Err("is not a regular file".to_owned());
    }
    // Enough for the schema message of a stream without continuation marker.
    let mut start = Vec::new();
    let file = File::open(path).map_err(|e| e.to_string())?;
    let mut file = file.take(64 << 10);
    file.read_to_end(&mut start).map_err(|e| e.to_string())?;
    if start.is_empty() {
        return Err("is empty".to_owned());
    }
    let by_content: [(&[u8], Result<Format, &str>); 8] = [
        (b"ARROW1", Ok(Format::IpcFile)),
        (&[0xff; 4], Ok(Format::IpcStream)),
        (b"PAR1", Ok(Format::Parquet)),
        (b"PARE", Err("encrypted Parquet is not supported")),
        (b"FEA1", Err("Feather version 1 is not supported")),
        (b"ORC", Err("ORC is not supported")),
        (&[0x1f, 0x8b], Err("is gzip-compressed: unpack it first")),
        (
            &[0x28, 0xb5, 0x2f, 0xfd],
            Err("is zstd-compressed: unpack it first"),
        ),
    ];
    let known = by_content
        .iter()
        .find(|(magic, _)| start.starts_with(magic));
    if let Some((_, format)) = known {
        return format.map_err(str::to_owned);
    }
    if ipc::is_legacy_stream(&start) {
        return Ok(Format::IpcStream);
    }
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    match extension.to_lowercase().as_str() {
        "csv" => Ok(Format::Csv(b',')),
        "tsv" => Ok(Format::Csv(b'\t')),
        "arrow" | "arrow_file" | "arrows" | "feather" | "ipc" | "stream" => {
            Err("is not Arrow IPC data".to_owned())
        }
        "parquet" => Err("is not a Parquet file".to_owned()),
        _ => Err("is not Arrow IPC, Parquet or a .csv file".to_owned()),
    }
}

fn open_file(
    path: &Path,
    format: Format,
    batch_rows: usize,
) -> Result<(BoxReader, Option<u64>), String> {
    let file = File::open(path).map_err(|e| e.to_string())?;
    let arrow = |e: ArrowError| e.to_string();
    match format {
        Format::IpcFile => {
            let mut file = BufReader::new(file);
            let rows = ipc::check_file(&mut file)?;
            let reader = arrow_ipc::reader::FileReader::try_new(file, None).map_err(arrow)?;
            Ok((Box::new(reader), Some(rows)))
        }
        Format::IpcStream => {
            let mut file = BufReader::new(file);
            let rows = ipc::check_stream(&mut file)?;
            file.rewind().map_err(|e| e.to_string())?;
            let reader = arrow_ipc::reader::StreamReader::try_new(file, None).map_err(arrow)?;
            Ok((Box::new(reader), Some(rows)))
        }
        Format::Parquet => {
            let builder = ParquetRecordBatchReaderBuilder::try_new(file)
                .map_err(|e| e.to_string())?
                .with_batch_size(batch_rows);
            let rows = builder.metadata().file_metadata().num_rows();
            let reader = builder.build().map_err(|e| e.to_string())?;
            Ok((Box::new(reader), u64::try_from(rows).ok()))
        }
        Format::Csv(delimiter) => {
            let mut file = BufReader::new(file);
            let format = arrow_csv::reader::Format::default()
                .with_header(true)
                .with_delimiter(delimiter);
            let (schema, rows) = format.infer_schema(&mut file, None).map_err(arrow)?;
            file.rewind().map_err(|e| e.to_string())?;
            let reader = arrow_csv::ReaderBuilder::new(Arc::new(schema))
                .with_format(format)
                .with_batch_size(batch_rows)
                .build_buffered(file)
                .map_err(arrow)?;
            Ok((Box::new(reader), u64::try_from(rows).ok()))
        }
    }
}

const TABLES: [&str; 8] = [
    "region", "nation", "supplier", "customer", "part", "partsupp", "orders", "lineitem",
];

/// A generator of a TPC-H table and about how many rows it makes.
fn open_table(
    name: &str,
    scale: f64,
    batch_rows: usize,
) -> Result<(BoxReader, Option<u64>), String> {
    macro_rules! table {
        ($arrow:ident, $generator:ident, $rows:expr) => {{
            let generator = tpch::$generator::new(scale, 1, 1);
            let reader = tables::$arrow::new(generator).with_batch_size(batch_rows);
            (Box::new(reader) as BoxReader, $rows)
        }};
    }
    macro_rules! rows {
        ($generator:ident) => {
            tpch::$generator::calculate_row_count(scale, 1, 1)
        };
    }
    let (reader, rows) = match name {
        "region" => table!(RegionArrow, RegionGenerator, 5),
        "nation" => table!(NationArrow, NationGenerator, 25),
        "supplier" => table!(SupplierArrow, SupplierGenerator, rows!(SupplierGenerator)),
        "customer" => table!(CustomerArrow, CustomerGenerator, rows!(CustomerGenerator)),
        "part" => table!(PartArrow, PartGenerator, rows!(PartGenerator)),
        // A part has 4 suppliers.
        "partsupp" => table!(
            PartSuppArrow,
            PartSuppGenerator,
            rows!(PartSuppGenerator).saturating_mul(4)
        ),
        "orders" => table!(OrderArrow, OrderGenerator, rows!(OrderGenerator)),
        // An order has 1 to 7 lines.
        "lineitem" => table!(
            LineItemArrow,
            LineItemGenerator,
            rows!(OrderGenerator).saturating_mul(4)
        ),
        _ => return Err("is not a TPC-H table".to_owned()),
    };
    Ok((reader, u64::try_from(rows).ok()))
}

/// Cuts batches that have too many rows, turns a panic of the reader into an error and ends after
/// an error.
struct Cut {
    inner: BoxReader,
    schema: SchemaRef,
    /// The rest of a large batch.
    rest: Option<RecordBatch>,
    most_rows: usize,
    ended: bool,
}

impl Cut {
    fn new(inner: BoxReader, most_rows: usize) -> Self {
        Self {
            schema: inner.schema(),
            inner,
            rest: None,
            most_rows,
            ended: false,
        }
    }
}

impl Iterator for Cut {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let batch = match self.rest.take() {
            Some(rest) => rest,
            None => match guard::catch(|| self.inner.next()) {
                Ok(Some(Ok(batch))) => batch,
                other => {
                    self.ended = true;
                    return match other {
                        Ok(end_or_error) => end_or_error,
                        Err(panic) => {
                            Some(Err(ArrowError::ExternalError(unreadable(&panic).into())))
                        }
                    };
                }
            },
        };
        let left = batch.num_rows().saturating_sub(self.most_rows);
        if left == 0 {
            return Some(Ok(batch));
        }
        self.rest = Some(batch.slice(self.most_rows, left));
        Some(Ok(batch.slice(0, self.most_rows)))
    }
}

impl RecordBatchReader for Cut {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow_array::{Int32Array, RecordBatchIterator};

    #[test]
    fn cuts_large_batches_and_keeps_small_ones() {
        let batch = |n: i32| {
            let column = Arc::new(Int32Array::from_iter_values(0..n)) as _;
            RecordBatch::try_from_iter([("a", column)])
        };
        let schema = batch(0).unwrap().schema();
        let inner = RecordBatchIterator::new([batch(7), batch(0), batch(3), batch(4)], schema);
        let rows: Vec<_> = Cut::new(Box::new(inner), 3)
            .map(|b| b.unwrap().num_rows())
            .collect();
        assert_eq!(rows, [3, 3, 1, 0, 3, 3, 1]);
    }

    #[test]
    fn a_panicking_reader_is_an_error_and_the_end() {
        let inner = (0..2).map(|_| -> Result<RecordBatch, ArrowError> { panic!("odd input") });
        let inner = RecordBatchIterator::new(inner, Arc::new(arrow_schema::Schema::empty()));
        let mut cut = Cut::new(Box::new(inner), 3);
        let e = cut.next().unwrap().unwrap_err().to_string();
        assert!(e.contains("odd input"), "{e}");
        assert!(cut.next().is_none());
    }

    #[test]
    fn tables_are_generated_in_batches() {
        for source in sources(&[], 0.001).unwrap() {
            let input = source.open(1000).unwrap();
            let (mut rows, name) = (0, input.name);
            for batch in input.reader {
                let batch = batch.unwrap();
                assert!(batch.num_rows() <= 1000, "{name}");
                rows += batch.num_rows() as u64;
            }
            let expected = input.rows.unwrap();
            let about = expected / 2..=expected * 2;
            assert!(about.contains(&rows), "{name}: {rows}, {expected}");
        }
    }
}
