//! What `arrow-device` costs, beside its peers in the same run: the Rust side.

pub mod async_streams;
pub mod batches;
pub mod cases;
pub mod overlap;
mod trip;
pub mod validation;

use std::ffi::{CStr, c_char};

use arrow_device::{
    DeviceRecordBatch, ExportOptions, FFI_ArrowDeviceArray, ImportOptions, SyncPolicy,
};
use arrow_schema::ffi::FFI_ArrowSchema;

use cases::{Input, Result};

/// # Safety
/// A terminated string that lives long enough.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str> {
    // SAFETY: the caller guarantees that `text` is null-terminated (see `# Safety`).
    Ok(unsafe { CStr::from_ptr(text) }.to_str()?)
}

fn answer<T>(result: Result<T>, otherwise: T) -> T {
    result.unwrap_or_else(|e| {
        eprintln!("{e}");
        otherwise
    })
}

/// A batch of `columns` times `rows`, by the name of its kind. Null after an error.
///
/// # Safety
/// `kind` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_input(
    kind: *const c_char,
    columns: usize,
    rows: usize,
) -> *const Input {
    // SAFETY: the caller guarantees that `kind` is null-terminated (see `# Safety`).
    let kind = unsafe { text(kind) };
    let made = kind.and_then(|kind| Input::new(batches::named(kind, columns, rows)?));
    answer(
        made.map(|input| Box::into_raw(Box::new(input)).cast_const()),
        std::ptr::null(),
    )
}

/// # Safety
/// `input` is of [`bench_input`], and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_input_free(input: *const Input) {
    // SAFETY: the caller guarantees that `input` came from this library and is not used again (see
    // `# Safety`).
    drop(unsafe { Box::from_raw(input.cast_mut()) });
}

/// Bytes of all buffers of the batch.
///
/// # Safety
/// `input` is of [`bench_input`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_bytes(input: *const Input) -> usize {
    // SAFETY: the caller guarantees that `input` is alive (see `# Safety`).
    unsafe { &*input }.bytes()
}

/// Runs a case `n` times: nanoseconds in all, negative after an error.
///
/// # Safety
/// `input` is of [`bench_input`], `case` a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_run(input: *const Input, case: *const c_char, n: usize) -> i64 {
    // SAFETY: the caller guarantees that `case` is null-terminated and that `input` is alive (see
    // `# Safety`).
    let (name, input) = unsafe { (text(case), &*input) };
    let took = name.and_then(|name| {
        let case = cases::case(name).ok_or_else(|| format!("no case is called {name}"))?;
        case(input, n)
    });
    answer(took.map(|took| took.as_nanos() as i64), -1)
}

/// The batch as C structs, for a peer. Nonzero after an error.
///
/// # Safety
/// `input` is of [`bench_input`]; `array` and `schema` are written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_give(
    input: *const Input,
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
) -> i32 {
    // SAFETY: the caller guarantees that `input` is alive (see `# Safety`).
    let input = unsafe { &*input };
    let give = || -> Result<i32> {
        let exported = input
            .device
            .export_array(&ExportOptions::new(SyncPolicy::Event))?;
        let of = FFI_ArrowSchema::try_from(&*input.host.schema())?;
        // SAFETY: the caller guarantees that `array` and `schema` are valid for a write (see
        // `# Safety`).
        unsafe {
            array.write(exported);
            schema.write(of);
        }
        Ok(0)
    };
    answer(give(), 1)
}

/// Whether a struct of a peer, which is consumed, has the values of the batch, as it should have.
/// Nonzero if not.
///
/// # Safety
/// `input` is of [`bench_input`]; `array` is a struct of the specification with this batch's
/// schema.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_check(input: *const Input, array: *mut FFI_ArrowDeviceArray) -> i32 {
    // SAFETY: the caller passes an array that it gives away (see `# Safety`).
    let (input, array) = unsafe { (&*input, FFI_ArrowDeviceArray::from_raw(array)) };
    let check = || -> Result<i32> {
        let (schema, options) = (input.host.schema(), ImportOptions::default());
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`).
        let batch = unsafe { DeviceRecordBatch::import_as(array, schema, &options) }?;
        Ok(i32::from(batch.to_host()? != input.host))
    };
    answer(check(), 1)
}

/// Whether what the case "copy" or "download" makes has the values of the batch. Nonzero if not.
///
/// # Safety
/// `input` is of [`bench_input`], `case` a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_check_own(input: *const Input, case: *const c_char) -> i32 {
    // SAFETY: the caller guarantees that `case` is null-terminated and that `input` is alive (see
    // `# Safety`).
    let (name, input) = unsafe { (text(case), &*input) };
    let check = name.and_then(|name| {
        let made = match name {
            "copy" => input.device.compact()?.to_host()?,
            "download" => input.simulated()?.to_host()?,
            _ => return Err(format!("{name} makes nothing to look at").into()),
        };
        Ok(i32::from(made != input.host))
    });
    answer(check, 1)
}

/// See [`overlap::run`]: `out` gets its seconds. Nonzero after an error.
///
/// # Safety
/// `out` has room for four numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_overlap(way: usize, batches: usize, out: *mut [f64; 4]) -> i32 {
    let ran = overlap::Way::numbered(way).ok_or_else(|| "no such way".into());
    let ran = ran
        .and_then(|way| overlap::run(way, batches))
        .map(|seconds| {
            // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
            unsafe { out.write(seconds) };
            0
        });
    answer(ran, 1)
}
