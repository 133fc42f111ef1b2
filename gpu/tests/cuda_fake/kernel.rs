//! The example `cuda_kernel`, its own code, with what it may cost.

use arrow_device::{Device, DeviceId, Devices, TransferStats};

use crate::cuda_suite::example as work;
use crate::cuda_suite::kernels::with_kernels;
use crate::fake::{Group, LAZY, MODES};
use crate::kernel_suite;
use crate::rig::{Rig, soon, unclean};
use crate::vendor::{DEVICE, HOST, MANAGED, Memory};

/// The example imports with the default set of devices, so its device must be there.
fn open(group: Group, memory: Memory) -> Device {
    let id = DeviceId::new(memory, i64::from(group.first));
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

fn costs(memory: Memory) {
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

fn check_costs(stats: &TransferStats, memory: Memory, flags: u32, context: &str) {
    let own = memory == DEVICE;
    // Up: one allocation, and about eight copies. The kernel's results: values and mask.
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
    let ups = stats.copies - if own { 3 } else { 0 };
    assert!((4..=8).contains(&ups), "{context}: {ups} copies");
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
    costs(DEVICE);
}

#[test]
fn page_locked_memory() {
    costs(HOST);
}

#[test]
fn managed_memory() {
    costs(MANAGED);
}

#[test]
fn the_kernels_of_the_example() {
    for flags in MODES {
        let rig = Rig::new(flags);
        with_kernels(&rig, |kernels| {
            kernel_suite::check_costs(&rig, kernels);
        });
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
