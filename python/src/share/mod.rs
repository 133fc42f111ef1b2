//! Batches handed to other processes without a copy.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arrow_device_share::{Error, Result};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::files;
use crate::signals::check;
use crate::target::Device;

mod publisher;
mod subscriber;

pub(crate) use publisher::Publisher;
pub(crate) use subscriber::Subscriber;

/// The CPU as a device whose memory other processes can map: a batch that is uploaded to it is written to shared memory once, and sent
/// without a copy, as are its slices and columns.
#[pyfunction]
pub(crate) fn shared_cpu() -> Device {
    Device(arrow_device_share::shared_cpu())
}

/// What both ends have.
struct State {
    name: String,
    /// Ends the waits of other threads.
    closed: AtomicBool,
    /// A forked child has locks that nobody will release.
    process: u32,
}

impl State {
    fn new(path: PathBuf) -> Self {
        Self {
            name: path.display().to_string(),
            closed: AtomicBool::new(false),
            process: std::process::id(),
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    fn close(&self) -> PyResult<()> {
        self.check_process().map_err(raised)?;
        self.closed.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let why = "this process was forked; what it asks for is its parent's";
        Err(Error::Refused(why.into()))
    }

    fn shown(&self, what: &str) -> String {
        let state = if self.is_closed() { ", closed" } else { "" };
        format!("<{what} {}{state}>", self.name)
    }
}

/// Waits in short turns until one does not run out of time, or all of them have. Between two, a signal's handler may raise an exception.
fn patiently<T>(end: Option<Instant>, mut turn: impl FnMut(Duration) -> Result<T>) -> Result<T> {
    const TURN: Duration = Duration::from_millis(50);
    loop {
        let left = end.map_or(TURN, |end| end.saturating_duration_since(Instant::now()));
        match turn(left.min(TURN)) {
            Err(Error::TimedOut(_)) if !left.is_zero() => check()?,
            done => return done,
        }
    }
}

fn end_of(timeout: Option<f64>) -> PyResult<Option<Instant>> {
    let Some(seconds) = timeout else {
        return Ok(None);
    };
    let time = Duration::try_from_secs_f64(seconds);
    let time = time.map_err(|e| PyValueError::new_err(format!("timeout: {e}")))?;
    Ok(Instant::now().checked_add(time))
}

fn duplicate(py: Python<'_>, fd: RawFd) -> PyResult<OwnedFd> {
    let fd = py.import("os")?.call_method1("dup", (fd,))?.extract()?;
    // SAFETY: the descriptor has just been made, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `OSError` chooses its class by this.
fn errno(e: &Error) -> Option<i32> {
    Some(match e {
        Error::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        Error::Protocol(_) => libc::EPROTO,
        Error::Refused(_) => libc::EPERM,
        Error::PublisherDied => libc::ECONNRESET,
        Error::SubscriberDied => libc::EPIPE,
        Error::TimedOut(_) => libc::ETIMEDOUT,
        _ => return None,
    })
}

fn raised(e: Error) -> PyErr {
    match (errno(&e), e) {
        (Some(errno), e) => PyOSError::new_err((errno, e.to_string())),
        (None, Error::Device(e)) => e.into(),
        (None, e) => PyRuntimeError::new_err(e.to_string()),
    }
}

/// With the path, as for a file.
fn at(path: &Path, e: Error) -> PyErr {
    match e {
        Error::Io { source, .. } => files::raised(path, &source),
        e => raised(e),
    }
}
