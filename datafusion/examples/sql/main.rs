//! Runs SQL whose filters and aggregates run on a device, and shows the plans.
//!
//! ```text
//! cargo run -p arrow-device-datafusion --example sql -- --device sim
//! ```

mod device_filter;
mod tpch;

use std::process::ExitCode;

use arrow_device::Devices;

const HELP: &str = "\
Runs SQL over a table on a device and over one on the host, with and without a rule that moves
filters and aggregates to the device: prints the plans, the results and what the operators did, and
compares with DataFusion's own results.

Usage: sql [--device NAME[:N]] [--tpch SCALE]

      --device NAME[:N]   sim, or cuda if built with that feature [default: sim]
      --tpch SCALE        instead: times queries 1 and 6 of TPC-H, over tables on the host, on the
                          device, and sent up; at scale 1, lineitem has 6 million rows
  -h, --help              print this text

The exit status is 0 if all results are DataFusion's own, 1 if one differs or a query failed, and 2 for
bad usage or a device that is not there.
";

const FAILED: u8 = 1;
const NO_DEVICE: u8 = 2;

#[tokio::main]
async fn main() -> ExitCode {
    let end = |status: u8, why: String| {
        eprintln!("sql: {why}");
        ExitCode::from(status)
    };
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (name, scale) = match arguments[..] {
        [] => ("sim", None),
        ["--device", name] => (name, None),
        ["--tpch", scale] => ("sim", Some(scale)),
        ["--device", name, "--tpch", scale] => (name, Some(scale)),
        ["--help" | "-h"] => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        _ => return end(NO_DEVICE, format!("{arguments:?} is not as --help says")),
    };
    let scale = match scale.map(str::parse::<f64>).transpose() {
        Ok(scale) => scale,
        Err(e) => return end(NO_DEVICE, format!("--tpch: {e}")),
    };
    let device = match Devices::open(name) {
        Ok(device) => device,
        Err(e) => return end(NO_DEVICE, e.to_string()),
    };
    if !device_filter::cache::exist_for(device.id().device_type) {
        return end(NO_DEVICE, format!("the filter has no kernels for {device}"));
    }
    let same = match scale {
        Some(scale) => tpch::run(&device, scale).await,
        None => device_filter::run(&device).await,
    };
    match same {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => end(FAILED, "a result differs from DataFusion's own".into()),
        Err(e) => end(FAILED, e.to_string()),
    }
}
