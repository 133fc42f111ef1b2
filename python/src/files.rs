//! Files as streams of batches on a device.

use std::borrow::Cow;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_device::{Error, Result};
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, Schema, SchemaRef};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use pyo3::exceptions::{PyKeyError, PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::ahead::upload_ahead;
use crate::schema::summary;
use crate::stream::Stream;
use crate::target::Target;

type HostReader = Box<dyn RecordBatchReader + Send>;

/// Reads a Parquet file as a stream of batches on a device. Two threads read and copy ahead of who asks for them.
///
/// Args:
///     path: the file.
///     device: the device, or its name.
///     columns: the names of the columns to read, in their order; all if None.
///     batch_size: the most rows of a batch.
///     ahead: at most twice as many batches and two more are read before they are asked for; at least 1.
///     memory_budget: the bytes of batches that are read and not taken yet, after which reading pauses. At least one batch is read.
///
/// Raises:
///     OSError: if the file cannot be opened or read, such as FileNotFoundError.
///     KeyError: for a column that the file does not have.
///     ValueError: for a file that is no Parquet file, or damaged, and for batches of 0 rows.
///     NotImplementedError: if there is no such device.
#[pyfunction]
#[pyo3(signature = (path, device, *, columns = None, batch_size = 65536, ahead = 2, memory_budget = 268435456))]
pub(crate) fn read_parquet(
    py: Python<'_>,
    path: PathBuf,
    device: Target<'_>,
    columns: Option<Vec<String>>,
    batch_size: usize,
    ahead: usize,
    memory_budget: usize,
) -> PyResult<Stream> {
    if batch_size == 0 {
        return Err(PyValueError::new_err("batch_size must be at least 1"));
    }
    let open = |file: File, chosen: Option<&[usize]>| {
        let builder = ParquetRecordBatchReaderBuilder::try_new(file)?;
        let mask = chosen.map_or_else(ProjectionMask::all, |chosen| {
            ProjectionMask::roots(builder.parquet_schema(), chosen.iter().copied())
        });
        let builder = builder.with_batch_size(batch_size);
        let reader = builder.with_projection(mask).build()?;
        Ok(Box::new(reader) as HostReader)
    };
    read(py, path, device, columns, ahead, memory_budget, open)
}

/// Reads an Arrow IPC file or stream ("Feather") as a stream of batches on a device: those that the file has. Two threads read and
/// copy ahead of who asks for them.
///
/// Args:
///     path: the file.
///     device: the device, or its name.
///     columns: the names of the columns to read, in their order; all if None.
///     ahead: at most twice as many batches and two more are read before they are asked for; at least 1.
///     memory_budget: the bytes of batches that are read and not taken yet, after which reading pauses. At least one batch is read.
///
/// Raises:
///     OSError: if the file cannot be opened or read, such as FileNotFoundError.
///     KeyError: for a column that the file does not have.
///     ValueError: for a file that is no Arrow IPC file, or damaged.
///     NotImplementedError: if there is no such device.
#[pyfunction]
#[pyo3(signature = (path, device, *, columns = None, ahead = 2, memory_budget = 268435456))]
pub(crate) fn read_ipc(
    py: Python<'_>,
    path: PathBuf,
    device: Target<'_>,
    columns: Option<Vec<String>>,
    ahead: usize,
    memory_budget: usize,
) -> PyResult<Stream> {
    let open = |mut file: File, chosen: Option<&[usize]>| {
        let mut start = [0; 8];
        file.read_exact(&mut start)?;
        let is_file = start.starts_with(b"ARROW1");
        // The size of a stream's first message, after a marker that old streams do not have. Memory of that size is allocated.
        let [a, b, c, d, size @ ..] = start;
        let size = match [a, b, c, d] {
            [0xff, 0xff, 0xff, 0xff] => size,
            old => old,
        };
        if !is_file && u64::from(u32::from_le_bytes(size)) > file.metadata()?.len() {
            return Err(ArrowError::ParseError("is not Arrow IPC data".into()));
        }
        file.rewind()?;
        let (file, chosen) = (BufReader::new(file), chosen.map(<[usize]>::to_vec));
        Ok(if is_file {
            Box::new(FileReader::try_new(file, chosen)?) as HostReader
        } else {
            Box::new(StreamReader::try_new(file, chosen)?)
        })
    };
    read(py, path, device, columns, ahead, memory_budget, open)
}

/// Opens a file: all of its columns, or those of these numbers, in the file's order.
fn read(
    py: Python<'_>,
    path: PathBuf,
    device: Target<'_>,
    columns: Option<Vec<String>>,
    ahead: usize,
    memory_budget: usize,
    open: impl Fn(File, Option<&[usize]>) -> Result<HostReader, ArrowError> + Sync,
) -> PyResult<Stream> {
    let device = device.open(py)?;
    let opened = |chosen: Option<&[usize]>| {
        let file = File::open(&path).map_err(|e| raised(&path, &e))?;
        // A directory can be opened too, and a read from a pipe could wait for ever.
        let kind = file.metadata().map_err(|e| raised(&path, &e))?;
        if !kind.is_file() {
            let text = "is not a regular file";
            return Err(named(&path, ArrowError::ParseError(text.into())).into());
        }
        let reader = caught(|| open(file, chosen));
        reader.map_err(|e| PyErr::from(named(&path, e)))
    };
    let all = py.detach(|| opened(None))?;
    let mut schema = all.schema();
    let (reader, order) = match &columns {
        None => (all, None),
        Some(columns) => {
            let order = numbers(&schema, columns)?;
            schema = Arc::new(schema.project(&order).map_err(Error::from)?);
            let mut chosen = order.clone();
            chosen.sort_unstable();
            chosen.dedup();
            // Where each column is among those that are read.
            let places = order.iter().map(|i| chosen.partition_point(|c| c < i));
            let places = places.collect();
            (py.detach(|| opened(Some(&chosen)))?, Some(places))
        }
    };
    let reader = Named {
        reader,
        order,
        schema,
        path,
    };
    let reader = upload_ahead(reader, &device, ahead.max(1), memory_budget)?;
    Ok(Stream::of(reader))
}

fn numbers(schema: &Schema, columns: &[String]) -> PyResult<Vec<usize>> {
    let number = |name: &String| {
        let found = schema.fields().iter().position(|f| f.name() == name);
        let absent = || format!("no column '{name}'; there are {}", summary(schema));
        found.ok_or_else(|| PyKeyError::new_err(absent()))
    };
    columns.iter().map(number).collect()
}

/// Puts columns into their order, and names the file in errors.
struct Named {
    reader: HostReader,
    order: Option<Vec<usize>>,
    schema: SchemaRef,
    path: PathBuf,
}

impl Iterator for Named {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = caught(|| self.reader.next().transpose()).transpose()?;
        let next = next.and_then(|batch| match &self.order {
            Some(order) => batch.project(order),
            None => Ok(batch),
        });
        Some(next.map_err(|e| named(&self.path, e).into()))
    }
}

impl RecordBatchReader for Named {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}

/// Readers panic on some damaged files.
fn caught<T>(read: impl FnOnce() -> Result<T, ArrowError>) -> Result<T, ArrowError> {
    let damaged = || ArrowError::ParseError("is probably damaged: its reader panicked".into());
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| Err(damaged()))
}

/// What opening a file raises: `FileNotFoundError` and the like, with the path.
pub(crate) fn raised(path: &Path, e: &std::io::Error) -> PyErr {
    let text = e.to_string();
    let text = text.split(" (os error").next().map(str::to_owned);
    // Of three arguments, Python chooses the class by the first.
    PyOSError::new_err((e.raw_os_error(), text, path.as_os_str().to_owned()))
}

/// The error of a reader: `OSError` of the system, else `ValueError`.
fn named(path: &Path, e: ArrowError) -> Error {
    let name = Cow::from(path.display().to_string());
    match &e {
        ArrowError::IoError(text, io) => match io.raw_os_error() {
            Some(errno) => Error::Foreign {
                operation: "read",
                errno,
                message: format!("{name}: {text}").into(),
            },
            None => Error::InvalidInput {
                path: name,
                message: text.clone().into(),
            },
        },
        _ => Error::InvalidInput {
            path: name,
            message: e.to_string().into(),
        },
    }
}
