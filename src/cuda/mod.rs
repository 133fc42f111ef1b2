//! NVIDIA GPUs, and conversions to and from the types of [cudarc](https://docs.rs/cudarc), which is
//! re-exported here.
//!
//! | device | name | memory |
//! | --- | --- | --- |
//! | ARROW_DEVICE_CUDA | `cuda:N` | the device's own memory, from a pool of this crate's |
//! | ARROW_DEVICE_CUDA_HOST | `cuda-host:N` | page-locked host memory |
//! | ARROW_DEVICE_CUDA_MANAGED | `cuda-managed:N` | managed memory |
//!
//! The driver's library is loaded at the first use: the one that the process has loaded already, or
//! else `libcuda.so.1` or `libcuda.so` (`nvcuda.dll` on Windows). Without a driver or a device,
//! opening a device returns [`Error::DeviceNotAvailable`] with the reason; everything else works as
//! usual. The oldest supported version is CUDA 11.4, cudarc's oldest.
//!
//! cudarc loads the library by itself, at its own first use, and looks for `libcuda.so` first. If
//! the CUDA toolkit's folder `stubs` is on the library path, that is a stub, every call of which
//! returns `CUDA_ERROR_STUB_LIBRARY`: this crate uses the driver all the same, unless the stub was
//! loaded before it, but the conversions below fail. Remove the folder from the path; it serves
//! only to link programs.
//!
//! ```no_run
//! use arrow_array::{RecordBatch, record_batch};
//! use arrow_device::cuda::cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg};
//! use arrow_device::{DeviceArray, DeviceBufferMut, Devices, Error};
//! # fn load(_: std::sync::Arc<arrow_device::cuda::cudarc::driver::CudaContext>) -> CudaFunction { panic!("{}", "from a module") }
//! # fn main() -> Result<(), Error> {
//! let batch = record_batch!(("price", Float64, [1.0, 2.0, 3.0]))?;
//! let device = Devices::open("cuda:0")?;
//! let queue = device.new_queue()?;
//! let on_device = device.upload_on(&batch, &queue)?;
//! let kernel: CudaFunction = load(device.cuda_context()?);  // void twice(const double*, double*, size_t)
//!
//! let prices = on_device.column_by_name("price")?;
//! let mut twice = DeviceBufferMut::allocate(&queue, 3 * 8)?;
//! {
//!     let values = prices.values_on::<f64>(&queue)?;       // the stream waits for the upload
//!     let rows = values.len();
//!     let stream = queue.cuda_stream()?;
//!     let mut launch = stream.launch_builder(&kernel);
//!     launch.arg(&values).arg(&mut twice).arg(&rows);
//!     // SAFETY: the arguments are the kernel's, and it stays within `rows`.
//!     unsafe { launch.launch(LaunchConfig::for_num_elems(3)) }.unwrap();
//! }                                                        // the loan ends: the use is recorded
//! let column = prices.with_values(prices.data_type().clone(), twice.freeze()?)?; // null where `prices` is
//! # let _ = column;
//! # Ok(())
//! # }
//! ```
//!
//! The example `cuda_kernel` is complete, nulls included. A program that loads a kernel's PTX
//! through cudarc enables cudarc's feature `nvrtc` itself, for the same version:
//! `cudarc = { version = "0.19", features = ["nvrtc"], default-features = false }`.
//!
//! # Conversions
//!
//! | type of cudarc's | becomes | and back |
//! | --- | --- | --- |
//! | `CudaContext` | a device: [`Device::from_cuda_context`] | [`Device::cuda_context`] |
//! | `CudaStream` | a queue: [`Queue::from_cuda_stream`] | [`Queue::cuda_stream`] |
//! | `CudaEvent` | an event: [`SyncEvent::from_cuda_event`] | [`SyncEvent::as_ptr`] points to the `CUevent` |
//! | `CudaSlice<T>` | a buffer: [`DeviceBuffer::from_cuda_slice`] | [`DeviceBuffer::try_into_cuda_slice`] |
//! | a kernel's argument | | loans ([`DeviceBuffer::on`], [`DeviceArray::values_on`](crate::DeviceArray::values_on), ...) and [`DeviceBufferMut`] |
//!
//! [`DeviceArray::from_values`](crate::DeviceArray::from_values) makes a column of a buffer, and
//! [`DeviceArray::with_values`](crate::DeviceArray::with_values) one with the nulls of the kernel's
//! input. Each conversion keeps the order of streams and events, and no call of this crate changes
//! the current context (cudarc's own calls do). cudarc is part of this crate's interface: another
//! minor version of it is a breaking change.
//!
//! # How it works
//!
//! Work runs on streams that do not wait for the legacy default stream. Memory is allocated and
//! freed in the order of streams, from a pool that keeps it until
//! [`Device::trim`]. Events have no timing and are reused.
//!
//! Page-locked and managed memory, and device memory where there is no pool, is recycled. The
//! driver may wait for the device and for host functions when it frees such memory, and other
//! threads' calls wait with it. So it is freed only where the device is waited for in any case: by
//! [`Device::synchronize`], which leaves up to 256 MiB for reuse, by
//! [`Device::trim`], after the device was dropped, or when an allocation finds
//! too little. A device holds at most 2 GiB of page-locked memory for staging and downloads; beyond
//! that, or if the driver refuses page-locked memory for whatever reason, ordinary memory serves,
//! which is slower. If more than 1 GiB of other blocks is idle and none fits, the next allocation
//! waits for the device to free some.
//!
//! An allocation that finds too little memory waits for the device's work, which may free more,
//! frees what is idle, and tries again; only then it returns
//! [`Error::OutOfMemory`].
//!
//! The driver copies between host memories, as `cuda-host` does, in the order of the stream, and the
//! call returns when that is done: such copies wait for the stream's earlier work.
//!
//! # Streams that are given
//!
//! A stream that is being captured into a graph is refused when it becomes a queue
//! ([`Queue::from_cuda_stream`]), and a queue refuses work while its
//! stream is captured, because the work would run later, when its memory may be gone.
//! Captures of other streams stay as they are, but CUDA lets nobody wait for a whole context while
//! one of its streams is captured: [`Device::synchronize`] is an error
//! then, and may end the capture. `trim`, an allocation that finds too little memory, and the end of a
//! device wait for the context too.
//!
//! A per-thread default stream, which is another one on each thread, and a stream of a green context
//! are refused too; use an ordinary stream of the device's context.
//!
//! Memory of a pool cannot be shared through the older interprocess handles (`cuIpcGetMemHandle`),
//! and kernels of another device reach it only after `cuMemPoolSetAccess`. This crate does not call
//! that function, because copies between devices do not need it and may go wrong after it
//! (reported for `cuMemcpyPeerAsync`).
//!
//! An import asks the driver once for each allocation that is not the device's own; where the driver does not report its range,
//! about the first and the last byte of the buffer. It accepts memory of the device that the import
//! names, managed memory, and page-locked memory that the device reaches at that address. It
//! refuses ordinary host memory under each of CUDA's device types, and device memory that belongs
//! to another context, since only that context's kernels reach it.
//!
//! After a kernel has failed (with an illegal address, for example), CUDA refuses all further work
//! of that context for the rest of the process. Every call, frees included, returns the code and
//! its text; releases are still called once.
//!
//! CUDA sends no notification when an event completes. A thread polls the events that something
//! waits for without blocking ([`SyncEvent::notify`], releases), at least
//! once per millisecond unless there are many.
//!
//! A thread that waits for the device asks it again and again, which returns soonest.
//!
//! After a `fork`, CUDA works in the parent only. In the child everything may be dropped or
//! released (nothing is freed, because it is the parent's, and nothing waits), every other use of a
//! device is an error that says so, and host arrays in page-locked or managed memory must not be
//! read. Do not fork while another thread is inside a call of this crate. A child that needs a
//! device is started with `exec` (Python's multiprocessing: the start method "spawn").

pub use crate::device::cuda::{device_count, register};
pub use cudarc;

use std::sync::Arc;

use arrow_buffer::ArrowNativeType;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtrMut, DeviceRepr, LaunchArgs, PushKernelArg,
};

use crate::abi::{ArrowDeviceType, guard};
use crate::device::backend::not_supported;
use crate::device::cuda::{Cuda, Kept};
use crate::device::engine::Engine;
use crate::device::gpu::{Block, Event, Gpu, Library, Origin, RawEvent, RawStream, Stream, Vendor};
use crate::device::{Device, DevicePtr, Queue, SyncEvent};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, DeviceBufferMut, Loan, Memory, Owner, Ready};

impl Queue {
    /// Makes a queue of a CUDA stream: work given to either runs in one order. While the stream is
    /// captured into a graph, the queue refuses work; memory that would be freed in its order is
    /// freed when the device is waited for.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device is not a CUDA device, and
    /// [`Error::InvalidArgument`] for a stream of another context, for one that is being captured,
    /// and for a per-thread default stream.
    pub fn from_cuda_stream(device: &Device, stream: Arc<CudaStream>) -> Result<Self> {
        let raw = RawStream(stream.cu_stream().expose_provenance());
        let context = stream.context().cu_ctx();
        let stream = Kept::new(stream.context().clone(), stream);
        let cuda = &Engine::<Gpu<Cuda>>::of(device)?.runtime().context;
        // The driver knows the context of any but a default stream.
        if raw.is_default() && cuda.vendor.raw != context {
            let advice = <Cuda as Vendor>::Library::ADVICE;
            return Err(Error::argument(format!(
                "{}: the stream belongs to another context{advice}",
                device.id()
            )));
        }
        // SAFETY: cudarc's stream keeps the raw one alive. `given` refuses one of another context, as the check above does.
        unsafe { Engine::<Gpu<Cuda>>::adopt(device, Stream::given(cuda, raw, stream)?) }
    }

    /// Returns the queue's stream, to launch kernels on.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the queue's device is not a CUDA device.
    pub fn cuda_stream(&self) -> Result<&CudaStream> {
        let stream = Engine::<Gpu<Cuda>>::stream(self)?.given_or(|raw| {
            let context = self.device().cuda_context()?;
            let raw = std::ptr::with_exposed_provenance_mut(raw.0);
            // SAFETY: the stream belongs to the queue, in the device's context. The queue keeps
            // what is made of it to itself, and lends it for no longer than it lives.
            let stream = unsafe { context.wrap_borrowed_stream(raw) };
            Ok(Kept::new(context, stream))
        })?;
        let stream = stream.thing.as_deref();
        stream.ok_or_else(|| Error::argument("the queue's stream is gone"))
    }
}

impl SyncEvent {
    /// Makes an event of a device from a recorded CUDA event, of any context. It stands for the
    /// work before it on the stream on which it was recorded.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device is not a CUDA device.
    pub fn from_cuda_event(device: &Device, event: CudaEvent) -> Result<Self> {
        let raw = RawEvent(event.cu_event().expose_provenance());
        let event = Kept::new(event.context().clone(), event);
        let engine = Engine::<Gpu<Cuda>>::of(device)?;
        let origin = Origin::Kept(Box::new(event));
        engine.give_event(device, Event::new(&engine.runtime().context, raw, origin))
    }
}

/// Returns the engine of a device whose memory is the device's own.
fn plain_device(device: &Device) -> Result<&Engine<Gpu<Cuda>>> {
    let cuda = Engine::<Gpu<Cuda>>::of(device)?;
    if device.id().device_type == ArrowDeviceType::CUDA
        && cuda.runtime().context.vendor.program.is_none()
    {
        return Ok(cuda);
    }
    let reason = "a slice is the driver's own memory: use a device of type CUDA whose memory no program allocates";
    Err(not_supported(device.id(), "CudaSlice", reason))
}

impl DeviceBuffer {
    /// Takes over a slice without copying. The buffer is ready after all work so far of the slice's
    /// stream, and of the other streams that cudarc knows to use the slice; its memory is freed on
    /// the slice's stream.
    ///
    /// [`DeviceArray::from_values`](crate::DeviceArray::from_values) makes a column of the buffer.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device is not of type CUDA,
    /// [`Error::InvalidArgument`] for a slice of another context, and otherwise the driver's error.
    /// The slice is dropped then.
    pub fn from_cuda_slice<T>(device: &Device, slice: CudaSlice<T>) -> Result<Self> {
        let (stream, bytes) = (slice.stream().clone(), slice.num_bytes());
        // Dropped last, so with the last handle of the context.
        let mut slice = Kept::new(slice.context().clone(), slice);
        let cuda = plain_device(device)?;
        let queue = Queue::from_cuda_stream(device, stream)?;
        let our_context = &cuda.runtime().context;
        let current = our_context.enter()?;
        let Some(slice) = (bytes > 0).then(|| slice.thing.take()).flatten() else {
            return DeviceBufferMut::allocate(&queue, 0)?.freeze();
        };
        let context = slice.context().clone();
        // `leak` makes the stream wait for other streams' uses. cudarc keeps an error of that for
        // later, together with those of the program's own calls, which are put back.
        let earlier = context.check_err();
        let block = Block::adopt(our_context, slice.leak() as usize);
        let ordered = context.check_err();
        context.record_err(earlier);
        drop(current);
        // What the device knows already it frees already.
        let base = cuda
            .insert(block.clone(), bytes)
            .inspect_err(|_| block.let_go())?;
        let waited = match ordered {
            Ok(()) => Ok(()),
            Err(_) => device.synchronize(),
        };
        let event = waited.and_then(|()| queue.record());
        // Other streams may still use the memory.
        let event = event.inspect_err(|_| cuda.give_up(base))?;
        let ready = event.map_or(Ready::Now, Ready::Event);
        let memory = Memory::Device { queue, base, bytes };
        let owner = Owner::new(device.clone(), memory, ready);
        Ok(Self::from_parts(Arc::new(owner), base, 0, bytes))
    }

    /// Turns the buffer into a slice for work on `stream`, without copying. The stream waits until
    /// the buffer is ready and its recorded uses are done.
    ///
    /// # Errors
    /// Returns the buffer with the reason
    /// - if it is not the only holder of its memory, or does not hold all of it,
    /// - if the memory was neither allocated by this crate on a device of type CUDA nor adopted
    ///   from a slice,
    /// - if its length in bytes is not a multiple of the size of `T`, or its address not aligned
    ///   for `T`,
    /// - for a stream of another context.
    ///
    /// If cudarc itself fails, the buffer that comes back is empty, and the contents are lost.
    pub fn try_into_cuda_slice<T: ArrowNativeType + DeviceRepr>(
        self,
        stream: &Arc<CudaStream>,
    ) -> std::result::Result<CudaSlice<T>, (Self, Error)> {
        let queue = match self.check_slice::<T>(stream) {
            Ok(queue) => queue,
            Err(e) => return Err((self, e)),
        };
        let len = self.len() / size_of::<T>();
        let device = self.device().clone();
        let (base, bytes) = self.into_raw(&queue)?;
        let slice = plain_device(&device).and_then(|cuda| {
            let _current = cuda.runtime().context.enter()?;
            let upgrade = || {
                let address = base.address() as CUdeviceptr;
                // SAFETY: `into_raw` took the memory from its only holder and made the stream wait
                // for all that used it; it holds `len` aligned elements (`check_slice`), and every
                // bit pattern is a value of arrow's native types.
                let mut slice = unsafe { stream.upgrade_device_ptr::<T>(address, len) };
                // The drop of this guard records the event for which cudarc makes other streams
                // wait.
                drop(slice.device_ptr_mut(stream));
                slice
            };
            // cudarc panics if it cannot create events.
            guard::call_foreign("CudaStream::upgrade_device_ptr", upgrade)
                .map_err(|_| Error::argument("cudarc could not create the slice's events"))
                .inspect(|_| {
                    // SAFETY: `into_raw` has given it up, and the slice frees it after the work of its stream.
                    if let Some(block) = unsafe { cuda.take(base) } {
                        block.let_go();
                    }
                })
        });
        match slice {
            Ok(slice) => Ok(slice),
            Err(e) => {
                // SAFETY: `into_raw` took these bytes from their only holder, and there is no slice that frees them.
                unsafe { queue.free(base, bytes) };
                let empty = DeviceBufferMut::allocate(&queue, 0).and_then(DeviceBufferMut::freeze);
                Err((
                    empty.unwrap_or_else(|_| arrow_buffer::Buffer::default().into()),
                    e,
                ))
            }
        }
    }

    /// Checks what can be checked before the memory is taken.
    fn check_slice<T>(&self, stream: &Arc<CudaStream>) -> Result<Queue> {
        plain_device(self.device())?;
        if self.len() % size_of::<T>() != 0 {
            return Err(Error::argument(format!(
                "{} bytes are no whole number of elements of {} bytes",
                self.len(),
                size_of::<T>()
            )));
        }
        if self.address().address() % align_of::<T>() != 0 {
            return Err(Error::argument(
                "the buffer is not aligned for the elements",
            ));
        }
        Queue::from_cuda_stream(self.device(), stream.clone())
    }
}

const _: () = assert!(
    size_of::<DevicePtr>() == size_of::<CUdeviceptr>(),
    "CUDA has 64-bit addresses"
);

/// Views an address as a kernel argument.
fn argument(address: &DevicePtr) -> &CUdeviceptr {
    // SAFETY: `DevicePtr` is a pointer, which has the size of a `CUdeviceptr` (asserted above) and
    // its alignment on systems with 64-bit addresses; any address is a value of the integer.
    unsafe { &*std::ptr::from_ref(address).cast::<CUdeviceptr>() }
}

// SAFETY: the driver reads the argument during the launch, while it is borrowed. Whoever launches
// guarantees (`launch` is unsafe) that the stream is that of the loan's queue, which has waited for
// the memory. The bit offset of a bitmap is an argument of its own.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b Loan<'_, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b Loan<'_, T>) -> &mut Self {
        self.arg(argument(&arg.address))
    }
}

// SAFETY: the driver reads the argument while it is borrowed. Nothing else has the memory yet, and
// whoever launches guarantees that the stream is that of the buffer's queue.
unsafe impl<'a, 'b: 'a> PushKernelArg<&'b mut DeviceBufferMut> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut DeviceBufferMut) -> &mut Self {
        self.arg(argument(&arg.base))
    }
}
