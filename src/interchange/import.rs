//! Import of an `ArrowDeviceArray` as [`DeviceArray`] or [`DeviceRecordBatch`].
//!
//! Ownership: an import consumes the array and borrows the schema, whatever its outcome. After an
//! error the array has been released, once. After success it is released when the last buffer,
//! array, export or device work that uses its memory has ended.

use std::sync::Arc;

use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, FieldRef, SchemaRef};

use crate::abi::c_data::CArray;
use crate::abi::{ArrowDeviceType, FFI_ArrowDeviceArray};
use crate::data::batch::check_no_nulls;
use crate::data::layout::{BufferKind, Layout, Nesting, check_type, child_type};
use crate::data::nulls::NullCounting;
use crate::data::tree::{Node, NullCount, Owners, Slot, Tree};
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{AddressClass, Arriving, Device, DeviceId, DevicePtr, EventPtr, Seen};
use crate::error::{Error, Result};
use crate::interchange::known::Known;
use crate::interchange::options::{ImportOptions, Validation};
use crate::interchange::path::Path;
use crate::interchange::schema::{import_field, import_schema};
use crate::interchange::validate::validate;
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
        let tree = unsafe { import(array, field.data_type().clone(), options) }?;
        let array = Self::from_tree(Arc::new(tree)).with_field(field)?;
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
        let tree = unsafe { import(array, root, options) }?;
        let array = DeviceArray::from_tree(Arc::new(tree));
        Ok(Self::from_struct(schema, array))
    }
}

/// Starts to count the nulls that an import of a batch has to count: all, to check the counts that
/// are stated, or those of the root if its count is not stated. In the former case, the sizes that
/// the check of the values needs are read along with them.
pub(super) fn start_counting(
    array: &DeviceArray,
    validation: Validation,
) -> Result<Option<NullCounting>> {
    match validation {
        Validation::Full => NullCounting::start_all(array),
        Validation::Structure if array.null_count().is_none() => {
            NullCounting::start(array, vec![array.view()], None).map(Some)
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
    data_type: DataType,
    options: &ImportOptions,
) -> Result<Tree> {
    if array.is_released() {
        return Err(Error::Released("the ArrowDeviceArray"));
    }
    let id = DeviceId::new(array.device_type, array.device_id);
    let event = EventPtr::new(array.sync_event);
    // SAFETY: the caller guarantees that the struct complies with the interface (`DeviceArray::import`).
    let address = || unsafe { first_address(&array.array, &data_type) };
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
    let mut importer = Importer {
        device: &device,
        nodes: Vec::new(),
        slots: Vec::new(),
        count: (1, 0),
        known: Known::default(),
    };
    device.within(|| {
        // SAFETY: the caller guarantees that the struct complies with the interface
        // (`DeviceArray::import`).
        unsafe { importer.check(&array.array, &data_type, 0, &Path::Root("array")) }
    })?;
    let (nodes, slots) = importer.count;
    importer.nodes.reserve_exact(nodes);
    importer.slots.reserve_exact(slots);
    importer.nodes.push(Node::placeholder(0));
    // SAFETY: `check` accepted the struct for this type.
    unsafe { importer.fill(0, &array.array, &data_type) };
    let Importer { nodes, slots, .. } = importer;
    let owner = Owner::new(device.clone(), Memory::Foreign(array), ready);
    Ok(Tree {
        device,
        root: data_type,
        nodes,
        slots,
        owners: Owners::One(Arc::new(owner)),
    })
}

/// Returns the first buffer that is not null, of the struct or its descendants. Follows no pointer that [`Importer::check`] would
/// refuse: it stops where the struct is not one of the type.
///
/// # Safety
/// As [`Importer::check`].
unsafe fn first_address(array: &CArray, data_type: &DataType) -> Option<DevicePtr> {
    fn usable<T>(pointer: *mut T) -> bool {
        !pointer.is_null() && pointer.is_aligned()
    }
    let layout = Layout::of(data_type);
    let fixed = layout.buffers().len();
    if array.is_released() || !n_buffers_fit(layout, array.n_buffers) {
        return None;
    }
    if fixed > 0 && !usable(array.buffers) {
        return None;
    }
    for i in 0..fixed {
        // SAFETY: the list is usable and, as the caller guarantees, has `n_buffers` pointers, which are at least `fixed`.
        let address = DevicePtr::new(unsafe { *array.buffers.add(i) }.cast_mut());
        if !address.is_null() {
            return Some(address);
        }
    }
    if layout.nesting == Nesting::Dictionary {
        let values = child_type(data_type, 0)?;
        // SAFETY: the dictionary is usable; the caller guarantees that it is a struct that complies with the interface.
        return usable(array.dictionary)
            .then(|| unsafe { first_address(&*array.dictionary, values) })?;
    }
    let n_children = layout.n_children();
    if array.n_children != n_children as i64 || n_children > 0 && !usable(array.children) {
        return None;
    }
    (0..n_children).find_map(|i| {
        // SAFETY: the list is usable and, as the caller guarantees, has `n_children` pointers.
        let child = unsafe { *array.children.add(i) };
        let of_type = child_type(data_type, i)?;
        // SAFETY: the child is usable; the caller guarantees that it is a struct that complies with the interface.
        usable(child).then(|| unsafe { first_address(&*child, of_type) })?
    })
}

/// Whether a struct of the layout may have so many buffers.
fn n_buffers_fit(layout: Layout, n_buffers: i64) -> bool {
    let fixed = layout.buffers().len() as i64;
    match layout.variadic {
        true => (fixed + 1..=MAX_BUFFERS as i64).contains(&n_buffers),
        false => n_buffers == fixed,
    }
}

struct Importer<'a> {
    device: &'a Device,
    nodes: Vec<Node>,
    slots: Vec<Slot>,
    /// How many nodes and slots there will be in all.
    count: (usize, usize),
    known: Known,
}

/// The most buffers that an array and its descendants may have. Structs may share one list of them.
const MAX_BUFFERS: usize = 1 << 22;

impl Importer<'_> {
    /// Checks a struct and its descendants. Reads no buffer.
    ///
    /// # Safety
    /// `array` complies with the C data interface: pointers that are not null are valid for what it
    /// says.
    unsafe fn check(
        &mut self,
        array: &CArray,
        data_type: &DataType,
        rows_needed: usize,
        path: &Path<'_>,
    ) -> Result<()> {
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
        let n_buffers = array.n_buffers as usize;
        // SAFETY: `buffers` is usable (checked above if there are any) and, as the caller
        // guarantees, has `n_buffers` pointers; `i` is below that.
        let buffer = |i: usize| DevicePtr::new(unsafe { *array.buffers.add(i) }.cast_mut());

        let has_bitmap = layout.has_validity() && !buffer(0).is_null();
        if array.null_count > 0 && !has_bitmap && *data_type != DataType::Null {
            return path.error(
                "null_count",
                format!("is {}, but there is no validity bitmap", array.null_count),
            );
        }
        for (i, kind) in layout.buffers().iter().enumerate() {
            let address = buffer(i);
            let bytes = match kind.bytes(rows) {
                Some(Ok(bytes)) => bytes,
                Some(Err(_)) => return path.error("length", format!("{rows} rows do not fit")),
                None => 0,
            };
            if length == 0 || bytes == 0 {
                continue;
            }
            if !address.is_null() {
                self.accessible(address, bytes, i, path)?;
            } else if *kind != BufferKind::Validity {
                return path.error(
                    &format!("buffers[{i}]"),
                    format!("is null, {bytes} bytes are needed"),
                );
            }
        }
        if layout.variadic && n_buffers > expected {
            let sizes = buffer(n_buffers - 1);
            if sizes.is_null() {
                return path.error(
                    &format!("buffers[{}]", n_buffers - 1),
                    "is null: the lengths of the variadic buffers are missing",
                );
            }
            // The sizes may be in host memory, whatever the device.
            let bytes = (n_buffers - expected) * 8;
            if self.class(sizes, bytes) != AddressClass::Host {
                self.accessible(sizes, bytes, n_buffers - 1, path)?;
            }
        }
        let slots = if layout.variadic { n_buffers } else { fixed };
        self.count.0 += layout.n_children();
        self.count.1 += slots;
        if self.count.1 > MAX_BUFFERS {
            return path.error("n_buffers", "the array has more than 2^22 buffers");
        }

        let dictionary = layout.nesting == Nesting::Dictionary;
        let n_children = if dictionary { 0 } else { layout.n_children() };
        if array.n_children != n_children as i64 {
            return path.error(
                "n_children",
                format!("is {}, {data_type} has {n_children}", array.n_children),
            );
        }
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
                // SAFETY: the dictionary is usable; the caller guarantees that it is a struct that
                // complies with the interface, which is what `check` asks for.
                return unsafe {
                    self.check(&*array.dictionary, values, 0, &Path::Dictionary(path))
                };
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
            // SAFETY: the caller guarantees that all descendants comply with the interface, which is what `check` asks for.
            unsafe { self.check(child, of_type, needed, &path) }?;
            if layout.nesting == Nesting::Runs && i == 0 {
                if child.null_count > 0 {
                    return path.error("null_count", "run ends cannot be null");
                }
                // Each run needs a value.
                needed = child.length as usize;
            }
        }
        Ok(())
    }

    fn class(&mut self, address: DevicePtr, bytes: usize) -> AddressClass {
        if self.device.id() == DeviceId::CPU {
            return AddressClass::HostAccessible;
        }
        let device = self.device;
        self.known.class(address.range(bytes), || {
            device.backend().classify_allocation(address, bytes)
        })
    }

    fn accessible(
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

    /// Adds a checked struct and its descendants to the tree.
    ///
    /// # Safety
    /// `check` accepted the struct for this type.
    unsafe fn fill(&mut self, node: usize, array: &CArray, data_type: &DataType) {
        let layout = Layout::of(data_type);
        let length = array.length as usize;
        // Without rows there need not be any before them either.
        let offset = match length {
            0 => 0,
            _ => array.offset as usize,
        };
        let n_buffers = array.n_buffers as usize;
        let first_slot = self.slots.len();
        let fixed = layout.buffers().len();
        for i in 0..n_buffers {
            // SAFETY: `check` accepted a list of `n_buffers` pointers (contract), and `i` is below
            // that.
            let address = DevicePtr::new(unsafe { *array.buffers.add(i) }.cast_mut());
            let bytes = match layout.buffers().get(i) {
                // The size of a data buffer is looked up even if the buffer is null.
                None if i + 1 < n_buffers => None,
                _ if address.is_null() => Some(0),
                None => Some((n_buffers - 1 - fixed) * 8),
                Some(_) if length == 0 => Some(0),
                Some(kind) => kind.bytes(offset + length).and_then(Result::ok),
            };
            self.slots.push(Slot::new(address, 0, bytes, 0));
        }
        let has_bitmap = layout.has_validity() && !self.slots[first_slot].is_null();
        let nulls = match array.null_count {
            _ if *data_type == DataType::Null => Some(length),
            _ if !has_bitmap || length == 0 => Some(0),
            n => usize::try_from(n).ok(),
        };
        let first_child = self.nodes.len();
        let parent = self.nodes[node].parent as usize;
        self.nodes[node] = Node {
            offset,
            validity_offset: offset,
            nulls: NullCount::from(nulls),
            first_child: first_child as u32,
            n_children: layout.n_children() as u32,
            ..Node::new(layout, length, parent, first_slot, n_buffers)
        };
        self.nodes
            .extend((0..layout.n_children()).map(|_| Node::placeholder(node)));
        for i in 0..layout.n_children() {
            // SAFETY: `check` accepted every child, or the dictionary, that the type has
            // (contract).
            let child = unsafe {
                match layout.nesting {
                    Nesting::Dictionary => &*array.dictionary,
                    _ => &**array.children.add(i),
                }
            };
            let of_type = child_type(data_type, i).unwrap_or(&DataType::Null);
            // SAFETY: `check` accepted this child for this type.
            unsafe { self.fill(first_child + i, child, of_type) };
        }
    }
}
