//! What a subscriber holds: its connection, and memory that goes back to the publisher once nothing uses it.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(feature = "cuda")]
use std::sync::OnceLock;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[cfg(feature = "cuda")]
use arrow_device::Queue;
use arrow_device::device::DevicePtr;
use arrow_device::device::sim::{SimBacking, SimDevice};
use arrow_device::{ArrowDeviceType, Device, DeviceBuffer, DeviceId, Devices};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::device::origin;
use crate::error::{Error, Result, check_process, lock};
use crate::manifest::Manifest;
use crate::region::Mapping;
use crate::wire::{self, Kind, Outgoing};

/// A connection to a publisher. It stays open until the subscriber is gone and all leases are returned.
#[derive(Debug)]
pub(crate) struct Link {
    socket: OwnedFd,
    pub(crate) process: u32,
    /// What the socket had no room for.
    outbox: Mutex<VecDeque<Outgoing>>,
}

impl Link {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            process: std::process::id(),
            outbox: Mutex::default(),
        }
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends a packet without waiting: now, or once there is room.
    pub(crate) fn post(&self, packet: Outgoing) {
        // A forked child has the same connection, but none of the leases.
        if check_process(self.process).is_ok() {
            self.flush(Some(packet));
        }
    }

    /// Says that nothing more is taken, which ends [`wait`](Self::wait) on other threads, too. Leases go back as before. While there is no
    /// room to say so, reading goes on: a publisher that cannot send, and was not told why, would wait to be told.
    pub(crate) fn leave(&self, last_lease: u64) {
        let gone = Outgoing::short(Kind::GONE, last_lease, &[]);
        if check_process(self.process).is_ok() && self.flush(Some(gone)) == PollFlags::IN {
            self.stop();
        }
    }

    /// Reads nothing more. Our end stays open: to close it would return leases whose memory is in use.
    fn stop(&self) {
        let _ = rustix::net::shutdown(self.socket(), Shutdown::Read);
    }

    /// Sends what there is room for, and returns what to wait for: the publisher, and room for the rest.
    pub(crate) fn flush(&self, last: Option<Outgoing>) -> PollFlags {
        let mut outbox = lock(&self.outbox);
        outbox.extend(last);
        match wire::flush(&mut outbox, self.socket()) {
            Ok(()) if !outbox.is_empty() => return PollFlags::IN | PollFlags::OUT,
            // The publisher is not there any more.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => {}
            // Leases are lost, which end with the connection.
            Err(_) => self.stop(),
        }
        PollFlags::IN
    }

    /// Waits until something has come, the publisher has closed its end, or so much time has passed.
    pub(crate) fn wait(&self, at_most: Option<Duration>) -> Result<()> {
        let at_most = at_most.and_then(|time| Timespec::try_from(time).ok());
        loop {
            let flags = self.flush(None);
            let mut sockets = [PollFd::from_borrowed_fd(self.socket(), flags)];
            match rustix::event::poll(&mut sockets, at_most.as_ref()) {
                Ok(_) if sockets[0].revents() == PollFlags::OUT => {}
                Ok(_) | Err(Errno::INTR) => return Ok(()),
                Err(e) => return Err(Error::of("wait for the publisher")(e)),
            }
        }
    }
}

/// Memory of a lease. Its drop returns the lease.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) link: Arc<Link>,
    pub(crate) number: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.link
            .post(Outgoing::short(Kind::DONE, self.number, &[]));
    }
}

/// Where a subscriber's batches are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    /// A device beside the CPU.
    pub(crate) device: Option<Device>,
    /// Whether the publisher is trusted, so that its memory need not be frozen.
    pub(crate) trusting: bool,
    /// A queue that waits for events of the publisher's.
    #[cfg(feature = "cuda")]
    pub(crate) waiting: OnceLock<Queue>,
}

/// Bytes of a simulated device that were adopted.
struct Adopted(Device, DevicePtr, usize);

impl Drop for Adopted {
    fn drop(&mut self) {
        if let Some(sim) = self.0.backend().downcast_ref::<SimDevice>() {
            // SAFETY: the memory was adopted once, and all work on it has ended: the core drops the owner of memory only then. An error
            // is one of a child process, which has nothing of the device.
            let _ = unsafe { sim.free_now(self.1, self.2) };
        }
    }
}

impl Places {
    /// Maps the memory of a lease as memory of a device of this process: all of it, or nothing if there is none. Sets whether the memory is
    /// ready, or the device waits until it is.
    pub(crate) fn map(
        &self,
        manifest: &mut Manifest,
        file: Option<OwnedFd>,
        lease: Lease,
    ) -> Result<DeviceBuffer> {
        let device = self.device_of(manifest.device_type)?;
        if manifest.origin != origin(&device)? {
            return Error::broken("memory of another machine or GPU");
        }
        if (manifest.size > 0) != file.is_some() {
            return Error::broken("memory and its description do not come together");
        }
        let bytes = usize::try_from(manifest.size);
        let bytes = bytes.map_err(|_| Error::protocol("more memory than there can be"))?;
        let (base, mapped, event): (_, Box<dyn Any + Send + Sync>, _) = match file {
            None => (DevicePtr::NULL, Box::new(()), None),
            #[cfg(feature = "cuda")]
            Some(file) if manifest.device_type == ArrowDeviceType::CUDA => {
                let mapped = crate::cuda::Mapped::of_peer(&device, file, bytes)?;
                // Without the event, the publisher says when the memory is ready, unless it has died.
                let event = manifest.event.filter(|_| !manifest.ready);
                let event = event.map(|event| crate::cuda::arrival(&device, event, &self.waiting));
                let event = event.transpose().unwrap_or_default().flatten();
                manifest.ready |= event.is_some();
                (mapped.base(), Box::new(mapped), event)
            }
            Some(file) => {
                let of_cpu = device.id() == DeviceId::CPU;
                let mapping = Mapping::of_peer(file.as_fd(), bytes, of_cpu)?;
                let start = mapping.start;
                let base = DevicePtr::new(start.as_ptr().cast());
                match device.backend().downcast_ref::<SimDevice>() {
                    _ if of_cpu => (base, Box::new(mapping), None),
                    Some(sim) => {
                        // SAFETY: the mapping has so many bytes and lives as long as the device uses it; the publisher, which the program
                        // trusts, fills it only until it says that it is ready. Nothing on this device writes to a `DeviceBuffer`.
                        let backing = unsafe { SimBacking::new(start, bytes, Arc::new(mapping)) };
                        let base = sim.adopt(backing)?;
                        (base, Box::new(Adopted(device.clone(), base, bytes)), None)
                    }
                    None => return Error::broken("a device that maps no memory"),
                }
            }
        };
        // The fields are dropped in order: the lease is returned once nothing is mapped.
        let owner = Box::new((mapped, lease));
        // SAFETY: so many bytes are there, of the device, until `owner` is dropped. Those of the CPU are in a file that cannot shrink, and to
        // which nobody can write. Those of other devices are filled by the publisher, which the program trusts, until the event, or until
        // it says that they are ready, before which nobody gets the batch.
        Ok(unsafe { DeviceBuffer::from_raw(&device, base, bytes, owner, event) })
    }

    fn device_of(&self, device_type: ArrowDeviceType) -> Result<Device> {
        if device_type == ArrowDeviceType::CPU {
            return Ok(Devices::cpu());
        }
        let device = self.device.as_ref();
        let device = device.filter(|of| of.id().device_type == device_type);
        match device.cloned() {
            Some(device) if self.trusting => Ok(device),
            Some(_) => Error::refused("memory of a device needs SubscriberOptions::trusting"),
            None => Error::refused(format!("batches of {device_type:?} need with_device")),
        }
    }
}
