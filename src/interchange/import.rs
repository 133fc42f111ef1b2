//! C structs in: [`DeviceArray`] and [`DeviceRecordBatch`] from an `ArrowDeviceArray`.
//!
//! Ownership: an import consumes the array and borrows the schema, whatever its outcome. After an
//! error the array has been released, once. After success it is released when the last buffer,
//! array, export or device work that uses its memory is gone.

use std::sync::Arc;

use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, FieldRef, SchemaRef};

use crate::abi::FFI_ArrowDeviceArray;
use crate::abi::c_data::CArray;
use crate::data::build::placeholder;
use crate::data::hidden;
use crate::data::layout::{BufferKind, Layout, Nesting, check_type, child_type};
use crate::data::tree::{Node, NullCount, Owners, Slot, Tree};
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{AddressClass, Device, DeviceId, DevicePtr, EventPtr};
use crate::error::{Error, Result};
use crate::interchange::options::{ImportOptions, Validation};
use crate::interchange::path::Path;
use crate::interchange::schema::{import_field, import_schema};
use crate::interchange::validate::validate_full;
use crate::memory::{Memory, Owner, Ready};

impl DeviceArray {
    /// Takes over a foreign array of any type. Nothing is copied, read or waited for; null counts
    /// and lengths that only the device knows stay unknown until asked for.
    ///
    /// # Safety
    /// - `array` and `schema` keep to the C device data interface: pointers that are not null are
    ///   valid for what the structs say, and the event, if any, is of the device's type;
    /// - the values are valid for their type, and null counts are right ([`Validation::Full`] checks
    ///   both);
    /// - nobody writes to the memory before it is released.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] with the field's path, [`Error::Released`],
    /// [`Error::DeviceNotAvailable`]. The array is released then.
    pub unsafe fn import(array: FFI_ArrowDeviceArray, schema: &FFI_ArrowSchema) -> Result<Self> {
        // SAFETY: the caller guarantees what `import_with` asks for: the two have the same contract.
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
        // SAFETY: the caller keeps to the contract of `import`; the type comes from the array's own schema.
        unsafe { Self::import_as(array, field, options) }
    }

    /// As [`import`](Self::import), for a type that is known already.
    ///
    /// # Safety
    /// As [`import`](Self::import).
    pub unsafe fn import_as(
        array: FFI_ArrowDeviceArray,
        field: FieldRef,
        options: &ImportOptions,
    ) -> Result<Self> {
        check_type(field.data_type())?;
        // SAFETY: the caller keeps to the contract of `import`, and `check_type` accepted the type above.
        let tree = unsafe { import(array, field.data_type().clone(), options) }?;
        if options.validation == Validation::Full {
            hidden::check_null_counts(&tree)?;
        }
        let array = Self::from_tree(Arc::new(tree)).with_field(field)?;
        if options.validation == Validation::Full {
            validate_full(&array.reachable_data()?)?;
        }
        Ok(array)
    }
}

impl DeviceRecordBatch {
    /// Takes over a foreign struct array as a batch: see [`DeviceArray::import`]. An offset of the
    /// root becomes its columns'.
    ///
    /// # Safety
    /// As [`DeviceArray::import`].
    ///
    /// # Errors
    /// Also for another type than a struct, and for a root that holds nulls.
    pub unsafe fn import(array: FFI_ArrowDeviceArray, schema: &FFI_ArrowSchema) -> Result<Self> {
        // SAFETY: the caller guarantees what `import_with` asks for: the two have the same contract.
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
        // SAFETY: the caller keeps to the contract of `import`; the type comes from the array's own schema.
        unsafe { Self::import_as(array, schema, options) }
    }

    /// As [`import`](Self::import), for a schema that is known already: at most four heap
    /// allocations, whatever the number of columns.
    ///
    /// # Safety
    /// As [`DeviceArray::import`].
    pub unsafe fn import_as(
        array: FFI_ArrowDeviceArray,
        schema: SchemaRef,
        options: &ImportOptions,
    ) -> Result<Self> {
        // SAFETY: the caller keeps to the contract of `DeviceArray::import`, which `import_unread` asks for.
        let batch = unsafe { Self::import_unread(array, schema, options) }?;
        batch.read_import(options)?;
        Ok(batch)
    }

    /// As [`import_as`](Self::import_as), which then [reads](Self::read_import) the memory if it must: here
    /// nothing waits.
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
        // SAFETY: the caller keeps to the contract of `import`, and `check_type` accepted the type above.
        let tree = unsafe { import(array, root, options) }?;
        let array = DeviceArray::from_tree(Arc::new(tree));
        Ok(Self::from_struct(schema, array))
    }

    /// Refuses rows that are null.
    pub(super) fn check_rows(&self) -> Result<()> {
        match self.as_struct().null_count() {
            Some(0) => Ok(()),
            _ => Err(Error::invalid(
                "array.null_count",
                "the rows of a record batch cannot be null; import it as an array",
            )),
        }
    }

    /// What an import checks by reading the memory.
    fn read_import(&self, options: &ImportOptions) -> Result<()> {
        let array = self.as_struct();
        if options.validation == Validation::Full {
            hidden::check_null_counts(array.tree())?;
        }
        if array.null_count().is_none() {
            // A validity bitmap without a count: only its bits tell.
            hidden::null_counts(array, vec![array.view()])?;
        }
        self.check_rows()?;
        if options.validation == Validation::Full {
            validate_full(&array.reachable_data()?)?;
        }
        Ok(())
    }
}

/// Checks a foreign array against its type and takes it over.
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
    let device = options.devices().get_for_import(id, event.is_some())?;
    if event.is_some() && device.is_synchronous() {
        return Err(Error::invalid(
            "sync_event",
            format!("{device} has no events, so this one cannot be waited for"),
        ));
    }
    let ready = match event {
        Some(event) => {
            // SAFETY: the caller's array keeps to the interface: its `sync_event` points to an event of the device's
            // type (contract of the import).
            let check = unsafe { device.backend().check_event(event) };
            check.map_err(|e| Error::invalid("sync_event", e.to_string()))?;
            Ready::Foreign(event)
        }
        None => Ready::Now,
    };
    let mut importer = Importer {
        device: &device,
        nodes: Vec::new(),
        slots: Vec::new(),
        count: (1, 0),
    };
    // SAFETY: the caller guarantees that the root is a valid struct as far as its members say (contract of the
    // import).
    unsafe { importer.check(&array.array, &data_type, 0, &Path::Root("array")) }?;
    let (nodes, slots) = importer.count;
    importer.nodes.reserve_exact(nodes);
    importer.slots.reserve_exact(slots);
    importer.nodes.push(placeholder(0));
    // SAFETY: as above, and `check` has seen every pointer that is followed.
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

struct Importer<'a> {
    device: &'a Device,
    nodes: Vec<Node>,
    slots: Vec<Slot>,
    /// How many nodes and slots there will be.
    count: (usize, usize),
}

/// Most buffers of an array and its descendants. Structs may share one list of them.
const MAX_BUFFERS: usize = 1 << 22;

impl Importer<'_> {
    /// Checks a struct and its descendants. Nothing of a buffer is read.
    ///
    /// # Safety
    /// `array` is a valid `ArrowArray` as far as its members say.
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
        let fits = if layout.variadic {
            (expected as i64..=MAX_BUFFERS as i64).contains(&array.n_buffers)
        } else {
            array.n_buffers == expected as i64
        };
        if !fits {
            return path.error(
                "n_buffers",
                format!("is {}, {data_type} has {expected}", array.n_buffers),
            );
        }
        if array.n_buffers > 0 {
            path.usable("buffers", array.buffers)?;
        }
        let n_buffers = array.n_buffers as usize;
        // SAFETY: the producer vouches for `n_buffers` pointers.
        let buffer = |i: usize| DevicePtr::new(unsafe { *array.buffers.add(i) }.cast_mut());

        let masked = layout.has_validity() && !buffer(0).is_null();
        if array.null_count > 0 && !masked && *data_type != DataType::Null {
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
            // They may be in host memory, whatever the device.
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
                // SAFETY: the producer vouches for a dictionary that is not null.
                let dictionary = unsafe { &*array.dictionary };
                // SAFETY: as above.
                return unsafe { self.check(dictionary, values, 0, &Path::Dictionary(path)) };
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
            // SAFETY: the producer vouches for `n_children` pointers.
            let child = unsafe { *array.children.add(i) };
            if child.is_null() || !child.is_aligned() {
                path.usable(&format!("children[{i}]"), child)?;
            }
            // SAFETY: as above, for a child that is not null.
            let child = unsafe { &*child };
            let of_type = child_type(data_type, i).unwrap_or(&DataType::Null);
            let path = Path::Child(path, i);
            // SAFETY: as above.
            unsafe { self.check(child, of_type, needed, &path) }?;
            if layout.nesting == Nesting::Runs && i == 0 {
                if child.null_count > 0 {
                    return path.error("null_count", "run ends cannot be null");
                }
                // There is a value for each run.
                needed = child.length as usize;
            }
        }
        Ok(())
    }

    fn class(&self, address: DevicePtr, bytes: usize) -> AddressClass {
        if self.device.id() == DeviceId::CPU {
            return AddressClass::HostAccessible;
        }
        self.device.backend().classify(address, bytes)
    }

    fn accessible(
        &self,
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

    /// Writes a checked struct and its descendants into the tree.
    ///
    /// # Safety
    /// `check` accepted the struct.
    unsafe fn fill(&mut self, node: usize, array: &CArray, data_type: &DataType) {
        let layout = Layout::of(data_type);
        let length = array.length as usize;
        // Rows before the first of none may not even be there.
        let offset = if length == 0 {
            0
        } else {
            array.offset as usize
        };
        let n_buffers = array.n_buffers as usize;
        let first_slot = self.slots.len();
        let fixed = layout.buffers().len();
        for i in 0..n_buffers {
            // SAFETY: `check` saw `n_buffers` pointers.
            let address = DevicePtr::new(unsafe { *array.buffers.add(i) }.cast_mut());
            let bytes = match layout.buffers().get(i) {
                _ if address.is_null() => Some(0),
                _ if length == 0 && i < fixed => Some(0),
                Some(kind) => kind.bytes(offset + length).and_then(Result::ok),
                None if i + 1 == n_buffers => Some((n_buffers - 1 - fixed) * 8),
                None => None,
            };
            // A variadic buffer's length is asked for even if it is null.
            let bytes = if i >= fixed && i + 1 < n_buffers {
                None
            } else {
                bytes
            };
            self.slots.push(Slot::new(address, 0, bytes, 0));
        }
        let masked = layout.has_validity() && !self.slots[first_slot].is_null();
        let nulls = match array.null_count {
            _ if *data_type == DataType::Null => Some(length),
            _ if !masked || length == 0 => Some(0),
            n => usize::try_from(n).ok(),
        };
        let first_child = self.nodes.len();
        let parent = self.nodes[node].parent;
        self.nodes[node] = Node {
            length,
            layout,
            cut: false,
            padded: false,
            offset,
            validity_offset: offset,
            nulls: NullCount::from(nulls),
            parent,
            first_child: first_child as u32,
            n_children: layout.n_children() as u32,
            first_slot: first_slot as u32,
            n_slots: n_buffers as u32,
        };
        self.nodes
            .extend((0..layout.n_children()).map(|_| placeholder(node)));
        for i in 0..layout.n_children() {
            // SAFETY: `check` saw every child and dictionary that the type has.
            let child = unsafe {
                if layout.nesting == Nesting::Dictionary {
                    &*array.dictionary
                } else {
                    &**array.children.add(i)
                }
            };
            let of_type = child_type(data_type, i).unwrap_or(&DataType::Null);
            // SAFETY: as above.
            unsafe { self.fill(first_child + i, child, of_type) };
        }
    }
}
