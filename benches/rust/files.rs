//! Batches as Arrow IPC files and streams.

use std::fs::File;
use std::io::{Read, Seek};
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_array::RecordBatch;
use arrow_device::{Devices, HostSlab};
use arrow_ipc::writer::{FileWriter, StreamWriter};

use crate::batches::Result;

/// The batches as a file, in memory.
///
/// # Errors
/// arrow-rs's.
pub fn file(batches: &[RecordBatch]) -> Result<Vec<u8>> {
    let mut writer = FileWriter::try_new(Vec::new(), &batches[0].schema())?;
    batches.iter().try_for_each(|batch| writer.write(batch))?;
    Ok(writer.into_inner()?)
}

/// The batches as a stream, in memory.
///
/// # Errors
/// arrow-rs's.
pub fn stream(batches: &[RecordBatch]) -> Result<Vec<u8>> {
    let mut writer = StreamWriter::try_new(Vec::new(), &batches[0].schema())?;
    batches.iter().try_for_each(|batch| writer.write(batch))?;
    Ok(writer.into_inner()?)
}

/// A file that nobody else sees, with room for what is in it.
#[derive(Debug)]
pub struct OnDisk {
    file: File,
    room: HostSlab,
}

impl OnDisk {
    /// Writes a file with these bytes.
    ///
    /// # Errors
    /// The system's.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("arrow-device-benches-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, bytes)?;
        let file = File::open(&path)?;
        // It is there as long as it is open.
        std::fs::remove_file(&path)?;
        // As good as this crate's own: in large pages.
        let room = Devices::cpu().host_slab(bytes.len())?;
        Ok(Self { file, room })
    }

    /// The file, from its start.
    ///
    /// # Errors
    /// The system's.
    pub fn rewound(&mut self) -> Result<&File> {
        self.file.rewind()?;
        Ok(&self.file)
    }

    /// Reads all of the file into memory that is there.
    ///
    /// # Errors
    /// The system's.
    pub fn read(&mut self) -> Result<&[u8]> {
        self.file.rewind()?;
        self.file.read_exact(&mut self.room)?;
        Ok(&self.room)
    }
}
