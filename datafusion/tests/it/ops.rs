//! The given operators: the values of DataFusion's own nodes, and nothing moves.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use arrow_device::{Device, DeviceRecordBatch, Error, TransferStats};
use arrow_device_datafusion::{DeviceExec, DeviceForm, DeviceTable};
use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, RecordBatchOptions};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::common::DataFusionError;
use datafusion::datasource::MemTable;
use datafusion::physical_expr::Partitioning;
use datafusion::physical_expr::expressions::{CastExpr, col, lit};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::execution_plan::{ChildrenPropertiesMode, ReplaceChildrenOptions};
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{ExecutionPlanProperties, collect_partitioned};
use futures::{Stream, StreamExt, TryStreamExt};

use crate::kit::*;
use crate::nodes::*;

/// What is the same in the result of the host's node and of the operator's.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Same {
    /// Each partition's rows, in their order.
    Partitions,
    /// The rows.
    Rows,
    /// How many rows: any so many.
    Count,
}

type Case = (fn(Plan) -> Plan, Same);

/// What makes nodes over a child of `partitions` partitions and `columns` columns.
pub(crate) fn cases(partitions: usize, columns: usize) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    let mut add = |make: fn(Plan) -> Plan, same| cases.push((make, same));
    let (order, count) = match partitions {
        0 | 1 => (Same::Partitions, Same::Partitions),
        _ => (Same::Rows, Same::Count),
    };
    let all = Same::Partitions;
    add(|c| project(c, &[]), all);
    add(|c| union([c.clone(), c]), all);
    add(|c| Arc::new(LocalLimitExec::new(c, 0)), all);
    add(|c| Arc::new(LocalLimitExec::new(c, 20)), all);
    add(|c| Arc::new(LocalLimitExec::new(c, 32)), all);
    add(|c| Arc::new(LocalLimitExec::new(c, 1000)), all);
    if columns == 3 {
        add(|c| project(c, &[(2, "x"), (0, "y"), (2, "z")]), all);
        add(|c| project(c, &[(1, "b")]), all);
    }
    if partitions > 0 {
        add(on_host, order);
        let few = |c| Arc::new(CoalescePartitionsExec::new(c).with_fetch(Some(20))) as _;
        add(few, count);
    }
    if partitions == 1 {
        add(|c| Arc::new(GlobalLimitExec::new(c, 5, Some(20))), all);
        add(|c| Arc::new(GlobalLimitExec::new(c, 16, None)), all);
        add(|c| Arc::new(GlobalLimitExec::new(c, 0, Some(16))), all);
        add(|c| Arc::new(GlobalLimitExec::new(c, 1000, Some(1))), all);
    }
    if partitions == 1 && columns == 3 {
        add(|c| merge(c, None), order);
        add(|c| merge(c, Some(20)), order);
    }
    cases
}

/// Rows as text.
pub(crate) fn lines(batches: &[RecordBatch]) -> Vec<String> {
    let options = FormatOptions::default().with_null("null");
    let mut lines = Vec::new();
    for batch in batches {
        let columns = batch.columns().iter();
        let columns = columns.map(|column| ArrayFormatter::try_new(column, &options).unwrap());
        let columns: Vec<_> = columns.collect();
        for row in 0..batch.num_rows() {
            let values = columns.iter().map(|column| column.value(row).to_string());
            lines.push(values.collect::<Vec<_>>().join("|"));
        }
    }
    lines
}

fn found(partitions: &[Vec<RecordBatch>], same: Same) -> Vec<Vec<String>> {
    let lines: Vec<_> = partitions.iter().map(|p| lines(p)).collect();
    match same {
        Same::Partitions => lines,
        Same::Rows => {
            let mut rows = lines.concat();
            rows.sort_unstable();
            vec![rows]
        }
        Same::Count => vec![vec![lines.concat().len().to_string()]],
    }
}

/// Runs all partitions of a device node on the device, at the same time, and says what the device did.
pub(crate) async fn run_on_device(
    plan: &Plan,
    device: &Device,
) -> arrow_device::Result<(Vec<Vec<DeviceRecordBatch>>, TransferStats)> {
    let (before, context) = (device.stats(), session().task_ctx());
    let node = DeviceExec::of(plan).expect("a device node");
    let partitions = plan.output_partitioning().partition_count();
    let start = |p| node.execute_device(p, context.clone()).unwrap();
    let streams: Vec<_> = (0..partitions).map(start).collect();
    let all = streams.into_iter().map(|stream| stream.try_collect());
    let found = futures::future::try_join_all(all).await?;
    Ok((found, device.stats().since(&before)))
}

fn all_to_host(partitions: &[Vec<DeviceRecordBatch>]) -> Vec<Vec<RecordBatch>> {
    partitions.iter().map(|p| to_host(p)).collect()
}

async fn run_on_host(node: Plan) -> Vec<Vec<RecordBatch>> {
    let context = session().task_ctx();
    collect_partitioned(node, context).await.unwrap()
}

/// Nothing was copied, made or waited for.
#[track_caller]
fn assert_nothing_moved(cost: &TransferStats, name: &str) {
    let moved = cost.bytes_to_device + cost.bytes_to_host + cost.bytes_on_device;
    assert_eq!((moved, cost.copies, cost.allocations), (0, 0, 0), "{name}");
    assert_eq!((cost.queue_waits, cost.host_waits), (0, 0), "{name}");
}

fn table(
    device: &Device,
    schema: &Arc<Schema>,
    up: Vec<Vec<DeviceRecordBatch>>,
) -> Arc<DeviceTable> {
    let table = DeviceTable::from_batches(schema.clone(), device.clone(), up);
    Arc::new(table.unwrap())
}

/// All nodes over these partitions, on this device: `cut` rows of each end are no part of the slices.
async fn compare(sim: &Sim, partitions: &[Vec<RecordBatch>], cut: usize) {
    let first = partitions.iter().flatten().next();
    let schema = first.map_or_else(schema, RecordBatch::schema);
    let inner = |rows: usize| (cut.min(rows), rows.saturating_sub(2 * cut));
    let slice = |batch: &RecordBatch| {
        let (from, rows) = inner(batch.num_rows());
        batch.slice(from, rows)
    };
    let up = |batch: &RecordBatch| {
        let (from, rows) = inner(batch.num_rows());
        sim.upload(batch).unwrap().slice(from, rows).unwrap()
    };
    let host = partitions.iter().map(|p| p.iter().map(slice).collect());
    let host: Vec<Vec<_>> = host.collect();
    let on_device = partitions.iter().map(|p| p.iter().map(up).collect());
    let device = device_leaf(table(sim, &schema, on_device.collect())).await;
    for (make, same) in cases(partitions.len(), schema.fields().len()) {
        let own = form(make(device.clone()), sim);
        let name = format!("{own:?} of {partitions:?}");
        let (batches, cost) = run_on_device(&own, sim).await.unwrap();
        assert_nothing_moved(&cost, &name);
        let batches = all_to_host(&batches);
        if partitions.is_empty() {
            assert_eq!(batches.concat().len(), 0, "{name}");
            continue;
        }
        let memory = MemTable::try_new(schema.clone(), host.clone()).unwrap();
        let node = make(scan(Arc::new(memory)).await);
        assert_eq!(own.schema(), node.schema(), "{name}");
        let mut all = batches.iter().flatten();
        assert!(all.all(|b| b.schema() == node.schema()), "{name}");
        let expected = run_on_host(node).await;
        assert_eq!(found(&batches, same), found(&expected, same), "{name}");
    }
}

/// No columns, and so many rows.
pub(crate) fn no_columns(rows: usize) -> RecordBatch {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::new(Schema::empty()), vec![], &options).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_give_what_datafusions_nodes_give_and_move_nothing() {
    let of_rows = |sizes: &[(i64, usize)]| -> Vec<_> {
        let batches = sizes.iter();
        batches.map(|(first, n)| rows(*first, *n)).collect()
    };
    for sim in [Sim::new(), Sim::deferred()] {
        for partitions in [
            vec![],
            vec![vec![]],
            vec![vec![], vec![]],
            vec![vec![rows(0, 0)]],
            vec![of_rows(&[(0, 0), (0, 16), (0, 0), (16, 16), (32, 7)])],
            vec![
                of_rows(&[(0, 16), (16, 16)]),
                of_rows(&[(100, 40)]),
                vec![],
                of_rows(&[(200, 0)]),
            ],
            vec![
                vec![no_columns(30), no_columns(0), no_columns(7)],
                vec![no_columns(5)],
            ],
            vec![vec![no_columns(0)]],
        ] {
            compare(&sim, &partitions, 0).await;
        }
        let slices = [
            of_rows(&[(0, 40), (40, 30), (70, 10)]),
            of_rows(&[(100, 21)]),
        ];
        compare(&sim, &slices, 5).await;
        compare(&sim, &slices[..1], 5).await;
        sim.assert_done();
    }
}

/// Without the rule, operators over the host's nodes upload, and so they give the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_a_host_node_they_upload() {
    let sim = Sim::new();
    let partitions = [vec![rows(0, 40)], vec![rows(40, 40)]];
    for (make, same) in cases(2, 3) {
        let host = make(scan(host_table(&partitions)).await);
        let (batches, _) = run_on_device(&form(host.clone(), &sim), &sim)
            .await
            .unwrap();
        let batches = found(&all_to_host(&batches), same);
        let expected = run_on_host(host.clone()).await;
        assert!(batches == found(&expected, same), "{host:?}");
    }
    sim.assert_done();
}

/// Names, nullability and metadata are the union's, although the children have their own.
#[tokio::test]
async fn a_union_has_its_own_schema() {
    let sim = Sim::new();
    let batch = |name: &str, nullable, key: &str, values: Vec<Option<i64>>| {
        let metadata = [(key.to_owned(), "1".to_owned())].into();
        let field = Field::new(name, DataType::Int64, nullable).with_metadata(metadata);
        let column: ArrayRef = Arc::new(Int64Array::from(values));
        RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![column]).unwrap()
    };
    let batches = [
        batch("x", false, "left", vec![Some(1), Some(2)]),
        batch("y", true, "right", vec![None, Some(3)]),
    ];
    let (mut on_device, mut on_host) = (Vec::new(), Vec::new());
    for batch in batches {
        on_device.push(device_leaf(device_table(&sim, &[vec![batch.clone()]])).await);
        on_host.push(scan(host_table(&[vec![batch]])).await);
    }
    let (plan, host) = (form(union(on_device), &sim), union(on_host));
    assert_eq!(plan.schema(), host.schema());
    let (batches, cost) = run_on_device(&plan, &sim).await.unwrap();
    assert_nothing_moved(&cost, "union");
    assert_eq!(all_to_host(&batches), run_on_host(host).await);
    drop((batches, plan));
    // A scan's batches may have other metadata than its table's schema.
    let schema = numbers(0, 1).schema();
    let metadata = [("of".to_owned(), "the batch".to_owned())].into();
    let other = Arc::new(Schema::clone(&schema).with_metadata(metadata));
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let batch = batch.with_schema(other).unwrap();
    let leaf = device_leaf(table(&sim, &schema, vec![vec![batch]])).await;
    let plan = form(union([leaf.clone(), leaf]), &sim);
    let (batches, _) = run_on_device(&plan, &sim).await.unwrap();
    let mut all = batches.iter().flatten();
    assert!(all.all(|batch| batch.schema() == schema));
    drop((batches, plan));
    sim.assert_done();
}

/// Expressions, types that change, merges of sorted partitions, and hash partitions need kernels.
#[tokio::test]
async fn what_needs_a_kernel_has_no_form() {
    let sim = Sim::new();
    let two = [vec![rows(0, 16)], vec![rows(0, 16)]];
    let one = device_leaf(device_table(&sim, &two[..1])).await;
    let two = device_leaf(device_table(&sim, &two)).await;
    let a = || col("a", &one.schema()).unwrap();
    let cast = |to| {
        let field = Arc::new(Field::new("x", to, true));
        let cast = CastExpr::new_with_target_field(a(), field, None);
        projected(one.clone(), Arc::new(cast))
    };
    let hash = Partitioning::Hash(vec![a()], 2);
    let hash = RepartitionExec::try_new(two.clone(), hash).unwrap();
    for (node, has_form) in [
        (projected(one.clone(), a()), true),
        (cast(DataType::Int64), true),
        (cast(DataType::Int32), false),
        (projected(one.clone(), lit(1i64)), false),
        (merge(two.clone(), None), false),
        (round_robin(two.clone(), 2), false),
        (Arc::new(hash), false),
        (two.clone(), false),
    ] {
        let form = DeviceForm::of(node.clone(), &sim).unwrap();
        assert_eq!(form.is_some(), has_form, "{node:?}");
    }
    // A merge that got more partitions than it can have.
    let merged = form(merge(one, None), &sim);
    let options = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
    let replaced = merged.replace_children(vec![two], options);
    fails(replaced, &["SortPreservingMergeExec"]);
}

/// The batches before an error come first, and nothing after it.
#[tokio::test]
async fn an_error_in_the_middle_comes_after_the_batches_before_it() {
    let sim = Sim::new();
    let (table, _) = reader_table(&sim, |i| match i {
        0 | 1 => Some(Ok(numbers(i as i64 * 16, 16))),
        2 => Some(Err(Error::InvalidArgument("the third".into()))),
        _ => panic!("asked after an error"),
    });
    let leaf = device_leaf(table).await;
    // Rows before the error, if there is one: some have enough before it.
    let mut plans = vec![(joining(leaf.clone(), &sim, 1000), (32, true))];
    for (make, _) in cases(1, 1) {
        let (table, _) = host_stream(|i| match i {
            0 | 1 => Some(Ok(numbers(i as i64 * 16, 16))),
            _ => Some(Err(DataFusionError::Execution("the third".into()))),
        });
        let host = make(scan(table).await);
        let stream = host.execute(0, session().task_ctx()).unwrap();
        let expected = rows_before_an_error(stream.map_ok(|batch| batch.num_rows())).await;
        plans.push((form(make(leaf.clone()), &sim), expected));
    }
    for (plan, expected) in plans {
        let node = DeviceExec::of(&plan).unwrap();
        let stream = node.execute_device(0, session().task_ctx()).unwrap();
        let found = rows_before_an_error(stream.map_ok(|batch| batch.num_rows())).await;
        assert_eq!(found, expected, "{plan:?}");
    }
    sim.assert_done();
}

/// How many rows come, and whether an error ends them.
async fn rows_before_an_error<E: std::fmt::Display>(
    mut rows: impl Stream<Item = Result<usize, E>> + Unpin,
) -> (usize, bool) {
    let mut count = 0;
    while let Some(next) = rows.next().await {
        match next {
            Ok(rows) => count += rows,
            Err(e) => {
                says(&e, &["the third"]);
                return (count, true);
            }
        }
    }
    (count, false)
}

/// A stream that is dropped drops what it reads from.
#[tokio::test]
async fn dropped_early_they_drop_their_input() {
    let sim = Sim::new();
    for i in 0..=cases(1, 1).len() {
        let (table, asked, gone) = watched(&sim);
        let leaf = device_leaf(table).await;
        let plan = match cases(1, 1).get(i) {
            Some((make, _)) => form(make(leaf), &sim),
            None => joining(leaf, &sim, 100),
        };
        let node = DeviceExec::of(&plan).unwrap();
        let partitions = plan.output_partitioning().partition_count();
        let start = |p| node.execute_device(p, session().task_ctx()).unwrap();
        let mut streams: Vec<_> = (0..partitions).map(start).collect();
        let first = streams[0].next().await;
        assert!(first.is_none_or(|batch| batch.is_ok()));
        drop(streams);
        eventually("the input is dropped", || gone.load(SeqCst));
        assert!(asked.load(SeqCst) < MANY, "{}", plan.name());
    }
    sim.assert_done();
}
