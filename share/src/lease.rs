//! What a subscriber holds: its connection, and memory that goes back to the publisher once nothing uses it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arrow_device::device::DevicePtr;
use arrow_device::device::sim::{SimBacking, SimDevice};
use arrow_device::{ArrowDeviceType, Device, DeviceBuffer, DeviceId, Devices};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::error::{Error, Result, check_process};
use crate::manifest::{Manifest, machine};
use crate::region::Mapping;
use crate::wire::{Kind, Outgoing, Sent};

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

    /// Sends what there is room for, and returns what to wait for: the publisher, and room for the rest.
    pub(crate) fn flush(&self, last: Option<Outgoing>) -> PollFlags {
        let mut outbox = self.outbox.lock().unwrap_or_else(PoisonError::into_inner);
        outbox.extend(last);
        while let Some(packet) = outbox.front() {
            match packet.send(self.socket()) {
                Ok(Sent::All) => _ = outbox.pop_front(),
                Ok(Sent::NoRoom | Sent::Crowded) => return PollFlags::IN | PollFlags::OUT,
                // The publisher is not there any more.
                Err(Errno::PIPE | Errno::CONNRESET) => outbox.clear(),
                // What was to be sent is lost: the publisher must not take what follows for all there is.
                Err(_) => {
                    outbox.clear();
                    let _ = rustix::net::shutdown(self.socket(), Shutdown::Both);
                }
            }
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
    link: Arc<Link>,
    number: u64,
}

impl Lease {
    pub(crate) fn new(link: Arc<Link>, number: u64) -> Self {
        Self { link, number }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.link.post(Outgoing::empty(Kind::Done, self.number));
    }
}

/// Where a subscriber's batches are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places {
    /// A device beside the CPU.
    pub(crate) device: Option<Device>,
    /// Whether the publisher is trusted, so that its memory need not be frozen.
    pub(crate) trusting: bool,
}

/// The fields are dropped in this order: the lease is returned once nothing is mapped.
struct OnCpu {
    _mapping: Mapping,
    _lease: Lease,
}

struct OnSim {
    device: Device,
    address: DevicePtr,
    bytes: usize,
    _lease: Lease,
}

impl Drop for OnSim {
    fn drop(&mut self) {
        if let Some(sim) = self.device.backend().downcast_ref::<SimDevice>() {
            // SAFETY: the memory was adopted once, and all work on it has ended: the core drops the owner of memory only then. An error
            // is one of a child process, which has nothing of the device.
            let _ = unsafe { sim.free_now(self.address, self.bytes) };
        }
    }
}

impl Places {
    /// Maps the memory of a lease as memory of a device of this process: all of it, or nothing if there is none.
    pub(crate) fn map(
        &self,
        manifest: &Manifest,
        file: Option<OwnedFd>,
        lease: Lease,
    ) -> Result<DeviceBuffer> {
        if manifest.machine != machine() {
            return Err(Error::protocol("memory of another machine"));
        }
        let device = self.device_of(manifest.device_type)?;
        if (manifest.size > 0) != file.is_some() {
            return Err(Error::protocol(
                "memory and its description do not come together",
            ));
        }
        let Some(file) = file else {
            // SAFETY: there are no bytes.
            return Ok(unsafe {
                DeviceBuffer::from_raw(&device, DevicePtr::NULL, 0, Box::new(lease), None)
            });
        };
        let bytes = usize::try_from(manifest.size);
        let bytes = bytes.map_err(|_| Error::protocol("more memory than there can be"))?;
        let of_cpu = device.id() == DeviceId::CPU;
        let mapping = Mapping::of_peer(file.as_fd(), bytes, of_cpu)?;
        let start = mapping.start();
        if of_cpu {
            let base = DevicePtr::new(start.as_ptr().cast());
            let owner = Box::new(OnCpu {
                _mapping: mapping,
                _lease: lease,
            });
            // SAFETY: the mapping has so many bytes, which the host can read. Their file cannot shrink, and nobody can write to it:
            // `of_peer` has checked both.
            return Ok(unsafe { DeviceBuffer::from_raw(&device, base, bytes, owner, None) });
        }
        let sim = device.backend().downcast_ref::<SimDevice>();
        let sim = sim.ok_or_else(|| Error::protocol("memory of a device that cannot be mapped"))?;
        // SAFETY: the mapping has so many bytes and lives as long as the device uses it; the publisher, which the program trusts, fills
        // it only until it says that it is ready. Nothing on this device writes to a `DeviceBuffer`.
        let backing = unsafe { SimBacking::new(start, bytes, Arc::new(mapping)) };
        let address = sim.adopt(backing)?;
        let owner = Box::new(OnSim {
            device: device.clone(),
            address,
            bytes,
            _lease: lease,
        });
        // SAFETY: the device has so many bytes there, until `owner` is dropped.
        Ok(unsafe { DeviceBuffer::from_raw(&device, address, bytes, owner, None) })
    }

    fn device_of(&self, device_type: ArrowDeviceType) -> Result<Device> {
        if device_type == ArrowDeviceType::CPU {
            return Ok(Devices::cpu());
        }
        let device = self.device.as_ref();
        let device = device.filter(|of| of.id().device_type == device_type);
        match device.cloned() {
            Some(device) if self.trusting => Ok(device),
            Some(_) => Err(Error::Refused(
                "memory of a device cannot be frozen: SubscriberOptions::trusting takes it".into(),
            )),
            None => Err(Error::Refused(
                format!("the batches are on a device of type {device_type:?}: with_device").into(),
            )),
        }
    }
}
