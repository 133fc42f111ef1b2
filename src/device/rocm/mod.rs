//! ROCm devices: ARROW_DEVICE_ROCM and ROCM_HOST, on the HIP runtime. The public interface is [`crate::rocm`].
//!
//! This file has how a device is opened, and what HIP does differently from CUDA, for [`gpu`]: the current device, the thread's last error,
//! kinds of memory, copies; `sys.rs` has the runtime's library, loaded at run time.

mod sys;

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::ops::Range;

use hip_runtime_sys::{hipDeviceAttribute_t as Attribute, hipMemcpyKind};

use self::sys::{Hip, PointerAttributes};
use crate::abi::ArrowDeviceType;
use crate::device::backend::CopyOp;
use crate::device::gpu::{
    self, Answer, Code, Found, Gpu, Library, PointerKind, RawStream, Vendor, find,
};
use crate::device::{DeviceId, Devices, absent};
use crate::error::Result;

/// Returns the number of ROCm devices.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`](crate::Error::DeviceNotAvailable) with the reason if there is no HIP runtime.
pub fn device_count() -> Result<usize> {
    gpu::device_count::<Hip>(ArrowDeviceType::ROCM)
}

/// Registers the two ROCm device types with a set of devices. [`Devices::global`] has them already.
pub fn register(devices: &Devices) {
    for device_type in [ArrowDeviceType::ROCM, ArrowDeviceType::ROCM_HOST] {
        devices.register(device_type, move |ordinal| {
            let id = DeviceId::new(device_type, ordinal);
            let rocm = Rocm::new(id)?;
            let pools = rocm.has(Attribute::hipDeviceAttributeMemoryPoolsSupported);
            let reads_managed = rocm.has(Attribute::hipDeviceAttributeConcurrentManagedAccess);
            Gpu::open(id, rocm, pools, reads_managed)
        });
    }
}

/// A device.
pub(crate) struct Rocm {
    hip: &'static Hip,
    /// The device's number in the runtime.
    ordinal: c_int,
    /// The runtime's version.
    version: c_int,
}

impl Rocm {
    fn new(id: DeviceId) -> Result<Self> {
        let (hip, ordinal) = find::<Hip>(id)?;
        let mut version = 0;
        // SAFETY: `version` is valid for the write of an int.
        let asked = hip.quietly(|| unsafe { hip.functions.get_version(&raw mut version) });
        asked.map_err(|_| absent(id, "the HIP runtime does not say its version"))?;
        Ok(Self {
            hip,
            ordinal,
            version,
        })
    }

    /// Whether a device attribute is set. Those that this crate asks for have the same numbers from HIP 5.2 to 7.14.
    fn has(&self, attribute: Attribute) -> bool {
        gpu::has(self.hip, attribute as c_int, self.ordinal)
    }

    /// Makes the device current; returns the number of the one before it.
    fn set_current(&self) -> Answer<c_int> {
        let mut before = -1;
        // SAFETY: `before` is valid for the write of an int.
        unsafe { self.hip.functions.get_device(&raw mut before) }?;
        if before != self.ordinal {
            // SAFETY: the runtime checks the number.
            unsafe { self.hip.functions.set_device(self.ordinal) }?;
        }
        Ok(before)
    }

    fn kind_of(&self, address: usize) -> Answer<PointerKind> {
        const INVALID_VALUE: c_int = 1;
        let mut found = PointerAttributes::NONE;
        let ptr = std::ptr::without_provenance(address);
        // SAFETY: `found` is valid for the write of the attributes. The runtime looks the address
        // up and does not follow it.
        match unsafe { self.hip.functions.pointer_attributes(&raw mut found, ptr) } {
            Ok(()) => Ok(kind(self.version, address, &found)),
            // What HIP 5, and some later ones, return for memory that is not theirs.
            Err(failed) if failed.code == INVALID_VALUE => Ok(PointerKind::Unknown),
            Err(failed) => Err(failed),
        }
    }

    /// Returns the range of the allocation at an address.
    fn range_of(&self, address: usize) -> Option<Range<usize>> {
        let (mut start, mut bytes) = (std::ptr::null_mut::<c_void>(), 0);
        let ptr = std::ptr::without_provenance_mut(address);
        // SAFETY: both results are valid for the write of their types. The runtime looks the
        // address up and does not follow it.
        let found = unsafe {
            self.hip
                .functions
                .address_range(&raw mut start, &raw mut bytes, ptr)
        };
        let range = start.addr()..start.addr().checked_add(bytes)?;
        (found.is_ok() && range.contains(&address)).then_some(range)
    }
}

// SAFETY: each method is the call of the runtime that its name and its documentation ask for; the
// runtime aligns memory to 256 bytes and more.
unsafe impl Vendor for Rocm {
    type Library = Hip;
    /// The thread's device and last error.
    type Before = (c_int, Code);
    type Given = Box<dyn Any + Send + Sync>;

    fn enter(&self) -> Answer<(c_int, Code)> {
        let last_error = self.hip.last_error();
        let before = self.set_current();
        let before = before.inspect_err(|_| self.hip.forget_error(last_error))?;
        Ok((before, last_error))
    }

    fn leave(&self, (before, last_error): (c_int, Code)) {
        if before != self.ordinal {
            // SAFETY: the runtime checks the number, which is the thread's own device as it was.
            let _ = unsafe { self.hip.functions.set_device(before) };
        }
        self.hip.forget_error(last_error);
    }

    unsafe fn foreign(&self, stream: RawStream) -> Answer<Option<String>> {
        let Some(call) = &self.hip.stream_device else {
            // An older runtime does not know: the caller of `from_hip_stream` guarantees it.
            return Ok(None);
        };
        let mut of = -1;
        // SAFETY: the caller guarantees a live stream (see `Vendor::foreign`); `of` is valid for
        // the write of an int.
        call.check(unsafe { (call.function)(stream, &raw mut of) })?;
        let other = || format!("the stream belongs to ROCm device {of}; use that device");
        Ok((of != self.ordinal).then(other))
    }

    fn look_up(&self, address: usize) -> Answer<Found> {
        let kind = self.kind_of(address)?;
        // The runtime may report more than is memory where a program has mapped some by itself.
        let range = self.range_of(address).filter(|range| {
            kind != PointerKind::Unknown && self.kind_of(range.end - 1) == Ok(kind)
        });
        Ok((kind, range))
    }

    fn peer_of(&self, kind: PointerKind) -> Answer<Option<usize>> {
        let PointerKind::Device(of, _) = kind else {
            return Ok(None);
        };
        let of = usize::try_from(of).ok();
        Ok(of.filter(|of| *of != self.ordinal as usize))
    }

    unsafe fn copy(&self, copy: &CopyOp, from: Option<usize>, stream: RawStream) -> Answer {
        let (dst, src, bytes) = (copy.dst.as_ptr(), copy.src.as_ptr(), copy.bytes);
        const DEFAULT: c_int = hipMemcpyKind::hipMemcpyDefault as c_int;
        match from {
            // SAFETY: the caller guarantees live memory and a live or default stream (see
            // `Vendor::copy`). All memory is in one address space, in which the runtime finds the
            // direction.
            None => unsafe { self.hip.functions.copy(dst, src, bytes, DEFAULT, stream) },
            Some(of) => {
                let of = of as c_int;
                // SAFETY: the caller guarantees live memory, a live or default stream, and that
                // `of` is what `peer_of` returned: the number of the source's device (see
                // `Vendor::copy`).
                unsafe {
                    self.hip
                        .functions
                        .copy_peer(dst, self.ordinal, src, of, bytes, stream)
                }
            }
        }
    }
}

impl fmt::Debug for Rocm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HIP {} device {}", self.version, self.ordinal)
    }
}

/// Whose memory an address is, by attributes that a runtime of this version wrote.
fn kind(version: i32, address: usize, found: &PointerAttributes) -> PointerKind {
    /// Memory that neither a device of this crate nor the host may touch.
    const NOBODYS: PointerKind = PointerKind::Device(-1, None);
    let host = PointerKind::Host {
        mapped: found.device_pointer.addr() == address,
    };
    let device = PointerKind::Device(found.device, None);
    // HIP_VERSION: major * 10,000,000 + minor * 100,000 + patch. Arrays are no linear memory,
    // "unified" is not used, and what has another number has come later.
    let kind = match (version / 10_000_000, found.memory_type) {
        (..=5, 0) => host,
        (..=5, 1) => device,
        (..=5, 4) => PointerKind::Managed,
        (6.., 0) => return PointerKind::Unknown,
        (6.., 1) => host,
        (6.., 2) => device,
        (6.., 3) => PointerKind::Managed,
        _ => return NOBODYS,
    };
    // Some versions report managed memory as the host's or the device's.
    if found.is_managed != 0 {
        return PointerKind::Managed;
    }
    kind
}

#[cfg(test)]
mod tests {
    use std::ffi::c_uint;

    use super::*;

    const HIP_5: i32 = 50_221_153;
    const HIP_6: i32 = 60_342_134;
    const HIP_7: i32 = 71_460_850;

    fn told(version: i32, memory_type: c_uint, is_managed: i32) -> PointerKind {
        let found = PointerAttributes {
            memory_type,
            device: 3,
            device_pointer: std::ptr::without_provenance_mut(64),
            is_managed,
            ..PointerAttributes::NONE
        };
        kind(version, 64, &found)
    }

    #[test]
    fn each_version_has_its_numbers() {
        let host = PointerKind::Host { mapped: true };
        let device = PointerKind::Device(3, None);
        let nobodys = PointerKind::Device(-1, None);
        assert_eq!(
            [0, 1, 4].map(|n| told(HIP_5, n, 0)),
            [host, device, PointerKind::Managed]
        );
        for version in [HIP_6, HIP_7] {
            let expected = [PointerKind::Unknown, host, device, PointerKind::Managed];
            assert_eq!([0, 1, 2, 3].map(|n| told(version, n, 0)), expected);
        }
        // Arrays, unified memory, and numbers that no version has yet.
        assert_eq!([2, 3, 5, u32::MAX].map(|n| told(HIP_5, n, 0)), [nobodys; 4]);
        assert_eq!(
            [4, 10, 11, u32::MAX].map(|n| told(HIP_7, n, 0)),
            [nobodys; 4]
        );
    }

    #[test]
    fn managed_memory_is_managed_under_any_type() {
        for (version, types) in [(HIP_5, [0, 1]), (HIP_7, [1, 2])] {
            for memory_type in types {
                assert_eq!(told(version, memory_type, 1), PointerKind::Managed);
            }
        }
    }

    #[test]
    fn page_locked_memory_at_another_address_is_not_mapped() {
        let found = PointerAttributes {
            memory_type: 1,
            device_pointer: std::ptr::without_provenance_mut(128),
            ..PointerAttributes::NONE
        };
        assert_eq!(kind(HIP_7, 64, &found), PointerKind::Host { mapped: false });
        let found = PointerAttributes {
            device_pointer: std::ptr::null_mut(),
            ..found
        };
        assert_eq!(kind(HIP_7, 64, &found), PointerKind::Host { mapped: false });
    }
}
