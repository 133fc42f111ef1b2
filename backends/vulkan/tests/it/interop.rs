//! Exchange with libraries in plain C (`peer.c`), which share the program's Vulkan device and have memory and events of their own.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arrow_array::cast::AsArray;
use arrow_array::types::Float32Type;
use arrow_array::{Float32Array, RecordBatch};
use arrow_device::{
    Device, DeviceArray, DeviceBuffer, DeviceRecordBatch, Devices, ImportOptions, SyncPolicy,
};
use arrow_device_vulkan::VulkanDevice;
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};

use crate::peer::{BY_QUEUE, LATER, NO_EVENT, Peer, Produced, SET_BEFORE};
use crate::program::Program;
use crate::rigs::{hold, is_there, open};
use crate::suite::{assert_clean, soon};

const ROWS: i64 = 10_000;

/// A program whose device this crate has adopted, and the libraries in C; `None` if something is missing. One test at a time: the
/// releases are counted for the process.
fn begin() -> Option<(MutexGuard<'static, ()>, Arc<Program>, Device, Peer)> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !is_there() {
        return None;
    }
    let program = Program::new();
    let peer = Peer::new(&program)?;
    let device = program.adopt();
    Some((alone, program, device, peer))
}

fn values(rows: std::ops::Range<i64>) -> Float32Array {
    Float32Array::from_iter_values(rows.map(|i| 3.0 * i as f32))
}

fn import(produced: Produced, device: &Device) -> DeviceArray {
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let options = ImportOptions::default().with_devices(devices);
    let schema = FFI_ArrowSchema::try_from(&Field::new("v", DataType::Float32, false)).unwrap();
    // SAFETY: the C program keeps to the interface.
    unsafe { DeviceArray::import_with(produced.array, &schema, &options) }.unwrap()
}

/// Makes the VkBuffer of an array known, as nobody can ask Vulkan for the buffer of an address. Only copies need it.
fn announce(device: &Device, produced: &Produced) -> DeviceBuffer {
    let (buffer, bytes) = (produced.buffer, produced.bytes as usize);
    // SAFETY: the buffer lives until the array is released, which is after the result is dropped. What is written to it until its
    // event is set, nobody reads before.
    unsafe { VulkanDevice::wrap_buffer(device, buffer, bytes, ()) }.unwrap()
}

#[test]
fn a_c_consumer_polls_our_event() {
    let Some((_alone, _program, device, peer)) = begin() else {
        return;
    };
    let column = Arc::new(values(0..ROWS)) as _;
    let batch = RecordBatch::try_from_iter([("v", column)]).unwrap();
    let queue = device.new_queue().unwrap();
    for (start, rows) in [(0, ROWS as usize), (37, 5_000), (9_999, 1)] {
        let mut held = hold(&queue);
        let up = device.upload_on(&batch, &queue).unwrap();
        let part = up.slice(start, rows).unwrap();
        let (mut array, _schema) = part.export(SyncPolicy::Event).unwrap();
        drop((up, part));
        assert!(!peer.poll(&array), "set before the copy ran");
        let opened = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let consumer = scope.spawn(|| {
                // Its kernel comes after the copy on the VkQueue, so it polls first.
                let doubled = peer.double(&mut array, rows);
                assert!(opened.load(SeqCst), "read before the copy ran");
                doubled
            });
            std::thread::sleep(Duration::from_millis(30));
            opened.store(true, SeqCst);
            held.open();
            let expected: Vec<f32> = (0..rows).map(|i| 6.0 * (start + i) as f32).collect();
            assert_eq!(consumer.join().unwrap(), expected);
        });
        // The consumer has released it.
        drop(array);
        assert_clean(&device);
    }
}

/// An import does not wait. Whoever makes a queue wait does, because Vulkan lets no queue wait for the event of another library.
#[test]
fn a_c_producers_event_is_waited_for() {
    let Some((_alone, _program, device, peer)) = begin() else {
        return;
    };
    for who in [LATER, BY_QUEUE, SET_BEFORE, NO_EVENT] {
        let before = Peer::releases();
        let mut held = (who == BY_QUEUE).then(|| hold(&device.default_queue()));
        let produced = peer.produce(device.id().id, ROWS, who);
        let producer = produced.producer;
        let known = announce(&device, &produced);
        let array = import(produced, &device);
        let is_pending = matches!(who, LATER | BY_QUEUE);
        assert_eq!(array.is_ready().unwrap(), !is_pending, "{who}");
        let queue = device.new_queue().unwrap();
        let part = array.slice(10, 100).unwrap();
        let opened = AtomicBool::new(!is_pending);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                opened.store(true, SeqCst);
                match who {
                    LATER => peer.open(producer),
                    BY_QUEUE => held.as_mut().unwrap().open(),
                    _ => {}
                }
            });
            let download = part.start_to_host_on(&queue).unwrap();
            assert!(opened.load(SeqCst), "{who}: read before it was written");
            let back = download.wait().unwrap();
            let back = back.as_primitive::<Float32Type>();
            assert_eq!(*back, values(10..110), "{who}");
        });
        let back = array.to_host().unwrap();
        let back = back.as_primitive::<Float32Type>();
        assert_eq!(*back, values(0..ROWS), "{who}");
        drop(known);
        drop((array, part));
        assert!(soon(|| Peer::releases() > before), "{who}: not released");
    }
}

/// The producer destroys its event and its memory as soon as it may: after our last use, not before.
#[test]
fn a_c_producer_is_released_after_the_last_use() {
    let Some((_alone, _program, device, peer)) = begin() else {
        return;
    };
    let before = Peer::releases();
    let queue = device.new_queue().unwrap();
    let produced = peer.produce(device.id().id, ROWS, LATER);
    peer.open(produced.producer);
    let array = import(produced, &device);
    assert!(soon(|| array.is_ready().unwrap()), "the event is never set");
    // Read by a kernel that gets the address, behind work that is pending.
    let mut held = hold(&queue);
    let loan = array.values_on::<f32>(&queue).unwrap();
    drop(loan);
    let start = Instant::now();
    drop(array);
    assert!(start.elapsed() < Duration::from_secs(5), "a release waits");
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(Peer::releases(), before, "released while it is used");
    held.open();
    assert!(soon(|| Peer::releases() > before), "not released");
    let batch = RecordBatch::try_from_iter([("v", Arc::new(values(0..9)) as _)]).unwrap();
    assert_eq!(device.upload(&batch).unwrap().to_host().unwrap(), batch);
}

/// An export of two columns waits for both producers' events. The consumer may release it at once.
#[test]
fn c_producers_are_released_after_a_wait_of_ours() {
    let Some((_alone, _program, device, peer)) = begin() else {
        return;
    };
    let before = Peer::releases();
    let (mut producers, mut columns) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let produced = peer.produce(device.id().id, ROWS, LATER);
        producers.push(produced.producer);
        columns.push(import(produced, &device));
    }
    let fields = ["a", "b"].map(|name| Field::new(name, DataType::Float32, true));
    let schema = Arc::new(Schema::new(fields.to_vec()));
    let batch = DeviceRecordBatch::try_new(schema, &columns).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            assert_eq!(Peer::releases(), before, "released while it is polled");
            producers
                .into_iter()
                .for_each(|producer| peer.open(producer));
        });
        let (array, _schema) = batch.export(SyncPolicy::Event).unwrap();
        drop((columns, batch));
        drop(array);
    });
    assert!(soon(|| Peer::releases() == before + 2), "not released");
}

/// Through the host: the functions of one VkDevice know nothing of another's buffers and events.
#[test]
fn a_c_producers_array_goes_to_another_vulkan_device() {
    let Some((_alone, _program, device, peer)) = begin() else {
        return;
    };
    let other = open();
    let produced = peer.produce(device.id().id, ROWS, LATER);
    let producer = produced.producer;
    let known = announce(&device, &produced);
    let array = import(produced, &device);
    let there = std::thread::scope(|scope| {
        let there = scope.spawn(|| array.to_device(&other).unwrap());
        std::thread::sleep(Duration::from_millis(30));
        peer.open(producer);
        there.join().unwrap()
    });
    let back = there.to_host().unwrap();
    assert_eq!(*back.as_primitive::<Float32Type>(), values(0..ROWS));
    drop(known);
}
