//! Repartitioning on the device: each batch goes to the partition that asks first.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use arrow_device::{Device, Error};
use arrow_device_datafusion::{
    DeviceExec, DeviceResolver, DeviceTable, SendableDeviceStream, execute_on_device, to_datafusion,
};
use datafusion::common::DataFusionError;
use datafusion::execution::TaskContext;
use futures::channel::mpsc::UnboundedSender;
use futures::task::{ArcWake, waker};
use futures::{FutureExt, StreamExt, TryStreamExt};

use crate::kit::*;
use crate::memory::limited;
use crate::nodes::*;

/// A repartitioning on the device of a table.
pub(crate) async fn spread(table: Arc<DeviceTable>, sim: &Sim, outputs: usize) -> Plan {
    form(round_robin(device_leaf(table).await, outputs), sim)
}

/// `partitions` partitions of `n` batches of 16 rows: their numbers begin at a million each.
pub(crate) fn table(device: &Device, partitions: i64, n: i64) -> Arc<DeviceTable> {
    let partitions = (0..partitions).map(|p| batches(p * 1_000_000, n));
    device_table(device, &partitions.collect::<Vec<_>>())
}

pub(crate) fn start(
    plan: &Plan,
    output: usize,
    context: &Arc<TaskContext>,
) -> SendableDeviceStream {
    let node = DeviceExec::of(plan).unwrap();
    node.execute_device(output, context.clone()).unwrap()
}

/// So many outputs of a new run.
fn started(plan: &Plan, outputs: usize) -> Vec<SendableDeviceStream> {
    let context = session().task_ctx();
    (0..outputs).map(|i| start(plan, i, &context)).collect()
}

pub(crate) async fn rest(stream: SendableDeviceStream) -> Vec<i64> {
    let all = tokio::time::timeout(LONG, stream.try_collect::<Vec<_>>());
    numbers_on(&all.await.expect("it goes on").unwrap())
}

/// All numbers of `table`.
pub(crate) fn all(partitions: i64, batches: i64) -> Vec<i64> {
    let partition = |p: i64| p * 1_000_000..p * 1_000_000 + batches * 16;
    (0..partitions).flat_map(partition).collect()
}

/// The numbers of each partition of a table are in their order.
#[track_caller]
fn assert_ordered(numbers: &[i64]) {
    for p in 0..8 {
        let own = numbers.iter().filter(|n| **n / 1_000_000 == p);
        assert!(own.is_sorted(), "partition {p} of {numbers:?}");
    }
}

/// No other output has to be read, or even started, for one to go on.
#[tokio::test]
async fn one_output_that_is_read_gets_all_rows() {
    let sim = Sim::new();
    let context = session().task_ctx();
    let plan = spread(table(&sim, 2, 100), &sim, 3).await;
    let idle = start(&plan, 0, &context);
    let numbers = rest(start(&plan, 2, &context)).await;
    assert_ordered(&numbers);
    assert_eq!(sorted(numbers), all(2, 100));
    assert_eq!(rest(idle).await, [0; 0]);
    assert_eq!(rest(start(&plan, 1, &context)).await, [0; 0]);
    drop(plan);
    sim.assert_done();
}

/// In tasks on several threads, each row comes once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn outputs_on_several_threads_get_each_row_once() {
    for sim in [Sim::new(), Sim::deferred()] {
        for (inputs, outputs) in [(1, 4), (3, 4), (4, 2)] {
            let plan = spread(table(&sim, inputs, 100), &sim, outputs).await;
            let tasks = started(&plan, outputs).into_iter().map(rest);
            let tasks: Vec<_> = tasks.map(tokio::spawn).collect();
            let mut numbers = Vec::new();
            for task in tasks {
                let own = task.await.unwrap();
                assert_ordered(&own);
                numbers.extend(own);
            }
            assert_eq!(sorted(numbers), all(inputs, 100));
        }
        sim.assert_done();
    }
}

/// Inputs that are slow, and on threads of their own: no wake-up gets lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn inputs_that_come_one_by_one_reach_whoever_waits() {
    let sim = Sim::new();
    let (table, _) = readers_table(&sim, 3, |p, i| {
        std::thread::yield_now();
        let first = p as i64 * 1_000_000 + i as i64 * 16;
        (i < 200).then(|| Ok(numbers(first, 16)))
    });
    let plan = spread(table, &sim, 4).await;
    let stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    assert_eq!(sorted(rest(stream).await), all(3, 200));
    sim.assert_done();
}

/// A batch that an output has not returned is not the output's.
#[tokio::test]
async fn an_output_that_is_dropped_takes_no_rows_with_it() {
    let sim = Sim::new();
    let plan = spread(table(&sim, 2, 20), &sim, 2).await;
    let mut streams = started(&plan, 2);
    let (second, mut first) = (streams.pop().unwrap(), streams.pop().unwrap());
    let batches: Vec<_> = first.by_ref().take(5).try_collect().await.unwrap();
    drop(first);
    let numbers = [numbers_on(&batches), rest(second).await].concat();
    assert_eq!(sorted(numbers), all(2, 20));
}

#[tokio::test]
async fn one_input_keeps_its_order() {
    let sim = Sim::new();
    let plan = spread(table(&sim, 1, 30), &sim, 3).await;
    assert_eq!(plan.maintains_input_order(), [true]);
    let mut streams = started(&plan, 3);
    let mut batches = Vec::new();
    for i in 0..30 {
        batches.push(streams[i % 3].next().await.unwrap().unwrap());
    }
    assert_eq!(numbers_on(&batches), all(1, 30));
    for mut stream in streams {
        assert!(stream.next().await.is_none());
    }
}

fn send(to: &UnboundedSender<Sent>, batch: Sent) {
    to.unbounded_send(batch).unwrap();
}

/// Counts how often it is woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl ArcWake for Woken {
    fn wake_by_ref(own: &Arc<Self>) {
        own.0.fetch_add(1, SeqCst);
    }
}

/// Polls for what is not there yet.
fn waits(stream: &mut SendableDeviceStream) -> Arc<Woken> {
    let woken = Arc::new(Woken::default());
    let next = stream.poll_next_unpin(&mut Context::from_waker(&waker(woken.clone())));
    assert!(matches!(next, Poll::Pending));
    woken
}

#[tokio::test]
async fn an_input_wakes_all_outputs_that_wait() {
    let sim = Sim::new();
    let (table, senders) = sent(&sim, 2);
    let plan = spread(table, &sim, 3).await;
    let mut streams = started(&plan, 3);
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    for sender in &senders {
        let woken: Vec<_> = streams.iter_mut().map(waits).collect();
        assert!(woken.iter().all(|w| w.0.load(SeqCst) == 0));
        send(sender, Ok(batch.clone()));
        assert!(woken.iter().all(|w| w.0.load(SeqCst) > 0));
        // The last that asks may take it: whose input it is makes no difference.
        assert!(streams[2].next().now_or_never().flatten().is_some());
        assert!(streams[0].next().now_or_never().is_none());
    }
    // The end of the inputs is everybody's.
    let ends = streams.into_iter().map(rest).map(tokio::spawn);
    let ends: Vec<_> = ends.collect();
    tokio::task::yield_now().await;
    drop(senders);
    for end in ends {
        assert_eq!(end.await.unwrap(), [0; 0]);
    }
}

/// One output polls an input while another passes by: that one is woken for what there may be more, or for the end.
#[tokio::test]
async fn an_output_that_passes_by_an_input_is_woken() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    for item in [Some(batch), None] {
        let ((entered, enter), (go, goes)) = (channel::<()>(), channel::<()>());
        let of = Mutex::new(Some((item, entered, goes)));
        let table = streams_table(&sim, 1, move |_| {
            let (item, entered, goes) = of.lock().unwrap().take().expect("one scan");
            futures::stream::poll_fn(move |_| {
                entered.send(()).unwrap();
                goes.recv().unwrap();
                Poll::Ready(item.clone().map(Ok))
            })
        });
        let plan = spread(table, &sim, 2).await;
        let mut streams = started(&plan, 2);
        let (mut passes, mut polls) = (streams.pop().unwrap(), streams.pop().unwrap());
        let thread = std::thread::spawn(move || polls.next().now_or_never().is_some());
        enter.recv().unwrap();
        let woken = waits(&mut passes);
        assert_eq!(woken.0.load(SeqCst), 0);
        go.send(()).unwrap();
        assert!(thread.join().unwrap());
        assert!(woken.0.load(SeqCst) > 0);
    }
}

#[tokio::test]
async fn an_error_goes_to_every_output() {
    let sim = Sim::new();
    let (table, senders) = sent(&sim, 2);
    let plan = spread(table, &sim, 3).await;
    let context = session().task_ctx();
    let mut streams: Vec<_> = (0..2).map(|i| start(&plan, i, &context)).collect();
    send(&senders[1], Ok(sim.upload(&numbers(0, 16)).unwrap()));
    assert!(streams[0].next().await.unwrap().is_ok());
    let error = Error::InvalidArgument("it is gone".into());
    send(&senders[1], Err(error));
    // One that is started after it, too.
    streams.push(start(&plan, 2, &context));
    for mut stream in streams {
        fails(stream.next().await.unwrap(), &["it is gone"]);
        assert!(stream.next().await.is_none());
    }
    // The other input was dropped.
    assert!(senders[0].is_closed() && senders[1].is_closed());
}

/// A batch costs two polls of its input, and none of the others, however many inputs and outputs wait.
#[tokio::test]
async fn an_input_is_polled_when_it_has_something() {
    const N: usize = 8;
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..N).map(|_| futures::channel::mpsc::unbounded()).unzip();
    let receivers = Mutex::new(receivers.into_iter().map(Some).collect::<Vec<_>>());
    let polls = Arc::new(AtomicUsize::new(0));
    let counted = polls.clone();
    let table = streams_table(&sim, N, move |p| {
        let receiver = receivers.lock().unwrap()[p].take();
        let (mut receiver, counted) = (receiver.expect("one scan"), counted.clone());
        futures::stream::poll_fn(move |cx| {
            counted.fetch_add(1, SeqCst);
            receiver.poll_next_unpin(cx)
        })
    });
    let plan = spread(table, &sim, N).await;
    let mut stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    assert!(stream.next().now_or_never().is_none());
    let settled = async || {
        for _ in 0..8 * N {
            tokio::task::yield_now().await;
        }
        polls.swap(0, SeqCst)
    };
    assert_eq!(settled().await, N);
    for i in 0..3 * N {
        send(&senders[i % N], Ok(batch.clone()));
        assert!(stream.next().await.unwrap().is_ok());
        assert_eq!(settled().await, 2);
    }
}

/// Both outputs' errors are there at the same time, and are DataFusion's own.
#[tokio::test]
async fn errors_of_datafusion_reach_every_output_as_they_are() {
    let sim = Sim::new();
    let refused = up(scan(host_table(&[batches(0, 1)])).await, &sim);
    let (table, _) = host_stream(|_| Some(Err(DataFusionError::Execution("it is gone".into()))));
    let failed = up(scan(table).await, &sim);
    let unlimited = session().task_ctx();
    for (child, context, text) in [
        (
            refused,
            limited(100).0,
            "HostToDeviceExec, partition 0: 128 bytes",
        ),
        (failed, unlimited, "it is gone"),
    ] {
        let plan = form(round_robin(child, 2), &sim);
        let streams: Vec<_> = (0..2).map(|i| start(&plan, i, &context)).collect();
        for mut stream in streams {
            let next = tokio::time::timeout(LONG, stream.next()).await.unwrap();
            let error = fails(next.unwrap().map_err(to_datafusion), &[text]);
            let own = match (&error, error.find_root()) {
                (DataFusionError::ResourcesExhausted(_), _) => text.contains("bytes"),
                (DataFusionError::ArrowError(..), _) => false,
                (_, DataFusionError::Execution(root)) => root == text,
                _ => false,
            };
            assert!(own, "{error:?}");
        }
    }
}

/// What an input's panic leaves is no end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_an_input_is_an_error_of_the_other_outputs() {
    let sim = Sim::new();
    let panics = |_| futures::stream::poll_fn(|_| -> Poll<Option<Sent>> { panic!("as planned") });
    let plan = spread(streams_table(&sim, 1, panics), &sim, 2).await;
    let mut streams = started(&plan, 2);
    let (mut second, mut first) = (streams.pop().unwrap(), streams.pop().unwrap());
    let task = tokio::spawn(async move { first.next().await.is_some() });
    assert!(task.await.unwrap_err().is_panic());
    let error = second.next().await.unwrap().unwrap_err();
    let error = ours(&to_datafusion(error));
    assert!(matches!(error, Error::Panic { .. }), "{error}");
}

/// Inputs and outputs on the devices of their partitions: what moves is what another device's output takes.
#[tokio::test]
async fn outputs_on_several_devices() {
    let (a, b) = (Sim::new(), Sim::new());
    let context = offering([&a, &b]);
    let partitions: Vec<_> = (0..2).map(|p| batches(p * 1_000_000, 1)).collect();
    let child = double(scan(host_table(&partitions)).await, any_sim());
    let plan = form(round_robin(child, 2), any_sim());
    let mut found = Vec::new();
    for (p, sim) in [(0, &a), (1, &b)] {
        let batch = start(&plan, p, &context).next().await.unwrap().unwrap();
        assert_eq!(*batch.device(), sim.device);
        found.extend(numbers_on(&[batch]));
    }
    found.sort_unstable();
    found.dedup();
    assert_eq!(found.len(), 32);
    drop(plan);
    a.assert_done();
    b.assert_done();
}

/// The device of an input's partition is another question than that of the output's.
#[tokio::test]
async fn an_input_without_its_device_is_named() {
    let sim = Sim::new();
    let leaf = device_leaf(table(&sim, 2, 1)).await;
    let plan = form(round_robin(leaf, 1), any_sim());
    let device = sim.device.clone();
    let context = resolving(DeviceResolver::new(move |_, partition| match partition {
        0 => Ok(device.clone()),
        _ => Err(Error::InvalidArgument("out of devices".into())),
    }));
    let started = DeviceExec::of(&plan).unwrap().execute_device(0, context);
    let expected = "input of DeviceRepartitionExec, partition 1, needs a device";
    fails(started, &[expected, "out of devices"]);
}
