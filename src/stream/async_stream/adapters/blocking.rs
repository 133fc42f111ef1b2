//! Streams as readers.

use std::pin::Pin;
use std::sync::Arc;
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
    stream: Pin<Box<S>>,
}

impl<S: DeviceRecordBatchStream> BlockingReader<S> {
    /// Reads `stream`.
    pub fn new(stream: S) -> Self {
        let stream = Box::pin(stream);
        Self { stream }
    }
}

impl<S: DeviceRecordBatchStream> Iterator for BlockingReader<S> {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = block_on(|cx| self.stream.as_mut().poll_next(cx))?;
        Some(next.map(|batch| batch.into().batch))
    }
}

impl<S: DeviceRecordBatchStream> DeviceRecordBatchReader for BlockingReader<S> {
    fn schema(&self) -> SchemaRef {
        self.stream.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.stream.device_type()
    }
}

/// Polls until there is a result; the thread sleeps in between.
fn block_on<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut cx = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(ready) = poll(&mut cx) {
            return ready;
        }
        thread::park();
    }
}
