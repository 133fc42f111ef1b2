//! A publisher that reads nothing for a while, or has more to send than the sockets take.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use arrow_device::{DeviceArray, DeviceBuffer, DeviceRecordBatch};
use arrow_device_share::{
    DeadPeers, Publisher, PublisherOptions, Subscriber, shared_cpu, socket_pair,
};
use arrow_schema::DataType;
use rustix::net::sockopt::set_socket_send_buffer_size;

use crate::deaths::{LONG, shared};
use crate::raw::{OFFER, Raw, SCHEMA};

const PATIENCE: Duration = Duration::from_secs(20);

fn options() -> PublisherOptions {
    PublisherOptions {
        leases: 2000,
        patience: PATIENCE,
        dead_peers: DeadPeers::Report,
        ..Default::default()
    }
}

/// Owns memory, and says so when nobody uses it any more. Its drop waits until it may go on.
struct Gate {
    _memory: DeviceBuffer,
    reached: Sender<()>,
    open: Mutex<Receiver<()>>,
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = self.reached.send(());
        let _ = self.open.lock().unwrap().recv_timeout(LONG);
    }
}

struct Stalled {
    publisher: Publisher,
    subscriber: Subscriber,
    /// What the subscriber has.
    batches: Vec<DeviceRecordBatch>,
    /// The publisher's thread reads nothing until this is dropped.
    stall: Sender<()>,
}

fn stalled(batches: usize, send_buffer: usize) -> Stalled {
    let (here, there) = socket_pair().unwrap();
    set_socket_send_buffer_size(&there, send_buffer).unwrap();
    let publisher = Publisher::over_with(here, options()).unwrap();
    let mut subscriber = Subscriber::over(there).unwrap();

    let like = shared(0);
    let memory = like.column(0).unwrap().buffer(1).unwrap();
    let (device, base, bytes) = (shared_cpu(), memory.address(), memory.len());
    let ((reached, is_reached), (stall, open)) = (channel(), channel());
    let gate = Gate {
        _memory: memory,
        reached,
        open: Mutex::new(open),
    };
    // SAFETY: the gate owns the memory, which nobody writes to.
    let memory = unsafe { DeviceBuffer::from_raw(&device, base, bytes, Box::new(gate), None) };
    let (of, buffers) = (DataType::Int64, [Some(memory)]);
    // SAFETY: the buffer has the values of 1000 numbers.
    let column = unsafe { DeviceArray::from_parts(&device, of, 1000, None, &buffers, &[]) };
    drop(buffers);
    let columns = [column.unwrap()];
    let gated = DeviceRecordBatch::try_new_with_rows(&device, like.schema(), &columns, 1000);
    publisher.send(&gated.unwrap()).unwrap();
    drop(columns);
    assert_eq!(publisher.stats().copied_batches, 0);
    let first = subscriber.next().unwrap().unwrap();
    let next = |_| {
        publisher.send(&like).unwrap();
        subscriber.next().unwrap().unwrap()
    };
    let batches = (0..batches).map(next).collect();
    drop(first);
    is_reached.recv().unwrap();
    Stalled {
        publisher,
        subscriber,
        batches,
        stall,
    }
}

/// The publisher reads some packets at a time, and the farewell may be the first one of the next time.
#[test]
fn a_farewell_after_many_returns() {
    for returns in [63, 64, 65, 128] {
        let all = stalled(returns, 1 << 20);
        drop((all.batches, all.subscriber));
        let publisher = all.publisher;
        let ends = std::thread::spawn(|| publisher.finish());
        // If this is too short, the farewell is read before the end is sent to nobody, which is right, too.
        std::thread::sleep(Duration::from_millis(50));
        drop(all.stall);
        let end = ends.join().unwrap();
        assert!(end.is_ok(), "{returns}: {end:?}");
    }
}

/// A farewell for which the socket has no room makes nobody wait.
#[test]
fn a_farewell_without_room() {
    let mut all = stalled(100, 1);
    let kept = all.batches.pop();
    drop((all.batches, all.subscriber, all.stall));
    let start = Instant::now();
    all.publisher.finish().unwrap();
    assert!(start.elapsed() < PATIENCE / 2);
    drop(kept);
}

/// What there was no room for goes as soon as there is.
#[test]
fn a_backlog() {
    const BATCHES: usize = 2000;
    let (raw, there) = Raw::pair();
    // Room for a few packets.
    set_socket_send_buffer_size(&there, 1).unwrap();
    let publisher = Publisher::over_with(there, options()).unwrap();
    raw.subscribe();
    let batch = shared(0);
    for _ in 0..BATCHES {
        publisher.send(&batch).unwrap();
    }
    let start = Instant::now();
    raw.expect(SCHEMA);
    for _ in 0..BATCHES {
        raw.expect(OFFER);
    }
    assert!(start.elapsed() < Duration::from_secs(3));
}
