//! A C library around the crate, so that any language can drive it: files as device streams, device streams as files,
//! batches from one device to another. `arrow_device.h` is its header.
//!
//! ```text
//! cargo build --release -p arrow-device-capi   # target/release/libarrow_device_capi.so; --features cuda, rocm
//! ```
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

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

pub use outcome::arrow_device_last_error;
use outcome::{Failure, answer};

/// Rows of the batches that files are read in, at most.
const BATCH_ROWS: usize = 65536;

/// See the header.
///
/// # Safety
/// The texts are null-terminated; `out` is valid for writes. Either may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn arrow_device_open(
    path: *const c_char,
    device: *const c_char,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    answer(|| {
        check(out, "out")?;
        // SAFETY: not null, and the caller's; what was there is not ours to release.
        unsafe { FFI_ArrowDeviceArrayStream::empty().write_to(out) };
        // SAFETY: the caller's.
        let (path, device) = unsafe { (path_of(path)?, text(device, "device")?) };
        // What the system says of it, with its errno. Opening another thing than a file could wait for ever.
        let file = |e| Failure::file(&path, &e);
        if path.metadata().map_err(file)?.is_file() {
            File::open(&path).map_err(file)?;
        }
        let source = input::sources(std::slice::from_ref(&path), 0.0).map_err(Failure::invalid)?;
        let source = source.first().ok_or_else(|| Failure::invalid("no file"))?;
        let reader = source.open(BATCH_ROWS).map_err(Failure::invalid)?.reader;
        let stream = export_reader(reader, &Devices::open(device)?)?;
        // SAFETY: as above.
        unsafe { stream.write_to(out) };
        Ok(())
    })
}

/// See the header.
///
/// # Safety
/// `stream` keeps to the C device stream interface; `path` is null-terminated. Either may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn arrow_device_write_ipc(
    stream: *mut FFI_ArrowDeviceArrayStream,
    path: *const c_char,
) -> c_int {
    answer(|| {
        check(stream, "stream")?;
        // SAFETY: not null, and the caller's. Taken first: it is consumed whatever happens.
        let stream = unsafe { FFI_ArrowDeviceArrayStream::from_raw(stream) };
        // SAFETY: the caller's.
        let path = unsafe { path_of(path) }?;
        // SAFETY: the caller vouches for the structs; values are checked.
        let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, checked()) }?;
        // Where a link leads to.
        let path = path.canonicalize().unwrap_or(path);
        if path.metadata().is_ok_and(|old| !old.is_file()) {
            // A pipe or a device cannot be replaced.
            let mut file = BufWriter::new(File::options().write(true).open(&path)?);
            write_ipc(reader, &mut file)?;
            return Ok(file.flush()?);
        }
        let mut part = Part::create(&path)?;
        write_ipc(reader, &mut part.file)?;
        part.keep(&path)
    })
}

/// A file beside the one that it will be; removed unless it is kept.
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
                // Another process' of the same number, or left behind by one.
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

/// arrow-ipc writes other values than those of a slice for these, at any depth.
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
/// See the header.
///
/// # Safety
/// The structs keep to the C device data interface; `device` is null-terminated; `out` and `out_schema` are valid
/// for writes. Any of them may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn arrow_device_copy(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
    device: *const c_char,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        // Taken first: both are consumed whatever happens.
        let array = check(array, "array")
            // SAFETY: not null, and the caller's.
            .map(|array| unsafe { FFI_ArrowDeviceArray::from_raw(array) });
        let schema = check(schema, "schema")
            // SAFETY: as above.
            .map(|schema| unsafe { ForeignSchema::from_raw(schema) });
        let out = check(out, "out").inspect(|out| {
            // SAFETY: valid for writes; what was there is not ours to release.
            unsafe { FFI_ArrowDeviceArray::empty().write_to(*out) };
        });
        let out_schema = check(out_schema, "out_schema").inspect(|out| {
            // SAFETY: as above.
            unsafe { out.write(FFI_ArrowSchema::empty()) };
        });
        let (array, schema, out, out_schema) = (array?, schema?, out?, out_schema?);
        // SAFETY: the caller's.
        let device = Devices::open(unsafe { text(device, "device") }?)?;
        // SAFETY: the caller vouches for the structs; values are checked.
        let batch = unsafe { DeviceRecordBatch::import_with(array, schema.as_ref(), &checked()) }?;
        let (array, schema) = batch.to_device(&device)?.export(SyncPolicy::Event)?;
        // SAFETY: not null, and valid for writes.
        unsafe {
            array.write_to(out);
            out_schema.write(schema);
        }
        Ok(())
    })
}

fn checked() -> ImportOptions {
    ImportOptions::default().with_validation(Validation::Full)
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
    // SAFETY: the caller's.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map_err(|_| Failure::invalid(format!("{name} is not UTF-8")))
}

/// # Safety
/// As [`text`].
unsafe fn path_of(path: *const c_char) -> Result<PathBuf, Failure> {
    if path.is_null() {
        return Err(Failure::invalid("path is null"));
    }
    // SAFETY: the caller's.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    Ok(OsStr::from_bytes(bytes).into())
}
