//! The C structs of an exported array. The private data of each is a box that owns what the struct refers to: its lists, its
//! children, a share of the memory in which its own buffers lie, and of the event. So a consumer may move children out of
//! their parent and release everything in any order, on any thread, and the memory of a column goes with that column.

use std::ffi::c_void;
use std::mem::take;
use std::ptr;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::abi::c_data::CArray;
use crate::abi::guard;
use crate::data::layout::Nesting;
use crate::data::node::{Node, NodeBuffer, View};
use crate::device::{Device, SyncEvent};
use crate::error::Result;
use crate::interchange::options::ReleasePolicy;
use crate::memory::{Memory, Owner, Ready};

/// What an exported struct refers to.
struct Exported {
    /// The addresses of the buffers.
    buffers: SmallVec<[*const c_void; 3]>,
    children: Vec<CArray>,
    /// The addresses of the children. A dictionary has none: its values are the only child.
    pointers: SmallVec<[*mut CArray; 2]>,
    /// What owns the buffers.
    owners: SmallVec<[Arc<Owner>; 1]>,
    event: Option<Event>,
    policy: ReleasePolicy,
}

/// What keeps an exported event alive.
#[derive(Clone)]
pub(super) enum Event {
    /// The event itself.
    Own(SyncEvent),
    /// Foreign memory that is ready after its event, which lives as long.
    Of(Arc<Owner>),
}

impl Event {
    /// The event after which the memory of an owner is ready.
    pub(super) fn of(owner: &Arc<Owner>) -> Self {
        let own = owner.own_event().cloned();
        own.map_or_else(|| Self::Of(owner.clone()), Self::Own)
    }
}

impl Drop for Exported {
    /// Never unwinds: all code of others (owners, events, children that a consumer put in) runs under a guard of its own.
    fn drop(&mut self) {
        for child in &mut self.children {
            // SAFETY: `release` requires a valid struct: `Exporter::node` made each child, and one that a consumer has moved out is marked as
            // released. An error is a panic that the callee has caught already.
            let _ = unsafe { CArray::release(child) };
        }
        for owner in take(&mut self.owners) {
            self.policy.release(owner);
        }
        match self.event.take() {
            None => {}
            Some(Event::Of(owner)) => self.policy.release(owner),
            // An error here is a panic in a backend, which a release cannot report.
            Some(event) => drop(guard::call_foreign("release", || drop(event))),
        }
    }
}

/// Makes the C struct of an array's node. Null counts that are not known are stated as -1. After an error `out` is as it was.
pub(super) fn build(
    device: &Device,
    node: &Arc<Node>,
    event: Option<Event>,
    policy: ReleasePolicy,
    out: &mut CArray,
) -> Result<()> {
    let mut exporter = Exporter {
        policy,
        event,
        sizes: None,
        next_size: ptr::null_mut(),
    };
    // Room for the lengths of every view array, known or not, since another thread may find them out meanwhile.
    let (mut room, mut is_known) = (0, false);
    node.each(&mut |node| {
        room += usize::from(node.layout.variadic) * node.buffers.len();
        is_known |= known_sizes(node).is_some();
    });
    if is_known {
        let host = device.host_buffer(room * 8)?;
        exporter.next_size = host.as_device_ptr().as_ptr().cast();
        let owner = Owner::new(device.clone(), Memory::Host(host), Ready::Now);
        exporter.sizes = Some(Arc::new(owner));
    }
    exporter.node(node, out);
    Ok(())
}

/// The data buffers of a view array, if their lengths are known. Otherwise the producer's own list of them is passed on.
fn known_sizes(node: &Node) -> Option<&[NodeBuffer]> {
    let [_, _, data @ .., _] = &node.buffers[..] else {
        return None;
    };
    let known = node.layout.variadic && data.iter().all(|data| data.bytes().is_some());
    known.then_some(data)
}

/// What the structs of one export have in common.
struct Exporter {
    policy: ReleasePolicy,
    event: Option<Event>,
    /// The lengths of the data buffers of view arrays, in memory that the device can read; `None` if all were unknown.
    sizes: Option<Arc<Owner>>,
    /// Where the next length goes.
    next_size: *mut i64,
}

impl Exporter {
    /// Makes the struct of a node, and those of its descendants.
    fn node(&mut self, node: &Arc<Node>, out: &mut CArray) {
        let (view, layout) = (View::whole(node), &node.layout);
        let (nulls, n_buffers) = (view.null_count(), node.buffers.len());
        let mut exported = Box::new(Exported {
            buffers: SmallVec::with_capacity(n_buffers),
            children: node.children.iter().map(|_| CArray::empty()).collect(),
            pointers: SmallVec::new(),
            owners: SmallVec::new(),
            event: self.event.clone(),
            policy: self.policy,
        });
        let this = &mut *exported;
        for buffer in &node.buffers {
            this.buffers.push(buffer.address().as_ptr().cast_const());
        }
        // The bitmap starts at the bit that the values' offset says. If there is no whole number of bytes between, its bits do
        // not matter: the others were moved before (`DeviceArray::to_exported`).
        if let (Some(bitmap), Some(bytes)) = (node.bitmap(), view.bitmap_shift()) {
            this.buffers[0] = bitmap.address().offset(bytes).as_ptr().cast_const();
        }
        if nulls == Some(0) && layout.has_validity() {
            this.buffers[0] = ptr::null();
        }
        for (buffer, address) in node.buffers.iter().zip(&this.buffers) {
            let owner = buffer.owner.as_ref().filter(|_| !address.is_null());
            let Some(owner) = owner else { continue };
            if (this.owners.last()).is_none_or(|last| !Arc::ptr_eq(last, owner)) {
                this.owners.push(owner.clone());
            }
        }
        if let (Some(data), Some(owner)) = (known_sizes(node), &self.sizes) {
            this.owners.push(owner.clone());
            this.buffers[n_buffers - 1] = self.list_sizes(data);
        }
        for (child, out) in node.children.iter().zip(&mut this.children) {
            self.node(child, out);
        }
        let (first, mut dictionary) = (this.children.as_mut_ptr(), ptr::null_mut());
        if layout.nesting == Nesting::Dictionary {
            dictionary = first;
        } else {
            this.pointers.reserve(this.children.len());
            for i in 0..this.children.len() {
                this.pointers.push(first.wrapping_add(i));
            }
        }
        let list = |n: usize, list: *mut *mut CArray| if n == 0 { ptr::null_mut() } else { list };
        let data = Box::into_raw(exported);
        // SAFETY: the box was just made, and nothing else refers to it.
        let exported = unsafe { &mut *data };
        *out = CArray {
            length: view.length as i64,
            null_count: nulls.map_or(-1, |n| n as i64),
            // Without rows an offset has no meaning, but consumers add it to the addresses of empty buffers.
            offset: if view.length > 0 {
                view.offset as i64
            } else {
                0
            },
            n_buffers: n_buffers as i64,
            n_children: exported.pointers.len() as i64,
            buffers: match n_buffers {
                0 => ptr::null_mut(),
                _ => exported.buffers.as_mut_ptr(),
            },
            children: list(exported.pointers.len(), exported.pointers.as_mut_ptr()),
            dictionary,
            release: Some(release),
            private_data: data.cast(),
        };
    }

    /// Lists the lengths of a view array's data buffers; returns where. An empty list takes room, too, so that it is there.
    fn list_sizes(&mut self, data: &[NodeBuffer]) -> *const c_void {
        let list = self.next_size;
        for (i, buffer) in data.iter().enumerate() {
            // SAFETY: writes need valid memory: `build` made room for these lengths in the host buffer that `sizes` keeps, which the host
            // can write to, and to which nobody else has access yet.
            unsafe { list.add(i).write(buffer.bytes().map_or(0, |n| n as i64)) };
        }
        self.next_size = list.wrapping_add(data.len() + 1);
        list.cast_const().cast()
    }
}

/// The release callback of every exported struct. It never unwinds.
///
/// # Safety
/// `array` is null, or a struct that [`build`] made or a bitwise move of one, as the C data
/// interface demands; it is not used at the same time elsewhere.
unsafe extern "C-unwind" fn release(array: *mut CArray) {
    // SAFETY: the caller guarantees a valid struct. It is not released, so its private data is the box that `Exporter::node` made,
    // which is taken back once.
    unsafe {
        if array.is_null() || (*array).release.is_none() {
            return;
        }
        (*array).release = None;
        drop(Box::from_raw((*array).private_data.cast::<Exported>()));
    }
}
