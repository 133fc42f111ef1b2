//! Memory of CUDA devices that other processes can map, and events that cross to them.
//!
//! Each allocation is one of the driver's virtual memory management, with a POSIX descriptor of its own; whoever maps it reserves as many
//! addresses as it has bytes. Events of the kind for other processes travel as the driver's 64 bytes.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, OnceLock};

use arrow_device::cuda::cudarc::driver::sys::{
    self, CUdevice_attribute as Of, CUevent, CUmemAccess_flags, CUresult,
};
use arrow_device::device::engine::{Health, Inside};
use arrow_device::device::{DevicePtr, WeakDevice, device_error};
use arrow_device::{Device, DeviceId, Queue, SyncEvent};

use crate::error::{Error, Result, lock};
use crate::region::{self, Region, check_owner};

const FILE: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`.
const EVENT_FLAGS: u32 = 2 | 4;

/// Returns a device over the GPU and the context of a CUDA device, whose memory other processes can map: an upload to it, and what is
/// computed on it, can be [sent](crate::Publisher::send) without a copy. The same one at each call, as long as it is used.
///
/// Each allocation is a whole number of the driver's granules (2 MiB, as a rule) and has a descriptor: small batches that are sent together
/// should be uploaded as one.
///
/// Memory of a GPU cannot be protected from who maps it: subscribers are other processes of the same program, or as trusted. This crate's
/// subscribers only read it. Memory that was freed is kept for reuse, and a process that keeps the descriptor of a batch that it has
/// returned sees what comes to lie there.
///
/// ```no_run
/// use arrow_device::Devices;
/// use arrow_device_share::shared_cuda;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = shared_cuda(&Devices::open("cuda:0")?)?; // its batches can be sent
/// # let _ = device;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Returns [`Error::Device`] if it is no CUDA device, or one without such memory.
pub fn shared_cuda(device: &Device) -> Result<Device> {
    static SHARED: Mutex<BTreeMap<usize, WeakDevice>> = Mutex::new(BTreeMap::new());
    // In a forked child the map may be locked for ever.
    check_owner()?;
    let _current = Current::of(device)?;
    let context = device.cuda_context()?;
    let raw = context.cu_ctx().addr();
    let find = |all: &BTreeMap<_, WeakDevice>| all.get(&raw).and_then(WeakDevice::upgrade);
    if let Some(shared) = find(&lock(&SHARED)) {
        return Ok(shared);
    }
    let needed = [
        Of::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        Of::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ];
    let is_absent = |of| context.attribute(of).unwrap_or(0) == 0;
    if needed.into_iter().any(is_absent) {
        let reason = "the GPU or this system has no virtual memory with descriptors that another process can map";
        return Err(Error::not_shared(device.id(), reason));
    }
    // SAFETY: the driver aligns the memory to its pages, access is set for the device, and nothing else has the addresses. Other processes
    // map the memory to read it.
    let shared = unsafe { device.with_memory(|id, bytes| Ok(allocate(id, bytes)?), region::free) };
    // Not under the lock until here, as this takes its time: another thread may have been first, also where this one has failed.
    let mut all = lock(&SHARED);
    if let Some(first) = find(&all) {
        return Ok(first);
    }
    let shared = shared?;
    // Contexts that are gone.
    all.retain(|_, device| device.upgrade().is_some());
    all.insert(raw, shared.downgrade());
    Ok(shared)
}

/// Calls a function of the driver, whose name is in the error.
macro_rules! call {
    (for $device:expr, $function:ident($($argument:expr),*)) => {
        check($device, stringify!($function), sys::$function($($argument),*))
    };
}

/// Allocates memory with a descriptor. The context is current.
fn allocate(id: DeviceId, bytes: usize) -> Result<DevicePtr> {
    let ordinal = id.id as c_int;
    check_owner()?;
    // SAFETY: all members are numbers or pointers, for which 0 means the default.
    let mut props: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    props.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    props.requestedHandleTypes = FILE;
    props.location = location(ordinal);
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let (mut granule, mut handle, mut fd) = (0, 0, -1 as c_int);
    // SAFETY: the properties have the header's layout, and `granule` is valid for the write of a size.
    unsafe { call!(for id, cuMemGetAllocationGranularity(&raw mut granule, &props, least)) }?;
    // The driver refuses what has no multiple.
    let bytes = bytes
        .checked_next_multiple_of(granule.max(1))
        .unwrap_or(bytes);
    // SAFETY: the properties have the header's layout, and `handle` is valid for the write of a handle.
    unsafe { call!(for id, cuMemCreate(&raw mut handle, bytes, &props, 0)) }?;
    let handle = Handle(handle);
    // SAFETY: the handle is live, and `fd` is valid for the write of a descriptor.
    let exported =
        unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle.0, FILE, 0) };
    // No descriptor is left, of which idle memory has some: the engine frees it, and asks again.
    let exported = match exported {
        CUresult::CUDA_ERROR_OPERATING_SYSTEM => CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        other => other,
    };
    check(id, "cuMemExportToShareableHandle", exported)?;
    // SAFETY: the driver has just made the descriptor for its caller.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::CLOEXEC)
        .map_err(Error::of("keep a descriptor from other programs"))?;
    let mapped = Mapped::new(id, ordinal, &handle, bytes)?;
    Ok(Region::new(mapped.base(), bytes, file, mapped).publish())
}

/// The place of a device's memory. In some versions of the bindings the ordinal is a member of a union.
fn location(ordinal: c_int) -> sys::CUmemLocation {
    const _: () = assert!(size_of::<sys::CUmemLocation>() == size_of::<[c_int; 2]>());
    let device = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_int;
    // SAFETY: the struct is two numbers of four bytes in all versions: the type, which is one of the enum's, and the ordinal.
    unsafe { std::mem::transmute([device, ordinal]) }
}

/// The device's engine knows how many bytes were too many.
fn check(device: DeviceId, operation: &'static str, code: CUresult) -> arrow_device::Result<()> {
    code.result().map_err(|e| match e.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => arrow_device::Error::OutOfMemory {
            device,
            operation,
            bytes: 0,
        },
        code => device_error(device, operation, code as i32, e.to_string()),
    })
}

/// An allocation, which what is mapped of it keeps.
struct Handle(sys::CUmemGenericAllocationHandle);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is live, and this alone has it.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

/// All of an allocation, at addresses of this process, of which a forked child has none.
pub(crate) struct Mapped {
    start: sys::CUdeviceptr,
    bytes: usize,
    health: Health,
}

impl Mapped {
    /// Maps memory for its device to read and write. The context is current.
    fn new(id: DeviceId, ordinal: c_int, handle: &Handle, bytes: usize) -> Result<Self> {
        let mut start = 0;
        // SAFETY: `start` is valid for the write of an address.
        unsafe { call!(for id, cuMemAddressReserve(&raw mut start, bytes, 0, 0, 0)) }?;
        // SAFETY: as many addresses are reserved, and nothing is there; the driver refuses more bytes than the memory has.
        let mapped = unsafe { call!(for id, cuMemMap(start, bytes, 0, handle.0, 0)) };
        mapped.inspect_err(|_| {
            // SAFETY: these were reserved, and nothing is mapped there.
            let _ = unsafe { sys::cuMemAddressFree(start, bytes) };
        })?;
        let health = Health::new(id);
        let this = Self {
            start,
            bytes,
            health,
        };
        let access = sys::CUmemAccessDesc {
            location: location(ordinal),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the memory was mapped there, and there is one description.
        unsafe { call!(for id, cuMemSetAccess(start, bytes, &access, 1)) }?;
        Ok(this)
    }

    /// Maps the memory that a peer passed, `bytes` bytes, for a device.
    pub(crate) fn of_peer(device: &Device, file: OwnedFd, bytes: usize) -> Result<Self> {
        let (id, current) = (device.id(), Current::of(device)?);
        let (mut handle, fd) = (0, file.as_raw_fd() as usize);
        let fd: *mut c_void = std::ptr::without_provenance_mut(fd);
        // SAFETY: the descriptor is open during the call, which passes it as the number that the pointer is.
        unsafe { call!(for id, cuMemImportFromShareableHandle(&raw mut handle, fd, FILE)) }?;
        Self::new(id, current.ordinal, &Handle(handle), bytes)
    }

    pub(crate) fn base(&self) -> DevicePtr {
        DevicePtr::new(std::ptr::with_exposed_provenance_mut(self.start as usize))
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Ok(_inside) = self.health.enter_even_if_failed() {
            // SAFETY: the memory was mapped there, and whoever uses it holds this.
            unsafe {
                let _ = sys::cuMemUnmap(self.start, self.bytes);
                let _ = sys::cuMemAddressFree(self.start, self.bytes);
            }
        }
    }
}

/// The context of a device is current on this thread as long as it lives, and then what was before. The process does not end meanwhile.
struct Current {
    ordinal: c_int,
    _inside: Inside,
}

impl Current {
    fn of(device: &Device) -> Result<Self> {
        let inside = Health::new(device.id()).enter()?;
        let context = device.cuda_context()?;
        // SAFETY: the device keeps the context.
        unsafe { call!(for device.id(), cuCtxPushCurrent_v2(context.cu_ctx())) }?;
        Ok(Self {
            ordinal: context.ordinal() as c_int,
            _inside: inside,
        })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is valid for the write of a handle. What is popped was pushed by `of`.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
    }
}

/// Returns what names a GPU, in whatever order a process sees them.
pub(crate) fn uuid(device: &Device) -> Result<[u8; 16]> {
    let _current = Current::of(device)?;
    let uuid = device.cuda_context()?.uuid();
    let uuid =
        uuid.map_err(|e| device_error(device.id(), "cuDeviceGetUuid", e.0 as i32, e.to_string()))?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// Returns a queue for what only waits, so that no other work waits with it.
fn waiting(queue: &OnceLock<Queue>, device: &Device) -> Result<Queue> {
    if queue.get().is_none() {
        let _ = queue.set(device.new_queue()?);
    }
    let own = queue.get().filter(|queue| queue.device() == device);
    Ok(own.cloned().unwrap_or_else(|| device.default_queue()))
}

fn stream(queue: &Queue) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(queue.raw().stream_handle().unwrap_or_default())
}

/// An event of this process's that others wait for, as long as it lives.
pub(crate) struct Crossing {
    device: Device,
    event: CUevent,
    health: Health,
    pub(crate) handle: [u8; 64],
}

// SAFETY: the driver accepts the event on any thread.
unsafe impl Send for Crossing {}
// SAFETY: nothing is done with the event but to destroy it.
unsafe impl Sync for Crossing {}

impl Crossing {
    /// Makes one that completes with an event of this process.
    ///
    /// # Errors
    /// It is no CUDA device, or the driver has no more of them, or none at all on this system.
    pub(crate) fn new(device: &Device, ready: &SyncEvent, queue: &OnceLock<Queue>) -> Result<Self> {
        let id = device.id();
        let _current = Current::of(device)?;
        let queue = waiting(queue, device)?;
        queue.wait(ready)?;
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is valid for the write of a handle.
        unsafe { call!(for id, cuEventCreate(&raw mut event, EVENT_FLAGS)) }?;
        let mut this = Self {
            device: device.clone(),
            event,
            health: Health::new(id),
            handle: [0; 64],
        };
        // SAFETY: event and stream are live, and of the current context.
        unsafe { call!(for id, cuEventRecord(event, stream(&queue))) }?;
        // SAFETY: the event is live, and the handle has 64 bytes of no alignment.
        unsafe { call!(for id, cuIpcGetEventHandle((&raw mut this.handle).cast(), event)) }?;
        Ok(this)
    }
}

impl Drop for Crossing {
    fn drop(&mut self) {
        let inside = self.health.enter_even_if_failed();
        if let Ok(Ok(_current)) = inside.map(|_inside| Current::of(&self.device)) {
            // SAFETY: this alone has the event. Work that was recorded before stays.
            let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// Returns an event of this process that completes with one of another process.
///
/// # Errors
/// Such as that its owner has died.
pub(crate) fn arrival(
    device: &Device,
    handle: [u8; 64],
    queue: &OnceLock<Queue>,
) -> Result<Option<SyncEvent>> {
    let (id, queue) = (device.id(), waiting(queue, device)?);
    let _current = Current::of(device)?;
    let mut event = std::ptr::null_mut();
    // SAFETY: the struct is 64 bytes, of which all values are valid.
    let handle = unsafe { std::mem::transmute::<[u8; 64], sys::CUipcEventHandle>(handle) };
    // SAFETY: `event` is valid for the write of a handle.
    unsafe { call!(for id, cuIpcOpenEventHandle(&raw mut event, handle)) }?;
    // SAFETY: event and stream are live. The wait stays when the event is destroyed.
    unsafe {
        let waits = call!(for id, cuStreamWaitEvent(stream(&queue), event, 0));
        let _ = sys::cuEventDestroy_v2(event);
        waits
    }?;
    Ok(queue.record()?)
}
