//! Devices whose memory other processes can map.

use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use arrow_device::device::sim::{SimBacking, SimConfig, SimDevice};
use arrow_device::device::{Backend, Capabilities, CopyOp, DevicePtr, RawQueue};
use arrow_device::{Device, DeviceBuffer, DeviceId, DeviceRecordBatch};

use crate::error::{Error, Result, check_process};
use crate::region::Region;

/// Returns the CPU as a device whose memory other processes can map: an upload to it, and what is computed on it, can be
/// [sent](crate::Publisher::send) without a copy. The same one at each call.
///
/// Each allocation is a memory file of its own, with a descriptor; small batches that are sent together should be uploaded as one. A
/// child that was forked does not have memory that was not sent yet, and cannot allocate any.
///
/// ```
/// use arrow_array::record_batch;
///
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// let shared = arrow_device_share::shared_cpu().upload(&batch)?; // copied to shared memory here, and never again
/// assert_eq!(shared.to_host()?, batch);
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub fn shared_cpu() -> Device {
    static CPU: OnceLock<Device> = OnceLock::new();
    CPU.get_or_init(|| {
        Device::new(Arc::new(SharedCpu(Arc::new(CpuQueue))))
            .expect("a backend with a default queue becomes a device")
    })
    .clone()
}

/// Returns the configuration of a simulated device whose memory other processes can map.
///
/// ```
/// use arrow_device::Device;
/// use arrow_device::device::sim::{SimConfig, SimDevice};
///
/// let sim = SimDevice::new(arrow_device_share::shared_sim(SimConfig::default()))?;
/// let device = Device::new(sim)?; // its batches can be sent
/// # let _ = device;
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub fn shared_sim(config: SimConfig) -> SimConfig {
    let memory = |bytes| {
        let region = Arc::new(Region::new(bytes).ok()?);
        let (start, bytes) = (region.start(), region.bytes());
        // SAFETY: the region keeps its mapping, to which nobody else writes: other processes map it read-only.
        Some(unsafe { SimBacking::new(start, bytes, region) })
    };
    SimConfig {
        memory: Some(memory),
        ..config
    }
}

/// Returns the shareable allocation in which a buffer lies, and where.
pub(crate) fn region_of(buffer: &DeviceBuffer) -> Option<(Arc<Region>, usize)> {
    let (address, bytes) = (buffer.address(), buffer.len());
    if buffer.device().id() == DeviceId::CPU {
        check_owner().ok()?;
        let regions = REGIONS.read().unwrap_or_else(PoisonError::into_inner);
        let (start, region) = regions.range(..=address.address()).next_back()?;
        let within = address.address() - start;
        let fits = within.checked_add(bytes)? <= region.bytes();
        return fits.then(|| (region.clone(), within));
    }
    let sim = buffer.device().backend().downcast_ref::<SimDevice>()?;
    let (owner, within) = sim.backing(address, bytes)?;
    Some((owner.downcast().ok()?, within))
}

/// Copies a batch to one shareable allocation, once, on its device.
pub(crate) fn copied(batch: &DeviceRecordBatch) -> Result<DeviceRecordBatch> {
    let cpu = shared_cpu();
    Ok(match batch.device() {
        device if device.id() == DeviceId::CPU && *device != cpu => batch.to_device(&cpu)?,
        _ => batch.compact()?,
    })
}

/// Whether there is not as much memory, or no file as large.
fn is_too_much(error: &std::io::Error) -> bool {
    use std::io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::OutOfMemory | Kind::StorageFull | Kind::FileTooLarge | Kind::InvalidInput
    )
}

/// The allocations of the shared CPU by their addresses.
static REGIONS: RwLock<BTreeMap<usize, Arc<Region>>> = RwLock::new(BTreeMap::new());

/// Fails in a forked child of the process that has used [`REGIONS`] first.
fn check_owner() -> Result<()> {
    static PROCESS: OnceLock<u32> = OnceLock::new();
    check_process(*PROCESS.get_or_init(std::process::id))
}

#[derive(Debug)]
struct SharedCpu(Arc<CpuQueue>);

#[derive(Debug)]
struct CpuQueue;

// SAFETY: the memory is mapped for the host to read and write, and zero at first; work has completed when a call returns, and there are
// no events; `classify` accepts no address.
unsafe impl Backend for SharedCpu {
    fn capabilities(&self) -> Capabilities {
        let mut is = Capabilities::new(DeviceId::CPU);
        (is.host_readable, is.synchronous) = (true, true);
        is
    }

    fn default_queue(&self) -> arrow_device::Result<Arc<dyn RawQueue>> {
        Ok(self.0.clone())
    }

    fn new_queue(&self) -> arrow_device::Result<Arc<dyn RawQueue>> {
        Ok(self.0.clone())
    }

    fn synchronize(&self) -> arrow_device::Result<()> {
        Ok(())
    }
}

// SAFETY: each allocation is a mapping of its own, of at least the requested size and aligned to a page; work runs at once, so in order.
unsafe impl RawQueue for CpuQueue {
    fn allocate(&self, bytes: usize) -> arrow_device::Result<DevicePtr> {
        if bytes == 0 {
            let what = "allocation of 0 bytes";
            return Err(arrow_device::Error::InvalidArgument(what.into()));
        }
        check_owner()?;
        let region = Region::new(bytes).map_err(|e| match e {
            Error::Io { source, .. } if is_too_much(&source) => arrow_device::Error::OutOfMemory {
                device: DeviceId::CPU,
                operation: "allocate shared memory",
                bytes,
            },
            // Such as a lack of descriptors.
            e => e.into(),
        })?;
        let start = region.start().as_ptr();
        let mut regions = REGIONS.write().unwrap_or_else(PoisonError::into_inner);
        regions.insert(start.addr(), Arc::new(region));
        Ok(DevicePtr::new(start.cast()))
    }

    unsafe fn free(&self, base: DevicePtr, _bytes: usize) -> arrow_device::Result<()> {
        // The child's copy of a region, and the addresses, stay as they are.
        if check_owner().is_err() {
            return Ok(());
        }
        let mut regions = REGIONS.write().unwrap_or_else(PoisonError::into_inner);
        let freed = regions.remove(&base.address());
        // Unmapped without the lock, once nobody is about to send it.
        drop(regions);
        let what = "free of memory that is not allocated";
        freed.map_or(
            Err(arrow_device::Error::InvalidArgument(what.into())),
            |_| Ok(()),
        )
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> arrow_device::Result<()> {
        for copy in copies {
            let (src, dst) = (copy.src.as_ptr(), copy.dst.as_ptr());
            // SAFETY: the caller guarantees that all ranges are valid and do not overlap (see `RawQueue::copy`); all are memory of the
            // host.
            unsafe { ptr::copy_nonoverlapping::<u8>(src.cast(), dst.cast(), copy.bytes) };
        }
        Ok(())
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> arrow_device::Result<()> {
        // SAFETY: the caller guarantees that `bytes` bytes at `dst` are valid (see `RawQueue::fill`).
        unsafe { ptr::write_bytes(dst.as_ptr().cast::<u8>(), byte, bytes) };
        Ok(())
    }
}
