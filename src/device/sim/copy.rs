//! Queued copies and fills, and whose memory an address is.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use super::state::Core;
use super::{INVALID_ACCESS, SimError};
use crate::device::{CopyKind, CopyOp, DevicePtr, LARGE, copy_large, lock};

/// The addresses of all simulated devices.
static DEVICES: Mutex<Vec<(Range<usize>, Weak<Core>)>> = Mutex::new(Vec::new());

/// Returns the simulated device whose addresses these are; `Some(None)` if it is being dropped.
fn owner_of(address: usize, bytes: usize) -> Option<Option<Arc<Core>>> {
    let end = address.saturating_add(bytes);
    let found = lock(&DEVICES)
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
    lock(&DEVICES).push((core.mapping.range(), Arc::downgrade(core)));
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
        let bytes = copies
            .iter()
            .fold(0usize, |n, copy| n.saturating_add(copy.bytes));
        for copy in copies.iter().rev() {
            self.run_copy(copy, bytes >= LARGE)
                .map_err(|message| SimError {
                    operation: "copy",
                    code: INVALID_ACCESS,
                    message,
                })?;
        }
        Ok(())
    }

    fn run_copy(&self, copy: &CopyOp, large: bool) -> Result<(), String> {
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
        unsafe {
            match large {
                true => copy_large(from, to, bytes),
                false => std::ptr::copy_nonoverlapping(from, to, bytes),
            }
        }
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
        lock(&DEVICES).retain(|(other, _)| *other != range);
    }
}
