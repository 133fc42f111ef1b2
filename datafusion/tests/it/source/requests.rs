//! What reaches a source: columns, limit, and the device.

use std::sync::Arc;

use arrow_device::Error;
use arrow_device_datafusion::{DeviceTable, DeviceTransitions, execute_on_device};
use datafusion::arrow::array::RecordBatch;
use datafusion::execution::SessionStateBuilder;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::StreamExt;

use super::watched::Watched;
use crate::kit::*;

pub(super) fn batches(partitions: usize) -> Vec<Vec<RecordBatch>> {
    let partition = |p: usize| (0..3).map(|i| rows((p * 3 + i) as i64 * 16, 16)).collect();
    (0..partitions).map(partition).collect()
}

/// The text of a query's result, rows in any order.
pub(super) async fn texts(ctx: &SessionContext, sql: &str) -> Vec<String> {
    let found = query(ctx, sql).await.unwrap();
    let found = datafusion::arrow::util::pretty::pretty_format_batches(&found).unwrap();
    let mut lines: Vec<_> = found.to_string().lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Runs a query over a source and over the same rows on the host, with the rule and without.
pub(super) async fn same_as_host(
    table: Arc<DeviceTable>,
    partitions: &[Vec<RecordBatch>],
    sql: &str,
) {
    for with_rule in [true, false] {
        let config = SessionConfig::new().with_target_partitions(partitions.len());
        let mut state = SessionStateBuilder::new()
            .with_config(config)
            .with_default_features();
        if with_rule {
            state = state.with_physical_optimizer_rule(Arc::new(DeviceTransitions));
        }
        let ctx = SessionContext::new_with_state(state.build());
        register(&ctx, "t", table.clone());
        let found = texts(&ctx, sql).await;
        ctx.deregister_table("t").unwrap();
        register(&ctx, "t", host_table(partitions));
        assert_eq!(
            found,
            texts(&ctx, sql).await,
            "{sql} with the rule: {with_rule}"
        );
    }
}

#[tokio::test]
async fn columns_and_limit_are_what_the_query_asks_for() {
    let sim = Sim::new();
    for projects in [true, false] {
        for (sql, expected) in [
            ("SELECT * FROM t", "columns=None filters=[] fetch=None"),
            ("SELECT s FROM t", "columns=Some([2]) filters=[] fetch=None"),
            (
                "SELECT s, a FROM t",
                "columns=Some([2, 0]) filters=[] fetch=None",
            ),
            (
                "SELECT count(b) AS n FROM t",
                "columns=Some([1]) filters=[] fetch=None",
            ),
            (
                "SELECT b FROM t LIMIT 5",
                "columns=Some([1]) filters=[] fetch=Some(5)",
            ),
            (
                "SELECT b FROM t LIMIT 5 OFFSET 20",
                "columns=Some([1]) filters=[] fetch=Some(25)",
            ),
            (
                "SELECT a FROM t WHERE b < 3 LIMIT 2",
                "columns=Some([0, 1]) filters=[] fetch=None",
            ),
        ] {
            let mut source = Watched::new(&sim, &batches(1));
            source.projects = projects;
            let requests = source.requests.clone();
            let table = source.table();
            same_as_host(table, &batches(1), sql).await;
            let expected = format!("0: {expected}");
            // With the rule and without.
            assert_eq!(requests.take(), [expected.clone(), expected], "{sql}");
        }
    }
    sim.assert_done();
}

/// Only the columns that are asked for are on the device at all, and no batch after the last one that is needed.
#[tokio::test]
async fn a_source_that_projects_uploads_no_more() {
    let sim = Sim::new();
    let source = Watched::new(&sim, &batches(1));
    let uploaded = source.uploaded.clone();
    let ctx = over(source.table());
    let before = sim.stats();
    let found = numbers_in(&ctx, "SELECT b FROM t LIMIT 20").await;
    assert_eq!(found, (0..20).map(|i| i % 10).collect::<Vec<_>>());
    let moved = sim.stats().since(&before);
    assert_eq!(*uploaded.lock().unwrap(), [16, 16]);
    assert_eq!(moved.bytes_to_device, 2 * 16 * 8);
    assert_eq!(moved.bytes_to_host, 20 * 8);
    drop(ctx);
    sim.assert_done();
}

/// A projection above the scan narrows it.
#[tokio::test]
async fn a_projection_that_drops_columns_becomes_the_scans() {
    use datafusion::physical_expr::expressions::col;
    use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
    let sim = Sim::new();
    let source = Watched::new(&sim, &batches(1));
    let requests = source.requests.clone();
    let scan = scan(source.table()).await;
    let names = ["s", "a"].map(|name| ProjectionExpr {
        expr: col(name, &scan.schema()).unwrap(),
        alias: name.into(),
    });
    let projection = ProjectionExec::try_new(names, scan.clone()).unwrap();
    let narrowed = scan.try_swapping_with_projection(&projection).unwrap();
    let narrowed = narrowed.unwrap();
    assert_eq!(
        narrowed.schema().fields(),
        projection_schema(&projection).fields()
    );
    assert_plan(
        &narrowed,
        &[&sim],
        "
        DeviceToHostExec: device=A
          DeviceScanExec: device=A, partitions=1, projection=[s, a]
        ",
    );
    // Twice: the columns are the scan's.
    let again = [ProjectionExpr {
        expr: col("a", &narrowed.schema()).unwrap(),
        alias: "a".into(),
    }];
    let again = ProjectionExec::try_new(again, narrowed.clone()).unwrap();
    let last = narrowed
        .try_swapping_with_projection(&again)
        .unwrap()
        .unwrap();
    let mut stream = execute_on_device(last, session().task_ctx(), &sim).unwrap();
    let batch = stream.next().await.unwrap().unwrap().to_host().unwrap();
    assert_eq!(numbers_of(&[batch]), (0..16).collect::<Vec<_>>());
    assert_eq!(
        requests.take(),
        ["0: columns=Some([0]) filters=[] fetch=None"]
    );
}

fn projection_schema(
    projection: &datafusion::physical_plan::projection::ProjectionExec,
) -> datafusion::arrow::datatypes::SchemaRef {
    use datafusion::physical_plan::ExecutionPlan;
    projection.schema()
}

/// What comes is checked, and the error says what was wrong.
#[tokio::test]
async fn batches_on_another_device_or_of_another_schema_are_refused() {
    let (a, b) = (Sim::new(), Sim::new());
    let wrong = b.upload(&numbers(0, 16)).unwrap();
    let schema = numbers(0, 1).schema();
    let of = wrong.clone();
    let table = DeviceTable::from_streams(schema.clone(), a.device.clone(), 1, move |request| {
        let stream = request.stream(futures::stream::iter([Ok(of.clone())]));
        async move { Ok(stream) }
    });
    let error = query(&over(Arc::new(table)), "SELECT a FROM t")
        .await
        .unwrap_err();
    assert!(
        matches!(ours(&error), Error::InvalidArgument(_)),
        "{error:?}"
    );
    for text in ["DeviceScanExec", &a.id().to_string(), &b.id().to_string()] {
        assert!(error.to_string().contains(text), "{error}");
    }
    let wrong = a.upload(&rows(0, 16)).unwrap();
    let table = DeviceTable::from_streams(schema, a.device.clone(), 1, move |request| {
        let stream = request.stream(futures::stream::iter([Ok(wrong.clone())]));
        async move { Ok(stream) }
    });
    let error = query(&over(Arc::new(table)), "SELECT a FROM t")
        .await
        .unwrap_err();
    for text in ["DeviceScanExec", "another schema", "\"s\": nullable Utf8"] {
        assert!(error.to_string().contains(text), "{error}");
    }
}
