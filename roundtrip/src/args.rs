//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use lexopt::prelude::*;

/// What `--help` prints.
pub(crate) const HELP: &str = "\
Sends record batches to a device and back through the Arrow C Device data interface, and compares
what comes back with what was sent: the schema, every value and every null.

Usage: roundtrip [OPTIONS] [FILE...]

A FILE is an Arrow IPC file or stream (compressed or not), a Parquet file, or a CSV file with a header.
Without files, the program generates the eight TPC-H tables. The rates leave out the time that this takes.

Options:
      --device NAME[:N]   the device: sim (simulated, needs no GPU), cpu, cuda, cuda-host, cuda-managed,
                          rocm, rocm-host, opencl, oneapi, vulkan or webgpu, and which one if there
                          are several [default: sim]
      --via WAY           the C struct that carries the batches: array (one per batch), stream (one per
                          input) or async (an asynchronous stream per input) [default: array]
      --batch-rows N      split batches that have more rows than this [default: 65536]
      --scale F           the TPC-H scale factor; 1 is about 1 GB of data [default: 0.1]
      --json              print all results as one JSON object on the last line
  -h, --help              print this text

Devices other than sim and cpu need a build with the feature of their name (for cuda-host and cuda-managed that is
cuda, for rocm-host rocm):
  cargo run --release -p roundtrip --features cuda -- --device cuda

Columns:
  bytes uploaded       bytes copied from host to device memory
  upload GB/s          10^9 bytes per second for upload, export and import, until the device has finished
  download GB/s        10^9 bytes per second for the copy back to host memory
  there and back GB/s  10^9 bytes uploaded per second by a stream, which uploads and downloads at once; the first
                       1 GiB of an input is read before the stream starts, the rest while it runs

The simulated device copies, and fills fresh memory, on the processor. The line after the table has the rate of a memcpy.

Exit status:
  0  everything that came back is identical
  1  something differs
  2  wrong usage, no such device, or an input that cannot be read
  3  a transfer or an exchange of C structs failed
";

/// Which C struct carries the batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Via {
    /// One `ArrowDeviceArray` per batch.
    Array,
    /// One `ArrowDeviceArrayStream` per input.
    Stream,
    /// One `ArrowAsyncDeviceStreamHandler` per input.
    Async,
}

impl Via {
    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Array => "array",
            Self::Stream => "stream",
            Self::Async => "async",
        }
    }

    fn parse(way: &str) -> Result<Self, String> {
        match way {
            "array" => Ok(Self::Array),
            "stream" => Ok(Self::Stream),
            "async" => Ok(Self::Async),
            other => Err(bad("via", other, "array, stream or async")),
        }
    }
}

/// What to do.
#[derive(Debug)]
pub(crate) struct Args {
    pub device: String,
    pub via: Via,
    /// The most rows of a batch; at least 1.
    pub batch_rows: usize,
    pub scale: f64,
    pub json: bool,
    /// Empty: generate tables.
    pub files: Vec<PathBuf>,
}

/// A parsed command line.
#[derive(Debug)]
pub(crate) enum Command {
    Help,
    Run(Args),
}

/// Parses the arguments after the program's name.
pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, String> {
    let mut args = Args {
        device: "sim".to_owned(),
        via: Via::Array,
        batch_rows: 65536,
        scale: 0.1,
        json: false,
        files: Vec::new(),
    };
    let mut parser = lexopt::Parser::from_args(arguments);
    while let Some(argument) = parser.next().map_err(usage)? {
        match argument {
            Short('h') | Long("help") => return Ok(Command::Help),
            Long("device") => args.device = text(&mut parser)?,
            Long("via") => args.via = Via::parse(&text(&mut parser)?)?,
            Long("batch-rows") => {
                args.batch_rows = number(&mut parser, "batch-rows", "a whole number from 1", |n| {
                    *n >= 1usize
                })?
            }
            Long("scale") => {
                args.scale = number(&mut parser, "scale", "from 0.0001 to 100000", |f: &f64| {
                    (0.0001..=100_000.0).contains(f)
                })?
            }
            Long("json") => args.json = true,
            Value(file) => args.files.push(file.into()),
            other => return Err(usage(other.unexpected())),
        }
    }
    Ok(Command::Run(args))
}

fn text(parser: &mut lexopt::Parser) -> Result<String, String> {
    parser.value().and_then(|v| v.string()).map_err(usage)
}

fn number<T: FromStr>(
    parser: &mut lexopt::Parser,
    option: &str,
    expected: &str,
    accept: impl Fn(&T) -> bool,
) -> Result<T, String> {
    let given = text(parser)?;
    match given.parse() {
        Ok(value) if accept(&value) => Ok(value),
        _ => Err(bad(option, &given, expected)),
    }
}

fn bad(option: &str, given: &str, expected: &str) -> String {
    format!("--{option} must be {expected}, not '{given}' (see --help)")
}

fn usage(e: lexopt::Error) -> String {
    format!("{e} (see --help)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Result<Args, String> {
        match parse(line.split_whitespace().map(OsString::from))? {
            Command::Run(args) => Ok(args),
            Command::Help => Err("help".to_owned()),
        }
    }

    #[test]
    fn defaults_and_values() {
        let args = run("").unwrap();
        assert_eq!((args.device.as_str(), args.via), ("sim", Via::Array));
        assert_eq!((args.batch_rows, args.json), (65536, false));
        let args = run("a --via=stream --batch-rows 7 --device cuda:1 --json -- --b").unwrap();
        assert_eq!((args.device.as_str(), args.via), ("cuda:1", Via::Stream));
        assert_eq!((args.batch_rows, args.json), (7, true));
        assert_eq!(args.files, [PathBuf::from("a"), PathBuf::from("--b")]);
        assert_eq!(run("--help --nonsense").unwrap_err(), "help");
    }

    #[test]
    fn refusals_name_the_option() {
        for (line, part) in [
            ("--via tape", "--via"),
            ("--batch-rows 0", "--batch-rows"),
            ("--batch-rows -3", "--batch-rows"),
            ("--scale 0", "--scale"),
            ("--scale NaN", "--scale"),
            ("--scale 0.00001", "--scale"),
            ("--scale", "--scale"),
            ("--nonsense", "--nonsense"),
            ("--json=1", "--json"),
        ] {
            let e = run(line).unwrap_err();
            assert!(e.contains(part), "{line}: {e}");
        }
    }
}
