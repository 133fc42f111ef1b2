//! The kernels that the examples and the guide show, on columns of every shape and on any device that runs them.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Float64Type;
use arrow_array::{Array, ArrayRef, Float64Array};
use arrow_device::{Device, DeviceArray, TransferStats};

/// One device's.
pub(crate) struct Kernels<'a> {
    pub double: &'a dyn Fn(&DeviceArray) -> DeviceArray,
    pub product: &'a dyn Fn(&DeviceArray, &DeviceArray) -> DeviceArray,
    pub above: &'a dyn Fn(&DeviceArray, f64) -> DeviceArray,
}

/// Every `n`th is null; none, and no bitmap, for 0.
fn numbers(rows: usize, n: usize) -> ArrayRef {
    let value = |i: usize| (n == 0 || i % n != n - 1).then_some((i * 7 % 23) as f64 - 9.5);
    Arc::new((0..rows).map(value).collect::<Float64Array>())
}

/// Slices of different offsets, with and without bitmaps, no rows included.
pub(crate) fn check(device: &Device, kernels: &Kernels<'_>) {
    let column = |rows, nulls, skip| {
        let host = numbers(skip + rows + 2, nulls);
        let there = device.upload_array(&host).unwrap();
        let host = host.slice(skip, rows).as_primitive::<Float64Type>().clone();
        (host, there.slice(skip, rows).unwrap())
    };
    for rows in [0, 1, 7, 8, 9, 64, 65, 1000, 5000] {
        for (nulls, skip) in [(0, 0), (0, 3), (2, 0), (3, 1), (3, 13), (1, 8)] {
            let context = format!("{device}: {rows} rows from {skip}, nulls {nulls}");
            let same = |made: DeviceArray, expected: Vec<Option<f64>>| {
                let made = made.to_host().unwrap();
                assert_eq!(*made, Float64Array::from(expected), "{context}");
            };
            let (a, on_a) = column(rows, nulls, skip);
            let (b, on_b) = column(rows, 5 - nulls, 8);
            same(
                (kernels.double)(&on_a),
                a.iter().map(|x| Some(2.0 * x?)).collect(),
            );
            let both = a.iter().zip(&b).map(|(x, y)| Some(x? * y?)).collect();
            same((kernels.product)(&on_a, &on_b), both);
            for limit in [-100.0, 0.0, 100.0] {
                let kept = a.iter().flatten().filter(|x| *x > limit);
                same((kernels.above)(&on_a, limit), kept.map(Some).collect());
            }
        }
    }
}

/// What each costs, beside the kernel: only the filter waits, for the number of its rows. It frees what it did not fill, which
/// costs a smaller allocation and a copy.
pub(crate) fn check_costs(device: &Device, kernels: &Kernels<'_>) {
    let column = device.upload_array(&numbers(1000, 3)).unwrap();
    let column = column.slice(5, 900).unwrap();
    column.wait().unwrap();
    let counts = |stats: &TransferStats| (stats.allocations, stats.copies, stats.host_waits);
    let cost = |made: &dyn Fn() -> DeviceArray| {
        let before = device.stats();
        let made = made();
        let stats = device.stats().since(&before);
        made.wait().unwrap();
        counts(&stats)
    };
    assert_eq!(cost(&|| (kernels.double)(&column)), (1, 0, 0));
    assert_eq!(cost(&|| (kernels.product)(&column, &column)), (2, 0, 0));
    assert_eq!(cost(&|| (kernels.above)(&column, 0.0)), (3, 2, 1));
}

/// The guide shows these functions of `source`, up to line breaks, in at most so many lines each.
pub(crate) fn check_guide(source: &str, functions: &[(&str, usize)]) {
    let guide = include_str!("../../../docs/guide/kernels.md");
    for (signature, lines) in functions {
        let [ours, shown] = [source, guide].map(|text| {
            let start = text
                .find(signature)
                .unwrap_or_else(|| panic!("no `{signature}`"));
            let text = &text[start..];
            &text[..text.find("\n}\n").unwrap()]
        });
        let code = |text: &str| {
            let lines = text
                .lines()
                .map(|line| line.split("//").next().unwrap_or(line));
            let text: String = lines.flat_map(str::split_whitespace).collect();
            text.replace(",)", ")").replace(",]", "]")
        };
        assert_eq!(
            code(ours),
            code(shown),
            "the guide shows another {signature}"
        );
        let shown = shown.lines().count() + 1;
        assert!(shown <= *lines, "{signature}: {shown} lines in the guide");
    }
}
