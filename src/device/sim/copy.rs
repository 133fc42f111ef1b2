//! Queued copies and fills, and whose memory an address is.

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::state::Core;
use super::{INVALID_ACCESS, SimError};
use crate::device::{CopyKind, CopyOp, DevicePtr, Process, lock};

/// The addresses of all simulated devices that a process has made.
struct Made {
    process: Process,
    list: Mutex<Vec<(Range<usize>, Weak<Core>)>>,
}

/// Returns this process's list. A child has one of its own: a thread of its parent may have held the lock of the parent's when the
/// process was forked.
fn devices() -> &'static Mutex<Vec<(Range<usize>, Weak<Core>)>> {
    static MADE: AtomicPtr<Made> = AtomicPtr::new(ptr::null_mut());
    let found = MADE.load(Ordering::Acquire);
    // SAFETY: a pointer that is not null was made below, of a box that is never freed once it is in `MADE`.
    let made = unsafe { found.as_ref() };
    if let Some(made) = made.filter(|made| made.process.is_this()) {
        return &made.list;
    }
    let own = Box::into_raw(Box::new(Made {
        process: Process::this(),
        list: Mutex::default(),
    }));
    match MADE.compare_exchange(found, own, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: the box is in `MADE`, and so is never freed.
        Ok(_) => unsafe { &(*own).list },
        Err(other) => {
            // SAFETY: the box was made above, and nothing else has its pointer.
            drop(unsafe { Box::from_raw(own) });
            // SAFETY: another thread of this process has put its box into `MADE`, where it is never freed.
            unsafe { &(*other).list }
        }
    }
}

/// Returns the simulated device whose addresses these are; `Some(None)` if it is being dropped.
fn owner_of(address: usize, bytes: usize) -> Option<Option<Arc<Core>>> {
    let end = address.saturating_add(bytes);
    let found = lock(devices())
        .iter()
        .find(|(range, _)| range.start < end && address < range.end)
        .map(|(_, core)| core.clone());
    // Upgraded with the list unlocked: if this becomes the last reference, its drop locks the list.
    found.map(|core| core.upgrade())
}

/// Whether these are host addresses, as far as simulated devices know.
pub(super) fn is_host(address: DevicePtr, bytes: usize) -> bool {
    !address.is_null() && owner_of(address.address(), bytes).is_none()
}

/// Adds a device to those whose addresses are known; its drop removes it.
pub(super) fn register(core: &Arc<Core>) {
    lock(devices()).push((core.mapping.range(), Arc::downgrade(core)));
}

impl Core {
    /// As [`locate`](Self::locate), for host memory.
    fn locate_host(&self, ptr: DevicePtr, bytes: usize) -> Result<*mut u8, String> {
        if is_host(ptr, bytes) {
            Ok(ptr.as_ptr().cast())
        } else {
            Err(format!(
                "invalid access at {ptr:?} ({bytes} bytes) on {}: not host memory",
                self.id
            ))
        }
    }

    /// Runs a list of copies, the last one first, because their order must not matter.
    pub(super) fn run_copies(&self, copies: &[CopyOp]) -> Result<(), SimError> {
        for copy in copies.iter().rev() {
            self.run_copy(copy).map_err(|message| SimError {
                operation: "copy",
                code: INVALID_ACCESS,
                message,
            })?;
        }
        Ok(())
    }

    fn run_copy(&self, copy: &CopyOp) -> Result<(), String> {
        let CopyOp {
            src, dst, bytes, ..
        } = *copy;
        let mut peer = None;
        let from = match copy.kind {
            CopyKind::HostToDevice => self.locate_host(src, bytes)?,
            CopyKind::DeviceToDevice
                if self.config.peer_access && self.mapping.offset(src.address()).is_none() =>
            {
                peer = owner_of(src.address(), bytes).flatten();
                let owner = peer.as_deref().unwrap_or(self);
                owner.locate(src, bytes)?
            }
            CopyKind::DeviceToHost | CopyKind::DeviceToDevice => self.locate(src, bytes)?,
        };
        let to = match copy.kind {
            CopyKind::DeviceToHost => self.locate_host(dst, bytes)?,
            CopyKind::HostToDevice | CopyKind::DeviceToDevice => self.locate(dst, bytes)?,
        };
        // SAFETY: device addresses were just checked against live allocations, which only this
        // engine frees. The caller of `RawQueue::copy` guarantees that host memory, and memory of a
        // peer, lives unchanged until the copy has completed; `peer` keeps a peer mapped.
        // `check_copy` has refused ranges that overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        drop(peer);
        Ok(())
    }

    pub(super) fn run_fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<(), SimError> {
        let start = self.locate(dst, bytes).map_err(|message| SimError {
            operation: "fill",
            code: INVALID_ACCESS,
            message,
        })?;
        // SAFETY: `locate` has checked the range against the live allocations, which only this
        // engine frees.
        unsafe { start.write_bytes(byte, bytes) };
        Ok(())
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        let range = self.mapping.range();
        lock(devices()).retain(|(other, _)| *other != range);
    }
}
