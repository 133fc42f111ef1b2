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
Runs SQL over a table on a device, with and without a rule that moves filters there: prints the
plans, the results and what the operators did, and compares with DataFusion's own results.

Usage: sql [--device NAME[:N]]

      --device NAME[:N]   sim, or cuda if built with that feature [default: sim]
  -h, --help              print this text

Exit status:
  0  all results are DataFusion's own
  1  a result differs, or a query failed
  2  bad usage, or no such device
";

const FAILED: u8 = 1;
const NO_DEVICE: u8 = 2;

/// Returns the device's name, or `None` to print the help.
fn arguments() -> Result<Option<String>, lexopt::Error> {
    let mut device = "sim".to_owned();
    let mut parser = lexopt::Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Long("device") => device = parser.value()?.string()?,
            Short('h') | Long("help") => return Ok(None),
            other => return Err(other.unexpected()),
        }
    }
    Ok(Some(device))
}

#[tokio::main]
async fn main() -> ExitCode {
    let end = |status: u8, why: String| {
        eprintln!("sql: {why}");
        ExitCode::from(status)
    };
    let name = match arguments() {
        Ok(Some(name)) => name,
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
    match device_filter::has_kernels(&device) {
        Ok(true) => {}
        Ok(false) => return end(NO_DEVICE, format!("the filter has no kernels for {device}")),
        Err(e) => return end(NO_DEVICE, e.to_string()),
    }
    match device_filter::run(&device).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => end(FAILED, "a result differs from DataFusion's own".into()),
        Err(e) => end(FAILED, e.to_string()),
    }
}
