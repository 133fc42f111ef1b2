//! What the program prints: progress, the closing table, the JSON line, the line of failure.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use crate::args::{Args, Via};
use crate::compare::Findings;
use crate::job::Outcome;

/// Work shorter than this shows no progress.
const SHORT: Duration = Duration::from_millis(500);

/// A bar on standard error, if that is a terminal and the work takes long.
pub struct Progress {
    bar: ProgressBar,
    hidden_since: Option<Instant>,
}

impl Progress {
    /// For an input of about `rows` rows.
    pub fn new(name: &str, rows: Option<u64>) -> Self {
        let bar = ProgressBar::with_draw_target(rows, ProgressDrawTarget::hidden());
        let template = match rows {
            Some(_) => "{msg} {wide_bar} {human_pos} rows, {eta} left",
            None => "{msg} {human_pos} rows",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(one_line(name));
        Self {
            bar,
            hidden_since: Some(Instant::now()),
        }
    }

    /// Shows that `rows` rows are done.
    pub fn update(&mut self, rows: u64) {
        if self
            .hidden_since
            .is_some_and(|since| since.elapsed() > SHORT)
        {
            self.hidden_since = None;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_position(rows);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
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
        total.bytes += outcome.bytes;
        total.differences += outcome.differences;
        total.up += outcome.up;
        total.down += outcome.down;
        total.stream += outcome.stream;
        let (sum, one) = (&mut total.counters, outcome.counters);
        sum.allocations += one.allocations;
        sum.copies += one.copies;
        sum.bytes_up += one.bytes_up;
        sum.bytes_down += one.bytes_down;
        sum.events += one.events;
        sum.queue_waits += one.queue_waits;
        sum.host_waits += one.host_waits;
    }
    total
}

/// 10^9 bytes per second; `None` if nothing was moved.
fn rate(bytes: u64, time: Duration) -> Option<f64> {
    let rate = bytes as f64 / time.as_secs_f64() / 1e9;
    (bytes > 0 && rate.is_finite()).then_some(rate)
}

/// The differences, the table and, if asked for, the JSON line.
pub fn closing(
    args: &Args,
    outcomes: &[Outcome],
    findings: &Findings,
    seconds: f64,
    status: u8,
) -> String {
    let mut text = String::new();
    for difference in &findings.described {
        text += &format!("{}\n", one_line(difference));
    }
    let more = findings.total - findings.described.len() as u64;
    if more > 0 {
        text += &format!("... and {} more\n", HumanCount(more));
    }
    if findings.total > 0 {
        text.push('\n');
    }
    text += &table(args, outcomes, seconds);
    if args.json {
        text += &json_line(args, outcomes, findings, seconds, status, None);
    }
    text
}

fn table(args: &Args, outcomes: &[Outcome], seconds: f64) -> String {
    let total = total(outcomes);
    let stream = args.via == Via::Stream;
    let rates = if stream { "GB/s" } else { "up GB/s|down GB/s" };
    let head = format!("input|rows|batches|bytes|{rates}|differences");
    let mut lines: Vec<Vec<String>> = vec![head.split('|').map(str::to_owned).collect()];
    for outcome in outcomes.iter().chain([&total]) {
        let shown = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{rate:.2}"));
        let mut line = vec![
            one_line(&outcome.name),
            HumanCount(outcome.rows).to_string(),
            HumanCount(outcome.batches).to_string(),
            HumanCount(outcome.bytes).to_string(),
        ];
        if stream {
            line.push(shown(rate(outcome.bytes, outcome.stream)));
        } else {
            line.push(shown(rate(outcome.counters.bytes_up, outcome.up)));
            line.push(shown(rate(outcome.counters.bytes_down, outcome.down)));
        }
        line.push(HumanCount(outcome.differences).to_string());
        lines.push(line);
    }
    let mut text = columns(&lines);
    if stream {
        text += "GB/s: the whole stream, reading the input included; up and down overlap and are \
                 not told apart.\n";
    }
    let counters = total.counters;
    text += &format!(
        "\ndevice {}, via {}, {seconds:.2} s\n",
        one_line(&args.device),
        args.via.name()
    );
    let numbers = [
        ("device allocations", counters.allocations),
        ("copies", counters.copies),
        ("bytes up", counters.bytes_up),
        ("bytes down", counters.bytes_down),
        ("events", counters.events),
        ("queue waits", counters.queue_waits),
        ("host waits", counters.host_waits),
    ];
    text += &columns(&numbers.map(|(name, n)| vec![name.to_owned(), HumanCount(n).to_string()]));
    text
}

/// The first column to the left, the others to the right.
fn columns(lines: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let mut text = String::new();
    for line in lines {
        for (column, cell) in line.iter().enumerate() {
            let width = width(column);
            text += &match column {
                0 => format!("{cell:<width$}"),
                _ => format!("  {cell:>width$}"),
            };
        }
        text.push('\n');
    }
    text
}

/// One JSON object on a line. `error` says why there is no full result.
pub fn json_line(
    args: &Args,
    outcomes: &[Outcome],
    findings: &Findings,
    seconds: f64,
    status: u8,
    error: Option<&str>,
) -> String {
    let total = total(outcomes);
    let numbers = |outcome: &Outcome| {
        let counters = outcome.counters;
        json!({
            "name": outcome.name,
            "batches": outcome.batches,
            "rows": outcome.rows,
            "bytes": outcome.bytes,
            "mismatches": outcome.differences,
            "up_gb_per_s": rate(counters.bytes_up, outcome.up),
            "down_gb_per_s": rate(counters.bytes_down, outcome.down),
            "stream_gb_per_s": rate(outcome.bytes, outcome.stream),
            "allocations": counters.allocations,
            "copies": counters.copies,
            "bytes_up": counters.bytes_up,
            "bytes_down": counters.bytes_down,
            "events": counters.events,
            "queue_waits": counters.queue_waits,
            "host_waits": counters.host_waits,
        })
    };
    let mut line = numbers(&total);
    let rest = json!({
        "files": outcomes.len(),
        "mismatches": findings.total,
        "device": args.device,
        "via": args.via.name(),
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
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    match written {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Says on standard error why the status is not 0. If even that is not possible, the status is
/// all there is.
pub fn complain(why: &str) {
    let _ = writeln!(io::stderr(), "roundtrip: {}", one_line(why));
}

/// Without line breaks and other control characters.
fn one_line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    words.join(" ").replace(char::is_control, "?")
}
