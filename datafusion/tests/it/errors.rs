//! Errors: they end the query, and say where and what.

use datafusion::arrow::array::StructArray;

use crate::kit::*;
use crate::nodes::*;

/// The error of a query whose stream gives `good` batches first, and ends after it, with these words.
async fn fails_after(plan: &Plan, good: usize, words: &[&str]) -> DataFusionError {
    let mut stream = started(plan);
    for i in 0..good {
        let batch = stream.next().await;
        let batch = batch.unwrap_or_else(|| panic!("ends before batch {i}"));
        batch.unwrap_or_else(|e| panic!("batch {i}: {e}"));
    }
    let error = fails(stream.next().await.expect("no end"), words);
    assert!(stream.next().await.is_none(), "goes on after an error");
    error
}

/// Device, operation and the device's text: in the error itself, and in what a user sees.
#[track_caller]
fn assert_device_error(error: &DataFusionError, sim: &Sim, own_operation: &str, text: &str) {
    match ours(error) {
        Error::Device {
            device,
            operation,
            message,
            ..
        } => {
            assert_eq!((device, operation), (sim.id(), own_operation));
            says(&message, &[text]);
        }
        e => panic!("{e:?}"),
    }
    let who = format!(", partition 0, on {}", sim.device);
    says(error, &[own_operation, text, &sim.id().to_string(), &who]);
    let root = error.find_root();
    assert!(matches!(root, DataFusionError::External(_)), "{error:?}");
}

#[tokio::test]
async fn an_error_of_the_device_names_it_with_operation_and_text() {
    let sim = Sim::new();
    let table = planned("Down < Numbers A 4", &[&sim], &[]);
    for (op, operation) in [
        (FaultOp::Copy, "copy"),
        (FaultOp::NewQueue, "new queue"),
        (FaultOp::QueueWait, "queue wait"),
        (FaultOp::Launch, "launch"),
    ] {
        let plan = with_transitions(double(table.clone(), &sim));
        sim.sim.faults().fail_nth(op, 1);
        let error = run(&plan).await.unwrap_err();
        assert_device_error(&error, &sim, operation, "injected failure");
        // The next one is as if nothing had been.
        assert_eq!(numbers_from(&plan).await.len(), 64);
    }
    // The batches before it come.
    sim.sim.faults().fail_nth(FaultOp::Copy, 3);
    let error = fails_after(&table, 2, &[]).await;
    assert_device_error(&error, &sim, "copy", "injected failure");
    // A lasting error of the device: later queries say the same.
    let kernel = |n| match n {
        20.. => Err(format!("the kernel does not like {n}")),
        n => Ok(n),
    };
    let plan = with_transitions(map(vec![table], &sim, kernel));
    for _ in 0..2 {
        let error = run(&plan).await.unwrap_err();
        assert_device_error(&error, &sim, "kernel", "the kernel does not like 20");
    }
    drop(plan);
    sim.assert_done();
}

/// Every operation in turn: an error that is the device's, or the right result; and nothing stays behind.
#[tokio::test]
async fn any_operation_may_fail() {
    let sim = Sim::new();
    let mut failures = 0;
    for n in 1..500 {
        let plan = ruled("Map A < Map A < Numbers 3", &[&sim]);
        sim.sim.faults().clear();
        sim.sim.faults().fail_nth(None, n);
        let result = run(&plan).await;
        let fired = sim.sim.faults().fired() > 0;
        sim.sim.faults().clear();
        match result {
            Ok(found) => assert_eq!(numbers_of(&found), multiples(48, 4), "operation {n}"),
            Err(e) => {
                let exhausted = matches!(e, DataFusionError::ResourcesExhausted(_));
                let of_device = exhausted || matches!(ours(&e), Error::Device { .. });
                assert!(of_device, "operation {n}: {e:?}");
                says(&e, &[", partition 0, on ", &sim.id().to_string()]);
                failures += 1;
            }
        }
        drop(plan);
        sim.device.synchronize().unwrap();
        sim.device.take_drop_error();
        if !fired && n > 60 {
            break;
        }
    }
    assert!(failures > 20, "{failures}");
    sim.assert_done();
}

/// An error or a panic is no batch, as with DataFusion's own nodes, and comes through operators and other nodes, too.
#[tokio::test]
async fn a_reader_that_fails_ends_the_query() {
    let sim = Sim::new();
    let (table, asked) = reader_table(&sim, |i| match i {
        0 | 1 => Some(Ok(numbers(0, 16))),
        _ => Some(Err(Error::Cancelled {
            operation: "reading the sensor",
        })),
    });
    let words = ["reading the sensor"];
    let plan = scan(table.clone()).await;
    let error = fails_after(&plan, 2, &words).await;
    assert!(matches!(ours(&error), Error::Cancelled { .. }), "{error:?}");
    assert_eq!(asked.load(SeqCst), 3);
    for node in ["DeviceScanExec", "DeviceToHostExec"] {
        assert_eq!(metric(&plan, node, "output_batches"), Some(2));
    }
    let ctx = session_with(4, 2);
    register(&ctx, "t", table);
    let sql = "SELECT a % 3, count(*) FROM t GROUP BY a % 3";
    fails(query(&ctx, sql).await, &words);
    let (panics, _) = reader_table(&sim, |i| match i {
        0 => Some(Ok(numbers(0, 16))),
        _ => panic!("the reader is broken"),
    });
    let plan = with_transitions(double(scan(panics).await, &sim));
    let error = fails_after(&plan, 1, &["the reader is broken"]).await;
    assert!(matches!(ours(&error), Error::Panic { .. }), "{error:?}");
    drop((plan, ctx));
    sim.assert_done();
    // One that cannot be opened.
    let open = |request: ScanRequest| -> arrow_device::Result<Reader> {
        let text = format!("no file {}", request.partition);
        Err(Error::InvalidArgument(text.into()))
    };
    let table = DeviceTable::from_readers(numbers(0, 1).schema(), sim.device.clone(), 2, open);
    let ctx = session_with(2, 1);
    register(&ctx, "t", Arc::new(table));
    let error = fails(query(&ctx, "SELECT a FROM t").await, &["no file"]);
    assert!(matches!(ours(&error), Error::InvalidArgument(_)));
}

/// Whoever matches an error that went up and down again finds it: DataFusion's, arrow-rs's, another crate's, and ours.
#[tokio::test]
async fn an_upload_passes_errors_on_as_they_are() {
    use DataFusionError as E;
    type Case = (fn() -> E, &'static str, fn(&E) -> bool);
    let cases: [Case; 5] = [
        (
            || E::Execution("no such thing".into()),
            "no such thing",
            |e| matches!(e.find_root(), E::Execution(text) if text == "no such thing"),
        ),
        (
            || E::ResourcesExhausted("too much".into()),
            "too much",
            |e| matches!(e.find_root(), E::ResourcesExhausted(text) if text == "too much"),
        ),
        (
            || ArrowError::DivideByZero.into(),
            "Divide by zero",
            |e| matches!(e, E::ArrowError(e, _) if matches!(**e, ArrowError::DivideByZero)),
        ),
        (
            || E::External(Box::new(std::io::Error::other("the cable is cut"))),
            "the cable is cut",
            |e| matches!(e.find_root(), E::External(e) if e.is::<std::io::Error>()),
        ),
        (
            || to_datafusion(Error::Cancelled { operation: "below" }),
            "below",
            |e| matches!(ours(e), Error::Cancelled { operation: "below" }),
        ),
    ];
    let sim = Sim::new();
    for (error, text, is_kept) in cases {
        let plan = with_transitions(double(broken(1, error).await, &sim));
        let error = fails_after(&plan, 1, &[text]).await;
        assert!(is_kept(&error), "{error:?}");
    }
    sim.assert_done();
}

#[tokio::test]
async fn out_of_memory_on_the_device() {
    let sim = Sim::set(|config| config.capacity_bytes = 1 << 20);
    // By an upload, and by an operator.
    let (host, _) = host_stream(|i| (i == 0).then(|| Ok(numbers(0, 1 << 18))));
    let host = scan(host).await;
    let table = scan(device_table(&sim, &[vec![numbers(0, 80_000)]])).await;
    for (child, node, expected) in [
        (host, "HostToDeviceExec", 8 << 18),
        (table, "MapExec", 640_000),
    ] {
        let plan = with_transitions(double(child, &sim));
        let who = format!("{node}, partition 0, on {}: out of memory", sim.device);
        let error = fails(run(&plan).await, &[&who, &format!("{expected} bytes")]);
        let exhausted = |e: &_| matches!(e, DataFusionError::ResourcesExhausted(_));
        assert!(exhausted(&error), "{error:?}");
        // Also on the way back, and at a C boundary.
        let found = on_device(&plan, &sim).await.unwrap_err();
        assert_eq!(found.errno(), 12, "{found:?}");
        assert!(exhausted(&to_datafusion(found)));
    }
    sim.assert_done();
}

/// A scan asks no more after an error, nor after its last row: the producer goes while the scan's
/// stream lives.
#[tokio::test]
async fn a_scan_lets_its_producer_go_at_the_end() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    for (fetch, expected) in [(None, 2), (Some(16), 1), (Some(0), 0)] {
        let alive = Arc::new(());
        let (batch, held) = (batch.clone(), alive.clone());
        let table = streams_table(&sim, 1, move |_| {
            let broken = Error::Cancelled { operation: "a" };
            let items = vec![Ok(batch.clone()), Err(broken), Ok(batch.clone())];
            let held = held.clone();
            futures::stream::iter(items).inspect(move |_| {
                let _ = &held;
            })
        });
        let scan = DeviceExec::from(table.scan_on_device(None, fetch).unwrap());
        let idle = Arc::strong_count(&alive);
        let mut stream = scan.execute_device(0, session().task_ctx()).unwrap();
        let read = usize::from(fetch != Some(0));
        assert_eq!(Arc::strong_count(&alive), idle + read);
        let items = stream.by_ref().count().await;
        let left = Arc::strong_count(&alive);
        assert_eq!((items, left), (expected, idle), "{fetch:?}");
    }
}

/// Rows of which nothing is null, as a union makes them, fit columns that may be, within structs as well.
#[test]
fn a_table_refuses_batches_of_another_schema_or_device() {
    let (a, b) = (Sim::new(), Sim::new());
    let made = |device: &Sim, table: &RecordBatch, batch: &RecordBatch| {
        let of = vec![vec![a.upload(batch).unwrap()]];
        DeviceTable::from_batches(table.schema(), device.device.clone(), of)
    };
    let structs = |nullable| {
        let fields = vec![Field::new("x", DataType::Int32, nullable)];
        let ints = Arc::new(Int32Array::from(vec![1, 2])) as ArrayRef;
        let column = StructArray::new(fields.into(), vec![ints], None);
        let field = Field::new("s", column.data_type().clone(), nullable);
        let schema = Arc::new(Schema::new(vec![field]));
        RecordBatch::try_new(schema, vec![Arc::new(column)]).unwrap()
    };
    let (strict, loose) = (structs(false), structs(true));
    for (device, table, batch, fits) in [
        (&a, &numbers(0, 1), &numbers(0, 3), true),
        (&a, &numbers(0, 1), &rows(0, 3), false),
        (&b, &numbers(0, 1), &numbers(0, 3), false),
        (&a, &loose, &strict, true),
        (&a, &strict, &loose, true),
    ] {
        match made(device, table, batch) {
            Ok(made) => assert!(fits && made.schema() == table.schema()),
            Err(e) => assert!(!fits && matches!(e, Error::InvalidArgument(_)), "{e}"),
        }
    }
}
