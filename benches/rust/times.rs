//! The cases of the report by themselves, for changes to the code:
//! `cargo bench -p arrow-device-benches`.

use std::time::Duration;

use arrow_device_benches::{batches, cases};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Group, rows, cases.
const GROUPS: [(&str, usize, &[&str]); 5] = [
    ("export", 1000, &["export", "export_host", "export_arrow"]),
    ("import", 1000, &["import", "import_host", "import_arrow"]),
    ("stream", 1, &["stream", "stream_host", "stream_arrow"]),
    ("async", 1, &["async", "async_threads", "stream"]),
    ("copy", 1000, &["copy", "malloc_copy", "memcpy"]),
];
/// At most so many C structs, or batches of a stream, at a time.
const MOST: u64 = 1000;

fn times(c: &mut Criterion) {
    for (group, rows, names) in GROUPS {
        let mut group = c.benchmark_group(group);
        for columns in [1, 10, 100, 1000] {
            let batch = batches::named("mixed", columns, rows).expect("a batch");
            let input = cases::Input::new(batch).expect("an input");
            group.throughput(Throughput::Elements(columns as u64));
            for name in names {
                let case = cases::case(name).expect("a case");
                group.bench_function(BenchmarkId::new(*name, columns), |bencher| {
                    bencher.iter_custom(|n| {
                        let parts = (0..n).step_by(MOST as usize);
                        parts
                            .map(|start| {
                                case(&input, (n - start).min(MOST) as usize).expect("runs")
                            })
                            .sum::<Duration>()
                    });
                });
            }
        }
    }
}

criterion_group!(benches, times);
criterion_main!(benches);
