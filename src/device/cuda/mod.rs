//! CUDA devices: ARROW_DEVICE_CUDA, CUDA_HOST and CUDA_MANAGED. The public interface is [`crate::cuda`].
//!
//! This file has how a device is opened, a device's context, what CUDA does differently from HIP, for [`gpu`], and objects of cudarc's that
//! are kept; `sys.rs` has the driver library, loaded at run time.

mod sys;

use std::ffi::c_int;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute as Attribute, CUdeviceptr, CUpointer_attribute as Is,
};
use cudarc::driver::{CudaContext, CudaStream, DriverError};

use self::sys::{Driver, IN_STREAM_ORDER};
use crate::abi::ArrowDeviceType;
use crate::device::backend::{CopyOp, Program, device_error};
use crate::device::engine::Engine;
use crate::device::gpu::{
    self, Answer, Context, Failed, Found, Gpu, Library, PointerKind, RawStream, Vendor, find,
};
use crate::device::{Device, DeviceId, Devices, absent, lock};
use crate::error::{Error, Result};

/// The device types, one for each kind of memory.
const TYPES: [ArrowDeviceType; 3] = [
    ArrowDeviceType::CUDA,
    ArrowDeviceType::CUDA_HOST,
    ArrowDeviceType::CUDA_MANAGED,
];

/// Returns the number of CUDA devices.
///
/// # Errors
/// Returns [`Error::DeviceNotAvailable`] with the reason if there is no driver.
pub fn device_count() -> Result<usize> {
    gpu::device_count::<Driver>(ArrowDeviceType::CUDA)
}

/// Registers the three CUDA device types with a set of devices, in their primary contexts.
/// [`Devices::global`] has them already.
pub fn register(devices: &Devices) {
    for device_type in TYPES {
        devices.register(device_type, move |ordinal| {
            open(DeviceId::new(device_type, ordinal), None, None)
        });
    }
}

/// Returns a device of the same context whose memory a program allocates.
pub(crate) fn with_memory(device: &Device, program: Program) -> Result<Device> {
    open(device.id(), Some(device.cuda_context()?), Some(program))
}

/// Opens a device in its primary context, or in the one that is given.
fn open(id: DeviceId, given: Option<Arc<CudaContext>>, program: Option<Program>) -> Result<Device> {
    let mut cuda = Cuda::new(id, given)?;
    cuda.program = program;
    let pools =
        program.is_none() && cuda.has(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
    let reads_managed = cuda.has(Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
    Gpu::open(id, cuda, pools, reads_managed)
}

impl Device {
    /// Opens the device of a CUDA context, which may be another one than the device's primary one.
    /// Arrays of the device have the type `device_type`: ARROW_DEVICE_CUDA for the device's own
    /// memory, CUDA_HOST for page-locked host memory, or CUDA_MANAGED. The device keeps the context
    /// alive. [`Devices::open`]`("cuda:0")` uses the primary context.
    ///
    /// ```no_run
    /// use arrow_device::abi::ArrowDeviceType;
    /// use arrow_device::{Device, cuda::cudarc::driver::CudaContext};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let context = CudaContext::new(0)?; // the program's own
    /// let device = Device::from_cuda_context(context, ArrowDeviceType::CUDA)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for another device type,
    /// [`Error::DeviceNotAvailable`] with the reason if the device lacks what is needed, and
    /// otherwise [`Error::Device`] with the driver's error.
    pub fn from_cuda_context(
        context: Arc<CudaContext>,
        device_type: ArrowDeviceType,
    ) -> Result<Self> {
        let id = DeviceId::new(device_type, context.ordinal() as i64);
        if !TYPES.contains(&device_type) {
            drop(Kept::new(context, ()));
            return Err(Error::argument(format!("{id} is no CUDA device")));
        }
        open(id, Some(context), None)
    }

    /// Returns cudarc's handle of a CUDA device's context. For the primary context, the first call
    /// makes the handle and waits for the context's work: cudarc does so when it begins to order
    /// slices between streams. A context that was passed to
    /// [`from_cuda_context`](Self::from_cuda_context) is returned as it is.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device is not a CUDA device of this crate, and
    /// [`Error::Device`] if cudarc cannot retain the context.
    pub fn cuda_context(&self) -> Result<Arc<CudaContext>> {
        Engine::<Gpu<Cuda>>::of(self)?.runtime().context.handle()
    }
}

/// A context.
pub(crate) struct Cuda {
    driver: &'static Driver,
    /// The device's number in the driver.
    ordinal: c_int,
    device: CUdevice,
    pub(crate) raw: CUcontext,
    /// cudarc's handle of the context: the one that was given, or what `handle` has made, with a
    /// stream. cudarc orders slices between streams from the first new stream on.
    handle: OnceLock<Kept<Option<Arc<CudaStream>>>>,
    /// Primary contexts that are retained: that of the device, unless another one was given, and those
    /// of other devices, by ordinal.
    retained: Mutex<Vec<(c_int, CUdevice, CUcontext)>>,
    /// Allocates the device's own memory instead of the driver.
    pub(crate) program: Option<Program>,
}

// SAFETY: the driver accepts the handles on any thread; each call makes the context current there.
unsafe impl Send for Cuda {}
// SAFETY: the driver accepts the handles on several threads at once, and `retained` is locked.
unsafe impl Sync for Cuda {}

impl Cuda {
    /// Makes a device's primary context, or adopts the one that is given.
    fn new(id: DeviceId, given: Option<Arc<CudaContext>>) -> Result<Self> {
        let given = given.map(|context| Kept::new(context, None));
        let (driver, ordinal) = find::<Driver>(id)?;
        // The failure may pass, so it does not say that there is no such device.
        let failed = |Failed { call, code }| device_error(id, call, code, driver.text(code));
        let device = device_of(driver, ordinal).map_err(failed)?;
        // What it retains its `drop` releases.
        let mut cuda = Self {
            driver,
            ordinal,
            device,
            raw: std::ptr::null_mut(),
            handle: given.map_or_else(OnceLock::new, OnceLock::from),
            retained: Mutex::default(),
            program: None,
        };
        cuda.raw = match cuda.handle.get().and_then(|kept| kept.context.as_ref()) {
            Some(context) => context.cu_ctx(),
            None => cuda.primary_of(ordinal).map_err(failed)?,
        };
        if !cuda.has(Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING) {
            return Err(absent(id, "the device has no unified addressing"));
        }
        let needs_managed = id.device_type == ArrowDeviceType::CUDA_MANAGED;
        if needs_managed && !cuda.has(Attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) {
            return Err(absent(id, "the device has no managed memory"));
        }
        Ok(cuda)
    }

    /// Whether a device attribute is set.
    fn has(&self, attribute: Attribute) -> bool {
        gpu::has(self.driver, attribute as c_int, self.device)
    }

    /// Retains the primary context of a device, this one or one whose memory is to be copied.
    fn primary_of(&self, ordinal: c_int) -> Answer<CUcontext> {
        let mut retained = lock(&self.retained);
        if let Some((_, _, raw)) = retained.iter().find(|(of, ..)| *of == ordinal) {
            return Ok(*raw);
        }
        let (device, mut raw) = (device_of(self.driver, ordinal)?, std::ptr::null_mut());
        // SAFETY: `raw` is valid for the write of a handle.
        unsafe { self.driver.functions.retain_primary(&raw mut raw, device) }?;
        retained.push((ordinal, device, raw));
        Ok(raw)
    }
}

fn device_of(driver: &Driver, ordinal: c_int) -> Answer<CUdevice> {
    let mut device: CUdevice = 0;
    // SAFETY: `device` is valid for the write of a handle.
    unsafe { driver.functions.get_device(&raw mut device, ordinal) }?;
    Ok(device)
}

impl Context<Cuda> {
    /// Returns cudarc's handle of the context, which the first call makes if none was given.
    fn handle(&self) -> Result<Arc<CudaContext>> {
        let cuda = &self.vendor;
        if let Some(context) = cuda.handle.get().and_then(|kept| kept.context.as_ref()) {
            return Ok(context.clone());
        }
        let failed = |operation, e: DriverError| {
            device_error(self.health.id(), operation, e.0 as i32, e.to_string())
        };
        // cudarc makes the context current; the guard undoes that.
        let _inside = self.health.enter()?;
        let _current = self.enter()?;
        let context = CudaContext::new(cuda.ordinal as usize);
        let context = context.map_err(|e| failed("CudaContext::new", e))?;
        let stream = context.new_stream();
        let stream = stream.map_err(|e| failed("CudaContext::new_stream", e))?;
        // A handle that another thread made meanwhile is of the same primary context.
        let kept = || Kept::new(context.clone(), Some(stream));
        cuda.handle.get_or_init(kept);
        Ok(context)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        drop(self.handle.take());
        for (_, device, _) in lock(&self.retained).drain(..) {
            // SAFETY: the context was retained in `primary_of`, and is released once.
            let _ = unsafe { self.driver.functions.release_primary(device) };
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}", self.raw)
    }
}

// SAFETY: each method is the call of the driver that its name and its documentation ask for; the
// driver aligns memory to 256 bytes and more.
unsafe impl Vendor for Cuda {
    type Library = Driver;
    type Before = ();
    type Given = Kept<Arc<CudaStream>>;

    fn program(&self) -> Option<Program> {
        self.program
    }

    fn enter(&self) -> Answer {
        // SAFETY: the context lives as long as `self`.
        unsafe { self.driver.functions.push_context(self.raw) }
    }

    fn leave(&self, (): ()) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is valid for the write of a handle. What is popped was pushed on this
        // thread by `enter`, or put in its place by cudarc.
        let _ = unsafe { self.driver.functions.pop_context(&raw mut popped) };
    }

    unsafe fn foreign(&self, stream: RawStream) -> Answer<Option<String>> {
        let mut of = std::ptr::null_mut();
        // SAFETY: the caller guarantees a live stream (see `Vendor::foreign`); `of` is valid for
        // the write of a handle.
        unsafe { self.driver.functions.stream_context(stream, &raw mut of) }?;
        // For a stream of a green context the driver returns a context that stands for that one.
        let why = || format!("the stream belongs to another context{}", Driver::ADVICE);
        Ok((of != self.raw).then(why))
    }

    fn look_up(&self, address: usize) -> Answer<Found> {
        const HOST: u64 = 1;
        const DEVICE: u64 = 2;
        let mut attributes = [
            Is::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Is::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            Is::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            Is::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
            Is::CU_POINTER_ATTRIBUTE_CONTEXT,
            Is::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Is::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            Is::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            Is::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        ]
        .map(|attribute| attribute as c_int);
        // Numbers of 4 and of 8 bytes. All of CUDA's systems are little-endian.
        let mut found = [0u64; 9];
        let mut values = found
            .each_mut()
            .map(|value| std::ptr::from_mut(value).cast());
        let (names, values) = (attributes.as_mut_ptr(), values.as_mut_ptr());
        // SAFETY: both lists have 9 members, and each value has room for its attribute's type. The
        // driver looks the address up and does not follow it.
        unsafe {
            self.driver
                .functions
                .pointer_attributes(9, names, values, address as CUdeviceptr)
        }?;
        let [what, managed, ordinal, at, of, start, bytes, ipc, pool] = found;
        let kind = match what {
            _ if managed != 0 => PointerKind::Managed,
            HOST => PointerKind::Host {
                mapped: at == address as u64,
            },
            DEVICE => PointerKind::Device(ordinal as c_int, (of != 0).then_some(of as usize)),
            _ => PointerKind::Unknown,
        };
        let start = start as usize;
        let end = start.checked_add(bytes as usize).filter(|end| start < *end);
        // Device memory that is neither of a pool nor of an ordinary allocation, whose handle other
        // processes could open, is mapped by the program itself. The driver then reports all the
        // addresses that were reserved for it, of which some may be mapped to nothing.
        let is_mapped = matches!(kind, PointerKind::Device(..)) && ipc == 0 && pool == 0;
        Ok((kind, end.filter(|_| !is_mapped).map(|end| start..end)))
    }

    fn peer_of(&self, kind: PointerKind) -> Answer<Option<usize>> {
        match kind {
            PointerKind::Device(_, Some(of)) => Ok((of != self.raw.addr()).then_some(of)),
            PointerKind::Device(ordinal, None) if ordinal != self.ordinal => {
                Ok(Some(self.primary_of(ordinal)?.expose_provenance()))
            }
            _ => Ok(None),
        }
    }

    unsafe fn copy(&self, copy: &CopyOp, from: Option<usize>, stream: RawStream) -> Answer {
        let (dst, src, bytes) = (copy.dst.as_ptr(), copy.src.as_ptr(), copy.bytes);
        match from {
            // SAFETY: the caller guarantees live memory and a live or default stream (see
            // `Vendor::copy`). All memory is in one address space, in which the driver finds the
            // direction.
            None => unsafe { self.driver.functions.copy(dst, src, bytes, stream) },
            Some(of) => {
                let of = std::ptr::with_exposed_provenance_mut(of);
                // SAFETY: the caller guarantees live memory, a live or default stream, and that
                // `of` is what `peer_of` returned: the context of the source, which lives as long
                // as the source (see `Vendor::copy`).
                unsafe {
                    self.driver
                        .functions
                        .copy_peer(dst, self.raw, src, of, bytes, stream)
                }
            }
        }
    }

    unsafe fn copy_list(&self, copies: &[&CopyOp], stream: RawStream) -> Option<Answer> {
        let call = self.driver.copy_list.as_ref()?;
        let mut dst: Vec<_> = copies.iter().map(|copy| copy.dst.as_ptr()).collect();
        let mut src: Vec<_> = copies.iter().map(|copy| copy.src.as_ptr()).collect();
        let mut sizes: Vec<_> = copies.iter().map(|copy| copy.bytes).collect();
        let (dst, src, bytes) = (dst.as_mut_ptr(), src.as_mut_ptr(), sizes.as_mut_ptr());
        // One set of attributes, from the first copy on.
        let (mut attributes, mut first) = (IN_STREAM_ORDER, 0usize);
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        // SAFETY: the three lists have a member for each copy, there is one set of attributes, and
        // all live during the call; the caller guarantees that memory and stream are live (see
        // `Vendor::copy_list`).
        let code =
            unsafe { (call.function)(dst, src, bytes, copies.len(), attributes, first, 1, stream) };
        Some(call.check(code))
    }
}

/// Something of cudarc's, and its context. The drop leaves the thread's current context as it was,
/// while cudarc makes its own current for every call. In a child of the process that has initialised
/// the driver nothing is dropped, because no call may be made there.
#[derive(Debug)]
pub(crate) struct Kept<T> {
    context: Option<Arc<CudaContext>>,
    /// `None` once it was taken.
    pub(crate) thing: Option<T>,
}

impl<T> Kept<T> {
    pub(crate) fn new(context: Arc<CudaContext>, thing: T) -> Self {
        Self {
            context: Some(context),
            thing: Some(thing),
        }
    }
}

impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        // cudarc's objects need a driver, so there is one.
        let (Ok(driver), Some(context)) = (Driver::get(), self.context.take()) else {
            return;
        };
        if !driver.process().is_this() {
            return std::mem::forget((context, self.thing.take()));
        }
        // SAFETY: `context` keeps the raw context alive.
        let pushed = unsafe { driver.functions.push_context(context.cu_ctx()) }.is_ok();
        drop(self.thing.take());
        // Destroying a context takes it off the stack by itself; releasing a primary one does not.
        match Arc::into_inner(context) {
            Some(context) if !context.is_primary() => return drop(context),
            context => drop(context),
        }
        if pushed {
            let mut popped = std::ptr::null_mut();
            // SAFETY: `popped` is valid for the write of a handle. What is popped was pushed above,
            // or put in its place by cudarc.
            let _ = unsafe { driver.functions.pop_context(&raw mut popped) };
        }
    }
}
