//! Threads on one device: while one is in a copy, which may take long, the others go on.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::{channel, sync_channel};
use std::time::Duration;

use crate::altered::{Altered, Stay};
use arrow_array::{RecordBatch, record_batch};
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{
    Device, DeviceRecordBatch, Devices, ImportOptions, Result, SyncPolicy, TransferStats,
};

/// All that producers and consumers do on a device.
fn work(device: &Device, imports: &ImportOptions) -> Result<()> {
    let host = record_batch!(("a", Int64, [1, 2, 3]), ("b", Utf8, ["x", "y", "z"]))?;
    let queue = device.new_queue()?;
    let there = device.upload_on(&host, &queue)?;
    there.wait()?;
    assert_eq!(there.to_host()?, host);
    assert_eq!(there.compact()?.to_host()?, host);
    let (array, schema) = there.export(SyncPolicy::Event)?;
    // SAFETY: both were just exported from a batch.
    let again = unsafe { DeviceRecordBatch::import(array, &schema, imports) }?;
    assert_eq!(again.to_host()?, host);
    assert_eq!(
        device.upload(&host)?.slice(1, 2)?.to_host()?,
        host.slice(1, 2)
    );
    drop((there, again));
    device.host_buffer(1 << 20)?;
    device.trim();
    device.synchronize()
}

/// No lock of a device is held over a copy: neither of an upload, nor of a download, nor on the device.
#[test]
fn a_copy_holds_up_nobody() {
    type Copy = fn(&Device, &RecordBatch, &DeviceRecordBatch) -> Result<()>;
    let copies: [(&str, Copy); 3] = [
        ("upload", |device, host, _| device.upload(host)?.wait()),
        ("download", |_, _, there| there.to_host().map(drop)),
        ("compact", |_, _, there| there.compact()?.wait()),
    ];
    for (name, copy) in copies {
        let sim = SimDevice::new(SimConfig::default()).unwrap();
        let slow = Altered::new(sim.clone());
        let next = slow.stay.clone();
        let device = Device::new(Arc::new(slow)).unwrap();
        let devices = Devices::new();
        devices.add(device.clone()).unwrap();
        let imports = ImportOptions {
            devices: Some(devices),
            ..Default::default()
        };
        let host = record_batch!(("a", Int64, [4, 5, 6])).unwrap();
        let there = device.upload(&host).unwrap();

        let ((here, is_here), (go, held)) = (sync_channel(1), sync_channel(1));
        *next.lock().unwrap() = Some(Stay(here, held));
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| copy(&device, &host, &there).unwrap());
            is_here.recv_timeout(Duration::from_secs(60)).unwrap();
            let (done, is_done) = channel();
            let others = [0; 2].map(|_| {
                let (done, device, imports) = (done.clone(), &device, &imports);
                scope.spawn(move || {
                    work(device, imports).unwrap();
                    done.send(()).unwrap();
                })
            });
            let went_on = others
                .iter()
                .all(|_| is_done.recv_timeout(Duration::from_secs(30)).is_ok());
            let is_held = !slow.is_finished();
            go.send(()).unwrap();
            assert!(went_on, "{name} holds a lock over its copy");
            assert!(is_held, "{name} did not copy");
        });
        drop(there);
        device.synchronize().unwrap();
        device.trim();
        assert_eq!(sim.report().violations, [""; 0]);
    }
}

/// A thread that ends may use devices in the destructors of its thread-local values, which may run after those of this crate's own.
#[test]
fn thread_local_values_use_devices_to_the_end() {
    struct AtEnd(Box<dyn FnMut()>);
    impl Drop for AtEnd {
        fn drop(&mut self) {
            self.0();
        }
    }
    thread_local!(static KEPT: RefCell<Vec<AtEnd>> = const { RefCell::new(Vec::new()) });
    let devices = Devices::new();
    let simulated = Device::new(SimDevice::new(SimConfig::default()).unwrap()).unwrap();
    devices.add(simulated.clone()).unwrap();
    let imports = ImportOptions {
        devices: Some(devices),
        ..Default::default()
    };
    for device in [Devices::cpu(), simulated] {
        let imports = imports.clone();
        let (done, is_done) = channel();
        let all = move || {
            work(&device, &imports).unwrap();
            let (result, stats) = TransferStats::scope(|| work(&device, &imports));
            result.unwrap();
            done.send(stats).unwrap();
        };
        let thread = std::thread::spawn(move || {
            // Registered before any of this crate's, the destructor runs after those.
            KEPT.with_borrow_mut(|kept| kept.push(AtEnd(Box::new(all.clone()))));
            all();
        });
        thread.join().unwrap();
        let counts = [is_done.recv().unwrap(), is_done.recv().unwrap()];
        let copies = counts.map(|stats| stats.copies);
        assert_eq!(
            copies[0], copies[1],
            "a scope counts at the end of a thread, too"
        );
    }
}
