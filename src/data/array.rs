//! [`DeviceArray`]: its properties, slices and readiness. See `build` for how one is made.

use std::fmt;
use std::sync::Arc;

use arrow_schema::{DataType, FieldRef};

use crate::data::layout::{Nesting, child_field};
use crate::data::node::{Node, View, owners};
use crate::device::{Device, Queue, SyncEvent};
use crate::error::{Result, bail};
use crate::memory::{DeviceBuffer, Owner, queue_for};

/// An Arrow array of any type in the memory of a device. Immutable; clones and slices share the memory.
///
/// It consists of a type, a length, an offset, a null count, buffers and children, as in the C data interface.
/// Offset and length are in rows; no offset is folded into a pointer. It is not an [`arrow_array::Array`]: that
/// trait reads memory on the host.
///
/// ```
/// use arrow_array::Int32Array;
/// use arrow_device::Devices;
/// let array = Devices::cpu().upload_array(&Int32Array::from(vec![Some(1), None, Some(3)]))?;
/// let tail = array.slice(1, 2)?; // shares the memory
/// assert_eq!((tail.len(), tail.offset(), array.null_count()), (2, 1, Some(1)));
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone)]
pub struct DeviceArray {
    device: Device,
    node: Arc<Node>,
    field: Option<FieldRef>,
}

impl DeviceArray {
    pub(crate) fn from_node(device: Device, node: Arc<Node>) -> Self {
        Self {
            device,
            node,
            field: None,
        }
    }

    /// Returns an array of this node on `device`, with this array's field, which is of the node's type.
    pub(crate) fn like(&self, device: Device, node: Arc<Node>) -> Self {
        Self {
            field: self.field.clone(),
            ..Self::from_node(device, node)
        }
    }

    /// Returns the same array with this field, whose name, nullability and metadata (extension types) are
    /// exported with it.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the field has another type.
    pub fn with_field(self, field: FieldRef) -> Result<Self> {
        if field.data_type() != self.data_type() {
            let (name, of, is) = (field.name(), field.data_type(), self.data_type());
            bail!("field '{name}' is of type {of}, the array of {is}");
        }
        Ok(Self {
            field: Some(field),
            ..self
        })
    }

    /// Returns the device whose memory holds the array.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the array's type.
    pub fn data_type(&self) -> &DataType {
        &self.node().data_type
    }

    /// Returns the array's field, with name, nullability and metadata (extension types), if it came with one.
    pub fn field(&self) -> Option<&FieldRef> {
        self.field.as_ref()
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.node.length
    }

    /// Returns whether the array has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of rows to skip from the start of the buffers.
    pub fn offset(&self) -> usize {
        self.node.offset
    }

    /// Returns the number of nulls in the array's own validity bitmap, or `None` if it is not known yet.
    /// Never reads device memory. A known number was counted, or the caller of an `unsafe` function guaranteed it.
    pub fn null_count(&self) -> Option<usize> {
        self.view().null_count()
    }

    /// Returns the number of buffers, in the order of the C data interface. A view type's buffer of sizes does
    /// not count.
    pub fn num_buffers(&self) -> usize {
        self.node().buffers.len() - usize::from(self.node().layout.variadic)
    }

    /// Returns buffer `i` as it is in memory, not cut to the rows of a slice: row 0 is element
    /// [`offset`](Self::offset) of it. A validity bitmap may start elsewhere; [`validity`](Self::validity) returns
    /// the bitmap of exactly these rows.
    ///
    /// Returns `None` if the array has no such buffer, or if its size is stored in device memory and not known yet
    /// (see [`resolve_sizes`](Self::resolve_sizes)). The text of a slice that was made before its size was known ends at the slice's
    /// last value.
    pub fn buffer(&self, i: usize) -> Option<DeviceBuffer> {
        if i >= self.num_buffers() {
            return None;
        }
        let buffer = &self.node().buffers[i];
        buffer.to_buffer(buffer.bytes()?)
    }

    /// Returns the number of children; a dictionary's values are one.
    pub fn num_children(&self) -> usize {
        self.node().children.len()
    }

    /// Returns child `i`: for structs, sparse unions and fixed-size lists the rows that belong to this array,
    /// otherwise the whole child. What lists and maps refer to is their child 0, in which their
    /// [offsets](Self::offsets_on) count; a dictionary's values are its child 0. Nothing is copied.
    ///
    /// The child keeps only its own memory alive: the allocations in which its buffers lie. Children that were
    /// uploaded together share one allocation; [`compact`](Self::compact) copies a child to one of its own.
    pub fn child(&self, i: usize) -> Option<Self> {
        if i >= self.num_children() {
            return None;
        }
        Some(Self {
            device: self.device.clone(),
            node: self.view().child(i).to_node(),
            field: child_field(self.data_type(), i).cloned(),
        })
    }

    /// Returns `length` rows from row `offset` on, without a copy.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the array does not have these rows.
    pub fn slice(&self, offset: usize, length: usize) -> Result<Self> {
        let rows = self.len();
        if offset.checked_add(length).is_none_or(|end| end > rows) {
            bail!("slice of {length} rows at {offset} of {rows} rows");
        }
        let node = self.view().slice(offset, length).to_node();
        Ok(self.like(self.device.clone(), node))
    }

    /// Returns whether the array's memory may be read now. Never waits.
    ///
    /// # Errors
    /// Returns the errors that the device reports.
    pub fn is_ready(&self) -> Result<bool> {
        Ok(self.pending()?.is_empty())
    }

    /// Blocks this thread until the array's memory may be read.
    ///
    /// # Errors
    /// Returns the errors that the device reports.
    pub fn wait(&self) -> Result<()> {
        self.owners().iter().try_for_each(|owner| owner.wait_host())
    }

    /// Returns an event after which the array's memory may be read, for example for
    /// [`notify`](SyncEvent::notify), or `None` if it may be read now. Several events become one: `queue`, or the device's default
    /// queue, waits for them. Does not block.
    ///
    /// # Errors
    /// Returns the errors that the device reports, and [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a queue of another
    /// device.
    pub fn ready_event<'a>(
        &self,
        queue: impl Into<Option<&'a Queue>>,
    ) -> Result<Option<SyncEvent>> {
        let queue = queue_for(queue.into(), self.device())?;
        let pending = self.pending()?;
        let Some(first) = pending.first() else {
            return Ok(None);
        };
        // One event of this crate serves as it is; a foreign one cannot outlive its memory.
        let event = |owner: &Arc<Owner>| owner.own_event().map(SyncEvent::as_ptr);
        if first.own_event().is_some() && pending.iter().all(|owner| event(owner) == event(first)) {
            return Ok(first.own_event().cloned());
        }
        pending.iter().try_for_each(|owner| owner.wait_on(&queue))?;
        queue.record()
    }

    /// The owners of memory that may not be read yet.
    pub(crate) fn pending(&self) -> Result<Vec<Arc<Owner>>> {
        let mut pending = Vec::new();
        for owner in self.owners() {
            let ready = owner.ready().map(|event| event.is_complete());
            if !ready.unwrap_or(Ok(true))? {
                pending.push(owner);
            }
        }
        Ok(pending)
    }

    /// Returns the bytes of device memory that the array keeps alive, each allocation once. Never reads device memory.
    ///
    /// Memory that this crate allocated counts as a whole with its padding, even if the array is a slice or one of several
    /// columns in it: [`compact`](Self::compact) makes an array that keeps only its rows. Of other memory (imported,
    /// wrapped) the bytes that buffers lie in count, each byte once; a buffer whose size is stored in device memory counts
    /// after [`resolve_sizes`](Self::resolve_sizes) only.
    ///
    /// ```
    /// # #[cfg(all(target_os = "linux", not(miri)))]
    /// # fn main() -> arrow_device::Result<()> {
    /// use arrow_array::Int64Array;
    /// use arrow_device::Devices;
    /// let up = Devices::simulated()?.upload_array(&Int64Array::from(vec![7; 1000]))?;
    /// let slice = up.slice(10, 100)?;
    /// assert_eq!(slice.get_array_memory_size(), 8000);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(all(target_os = "linux", not(miri))))]
    /// # fn main() {}
    /// ```
    pub fn get_array_memory_size(&self) -> usize {
        let mut total = (self.owners().iter().filter_map(|owner| owner.allocated())).sum();
        // The addresses of buffers that are not in memory of this crate.
        let buffers = (self.node.all().into_iter()).flat_map(|node| &node.buffers);
        let foreign = buffers.filter(|buffer| {
            let owner = buffer.owner.as_ref();
            owner.is_some_and(|owner| owner.allocated().is_none())
        });
        let ranges = foreign.map(|buffer| buffer.address().range(buffer.bytes().unwrap_or(0)));
        let mut ranges: Vec<_> = ranges.collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let mut counted = 0;
        for range in ranges {
            total += range.end.saturating_sub(range.start.max(counted));
            counted = range.end.max(counted);
        }
        total
    }

    /// The owners of the array's buffers and of its descendants', each once.
    pub(crate) fn owners(&self) -> Vec<Arc<Owner>> {
        owners([self.node()], |_| true)
    }

    pub(crate) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    pub(crate) fn view(&self) -> View<'_> {
        View::whole(&self.node)
    }
}

/// The path of a node in the array that has it, for errors.
#[cold]
pub(crate) fn path(arrays: &[&DeviceArray], to: &Node) -> String {
    fn below(node: &Node, to: &Node) -> Option<String> {
        if std::ptr::eq(node, to) {
            return Some(String::new());
        }
        let mut children = node.children.iter().enumerate();
        let (i, rest) = children.find_map(|(i, child)| Some((i, below(child, to)?)))?;
        Some(match node.layout.nesting {
            Nesting::Dictionary => format!(".dictionary{rest}"),
            _ => format!(".children[{i}]{rest}"),
        })
    }
    let mut paths = arrays.iter().filter_map(|array| below(array.node(), to));
    format!("array{}", paths.next().unwrap_or_default())
}

impl fmt::Debug for DeviceArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceArray")
            .field("device", &self.device().id())
            .field("data_type", self.data_type())
            .field("len", &self.len())
            .field("offset", &self.offset())
            .field("null_count", &self.null_count())
            .finish_non_exhaustive()
    }
}
