//! Events that several processes know: their state is in a memory file, which others open by the owner's descriptor. So a handle is
//! good as long as its owner lives and has not destroyed the event.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::pages::{Pages, memory_file};

const BYTES: usize = 4096;

/// Which event, for other processes: the owner's process and descriptor, and the file's number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct IpcHandle {
    process: u32,
    file: i32,
    number: u64,
    rest: [u64; 6],
}

impl IpcHandle {
    pub(crate) fn is_of_this_process(self) -> bool {
        self.process == std::process::id()
    }

    fn file(self) -> Option<File> {
        let path = format!("/proc/{}/fd/{}", self.process, self.file);
        let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        let is_same = file.metadata().ok()?.ino() == self.number;
        is_same.then_some(file)
    }
}

/// The state of an event.
#[derive(Debug)]
pub(crate) struct Crossing {
    pages: Pages,
    handle: IpcHandle,
    /// The owner's; `None` in other processes.
    own: Option<File>,
}

impl Crossing {
    pub(crate) fn new() -> Option<Self> {
        let file = memory_file(c"cuda-fake-event", BYTES)?;
        let handle = IpcHandle {
            process: std::process::id(),
            file: file.as_raw_fd(),
            number: file.metadata().ok()?.ino(),
            rest: [0; 6],
        };
        Some(Self {
            pages: Pages::of(&file, BYTES)?,
            handle,
            own: Some(file),
        })
    }

    /// Opens an event of another process; `None` if it is no more.
    pub(crate) fn open(handle: IpcHandle) -> Option<Self> {
        Some(Self {
            pages: Pages::of(&handle.file()?, BYTES)?,
            handle,
            own: None,
        })
    }

    pub(crate) fn handle(&self) -> IpcHandle {
        self.handle
    }

    pub(crate) fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// How often the event was recorded, and up to which record the work has run.
    fn counts(&self) -> &[AtomicU64; 2] {
        // SAFETY: the pages are mapped as long as this lives, and all processes use them as these atomic numbers.
        unsafe { self.pages.start().cast().as_ref() }
    }

    /// Begins a record; its number.
    pub(crate) fn record(&self) -> u64 {
        self.counts()[0].fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The work before this record has run.
    pub(crate) fn complete(&self, record: u64) {
        self.counts()[1].fetch_max(record, Ordering::SeqCst);
    }

    /// The last record, if its work has not run.
    pub(crate) fn pending(&self) -> Option<u64> {
        let [recorded, completed] = self.counts();
        let last = recorded.load(Ordering::SeqCst);
        (completed.load(Ordering::SeqCst) < last).then_some(last)
    }

    /// Waits until the work before a record has run. An error is that of an owner that died first, or destroyed the event: what a driver
    /// does then is not known, and this is the worst that a program can be told.
    pub(crate) fn wait(&self, record: u64) -> Result<(), String> {
        let is_done = || self.counts()[1].load(Ordering::SeqCst) >= record;
        while !is_done() {
            if self.handle.file().is_none() && !is_done() {
                return Err("waits for an event of another process that is gone".into());
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }
}
