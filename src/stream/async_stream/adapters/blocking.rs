//! Streams as readers.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use arrow_schema::SchemaRef;

use crate::abi::ArrowDeviceType;
use crate::async_stream::DeviceRecordBatchStream;
use crate::data::DeviceRecordBatch;
use crate::error::Result;
use crate::stream::DeviceRecordBatchReader;

/// A stream as a [`DeviceRecordBatchReader`]: the thread that asks for a batch waits for it.
///
/// Not for a thread that must run the stream's producer meanwhile, as the only thread of an executor would:
/// it would wait for ever.
#[derive(Debug)]
pub struct BlockingReader<S> {
    /// `None` after its end or an error.
    stream: Option<Pin<Box<S>>>,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
}

impl<S: DeviceRecordBatchStream> BlockingReader<S> {
    /// Reads `stream`.
    pub fn new(stream: S) -> Self {
        Self {
            schema: stream.schema(),
            device_type: stream.device_type(),
            stream: Some(Box::pin(stream)),
        }
    }
}

impl<S: DeviceRecordBatchStream> Iterator for BlockingReader<S> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let stream = self.stream.as_mut()?;
        let next = block_on(|cx| stream.as_mut().poll_next(cx));
        if !matches!(next, Some(Ok(_))) {
            self.stream = None;
        }
        next.map(|next| next.map(|batch| batch.into().batch))
    }
}

impl<S: DeviceRecordBatchStream> DeviceRecordBatchReader for BlockingReader<S> {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}

/// Polls until there is a result; the thread sleeps in between.
fn block_on<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    /// Others may park this thread within the poll, and take the token: so there is a flag.
    struct Unpark(Thread, AtomicBool);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.1.store(true, Ordering::Release);
            self.0.unpark();
        }
    }

    let unpark = Arc::new(Unpark(thread::current(), AtomicBool::new(false)));
    let waker = Waker::from(unpark.clone());
    let mut cx = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(ready) = poll(&mut cx) {
            return ready;
        }
        while !unpark.1.swap(false, Ordering::Acquire) {
            thread::park();
        }
    }
}
