//! The walk that checks a foreign array and its descendants, and makes their nodes.

use std::ffi::c_void;
use std::sync::Arc;

use arrow_schema::DataType;

use crate::abi::c_data::CArray;
use crate::data::layout::{BufferKind, Layout, Nesting, child_type};
use crate::data::node::{Buffers, Node, NodeBuffer, NullCount};
use crate::device::{AddressClass, Device, DevicePtr, PointerInfo};
use crate::error::Result;
use crate::interchange::path::{Path, usable};
use crate::memory::Owner;

pub(super) struct Importer<'a> {
    pub(super) device: &'a Device,
    /// Keeps the struct.
    pub(super) owner: &'a Arc<Owner>,
    /// The backend's last answer: addresses of one class.
    pub(super) known: Option<PointerInfo>,
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
        path.check(length >= rows_needed, "length", || {
            format!("is {length}, but its parent needs {rows_needed} rows")
        })?;
        let null_count = array.null_count;
        path.check(
            (-1..=array.length).contains(&null_count),
            "null_count",
            || format!("is {null_count} for {length} rows"),
        )?;
        // SAFETY: the caller guarantees that the struct complies with the interface.
        let pointers = unsafe { buffers_of(array, data_type, layout, path) }?;
        self.buffers += pointers.len();
        path.check(self.buffers <= MAX_BUFFERS as usize, "n_buffers", || {
            format!("is {}, and all structs have more than 2^22", pointers.len())
        })?;
        let has_bitmap = layout.has_validity() && !pointers[0].is_null();
        path.check(
            null_count <= 0 || has_bitmap || layout.is_null_type(),
            "null_count",
            || format!("is {null_count}, but there is no validity bitmap"),
        )?;
        let mut buffers = Buffers::with_capacity(pointers.len());
        for (i, (kind, &address)) in layout.buffers().iter().zip(pointers).enumerate() {
            let address = DevicePtr::new(address.cast_mut());
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
            self.variadic(pointers, layout.buffers().len(), path, &mut buffers)?;
        }
        // SAFETY: the caller guarantees that the struct and its descendants comply with the interface.
        let children = unsafe { self.children(array, data_type, layout, (rows, length), path) }?;
        // Without rows there need not be any before them either.
        let offset = if length == 0 { 0 } else { offset };
        let nulls = match null_count {
            _ if layout.is_null_type() => Some(length),
            _ if !has_bitmap || length == 0 => Some(0),
            n => usize::try_from(n).ok(),
        };
        Ok(Arc::new(Node {
            offset,
            validity_offset: offset,
            nulls: NullCount::from(nulls),
            ..Node::new(data_type.clone(), length, buffers, children)
        }))
    }

    /// Checks and adds the data buffers of a view array, and the buffer of their sizes, the last of `pointers`.
    fn variadic(
        &mut self,
        pointers: &[*const c_void],
        fixed: usize,
        path: &Path<'_>,
        buffers: &mut Buffers,
    ) -> Result<()> {
        let last = pointers.len() - 1;
        let buffer = |i: usize| DevicePtr::new(pointers[i].cast_mut());
        // The size of a data buffer is looked up even if the buffer is null.
        let data = (fixed..last).map(|i| NodeBuffer::new(self.owner, buffer(i), 0, None));
        buffers.extend(data);
        let (sizes, bytes) = (buffer(last), (last - fixed) * 8);
        if bytes > 0 && sizes.is_null() {
            return path.error(
                &format!("buffers[{last}]"),
                "is null: the lengths of the variadic buffers are missing",
            );
        }
        // The sizes may be in host memory, whatever the device.
        if bytes > 0 && self.classify(sizes, bytes).class != AddressClass::Host {
            self.accessible(sizes, bytes, last, path)?;
        }
        let bytes = if sizes.is_null() { 0 } else { bytes };
        buffers.push(NodeBuffer::new(self.owner, sizes, 0, Some(bytes)));
        Ok(())
    }

    /// Checks the children or the dictionary of an array, of which `rows` rows of the buffers and `length` rows of its own count.
    ///
    /// # Safety
    /// As [`node`](Self::node).
    unsafe fn children(
        &mut self,
        array: &CArray,
        data_type: &DataType,
        layout: Layout,
        (rows, length): (usize, usize),
        path: &Path<'_>,
    ) -> Result<Vec<Arc<Node>>> {
        let is_dictionary = layout.nesting == Nesting::Dictionary;
        let n_children = if is_dictionary {
            0
        } else {
            layout.n_children()
        };
        path.check(array.n_children == n_children as i64, "n_children", || {
            format!("is {}, {data_type} has {n_children}", array.n_children)
        })?;
        if is_dictionary {
            let values = child_type(data_type, 0).unwrap_or(&DataType::Null);
            path.usable("dictionary", array.dictionary)?;
            // SAFETY: the dictionary is usable; the caller guarantees that it is a struct that complies with the interface.
            let dictionary = unsafe { &*array.dictionary };
            // SAFETY: the caller guarantees that the dictionary and its descendants comply with the interface, which `node` asks for.
            let values = unsafe { self.node(dictionary, values, 0, &Path::Dictionary(path)) }?;
            return Ok(vec![values]);
        }
        path.check(array.dictionary.is_null(), "dictionary", || {
            format!("is there, but the type is {data_type}")
        })?;
        if n_children > 0 {
            path.usable("children", array.children)?;
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
        let mut children = Vec::with_capacity(n_children);
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
                path.check(child.null_count <= 0, "null_count", || {
                    "run ends cannot be null".into()
                })?;
                // Each run needs a value.
                needed = child.length as usize;
            }
        }
        Ok(children)
    }

    fn classify(&mut self, address: DevicePtr, bytes: usize) -> &PointerInfo {
        let wanted = address.range(bytes);
        let covers = |known: &PointerInfo| {
            known.range.start <= wanted.start && wanted.end <= known.range.end
        };
        let known = self.known.take().filter(covers);
        self.known
            .insert(known.unwrap_or_else(|| self.device.backend().classify(address, bytes)))
    }

    fn accessible(
        &mut self,
        address: DevicePtr,
        bytes: usize,
        buffer: usize,
        path: &Path<'_>,
    ) -> Result<()> {
        match self.classify(address, bytes).check() {
            Ok(()) => Ok(()),
            Err(why) => path.error(
                &format!("buffers[{buffer}]"),
                format!(
                    "{bytes} bytes at {address:?} are not memory that {} can use{why}",
                    self.device
                ),
            ),
        }
    }
}

/// The most buffers that an array and its descendants may have.
const MAX_BUFFERS: i64 = 1 << 22;

/// Whether a struct of the layout may have so many buffers.
fn n_buffers_fit(layout: Layout, n_buffers: i64) -> bool {
    let fixed = layout.buffers().len() as i64;
    match layout.variadic {
        true => (fixed + 1..=MAX_BUFFERS).contains(&n_buffers),
        // polars gives a null array the pointer of a validity bitmap, which is null.
        false if layout.is_null_type() => (0..=1).contains(&n_buffers),
        false => n_buffers == fixed,
    }
}

/// The pointers of the buffers that an array of the layout has.
///
/// # Safety
/// `array` complies with the C data interface.
unsafe fn buffers_of<'a>(
    array: &'a CArray,
    data_type: &DataType,
    layout: Layout,
    path: &Path<'_>,
) -> Result<&'a [*const c_void]> {
    let n = array.n_buffers;
    path.check(n_buffers_fit(layout, n), "n_buffers", || {
        let expected = layout.buffers().len() + usize::from(layout.variadic);
        format!("is {n}, {data_type} has {expected}")
    })?;
    if n == 0 {
        return Ok(&[]);
    }
    path.usable("buffers", array.buffers)?;
    // SAFETY: `buffers` is usable and, as the caller guarantees, has `n_buffers` pointers, which is neither negative nor too many.
    let pointers = unsafe { std::slice::from_raw_parts(array.buffers, n as usize) };
    if layout.is_null_type() {
        path.check(pointers[0].is_null(), "buffers[0]", || {
            "is not null, but a null array has no buffers".into()
        })?;
        return Ok(&[]);
    }
    Ok(pointers)
}

/// Returns the first buffer that is not null, of the struct or its descendants. Follows no pointer that an import would refuse: this
/// stops where the struct is not one of the type.
///
/// # Safety
/// `array` complies with the C data interface: pointers that are not null are valid for what it says.
pub(super) unsafe fn first_address(array: &CArray, data_type: &DataType) -> Option<DevicePtr> {
    let layout = Layout::of(data_type);
    if array.is_released() {
        return None;
    }
    // SAFETY: the caller guarantees that the struct complies with the interface.
    let pointers = unsafe { buffers_of(array, data_type, layout, &Path::Root("array")) }.ok()?;
    let mut fixed = pointers.iter().take(layout.buffers().len());
    if let Some(found) = fixed.find(|address| !address.is_null()) {
        return Some(DevicePtr::new(found.cast_mut()));
    }
    let n_children = layout.n_children();
    let children = match layout.nesting {
        Nesting::Dictionary => &[array.dictionary][..],
        _ if n_children == 0 || array.n_children != n_children as i64 => &[],
        _ if !usable(array.children) => &[],
        // SAFETY: the list is usable and, as the caller guarantees, has `n_children` pointers.
        _ => unsafe { std::slice::from_raw_parts(array.children, n_children) },
    };
    children.iter().enumerate().find_map(|(i, &child)| {
        let of_type = child_type(data_type, i).filter(|_| usable(child))?;
        // SAFETY: the child is usable; the caller guarantees that it is a struct that complies with the interface.
        unsafe { first_address(&*child, of_type) }
    })
}
