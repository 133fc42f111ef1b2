//! Rounds, medians, tables.

use std::cell::RefCell;
use std::error::Error;
use std::time::Instant;

pub(crate) type Res<T> = Result<T, Box<dyn Error>>;

/// How often something is done.
#[derive(Clone, Copy)]
pub(crate) struct Rounds {
    pub(crate) least: usize,
    pub(crate) most: usize,
    /// After so many seconds no more rounds than the least.
    pub(crate) seconds: f64,
}

impl Rounds {
    fn more(self, done: usize, since: Instant) -> bool {
        let time = since.elapsed().as_secs_f64() < self.seconds;
        done < self.least || (time && done < self.most)
    }
}

/// Measured values, in order of size.
#[derive(Clone)]
pub(crate) struct Sample(Vec<f64>);

impl Sample {
    pub(crate) fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    fn at(&self, share: f64) -> f64 {
        let last = self.0.len().saturating_sub(1) as f64;
        let at = (last * share).round() as usize;
        self.0.get(at).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn median(&self) -> f64 {
        let last = self.0.len().saturating_sub(1);
        match (self.0.get(last / 2), self.0.get(last.div_ceil(2))) {
            (Some(low), Some(high)) => (low + high) / 2.0,
            _ => f64::NAN,
        }
    }

    /// The 10th of a hundred.
    pub(crate) fn low(&self) -> f64 {
        self.at(0.1)
    }

    /// The 90th of a hundred.
    pub(crate) fn high(&self) -> f64 {
        self.at(0.9)
    }

    pub(crate) fn best(&self) -> f64 {
        self.at(0.0)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Seconds since `start`.
pub(crate) fn since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64()
}

/// Runs once untimed, then in rounds. What a run answers is measured values, in seconds.
pub(crate) fn measure<const N: usize>(
    rounds: Rounds,
    mut run: impl FnMut() -> Res<[f64; N]>,
) -> Res<[Sample; N]> {
    run()?;
    let mut values: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    let start = Instant::now();
    while rounds.more(values.first().map_or(usize::MAX, Vec::len), start) {
        for (values, value) in values.iter_mut().zip(run()?) {
            values.push(value);
        }
    }
    Ok(values.map(Sample::new))
}

/// The seconds of a run in which nothing is submitted that could be timed by itself.
pub(crate) fn total_only(seconds: f64) -> [f64; 2] {
    [f64::NAN, seconds]
}

/// One way to do something.
pub(crate) struct Side<'a> {
    name: String,
    /// Whether it moves the bytes, so that it has a rate.
    moves: bool,
    run: Box<dyn FnMut() -> Res<[f64; 2]> + 'a>,
}

/// A way; it answers the seconds until all was submitted and until all was done.
pub(crate) fn side<'a>(
    name: impl Into<String>,
    run: impl FnMut() -> Res<[f64; 2]> + 'a,
) -> Side<'a> {
    Side {
        name: name.into(),
        moves: true,
        run: Box::new(run),
    }
}

impl Side<'_> {
    /// It moves nothing.
    pub(crate) fn without_bytes(mut self) -> Self {
        self.moves = false;
        self
    }
}

/// A comparison that has run.
pub(crate) struct Compared {
    title: String,
    /// Each way's name and its seconds, run for run.
    pub(crate) ways: Vec<(String, Vec<f64>)>,
}

thread_local! {
    // The probe compares on one thread.
    static COMPARED: RefCell<Vec<Compared>> = const { RefCell::new(Vec::new()) };
}

/// What `read` makes of the comparison whose title begins so, if it has run.
pub(crate) fn compared<T>(title: &str, read: impl FnOnce(&Compared) -> T) -> Option<T> {
    COMPARED.with_borrow(|all| {
        let found = all.iter().find(|one| one.title.starts_with(title));
        found.map(read)
    })
}

/// The first way beside the others. Each round runs all of them in turn, twice: the second time
/// shows how far the same code is from itself.
pub(crate) fn compare(
    title: &str,
    bytes: usize,
    rounds: Rounds,
    mut sides: Vec<Side<'_>>,
) -> Res<()> {
    for side in &mut sides {
        (side.run)()?;
    }
    // By side, then by round and pass.
    let mut submit = vec![Vec::new(); sides.len()];
    let mut total: Vec<Vec<f64>> = vec![Vec::new(); sides.len()];
    let (start, mut done) = (Instant::now(), 0);
    while rounds.more(done, start) {
        for _ in 0..2 {
            for (i, side) in sides.iter_mut().enumerate() {
                let [submitted, all] = (side.run)()?;
                submit[i].push(submitted);
                total[i].push(all);
            }
        }
        done += 1;
    }
    println!("{title}\n{} a run, {done} rounds of two runs", size(bytes));
    let mut table = Table::new(&[
        "way",
        "submit",
        "median",
        "p10",
        "p90",
        "best",
        "rate",
        "first/this",
        "p10",
        "p90",
        "best/best",
        "self",
    ]);
    let first = Sample::new(total[0].clone());
    for (i, side) in sides.iter().enumerate() {
        let own = Sample::new(total[i].clone());
        let ratios = total[0].iter().zip(&total[i]).map(|(a, b)| a / b).collect();
        let ratios = Sample::new(ratios);
        let twice = total[i].chunks_exact(2).map(|pair| pair[1] / pair[0]);
        let twice = Sample::new(twice.collect());
        table.row([
            side.name.clone(),
            time(Sample::new(submit[i].clone()).median()),
            time(own.median()),
            time(own.low()),
            time(own.high()),
            time(own.best()),
            match side.moves {
                true => rate(bytes, own.median()),
                false => "-".into(),
            },
            ratio(ratios.median()),
            ratio(ratios.low()),
            ratio(ratios.high()),
            ratio(first.best() / own.best()),
            format!("{:.3}..{:.3}", twice.low(), twice.high()),
        ]);
    }
    table.print();
    let names = sides.into_iter().map(|side| side.name);
    let compared = Compared {
        title: title.to_owned(),
        ways: names.zip(total).collect(),
    };
    COMPARED.with_borrow_mut(|all| all.push(compared));
    Ok(())
}

/// What the columns of [`compare`] are.
pub(crate) const LEGEND: &str = "\
submit: until all was submitted (median; - where the call waits itself). median, p10, p90, best: until all was done, seen by the host.
first/this: the first row's time divided by this row's, run for run. best/best: of the best runs.
self: p10 and p90 of this row's second run divided by its first, in the same round.";

fn ratio(value: f64) -> String {
    format!("{value:.3}")
}

/// A duration with its unit.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        s if s.is_nan() => "-".into(),
        s if s < 1e-6 => format!("{:.1} ns", s * 1e9),
        s if s < 1e-3 => format!("{:.2} us", s * 1e6),
        s if s < 1.0 => format!("{:.3} ms", s * 1e3),
        s => format!("{s:.3} s"),
    }
}

/// Bytes in a time, with the unit.
pub(crate) fn rate(bytes: usize, seconds: f64) -> String {
    let rate = bytes as f64 / seconds;
    if rate < 1e8 {
        return format!("{:.3} MB/s", rate / 1e6);
    }
    format!("{:.2} GB/s", rate / 1e9)
}

/// Bytes with their unit.
pub(crate) fn size(bytes: usize) -> String {
    let (unit, name) = match bytes {
        b if b < 1 << 10 => return format!("{b} B"),
        b if b < 1 << 20 => (1 << 10, "KiB"),
        b if b < 1 << 30 => (1 << 20, "MiB"),
        _ => (1 << 30, "GiB"),
    };
    if bytes % unit == 0 {
        return format!("{} {name}", bytes / unit);
    }
    format!("{:.2} {name}", bytes as f64 / unit as f64)
}

/// A table in plain text. Printed when it is dropped, so that what was measured before a failure is
/// not lost.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(head: &[&str]) -> Self {
        let head = head.iter().map(|text| (*text).to_owned());
        Self {
            rows: vec![head.collect()],
        }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Prints it, and an empty line.
    pub(crate) fn print(self) {}
}

impl Drop for Table {
    fn drop(&mut self) {
        let widths: Vec<usize> = (0..self.rows[0].len())
            .map(|column| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
            })
            .collect();
        for row in &self.rows {
            let mut line = String::new();
            for (i, (cell, width)) in row.iter().zip(&widths).enumerate() {
                // Names to the left, figures to the right.
                line += &match i {
                    0 => format!("{cell:<width$}"),
                    _ => format!("  {cell:>width$}"),
                };
            }
            println!("{}", line.trim_end());
        }
        println!();
    }
}
