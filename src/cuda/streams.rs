//! Streams and events.

use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};

use super::CudaQueue;
use crate::device::cuda::let_go;
use crate::device::{Device, Place, Queue, SyncEvent};
use crate::error::{Error, Result};

impl Queue {
    /// A CUDA stream as a queue of a device: what either is given runs in one order.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for another device than CUDA's, [`Error::InvalidArgument`] for a
    /// stream of another context.
    pub fn from_cuda_stream(device: &Device, stream: Arc<CudaStream>) -> Result<Self> {
        let cuda = match device.as_cuda() {
            Ok(cuda) => cuda,
            Err(e) => {
                let of = stream.context().clone();
                let_go(of, move || drop(stream));
                return Err(e);
            }
        };
        let raw = cuda.adopt_stream(stream)?;
        // SAFETY: the queue was just made by the device's backend.
        Ok(unsafe { device.wrap_queue(raw) })
    }

    /// The queue's stream, to launch kernels on.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for a queue of another device than CUDA's.
    pub fn cuda_stream(&self) -> Result<QueueStream<'_>> {
        let device = self.device().as_cuda()?;
        let queue = self.raw().as_any().downcast_ref::<CudaQueue>();
        let queue = queue.ok_or_else(|| Error::argument("not a queue of a CUDA device"))?;
        let stream = match queue.cuda_stream() {
            Some(stream) => stream.clone(),
            None => {
                let context = device.cuda_context()?;
                // SAFETY: the stream is the queue's, of the device's context, and the queue outlives
                // the answer. It is one stream, so there is one order.
                unsafe { context.wrap_borrowed_stream(queue.cu_stream()) }
            }
        };
        Ok(QueueStream {
            stream,
            _queue: self,
        })
    }
}

/// A queue's CUDA stream, borrowed.
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
    /// A recorded CUDA event of any context, as an event of a device. The work before it counts,
    /// on whatever stream it was recorded.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for another device than CUDA's.
    pub fn from_cuda_event(device: &Device, event: CudaEvent) -> Result<Self> {
        let cuda = match device.as_cuda() {
            Ok(cuda) => cuda,
            Err(e) => {
                let of = event.context().clone();
                let_go(of, move || drop(event));
                return Err(e);
            }
        };
        let ptr = cuda.adopt_event(event);
        let ptr = ptr.ok_or_else(|| Error::argument("a null event"))?;
        // SAFETY: made by the device's backend for its own `release_event`, and given to nobody else.
        Ok(unsafe { Self::from_recorded(device.clone(), ptr, Place::alone()) })
    }
}
