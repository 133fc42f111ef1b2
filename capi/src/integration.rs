//! The functions of `arrow_device_integration.h`, which tests of several implementations against each other call.

use std::ffi::{c_char, c_int};
use std::fs::File;
use std::io::BufReader;
use std::ptr;

use arrow_array::{Array, RecordBatch, RecordBatchIterator, RecordBatchOptions, make_array};
use arrow_device::abi::ForeignSchema;
use arrow_device::device::DeviceId;
use arrow_device::device::sim::SimDevice;
use arrow_device::{
    ArrowDeviceType, Device, DeviceRecordBatch, DeviceRecordBatchReader,
    DeviceRecordBatchStreamReader, Devices, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
    SyncPolicy, export_reader,
};
use arrow_integration_test::{ArrowJson, schema_from_json};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{ArrowError, Schema, SchemaRef};
use roundtrip::input;

use crate::outcome::{Failure, answer, arrow_device_last_error};
use crate::{check, checked, live, path_of};

/// The rows of a batch of a file are never more.
const ALL_ROWS: usize = 1 << 20;

/// Exports the schema of a file. The header describes it, as all functions here.
///
/// # Safety
/// `path` is null or null-terminated. `out` is null or valid for writes.
#[unsafe(export_name = "ArrowDevice_CDeviceIntegration_ExportSchemaFromJson")]
pub unsafe extern "C" fn export_schema(
    path: *const c_char,
    out: *mut FFI_ArrowSchema,
) -> *const c_char {
    text(|| {
        check(out, "out")?;
        // SAFETY: the caller guarantees that `path` is null or null-terminated.
        let case = unsafe { Case::read(path) }?;
        // SAFETY: the caller guarantees that `out`, which is not null, is valid for writes.
        unsafe { out.write(FFI_ArrowSchema::try_from(case.schema.as_ref())?) };
        Ok(())
    })
}

/// Imports a schema and compares it with that of a file.
///
/// # Safety
/// `path` is null or null-terminated. `schema` is null or points to a schema that keeps to the C data interface.
#[unsafe(export_name = "ArrowDevice_CDeviceIntegration_ImportSchemaAndCompareToJson")]
pub unsafe extern "C" fn import_schema(
    path: *const c_char,
    schema: *mut FFI_ArrowSchema,
) -> *const c_char {
    text(|| {
        check(schema, "schema")?;
        // SAFETY: the caller guarantees that `schema`, which is not null, points to a schema.
        let schema = unsafe { ForeignSchema::from_raw(schema) };
        // SAFETY: the caller guarantees that `path` is null or null-terminated.
        let case = unsafe { Case::read(path) }?;
        let schema = Schema::try_from(schema.as_ref())?;
        same("schema", &schema, case.schema.as_ref())
    })
}

/// Exports a batch of a file on a device.
///
/// # Safety
/// As [`export_schema`].
#[unsafe(export_name = "ArrowDevice_CDeviceIntegration_ExportBatchFromJson")]
pub unsafe extern "C" fn export_batch(
    path: *const c_char,
    number: c_int,
    device_type: i32,
    out: *mut FFI_ArrowDeviceArray,
) -> *const c_char {
    text(|| {
        check(out, "out")?;
        // SAFETY: the caller guarantees that `path` is null or null-terminated.
        let batch = unsafe { Case::read(path) }?.batch(number)?;
        let batch = device(device_type)?.upload(&batch)?;
        let (array, _schema) = batch.export(SyncPolicy::Event)?;
        // SAFETY: the caller guarantees that `out`, which is not null, is valid for writes.
        unsafe { out.write(array) };
        Ok(())
    })
}

/// Imports a batch from a device and compares it with one of a file.
///
/// # Safety
/// `path` is null or null-terminated. `array` is null or points to an array that keeps to the C device data interface.
#[unsafe(export_name = "ArrowDevice_CDeviceIntegration_ImportBatchAndCompareToJson")]
pub unsafe extern "C" fn import_batch(
    path: *const c_char,
    number: c_int,
    device_type: i32,
    array: *mut FFI_ArrowDeviceArray,
) -> *const c_char {
    text(|| {
        check(array, "array")?;
        // SAFETY: the caller guarantees that `array`, which is not null, points to an array.
        let array = unsafe { FFI_ArrowDeviceArray::from_raw(array) };
        same("device type", &array.device_type().value(), &device_type)?;
        // SAFETY: the caller guarantees that `path` is null or null-terminated.
        let case = unsafe { Case::read(path) }?;
        let expected = case.batch(number)?;
        // SAFETY: the caller guarantees that the array keeps to the interface. `checked` requires nothing of the values.
        let batch = unsafe { DeviceRecordBatch::import_as(array, case.schema, &checked()) }?;
        same("batch", &batch.to_host()?, &expected)
    })
}

/// Exports the batches of a file as a stream on a device.
///
/// # Safety
/// As [`export_schema`].
#[unsafe(export_name = "ArrowDevice_CDeviceIntegration_ExportStreamFromJson")]
pub unsafe extern "C" fn export_stream(
    path: *const c_char,
    device_type: i32,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> *const c_char {
    text(|| {
        check(out, "out")?;
        // SAFETY: the caller guarantees that `path` is null or null-terminated.
        let case = unsafe { Case::read(path) }?;
        let batches = case.batches.into_iter().map(|batch| counted(&batch));
        let reader = RecordBatchIterator::new(batches, case.schema);
        let stream = export_reader(reader, &device(device_type)?)?;
        // SAFETY: the caller guarantees that `out`, which is not null, is valid for writes.
        unsafe { out.write(stream) };
        Ok(())
    })
}

/// Imports a stream from a device and compares it with a file.
///
/// # Safety
/// `path` is null or null-terminated. `stream` is null or points to a stream that keeps to the C device stream interface.
#[unsafe(export_name = "ArrowDevice_CDeviceIntegration_ImportStreamAndCompareToJson")]
pub unsafe extern "C" fn import_stream(
    path: *const c_char,
    device_type: i32,
    stream: *mut FFI_ArrowDeviceArrayStream,
) -> *const c_char {
    text(|| {
        check(stream, "stream")?;
        // SAFETY: the caller guarantees that `stream`, which is not null, points to a stream.
        let stream = unsafe { FFI_ArrowDeviceArrayStream::from_raw(stream) };
        // SAFETY: the caller guarantees that `path` is null or null-terminated.
        let case = unsafe { Case::read(path) }?;
        // SAFETY: the caller guarantees that the stream keeps to the interface. `checked` requires nothing of the values.
        let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, checked()) }?;
        same("schema", reader.schema().as_ref(), case.schema.as_ref())?;
        let mut expected = case.batches.into_iter();
        for batch in reader {
            let batch = batch?;
            let code = batch.device().id().device_type.value();
            same("device type", &code, &device_type)?;
            same("batch", &Some(batch.to_host()?), &expected.next())?;
        }
        same("batch after the end", &None, &expected.next())
    })
}

/// Returns the bytes that exports and imports hold, on the host and on the test device.
#[unsafe(export_name = "ArrowDevice_CDeviceIntegration_BytesAllocated")]
pub extern "C" fn bytes_allocated() -> i64 {
    let mut bytes = 0;
    answer(|| {
        let device = device(ArrowDeviceType::EXT_DEV.value())?;
        // What was released is freed in the order of the device's work.
        device.synchronize()?;
        device.trim();
        let sim = device.backend().downcast_ref::<SimDevice>();
        bytes = sim.map_or(0, |sim| sim.report().live_bytes as i64);
        Ok(())
    });
    bytes + live::live_bytes()
}

/// What a file has: an integration file in JSON, or one of Arrow IPC with the same content.
struct Case {
    schema: SchemaRef,
    batches: Vec<RecordBatch>,
}

impl Case {
    /// # Safety
    /// `path` is null or null-terminated.
    unsafe fn read(path: *const c_char) -> Result<Self, Failure> {
        // SAFETY: the caller guarantees that `path` is null or null-terminated.
        let path = unsafe { path_of(path) }?;
        if path.extension().is_some_and(|of| of == "json") {
            let json = BufReader::new(File::open(&path).map_err(|e| Failure::file(&path, &e))?);
            let invalid = |e: serde_json::Error| Failure::invalid(e.to_string());
            let json: serde_json::Value = serde_json::from_reader(json).map_err(invalid)?;
            let schema = schema_from_json(&json["schema"])?.into();
            let json: ArrowJson = serde_json::from_value(json).map_err(invalid)?;
            let batches = json.get_record_batches()?;
            return Ok(Self { schema, batches });
        }
        let source = input::sources(std::slice::from_ref(&path), 0.0).map_err(Failure::invalid)?;
        let source = source.first().ok_or_else(|| Failure::invalid("no file"))?;
        let reader = source.open(ALL_ROWS).map_err(Failure::invalid)?.reader;
        let schema = reader.schema();
        let batches = reader.collect::<Result<_, _>>()?;
        Ok(Self { schema, batches })
    }

    fn batch(&self, number: c_int) -> Result<RecordBatch, Failure> {
        let batch = usize::try_from(number)
            .ok()
            .and_then(|n| self.batches.get(n));
        match batch {
            Some(batch) => Ok(counted(batch)?),
            None => Err(Failure::invalid(format!("the file has no batch {number}"))),
        }
    }
}

/// The same batch, whose memory [`bytes_allocated`] counts.
fn counted(batch: &RecordBatch) -> Result<RecordBatch, ArrowError> {
    let columns = batch.columns().iter();
    let columns = columns.map(|column| make_array(live::counted(&column.to_data())));
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(batch.schema(), columns.collect(), &options)
}

/// The CPU, or the simulated device, whose memory the host cannot read.
fn device(device_type: i32) -> Result<Device, Failure> {
    let device = match ArrowDeviceType::new(device_type) {
        ArrowDeviceType::EXT_DEV => Devices::simulated(),
        other => Devices::global().get(DeviceId::new(other, 0)),
    };
    // Callers know from these words that there is nothing to compare.
    device.map_err(|e| Failure::invalid(format!("not supported: {e}")))
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, got: &T, expected: &T) -> Result<(), Failure> {
    if got == expected {
        return Ok(());
    }
    let text = format!("{what}: expected {expected:?}, got {got:?}");
    Err(Failure::invalid(text))
}

/// As archery's functions answer: null, or what is wrong.
fn text(body: impl FnOnce() -> Result<(), Failure>) -> *const c_char {
    match answer(body) {
        0 => ptr::null(),
        _ => arrow_device_last_error(),
    }
}
