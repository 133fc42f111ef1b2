//! Lines over logarithmic axes, as SVG.

use std::fmt::Write;

/// A line's name, and its points.
pub(crate) type Line<'a> = (&'a str, Vec<(f64, f64)>);

/// Told apart without seeing red or green, and by their dashes.
const STYLES: [(&str, &str); 3] = [("#0072b2", ""), ("#d55e00", "8 3"), ("#009e73", "3 3")];
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 470.0;
/// Where the axes begin and end.
const X: (f64, f64) = (70.0, 610.0);
const Y: (f64, f64) = (370.0, 95.0);

/// The positions of numbers on an axis, between two powers of a base.
struct Axis {
    base: f64,
    first: f64,
    last: f64,
    ends: (f64, f64),
}

impl Axis {
    fn new(numbers: impl Iterator<Item = f64>, base: f64, ends: (f64, f64)) -> Self {
        let (mut first, mut last) = (f64::MAX, f64::MIN);
        for number in numbers {
            first = first.min(number.log(base).floor());
            last = last.max(number.log(base).ceil());
        }
        Self {
            base,
            first,
            last: last.max(first + 1.0),
            ends,
        }
    }

    fn at(&self, number: f64) -> f64 {
        let part = (number.log(self.base) - self.first) / (self.last - self.first);
        self.ends.0 + part * (self.ends.1 - self.ends.0)
    }

    fn powers(&self) -> impl Iterator<Item = f64> {
        (self.first as i32..=self.last as i32).map(|power| self.base.powi(power))
    }
}

/// Draws gigabytes per second over bytes. All numbers are above 0.
pub(crate) fn draw(
    title: &str,
    notes: &[String],
    lines: &[Line<'_>],
) -> Result<String, std::fmt::Error> {
    let points = || lines.iter().flat_map(|(_, points)| points);
    let x = Axis::new(points().map(|point| point.0), 4.0, X);
    let y = Axis::new(points().map(|point| point.1), 10.0, Y);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    let text = |svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str| {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        writeln!(
            svg,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
        )
    };
    let title = std::iter::once(title).chain(notes.iter().map(String::as_str));
    for (i, line) in title.enumerate() {
        text(
            &mut svg,
            (WIDTH / 2.0, 22.0 + 18.0 * i as f64),
            "middle",
            line,
        )?;
    }
    let grid = |svg: &mut String, from: (f64, f64), to: (f64, f64)| {
        let (x1, y1, x2, y2) = (from.0, from.1, to.0, to.1);
        writeln!(
            svg,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#cccccc\"/>"
        )
    };
    for bytes in x.powers() {
        grid(&mut svg, (x.at(bytes), Y.0), (x.at(bytes), Y.1))?;
        text(&mut svg, (x.at(bytes), Y.0 + 20.0), "middle", &unit(bytes))?;
    }
    for rate in y.powers() {
        grid(&mut svg, (X.0, y.at(rate)), (X.1, y.at(rate)))?;
        text(
            &mut svg,
            (X.0 - 8.0, y.at(rate) + 4.0),
            "end",
            &rate.to_string(),
        )?;
    }
    text(
        &mut svg,
        (WIDTH / 2.0, Y.0 + 44.0),
        "middle",
        "bytes of one column",
    )?;
    text(&mut svg, (X.0 - 8.0, Y.1 - 12.0), "end", "GB/s")?;
    for (i, (name, points)) in lines.iter().enumerate() {
        let (colour, dash) = STYLES[i % STYLES.len()];
        let stroke = format!(
            "stroke=\"{colour}\" stroke-width=\"2.5\" stroke-dasharray=\"{dash}\" fill=\"none\""
        );
        let at: Vec<String> = points
            .iter()
            .map(|p| format!("{:.1},{:.1}", x.at(p.0), y.at(p.1)))
            .collect();
        writeln!(svg, "<polyline points=\"{}\" {stroke}/>", at.join(" "))?;
        let (left, top) = (X.0 + 190.0 * i as f64, Y.0 + 76.0);
        writeln!(
            svg,
            "<polyline points=\"{left},{top} {},{top}\" {stroke}/>",
            left + 36.0
        )?;
        text(&mut svg, (left + 44.0, top + 4.0), "start", name)?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

fn unit(bytes: f64) -> String {
    match bytes.log2() as i32 {
        20.. => format!("{} MiB", bytes / f64::from(1 << 20)),
        10.. => format!("{} KiB", bytes / f64::from(1 << 10)),
        _ => bytes.to_string(),
    }
}
