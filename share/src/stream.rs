//! [`SubscriberStream`]: a subscriber for async programs.

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use arrow_device::DeviceRecordBatch;
use futures_core::Stream;
use rustix::event::{EventfdFlags, PollFd, PollFlags};

use crate::error::{Error, Result};
use crate::lease::Link;
use crate::subscriber::Subscriber;

/// The batches of a [`Subscriber`] as a stream, for any executor. A poll never blocks, except to read values that are validated; a thread
/// of the stream's own waits for the publisher.
#[derive(Debug)]
pub struct SubscriberStream {
    subscriber: Subscriber,
    watch: Option<Arc<Watch>>,
}

impl Subscriber {
    /// Returns the batches as a stream.
    pub fn into_stream(self) -> SubscriberStream {
        SubscriberStream {
            subscriber: self,
            watch: None,
        }
    }
}

impl Stream for SubscriberStream {
    type Item = Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(next) = self.subscriber.try_next() {
            return Poll::Ready(next);
        }
        let watched = match &self.watch {
            Some(watch) => Ok(watch.clone()),
            None => Watch::start(self.subscriber.link().clone()),
        };
        match watched {
            Ok(watch) => {
                watch.ask(Some(cx.waker().clone()), false);
                self.watch = Some(watch);
                Poll::Pending
            }
            Err(e) => Poll::Ready(Some(Err(e))),
        }
    }
}

impl Drop for SubscriberStream {
    fn drop(&mut self) {
        if let Some(watch) = &self.watch {
            watch.ask(None, true);
        }
    }
}

/// Wakes a task once something has come.
#[derive(Debug)]
struct Watch {
    /// The task, and whether the thread ends.
    asked: Mutex<(Option<Waker>, bool)>,
    wake: OwnedFd,
}

impl Watch {
    fn start(link: Arc<Link>) -> Result<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let watch = Arc::new(Self {
            asked: Mutex::default(),
            wake: rustix::event::eventfd(0, flags).map_err(Error::of("make an event"))?,
        });
        let watched = watch.clone();
        std::thread::Builder::new()
            .name("arrow-device subscriber".into())
            .spawn(move || watched.run(&link))
            .map_err(Error::of("start a thread"))?;
        Ok(watch)
    }

    fn lock(&self) -> MutexGuard<'_, (Option<Waker>, bool)> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, waker: Option<Waker>, over: bool) {
        let before = std::mem::replace(&mut *self.lock(), (waker, over));
        // Without the lock: it is the program's.
        drop(before);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn run(&self, link: &Link) {
        loop {
            let (is_asked, over) = {
                let asked = self.lock();
                (asked.0.is_some(), asked.1)
            };
            if over {
                return;
            }
            let mut waits = vec![PollFd::new(&self.wake, PollFlags::IN)];
            let mut flags = link.flush(None);
            flags.set(PollFlags::IN, is_asked);
            if !flags.is_empty() {
                waits.push(PollFd::from_borrowed_fd(link.socket(), flags));
            }
            // After an error, such as a signal, the task looks for itself.
            let _ = rustix::event::poll(&mut waits, None);
            let has_come = waits.get(1).map(|socket| !socket.revents().is_empty());
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            if has_come == Some(true) {
                let waker = self.lock().0.take();
                waker.into_iter().for_each(Waker::wake);
            }
        }
    }
}
