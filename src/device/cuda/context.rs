//! One context of one device: how it is retained and given back, and its memory pool.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUmemAllocationType, CUmemLocationType,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool,
};

use super::driver::{Driver, answer};
use crate::device::DeviceId;
use crate::device::backend::device_error;
use crate::device::gpu::{Answer, Failed, Runtime, absent, ordinal_of};
use crate::error::{Error, Result};

/// A context.
pub(super) struct Cuda {
    pub(super) driver: &'static Driver,
    /// The device's number in the driver.
    pub(super) ordinal: c_int,
    device: CUdevice,
    raw: CUcontext,
    /// The context's owner; `None`: the primary one, retained here.
    given: Option<Arc<CudaContext>>,
    /// Where the device has such.
    pub(super) pool: Option<CUmemoryPool>,
    pub(super) reads_managed: bool,
    /// Primary contexts of other devices, by ordinal, retained.
    others: Mutex<Vec<(c_int, CUdevice, CUcontext)>>,
}

// SAFETY: the handles may be used on any thread; each call makes the context current there.
unsafe impl Send for Cuda {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// The primary context of a device, or the one that is given.
    pub(super) fn new(id: DeviceId, given: Option<Arc<CudaContext>>) -> Result<Self> {
        let driver = Driver::get().map_err(|why| absent(id, why))?;
        let failed = |call: &str, code| {
            let text = driver.text(code);
            absent(id, format!("{call} failed: {text} (code {code})"))
        };
        let count = driver
            .device_count()
            .map_err(|code| failed("cuDeviceGetCount", code))?;
        let ordinal = ordinal_of("CUDA", id, count)?;
        let mut device: CUdevice = 0;
        // SAFETY: `device` is written.
        match unsafe { (driver.cuDeviceGet)(&raw mut device, ordinal) } {
            0 => {}
            code => return Err(failed("cuDeviceGet", code)),
        }
        // Perhaps for now only: not the device that is missing.
        let refused = |Failed { call, code, .. }| device_error(id, call, code, driver.text(code));
        let raw = match &given {
            Some(context) if context.ordinal() as i64 != id.id => {
                let ordinal = context.ordinal();
                return Err(Error::argument(format!(
                    "a context of CUDA device {ordinal} for {id}"
                )));
            }
            Some(context) => context.cu_ctx(),
            // Released in `drop`.
            None => retain(driver, device).map_err(refused)?,
        };
        // From here on `drop` gives everything back.
        let mut cuda = Self {
            driver,
            ordinal,
            device,
            raw,
            given,
            pool: None,
            reads_managed: false,
            others: Mutex::new(Vec::new()),
        };
        if cuda.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) == 0 {
            return Err(absent(id, "the device has no unified addressing"));
        }
        let both = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        cuda.reads_managed = cuda.attribute(both) != 0;
        cuda.pool = cuda.new_pool().map_err(refused)?;
        Ok(cuda)
    }

    /// A device attribute; 0 if the driver does not know it.
    pub(super) fn attribute(&self, attribute: CUdevice_attribute) -> c_int {
        let mut value = 0;
        // SAFETY: `value` is written.
        let code =
            unsafe { (self.driver.cuDeviceGetAttribute)(&raw mut value, attribute, self.device) };
        if code == 0 { value } else { 0 }
    }

    /// A pool of our own that keeps freed memory until it is trimmed: the default one gives it back
    /// at every synchronisation, and is everybody's. Pools are the device's, not a context's.
    fn new_pool(&self) -> Answer<Option<CUmemoryPool>> {
        let supported = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        if self.attribute(supported) == 0 {
            return Ok(None);
        }
        let before = self.enter()?;
        let pool = self.new_pool_here();
        self.leave(before);
        pool.map(Some)
    }

    /// As above; the context is current.
    fn new_pool_here(&self) -> Answer<CUmemoryPool> {
        // SAFETY: all members are integers or pointers, for which zero is a value.
        let mut props: CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        // The second member: its name depends on the version of the bindings.
        // SAFETY: `CUmemLocation` is a C struct of the type and an int, the device.
        unsafe {
            (&raw mut props.location)
                .cast::<c_int>()
                .add(1)
                .write(self.device);
        }
        let mut pool = std::ptr::null_mut();
        // SAFETY: `pool` is written.
        answer!("cuMemPoolCreate", unsafe {
            (self.driver.cuMemPoolCreate)(&raw mut pool, &raw const props)
        })?;
        let mut keep = u64::MAX;
        // SAFETY: the attribute is a 64-bit number of bytes.
        let set = answer!("cuMemPoolSetAttribute", unsafe {
            (self.driver.cuMemPoolSetAttribute)(
                pool,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                (&raw mut keep).cast::<c_void>(),
            )
        });
        set.map(|()| pool).inspect_err(|_| {
            // SAFETY: just made, and empty.
            unsafe { (self.driver.cuMemPoolDestroy)(pool) };
        })
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    pub(super) fn given(&self) -> Option<&Arc<CudaContext>> {
        self.given.as_ref()
    }

    /// The pool; there is one where this is asked.
    pub(super) fn pool(&self) -> CUmemoryPool {
        self.pool.unwrap_or(std::ptr::null_mut())
    }

    /// The primary context of another device, for copies out of its memory. Kept as long as this one.
    pub(super) fn primary_of(&self, ordinal: c_int) -> Answer<CUcontext> {
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, _, raw)) = others.iter().find(|(of, ..)| *of == ordinal) {
            return Ok(*raw);
        }
        let mut device: CUdevice = 0;
        // SAFETY: `device` is written.
        answer!("cuDeviceGet", unsafe {
            (self.driver.cuDeviceGet)(&raw mut device, ordinal)
        })?;
        let raw = retain(self.driver, device)?;
        others.push((ordinal, device, raw));
        Ok(raw)
    }
}

/// A device's primary context.
fn retain(driver: &Driver, device: CUdevice) -> Answer<CUcontext> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` is written; who asks releases it.
    answer!("cuDevicePrimaryCtxRetain", unsafe {
        (driver.cuDevicePrimaryCtxRetain)(&raw mut raw, device)
    })?;
    Ok(raw)
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if let Some(pool) = self.pool {
            if let Ok(before) = self.enter() {
                // SAFETY: made in `new`; memory that is still being freed in stream order stays until then.
                unsafe { (self.driver.cuMemPoolDestroy)(pool) };
                self.leave(before);
            }
        }
        let others = self.others.get_mut();
        for (_, device, _) in others.unwrap_or_else(PoisonError::into_inner).drain(..) {
            // SAFETY: retained in `primary_of`.
            unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(device) };
        }
        match self.given.take() {
            Some(context) => self.driver.let_go(context, || ()),
            // SAFETY: retained in `new`.
            None => unsafe {
                (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device);
            },
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.raw)
    }
}
