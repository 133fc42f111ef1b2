//! What is measured, by name. A case times what it is about and nothing that prepares it.

use std::alloc::{Layout, alloc, dealloc};
use std::hint::black_box;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::async_streams;
use crate::files::{self, OnDisk};
use crate::fresh::Fresh;
use crate::trip;
use arrow_array::ffi::{FFI_ArrowArray, from_ffi_and_data_type};
use arrow_array::ffi_stream::{ArrowArrayStreamReader, FFI_ArrowArrayStream};
use arrow_array::{Array, RecordBatch, RecordBatchIterator, StructArray};
use arrow_data::ArrayData;
use arrow_device::ipc::IpcFileReader;
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatchIterator, DeviceRecordBatchReader,
    DeviceRecordBatchStreamReader, Devices, ExportOptions, FFI_ArrowDeviceArray,
    FFI_ArrowDeviceArrayStream, ImportOptions, SyncPolicy, UploadingReader, Validation,
    export_reader,
};
use arrow_ipc::reader::FileReader;
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
    /// The bytes of every buffer of `host`; not for longer than that.
    buffers: Vec<&'static [u8]>,
    /// All of them one after the other, and room for a copy.
    payload: OnceLock<(Vec<u8>, Mutex<Vec<u8>>)>,
    simulated: OnceLock<DeviceRecordBatch>,
    file: Mutex<Option<OnDisk>>,
}

impl Input {
    /// # Errors
    /// The crate's.
    pub fn new(host: RecordBatch) -> Result<Self> {
        let mut buffers = Vec::new();
        for column in host.columns() {
            let data = column.to_data();
            let masks = data.nulls().map(|nulls| nulls.buffer());
            for buffer in masks.into_iter().chain(data.buffers()) {
                // SAFETY: `host` keeps the buffer, and this list goes with it.
                buffers.push(unsafe { std::slice::from_raw_parts(buffer.as_ptr(), buffer.len()) });
            }
        }
        Ok(Self {
            device: Devices::cpu().upload(&host)?,
            data_type: DataType::Struct(host.schema().fields().clone()),
            host,
            buffers,
            payload: OnceLock::new(),
            simulated: OnceLock::new(),
            file: Mutex::new(None),
        })
    }

    /// The bytes of every buffer.
    pub fn buffers(&self) -> &[&[u8]] {
        &self.buffers
    }

    /// How many they are in all.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.len()).sum()
    }

    fn payload(&self) -> &(Vec<u8>, Mutex<Vec<u8>>) {
        self.payload.get_or_init(|| {
            let all = self.buffers.concat();
            let room = Mutex::new(all.clone());
            (all, room)
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
    ("import_host", import_host),
    ("import_arrow", import_arrow),
    ("validate", validate),
    ("validate_arrow", validate_arrow),
    ("stream", stream),
    ("stream_host", stream_host),
    ("stream_arrow", stream_arrow),
    ("async", |i, n| {
        async_streams::one_thread(&i.device, n, counted)
    }),
    ("async_threads", |i, n| {
        async_streams::two_threads(&i.device, n, counted)
    }),
    ("async_single", |i, n| {
        async_streams::single(&i.device, n, counted)
    }),
    ("channel", |i, n| {
        async_streams::channel(&i.device, n, counted)
    }),
    ("channel_single", |i, n| {
        async_streams::channel_single(&i.device, n, counted)
    }),
    ("copy", copy),
    ("copy_cold", copy_cold),
    ("download", download),
    ("memcpy", memcpy),
    ("memcpy_cold", memcpy_cold),
    ("memcpy_each", memcpy_each),
    ("write_structs", write_structs),
    ("read_device", read_device),
    ("read_arrow", read_arrow),
    ("read_ready", read_ready),
    ("malloc_copy", malloc_copy),
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
        .map(|_| FFI_ArrowDeviceArray::new_cpu(&struct_data(&input.host)))
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

/// C structs to arrow-rs batches, schema known.
fn import_host(input: &Input, n: usize) -> Result<Duration> {
    let (schema, options) = (input.host.schema(), ImportOptions::default());
    each(produced_for_device(input, n), |array| {
        // SAFETY: arrow-rs exported the struct from a valid batch of this schema.
        let batch = unsafe { DeviceRecordBatch::import_as(array, schema.clone(), &options) }?;
        Ok(batch.to_host()?)
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

/// C structs to device batches whose values are checked, schema known.
fn validate(input: &Input, n: usize) -> Result<Duration> {
    let schema = input.host.schema();
    let options = ImportOptions::default().with_validation(Validation::Full);
    each(produced_for_device(input, n), |array| {
        // SAFETY: arrow-rs exported the struct from a valid batch of this schema.
        Ok(unsafe { DeviceRecordBatch::import_as(array, schema.clone(), &options) }?)
    })
}

/// C structs to arrow-rs's data, whose values are checked.
fn validate_arrow(input: &Input, n: usize) -> Result<Duration> {
    each(structs(input, n), |array| {
        // SAFETY: arrow-rs exported the struct from a valid batch of this schema.
        let data = unsafe { from_ffi_and_data_type(array, input.data_type.clone()) }?;
        data.validate_full()?;
        Ok(data)
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
        let reader =
            DeviceRecordBatchIterator::new(batches, input.host.schema(), ArrowDeviceType::CPU);
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

/// Deep copies into memory that nobody has touched yet; dropping them is not timed.
fn copy_cold(input: &Input, n: usize) -> Result<Duration> {
    let mut took = Duration::ZERO;
    for _ in 0..n {
        Devices::cpu().trim();
        release_heap();
        let mut kept = None;
        took += timed(1, || {
            kept = Some(input.device.compact()?);
            Ok(())
        })?;
        drop(black_box(kept));
    }
    Ok(took)
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

/// The same into memory that nobody has touched yet; freeing it is not timed.
fn memcpy_cold(input: &Input, n: usize) -> Result<Duration> {
    let (from, _) = input.payload();
    let mut took = Duration::ZERO;
    for _ in 0..n {
        let mut kept = None;
        took += timed(1, || {
            let to = kept.insert(Fresh::new(from.len())?);
            to.bytes().copy_from_slice(black_box(from));
            Ok(())
        })?;
        drop(black_box(kept));
    }
    Ok(took)
}

/// A copy of each buffer, one after the other into one block that is there: what copying many buffers costs without an
/// allocation, a plan or a result.
fn memcpy_each(input: &Input, n: usize) -> Result<Duration> {
    let sizes = input.buffers.iter().map(|from| from.len());
    let bytes: usize = sizes.map(|bytes| bytes.next_multiple_of(64)).sum();
    let mut to = vec![1; bytes];
    timed(n, || {
        let mut at = 0;
        for from in black_box(&input.buffers) {
            to[at..at + from.len()].copy_from_slice(from);
            at += from.len().next_multiple_of(64);
        }
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

/// Times work on the batch as an Arrow IPC file, which the system has in memory.
fn of_file(input: &Input, n: usize, work: impl Fn(&mut OnDisk) -> Result<()>) -> Result<Duration> {
    let mut file = input.file.lock().unwrap_or_else(PoisonError::into_inner);
    let file = match &mut *file {
        Some(file) => file,
        none => none.insert(OnDisk::new(&files::file(std::slice::from_ref(
            &input.host,
        ))?)?),
    };
    timed(n, || work(file))
}

/// Read to the CPU device, dropped again.
fn read_device(input: &Input, n: usize) -> Result<Duration> {
    of_file(input, n, |file| {
        IpcFileReader::try_new(file.rewound()?, &Devices::cpu())?.try_for_each(used)
    })
}

/// Read by arrow-rs and given to the CPU device, dropped again.
fn read_arrow(input: &Input, n: usize) -> Result<Duration> {
    of_file(input, n, |file| {
        let reader = FileReader::try_new(file.rewound()?, None)?;
        UploadingReader::new(reader, &Devices::cpu()).try_for_each(used)
    })
}

/// Read into memory that is there, and nothing else.
fn read_ready(input: &Input, n: usize) -> Result<Duration> {
    of_file(input, n, |file| {
        black_box(file.read()?.as_ptr());
        Ok(())
    })
}

/// An allocation and a copy for each buffer, freed again.
fn malloc_copy(input: &Input, n: usize) -> Result<Duration> {
    let mut kept = Vec::with_capacity(input.buffers.len());
    timed(n, || {
        for from in &input.buffers {
            let layout = Layout::from_size_align(from.len().next_multiple_of(64).max(64), 64)?;
            // SAFETY: the layout is not empty, and has room for the bytes.
            unsafe {
                let to = alloc(layout);
                if to.is_null() {
                    return Err("out of memory".into());
                }
                to.copy_from_nonoverlapping(from.as_ptr(), from.len());
                kept.push((to, layout));
            }
        }
        for (address, layout) in black_box(&mut kept).drain(..) {
            // SAFETY: the memory was allocated above with this layout, and is freed once.
            unsafe { dealloc(address, layout) };
        }
        Ok(())
    })
}

/// Gives idle heap memory back to the system.
pub fn release_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` may be called at any time, on any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
