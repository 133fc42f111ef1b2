//! Export of [`DeviceArray`] and [`DeviceRecordBatch`] as `ArrowDeviceArray`.
//!
//! Ownership: the consumer owns the struct and releases it once, on any thread. The memory stays
//! alive until then; if children were moved out, until the last of them is released. Release never
//! waits.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use arrow_schema::Field;
use arrow_schema::ffi::FFI_ArrowSchema;

use crate::abi::FFI_ArrowDeviceArray;
use crate::data::node::owners;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{ExportSync, completion, now};
use crate::error::Result;
use crate::interchange::c_array::{self, Event};
use crate::interchange::options::{ExportOptions, SyncPolicy};
use crate::interchange::schema::{export_field, export_schema};
use crate::memory::Owner;
use crate::transfer::export_reads;

impl DeviceArray {
    /// Exports the array and its type as C structs, without copying, except for some validity
    /// bitmaps.
    ///
    /// The C data interface has one offset for all buffers. If the array has a
    /// [`Validity`](crate::Validity) that starts at another row than its values do (for example
    /// because it shares the bitmap of a slice), it is exported as it is if there is a whole number
    /// of bytes between the two starts. Otherwise each export copies the bitmap, one bit for each
    /// row: all such bitmaps are copied to the host with one read and one host wait, together with
    /// those in which nulls must be counted, and from there to one fresh allocation on the device.
    /// The copies are counted in [`TransferStats`](crate::TransferStats).
    /// [`compact`](Self::compact) makes an array that needs none.
    ///
    /// A binary, text, list or map array without rows has one offset, 0, which an import does without. If its address is null, each
    /// export makes one, in 64 bytes of a fresh allocation, which is that of the bitmaps if there are some.
    ///
    /// ```
    /// # use arrow_array::Int32Array;
    /// # use arrow_device::{DeviceArray, Devices, SyncPolicy};
    /// let array = Devices::cpu().upload_array(&Int32Array::from(vec![1, 2, 3]))?;
    /// let (c_array, c_schema) = array.export(SyncPolicy::Event)?;
    /// // SAFETY: both come from `export`.
    /// let again = unsafe { DeviceArray::import(c_array, &c_schema, None) }?;
    /// assert_eq!(again.len(), 3);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`](crate::Error::InvalidInput) for a name or metadata that a C
    /// string cannot hold, and the errors that the device reports while events are merged or nulls
    /// are counted.
    pub fn export(&self, sync: SyncPolicy) -> Result<(FFI_ArrowDeviceArray, FFI_ArrowSchema)> {
        let schema = self.export_type()?;
        Ok((self.export_array(&ExportOptions::new(sync))?, schema))
    }

    /// Exports the array without its type, for consumers that know the type.
    ///
    /// # Errors
    /// As [`export`](Self::export).
    pub fn export_array(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray> {
        match export_reads(self.node(), options.counts_nulls) {
            true => now(export(self, options, false)),
            // As `export`, which need not be entered to read nothing.
            false => export_resolved(self, options),
        }
    }

    /// Exports the array's field, or a field without a name.
    pub(crate) fn export_type(&self) -> Result<FFI_ArrowSchema> {
        match self.field() {
            Some(field) => export_field(field),
            None => export_field(&Field::new("", self.data_type().clone(), true)),
        }
    }
}

impl DeviceRecordBatch {
    /// Exports the batch and its schema as C structs: a struct array at offset 0, without a
    /// validity bitmap. The schema's metadata is exported too. Copies nothing, except as
    /// [`DeviceArray::export`] says.
    ///
    /// # Errors
    /// As [`DeviceArray::export`].
    pub fn export(&self, sync: SyncPolicy) -> Result<(FFI_ArrowDeviceArray, FFI_ArrowSchema)> {
        let schema = export_schema(self.schema_ref())?;
        Ok((self.export_array(&ExportOptions::new(sync))?, schema))
    }

    /// Exports the batch without its schema, for consumers that know the schema.
    ///
    /// # Errors
    /// As [`DeviceArray::export`].
    pub fn export_array(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray> {
        self.as_struct().export_array(options)
    }
}

/// Exports an array. If it `polls`, a poll never blocks: the task waits for the memory ([`SyncPolicy::Wait`]), and for
/// validity bitmaps that must be read. Otherwise this blocks its thread, and is ready at once.
pub(crate) async fn export(
    array: &DeviceArray,
    options: &ExportOptions,
    polls: bool,
) -> Result<FFI_ArrowDeviceArray> {
    let exported = match export_reads(array.node(), options.counts_nulls) {
        true => Some(array.to_exported(options.counts_nulls, polls).await?),
        false => None,
    };
    let array = exported.as_ref().unwrap_or(array);
    if polls && export_sync(array, options.sync) == ExportSync::Wait {
        completion(array.ready_event(None)?).await?;
    }
    export_resolved(array, options)
}

/// Exports an array whose bitmaps need not be read any more.
fn export_resolved(array: &DeviceArray, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray> {
    array.device().check_export()?;
    let event = event_for(array, options.sync)?;
    let (id, mut exported) = (array.device().id(), FFI_ArrowDeviceArray::empty());
    exported.device_id = id.id;
    exported.device_type = options.label(id.device_type);
    exported.sync_event = match &event {
        None => ptr::null_mut(),
        Some(Event::Own(event)) => event.as_ptr().as_ptr(),
        Some(Event::Of(owner)) => address(owner),
    };
    c_array::build(
        array.device(),
        array.node(),
        event,
        options.release,
        &mut exported.array,
    )?;
    Ok(exported)
}

/// Returns what an export of the array carries. With [`ExportSync::Wait`] the memory must be ready.
fn export_sync(array: &DeviceArray, sync: SyncPolicy) -> ExportSync {
    let device = array.device().capabilities();
    match device.exports {
        _ if sync == SyncPolicy::Wait => ExportSync::Wait,
        ExportSync::QueueOrder if device.host_readable => ExportSync::Wait,
        exports => exports,
    }
}

/// Returns the event after which the array's memory is ready, if it is not ready already.
fn event_for(array: &DeviceArray, sync: SyncPolicy) -> Result<Option<Event>> {
    let device = array.device();
    let guarded = owners([array.node()], |owner| owner.ready().is_some());
    let Some(first) = guarded.first() else {
        return Ok(None);
    };
    let own = |owner: &Arc<Owner>| owner.ready().is_some_and(|event| event.device == device);
    match export_sync(array, sync) {
        ExportSync::Wait => {
            array.wait()?;
            return Ok(None);
        }
        ExportSync::QueueOrder => {
            let queue = device.default_queue();
            let mut others = guarded.iter().filter(|owner| !own(owner)).peekable();
            if others.peek().is_some() {
                others.try_for_each(|owner| owner.wait_on(&queue))?;
                // The waits are handed over to the runtime, as all recorded work is.
                drop(queue.record()?);
            }
            return Ok(None);
        }
        _ => {}
    }
    if own(first) && guarded.iter().all(|owner| address(owner) == address(first)) {
        return Ok(Some(Event::of(first)));
    }
    match array.pending()?.as_slice() {
        [] => Ok(None),
        [one] if own(one) => Ok(Some(Event::of(one))),
        many => {
            // The queue waits for events of other devices too, or else this thread does.
            let queue = device.default_queue();
            many.iter().try_for_each(|owner| owner.wait_on(&queue))?;
            Ok(queue.record()?.map(Event::Own))
        }
    }
}

/// The address of the event of an owner.
fn address(owner: &Owner) -> *mut c_void {
    let event = owner.ready();
    event.map_or(ptr::null_mut(), |event| event.ptr.as_ptr())
}
