//! Sends real data to a device and back and compares every value, null and schema.
//!
//! Each record batch is uploaded, exported as C structs, imported from them again, downloaded and
//! compared with what was sent. Try
//!
//! ```text
//! cargo run --release -p roundtrip -- --help
//! ```

mod args;
mod asynchronous;
mod compare;
mod job;
mod measure;
mod report;

use std::process::ExitCode;
use std::time::Instant;

use args::{Args, Command};
use compare::Findings;
use job::{Failure, Job, Outcome};
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
    let print = |text: &str| {
        report::print(text).map_err(|e| (FAILED, format!("cannot write to standard output: {e}")))
    };
    let arguments = std::env::args_os().skip(1);
    let args = match args::parse(arguments).map_err(|e| (USAGE, e))? {
        Command::Help => return print(args::HELP),
        Command::Run(args) => args,
    };
    let start = Instant::now();
    let (mut outcomes, mut findings) = (Vec::new(), Findings::default());
    let done = guard::catch(|| round_trip(&args, &mut outcomes, &mut findings))
        .unwrap_or_else(|panic| Err(Failure::Job(format!("panic: {panic}"))));
    let seconds = start.elapsed().as_secs_f64();
    if let Err(failure) = done {
        let (status, why) = match failure {
            Failure::Usage(why) => (USAGE, why),
            Failure::Job(why) => (FAILED, why),
        };
        if args.json {
            let why = Some(why.as_str());
            print(&report::json_line(
                &args, &outcomes, &findings, seconds, status, why,
            ))?;
        }
        return Err((status, why));
    }
    let status = match findings.total {
        0 => IDENTICAL,
        _ => DIFFERENT,
    };
    let closing = report::closing(&args, &outcomes, &findings, seconds, status);
    match (print(&closing), findings.described.first()) {
        (_, Some(first)) => {
            let differences = match findings.total {
                1 => "1 difference".to_owned(),
                n => format!("{n} differences, the first"),
            };
            Err((DIFFERENT, format!("{differences}: {first}")))
        }
        (printed, None) => printed,
    }
}

fn round_trip(
    args: &Args,
    outcomes: &mut Vec<Outcome>,
    findings: &mut Findings,
) -> Result<(), Failure> {
    let sources = input::sources(&args.files, args.scale).map_err(Failure::Usage)?;
    let job = Job::open(&args.device, args.via)?;
    for source in sources {
        let input = source.open(args.batch_rows).map_err(Failure::Usage)?;
        let mut progress = report::Progress::new(&input.name, input.rows);
        outcomes.push(job.run(input, findings, &mut |rows| progress.update(rows))?);
    }
    Ok(())
}
