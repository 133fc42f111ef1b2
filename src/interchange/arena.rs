//! The one block of memory behind an exported array: structs, pointer lists, owners, event.
//!
//! Every node of the array has a release callback of its own. Where there are several owners a node
//! lets go of those of its own buffers when it is released; one owner of all, the block and the event go
//! with the last node. So a consumer may move
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

use crate::abi::c_data::CArray;
use crate::abi::guard::{self, ReleaseFn};
use crate::data::layout::Nesting;
use crate::data::parts::Parts;
use crate::data::tree::{Node, Slot, Tree, View};
use crate::data::{DeviceArray, hidden};
use crate::device::{Device, SyncEvent};
use crate::error::{Error, Result};
use crate::interchange::export::ReleasePolicy;
use crate::memory::{HostSlab, Owner};

/// Start of the block.
struct Header {
    /// Nodes not yet released.
    nodes: AtomicUsize,
    memory: Memory,
    policy: ReleasePolicy,
    /// The owner of all buffers, if there is only one: it goes with the last node.
    owner: Option<Arc<Owner>>,
    /// Keeps the event in `sync_event`.
    event: Option<EventKeeper>,
    /// Lengths of variadic buffers, where the device needs them in memory of its own choosing.
    sizes: Option<HostSlab>,
    /// Whose work may read the lengths, if there are any.
    device: Option<Device>,
}

/// What keeps an exported event alive.
pub(crate) enum EventKeeper {
    /// It is of this crate's making.
    Own(#[allow(dead_code)] SyncEvent),
    /// It is part of what this owner holds.
    Owner(Arc<Owner>),
}

/// One of several owners.
struct OwnerEntry {
    owner: ManuallyDrop<Arc<Owner>>,
    /// Entries of unreleased nodes that name this owner.
    uses: AtomicUsize,
}

/// A node's `private_data`: one for each node, or one for all if there is one owner.
struct NodeData {
    header: *mut Header,
    owners: *mut OwnerEntry,
    /// Indices into `owners`; none if there is one owner.
    used: *const u32,
    n_used: u32,
}

/// Whether the lengths of a view array's variadic buffers are known; else the producer's own list of
/// them is handed on.
#[cold]
fn knows_sizes(slots: &[Slot]) -> bool {
    slots[2..slots.len() - 1]
        .iter()
        .all(|s| s.bytes().is_some())
}

/// Where the parts of the block lie. All are aligned to 8 bytes.
struct Block {
    /// Bytes. 64 bits hold any sum of counts of 32 bits times sizes of structs.
    bytes: u64,
}

impl Block {
    /// Room for `n` of `T` at the end: the offset in bytes.
    fn extend<T>(&mut self, n: usize) -> usize {
        const { assert!(align_of::<T>() <= 8) };
        let at = self.bytes;
        self.bytes += (size_of::<T>() as u64 * n as u64).next_multiple_of(8);
        at as usize
    }
}

/// What is done about null counts that are unknown.
pub(crate) enum Nulls {
    AllowUnknown,
    /// They are counted, with one host wait.
    Count,
    /// They were: one for each part.
    #[cfg_attr(not(feature = "async"), allow(dead_code))]
    Counted(Vec<usize>),
}

/// Builds the C struct of an array. `as_batch`: see [`Parts`].
pub(crate) fn build(
    array: &DeviceArray,
    as_batch: bool,
    null_counts: Nulls,
    event: Option<EventKeeper>,
    policy: ReleasePolicy,
) -> Result<CArray> {
    let tree = &**array.tree();
    let device = &tree.device;
    let parts = Parts::of(array, as_batch);
    let n = parts.len();

    // Buffers, children and lengths of variadic buffers.
    let (mut n_buffers, mut n_children, mut n_sizes) = (0, 0, 0);
    let (mut unknown_nulls, mut states_sizes) = (false, false);
    parts.each(|i, node, view, _| {
        n_buffers += node.n_slots as usize;
        // A dictionary's values need no entry; it is spare then.
        n_children += node.n_children as usize;
        unknown_nulls |= parts.null_count(i, node, view).is_none();
        if node.layout.variadic {
            // Room whether they are known or not: another thread may find them out meanwhile. One
            // more, so that the list is there even if it is empty.
            n_sizes += node.n_slots as usize - 2;
            states_sizes |= knows_sizes(tree.slots_of(node));
        }
    });
    let counted = match null_counts {
        Nulls::Counted(counts) => Some(counts),
        Nulls::Count if unknown_nulls => Some(hidden::null_counts(array, parts.views())?),
        Nulls::Count | Nulls::AllowUnknown => None,
    };

    let owners = tree.owners.as_slice();
    let single = owners.len() == 1;
    let (n_data, n_used) = if single { (1, 0) } else { (n, n_buffers) };
    let mut block = Block { bytes: 0 };
    block.extend::<Header>(1);
    let at_structs = block.extend::<CArray>(n);
    let at_nodes = block.extend::<NodeData>(n_data);
    let at_buffers = block.extend::<*const c_void>(n_buffers);
    let at_children = block.extend::<*mut CArray>(n_children);
    let at_sizes = block.extend::<i64>(n_sizes);
    let at_owners = block.extend::<OwnerEntry>(if single { 0 } else { owners.len() });
    let at_used = block.extend::<u32>(n_used);
    let bytes = usize::try_from(block.bytes).unwrap_or(usize::MAX);
    let memory = Memory::from_size_align(bytes, 8)
        .map_err(|_| Error::argument("the array has too many children to export"))?;

    // A device whose memory the host cannot read gets the lengths where it reads host memory best.
    let mut slab = None;
    if states_sizes && !device.is_host_readable() {
        slab = Some(device.host_slab(n_sizes * 8)?);
    }
    // SAFETY: the layout has the size of `Header` at least.
    let block =
        NonNull::new(unsafe { alloc::alloc(memory) }).ok_or_else(|| Error::OutOfMemory {
            device: device.id(),
            operation: "export",
            bytes: memory.size(),
        })?;
    let base = block.as_ptr();
    // SAFETY: here and in `Writer`, all parts lie in the block at offsets that `extend` gave, with
    // the alignment and the number of elements that were counted; each element is written before it
    // is read. Everything is reached by raw pointers from `base`.
    let (header, mut writer) = unsafe {
        let header = base.cast::<Header>();
        let entries = base.add(at_owners).cast::<OwnerEntry>();
        let nodes = base.add(at_nodes).cast::<NodeData>();
        if single {
            nodes.write(NodeData {
                header,
                owners: entries,
                used: ptr::null(),
                n_used: 0,
            });
        } else {
            for (i, owner) in owners.iter().enumerate() {
                entries.add(i).write(OwnerEntry {
                    owner: ManuallyDrop::new(owner.clone()),
                    uses: AtomicUsize::new(0),
                });
            }
        }
        let writer = Writer {
            tree,
            parts: &parts,
            single,
            header,
            owners: entries,
            nodes,
            structs: base.add(at_structs).cast(),
            buffers: base.add(at_buffers).cast(),
            children: base.add(at_children).cast(),
            sizes: match &slab {
                Some(slab) => slab.as_device_ptr().as_ptr().cast::<i64>(),
                None => base.add(at_sizes).cast(),
            },
            states_sizes,
            used: base.add(at_used).cast(),
        };
        (header, writer)
    };
    parts.each(|i, node, view, first_child| {
        let null_count = parts.null_count(i, node, view).map_or(-1, |n| n as i64);
        // SAFETY: the nodes come in the order in which they were counted, each once.
        unsafe { writer.node(i, node, view, null_count, first_child) };
    });
    for (i, nulls) in counted.iter().flatten().enumerate() {
        // SAFETY: there is a count for each node.
        unsafe { writer.set_nulls(i, *nulls) };
    }
    if as_batch {
        // SAFETY: node 0 is a struct, whose one buffer is a mask.
        unsafe {
            writer.set_nulls(0, 0);
            (*writer.structs).offset = 0;
        }
    }
    // SAFETY: the header and the owners' entries lie in the block, which nobody else has yet. Node 0
    // was written, and is moved out once: the block never looks at it again.
    unsafe {
        if !single {
            // Owners that no buffer lies in (arrays without buffers) go at once.
            for k in 0..owners.len() {
                let entry = writer.owners.add(k);
                if *(*entry).uses.get_mut() == 0 {
                    ManuallyDrop::drop(&mut (*entry).owner);
                }
            }
        }
        header.write(Header {
            nodes: AtomicUsize::new(n),
            memory,
            policy,
            owner: single.then(|| owners[0].clone()),
            event,
            device: slab.is_some().then(|| device.clone()),
            sizes: slab,
        });
        Ok(writer.structs.read())
    }
}

struct Writer<'a> {
    tree: &'a Tree,
    parts: &'a Parts<'a>,
    /// There is one owner, and one `NodeData`.
    single: bool,
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
}

impl Writer<'_> {
    /// Writes node `i`, whose children, if there are any, are the nodes from `first_child` on.
    ///
    /// # Safety
    /// Nodes are written in order, each once, and are those that were counted.
    #[inline(always)]
    unsafe fn node(
        &mut self,
        i: usize,
        node: &Node,
        view: View,
        null_count: i64,
        first_child: usize,
    ) {
        let layout = &node.layout;
        let slots = self.tree.slots_of(node);
        // SAFETY: see `build`.
        unsafe {
            let buffers = self.buffers;
            for (k, slot) in slots.iter().enumerate() {
                buffers.add(k).write(slot.address().as_ptr().cast_const());
            }
            self.buffers = buffers.add(slots.len());
            if view.offset != view.validity_offset {
                self.shift_bitmap(node, view, buffers);
            }
            if null_count == 0 && layout.has_validity() {
                buffers.write(ptr::null());
            }
            if layout.variadic && self.states_sizes && knows_sizes(slots) {
                self.list_sizes(slots, buffers);
            }
            let mut data = self.nodes;
            if !self.single {
                data = data.add(i);
                data.write(self.uses(slots, buffers));
            }
            let array = self.structs.add(i);
            array.write(CArray {
                length: view.length as i64,
                null_count,
                // Without rows an offset means nothing, but consumers add it to buffers of no bytes.
                offset: if view.length == 0 {
                    0
                } else {
                    view.offset as i64
                },
                n_buffers: slots.len() as i64,
                n_children: 0,
                buffers: if slots.is_empty() {
                    ptr::null_mut()
                } else {
                    buffers
                },
                children: ptr::null_mut(),
                dictionary: ptr::null_mut(),
                release: Some(release),
                private_data: data.cast(),
            });
            if node.n_children > 0 {
                let first = self.structs.add(first_child);
                if matches!(layout.nesting, Nesting::Dictionary) {
                    (*array).dictionary = first;
                } else {
                    self.list_children(array, first, node.n_children as usize);
                }
            }
        }
    }

    /// Has the bitmap start where the values' offset says. Where no whole number of bytes lies between, its bits
    /// do not matter: [`export`](super::export::export) has moved the others.
    ///
    /// # Safety
    /// `buffers` are the addresses of the node's slots, as they go out.
    #[cold]
    unsafe fn shift_bitmap(&self, node: &Node, view: View, buffers: *mut *const c_void) {
        let bitmap = self.tree.bitmap_of(node);
        if let (Some(slot), Some(bytes)) = (bitmap, view.bitmap_shift()) {
            // SAFETY: the caller guarantees the slots; a node with a bitmap has it first.
            unsafe { buffers.write(slot.address().offset(bytes).as_ptr().cast_const()) };
        }
    }

    /// Sets the null count of node `i`; without nulls its mask, the first buffer, goes too.
    ///
    /// # Safety
    /// Node `i` was written.
    unsafe fn set_nulls(&self, i: usize, nulls: usize) {
        // SAFETY: the caller's. Nodes that are a mask's have a first buffer.
        unsafe {
            let array = self.structs.add(i);
            (*array).null_count = nulls as i64;
            let (node, _) = self.parts.get(i);
            if nulls == 0 && node.layout.has_validity() {
                (*array).buffers.write(ptr::null());
            }
        }
    }

    /// # Safety
    /// As [`node`](Self::node): there is room for the `n` children.
    #[inline(never)]
    unsafe fn list_children(&mut self, array: *mut CArray, first: *mut CArray, n: usize) {
        let children = self.children;
        // SAFETY: the caller's.
        unsafe {
            for k in 0..n {
                children.add(k).write(first.add(k));
            }
            self.children = children.add(n);
            (*array).n_children = n as i64;
            (*array).children = children;
        }
    }

    /// Lists the lengths of a node's variadic buffers.
    ///
    /// # Safety
    /// As [`node`](Self::node): there is room for them.
    #[cold]
    unsafe fn list_sizes(&mut self, slots: &[Slot], buffers: *mut *const c_void) {
        let variadic = &slots[2..slots.len() - 1];
        // SAFETY: the caller's.
        unsafe {
            for (k, slot) in variadic.iter().enumerate() {
                let bytes = slot.bytes().map_or(0, |n| n as i64);
                self.sizes.add(k).write(bytes);
            }
            buffers.add(slots.len() - 1).write(self.sizes.cast());
            self.sizes = self.sizes.add(variadic.len() + 1);
        }
    }

    /// Lists the owners of a node's buffers, where there are several.
    ///
    /// # Safety
    /// As [`node`](Self::node); `buffers` are the addresses of `slots`, as they go out.
    #[inline(never)]
    unsafe fn uses(&mut self, slots: &[Slot], buffers: *const *const c_void) -> NodeData {
        let used = self.used;
        let mut n_used = 0;
        // SAFETY: the caller's; there is room for an index for each slot.
        unsafe {
            for (k, slot) in slots.iter().enumerate() {
                let known = n_used > 0 && *used.add(n_used - 1) == slot.owner;
                if known || slot.is_null() || (*buffers.add(k)).is_null() {
                    continue;
                }
                used.add(n_used).write(slot.owner);
                n_used += 1;
                *(*self.owners.add(slot.owner as usize)).uses.get_mut() += 1;
            }
            self.used = used.add(n_used);
        }
        NodeData {
            header: self.header,
            owners: self.owners,
            used,
            n_used: n_used as u32,
        }
    }
}

/// The release callback of every exported node. Nothing unwinds from it: all that runs code of others
/// (owners, events, children that a consumer put in) does so under a guard of its own.
///
/// # Safety
/// `array` is a struct that [`build`] made, or a bitwise move of one, as the C data interface says.
unsafe extern "C-unwind" fn release(array: *mut CArray) {
    // SAFETY: the consumer gives a valid struct; the block lives as long as one node of it is not
    // counted off, and those released here are counted off at the end.
    unsafe {
        if array.is_null() || (*array).release.is_none() {
            return;
        }
        let header = (*(*array).private_data.cast::<NodeData>()).header;
        let released = release_part(array, header);
        if (*header).nodes.fetch_sub(released, Ordering::AcqRel) == released {
            free(header);
        }
    }
}

/// Frees the block after its last node.
///
/// # Safety
/// All nodes of the block at `header` are released, and nobody uses it any more.
unsafe fn free(header: *mut Header) {
    // SAFETY: the caller's; `build` wrote the header and allocated the block with this layout. What
    // the header owns is moved out, once.
    unsafe {
        let (memory, policy) = ((*header).memory, (*header).policy);
        let owner = (*header).owner.take();
        let event = (*header).event.take();
        let sizes = (*header).sizes.take();
        let device = (*header).device.take();
        alloc::dealloc(header.cast(), memory);
        if let Some(owner) = owner {
            policy.let_go(owner);
        }
        if event.is_some() || device.is_some() {
            let_go_rest(policy, event, device, sizes);
        }
    }
}

#[cold]
fn let_go_rest(
    policy: ReleasePolicy,
    event: Option<EventKeeper>,
    device: Option<Device>,
    sizes: Option<HostSlab>,
) {
    // An error here is a panic of a backend's; a release cannot report it.
    let _ = guard::call_foreign("release", || match event {
        Some(EventKeeper::Owner(owner)) => policy.let_go(owner),
        Some(EventKeeper::Own(event)) => drop(event),
        None => {}
    });
    let _ = guard::call_foreign("release", || match device {
        Some(device) => policy.let_go_after(&device, sizes),
        None => drop(sizes),
    });
}

/// Releases a node and those of its descendants that are in the same block. Answers how many.
///
/// # Safety
/// `array` is a node of the block at `header` that is not released; its children are valid, or were
/// moved out and are marked released. The block outlives the call.
unsafe fn release_part(array: *mut CArray, header: *mut Header) -> usize {
    // SAFETY: the caller's.
    unsafe {
        (*array).release = None;
        let data = (*array).private_data.cast::<NodeData>();
        let mut released = 1;
        for i in 0..(*array).n_children as usize {
            released += release_child(*(*array).children.add(i), header);
        }
        released += release_child((*array).dictionary, header);
        for i in 0..(*data).n_used as usize {
            let entry = (*data).owners.add(*(*data).used.add(i) as usize);
            if (*entry).uses.fetch_sub(1, Ordering::AcqRel) == 1 {
                (*header)
                    .policy
                    .let_go(ManuallyDrop::take(&mut (*entry).owner));
            }
        }
        released
    }
}

/// Releases a child. Answers how many nodes of the block at `header` that were.
///
/// # Safety
/// `child` is null or a valid struct; else as [`release_part`].
#[inline]
unsafe fn release_child(child: *mut CArray, header: *mut Header) -> usize {
    // SAFETY: the caller's. A child that was moved out has no release. One with this release is of
    // this crate's making, and then has `NodeData`.
    unsafe {
        if child.is_null() {
            return 0;
        }
        let Some(other) = (*child).release else {
            return 0;
        };
        let ours = ptr::fn_addr_eq(other, release as ReleaseFn<CArray>)
            && (*(*child).private_data.cast::<NodeData>()).header == header;
        if ours {
            return release_part(child, header);
        }
        // An error here is a panic that the callee caught already.
        let _ = CArray::release(child);
        0
    }
}
