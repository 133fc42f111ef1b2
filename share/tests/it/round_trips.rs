//! Every type, from process to process.

use std::sync::Arc;
use std::time::Duration;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{Device, DeviceRecordBatch};
use arrow_device_share::{
    Publisher, Subscriber, SubscriberOptions, shared_cpu, shared_sim, socket_pair,
};
use arrow_schema::{Field, Schema};

use crate::support::cases::cases;
use crate::support::compare::same_batch;
use crate::support::types::all_types;
use crate::two::{Other, alone, role, say};

pub(crate) fn batch_of(column: ArrayRef) -> RecordBatch {
    let field = Field::new("column", column.data_type().clone(), true);
    RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![column]).unwrap()
}

pub(crate) fn sim() -> (Arc<SimDevice>, Device) {
    let sim = SimDevice::new(shared_sim(SimConfig::default())).unwrap();
    (sim.clone(), Device::new(sim).unwrap())
}

/// The batches of all types, whole and cut, by type.
fn batches() -> impl Iterator<Item = (String, Vec<(String, RecordBatch)>)> {
    all_types()
        .into_iter()
        .enumerate()
        .map(|(seed, (name, data_type))| {
            let cases = cases(&data_type, seed as u64);
            let batches = cases
                .into_iter()
                .map(|(name, column)| (name, batch_of(column)));
            (name, batches.collect())
        })
}

/// The batches of a case, on a device: as it is uploaded, and slices of that.
fn on(device: &Device, batch: &RecordBatch) -> Vec<(RecordBatch, DeviceRecordBatch)> {
    let whole = device.upload(batch).unwrap();
    let rows = batch.num_rows();
    let mut all = vec![(batch.clone(), whole.clone())];
    if rows > 3 {
        for (at, len) in [(1, rows - 1), (3, rows / 2 - 1), (rows, 0)] {
            let both = (batch.slice(at, len), whole.slice(at, len).unwrap());
            all.push(both);
        }
    }
    all
}

fn send_all(folder: &str, device: &Device) {
    for (name, cases) in batches() {
        let path = format!("{folder}/socket");
        let publisher = Publisher::bind(&path).unwrap();
        say("bound");
        publisher
            .wait_for_subscribers(1, Duration::from_secs(60))
            .unwrap();
        let mut sent = 0;
        for (case, batch) in cases {
            for (_, on_device) in on(device, &batch) {
                let receivers = publisher.send(&on_device);
                assert_eq!(receivers.unwrap(), 1, "{name}: {case}");
                sent += 1;
            }
        }
        let stats = publisher.stats();
        assert_eq!((stats.batches, stats.copied_batches), (sent, 0), "{name}");
        publisher.finish().unwrap();
    }
}

fn receive_all(test: &str, options: impl Fn() -> SubscriberOptions, device: &Device) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let mut other = Other::start(test, path, std::process::Stdio::null());
    for (name, cases) in batches() {
        other.expect("bound");
        let subscriber = Subscriber::connect_with(format!("{path}/socket"), options()).unwrap();
        let mut subscriber = subscriber.fuse();
        for (case, batch) in cases {
            for (expected, _) in on(&arrow_device::Devices::cpu(), &batch) {
                let before = device.stats();
                let received = subscriber.next().unwrap();
                let received = received.unwrap_or_else(|e| panic!("{name}: {case}: {e}"));
                let copied = device.stats().since(&before);
                assert_eq!(
                    (copied.copies, copied.host_copied_bytes),
                    (0, 0),
                    "{name}: {case}"
                );
                let back = received.to_host().unwrap();
                same_batch(&expected, &back).unwrap_or_else(|e| panic!("{name}: {case}: {e}"));
            }
        }
        assert!(subscriber.next().is_none(), "{name}");
    }
    other.passed();
}

#[test]
fn every_type_on_the_cpu() {
    match role() {
        Some(folder) => send_all(&folder, &shared_cpu()),
        None => {
            let test = "round_trips::every_type_on_the_cpu";
            receive_all(
                test,
                SubscriberOptions::default,
                &arrow_device::Devices::cpu(),
            );
        }
    }
}

#[test]
fn every_type_on_a_simulated_device() {
    let (sim, device) = sim();
    match role() {
        Some(folder) => send_all(&folder, &device),
        None => {
            let test = "round_trips::every_type_on_a_simulated_device";
            // SAFETY: the publisher is this program.
            let options = || unsafe { SubscriberOptions::trusting() }.with_device(device.clone());
            receive_all(test, options, &device);
            device.trim();
            sim.assert_clean();
        }
    }
}

/// What is not in one shareable allocation is copied once, and counted: where nothing else copies, since the process has one device of
/// shared memory, which counts for all.
#[test]
fn a_batch_elsewhere_is_copied_once() {
    if !alone("round_trips::a_batch_elsewhere_is_copied_once") {
        return;
    }
    let (here, there) = socket_pair().unwrap();
    let publisher = Publisher::over(here).unwrap();
    let mut subscriber = Subscriber::over(there).unwrap();
    let column: ArrayRef = Arc::new(arrow_array::Int64Array::from_iter_values(0..1000));
    let batch = batch_of(column);
    let before = shared_cpu().stats();
    publisher
        .send(&arrow_device::Devices::cpu().upload(&batch).unwrap())
        .unwrap();
    let counts = shared_cpu().stats().since(&before);
    let stats = publisher.stats();
    assert_eq!((stats.copied_batches, stats.copied_bytes), (1, 8000));
    assert_eq!((counts.copies, counts.bytes_to_device), (1, 8000));
    assert_eq!(
        subscriber.next().unwrap().unwrap().to_host().unwrap(),
        batch
    );
}
