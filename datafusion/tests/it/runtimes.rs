//! The runtime that runs a plan's tasks: it ends before its result does, and its own threads read
//! the result.

use arrow_device_datafusion::BlockingReader;
use datafusion::arrow::datatypes::Int64Type;
use tokio::sync::oneshot;
use tokio::task::{LocalSet, spawn_blocking};

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
    /// None: of one partition.
    Scan,
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
            Self::Scan => scan(host_table(&[batches(0, 2 * BATCHES)])).await,
        }
    }

    async fn stream(self, device: &Device) -> SendableDeviceStream {
        started_on(&self.plan().await, device)
    }

    async fn exported(self, sim: &Sim) -> FFI_ArrowDeviceArrayStream {
        export(self.plan().await, session().task_ctx(), sim)
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
            _ => 2 * rows,
        }
    }

    #[track_caller]
    fn assert_all(self, batches: &Batches) {
        assert!(batches.iter().all(Result::is_ok), "{self:?}");
        assert_eq!(self.rows(batches), self.all(), "{self:?}");
    }
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
            let mut reader = reader(runtime.block_on(tasks.exported(&sim)), &sim);
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
        let stream = runtime.block_on(tasks.exported(&sim));
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
        match batches.last().unwrap() {
            Ok(_) => tasks.assert_all(&batches),
            Err(e) => {
                assert_cancelled(e);
                tasks.rows(&batches);
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
        let whole = runtime.block_on(tasks.stream(&sim));
        tasks.assert_all(&block_on(whole.collect()));
        let cut = runtime.block_on(tasks.stream(&sim));
        drop(runtime);
        let cut: Batches = block_on(cut.collect());
        assert_eq!(cut.len(), 1, "{tasks:?}");
        assert_cancelled(cut[0].as_ref().unwrap_err());
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

/// Who reads a result in its runtime.
#[derive(Clone, Copy, Debug)]
enum Who {
    /// A task, over the C stream.
    Task,
    /// What the runtime blocks on.
    Blocked,
    /// What a set of local tasks blocks on.
    LocalSet,
    /// A thread for blocking work.
    BlockingThread,
}

fn read_by(who: Who, workers: usize, tasks: Tasks, sim: &Arc<Sim>) -> Batches {
    let sim = sim.clone();
    let runtime = runtime(workers);
    timed(move || {
        let device = sim.device.clone();
        let reader = async move || BlockingReader::new(tasks.stream(&device).await);
        match who {
            Who::Task => runtime.block_on(async {
                let read =
                    async move { crate::kit::reader(tasks.exported(&sim).await, &sim).collect() };
                tokio::spawn(read).await.unwrap()
            }),
            Who::Blocked => runtime.block_on(async { reader().await.collect() }),
            Who::LocalSet => LocalSet::new().block_on(&runtime, async { reader().await.collect() }),
            Who::BlockingThread => runtime.block_on(async {
                let reader = reader().await;
                spawn_blocking(|| reader.collect()).await.unwrap()
            }),
        }
    })
}

/// More batches than a task may take without giving its thread back; of a scan the reader's polls alone spend the budget.
#[test]
fn a_result_is_read_by_a_thread_of_its_runtime() {
    for (who, workers) in [
        (Who::Blocked, 1),
        (Who::Task, 1),
        (Who::Task, 4),
        (Who::BlockingThread, 0),
        (Who::BlockingThread, 2),
    ] {
        for tasks in TASKS.into_iter().chain([Tasks::Scan]) {
            let sim = Arc::new(Sim::new());
            tasks.assert_all(&read_by(who, workers, tasks, &sim));
            sim.assert_done();
        }
    }
}

/// Nobody could run the plan's tasks: an error, neither a wait for ever nor a panic.
#[test]
fn on_the_thread_that_runs_the_tasks_it_is_an_error() {
    for (who, workers) in [(Who::Task, 0), (Who::Blocked, 0), (Who::LocalSet, 2)] {
        let sim = Arc::new(Sim::new());
        let mut batches = read_by(who, workers, Tasks::GroupBy, &sim);
        let error = fails(batches.pop().unwrap(), &["spawn_blocking"]);
        let own = matches!(error, Error::InvalidArgument(_));
        assert!(own || matches!(who, Who::Task), "{who:?}: {error:?}");
        assert_eq!(batches.len(), 0);
        sim.assert_done();
    }
}
