//! What comes in, compared with cases by value. Everything is consumed, whatever happens.

use std::ffi::c_int;

use arrow_device::{
    DeviceArray, DeviceArrayReader, DeviceArrayStreamReader, DeviceRecordBatch,
    DeviceRecordBatchReader, DeviceRecordBatchStreamReader, FFI_ArrowDeviceArray,
    FFI_ArrowDeviceArrayStream, ImportOptions, Validation,
};
use arrow_schema::Schema;
use arrow_schema::ffi::FFI_ArrowSchema;

use super::answer::{Failure, Outcome, answer};
use super::give::host_value;
use super::{COMMON, Type, changed, listed};
use crate::support;

pub(super) fn checked() -> ImportOptions {
    ImportOptions::default()
        .with_validation(Validation::Full)
        .with_metal_as_host()
}

/// Moves array and schema out of what the caller gave.
///
/// # Safety
/// Each is null or a valid struct.
pub(super) unsafe fn take(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
) -> Outcome<(FFI_ArrowDeviceArray, FFI_ArrowSchema)> {
    let null = |name| Failure::invalid(format!("{name} is null"));
    let array = match array.is_null() {
        true => Err(null("array")),
        // SAFETY: the caller passes an array that it gives away (see `# Safety`).
        false => Ok(unsafe { FFI_ArrowDeviceArray::from_raw(array) }),
    };
    let schema = match schema.is_null() {
        true => Err(null("schema")),
        // SAFETY: the caller passes a schema that it gives away (see `# Safety`).
        false => Ok(unsafe { FFI_ArrowSchema::from_raw(schema) }),
    };
    Ok((array?, schema?))
}

/// # Safety
/// `stream` is null or a valid struct.
pub(super) unsafe fn take_stream(
    stream: *mut FFI_ArrowDeviceArrayStream,
) -> Outcome<FFI_ArrowDeviceArrayStream> {
    if stream.is_null() {
        return Err(Failure::invalid("stream is null"));
    }
    // SAFETY: the caller passes a stream that it gives away (see `# Safety`).
    Ok(unsafe { FFI_ArrowDeviceArrayStream::from_raw(stream) })
}

/// Whether `array` has the case's value. `through_pyarrow`: in a type as pyarrow gives it back.
pub(super) fn same(
    of: &Type,
    case: u64,
    through_pyarrow: bool,
    array: &DeviceArray,
) -> Outcome<()> {
    let actual = array.to_host()?;
    let mut expected = of.case(case)?.value();
    if through_pyarrow {
        expected = changed::array(&expected);
    }
    Ok(support::same(&expected, &actual)?)
}

fn same_batch(
    types: &[&Type],
    variant: u64,
    through_pyarrow: bool,
    batch: &DeviceRecordBatch,
) -> Outcome<()> {
    let mut expected = host_value(types, variant)?;
    if through_pyarrow {
        expected = changed::batch(&expected)?;
    }
    Ok(support::same_batch(&expected, &batch.to_host()?)?)
}

/// # Safety
/// Array and schema are null or keep to the C device data interface.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_check_array(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
    type_: u64,
    case: u64,
    through_pyarrow: bool,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes an array and a schema that it gives away (see `# Safety`).
        let (array, schema) = unsafe { take(array, schema) }?;
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
        let array = unsafe { DeviceArray::import_with(array, &schema, &checked()) }?;
        same(Type::at(type_)?, case, through_pyarrow, &array)
    })
}

/// # Safety
/// As [`peers_check_array`]; `list` has `n` numbers.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_check_batch(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
    list: *const u64,
    n: u64,
    variant: u64,
    through_pyarrow: bool,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes an array and a schema that it gives away (see `# Safety`).
        let (array, schema) = unsafe { take(array, schema) }?;
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
        let batch = unsafe { DeviceRecordBatch::import_with(array, &schema, &checked()) }?;
        // SAFETY: the caller guarantees that `list` has `n` entries (see `# Safety`).
        same_batch(
            &unsafe { listed(list, n) }?,
            variant,
            through_pyarrow,
            &batch,
        )
    })
}

/// # Safety
/// The stream is null or keeps to the C device stream interface; `list` has `n` numbers.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_check_stream(
    stream: *mut FFI_ArrowDeviceArrayStream,
    list: *const u64,
    n: u64,
    through_pyarrow: bool,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes a stream that it gives away (see `# Safety`).
        let stream = unsafe { take_stream(stream) }?;
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
        let mut reader = unsafe { DeviceRecordBatchStreamReader::new(stream, checked()) }?;
        // SAFETY: the caller guarantees that `list` has `n` entries (see `# Safety`).
        let types = unsafe { listed(list, n) }?;
        let (mut expected, actual) = (Schema::clone(&super::schema(&types)), reader.schema());
        if through_pyarrow {
            expected = changed::schema(&expected);
        }
        if expected != *actual {
            let text = format!("schema: expected {expected:?}, actual {actual:?}");
            return Err(text.into());
        }
        for variant in 0..COMMON as u64 {
            let Some(batch) = reader.next() else {
                return Err(format!("{variant} batches instead of {COMMON}").into());
            };
            same_batch(&types, variant, through_pyarrow, &batch?)?;
        }
        ended(reader.next().is_none() && reader.next().is_none())
    })
}

/// # Safety
/// The stream is null or keeps to the C device stream interface.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_check_array_stream(
    stream: *mut FFI_ArrowDeviceArrayStream,
    type_: u64,
    through_pyarrow: bool,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes a stream that it gives away (see `# Safety`).
        let stream = unsafe { take_stream(stream) }?;
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
        let mut reader = unsafe { DeviceArrayStreamReader::new(stream, checked()) }?;
        let of = Type::at(type_)?;
        let mut expected = of.data_type.clone();
        if through_pyarrow {
            expected = changed::data_type(&expected);
        }
        if *reader.field().data_type() != expected {
            let actual = reader.field();
            return Err(format!("type: expected {expected:?}, actual {actual:?}").into());
        }
        let cases = of.cases().len();
        for case in 0..cases as u64 {
            let Some(array) = reader.next() else {
                return Err(format!("{case} arrays instead of {cases}").into());
            };
            same(of, case, through_pyarrow, &array?)?;
        }
        ended(reader.next().is_none() && reader.next().is_none())
    })
}

fn ended(has: bool) -> Outcome<()> {
    if has {
        return Ok(());
    }
    Err(String::from("the stream goes on after its end").into())
}
