//! The subscriber's end.

use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use arrow_device::abi::ArrowDeviceType;
use arrow_device::{DeviceRecordBatch, DeviceRecordBatches};
use arrow_device_share::{self as share, Error, Result, SubscriberOptions};
use arrow_schema::Schema;
use pyo3::exceptions::PyStopAsyncIteration;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::{State, at, duplicate, errno, patiently, raised};
use crate::record_batch::RecordBatch;
use crate::stream::Stream;

/// Receives the batches of a `Publisher`, which lie in its memory, without a copy: in a loop (`for` or `async for`). Linux.
///
/// The memory of a batch goes back to the publisher once no array, and nothing that another library has made of it, uses it any more.
/// A batch may outlive the subscriber and the publisher.
///
/// Args:
///     path: where the publisher listens.
///     trusting: what the publisher says of its memory is believed without reading it. This is a promise that it is a program of this
///         package or of its Rust crate. Otherwise text, lists and columns with nulls are read and checked.
///
/// Raises:
///     OSError: if nobody listens there (FileNotFoundError, ConnectionRefusedError), or another user (PermissionError).
#[pyclass(frozen, module = "arrow_device.share")]
pub(crate) struct Subscriber(Arc<Receiving>);

/// For waits that nobody cancels.
static NEVER: AtomicBool = AtomicBool::new(false);

struct Receiving {
    source: Mutex<Source>,
    batches: AtomicU64,
    state: State,
}

/// And what came for a wait that had been cancelled.
type Source = (Option<share::Subscriber>, Option<Result<DeviceRecordBatch>>);

/// Whether nobody waits any more for what a thread waits for.
#[pyclass(frozen)]
#[derive(Default)]
struct Cancelled(AtomicBool);

#[pymethods]
impl Cancelled {
    fn __call__(&self, _future: &Bound<'_, PyAny>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[pymethods]
impl Subscriber {
    #[new]
    #[pyo3(signature = (path, *, trusting = false))]
    fn new(py: Python<'_>, path: PathBuf, trusting: bool) -> PyResult<Self> {
        let options = options(trusting);
        let connected = py.detach(|| share::Subscriber::connect_with(&path, options));
        Ok(Self::of(connected.map_err(|e| at(&path, e))?, path))
    }

    /// Subscribes to the publisher at the other end of a socket.
    ///
    /// Args:
    ///     fd: the descriptor of a socket of the kind `SOCK_SEQPACKET`, which is duplicated.
    ///     trusting: as for a path.
    ///
    /// Raises:
    ///     OSError: for another descriptor, or a peer of another user.
    #[staticmethod]
    #[pyo3(signature = (fd, *, trusting = false))]
    fn over(py: Python<'_>, fd: RawFd, trusting: bool) -> PyResult<Self> {
        let options = options(trusting);
        let over = share::Subscriber::over_with(duplicate(py, fd)?, options);
        Ok(Self::of(over.map_err(raised)?, "a socket".into()))
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Waits for the next batch.
    ///
    /// Raises:
    ///     ConnectionResetError: if the publisher has died, or has gone without an end. What it has sent before is received first.
    ///     RuntimeError: with the publisher's text, if it has ended the stream with an error.
    ///     ValueError: for invalid values, with the path of the field.
    ///     PermissionError: if the publisher accepts no more subscribers, or has another version.
    ///     OSError: if the publisher breaks the protocol.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<RecordBatch>> {
        let next = py.detach(|| self.0.next(&NEVER)).map_err(raised)?;
        Ok(next.map(RecordBatch))
    }

    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Each batch is waited for by a thread of asyncio's default executor, which a wait that is cancelled ends. The next wait gets
    /// its batch.
    fn __anext__<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = this.py();
        let asyncio = py.import("asyncio")?;
        let cancelled = Bound::new(py, Cancelled::default())?;
        let wait = (py.None(), this.getattr("_next")?, &cancelled);
        let event_loop = asyncio.call_method0("get_running_loop")?;
        let future = event_loop.call_method1("run_in_executor", wait)?;
        future.call_method1("add_done_callback", (cancelled,))?;
        // A coroutine, of which tasks can be made, unlike of a future.
        asyncio.call_method1("wait_for", (future, py.None()))
    }

    fn _next(&self, py: Python<'_>, cancelled: &Bound<'_, Cancelled>) -> PyResult<RecordBatch> {
        let cancelled = &cancelled.get().0;
        let next = py.detach(|| self.0.next(cancelled)).map_err(raised)?;
        next.map(RecordBatch)
            .ok_or_else(|| PyStopAsyncIteration::new_err(()))
    }

    /// Returns the batches that have not been taken as a stream, which other libraries read. Waits for the first one, of which the schema
    /// is: without any batch, there are no columns.
    ///
    /// Raises:
    ///     OSError, RuntimeError, ValueError: as the next batch. Later, the stream raises them.
    fn stream(&self, py: Python<'_>) -> PyResult<Stream> {
        let first = py.detach(|| self.0.next(&NEVER)).map_err(raised)?;
        let schema = first.as_ref().map(DeviceRecordBatch::schema);
        let schema = schema.unwrap_or_else(|| Arc::new(Schema::empty()));
        let rest = self.0.clone();
        let rest = std::iter::from_fn(move || rest.next(&NEVER).map_err(in_stream).transpose());
        let batches = first.map(Ok).into_iter().chain(rest);
        let reader = DeviceRecordBatches::new(batches, schema, ArrowDeviceType::CPU);
        Ok(Stream::of(reader))
    }

    /// Takes nothing more. Batches that were taken stay. A loop in another thread ends.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.0.state.close()?;
        let clear = |mut source: MutexGuard<'_, Source>| *source = (None, None);
        let closed = || patiently(None, |_| self.0.try_lock().map(clear));
        py.detach(closed).map_err(raised)
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let batches = self.0.batches.load(Ordering::Relaxed);
        let batches = format!("Subscriber: {batches} batches so far, of");
        self.0.state.shown(&batches)
    }
}

impl Subscriber {
    fn of(subscriber: share::Subscriber, path: PathBuf) -> Self {
        Self(Arc::new(Receiving {
            source: Mutex::new((Some(subscriber), None)),
            batches: AtomicU64::new(0),
            state: State::new(path),
        }))
    }
}

impl Receiving {
    /// The lock for one turn: a signal's handler may run between two, here and where another thread reads.
    fn try_lock(&self) -> Result<MutexGuard<'_, Source>> {
        match self.source.try_lock() {
            Ok(source) => Ok(source),
            Err(TryLockError::Poisoned(e)) => Ok(e.into_inner()),
            Err(TryLockError::WouldBlock) => {
                std::thread::sleep(Duration::from_millis(1));
                Err(Error::TimedOut("another thread waits for a batch"))
            }
        }
    }

    fn next(&self, cancelled: &AtomicBool) -> Result<Option<DeviceRecordBatch>> {
        self.state.check_process()?;
        let ended = || self.state.is_closed() || cancelled.load(Ordering::Relaxed);
        let next = patiently(None, |time| {
            let (subscriber, kept) = &mut *self.try_lock()?;
            let Some(subscriber) = subscriber.as_mut().filter(|_| !ended()) else {
                return Ok(None);
            };
            let next = kept.take().or_else(|| subscriber.next_timeout(time));
            if ended() && !matches!(next, Some(Err(Error::TimedOut(_)))) {
                *kept = next;
                return Ok(None);
            }
            next.transpose()
        })?;
        let count = u64::from(next.is_some());
        self.batches.fetch_add(count, Ordering::Relaxed);
        Ok(next)
    }
}

fn options(trusting: bool) -> SubscriberOptions {
    if trusting {
        // SAFETY: the documentation requires Python code that passes `trusting=True` to vouch for the publisher.
        unsafe { SubscriberOptions::trusting() }
    } else {
        SubscriberOptions::default()
    }
}

/// The same for whoever reads a stream, who may know no Python.
fn in_stream(e: Error) -> arrow_device::Error {
    match errno(&e) {
        Some(errno) => arrow_device::Error::Foreign {
            operation: "next",
            errno,
            message: e.to_string().into(),
        },
        None => e.into(),
    }
}
