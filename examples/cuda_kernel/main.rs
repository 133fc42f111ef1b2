//! Multiplies two columns of a record batch with a CUDA kernel, nulls included. Two more kernels double a column and filter it.
//!
//! ```text
//! cargo run -p examples --features cuda --example cuda_kernel -- --device cuda:0
//! ```
//!
//! It needs an NVIDIA GPU and its driver, but no CUDA toolkit. Read `work.rs` first. With `cuda-host:0` and
//! `cuda-managed:0` the data is in page-locked and in managed memory.

mod work;

use std::process::ExitCode;

use arrow_device::Devices;

const USAGE: &str = "usage: cuda_kernel [--device cuda:N|cuda-host:N|cuda-managed:N]";

/// Exit statuses.
const SAME: u8 = 0;
const DIFFERENT: u8 = 1;
const NO_DEVICE: u8 = 2;

fn main() -> ExitCode {
    ExitCode::from(match run() {
        Ok(()) => SAME,
        Err((status, why)) => {
            eprintln!("cuda_kernel: {why}");
            status
        }
    })
}

/// An error carries the exit status and what to say about it.
fn run() -> Result<(), (u8, String)> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let arguments: Option<Vec<_>> = arguments.iter().map(|a| a.to_str()).collect();
    let name = match arguments.as_deref() {
        Some([]) => "cuda:0",
        Some(["--device", name]) => name,
        _ => return Err((NO_DEVICE, USAGE.into())),
    };
    let device = Devices::open(name).map_err(|e| (NO_DEVICE, e.to_string()))?;
    if let Err(e) = device.cuda_context() {
        return Err((NO_DEVICE, e.to_string()));
    }
    let report = work::run(&device).map_err(|e| (DIFFERENT, e.to_string()))?;
    work::double_and_filter(&device).map_err(|e| (DIFFERENT, e.to_string()))?;
    let stats = report.stats;
    println!(
        "{device}: {} rows, {} null products, all equal to the CPU's",
        report.rows, report.nulls
    );
    let event = if report.has_event { "an" } else { "no" };
    println!("exported with {event} event and imported again");
    println!(
        "{} copies ({} bytes up, {} bytes down), {} allocations",
        stats.copies, stats.bytes_to_device, stats.bytes_to_host, stats.allocations
    );
    println!(
        "{} events, {} queue waits, {} host waits",
        stats.events, stats.queue_waits, stats.host_waits
    );
    Ok(())
}
