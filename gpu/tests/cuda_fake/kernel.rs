//! The example `cuda_kernel`, its own code, with what it may cost.

use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Float64Array, RecordBatch};
use arrow_device::cuda::CudaMemory;
use arrow_device::{Device, DeviceId, Devices, TransferStats};

use crate::cuda_suite::example as work;
use crate::fake::{Group, LAZY, MODES};
use crate::kernel_suite::{self, Kernels};
use crate::rig::{Rig, soon, unclean};

/// The example imports with the default set of devices, so its device must be there.
fn open(group: Group, memory: CudaMemory) -> Device {
    let id = DeviceId::new(memory.device_type(), i64::from(group.first));
    Devices::open(&id.to_string()).unwrap()
}

/// Waits until the device has everything back.
fn assert_clean(group: Group, device: &Device) {
    let mut left = None;
    let clean = soon(|| {
        device.synchronize().unwrap();
        device.trim();
        left = unclean(group);
        left.is_none()
    });
    assert!(clean, "{device}: {}", left.unwrap_or_default());
    assert_eq!(device.take_drop_error().map(|e| e.to_string()), None);
}

fn costs(memory: CudaMemory) {
    for flags in MODES {
        let group = Group::open(1, flags);
        let device = open(group, memory);
        // Twice: the second run finds everything warm.
        for run in 0..2 {
            let context = format!("{device}, flags {flags}, run {run}");
            let report = work::run(&device).unwrap_or_else(|e| panic!("{context}: {e}"));
            assert_eq!((report.rows, report.nulls), (100_000, 31_428), "{context}");
            // A fast device has done the work before the export.
            assert!(report.has_event || flags != LAZY, "{context}");
            check_costs(&report.stats, memory, flags, &context);
            assert_clean(group, &device);
        }
    }
}

fn check_costs(stats: &TransferStats, memory: CudaMemory, flags: u32, context: &str) {
    let own = memory == CudaMemory::Device;
    // Up: one allocation, and a copy for each MiB. The kernel's results: values and mask.
    assert_eq!((stats.allocations, stats.frees), (3, 0), "{context}");
    assert_eq!(stats.fills + stats.drop_errors, 0, "{context}");
    assert_eq!(stats.bytes_on_device, 0, "{context}");
    // 100,003 rows: ids and two columns of numbers, offsets, text, two masks, each padded.
    let text: usize = (0..100_003).map(|i| format!("item {i}").len()).sum();
    let pieces = [800_024, 400_016, text, 800_024, 12_501, 800_024, 12_501];
    let up: usize = pieces.iter().map(|n| n.next_multiple_of(64)).sum();
    assert_eq!(stats.bytes_to_device, up as u64, "{context}");
    // Down: ids, products and their mask; the host reads other memory where it is.
    let down = if own { 800_000 + 800_000 + 12_500 } else { 0 };
    assert_eq!(stats.bytes_to_host, down, "{context}");
    let ups = up.div_ceil(1 << 20) as u64;
    assert_eq!(stats.copies, if own { ups + 3 } else { ups }, "{context}");
    // The upload, four loans, two results, the export; the download.
    let events = if own { 9 } else { 8 };
    // Four loans wait for the upload, the export for the two results; the download for the export.
    let waits = (stats.queue_waits, stats.host_waits);
    let expected = (if own { 7 } else { 6 }, 1);
    if flags == LAZY {
        assert_eq!((stats.events, waits), (events, expected), "{context}");
    } else {
        // Nobody waits for what has completed, or exports its event.
        assert!(
            stats.events <= events && waits.0 <= expected.0 && waits.1 <= expected.1,
            "{context}: {stats:?}"
        );
    }
}

#[test]
fn device_memory() {
    costs(CudaMemory::Device);
}

#[test]
fn page_locked_memory() {
    costs(CudaMemory::Host);
}

#[test]
fn managed_memory() {
    costs(CudaMemory::Managed);
}

/// Numbers of which every `n`th is null; none, and no mask, for 0.
fn numbers(rows: usize, n: usize) -> ArrayRef {
    let value = |i: usize| (n == 0 || i % n != n - 1).then_some(i as f64 * 0.75 - 3.0);
    Arc::new((0..rows).map(value).collect::<Float64Array>())
}

#[test]
fn any_rows_any_bits_any_masks() {
    for flags in MODES {
        let rig = Rig::new(flags);
        let kernel = work::load(&rig, "product_f64").unwrap();
        let queue = rig.new_queue().unwrap();
        for rows in [0, 1, 7, 8, 9, 63, 64, 65, 1000] {
            for (a_nulls, b_nulls) in [(0, 0), (0, 3), (2, 0), (2, 3), (1, 1)] {
                for (a_skip, b_skip) in [(0, 0), (1, 0), (3, 13), (8, 7)] {
                    let a = numbers(a_skip + rows + 2, a_nulls);
                    let b = numbers(b_skip + rows, b_nulls);
                    let [on_a, on_b] = [(&a, a_skip), (&b, b_skip)].map(|(array, skip)| {
                        let on_device = rig.upload_array(array).unwrap();
                        on_device.slice(skip, rows).unwrap()
                    });
                    let total = work::product(&kernel, &on_a, &on_b, &queue).unwrap();
                    let total = total.to_host().unwrap();
                    let orders = RecordBatch::try_from_iter([
                        ("id", a.slice(a_skip, rows)),
                        ("price", a.slice(a_skip, rows)),
                        ("quantity", b.slice(b_skip, rows)),
                    ]);
                    let back = RecordBatch::try_from_iter([
                        ("id", a.slice(a_skip, rows)),
                        ("total", total),
                    ]);
                    let checked = work::check(&orders.unwrap(), &back.unwrap());
                    checked.unwrap_or_else(|e| {
                        panic!(
                            "{rows} rows, nulls {a_nulls} {b_nulls}, from {a_skip} {b_skip}: {e}"
                        )
                    });
                }
            }
        }
        drop((kernel, queue));
        rig.assert_done();
        rig.end();
    }
}

#[test]
fn the_kernels_of_the_example() {
    for flags in MODES {
        let rig = Rig::new(flags);
        let load = |name| work::load(&rig, name).unwrap();
        let (double, product) = (load("double_f64"), load("product_f64"));
        let above = work::load_above(&rig).unwrap();
        let queue = rig.new_queue().unwrap();
        let kernels = Kernels {
            double: &|column| work::double(&double, column, &queue).unwrap(),
            product: &|a, b| work::product(&product, a, b, &queue).unwrap(),
            above: &|column, limit| work::above(&above, column, limit, &queue).unwrap(),
        };
        kernel_suite::check(&rig, &kernels);
        kernel_suite::check_costs(&rig, &kernels, false);
        drop((double, product, above, queue));
        rig.assert_done();
        rig.end();
    }
}

#[test]
fn the_guide_shows_the_example() {
    let work = include_str!("../../../examples/cuda_kernel/work.rs");
    // What rustfmt breaks before the first parameter.
    let work = work
        .replace("(\n    kernel: ", "(kernel: ")
        .replace("(\n    kernels: ", "(kernels: ");
    let functions = [
        ("fn double(kernel: ", 15),
        ("fn product(kernel: ", 20),
        ("fn above(kernels: ", 40),
    ];
    kernel_suite::check_guide(&work, &functions);
}

/// The check of the example itself notices what is wrong.
#[test]
fn differences_are_found() {
    let orders = work::orders(20).unwrap();
    let price = orders.column_by_name("price").unwrap();
    let quantity = orders.column_by_name("quantity").unwrap();
    let [price, quantity] =
        [price, quantity].map(|c| c.as_any().downcast_ref::<Float64Array>().unwrap().clone());
    let right: Vec<Option<f64>> = price
        .iter()
        .zip(&quantity)
        .map(|(p, q)| Some(p? * q?))
        .collect();
    let back = |total: Vec<Option<f64>>, rows: usize| {
        let total = Arc::new(Float64Array::from(total)) as ArrayRef;
        let columns = [("id", orders.column(0).slice(0, rows)), ("total", total)];
        work::check(&orders, &RecordBatch::try_from_iter(columns).unwrap())
    };
    let nulls = right.iter().filter(|v| v.is_none()).count();
    assert_eq!(back(right.clone(), 20).unwrap(), nulls);
    let change = |row: usize, value| {
        let mut total = right.clone();
        total[row] = value;
        total
    };
    assert!(
        back(change(0, None), 20)
            .unwrap_err()
            .to_string()
            .contains("row 0")
    );
    assert!(back(change(2, Some(0.0)), 20).is_err());
    assert!(back(change(19, Some(1.0)), 20).is_err());
    assert!(back(right[..19].to_vec(), 19).is_err());
}
