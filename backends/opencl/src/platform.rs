//! The devices of all platforms.

use std::fmt;
use std::ptr::null_mut;
use std::sync::Mutex;

use arrow_device::device::DeviceId;
use arrow_device::{ArrowDeviceType, Error, Result};
use opencl_sys::*;

use crate::codes;
use crate::context::lock;
use crate::memory::{Kind, OpenClMemory};
use crate::sys::{Cl, Failed, Usm, call, info, info_list, text};

/// A device that the loader lists.
#[derive(Clone, Copy)]
pub(crate) struct Listed {
    pub(crate) platform: cl_platform_id,
    pub(crate) device: cl_device_id,
}

/// What OpenCL reports about a device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenClDeviceInfo {
    /// The device's name.
    pub name: String,
    /// The version that the device supports: `OpenCL 3.0 PoCL HSTR: ...`.
    pub version: String,
    /// The name of the device's platform, that is, of its driver.
    pub platform: String,
    /// The memory that arrow-device can allocate, in the order in which it is chosen. The last one,
    /// [`OpenClMemory::Handles`], is there always and chosen only on request.
    pub memory: Vec<OpenClMemory>,
    /// Whether the device is the host's processor.
    pub is_cpu: bool,
    /// The size in bytes of the largest allocation.
    pub max_allocation: usize,
}

impl fmt::Display for OpenClDeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {})", self.name, self.platform, self.version)
    }
}

/// Returns [`Error::DeviceNotAvailable`].
pub(crate) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into().into(),
    }
}

/// Returns [`Error::DeviceNotAvailable`] because a call has failed.
pub(crate) fn absent_after(device: DeviceId, failed: Failed) -> Error {
    let Failed { call, code } = failed;
    absent(
        device,
        format!("{call} failed: {} (code {code})", codes::name(code)),
    )
}

/// Returns the loader.
pub(crate) fn loader(id: DeviceId) -> Result<&'static Cl> {
    let cl = Cl::get().map_err(|why| absent(id, why))?;
    cl.process.check(id, CL_INVALID_CONTEXT)?;
    Ok(cl)
}

/// Returns the loader and all devices, in its order.
pub(crate) fn list(id: DeviceId) -> Result<(&'static Cl, Vec<Listed>)> {
    // PoCL 3.1 finds its devices at the first call, and reports none to another thread meanwhile.
    static ONE: Mutex<()> = Mutex::new(());
    let cl = loader(id)?;
    let _one = lock(&ONE);
    let mut count = 0;
    // SAFETY: the place for the count is valid, and there is no list.
    let counted = unsafe { call!(cl, clGetPlatformIDs(0, null_mut(), &raw mut count)) };
    match counted {
        Err(failed) if failed.code != codes::CL_PLATFORM_NOT_FOUND_KHR => {
            return Err(absent_after(id, failed));
        }
        Ok(()) if count > 0 => {}
        _ => {
            return Err(absent(
                id,
                "OpenCL's loader finds no driver; install the GPU's, or one for CPUs (Debian and Ubuntu: pocl-opencl-icd)",
            ));
        }
    }
    let mut platforms = vec![null_mut(); count as usize];
    // SAFETY: there is room for `count` platforms.
    let listed = unsafe {
        call!(
            cl,
            clGetPlatformIDs(count, platforms.as_mut_ptr(), null_mut())
        )
    };
    listed.map_err(|failed| absent_after(id, failed))?;
    let mut devices = Vec::new();
    for platform in platforms.into_iter().filter(|platform| !platform.is_null()) {
        let all = CL_DEVICE_TYPE_ALL;
        let mut count = 0;
        // SAFETY: the platform is the loader's, the place for the count is valid, and there is no list.
        let counted = unsafe {
            call!(
                cl,
                clGetDeviceIDs(platform, all, 0, null_mut(), &raw mut count)
            )
        };
        // A platform without devices reports that as an error.
        if counted.is_err() {
            continue;
        }
        let mut of_platform = vec![null_mut(); count as usize];
        // SAFETY: there is room for `count` devices.
        let listed = unsafe {
            call!(
                cl,
                clGetDeviceIDs(platform, all, count, of_platform.as_mut_ptr(), null_mut())
            )
        };
        if listed.is_ok() {
            let there = of_platform.into_iter().filter(|device| !device.is_null());
            devices.extend(there.map(|device| Listed { platform, device }));
        }
    }
    Ok((cl, devices))
}

/// Returns the loader and the device of a number.
pub(crate) fn find(id: DeviceId, ordinal: usize) -> Result<(&'static Cl, Listed)> {
    let (cl, devices) = list(id)?;
    if let Some(listed) = devices.get(ordinal) {
        return Ok((cl, *listed));
    }
    Err(absent(
        id,
        match devices.len() {
            0 => "there is no OpenCL device".into(),
            1 => "there is one OpenCL device, 0".into(),
            n => format!("there are {n} OpenCL devices, 0 to {}", n - 1),
        },
    ))
}

/// Returns all OpenCL devices of the machine: the index of each is its number in `opencl:N`.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`] with the reason if there is no OpenCL loader or no driver.
pub fn devices() -> Result<Vec<OpenClDeviceInfo>> {
    let id = DeviceId::new(ArrowDeviceType::OPENCL, 0);
    let (cl, devices) = list(id)?;
    let info = |listed: Listed| {
        // SAFETY: the loader has listed the device.
        let described = unsafe { describe(cl, listed) };
        described
            .map(|(info, _)| info)
            .map_err(|failed| absent_after(id, failed))
    };
    devices.into_iter().map(info).collect()
}

/// Returns what the runtime reports about a device, and its kinds of memory.
///
/// # Safety
/// The platform is one that the loader listed, and the device a live one of it.
pub(crate) unsafe fn describe(
    cl: &Cl,
    listed: Listed,
) -> Result<(OpenClDeviceInfo, Vec<Kind>), Failed> {
    let Listed { platform, device } = listed;
    // SAFETY: the caller guarantees platform and device; each value is read as what the specification says it is. A runtime that
    // does not know a question answers with an error.
    unsafe {
        let device_text =
            |what| info_list!(cl, clGetDeviceInfo(device, what) as [u8]).map(|t| text(&t));
        let bits = |what| info!(cl, clGetDeviceInfo(device, what) as cl_bitfield).unwrap_or(0);
        let kind = info!(
            cl,
            clGetDeviceInfo(device, CL_DEVICE_TYPE) as cl_device_type
        )?;
        let max = info!(
            cl,
            clGetDeviceInfo(device, CL_DEVICE_MAX_MEM_ALLOC_SIZE) as cl_ulong
        )?;
        let platform_name = info_list!(cl, clGetPlatformInfo(platform, CL_PLATFORM_NAME) as [u8])?;
        let extensions = device_text(CL_DEVICE_EXTENSIONS)?;

        let usm = (extensions
            .split(' ')
            .any(|name| name == "cl_intel_unified_shared_memory")
            && bits(CL_DEVICE_DEVICE_MEM_CAPABILITIES_INTEL)
                & CL_UNIFIED_SHARED_MEMORY_ACCESS_INTEL
                != 0
            && bits(CL_DEVICE_HOST_MEM_CAPABILITIES_INTEL) & CL_UNIFIED_SHARED_MEMORY_ACCESS_INTEL
                != 0)
            .then(|| Usm::of(cl, platform).ok())
            .flatten();
        let svm = |capability| {
            cl.svm
                .filter(|_| bits(CL_DEVICE_SVM_CAPABILITIES) & capability != 0)
        };
        let kinds: Vec<_> = [
            usm.map(Kind::Usm),
            svm(CL_DEVICE_SVM_COARSE_GRAIN_BUFFER).map(Kind::Svm),
            svm(CL_DEVICE_SVM_FINE_GRAIN_BUFFER).map(Kind::FineSvm),
            Some(Kind::Handles),
        ]
        .into_iter()
        .flatten()
        .collect();
        let info = OpenClDeviceInfo {
            name: device_text(CL_DEVICE_NAME)?,
            version: device_text(CL_DEVICE_VERSION)?,
            platform: text(&platform_name),
            memory: kinds.iter().map(|kind| kind.name()).collect(),
            is_cpu: kind & CL_DEVICE_TYPE_CPU != 0,
            max_allocation: usize::try_from(max).unwrap_or(usize::MAX),
        };
        Ok((info, kinds))
    }
}
