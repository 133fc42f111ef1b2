//! `INSERT INTO` a device table.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use arrow_device::{ArrowDeviceType, DeviceId, DeviceRecordBatch, Error};
use arrow_device_datafusion::{
    DeviceResolver, DeviceSink, DeviceSource, DeviceSpec, DeviceTable, InsertRequest, ScanRequest,
    SendableDeviceStream,
};
use async_trait::async_trait;
use datafusion::arrow::array::{Int64Array, RecordBatch, UInt64Array};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::common::DataFusionError;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::physical_plan::collect;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::StreamExt;

use crate::kit::*;
use crate::nodes::*;
use crate::operator::operator;
use crate::queries::result;

fn inserted(batches: &[RecordBatch]) -> u64 {
    assert_eq!(batches.len(), 1);
    assert_eq!(batches[0].schema().field(0).name(), "count");
    let count = batches[0].column(0).as_any().downcast_ref::<UInt64Array>();
    count.unwrap().value(0)
}

async fn insert(ctx: &SessionContext, sql: &str) -> u64 {
    inserted(&query(ctx, sql).await.unwrap())
}

/// From one device table to another, with columns in another order: no byte comes down, none is copied.
#[tokio::test]
async fn rows_of_a_device_table_stay_on_the_device() {
    let sim = Sim::new();
    for partitions in [1, 3] {
        let ctx = session_with(partitions, 0);
        let from: Vec<_> = (0..partitions)
            .map(|i| vec![rows(i as i64 * 16, 16)])
            .collect();
        register(&ctx, "t", device_table(&sim, &from));
        let empty = DeviceTable::from_batches(schema(), sim.device.clone(), vec![vec![]]).unwrap();
        register(&ctx, "u", Arc::new(empty));
        let sql = "INSERT INTO u SELECT * FROM t";
        let before = sim.stats();
        let plan = plan(&ctx, sql).await;
        says(
            &text(&plan, &[&sim]),
            &["DeviceInsertExec: device=A, op=Insert Into"],
        );
        assert_eq!(shape(&plan, &[&sim]), "Insert < Scan A");
        let found = collect(plan.clone(), ctx.task_ctx()).await.unwrap();
        assert_eq!(inserted(&found), partitions as u64 * 16);
        let written = metric(&plan, "DeviceInsertExec", "rows_written");
        assert_eq!(written, Some(partitions * 16));
        let none = "INSERT INTO u SELECT a, b, s FROM t WHERE false";
        assert_eq!(insert(&ctx, none).await, 0);
        let moved = sim.stats().since(&before);
        assert_eq!((moved.copies, moved.allocations), (0, 0), "{moved:?}");
        let found = result(&ctx, "SELECT * FROM u").await.1;
        assert_eq!(found, result(&ctx, "SELECT * FROM t").await.1);
    }
    sim.assert_done();
}

/// Without the rule, too: the node finds the device operator below the download.
#[tokio::test]
async fn without_the_rule_they_stay_there_too() {
    let sim = Sim::new();
    let ctx = session_without_rule(2);
    let from = [vec![rows(0, 16)], vec![rows(16, 16)]];
    register(&ctx, "t", device_table(&sim, &from));
    register(&ctx, "u", device_table(&sim, &[vec![rows(32, 16)]]));
    let before = sim.stats();
    assert_eq!(insert(&ctx, "INSERT INTO u SELECT * FROM t").await, 32);
    let moved = sim.stats().since(&before);
    assert_eq!(moved.copies, 0, "{moved:?}");
    let found = sorted(numbers_in(&ctx, "SELECT a FROM u").await);
    assert_eq!(found, multiples(48, 1));
}

/// Rows of the host go up, once.
#[tokio::test]
async fn rows_of_the_host_are_uploaded() {
    let sim = Sim::new();
    let ctx = session();
    register(&ctx, "h", host_table(&[vec![numbers(0, 16)]]));
    register(&ctx, "t", device_table(&sim, &[vec![numbers(100, 16)]]));
    let plan = plan(&ctx, "INSERT INTO t SELECT a FROM h").await;
    assert_eq!(shape(&plan, &[&sim]), "Insert < Up A < DataSource");
    let before = sim.stats();
    assert_eq!(inserted(&collect(plan, ctx.task_ctx()).await.unwrap()), 16);
    let moved = sim.stats().since(&before);
    assert_eq!((moved.bytes_to_device, moved.bytes_to_host), (16 * 8, 0));
    assert_eq!(insert(&ctx, "INSERT INTO t VALUES (7), (8)").await, 2);
    let found = sorted(numbers_in(&ctx, "SELECT a FROM t").await);
    let expected = (0..16).chain([7, 8]).chain(100..116).collect();
    assert_eq!(found, sorted(expected));
    assert_eq!(numbers_in(&ctx, "SELECT count(*) FROM t").await, [34]);
    drop(ctx);
    sim.assert_done();
}

fn two_partitions(sim: &Sim) -> SessionContext {
    over(device_table(sim, &[batches(0, 1), batches(16, 1)]))
}

#[tokio::test]
async fn overwrite_replaces_all_rows_and_replace_is_refused() {
    let sim = Sim::new();
    let ctx = two_partitions(&sim);
    // Its own rows: the scan reads what was there when it was planned.
    for (sql, count, rows) in [
        ("INSERT INTO t SELECT a + 100 FROM t", 32, 64),
        ("INSERT OVERWRITE t SELECT a FROM t WHERE a >= 130", 2, 2),
        ("INSERT OVERWRITE t SELECT a FROM t WHERE false", 0, 0),
    ] {
        assert_eq!(insert(&ctx, sql).await, count, "{sql}");
        let found = sorted(numbers_in(&ctx, "SELECT a FROM t").await);
        assert_eq!(found.len(), rows, "{sql}");
        assert!(rows != 2 || found == [130, 131], "{found:?}");
    }
    let replaced = query(&ctx, "REPLACE INTO t VALUES (1)").await;
    fails(replaced, &["Replace Into", &sim.id().to_string()]);
    drop(ctx);
    sim.assert_done();
}

/// A query that is planned before an INSERT reads the old rows, of all partitions; one that is planned after it, the new ones.
#[tokio::test]
async fn a_scan_reads_the_rows_of_one_moment() {
    let sim = Sim::new();
    let ctx = two_partitions(&sim);
    let old = plan(&ctx, "SELECT a FROM t").await;
    let started = datafusion::physical_plan::execute_stream(old.clone(), ctx.task_ctx()).unwrap();
    assert_eq!(insert(&ctx, "INSERT INTO t VALUES (99)").await, 1);
    let rest: Vec<_> = started.map(Result::unwrap).collect().await;
    assert_eq!(sorted(numbers_of(&rest)), multiples(32, 1));
    let found = collect(old, ctx.task_ctx()).await.unwrap();
    assert_eq!(sorted(numbers_of(&found)), multiples(32, 1));
    assert_eq!(numbers_in(&ctx, "SELECT max(a) FROM t").await, [99]);
}

/// Of what fails, nothing is visible.
#[tokio::test]
async fn an_insert_that_fails_leaves_the_table_as_it_was() {
    let sim = Sim::new();
    let ctx = session();
    register(&ctx, "t", device_table(&sim, &[vec![numbers(0, 16)]]));
    let (broken, _) = host_stream(|i| match i {
        0..3 => Some(Ok(numbers(100, 16))),
        _ => Some(Err(DataFusionError::Execution("the disk is gone".into()))),
    });
    register(&ctx, "h", broken);
    for sql in [
        "INSERT INTO t SELECT a FROM h",
        "INSERT OVERWRITE t SELECT a FROM h",
    ] {
        fails(query(&ctx, sql).await, &["the disk is gone"]);
        let found = numbers_in(&ctx, "SELECT a FROM t").await;
        assert_eq!(found, multiples(16, 1));
    }
    // Nor of one that is dropped before its end.
    let plan = plan(&ctx, "INSERT INTO t VALUES (1)").await;
    drop(datafusion::physical_plan::execute_stream(plan, ctx.task_ctx()).unwrap());
    let found = numbers_in(&ctx, "SELECT a FROM t").await;
    assert_eq!(found, multiples(16, 1));
    drop(ctx);
    sim.assert_done();
}

/// The table's columns allow no nulls; the input's do.
#[tokio::test]
async fn nulls_for_a_column_without_them_are_refused() {
    let sim = Sim::new();
    let nullable = Arc::new(Schema::new(vec![Field::new("a", DataType::Int64, true)]));
    let batch = |values: Vec<Option<i64>>| {
        let values = Arc::new(Int64Array::from(values));
        RecordBatch::try_new(nullable.clone(), vec![values]).unwrap()
    };
    let ctx = session();
    register(&ctx, "t", device_table(&sim, &[vec![numbers(0, 16)]]));
    for (name, values) in [
        ("good", vec![Some(16), Some(17)]),
        ("bad", vec![Some(1), None]),
        // Its slice's nulls are not known.
        ("part", vec![Some(18), None, None]),
    ] {
        register(&ctx, name, device_table(&sim, &[vec![batch(values)]]));
    }
    for (sql, fits) in [
        ("INSERT INTO t SELECT a FROM good", true),
        ("INSERT INTO t SELECT a FROM part LIMIT 1", true),
        ("INSERT INTO t SELECT a FROM bad", false),
        ("INSERT INTO t SELECT a FROM part LIMIT 2", false),
    ] {
        let found = query(&ctx, sql).await;
        if fits {
            assert!(inserted(&found.unwrap()) > 0);
            continue;
        }
        let error = ours(&fails(found, &["'a'", "1 nulls"]));
        assert!(matches!(error, Error::InvalidArgument(_)), "{error:?}");
    }
    let found = sorted(numbers_in(&ctx, "SELECT a FROM t").await);
    assert_eq!(found, multiples(19, 1));
}

#[tokio::test]
async fn tables_that_take_no_rows_say_so() {
    let sim = Sim::new();
    let ctx = session();
    register(&ctx, "r", reader_table(&sim, |_| None).0);
    let found = query(&ctx, "INSERT INTO r VALUES (1)").await;
    fails(found, &["Insert Into", &sim.id().to_string()]);
}

/// Takes rows, two batches at most, and counts what becomes of it.
#[derive(Clone)]
struct Counting {
    device: DeviceSpec,
    sinks: Arc<AtomicUsize>,
    dropped: Arc<AtomicUsize>,
    committed: Arc<Mutex<Vec<DeviceRecordBatch>>>,
}

impl fmt::Debug for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Counting")
    }
}

struct CountingSink(Counting, Vec<DeviceRecordBatch>);

impl Drop for CountingSink {
    fn drop(&mut self) {
        self.0.dropped.fetch_add(1, SeqCst);
    }
}

impl DeviceSource for Counting {
    fn schema(&self) -> SchemaRef {
        numbers(0, 1).schema()
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn open(&self, request: ScanRequest) -> arrow_device::Result<SendableDeviceStream> {
        let batches = self.committed.lock().unwrap().clone();
        Ok(request.stream(futures::stream::iter(batches.into_iter().map(Ok))))
    }

    fn supports_insert(&self, op: InsertOp) -> bool {
        op == InsertOp::Append
    }

    fn insert(&self, request: InsertRequest) -> arrow_device::Result<Box<dyn DeviceSink>> {
        assert!(self.device.fits(&request.device));
        self.sinks.fetch_add(1, SeqCst);
        Ok(Box::new(CountingSink(self.clone(), Vec::new())))
    }
}

#[async_trait]
impl DeviceSink for CountingSink {
    async fn write(&mut self, batch: DeviceRecordBatch) -> arrow_device::Result<()> {
        tokio::task::yield_now().await;
        if self.1.len() == 2 {
            let text = "the sink is full";
            return Err(Error::InvalidArgument(text.into()));
        }
        self.1.push(batch);
        Ok(())
    }

    async fn commit(mut self: Box<Self>) -> arrow_device::Result<()> {
        tokio::task::yield_now().await;
        let batches = std::mem::take(&mut self.1);
        self.0.committed.lock().unwrap().extend(batches);
        Ok(())
    }
}

/// Each statement has a sink of its own, which is committed once, or dropped after an error.
#[tokio::test]
async fn a_sink_is_committed_once_or_dropped() {
    let sim = Sim::new();
    let source = Counting {
        device: (&sim).into(),
        sinks: Arc::default(),
        dropped: Arc::default(),
        committed: Arc::default(),
    };
    let table = DeviceTable::new(Arc::new(source.clone())).unwrap();
    let ctx = over(Arc::new(table));
    register(&ctx, "two", device_table(&sim, &[batches(0, 2)]));
    register(&ctx, "three", device_table(&sim, &[batches(0, 3)]));
    assert_eq!(insert(&ctx, "INSERT INTO t SELECT a FROM two").await, 32);
    let full = query(&ctx, "INSERT INTO t SELECT a FROM three").await;
    fails(full, &["the sink is full"]);
    let ends = (source.sinks.load(SeqCst), source.dropped.load(SeqCst));
    assert_eq!(ends, (2, 2));
    assert_eq!(source.committed.lock().unwrap().len(), 2);
    let found = numbers_in(&ctx, "SELECT a FROM t").await;
    assert_eq!(found, multiples(32, 1));
    // Planned, and never run.
    plan(&ctx, "INSERT INTO t SELECT a FROM two").await;
    assert_eq!(source.sinks.load(SeqCst), 2);
}

/// A session that lacks the table's device says which node needs it.
#[tokio::test]
async fn an_insert_without_its_device_names_its_node() {
    let id = DeviceId::new(ArrowDeviceType::CUDA, 5);
    let source = Counting {
        device: id.into(),
        sinks: Arc::default(),
        dropped: Arc::default(),
        committed: Arc::default(),
    };
    let config = SessionConfig::new().with_extension(Arc::new(DeviceResolver::of([])));
    let ctx = SessionContext::new_with_config(config);
    let table = DeviceTable::new(Arc::new(source.clone())).unwrap();
    register(&ctx, "t", Arc::new(table));
    let found = query(&ctx, "INSERT INTO t VALUES (1)").await;
    let text = "DeviceInsertExec, partition 0, needs a device";
    let error = ours(&fails(found, &[text]));
    let of = |e: &_| matches!(e, Error::DeviceNotAvailable { device, .. } if *device == id);
    assert!(of(&error), "{error:?}");
    assert_eq!(source.sinks.load(SeqCst), 0);
}

/// The device of a table of batches is the program's as long as the table is, even if there is no batch on it.
#[tokio::test]
async fn an_empty_table_keeps_its_device() {
    let sim = Sim::new();
    let id = sim.id();
    let table = DeviceTable::from_batches(schema(), sim.device.clone(), vec![vec![]]).unwrap();
    let Sim { device, sim } = sim;
    drop(device);
    let ctx = session_without_rule(1);
    register(&ctx, "t", Arc::new(table));
    assert_eq!(numbers_in(&ctx, "SELECT a FROM t").await, [0; 0], "{id}");
    assert_eq!(insert(&ctx, "INSERT INTO t VALUES (1, 2, 'c')").await, 1);
    assert_eq!(numbers_in(&ctx, "SELECT a FROM t").await, [1]);
    drop((ctx, sim));
}

/// Batches that do not keep to their plan's schema are an error, not a panic.
#[tokio::test]
async fn rows_of_another_schema_are_refused() {
    let sim = Sim::new();
    let ctx = over(device_table(&sim, &[vec![rows(0, 16)]]));
    let scan = device_leaf(device_table(&sim, &[vec![rows(16, 16)]])).await;
    let narrow = operator("NarrowExec", vec![scan], &sim, |state, cx| {
        let next = std::task::ready!(state.next(cx));
        std::task::Poll::Ready(next.map(|batch| batch?.project(&[0])))
    });
    let table = ctx.table_provider("t").await.unwrap();
    let state = ctx.state();
    let insert = table.insert_into(&state, narrow, InsertOp::Append);
    let found = collect(insert.await.unwrap(), ctx.task_ctx()).await;
    fails(found, &["DeviceInsertExec"]);
    assert_eq!(numbers_in(&ctx, "SELECT a FROM t").await.len(), 16);
}
