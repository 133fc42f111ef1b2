//! TPC-H's query 6 on a GPU that wgpu drives: the columns of `lineitem` go to the GPU, shaders in WGSL filter them and sum a product
//! of decimals exactly, nulls honoured, and the result comes back as a record batch, which must equal that of arrow-rs on the CPU.
//!
//! ```sh
//! cargo run --release -p arrow-device-wgpu --example column_math               # makes lineitem at scale 1
//! cargo run --release -p arrow-device-wgpu --example column_math -- FILE.parquet
//! cargo run --release -p arrow-device-wgpu --example column_math -- --sizes bandwidth.svg
//! ```
//!
//! `--scale S` makes another size, of about 6 million rows times S, which needs 312 MB times S of the GPU's memory. `--adapter N` takes
//! another adapter than the best. `--sizes PATH` measures copies of 4 KiB to 64 MiB instead, and draws their rates. The exit code is 1 if
//! the results differ or something fails, and 2 if there is no adapter.

mod chart;
mod cpu;
mod input;
mod query;
mod shader;
mod sizes;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use arrow_array::cast::AsArray;
use arrow_array::types::{Decimal128Type, Int64Type};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_device::{Device, DeviceRecordBatch, TransferStats};
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, wgpu};
use arrow_schema::DataType;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Each side runs this often; its fastest run counts, which other programs disturb least.
const RUNS: usize = 5;

struct Options {
    file: Option<PathBuf>,
    scale: f64,
    adapter: Option<usize>,
    sizes: Option<PathBuf>,
}

impl Options {
    fn parse() -> Result<Self> {
        use lexopt::prelude::*;
        let mut options = Self {
            file: None,
            scale: 1.0,
            adapter: None,
            sizes: None,
        };
        let mut arguments = lexopt::Parser::from_env();
        while let Some(argument) = arguments.next()? {
            match argument {
                Long("scale") => options.scale = arguments.value()?.parse()?,
                Long("adapter") => options.adapter = Some(arguments.value()?.parse()?),
                Long("sizes") => options.sizes = Some(arguments.value()?.into()),
                Value(file) if options.file.is_none() => options.file = Some(file.into()),
                other => return Err(other.unexpected().into()),
            }
        }
        if !(options.scale > 0.0 && options.scale <= 1000.0) {
            return Err("--scale takes a number above 0 and up to 1000".into());
        }
        Ok(options)
    }

    fn open(&self) -> arrow_device::Result<Device> {
        match self.adapter {
            Some(number) => WgpuConfig::new(number).open(),
            None => WgpuConfig::best().open(),
        }
    }
}

fn main() -> ExitCode {
    let options = match Options::parse() {
        Ok(options) => options,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::FAILURE;
        }
    };
    let device = match options.open() {
        Ok(device) => device,
        Err(e) => {
            eprintln!("No GPU to compute on: {e}");
            return ExitCode::from(2);
        }
    };
    match run(&options, &device) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether both results are the same.
fn run(options: &Options, device: &Device) -> Result<bool> {
    let adapter = describe(&WgpuDevice::of(device)?.info());
    println!("Adapter    {}", adapter.join("\n           "));
    if let Some(path) = &options.sizes {
        sizes::measure(device, &adapter, path)?;
        return Ok(true);
    }
    let batches = match &options.file {
        Some(file) => input::read(file)?,
        None => input::generate(options.scale)?,
    };
    let rows: usize = batches.iter().map(RecordBatch::num_rows).sum();
    let bytes: usize = batches
        .iter()
        .flat_map(RecordBatch::columns)
        .map(bytes)
        .sum();
    println!(
        "Input      {rows} rows in {} batches, {} in 4 columns",
        batches.len(),
        size(bytes)
    );

    let on_gpu = on_gpu(device, &batches, bytes)?;
    let (time, on_cpu) = fastest(|| cpu::query(&batches))?;
    println!(
        "CPU        {}, {} read by arrow-rs on one thread",
        milliseconds(time),
        size(bytes)
    );
    for (name, result) in [("GPU", &on_gpu), ("CPU", &on_cpu)] {
        println!("{name}        {}", show(result));
    }
    let equal = on_gpu == on_cpu;
    println!(
        "{}",
        if equal {
            "The results are equal."
        } else {
            "THE RESULTS DIFFER."
        }
    );
    Ok(equal)
}

/// Runs the query on the GPU, and prints what each step takes.
fn on_gpu(device: &Device, batches: &[RecordBatch], bytes: usize) -> Result<RecordBatch> {
    let start = Instant::now();
    let query = query::Query::new(device)?;
    println!(
        "GPU        {} to compile the shaders, once",
        milliseconds(start.elapsed())
    );

    let upload = || -> Result<Vec<DeviceRecordBatch>> {
        let columns: std::result::Result<_, _> = batches.iter().map(|b| device.upload(b)).collect();
        device.synchronize()?;
        Ok(columns?)
    };
    let ((up, columns), copied) = counted(|| fastest(upload))?;
    let copied = copied.bytes_to_device / RUNS as u64;
    println!(
        "GPU        {}, {} copied to the GPU",
        milliseconds(up),
        size(copied as usize)
    );

    let (computed, result) = fastest(|| {
        let result = query.run(&columns)?;
        device.synchronize()?;
        Ok(result)
    })?;
    println!(
        "GPU        {}, {} read and summed by shaders",
        milliseconds(computed),
        size(bytes)
    );

    let ((back, result), copied) = counted(|| fastest(|| Ok(result.to_host()?)))?;
    let copied = copied.bytes_to_host / RUNS as u64;
    println!(
        "GPU        {}, {copied} bytes copied back",
        milliseconds(back)
    );
    println!("GPU        {} in all", milliseconds(up + computed + back));
    Ok(result)
}

/// Returns the time of the fastest run and the last one's result. The results before are dropped outside the measured time.
fn fastest<T>(mut work: impl FnMut() -> Result<T>) -> Result<(Duration, T)> {
    let (mut least, mut last) = (Duration::MAX, None);
    for _ in 0..RUNS {
        drop(last.take());
        let start = Instant::now();
        last = Some(work()?);
        least = least.min(start.elapsed());
    }
    Ok((least, last.expect("a run")))
}

fn counted<T>(work: impl FnOnce() -> Result<T>) -> Result<(T, TransferStats)> {
    let (done, stats) = TransferStats::scope(work);
    Ok((done?, stats))
}

/// The adapter, and whether it is one.
fn describe(info: &wgpu::AdapterInfo) -> Vec<String> {
    let driver = [&*info.driver, &*info.driver_info].join(" ");
    let mut lines = vec![format!(
        "{}, {:?}, {}",
        info.name,
        info.backend,
        driver.trim()
    )];
    if info.device_type == wgpu::DeviceType::Cpu {
        lines.push("A driver in software, which computes on the CPU: no measure of a GPU.".into());
    }
    lines
}

fn show(result: &RecordBatch) -> String {
    let revenue = result.column(0).as_primitive::<Decimal128Type>();
    let rows = result.column(1).as_primitive::<Int64Type>().value(0);
    match revenue.is_null(0) {
        true => format!("revenue null, of {rows} rows"),
        false => format!("revenue {}, of {rows} rows", revenue.value_as_string(0)),
    }
}

/// Returns the bytes of values and validity bitmap, as they are copied.
fn bytes(column: &ArrayRef) -> usize {
    let width = match column.data_type() {
        DataType::Date32 => 4,
        _ => 16,
    };
    let bitmap = column.nulls().map_or(0, |_| column.len().div_ceil(8));
    column.len() * width + bitmap
}

fn milliseconds(time: Duration) -> String {
    format!("{:9.3} ms", time.as_secs_f64() * 1e3)
}

fn size(bytes: usize) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}
