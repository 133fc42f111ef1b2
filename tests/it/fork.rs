//! Devices that need no GPU, in a child of the process that opened them.

use std::time::{Duration, Instant};

use crate::support::fork_kit::{alone, forked};
use arrow_array::{RecordBatch, RecordBatchIterator, record_batch};
use arrow_device::device::sim::{SimConfig, SimDevice, SimMode};
use arrow_device::{Device, DeviceRecordBatch, Devices, SyncPolicy, upload_reader_ahead};

fn batch() -> RecordBatch {
    record_batch!(("id", Int32, [1, 2, 3]), ("name", Utf8, ["a", "b", "c"])).unwrap()
}

fn round_trip(device: &Device) {
    let up = device.upload(&batch()).unwrap();
    let (array, schema) = up.export(SyncPolicy::Event).unwrap();
    drop((array, schema));
    assert_eq!(up.to_host().unwrap(), batch());
}

/// The CPU has no threads and no library of its own: it goes on.
#[test]
fn the_cpu_works_in_a_child() {
    alone("fork::the_cpu_works_in_a_child", || {
        let cpu = Devices::cpu();
        let up = cpu.upload(&batch()).unwrap();
        let mut theirs = Some(up.export(SyncPolicy::Event).unwrap());
        forked(|| {
            round_trip(&cpu);
            let (array, schema) = theirs.take().unwrap();
            // SAFETY: both structs come from one export of this crate.
            let again = unsafe { DeviceRecordBatch::import(array, &schema, None) }.unwrap();
            drop(schema);
            assert_eq!(again.to_host().unwrap(), batch());
        });
        round_trip(&cpu);
    });
}

/// A simulated device's worker does not exist there, and its memory is the parent's.
#[test]
fn a_simulated_device_is_the_parents() {
    alone("fork::a_simulated_device_is_the_parents", || {
        for mode in [SimMode::Async, SimMode::Deferred] {
            let sim = SimDevice::new(SimConfig {
                mode,
                ..SimConfig::default()
            })
            .unwrap();
            let device = Device::new(sim.clone()).unwrap();
            let up = device.upload(&batch()).unwrap();
            let exported = up.export(SyncPolicy::Event).unwrap();
            let event = device.default_queue().record().unwrap().unwrap();
            let host = device.host_buffer(1 << 20).unwrap();
            let mut child = Some((
                up.clone(),
                exported,
                event,
                host,
                device.clone(),
                sim.clone(),
            ));
            forked(|| {
                let (up, exported, event, host, device, sim) = child.take().unwrap();
                for e in [
                    device.upload(&batch()).unwrap_err(),
                    up.to_host().unwrap_err(),
                    event.wait().unwrap_err(),
                    event.is_complete().unwrap_err(),
                    device.new_queue().unwrap_err(),
                    device.synchronize().unwrap_err(),
                ] {
                    let text = e.to_string();
                    assert!(text.contains("cannot be used after fork"), "{text}");
                }
                let (array, schema) = exported;
                drop((array, schema, host, event, up));
                assert_eq!(device.take_drop_error().map(|e| e.to_string()), None);
                drop((device, sim));
                // One of its own works.
                let own = SimDevice::new(SimConfig {
                    mode,
                    ..SimConfig::default()
                })
                .unwrap();
                round_trip(&Device::new(own.clone()).unwrap());
            });
            assert_eq!(up.to_host().unwrap(), batch());
            drop((up, child));
            device.synchronize().unwrap();
            drop(device);
            // A thread of the device's drops some of it.
            let end = Instant::now() + Duration::from_secs(10);
            while !sim.report().is_clean() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            sim.assert_clean();
        }
    });
}

/// What another thread holds while the process forks, the child does without.
#[test]
fn a_child_waits_for_no_thread_of_its_parent() {
    alone("fork::a_child_waits_for_no_thread_of_its_parent", || {
        let sim = SimDevice::new(SimConfig::default()).unwrap();
        for device in [Devices::cpu(), Device::new(sim.clone()).unwrap()] {
            let up = device.upload(&batch()).unwrap();
            let theirs = device.clone();
            // It ends with the process.
            std::thread::spawn(move || {
                loop {
                    for _ in 0..100 {
                        drop(theirs.host_buffer(64).unwrap());
                    }
                    drop(theirs.upload(&batch()).unwrap());
                    theirs.trim();
                }
            });
            let mut child = Some(up);
            for _ in 0..50 {
                forked(|| {
                    let up = child.take().unwrap();
                    assert_eq!(up.to_host().is_ok(), device.is_synchronous());
                    drop((device.host_buffer(64), up));
                    device.trim();
                    assert!(sim.report().error.is_some());
                });
            }
        }
    });
}

/// A reader with threads of its own ends in a child with an error, though batches wait in it. The parent's goes on.
fn is_the_parents<T, E: std::fmt::Display + std::fmt::Debug>(
    mut reader: impl Iterator<Item = Result<T, E>>,
    rows: impl Fn(T) -> usize,
) {
    assert_eq!(rows(reader.next().unwrap().unwrap()), 3);
    let mut child = Some(reader);
    forked(|| {
        let mut reader = child.take().unwrap();
        let text = reader.next().unwrap().map(drop).unwrap_err().to_string();
        assert!(text.contains("cannot be used after fork"), "{text}");
        assert!(reader.next().is_none() && reader.next().is_none());
        drop(reader);
    });
    let rest: Vec<_> = child.unwrap().map(|item| rows(item.unwrap())).collect();
    assert_eq!(rest, [3; 4]);
}

#[test]
fn a_stream_with_threads_is_the_parents() {
    alone("fork::a_stream_with_threads_is_the_parents", || {
        for device in [Devices::cpu(), Devices::simulated().unwrap()] {
            let batches = (0..5).map(|_| Ok(batch()));
            let reader = RecordBatchIterator::new(batches, batch().schema());
            let ahead = upload_reader_ahead(reader, &device, 2).unwrap();
            is_the_parents(ahead, |up| up.num_rows());
        }
    });
}
