//! Import of an `ArrowDeviceArray` as [`DeviceArray`] or [`DeviceRecordBatch`].
//!
//! Ownership: an import consumes the array and borrows the schema, whatever its outcome. After an
//! error the array has been released, once. After success it is released when the last buffer,
//! array, export or device work that uses its memory has ended.

use std::sync::Arc;

use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, FieldRef, SchemaRef};

use crate::abi::{ArrowDeviceType, FFI_ArrowDeviceArray};
use crate::data::batch::check_no_nulls;
use crate::data::layout::check_type;
use crate::data::numbers::{Numbers, resolve};
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{
    AddressClass, DeviceId, Devices, EventPtr, PointerInfo, Seen, completion, now,
};
use crate::error::{Error, Result};
use crate::interchange::Path;
use crate::interchange::foreign::{Importer, first_address};
use crate::interchange::options::{ImportOptions, Validation};
use crate::interchange::schema::{import_field, import_schema};
use crate::interchange::validate::validate;
use crate::memory::{Memory, Owner, Ready};

impl DeviceArray {
    /// Imports a foreign array of any type. Nothing is copied, no buffer is read, and nothing
    /// waits. Null counts that the producer does not state, and sizes that are stored in device
    /// memory, stay unknown until they are needed. `None` stands for the default options.
    ///
    /// # Safety
    /// - `array` and `schema` comply with the C device data interface: pointers that are not null
    ///   are valid for what the structs say, and the event, if there is one, has the type that
    ///   belongs to the device;
    /// - if the host can read the memory of the device that the array is imported to ([`is_host_readable`](crate::Device::is_host_readable)), it can read the
    ///   array's buffers;
    /// - the buffers of an array of type METAL are host addresses, if a device of [`metal`](crate::metal) was registered for it;
    /// - the values are valid for their type, and null counts are correct ([`Validation::Full`]
    ///   checks both);
    /// - nobody writes to the memory before it is released.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] with the path of the faulty field, [`Error::Released`] for a
    /// released array, and [`Error::DeviceNotAvailable`] if there is no backend for the device. The
    /// array is released then.
    pub unsafe fn import<'a>(
        array: FFI_ArrowDeviceArray,
        schema: &FFI_ArrowSchema,
        options: impl Into<Option<&'a ImportOptions>>,
    ) -> Result<Self> {
        let field = Arc::new(import_field(schema)?);
        // SAFETY: the caller keeps to the contract of `import`; the type comes from the array's own
        // schema.
        unsafe { Self::import_as(array, field, &options.into().cloned().unwrap_or_default()) }
    }

    /// As [`import`](Self::import), for a type that is known.
    ///
    /// # Safety
    /// As [`import`](Self::import).
    pub unsafe fn import_as(
        array: FFI_ArrowDeviceArray,
        field: FieldRef,
        options: &ImportOptions,
    ) -> Result<Self> {
        // SAFETY: the caller keeps to the contract of `import`.
        let array = unsafe { import(array, field.data_type(), options) }?;
        let array = match options.validation {
            Validation::Full => array.validated()?,
            Validation::Structure => array,
        };
        array.with_field(field)
    }

    /// Checks all values of the array and its null counts, as an import with [`Validation::Full`] does, also for arrays that were made
    /// of parts. Returns the array, or a copy of it in which texts under nulls that are no UTF-8 are zeros. Waits for the memory that it
    /// reads.
    ///
    /// ```
    /// use arrow_buffer::Buffer;
    /// use arrow_device::{DeviceArray, Devices, Validity};
    /// use arrow_schema::DataType;
    /// let parts = [Buffer::from_vec(vec![0i32, 1, 2]), Buffer::from(b"a\xff")].map(|part| Some(part.into()));
    /// let bits = Validity::new(Buffer::from([0b01]).into(), 0, 2)?; // the second text is null
    /// // SAFETY: the values are checked before anything else is done with the array.
    /// let array = unsafe { DeviceArray::from_parts(&Devices::cpu(), DataType::Utf8, 2, Some(bits), &parts, &[]) }?;
    /// assert!(array.validated()?.to_host()?.is_null(1));
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] with the path of what is wrong, and the errors that the device reports.
    pub fn validated(&self) -> Result<Self> {
        now(checked(self.clone(), Validation::Full, false))
    }
}

impl DeviceRecordBatch {
    /// Imports a foreign struct array as a batch; see [`DeviceArray::import`]. An offset of the
    /// struct is applied to its columns.
    ///
    /// # Safety
    /// As [`DeviceArray::import`].
    ///
    /// # Errors
    /// As [`DeviceArray::import`]. Also returns [`Error::InvalidInput`] for any type but a struct,
    /// and for a struct that has nulls. If the producer does not state the struct's null count, its
    /// validity bitmap is read, which waits.
    pub unsafe fn import<'a>(
        array: FFI_ArrowDeviceArray,
        schema: &FFI_ArrowSchema,
        options: impl Into<Option<&'a ImportOptions>>,
    ) -> Result<Self> {
        let schema = import_schema(schema)?;
        // SAFETY: the caller keeps to the contract of `import`; the type comes from the array's own
        // schema.
        unsafe { Self::import_as(array, schema, &options.into().cloned().unwrap_or_default()) }
    }

    /// As [`import`](Self::import), for a schema that is known. Takes at most four heap
    /// allocations, whatever the number of columns, and those of a list of the device's allocations
    /// if the buffers lie in several.
    ///
    /// # Safety
    /// As [`DeviceArray::import`].
    pub unsafe fn import_as(
        array: FFI_ArrowDeviceArray,
        schema: SchemaRef,
        options: &ImportOptions,
    ) -> Result<Self> {
        let root = DataType::Struct(schema.fields().clone());
        // SAFETY: the caller keeps to the contract of `DeviceArray::import`.
        let array = unsafe { import(array, &root, options) }?;
        let array = match options.validation {
            // There is nothing to read.
            Validation::Structure if array.null_count().is_some() => array,
            validation => now(checked(array, validation, false))?,
        };
        check_no_nulls(&array)?;
        Ok(Self::from_struct(schema, array))
    }
}

/// As [`DeviceRecordBatch::import_as`]. A poll of what it returns never blocks, and the import itself does not wait.
///
/// # Safety
/// As [`DeviceArray::import`].
#[cfg(feature = "async")]
pub(crate) unsafe fn import_async(
    array: FFI_ArrowDeviceArray,
    schema: SchemaRef,
    options: &ImportOptions,
) -> Result<impl Future<Output = Result<DeviceRecordBatch>> + use<>> {
    let root = DataType::Struct(schema.fields().clone());
    // SAFETY: the caller keeps to the contract of `import`.
    let array = unsafe { import(array, &root, options) }?;
    let checked = checked(array, options.validation, true);
    Ok(async move {
        let array = checked.await?;
        check_no_nulls(&array)?;
        Ok(DeviceRecordBatch::from_struct(schema, array))
    })
}

/// Checks what can be checked only by reading the array's memory, and waits for it: as a task if this `polls`, else by blocking
/// its thread. Nulls are counted: all, to check the counts that are stated, or those of the root if its count is not stated. In the
/// former case, the sizes that the check of the values needs are read along with them. Returns the array, or what to use instead, as
/// [`validate`] does.
async fn checked(array: DeviceArray, validation: Validation, polls: bool) -> Result<DeviceArray> {
    let full = validation == Validation::Full;
    if polls && full {
        completion(array.ready_event(None)?).await?;
    }
    let count = |numbers: &Numbers| match full {
        true => numbers.check(&array),
        false => {
            numbers.null_count(array.view());
            Ok(())
        }
    };
    resolve(&mut Numbers::default(), &[&array], None, polls, count).await?;
    let mended = match full {
        true => validate(&array, polls).await?,
        false => None,
    };
    Ok(mended.unwrap_or(array))
}

/// Checks a foreign array against its type, and imports it.
///
/// # Safety
/// As [`DeviceArray::import`].
unsafe fn import(
    array: FFI_ArrowDeviceArray,
    data_type: &DataType,
    options: &ImportOptions,
) -> Result<DeviceArray> {
    check_type(data_type)?;
    if array.is_released() {
        return Err(Error::Released("the ArrowDeviceArray"));
    }
    let device_type = match array.device_type {
        ArrowDeviceType::CUDA if options.cuda_is_rocm => ArrowDeviceType::ROCM,
        stated => stated,
    };
    let id = DeviceId::new(device_type, array.device_id);
    let event = EventPtr::new(array.sync_event);
    // SAFETY: the caller guarantees that the struct complies with the interface (`DeviceArray::import`).
    let address = || unsafe { first_address(&array.array, data_type) };
    let devices = options.devices.as_ref().unwrap_or(Devices::global());
    // SAFETY: the caller guarantees that `sync_event` points to an event of the type that belongs to the device; the array,
    // which keeps it alive, is not released before the import ends.
    let device = unsafe { devices.get_for_import(id, event, address) }?;
    let ready = match event {
        None => Ready::Now,
        Some(_) if device.is_synchronous() => {
            let why = "has no events, so this one cannot be waited for: export with a null event once the memory is ready";
            return Err(Error::invalid("sync_event", format!("{device} {why}")));
        }
        Some(event) => {
            // SAFETY: the caller guarantees that `sync_event` points to an event of the type that
            // belongs to the device (`DeviceArray::import`).
            let check = unsafe { device.backend().check_event(event) };
            check.map_err(|e| Error::invalid("sync_event", e.to_string()))?;
            Ready::Foreign(event, Seen::default())
        }
    };
    // The owner first, in which the struct then stays: it is released once, after errors too.
    let owner = Arc::new(Owner::new(device.clone(), Memory::Foreign(array), ready));
    let Some(array) = owner.foreign() else {
        return Err(Error::Released("the ArrowDeviceArray"));
    };
    let mut importer = Importer {
        device: &device,
        owner: &owner,
        known: PointerInfo::new(AddressClass::Unknown, 0..0),
        buffers: 0,
    };
    // SAFETY: the caller guarantees that the struct complies with the interface
    // (`DeviceArray::import`).
    let node = unsafe { importer.node(&array.array, data_type, 0, &Path::Root("array")) }?;
    Ok(DeviceArray::from_node(device, node))
}
