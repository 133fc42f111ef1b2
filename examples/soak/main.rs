//! A soak test: streams many batches to a device and back through the C stream, from several threads, and checks that memory,
//! open files and threads do not grow. Some streams are closed early, some fail, and some are never read.
//!
//! `cargo run --release -p examples --example soak -- --batches 1000000 --device sim`

mod streams;
mod watch;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arrow_device::{Device, Devices, ReleasePolicy};
use streams::{Result, Worker};
use watch::Watch;

const HELP: &str = "\
Streams batches to a device and back through the C stream, and compares every value. Fails if memory,
open files or threads grow meanwhile. Runs on Linux only, as it reads /proc.

Usage: soak [OPTIONS]

Options:
      --batches N         how many batches come back [default: 100000]
      --threads N         threads that stream at once [default: 4]
      --device NAME[:N]   cpu, sim, cuda, ... [default: sim]
      --synchronize       releases wait for the whole device, as DLPack's do
      --unwatched         do not fail if memory, files or threads grow, as they do under a sanitizer
  -h, --help              print this text

Exit status:
  0  everything came back identical, and nothing grew
  1  something grew, was not released, or differs
  2  wrong usage, or no such device
";

/// How often the progress is printed.
const PRINTS: u64 = 10;
/// How often memory, files and threads are looked at.
const SAMPLES: u64 = 200;

struct Args {
    batches: u64,
    threads: usize,
    device: String,
    release: ReleasePolicy,
    watched: bool,
}

/// `None` if help was asked for.
fn args() -> Result<Option<Args>> {
    let mut args = Args {
        batches: 100_000,
        threads: 4,
        device: "sim".into(),
        release: ReleasePolicy::Ordered,
        watched: true,
    };
    let mut given = std::env::args().skip(1);
    while let Some(option) = given.next() {
        let mut value = || given.next().ok_or(format!("{option} needs a value"));
        match option.as_str() {
            "--batches" => args.batches = value()?.parse()?,
            "--threads" => args.threads = value()?.parse()?,
            "--device" => args.device = value()?,
            "--synchronize" => args.release = ReleasePolicy::Synchronize,
            "--unwatched" => args.watched = false,
            "-h" | "--help" => return Ok(None),
            _ => return Err(format!("there is no option {option}").into()),
        }
    }
    if args.batches == 0 || args.threads == 0 {
        return Err("there must be a batch and a thread".into());
    }
    Ok(Some(args))
}

fn main() -> ExitCode {
    let (args, device) = match args() {
        Ok(Some(args)) => match Devices::open(&args.device) {
            Ok(device) => (args, device),
            Err(e) => return fail(2, &e.to_string()),
        },
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(e) => return fail(2, &format!("{e}. Try --help.")),
    };
    match soak(&args, &device) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(1, &e.to_string()),
    }
}

fn fail(status: u8, why: &str) -> ExitCode {
    eprintln!("soak: {why}");
    ExitCode::from(status)
}

fn soak(args: &Args, device: &Device) -> Result<()> {
    println!(
        "Streaming {} batches to {device} and back, through the C stream, on {} threads.",
        args.batches, args.threads
    );
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let pool = streams::Kept::default();
    let mut watch = Watch::start()?;
    let start = Instant::now();
    let totals = std::thread::scope(|scope| -> Result<streams::Totals> {
        let workers: Vec<_> = (0..args.threads)
            .map(|seed| {
                let (pool, done, stop) = (&pool, &done, &stop);
                scope.spawn(move || -> Result<streams::Totals> {
                    let mut worker = Worker::new(device, args.release, seed as u64, pool)?;
                    let worked: Result<()> = (|| {
                        while done.load(Ordering::Relaxed) < args.batches
                            && !stop.load(Ordering::Relaxed)
                        {
                            done.fetch_add(worker.stream()?, Ordering::Relaxed);
                        }
                        Ok(())
                    })();
                    if worked.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    worked.map(|()| worker.totals)
                })
            })
            .collect();
        let (mut sampled, mut printed) = (0, 0);
        let mut watched = Ok(());
        while !workers.iter().all(|worker| worker.is_finished()) {
            std::thread::sleep(Duration::from_millis(5));
            let now = done.load(Ordering::Relaxed).min(args.batches);
            if watched.is_ok() && now * SAMPLES / args.batches > sampled {
                sampled = now * SAMPLES / args.batches;
                watched = watch.sample(now as f64 / args.batches as f64);
                if now * PRINTS / args.batches > printed {
                    printed = now * PRINTS / args.batches;
                    let seconds = start.elapsed().as_secs();
                    println!("After {now} batches ({seconds} s): {}.", watch.last());
                }
            }
        }
        let mut totals = streams::Totals::default();
        for worker in workers {
            totals += worker.join().map_err(|_| "a thread panicked")??;
        }
        watched.map(|()| totals)
    })?;
    println!("All came back with their values: {totals}.");

    drop(pool);
    streams::check_clean(device)?;
    if args.watched {
        watch.check_level()?;
        watch.check_end()?;
        println!("Memory, open files and threads stayed level.");
    }
    Ok(())
}
