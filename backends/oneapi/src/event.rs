//! Events: `sync_event` is a `sycl::event*`.
//!
//! What a queue of this crate has recorded is in a table, which tells it from the events of programs. SYCL itself is asked about
//! states, and waits only for an event that has ended, or after a failure: its own waits hold locks that other threads need while work
//! is behind a host task, and crash when two threads wait across contexts (SYCL 2026.2).

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arrow_device::device::parts::Failure;
use arrow_device::device::{DeviceId, EventPtr};
use arrow_device::{Error, Result};

use crate::object::Owned;
use crate::sys::{is_child, raw};

/// An event that a queue of this crate has recorded.
pub(crate) struct Recorded {
    pub(crate) event: Owned<raw::Event>,
    /// The number of the device.
    pub(crate) device: u64,
    pub(crate) id: DeviceId,
    pub(crate) failure: Arc<Failure>,
    pub(crate) queue: Arc<Owned<raw::Queue>>,
}

static RECORDED: LazyLock<Mutex<HashMap<EventPtr, Arc<Recorded>>>> = LazyLock::new(Mutex::default);

/// `None` in a child of the process, where another thread of the parent may have held the lock.
fn recorded() -> Option<MutexGuard<'static, HashMap<EventPtr, Arc<Recorded>>>> {
    (!is_child()).then(|| RECORDED.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Recorded {
    /// Adds the event to the table.
    pub(crate) fn publish(self) -> EventPtr {
        let ptr = self.event.ptr();
        if let Some(mut recorded) = recorded() {
            recorded.insert(ptr, Arc::new(self));
        }
        ptr
    }

    /// Finds an event by its address.
    pub(crate) fn find(event: EventPtr) -> Option<Arc<Self>> {
        recorded()?.get(&event).cloned()
    }

    /// Releases an event.
    pub(crate) fn release(event: EventPtr) {
        // Dropped without the lock.
        let _released = recorded().and_then(|mut recorded| recorded.remove(&event));
    }

    /// Returns whether the work before the event has completed. It is an error if the device has failed: for SYCL, a host task
    /// that throws completes, and so does work after an event of another library that has failed.
    pub(crate) fn is_complete(&self) -> Result<bool> {
        let checked = match self.event.is_complete() {
            Ok(false) => return Ok(false),
            Ok(true) => self.queue.check(),
            Err(failed) => Err(failed),
        };
        if let Err(failed) = checked {
            self.failure.set(failed.on(self.id));
        }
        self.failure.check()?;
        Ok(true)
    }

    /// Returns how many events of a device are in the table.
    pub(crate) fn count(device: u64) -> usize {
        recorded().map_or(0, |recorded| {
            let events = recorded.values();
            events.filter(|event| event.device == device).count()
        })
    }
}

/// Returns an error for what cannot be the address of a `sycl::event`, which is a `std::shared_ptr`: two addresses.
///
/// # Safety
/// If the address is aligned for two addresses, they can be read.
pub(crate) unsafe fn check(device: DeviceId, event: EventPtr) -> Result<()> {
    let words = event.as_ptr().cast::<[usize; 2]>();
    let is_address = |word: usize| word != 0 && word.is_multiple_of(align_of::<usize>());
    // SAFETY: the caller guarantees that they can be read (see `# Safety`).
    if words.is_aligned() && unsafe { words.read() }.into_iter().all(is_address) {
        return Ok(());
    }
    Err(Error::InvalidArgument(
        format!(
            "sync_event of an array of {device} is {:p}, which is not the address of a sycl::event; the producer must set it to a \
             live sycl::event*, or to null",
            event.as_ptr()
        )
        .into(),
    ))
}

/// Makes this thread wait until `is_complete` returns `true` or an error.
pub(crate) fn wait<E>(
    mut is_complete: impl FnMut() -> std::result::Result<bool, E>,
) -> std::result::Result<(), E> {
    const BRIEF: Duration = Duration::from_micros(100);
    let start = Instant::now();
    while !is_complete()? {
        let waited = start.elapsed();
        match waited < BRIEF {
            true => std::thread::yield_now(),
            // A tenth of the time more, at most.
            false => std::thread::sleep((waited / 10).min(Duration::from_millis(1))),
        }
    }
    Ok(())
}
