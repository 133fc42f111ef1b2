//! [`DeviceArray`].

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use arrow_schema::{DataType, FieldRef};

use crate::data::build::{Builder, root_node};
use crate::data::layout::{BufferKind, Layout, Nesting, check_rows, check_type};
use crate::data::tree::{Node, NullCount, Tree, View};
use crate::data::validity::Validity;
use crate::device::{Device, SyncEvent};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, Owner};

/// An Arrow array of any type in the memory of a device: type, length, offset, null count, buffers,
/// children. Immutable; clones and slices share the memory.
///
/// Offset and length are in rows and stay as the C interface has them; no offset is folded into a
/// pointer. It is not an [`arrow_array::Array`]: that trait reads memory on the host.
#[derive(Clone)]
pub struct DeviceArray {
    tree: Arc<Tree>,
    view: View,
    nulls: NullCount,
    field: Option<FieldRef>,
}

impl DeviceArray {
    pub(crate) fn from_tree(tree: Arc<Tree>) -> Self {
        let view = tree.whole(0);
        Self::from_view(tree, view)
    }

    pub(crate) fn from_view(tree: Arc<Tree>, view: View) -> Self {
        let nulls = NullCount::from(tree.null_count(view));
        let field = tree.field(view.node).cloned();
        Self {
            tree,
            view,
            nulls,
            field,
        }
    }

    /// The same array under this field: its name, nullability and metadata (extension types) go
    /// along with exports.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the field is of another type.
    pub fn with_field(self, field: FieldRef) -> Result<Self> {
        if field.data_type() != self.data_type() {
            return Err(Error::argument(format!(
                "field '{}' is of type {}, the array of {}",
                field.name(),
                field.data_type(),
                self.data_type()
            )));
        }
        Ok(Self {
            field: Some(field),
            ..self
        })
    }

    /// An array of a type whose every bit pattern is a value (integers, floats, decimals, dates,
    /// times, intervals, booleans, fixed-size binary) from its buffers, at offset 0.
    ///
    /// `validity` says which rows are null, `None` that none is: for the nulls of an input pass its
    /// [`validity`](Self::validity), or use [`with_values`](Self::with_values). How many are null is known
    /// only if the validity knows it; otherwise it is counted by what needs the number.
    ///
    /// Nothing is copied. An export may have to copy the bitmap if it starts within a byte: see
    /// [`export`](Self::export).
    ///
    /// ```
    /// use arrow_buffer::Buffer;
    /// use arrow_device::{DeviceArray, DeviceBuffer};
    /// use arrow_schema::DataType;
    /// let values = DeviceBuffer::from(Buffer::from_vec(vec![1i32, 2, 3]));
    /// let array = DeviceArray::from_values(DataType::Int32, 3, values, None)?;
    /// assert_eq!(array.to_host()?.len(), 3);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another type, a validity of another number of rows, values that are too
    /// short, and buffers of two devices.
    pub fn from_values(
        data_type: DataType,
        length: usize,
        values: DeviceBuffer,
        validity: Option<Validity>,
    ) -> Result<Self> {
        let layout = Layout::of(&data_type);
        let plain = layout.nesting == Nesting::Leaf && !layout.variadic;
        if !plain || layout.buffers().len() != 2 {
            return Err(Error::argument(format!(
                "{data_type} has other buffers than values; use DeviceArray::from_parts"
            )));
        }
        let (bitmap, bit_offset, nulls) = match validity {
            Some(validity) if validity.len() != length => {
                return Err(Error::argument(format!(
                    "{data_type}: a validity of {} rows for {length} rows",
                    validity.len()
                )));
            }
            Some(validity) => {
                let (buffer, bit_offset, nulls) = validity.into_parts();
                (Some(buffer), bit_offset, nulls)
            }
            None => (None, 0, Some(0)),
        };
        let buffers = [bitmap, Some(values)];
        // SAFETY: every bit pattern is a value of these types. A null count that is known is that of an array
        // with these rows of the bitmap, which counted it or was vouched for.
        unsafe { Self::assemble(data_type, length, nulls, bit_offset, &buffers, &[]) }
    }

    /// An array of any type from buffers, in the order of the C data interface, and children (a
    /// dictionary's values are its child), at offset 0: a validity bitmap starts at bit 0 of its buffer. For
    /// view types, `buffers` are bitmap, views and all out-of-line buffers. A buffer of no bytes may be `None`.
    ///
    /// `nulls` is the number of rows that the bitmap says are null, or `None` if it is not known. It is not
    /// checked but against the number of rows: exports state it, and arrow-rs relies on it.
    ///
    /// # Safety
    /// - The values must be valid for the type once the buffers are ready: offsets ascend and lie
    ///   inside, text is UTF-8, keys, type ids, views and run ends point to something. Sizes that the
    ///   type tells are checked.
    /// - `nulls`, if it is given, is the number of unset bits among the first `length` of the bitmap.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if counts, lengths, types or devices do not fit.
    pub unsafe fn from_parts(
        data_type: DataType,
        length: usize,
        nulls: Option<usize>,
        buffers: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        // SAFETY: the caller guarantees values and null count (see `# Safety`); the bitmap starts at bit 0.
        unsafe { Self::assemble(data_type, length, nulls, 0, buffers, children) }
    }

    /// As [`from_parts`](Self::from_parts), for a validity bitmap that starts at bit `bit_offset` of its
    /// buffer.
    ///
    /// # Safety
    /// As [`from_parts`](Self::from_parts), for the bits from `bit_offset` on.
    unsafe fn assemble(
        data_type: DataType,
        length: usize,
        nulls: Option<usize>,
        bit_offset: usize,
        buffers: &[Option<DeviceBuffer>],
        children: &[DeviceArray],
    ) -> Result<Self> {
        check_type(&data_type)?;
        check_rows(length)?;
        let layout = Layout::of(&data_type);
        let wrong = |what: String| Err(Error::argument(format!("{data_type}: {what}")));
        let kinds = layout.buffers();
        let fits = if layout.variadic {
            buffers.len() >= kinds.len()
        } else {
            buffers.len() == kinds.len()
        };
        if !fits || children.len() != layout.n_children() {
            return wrong(format!(
                "{} buffers and {} children given, {} and {} needed",
                buffers.len(),
                children.len(),
                kinds.len(),
                layout.n_children()
            ));
        }
        let device = buffers.iter().flatten().map(DeviceBuffer::device);
        let device = device
            .chain(children.iter().map(DeviceArray::device))
            .next();
        let Some(device) = device.cloned() else {
            return wrong("no buffer tells the device".into());
        };
        let mut builder = Builder::new(device);
        for (kind, buffer) in kinds.iter().zip(buffers) {
            let is_mask = *kind == BufferKind::Validity;
            let rows = if is_mask {
                bit_offset.saturating_add(length)
            } else {
                length
            };
            let needed = match (kind.bytes(rows), buffer) {
                (_, None) if is_mask => 0,
                (Some(bytes), _) if length > 0 => bytes?,
                _ => 0,
            };
            let there = buffer.as_ref().map_or(0, DeviceBuffer::len);
            if there < needed {
                return wrong(format!(
                    "a buffer has {there} bytes where {length} rows need {needed}"
                ));
            }
        }
        let has_mask = layout.has_validity() && buffers[0].is_some();
        match nulls {
            Some(n) if n > length || (n > 0 && !has_mask && data_type != DataType::Null) => {
                return wrong(format!("{n} nulls in {length} rows"));
            }
            _ => {}
        }
        for (i, child) in children.iter().enumerate() {
            let expected = crate::data::layout::child_type(&data_type, i);
            if expected != Some(child.data_type()) {
                return wrong(format!("child {i} is of type {}", child.data_type()));
            }
            let needed = match layout.nesting {
                Nesting::RowByRow => length,
                Nesting::Times(n) => length
                    .checked_mul(n as usize)
                    .ok_or_else(|| Error::argument("too many rows"))?,
                _ => 0,
            };
            if child.len() < needed {
                return wrong(format!(
                    "child {i} has {} rows, {needed} needed",
                    child.len()
                ));
            }
        }
        for buffer in buffers {
            builder.buffer(buffer.as_ref())?;
        }
        if layout.variadic {
            builder.buffer(None)?;
        }
        let n_slots = builder.slots.len();
        builder.nodes.push(Node {
            validity_offset: bit_offset,
            ..root_node(layout, length, n_slots, NullCount::from(nulls))
        });
        builder.children(0, children)?;
        Ok(Self::from_tree(Arc::new(builder.finish(data_type))))
    }

    /// The device whose memory the array is in.
    pub fn device(&self) -> &Device {
        &self.tree.device
    }

    /// The array's type.
    pub fn data_type(&self) -> &DataType {
        self.tree.data_type(self.view.node)
    }

    /// Name, nullability and metadata (extension types), where the array came with them.
    pub fn field(&self) -> Option<&FieldRef> {
        self.field.as_ref()
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        self.view.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.view.length == 0
    }

    /// Rows to skip from the start of the buffers.
    pub fn offset(&self) -> usize {
        self.view.offset
    }

    /// Returns the number of nulls in the array's own validity bitmap, or `None` if it is not known yet.
    /// Never reads device memory. A number that is known was counted, or an `unsafe` import vouched for it.
    pub fn null_count(&self) -> Option<usize> {
        // Others may have counted the same rows.
        let counted = || self.tree.null_count(self.view);
        self.nulls.get().or_else(counted)
    }

    /// How many buffers there are, in the order of the C data interface, without a view type's
    /// buffer of lengths.
    pub fn num_buffers(&self) -> usize {
        let slots = self.tree.slots(self.view.node).len();
        slots - usize::from(self.tree.layout(self.view.node).variadic)
    }

    /// Buffer `i` as the array has it in memory, which is not cut to the rows of a slice: row 0 is at
    /// [`offset`](Self::offset), and in a validity bitmap maybe elsewhere; [`validity`](Self::validity) has the
    /// bitmap of exactly these rows. `None` if the buffer is not there, or while its length is known on the
    /// device only.
    pub fn buffer(&self, i: usize) -> Option<DeviceBuffer> {
        if i >= self.num_buffers() {
            return None;
        }
        let slot = &self.tree.slots(self.view.node)[i];
        if slot.is_null() {
            return None;
        }
        let owner = self.tree.owner(slot).clone();
        Some(DeviceBuffer::from_parts(
            owner,
            slot.base,
            slot.offset,
            slot.bytes()?,
        ))
    }

    /// How many children; a dictionary's values are one.
    pub fn num_children(&self) -> usize {
        self.tree.nodes[self.view.node].n_children as usize
    }

    /// Child `i`: of structs, sparse unions and fixed-size lists the rows that belong to this array,
    /// else the whole child.
    pub fn child(&self, i: usize) -> Option<Self> {
        (i < self.num_children())
            .then(|| Self::from_view(self.tree.clone(), self.tree.child(self.view, i)))
    }

    /// A dictionary's values.
    pub fn dictionary(&self) -> Option<Self> {
        match self.data_type() {
            DataType::Dictionary(_, _) => self.child(0),
            _ => None,
        }
    }

    /// `length` rows from `offset`, without a copy.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they do not lie inside.
    pub fn slice(&self, offset: usize, length: usize) -> Result<Self> {
        if offset
            .checked_add(length)
            .is_none_or(|end| end > self.len())
        {
            return Err(Error::argument(format!(
                "slice of {length} rows at {offset} of {} rows",
                self.len()
            )));
        }
        let view = View {
            node: self.view.node,
            offset: self.view.offset + offset,
            length,
            validity_offset: self.view.validity_offset + offset,
        };
        let whole = length == self.len();
        let nulls = match self.null_count() {
            Some(n) if n == 0 || whole => Some(n),
            Some(n) if n == self.len() => Some(length),
            _ => self.tree.null_count(view),
        };
        Ok(Self {
            tree: self.tree.clone(),
            view,
            nulls: NullCount::from(nulls),
            field: self.field.clone(),
        })
    }

    /// Whether the array's memory may be read now. Never waits.
    pub fn is_ready(&self) -> Result<bool> {
        for owner in self.owners().iter() {
            if let Some(event) = owner.ready() {
                if !event.is_complete()? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Makes this thread wait until the array's memory may be read.
    pub fn wait(&self) -> Result<()> {
        self.owners().iter().try_for_each(|owner| owner.wait_host())
    }

    /// An event after which the array's memory may be read, to be [notified](SyncEvent::notify) of;
    /// `None` if it may be now. Several events become one: the default queue waits for them.
    pub fn ready_event(&self) -> Result<Option<SyncEvent>> {
        let mut one: Option<SyncEvent> = None;
        let mut queue = None;
        for owner in self.owners().iter() {
            let Some(event) = owner.ready() else { continue };
            if event.is_complete()? {
                continue;
            }
            match (owner.own_event(), &one) {
                (Some(own), None) if queue.is_none() => one = Some(own.clone()),
                (Some(own), Some(seen)) if own.as_ptr() == seen.as_ptr() => {}
                _ => {
                    let queue = queue.get_or_insert_with(|| self.device().default_queue());
                    owner.wait_on(queue)?;
                }
            }
        }
        match (queue, one) {
            (Some(queue), one) => {
                if let Some(event) = one {
                    queue.wait(&event)?;
                }
                queue.record()
            }
            (None, one) => Ok(one),
        }
    }

    /// The owners of this array's own buffers and its descendants'.
    pub(crate) fn owners(&self) -> Cow<'_, [Arc<Owner>]> {
        let all = self.tree.owners.as_slice();
        if self.view.node == 0 || all.len() == 1 {
            return Cow::Borrowed(all);
        }
        let mut used = vec![false; all.len()];
        self.tree.mark_owners(self.view.node, &mut used);
        let used = all.iter().zip(used).filter(|(_, used)| *used);
        Cow::Owned(used.map(|(owner, _)| owner.clone()).collect())
    }

    pub(crate) fn tree(&self) -> &Arc<Tree> {
        &self.tree
    }

    pub(crate) fn view(&self) -> View {
        self.view
    }

    /// Keeps the number of nulls that were counted in this array's bitmap.
    pub(crate) fn set_null_count(&self, nulls: usize) {
        self.nulls.set(nulls);
        self.tree.keep_null_count(self.view, nulls);
    }
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
