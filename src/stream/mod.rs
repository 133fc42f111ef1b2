//! Streams of batches.
//!
//! A stream of device batches is a [`DeviceRecordBatchReader`], as a stream of host batches is a
//! [`RecordBatchReader`](arrow_array::RecordBatchReader) in arrow-rs. Readers are uploaded ([`upload_reader`]), read on the host
//! ([`HostRecordBatchReader`]), become C streams ([`export_reader`]) and are made of C streams
//! ([`DeviceRecordBatchStreamReader`]):
//!
//! ```
//! use arrow_array::{RecordBatchIterator, record_batch};
//! use arrow_device::{DeviceRecordBatchReader, DeviceRecordBatchStreamReader, Devices, export_reader};
//!
//! let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
//! let reader = RecordBatchIterator::new([Ok(batch.clone())], batch.schema());
//! let mut stream = export_reader(reader, &Devices::cpu())?; // a C struct, for any consumer
//!
//! // SAFETY: the stream is this crate's.
//! let reader = unsafe { DeviceRecordBatchStreamReader::from_raw(&mut stream) }?;
//! for back in reader.into_host_reader() {
//!     assert_eq!(back?, batch);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod ahead;
#[cfg(feature = "async")]
pub mod async_stream;
pub(crate) mod export;
mod host;
pub(crate) mod import;
mod reader;
mod upload;

pub use export::export_reader;
pub use host::HostRecordBatchReader;
pub use import::DeviceRecordBatchStreamReader;
pub use reader::{DeviceRecordBatchReader, DeviceRecordBatches};
pub use upload::{upload_reader, upload_reader_ahead};
