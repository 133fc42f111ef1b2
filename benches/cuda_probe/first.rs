//! The first upload of a process.

use arrow_device::Devices;

use crate::Probe;
use crate::data::mixed;
use crate::stats::{Res, time};
use crate::transfers::upload;

/// Must be the first that is done with the device.
pub(crate) fn run(probe: &Probe) -> Res<()> {
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
