//! Rounds of all ways, medians, tables, and the rows of the record.

use std::error::Error;
use std::time::Instant;

use crate::Probe;

pub(crate) type Res<T> = Result<T, Box<dyn Error>>;

/// The seconds until all was submitted (NaN where nothing could be timed by itself), and until all was done.
pub(crate) type Seconds = [f64; 2];

/// Measured values, in order of size.
pub(crate) struct Sample(Vec<f64>);

impl Sample {
    pub(crate) fn new(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    pub(crate) fn at(&self, share: f64) -> f64 {
        let at = self.0.len().saturating_sub(1) as f64 * share;
        self.0.get(at.round() as usize).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn median(&self) -> f64 {
        self.at(0.5)
    }

    /// The median and the lowest and the highest tenth.
    fn spread(&self) -> [f64; 3] {
        [0.5, 0.1, 0.9].map(|share| self.at(share))
    }
}

pub(crate) fn since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64()
}

/// One way to do something: what it is called, and a run of it.
pub(crate) type Way<'a> = (String, Box<dyn FnMut() -> Res<Seconds> + 'a>);

pub(crate) fn way<'a>(name: impl Into<String>, run: impl FnMut() -> Res<Seconds> + 'a) -> Way<'a> {
    (name.into(), Box::new(run))
}

/// A way of which only the whole is timed, by itself.
pub(crate) fn whole<'a>(name: impl Into<String>, mut run: impl FnMut() -> Res<()> + 'a) -> Way<'a> {
    way(name, move || {
        let start = Instant::now();
        run()?;
        Ok([f64::NAN, since(start)])
    })
}

/// The seconds of each way, run for run.
pub(crate) struct Compared {
    submits: Vec<Vec<f64>>,
    totals: Vec<Vec<f64>>,
    /// The second run's time divided by the first's.
    twice: Vec<Vec<f64>>,
}

impl Compared {
    /// The median of a way, until all was done.
    pub(crate) fn median(&self, way: usize) -> f64 {
        Sample::new(self.totals[way].clone()).median()
    }

    /// The first way's time divided by that of the slowest of others.
    pub(crate) fn over(&self, others: &[usize]) -> f64 {
        self.ratio(|all, i| {
            others
                .iter()
                .map(|&other| all[other][i])
                .fold(0.0, f64::max)
        })
    }

    /// The first way's time divided by what `under` makes of a run's times.
    pub(crate) fn ratio(&self, under: impl Fn(&[Vec<f64>], usize) -> f64) -> f64 {
        let runs = self.totals[0].iter().enumerate();
        let ratios = runs.map(|(i, own)| own / under(&self.totals, i));
        Sample::new(ratios.collect()).median()
    }
}

/// The first way beside the others, for `seconds` and `least` rounds. Each round begins with another way and runs each twice in a row:
/// the second time counts, since the first may pay for what the way before has left behind, such as a pool that has given its memory back.
pub(crate) fn measure(
    probe: &Probe,
    least: usize,
    seconds: f64,
    ways: &mut [Way<'_>],
) -> Res<Compared> {
    let all = ways.len();
    let [mut submits, mut totals, mut twice] = [(); 3].map(|()| vec![Vec::new(); all]);
    let (start, mut done) = (Instant::now(), 0);
    while done < if probe.quick { 2 } else { least } || (!probe.quick && since(start) < seconds) {
        for i in (done..done + all).map(|i| i % all) {
            let run = &mut ways[i].1;
            let ([_, before], [submit, total]) = (run()?, run()?);
            submits[i].push(submit);
            totals[i].push(total);
            twice[i].push(total / before);
        }
        done += 1;
    }
    Ok(Compared {
        submits,
        totals,
        twice,
    })
}

/// The same with 5 rounds at least, and a table of it.
pub(crate) fn compare(
    probe: &Probe,
    title: &str,
    bytes: usize,
    seconds: f64,
    mut ways: Vec<Way<'_>>,
) -> Res<Compared> {
    let took = measure(probe, 5, seconds, &mut ways)?;
    let first = &took.totals[0];
    println!("{title}\n{} a run, {} rounds", size(bytes), first.len());
    let mut table =
        Table::new("way submit median p10 p90 rate first/this p10 p90 second/first-run-p10 p90");
    for (i, (name, _)) in ways.iter().enumerate() {
        let ratios = first.iter().zip(&took.totals[i]);
        let ratios = Sample::new(ratios.map(|(first, own)| first / own).collect());
        let [submitted, own, twice] =
            [&took.submits, &took.totals, &took.twice].map(|all| Sample::new(all[i].clone()));
        let mut cells = vec![name.clone(), time(submitted.median())];
        cells.extend(own.spread().map(time));
        cells.push(rate(bytes, own.median()));
        cells.extend(ratios.spread().map(|ratio| format!("{ratio:.3}")));
        cells.extend([0.1, 0.9].map(|share| format!("{:.3}", twice.at(share))));
        table.row(cells);
    }
    drop(table);
    Ok(took)
}

/// What the columns of [`compare`] are.
pub(crate) const LEGEND: &str = "\
submit: until all was submitted (median; - where the call waits itself). median, p10, p90: until all was done, seen by the host.
first/this: the first row's time divided by this row's, round for round. second/first-run: each way runs twice in a row, of which the
second run counts; what the first pays for what the way before has left behind.\n";

impl Probe {
    /// Prints a row of the record: `row`, id, what, measured, target and verdict, with tabs between them.
    pub(crate) fn row(&self, id: &str, what: &str, measured: f64, sign: &str, target: f64) {
        let met = if sign == "<=" {
            measured <= target
        } else {
            measured >= target
        };
        let verdict = self.instead.unwrap_or(if met { "pass" } else { "miss" });
        let measured = if measured.fract() == 0.0 {
            measured.to_string()
        } else {
            format!("{measured:.3}")
        };
        println!("row\t{id}\t{what}\t{measured}\t{sign} {target}\t{verdict}");
    }
}

/// A duration with its unit.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        s if s.is_nan() => "-".into(),
        s if s < 1e-3 => format!("{:.2} us", s * 1e6),
        s => format!("{:.3} ms", s * 1e3),
    }
}

/// Bytes in a time.
pub(crate) fn rate(bytes: usize, seconds: f64) -> String {
    format!("{:.3} GB/s", bytes as f64 / seconds / 1e9)
}

/// Bytes with their unit.
pub(crate) fn size(bytes: usize) -> String {
    let of = |unit: usize| (bytes as f64 / unit as f64 * 100.0).round() / 100.0;
    match bytes {
        b if b < 1 << 10 => format!("{b} B"),
        b if b < 1 << 20 => format!("{} KiB", of(1 << 10)),
        _ => format!("{} MiB", of(1 << 20)),
    }
}

/// A table in plain text. Printed when it is dropped, so that what was measured before a failure is not lost.
pub(crate) struct Table(Vec<Vec<String>>);

impl Table {
    pub(crate) fn new(head: &str) -> Self {
        Self(vec![head.split(' ').map(str::to_owned).collect()])
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.0.push(cells.into_iter().collect());
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let width = |i: usize| {
            self.0
                .iter()
                .filter_map(|row| row.get(i))
                .map(String::len)
                .max()
        };
        let widths: Vec<_> = (0..self.0[0].len()).filter_map(width).collect();
        for row in &self.0 {
            let cells = row.iter().zip(&widths).enumerate();
            // Names to the left, figures to the right.
            let cells = cells.map(|(i, (cell, width))| match i {
                0 => format!("{cell:<width$}"),
                _ => format!("  {cell:>width$}"),
            });
            println!("{}", cells.collect::<String>().trim_end());
        }
        println!();
    }
}
