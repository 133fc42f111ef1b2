//! Import of an `ArrowDeviceArray` as [`DeviceArray`] or [`DeviceRecordBatch`].
//!
//! Ownership: an import consumes the array and borrows the schema, whatever its outcome. After an
//! error the array has been released, once. After success it is released when the last buffer,
//! array, export or device work that uses its memory has ended.

use std::ops::Range;
use std::sync::Arc;

use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, FieldRef, SchemaRef};

use crate::abi::c_data::CArray;
use crate::abi::{ArrowDeviceType, FFI_ArrowDeviceArray};
use crate::data::batch::check_no_nulls;
use crate::data::layout::{BufferKind, Layout, Nesting, check_type, child_type};
use crate::data::node::{Buffers, Node, NodeBuffer, NullCount};
use crate::data::nulls::NullCounting;
use crate::data::{DeviceArray, DeviceRecordBatch};
#[cfg(feature = "async")]
use crate::device::completion;
use crate::device::{AddressClass, Arriving, Device, DeviceId, DevicePtr, EventPtr, Seen};
use crate::error::{Error, Result};
use crate::interchange::foreign::{MAX_BUFFERS, first_address, n_buffers_fit};
use crate::interchange::options::{ImportOptions, Validation};
use crate::interchange::path::Path;
use crate::interchange::schema::{import_field, import_schema};
use crate::interchange::validate::validate;
#[cfg(feature = "async")]
use crate::interchange::validate::validate_async;
use crate::memory::{Memory, Owner, Ready};

impl DeviceArray {
    /// Imports a foreign array of any type. Nothing is copied, no buffer is read, and nothing
    /// waits. Null counts that the producer does not state, and sizes that are stored in device
    /// memory, stay unknown until they are needed.
    ///
    /// # Safety
    /// - `array` and `schema` comply with the C device data interface: pointers that are not null
    ///   are valid for what the structs say, and the event, if there is one, has the type that
    ///   belongs to the device;
    /// - if the host can read the memory of the device that the array is imported to ([`Device::is_host_readable`]), it can read the
    ///   array's buffers;
    /// - the buffers of an array of type METAL are host addresses, if the [options](ImportOptions::with_metal_as_host)
    ///   or a device that was [registered](crate::metal::shared_memory) say so;
    /// - the values are valid for their type, and null counts are correct ([`Validation::Full`]
    ///   checks both);
    /// - nobody writes to the memory before it is released.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] with the path of the faulty field, [`Error::Released`] for a
    /// released array, and [`Error::DeviceNotAvailable`] if there is no backend for the device. The
    /// array is released then.
    pub unsafe fn import(array: FFI_ArrowDeviceArray, schema: &FFI_ArrowSchema) -> Result<Self> {
        // SAFETY: the caller guarantees what `import_with` asks for: the two have the same
        // contract.
        unsafe { Self::import_with(array, schema, &ImportOptions::default()) }
    }

    /// As [`import`](Self::import), with options.
    ///
    /// # Safety
    /// As [`import`](Self::import).
    pub unsafe fn import_with(
        array: FFI_ArrowDeviceArray,
        schema: &FFI_ArrowSchema,
        options: &ImportOptions,
    ) -> Result<Self> {
        let field = Arc::new(import_field(schema)?);
        // SAFETY: the caller keeps to the contract of `import`; the type comes from the array's own
        // schema.
        unsafe { Self::import_as(array, field, options) }
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
        check_type(field.data_type())?;
        // SAFETY: the caller keeps to the contract of `import`, and `check_type` accepted the type
        // above.
        let array = unsafe { import(array, field.data_type(), options) }?.with_field(field)?;
        if options.validation == Validation::Full {
            if let Some(counting) = NullCounting::start_all(&array)? {
                counting.finish(&array)?;
            }
            validate(&array)?;
        }
        Ok(array)
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
    pub unsafe fn import(array: FFI_ArrowDeviceArray, schema: &FFI_ArrowSchema) -> Result<Self> {
        // SAFETY: the caller guarantees what `import_with` asks for: the two have the same
        // contract.
        unsafe { Self::import_with(array, schema, &ImportOptions::default()) }
    }

    /// As [`import`](Self::import), with options.
    ///
    /// # Safety
    /// As [`DeviceArray::import`].
    pub unsafe fn import_with(
        array: FFI_ArrowDeviceArray,
        schema: &FFI_ArrowSchema,
        options: &ImportOptions,
    ) -> Result<Self> {
        let schema = import_schema(schema)?;
        // SAFETY: the caller keeps to the contract of `import`; the type comes from the array's own
        // schema.
        unsafe { Self::import_as(array, schema, options) }
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
        // SAFETY: the caller keeps to the contract of `DeviceArray::import`, which `import_unread`
        // asks for.
        let batch = unsafe { Self::import_unread(array, schema, options) }?;
        let array = batch.as_struct();
        if let Some(counting) = start_counting(array, options.validation)? {
            counting.finish(array)?;
        }
        check_no_nulls(array)?;
        if options.validation == Validation::Full {
            validate(array)?;
        }
        Ok(batch)
    }

    /// As [`import_as`](Self::import_as), but without the checks that read the memory. Does not
    /// wait.
    ///
    /// # Safety
    /// As [`DeviceArray::import`].
    pub(crate) unsafe fn import_unread(
        array: FFI_ArrowDeviceArray,
        schema: SchemaRef,
        options: &ImportOptions,
    ) -> Result<Self> {
        let root = DataType::Struct(schema.fields().clone());
        check_type(&root)?;
        // SAFETY: the caller keeps to the contract of `import`, and `check_type` accepted the type
        // above.
        let array = unsafe { import(array, &root, options) }?;
        Ok(Self::from_struct(schema, array))
    }
}

/// Checks a batch after [`DeviceRecordBatch::import_unread`] as [`DeviceRecordBatch::import_as`] does, and returns it. A poll never
/// blocks.
#[cfg(feature = "async")]
pub(crate) async fn check_async(
    batch: DeviceRecordBatch,
    validation: Validation,
) -> Result<DeviceRecordBatch> {
    let (array, full) = (batch.as_struct(), validation == Validation::Full);
    // Nothing is read of most batches.
    if full || array.null_count().is_none() {
        completion(array.ready_event()?).await?;
    }
    if let Some(mut counting) = start_counting(array, validation)? {
        completion(counting.reading.event().cloned()).await?;
        counting.reading.waited();
        counting.finish(array)?;
    }
    check_no_nulls(array)?;
    if full {
        validate_async(array).await?;
    }
    Ok(batch)
}

/// Starts to count the nulls that an import of a batch has to count: all, to check the counts that
/// are stated, or those of the root if its count is not stated. In the former case, the sizes that
/// the check of the values needs are read along with them.
fn start_counting(array: &DeviceArray, validation: Validation) -> Result<Option<NullCounting>> {
    match validation {
        Validation::Full => NullCounting::start_all(array),
        Validation::Structure if array.null_count().is_none() => {
            NullCounting::start(array, vec![array.view().to_rows()], None).map(Some)
        }
        Validation::Structure => Ok(None),
    }
}

/// Checks a foreign array against its type, and imports it.
///
/// # Safety
/// As [`DeviceArray::import`]; `data_type` passed [`check_type`].
unsafe fn import(
    array: FFI_ArrowDeviceArray,
    data_type: &DataType,
    options: &ImportOptions,
) -> Result<DeviceArray> {
    if array.is_released() {
        return Err(Error::Released("the ArrowDeviceArray"));
    }
    let id = DeviceId::new(array.device_type, array.device_id);
    let event = EventPtr::new(array.sync_event);
    // SAFETY: the caller guarantees that the struct complies with the interface (`DeviceArray::import`).
    let address = || unsafe { first_address(&array.array, data_type) };
    // SAFETY: the caller guarantees that `sync_event` points to an event of the type that belongs to the device; the array,
    // which keeps it alive, is not released before the import ends.
    let arriving = unsafe { Arriving::new(id, event, &address) };
    let device = options.devices().get_for_import(&arriving, options.metal)?;
    if event.is_some() && device.is_synchronous() {
        let more = match id.device_type {
            ArrowDeviceType::METAL => {
                "; only Metal's framework can wait for an MTLSharedEvent: export with a null event \
                 once the memory is ready"
            }
            _ => "",
        };
        return Err(Error::invalid(
            "sync_event",
            format!("{device} has no events, so this one cannot be waited for{more}"),
        ));
    }
    let ready = match event {
        Some(event) => {
            // SAFETY: the caller guarantees that `sync_event` points to an event of the type that
            // belongs to the device (`DeviceArray::import`).
            let check = unsafe { device.backend().check_event(event) };
            check.map_err(|e| Error::invalid("sync_event", e.to_string()))?;
            Ready::Foreign(event, Seen::default())
        }
        None => Ready::Now,
    };
    // The owner first, in which the struct then stays: it is released once, after errors too.
    let owner = Arc::new(Owner::new(device.clone(), Memory::Foreign(array), ready));
    let Some(array) = owner.foreign() else {
        return Err(Error::Released("the ArrowDeviceArray"));
    };
    let mut importer = Importer {
        device: &device,
        owner: &owner,
        any_address: device.id() == DeviceId::CPU,
        buffers: 0,
        known: None,
    };
    // SAFETY: the caller guarantees that the struct complies with the interface
    // (`DeviceArray::import`).
    let node = unsafe { importer.node(&array.array, data_type, 0, &Path::Root("array")) }?;
    Ok(DeviceArray::from_node(device, node))
}

struct Importer<'a> {
    device: &'a Device,
    /// Keeps the struct.
    owner: &'a Arc<Owner>,
    /// Whether the device is the CPU, which can use memory at any address.
    any_address: bool,
    /// How many buffers there were so far.
    buffers: usize,
    /// The backend's last answer: addresses of one class.
    known: Option<(Range<usize>, AddressClass)>,
}

impl Importer<'_> {
    /// Checks a struct and its descendants, and makes their nodes. Reads no buffer.
    ///
    /// # Safety
    /// `array` complies with the C data interface: pointers that are not null are valid for what it
    /// says.
    unsafe fn node(
        &mut self,
        array: &CArray,
        data_type: &DataType,
        rows_needed: usize,
        path: &Path<'_>,
    ) -> Result<Arc<Node>> {
        if array.is_released() {
            return path.error("", "is released");
        }
        let layout = Layout::of(data_type);
        let Ok(length) = usize::try_from(array.length) else {
            return path.error("length", format!("is {}", array.length));
        };
        let Ok(offset) = usize::try_from(array.offset) else {
            return path.error("offset", format!("is {}", array.offset));
        };
        let rows = offset.checked_add(length);
        let Some(rows) = rows.filter(|n| isize::try_from(*n).is_ok()) else {
            return path.error("offset", format!("{offset} and length {length} overflow"));
        };
        if length < rows_needed {
            return path.error(
                "length",
                format!("is {length}, but its parent needs {rows_needed} rows"),
            );
        }
        if !(-1..=array.length).contains(&array.null_count) {
            return path.error(
                "null_count",
                format!("is {} for {length} rows", array.null_count),
            );
        }

        let fixed = layout.buffers().len();
        let expected = if layout.variadic { fixed + 1 } else { fixed };
        if !n_buffers_fit(layout, array.n_buffers) {
            return path.error(
                "n_buffers",
                format!("is {}, {data_type} has {expected}", array.n_buffers),
            );
        }
        if array.n_buffers > 0 {
            path.usable("buffers", array.buffers)?;
        }
        let mut n_buffers = array.n_buffers as usize;
        // SAFETY: `buffers` is usable (checked above if there are any) and, as the caller
        // guarantees, has `n_buffers` pointers; `i` is below that.
        let buffer = |i: usize| DevicePtr::new(unsafe { *array.buffers.add(i) }.cast_mut());

        if layout.is_null_type() && n_buffers > 0 {
            if !buffer(0).is_null() {
                return path.error("buffers[0]", "is not null, but a null array has no buffers");
            }
            n_buffers = 0;
        }
        let has_bitmap = layout.has_validity() && !buffer(0).is_null();
        if array.null_count > 0 && !has_bitmap && !layout.is_null_type() {
            return path.error(
                "null_count",
                format!("is {}, but there is no validity bitmap", array.null_count),
            );
        }
        self.buffers = self.buffers.saturating_add(n_buffers);
        if self.buffers > MAX_BUFFERS {
            return path.error("n_buffers", "the array has more than 2^22 buffers");
        }
        let mut buffers = Buffers::with_capacity(n_buffers);
        for (i, kind) in layout.buffers().iter().enumerate() {
            let address = buffer(i);
            // Unknown if it is stored in the memory.
            let bytes = match kind.bytes(rows) {
                Some(Ok(bytes)) => Some(bytes),
                Some(Err(_)) => return path.error("length", format!("{rows} rows do not fit")),
                None => None,
            };
            let needed = if length == 0 { 0 } else { bytes.unwrap_or(0) };
            if needed > 0 && !address.is_null() {
                self.accessible(address, needed, i, path)?;
            } else if needed > 0 && *kind != BufferKind::Validity {
                return path.error(
                    &format!("buffers[{i}]"),
                    format!("is null, {needed} bytes are needed"),
                );
            }
            let empty = length == 0 || address.is_null();
            let bytes = if empty { Some(0) } else { bytes };
            buffers.push(NodeBuffer::new(self.owner, address, 0, bytes));
        }
        if layout.variadic {
            // SAFETY: the list of buffers is usable, and has `n_buffers` pointers (see `buffer`).
            unsafe { self.variadic(array, fixed, path, &mut buffers) }?;
        }
        // Without rows there need not be any before them either.
        let offset = if length == 0 { 0 } else { offset };
        let nulls = match array.null_count {
            _ if layout.is_null_type() => Some(length),
            _ if !has_bitmap || length == 0 => Some(0),
            n => usize::try_from(n).ok(),
        };
        let dictionary = layout.nesting == Nesting::Dictionary;
        let n_children = if dictionary { 0 } else { layout.n_children() };
        if array.n_children != n_children as i64 {
            return path.error(
                "n_children",
                format!("is {}, {data_type} has {n_children}", array.n_children),
            );
        }
        let mut children = Vec::with_capacity(layout.n_children());
        match (dictionary, array.dictionary.is_null()) {
            (true, true) => return path.error("dictionary", "is null"),
            (false, false) => {
                return path.error(
                    "dictionary",
                    format!("is there, but the type is {data_type}"),
                );
            }
            (true, false) => {
                let values = child_type(data_type, 0).unwrap_or(&DataType::Null);
                path.usable("dictionary", array.dictionary)?;
                let path = Path::Dictionary(path);
                // SAFETY: the dictionary is usable; the caller guarantees that it is a struct that
                // complies with the interface, which is what `node` asks for.
                children.push(unsafe { self.node(&*array.dictionary, values, 0, &path) }?);
            }
            (false, true) => {}
        }
        if n_children > 0 {
            path.usable("children", array.children)?;
        }
        let needed = match layout.nesting {
            Nesting::RowByRow => rows,
            Nesting::Times(n) => match rows.checked_mul(n as usize) {
                Some(needed) => needed,
                None => return path.error("length", format!("{rows} lists of {n} overflow")),
            },
            Nesting::Runs => usize::from(length > 0),
            _ => 0,
        };
        let mut needed = if length == 0 { 0 } else { needed };
        for i in 0..n_children {
            // SAFETY: `children` is usable and, as the caller guarantees, has `n_children`
            // pointers; `i` is below that.
            let child = unsafe { *array.children.add(i) };
            let of_type = child_type(data_type, i).unwrap_or(&DataType::Null);
            let path = Path::Child(path, i);
            path.usable("", child)?;
            // SAFETY: the child is usable; the caller guarantees that it is a struct that complies
            // with the interface.
            let child = unsafe { &*child };
            // SAFETY: the caller guarantees that all descendants comply with the interface, which is what `node` asks for.
            children.push(unsafe { self.node(child, of_type, needed, &path) }?);
            if layout.nesting == Nesting::Runs && i == 0 {
                if child.null_count > 0 {
                    return path.error("null_count", "run ends cannot be null");
                }
                // Each run needs a value.
                needed = child.length as usize;
            }
        }
        Ok(Arc::new(Node {
            offset,
            validity_offset: offset,
            nulls: NullCount::from(nulls),
            ..Node::new(data_type.clone(), length, buffers, children)
        }))
    }

    /// Checks and adds the data buffers of a view array, and the buffer of their sizes.
    ///
    /// # Safety
    /// `array` has more than `fixed` buffers, which are listed.
    unsafe fn variadic(
        &mut self,
        array: &CArray,
        fixed: usize,
        path: &Path<'_>,
        buffers: &mut Buffers,
    ) -> Result<()> {
        let last = array.n_buffers as usize - 1;
        // SAFETY: `i` is at most the last buffer, and the caller guarantees the list.
        let buffer = |i: usize| DevicePtr::new(unsafe { *array.buffers.add(i) }.cast_mut());
        // The size of a data buffer is looked up even if the buffer is null.
        let data = (fixed..last).map(|i| NodeBuffer::new(self.owner, buffer(i), 0, None));
        buffers.extend(data);
        let (sizes, bytes) = (buffer(last), (last - fixed) * 8);
        if bytes > 0 {
            if sizes.is_null() {
                return path.error(
                    &format!("buffers[{last}]"),
                    "is null: the lengths of the variadic buffers are missing",
                );
            }
            // The sizes may be in host memory, whatever the device.
            if self.class(sizes, bytes) != AddressClass::Host {
                self.accessible(sizes, bytes, last, path)?;
            }
        }
        let bytes = if sizes.is_null() { 0 } else { bytes };
        buffers.push(NodeBuffer::new(self.owner, sizes, 0, Some(bytes)));
        Ok(())
    }

    fn class(&mut self, address: DevicePtr, bytes: usize) -> AddressClass {
        if self.any_address {
            return AddressClass::HostAccessible;
        }
        let wanted = address.range(bytes);
        match &self.known {
            Some((range, class)) if range.start <= wanted.start && wanted.end <= range.end => {
                *class
            }
            _ => {
                let (class, range) = self.device.backend().classify_allocation(address, bytes);
                self.known = Some((range, class));
                class
            }
        }
    }

    #[inline]
    fn accessible(
        &mut self,
        address: DevicePtr,
        bytes: usize,
        buffer: usize,
        path: &Path<'_>,
    ) -> Result<()> {
        if self.any_address {
            return Ok(());
        }
        self.accessible_at(address, bytes, buffer, path)
    }

    #[inline(never)]
    fn accessible_at(
        &mut self,
        address: DevicePtr,
        bytes: usize,
        buffer: usize,
        path: &Path<'_>,
    ) -> Result<()> {
        match self.class(address, bytes) {
            AddressClass::Device | AddressClass::HostAccessible | AddressClass::Unknown => Ok(()),
            AddressClass::Host | AddressClass::Inaccessible => {
                let why = self.device.backend().explain(address, bytes);
                let why = why.map_or_else(String::new, |why| format!(": {why}"));
                path.error(
                    &format!("buffers[{buffer}]"),
                    format!(
                        "{bytes} bytes at {address:?} are not memory that {} can use{why}",
                        self.device
                    ),
                )
            }
        }
    }
}
