//! Arrays of every type: out, and compared on their way back.

use std::ffi::{CString, c_char, c_int};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arrow_array::{Array, ArrayRef};
use arrow_data::ffi::FFI_ArrowArray;
use arrow_device::{DeviceArray, Devices, FFI_ArrowDeviceArray, SyncPolicy};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field};

use super::answer::{Failure, answer};
use super::{device, holders, name, options, policy, queue, spelling, write};
use crate::sim::PeersSim;
use crate::support::{all_types, cases, same};

struct Type {
    name: CString,
    data_type: DataType,
    /// Made when first asked for.
    cases: OnceLock<Vec<Case>>,
}

struct Case {
    name: CString,
    array: ArrayRef,
    /// Of its buffers, while nothing is exported. Cases of one type may share buffers.
    holders_at_rest: usize,
}

fn types() -> &'static [Type] {
    static TYPES: OnceLock<Vec<Type>> = OnceLock::new();
    TYPES.get_or_init(|| {
        let types = all_types().into_iter().map(|(text, data_type)| Type {
            name: name(text),
            data_type,
            cases: OnceLock::new(),
        });
        types.collect()
    })
}

impl Type {
    fn cases(&self) -> &[Case] {
        self.cases.get_or_init(|| {
            let cases: Vec<_> = cases(&self.data_type, 7);
            let counts: Vec<_> = cases.iter().map(|(_, array)| holders(array)).collect();
            let cases = cases.into_iter().zip(counts);
            let cases = cases.map(|((text, array), holders_at_rest)| Case {
                name: name(text),
                array,
                holders_at_rest,
            });
            cases.collect()
        })
    }

    /// What it travels as: a name, and metadata, that the other side is to hand back.
    fn field(&self) -> Field {
        let metadata = [("note".to_owned(), "ü".to_owned())].into();
        Field::new("column ü", self.data_type.clone(), true).with_metadata(metadata)
    }
}

fn case(of_type: usize, case: usize) -> Result<(&'static Type, &'static Case), Failure> {
    let of_type = types().get(of_type).ok_or("no such type")?;
    let case = of_type.cases().get(case).ok_or("no such case")?;
    Ok((of_type, case))
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_types() -> usize {
    types().len()
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_type_name(of_type: usize) -> *const c_char {
    types()
        .get(of_type)
        .map_or(std::ptr::null(), |t| t.name.as_ptr())
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_cases(of_type: usize) -> usize {
    types().get(of_type).map_or(0, |t| t.cases().len())
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_case_name(of_type: usize, of_case: usize) -> *const c_char {
    case(of_type, of_case).map_or(std::ptr::null(), |(_, case)| case.name.as_ptr())
}

#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_case_rows(of_type: usize, of_case: usize) -> usize {
    case(of_type, of_case).map_or(0, |(_, case)| case.array.len())
}

/// The array on the simulated device, or on the CPU if `sim` is null.
///
/// # Safety
/// `sim` is null or live; `out` and `out_schema` are valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_case_export(
    of_type: usize,
    of_case: usize,
    sim: *const PeersSim,
    wait: bool,
    out: *mut FFI_ArrowDeviceArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        let (of_type, case) = case(of_type, of_case)?;
        // SAFETY: the caller guarantees that `sim` is null or alive (see `# Safety`).
        let queue = queue(unsafe { sim.as_ref() })?;
        let array = queue
            .device()
            .upload_data_on(case.array.to_data(), &queue)?;
        let array = array.with_field(Arc::new(of_type.field()))?;
        let (array, schema) = array.export(policy(wait))?;
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe {
            write(out, array)?;
            write(out_schema, schema)
        }
    })
}

/// The same array in the host's plain structs, as arrow-rs exports it. The schema is this crate's where arrow-rs's says
/// less.
///
/// # Safety
/// `out` and `out_schema` are valid for writes.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_case_export_host(
    of_type: usize,
    of_case: usize,
    out: *mut FFI_ArrowArray,
    out_schema: *mut FFI_ArrowSchema,
) -> c_int {
    answer(|| {
        let (of_type, case) = case(of_type, of_case)?;
        let schema = if spelling::has_sorted_map(&of_type.data_type) {
            let array = Devices::cpu().upload_array(&case.array)?;
            let array = array.with_field(Arc::new(of_type.field()))?;
            array.export(SyncPolicy::Event)?.1
        } else {
            FFI_ArrowSchema::try_from(of_type.field())?
        };
        // SAFETY: the caller guarantees that `out` is valid for a write (see `# Safety`).
        unsafe {
            write(out, FFI_ArrowArray::new(&case.array.to_data()))?;
            write(out_schema, schema)
        }
    })
}

/// Imports an array that Arrow C++ exported, which is consumed, and the schema, and compares them with rows
/// `offset..offset + length` of the case. `full`: values are validated as well.
///
/// # Safety
/// `sim` is null or live; the structs keep to the C device data interface.
#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn peers_cpp_case_check(
    of_type: usize,
    of_case: usize,
    offset: usize,
    length: usize,
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
        let (of_type, case) = case(of_type, of_case)?;
        // SAFETY: the caller guarantees that the producer keeps to the interface (see `# Safety`).
        let array = unsafe { DeviceArray::import_with(array, &schema, &options(sim, full)) }?;
        if array.device().id() != device(sim).id() {
            return Err(Failure::differs(format!("is on {}", array.device())));
        }
        let (expected, field) = (spelling::field(&of_type.field()), array.field());
        if field.is_none_or(|field| **field != expected) {
            let text = format!("field: expected {expected:?}, actual {field:?}");
            return Err(Failure::differs(text));
        }
        let expected = spelling::array(&case.array.slice(offset, length));
        same(&expected, &array.to_host()?).map_err(Failure::differs)
    })
}

/// How many holders the buffers of all cases have beyond those at rest: 0 once every export is released.
#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_case_holders() -> usize {
    // One caller at a time: counting holds them too.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let made = types().iter().filter_map(|t| t.cases.get()).flatten();
    made.map(|case| holders(&case.array) - case.holders_at_rest)
        .sum()
}
