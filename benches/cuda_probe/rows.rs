//! The rows of the record: what the figures should be, and where each comes from.
//!
//! A row is one line of standard output: `row`, id, what, measured, target and verdict, with tabs between them.

use std::cell::RefCell;

use crate::stats::{Compared, Sample, compared};

/// What a row should be.
#[derive(Clone, Copy)]
enum Target {
    AtMost(f64),
    AtLeast(f64),
}

/// Where a row's figure comes from.
enum From {
    /// The time of a comparison's first way divided by that of the slowest of the ways named here, run for run.
    Time(&'static [&'static str]),
    /// As many bytes in the time of the first way as in that of the way named here: its time divided by the first's.
    Rate(&'static str),
    /// The time of the first way divided by the slower of a producer and the uploads, and one upload more.
    Pipeline {
        producer: &'static str,
        uploads: &'static str,
    },
    /// A count.
    Count,
}

struct Row {
    id: &'static str,
    what: &'static str,
    /// How the title of the comparison begins, or the name of the count.
    of: &'static str,
    from: From,
    target: Target,
}

const fn row(
    id: &'static str,
    what: &'static str,
    of: &'static str,
    from: From,
    target: Target,
) -> Row {
    Row {
        id,
        what,
        of,
        from,
        target,
    }
}

use From::{Count, Pipeline, Rate, Time};
use Target::{AtLeast, AtMost};

const RAW: &str = "raw(";
pub(crate) const BY_THREADS: &str = "memcpy, T threads";
pub(crate) const PAGEABLE: &str = "the driver, from ordinary";
pub(crate) const PACKED: &str = "packed by hand";
pub(crate) const LOOP: &str = "loop";
pub(crate) const LIST: &str = "list of page-locked pieces";
pub(crate) const EACH_LENGTH: &str = "a wait for each length";
/// How many batches a run of S1 uploads.
pub(crate) const BATCHES: &str = "S1 batches";
pub(crate) const WAITS: &str = "D3 waits";

const PRODUCER: From = Pipeline {
    producer: "producer alone",
    uploads: "uploads alone",
};

/// All rows with their targets.
const ROWS: [Row; 16] = [
    row(
        "U1",
        "8 x 64 MiB from page-locked memory / one raw copy",
        "U1 upload",
        Time(&[RAW]),
        AtMost(1.05),
    ),
    row(
        "U2",
        "8 x 64 MiB from ordinary memory / slower of one raw copy and memcpy by T threads",
        "U2, U3 upload",
        Time(&[RAW, BY_THREADS]),
        AtMost(1.15),
    ),
    row(
        "U3",
        "8 x 64 MiB from ordinary memory / the driver's own copy from it",
        "U2, U3 upload",
        Time(&[PAGEABLE]),
        AtMost(0.5),
    ),
    row(
        "U4",
        "1,000 columns x 10 rows / packed by hand and one raw copy",
        "U4 upload",
        Time(&[PACKED]),
        AtMost(2.0),
    ),
    row(
        "U5",
        "1,000 columns x 1,000 rows / a block and a copy for each buffer",
        "U5 upload",
        Time(&[LOOP]),
        AtMost(0.15),
    ),
    row(
        "U5",
        "1,000 columns x 1,000 rows / the driver's list of page-locked pieces",
        "U5 upload",
        Time(&[LIST]),
        AtMost(0.8),
    ),
    row(
        "U6",
        "1 column x 1 row / one raw copy",
        "U6 upload",
        Time(&[RAW]),
        AtMost(3.0),
    ),
    row(
        "S1",
        "stream of 8 MiB batches, producer takes no time / slower of both, and one batch",
        "S1 with no delay",
        PRODUCER,
        AtMost(1.15),
    ),
    row(
        "S1",
        "the same, producer takes half an upload",
        "S1 with half",
        PRODUCER,
        AtMost(1.15),
    ),
    row(
        "S1",
        "the same, producer takes an upload",
        "S1 with a copy's",
        PRODUCER,
        AtMost(1.15),
    ),
    row(
        "S2",
        "rate of both directions at once / that of raw copies",
        "S2 both together",
        Rate("raw"),
        AtLeast(0.9),
    ),
    row(
        "D1",
        "512 MiB down in one batch, into page-locked buffers / one raw copy",
        "D1 download of one batch",
        Time(&[RAW]),
        AtMost(1.05),
    ),
    row(
        "D1",
        "the same in 8 batches, one after the other",
        "D1 download of 8 batches",
        Time(&[RAW]),
        AtMost(1.05),
    ),
    row(
        "D2",
        "512 MiB down, into the CPU device's ordinary memory / a copy into fresh memory for each buffer",
        "D2 download",
        Time(&[LOOP]),
        AtMost(0.6),
    ),
    row(
        "D3",
        "300 text columns imported and downloaded: host waits",
        WAITS,
        Count,
        AtMost(2.0),
    ),
    row(
        "D3",
        "300 text columns imported and downloaded / a wait for each length, a copy for each buffer",
        "D3 import",
        Time(&[EACH_LENGTH]),
        AtMost(0.2),
    ),
];

thread_local! {
    // The probe counts on one thread.
    static COUNTS: RefCell<Vec<(&'static str, f64)>> = const { RefCell::new(Vec::new()) };
}

/// Keeps a count for the rows.
pub(crate) fn count(name: &'static str, value: usize) {
    COUNTS.with_borrow_mut(|counts| counts.push((name, value as f64)));
}

fn counted(name: &str) -> Option<f64> {
    COUNTS.with_borrow(|counts| counts.iter().find(|(n, _)| *n == name).map(|(_, v)| *v))
}

/// The seconds of the way whose name begins so.
fn way<'a>(compared: &'a Compared, name: &str) -> Result<&'a [f64], String> {
    let found = compared.ways.iter().find(|(n, _)| n.starts_with(name));
    let (_, seconds) = found.ok_or_else(|| format!("there is no way {name:?}"))?;
    Ok(seconds)
}

fn measure(compared: &Compared, from: &From) -> Result<f64, String> {
    let (_, first) = compared.ways.first().ok_or("there is no way")?;
    let ratios: Vec<f64> = match from {
        Time(names) => {
            let mut slowest = vec![f64::NAN; first.len()];
            for name in *names {
                for (slowest, seconds) in slowest.iter_mut().zip(way(compared, name)?) {
                    *slowest = slowest.max(*seconds);
                }
            }
            first
                .iter()
                .zip(slowest)
                .map(|(own, by)| own / by)
                .collect()
        }
        Rate(name) => {
            let by = way(compared, name)?;
            by.iter().zip(first).map(|(by, own)| by / own).collect()
        }
        Pipeline { producer, uploads } => {
            let batches = counted(BATCHES).ok_or("the batches were not counted")?;
            let parts = way(compared, producer)?.iter().zip(way(compared, uploads)?);
            let best = parts.map(|(producer, uploads)| producer.max(*uploads) + uploads / batches);
            first.iter().zip(best).map(|(own, by)| own / by).collect()
        }
        Count => return Err("a count has no ways".into()),
    };
    Ok(Sample::new(ratios).median())
}

impl Row {
    /// `None`: nothing that it needs has run yet.
    fn measured(&self) -> Option<Result<f64, String>> {
        if matches!(self.from, Count) {
            return counted(self.of).map(Ok);
        }
        compared(self.of, |compared| measure(compared, &self.from))
    }

    fn target(&self) -> String {
        match self.target {
            AtMost(limit) => format!("<= {limit}"),
            AtLeast(limit) => format!(">= {limit}"),
        }
    }

    /// What the figure is worth: pass, miss, or what stands in their place.
    fn verdict(&self, value: f64, instead: Option<&'static str>) -> &'static str {
        let met = match self.target {
            AtMost(limit) => value <= limit,
            AtLeast(limit) => value >= limit,
        };
        instead.unwrap_or(if met { "pass" } else { "miss" })
    }

    fn print(&self, measured: &str, verdict: &str) {
        let (id, what, target) = (self.id, self.what, self.target());
        println!("row\t{id}\t{what}\t{measured}\t{target}\t{verdict}");
    }
}

/// Prints rows, each once, as soon as what it needs has run.
pub(crate) struct Printer {
    printed: [bool; ROWS.len()],
    /// What stands in the place of a verdict, where figures say nothing.
    instead: Option<&'static str>,
}

impl Printer {
    pub(crate) fn new(instead: Option<&'static str>) -> Self {
        Self {
            printed: [false; ROWS.len()],
            instead,
        }
    }

    /// Prints the rows whose figures are known.
    pub(crate) fn print(&mut self) {
        let mut any = false;
        for (row, printed) in ROWS.iter().zip(&mut self.printed) {
            if *printed {
                continue;
            }
            match row.measured() {
                None => continue,
                Some(Ok(value)) if value.is_nan() => row.print("no figure", "not measured"),
                Some(Ok(value)) => {
                    let figure = match row.from {
                        Count => format!("{value}"),
                        _ => format!("{value:.3}"),
                    };
                    row.print(&figure, row.verdict(value, self.instead));
                }
                Some(Err(why)) => row.print(&why, "not measured"),
            }
            *printed = true;
            any = true;
        }
        if any {
            println!();
        }
    }

    /// Prints all rows that are left.
    pub(crate) fn finish(mut self) {
        self.print();
        for (row, printed) in ROWS.iter().zip(self.printed) {
            if !printed {
                row.print("-", "not measured");
            }
        }
    }
}
