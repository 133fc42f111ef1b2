//! The one block of memory behind an exported array: structs, pointer lists, owners, event.
//!
//! Every node of the array has a release callback of its own. A node lets go of the owners of its own
//! buffers when it is released; the block and the event go with the last node. So a consumer may move
//! children out of their parent and release everything in any order, on any thread.
//!
//! Layout: [`Header`], owners, nodes, child structs, pointer lists, owner indices, lengths of variadic
//! buffers.

use std::alloc::{self, Layout as Memory};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow_buffer::{BooleanBuffer, BooleanBufferBuilder, Buffer};

use crate::abi::c_data::CArray;
use crate::abi::guard;
use crate::data::DeviceArray;
use crate::data::hidden::part;
use crate::data::layout::Nesting;
use crate::data::tree::{Slot, Tree, View};
use crate::device::{Counters, SyncEvent};
use crate::error::{Error, Result};
use crate::interchange::export::ReleasePolicy;
use crate::memory::{HostSlab, Owner};

/// Start of the block.
struct Header {
    /// Nodes not yet released.
    nodes: AtomicUsize,
    memory: Memory,
    policy: ReleasePolicy,
    /// Keeps the event in `sync_event`.
    event: Option<EventKeeper>,
    /// Masks that were repacked because theirs start at another bit than the values.
    _masks: Vec<Buffer>,
    /// Lengths of variadic buffers, where the device needs them in memory of its own choosing.
    _sizes: Option<HostSlab>,
}

/// What keeps an exported event alive.
pub(crate) enum EventKeeper {
    /// It is of this crate's making.
    Own(#[allow(dead_code)] SyncEvent),
    /// It is part of what this owner holds.
    Owner(Arc<Owner>),
}

struct OwnerEntry {
    owner: ManuallyDrop<Arc<Owner>>,
    /// Entries of unreleased nodes that name this owner.
    uses: AtomicUsize,
}

/// A node's `private_data`.
struct NodeData {
    header: *mut Header,
    owners: *mut OwnerEntry,
    /// Indices into `owners`.
    used: *const u32,
    n_used: u32,
}

/// How many of what the block holds.
#[derive(Default)]
struct Size {
    nodes: usize,
    buffers: usize,
    children: usize,
    /// Lengths of variadic buffers.
    sizes: usize,
    /// Whether this export states any of them itself.
    states_sizes: bool,
}

impl Size {
    fn add(&mut self, tree: &Tree, node: usize) {
        let n = &tree.nodes[node];
        let layout = tree.layout(node);
        self.nodes += 1;
        self.buffers += n.n_slots as usize;
        if layout.nesting != Nesting::Dictionary {
            self.children += n.n_children as usize;
        }
        if layout.variadic {
            // Room whether they are known or not: another thread may find them out meanwhile. One
            // more, so that the list is there even if it is empty.
            self.sizes += tree.slots(node).len() - 2;
            self.states_sizes |= states_sizes(tree.slots(node));
        }
        for i in 0..n.n_children {
            self.add(tree, (n.first_child + i) as usize);
        }
    }
}

/// Whether the lengths of a view array's variadic buffers are known; else the producer's own list of
/// them is handed on.
fn states_sizes(slots: &[Slot]) -> bool {
    slots[2..slots.len() - 1]
        .iter()
        .all(|s| s.bytes().is_some())
}

/// Builds the C struct of an array. `nulls`: the counts of [`crate::data::hidden::parts`], where some
/// are unknown.
pub(crate) fn build(
    array: &DeviceArray,
    as_batch: bool,
    nulls: Option<&[usize]>,
    event: Option<EventKeeper>,
    policy: ReleasePolicy,
) -> Result<CArray> {
    let tree = array.tree();
    let mut size = Size::default();
    size.add(tree, array.view().node);
    let owners = tree.owners.as_slice();
    let device = array.device();

    let too_large = || Error::argument("the array has too many children to export");
    let extend = |memory: Memory, part: Result<Memory, _>| {
        let part: Memory = part.map_err(|_: std::alloc::LayoutError| too_large())?;
        memory.extend(part).map_err(|_| too_large())
    };
    let (memory, at_owners) = extend(
        Memory::new::<Header>(),
        Memory::array::<OwnerEntry>(owners.len()),
    )?;
    let (memory, at_nodes) = extend(memory, Memory::array::<NodeData>(size.nodes))?;
    let (memory, at_structs) = extend(memory, Memory::array::<CArray>(size.nodes))?;
    let (memory, at_buffers) = extend(memory, Memory::array::<*const c_void>(size.buffers))?;
    let (memory, at_children) = extend(memory, Memory::array::<*mut CArray>(size.children))?;
    let (memory, at_sizes) = extend(memory, Memory::array::<i64>(size.sizes))?;
    let (memory, at_used) = extend(memory, Memory::array::<u32>(size.buffers + 1))?;

    // A device whose memory the host cannot read gets the lengths where it reads host memory best.
    let mut slab = None;
    if size.states_sizes && !device.is_host_readable() {
        slab = Some(device.host_slab(size.sizes * 8)?);
    }
    let masks = repacked_masks(array, as_batch, nulls)?;
    // SAFETY: the layout has the size of `Header` at least.
    let block = NonNull::new(unsafe { alloc::alloc(memory) }).ok_or(Error::OutOfMemory {
        device: device.id(),
        operation: "export",
        bytes: memory.size(),
    })?;
    let base = block.as_ptr();
    // SAFETY: here and in `Writer`, all parts lie in the block at offsets that `extend` gave, with
    // the alignment and the number of elements that were counted; each element is written before it
    // is read. Everything is reached by raw pointers from `base`.
    let mut writer = unsafe {
        let header = base.cast::<Header>();
        let sizes = match &slab {
            Some(slab) => slab.as_device_ptr().as_ptr().cast::<i64>(),
            None => base.add(at_sizes).cast(),
        };
        let masks_list = masks.iter().map(|(_, mask)| mask.clone()).collect();
        header.write(Header {
            nodes: AtomicUsize::new(size.nodes),
            memory,
            policy,
            event,
            _masks: masks_list,
            _sizes: slab,
        });
        let entries = base.add(at_owners).cast::<OwnerEntry>();
        for (i, owner) in owners.iter().enumerate() {
            entries.add(i).write(OwnerEntry {
                owner: ManuallyDrop::new(owner.clone()),
                uses: AtomicUsize::new(0),
            });
        }
        Writer {
            tree,
            header,
            owners: entries,
            nodes: base.add(at_nodes).cast(),
            structs: base.add(at_structs).cast(),
            buffers: base.add(at_buffers).cast(),
            children: base.add(at_children).cast(),
            sizes,
            states_sizes: size.states_sizes,
            used: base.add(at_used).cast(),
            next: 1,
        }
    };
    let mut views = Vec::new();
    if as_batch || size.nodes > 1 {
        views.reserve_exact(size.nodes);
    }
    views.push(array.view());
    let mut masks = masks.iter().peekable();
    let mut i = 0;
    while i < views.len() {
        let view = views[i];
        let batch_root = as_batch && i == 0;
        let known = match i {
            0 => array.null_count(),
            _ => tree.null_count(view),
        };
        let null_count = match nulls {
            Some(counts) => counts[i] as i64,
            None => known.map_or(-1, |n| n as i64),
        };
        let mask = masks.next_if(|(node, _)| *node == i).map(|(_, mask)| mask);
        // SAFETY: `i` counts the nodes in the order in which they were counted.
        unsafe { writer.node(i, view, null_count, mask, batch_root) };
        for child in 0..tree.nodes[view.node].n_children as usize {
            views.push(part(tree, view, child, batch_root));
        }
        i += 1;
    }
    // Owners that no buffer lies in (arrays without buffers) go at once.
    for k in 0..owners.len() {
        // SAFETY: entry `k` was written above; nobody else has the block yet.
        unsafe {
            let entry = writer.owners.add(k);
            if *(*entry).uses.get_mut() == 0 {
                ManuallyDrop::drop(&mut (*entry).owner);
            }
        }
    }
    // SAFETY: node 0 was written, and is moved out once: the block never looks at it again.
    Ok(unsafe { writer.structs.read() })
}

struct Writer<'a> {
    tree: &'a Tree,
    header: *mut Header,
    owners: *mut OwnerEntry,
    nodes: *mut NodeData,
    structs: *mut CArray,
    buffers: *mut *const c_void,
    children: *mut *mut CArray,
    sizes: *mut i64,
    /// Whether there is memory at `sizes`.
    states_sizes: bool,
    used: *mut u32,
    /// The next free struct.
    next: usize,
}

impl Writer<'_> {
    /// Writes node `i`.
    ///
    /// # Safety
    /// Nodes are written in order, each once, and are those that were counted.
    unsafe fn node(
        &mut self,
        i: usize,
        view: View,
        null_count: i64,
        mask: Option<&Buffer>,
        batch_root: bool,
    ) {
        let tree = self.tree;
        let layout = tree.layout(view.node);
        let slots = tree.slots(view.node);
        let n_children = tree.nodes[view.node].n_children as usize;
        // SAFETY: see `build`.
        unsafe {
            let buffers = self.buffers;
            let used = self.used;
            let mut n_used = 0;
            for (k, slot) in slots.iter().enumerate() {
                let is_mask = k == 0 && layout.has_validity();
                let address = match mask {
                    _ if is_mask && (batch_root || null_count == 0) => ptr::null(),
                    Some(mask) if is_mask => mask.as_ptr().cast::<c_void>(),
                    _ => slot.address().as_ptr().cast_const(),
                };
                buffers.add(k).write(address);
                let foreign =
                    !slot.is_null() && (n_used == 0 || *used.add(n_used - 1) != slot.owner);
                if foreign && !address.is_null() {
                    used.add(n_used).write(slot.owner);
                    n_used += 1;
                    *(*self.owners.add(slot.owner as usize)).uses.get_mut() += 1;
                }
            }
            self.buffers = buffers.add(slots.len());
            self.used = used.add(n_used);
            if layout.variadic && self.states_sizes && states_sizes(slots) {
                let variadic = &slots[2..slots.len() - 1];
                for (k, slot) in variadic.iter().enumerate() {
                    self.sizes
                        .add(k)
                        .write(slot.bytes().map_or(0, |n| n as i64));
                }
                buffers.add(slots.len() - 1).write(self.sizes.cast());
                self.sizes = self.sizes.add(variadic.len() + 1);
            }
            let data = self.nodes.add(i);
            data.write(NodeData {
                header: self.header,
                owners: self.owners,
                used,
                n_used: n_used as u32,
            });
            let first = self.structs.add(self.next);
            self.next += n_children;
            let dictionary = layout.nesting == Nesting::Dictionary;
            let children = self.children;
            if !dictionary {
                for k in 0..n_children {
                    children.add(k).write(first.add(k));
                }
                self.children = children.add(n_children);
            }
            let listed = if dictionary { 0 } else { n_children };
            self.structs.add(i).write(CArray {
                length: view.length as i64,
                null_count: if batch_root { 0 } else { null_count },
                // Without rows an offset means nothing, but consumers add it to buffers of no bytes.
                offset: if batch_root || view.length == 0 {
                    0
                } else {
                    view.offset as i64
                },
                n_buffers: slots.len() as i64,
                n_children: listed as i64,
                buffers: if slots.is_empty() {
                    ptr::null_mut()
                } else {
                    buffers
                },
                children: if listed == 0 {
                    ptr::null_mut()
                } else {
                    children
                },
                dictionary: if dictionary { first } else { ptr::null_mut() },
                release: Some(release),
                private_data: data.cast(),
            });
        }
    }
}

/// Masks that start at another bit than the values do: only arrow-rs arrays in host memory have
/// them. Repacked to the values' offset, with the index of their node.
fn repacked_masks(
    array: &DeviceArray,
    as_batch: bool,
    nulls: Option<&[usize]>,
) -> Result<Vec<(usize, Buffer)>> {
    let mut masks = Vec::new();
    let tree = array.tree();
    let differs = tree.nodes.iter().any(|n| n.offset != n.validity_offset);
    if !array.device().is_host_readable()
        || !(differs || array.view().offset != array.view().validity_offset)
    {
        return Ok(masks);
    }
    let views = crate::data::hidden::parts(array, as_batch);
    for (i, view) in views.iter().enumerate() {
        let slots = tree.slots(view.node);
        let masked =
            tree.layout(view.node).has_validity() && !slots[0].is_null() && !(as_batch && i == 0);
        let no_nulls = match nulls {
            Some(counts) => counts[i] == 0,
            None => tree.null_count(*view) == Some(0),
        };
        if !masked || no_nulls || view.offset == view.validity_offset || view.length == 0 {
            continue;
        }
        array.wait()?;
        let bytes = (view.validity_offset + view.length).div_ceil(8);
        // SAFETY: ready host memory; a mask has one bit for each row of its node.
        let source =
            unsafe { crate::memory::host_buffer(tree.owner(&slots[0]), slots[0].address(), bytes) };
        let source = BooleanBuffer::new(source, view.validity_offset, view.length);
        let mut mask = BooleanBufferBuilder::new((view.offset + view.length).next_multiple_of(512));
        mask.append_n(view.offset, false);
        mask.append_buffer(&source);
        mask.append_n(
            (view.offset + view.length).next_multiple_of(512) - view.offset - view.length,
            false,
        );
        let mask = mask.finish().into_inner();
        Counters::add(&array.device().counters().host_copied_bytes, mask.len());
        masks.push((i, mask));
    }
    Ok(masks)
}

/// The release callback of every exported node.
///
/// # Safety
/// `array` is a struct that [`build`] made, or a bitwise move of one, as the C data interface says.
unsafe extern "C-unwind" fn release(array: *mut CArray) {
    // A release cannot report an error. What owners throw is parked, and nothing else does.
    let _ = guard::callback("release", || {
        // SAFETY: the consumer's contract.
        unsafe { release_node(array) };
        Ok(())
    });
}

/// # Safety
/// As [`release`].
unsafe fn release_node(array: *mut CArray) {
    // SAFETY: the consumer gives a valid struct; its children are valid, or were moved out and are
    // marked released; the block lives as long as one node is not released.
    unsafe {
        if array.is_null() || (*array).release.is_none() {
            return;
        }
        (*array).release = None;
        let data = (*array).private_data.cast::<NodeData>();
        for i in 0..(*array).n_children as usize {
            release_child(*(*array).children.add(i));
        }
        release_child((*array).dictionary);
        let header = (*data).header;
        for i in 0..(*data).n_used as usize {
            let entry = (*data).owners.add(*(*data).used.add(i) as usize);
            if (*entry).uses.fetch_sub(1, Ordering::AcqRel) == 1 {
                let owner = ManuallyDrop::take(&mut (*entry).owner);
                // A panic in a drop of the owner's must not keep the others.
                let device = owner.device().clone();
                device.parking("release", || (*header).policy.let_go(owner));
            }
        }
        if (*header).nodes.fetch_sub(1, Ordering::AcqRel) == 1 {
            let memory = (*header).memory;
            if let Some(EventKeeper::Owner(owner)) = (*header).event.take() {
                let device = owner.device().clone();
                device.parking("release", || (*header).policy.let_go(owner));
            }
            ptr::drop_in_place(header);
            alloc::dealloc(header.cast(), memory);
        }
    }
}

/// # Safety
/// `child` is null or a valid struct.
unsafe fn release_child(child: *mut CArray) {
    // SAFETY: the caller's. A child that was moved out has no release.
    unsafe {
        if !child.is_null() && (*child).release.is_some() {
            // An error here is a panic that the callee caught already.
            let _ = CArray::release(child);
        }
    }
}
