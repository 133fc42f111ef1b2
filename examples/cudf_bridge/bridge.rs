//! The functions of `bridge.h`, from the library that `build` makes.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int};
use std::path::Path;

use arrow_device::{DeviceRecordBatch, FFI_ArrowDeviceArray, SyncPolicy};
use arrow_schema::ffi::FFI_ArrowSchema;
use libloading::{Library, Symbol};

type Sort = unsafe extern "C" fn(
    *mut FFI_ArrowDeviceArray,
    *const FFI_ArrowSchema,
    i32,
    *mut FFI_ArrowDeviceArray,
    *mut FFI_ArrowSchema,
) -> c_int;
type Sum = unsafe extern "C" fn(
    *mut FFI_ArrowDeviceArray,
    *const FFI_ArrowSchema,
    i32,
    i32,
    *mut FFI_ArrowDeviceArray,
    *mut FFI_ArrowSchema,
) -> c_int;
type LastError = unsafe extern "C" fn() -> *const c_char;

/// cuDF, as far as the library offers it.
pub(crate) struct Cudf {
    sort: Sort,
    sum: Sum,
    error: LastError,
}

impl Cudf {
    /// Loads the library, and cuDF with it.
    ///
    /// # Safety
    /// The library is made of this folder's `bridge.cc`.
    pub(crate) unsafe fn load(path: &Path) -> Result<Self, libloading::Error> {
        // SAFETY: the caller guarantees which library it is. Loading it runs the initializers of cuDF, which need nothing of this program.
        let library = unsafe { Library::new(path) }?;
        // Never unloaded: batches that come from it have release callbacks there.
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: the types are those of `bridge.h`.
        unsafe {
            let sort: Symbol<Sort> = library.get("cudf_bridge_sort")?;
            let sum: Symbol<Sum> = library.get("cudf_bridge_sum")?;
            let error: Symbol<LastError> = library.get("cudf_bridge_error")?;
            Ok(Self {
                sort: *sort,
                sum: *sum,
                error: *error,
            })
        }
    }

    /// Returns the rows in the order of a column's values, nulls last.
    pub(crate) fn sort(
        &self,
        batch: &DeviceRecordBatch,
        by: i32,
    ) -> Result<DeviceRecordBatch, Box<dyn Error>> {
        self.call(batch, |array, schema, out, out_schema| {
            // SAFETY: `call` passes the structs that the function needs.
            unsafe { (self.sort)(array, schema, by, out, out_schema) }
        })
    }

    /// Returns each value of the column `key` once, with the sum of `values` in its rows.
    pub(crate) fn sum(
        &self,
        batch: &DeviceRecordBatch,
        key: i32,
        values: i32,
    ) -> Result<DeviceRecordBatch, Box<dyn Error>> {
        self.call(batch, |array, schema, out, out_schema| {
            // SAFETY: `call` passes the structs that the function needs.
            unsafe { (self.sum)(array, schema, key, values, out, out_schema) }
        })
    }

    /// Passes a batch to `function`: an exported array with its schema, and empty structs for the result.
    fn call(
        &self,
        batch: &DeviceRecordBatch,
        function: impl FnOnce(
            *mut FFI_ArrowDeviceArray,
            *const FFI_ArrowSchema,
            *mut FFI_ArrowDeviceArray,
            *mut FFI_ArrowSchema,
        ) -> c_int,
    ) -> Result<DeviceRecordBatch, Box<dyn Error>> {
        // The array has the event of what still fills the batch, and its null counts, which cuDF needs to be exact.
        let (mut array, schema) = batch.export(SyncPolicy::Event)?;
        let mut out = FFI_ArrowDeviceArray::empty();
        let mut out_schema = FFI_ArrowSchema::empty();
        let code = function(&mut array, &schema, &mut out, &mut out_schema);
        assert!(array.is_released(), "the function consumes the array");
        if code != 0 {
            // SAFETY: the text is null-terminated and stays until this thread's next call.
            let text = unsafe { CStr::from_ptr((self.error)()) };
            return Err(format!("cuDF: {} (errno {code})", text.to_string_lossy()).into());
        }
        // SAFETY: `import` requires structs that follow the specification and hold valid data. cuDF made both of a table of its own.
        Ok(unsafe { DeviceRecordBatch::import(out, &out_schema, None) }?)
    }
}
