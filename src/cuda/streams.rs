//! CUDA streams and events in and out.

use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

use crate::device::cuda::{Cuda, Kept};
use crate::device::gpu::{EventCell, GpuQueue, Library, RawEvent, RawStream, Runtime};
use crate::device::{Device, Queue, SyncEvent};
use crate::error::{Error, Result};

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
        let cuda = &device.as_cuda()?.context;
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
    pub fn cuda_stream(&self) -> Result<QueueStream<'_>> {
        self.device().as_cuda()?;
        let queue = self.raw().downcast_ref::<GpuQueue<Cuda>>();
        let queue = queue.ok_or_else(|| Error::argument("not a queue of a CUDA device"))?;
        let stream = match queue.keeper().and_then(Kept::get) {
            Some(stream) => stream.clone(),
            None => {
                let context = self.device().cuda_context()?;
                let raw = std::ptr::with_exposed_provenance_mut(queue.lend().0);
                // SAFETY: the stream belongs to the queue, in the device's context, and
                // `QueueStream` borrows the queue, so the stream outlives it.
                unsafe { context.wrap_borrowed_stream(raw) }
            }
        };
        Ok(QueueStream {
            stream,
            _queue: self,
        })
    }
}

/// A queue's CUDA stream, borrowed from the queue by [`Queue::cuda_stream`].
#[derive(Debug)]
pub struct QueueStream<'a> {
    stream: Arc<CudaStream>,
    _queue: &'a Queue,
}

impl Deref for QueueStream<'_> {
    type Target = CudaStream;

    fn deref(&self) -> &CudaStream {
        &self.stream
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
        device.as_cuda()?;
        let ptr = EventCell::given(raw, Box::new(event));
        let ptr = ptr.ok_or_else(|| Error::argument("a null event"))?;
        // SAFETY: the device's backend made the pointer for its own `release_event`, and nothing
        // else has it.
        Ok(unsafe { Self::from_recorded(device.clone(), ptr) })
    }
}
