//! What a filter keeps, joins and loads.

use super::kit::*;
use crate::device_filter::FilterPlugin;

/// So many rows of a number, a text of 32 bytes and a view of one.
fn wide(first: i64, rows: i64) -> RecordBatch {
    let numbers = first..first + rows;
    let texts = || numbers.clone().map(|n| format!("text number {n:020}"));
    let columns: [(_, ArrayRef); 3] = [
        ("n", Arc::new(Int64Array::from_iter_values(numbers.clone()))),
        ("s", Arc::new(StringArray::from_iter_values(texts()))),
        ("v", Arc::new(StringViewArray::from_iter_values(texts()))),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

/// These batches in one partition, on a device and on the host.
fn tables(device: &Device, batches: Vec<RecordBatch>) -> Tables {
    let partitions = [batches];
    let host = session_of(of_partitions(1), []);
    register(&host, "t", host_table(&partitions));
    let device = session(device_table(device, &partitions), 1);
    Tables { host, device }
}

/// A result of 20 of 20,000 rows keeps the bytes of 20 rows: nothing of its input, and no larger buffers.
#[tokio::test]
async fn a_result_keeps_its_own_bytes() {
    let sim = Sim::new();
    let context = tables(&sim, vec![wide(0, 20_000)]).device;
    let sql = "SELECT n, s, v FROM t WHERE n >= 100 AND n < 120";
    let (found, ..) = driven(&context, &sim, sql, 0).await;
    assert_eq!(rows_of(&found), [20]);
    assert_eq!(found[0].to_host().unwrap(), wide(100, 20));
    drop(context);
    sim.synchronize().unwrap();
    // Numbers; offsets and text; views and what they refer to: each rounded up to 64 bytes.
    let buffers = [20 * 8, 21 * 4, 20 * 32, 20 * 16, 20 * 32];
    let rounded = buffers.map(|bytes: usize| bytes.next_multiple_of(64));
    let kept: usize = rounded.iter().sum();
    assert_eq!(found[0].get_array_memory_size(), kept);
    eventually("nothing else is left", || {
        sim.sim.report().live_bytes == kept
    });
    drop(found);
    sim.assert_done();
}

/// Of 40 batches some rows each pass: those of 16 become one batch, without a copy more.
#[tokio::test]
async fn small_results_are_joined() {
    let sim = Sim::new();
    let tables_of = |batch: &dyn Fn(i64) -> RecordBatch| tables(&sim, (0..40).map(batch).collect());
    let different = tables_of(&|i| wide(i * 1000, 1000));
    let equal = tables_of(&|_| wide(0, 100));
    #[rustfmt::skip]
    let queries = [
        (&different, "SELECT s, v, n FROM t WHERE s <> 'x' AND n <> 500 AND n >= 990", vec![15_010, 16_000, 8000]),
        (&different, "SELECT n FROM t WHERE n < 15007", vec![15_007]),
        (&different, "SELECT n, s FROM t WHERE n >= 38990", vec![1010]),
        // One row of each batch: the batches of at most 16 inputs wait for each other.
        (&equal, "SELECT n, s FROM t WHERE n = 7", vec![16, 16, 8]),
    ];
    for (tables, sql, sizes) in queries {
        let (found, cost, waits) = driven(&tables.device, &sim, sql, 0).await;
        let cost = (cost.host_waits, cost.bytes_on_device);
        assert_eq!(cost, (waits, 0), "{sql}");
        assert_eq!(rows_of(&found), sizes, "{sql}");
        let found = to_host(&found);
        let found = concat_batches(&found[0].schema(), &found).unwrap();
        assert_same(&[found], &tables.expected(sql).await, sql);
    }
}

/// However many buffers a batch has, the queue of an operator waits for it once, and not at all if its memory is ready. The host waits for
/// none, and no poll runs work.
#[tokio::test]
async fn a_batch_is_waited_for_once() {
    const BATCHES: usize = 16;
    // The filter's events are of the counts, of their download, of the result, and of the end of all loans. The aggregate waits for the
    // filter's batch.
    #[rustfmt::skip]
    let queries = [
        ("SELECT id, a, d FROM t WHERE n > 0 AND x >= 0.0 AND ts IS NOT NULL", "DeviceFilterExec", 4, 0, 1),
        ("SELECT id, s FROM t WHERE s <> 'x' AND n > 0", "DeviceFilterExec", 7, 0, 2),
        ("SELECT sum(a), max(d) FROM t WHERE n > 0 AND x >= 0.0", "DeviceAggregateExec", 13, 1, 3),
    ];
    for (sql, operator, most_events, more_waits, copies) in queries {
        // Of a deferred device the uploads have not begun either.
        for (sim, waits) in [(Sim::new(), 0), (Sim::deferred(), BATCHES as u64)] {
            let tables = tables(&sim, (0..BATCHES).map(batch).collect());
            if waits == 0 {
                sim.synchronize().unwrap();
            }
            let shown = text(&plan(&tables.device, sql).await, &[]);
            says(&shown, &["DeviceFilterExec", operator]);
            let (up, cost, own_waits) = driven(&tables.device, &sim, sql, waits).await;
            assert_eq!(cost.host_waits, own_waits, "{sql}: {cost:?}");
            let most = waits..=waits + more_waits;
            assert!(most.contains(&cost.queue_waits), "{sql}: {cost:?}");
            assert!(cost.events <= most_events, "{sql}: {cost:?}");
            // The counts of all batches come in one.
            assert_eq!((cost.copies, cost.bytes_on_device), (copies, 0), "{sql}");
            let found = concat_batches(&up[0].schema(), &to_host(&up)).unwrap();
            assert_same(&[found], &tables.expected(sql).await, sql);
            drop((tables, up));
            sim.assert_done();
        }
    }
}

/// A session with the rule, which uploads to `spec`, and with these devices.
fn with_rule(plugin: &Arc<FilterPlugin>, spec: DeviceSpec, devices: &[Device]) -> SessionContext {
    let resolver = DeviceResolver::of(devices.iter().cloned());
    let rule = DeviceRule::default().with_plugin(plugin.clone());
    let config = of_partitions(PARTITIONS).with_extension(Arc::new(resolver));
    let context = session_of(config, [Arc::new(rule.with_uploads(spec, 0)) as _]);
    register(&context, "t", host_table(&numbered(PARTITIONS, 2, batch)));
    context
}

/// Plans are made without any device. Kernels are loaded by a device's first filter, and go with the device.
#[tokio::test]
async fn kernels_are_loaded_once_per_device() {
    let (first, second) = (Sim::new(), Sim::new());
    let spec = DeviceSpec::any(first.id().device_type);
    let plugin = Arc::new(FilterPlugin::default());
    let kernels = || (plugin.kernels().loads(), plugin.kernels().len());
    let with_rule_of = |devices: &[Device]| with_rule(&plugin, spec.clone(), devices);
    let sql = "SELECT id, s FROM t WHERE a > 3";
    let absent = with_rule_of(&[]);
    let query = plan(&absent, sql).await;
    assert!(is_on_device(&query));
    assert_eq!(kernels(), (0, 0), "nothing was opened to plan");
    let found = collect(query, absent.task_ctx()).await;
    fails(found, &["sim", "the session offers []"]);

    let context = with_rule_of(from_ref(&first.device));
    let all = rows(&context, plan(&context, sql).await).await;
    let other = "SELECT n, id FROM t WHERE s = 'row 7' OR false";
    for sql in [sql, sql, other] {
        rows(&context, plan(&context, sql).await).await;
    }
    assert_eq!(kernels(), (1, 1), "for all partitions, queries and filters");

    // Partitions on two devices.
    let both = with_rule_of(&[first.device.clone(), second.device.clone()]);
    assert_eq!(rows(&both, plan(&both, sql).await).await, all);
    assert_eq!(kernels(), (2, 2));
    drop(both);
    second.assert_done();
    drop(second);
    assert_eq!(rows(&context, plan(&context, sql).await).await, all);
    assert_eq!(kernels(), (2, 1));

    // A device that is described by its number.
    let numbered = DeviceSpec::from(DeviceId::new(first.id().device_type, first.id().id));
    let context = with_rule(&plugin, numbered.clone(), from_ref(&first.device));
    let query = plan(&context, sql).await;
    let node = DeviceExec::of(query.children()[0]).unwrap();
    assert_eq!(node.device(), &numbered);
    assert_eq!(rows(&context, query).await, all);
}
