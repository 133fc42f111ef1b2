//! What is measured, by name. A case times what it is about and nothing that prepares it.

use std::hint::black_box;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::async_streams::{QUEUE, channel, one_thread, threads};
use crate::trip;
use arrow_array::ffi::{FFI_ArrowArray, from_ffi_and_data_type};
use arrow_array::ffi_stream::{ArrowArrayStreamReader, FFI_ArrowArrayStream};
use arrow_array::{Array, RecordBatch, RecordBatchIterator, StructArray};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader,
    DeviceRecordBatches, Devices, ExportOptions, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
    ImportOptions, SyncPolicy, export_reader,
};
use arrow_schema::{ArrowError, DataType};

pub use crate::batches::Result;

/// A batch with what the cases need of it.
#[derive(Debug)]
pub struct Input {
    /// The batch in host memory.
    pub host: RecordBatch,
    /// The same memory as a batch of the CPU device.
    pub device: DeviceRecordBatch,
    data_type: DataType,
    /// The bytes of every buffer, one after the other, and room for a copy.
    payload: OnceLock<(Vec<u8>, Mutex<Vec<u8>>)>,
    simulated: OnceLock<DeviceRecordBatch>,
}

fn buffers(batch: &RecordBatch) -> Vec<Buffer> {
    let columns = batch.columns().iter().map(|column| column.to_data());
    let of = |data: ArrayData| {
        let mask = data.nulls().map(|nulls| nulls.buffer().clone());
        mask.into_iter().chain(data.buffers().to_vec())
    };
    columns.flat_map(of).collect()
}

impl Input {
    /// # Errors
    /// The crate's.
    pub fn new(host: RecordBatch) -> Result<Self> {
        Ok(Self {
            device: Devices::cpu().upload(&host)?,
            data_type: DataType::Struct(host.schema().fields().clone()),
            host,
            payload: OnceLock::new(),
            simulated: OnceLock::new(),
        })
    }

    /// How many bytes all buffers have.
    pub fn bytes(&self) -> usize {
        buffers(&self.host).iter().map(Buffer::len).sum()
    }

    fn payload(&self) -> &(Vec<u8>, Mutex<Vec<u8>>) {
        self.payload.get_or_init(|| {
            let all: Vec<_> = buffers(&self.host)
                .iter()
                .flat_map(|b| b.to_vec())
                .collect();
            (all.clone(), Mutex::new(all))
        })
    }

    /// The batch on a simulated device of its own.
    ///
    /// # Errors
    /// The crate's.
    pub fn simulated(&self) -> Result<&DeviceRecordBatch> {
        if let Some(there) = self.simulated.get() {
            return Ok(there);
        }
        let there = Devices::simulated()?.upload(&self.host)?;
        there.wait()?;
        Ok(self.simulated.get_or_init(|| there))
    }
}

type Case = fn(&Input, usize) -> Result<Duration>;

/// Every case, by its name.
pub const CASES: &[(&str, Case)] = &[
    ("export", export),
    ("export_host", export_host),
    ("export_arrow", export_arrow),
    ("export_ready", export_ready),
    ("import", import),
    ("import_arrow", import_arrow),
    ("stream", stream),
    ("stream_host", stream_host),
    ("stream_arrow", stream_arrow),
    ("async", |i, n| one_thread(&i.device, n, counted)),
    ("async_threads", |i, n| {
        threads(&i.device, n, QUEUE, counted)
    }),
    ("async_single", |i, n| threads(&i.device, n, 1, counted)),
    ("channel", |i, n| channel(&i.device, n, QUEUE, counted)),
    // Each batch is taken before the next is sent, as where they are requested one by one.
    ("channel_single", |i, n| channel(&i.device, n, 0, counted)),
    ("copy", copy),
    ("download", download),
    ("memcpy", memcpy),
    ("write_structs", write_structs),
    ("up_held", |i, n| trip::up_held(&i.host, n, counted)),
    ("up", |i, n| trip::up_whole(&i.host, n, counted)),
    ("up_cold", |i, n| trip::up_cold(&i.host, n, counted)),
    ("download_cold", |i, n| {
        trip::download_cold(&i.host, n, counted)
    }),
];

/// The case of this name.
pub fn case(name: &str) -> Option<Case> {
    Some(CASES.iter().find(|(n, _)| *n == name)?.1)
}

/// The measured part of each case, under a name that callgrind finds.
#[unsafe(no_mangle)]
#[inline(never)]
pub fn counted(part: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    part()?;
    Ok(start.elapsed())
}

fn timed(n: usize, mut body: impl FnMut() -> Result<()>) -> Result<Duration> {
    counted(&mut || {
        for _ in 0..n {
            body()?;
        }
        Ok(())
    })
}

const OPTIONS: ExportOptions = ExportOptions::new(SyncPolicy::Event);

/// A device batch to the C struct, which is released.
fn export(input: &Input, n: usize) -> Result<Duration> {
    timed(n, || {
        drop(black_box(input.device.export_array(&OPTIONS)?));
        Ok(())
    })
}

/// The same from a batch of arrow-rs.
fn export_host(input: &Input, n: usize) -> Result<Duration> {
    let cpu = Devices::cpu();
    timed(n, || {
        drop(black_box(cpu.upload(&input.host)?.export_array(&OPTIONS)?));
        Ok(())
    })
}

fn struct_data(batch: &RecordBatch) -> ArrayData {
    StructArray::from(batch.clone()).into_data()
}

fn export_arrow(input: &Input, n: usize) -> Result<Duration> {
    timed(n, || {
        drop(black_box(FFI_ArrowArray::new(&struct_data(&input.host))));
        Ok(())
    })
}

/// arrow-rs without the conversion that its export asks for.
fn export_ready(input: &Input, n: usize) -> Result<Duration> {
    let data = struct_data(&input.host);
    timed(n, || {
        drop(black_box(FFI_ArrowArray::new(&data)));
        Ok(())
    })
}

/// C structs as arrow-rs makes them, for either importer.
fn structs(input: &Input, n: usize) -> Vec<FFI_ArrowArray> {
    (0..n)
        .map(|_| FFI_ArrowArray::new(&struct_data(&input.host)))
        .collect()
}

fn produced_for_device(input: &Input, n: usize) -> Vec<FFI_ArrowDeviceArray> {
    (0..n)
        .map(|_| {
            let array = FFI_ArrowArray::new(&struct_data(&input.host));
            // SAFETY: the array is in host memory, and ready.
            unsafe {
                FFI_ArrowDeviceArray::new(array, ArrowDeviceType::CPU, -1, std::ptr::null_mut())
            }
        })
        .collect()
}

/// Times `step` for each struct; what it makes is dropped afterwards.
fn each<S, T>(structs: Vec<S>, mut step: impl FnMut(S) -> Result<T>) -> Result<Duration> {
    let mut kept = Vec::with_capacity(structs.len());
    let mut structs = structs.into_iter();
    let took = counted(&mut || {
        for array in structs.by_ref() {
            kept.push(step(array)?);
        }
        Ok(())
    })?;
    drop(black_box(kept));
    Ok(took)
}

/// C structs to device batches, schema known.
fn import(input: &Input, n: usize) -> Result<Duration> {
    let (schema, options) = (input.host.schema(), ImportOptions::default());
    each(produced_for_device(input, n), |array| {
        // SAFETY: arrow-rs exported the struct from a valid batch of this schema.
        Ok(unsafe { DeviceRecordBatch::import_as(array, schema.clone(), &options) }?)
    })
}

fn import_arrow(input: &Input, n: usize) -> Result<Duration> {
    let schema = input.host.schema();
    each(structs(input, n), |array| {
        // SAFETY: arrow-rs exported the struct from a valid batch of this schema.
        let data = unsafe { from_ffi_and_data_type(array, input.data_type.clone()) }?;
        Ok(RecordBatch::from(StructArray::from(data)).with_schema(schema.clone())?)
    })
}

/// Times the way through a C stream of `n` batches: from the reader to each batch that comes out.
fn through<T>(n: usize, mut open: impl FnMut() -> Result<T>) -> Result<Duration>
where
    T: Iterator<Item = Result<()>>,
{
    let mut count = 0;
    let took = counted(&mut || {
        for batch in open()? {
            batch?;
            count += 1;
        }
        Ok(())
    })?;
    if count != n {
        return Err(format!("{count} of {n} batches").into());
    }
    Ok(took)
}

/// Drops what came out.
fn used<T, E>(batch: Result<T, E>) -> Result<()>
where
    E: std::error::Error + Send + Sync + 'static,
{
    drop(black_box(batch?));
    Ok(())
}

/// Device batches out and in again.
fn stream(input: &Input, n: usize) -> Result<Duration> {
    through(n, || {
        let batch = input.device.clone();
        let batches = (0..n).map(move |_| Ok(batch.clone()));
        let reader = DeviceRecordBatches::new(batches, input.host.schema(), ArrowDeviceType::CPU);
        let mut stream = FFI_ArrowDeviceArrayStream::new(reader, OPTIONS)?;
        // SAFETY: this crate exported the stream above, and this is its only owner.
        let reader = unsafe { DeviceRecordBatchStreamReader::from_raw(&mut stream) }?;
        Ok(reader.map(used))
    })
}

type HostReader =
    RecordBatchIterator<Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>>;

fn reader(input: &Input, n: usize) -> HostReader {
    let (batch, schema) = (input.host.clone(), input.host.schema());
    RecordBatchIterator::new(Box::new((0..n).map(move |_| Ok(batch.clone()))), schema)
}

/// arrow-rs batches out and, as arrow-rs batches, in again.
fn stream_host(input: &Input, n: usize) -> Result<Duration> {
    through(n, || {
        let mut stream = export_reader(reader(input, n), &Devices::cpu())?;
        // SAFETY: this crate exported the stream above, and this is its only owner.
        let reader = unsafe { DeviceRecordBatchStreamReader::from_raw(&mut stream) }?;
        Ok(reader.into_host_reader().map(used))
    })
}

fn stream_arrow(input: &Input, n: usize) -> Result<Duration> {
    through(n, || {
        let mut stream = FFI_ArrowArrayStream::new(Box::new(reader(input, n)));
        // SAFETY: arrow-rs exported the stream above, and this is its only owner.
        let reader = unsafe { ArrowArrayStreamReader::from_raw(&mut stream) }?;
        Ok(reader.map(used))
    })
}

/// A deep copy into recycled memory, dropped again.
fn copy(input: &Input, n: usize) -> Result<Duration> {
    timed(n, || {
        drop(black_box(input.device.compact()?));
        Ok(())
    })
}

/// Down from a simulated device into recycled memory, dropped again.
fn download(input: &Input, n: usize) -> Result<Duration> {
    let there = input.simulated()?;
    timed(n, || {
        drop(black_box(there.to_host()?));
        Ok(())
    })
}

/// One copy of all bytes into memory that is there.
fn memcpy(input: &Input, n: usize) -> Result<Duration> {
    let (from, to) = input.payload();
    let mut to = to.lock().unwrap_or_else(PoisonError::into_inner);
    timed(n, || {
        to.copy_from_slice(black_box(from));
        black_box(to.as_ptr());
        Ok(())
    })
}

/// One allocation with as many bytes as the C structs of the batch have, which are copied there, and freed again: what
/// any export must write, and any import read.
fn write_structs(input: &Input, n: usize) -> Result<Duration> {
    // With a bitmap, and with the pointer to it in its parent.
    let of = |data: &ArrayData| {
        size_of::<FFI_ArrowArray>() + (data.buffers().len() + 2) * size_of::<usize>()
    };
    let columns = input.host.columns().iter();
    let all: usize = columns.map(|column| of(&column.to_data())).sum();
    // The batch has one buffer, and no parent.
    let from = vec![1u8; all + size_of::<FFI_ArrowDeviceArray>() + size_of::<usize>()];
    timed(n, || {
        drop(black_box(black_box(&from).clone()));
        Ok(())
    })
}
