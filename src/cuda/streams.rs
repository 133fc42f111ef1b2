//! CUDA streams and events in and out.

use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

use super::CudaQueue;
use crate::device::cuda::let_go;
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
        let cuda = match device.as_cuda() {
            Ok(cuda) => cuda,
            Err(e) => {
                let_go(stream.context().clone(), stream);
                return Err(e);
            }
        };
        let raw = cuda.adopt_stream(stream)?;
        // SAFETY: the device's backend has just made the queue.
        Ok(unsafe { device.wrap_queue(raw) })
    }

    /// Returns the queue's stream, to launch kernels on.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the queue's device is not a CUDA device.
    pub fn cuda_stream(&self) -> Result<QueueStream<'_>> {
        let device = self.device().as_cuda()?;
        let queue = self.raw().as_any().downcast_ref::<CudaQueue>();
        let queue = queue.ok_or_else(|| Error::argument("not a queue of a CUDA device"))?;
        let stream = match queue.cuda_stream() {
            Some(stream) => stream.clone(),
            None => {
                let context = device.cuda_context()?;
                queue.lend();
                // SAFETY: the stream belongs to the queue, in the device's context, and
                // `QueueStream` borrows the queue, so the stream outlives it.
                unsafe { context.wrap_borrowed_stream(queue.cu_stream()) }
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
        let cuda = match device.as_cuda() {
            Ok(cuda) => cuda,
            Err(e) => {
                let_go(event.context().clone(), event);
                return Err(e);
            }
        };
        let ptr = cuda.adopt_event(event);
        let ptr = ptr.ok_or_else(|| Error::argument("a null event"))?;
        // SAFETY: the device's backend made the pointer for its own `release_event`, and nothing
        // else has it.
        Ok(unsafe { Self::from_recorded(device.clone(), ptr) })
    }
}
