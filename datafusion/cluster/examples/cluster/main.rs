//! Runs queries of TPC-H on a cluster whose workers have devices, and compares with DataFusion in one process.
//!
//! ```text
//! datafusion/cluster/run ballista
//! datafusion/cluster/run distributed
//! ```

#[cfg(feature = "ballista")]
mod ballista;
#[cfg(feature = "distributed")]
mod codec;
#[allow(dead_code, unused_imports)]
mod data;
#[allow(dead_code, unused_imports)]
#[path = "../../../examples/sql/device_filter/mod.rs"]
mod device_filter;
#[cfg(feature = "distributed")]
mod distributed;
#[allow(dead_code)]
mod processes;
#[allow(dead_code)]
mod report;

use std::process::ExitCode;

use datafusion::error::{DataFusionError, Result};
use lexopt::prelude::*;

const HELP: &str = "\
Starts a cluster on this machine, of a process that plans and two workers with a simulated device
each, runs queries of TPC-H on it, and compares the results with those of DataFusion in one process.
Prints the stages that ran device operators, and what they moved.

Usage: cluster ENGINE [--all]

  ENGINE       ballista or distributed, if built with that feature
      --all    run all 22 queries instead of three
  -h, --help   print this text

Exit status:
  0  all results are the same
  1  a result differs, or a query failed
  2  bad usage
";

const FAILED: u8 = 1;
const USAGE: u8 = 2;

struct Arguments {
    engine: String,
    /// What this process does in a cluster that another one has started: its role, and what the role needs.
    role: Vec<String>,
    all: bool,
}

/// Returns `None` to print the help.
fn arguments() -> std::result::Result<Option<Arguments>, lexopt::Error> {
    let mut found = Arguments {
        engine: String::new(),
        role: Vec::new(),
        all: false,
    };
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Value(engine) if found.engine.is_empty() => found.engine = engine.string()?,
            Long("all") => found.all = true,
            Long("role") => {
                let role = parser.values()?.map(|value| value.string());
                found.role = role.collect::<std::result::Result<_, _>>()?;
            }
            Short('h') | Long("help") => return Ok(None),
            other => return Err(other.unexpected()),
        }
    }
    match found.engine.is_empty() {
        true => Err("an engine is missing: ballista or distributed".into()),
        false => Ok(Some(found)),
    }
}

/// The queries to run.
fn queries(all: bool) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    let few = ["q01", "q03", "q06"];
    let queries = data::QUERIES.iter();
    queries.filter(move |(name, _)| all || few.contains(name))
}

/// Returns whether all results are the same.
async fn run(arguments: Arguments) -> Result<bool> {
    match (arguments.engine.as_str(), &arguments.role[..]) {
        #[cfg(feature = "ballista")]
        ("ballista", []) => ballista::run(queries(arguments.all)).await,
        #[cfg(feature = "ballista")]
        ("ballista", role) => ballista::role(role).await.map(|()| true),
        #[cfg(feature = "distributed")]
        ("distributed", []) => distributed::run(queries(arguments.all)).await,
        #[cfg(feature = "distributed")]
        ("distributed", role) => distributed::role(role).await.map(|()| true),
        (engine, _) => Err(DataFusionError::Configuration(format!(
            "this program was built without an engine {engine:?}; with it: --features {engine}"
        ))),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let end = |status: u8, why: String| {
        eprintln!("cluster: {why}");
        ExitCode::from(status)
    };
    let arguments = match arguments() {
        Ok(Some(arguments)) => arguments,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(e) => return end(USAGE, e.to_string()),
    };
    match run(arguments).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => end(FAILED, "a result differs from that of one process".into()),
        Err(e @ DataFusionError::Configuration(_)) => end(USAGE, e.to_string()),
        Err(e) => end(FAILED, e.to_string()),
    }
}
