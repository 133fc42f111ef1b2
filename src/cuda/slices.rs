//! cudarc's `CudaSlice` in and out.

use std::sync::Arc;

use arrow_buffer::ArrowNativeType;
use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut, DeviceRepr};

use crate::abi::{ArrowDeviceType, guard};
use crate::device::cuda::{Cuda, Kept};
use crate::device::gpu::Gpu;
use crate::device::{Device, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::{DeviceBuffer, DeviceBufferMut, Memory, Owner, Ready};

/// Returns the backend of a device whose memory is the device's own.
fn plain_device(device: &Device) -> Result<&Gpu<Cuda>> {
    let cuda = device.as_cuda()?;
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
            cuda.context.heap.forget(base);
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
