//! What the program prints: what it is about to do, progress, the table, the verdict, the JSON
//! line, the line of failure.

use std::io::{self, Write};
use std::time::Duration;

use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use crate::args::{Args, Via};
use crate::compare::Findings;
use crate::job::{Job, Outcome};

/// A line on standard error, if that is a terminal, until it is dropped.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn new(name: &str) -> Self {
        let bar = ProgressBar::no_length();
        bar.set_message(one_line(name));
        let progress = Self(bar);
        progress.set_template("{spinner} {msg}: {human_pos} rows");
        progress.0.enable_steady_tick(Duration::from_millis(100));
        progress
    }

    /// Says that about `rows` rows will come.
    pub(crate) fn expect(&self, rows: Option<u64>) {
        if let Some(rows) = rows {
            self.0.set_length(rows);
            self.set_template("{spinner} {msg}: {human_pos} of about {human_len} rows {wide_bar}");
        }
    }

    /// Shows that `rows` rows came back.
    pub(crate) fn update(&self, rows: u64) {
        self.0.set_position(rows);
    }

    fn set_template(&self, template: &str) {
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.0.set_style(style);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// All inputs together.
fn total(outcomes: &[Outcome]) -> Outcome {
    let mut total = Outcome {
        name: "total".to_owned(),
        ..Outcome::default()
    };
    for outcome in outcomes {
        total.batches += outcome.batches;
        total.rows += outcome.rows;
        total.differences += outcome.differences;
        total.up += outcome.up;
        total.down += outcome.down;
        total.stream += outcome.stream;
        total.stats = total.stats + outcome.stats;
    }
    total
}

/// 10^9 bytes per second; `None` if nothing was moved.
fn rate(bytes: u64, time: Duration) -> Option<f64> {
    let rate = bytes as f64 / time.as_secs_f64() / 1e9;
    (bytes > 0 && rate.is_finite()).then_some(rate)
}

/// `n` of something.
fn count(n: u64, one: &str, many: &str) -> String {
    format!("{} {}", HumanCount(n), if n == 1 { one } else { many })
}

/// What goes where, before the first input.
pub(crate) fn opening(args: &Args) -> String {
    let inputs = match args.files.len() {
        0 => format!(
            "Generating the TPC-H tables at scale factor {}. The time that this takes is in none of the figures.",
            args.scale
        ),
        n => format!("Reading {}.", count(n as u64, "file", "files")),
    };
    let way = match args.via {
        Via::Array => "each batch as an ArrowDeviceArray",
        Via::Stream => "each input as an ArrowDeviceArrayStream",
        Via::Async => "each input through an ArrowAsyncDeviceStreamHandler",
    };
    let device = one_line(&args.device);
    format!("{inputs}\nSending them to the device {device} and back, {way}.\n\n")
}

/// The table of inputs, which is printed line by line.
pub(crate) struct Table {
    via: Via,
    name_width: usize,
    heads: Vec<&'static str>,
}

impl Table {
    /// For inputs with these names.
    pub(crate) fn new(names: &[String], via: Via) -> Self {
        let mut heads = vec!["input", "rows", "batches", "bytes uploaded"];
        match via {
            Via::Array => heads.extend(["upload GB/s", "download GB/s"]),
            Via::Stream | Via::Async => heads.push("there and back GB/s"),
        }
        heads.push("differences");
        let widths = names.iter().map(|name| one_line(name).chars().count());
        Self {
            via,
            name_width: widths.max().unwrap_or(0).max("input".len()),
            heads,
        }
    }

    pub(crate) fn head(&self) -> String {
        self.row(self.heads.iter().copied())
    }

    pub(crate) fn line(&self, outcome: &Outcome) -> String {
        let number = |n: u64| HumanCount(n).to_string();
        let speed = |bytes, time| rate(bytes, time).map_or("-".into(), |rate| format!("{rate:.2}"));
        let (up, down) = (outcome.stats.bytes_to_device, outcome.stats.bytes_to_host);
        let mut cells = vec![one_line(&outcome.name)];
        cells.extend([outcome.rows, outcome.batches, up].map(number));
        match self.via {
            Via::Array => cells.extend([speed(up, outcome.up), speed(down, outcome.down)]),
            Via::Stream | Via::Async => cells.push(speed(up, outcome.stream)),
        }
        cells.push(number(outcome.differences));
        self.row(cells.iter().map(String::as_str))
    }

    /// The first cell to the left, the others to the right.
    fn row<'a>(&self, cells: impl Iterator<Item = &'a str>) -> String {
        let mut line = String::new();
        for (head, cell) in self.heads.iter().zip(cells) {
            if line.is_empty() {
                line = format!("{cell:0$}", self.name_width);
            } else {
                line += &format!("  {cell:>0$}", head.len().max(11));
            }
        }
        line + "\n"
    }
}

/// What comes after the last input: the differences, the verdict and the device's stats.
pub(crate) fn closing(
    table: &Table,
    job: &Job,
    outcomes: &[Outcome],
    findings: &Findings,
) -> String {
    let total = total(outcomes);
    let mut text = table.line(&total) + "\n";
    for difference in &findings.described {
        text += &format!("{}\n", one_line(difference));
    }
    let more = findings.total - findings.described.len() as u64;
    if more > 0 {
        text += &format!("... and {} more\n", HumanCount(more));
    }
    let rows = count(total.rows, "row", "rows");
    let batches = count(total.batches, "batch", "batches");
    text += &match findings.total {
        0 => format!("{rows} in {batches} came back identical.\n"),
        n => {
            let differences = count(n, "difference", "differences");
            format!("{rows} in {batches} came back with {differences}.\n")
        }
    };
    if let Some(memcpy) = job.memcpy() {
        text += &format!(
            "The device is simulated: the GB/s say nothing about a GPU. A memcpy runs at {memcpy:.2} GB/s here.\n"
        );
    }
    let stats = total.stats;
    text + &format!(
        "The device counted {}, {}, {} up, {} down, {}, {} and {}.\n",
        count(stats.allocations, "allocation", "allocations"),
        count(stats.copies, "copy", "copies"),
        count(stats.bytes_to_device, "byte", "bytes"),
        count(stats.bytes_to_host, "byte", "bytes"),
        count(stats.events, "event", "events"),
        count(stats.queue_waits, "queue wait", "queue waits"),
        count(stats.host_waits, "host wait", "host waits"),
    )
}

/// One JSON object on a line. `error` says why there is no full result.
pub(crate) fn json_line(
    args: &Args,
    memcpy: Option<f64>,
    outcomes: &[Outcome],
    findings: &Findings,
    seconds: f64,
    status: u8,
    error: Option<&str>,
) -> String {
    let total = total(outcomes);
    let numbers = |outcome: &Outcome| {
        let stats = outcome.stats;
        json!({
            "name": outcome.name,
            "batches": outcome.batches,
            "rows": outcome.rows,
            "mismatches": outcome.differences,
            "up_gb_per_s": rate(stats.bytes_to_device, outcome.up),
            "down_gb_per_s": rate(stats.bytes_to_host, outcome.down),
            "stream_gb_per_s": rate(stats.bytes_to_device, outcome.stream),
            "allocations": stats.allocations,
            "copies": stats.copies,
            "bytes_up": stats.bytes_to_device,
            "bytes_down": stats.bytes_to_host,
            "events": stats.events,
            "queue_waits": stats.queue_waits,
            "host_waits": stats.host_waits,
        })
    };
    let mut line = numbers(&total);
    let rest = json!({
        "files": outcomes.len(),
        "mismatches": findings.total,
        "device": args.device,
        "via": args.via.name(),
        "memcpy_gb_per_s": memcpy,
        "seconds": seconds,
        "status": status,
        "error": error,
        "differences": findings.described,
        "inputs": outcomes.iter().map(numbers).collect::<Vec<Value>>(),
    });
    if let (Value::Object(line), Value::Object(rest)) = (&mut line, rest) {
        line.remove("name");
        line.extend(rest);
    }
    format!("{line}\n")
}

/// Writes to standard output. A reader that went away is no error.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Says on standard error why the status is not 0. If even that is not possible, the status is
/// all there is.
pub(crate) fn complain(why: &str) {
    let _ = writeln!(io::stderr(), "roundtrip: {}", one_line(why));
}

/// Without line breaks and other control characters.
fn one_line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    words.join(" ").replace(char::is_control, "?")
}
