//! The devices of all platforms, and what each offers.

use std::fmt;
use std::ptr::null_mut;
use std::sync::Mutex;

use arrow_device::device::DeviceId;
use arrow_device::device::engine::Inside;
use arrow_device::{ArrowDeviceType, Error, Result};
use opencl_sys::*;

use crate::sys::{Answer, Cl, Failed, Svm, Usm, call, code_name, list, lock};

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

/// Returns all OpenCL devices of the machine: the index of each is its number in `opencl:N`.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`] with the reason if there is no OpenCL loader or no driver.
pub fn devices() -> Result<Vec<OpenClDeviceInfo>> {
    let id = DeviceId::new(ArrowDeviceType::OPENCL, 0);
    let (cl, _inside) = loader(id)?;
    let info = |listed: Listed| {
        // SAFETY: the loader has listed the device.
        let described = unsafe { describe(cl, listed) };
        described.map_or_else(|failed| Err(absent_after(id, failed)), |(info, _)| Ok(info))
    };
    platforms_devices(cl, id)?.into_iter().map(info).collect()
}

/// Which of OpenCL's memories a device allocates.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum OpenClMemory {
    /// Unified shared memory of the device (cl_intel_unified_shared_memory): device addresses, not readable by the host.
    Usm,
    /// Coarse-grained shared virtual memory (OpenCL 2.0): device addresses. The host could read them only while they are
    /// mapped, so they count as not readable by the host.
    Svm,
    /// `cl_mem` buffers (OpenCL 1.2). Their addresses are placeholders that nothing can be read at, and are not exported:
    /// [`OpenClDevice::resolve`](crate::OpenClDevice::resolve) returns the `cl_mem` behind one.
    Handles,
}

/// A kind of memory, with the functions for it.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Usm(Usm),
    Svm(Svm),
    Handles,
}

impl Kind {
    pub(crate) fn name(self) -> OpenClMemory {
        match self {
            Self::Usm(_) => OpenClMemory::Usm,
            Self::Svm(_) => OpenClMemory::Svm,
            Self::Handles => OpenClMemory::Handles,
        }
    }
}

/// Returns the devices of a context.
///
/// # Safety
/// The context is live.
pub(crate) unsafe fn devices_of(cl: &Cl, context: cl_context) -> Answer<Vec<cl_device_id>> {
    // SAFETY: the caller guarantees the context; the answer is a list of pointers.
    list("clGetContextInfo", null_mut(), |room, to, bytes| unsafe {
        (cl.clGetContextInfo)(context, CL_CONTEXT_DEVICES, room, to, bytes)
    })
}

/// Returns [`Error::DeviceNotAvailable`].
pub(crate) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    let reason = reason.into().into();
    Error::DeviceNotAvailable { device, reason }
}

/// Returns [`Error::DeviceNotAvailable`] because a call has failed.
pub(crate) fn absent_after(device: DeviceId, failed: Failed) -> Error {
    let Failed { call, code } = failed;
    let name = code_name(code);
    absent(device, format!("{call} failed: {name} (code {code})"))
}

/// Returns the loader, which may be used while the other value lives.
pub(crate) fn loader(id: DeviceId) -> Result<(&'static Cl, Inside)> {
    let cl = Cl::get().map_err(|why| absent(id, why))?;
    Ok((cl, cl.health.enter()?))
}

/// A device that the loader lists.
#[derive(Clone, Copy)]
pub(crate) struct Listed {
    pub(crate) platform: cl_platform_id,
    pub(crate) device: cl_device_id,
}

/// Returns the devices of all platforms, in the loader's order.
pub(crate) fn platforms_devices(cl: &Cl, id: DeviceId) -> Result<Vec<Listed>> {
    // PoCL 3.1 finds its devices at the first call, and reports none to another thread meanwhile.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = lock(&ONE);
    // SAFETY: there is room for as many platforms as is said, and a place for their number.
    let platforms =
        handles(|room, to, count| unsafe { call!(code cl.clGetPlatformIDs(room, to, count)) });
    let is_none = |failed: &Failed| failed.code == CL_PLATFORM_NOT_FOUND_KHR;
    let platforms = platforms.or_else(|failed| match is_none(&failed) {
        true => Ok(Vec::new()),
        false => Err(absent_after(id, failed)),
    })?;
    if platforms.is_empty() {
        let reason = "OpenCL's loader finds no driver; install the GPU's, or one for CPUs (Debian and Ubuntu: pocl-opencl-icd)";
        return Err(absent(id, reason));
    }
    let devices = |platform| {
        // A platform without devices reports that as an error.
        // SAFETY: the platform is one of the loader's, and there is room for so many devices and a number (`handles`).
        let devices = handles(|room, to, count| unsafe {
            call!(code cl.clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, room, to, count))
        });
        let listed = move |device| Listed { platform, device };
        devices.unwrap_or_default().into_iter().map(listed)
    };
    Ok(platforms.into_iter().flat_map(devices).collect())
}

/// Asks for a list of handles twice: for their number, and for them.
fn handles<T>(ask: impl Fn(cl_uint, *mut *mut T, *mut cl_uint) -> Answer) -> Answer<Vec<*mut T>> {
    let mut count = 0;
    ask(0, null_mut(), &raw mut count)?;
    let mut handles = vec![null_mut(); count as usize];
    if count > 0 {
        ask(count, handles.as_mut_ptr(), null_mut())?;
    }
    handles.retain(|handle| !handle.is_null());
    Ok(handles)
}

/// Returns what the runtime reports about a device, and its kinds of memory.
///
/// # Safety
/// The platform is one that the loader listed, and the device a live one of it.
pub(crate) unsafe fn describe(cl: &Cl, listed: Listed) -> Answer<(OpenClDeviceInfo, Vec<Kind>)> {
    let Listed { platform, device } = listed;
    // SAFETY: the caller guarantees platform and device; each value is asked for as what the specification says it is. A runtime that
    // does not know a question answers with an error.
    unsafe {
        let device_text = |what| {
            let ask = |room, to, bytes| (cl.clGetDeviceInfo)(device, what, room, to, bytes);
            list("clGetDeviceInfo", 0, ask).map(text)
        };
        let ask =
            |room, to, bytes| (cl.clGetPlatformInfo)(platform, CL_PLATFORM_NAME, room, to, bytes);
        let platform_name = list("clGetPlatformInfo", 0, ask).map(text);
        let number = |what| -> Answer<u64> { call!(info cl.clGetDeviceInfo(device, what)) };
        let has = |what, bits| number(what).is_ok_and(|found| found & bits != 0);
        let extensions = device_text(CL_DEVICE_EXTENSIONS)?;
        let (access, coarse) = (
            CL_UNIFIED_SHARED_MEMORY_ACCESS_INTEL,
            CL_DEVICE_SVM_COARSE_GRAIN_BUFFER,
        );
        let mut extensions = extensions.split(' ');
        let has_usm = extensions.any(|name| name == "cl_intel_unified_shared_memory")
            && has(CL_DEVICE_DEVICE_MEM_CAPABILITIES_INTEL, access)
            && has(CL_DEVICE_HOST_MEM_CAPABILITIES_INTEL, access);
        let usm = has_usm.then(|| Usm::of(cl, platform).ok()).flatten();
        let svm = cl.svm.filter(|_| has(CL_DEVICE_SVM_CAPABILITIES, coarse));
        let kinds = [usm.map(Kind::Usm), svm.map(Kind::Svm), Some(Kind::Handles)];
        let kinds: Vec<_> = kinds.into_iter().flatten().collect();
        let info = OpenClDeviceInfo {
            name: device_text(CL_DEVICE_NAME)?,
            version: device_text(CL_DEVICE_VERSION)?,
            platform: platform_name?,
            memory: kinds.iter().map(|kind| kind.name()).collect(),
            is_cpu: number(CL_DEVICE_TYPE)? & CL_DEVICE_TYPE_CPU != 0,
            max_allocation: number(CL_DEVICE_MAX_MEM_ALLOC_SIZE)?
                .try_into()
                .unwrap_or(usize::MAX),
        };
        Ok((info, kinds))
    }
}

/// Returns a text of the runtime, without the NUL at its end.
fn text(bytes: Vec<u8>) -> String {
    let text = String::from_utf8_lossy(&bytes);
    let text = text.split('\0').next().unwrap_or_default();
    text.trim().to_owned()
}
