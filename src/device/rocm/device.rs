//! One device: how it is found, and its memory pool.

use std::ffi::{c_int, c_void};
use std::fmt;

use hip_runtime_sys::{
    hipDeviceAttribute_t, hipMemAllocationType, hipMemLocationType, hipMemPool_t, hipMemPoolAttr,
    hipMemPoolProps,
};

use super::library::{Hip, answer};
use crate::device::DeviceId;
use crate::device::backend::device_error;
use crate::device::gpu::{Answer, Failed, Memory, Runtime, absent, ordinal_of};
use crate::error::Result;

/// A device.
pub(super) struct Rocm {
    pub(super) hip: &'static Hip,
    /// The device's number in the runtime.
    pub(super) ordinal: c_int,
    /// The runtime's.
    pub(super) version: c_int,
    /// Where the device has such.
    pub(super) pool: Option<hipMemPool_t>,
    pub(super) reads_managed: bool,
}

// SAFETY: the handles may be used on any thread; each call makes the device current there.
unsafe impl Send for Rocm {}
// SAFETY: as above; the runtime locks.
unsafe impl Sync for Rocm {}

impl Rocm {
    pub(super) fn new(id: DeviceId, memory: Memory) -> Result<Self> {
        let hip = Hip::get().map_err(|why| absent(id, why))?;
        let count = hip.device_count().map_err(|code| {
            let text = hip.text(code);
            absent(
                id,
                format!("hipGetDeviceCount failed: {text} (code {code})"),
            )
        })?;
        let ordinal = ordinal_of("ROCm", id, count)?;
        let version = hip.version();
        let version =
            version.ok_or_else(|| absent(id, "the HIP runtime does not say its version"))?;
        if memory == Memory::Host && hip.hipLaunchHostFunc.is_none() {
            return Err(absent(
                id,
                "the HIP runtime has no hipLaunchHostFunc, which copies between page-locked memory need; \
                 update ROCm",
            ));
        }
        // From here on `drop` gives everything back.
        let mut rocm = Self {
            hip,
            ordinal,
            version,
            pool: None,
            reads_managed: false,
        };
        let both = hipDeviceAttribute_t::hipDeviceAttributeConcurrentManagedAccess;
        rocm.reads_managed = rocm.attribute(both) != 0;
        rocm.pool = rocm.new_pool().map_err(|Failed { call, code, .. }| {
            // Perhaps for now only: not the device that is missing.
            device_error(id, call, code, hip.text(code))
        })?;
        Ok(rocm)
    }

    /// A device attribute; 0 if the runtime does not know it. The numbers are the same from HIP 5.2 to 7.14.
    fn attribute(&self, attribute: hipDeviceAttribute_t) -> c_int {
        let mut value = 0;
        // SAFETY: `value` is written.
        let ask =
            || unsafe { (self.hip.hipDeviceGetAttribute)(&raw mut value, attribute, self.ordinal) };
        let code = self.hip.quietly(ask);
        if code == 0 { value } else { 0 }
    }

    /// A pool of our own that keeps freed memory until it is trimmed: the default one is everybody's.
    fn new_pool(&self) -> Answer<Option<hipMemPool_t>> {
        let supported = hipDeviceAttribute_t::hipDeviceAttributeMemoryPoolsSupported;
        if self.attribute(supported) == 0 {
            return Ok(None);
        }
        let before = self.enter()?;
        let pool = self.new_pool_here();
        self.leave(before);
        pool.map(Some)
    }

    /// As above; the device is current.
    fn new_pool_here(&self) -> Answer<hipMemPool_t> {
        // SAFETY: integers and a pointer, for which zero is a value, and enums that have a 0.
        let mut props: hipMemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = hipMemAllocationType::hipMemAllocationTypePinned;
        props.location.type_ = hipMemLocationType::hipMemLocationTypeDevice;
        props.location.id = self.ordinal;
        let mut pool = std::ptr::null_mut();
        // SAFETY: `pool` is written.
        answer!("hipMemPoolCreate", unsafe {
            (self.hip.hipMemPoolCreate)(&raw mut pool, &raw const props)
        })?;
        let mut keep = u64::MAX;
        // SAFETY: the attribute is a 64-bit number of bytes.
        let set = answer!("hipMemPoolSetAttribute", unsafe {
            (self.hip.hipMemPoolSetAttribute)(
                pool,
                hipMemPoolAttr::hipMemPoolAttrReleaseThreshold,
                (&raw mut keep).cast::<c_void>(),
            )
        });
        set.map(|()| pool).inspect_err(|_| {
            // SAFETY: just made, and empty.
            unsafe { (self.hip.hipMemPoolDestroy)(pool) };
        })
    }

    /// The pool; there is one where this is asked.
    pub(super) fn pool(&self) -> hipMemPool_t {
        self.pool.unwrap_or(std::ptr::null_mut())
    }
}

impl Drop for Rocm {
    fn drop(&mut self) {
        if let Some(pool) = self.pool {
            if let Ok(before) = self.enter() {
                // SAFETY: made in `new`; memory that is still being freed in stream order stays until then.
                unsafe { (self.hip.hipMemPoolDestroy)(pool) };
                self.leave(before);
            }
        }
    }
}

impl fmt::Debug for Rocm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HIP device {}", self.ordinal)
    }
}
