//! Cases out: as C structs, as streams, as files.

use std::ffi::{c_char, c_int};
use std::fs::File;
use std::io::BufWriter;
use std::sync::Arc;

use arrow_array::{Array, RecordBatch, RecordBatchOptions, make_array};
use arrow_data::ffi::FFI_ArrowArray;
use arrow_device::{
    Device, DeviceArray, DeviceArrayIterator, DeviceRecordBatch, DeviceRecordBatchIterator,
    ExportOptions, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
};
use arrow_schema::ffi::FFI_ArrowSchema;

use super::answer::{Outcome, answer, device, policy, put, put_both, text};
use super::balance::{Counted, counted};
use super::{COMMON, Case, Type, listed, schema};

/// A case as an array on a device.
fn array_on(of: &Type, case: &Case, device: &Device) -> arrow_device::Result<DeviceArray> {
    let array = device.upload_data(counted(&case.whole.to_data()))?;
    let array = array.with_field(Arc::new(of.field()))?;
    match case.cut {
        Some((offset, rows)) => array.slice(offset, rows),
        None => Ok(array),
    }
}

/// A batch on the host whose columns are a variant of each type, and its slice if the variant is cut on the device.
pub(super) fn host_batch(
    types: &[&Type],
    variant: u64,
) -> Outcome<(RecordBatch, Option<(usize, usize)>)> {
    let mut columns = Vec::new();
    let (mut rows, mut cut) = (0, None);
    for t in types {
        let case = t.case(variant)?;
        columns.push(make_array(counted(&case.whole.to_data())));
        (rows, cut) = (case.whole.len(), case.cut);
    }
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    let batch = RecordBatch::try_new_with_options(schema(types), columns, &options)?;
    Ok((batch, cut))
}

/// What a peer must see of it.
pub(super) fn host_value(types: &[&Type], variant: u64) -> Outcome<RecordBatch> {
    let (batch, cut) = host_batch(types, variant)?;
    Ok(match cut {
        Some((offset, rows)) => batch.slice(offset, rows),
        None => batch,
    })
}

fn batch_on(types: &[&Type], variant: u64, device: &Device) -> Outcome<DeviceRecordBatch> {
    let (batch, cut) = host_batch(types, variant)?;
    let batch = device.upload(&batch)?;
    Ok(match cut {
        Some((offset, rows)) => batch.slice(offset, rows)?,
        None => batch,
    })
}

/// A case as an array. `wait`: it is complete and comes without an event.
///
/// # Safety
/// `name` is null or null-terminated; `out` and `out_schema` are null or valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_array(
    type_: u64,
    case: u64,
    name: *const c_char,
    wait: bool,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        let of = Type::at(type_)?;
        // SAFETY: the caller guarantees that `name` is null or null-terminated (see `# Safety`).
        let device = unsafe { device(name) }?;
        let array = array_on(of, of.case(case)?, &device)?;
        let (array, schema) = array.export(policy(wait))?;
        // SAFETY: the caller guarantees that both outputs are null or valid for a write (see `# Safety`).
        unsafe { put_both(out, array, out_schema, schema) }
    })
}

/// A variant of each listed type as the columns of a batch.
///
/// # Safety
/// `list` has `n` numbers; else as [`peers_array`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_batch(
    list: *const u64,
    n: u64,
    variant: u64,
    name: *const c_char,
    wait: bool,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `list` has `n` entries and that `name` is null or null-terminated (see `# Safety`).
        let (types, device) = unsafe { (listed(list, n)?, device(name)?) };
        let (array, schema) = batch_on(&types, variant, &device)?.export(policy(wait))?;
        // SAFETY: the caller guarantees that both outputs are null or valid for a write (see `# Safety`).
        unsafe { put_both(out, array, out_schema, schema) }
    })
}

/// All common variants, one after the other, as a stream of batches.
///
/// # Safety
/// As [`peers_batch`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_stream(
    list: *const u64,
    n: u64,
    name: *const c_char,
    wait: bool,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `list` has `n` entries and that `name` is null or null-terminated (see `# Safety`).
        let (types, device) = unsafe { (listed(list, n)?, device(name)?) };
        let (schema, id, open) = (schema(&types), device.id(), Counted::handle());
        let batches = (0..COMMON as u64).map(move |variant| {
            let _open = &open;
            batch_on(&types, variant, &device).map_err(|failure| failure.into_error())
        });
        let reader = DeviceRecordBatchIterator::new(batches, schema, id.device_type);
        let stream = FFI_ArrowDeviceArrayStream::new(reader, ExportOptions::new(policy(wait)))?;
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe { put(out, stream, "out") }
    })
}

/// All variants of a type, one after the other, as a stream of arrays.
///
/// # Safety
/// As [`peers_array`].
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_array_stream(
    type_: u64,
    name: *const c_char,
    wait: bool,
    out: *mut FFI_ArrowDeviceArrayStream,
) -> c_int {
    answer(|| {
        let of = Type::at(type_)?;
        // SAFETY: the caller guarantees that `name` is null or null-terminated (see `# Safety`).
        let device = unsafe { device(name) }?;
        let (id, open) = (device.id(), Counted::handle());
        let arrays = of.cases().iter().map(move |case| {
            let _open = &open;
            array_on(of, case, &device)
        });
        let reader = DeviceArrayIterator::new(arrays, Arc::new(of.field()), id.device_type);
        let options = ExportOptions::new(policy(wait));
        let stream = FFI_ArrowDeviceArrayStream::new_arrays(reader, options)?;
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe { put(out, stream, "out") }
    })
}

/// A case through arrow-rs's own C data interface: another way to the same value.
///
/// # Safety
/// `out` and `out_schema` are null or valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_plain_array(
    type_: u64,
    case: u64,
    out: *mut FFI_ArrowArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        let of = Type::at(type_)?;
        let data = counted(&of.case(case)?.value().to_data());
        let schema = FFI_ArrowSchema::try_from(of.field())?;
        // SAFETY: the caller guarantees that both outputs are null or valid for a write (see `# Safety`).
        unsafe { put_both(out, FFI_ArrowArray::new(&data), out_schema, schema) }
    })
}

/// All common variants as an Arrow IPC stream file: a third way to the same values.
///
/// # Safety
/// `list` has `n` numbers; `path` is null or null-terminated.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_ipc(list: *const u64, n: u64, path: *const c_char) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `list` has `n` entries and that `path` is null or null-terminated (see `# Safety`).
        let (types, path) = unsafe { (listed(list, n)?, text(path, "path")?) };
        let file = BufWriter::new(File::create(path)?);
        let mut writer = arrow_ipc::writer::StreamWriter::try_new(file, &schema(&types))?;
        for variant in 0..COMMON as u64 {
            writer.write(&host_value(&types, variant)?)?;
        }
        Ok(writer.finish()?)
    })
}
