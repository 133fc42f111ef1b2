//! cudarc's streams, events and slices in and out, and loans and buffers as kernel arguments.

use std::sync::Arc;

use arrow_buffer::ArrowNativeType;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtrMut, DeviceRepr, LaunchArgs, PushKernelArg,
};

use crate::abi::{ArrowDeviceType, guard};
use crate::device::cuda::{Cuda, Kept};
use crate::device::gpu::{EventCell, Gpu, GpuQueue, Library, RawEvent, RawStream, Runtime};
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
        let context = stream.context().cu_ctx().addr();
        let stream = Kept::new(stream.context().clone(), stream);
        let cuda = &Gpu::<Cuda>::of(device)?.context;
        // The driver knows the context of any but a default stream.
        if raw.is_default() && !cuda.runtime.reaches_context(context) {
            let advice = <Cuda as Runtime>::Library::ADVICE;
            return Err(Error::argument(format!(
                "{}: the stream belongs to another context{advice}",
                cuda.id
            )));
        }
        // SAFETY: the queue keeps cudarc's stream, which keeps the raw one alive.
        let queue = unsafe { GpuQueue::given(cuda.clone(), raw, stream) }?;
        // SAFETY: the queue is of the device's context.
        Ok(unsafe { device.wrap_queue(Arc::new(queue)) })
    }

    /// Returns the queue's stream, to launch kernels on.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the queue's device is not a CUDA device.
    pub fn cuda_stream(&self) -> Result<&CudaStream> {
        let stream = GpuQueue::<Cuda>::of(self)?.given_or(|raw| {
            let context = self.device().cuda_context()?;
            let raw = std::ptr::with_exposed_provenance_mut(raw.0);
            // SAFETY: the stream belongs to the queue, in the device's context. The queue keeps
            // what is made of it to itself, and lends it for no longer than it lives.
            let stream = unsafe { context.wrap_borrowed_stream(raw) };
            Ok(Kept::new(context, stream))
        })?;
        let stream = stream.get().map(Arc::as_ref);
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
        Gpu::<Cuda>::of(device)?;
        let ptr = EventCell::given(raw, Some(Box::new(event)));
        let ptr = ptr.ok_or_else(|| Error::argument("a null event"))?;
        // SAFETY: the device's backend made the pointer for its own `release_event`, and nothing
        // else has it.
        Ok(unsafe { Self::from_recorded(device.clone(), ptr) })
    }
}

/// Returns the backend of a device whose memory is the device's own.
fn plain_device(device: &Device) -> Result<&Gpu<Cuda>> {
    let cuda = Gpu::<Cuda>::of(device)?;
    if device.id().device_type == ArrowDeviceType::CUDA {
        return Ok(cuda);
    }
    Err(Error::NotSupported {
        device: device.id(),
        operation: "CudaSlice",
        reason: "a slice is the device's own memory: use the device of type CUDA".into(),
    })
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
        let current = cuda.context.enter()?;
        let Some(slice) = (bytes > 0).then(|| slice.take()).flatten() else {
            return DeviceBufferMut::allocate(&queue, 0)?.freeze();
        };
        let context = slice.context().clone();
        // `leak` makes the stream wait for other streams' uses. cudarc keeps an error of that for
        // later, together with those of the program's own calls, which are put back.
        let earlier = context.check_err();
        let base = DevicePtr::new(std::ptr::with_exposed_provenance_mut(slice.leak() as usize));
        let ordered = context.check_err();
        context.record_err(earlier);
        drop(current);
        let waited = match ordered {
            Ok(()) => Ok(()),
            Err(_) => device.synchronize(),
        };
        let event = waited.and_then(|()| queue.record());
        // Other streams may still use the memory.
        let event = event.inspect_err(|_| cuda.context.heap.give_up(base))?;
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
            cuda.context.heap.live.remove(base);
            let _current = cuda.context.enter()?;
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
        });
        match slice {
            // It frees the memory.
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
        self.arg(argument(arg.address_ref()))
    }
}

// SAFETY: the driver reads the argument while it is borrowed. Nothing else has the memory yet, and
// whoever launches guarantees that the stream is that of the buffer's queue.
unsafe impl<'a, 'b: 'a> PushKernelArg<&'b mut DeviceBufferMut> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut DeviceBufferMut) -> &mut Self {
        self.arg(argument(arg.address_ref()))
    }
}
