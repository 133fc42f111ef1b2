//! [`Ahead`]: batches of a stream that are copied ahead of the consumer.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;

use crate::async_stream::batch::AsyncBatch;
use crate::data::DeviceRecordBatch;
use crate::error::Result;
use crate::memory::{MemoryBudget, Reserved};
use crate::transfer::Download;

/// Batches of a stream on their way to where `T` is.
#[derive(Debug)]
pub(super) struct Ahead<S, T> {
    /// `None` after its end or an error.
    stream: Option<Pin<Box<S>>>,
    pub(super) prefetch: usize,
    /// Batches that were taken from the stream and not yet returned, oldest first. An error is the last.
    coming: VecDeque<Result<Coming<T>>>,
    pub(super) budget: Option<Arc<dyn MemoryBudget>>,
    /// What the batch that was returned last takes of the budget.
    returned: Reserved,
}

/// A batch on its way.
#[derive(Debug)]
pub(super) struct Coming<T> {
    /// The copies, if there are any and they may still be running.
    download: Option<Download<T>>,
    /// The batch, once it has arrived.
    arrived: Option<Result<T>>,
    /// Nothing is gained by an earlier start.
    in_place: bool,
    reserved: Reserved,
}

impl<T> Coming<T> {
    /// A batch whose copies are yet to start.
    pub(super) fn started(download: Download<T>) -> Self {
        Self {
            in_place: download.is_in_place(),
            download: Some(download),
            arrived: None,
            reserved: Reserved::default(),
        }
    }

    /// A batch that needs no copy.
    pub(super) fn arrived(batch: T) -> Self {
        Self {
            in_place: true,
            download: None,
            arrived: Some(Ok(batch)),
            reserved: Reserved::default(),
        }
    }

    fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(download) = &mut self.download {
            if let Poll::Ready(batch) = Pin::new(&mut *download).poll(cx) {
                self.reserved = download.take_reserved();
                self.arrived = Some(batch);
                self.download = None;
            }
        }
    }
}

impl<S, T> Ahead<S, T> {
    /// Copies one batch ahead.
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream: Some(Box::pin(stream)),
            prefetch: 1,
            coming: VecDeque::new(),
            budget: None,
            returned: Reserved::default(),
        }
    }

    /// The reader asks for the next batch: that takes nothing of the budget any more which was returned before.
    pub(super) fn release(&mut self) {
        self.returned.free();
    }

    /// Asks the budget for more memory for the batch that was returned last.
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<()> {
        self.returned.grow(bytes)
    }
}

impl<B: Into<AsyncBatch>, S: Stream<Item = Result<B>>, T> Ahead<S, T> {
    /// Returns the next batch, and `start`s those after it, each with what it is to take of the budget, unless nothing is gained by that. Ends after an error.
    pub(super) fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
        mut start: impl FnMut(DeviceRecordBatch, Reserved) -> Result<Coming<T>>,
    ) -> Poll<Option<Result<T>>> {
        self.release();
        loop {
            // Batches at hand start first, so that their copies overlap with the making of the next one.
            for coming in self.coming.iter_mut().flatten() {
                coming.drive(cx);
            }
            let before = self.coming.len();
            self.fill(cx, &mut start);
            if self.coming.len() == before {
                break;
            }
        }
        let batch = match self.coming.pop_front() {
            None if self.stream.is_none() => return Poll::Ready(None),
            None => return Poll::Pending,
            Some(Err(e)) => Err(e),
            Some(Ok(mut next)) => match next.arrived.take() {
                Some(batch) => {
                    self.returned = next.reserved;
                    batch
                }
                None => {
                    self.coming.push_front(Ok(next));
                    return Poll::Pending;
                }
            },
        };
        if batch.is_err() {
            self.release();
            self.stream = None;
            self.coming.clear();
        }
        Poll::Ready(Some(batch))
    }

    /// Takes batches from the stream until there are enough, or it is pending.
    fn fill(
        &mut self,
        cx: &mut Context<'_>,
        start: &mut impl FnMut(DeviceRecordBatch, Reserved) -> Result<Coming<T>>,
    ) {
        while self.coming.len() <= self.prefetch && self.worth_it() {
            let Some(stream) = &mut self.stream else {
                break;
            };
            let next = match stream.as_mut().poll_next(cx) {
                Poll::Pending => break,
                Poll::Ready(next) => next,
            };
            match next {
                Some(batch) => {
                    let reserved = Reserved::new(self.budget.clone());
                    let coming = batch.and_then(|batch| start(batch.into().batch, reserved));
                    if coming.is_err() {
                        self.stream = None;
                    }
                    self.coming.push_back(coming);
                }
                None => self.stream = None,
            }
        }
    }
    /// Batches that need no copy gain nothing from a prefetch.
    fn worth_it(&self) -> bool {
        let next = self.coming.front();
        next.is_none_or(|next| matches!(next, Ok(next) if !next.in_place))
    }
}
