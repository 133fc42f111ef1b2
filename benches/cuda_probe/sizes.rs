//! The first upload of a process, and uploads from 64 KiB to 64 MiB with each number of packing threads.

use arrow_device::Devices;

use crate::Probe;
use crate::data::{mixed, ordinary, over};
use crate::raw::{Pool, address};
use crate::stats::{LEGEND, Res, compare, time, way};
use crate::transfers::upload;

/// Must be the first that is done with the device.
pub(crate) fn first(probe: &Probe) -> Res<()> {
    let batch = mixed(10, 1000)?;
    // What the host's own code needs once is not the device's.
    drop(Devices::cpu().upload(&batch)?);
    let times = [(); 3].map(|()| upload(probe, &batch));
    let [first, second, third] = times.map(|seconds| seconds.map(|[_, done]| done));
    let first = first?;
    println!(
        "10 columns x 1,000 rows, the first upload of this process: {}; the second: {}; the third: {}\n",
        time(first),
        time(second?),
        time(third?)
    );
    probe.row(
        "U8",
        "first upload of a process, 10 columns x 1,000 rows, ms",
        first * 1e3,
        "<=",
        3.0,
    );
    Ok(())
}

/// 10 columns of ordinary memory, as this device is set up and with fixed numbers of threads, beside a block and a copy for each column.
pub(crate) fn run(probe: &Probe) -> Res<()> {
    println!("{LEGEND}");
    println!(
        "loop: a block from a warm pool and a copy from ordinary memory for each column, 1 wait.\n"
    );
    let most = probe.bytes(64 << 20, 256 << 10);
    let (pool, all) = (Pool::new(probe.ordinal)?, ordinary(most, 3));
    let mut worst = 0.0f64;
    for bytes in (16..=26)
        .map(|n| 1usize << n)
        .filter(|bytes| *bytes <= most)
    {
        let each = bytes / 10 / 64 * 64;
        let batch = over(&all.slice_with_length(0, 10 * each), 10)?;
        let columns: Vec<_> = (0..10)
            .map(|i| all.slice_with_length(i * each, each))
            .collect();
        let packed_by = |threads: usize| {
            let batch = &batch;
            move || {
                probe.device.set_packing_threads(threads);
                let took = upload(probe, batch);
                probe.device.set_packing_threads(0);
                took
            }
        };
        let mut ways = vec![
            way("this crate", packed_by(0)),
            way("loop", || {
                // SAFETY: the block has as many bytes, and the column lives until the wait.
                pool.with_blocks(
                    &probe.stream,
                    columns.iter().map(|column| column.len()),
                    |i, block| unsafe { probe.stream.copy(block, address(&columns[i]), each) },
                )
            }),
        ];
        ways.extend(
            [1, 2, 4, 8].map(|threads| way(format!("{threads} threads"), packed_by(threads))),
        );
        let took = compare(probe, "U7 upload of 10 columns", 10 * each, 0.5, ways)?;
        worst = worst.max(took.over(&[1]));
    }
    probe.row(
        "U7",
        "64 KiB to 64 MiB in 10 columns / a block and a copy for each column, the worst size",
        worst,
        "<=",
        1.0,
    );
    Ok(())
}
