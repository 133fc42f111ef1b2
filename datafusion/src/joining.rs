//! Which small batches of a stream are joined, on the host or on a device.

use std::task::{Context, Poll};
use std::time::Duration;

use arrow_device::Result;
use futures::stream::{BoxStream, Stream, StreamExt, poll_fn};

use super::timer::Patience;

/// Returns the batches of a stream in groups, each of which is to become one batch: small ones, up to `most` rows and bytes of them or until they
/// have waited long enough, and others alone. `size` returns the rows and bytes of a small batch; its error comes before what
/// waits, and nothing is to be asked for after it. Small batches without rows are dropped.
pub(super) fn groups<B: Send + 'static>(
    batches: impl Stream<Item = Result<B>> + Send + 'static,
    most: (usize, usize),
    wait: Duration,
    size: impl FnMut(&mut B) -> Result<Option<(usize, usize)>>,
) -> impl Stream<Item = Result<Vec<B>>> + Unpin {
    let mut groups = Box::new(Groups {
        stream: Some(batches.boxed()),
        size,
        most,
        small: Vec::new(),
        rows: 0,
        bytes: 0,
        patience: Patience::new(wait),
        after: None,
    });
    poll_fn(move |cx| groups.poll(cx))
}

struct Groups<B, S> {
    /// `None` once it has ended.
    stream: Option<BoxStream<'static, Result<B>>>,
    size: S,
    most: (usize, usize),
    /// Batches that wait for more.
    small: Vec<B>,
    /// Their rows and bytes.
    rows: usize,
    bytes: usize,
    patience: Patience,
    /// What comes after them.
    after: Option<Result<Vec<B>>>,
}

impl<B, S: FnMut(&mut B) -> Result<Option<(usize, usize)>>> Groups<B, S> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Vec<B>>>> {
        loop {
            if let Some(after) = self.after.take() {
                return Poll::Ready(Some(after));
            }
            let Some(stream) = &mut self.stream else {
                return Poll::Ready(None);
            };
            let group = match stream.poll_next_unpin(cx) {
                Poll::Pending if self.small.is_empty() => return Poll::Pending,
                Poll::Pending if !self.patience.ends(cx.waker()) => return Poll::Pending,
                Poll::Pending => self.take(),
                Poll::Ready(Some(Ok(batch))) => self.push(batch)?,
                // What waits comes first.
                Poll::Ready(end) => {
                    self.stream = None;
                    self.after = end.and_then(Result::err).map(Err);
                    self.take()
                }
            };
            if !group.is_empty() {
                return Poll::Ready(Some(Ok(group)));
            }
        }
    }

    /// Keeps a small batch, or has another one come after those that are kept. Returns what has become large enough.
    fn push(&mut self, mut batch: B) -> Result<Vec<B>> {
        let Some((rows, bytes)) = (self.size)(&mut batch)? else {
            self.after = Some(Ok(vec![batch]));
            return Ok(self.take());
        };
        if rows == 0 {
            return Ok(Vec::new());
        }
        let over = self.rows + rows > self.most.0 || self.bytes + bytes > self.most.1;
        let full = if over { self.take() } else { Vec::new() };
        if self.small.is_empty() {
            self.patience.begin();
        }
        self.small.push(batch);
        (self.rows, self.bytes) = (self.rows + rows, self.bytes + bytes);
        // If the input is slow, and may be endless, a query with a limit needs no more than there is.
        let due = full.is_empty() && (self.rows >= self.most.0 || self.patience.is_over());
        Ok(if due { self.take() } else { full })
    }

    fn take(&mut self) -> Vec<B> {
        (self.rows, self.bytes) = (0, 0);
        std::mem::take(&mut self.small)
    }
}
