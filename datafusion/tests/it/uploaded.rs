//! How rows of the host go up: in the types that a plugin wants, and in batches that are not too small.

use std::time::Duration;

use datafusion::arrow::compute::{sort_to_indices, take_record_batch};
use datafusion::arrow::datatypes::DataType::{self, *};
use datafusion::common::Result;

use crate::kit::*;
use crate::nodes::*;
use crate::operator::{Operator, Runs, State};
use crate::placed::{placed, rule};
use crate::plans::assert_becomes;
use crate::support::compare::assert_same_batch;
use crate::support::r#gen::{Nulls, batch};
use crate::support::types::all_types;

/// The types of each batch that came up.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<Vec<DataType>>>>);

impl Seen {
    fn take(&self) -> Vec<Vec<DataType>> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    /// Runs filters that keep all rows, and sorts, by operators that pass on what they get. It wants text, decoded dictionaries
    /// and wide decimals. Of two in a row the upper one has another name.
    fn plugin(&self) -> Runs {
        let seen = self.clone();
        let make = move |node: &Plan| -> Result<Arc<dyn DeviceOperator>> {
            let upper =
                !["HostToDeviceExec", "DeviceScanExec"].contains(&node.children()[0].name());
            let name = if upper { "UpperExec" } else { "PassExec" };
            let seen = seen.clone();
            let pass = move |state: &mut State, cx: &mut Context<'_>| {
                let batch = ready!(state.next(cx));
                if let Some(Ok(batch)) = &batch {
                    let types = batch.columns().map(|column| column.data_type().clone());
                    seen.0.lock().unwrap().push(types.collect());
                }
                Poll::Ready(batch)
            };
            let mut operator = Operator::new(name, pass);
            operator.runs_on_host = true;
            Ok(Arc::new(operator))
        };
        Runs {
            names: &["FilterExec", "SortExec"],
            make: Some(Arc::new(make)),
            types: Some(|data_type| match data_type {
                Utf8View => Some(Utf8),
                Dictionary(_, values) => Some((**values).clone()),
                Decimal128(precision, scale) => Some(Decimal256(*precision, *scale)),
                _ => None,
            }),
            ..Runs::default()
        }
    }
}

/// `n` rows from `first`, whose columns all say the number of the row.
fn typed(first: i64, n: i64) -> RecordBatch {
    let numbers = Int64Array::from_iter_values(first..first + n);
    let text = |i: i64| (i % 3 != 0).then(|| format!("the text of row {i}"));
    let texts = (first..first + n).map(text);
    let strings: ArrayRef = Arc::new(StringArray::from_iter(texts.clone()));
    let dictionary = Dictionary(Int32.into(), Utf8.into());
    let columns: [(&str, ArrayRef); 4] = [
        ("a", Arc::new(numbers.clone())),
        ("v", Arc::new(StringViewArray::from_iter(texts))),
        ("d", cast(&strings, &dictionary).unwrap()),
        ("n", cast(&numbers, &Decimal128(20, 2)).unwrap()),
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

#[tokio::test]
async fn columns_go_up_in_the_plugins_types_and_come_down_in_the_plans() {
    let sim = Sim::new();
    let host = typed_scan().await;
    let there = scan(device_table(&sim, &[vec![typed(100, 10)]])).await;
    let types = |plan: &Plan| -> Vec<DataType> {
        let fields = plan.schema().fields().clone();
        fields.iter().map(|f| f.data_type().clone()).collect()
    };
    let seen = Seen::default();
    let rule = rule(seen.plugin()).with_uploads(any_sim(), 0);
    for (table, expected) in [
        (
            "Filter true < Host
             Down < CoalesceBatches < Pass < Up < DataSource",
            vec![THERE.to_vec()],
        ),
        (
            // Nodes without kernels keep the types that columns have on the device.
            "Filter true < CoalescePartitions < Projection a n:m v:w d < Union < (Filter true < Host, Filter true < Host)
             Down < CoalesceBatches < Upper < CoalescePartitions < Projection < Union < (CoalesceBatches < Pass < Up < DataSource, CoalesceBatches < Pass < Up < DataSource)",
            vec![THERE.to_vec(), vec![Int64, Decimal256(20, 2), Utf8, Utf8]],
        ),
        (
            // Rows of a table on the device have its own types. Where they meet uploaded ones, all get the plan's.
            "Filter true < CoalescePartitions < Union < (Filter true < Host, Filter true < There)
             Down < CoalesceBatches < Pass < Up < CoalescePartitions < Union < (Down < CoalesceBatches < Pass < Up < DataSource, Down < CoalesceBatches < Pass < Scan)",
            vec![THERE.to_vec(), types(&there)],
        ),
    ] {
        let own = [("Host", &host), ("There", &there)];
        assert_becomes(|plan| placed(plan, &rule), &[], &own, table).await;
        let seen = seen.take();
        assert!(seen.iter().all(|types| expected.contains(types)), "{seen:?}");
        assert!(expected.iter().all(|types| seen.contains(types)), "{seen:?}");
    }
    let plan = placed(
        planned("Filter true < Host", &[], &[("Host", &host)]),
        &rule,
    );
    let up = "HostToDeviceExec: device=sim, v as Utf8, d as Utf8, n as Decimal256(20, 2)";
    says(&text(&plan, &[]), &[up]);
}

/// All rows, in the order of `a`, as one batch.
fn by_number(batches: &[RecordBatch]) -> RecordBatch {
    let all = concat_batches(&batches[0].schema(), batches).unwrap();
    let order = sort_to_indices(all.column(0), None, None).unwrap();
    take_record_batch(&all, &order).unwrap()
}

/// Who gets a plan's result on a device gets the plan's types, and so does a table there.
#[tokio::test]
async fn results_on_a_device_and_inserted_rows_have_the_plans_types() {
    let sim = Sim::new();
    let host = typed_scan().await;
    let expected = by_number(&run(&host).await.unwrap());
    let seen = Seen::default();
    let rule = rule(seen.plugin()).with_uploads(any_sim(), 0);
    let made = |line| placed(planned(line, &[], &[("Host", &host)]), &rule);
    let plan = made("Filter true < Host");
    let stream = started_on(&plan, &sim);
    assert_eq!(stream.schema(), host.schema());
    let batches: Vec<_> = stream.try_collect().await.unwrap();
    assert_eq!(by_number(&to_host(&batches)), expected);
    let table = device_table_of(&sim, host.schema(), &[vec![]]);
    let insert = table.insert_on_device(plan, InsertOp::Append).unwrap();
    let insert: Plan = Arc::new(insert);
    run(&insert).await.unwrap();
    let found = run(&scan(table).await).await.unwrap();
    assert_eq!(by_number(&found), expected);
}

/// Also above what joins batches, cuts or gathers them, and where other partitions come from the device.
#[tokio::test]
async fn an_operator_above_one_on_the_host_gets_the_plugins_types() {
    let (sim, host, seen) = (Sim::new(), typed_scan().await, Seen::default());
    let there = device_leaf(device_table(&sim, &[vec![typed(100, 10)]])).await;
    let rule = rule(seen.plugin()).with_uploads(&sim, 0);
    for line in [
        "Sort < Sort < Host",
        "Filter true < Filter true < Host",
        "Filter true < LocalLimit 15 < Filter true < Host",
        "Filter true < CoalescePartitions < Filter true < Host",
        "Filter true < Union < (Filter true < Filter true < Host, Filter true < Host)",
        "Filter true < CoalescePartitions < Union < (Filter true < Filter true < Host, Filter true < Host)",
        "Filter true < CoalescePartitions < Union < (There, Filter true < Host)",
    ] {
        let plan = || planned(line, &[], &[("Host", &host), ("There", &there)]);
        let expected = by_number(&run(&plan()).await.unwrap());
        for (disabled, runs, enabled) in [
            ("PassExec", true, true),
            ("UpperExec", true, true),
            ("PassExec, UpperExec", false, true),
            ("", false, false),
        ] {
            let config = config(|options| {
                (options.disable, options.enable) = (disabled.to_owned(), enabled);
                options.upload_rows = if disabled == "UpperExec" { 0 } else { 1000 };
            });
            let found = collect(placed(plan(), &rule), task(config)).await.unwrap();
            assert_eq!(by_number(&found), expected, "{disabled}, {line}");
            let seen = seen.take();
            assert!(seen.iter().all(|types| *types == THERE), "{line}: {seen:?}");
            assert_eq!(!seen.is_empty(), runs, "{disabled}, {line}");
        }
    }
}

/// 100 values each, others in each batch, with keys of one byte.
#[tokio::test]
async fn dictionaries_with_small_keys_come_down_again() {
    let batch = |first: i64| {
        let values = StringArray::from_iter_values((first..first + 100).map(|i| i.to_string()));
        let keys = Int8Array::from_iter_values(0..100);
        let d = DictionaryArray::<Int8Type>::new(keys, Arc::new(values));
        let a = Int64Array::from_iter_values(first..first + 100);
        let columns: [(&str, ArrayRef); 2] = [("a", Arc::new(a)), ("d", Arc::new(d))];
        RecordBatch::try_from_iter(columns).unwrap()
    };
    let host = scan(host_table(&[vec![batch(0), batch(100)]])).await;
    let rule = rule(Seen::default().plugin()).with_uploads(any_sim(), 0);
    let plan = placed(
        planned("Filter true < Host", &[], &[("Host", &host)]),
        &rule,
    );
    let found = collect(plan, SessionContext::new().task_ctx()).await;
    assert_eq!(lines(&found.unwrap()), lines(&run(&host).await.unwrap()));
}

type Up = Vec<arrow_device::Result<DeviceRecordBatch>>;

/// What comes up of a host plan that gives these batches, in a session that joins them to so many rows, whatever that takes.
async fn uploaded(given: Vec<Result<RecordBatch>>, rows: usize, sim: &Sim) -> Up {
    let schema = given.iter().flatten().next().unwrap().schema();
    let given = Mutex::new(given.into_iter());
    let (table, _) = host_stream_of(schema, move |_| given.lock().unwrap().next());
    let context = task(config(|options| options.upload_rows = rows));
    let stream = execute_on_device(scan(table).await, context, sim).unwrap();
    stream.collect().await
}

/// The same, all of which must come, back on the host.
async fn back(given: &[RecordBatch], rows: usize) -> Vec<RecordBatch> {
    let given = given.iter().cloned().map(Ok).collect();
    let up = uploaded(given, rows, &Sim::new()).await.into_iter();
    up.map(|batch| batch.unwrap().to_host().unwrap()).collect()
}

/// Every type: whole batches and slices, with and without nulls.
#[tokio::test]
async fn values_are_those_of_the_parts() {
    let sizes = [7, 1, 30, 5];
    let nulls = [Nulls::Some, Nulls::None, Nulls::Some, Nulls::All];
    let mut joined_types = 0;
    for (name, data_type) in all_types() {
        let types = [data_type.clone(), Int32];
        let part = |i: usize| {
            let rows = sizes[i];
            batch(&types, rows + 4, nulls[i], i as u64 + 1).slice(3, rows)
        };
        let parts: Vec<_> = (0..4).map(part).collect();
        let mut up = back(&parts, 1000).await;
        if up.len() == 1 {
            let data_type = format!("{data_type:?}");
            let fails_at_times = ["Dictionary", "RunEndEncoded"];
            assert!(!fails_at_times.iter().any(|kind| data_type.contains(kind)));
            assert_eq!(up[0].num_rows(), 43, "{name}");
            joined_types += 1;
            let mut first = 0;
            let cut = sizes.map(|rows| {
                first += rows;
                up[0].slice(first - rows, rows)
            });
            up = cut.to_vec();
        }
        assert_eq!(up.len(), 4, "{name}");
        for (part, up) in parts.iter().zip(&up) {
            assert_same_batch(part, up, &name);
        }
    }
    assert!(joined_types > 30, "{joined_types} types");
}

#[tokio::test]
async fn where_batches_end() {
    for (given, target, expected) in [
        // They are not cut.
        (&[3, 3, 3, 3, 3][..], 8, &[6, 6, 3][..]),
        // Half is not small.
        (&[4, 4, 4], 8, &[4, 4, 4]),
        // Large ones pass.
        (&[3, 20, 3, 3], 8, &[3, 20, 6]),
        (&[3, 3, 20], 8, &[6, 20]),
        // No empty ones.
        (&[0, 3, 0, 0, 2, 0], 8, &[5]),
        (&[0, 0], 8, &[]),
        // Nothing is joined.
        (&[2, 0, 2], 1, &[2, 0, 2]),
    ] {
        let parts = given.iter().scan(0, |first, rows| {
            *first += *rows as i64;
            Some(numbers(*first - *rows as i64, *rows))
        });
        let up = back(&parts.collect::<Vec<_>>(), target).await;
        assert_eq!(sizes(&up), expected);
        let rows = expected.iter().sum::<usize>() as i64;
        assert_eq!(numbers_of(&up), multiples(rows, 1));
    }
    let none = [no_columns(5), no_columns(5)];
    assert_eq!(sizes(&back(&none, 100).await), [10]);
    // arrow-rs lets a column's type differ from its schema's in what nested fields may be null.
    let list = |nullable| List(Arc::new(Field::new("item", Int32, nullable)));
    let schema = |nullable| Arc::new(Schema::new(vec![Field::new("l", list(nullable), true)]));
    let made = |nullable| {
        let batch = batch(&[list(nullable)], 5, Nulls::None, 3);
        let batch = RecordBatch::try_new(schema(nullable), batch.columns().to_vec());
        batch.unwrap().with_schema(schema(true)).unwrap()
    };
    let given = [true, true, false, true].map(made);
    assert_eq!(sizes(&back(&given, 100).await), [10, 5, 5]);
    // Batches of much text stay as they are: they could be more than one array holds.
    let text = |bytes: usize| {
        let text: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(bytes)]));
        RecordBatch::try_from_iter([("t", text)]).unwrap()
    };
    let (wide, wider) = (text(9 << 20), text(17 << 20));
    let given = [wide.clone(), wide.clone(), wider, wide];
    assert_eq!(sizes(&back(&given, 100).await), [1, 1, 1, 1]);
    // One allocation where there were many.
    let sim = Sim::new();
    let up = uploaded((0..100).map(|_| Ok(numbers(0, 50))).collect(), 1000, &sim).await;
    assert_eq!((sim.stats().allocations, up.len()), (5, 5));
    drop(up);
    sim.assert_done();
}

/// Both after the rows before them. A plan that has ended is not asked again.
#[tokio::test]
async fn errors_and_batches_of_other_schemas_keep_their_place() {
    let text: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
    let other = RecordBatch::try_from_iter([("t", text)]).unwrap();
    let error = DataFusionError::Execution("line 7".into());
    for (item, says) in [
        (Err(error), "line 7"),
        (Ok(other), "column types must match"),
    ] {
        let given = vec![
            Ok(numbers(0, 2)),
            Ok(numbers(2, 3)),
            item,
            Ok(numbers(5, 4)),
        ];
        let mut up = uploaded(given, 100, &Sim::new()).await;
        fails(up.pop().unwrap(), &[says]);
        assert_eq!((up.len(), up[0].as_ref().unwrap().num_rows()), (1, 5));
    }
    let (table, asked) = host_stream(|i| (i == 0).then(|| Ok(numbers(0, 2))));
    let context = task(config(|_| ()));
    let stream = execute_on_device(scan(table).await, context, &Sim::new());
    let mut stream = stream.unwrap();
    assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 2);
    for _ in 0..2 {
        assert!(stream.next().await.is_none());
    }
    assert_eq!(asked.load(SeqCst), 2);
}

/// What is there goes up if nothing follows, and at once if the plan has no end; also the rows of an input that is always ready, and slow.
#[tokio::test]
async fn rows_wait_a_while_for_more() {
    let default = || SessionConfig::new().with_option_extension(DeviceOptions::default());
    for (infinite, config) in [(true, config(|_| ())), (false, default())] {
        let table = stream_table(numbers(0, 1).schema(), || {
            let first = futures::stream::iter([Ok(numbers(0, 2))]);
            first.chain(futures::stream::pending())
        });
        let host = scan(Arc::new(table.with_infinite_table(infinite))).await;
        let mut stream = execute_on_device(host, task(config), &Sim::new()).unwrap();
        assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 2);
        let mut cx = Context::from_waker(std::task::Waker::noop());
        assert!(stream.poll_next_unpin(&mut cx).is_pending());
    }
    let (slow, asked) = host_stream(|i| {
        std::thread::sleep(Duration::from_millis(2));
        Some(Ok(numbers(i as i64, 1)))
    });
    let stream = execute_on_device(scan(slow).await, task(default()), &Sim::new());
    let first = stream.unwrap().next().await.unwrap().unwrap().num_rows();
    assert!(first > 1 && asked.load(SeqCst) < 10_000, "{first} rows");
}

/// DataFusion's placeholder for a row has columns of nulls, whatever its schema says.
#[tokio::test]
async fn nulls_without_a_type_take_the_plans() {
    for (nullable, null_count) in [(true, 3), (false, 0)] {
        let fields = [("a", Int64), ("b", Utf8)].map(|(n, of)| Field::new(n, of, nullable));
        let schema = Arc::new(Schema::new(fields.to_vec()));
        let nulls = ["a", "b"].map(|name| (name, Arc::new(NullArray::new(3)) as ArrayRef));
        let nulls = RecordBatch::try_from_iter(nulls).unwrap();
        let (table, _) =
            host_stream_of(schema.clone(), move |i| (i == 0).then(|| Ok(nulls.clone())));
        let host = scan(table).await;
        let up = to_host(&on_device(&host, &Sim::new()).await.unwrap());
        assert_eq!(up[0].schema(), schema);
        let counts: Vec<_> = up[0].columns().iter().map(|c| c.null_count()).collect();
        assert_eq!((sizes(&up), counts), (vec![3], vec![null_count; 2]));
    }
}

/// Of an aggregate's states, DataFusion's `percentile_cont` reads one of each batch.
#[tokio::test]
async fn states_of_aggregates_are_not_joined() {
    let ctx = session_without_rule(4);
    let parts: Vec<_> = (0..4).map(|i| batches(i * 32, 2)).collect();
    register(&ctx, "t", host_table(&parts));
    let sql = "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY a) FROM t";
    let mut node = plan(&ctx, sql).await;
    while node.name() != "CoalescePartitionsExec" {
        node = node.children()[0].clone();
    }
    // What has come down from a device is what it was.
    let again = on_host(down(up(node.children()[0].clone(), &Sim::new())));
    for states in [node, again] {
        let up = on_device(&states, &Sim::new()).await.unwrap();
        assert_eq!(sizes(&to_host(&up)), [1; 4]);
    }
}

#[tokio::test]
async fn the_session_says_how_far_and_so_does_sql() {
    let sim = Sim::new();
    let defaults = DeviceOptions::default();
    let ctx = SessionContext::new_with_config(config(|options| {
        options.upload_rows = defaults.upload_rows;
    }));
    let up = async |plan| {
        let found = collect(down(up(plan, &sim)), ctx.task_ctx()).await;
        sizes(&found.unwrap())
    };
    for (set, n, expected) in [
        ("upload_wait_ms = 3600000", 10, &[160][..]),
        ("upload_rows = 64", 10, &[64, 64, 32]),
        ("upload_rows = 48", 5, &[48, 32]),
        ("upload_rows = 0", 3, &[16, 16, 16]),
        ("upload_rows = 1000", 3, &[48]),
        // Seven batches of 128 bytes.
        ("upload_bytes = 1000", 10, &[112, 48]),
        // Half of it is not small.
        ("upload_bytes = 256", 2, &[16, 16]),
    ] {
        query(&ctx, &format!("SET device.{set}")).await.unwrap();
        let found = up(scan(host_table(&[batches(0, n)])).await).await;
        assert_eq!(found, expected, "{set}");
    }
    for set in ["upload_rows = many", "download_rows = 1"] {
        assert!(query(&ctx, &format!("SET device.{set}")).await.is_err());
    }
    // A slice of a large array is as large as its rows.
    let all = numbers(0, 1 << 20);
    let slices = (0..8).map(|i| all.slice(i * 100_000, 1000)).collect();
    for set in ["upload_rows = 131072", "upload_bytes = 16777216"] {
        query(&ctx, &format!("SET device.{set}")).await.unwrap();
    }
    assert_eq!(up(scan(host_table(&[slices])).await).await, [8000]);
}

/// A limit goes below the upload, so that no rows are waited for that nobody needs.
#[tokio::test]
async fn a_limit_is_pushed_below_the_upload() {
    let sim = Sim::new();
    let (table, asked) = host_stream(|i| (i < MANY).then(|| Ok(numbers(i as i64 * 16, 16))));
    let leaf = scan(table).await;
    let plan = planned(
        "GlobalLimit 0 20 < Down < Up A < T",
        &[&sim],
        &[("T", &leaf)],
    );
    let plan = LimitPushdown::new().optimize(plan, &Default::default());
    let context = task(config(|options| options.upload_rows = 1000));
    let batches = collect(plan.unwrap(), context).await.unwrap();
    assert_eq!(numbers_of(&batches), multiples(20, 1));
    let asked = asked.load(SeqCst);
    assert!(asked <= 3, "{asked} batches");
    assert_eq!(sim.stats().bytes_to_device, 192, "20 rows");
}

/// To the CPU nothing is copied, not even to join it.
#[tokio::test]
async fn batches_for_the_cpu_are_not_joined() {
    let parts = batches(0, 4);
    let host = scan(host_table(std::slice::from_ref(&parts))).await;
    let plan = down(up(host, &Devices::cpu()));
    let found = collect(plan, task(config(|_| ()))).await.unwrap();
    assert_eq!(found, parts);
    for (batch, part) in found.iter().zip(&parts) {
        let address = |batch: &RecordBatch| batch.column(0).to_data().buffers()[0].as_ptr();
        assert_eq!(address(batch), address(part));
    }
}
