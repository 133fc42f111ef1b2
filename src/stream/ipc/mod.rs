//! Arrow IPC files and streams, read straight to a device (feature `ipc`).
//!
//! [`IpcFileReader`] and [`IpcStreamReader`] read each message into staging memory of the device, page-locked where the device has
//! such memory. arrow-rs's decoder finds and checks the arrays there, and their buffers are copied to the device from where they
//! are: the host copies nothing ([`TransferStats::host_copied_bytes`](crate::TransferStats::host_copied_bytes) is 0). On the CPU
//! device the arrays stay in the memory that was read.
//!
//! Through the host's memory go, as in any upload: buffers that are compressed in the file, dictionaries that were joined of several
//! messages, and buffers whose place in the file has too small an alignment for their type. Compressed files need arrow-ipc's
//! features `lz4` and `zstd`, which a program switches on for itself.
//!
//! A batch is one allocation on the device, and dictionaries are allocations of their own, which batches share: each goes up once, and
//! again when it has changed. Buffers begin at multiples of 64 bytes and are padded with zeros; what follows the last row in a bitmap is as in the file.
//!
//! What is read is checked as arrow-rs checks it, all values included, and what it would panic at is an error: here, or, where a check
//! would repeat all of its work, by catching the panic, which a program that is built with `panic = "abort"` does not survive.
//! A message takes as much memory as its body has bytes, its buffers that much again where values are moved to where they are aligned,
//! and compressed ones what they decompress to (and LZ4 up to 12 MiB at a time): [`IpcOptions::with_max_message_bytes`] limits the
//! bodies of a stream's messages, and what buffers decompress to. What a few bytes could make stand for any number is refused, since
//! no writer makes it: buffers of a message that overlap, messages that are together longer than their file, and fields that share children and metadata to
//! more than 16 times the bytes that are there.

mod file;
mod lz4;
mod message;
mod staged;
mod stream;

pub use file::IpcFileReader;
pub use stream::IpcStreamReader;

/// What is read of a file or stream.
///
/// ```
/// use arrow_device::ipc::IpcOptions;
/// let options = IpcOptions::default().with_projection(vec![2, 0]).with_max_message_bytes(1 << 30);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct IpcOptions {
    projection: Option<Vec<usize>>,
    max_message_bytes: usize,
}

impl Default for IpcOptions {
    fn default() -> Self {
        Self {
            projection: None,
            max_message_bytes: usize::try_from(4u64 << 30).unwrap_or(usize::MAX),
        }
    }
}

impl IpcOptions {
    /// Only these columns, in this order. The others are read, but neither decoded nor copied to the device.
    pub fn with_projection(mut self, columns: Vec<usize>) -> Self {
        self.projection = Some(columns);
        self
    }

    /// The most bytes that the body of a message of a stream may have, that the buffers of a message may have when they are
    /// decompressed, and that all compressed dictionaries together may, and the most values of a dictionary of several messages; without another number
    /// 4 GiB. A malformed input may announce any number,
    /// and so much memory is allocated for it, but a buffer never decompresses to more than it announces.
    pub fn with_max_message_bytes(mut self, bytes: usize) -> Self {
        self.max_message_bytes = bytes;
        self
    }
}
