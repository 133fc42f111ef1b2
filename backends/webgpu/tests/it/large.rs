//! A batch larger than a buffer may be.

use std::sync::Arc;

use arrow_array::{Int64Array, RecordBatch};
use arrow_device_wgpu::{WgpuDevice, wgpu};

use crate::rigs::open_with;
use crate::suite::assert_clean;

/// 300 MiB over two buffers, of which the first ends within the column.
#[test]
fn a_batch_larger_than_the_largest_buffer() {
    let lower = |limits: &mut wgpu::Limits| {
        limits.max_buffer_size = 256 << 20;
        limits.max_storage_buffer_binding_size = 128 << 20;
    };
    let Some(device) = open_with(lower) else {
        return;
    };
    let rows = (300 << 20) / 8;
    let column = Arc::new(Int64Array::from_iter_values(0..rows)) as _;
    let sent = RecordBatch::try_from_iter([("a", column)]).unwrap();
    let up = device.upload(&sent).unwrap();
    assert_eq!(WgpuDevice::of(&device).unwrap().in_use().0, 1);
    assert!(up.to_host().unwrap() == sent, "other values came back");
    let seam = (256 << 20) / 8;
    let part = up.slice(seam - 3, 7).unwrap().to_host().unwrap();
    assert_eq!(part, sent.slice(seam - 3, 7));
    drop(up);
    assert_clean(&device);
}
