//! Arrays and readers that stay on this side until they are dropped.

use std::ffi::{c_char, c_int};
use std::ptr;

use arrow_device::{
    DeviceArray, DeviceArrayStreamReader, DeviceRecordBatchStreamReader, ExportOptions,
    FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
};
use arrow_schema::ffi::FFI_ArrowSchema;

use super::Type;
use super::answer::{Failure, Outcome, answer, borrow, device, policy, put, put_both};
use super::balance::Counted;
use super::check::{checked, same, take, take_stream};

/// An array.
pub(super) struct Held {
    array: DeviceArray,
    _one: Counted,
}

impl Held {
    fn boxed(array: DeviceArray) -> *mut Self {
        let _one = Counted::handle();
        Box::into_raw(Box::new(Self { array, _one }))
    }
}

/// A reader of a foreign stream.
pub(super) struct Reader {
    reader: Either,
    _one: Counted,
}

enum Either {
    Batches(DeviceRecordBatchStreamReader),
    Arrays(DeviceArrayStreamReader),
}

/// Imports an array. Array and schema are consumed, whatever happens.
///
/// # Safety
/// Array and schema are null or keep to the C device data interface; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_hold(
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
    out: *mut *mut Held,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes an array and a schema that it gives away (see `# Safety`).
        let (array, schema) = unsafe { take(array, schema) }?;
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
        let array = unsafe { DeviceArray::import_with(array, &schema, &checked()) }?;
        // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
        unsafe { give(out, array) }
    })
}

/// # Safety
/// `out` is null or valid for a write.
unsafe fn give(out: *mut *mut Held, array: DeviceArray) -> Outcome<()> {
    if out.is_null() {
        return Err(Failure::invalid("out is null"));
    }
    // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
    unsafe { put(out, Held::boxed(array), "out") }
}

/// How many rows a held array has; -1 for null.
///
/// # Safety
/// `held` is null or alive.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_held_rows(held: *const Held) -> i64 {
    // SAFETY: the caller guarantees that `held` is null or alive (see `# Safety`).
    unsafe { held.as_ref() }.map_or(-1, |held| held.array.len() as i64)
}

/// Compares with a case.
///
/// # Safety
/// As [`peers_held_rows`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_held_check(
    held: *const Held,
    type_: u64,
    case: u64,
    through_pyarrow: bool,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `held` is null or alive (see `# Safety`).
        let held = unsafe { borrow(held, "held") }?;
        same(Type::at(type_)?, case, through_pyarrow, &held.array)
    })
}

/// Child `i` as a held array of its own.
///
/// # Safety
/// As [`peers_held_rows`]; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_held_child(
    held: *const Held,
    i: u64,
    out: *mut *mut Held,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `held` is null or alive (see `# Safety`).
        let held = unsafe { borrow(held, "held") }?;
        let child = held.array.child(i as usize);
        let child = child.ok_or_else(|| Failure::invalid(format!("there is no child {i}")))?;
        // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
        unsafe { give(out, child) }
    })
}

/// A held array's rows `offset` to `offset + rows`.
///
/// # Safety
/// As [`peers_held_child`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_held_slice(
    held: *const Held,
    offset: u64,
    rows: u64,
    out: *mut *mut Held,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `held` is null or alive (see `# Safety`).
        let held = unsafe { borrow(held, "held") }?;
        let slice = held.array.slice(offset as usize, rows as usize)?;
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe { give(out, slice) }
    })
}

/// A held array on another device.
///
/// # Safety
/// As [`peers_held_child`]; `name` is null or null-terminated.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_held_copy(
    held: *const Held,
    name: *const c_char,
    out: *mut *mut Held,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `held` is null or alive and that `name` is null or null-terminated (see `# Safety`).
        let (held, device) = unsafe { (borrow(held, "held")?, device(name)?) };
        let copy = held.array.to_device(&device)?;
        // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
        unsafe { give(out, copy) }
    })
}

/// Exports a held array, which stays.
///
/// # Safety
/// As [`peers_held_rows`]; `out` and `out_schema` are null or valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_held_export(
    held: *const Held,
    wait: bool,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `held` is null or alive (see `# Safety`).
        let (array, schema) = unsafe { borrow(held, "held") }?
            .array
            .export(policy(wait))?;
        // SAFETY: the caller guarantees that both outputs are null or valid for a write (see `# Safety`).
        unsafe { put_both(out, array, out_schema, schema) }
    })
}

/// Lets a held array go.
///
/// # Safety
/// `held` is null, or came from this library and was not dropped.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_held_drop(held: *mut Held) {
    if !held.is_null() {
        // SAFETY: the caller guarantees that `held` came from this library and is not used again (see `# Safety`).
        drop(unsafe { Box::from_raw(held) });
    }
}

/// Opens a reader of batches, or of arrays of any type. The stream is consumed, whatever happens.
///
/// # Safety
/// The stream is null or keeps to the C device stream interface; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_reader_open(
    stream: *mut FFI_ArrowDeviceArrayStream,
    batches: bool,
    out: *mut *mut Reader,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes a stream that it gives away (see `# Safety`).
        let stream = unsafe { take_stream(stream) }?;
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
        let reader = unsafe {
            if batches {
                Either::Batches(DeviceRecordBatchStreamReader::new(stream, checked())?)
            } else {
                Either::Arrays(DeviceArrayStreamReader::new(stream, checked())?)
            }
        };
        if out.is_null() {
            return Err(Failure::invalid("out is null"));
        }
        let _one = Counted::handle();
        let reader = Box::into_raw(Box::new(Reader { reader, _one }));
        // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
        unsafe { put(out, reader, "out") }
    })
}

/// The next array (a batch as a struct array); null at the end.
///
/// # Safety
/// `reader` is null, or alive and used by nobody else; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_reader_next(
    reader: *mut Reader,
    out: *mut *mut Held,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `reader` is null, or alive and used by nobody else (see `# Safety`).
        let reader = unsafe { reader.as_mut() };
        let reader = reader.ok_or_else(|| Failure::invalid("reader is null"))?;
        // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
        unsafe { put(out, ptr::null_mut(), "out") }?;
        let next = match &mut reader.reader {
            Either::Batches(reader) => reader
                .next()
                .transpose()?
                .map(|batch| batch.as_struct().clone()),
            Either::Arrays(reader) => reader.next().transpose()?,
        };
        match next {
            // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
            Some(array) => unsafe { give(out, array) },
            None => Ok(()),
        }
    })
}

/// Closes a reader; its arrays stay.
///
/// # Safety
/// `reader` is null, or came from this library and was not dropped.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_reader_drop(reader: *mut Reader) {
    if !reader.is_null() {
        // SAFETY: the caller guarantees that `reader` came from this library and is not used again (see `# Safety`).
        drop(unsafe { Box::from_raw(reader) });
    }
}

/// A foreign stream of batches, read and given out again by this crate. It is consumed, whatever happens.
///
/// # Safety
/// The stream is null or keeps to the C device stream interface; `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_relay(
    stream: *mut FFI_ArrowDeviceArrayStream,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    answer(|| {
        // SAFETY: the caller passes a stream that it gives away (see `# Safety`).
        let stream = unsafe { take_stream(stream) }?;
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`); values are checked.
        let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, checked()) }?;
        let stream = FFI_ArrowDeviceArrayStream::new(reader, ExportOptions::new(policy(false)))?;
        // SAFETY: the caller guarantees that `out` is null or valid for a write (see `# Safety`).
        unsafe { put(out, stream, "out") }
    })
}
