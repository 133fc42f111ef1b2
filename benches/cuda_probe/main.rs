//! The first measurement on a GPU: what the machine can do, by plain driver calls, and this crate
//! beside it in the same run.
//!
//! ```text
//! cargo bench --features cuda --bench cuda_probe
//! ```
//!
//! Tables of all that it measures, and a line for each row that has a target (`rows`). About two
//! minutes; less than 6 GiB of host memory. `gpu/run` makes a record of it.

mod calls;
mod data;
mod host;
mod links;
mod machine;
mod ours;
mod peer;
mod raw;
mod reads;
mod rows;
mod staged;
mod stats;
mod streams;

use std::process::ExitCode;
use std::time::Instant;

use arrow_device::cuda::cudarc::driver::sys;
use arrow_device::cuda::{CudaConfig, CudaQueue};
use arrow_device::{Device, Error};

use raw::{Batch, Stream, check};
use rows::Printer;
use stats::{Res, Rounds};

const HELP: &str = "\
Measures copies, memory and calls of a CUDA device, and this crate beside them.

Usage: cuda_probe [--device N] [--quick] [--machine]

  --device N  which device [default: 0]
  --quick     small sizes and few rounds: shows that it runs, measures nothing worth keeping
  --machine   says what the machine is, and measures nothing
  -h, --help  print this text

Without a device it says so and exits 0; with ARROW_DEVICE_REQUIRE=cuda it exits 1.
Exit status 1 also if something could not be measured, 2 after bad usage.
";

struct Args {
    ordinal: usize,
    quick: bool,
    machine: bool,
}

/// `None`: print the help.
fn arguments() -> Result<Option<Args>, lexopt::Error> {
    use lexopt::prelude::*;
    let mut args = Args {
        ordinal: 0,
        quick: false,
        machine: false,
    };
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("device") => args.ordinal = parser.value()?.parse()?,
            Long("quick") => args.quick = true,
            Long("machine") => args.machine = true,
            Short('h') | Long("help") => return Ok(None),
            // Cargo adds them.
            Long("bench" | "test") => {}
            other => return Err(other.unexpected()),
        }
    }
    Ok(Some(args))
}

/// What every measurement has. The device's context is current on this thread.
pub(crate) struct Probe {
    pub(crate) ordinal: usize,
    pub(crate) quick: bool,
    pub(crate) cores: usize,
    pub(crate) device: Device,
    /// That of the device's default queue, so that raw copies run where the crate's do.
    pub(crate) stream: Stream,
    /// For the other direction.
    pub(crate) second: Stream,
    pub(crate) batch: Option<Batch>,
}

impl Probe {
    fn new(args: &Args, device: Device) -> Res<Self> {
        let queue = device.default_queue();
        let queue = queue.raw().as_any().downcast_ref::<CudaQueue>();
        let queue = queue.ok_or("the default queue is not a CUDA stream")?;
        Ok(Self {
            ordinal: args.ordinal,
            quick: args.quick,
            cores: std::thread::available_parallelism()?.get(),
            // SAFETY: the device keeps its default queue, and `device` is dropped after `stream`
            // has been used for the last time.
            stream: unsafe { Stream::borrowed(queue.cu_stream()) },
            device,
            second: Stream::new()?,
            batch: Batch::load(),
        })
    }

    /// At least `least` rounds, and more for up to `seconds`.
    pub(crate) fn rounds(&self, least: usize, seconds: f64) -> Rounds {
        if self.quick {
            return Rounds {
                least: 2,
                most: 2,
                seconds: 0.0,
            };
        }
        Rounds {
            least,
            most: 2000,
            seconds,
        }
    }

    /// The size of something, and the one that shows that it runs.
    pub(crate) fn bytes(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }
}

fn main() -> ExitCode {
    let args = match arguments() {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(e) => {
            eprintln!("cuda_probe: {e} (see --help)");
            return ExitCode::from(2);
        }
    };
    // A device of its own rather than the default set's: it goes when the probe is done.
    let device = match CudaConfig::new(args.ordinal).open() {
        Ok(device) => device,
        Err(e @ Error::DeviceNotAvailable { .. }) if !is_required() => {
            println!("cuda_probe: nothing measured: {e}");
            return ExitCode::SUCCESS;
        }
        Err(e) => {
            eprintln!("cuda_probe: {e}");
            return ExitCode::FAILURE;
        }
    };
    match run(&args, device) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            println!("{failed} of the measurements failed; see FAILED above");
            ExitCode::FAILURE
        }
        Err(e) => {
            println!("FAILED: {e}");
            ExitCode::FAILURE
        }
    }
}

/// As the tests have it: a list, separated by commas.
fn is_required() -> bool {
    let list = std::env::var("ARROW_DEVICE_REQUIRE").unwrap_or_default();
    list.split(',').any(|name| name.trim() == "cuda")
}

/// Answers how many measurements failed.
fn run(args: &Args, device: Device) -> Res<usize> {
    let context = device.as_cuda()?.cu_context();
    // SAFETY: the context is the device's, which lives until the end of this function.
    check("cuCtxPushCurrent", unsafe {
        sys::cuCtxPushCurrent_v2(context)
    })?;
    let probe = Probe::new(args, device.clone())?;
    let failed = if args.machine {
        machine::run(&probe)?;
        0
    } else {
        parts(&probe)?
    };
    drop(probe);
    let mut popped = std::ptr::null_mut();
    // SAFETY: `popped` is valid for the write of a handle; what is popped was pushed above.
    check("cuCtxPopCurrent", unsafe {
        sys::cuCtxPopCurrent_v2(&raw mut popped)
    })?;
    drop(device);
    Ok(failed)
}

/// What stands in the place of a verdict, where figures are no measurement.
fn no_measurement(probe: &Probe) -> Res<Option<&'static str>> {
    Ok(if machine::name(probe)?.starts_with("Simulated") {
        Some("stand-in: not a measurement")
    } else if probe.quick {
        Some("quick: not a measurement")
    } else if cfg!(debug_assertions) {
        Some("debug build: not a measurement")
    } else {
        None
    })
}

/// Runs all parts; answers how many failed.
fn parts(probe: &Probe) -> Res<usize> {
    let start = Instant::now();
    let mut rows = Printer::new(no_measurement(probe)?);
    if probe.quick {
        println!("QUICK: shows that the probe runs. These figures are no record.\n");
    }
    type Part = fn(&Probe) -> Res<()>;
    let parts: [(&str, Part); 12] = [
        ("machine", machine::run),
        ("raw copies", links::run),
        ("memcpy", host::copies),
        ("page-locking", host::locking),
        ("pools", calls::pools),
        ("small copies", calls::small_copies),
        ("events and calls", calls::events),
        ("reads of 8 bytes", reads::run),
        ("this crate: 512 MiB", ours::large),
        ("this crate: many and few columns", ours::small),
        ("this crate: 300 text columns", staged::texts),
        ("this crate: streams", streams::run),
    ];
    let mut failed = 0;
    for (name, part) in parts {
        println!("== {name}\n");
        let start = Instant::now();
        if let Err(e) = part(probe) {
            println!("FAILED: {name}: {e}\n");
            failed += 1;
        }
        // What a failed part left behind must not count for the next.
        probe.device.synchronize()?;
        probe.device.trim();
        println!("({name}: {:.1} s)\n", stats::since(start));
        rows.print();
    }
    rows.finish();
    println!("\npeak resident host memory: {}", machine::peak());
    println!("all of it: {:.1} s", stats::since(start));
    Ok(failed)
}
