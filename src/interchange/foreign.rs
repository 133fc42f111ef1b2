//! The walk that checks a foreign array and its descendants, and makes their nodes.

use std::ffi::c_void;
use std::slice;
use std::sync::Arc;

use arrow_schema::DataType;

use crate::abi::c_data::CArray;
use crate::data::layout::{BufferKind, Layout, Nesting, child_type};
use crate::data::node::{Buffers, Node, NodeBuffer, NullCount};
use crate::device::{AddressClass, Device, DevicePtr, PointerInfo};
use crate::error::Result;
use crate::interchange::Path;
use crate::memory::Owner;

pub(super) struct Importer<'a> {
    pub(super) device: &'a Device,
    /// Keeps the struct.
    pub(super) owner: &'a Arc<Owner>,
    /// The backend's last answer: addresses of one class.
    pub(super) known: PointerInfo,
    /// How many buffers all nodes so far have: structs may share one list of them.
    pub(super) buffers: usize,
}

impl Importer<'_> {
    /// Checks a struct and its descendants, and makes their nodes. Reads no buffer.
    ///
    /// # Safety
    /// `array` complies with the C data interface: pointers that are not null are valid for what it
    /// says.
    pub(super) unsafe fn node(
        &mut self,
        array: &CArray,
        data_type: &DataType,
        rows_needed: usize,
        path: &Path<'_>,
    ) -> Result<Arc<Node>> {
        path.check(!array.is_released(), "", || "is released".into())?;
        let layout = Layout::of(data_type);
        let count = |n: i64, member| match usize::try_from(n) {
            Ok(n) => Ok(n),
            Err(_) => path.error(member, format!("is {n}")),
        };
        let length = count(array.length, "length")?;
        let offset = count(array.offset, "offset")?;
        let rows = offset.checked_add(length);
        let Some(rows) = rows.filter(|n| isize::try_from(*n).is_ok()) else {
            return path.error("offset", format!("{offset} and length {length} overflow"));
        };
        path.check(length >= rows_needed, "length", || {
            format!("is {length}, but its parent needs {rows_needed} rows")
        })?;
        // SAFETY: the caller guarantees that the struct complies with the interface.
        let pointers = unsafe { buffers_of(array, data_type, &layout, path) }?;
        self.buffers += pointers.len();
        path.check(self.buffers <= MAX_BUFFERS, "n_buffers", || {
            format!("is {}, and all structs have more than 2^22", pointers.len())
        })?;
        let has_bitmap = layout.has_validity() && !pointers[0].is_null();
        let nulls = match array.null_count {
            n if n < -1 || n > array.length => {
                return path.error("null_count", format!("is {n} for {length} rows"));
            }
            _ if layout.is_null_type() => Some(length),
            n if n > 0 && !has_bitmap => {
                let why = format!("is {n}, but there is no validity bitmap");
                return path.error("null_count", why);
            }
            _ if !has_bitmap || length == 0 => Some(0),
            n => usize::try_from(n).ok(),
        };
        let mut buffers = Buffers::with_capacity(pointers.len());
        for (i, (kind, &address)) in layout.buffers().iter().zip(pointers).enumerate() {
            let address = DevicePtr::new(address.cast_mut());
            // Unknown if it is stored in the memory.
            let Ok(bytes) = kind.bytes(rows).transpose() else {
                return path.error("length", format!("{rows} rows do not fit"));
            };
            let needed = if length == 0 { 0 } else { bytes.unwrap_or(0) };
            if needed > 0 && !address.is_null() {
                self.accessible(address, needed, i, path)?;
            } else if needed > 0 && *kind != BufferKind::Validity {
                let member = format!("buffers[{i}]");
                return path.error(&member, format!("is null, {needed} bytes are needed"));
            }
            let empty = length == 0 || address.is_null();
            let bytes = if empty { Some(0) } else { bytes };
            buffers.push(NodeBuffer::new(self.owner, address, 0, bytes));
        }
        if layout.variadic {
            self.variadic(pointers, path, &mut buffers)?;
        }
        // How many rows a child needs at least. Lists point to theirs in memory, which is not read here.
        let needed = match layout.nesting {
            _ if length == 0 => Some(0),
            Nesting::RowByRow => Some(rows),
            Nesting::Times(n) => rows.checked_mul(n as usize),
            Nesting::Runs => Some(1),
            _ => Some(0),
        };
        let Some(mut needed) = needed else {
            return path.error("length", format!("{rows} lists overflow"));
        };
        // SAFETY: the caller guarantees that the struct complies with the interface.
        let pointers = unsafe { children_of(array, data_type, &layout, path) }?;
        let mut children = Vec::with_capacity(pointers.len());
        for (i, &child) in pointers.iter().enumerate() {
            let path = path.below(layout.nesting, i);
            path.usable("", child)?;
            let of_type = child_type(data_type, i).unwrap_or(&DataType::Null);
            // SAFETY: the child is usable; the caller guarantees that it is a struct that complies
            // with the interface, and so do its descendants.
            let child = unsafe { self.node(&*child, of_type, needed, &path) }?;
            if layout.nesting == Nesting::Runs && i == 0 {
                if child.nulls.get().is_some_and(|nulls| nulls > 0) {
                    return path.error("null_count", "run ends cannot be null");
                }
                // Each run needs a value.
                needed = child.length;
            }
            children.push(child);
        }
        // Without rows there need not be any before them either.
        let offset = if length == 0 { 0 } else { offset };
        Ok(Arc::new(Node {
            data_type: data_type.clone(),
            layout,
            length,
            cut: false,
            padded: false,
            offset,
            validity_offset: offset,
            nulls: NullCount::from(nulls),
            buffers,
            children,
        }))
    }

    /// Checks and adds the data buffers of a view array, and the buffer of their sizes, the last of `pointers`.
    fn variadic(
        &mut self,
        pointers: &[*const c_void],
        path: &Path<'_>,
        buffers: &mut Buffers,
    ) -> Result<()> {
        let address = |i: usize| DevicePtr::new(pointers[i].cast_mut());
        let (fixed, last) = (buffers.len(), pointers.len() - 1);
        let (sizes, bytes) = (address(last), (last - fixed) * 8);
        // The size of a data buffer is looked up even if the buffer is null.
        buffers.extend((fixed..last).map(|i| NodeBuffer::new(self.owner, address(i), 0, None)));
        if bytes > 0 && sizes.is_null() {
            let why = "is null: the lengths of the variadic buffers are missing";
            return path.error(&format!("buffers[{last}]"), why);
        }
        // The sizes may be in host memory, whatever the device.
        if bytes > 0 && self.classify(sizes, bytes).class != AddressClass::Host {
            self.accessible(sizes, bytes, last, path)?;
        }
        let bytes = if sizes.is_null() { 0 } else { bytes };
        buffers.push(NodeBuffer::new(self.owner, sizes, 0, Some(bytes)));
        Ok(())
    }

    fn classify(&mut self, address: DevicePtr, bytes: usize) -> &PointerInfo {
        let (wanted, known) = (address.range(bytes), &self.known);
        let covers = known.range.start <= wanted.start && wanted.end <= known.range.end;
        if !covers {
            self.known = self.device.backend().classify(address, bytes);
        }
        &self.known
    }

    fn accessible(
        &mut self,
        address: DevicePtr,
        bytes: usize,
        buffer: usize,
        path: &Path<'_>,
    ) -> Result<()> {
        let checked = self.classify(address, bytes).check();
        checked.or_else(|why| {
            let memory = format!("{bytes} bytes at {address:?} are not memory");
            let why = format!("{memory} that {} can use{why}", self.device);
            path.error(&format!("buffers[{buffer}]"), why)
        })
    }
}

/// The most buffers that an array and its descendants may have.
const MAX_BUFFERS: usize = 1 << 22;

/// The pointers of the buffers that an array of the layout has.
///
/// # Safety
/// `array` complies with the C data interface.
unsafe fn buffers_of<'a>(
    array: &'a CArray,
    data_type: &DataType,
    layout: &Layout,
    path: &Path<'_>,
) -> Result<&'a [*const c_void]> {
    let fixed = layout.buffers().len();
    let (least, most) = match layout.variadic {
        true => (fixed + 1, MAX_BUFFERS),
        // polars gives a null array the pointer of a validity bitmap, which is null.
        false => (fixed, fixed + usize::from(layout.is_null_type())),
    };
    let n = usize::try_from(array.n_buffers).unwrap_or(usize::MAX);
    if n < least || n > most {
        let n = array.n_buffers;
        return path.error("n_buffers", format!("is {n}, {data_type} has {least}"));
    }
    if n == 0 {
        return Ok(&[]);
    }
    path.usable("buffers", array.buffers)?;
    // SAFETY: `buffers` is usable and, as the caller guarantees, has `n_buffers` pointers.
    let pointers = unsafe { slice::from_raw_parts(array.buffers, n) };
    if layout.is_null_type() {
        path.check(pointers[0].is_null(), "buffers[0]", || {
            "is not null, but a null array has no buffers".into()
        })?;
        return Ok(&[]);
    }
    Ok(pointers)
}

/// The pointers of the children that an array of the layout has; a dictionary is the only child.
///
/// # Safety
/// `array` complies with the C data interface.
unsafe fn children_of<'a>(
    array: &'a CArray,
    data_type: &DataType,
    layout: &Layout,
    path: &Path<'_>,
) -> Result<&'a [*mut CArray]> {
    let is_dictionary = layout.nesting == Nesting::Dictionary;
    let n = if is_dictionary {
        0
    } else {
        layout.n_children()
    };
    path.check(array.n_children == n as i64, "n_children", || {
        format!("is {}, {data_type} has {n}", array.n_children)
    })?;
    if is_dictionary {
        return Ok(slice::from_ref(&array.dictionary));
    }
    path.check(array.dictionary.is_null(), "dictionary", || {
        format!("is there, but the type is {data_type}")
    })?;
    if n == 0 {
        return Ok(&[]);
    }
    path.usable("children", array.children)?;
    // SAFETY: `children` is usable and, as the caller guarantees, has `n_children` pointers.
    Ok(unsafe { slice::from_raw_parts(array.children, n) })
}

/// Returns the first buffer that is not null, of the struct or its descendants. Follows no pointer that an import would refuse: this
/// stops where the struct is not one of the type.
///
/// # Safety
/// `array` complies with the C data interface: pointers that are not null are valid for what it says.
pub(super) unsafe fn first_address(array: &CArray, data_type: &DataType) -> Option<DevicePtr> {
    let (layout, path) = (Layout::of(data_type), Path::Root("array"));
    if array.is_released() {
        return None;
    }
    // SAFETY: the caller guarantees that the struct complies with the interface.
    let lists = unsafe {
        let buffers = buffers_of(array, data_type, &layout, &path).ok()?;
        (buffers, children_of(array, data_type, &layout, &path).ok())
    };
    let mut fixed = lists.0.iter().take(layout.buffers().len());
    if let Some(found) = fixed.find(|address| !address.is_null()) {
        return Some(DevicePtr::new(found.cast_mut()));
    }
    lists.1?.iter().enumerate().find_map(|(i, &child)| {
        let of_type = child_type(data_type, i)?;
        path.usable("", child).ok()?;
        // SAFETY: the child is usable; the caller guarantees that it is a struct that complies with the interface.
        unsafe { first_address(&*child, of_type) }
    })
}
