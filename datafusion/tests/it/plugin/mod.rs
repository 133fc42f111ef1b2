//! The worked plugin: its results are DataFusion's own, bit by bit, and its rule replaces what it
//! can and nothing else.

mod aggregates;
mod economy;
pub(crate) mod kit;
mod memory;
mod types;

use futures::stream;

use kit::*;

/// Columns, and literals to compare them with.
#[rustfmt::skip]
const LITERALS: [(&str, &str); 14] = [
    ("x", "CAST(0.0 AS DOUBLE)"), ("x", "CAST(-0.0 AS DOUBLE)"), ("x", "CAST(1.5 AS DOUBLE)"), ("x", "CAST(5e-324 AS DOUBLE)"),
    ("x", "CAST('-inf' AS DOUBLE)"), ("x", "CAST('nan' AS DOUBLE)"), ("x", "CAST('-nan' AS DOUBLE)"),
    ("a", "7"), ("a", "9223372036854775807"), ("a", "-9223372036854775808"), ("n", "-6"), ("id", "1000"),
    ("d", "DATE '1970-01-15'"), ("ts", "TIMESTAMP '1970-01-01T00:00:00.000100'"),
];

/// Other predicates, and whether any row passes. The columns u, l and v have the same texts in three layouts, of which two have the same
/// start, and some more bytes than a view has.
#[rustfmt::skip]
const PREDICATES: [(&str, bool); 14] = [
    ("a > -10 AND a <= 10 AND x >= 0.0 AND n <> 0", true),
    ("2 < n AND 10 > a", true),
    ("a BETWEEN -3 AND 3", true),
    ("NOT (id < 1700)", true),
    ("id < 0", false),
    ("a = 5 AND n = 100", false),
    ("u = 'no such text, neither here nor there' OR false", false),
    ("l <> 'no such text, neither here nor there' AND v <> 'thirteen bytf'", true),
    ("v = '' AND a > 0", true),
    ("l <> ''", true),
    ("u IS NOT NULL AND v = 'thirteen byte'", true),
    ("u > '' AND u <= 'twelve byte' AND l > 'a' AND v > 'a'", true),
    ("v > 'ß'", false),
    ("id < 300 AND l = 'ß'", true),
];

#[tokio::test]
async fn results_are_datafusions() {
    let sim = Sim::new();
    let tables = Tables::new(&sim, PARTITIONS);
    let all = tables.check("SELECT id FROM t WHERE id >= 0").await.1;
    for (column, literal) in LITERALS {
        for op in ["=", "<>", "<", ">="] {
            let sql = format!("SELECT id, a, x, n, d, ts FROM t WHERE {column} {op} {literal}");
            // What cannot be, DataFusion sees by itself: nothing is beyond the last integer.
            if count(&plan(&tables.host, &sql).await, "FilterExec") == 0 {
                assert!(column == "a" && literal.len() > 3, "{sql}");
                continue;
            }
            let (query, n) = tables.check(&sql).await;
            assert!(is_on_device(&query), "{sql}");
            assert!(n < all || column == "id", "nulls do not pass: {sql}");
        }
    }
    for (predicate, some) in PREDICATES {
        for columns in ["ts, d, n, x, a, id", "v, x, l, u", "sum(a), min(n), max(d)"] {
            let sql = format!("SELECT {columns} FROM t WHERE {predicate}");
            let (query, n) = tables.check(&sql).await;
            assert!(is_on_device(&query), "{sql}");
            assert_eq!(n > 0, some || sql.contains('('), "{sql}");
        }
    }
    drop(tables);
    sim.assert_done();
}

#[tokio::test]
async fn it_replaces_the_filter() {
    let sim = Sim::new();
    let tables = Tables::new(&sim, PARTITIONS);
    let with = plan(&tables.device, "SELECT a, x FROM t WHERE n > 3 AND x < 1.5").await;
    let expected = "
        DeviceToHostExec: device=A
          DeviceFilterExec: device=A, n@2 > 3 AND x@1 < 1.5, projection=[a@0, x@1]
            DeviceScanExec: device=A, partitions=3, projection=[a, x, n]
    ";
    assert_plan(&with, &[&sim], expected);
    let with = plan(&tables.device, "SELECT id FROM t WHERE a = 1 ORDER BY id").await;
    let expected = "SortPreservingMerge < Sort < Down < Filter A < Scan A";
    assert_eq!(shape(&with, &[&sim]), expected);
    // Running the rules again changes nothing.
    let again = filters().optimize(with, tables.device.state().config_options());
    assert_eq!(shape(&again.unwrap(), &[&sim]), expected);
}

#[tokio::test]
async fn it_leaves_what_it_cannot_do() {
    let sim = Sim::new();
    let tables = Tables::new(&sim, PARTITIONS);
    #[rustfmt::skip]
    let queries = [
        "id FROM t WHERE a > 3 OR n > 3", "id FROM t WHERE (a > 3) IS NULL", "id FROM t WHERE a > 3 AND x + 1 IS NOT NULL",
        "id FROM t WHERE s LIKE 'row 5%'", "id FROM t WHERE s = concat('row ', id)", "id FROM t WHERE a > id",
        "id FROM t WHERE a + 1 > 2 - id", "id FROM t WHERE CAST(a AS DOUBLE) > 2.5", "id FROM t WHERE a IN (1, 3, 5, 7, 9, 11, 13)",
        "id FROM t WHERE a IS DISTINCT FROM 4", "id FROM t WHERE CAST(ts AS DATE) > DATE '1969-12-31'",
        // Types without kernels, that are tested or returned.
        "id FROM t WHERE dictionary IS NOT NULL", "id FROM t WHERE list IS NOT NULL", "dictionary FROM t WHERE id > 3",
        "list FROM t WHERE id > 3", "nothing FROM t WHERE id > 3",
    ];
    for query in queries {
        let (plan, n) = tables.check(&format!("SELECT {query}")).await;
        assert!(!is_on_device(&plan) && n > 0, "{query}");
    }
    // Not on a device, or on one without kernels.
    let on_host = session(host_table(&[vec![batch(0)]]), 1);
    for context in [on_host, Tables::new(&Devices::cpu(), 1).device] {
        let plan = plan(&context, "SELECT id FROM t WHERE a > 3").await;
        assert!(!is_on_device(&plan));
    }
}

/// A table of one partition, batch by batch as asked for; how many were. After the last one it says
/// nothing more.
fn endless(device: &Device, n: usize) -> (SessionContext, Arc<AtomicUsize>) {
    let (asked, up) = (Arc::<AtomicUsize>::default(), device.upload(&batch(0)));
    let (up, counter) = (up.unwrap(), asked.clone());
    let schema = up.schema();
    let open = move |request: ScanRequest| {
        let (up, asked, columns) = (up.clone(), counter.clone(), request.projection.clone());
        let batches = stream::repeat_with(move || {
            asked.fetch_add(1, SeqCst);
            up.project(columns.as_deref().unwrap())
        });
        let stream = request.stream(batches.take(n).chain(stream::pending()));
        async move { Ok(stream) }
    };
    let table = DeviceTable::from_streams(schema, device.clone(), 1, open);
    (session(Arc::new(table), 1), asked)
}

/// After so many batches, of which the next ones are on their way; or the last one of a stream that says nothing more.
#[tokio::test]
async fn a_limit_ends_it() {
    let sim = Sim::new();
    for (batches, most) in [(1000, 8), (2, 2)] {
        let (context, asked) = endless(&sim, batches);
        // 238 of the 300 rows of a batch.
        let query = plan(&context, "SELECT id, a FROM t WHERE a > -100 LIMIT 400").await;
        says(&text(&query, &[]), &["a@1 > -100, fetch=400"]);
        let found = tokio::time::timeout(LONG, rows(&context, query)).await;
        assert_eq!(found.expect("it ends")[0].num_rows(), 400);
        let asked = asked.load(SeqCst);
        assert!(asked <= most, "asked for {asked} batches");
    }
    sim.assert_done();
}

#[tokio::test]
async fn what_is_dropped_is_freed() {
    let sim = Sim::new();
    let (context, _) = endless(&sim, 1000);
    let query = plan(&context, "SELECT id, a FROM t WHERE a > -100").await;
    for polls in 0..20 {
        let mut stream = query.execute(0, context.task_ctx()).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..polls {
            let _ = stream.poll_next_unpin(&mut cx);
        }
    }
    drop((query, context));
    sim.assert_done();
}

/// Whatever fails, the query ends with it or does without, and nothing is left behind.
#[tokio::test]
async fn failures_end_the_query() {
    use FaultOp::{Allocate, Copy, Fill, Launch, Record};
    // One condition is tested, rows are selected, a column is measured, and 2 columns are gathered.
    let sql = "SELECT id, s FROM t WHERE s <> 'row 77'";
    for operation in [Launch, Allocate, Fill, Copy, Record] {
        for n in 1.. {
            let sim = Sim::new();
            let tables = Tables::new(&sim, 1);
            let query = plan(&tables.device, sql).await;
            sim.synchronize().unwrap();
            sim.sim.faults().clear();
            sim.sim.faults().fail_nth(operation, n);
            let found = collect(query, tables.device.task_ctx()).await;
            let fired = sim.sim.faults().fired();
            sim.sim.faults().clear();
            match found {
                Err(e) => says(&e, &[&sim.id().to_string()]),
                // Of some events nobody has to hear.
                Ok(found) => {
                    let what = format!("{operation:?} {n}");
                    assert!(fired == 0 || operation == Record, "{what}");
                    let found = concat_batches(&found[0].schema(), &found).unwrap();
                    assert_same(&[found], &tables.expected(sql).await, &what);
                }
            }
            drop(tables);
            sim.assert_done();
            if fired == 0 {
                assert!(n > 3, "{operation:?}: {n}");
                break;
            }
        }
    }
}

/// The example's program, beside the tests' folder. Built if this test alone was built.
fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().unwrap().parent().unwrap();
    let name = format!("sql{}", std::env::consts::EXE_SUFFIX);
    let program = profile.join("examples").join(name);
    if !program.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--example", "sql"]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        let built = build.current_dir(env!("CARGO_MANIFEST_DIR")).status();
        assert!(built.unwrap().success(), "the example does not build");
    }
    program
}

#[test]
fn the_program_says_how_it_went() {
    let run = |arguments: &[&str]| {
        let output = Command::new(program()).args(arguments).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (out, errors) = (text(output.stdout), text(output.stderr));
        (output.status.code().unwrap(), out, errors)
    };
    let (status, stdout, stderr) = run(&["--device", "sim"]);
    assert_eq!((status, &*stderr), (0, ""));
    let parts = [
        "On the host:\nFilterExec",
        // The guide shows these counts: see "What moves when" in docs/guide/datafusion.md.
        "output_batches=2, peak_mem_used=1568.0 B, bytes_on_device=0, bytes_to_device=0, bytes_to_host=1.57 K, copies=4, host_waits=0, queue_waits=2]\n",
        "bytes_on_device=0, bytes_to_device=0, bytes_to_host=1.28 K, copies=2, host_waits=0, queue_waits=0]\n",
        "output_batches=32, peak_mem_used=0.0 B, bytes_on_device=0, bytes_to_device=0, bytes_to_host=0, copies=0, host_waits=0, queue_waits=0]\n",
        "DeviceFilterExec: device=sim",
        "host_waits=0",
        "the same as DataFusion's own",
        "HostToDeviceExec: device=sim, ",
        "Kernels were loaded 1 time(s), for 1 device(s).",
    ];
    says(&stdout, &parts);
    let why = "sql: the filter has no kernels for cpu\n";
    for (arguments, expected, why) in [
        ("--uploads some", 2, ""),
        ("--device cpu", 2, why),
        ("--device no-such-device", 2, "no-such-device"),
        ("--bad", 2, ""),
        ("--help", 0, ""),
    ] {
        let arguments: Vec<_> = arguments.split(' ').collect();
        let (status, _, stderr) = run(&arguments);
        assert_eq!(status, expected, "{arguments:?}: {stderr}");
        says(&stderr, &[why]);
    }
}
