//! Who owns memory, when it is ready, and who still uses it.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::abi::FFI_ArrowDeviceArray;
use crate::device::{
    ALIGNMENT, Device, DevicePtr, EventPtr, EventRef, Queue, Seen, SyncEvent, lock,
};
use crate::error::{Result, bail};
use crate::memory::HostBuffer;

/// One piece of memory with one lifetime, shared by `Arc` between all buffers that lie in it.
///
/// Dropping the last holder frees memory of this crate on its home queue, after all recorded uses. Anything else (a foreign
/// array, host memory under an asynchronous copy) is dropped by the device's release thread once its uses have completed, or at once if
/// there are none. Nothing here waits.
#[derive(Debug)]
pub(crate) struct Owner {
    device: Device,
    /// `None` only while dropping.
    memory: Option<Memory>,
    ready: Ready,
    /// Reads after which the memory may be freed.
    uses: Mutex<Vec<SyncEvent>>,
    /// A use could not be recorded: all work of the device must end before the free.
    unrecorded: AtomicBool,
}

// Arrow requires this of what keeps a buffer's memory. A panic leaves an owner as it was: no lock is held while foreign code runs,
// and what the owner holds is only kept and dropped.
impl std::panic::RefUnwindSafe for Owner {}

/// Fewer events than this are all kept.
const FEW_USES: usize = 4;

/// The memory itself, or what keeps it alive.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Memory that this crate allocated on a device, and its home queue.
    Device {
        queue: Queue,
        base: DevicePtr,
        bytes: usize,
    },
    /// Host memory of this crate.
    Host(HostBuffer),
    /// A foreign producer's array, which owns the memory until its release.
    Foreign(FFI_ArrowDeviceArray),
    /// Any other owner, which is only kept and dropped.
    Kept(#[allow(dead_code)] Box<dyn Any + Send + Sync>),
}

/// When the memory may be read.
#[derive(Debug)]
pub(crate) enum Ready {
    /// Now.
    Now,
    /// After this event.
    Event(SyncEvent),
    /// After the event that the foreign array carries; it lives as long as the array.
    Foreign(EventPtr, Seen),
}

impl Owner {
    pub(crate) fn new(device: Device, memory: Memory, ready: Ready) -> Self {
        Self {
            device,
            memory: Some(memory),
            ready,
            uses: Mutex::default(),
            unrecorded: AtomicBool::new(false),
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the foreign array that is the memory, if it is one.
    pub(crate) fn foreign(&self) -> Option<&FFI_ArrowDeviceArray> {
        match &self.memory {
            Some(Memory::Foreign(array)) => Some(array),
            _ => None,
        }
    }

    /// Returns the bytes of the allocation if it is this crate's.
    pub(crate) fn allocated(&self) -> Option<usize> {
        match &self.memory {
            Some(Memory::Device { bytes, .. }) => Some(*bytes),
            Some(Memory::Host(host)) => Some(host.len()),
            _ => None,
        }
    }

    /// Returns the event after which the memory may be read, if there is one.
    pub(crate) fn ready(&self) -> Option<EventRef<'_>> {
        match &self.ready {
            Ready::Now => None,
            Ready::Event(event) => Some(event.as_ref()),
            // SAFETY: the caller of the import guaranteed an event of the device's type that lives until the array is
            // released, and `memory` holds the array.
            Ready::Foreign(ptr, seen) => Some(unsafe { EventRef::new(&self.device, *ptr, seen) }),
        }
    }

    /// Returns the event of [`ready`](Self::ready) if it is this crate's. A foreign event cannot outlive the memory.
    pub(crate) fn own_event(&self) -> Option<&SyncEvent> {
        match &self.ready {
            Ready::Event(event) => Some(event),
            Ready::Now | Ready::Foreign(..) => None,
        }
    }

    /// Makes `queue` wait until the memory is ready.
    pub(crate) fn wait_on(&self, queue: &Queue) -> Result<()> {
        match self.ready() {
            // Work queued later on the home queue comes after the work that made the memory.
            Some(_) if self.own_event().is_some() && self.is_freed_on(queue) => Ok(()),
            Some(event) => queue.wait_ref(event),
            None => Ok(()),
        }
    }

    /// Makes this thread wait until the memory is ready. Counts no host wait if it is already.
    pub(crate) fn wait_host(&self) -> Result<()> {
        match self.ready() {
            Some(event) if !event.is_complete()? => event.wait(),
            _ => Ok(()),
        }
    }

    /// Returns whether the free comes after all work of `queue` in any case, because it runs on that queue.
    fn is_freed_on(&self, queue: &Queue) -> bool {
        matches!(&self.memory, Some(Memory::Device { queue: home, .. }) if home == queue)
    }

    /// Records that work given to `queue` so far reads the memory.
    pub(crate) fn record_use(&self, queue: &Queue) {
        if self.is_freed_on(queue) {
            return;
        }
        let event = match queue.record() {
            Ok(None) => return,
            Ok(Some(event)) => event,
            Err(_) => return self.add_unknown_use(),
        };
        let mut uses = lock(&self.uses);
        uses.push(event);
        // Completed ones are removed each time that the number has doubled, so that the cost of a use does not depend on how many
        // are pending.
        if uses.len() < FEW_USES || !uses.len().is_power_of_two() {
            return;
        }
        // The backend is called outside the lock.
        let mut events = std::mem::take(&mut *uses);
        drop(uses);
        events.retain(|old| !old.is_complete().unwrap_or(false));
        lock(&self.uses).append(&mut events);
    }

    /// Records that work which nobody knows of may use the memory: the free waits for all work of the device.
    pub(crate) fn add_unknown_use(&self) {
        self.unrecorded.store(true, Ordering::Release);
    }
}

impl Owner {
    /// Transfers memory that this crate allocated, `len` bytes at `base` and their padding, to the caller's work on `queue`,
    /// which waits for what the free would wait for. The owner then owns nothing. Returns the bytes that were allocated.
    pub(super) fn surrender(
        &mut self,
        queue: &Queue,
        base: DevicePtr,
        len: usize,
    ) -> Result<usize> {
        let (home, bytes) = match &self.memory {
            Some(Memory::Device {
                queue: home,
                base: of,
                bytes,
            }) if *of == base && len <= *bytes && *bytes - len < ALIGNMENT => (home, *bytes),
            _ => bail!(
                "the buffer is not all of an allocation on the device; copy it, or call DeviceBufferMut::shrink_to_fit after truncate"
            ),
        };
        self.wait_on(queue)?;
        // Uses on the home queue are not recorded: the free would come after them.
        if home != queue {
            if let Some(event) = home.record()? {
                queue.wait(&event)?;
            }
        }
        if *self.unrecorded.get_mut() {
            self.device.synchronize()?;
            *self.unrecorded.get_mut() = false;
        }
        let uses = self.uses.get_mut().unwrap_or_else(PoisonError::into_inner);
        uses.iter()
            .try_for_each(|event| queue.wait_ref_unless_complete(event))?;
        self.memory = None;
        Ok(bytes)
    }
}

impl Memory {
    fn free(self, device: &Device) {
        match self {
            // SAFETY: `DeviceBufferMut` allocated `bytes` bytes at `base` on a queue of this device and moved them here. The memory is
            // consumed, so this is the only free; `Owner::drop` calls this once its uses on other queues have completed, or the
            // queue waits for them.
            Self::Device { queue, base, bytes } => unsafe { queue.free(base, bytes) },
            Self::Foreign(mut array) => {
                if let Err(e) = array.call_release() {
                    device.park_drop_error(e);
                }
            }
            Self::Host(_) | Self::Kept(_) => {}
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        let uses = self.uses.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut uses = std::mem::take(uses);
        // Memory of this crate is freed in the order of its queue. Other memory may still be written: it must be ready first.
        if let (false, Ready::Event(event)) = (matches!(memory, Memory::Device { .. }), &self.ready)
        {
            uses.push(event.clone());
        }
        if let Memory::Device { queue, .. } = &memory {
            uses.retain(|event| queue.wait_ref_unless_complete(event).is_err());
        }
        if *self.unrecorded.get_mut() {
            let device = self.device.clone();
            self.device.settled(move || {
                let on = device.clone();
                device.after(uses, move || memory.free(&on));
            });
        } else if uses.is_empty() {
            memory.free(&self.device);
        } else {
            let device = self.device.clone();
            self.device.after(uses, move || memory.free(&device));
        }
    }
}
