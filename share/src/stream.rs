//! [`SubscriberStream`]: a subscriber for async programs.

use std::panic::catch_unwind;
use std::pin::Pin;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread::Builder;

use arrow_device::DeviceRecordBatch;
use futures_core::Stream;

use crate::error::{Error, Result, lock};
use crate::subscriber::Subscriber;

/// The batches of a [`Subscriber`] as a stream, for any executor. A poll never blocks, except to read values that are validated; a thread
/// of the stream's own waits for the publisher.
#[derive(Debug)]
pub struct SubscriberStream {
    // Dropped first, which ends the thread's wait.
    subscriber: Subscriber,
    asked: Arc<Mutex<Option<Waker>>>,
    /// Lets the thread wait, if there is one.
    bell: Option<SyncSender<()>>,
}

impl Subscriber {
    /// Returns the batches as a stream.
    pub fn into_stream(self) -> SubscriberStream {
        SubscriberStream {
            subscriber: self,
            asked: Arc::default(),
            bell: None,
        }
    }
}

impl Stream for SubscriberStream {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(next) = self.subscriber.try_next() {
            return Poll::Ready(next);
        }
        match self.ask(cx.waker()) {
            Ok(()) => Poll::Pending,
            Err(e) => Poll::Ready(Some(Err(e))),
        }
    }
}

impl SubscriberStream {
    /// Lets a thread wake the task once something has come.
    fn ask(&mut self, waker: &Waker) -> Result<()> {
        let before = lock(&self.asked).replace(waker.clone());
        // Without the lock: it is the program's.
        drop(before);
        if self.bell.is_none() {
            let (bell, rung) = sync_channel(1);
            let (link, asked) = (self.subscriber.link.clone(), self.asked.clone());
            let run = move || {
                while rung.recv().is_ok() {
                    // After an error, the task looks for itself.
                    let _ = link.wait(None);
                    let waker = lock(&asked).take();
                    // One that panics must not end the thread, for which the next one would wait for ever.
                    let _ = catch_unwind(|| waker.into_iter().for_each(Waker::wake));
                }
            };
            let thread = Builder::new().name("arrow-device subscriber".into());
            thread.spawn(run).map_err(Error::of("start a thread"))?;
            self.bell = Some(bell);
        }
        // It fails if the thread has not heard the last one yet: then it looks again, too.
        let _ = self.bell.as_ref().map(|bell| bell.try_send(()));
        Ok(())
    }
}
