//! The runtime that runs a plan's tasks: it ends before its result does, and its own threads read
//! the result.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use arrow_device::{
    Device, DeviceRecordBatch, DeviceRecordBatchStreamReader, Error, FFI_ArrowDeviceArrayStream,
};
use arrow_device_datafusion::{BlockingReader, SendableDeviceStream, execute_on_device};
use datafusion::arrow::array::{AsArray, RecordBatch};
use datafusion::arrow::datatypes::Int64Type;
use futures::StreamExt;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

use crate::kit::*;
use crate::nodes::*;

type Batches = Vec<arrow_device::Result<DeviceRecordBatch>>;

/// The batches of each of two equal partitions.
const BATCHES: i64 = 200;

fn partitions() -> [Vec<RecordBatch>; 2] {
    [batches(0, BATCHES), batches(0, BATCHES)]
}

/// With this many workers; of one thread, with none.
fn runtime(workers: usize) -> Runtime {
    let mut builder = match workers {
        0 => Builder::new_current_thread(),
        _ => Builder::new_multi_thread(),
    };
    builder.worker_threads(workers.max(1)).build().unwrap()
}

/// Plans whose tasks give each other batches.
#[derive(Clone, Copy, Debug)]
enum Tasks {
    GroupBy,
    Repartition,
    Coalesce,
}

const TASKS: [Tasks; 3] = [Tasks::GroupBy, Tasks::Repartition, Tasks::Coalesce];

impl Tasks {
    async fn plan(self) -> Plan {
        let table = host_table(&partitions());
        match self {
            Self::GroupBy => {
                let ctx = session_with(4, 0);
                register(&ctx, "t", table);
                plan(&ctx, "SELECT a, count(*) AS n FROM t GROUP BY a").await
            }
            Self::Repartition => round_robin(scan(table).await, 3),
            Self::Coalesce => on_host(scan(table).await),
        }
    }

    /// Checks what came: rows that no half of the input makes. How many.
    #[track_caller]
    fn rows(self, batches: &Batches) -> usize {
        let mut rows = 0;
        for batch in batches.iter().flatten() {
            let batch = batch.to_host().unwrap();
            rows += batch.num_rows();
            if let Some(counts) = batch.column_by_name("n") {
                let counts = counts.as_primitive::<Int64Type>().values();
                assert!(counts.iter().all(|n| *n == 2), "{counts:?}");
            }
        }
        rows
    }

    fn all(self) -> usize {
        let rows = BATCHES as usize * 16;
        match self {
            Self::GroupBy => rows,
            Self::Repartition | Self::Coalesce => 2 * rows,
        }
    }
}

async fn stream(tasks: Tasks, device: &Device) -> SendableDeviceStream {
    execute_on_device(tasks.plan().await, session().task_ctx(), device).unwrap()
}

async fn exported(tasks: Tasks, sim: &Sim) -> FFI_ArrowDeviceArrayStream {
    export(tasks.plan().await, session().task_ctx(), sim)
}

#[track_caller]
fn assert_cancelled(error: &Error) {
    assert_eq!(error.errno(), 125, "{error}");
    says(error, &["runtime"]);
}

/// Only the error comes: the batches that are ready say nothing of those that are missing.
#[track_caller]
fn assert_ends_cancelled(reader: &mut DeviceRecordBatchStreamReader, tasks: Tasks) {
    let next = reader.next();
    let next = next.unwrap_or_else(|| panic!("{tasks:?}: the end, and no error"));
    assert_cancelled(&next.unwrap_err());
    assert!(reader.next().is_none());
}

/// Runs the runtime of a thread, until told to end it.
fn driven(runtime: Runtime) -> (oneshot::Sender<()>, thread::JoinHandle<()>) {
    let (end, ended) = oneshot::channel();
    let driver = thread::spawn(move || {
        let _ = runtime.block_on(ended);
        drop(runtime);
    });
    (end, driver)
}

/// Or in the middle of it.
#[test]
fn a_runtime_that_ends_before_the_result_is_read_is_an_error() {
    for (tasks, middle) in TASKS.into_iter().flat_map(|t| [(t, false), (t, true)]) {
        for workers in [0, 2] {
            let sim = Sim::new();
            let runtime = runtime(workers);
            let mut reader = reader(runtime.block_on(exported(tasks, &sim)), &sim);
            if middle {
                let (end, driver) = driven(runtime);
                reader.next().unwrap().unwrap();
                end.send(()).unwrap();
                driver.join().unwrap();
            } else {
                drop(runtime);
            }
            assert_ends_cancelled(&mut reader, tasks);
            drop(reader);
            sim.assert_done();
        }
    }
}

/// Whenever it ends: all rows, or an error, and no row that was made of half the input.
#[test]
fn a_runtime_that_ends_during_a_read_cuts_nothing_short() {
    let mut cancelled = 0;
    for i in 0..60 {
        let tasks = TASKS[i % 3];
        let sim = Sim::new();
        let runtime = runtime(i % 4);
        let stream = runtime.block_on(exported(tasks, &sim));
        let (end, driver) = driven(runtime);
        let (ready, started) = mpsc::channel();
        let device = sim.device.clone();
        let reading = thread::spawn(move || {
            ready.send(()).unwrap();
            reader(stream, &device).collect::<Batches>()
        });
        started.recv().unwrap();
        thread::sleep(Duration::from_micros(200) * i as u32);
        end.send(()).unwrap();
        driver.join().unwrap();
        let batches = reading.join().unwrap();
        let rows = tasks.rows(&batches);
        match batches.last().unwrap() {
            Ok(_) => assert_eq!(rows, tasks.all(), "{tasks:?}: cut short, and no error"),
            Err(e) => {
                assert_cancelled(e);
                cancelled += 1;
            }
        }
        drop(batches);
        sim.assert_done();
    }
    assert!(cancelled > 0, "never in the middle");
}

/// The tasks belong to the runtime, whoever polls the stream, which knows of the runtime's end.
#[test]
fn a_stream_may_be_polled_outside_its_runtime() {
    for tasks in TASKS {
        let sim = Sim::new();
        let runtime = runtime(2);
        let whole = runtime.block_on(stream(tasks, &sim));
        let whole: Batches = futures::executor::block_on(whole.collect());
        assert_eq!(tasks.rows(&whole), tasks.all(), "{tasks:?}");
        assert!(whole.iter().all(Result::is_ok));
        let cut = runtime.block_on(stream(tasks, &sim));
        drop(runtime);
        let cut: Batches = futures::executor::block_on(cut.collect());
        assert_eq!(cut.len(), 1, "{tasks:?}");
        assert_cancelled(cut[0].as_ref().unwrap_err());
        drop(whole);
        sim.assert_done();
    }
}

/// Runs a test on a thread that may hang, which is a failure.
#[track_caller]
fn timed<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(test()));
    receiver.recv_timeout(LONG).expect("it hangs, or panicked")
}

/// Reads a result in a task of its runtime, over the C stream, or else in what the runtime blocks on.
fn read_within(runtime: Runtime, spawned: bool, tasks: Tasks, sim: &Arc<Sim>) -> Batches {
    let sim = sim.clone();
    timed(move || match spawned {
        true => runtime.block_on(async {
            let read = async move { reader(exported(tasks, &sim).await, &sim).collect() };
            tokio::spawn(read).await.unwrap()
        }),
        false => runtime.block_on(async {
            let reader = BlockingReader::new(stream(tasks, &sim).await);
            reader.collect()
        }),
    })
}

/// More batches than a task may take without giving its thread back.
#[test]
fn a_result_is_read_by_a_task_on_a_worker() {
    for (workers, spawned) in [(1, false), (1, true), (4, true)] {
        for tasks in TASKS {
            let sim = Arc::new(Sim::new());
            let batches = read_within(runtime(workers), spawned, tasks, &sim);
            assert_eq!(tasks.rows(&batches), tasks.all(), "{tasks:?}, {workers}");
            assert!(batches.iter().all(Result::is_ok));
            drop(batches);
            sim.assert_done();
        }
    }
}

/// A plan of one partition, without tasks: the reader's polls alone spend the budget.
#[test]
fn a_scan_is_read_by_a_task_on_a_worker() {
    let sim = Sim::new();
    let batches = batches(0, 400);
    let on_device = device_table(&sim, std::slice::from_ref(&batches));
    for on_host in [true, false] {
        let (device, batches, table) = (sim.device.clone(), batches.clone(), on_device.clone());
        let rows = timed(move || {
            let read = async move {
                let plan = match on_host {
                    true => scan(host_table(&[batches])).await,
                    false => scan(table).await,
                };
                let stream = execute_on_device(plan, session().task_ctx(), &device).unwrap();
                let reader = BlockingReader::new(stream);
                reader.map(|batch| batch.unwrap().num_rows()).sum::<usize>()
            };
            runtime(2).block_on(async { tokio::spawn(read).await.unwrap() })
        });
        assert_eq!(rows, 6400);
    }
    drop(on_device);
    sim.assert_done();
}

/// Nobody could run the plan's tasks: an error, neither a wait for ever nor a panic.
#[test]
fn on_the_thread_of_a_current_thread_runtime_it_is_an_error() {
    for spawned in [true, false] {
        let sim = Arc::new(Sim::new());
        let mut batches = read_within(runtime(0), spawned, Tasks::GroupBy, &sim);
        let error = fails(batches.pop().unwrap(), &["spawn_blocking"]);
        assert!(spawned || matches!(error, Error::InvalidArgument(_)));
        assert_eq!(batches.len(), 0);
        sim.assert_done();
    }
    // Nor on that of a set of local tasks.
    let sim = Sim::new();
    let device = sim.device.clone();
    let error = timed(move || {
        let read = async move {
            let mut reader = BlockingReader::new(stream(Tasks::GroupBy, &device).await);
            reader.next().unwrap().unwrap_err()
        };
        LocalSet::new().block_on(&runtime(2), read)
    });
    says(&error, &["spawn_blocking"]);
    sim.assert_done();
}

#[test]
fn a_result_is_read_on_a_blocking_thread_of_any_runtime() {
    for workers in [0, 2] {
        let sim = Sim::new();
        let device = sim.device.clone();
        let batches = timed(move || {
            runtime(workers).block_on(async {
                let reader = BlockingReader::new(stream(Tasks::GroupBy, &device).await);
                let read = tokio::task::spawn_blocking(|| reader.collect::<Batches>());
                read.await.unwrap()
            })
        });
        assert_eq!(Tasks::GroupBy.rows(&batches), Tasks::GroupBy.all());
        drop(batches);
        sim.assert_done();
    }
}
