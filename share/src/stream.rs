//! [`SubscriberStream`]: a subscriber for async programs.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread::Builder;

use arrow_device::DeviceRecordBatch;
use futures_core::Stream;
use rustix::event::{PollFd, PollFlags};

use crate::error::{Error, Result, lock};
use crate::lease::Link;
use crate::subscriber::Subscriber;

/// The batches of a [`Subscriber`] as a stream, for any executor. A poll never blocks, except to read values that are validated; a thread
/// of the stream's own waits for the publisher.
#[derive(Debug)]
pub struct SubscriberStream {
    subscriber: Subscriber,
    watch: Option<Watch>,
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
        if self.watch.is_none() {
            match Watch::start(self.subscriber.link().clone()) {
                Ok(watch) => self.watch = Some(watch),
                Err(e) => return Poll::Ready(Some(Err(e))),
            }
        }
        let watch = self.watch.as_ref();
        watch
            .into_iter()
            .for_each(|watch| watch.ask(cx.waker().clone()));
        Poll::Pending
    }
}

/// A thread that wakes a task once something has come.
#[derive(Debug)]
struct Watch {
    asked: Arc<Mutex<Option<Waker>>>,
    /// Wakes the thread; its end is that of the thread.
    bell: UnixStream,
}

impl Watch {
    fn start(link: Arc<Link>) -> Result<Self> {
        let failed = Error::of("make a pair of sockets");
        let (bell, rung) = UnixStream::pair().map_err(&failed)?;
        for end in [&bell, &rung] {
            end.set_nonblocking(true).map_err(&failed)?;
        }
        let asked = Arc::default();
        let watch = Self { asked, bell };
        let asked = watch.asked.clone();
        let thread = Builder::new().name("arrow-device subscriber".into());
        let thread = thread.spawn(move || run(&link, &asked, &rung));
        thread.map_err(Error::of("start a thread"))?;
        Ok(watch)
    }

    fn ask(&self, waker: Waker) {
        let before = lock(&self.asked).replace(waker);
        // Without the lock: it is the program's.
        drop(before);
        // It fails if there is no room: then the thread is awake already.
        let _ = (&self.bell).write(&[0]);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.bell.shutdown(Shutdown::Both);
    }
}

fn run(link: &Link, asked: &Mutex<Option<Waker>>, mut rung: &UnixStream) {
    loop {
        let mut flags = link.flush(None);
        flags.set(PollFlags::IN, lock(asked).is_some());
        let mut waits = vec![PollFd::new(rung, PollFlags::IN)];
        if !flags.is_empty() {
            waits.push(PollFd::from_borrowed_fd(link.socket(), flags));
        }
        // After an error, such as a signal, the task looks for itself.
        let _ = rustix::event::poll(&mut waits, None);
        let has_come = waits.get(1).map(|socket| !socket.revents().is_empty());
        if matches!(rung.read(&mut [0; 64]), Ok(0)) {
            return;
        }
        if has_come == Some(true) {
            let waker = lock(asked).take();
            waker.into_iter().for_each(Waker::wake);
        }
    }
}
