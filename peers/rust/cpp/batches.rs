//! Record batches: out, and compared on their way back.

use std::ffi::{CString, c_char, c_int};
use std::sync::{Arc, OnceLock};

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, BinaryArray, Int32Array, ListArray, RecordBatch, StringArray, StructArray,
};
use arrow_data::ffi::FFI_ArrowArray;
use arrow_device::{DeviceArray, DeviceRecordBatch, Devices, FFI_ArrowDeviceArray, SyncPolicy};
use arrow_schema::DataType::{self, *};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{FieldRef, TimeUnit};

use super::answer::{Failure, answer};
use super::{device, name, options, policy, queue, spelling, write};
use crate::sim::PeersSim;
use crate::support::types::{fixed_list, list, structure};
use crate::support::{Nulls, all_types, batch, same_batch, zero_column_batch};

/// From a seed to a batch.
type Make = fn(u64) -> RecordBatch;

struct Kind {
    name: CString,
    make: Make,
}

fn kinds() -> &'static [Kind] {
    static KINDS: OnceLock<Vec<Kind>> = OnceLock::new();
    KINDS.get_or_init(|| {
        let kinds: [(&str, Make); 8] = [
            ("every type", |seed| batch(&every(), 57, Nulls::Some, seed)),
            ("every type, no rows", |seed| {
                batch(&every(), 0, Nulls::Some, seed)
            }),
            ("every type, sliced", |seed| {
                batch(&every(), 57, Nulls::Some, seed).slice(11, 30)
            }),
            ("no columns", |seed| zero_column_batch(5 + seed as usize)),
            ("fixed width", |seed| {
                batch(&fixed(), 1000, Nulls::Some, seed)
            }),
            ("strings", |seed| batch(&strings(), 300, Nulls::Some, seed)),
            ("many columns", |seed| {
                let types: Vec<_> = fixed().into_iter().cycle().take(200).collect();
                batch(&types, 20, Nulls::None, seed)
            }),
            ("empty strings", |_| empty_strings()),
        ];
        let kinds = kinds.into_iter();
        let kinds = kinds.map(|(text, make)| Kind {
            name: name(text),
            make,
        });
        kinds.collect()
    })
}

fn every() -> Vec<DataType> {
    all_types().into_iter().map(|(_, t)| t).collect()
}

fn fixed() -> Vec<DataType> {
    vec![
        Int32,
        Int64,
        Float64,
        Boolean,
        Decimal128(20, 2),
        Date32,
        Timestamp(TimeUnit::Microsecond, None),
        FixedSizeBinary(3),
        structure(vec![("a", Int32), ("b", Float32)]),
        fixed_list(Int16, 3),
    ]
}

fn strings() -> Vec<DataType> {
    vec![Utf8, LargeUtf8, Binary, list(Utf8), Utf8View]
}

/// Rows whose values have no bytes: buffers of length 0 in arrays that have rows.
fn empty_strings() -> RecordBatch {
    let lists: [Option<[Option<i32>; 0]>; 3] = [Some([]), None, Some([])];
    let columns: [(&str, ArrayRef); 4] = [
        ("utf8", Arc::new(StringArray::from(vec!["", "", ""]))),
        (
            "binary",
            Arc::new(BinaryArray::from(vec![None, Some(b"".as_slice()), None])),
        ),
        (
            "list",
            Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists)),
        ),
        ("int", Arc::new(Int32Array::from(vec![1, 2, 3]))),
    ];
    RecordBatch::try_from_iter(columns).expect("columns of one length")
}

/// The batch of this kind and seed.
pub(super) fn make(kind: usize, seed: u64) -> Result<RecordBatch, Failure> {
    let kind = kinds().get(kind).ok_or("no such kind of batch")?;
    Ok((kind.make)(seed))
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_batches() -> usize {
    kinds().len()
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_batch_name(kind: usize) -> *const c_char {
    let kind = kinds().get(kind);
    kind.map_or(std::ptr::null(), |kind| kind.name.as_ptr())
}

/// The batch on the simulated device, or on the CPU if `sim` is null. `apart`: each column by itself, with an event of
/// its own; they become one.
///
/// # Safety
/// `sim` is null or live; `out` and `out_schema` are valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_batch_export(
    kind: usize,
    seed: u64,
    sim: *const PeersSim,
    wait: bool,
    apart: bool,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `sim` is null or alive (see `# Safety`).
        let sim = unsafe { sim.as_ref() };
        let batch = make(kind, seed)?;
        let batch = if apart {
            let columns = batch.columns().iter().map(|column| {
                let queue = queue(sim)?;
                let device = queue.device();
                Ok(device.upload_data_on(column.to_data(), &queue)?)
            });
            let columns: Vec<DeviceArray> = columns.collect::<Result<_, Failure>>()?;
            DeviceRecordBatch::try_new(batch.schema(), &columns)?
        } else {
            let queue = queue(sim)?;
            queue.device().upload_on(&batch, &queue)?
        };
        let (array, schema) = batch.export(policy(wait))?;
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe {
            write(out, array)?;
            write(out_schema, schema)
        }
    })
}

/// The same batch in the host's plain structs: see `peers_cpp_case_export_host`.
///
/// # Safety
/// `out` and `out_schema` are valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_batch_export_host(
    kind: usize,
    seed: u64,
    out: *mut FFI_ArrowArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        let batch = make(kind, seed)?;
        let sorted = |field: &FieldRef| spelling::has_sorted_map(field.data_type());
        let schema = if batch.schema_ref().fields().iter().any(sorted) {
            Devices::cpu().upload(&batch)?.export(SyncPolicy::Event)?.1
        } else {
            FFI_ArrowSchema::try_from(batch.schema_ref().as_ref())?
        };
        let rows = StructArray::from(batch);
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe {
            write(out, FFI_ArrowArray::new(&rows.to_data()))?;
            write(out_schema, schema)
        }
    })
}

/// Imports a batch that Arrow C++ exported, which is consumed, and the schema, and compares them with the batch of this kind and seed.
///
/// # Safety
/// `sim` is null or live; the structs keep to the C device data interface.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_batch_check(
    kind: usize,
    seed: u64,
    sim: *const PeersSim,
    full: bool,
    array: *mut FFI_ArrowDeviceArray,
    schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        // SAFETY: the caller guarantees that `sim` is null or alive (see `# Safety`).
        let (sim, array, schema) = unsafe {
            (
                sim.as_ref(),
                FFI_ArrowDeviceArray::from_raw(array),
                FFI_ArrowSchema::from_raw(schema),
            )
        };
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`).
        let batch = unsafe { DeviceRecordBatch::import_with(array, &schema, &options(sim, full)) }?;
        if batch.device().id() != device(sim).id() {
            return Err(Failure::differs(format!("is on {}", batch.device())));
        }
        let expected = spelling::batch(&make(kind, seed)?);
        same_batch(&expected, &batch.to_host()?).map_err(Failure::differs)
    })
}
