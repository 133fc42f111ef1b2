//! Devices whose memory other processes can map.

use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use arrow_device::device::DevicePtr;
use arrow_device::device::sim::{SimBacking, SimConfig, SimDevice};
use arrow_device::{ArrowDeviceType, Device, DeviceBuffer, DeviceId, DeviceRecordBatch, Devices};

use crate::error::{Error, Result};
use crate::manifest::machine;
use crate::region::{self, Region, check_owner};

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
    // SAFETY: each region is a mapping of its own, of zeros, aligned to a page, to which nobody else writes.
    let cpu = || unsafe { Devices::cpu().with_memory(allocate, region::free) };
    CPU.get_or_init(|| cpu().expect("the CPU can have such memory"))
        .clone()
}

fn allocate(device: DeviceId, bytes: usize) -> arrow_device::Result<DevicePtr> {
    check_owner()?;
    let region = Region::of_file(bytes).map_err(|e| match e {
        Error::Io { source, .. } if is_too_much(&source) => arrow_device::Error::OutOfMemory {
            device,
            operation: "allocate shared memory",
            bytes,
        },
        // Such as a lack of descriptors.
        e => e.into(),
    })?;
    Ok(region.publish())
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
        let region = Arc::new(Region::of_file(bytes).ok()?);
        let start = NonNull::new(region.start.as_ptr().cast())?;
        let bytes = region.bytes;
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
    let of = buffer.device().id().device_type;
    if of == ArrowDeviceType::CPU || of == ArrowDeviceType::CUDA {
        return region::find(address, bytes);
    }
    let sim = buffer.device().backend().downcast_ref::<SimDevice>()?;
    let (owner, within) = sim.backing(address, bytes)?;
    Some((owner.downcast().ok()?, within))
}

/// Copies a batch to one shareable allocation, once, on its device.
///
/// # Errors
/// Refuses devices that have no such memory, before anything is copied.
pub(crate) fn copied(batch: &DeviceRecordBatch) -> Result<DeviceRecordBatch> {
    let device = batch.device();
    let shared = match device.id().device_type {
        ArrowDeviceType::CPU => shared_cpu(),
        #[cfg(feature = "cuda")]
        ArrowDeviceType::CUDA => crate::cuda::shared_cuda(device)?,
        ArrowDeviceType::EXT_DEV => device.clone(),
        _ => return Err(own_memory(device)),
    };
    Ok(match *device == shared {
        true => batch.compact()?,
        false => batch.to_device(&shared)?,
    })
}

pub(crate) fn own_memory(device: &Device) -> Error {
    let reason = "its memory is this process's own; copy the batch with to_device to \
                  arrow_device_share::shared_cpu or shared_cuda, or simulate the device with shared_sim";
    Error::not_shared(device.id(), reason)
}

/// Whether there is not as much memory, or no file as large.
fn is_too_much(error: &std::io::Error) -> bool {
    use std::io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::OutOfMemory | Kind::StorageFull | Kind::FileTooLarge | Kind::InvalidInput
    )
}

/// Returns what names the GPU that a device is, or the machine and its start if it is none: memory is shared within one only.
pub(crate) fn origin(device: &Device) -> Result<[u8; 16]> {
    #[cfg(feature = "cuda")]
    if device.id().device_type == ArrowDeviceType::CUDA {
        return crate::cuda::uuid(device);
    }
    let _ = device;
    Ok(machine())
}
