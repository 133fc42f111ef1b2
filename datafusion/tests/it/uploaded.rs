//! What a plugin wants of uploads: other types, and all partitions as one.

use std::sync::{Arc, Mutex};

use arrow_device_datafusion::{
    DeviceOperator, DeviceOptions, DevicePlugin, DeviceRule, DeviceSpec, DeviceTask,
    SendableDeviceStream, Verdict, execute_on_device,
};
use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray, StringViewArray};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::DataType::{self, *};
use datafusion::arrow::datatypes::{Field, Schema};
use datafusion::common::Result;
use datafusion::common::config::ConfigOptions;
use datafusion::execution::SessionStateBuilder;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::physical_expr::Partitioning;
use datafusion::physical_expr::expressions::{col, lit};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlanProperties;
use datafusion::physical_plan::execution_plan::reset_plan_states;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::{collect, collect_partitioned};
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::{StreamExt, TryStreamExt};

use crate::kit::*;
use crate::nodes::*;

/// Runs filters that keep all rows, and wants text, decoded dictionaries and wide decimals.
#[derive(Debug, Default)]
struct Passing {
    merges: bool,
    /// The types of each batch that came up.
    seen: Arc<Mutex<Vec<Vec<DataType>>>>,
}

/// The operator, which passes on what it gets.
#[derive(Debug)]
struct PassExec(&'static str, Arc<Mutex<Vec<Vec<DataType>>>>);

impl DevicePlugin for Passing {
    fn can_run(&self, node: &Plan, _: &DeviceSpec) -> Verdict {
        match node.is::<FilterExec>() {
            true => Verdict::Runs,
            false => Verdict::Unknown,
        }
    }

    fn replace(&self, node: &Plan) -> Result<Arc<dyn DeviceOperator>> {
        let upper = node.children()[0].name() == "LowerExec";
        let name = if upper { "UpperExec" } else { "LowerExec" };
        Ok(Arc::new(PassExec(name, self.seen.clone())))
    }

    fn upload_type(&self, data_type: &DataType) -> Option<DataType> {
        match data_type {
            Utf8View => Some(Utf8),
            Dictionary(_, values) => Some((**values).clone()),
            Decimal128(precision, scale) => Some(Decimal256(*precision, *scale)),
            _ => None,
        }
    }

    fn merges_uploads(&self) -> bool {
        self.merges
    }
}

impl DeviceOperator for PassExec {
    fn name(&self) -> &str {
        self.0
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let (input, seen) = (task.input(0)?, self.1.clone());
        let schema = input.schema();
        let batches = input.map(move |batch| {
            let batch = batch?;
            let types = batch.columns().map(|column| column.data_type().clone());
            seen.lock().unwrap().push(types.collect());
            Ok(batch)
        });
        Ok(task.stream_of(schema, batches))
    }

    fn has_small_batches(&self, _: &dyn datafusion::physical_plan::ExecutionPlan) -> bool {
        false
    }
}

/// `n` rows from `first`, whose columns all say the number of the row.
fn typed(first: i64, n: i64) -> RecordBatch {
    let numbers = Int64Array::from_iter_values(first..first + n);
    let text = |i: i64| (i % 3 != 0).then(|| format!("the text of row {i}"));
    let texts = (first..first + n).map(text);
    let as_type = |to: &DataType| cast(&numbers, to).unwrap();
    let strings: ArrayRef = Arc::new(StringArray::from_iter(texts.clone()));
    let dictionary = Dictionary(Int32.into(), Utf8.into());
    let columns: [(&str, ArrayRef); 4] = [
        ("a", as_type(&Int64)),
        ("v", Arc::new(StringViewArray::from_iter(texts))),
        ("d", cast(&strings, &dictionary).unwrap()),
        ("n", as_type(&Decimal128(20, 2))),
    ];
    let metadata = [("unit".to_owned(), "row".to_owned())];
    let fields = columns.iter().map(|(name, column)| {
        let nullable = matches!(*name, "v" | "d");
        let field = Field::new(*name, column.data_type().clone(), nullable);
        field.with_metadata(metadata.clone().into())
    });
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let columns = columns.map(|(_, column)| column).to_vec();
    RecordBatch::try_new(schema, columns).unwrap()
}

const THERE: [DataType; 4] = [Int64, Utf8, Utf8, Decimal256(20, 2)];

/// Three partitions of a table on the host.
async fn typed_scan() -> Plan {
    let partition = |i: i64| vec![typed(i * 20, 10), typed(i * 20 + 10, 10)];
    scan(host_table(&[0, 1, 2].map(partition))).await
}

fn pass(child: Plan) -> Plan {
    Arc::new(FilterExec::try_new(lit(true), child).unwrap())
}

/// The plan with the plugin's operators, which the rule leaves as it is the next time.
fn placed_by(plan: &Plan, plugin: Passing) -> Plan {
    let rule = DeviceRule::default()
        .with_plugin(Arc::new(plugin))
        .with_uploads(any_sim(), 0);
    let run = |plan: &Plan| rule.optimize(plan.clone(), &ConfigOptions::default());
    let placed = run(plan).unwrap();
    let again = run(&placed).unwrap();
    assert_eq!(text(&again, &[]), text(&placed, &[]));
    placed
}

/// All rows of each plan, in the order of `a`, as one batch of the plan's schema.
async fn all_rows(plan: &Plan, context: &SessionContext) -> RecordBatch {
    let fresh = reset_plan_states(plan.clone()).unwrap();
    sorted_rows(&collect(fresh, context.task_ctx()).await.unwrap())
}

fn sorted_rows(batches: &[RecordBatch]) -> RecordBatch {
    use datafusion::arrow::compute::{concat_batches, sort_to_indices, take_record_batch};
    let all = concat_batches(&batches[0].schema(), batches).unwrap();
    let order = sort_to_indices(all.column(0), None, None).unwrap();
    take_record_batch(&all, &order).unwrap()
}

#[tokio::test]
async fn columns_go_up_in_the_plugins_types_and_come_down_in_the_plans() {
    let (host, plugin) = (pass(typed_scan().await), Passing::default());
    let seen = plugin.seen.clone();
    let plan = placed_by(&host, plugin);
    let up = "HostToDeviceExec: device=sim, v as Utf8, d as Utf8, n as Decimal256(20, 2)";
    assert!(text(&plan, &[]).contains(up), "{}", text(&plan, &[]));
    let expected = all_rows(&host, &session()).await;
    assert_eq!(all_rows(&plan, &session()).await, expected);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert!(
        !seen.is_empty() && seen.iter().all(|types| *types == THERE),
        "{seen:?}"
    );
}

/// Nodes without kernels keep the types that columns have on the device.
#[tokio::test]
async fn forms_and_moves_keep_the_types_on_the_device() {
    let columns = [(0, "a"), (3, "m"), (1, "w"), (2, "d")];
    let both = union([pass(typed_scan().await), pass(typed_scan().await)]);
    let host = pass(on_host(project(both, &columns)));
    let plugin = Passing::default();
    let seen = plugin.seen.clone();
    let plan = placed_by(&host, plugin);
    let expected = "Down < Upper < CoalescePartitions < Projection < Union < (Lower < Up < DataSource, Lower < Up < DataSource)";
    let shape = shape(&plan, &[])
        .replace("Upper", "Lower")
        .replacen("Lower", "Upper", 1);
    assert_eq!(shape, expected);
    assert_eq!(
        all_rows(&plan, &session()).await,
        all_rows(&host, &session()).await
    );
    let top = [Int64, Decimal256(20, 2), Utf8, Utf8];
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert!(
        seen.iter().all(|types| *types == THERE || *types == top),
        "{seen:?}"
    );
    assert!(seen.contains(&top.to_vec()));
}

/// Rows of a table on the device have its own types. Where they meet uploaded ones, all get the plan's.
#[tokio::test]
async fn partitions_of_different_types_get_the_plans() {
    let sim = Sim::new();
    let table = scan(device_table(&sim, &[vec![typed(100, 10)]])).await;
    let host = pass(on_host(union([pass(typed_scan().await), pass(table)])));
    let plugin = Passing::default();
    let seen = plugin.seen.clone();
    let plan = placed_by(&host, plugin);
    assert_eq!(
        all_rows(&plan, &session()).await,
        all_rows(&host, &session()).await
    );
    let own: Vec<_> = host
        .schema()
        .fields()
        .iter()
        .map(|f| f.data_type().clone())
        .collect();
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert!(
        seen.contains(&own) && seen.contains(&THERE.to_vec()),
        "{seen:?}"
    );
    drop(plan);
}

/// Who gets a plan's result on a device gets the plan's types.
#[tokio::test]
async fn results_on_a_device_and_inserted_rows_have_the_plans_types() {
    let sim = Sim::new();
    let host = pass(typed_scan().await);
    let expected = all_rows(&host, &session()).await;
    let plan = placed_by(&host, Passing::default());
    let stream = execute_on_device(plan.clone(), session().task_ctx(), &sim).unwrap();
    assert_eq!(stream.schema(), host.schema());
    let batches: Vec<_> = stream.try_collect().await.unwrap();
    assert_eq!(sorted_rows(&to_host(&batches)), expected);

    let table = device_table_of(&sim, host.schema(), &[vec![]]);
    let insert = table.insert_on_device(plan, InsertOp::Append).unwrap();
    let insert: Plan = Arc::new(insert);
    collect(insert, session().task_ctx()).await.unwrap();
    assert_eq!(all_rows(&scan(table).await, &session()).await, expected);
}

/// An operator on a device above one that runs on the host has its input in the plugin's types.
#[tokio::test]
async fn the_host_works_in_the_plans_types() {
    let host = pass(pass(typed_scan().await));
    let expected = all_rows(&host, &session()).await;
    for (disabled, upper, enabled) in [
        ("LowerExec", 3, true),
        ("UpperExec", 6, true),
        ("", 0, false),
    ] {
        let plugin = Passing::default();
        let seen = plugin.seen.clone();
        let plan = placed_by(&host, plugin);
        let mut options = DeviceOptions::default();
        (options.disable, options.enable) = (disabled.to_owned(), enabled);
        options.upload_rows = 0;
        let config = SessionConfig::new().with_option_extension(options);
        let context = SessionContext::new_with_config(config);
        assert_eq!(all_rows(&plan, &context).await, expected, "{disabled}");
        let seen = std::mem::take(&mut *seen.lock().unwrap());
        assert_eq!(seen.len(), upper, "{disabled}");
        assert!(seen.iter().all(|types| *types == THERE), "{seen:?}");
    }
}

fn merging() -> Passing {
    let merges = true;
    Passing {
        merges,
        ..Default::default()
    }
}

/// All partitions go up as one, and the rows are distributed as before above the operators. Those with an order, or distributed by their values, stay.
#[tokio::test]
async fn partitions_go_up_as_one() {
    let scan = typed_scan().await;
    let a = col("a", &scan.schema()).unwrap();
    let hash = Partitioning::Hash(vec![a], 4);
    let hashed: Plan = Arc::new(RepartitionExec::try_new(scan.clone(), hash.clone()).unwrap());
    let sorted: Plan = {
        let sort = sort(scan.clone());
        let sort = sort.downcast_ref::<datafusion::physical_plan::sorts::sort::SortExec>();
        Arc::new(sort.unwrap().clone().with_preserve_partitioning(true))
    };
    let cases = [
        (
            pass(scan.clone()),
            "Repartition < Down < Lower < Up < CoalescePartitions < DataSource",
            3,
        ),
        (
            pass(hashed),
            "Down < Lower < Up < Repartition < DataSource",
            4,
        ),
        (pass(sorted), "Down < Lower < Up < Sort < DataSource", 3),
        (
            on_host(pass(scan.clone())),
            "CoalescePartitions < Down < Lower < Up < CoalescePartitions < DataSource",
            1,
        ),
        (
            pass(on_host(scan)),
            "Down < Lower < Up < CoalescePartitions < DataSource",
            1,
        ),
    ];
    for (host, expected, partitions) in cases {
        let plan = placed_by(&host, merging());
        assert_eq!(shape(&plan, &[]), expected);
        assert_eq!(plan.output_partitioning().partition_count(), partitions);
        if let Partitioning::Hash(by, _) = host.output_partitioning() {
            assert!(matches!(plan.output_partitioning(), Partitioning::Hash(own, 4) if own == by));
        }
        assert_eq!(plan.output_ordering(), host.output_ordering());
        assert_eq!(
            all_rows(&plan, &session()).await,
            all_rows(&host, &session()).await
        );
        if host.output_ordering().is_some() {
            let fresh = reset_plan_states(plan).unwrap();
            let context = session().task_ctx();
            let partitions = collect_partitioned(fresh, context).await.unwrap();
            for partition in partitions {
                assert!(numbers_of(&partition).is_sorted());
            }
        }
    }
}

/// The partitions of a worker's task may be started apart from each other.
#[tokio::test]
async fn a_workers_task_keeps_its_partitions() {
    let host = pass(typed_scan().await);
    let rule = DeviceRule::default()
        .with_plugin(Arc::new(merging()))
        .with_uploads(any_sim(), 0);
    let plan = rule.rewrite(host, &ConfigOptions::default()).unwrap();
    assert_eq!(shape(&plan, &[]), "Down < Lower < Up < DataSource");
}

/// Declines all.
#[derive(Debug)]
struct Declining;

impl DevicePlugin for Declining {
    fn can_run(&self, node: &Plan, _: &DeviceSpec) -> Verdict {
        match node.name() {
            "FilterExec" => Verdict::stays("no kernel for <"),
            "SortExec" => Verdict::stays("too few rows"),
            _ => Verdict::Unknown,
        }
    }

    fn replace(&self, _: &Plan) -> Result<Arc<dyn DeviceOperator>> {
        unreachable!()
    }
}

#[tokio::test]
async fn explain_analyze_says_which_nodes_were_declined() {
    let rule = DeviceRule::default()
        .with_plugin(Arc::new(Declining))
        .with_uploads(any_sim(), 0);
    let state = SessionStateBuilder::new().with_default_features();
    let state = state.with_physical_optimizer_rule(Arc::new(rule));
    let context = SessionContext::new_with_state(state.build());
    register(&context, "t", host_table(&[vec![rows(0, 100)]]));
    let sql = "SELECT * FROM t WHERE a < 5 ORDER BY b";
    let shown = |batches: Vec<RecordBatch>| {
        datafusion::arrow::util::pretty::pretty_format_batches(&batches)
            .unwrap()
            .to_string()
    };
    let analyzed = shown(
        query(&context, &format!("EXPLAIN ANALYZE {sql}"))
            .await
            .unwrap(),
    );
    for why in ["FilterExec: no kernel for <", "SortExec: too few rows"] {
        assert!(analyzed.contains(why), "{analyzed}");
    }
    assert_eq!(row_count(&query(&context, sql).await.unwrap()), 5);
}
