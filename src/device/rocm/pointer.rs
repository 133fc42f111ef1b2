//! What HIP reports about an address, in the numbering of its version.

use super::sys::PointerAttributes;
use crate::device::gpu::PointerKind;

/// Whose memory an address is, by attributes that a runtime of this version wrote.
pub(super) fn kind(version: i32, address: usize, found: &PointerAttributes) -> PointerKind {
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
