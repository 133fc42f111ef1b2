//! The publisher's end.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use arrow_device_share::{self as share, DeadPeers, Error, PublisherStats, Result};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{State, at, duplicate, end_of, patiently, raised};
use crate::record_batch::RecordBatch;

/// Hands batches to subscribers in other processes on this machine, each batch to all of them, without a copy. Linux.
///
/// As a context manager it ends the stream: in order, or with the exception as an error. Without an end it looks to its subscribers as if
/// this process had died.
///
/// Args:
///     path: where subscribers connect: a file that is made for it, and removed with it.
///     leases: how many batches a subscriber may have at a time: for one that is read in a loop at least 2, since the loop has its last
///         batch until the next one comes.
///
/// Raises:
///     OSError: if it cannot listen there, for example because another publisher does.
#[pyclass(frozen, module = "arrow_device.share")]
pub(crate) struct Publisher {
    /// Or what it had done when the stream ended.
    publisher: RwLock<Result<share::Publisher, PublisherStats>>,
    /// Held where a batch is sent, for which there is room then.
    sending: Mutex<()>,
    state: State,
}

#[pymethods]
impl Publisher {
    #[new]
    #[pyo3(signature = (path, *, leases = 16))]
    fn new(py: Python<'_>, path: PathBuf, leases: usize) -> PyResult<Self> {
        let options = share::PublisherOptions {
            leases,
            ..Default::default()
        };
        let bound = py.detach(|| share::Publisher::bind_with(&path, options));
        Ok(Self::of(bound.map_err(|e| at(&path, e))?, path))
    }

    /// Publishes to the one subscriber at the other end of a socket, such as a child process. `send` waits until it has begun, and
    /// raises BrokenPipeError once it has died.
    ///
    /// Args:
    ///     fd: the descriptor of a socket of the kind `SOCK_SEQPACKET`, which is duplicated.
    ///     leases: as for a path.
    ///
    /// Raises:
    ///     OSError: for another descriptor, or a peer of another user.
    #[staticmethod]
    #[pyo3(signature = (fd, *, leases = 16))]
    fn over(py: Python<'_>, fd: RawFd, leases: usize) -> PyResult<Self> {
        let options = share::PublisherOptions {
            leases,
            dead_peers: DeadPeers::Report,
            ..Default::default()
        };
        let over = share::Publisher::over_with(duplicate(py, fd)?, options);
        Ok(Self::of(over.map_err(raised)?, "a socket".into()))
    }

    /// Waits until there are so many subscribers.
    ///
    /// Args:
    ///     subscribers: how many.
    ///     timeout: seconds; None waits for ever.
    ///
    /// Raises:
    ///     TimeoutError: if there are fewer after that time.
    #[pyo3(signature = (subscribers = 1, *, timeout = None))]
    fn wait_for_subscribers(
        &self,
        py: Python<'_>,
        subscribers: usize,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        self.patiently(py, timeout, |publisher, turn| {
            publisher.wait_for_subscribers(subscribers, turn)
        })
    }

    /// Sends a batch to all subscribers, and returns how many these are. It is kept until each has returned it, gone or died. Returns
    /// before the work that fills its memory is done: subscribers wait for it.
    ///
    /// A batch on `shared_cpu()` is not copied. Any other batch is copied to shared memory once, and `stats()` says so. Nobody can write
    /// to memory that was sent.
    ///
    /// Args:
    ///     data: an object with `__arrow_c_device_array__` or `__arrow_c_array__`.
    ///     timeout: seconds to wait for subscribers that have as many batches as they may; None waits for ever.
    ///
    /// Raises:
    ///     TypeError: for any other object.
    ///     ValueError: for another schema than that of the first batch, and after the end.
    ///     NotImplementedError: for memory of a device: send `to_host()`.
    ///     TimeoutError: if a subscriber has returned nothing in that time. Nobody has the batch then.
    #[pyo3(signature = (data, *, timeout = 60.0))]
    fn send(
        &self,
        py: Python<'_>,
        data: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> PyResult<usize> {
        let batch = match data.cast::<RecordBatch>() {
            Ok(batch) => batch.get().0.clone(),
            Err(_) => RecordBatch::new(data)?.0,
        };
        self.patiently(py, timeout, |publisher, turn| {
            publisher.wait_for_room(turn)?;
            let _one = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
            // Another thread may have been faster.
            publisher.wait_for_room(Duration::ZERO)?;
            publisher.send(&batch)
        })
    }

    /// Ends the stream: subscribers read what was sent, and then its end. Waits until all that was sent has left this process. A second
    /// end does nothing.
    ///
    /// Raises:
    ///     TimeoutError: if a subscriber reads nothing for a minute.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py, share::Publisher::finish)
    }

    /// Ends the stream with an error: subscribers read what was sent, and then RuntimeError with this text.
    ///
    /// Raises:
    ///     TimeoutError: if a subscriber reads nothing for a minute.
    fn fail(&self, py: Python<'_>, why: String) -> PyResult<()> {
        self.end(py, move |publisher| publisher.fail(&why))
    }

    /// What was done so far. `batches`: sent; `copied_batches`, `copied_bytes`: of these, copied first; `subscribers`, `leases`: now, and
    /// the batches that they have; `left`, `died`: subscribers that went in order, or not. After the end of the stream: what was done before.
    fn stats(&self, py: Python<'_>) -> PyResult<HashMap<&'static str, u64>> {
        self.state.check_process().map_err(raised)?;
        let stats = py.detach(|| match &*self.read() {
            Ok(publisher) => publisher.stats(),
            Err(last) => *last,
        });
        Ok(HashMap::from([
            ("batches", stats.batches),
            ("copied_batches", stats.copied_batches),
            ("copied_bytes", stats.copied_bytes),
            ("subscribers", stats.subscribers as u64),
            ("leases", stats.leases as u64),
            ("left", stats.left),
            ("died", stats.died),
        ]))
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (_class, raised, _traceback, /))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _class: &Bound<'_, PyAny>,
        raised: Option<Bound<'_, PyAny>>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        match raised {
            None => self.finish(py),
            // That exception goes on, whatever becomes of telling others.
            Some(raised) => {
                let _ = self.fail(py, PyErr::from_value(raised).to_string());
                Ok(())
            }
        }
    }

    fn __repr__(&self) -> String {
        self.state.shown("Publisher: at")
    }
}

impl Publisher {
    fn of(publisher: share::Publisher, path: PathBuf) -> Self {
        Self {
            publisher: RwLock::new(Ok(publisher)),
            sending: Mutex::default(),
            state: State::new(path),
        }
    }

    /// Must be called detached from the interpreter, as every wait for a lock.
    fn read(&self) -> RwLockReadGuard<'_, Result<share::Publisher, PublisherStats>> {
        self.publisher
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the publisher out, unless the stream has ended.
    fn take(&self) -> Option<share::Publisher> {
        let publisher = self.publisher.write();
        let mut publisher = publisher.unwrap_or_else(PoisonError::into_inner);
        let stats = publisher.as_ref().ok()?.stats();
        std::mem::replace(&mut *publisher, Err(stats)).ok()
    }

    fn patiently<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        turn: impl Fn(&share::Publisher, Duration) -> Result<T> + Sync,
    ) -> PyResult<T> {
        self.state.check_process().map_err(raised)?;
        let end = end_of(timeout)?;
        let ended = || PyValueError::new_err("the publisher has ended its stream");
        py.detach(|| {
            // The lock is taken anew in each turn, since a signal's handler may end the stream between two.
            let done = patiently(end, |time| match &*self.read() {
                Ok(publisher) if !self.state.is_closed() => turn(publisher, time).map(Some),
                _ => Ok(None),
            });
            done.map_err(raised)?.ok_or_else(ended)
        })
    }

    fn end(
        &self,
        py: Python<'_>,
        how: impl FnOnce(share::Publisher) -> Result<()> + Send + 'static,
    ) -> PyResult<()> {
        self.state.close()?;
        let ended = || {
            let Some(publisher) = self.take() else {
                return Ok(());
            };
            // On a thread of its own, which goes on after Ctrl-C.
            let (done, wait) = channel();
            let thread = std::thread::Builder::new().name("arrow-device end".into());
            let started = thread.spawn(move || done.send(how(publisher)));
            started.map_err(|source| Error::Io {
                operation: "start a thread",
                source,
            })?;
            patiently(None, |turn| match wait.recv_timeout(turn) {
                Ok(done) => Ok(done),
                Err(RecvTimeoutError::Timeout) => Err(Error::TimedOut("the end of the stream")),
                Err(RecvTimeoutError::Disconnected) => Err(Error::PublisherDied),
            })?
        };
        py.detach(ended).map_err(raised)
    }
}
