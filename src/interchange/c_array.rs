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
            // SAFETY: the children are valid, or were not made or moved out, and are marked as released. An error is a panic that the callee has
            // caught already.
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

/// What the structs of one export have in common.
pub(super) struct Exporter<'a> {
    pub(super) device: &'a Device,
    pub(super) policy: ReleasePolicy,
    pub(super) event: Option<Event>,
}

impl Exporter<'_> {
    /// Makes the struct of a node, and those of its descendants. Null counts that are not known are stated as -1. After an error `out`
    /// is as it was.
    pub(super) fn node(&self, node: &Arc<Node>, out: &mut CArray) -> Result<()> {
        let (view, layout) = (View::whole(node), &node.layout);
        let (nulls, n_buffers) = (view.null_count(), node.buffers.len());
        // It owns what was made so far, after an error too.
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
        if let ([_, _, data @ .., _], true) = (&node.buffers[..], layout.variadic) {
            // Unless all lengths of the data buffers are known, the producer's own list of them is passed on.
            if let Some(sizes) = data
                .iter()
                .map(NodeBuffer::bytes)
                .collect::<Option<Vec<_>>>()
            {
                let mut list = self.device.host_buffer(8 * sizes.len())?;
                for (bytes, size) in list.chunks_exact_mut(8).zip(sizes) {
                    bytes.copy_from_slice(&(size as i64).to_ne_bytes());
                }
                this.buffers[n_buffers - 1] = list.as_device_ptr().as_ptr().cast_const();
                let owner = Owner::new(self.device.clone(), Memory::Host(list), Ready::Now);
                this.owners.push(Arc::new(owner));
            }
        }
        for (child, out) in node.children.iter().zip(&mut this.children) {
            self.node(child, out)?;
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
        Ok(())
    }
}

/// The release callback of every exported struct. It never unwinds.
///
/// # Safety
/// `array` is null, or a struct that [`Exporter::node`] made or a bitwise move of one, as the C data
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
