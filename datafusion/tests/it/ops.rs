//! The given operators: the values of DataFusion's own nodes, and nothing moves.

use datafusion::physical_expr::expressions::CastExpr;
use datafusion::physical_plan::execution_plan::{ChildrenPropertiesMode, ReplaceChildrenOptions};

use crate::kit::*;
use crate::nodes::*;

/// Nodes that have a form over a child, X, of so many partitions and columns.
pub(crate) fn cases(partitions: usize, columns: usize) -> Vec<&'static str> {
    let mut cases = vec![
        "Projection < X",
        "Union < (X, X)",
        "LocalLimit 0 < X",
        "LocalLimit 20 < X",
        "LocalLimit 32 < X",
        "LocalLimit 1000 < X",
    ];
    if columns == 3 {
        cases.extend(["Projection s:x a:y s:z < X", "Projection b < X"]);
    }
    if partitions > 0 {
        cases.extend(["CoalescePartitions < X", "CoalescePartitions 20 < X"]);
    }
    if partitions == 1 {
        cases.extend([
            "GlobalLimit 5 20 < X",
            "GlobalLimit 16 < X",
            "GlobalLimit 0 16 < X",
            "GlobalLimit 1000 1 < X",
        ]);
    }
    if partitions == 1 && columns == 3 {
        cases.extend(["SortPreservingMerge < X", "SortPreservingMerge 20 < X"]);
    }
    cases
}

pub(crate) fn over_x(line: &str, x: &Plan) -> Plan {
    planned(line, &[], &[("X", x)])
}

/// What is the same in the result of the host's node and of the operator's: the rows of each partition; where several become
/// one, all rows in any order; with a limit any so many.
fn same(line: &str, partitions: &[Vec<RecordBatch>], from: usize) -> Vec<Vec<String>> {
    let mut lines: Vec<_> = partitions.iter().map(|p| lines(p)).collect();
    if line.starts_with("CoalescePartitions") && from > 1 {
        match line.contains("20") {
            true => return vec![vec![lines.concat().len().to_string()]],
            false => lines.iter_mut().for_each(|rows| rows.sort_unstable()),
        }
    }
    lines
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

/// The same, on the host.
async fn run_down(plan: &Plan, device: &Device) -> (Vec<Vec<RecordBatch>>, TransferStats) {
    let (found, cost) = run_on_device(plan, device).await.unwrap();
    (found.iter().map(|batches| to_host(batches)).collect(), cost)
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

async fn leaf_of(
    device: &Device,
    schema: &SchemaRef,
    partitions: Vec<Vec<DeviceRecordBatch>>,
) -> Plan {
    let table = DeviceTable::from_batches(schema.clone(), device.clone(), partitions);
    device_leaf(Arc::new(table.unwrap())).await
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
    let there = partitions.iter().map(|p| p.iter().map(up).collect());
    let there = leaf_of(sim, &schema, there.collect()).await;
    for line in cases(partitions.len(), schema.fields().len()) {
        let own = form(over_x(line, &there), sim);
        let name = format!("{line} of {partitions:?}");
        let (batches, cost) = run_down(&own, sim).await;
        assert_nothing_moved(&cost, &name);
        if partitions.is_empty() {
            assert_eq!(batches.concat().len(), 0, "{name}");
            continue;
        }
        let memory = MemTable::try_new(schema.clone(), host.clone()).unwrap();
        let node = over_x(line, &scan(Arc::new(memory)).await);
        assert_eq!(own.schema(), node.schema(), "{name}");
        let mut all = batches.iter().flatten();
        assert!(all.all(|b| b.schema() == node.schema()), "{name}");
        let same = |batches| same(line, batches, partitions.len());
        assert_eq!(same(&batches), same(&run_on_host(node).await), "{name}");
    }
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
    for line in cases(2, 3) {
        let leaf = scan(host_table(&[vec![rows(0, 40)], vec![rows(40, 40)]])).await;
        let (found, _) = run_down(&form(over_x(line, &leaf), &sim), &sim).await;
        let expected = run_on_host(over_x(line, &leaf)).await;
        assert_eq!(same(line, &found, 2), same(line, &expected, 2), "{line}");
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
    let (mut on_device, mut on_host) = (Vec::new(), Vec::new());
    for batch in [
        batch("x", false, "left", vec![Some(1), Some(2)]),
        batch("y", true, "right", vec![None, Some(3)]),
    ] {
        on_device.push(device_leaf(device_table(&sim, &[vec![batch.clone()]])).await);
        on_host.push(scan(host_table(&[vec![batch]])).await);
    }
    let (plan, host) = (form(union(on_device), &sim), union(on_host));
    assert_eq!(plan.schema(), host.schema());
    let (batches, cost) = run_down(&plan, &sim).await;
    assert_nothing_moved(&cost, "union");
    assert_eq!(batches, run_on_host(host).await);
    // A scan's batches may have other metadata than its table's schema.
    let schema = numbers(0, 1).schema();
    let metadata = [("of".to_owned(), "the batch".to_owned())].into();
    let other = Arc::new(Schema::clone(&schema).with_metadata(metadata));
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let batch = batch.with_schema(other).unwrap();
    let leaf = leaf_of(&sim, &schema, vec![vec![batch]]).await;
    let plan = form(union([leaf.clone(), leaf]), &sim);
    let (batches, _) = run_down(&plan, &sim).await;
    let mut all = batches.iter().flatten();
    assert!(all.all(|batch| batch.schema() == schema));
}

/// Expressions, types that change, merges of sorted partitions, and hash partitions need kernels.
#[tokio::test]
async fn what_needs_a_kernel_has_no_form() {
    let sim = Sim::new();
    let made = |line| planned(line, &[&sim], &[]);
    let (one, two) = (made("Scan A"), made("Scan A 2"));
    let a = || col("a", &one.schema()).unwrap();
    let cast = |to| {
        let field = Arc::new(Field::new("x", to, true));
        let cast = CastExpr::new_with_target_field(a(), field, None);
        projected(one.clone(), Arc::new(cast))
    };
    for (node, has_form) in [
        (projected(one.clone(), a()), true),
        (cast(DataType::Int64), true),
        (cast(DataType::Int32), false),
        (projected(one.clone(), lit(1i64)), false),
        (made("SortPreservingMerge < Scan A 2"), false),
        (made("Repartition 2 < Scan A 2"), false),
        (made("Repartition a 2 < Scan A 2"), false),
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
    for line in cases(1, 1) {
        let host = broken(2, || DataFusionError::Execution("the third".into())).await;
        let stream = started(&over_x(line, &host));
        let expected = rows_before_an_error(stream.map_ok(|batch| batch.num_rows())).await;
        plans.push((form(over_x(line, &leaf), &sim), expected));
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
    for line in cases(1, 1).into_iter().chain(["Joining"]) {
        let (table, asked, gone) = watched(&sim);
        let leaf = device_leaf(table).await;
        let plan = match line {
            "Joining" => joining(leaf, &sim, 100),
            line => form(over_x(line, &leaf), &sim),
        };
        let node = DeviceExec::of(&plan).unwrap();
        let partitions = plan.output_partitioning().partition_count();
        let start = |p| node.execute_device(p, session().task_ctx()).unwrap();
        let mut streams: Vec<_> = (0..partitions).map(start).collect();
        let first = streams[0].next().await;
        assert!(first.is_none_or(|batch| batch.is_ok()));
        drop(streams);
        eventually("the input is dropped", || gone.load(SeqCst));
        assert!(asked.load(SeqCst) < MANY, "{line}");
    }
    sim.assert_done();
}
