//! Repartitioning on the device: each batch goes to the partition that asks first.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use arrow_device::async_stream::DeviceRecordBatchStreamAdapter as Adapter;
use arrow_device::{Device, DeviceRecordBatch, Error};
use arrow_device_datafusion::{
    DeviceExec, DeviceResolver, DeviceSpec, DeviceTable, ScanRequest, SendableDeviceStream,
    execute_on_device, to_datafusion,
};
use datafusion::common::DataFusionError;
use datafusion::execution::TaskContext;
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::channel::mpsc::{UnboundedSender, unbounded};
use futures::task::{ArcWake, waker};
use futures::{FutureExt, StreamExt, TryStreamExt};

use crate::kit::*;
use crate::merged::{Sent, sent};
use crate::ops::{device_leaf, form, round_robin};
use crate::plans::up;

/// A repartitioning on the device of a table.
pub(crate) async fn spread(table: Arc<DeviceTable>, sim: &Sim, outputs: usize) -> Plan {
    form(round_robin(device_leaf(table).await, outputs), sim)
}

/// `partitions` partitions of `batches` batches of 16 rows: their numbers begin at a million each.
pub(crate) fn table(device: &Device, partitions: i64, batches: i64) -> Arc<DeviceTable> {
    let partition = |p: i64| (0..batches).map(move |i| numbers(p * 1_000_000 + i * 16, 16));
    let partitions: Vec<Vec<_>> = (0..partitions).map(|p| partition(p).collect()).collect();
    device_table(device, &partitions)
}

pub(crate) fn start(
    plan: &Plan,
    output: usize,
    context: &Arc<TaskContext>,
) -> SendableDeviceStream {
    let node = DeviceExec::of(plan).unwrap();
    node.execute_device(output, context.clone()).unwrap()
}

pub(crate) fn numbers_on(batches: &[DeviceRecordBatch]) -> Vec<i64> {
    let down: Vec<_> = batches.iter().map(|b| b.to_host().unwrap()).collect();
    numbers_of(&down)
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
            let plan = spread(table(&sim, inputs, 200), &sim, outputs).await;
            let context = session().task_ctx();
            let start = |output| tokio::spawn(rest(start(&plan, output, &context)));
            let tasks: Vec<_> = (0..outputs).map(start).collect();
            let mut numbers = Vec::new();
            for task in tasks {
                let own = task.await.unwrap();
                assert_ordered(&own);
                numbers.extend(own);
            }
            assert_eq!(sorted(numbers), all(inputs, 200));
        }
        sim.assert_done();
    }
}

/// Inputs that are slow, and on threads of their own: no wake-up gets lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn inputs_that_come_one_by_one_reach_whoever_waits() {
    let sim = Sim::new();
    let device = sim.device.clone();
    let open = move |request: ScanRequest| {
        let p = request.partition;
        let next = move |i: usize| {
            std::thread::yield_now();
            (i < 200).then(|| Ok(numbers(p as i64 * 1_000_000 + i as i64 * 16, 16)))
        };
        Ok(Reader::new(&device, numbers(0, 1).schema(), next))
    };
    let schema = numbers(0, 1).schema();
    let table = DeviceTable::from_readers(schema, sim.device.clone(), 3, open);
    let plan = spread(Arc::new(table), &sim, 4).await;
    let stream = execute_on_device(plan, session().task_ctx(), &sim).unwrap();
    let numbers = rest(stream).await;
    assert_eq!(sorted(numbers), all(3, 200));
    sim.assert_done();
}

/// A batch that an output has not returned is not the output's.
#[tokio::test]
async fn an_output_that_is_dropped_takes_no_rows_with_it() {
    let sim = Sim::new();
    let context = session().task_ctx();
    let plan = spread(table(&sim, 2, 20), &sim, 2).await;
    let (mut first, second) = (start(&plan, 0, &context), start(&plan, 1, &context));
    let mut numbers = Vec::new();
    for _ in 0..5 {
        let batch = first.next().await.unwrap().unwrap();
        numbers.extend(numbers_on(&[batch]));
    }
    drop(first);
    numbers.extend(rest(second).await);
    assert_eq!(sorted(numbers), all(2, 20));
}

#[tokio::test]
async fn one_input_keeps_its_order() {
    let sim = Sim::new();
    let context = session().task_ctx();
    let plan = spread(table(&sim, 1, 30), &sim, 3).await;
    assert_eq!(plan.maintains_input_order(), [true]);
    let mut streams: Vec<_> = (0..3).map(|i| start(&plan, i, &context)).collect();
    let mut numbers = Vec::new();
    for i in 0..30 {
        let batch = streams[i % 3].next().await.unwrap().unwrap();
        numbers.extend(numbers_on(&[batch]));
    }
    assert_eq!(numbers, all(1, 30));
    for mut stream in streams {
        assert!(stream.next().await.is_none());
    }
}

fn send(to: &UnboundedSender<Sent>, batch: Sent) {
    to.unbounded_send(batch).unwrap();
}

/// Counts how often it is woken.
struct Woken(AtomicUsize);

impl ArcWake for Woken {
    fn wake_by_ref(own: &Arc<Self>) {
        own.0.fetch_add(1, SeqCst);
    }
}

#[tokio::test]
async fn an_input_wakes_all_outputs_that_wait() {
    let sim = Sim::new();
    let (table, senders) = sent(&sim, 2);
    let plan = spread(table, &sim, 3).await;
    let context = session().task_ctx();
    let mut streams: Vec<_> = (0..3).map(|i| start(&plan, i, &context)).collect();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    for sender in &senders {
        let woken: Vec<_> = (0..3)
            .map(|_| Arc::new(Woken(AtomicUsize::new(0))))
            .collect();
        for (stream, woken) in streams.iter_mut().zip(&woken) {
            let waker = waker(woken.clone());
            let next = stream.poll_next_unpin(&mut Context::from_waker(&waker));
            assert!(matches!(next, Poll::Pending));
        }
        assert!(woken.iter().all(|w| w.0.load(SeqCst) == 0));
        send(sender, Ok(batch.clone()));
        assert!(woken.iter().all(|w| w.0.load(SeqCst) > 0));
        // The last that asks may take it: whose input it is makes no difference.
        assert!(streams[2].next().now_or_never().flatten().is_some());
        assert!(streams[0].next().now_or_never().is_none());
    }
    // The end of the inputs is everybody's.
    let mut waits = streams
        .into_iter()
        .map(|mut s| async move { s.next().await.is_none() });
    let ends = futures::future::join3(
        waits.next().unwrap(),
        waits.next().unwrap(),
        waits.next().unwrap(),
    );
    let ends = tokio::spawn(ends);
    tokio::task::yield_now().await;
    drop(senders);
    assert_eq!(ends.await.unwrap(), (true, true, true));
}

/// One output polls an input while another passes by: that one is woken for what there may be more, or for the end.
#[tokio::test]
async fn an_output_that_passes_by_an_input_is_woken() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    for item in [Some(batch), None] {
        let ((entered, enter), (go, goes)) = (channel::<()>(), channel::<()>());
        let schema = numbers(0, 1).schema();
        let of = (
            schema.clone(),
            sim.id().device_type,
            Mutex::new(Some((item, entered, goes))),
        );
        let open = move |_| {
            let (item, entered, goes) = of.2.lock().unwrap().take().expect("one scan");
            let next = move |_: &mut Context<'_>| {
                entered.send(()).unwrap();
                goes.recv().unwrap();
                Poll::Ready(item.clone().map(Ok))
            };
            let stream = futures::stream::poll_fn(next);
            std::future::ready(Ok(Adapter::new(of.0.clone(), of.1, stream)))
        };
        let table = DeviceTable::from_streams(schema, sim.device.clone(), 1, open);
        let plan = spread(Arc::new(table), &sim, 2).await;
        let context = session().task_ctx();
        let (mut polls, mut passes) = (start(&plan, 0, &context), start(&plan, 1, &context));
        let thread = std::thread::spawn(move || polls.next().now_or_never().is_some());
        enter.recv().unwrap();
        let woken = Arc::new(Woken(AtomicUsize::new(0)));
        let next = passes.poll_next_unpin(&mut Context::from_waker(&waker(woken.clone())));
        assert!(matches!(next, Poll::Pending));
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
    send(
        &senders[1],
        Err(Error::InvalidArgument("it is gone".into())),
    );
    // One that is started after it, too.
    streams.push(start(&plan, 2, &context));
    for mut stream in streams {
        let error = stream.next().await.unwrap().unwrap_err();
        assert!(error.to_string().contains("it is gone"), "{error}");
        assert!(stream.next().await.is_none());
    }
    // The other input was dropped.
    assert!(senders[0].is_closed() && senders[1].is_closed());
}

#[tokio::test]
async fn without_outputs_there_are_no_inputs() {
    let sim = Sim::new();
    let (table, senders) = sent(&sim, 2);
    let plan = spread(table, &sim, 2).await;
    let context = session().task_ctx();
    let (first, second) = (start(&plan, 0, &context), start(&plan, 1, &context));
    drop(first);
    assert!(!senders[0].is_closed());
    drop(second);
    // The plan is still there.
    assert!(senders[0].is_closed() && senders[1].is_closed());
    assert_eq!(plan.name(), "DeviceRepartitionExec");
}

/// An output that is at another input is not woken for batches of this one.
#[tokio::test]
async fn a_batch_wakes_no_output_that_does_not_wait_for_its_input() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let ((entered, enter), (go, goes)) = (channel::<()>(), channel::<()>());
    let (schema, device_type) = (batch.schema(), sim.id().device_type);
    let (of, slow) = (schema.clone(), Mutex::new(Some((entered, goes))));
    let open = move |request: ScanRequest| {
        let batch = batch.clone();
        let slow = (request.partition == 1).then(|| slow.lock().unwrap().take().expect("one scan"));
        let next = move |_: &mut Context<'_>| {
            if let Some((entered, goes)) = &slow {
                entered.send(()).unwrap();
                goes.recv().unwrap();
            }
            Poll::Ready(Some(Ok(batch.clone())))
        };
        let stream = futures::stream::poll_fn(next);
        std::future::ready(Ok(Adapter::new(of.clone(), device_type, stream)))
    };
    let table = DeviceTable::from_streams(schema, sim.device.clone(), 2, open);
    let plan = spread(Arc::new(table), &sim, 2).await;
    let context = session().task_ctx();
    let (mut reads, mut busy) = (start(&plan, 0, &context), start(&plan, 1, &context));
    let woken = Arc::new(Woken(AtomicUsize::new(0)));
    let waker = waker(woken.clone());
    let thread = std::thread::spawn(move || {
        let next = busy.poll_next_unpin(&mut Context::from_waker(&waker));
        matches!(next, Poll::Ready(Some(Ok(_))))
    });
    enter.recv().unwrap();
    for _ in 0..10 {
        assert!(reads.next().now_or_never().flatten().unwrap().is_ok());
    }
    assert_eq!(woken.0.load(SeqCst), 0);
    go.send(()).unwrap();
    assert!(thread.join().unwrap());
}

/// A batch costs two polls of its input, and none of the others, however many inputs and outputs wait.
#[tokio::test]
async fn an_input_is_polled_when_it_has_something() {
    const N: usize = 8;
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..N).map(|_| unbounded::<Sent>()).unzip();
    let receivers = Mutex::new(receivers.into_iter().map(Some).collect::<Vec<_>>());
    let (schema, device_type) = (batch.schema(), sim.id().device_type);
    let (of, polls) = (schema.clone(), Arc::new(AtomicUsize::new(0)));
    let counted = polls.clone();
    let open = move |request: ScanRequest| {
        let receiver = receivers.lock().unwrap()[request.partition].take();
        let (mut receiver, counted) = (receiver.expect("one scan"), counted.clone());
        let next = move |cx: &mut Context<'_>| {
            counted.fetch_add(1, SeqCst);
            receiver.poll_next_unpin(cx)
        };
        let stream = futures::stream::poll_fn(next);
        std::future::ready(Ok(Adapter::new(of.clone(), device_type, stream)))
    };
    let table = DeviceTable::from_streams(schema, sim.device.clone(), N, open);
    let plan = spread(Arc::new(table), &sim, N).await;
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

/// The errors of both outputs, which are there at the same time.
async fn errors_of_both(child: Plan, sim: &Sim, context: &Arc<TaskContext>) -> Vec<String> {
    let plan = form(round_robin(child, 2), sim);
    let mut streams: Vec<_> = (0..2).map(|i| start(&plan, i, context)).collect();
    let mut errors = Vec::new();
    for stream in &mut streams {
        let next = tokio::time::timeout(LONG, stream.next()).await;
        errors.push(next.unwrap().unwrap().unwrap_err());
    }
    let errors = errors.into_iter().map(to_datafusion);
    errors
        .map(|e| {
            assert!(!matches!(e, DataFusionError::ArrowError(..)), "{e:?}");
            match (&e, e.find_root()) {
                (
                    DataFusionError::ResourcesExhausted(text),
                    DataFusionError::ResourcesExhausted(_),
                ) => format!("refused: {text}"),
                (_, DataFusionError::Execution(text)) => format!("execution: {text}"),
                _ => panic!("{e:?}"),
            }
        })
        .collect()
}

#[tokio::test]
async fn errors_of_datafusion_reach_every_output_as_they_are() {
    let sim = Sim::new();
    let runtime = RuntimeEnvBuilder::new().with_memory_limit(100, 1.0);
    let runtime = runtime.build_arc().unwrap();
    let limited = SessionContext::new_with_config_rt(SessionConfig::new(), runtime).task_ctx();
    let child = up(scan(host_table(&[vec![numbers(0, 16)]])).await, &sim);
    let errors = errors_of_both(child, &sim, &limited).await;
    assert_eq!(errors.len(), 2);
    for error in errors {
        let whose = "refused: HostToDeviceExec, partition 0: 128 bytes";
        assert!(error.starts_with(whose), "{error}");
    }
    let (table, _) = host_stream(|_| Some(Err(DataFusionError::Execution("it is gone".into()))));
    let child = up(scan(table).await, &sim);
    let errors = errors_of_both(child, &sim, &session().task_ctx()).await;
    assert_eq!(errors, ["execution: it is gone"; 2]);
}

/// What an input's panic leaves is no end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_an_input_is_an_error_of_the_other_outputs() {
    let sim = Sim::new();
    let schema = numbers(0, 1).schema();
    let of = schema.clone();
    let open = move |request: ScanRequest| {
        let (schema, device_type) = (of.clone(), request.device.id().device_type);
        async move {
            let stream =
                futures::stream::poll_fn(|_| -> Poll<Option<Sent>> { panic!("as planned") });
            Ok(Adapter::new(schema, device_type, stream))
        }
    };
    let table = DeviceTable::from_streams(schema, sim.device.clone(), 1, open);
    let plan = spread(Arc::new(table), &sim, 2).await;
    let context = session().task_ctx();
    let mut streams: Vec<_> = (0..2).map(|i| start(&plan, i, &context)).collect();
    let mut second = streams.pop().unwrap();
    let mut first = streams.pop().unwrap();
    let task = tokio::spawn(async move { first.next().await.is_some() });
    assert!(task.await.unwrap_err().is_panic());
    let error = second.next().await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Panic { .. }), "{error}");
}

/// Inputs and outputs on the devices of their partitions: what moves is what another device's output takes.
#[tokio::test]
async fn outputs_on_several_devices() {
    use arrow_device_datafusion::{DeviceResolver, DeviceSpec};
    let (a, b) = (Sim::new(), Sim::new());
    let resolver = DeviceResolver::of([a.device.clone(), b.device.clone()]);
    let config = SessionConfig::new().with_extension(Arc::new(resolver));
    let context = SessionContext::new_with_config(config).task_ctx();
    let spec = DeviceSpec::any(a.id().device_type);
    let partitions: Vec<_> = (0..2).map(|p| vec![numbers(p * 1_000_000, 16)]).collect();
    let child = double(scan(host_table(&partitions)).await, spec.clone());
    let plan = form(round_robin(child, 2), spec);
    let mut found = HashSet::new();
    for (p, sim) in [(0, &a), (1, &b)] {
        let mut stream = start(&plan, p, &context);
        let batch = stream.next().await.unwrap().unwrap();
        assert_eq!(*batch.device(), sim.device);
        found.extend(numbers_on(&[batch]));
    }
    assert_eq!(found.len(), 32);
    drop(plan);
    a.assert_done();
    b.assert_done();
}

/// The device of an input's partition is another question than that of the output's.
#[tokio::test]
async fn an_input_without_its_device_is_named() {
    let sim = Sim::new();
    let leaf = device_leaf(device_table(
        &sim,
        &[vec![numbers(0, 16)], vec![numbers(16, 16)]],
    ))
    .await;
    let any = DeviceSpec::any(sim.id().device_type);
    let plan = form(round_robin(leaf, 1), any);
    let device = sim.device.clone();
    let resolver = DeviceResolver::new(move |_, partition| match partition {
        0 => Ok(device.clone()),
        _ => Err(Error::InvalidArgument("out of devices".into())),
    });
    let config = SessionConfig::new().with_extension(Arc::new(resolver));
    let context = SessionContext::new_with_config(config).task_ctx();
    let node = DeviceExec::of(&plan).unwrap();
    let error = node.execute_device(0, context).err().unwrap().to_string();
    let expected = "input of DeviceRepartitionExec, partition 1, needs a device";
    assert!(
        error.contains(expected) && error.contains("out of devices"),
        "{error}"
    );
}
