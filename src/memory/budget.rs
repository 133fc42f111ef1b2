//! [`MemoryBudget`]: who is asked before streams take memory.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;

/// Decides whether a stream may take memory for the batches that it copies; for example, the memory pool of a query engine.
///
/// [`UploadingStream`](crate::async_stream::UploadingStream), [`HostRecordBatchStream`](crate::async_stream::HostRecordBatchStream)
/// and [`MovingStream`](crate::async_stream::MovingStream) ask before they allocate device memory or page-locked host memory for a
/// batch, in bytes. They give the bytes of a batch back when the reader asks for the next one, at the end, after an error,
/// or when they are dropped, whichever comes first. A reader that keeps batches longer accounts for them itself. Batches that
/// are passed on without a copy take nothing, and neither do small reads of sizes and the staging memory of uploads, which is bounded.
///
/// Streams call the budget in their polls, so it must not block.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
/// use arrow_device::{Error, MemoryBudget, Result};
///
/// #[derive(Debug)]
/// struct Limit { bytes: AtomicUsize, most: usize }
///
/// impl MemoryBudget for Limit {
///     fn reserve(&self, bytes: usize) -> Result<()> {
///         let fits = |all: usize| all.checked_add(bytes).filter(|all| *all <= self.most);
///         match self.bytes.fetch_update(SeqCst, SeqCst, fits) {
///             Ok(_) => Ok(()),
///             Err(all) => Err(Error::InvalidArgument(format!("{bytes} bytes beyond {all}").into())),
///         }
///     }
///
///     fn release(&self, bytes: usize) {
///         self.bytes.fetch_sub(bytes, SeqCst);
///     }
/// }
/// ```
pub trait MemoryBudget: fmt::Debug + Send + Sync {
    /// Asks for so many bytes, which are about to be allocated.
    ///
    /// # Errors
    /// Returns an error if they must not be. Nothing is allocated then, and the error ends the stream.
    fn reserve(&self, bytes: usize) -> Result<()>;

    /// Gives back bytes of earlier calls of [`reserve`](Self::reserve).
    fn release(&self, bytes: usize);
}

/// Bytes of a budget, which are given back when this is dropped. Without a budget there is no limit.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    budget: Option<Arc<dyn MemoryBudget>>,
    bytes: usize,
}

impl Reserved {
    #[cfg(feature = "async")]
    pub(crate) fn new(budget: Option<Arc<dyn MemoryBudget>>) -> Self {
        Self { budget, bytes: 0 }
    }

    pub(crate) fn grow(&mut self, bytes: usize) -> Result<()> {
        if let Some(budget) = self.budget.as_ref().filter(|_| bytes > 0) {
            budget.reserve(bytes)?;
            self.bytes += bytes;
        }
        Ok(())
    }

    /// Gives the bytes back.
    pub(crate) fn free(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        if let Some(budget) = self.budget.as_ref().filter(|_| bytes > 0) {
            budget.release(bytes);
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.free();
    }
}
