//! Out and in: arrays, batches and streams given to a peer, and what a peer gives compared or given on. What comes in
//! is consumed, whatever happens; all its values are checked.

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use arrow_data::ffi::FFI_ArrowArray;
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceRecordBatch, DeviceRecordBatchStreamReader,
    DeviceRecordBatches, Devices, Error, ExportOptions, FFI_ArrowDeviceArray,
    FFI_ArrowDeviceArrayStream, ImportOptions, Queue, Validation, metal,
};
use arrow_schema::ffi::FFI_ArrowSchema;

use crate::answer::{Failure, Outcome, answer, device, policy};
use crate::cases::{COMMON, Columns, Type};
use crate::live::{Counted, counted};
use crate::{spelling, support};

pub(crate) fn checked() -> ImportOptions {
    // What peers export as Metal's is host memory.
    Devices::global().register(ArrowDeviceType::METAL, |id| Ok(metal::shared_memory(id)));
    ImportOptions {
        validation: Validation::Full,
        ..Default::default()
    }
}

/// On devices of the tests' own one that nothing else uses, so that work elsewhere comes after its own by events only.
pub(crate) fn queue(device: &Device) -> Outcome<Queue> {
    Ok(match device.to_string().starts_with("sim:") {
        true => device.new_queue()?,
        false => device.default_queue(),
    })
}

pub(crate) fn upload(columns: &Columns, variant: u64, queue: &Queue) -> Outcome<DeviceRecordBatch> {
    let (batch, cut) = columns.whole(variant)?;
    let batch = queue.device().upload_on(&batch, queue)?;
    Ok(match cut {
        Some((offset, rows)) => batch.slice(offset, rows)?,
        None => batch,
    })
}

/// Writes an array and its schema to where a peer wants them.
///
/// # Safety
/// Both are valid for writes.
pub(crate) unsafe fn put<A>(
    (array, schema): (A, FFI_ArrowSchema),
    out: *mut A,
    out_schema: *mut FFI_ArrowSchema,
) -> Outcome<()> {
    // SAFETY: the caller guarantees that both are valid for writes (see `# Safety`).
    unsafe {
        out.write(array);
        out_schema.write(schema);
    }
    Ok(())
}

/// A case as an array. `wait`: it is complete and comes without an event.
///
/// # Safety
/// `name` is null-terminated; `out` and `out_schema` are valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_array(
    type_: u64,
    case: u64,
    name: *const c_char,
    wait: bool,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        let of = Type::at(type_)?;
        let case = of.case(case)?;
        // SAFETY: the caller guarantees that `name` is null-terminated (see `# Safety`).
        let queue = queue(&unsafe { device(name) }?)?;
        let data = counted(&case.whole.to_data());
        let array = queue
            .device()
            .upload_array_on(&arrow_array::make_array(data), &queue)?;
        let array = array.with_field(Arc::new(of.field()))?;
        let array = match case.cut {
            Some((offset, rows)) => array.slice(offset, rows)?,
            None => array,
        };
        // SAFETY: the caller guarantees that both outputs are valid for writes (see `# Safety`).
        unsafe { put(array.export(policy(wait))?, out, out_schema) }
    })
}

/// A variant of each listed type as the columns of a batch. `apart`: each column by itself, with an event of its own;
/// they become one.
///
/// # Safety
/// `list` has `n` numbers; else as [`peers_array`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_batch(
    list: *const u64,
    n: usize,
    variant: u64,
    name: *const c_char,
    wait: bool,
    apart: bool,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `list` has `n` numbers and that `name` is null-terminated (see `# Safety`).
        let (columns, device) = unsafe { (Columns::listed(list, n)?, device(name)?) };
        let batch = if apart {
            let batch = columns.value(variant)?;
            let parts = batch.columns().iter().map(|column| {
                let queue = queue(&device)?;
                Ok(device.upload_array_on(column, &queue)?)
            });
            let parts: Vec<DeviceArray> = parts.collect::<Outcome<_>>()?;
            DeviceRecordBatch::try_new(batch.schema(), &parts)?
        } else {
            upload(&columns, variant, &queue(&device)?)?
        };
        // SAFETY: the caller guarantees that both outputs are valid for writes (see `# Safety`).
        unsafe { put(batch.export(policy(wait))?, out, out_schema) }
    })
}

/// A case through arrow-rs's own C data interface: another way to the same value.
///
/// # Safety
/// `out` and `out_schema` are valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_plain(
    type_: u64,
    case: u64,
    out: *mut FFI_ArrowArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        let of = Type::at(type_)?;
        let data = counted(&of.case(case)?.value().to_data());
        let plain = (
            FFI_ArrowArray::new(&data),
            FFI_ArrowSchema::try_from(of.field())?,
        );
        // SAFETY: the caller guarantees that both outputs are valid for writes (see `# Safety`).
        unsafe { put(plain, out, out_schema) }
    })
}

/// What a stream answers with in place of batch `k`: an error, or a panic if the errno is 0.
pub(crate) fn failure(errno: c_int, k: u64) -> Error {
    let text = format!("batch {k} cannot be made");
    if errno == 0 {
        // Without the hook's words on the terminal.
        std::panic::resume_unwind(Box::new(text));
    }
    Error::AsyncProducer {
        errno,
        message: text.into(),
        metadata: [("batch".to_owned(), k.to_string())].into(),
    }
}

/// A stream of `count` batches: the common variants, one after the other and again. In place of batch `fail_at`, unless
/// that is negative, comes what [`failure`] says.
///
/// # Safety
/// As [`peers_batch`].
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_stream(
    list: *const u64,
    n: usize,
    count: u64,
    fail_at: i64,
    errno: c_int,
    name: *const c_char,
    wait: bool,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `list` has `n` numbers and that `name` is null-terminated (see `# Safety`).
        let (columns, device) = unsafe { (Columns::listed(list, n)?, device(name)?) };
        let (schema, device_type, open) =
            (columns.schema(), device.id().device_type, Counted::reader());
        let queue = queue(&device)?;
        let batches = (0..count).map(move |k| {
            let _open = &open;
            if k as i64 == fail_at {
                return Err(failure(errno, k));
            }
            upload(&columns, k % COMMON as u64, &queue).map_err(Failure::into_error)
        });
        let reader = DeviceRecordBatches::new(batches, schema, device_type);
        let stream = FFI_ArrowDeviceArrayStream::new(reader, ExportOptions::new(policy(wait)))?;
        // SAFETY: the caller guarantees that `out` is valid for writes (see `# Safety`).
        unsafe { out.write(stream) };
        Ok(())
    })
}

/// Imports an array.
///
/// # Safety
/// Array and schema keep to the C device data interface.
unsafe fn import(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
) -> Outcome<DeviceArray> {
    // SAFETY: the caller passes an array and a schema that it gives away (see `# Safety`).
    let (array, schema) = unsafe {
        (
            FFI_ArrowDeviceArray::from_raw(array),
            FFI_ArrowSchema::from_raw(schema),
        )
    };
    // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
    Ok(unsafe { DeviceArray::import(array, &schema, &checked()) }?)
}

/// Compares an array with rows `offset..` of a case, `rows` of them unless that is negative.
///
/// # Safety
/// Array and schema keep to the C device data interface.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_check_array(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
    type_: u64,
    case: u64,
    offset: u64,
    rows: i64,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that both keep to the interface (see `# Safety`).
        let actual = spelling::array(&unsafe { import(array, schema) }?.to_host()?);
        let expected = spelling::array(&Type::at(type_)?.case(case)?.value());
        let offset = offset as usize;
        let rows = usize::try_from(rows).unwrap_or(expected.len() - offset);
        support::same(&expected.slice(offset, rows), &actual).map_err(Failure::differs)
    })
}

/// Compares a batch with a variant of each listed type.
///
/// # Safety
/// As [`peers_check_array`]; `list` has `n` numbers.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_check_batch(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
    list: *const u64,
    n: usize,
    variant: u64,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes an array and a schema that it gives away (see `# Safety`).
        let (array, schema) = unsafe {
            (
                FFI_ArrowDeviceArray::from_raw(array),
                FFI_ArrowSchema::from_raw(schema),
            )
        };
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
        let batch = unsafe { DeviceRecordBatch::import(array, &schema, &checked()) }?;
        // SAFETY: the caller guarantees that `list` has `n` numbers (see `# Safety`).
        let expected = unsafe { Columns::listed(list, n) }?.value(variant)?;
        let (expected, actual) = (
            spelling::batch(&expected)?,
            spelling::batch(&batch.to_host()?)?,
        );
        support::same_batch(&expected, &actual).map_err(Failure::differs)
    })
}

/// An array as this crate took it, or rows of it (`rows` negative: all), on a device (null: where it is); given out
/// again. What is given out keeps what came in alive.
///
/// # Safety
/// As [`peers_check_array`]; `name` is null or null-terminated; `out` and `out_schema` are valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_pass(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
    offset: u64,
    rows: i64,
    name: *const c_char,
    wait: bool,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that both keep to the interface (see `# Safety`).
        let mut array = unsafe { import(array, schema) }?;
        if let Ok(rows) = usize::try_from(rows) {
            array = array.slice(offset as usize, rows)?;
        }
        if !name.is_null() {
            // SAFETY: `name` is not null, so the caller guarantees that it is null-terminated (see `# Safety`).
            array = array.to_device(&unsafe { device(name) }?)?;
        }
        // SAFETY: the caller guarantees that both outputs are valid for writes (see `# Safety`).
        unsafe { put(array.export(policy(wait))?, out, out_schema) }
    })
}

/// A foreign stream of batches, read by this crate and given out again.
///
/// # Safety
/// The stream keeps to the C device stream interface; `out` is valid for writes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn peers_relay(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes a stream that it gives away (see `# Safety`).
        let stream = unsafe { FFI_ArrowDeviceArrayStream::from_raw(stream) };
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
        let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, checked()) }?;
        let stream = FFI_ArrowDeviceArrayStream::new(reader, ExportOptions::new(policy(false)))?;
        // SAFETY: the caller guarantees that `out` is valid for writes (see `# Safety`).
        unsafe { out.write(stream) };
        Ok(())
    })
}
