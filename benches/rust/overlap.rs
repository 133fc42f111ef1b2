//! Long streams to and from a simulated device that copies at a fixed rate, whose producer is as
//! slow as the copy.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arrow_array::RecordBatchIterator;
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{
    ArrowDeviceType, Device, DeviceRecordBatchReader, DeviceRecordBatches, upload_reader,
};

use crate::batches;
use crate::cases::Result;

/// Slow, so that what the simulation costs besides is little.
const BYTES_PER_SECOND: u64 = 12_500_000;
const COLUMNS: usize = 2;
const ROWS: usize = 1 << 14;

/// Time that a producer took, which it spends asleep.
#[derive(Clone, Default)]
struct Producer(Arc<Mutex<Duration>>);

impl Producer {
    fn produce(&self, time: Duration) {
        let start = Instant::now();
        std::thread::sleep(time);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) += start.elapsed();
    }

    fn seconds(&self) -> f64 {
        let took = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        took.as_secs_f64()
    }
}

/// What is done with the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Up; the consumer works on the device, and waits in the end.
    Up,
    /// Up; the consumer waits for each batch as soon as it has it, which lets nothing overlap.
    UpAtOnce,
    /// Down, to be read.
    Down,
}

impl Way {
    /// By the number that Python has for it.
    pub fn numbered(n: usize) -> Option<Self> {
        [Self::Up, Self::UpAtOnce, Self::Down].get(n).copied()
    }
}

/// Seconds: in all, of the producer, of the copies, of one batch's copy.
///
/// # Errors
/// The crate's.
pub fn run(way: Way, n: usize) -> Result<[f64; 4]> {
    let config = SimConfig {
        bytes_per_second: Some(BYTES_PER_SECOND),
        ..SimConfig::default()
    };
    let device = Device::new(SimDevice::new(config)?)?;
    let batch = batches::named("integers", COLUMNS, ROWS)?;
    let schema = batch.schema();
    let one = (COLUMNS * ROWS * 8) as f64 / BYTES_PER_SECOND as f64;
    let time = Duration::from_secs_f64(one);
    let producer = Producer::default();
    let there = device.upload(&batch)?;
    there.wait()?;
    // The host buffers of downloads are there.
    drop([there.to_host()?, there.to_host()?, there.to_host()?]);

    let (slow, before, start) = (producer.clone(), device.stats(), Instant::now());
    let bytes = if way != Way::Down {
        let batches = (0..n).map(move |_| {
            slow.produce(time);
            Ok(batch.clone())
        });
        let mut last = None;
        for batch in upload_reader(RecordBatchIterator::new(batches, schema), &device) {
            let batch = last.insert(batch?);
            if way == Way::UpAtOnce {
                batch.wait()?;
            }
        }
        last.ok_or("no batches")?.wait()?;
        device.stats().since(&before).bytes_to_device
    } else {
        let batches = (0..n).map(move |_| {
            slow.produce(time);
            Ok(there.clone())
        });
        let reader = DeviceRecordBatches::new(batches, schema, ArrowDeviceType::EXT_DEV);
        for batch in reader.into_host_reader() {
            drop(batch?);
        }
        device.stats().since(&before).bytes_to_host
    };
    let copies = bytes as f64 / BYTES_PER_SECOND as f64;
    Ok([
        start.elapsed().as_secs_f64(),
        producer.seconds(),
        copies,
        one,
    ])
}
