//! Runs SQL whose filters run on a device, and shows the plans.
//!
//! ```text
//! cargo run -p arrow-device-datafusion --example sql -- --device sim
//! ```

mod device_filter;

use std::process::ExitCode;

use arrow_device::Devices;
use lexopt::prelude::*;

const HELP: &str = "\
Runs SQL over a table on a device and over a Parquet table, with and without a rule that moves
filters to the device: prints the plans, the results and what the operators did, and compares with
DataFusion's own results.

Usage: sql [--device NAME[:N]] [--uploads WHEN]

      --device NAME[:N]   sim, or cuda if built with that feature [default: sim]
      --uploads WHEN      when the filter of a Parquet table moves to the device: always, never, or a
                          number of rows that the table must have [default: 100000]
  -h, --help              print this text

Exit status:
  0  all results are DataFusion's own
  1  a result differs, or a query failed
  2  bad usage, or no such device
";

const FAILED: u8 = 1;
const NO_DEVICE: u8 = 2;

/// Returns the device's name and of how many rows an upload is worth it, or `None` to print the help.
fn arguments() -> Result<Option<(String, Option<usize>)>, lexopt::Error> {
    let mut device = "sim".to_owned();
    let mut uploads = Some(100_000);
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("device") => device = parser.value()?.string()?,
            Long("uploads") => {
                uploads = match &*parser.value()?.string()? {
                    "always" => Some(0),
                    "never" => None,
                    rows => Some(rows.parse().map_err(|e| {
                        format!("--uploads {rows}: {e}; it is always, never or a number of rows")
                    })?),
                };
            }
            Short('h') | Long("help") => return Ok(None),
            other => return Err(other.unexpected()),
        }
    }
    Ok(Some((device, uploads)))
}

#[tokio::main]
async fn main() -> ExitCode {
    let end = |status: u8, why: String| {
        eprintln!("sql: {why}");
        ExitCode::from(status)
    };
    let (name, uploads) = match arguments() {
        Ok(Some(arguments)) => arguments,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(e) => return end(NO_DEVICE, e.to_string()),
    };
    let device = match Devices::open(&name) {
        Ok(device) => device,
        Err(e) => return end(NO_DEVICE, e.to_string()),
    };
    if !device_filter::has_kernels(&device) {
        return end(NO_DEVICE, format!("the filter has no kernels for {device}"));
    }
    match device_filter::run(&device, uploads).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => end(FAILED, "a result differs from DataFusion's own".into()),
        Err(e) => end(FAILED, e.to_string()),
    }
}
