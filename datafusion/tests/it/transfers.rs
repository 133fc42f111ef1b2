//! What moves, what is waited for, and whether it is told.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::kit::*;
use crate::memory::recorded;
use crate::nodes::*;

const NODES: [&str; 5] = [
    "DeviceScanExec",
    "HostToDeviceExec",
    "DeviceToDeviceExec",
    "MapExec",
    "DeviceToHostExec",
];

/// What each node counts of the bytes to a device, to the host, and on the device, of copies, and of waits of the host.
fn counted(plan: &Plan, node: &str) -> [u64; 5] {
    let names = ["to_device", "to_host", "on_device"].map(|name| format!("bytes_{name}"));
    let names = names.iter().map(String::as_str);
    let names: Vec<_> = names.chain(["copies", "host_waits"]).collect();
    std::array::from_fn(|i| metric(plan, node, names[i]).unwrap_or(0) as u64)
}

/// The same, of a device.
pub(crate) fn moved(of: &TransferStats) -> [u64; 5] {
    let bytes = [of.bytes_to_device, of.bytes_to_host, of.bytes_on_device];
    let [up, down, on_device] = bytes;
    [up, down, on_device, of.copies, of.host_waits]
}

/// Two devices of which each reaches the other's memory.
fn peers() -> [Sim; 2] {
    [(); 2].map(|()| Sim::set(|config| config.peer_access = true))
}

/// Up once and down once, whatever stands between. Of batches of 128 bytes.
#[tokio::test]
async fn nodes_and_devices_count_exactly_what_moved() {
    let (apart, peers) = ([Sim::new(), Sim::new()], peers());
    for (line, [a, b], nodes, [on_a, on_b]) in [
        (
            "Map A < Map A < Numbers 5",
            &apart,
            &[
                ("HostToDeviceExec", 80, [640, 0, 0, 5, 0]),
                ("MapExec", 160, [0; 5]),
                ("DeviceToHostExec", 80, [0, 640, 0, 5, 0]),
            ][..],
            [[640, 640, 0, 10, 0], [0; 5]],
        ),
        (
            // Operators pass batches on without a copy or a wait.
            "Map A < Map A < Map A < Numbers A 3",
            &apart,
            &[
                ("DeviceScanExec", 48, [0; 5]),
                ("MapExec", 3 * 48, [0; 5]),
                ("DeviceToHostExec", 48, [0, 384, 0, 3, 0]),
            ],
            [[0, 384, 0, 3, 0], [0; 5]],
        ),
        (
            // Down from one and up to the other, each of which counts its own half.
            "Map B < Numbers A 3",
            &apart,
            &[
                ("DeviceToDeviceExec", 48, [384, 384, 0, 6, 0]),
                ("MapExec", 48, [0; 5]),
                ("DeviceToHostExec", 48, [0, 384, 0, 3, 0]),
            ],
            [[0, 384, 0, 3, 0], [384, 384, 0, 6, 0]],
        ),
        (
            // Nothing passes through the host. Events of simulated devices are their own: a blocking thread waits for each batch.
            "Map B < Numbers A 3",
            &peers,
            &[
                ("DeviceToDeviceExec", 48, [0, 0, 384, 3, 3]),
                ("MapExec", 48, [0; 5]),
                ("DeviceToHostExec", 48, [0, 384, 0, 3, 0]),
            ],
            [[0, 0, 0, 0, 3], [0, 384, 384, 6, 0]],
        ),
    ] {
        let plan = ruled(line, &[a, b]);
        let before = [a.stats(), b.stats()];
        let rows = row_count(&run(&plan).await.unwrap());
        let cost = [a.stats().since(&before[0]), b.stats().since(&before[1])];
        for (node, rows, expected) in nodes {
            assert_eq!(counted(&plan, node), *expected, "{node} of {line}");
            assert_eq!(metric(&plan, node, "output_rows"), Some(*rows), "{line}");
        }
        for node in ["HostToDeviceExec", "DeviceToHostExec"] {
            let batches = metric(&plan, node, "output_batches");
            assert!(batches.is_none_or(|n| n == rows / 16), "{node} of {line}");
        }
        assert_eq!(cost.each_ref().map(moved), [on_a, on_b], "{line}");
        // The nodes together are the devices: nothing is counted twice, and nothing is left out.
        let nodes = NODES.map(|node| counted(&plan, node));
        let sums: [u64; 5] = std::array::from_fn(|i| nodes.iter().map(|of| of[i]).sum());
        assert_eq!(sums, std::array::from_fn(|i| on_a[i] + on_b[i]), "{line}");
        // Each operator makes its batches, and its queue waits for those of the one before.
        if let Some(made) = metric(&plan, "MapExec", "output_batches").filter(|n| *n == 9) {
            assert_eq!(cost[0].allocations, made as u64);
            assert!(metric(&plan, "MapExec", "queue_waits") > Some(0));
            assert_eq!(metric(&plan, "MapExec", "started"), Some(3), "its own");
        }
        drop(plan);
        b.assert_done();
        a.assert_done();
    }
}

#[tokio::test]
async fn only_the_columns_and_rows_that_are_asked_for_move() {
    for ctx in [session(), session_without_rule(1)] {
        let sim = Sim::new();
        let table = device_table(&sim, &[vec![rows(0, 160), rows(160, 160)]]);
        register(&ctx, "t", table);
        for (sql, rows, values) in [
            ("SELECT a FROM t", 320, 320),
            ("SELECT b, a FROM t", 320, 640),
            ("SELECT a FROM t LIMIT 16", 16, 16),
            ("SELECT a FROM t LIMIT 168", 168, 168),
            ("SELECT count(*) FROM t", 1, 0),
        ] {
            let before = sim.stats();
            let found = row_count(&query(&ctx, sql).await.unwrap());
            let [up, down, ..] = moved(&sim.stats().since(&before));
            assert_eq!((found, up, down), (rows, 0, values * 8), "{sql}");
        }
    }
}

/// What comes down has the batch size of the session, whatever is on the device.
#[tokio::test]
async fn what_comes_down_has_the_batch_size() {
    let sim = Sim::new();
    let ctx = over(device_table(&sim, &[vec![numbers(0, 100)]]));
    let found = query(&ctx, "SELECT a FROM t").await.unwrap();
    assert_eq!(sizes(&found), [32, 32, 32, 4]);
    assert_eq!(numbers_of(&found), multiples(100, 1));
}

/// A slow node on the host is no reason to look at the upload.
#[tokio::test]
async fn an_upload_does_not_count_its_childs_time() {
    let sim = Sim::new();
    let slept = Arc::new(AtomicU64::new(0));
    let sleeps = Arc::clone(&slept);
    let (table, _) = host_stream(move |i| {
        (i < 10).then(|| {
            let start = Instant::now();
            std::thread::sleep(Duration::from_millis(50));
            sleeps.fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
            Ok(numbers(i as i64 * 16, 16))
        })
    });
    let plan = with_transitions(double(scan(table).await, &sim));
    let start = Instant::now();
    assert_eq!(numbers_from(&plan).await.len(), 160);
    // Everything happens on one thread, one after the other.
    let awake = start.elapsed() - Duration::from_nanos(slept.load(Relaxed));
    for node in ["HostToDeviceExec", "MapExec", "DeviceToHostExec"] {
        let time = metric(&plan, node, "elapsed_compute").unwrap();
        let time = Duration::from_nanos(time as u64);
        let counted = time > Duration::ZERO && time < awake;
        assert!(counted, "{node}: {time:?} of {awake:?}");
    }
}

/// Queries on one device, on threads of their own, each of which tells what it did itself, and so does each of its partitions.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn queries_and_partitions_at_once_do_not_count_each_other() {
    let sim = Sim::new();
    for _ in 0..10 {
        let mut tasks = Vec::new();
        for n in 1..=4_u64 {
            let up = ruled(&format!("Map A < Numbers {n}"), &[&sim]);
            let down = ruled("Map A < Numbers A 1 2 3", &[&sim]);
            tasks.push(tokio::spawn(async move {
                run(&up).await.unwrap();
                run(&down).await.unwrap();
                (up, down, n)
            }));
        }
        for task in tasks {
            let (up, down, n) = task.await.unwrap();
            let bytes = n * 128;
            assert_eq!(counted(&up, "HostToDeviceExec"), [bytes, 0, 0, n, 0]);
            assert_eq!(counted(&up, "MapExec"), [0; 5]);
            assert_eq!(counted(&up, "DeviceToHostExec"), [0, bytes, 0, n, 0]);
            assert_eq!(counted(&down, "DeviceToHostExec"), [0, 768, 0, 6, 0]);
            let metrics = down.metrics().unwrap();
            for partition in 0..3 {
                let bytes = metrics.sum(|metric| {
                    metric.partition() == Some(partition)
                        && metric.value().name() == "bytes_to_host"
                });
                assert_eq!(bytes.unwrap().as_usize(), (partition + 1) * 128);
            }
        }
    }
}

/// What came of a stream, and how often there was nothing yet. The devices run between polls and only then: a wait within one would
/// run their work.
struct Driven<'a, T> {
    sims: &'a [&'a Sim],
    items: Vec<T>,
    pending: usize,
}

impl<'a, T> Driven<'a, T> {
    fn new(sims: &'a [&'a Sim]) -> Self {
        Self {
            sims,
            items: Vec::new(),
            pending: 0,
        }
    }

    /// How much waits on each device, and how often the host has waited.
    fn state(&self) -> Vec<(usize, u64)> {
        let state = |sim: &&Sim| (sim.sim.report().pending_operations, sim.stats().host_waits);
        self.sims.iter().map(state).collect()
    }

    fn assert_nothing_ran(&self, before: &[(usize, u64)]) {
        for (before, now) in before.iter().zip(self.state()) {
            assert!(now.0 >= before.0, "work ran within a poll");
            assert_eq!(now.1, before.1, "host waits within a poll");
        }
    }

    /// What a poll returned; whether the stream goes on.
    fn take(&mut self, polled: Poll<Option<T>>) -> bool {
        match polled {
            Poll::Ready(Some(item)) => self.items.push(item),
            Poll::Ready(None) => return false,
            Poll::Pending => {
                self.pending += 1;
                assert!(self.pending < 10_000, "it never goes on");
                self.sims.iter().for_each(|sim| sim.synchronize().unwrap());
            }
        }
        true
    }
}

/// A runtime with one thread for blocking work, and what holds that one up until it is dropped.
fn held_up(runtime: &Runtime) -> mpsc::Sender<()> {
    let (begin, begun) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    runtime.spawn_blocking(move || {
        begin.send(()).unwrap();
        released.recv().unwrap_err();
    });
    begun.recv().unwrap();
    release
}

fn one_blocking_thread() -> Runtime {
    let mut runtime = Builder::new_current_thread();
    runtime.max_blocking_threads(1).build().unwrap()
}

/// Runs a plan, poll by poll. What a poll leaves to a blocking thread is done before the next one.
fn drive(sims: &[&Sim], plan: &Plan, context: Arc<TaskContext>) -> (Vec<RecordBatch>, usize) {
    let drive = || {
        let runtime = one_blocking_thread();
        let mut stream = {
            let _within = runtime.enter();
            plan.execute(0, context).unwrap()
        };
        let mut driven = Driven::new(sims);
        loop {
            let held = held_up(&runtime);
            let before = driven.state();
            let polled = stream.poll_next_unpin(&mut Context::from_waker(Waker::noop()));
            driven.assert_nothing_ran(&before);
            drop(held);
            drop(held_up(&runtime));
            if !driven.take(polled) {
                break;
            }
        }
        let batches = driven.items.into_iter().map(Result::unwrap);
        (batches.collect(), driven.pending)
    };
    // On a thread of its own: within a task, DataFusion's streams yield from time to time.
    std::thread::scope(|scope| scope.spawn(drive).join().unwrap())
}

/// The same for a stream that tasks of this runtime make: neither their polls nor the stream's wait.
async fn drive_tasks<T>(
    sims: &[&Sim],
    mut stream: impl Stream<Item = T> + Unpin,
) -> (Vec<T>, usize) {
    let mut driven = Driven::new(sims);
    loop {
        let before = driven.state();
        // As far as the tasks get without the devices. Threads do some of the work, so that only
        // silence tells that nothing more comes.
        let polled = match timeout(Duration::from_millis(20), stream.next()).await {
            Ok(item) => Poll::Ready(item),
            Err(_) => Poll::Pending,
        };
        driven.assert_nothing_ran(&before);
        if !driven.take(polled) {
            return (driven.items, driven.pending);
        }
    }
}

/// Text, whose length hides on the device, whole and cut; operators; other devices; and joins of small batches, for which a blocking thread waits.
#[tokio::test]
async fn no_poll_waits() {
    let (a, b) = (Sim::deferred(), Sim::deferred());
    let driven = |plan: &Plan| {
        let (found, pending) = drive(&[&a, &b], plan, session().task_ctx());
        assert!(pending > 0, "{plan:?}: nothing was ever waited for");
        found
    };
    let ctx = over(device_table(&a, &[vec![rows(0, 50), rows(50, 50)]]));
    for (sql, rows) in [
        ("SELECT * FROM t", 100),
        ("SELECT s FROM t LIMIT 20", 20),
        ("SELECT a FROM t WHERE b = 3", 10),
        ("SELECT s, count(*) FROM t GROUP BY s ORDER BY s", 86),
    ] {
        let found = driven(&plan(&ctx, sql).await);
        assert_eq!(row_count(&found), rows, "{sql}");
    }
    let parts = (0..12).map(|i| rows(i * 10, 10)).collect();
    let there = device_leaf(device_table(&a, &[parts])).await;
    let own = [("There", &there)];
    for (line, rows) in [
        ("Map A < Map A < Numbers 6", 96),
        ("Map A < Map A < There", 120),
        ("Map A < Map B < There", 120),
    ] {
        let plan = with_transitions(planned(line, &[&a, &b], &own));
        assert_eq!(numbers_of(&driven(&plan)), multiples(rows, 4), "{line}");
    }
    let plan = with_transitions(joining(there.clone(), &a, 40));
    assert_eq!(lines(&driven(&plan)), lines(&[rows(0, 120)]));
    let of_join = |name| metric(&plan, "DeviceCoalesceBatchesExec", name);
    assert_eq!(of_join("output_batches"), Some(3));
    assert!(of_join("host_waits") >= Some(3), "it did wait");
    drop((plan, there, ctx));
    b.synchronize().unwrap();
    a.assert_done();
    b.assert_done();
}

/// A consumer takes all that there is, while the device does nothing: the task waits for the oldest upload or move, no thread does. As well of
/// results on another device.
#[tokio::test]
async fn no_poll_waits_for_more_copies_than_may_be_under_way() {
    let (a, b) = (Sim::deferred(), Sim::deferred());
    let cpu = device_leaf(device_table(&Devices::cpu(), &[batches(0, 200)])).await;
    for (line, to, n) in [
        ("Numbers 200", &a, 200),
        ("Move A < Cpu", &a, 200),
        ("Numbers A 3 2", &b, 5),
    ] {
        let plan = planned(line, &[&a, &b], &[("Cpu", &cpu)]);
        let stream = started_on(&plan, to);
        let (found, pending) = drive_tasks(&[&a, &b], stream).await;
        assert_eq!(found.len(), n, "{line}");
        assert!(found.iter().all(Result::is_ok), "{line}");
        // Of many, 66 are under way, and then all of those are done.
        let least = if n == 200 { 3 } else { 1 };
        assert!((least..200).contains(&pending), "{line}: {pending}");
    }
    drop(cpu);
    // What b has not copied yet is host memory of a's.
    b.assert_done();
    a.assert_done();
}

/// A copy on a blocking thread goes on if its reader has gone, and what it has allocated stays reserved.
#[tokio::test]
async fn a_copy_that_nobody_waits_for_stays_reserved() {
    let [a, b] = peers();
    let moves = planned("Down < Move B < Numbers A 1", &[&a, &b], &[]);
    let dropped = || {
        let runtime = one_blocking_thread();
        let _within = runtime.enter();
        let (context, pool) = recorded();
        let mut stream = moves.execute(0, context).unwrap();
        let held = held_up(&runtime);
        let polled = stream.poll_next_unpin(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        drop(stream);
        assert_eq!(pool.reserved(), 128);
        drop(held);
        eventually("the copy is done", || pool.reserved() == 0);
    };
    std::thread::scope(|scope| scope.spawn(dropped).join().unwrap());
    drop(moves);
    b.assert_done();
    a.assert_done();
}

/// The columns of a batch come down by themselves, and at once.
#[tokio::test]
async fn columns_come_down_at_once() {
    let sim = Sim::deferred();
    let waits = [1, 5].map(|columns| {
        let text = (0..4000).map(|i| format!("{i:020}"));
        let column: ArrayRef = Arc::new(StringArray::from_iter_values(text));
        let batch = (0..columns).map(|i| (format!("c{i}"), column.clone()));
        let batch = RecordBatch::try_from_iter(batch).unwrap();
        let table = device_table(&sim, &[vec![batch.clone()]]);
        // The ends of a slice's text are read first.
        let limited = table.scan_on_device(None, Some(3000)).unwrap();
        let plan = down(Arc::new(DeviceExec::from(limited)));
        let (found, pending) = drive(&[&sim], &plan, SessionContext::new().task_ctx());
        assert_eq!(found, [batch.slice(0, 3000)]);
        pending
    });
    assert_eq!(waits[0], waits[1]);
}
