//! The first measurement on a GPU: what the machine can do, by plain driver calls, and this crate
//! beside it in the same run.
//!
//! ```text
//! cargo bench -p arrow-device-gpu --bench cuda_probe
//! ```
//!
//! Tables of all that it measures, and after each the lines of its rows, which have targets; lines that
//! begin with "grid" are for `gpu/picture`. About two minutes; less than 8 GiB of host memory. `gpu/run`
//! makes a record of it.

mod data;
mod first;
mod grid;
mod machine;
mod peer;
mod raw;
mod stats;
mod streams;
mod texts;
mod transfers;

use std::process::ExitCode;
use std::ptr::with_exposed_provenance_mut;
use std::time::Instant;

use arrow_device::abi::ArrowDeviceType;
use arrow_device::cuda::cudarc::driver::result;
use arrow_device::device::DeviceId;
use arrow_device::{Device, Devices, Error};

use raw::{Lists, Stream};
use stats::Res;

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
    /// What stands in the place of a verdict, where figures are no measurement.
    pub(crate) instead: Option<&'static str>,
    /// That of the device's default queue, so that raw copies run where the crate's do.
    pub(crate) stream: Stream,
    pub(crate) lists: Option<Lists>,
    /// Last, since the others need its context.
    pub(crate) device: Device,
}

impl Probe {
    fn new(args: &Args, device: Device) -> Res<Self> {
        let context = device.cuda_context()?.cu_ctx();
        // SAFETY: the context is the device's, which the probe keeps.
        unsafe { result::ctx::set_current(context) }?;
        let queue = device.default_queue().raw().stream_handle();
        let queue = queue.ok_or("the default queue is not a CUDA stream")?;
        let not_measured = [
            (
                machine::name(args.ordinal)?.starts_with("Simulated"),
                "stand-in: not a measurement",
            ),
            (args.quick, "quick: not a measurement"),
            (cfg!(debug_assertions), "debug build: not a measurement"),
        ];
        Ok(Self {
            ordinal: args.ordinal,
            quick: args.quick,
            instead: not_measured
                .iter()
                .find(|(holds, _)| *holds)
                .map(|(_, text)| *text),
            // SAFETY: the device keeps its default queue, and is kept for as long.
            stream: unsafe { Stream::borrowed(with_exposed_provenance_mut(queue)) }?,
            device,
            lists: Lists::load(),
        })
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
    let devices = Devices::new();
    arrow_device::cuda::register(&devices);
    let id = DeviceId::new(ArrowDeviceType::CUDA, args.ordinal as i64);
    let device = match devices.get(id) {
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

/// Runs all parts; answers how many failed.
fn run(args: &Args, device: Device) -> Res<usize> {
    let probe = Probe::new(args, device)?;
    if args.machine {
        machine::run(&probe)?;
        return Ok(0);
    }
    let start = Instant::now();
    if probe.quick {
        println!("QUICK: shows that the probe runs. These figures are no record.\n");
    }
    type Part = fn(&Probe) -> Res<()>;
    let parts: [(&str, Part); 7] = [
        ("the first upload", first::run),
        ("machine", machine::run),
        ("this crate: 512 MiB", transfers::large),
        ("this crate: many and few columns", transfers::small),
        ("this crate: 300 text columns", texts::run),
        ("this crate: streams", streams::run),
        ("sizes and columns", grid::run),
    ];
    let mut failed = 0;
    for (name, part) in parts {
        println!("== {name}\n");
        let start = Instant::now();
        if let Err(e) = part(&probe) {
            println!("FAILED: {name}: {e}\n");
            failed += 1;
        }
        // What a failed part left behind must not count for the next.
        probe.device.synchronize()?;
        probe.device.trim();
        println!("({name}: {:.1} s)\n", stats::since(start));
    }
    println!("all of it: {:.1} s", stats::since(start));
    Ok(failed)
}
