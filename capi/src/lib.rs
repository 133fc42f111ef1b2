//! A C library around `arrow-device`, through which any language can use it: it reads files as
//! device streams, writes device streams to files, and moves batches between devices.
//! `arrow_device.h` is its header.
//!
//! ```c
//! struct ArrowDeviceArrayStream stream;
//! if (arrow_device_open("trips.parquet", "cuda:0", &stream) != 0) {
//!   fprintf(stderr, "%s\n", arrow_device_last_error());
//! }
//! ```
//!
//! ```text
//! cargo build --release -p arrow-device-capi   # target/release/libarrow_device_capi.so; --features cuda, rocm, integration
//! ```
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

#[cfg(feature = "integration")]
mod integration;
#[cfg(feature = "integration")]
mod live;
mod outcome;

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_device::abi::ForeignSchema;
use arrow_device::{
    DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices,
    FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream, ImportOptions, SyncPolicy, Validation,
    export_reader,
};
use arrow_schema::DataType;
use arrow_schema::ffi::FFI_ArrowSchema;
use roundtrip::input;

#[cfg(feature = "integration")]
pub use integration::*;
#[cfg(feature = "integration")]
pub use live::{counted, live_buffers, live_bytes};
pub use outcome::arrow_device_last_error;
use outcome::{Failure, answer};

/// The most rows of a batch that is read from a file.
const BATCH_ROWS: usize = 65536;

/// Opens a file as a stream of record batches on a device. The header describes it.
///
/// # Safety
/// `path` and `device` are null or null-terminated. `out` is null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn arrow_device_open(
    path: *const c_char,
    device: *const c_char,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    answer(|| {
        check(out, "out")?;
        // SAFETY: the caller guarantees that `out`, which is not null, is valid for writes. What
        // was there is not released.
        unsafe { out.write(FFI_ArrowDeviceArrayStream::empty()) };
        // SAFETY: the caller guarantees that both are null or null-terminated.
        let (path, device) = unsafe { (path_of(path)?, text(device, "device")?) };
        // Reports the system's errno. Opening anything but a regular file, such as a pipe, could
        // block for ever.
        let file = |e| Failure::file(&path, &e);
        if path.metadata().map_err(file)?.is_file() {
            File::open(&path).map_err(file)?;
        }
        let source = input::sources(std::slice::from_ref(&path), 0.0).map_err(Failure::invalid)?;
        let source = source.first().ok_or_else(|| Failure::invalid("no file"))?;
        let reader = source.open(BATCH_ROWS).map_err(Failure::invalid)?.reader;
        let stream = export_reader(reader, &Devices::open(device)?)?;
        // SAFETY: the caller guarantees that `out`, which is not null, is valid for writes.
        unsafe { out.write(stream) };
        Ok(())
    })
}

/// Writes a device stream to an Arrow IPC stream file. The header describes it.
///
/// # Safety
/// `stream` is null or points to a stream that keeps to the C device stream interface. `path` is
/// null or null-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn arrow_device_write_ipc(
    stream: *mut FFI_ArrowDeviceArrayStream,
    path: *const c_char,
) -> c_int {
    answer(|| {
        check(stream, "stream")?;
        // Taken first, since the stream is consumed whatever happens.
        // SAFETY: the caller guarantees that `stream`, which is not null, points to a stream.
        let stream = unsafe { FFI_ArrowDeviceArrayStream::from_raw(stream) };
        // SAFETY: the caller guarantees that `path` is null or null-terminated.
        let path = unsafe { path_of(path) }?;
        // SAFETY: the caller guarantees that the stream keeps to the interface. `checked` requires
        // nothing of the values.
        let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, checked()) }?;
        // Follows links.
        let path = path.canonicalize().unwrap_or(path);
        if path.metadata().is_ok_and(|old| !old.is_file()) {
            // A pipe or a device file cannot be replaced.
            let mut file = BufWriter::new(File::options().write(true).open(&path)?);
            write_ipc(reader, &mut file)?;
            return Ok(file.flush()?);
        }
        let mut part = Part::create(&path)?;
        write_ipc(reader, &mut part.file)?;
        part.keep(&path)
    })
}

/// A file next to the one that it will replace. It is removed unless it is kept.
struct Part {
    file: BufWriter<File>,
    path: PathBuf,
    kept: bool,
}

impl Part {
    fn create(whole: &Path) -> Result<Self, Failure> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = whole.with_file_name(format!(".{}-{count}.part", std::process::id()));
            match File::create_new(&path) {
                // Another process with the same number has left it behind, or is using it.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                file => {
                    return Ok(Self {
                        file: BufWriter::new(file?),
                        path,
                        kept: false,
                    });
                }
            }
        }
    }

    fn keep(mut self, whole: &Path) -> Result<(), Failure> {
        self.file.flush()?;
        if let Ok(old) = whole.metadata() {
            std::fs::set_permissions(&self.path, old.permissions())?;
        }
        std::fs::rename(&self.path, whole)?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn write_ipc(reader: DeviceRecordBatchStreamReader, to: impl Write) -> Result<(), Failure> {
    let schema = reader.schema();
    let slices_are_wrong = schema
        .fields()
        .iter()
        .any(|f| has_runs_or_unions(f.data_type()));
    let mut writer = arrow_ipc::writer::StreamWriter::try_new(to, &schema)?;
    for batch in reader {
        let mut batch = batch?;
        if slices_are_wrong {
            batch = batch.compact()?;
        }
        writer.write(&batch.to_host()?)?;
    }
    writer.finish()?;
    Ok(())
}

/// Whether the type contains run-end encoded or union types, for which arrow-ipc does not write the
/// values of slices correctly.
fn has_runs_or_unions(data_type: &DataType) -> bool {
    match data_type {
        DataType::RunEndEncoded(..) | DataType::Union(..) => true,
        DataType::List(item) | DataType::LargeList(item) => has_runs_or_unions(item.data_type()),
        DataType::ListView(item) | DataType::LargeListView(item) => {
            has_runs_or_unions(item.data_type())
        }
        DataType::FixedSizeList(item, _) | DataType::Map(item, _) => {
            has_runs_or_unions(item.data_type())
        }
        DataType::Struct(fields) => fields.iter().any(|f| has_runs_or_unions(f.data_type())),
        DataType::Dictionary(_, values) => has_runs_or_unions(values),
        _ => false,
    }
}

/// Moves a record batch to a device. The header describes it.
///
/// # Safety
/// Each pointer is null, or: `array` and `schema` point to structs that keep to the C device data
/// interface, `device` is null-terminated, and `out` and `out_schema` are valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn arrow_device_copy(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
    device: *const c_char,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        // Taken first, since both are consumed whatever happens.
        let array = check(array, "array")
            // SAFETY: the caller guarantees that `array`, which is not null, points to an array.
            .map(|array| unsafe { FFI_ArrowDeviceArray::from_raw(array) });
        let schema = check(schema, "schema")
            // SAFETY: the caller guarantees that `schema`, which is not null, points to a schema.
            .map(|schema| unsafe { ForeignSchema::from_raw(schema) });
        let out = check(out, "out").inspect(|out| {
            // SAFETY: the caller guarantees that `out`, which is not null, is valid for writes.
            // What was there has been taken or is not released.
            unsafe { (*out).write(FFI_ArrowDeviceArray::empty()) };
        });
        let out_schema = check(out_schema, "out_schema").inspect(|out| {
            // SAFETY: the caller guarantees that `out_schema`, which is not null, is valid for
            // writes.
            unsafe { out.write(FFI_ArrowSchema::empty()) };
        });
        let (array, schema, out, out_schema) = (array?, schema?, out?, out_schema?);
        // SAFETY: the caller guarantees that `device` is null or null-terminated.
        let device = Devices::open(unsafe { text(device, "device") }?)?;
        // SAFETY: the caller guarantees that the structs keep to the interface. `checked` requires
        // nothing of the values.
        let batch = unsafe { DeviceRecordBatch::import(array, schema.as_ref(), &checked()) }?;
        let (array, schema) = batch.to_device(&device)?.export(SyncPolicy::Event)?;
        // SAFETY: the caller guarantees that both, which are not null, are valid for writes. They
        // are empty since the writes above.
        unsafe {
            out.write(array);
            out_schema.write(schema);
        }
        Ok(())
    })
}

fn checked() -> ImportOptions {
    ImportOptions {
        validation: Validation::Full,
        ..Default::default()
    }
}

fn check<T>(pointer: *mut T, name: &str) -> Result<*mut T, Failure> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(Failure::invalid(format!("{name} is null or misaligned")));
    }
    Ok(pointer)
}

/// # Safety
/// `text` is null or null-terminated, and lives for `'a`.
unsafe fn text<'a>(text: *const c_char, name: &str) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(Failure::invalid(format!("{name} is null")));
    }
    // SAFETY: the caller guarantees that `text`, which is not null, is null-terminated and lives
    // for `'a`.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map_err(|_| Failure::invalid(format!("{name} is not UTF-8")))
}

/// # Safety
/// `path` is null or null-terminated.
unsafe fn path_of(path: *const c_char) -> Result<PathBuf, Failure> {
    if path.is_null() {
        return Err(Failure::invalid("path is null"));
    }
    // SAFETY: the caller guarantees that `path`, which is not null, is null-terminated. The bytes
    // are copied here.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    Ok(OsStr::from_bytes(bytes).into())
}
