//! The single block of memory behind an exported array: structs, pointer lists, owners, event.
//!
//! Every node of the array has its own release callback. If there are several owners, a node drops
//! those of its own buffers when it is released; a single owner, the block and the event are
//! dropped with the last node. So a consumer may move children out of their parent and release
//! everything in any order, on any thread.
//!
//! Layout: [`Header`], child structs, [`NodeData`], pointer lists, sizes of data buffers, owners,
//! owner indices.

use std::alloc::{self, Layout as Memory};
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::abi::c_data::CArray;
use crate::abi::guard::{self, ReleaseFn};
use crate::data::DeviceArray;
use crate::data::layout::{BufferKind, Layout, Nesting};
use crate::data::parts::Parts;
use crate::data::tree::{Node, Slot, Tree, View};
use crate::device::{ALIGNMENT, Device, DeviceId, SyncEvent};
use crate::error::{Error, Result};
use crate::interchange::release::ReleasePolicy;
use crate::memory::{HostSlab, Owner};

/// The start of the block.
struct Header {
    /// The number of nodes that are not released yet.
    nodes: AtomicUsize,
    memory: Memory,
    policy: ReleasePolicy,
    /// The owner of all buffers, if there is only one. It is dropped with the last node.
    owner: Option<Arc<Owner>>,
    /// Keeps the event in `sync_event`.
    event: Option<EventKeeper>,
    /// The sizes of data buffers, if the host cannot read the device's memory.
    sizes: Option<HostSlab>,
    /// The device whose work may read `sizes`.
    device: Option<Device>,
}

/// What keeps an exported event alive.
pub(crate) enum EventKeeper {
    /// This crate made the event.
    Own(#[allow(dead_code)] SyncEvent),
    /// The event is part of what this owner holds.
    Owner(Arc<Owner>),
}

/// One of several owners.
struct OwnerEntry {
    owner: ManuallyDrop<Arc<Owner>>,
    /// How many entries of unreleased nodes name this owner.
    uses: AtomicUsize,
}

/// A node's `private_data`: one for each node, or one for all nodes if there is a single owner.
struct NodeData {
    header: *mut Header,
    owners: *mut OwnerEntry,
    /// Indices into `owners`; none if there is a single owner.
    used: *const u32,
    n_used: u32,
}

/// The offset of arrays without rows that come without one, padded as other buffers are. Consumers read it, and nobody writes it.
static ZERO: Zeros = Zeros([0; ALIGNMENT]);

#[repr(align(64))]
struct Zeros(#[allow(dead_code)] [u8; ALIGNMENT]);

/// Whether the sizes of a view array's data buffers are known; otherwise the producer's own list of
/// them is passed on.
#[cold]
fn knows_sizes(slots: &[Slot]) -> bool {
    slots[2..slots.len() - 1]
        .iter()
        .all(|s| s.bytes().is_some())
}

/// The layout of the block. All parts are aligned to 8 bytes.
struct Block {
    /// The bytes so far. 64 bits hold any sum of 32-bit counts times sizes of structs.
    bytes: u64,
}

impl Block {
    /// Adds room for `n` elements of `T`; returns its offset in bytes.
    fn extend<T>(&mut self, n: usize) -> usize {
        const { assert!(align_of::<T>() <= 8) };
        let at = self.bytes;
        self.bytes += (size_of::<T>() as u64 * n as u64).next_multiple_of(8);
        at as usize
    }
}

/// Builds the C struct of an array. For `as_batch` see [`Parts`]. `counted` has the null counts of
/// parts that the array itself does not know, or is empty; other unknown ones are stated as -1.
pub(crate) fn build(
    array: &DeviceArray,
    as_batch: bool,
    counted: &[Option<usize>],
    event: Option<EventKeeper>,
    policy: ReleasePolicy,
) -> Result<CArray> {
    let tree = &**array.tree();
    let device = &tree.device;
    let parts = Parts::of(array, as_batch);
    let n = parts.len();

    // Buffers, children and sizes of data buffers.
    let (mut n_buffers, mut n_children, mut n_sizes) = (0, 0, 0);
    let mut states_sizes = false;
    parts.each(|_, node, _, _| {
        n_buffers += node.n_slots as usize;
        // A dictionary's values need no entry, which is left over then.
        n_children += node.n_children as usize;
        if node.layout.variadic {
            // Room whether they are known or not: another thread may find them out meanwhile. One
            // more, so that the list exists even if it is empty.
            n_sizes += node.n_slots as usize - 2;
            states_sizes |= knows_sizes(tree.slots_of(node));
        }
    });
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

    // If the host cannot read the device's memory, the sizes are in the host memory that the device
    // reads fastest.
    let mut slab = None;
    if states_sizes && !device.is_host_readable() {
        slab = Some(device.host_slab(n_sizes * 8)?);
    }
    // SAFETY: the layout is not empty: it has room for a `Header` at least.
    let block =
        NonNull::new(unsafe { alloc::alloc(memory) }).ok_or_else(|| Error::OutOfMemory {
            device: device.id(),
            operation: "export",
            bytes: memory.size(),
        })?;
    let base = block.as_ptr();
    // SAFETY: each part lies in the block at the offset that `extend` returned, with the alignment
    // and the number of elements that were counted above; each element is written before it is
    // read. All pointers are derived from `base`.
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
        // SAFETY: `Parts::each` visits the nodes in the order in which they were counted, each
        // once.
        unsafe { writer.node(i, node, view, null_count, first_child) };
    });
    for (i, nulls) in counted.iter().enumerate() {
        if let Some(nulls) = nulls {
            // SAFETY: `counted` has one element for each part, and all parts were written above.
            unsafe { writer.set_nulls(i, *nulls) };
        }
    }
    if as_batch {
        // SAFETY: node 0 was written above.
        unsafe {
            writer.set_nulls(0, 0);
            (*writer.structs).offset = 0;
        }
    }
    // SAFETY: the header and the owners' entries lie in the block, to which only this function has
    // access yet; the entries were written above. Node 0 was written, and is moved out once:
    // nothing reads it in the block again.
    unsafe {
        if !single {
            // Owners of no buffer (of arrays without buffers) are dropped at once.
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
    /// Whether there is a single owner, and a single `NodeData`.
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
    /// Writes node `i`. Its children are the nodes from `first_child` on.
    ///
    /// # Safety
    /// Nodes are written in order, each once, and are those that `build` counted.
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
        // SAFETY: the pointers of `Writer` are into the block that `build` laid out, with room for
        // the structs, buffers, children, sizes and owner indices of all nodes. The caller
        // guarantees that the nodes are those, each once.
        unsafe {
            let buffers = self.buffers;
            for (k, slot) in slots.iter().enumerate() {
                buffers.add(k).write(slot.address().as_ptr().cast_const());
            }
            self.buffers = buffers.add(slots.len());
            if view.length == 0 && self.tree.device.id() == DeviceId::CPU {
                self.state_offset(layout, slots, buffers);
            }
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
                // Without rows an offset has no meaning, but consumers add it to the addresses of
                // empty buffers.
                offset: match view.length {
                    0 => 0,
                    _ => view.offset as i64,
                },
                n_buffers: slots.len() as i64,
                n_children: 0,
                buffers: match slots.is_empty() {
                    true => ptr::null_mut(),
                    false => buffers,
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

    /// Lists an offset for an array without rows in memory of the CPU, whose own is missing, or may have no bytes. Where it is
    /// missing on other devices, it was made before ([`Bitmaps`](crate::transfer::Bitmaps)).
    ///
    /// # Safety
    /// `buffers` is the list of buffers of a node with these slots, which may be written.
    #[cold]
    unsafe fn state_offset(&self, layout: &Layout, slots: &[Slot], buffers: *mut *const c_void) {
        let kinds = layout.buffers().iter().enumerate();
        for (k, _) in kinds.filter(|(_, kind)| matches!(kind, BufferKind::Offsets { .. })) {
            if slots[k].bytes() == Some(0) {
                // SAFETY: the caller guarantees the list, which has a buffer of each kind.
                unsafe { buffers.add(k).write((&raw const ZERO).cast()) };
            }
        }
    }

    /// Makes the bitmap start at the bit that the values' offset says. If there is no whole number
    /// of bytes between, its bits do not matter: the export has moved the others
    /// ([`Bitmaps`](crate::transfer::Bitmaps)).
    ///
    /// # Safety
    /// `buffers` is the node's list of buffers, which may be written.
    #[cold]
    unsafe fn shift_bitmap(&self, node: &Node, view: View, buffers: *mut *const c_void) {
        let bitmap = self.tree.bitmap_of(node);
        if let (Some(slot), Some(bytes)) = (bitmap, view.bitmap_shift()) {
            // SAFETY: the caller guarantees the list, and a node with a bitmap has at least that
            // buffer, the first one.
            unsafe { buffers.write(slot.address().offset(bytes).as_ptr().cast_const()) };
        }
    }

    /// Sets the null count of node `i`. If there are no nulls, its validity bitmap, the first
    /// buffer, is left out.
    ///
    /// # Safety
    /// Node `i` was written.
    unsafe fn set_nulls(&self, i: usize, nulls: usize) {
        // SAFETY: the caller guarantees that struct `i` and its list of buffers were written. A
        // node whose type has a validity bitmap has a first buffer.
        unsafe {
            let array = self.structs.add(i);
            (*array).null_count = nulls as i64;
            let (node, _) = self.parts.get(i);
            if nulls == 0 && node.layout.has_validity() {
                (*array).buffers.write(ptr::null());
            }
        }
    }

    /// Lists the `n` children of `array`, which are the structs from `first` on.
    ///
    /// # Safety
    /// `array` was written; the `n` children are some of those that `build` counted, and are listed
    /// once.
    #[inline(never)]
    unsafe fn list_children(&mut self, array: *mut CArray, first: *mut CArray, n: usize) {
        let children = self.children;
        // SAFETY: the block has room for the children that `build` counted, and the caller
        // guarantees that these are some of them; their structs are in the block too.
        unsafe {
            for k in 0..n {
                children.add(k).write(first.add(k));
            }
            self.children = children.add(n);
            (*array).n_children = n as i64;
            (*array).children = children;
        }
    }

    /// Lists the sizes of a node's data buffers.
    ///
    /// # Safety
    /// `build` counted the sizes of these slots, and they are listed once; `buffers` is the node's
    /// list of buffers, which may be written.
    #[cold]
    unsafe fn list_sizes(&mut self, slots: &[Slot], buffers: *mut *const c_void) {
        let variadic = &slots[2..slots.len() - 1];
        // SAFETY: the caller guarantees that `build` made room for these sizes, and that there is a
        // pointer for each slot.
        unsafe {
            for (k, slot) in variadic.iter().enumerate() {
                let bytes = slot.bytes().map_or(0, |n| n as i64);
                self.sizes.add(k).write(bytes);
            }
            buffers.add(slots.len() - 1).write(self.sizes.cast());
            self.sizes = self.sizes.add(variadic.len() + 1);
        }
    }

    /// Lists the owners of a node's buffers, if there are several owners.
    ///
    /// # Safety
    /// `build` counted these slots, and they are listed once; `buffers` has the exported address of
    /// each.
    #[inline(never)]
    unsafe fn uses(&mut self, slots: &[Slot], buffers: *const *const c_void) -> NodeData {
        let used = self.used;
        let mut n_used = 0;
        // SAFETY: the caller guarantees an address for each slot. `build` made room for an index
        // for each slot, and wrote an entry for each owner, to which nobody else has access yet.
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

/// The release callback of every exported node. It never unwinds: all code of others (owners,
/// events, children that a consumer put in) runs under a guard of its own.
///
/// # Safety
/// `array` is null, or a struct that [`build`] made or a bitwise move of one, as the C data
/// interface demands; it is not used at the same time elsewhere.
unsafe extern "C-unwind" fn release(array: *mut CArray) {
    // SAFETY: the caller guarantees a valid struct. The block lives as long as not all of its nodes
    // are counted as released, and those released here are counted last.
    unsafe {
        if array.is_null() || (*array).release.is_none() {
            return;
        }
        let header = (*(*array).private_data.cast::<NodeData>()).header;
        let released = release_part(array, header);
        // If no other node is left, nobody else changes the count.
        let nodes = &(*header).nodes;
        if nodes.load(Ordering::Acquire) == released
            || nodes.fetch_sub(released, Ordering::AcqRel) == released
        {
            free(header);
        }
    }
}

/// Frees the block after its last node.
///
/// # Safety
/// All nodes of the block at `header` are released, and nothing uses it any more.
unsafe fn free(header: *mut Header) {
    // SAFETY: `build` wrote the header, and allocated the block with this layout. The caller
    // guarantees that nothing uses the block any more. What the header owns is moved out once,
    // before the block is freed.
    unsafe {
        let Header {
            nodes: _,
            memory,
            policy,
            owner,
            event,
            sizes,
            device,
        } = header.read();
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
    // An error here is a panic in a backend, which a release cannot report.
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

/// Releases a node and its descendants. Returns how many of them are in the block at `header`.
///
/// # Safety
/// `array` is a node of the block at `header` that is not released; its children are valid, or were
/// moved out and are marked released. The block outlives the call.
unsafe fn release_part(array: *mut CArray, header: *mut Header) -> usize {
    // SAFETY: the caller guarantees an unreleased node, so its `private_data`, its lists and the
    // entries that it names were written by `build`, and are in the block, which outlives the call.
    // The node that brings `uses` to 0 is the only one that takes the owner.
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

/// Releases a child. Returns how many nodes of the block at `header` that released.
///
/// # Safety
/// `child` is null or a valid struct, released or not. The block outlives the call.
#[inline]
unsafe fn release_child(child: *mut CArray, header: *mut Header) -> usize {
    // SAFETY: the caller guarantees a valid struct. A child that was moved out has no release
    // callback. Only `build` makes structs with this one, and they have `NodeData`; if its header
    // is this block's, the child is one of its nodes.
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
            let data = (*child).private_data.cast::<NodeData>();
            if (*child).n_children == 0 && (*child).dictionary.is_null() && (*data).n_used == 0 {
                // Nothing but the node itself, as most columns are.
                (*child).release = None;
                return 1;
            }
            return release_part(child, header);
        }
        // An error here is a panic that the callee has caught already.
        let _ = CArray::release(child);
        0
    }
}
