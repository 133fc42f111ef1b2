//! The given operators: the values of DataFusion's own nodes, and nothing moves.

use std::sync::Arc;

use arrow_device::{Device, DeviceRecordBatch, TransferStats};
use arrow_device_datafusion::{DeviceExec, DeviceForm, DeviceSpec, DeviceTable};
use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, RecordBatchOptions};
use datafusion::arrow::compute::SortOptions;
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::common::DataFusionError;
use datafusion::datasource::MemTable;
use datafusion::physical_expr::expressions::{CastExpr, Column, col};
use datafusion::physical_expr::{LexOrdering, Partitioning, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{ExecutionPlanProperties, collect_partitioned};
use futures::{Stream, StreamExt, TryStreamExt};

use crate::joined::joining;
use crate::kit::*;

/// The device form of a node, as a node.
pub(crate) fn form(node: Plan, device: impl Into<DeviceSpec>) -> Plan {
    let form = DeviceForm::of(node, device).unwrap().expect("a form");
    Arc::new(DeviceExec::new(Arc::new(form)))
}

fn has_form(node: Plan, device: impl Into<DeviceSpec>) -> bool {
    DeviceForm::of(node, device).unwrap().is_some()
}

/// A device scan, and nothing above it.
pub(crate) async fn device_leaf(table: Arc<DeviceTable>) -> Plan {
    scan(table).await.children()[0].clone()
}

/// Columns by number, with new names.
pub(crate) fn project(child: Plan, columns: &[(usize, &str)]) -> Plan {
    let schema = child.schema();
    let expr = columns.iter().map(|(i, name)| ProjectionExpr {
        expr: Arc::new(Column::new(schema.field(*i).name(), *i)),
        alias: (*name).to_owned(),
    });
    Arc::new(ProjectionExec::try_new(expr, child).unwrap())
}

pub(crate) fn round_robin(child: Plan, outputs: usize) -> Plan {
    let to = Partitioning::RoundRobinBatch(outputs);
    Arc::new(RepartitionExec::try_new(child, to).unwrap())
}

fn merge(child: Plan, fetch: Option<usize>) -> Plan {
    let by = PhysicalSortExpr::new(col("a", &child.schema()).unwrap(), SortOptions::default());
    let by = LexOrdering::new([by]).unwrap();
    Arc::new(SortPreservingMergeExec::new(by, child).with_fetch(fetch))
}

/// What is the same in the result of the host's node and of the operator's.
#[derive(Clone, Copy, PartialEq)]
enum Same {
    /// Each partition's rows, in their order.
    Partitions,
    /// The rows.
    Rows,
    /// How many rows: any so many.
    Count,
}

pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The node over a child.
    pub(crate) make: fn(Plan) -> Plan,
    same: Same,
}

/// Nodes over a child of `partitions` partitions and `columns` columns.
pub(crate) fn cases(partitions: usize, columns: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name, make, same| cases.push(Case { name, make, same });
    let order = if partitions > 1 {
        Same::Rows
    } else {
        Same::Partitions
    };
    add(
        "DeviceProjectionExec",
        |c| project(c, &[]),
        Same::Partitions,
    );
    if columns == 3 {
        let again = |c| project(c, &[(2, "x"), (0, "y"), (2, "z")]);
        add("DeviceProjectionExec", again, Same::Partitions);
        add(
            "DeviceProjectionExec",
            |c| project(c, &[(1, "b")]),
            Same::Partitions,
        );
    }
    let union = |c: Plan| UnionExec::try_new(vec![c.clone(), c]).unwrap();
    add("DeviceUnionExec", union, Same::Partitions);
    for make in [
        (|c| Arc::new(LocalLimitExec::new(c, 0)) as _) as fn(Plan) -> Plan,
        |c| Arc::new(LocalLimitExec::new(c, 20)),
        |c| Arc::new(LocalLimitExec::new(c, 32)),
        |c| Arc::new(LocalLimitExec::new(c, 1000)),
    ] {
        add("DeviceLimitExec", make, Same::Partitions);
    }
    if partitions != 0 {
        let coalesce = |c| Arc::new(CoalescePartitionsExec::new(c)) as _;
        add("DeviceCoalescePartitionsExec", coalesce, order);
        let coalesce = |c| Arc::new(CoalescePartitionsExec::new(c).with_fetch(Some(20))) as _;
        let same = if partitions > 1 {
            Same::Count
        } else {
            Same::Partitions
        };
        add("DeviceCoalescePartitionsExec", coalesce, same);
    }
    if partitions == 1 {
        for make in [
            (|c| Arc::new(GlobalLimitExec::new(c, 5, Some(20))) as _) as fn(Plan) -> Plan,
            |c| Arc::new(GlobalLimitExec::new(c, 16, None)),
            |c| Arc::new(GlobalLimitExec::new(c, 0, Some(16))),
            |c| Arc::new(GlobalLimitExec::new(c, 1000, Some(1))),
        ] {
            add("DeviceLimitExec", make, Same::Partitions);
        }
        if columns == 3 {
            add("DeviceSortPreservingMergeExec", |c| merge(c, None), order);
            add(
                "DeviceSortPreservingMergeExec",
                |c| merge(c, Some(20)),
                order,
            );
        }
    }
    add("DeviceRepartitionExec", |c| round_robin(c, 1), order);
    add("DeviceRepartitionExec", |c| round_robin(c, 3), Same::Rows);
    cases
}

/// Rows as text.
pub(crate) fn lines(batches: &[RecordBatch]) -> Vec<String> {
    let options = FormatOptions::default().with_null("null");
    let mut lines = Vec::new();
    for batch in batches {
        let columns = batch.columns().iter();
        let columns: Vec<_> = columns
            .map(|column| ArrayFormatter::try_new(column, &options).unwrap())
            .collect();
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

pub(crate) fn on_host(partitions: &[Vec<DeviceRecordBatch>]) -> Vec<Vec<RecordBatch>> {
    let down = |batch: &DeviceRecordBatch| batch.to_host().unwrap();
    let partitions = partitions.iter().map(|p| p.iter().map(down).collect());
    partitions.collect()
}

/// Nothing was copied, made or waited for.
#[track_caller]
fn assert_nothing_moved(cost: &TransferStats, name: &str) {
    let moved = cost.bytes_to_device + cost.bytes_to_host + cost.bytes_on_device;
    assert_eq!((moved, cost.copies, cost.allocations), (0, 0, 0), "{name}");
    assert_eq!((cost.queue_waits, cost.host_waits), (0, 0), "{name}");
}

/// A table whose partitions are these batches.
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
    let batches = || partitions.iter().flatten();
    let schema = batches().next().map_or_else(schema, RecordBatch::schema);
    let inner = |rows: usize| (cut.min(rows), rows.saturating_sub(2 * cut));
    let slice = |batch: &RecordBatch| {
        let (from, rows) = inner(batch.num_rows());
        batch.slice(from, rows)
    };
    let up = |batch: &RecordBatch| {
        let (from, rows) = inner(batch.num_rows());
        sim.upload(batch).unwrap().slice(from, rows).unwrap()
    };
    let host: Vec<Vec<_>> = partitions
        .iter()
        .map(|p| p.iter().map(slice).collect())
        .collect();
    let on_device = partitions
        .iter()
        .map(|p| p.iter().map(up).collect())
        .collect();
    let device = device_leaf(table(sim, &schema, on_device)).await;
    let columns = schema.fields().len();
    for case in cases(partitions.len(), columns) {
        let name = format!("{} of {partitions:?}", case.name);
        let leaf = match partitions.len() {
            0 => device.clone(),
            _ => {
                scan(Arc::new(
                    MemTable::try_new(schema.clone(), host.clone()).unwrap(),
                ))
                .await
            }
        };
        let node = (case.make)(leaf);
        let own = form((case.make)(device.clone()), sim);
        assert_eq!(own.name(), case.name);
        assert_eq!(own.schema(), node.schema(), "{name}");
        let expected = match partitions.len() {
            0 => Vec::new(),
            _ => collect_partitioned(node.clone(), session().task_ctx())
                .await
                .unwrap(),
        };
        let (batches, cost) = run_on_device(&own, sim).await.unwrap();
        assert_nothing_moved(&cost, &name);
        for batch in batches.iter().flatten() {
            assert_eq!(batch.schema(), node.schema(), "{name}");
        }
        let batches = on_host(&batches);
        if partitions.is_empty() {
            assert_eq!(batches.concat().len(), 0, "{name}");
            continue;
        }
        let (expected, batches) = (found(&expected, case.same), found(&batches, case.same));
        assert_eq!(batches, expected, "{name}");
    }
}

/// No columns, and so many rows.
pub(crate) fn no_columns(rows: usize) -> RecordBatch {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(Arc::new(Schema::empty()), vec![], &options).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_give_what_datafusions_nodes_give_and_move_nothing() {
    for sim in [Sim::new(), Sim::deferred()] {
        for partitions in [
            vec![],
            vec![vec![]],
            vec![vec![], vec![]],
            vec![vec![rows(0, 0)]],
            vec![vec![
                rows(0, 0),
                rows(0, 16),
                rows(0, 0),
                rows(16, 16),
                rows(32, 7),
            ]],
            vec![
                vec![rows(0, 16), rows(16, 16)],
                vec![rows(100, 40)],
                vec![],
                vec![rows(200, 0)],
            ],
            vec![
                vec![no_columns(30), no_columns(0), no_columns(7)],
                vec![no_columns(5)],
            ],
            vec![vec![no_columns(0)]],
        ] {
            compare(&sim, &partitions, 0).await;
        }
        let slices = vec![
            vec![rows(0, 40), rows(40, 30), rows(70, 10)],
            vec![rows(100, 21)],
        ];
        compare(&sim, &slices, 5).await;
        compare(&sim, &slices[..1], 5).await;
        sim.assert_done();
    }
}

/// One on another, all of them: the first batch that moves is the download's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stack_of_all_moves_nothing() {
    for sim in [Sim::new(), Sim::deferred()] {
        let partition = |p: i64| (0..4).map(|i| rows(p * 100 + i * 16, 16)).collect();
        let partitions: Vec<Vec<_>> = (0..2).map(partition).collect();
        let stack = |leaf: Plan| {
            let narrow = project(leaf.clone(), &[(2, "s"), (0, "a")]);
            let union = UnionExec::try_new(vec![narrow, project(leaf, &[(2, "s"), (1, "b")])]);
            let spread = round_robin(union.unwrap(), 3);
            let few: Plan = Arc::new(LocalLimitExec::new(spread, 10_000));
            let one = merge(Arc::new(CoalescePartitionsExec::new(few)), None);
            Arc::new(GlobalLimitExec::new(one, 0, Some(10_000))) as Plan
        };
        let leaf = device_leaf(device_table(&sim, &partitions)).await;
        let plan = form(stack(leaf), &sim);
        let text = text(&plan, &[&sim]);
        assert!(
            text.lines().all(|line| line.trim().starts_with("Device")),
            "{text}"
        );
        let (batches, cost) = run_on_device(&plan, &sim).await.unwrap();
        assert_nothing_moved(&cost, "the stack");
        assert_eq!(batches.concat().len(), 16);
        let host = stack(scan(host_table(&partitions)).await);
        let expected = collect_partitioned(host, session().task_ctx())
            .await
            .unwrap();
        let rows = found(&on_host(&batches), Same::Rows);
        assert!(rows == found(&expected, Same::Rows));
        drop((plan, batches));
        sim.assert_done();
    }
}

/// Names, nullability and metadata are the union's, although the children have their own.
#[tokio::test]
async fn a_union_has_its_own_schema() {
    let sim = Sim::new();
    let field = |name: &str, nullable, key: &str| {
        let metadata = [(key.to_owned(), "1".to_owned())].into();
        Field::new(name, DataType::Int64, nullable).with_metadata(metadata)
    };
    let leaf = |field: Field, values: Vec<Option<i64>>| {
        let schema = Arc::new(Schema::new(vec![field]));
        let column: ArrayRef = Arc::new(Int64Array::from(values));
        let batch = RecordBatch::try_new(schema, vec![column]).unwrap();
        (
            device_table(&sim, &[vec![batch.clone()]]),
            host_table(&[vec![batch]]),
        )
    };
    let (a, host_a) = leaf(field("x", false, "left"), vec![Some(1), Some(2)]);
    let (b, host_b) = leaf(field("y", true, "right"), vec![None, Some(3)]);
    let union = UnionExec::try_new(vec![device_leaf(a).await, device_leaf(b).await]).unwrap();
    let host = UnionExec::try_new(vec![scan(host_a).await, scan(host_b).await]).unwrap();
    let plan = form(union, &sim);
    assert_eq!(plan.schema(), host.schema());
    assert!(plan.schema().field(0).is_nullable() && plan.schema().field(0).metadata().len() == 2);
    let expected = collect_partitioned(host, session().task_ctx())
        .await
        .unwrap();
    let (batches, cost) = run_on_device(&plan, &sim).await.unwrap();
    assert_nothing_moved(&cost, "union");
    assert_eq!(on_host(&batches), expected);
    drop((batches, plan));
    // A scan's batches may have other metadata than its table's schema.
    let schema = numbers(0, 1).schema();
    let metadata = [("of".to_owned(), "the batch".to_owned())].into();
    let other = Arc::new(Schema::clone(&schema).with_metadata(metadata));
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let batch = batch.with_schema(other).unwrap();
    let leaf = device_leaf(table(&sim, &schema, vec![vec![batch]])).await;
    let plan = form(UnionExec::try_new(vec![leaf.clone(), leaf]).unwrap(), &sim);
    let (batches, _) = run_on_device(&plan, &sim).await.unwrap();
    assert!(
        batches
            .iter()
            .flatten()
            .all(|batch| batch.schema() == schema)
    );
    drop((batches, plan));
    sim.assert_done();
}

/// Expressions, types that change, merges of sorted partitions, and hash partitions need kernels.
#[tokio::test]
async fn what_needs_a_kernel_has_no_form() {
    let sim = Sim::new();
    let one = device_leaf(device_table(&sim, &[vec![rows(0, 16)]])).await;
    let two = device_leaf(device_table(&sim, &[vec![rows(0, 16)], vec![rows(0, 16)]])).await;
    let projected = |expr: Arc<dyn PhysicalExpr>| {
        let alias = "x".to_owned();
        let expr = ProjectionExpr { expr, alias };
        Arc::new(ProjectionExec::try_new([expr], one.clone()).unwrap()) as Plan
    };
    let a = || col("a", &one.schema()).unwrap();
    assert!(has_form(projected(a()), &sim));
    let cast = |to, nullable| {
        let field = Arc::new(Field::new("x", to, nullable));
        projected(Arc::new(CastExpr::new_with_target_field(a(), field, None)))
    };
    assert!(has_form(cast(DataType::Int64, true), &sim));
    assert!(!has_form(cast(DataType::Int32, true), &sim));
    let sum = datafusion::physical_expr::expressions::lit(1i64);
    assert!(!has_form(projected(sum), &sim));
    assert!(!has_form(merge(two.clone(), None), &sim));
    assert!(has_form(round_robin(two.clone(), 2), &sim));
    let hash = Partitioning::Hash(vec![a()], 2);
    let hash = RepartitionExec::try_new(two.clone(), hash).unwrap();
    assert!(!has_form(Arc::new(hash), &sim));
    assert!(!has_form(two, &sim));
    // A merge that got more partitions than it can have.
    let merged = form(merge(one, None), &sim);
    let two = device_leaf(device_table(&sim, &[vec![rows(0, 1)], vec![rows(0, 1)]])).await;
    let options = datafusion::physical_plan::execution_plan::ReplaceChildrenOptions::new(
        datafusion::physical_plan::execution_plan::ChildrenPropertiesMode::Recompute,
    );
    let error = merged.replace_children(vec![two], options).unwrap_err();
    assert!(
        error.to_string().contains("DeviceSortPreservingMergeExec"),
        "{error}"
    );
}

/// The batches before an error come first, and nothing after it.
#[tokio::test]
async fn an_error_in_the_middle_comes_after_the_batches_before_it() {
    let sim = Sim::new();
    let device = sim.device.clone();
    let open = move |_| {
        let schema = numbers(0, 1).schema();
        let next = |i| match i {
            0 | 1 => Some(Ok(numbers(i as i64 * 16, 16))),
            2 => Some(Err(arrow_device::Error::InvalidArgument(
                "the third".into(),
            ))),
            _ => panic!("asked after an error"),
        };
        Ok(Reader::new(&device, schema, next))
    };
    let schema = numbers(0, 1).schema();
    let table = DeviceTable::from_readers(schema, sim.device.clone(), 1, open);
    let table = Arc::new(table);
    let leaf = device_leaf(table).await;
    // Rows before the error, if there is one: some have enough before it.
    let mut plans = vec![(joining(leaf.clone(), &sim, 1000), (32, true))];
    for case in cases(1, 1) {
        let (table, _) = host_stream(|i| match i {
            0 | 1 => Some(Ok(numbers(i as i64 * 16, 16))),
            _ => Some(Err(DataFusionError::Execution("the third".into()))),
        });
        let mut host = (case.make)(scan(table).await);
        if host.name() == "RepartitionExec" {
            // One output gets all if it alone is read.
            host = host.children()[0].clone();
        }
        let stream = host.execute(0, session().task_ctx()).unwrap();
        let expected = rows_before_an_error(stream.map_ok(|batch| batch.num_rows())).await;
        plans.push((form((case.make)(leaf.clone()), &sim), expected));
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
                assert!(e.to_string().contains("the third"), "{e}");
                return (count, true);
            }
        }
    }
    (count, false)
}

/// A stream that is dropped drops what it reads from.
#[tokio::test]
async fn dropped_early_they_drop_their_input() {
    use std::sync::atomic::Ordering::SeqCst;
    let sim = Sim::new();
    for i in 0..=cases(1, 1).len() {
        let (table, asked, gone) = watched(&sim);
        let leaf = device_leaf(table).await;
        let plan = match cases(1, 1).get(i) {
            Some(case) => form((case.make)(leaf), &sim),
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

/// Without the rule, operators over the host's nodes upload, and so they give the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_a_host_node_they_upload() {
    let sim = Sim::new();
    let partitions = [vec![rows(0, 40)], vec![rows(40, 40)]];
    for case in cases(2, 3) {
        let host = (case.make)(scan(host_table(&partitions)).await);
        let expected = collect_partitioned(host.clone(), session().task_ctx())
            .await
            .unwrap();
        let (batches, _) = run_on_device(&form(host, &sim), &sim).await.unwrap();
        let batches = found(&on_host(&batches), case.same);
        assert!(batches == found(&expected, case.same), "{}", case.name);
    }
    sim.assert_done();
}
