//! Simulated devices for the integration tests.
#![allow(dead_code)]

pub(crate) mod layout;

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use arrow_array::{Array, ArrayRef, Int32Array, Int64Array, RecordBatch};
use arrow_buffer::Buffer;
use arrow_device::device::sim::{Faults, SimConfig, SimDevice, SimMemory, SimMode};
use arrow_device::{Device, DeviceRecordBatch, Queue, Result};

pub(crate) const MODES: [SimMode; 2] = [SimMode::Async, SimMode::Deferred];

/// A device and its backend.
pub(crate) struct Sim {
    pub device: Device,
    pub sim: Arc<SimDevice>,
}

impl Deref for Sim {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

impl From<&Sim> for Queue {
    fn from(sim: &Sim) -> Self {
        sim.default_queue()
    }
}

impl Sim {
    pub(crate) fn new(mode: SimMode) -> Self {
        Self::with(SimConfig {
            mode,
            ..SimConfig::default()
        })
    }

    pub(crate) fn with(config: SimConfig) -> Self {
        let sim = SimDevice::new(config).unwrap();
        let device = Device::new(sim.clone()).unwrap();
        Self { device, sim }
    }

    pub(crate) fn faults(&self) -> &Faults {
        self.sim.faults()
    }

    /// Everything was dropped: waits until all of it has gone, and checks that nothing was done wrong.
    #[track_caller]
    pub(crate) fn assert_done(&self) {
        self.assert_done_but(0);
    }

    /// As `assert_done`, with this many device allocations left.
    #[track_caller]
    pub(crate) fn assert_done_but(&self, allocations: usize) {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            self.device.synchronize().unwrap();
            self.device.trim();
            let report = self.sim.report();
            assert_eq!(report.violations, [""; 0]);
            let live = report.live_host_allocations + report.live_events;
            let quiet = report.live_allocations == allocations && report.pending_operations == 0;
            if quiet && (live == 0 || allocations > 0) {
                assert_eq!(self.device.take_drop_error().map(|e| e.to_string()), None);
                return;
            }
            assert!(Instant::now() < end, "{:?}: {report:#?}", self.device);
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Queues a kernel.
pub(crate) fn launch(
    queue: &Queue,
    kernel: impl FnOnce(&mut SimMemory<'_>) -> Result<(), String> + Send + 'static,
) -> Result<()> {
    let sim = queue.as_sim().unwrap();
    // SAFETY: the tests' kernels write only buffers that are not frozen yet.
    unsafe { sim.launch(kernel) }
}

/// Numbers and nulls.
pub(crate) fn ints(n: i32) -> Int32Array {
    (0..n).map(|i| (i % 5 != 0).then_some(i * 7)).collect()
}

/// Numbers from 0, and what tells whether their memory was let go.
pub(crate) fn watched(rows: usize) -> (Int64Array, Weak<Vec<i64>>) {
    let values: Arc<Vec<i64>> = Arc::new((0..rows as i64).collect());
    let watch = Arc::downgrade(&values);
    let ptr = NonNull::from(values.as_slice()).cast();
    // SAFETY: the buffer holds the owner of the values.
    let buffer = unsafe { Buffer::from_custom_allocation(ptr, rows * 8, values) };
    (Int64Array::new(buffer.into(), None), watch)
}

/// Slices (offset, length) of `rows` rows: odd places, all, none.
pub(crate) fn slices(rows: usize) -> Vec<(usize, usize)> {
    let mut slices = vec![(0, 0), (rows, 0), (0, rows)];
    if rows > 1 {
        slices.push((1, rows - 1));
        slices.push((0, rows - 1));
    }
    if rows > 20 {
        slices.extend([(3, 5), (7, 11), (9, rows / 2), (rows / 2 + 1, 8)]);
    }
    slices
}

/// Whether a full validation by arrow-rs says yes, where it says yes to `input`.
#[track_caller]
pub(crate) fn assert_valid(input: &dyn Array, output: &ArrayRef, context: &str) {
    if input.to_data().validate_full().is_ok() {
        let valid = output.to_data().validate_full();
        valid.unwrap_or_else(|e| panic!("{context}: {e}"));
    }
}

#[track_caller]
pub(crate) fn assert_valid_batch(batch: &RecordBatch, context: &str) {
    for column in batch.columns() {
        assert_valid(column, column, context);
    }
}

/// Whether a batch has come to where it says that it is.
pub(crate) fn is_on(batch: &DeviceRecordBatch, device: &Device) -> bool {
    batch.device() == device && batch.columns().all(|column| column.device() == device)
}
