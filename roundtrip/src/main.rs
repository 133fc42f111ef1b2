//! Sends real data to a device and back and compares every value, null and schema.
//!
//! Each record batch is uploaded, exported as C structs, imported from them again, downloaded and
//! compared with what was sent. `cargo run --release -p roundtrip -- --help` lists the options.

mod args;
mod asynchronous;
mod compare;
mod job;
mod report;
mod simulation;

use std::process::ExitCode;
use std::time::Instant;

use args::{Args, Command};
use compare::Findings;
use job::{Failure, Job, Outcome};
use report::{Progress, Table};
use roundtrip::input::Source;
use roundtrip::{guard, input};

/// Exit statuses.
const IDENTICAL: u8 = 0;
const DIFFERENT: u8 = 1;
const USAGE: u8 = 2;
const FAILED: u8 = 3;

fn main() -> ExitCode {
    guard::silence_panics();
    let result = guard::catch(run).unwrap_or_else(|panic| Err((FAILED, format!("panic: {panic}"))));
    ExitCode::from(match result {
        Ok(()) => IDENTICAL,
        Err((status, why)) => {
            report::complain(&why);
            status
        }
    })
}

/// An error carries the exit status and what to say about it.
fn run() -> Result<(), (u8, String)> {
    let arguments = std::env::args_os().skip(1);
    let args = match args::parse(arguments).map_err(|e| (USAGE, e))? {
        Command::Help => return print(args::HELP).map_err(|why| (FAILED, why)),
        Command::Run(args) => args,
    };
    let start = Instant::now();
    let (mut outcomes, mut findings) = (Vec::new(), Findings::default());
    let mut memcpy = None;
    let done = guard::catch(|| round_trip(&args, &mut memcpy, &mut outcomes, &mut findings))
        .unwrap_or_else(|panic| Err(Failure::Job(format!("panic: {panic}"))));
    let seconds = start.elapsed().as_secs_f64();
    let (status, why) = match done {
        Ok(()) if findings.total == 0 => (IDENTICAL, None),
        Ok(()) => (DIFFERENT, None),
        Err(Failure::Usage(why)) => (USAGE, Some(why)),
        Err(Failure::Job(why)) => (FAILED, Some(why)),
    };
    if args.json {
        let error = why.as_deref();
        let line = report::json_line(&args, memcpy, &outcomes, &findings, seconds, status, error);
        print(&line).map_err(|why| (FAILED, why))?;
    }
    match why.or_else(|| findings.summary()) {
        None => Ok(()),
        Some(why) => Err((status, why)),
    }
}

fn round_trip(
    args: &Args,
    memcpy: &mut Option<f64>,
    outcomes: &mut Vec<Outcome>,
    findings: &mut Findings,
) -> Result<(), Failure> {
    let sources = input::sources(&args.files, args.scale).map_err(Failure::Usage)?;
    let job = Job::open(&args.device, args.via)?;
    *memcpy = job.memcpy();
    let names: Vec<_> = sources.iter().map(Source::name).collect();
    let table = Table::new(&names, args.via);
    print(&report::opening(args)).map_err(Failure::Job)?;
    print(&table.head()).map_err(Failure::Job)?;
    for (source, name) in sources.iter().zip(&names) {
        let progress = Progress::new(name);
        let input = source.open(args.batch_rows).map_err(Failure::Usage)?;
        progress.expect(input.rows);
        let outcome = job.run(input, findings, &|rows| progress.update(rows))?;
        drop(progress);
        print(&table.line(&outcome)).map_err(Failure::Job)?;
        outcomes.push(outcome);
    }
    print(&report::closing(&table, &job, outcomes, findings)).map_err(Failure::Job)
}

fn print(text: &str) -> Result<(), String> {
    report::print(text).map_err(|e| format!("cannot write to standard output: {e}"))
}
