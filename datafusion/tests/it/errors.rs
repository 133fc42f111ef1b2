//! Errors: they end the query, and say where and what.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use arrow_device::device::sim::{FaultOp, SimConfig};
use arrow_device::{Error, ExportOptions, FFI_ArrowDeviceArrayStream, SyncPolicy};
use arrow_device_datafusion::{DeviceExec, DeviceTable, ScanRequest, to_datafusion};
use datafusion::arrow::datatypes::Schema;
use datafusion::arrow::error::ArrowError;
use datafusion::catalog::TableProvider;
use datafusion::common::DataFusionError;
use datafusion::physical_plan::execute_stream;
use futures::StreamExt;

use crate::kit::*;

/// The error of a query whose stream gives `good` batches first, and ends after it, with these words.
async fn fails_after(plan: &Plan, good: usize, words: &[&str]) -> DataFusionError {
    let mut stream = execute_stream(plan.clone(), session().task_ctx()).unwrap();
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
    assert!(
        matches!(error.find_root(), DataFusionError::External(_)),
        "{error:?}"
    );
}

#[tokio::test]
async fn an_injected_failure_names_device_operation_and_text() {
    let sim = Sim::new();
    let table = scan(device_table(&sim, &[batches(0, 4)])).await;
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
    drop(table);
    sim.assert_done();
}

/// Every operation in turn: an error that is the device's, or the right result; and nothing stays
/// behind.
#[tokio::test]
async fn any_operation_may_fail() {
    let sim = Sim::new();
    let mut failures = 0;
    for n in 1..500 {
        let host = scan(host_table(&[batches(0, 3)])).await;
        let plan = with_transitions(double(double(host, &sim), &sim));
        sim.sim.faults().clear();
        sim.sim.faults().fail_nth(None, n);
        let result = run(&plan).await;
        let fired = sim.sim.faults().fired() > 0;
        sim.sim.faults().clear();
        match result {
            Ok(found) => assert_eq!(numbers_of(&found), multiples(48, 4), "operation {n}"),
            Err(e) => {
                let of_device = match &e {
                    DataFusionError::ResourcesExhausted(_) => true,
                    e => matches!(ours(e), Error::Device { .. }),
                };
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

/// An error is no batch, as with DataFusion's own nodes.
#[tokio::test]
async fn a_reader_that_errs_ends_the_query_with_its_error() {
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
    // Through operators and other nodes as well.
    let ctx = session_with(4, 2);
    register(&ctx, "t", table);
    let sql = "SELECT a % 3, count(*) FROM t GROUP BY a % 3";
    fails(query(&ctx, sql).await, &words);
    drop((plan, ctx));
    sim.assert_done();
}

#[tokio::test]
async fn a_reader_that_panics_ends_the_query_with_the_text() {
    let sim = Sim::new();
    let (table, _) = reader_table(&sim, |i| match i {
        0 => Some(Ok(numbers(0, 16))),
        _ => panic!("the reader is broken"),
    });
    let plan = with_transitions(double(scan(table).await, &sim));
    let error = fails_after(&plan, 1, &["the reader is broken"]).await;
    assert!(matches!(ours(&error), Error::Panic { .. }), "{error:?}");
    drop(plan);
    sim.assert_done();
}

#[tokio::test]
async fn a_table_that_cannot_be_opened() {
    let sim = Sim::new();
    let schema = numbers(0, 1).schema();
    let open = |request: ScanRequest| -> arrow_device::Result<Reader> {
        let text = format!("no file {}", request.partition);
        Err(Error::InvalidArgument(text.into()))
    };
    let table = DeviceTable::from_readers(schema, sim.device.clone(), 2, open);
    let ctx = session_with(2, 1);
    register(&ctx, "t", Arc::new(table));
    let error = fails(query(&ctx, "SELECT a FROM t").await, &["no file"]);
    assert!(matches!(ours(&error), Error::InvalidArgument(_)));
}

#[tokio::test]
async fn a_failing_kernel() {
    let sim = Sim::new();
    let table = scan(device_table(&sim, &[batches(0, 4)])).await;
    let kernel = |n| match n {
        20.. => Err(format!("the kernel does not like {n}")),
        n => Ok(n),
    };
    let plan = with_transitions(map(vec![table], &sim, kernel));
    // A lasting error of the device: later queries say the same.
    for _ in 0..2 {
        let error = run(&plan).await.unwrap_err();
        assert_device_error(&error, &sim, "kernel", "the kernel does not like 20");
    }
    drop(plan);
    sim.assert_done();
}

/// Errno and text of a producer come through the C interface.
#[tokio::test]
async fn a_foreign_stream_that_errs() {
    let sim = Sim::new();
    let device = sim.device.clone();
    let open = move |_| {
        let gone = || ArrowError::ComputeError("the disk is gone".into());
        let next = move |i| match i {
            0 | 1 => Some(Ok(numbers(0, 16))),
            _ => Some(Err(gone().into())),
        };
        let own = Reader::new(&device, numbers(0, 1).schema(), next);
        let options = ExportOptions::new(SyncPolicy::Event);
        let stream = FFI_ArrowDeviceArrayStream::new(own, options)?;
        Ok(reader(stream, &device))
    };
    let schema = numbers(0, 1).schema();
    let table = DeviceTable::from_readers(schema, sim.device.clone(), 1, open);
    let plan = with_transitions(double(scan(Arc::new(table)).await, &sim));
    let error = fails_after(&plan, 2, &["the disk is gone"]).await;
    match ours(&error) {
        Error::Foreign {
            operation, errno, ..
        } => assert_eq!((operation, errno), ("get_next", 5)),
        e => panic!("{e:?}"),
    }
    drop(plan);
    sim.assert_done();
}

/// Whoever matches an error that went up and down again finds it: DataFusion's, arrow-rs's, another crate's, and ours.
#[tokio::test]
async fn an_upload_passes_errors_on_as_they_are() {
    type Case = (
        fn() -> DataFusionError,
        &'static str,
        fn(&DataFusionError) -> bool,
    );
    let cases: [Case; 5] = [
        (
            || DataFusionError::Execution("no such thing".into()),
            "no such thing",
            |e| matches!(e.find_root(), DataFusionError::Execution(text) if text == "no such thing"),
        ),
        (
            || DataFusionError::ResourcesExhausted("too much".into()),
            "too much",
            |e| matches!(e.find_root(), DataFusionError::ResourcesExhausted(text) if text == "too much"),
        ),
        (
            || ArrowError::DivideByZero.into(),
            "Divide by zero",
            |e| matches!(e, DataFusionError::ArrowError(e, _) if matches!(**e, ArrowError::DivideByZero)),
        ),
        (
            || DataFusionError::External(Box::new(std::io::Error::other("the cable is cut"))),
            "the cable is cut",
            |e| matches!(e.find_root(), DataFusionError::External(e) if e.is::<std::io::Error>()),
        ),
        (
            || to_datafusion(Error::Cancelled { operation: "below" }),
            "below",
            |e| matches!(ours(e), Error::Cancelled { operation: "below" }),
        ),
    ];
    for (error, text, is_kept) in cases {
        let sim = Sim::new();
        let (table, _) = host_stream(move |i| match i {
            0 => Some(Ok(numbers(0, 16))),
            _ => Some(Err(error())),
        });
        let plan = with_transitions(double(scan(table).await, &sim));
        let error = fails_after(&plan, 1, &[text]).await;
        assert!(is_kept(&error), "{error:?}");
        drop(plan);
        sim.assert_done();
    }
}

#[tokio::test]
async fn out_of_memory_on_the_device() {
    let config = SimConfig::default();
    let config = SimConfig {
        capacity_bytes: 1 << 20,
        ..config
    };
    let sim = Sim::with(config);
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

/// The others end with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_error_of_one_partition_ends_the_query() {
    let sim = Sim::new();
    let (table, _) = readers_table(&sim, 4, |partition, i| match (partition, i) {
        (2, 3) => Some(Err(Error::Cancelled { operation: "three" })),
        // These never end by themselves.
        _ => (i < MANY).then(|| Ok(numbers(0, 16))),
    });
    let ctx = session_with(4, 1);
    register(&ctx, "t", table);
    let found = query(&ctx, "SELECT a, count(*) FROM t GROUP BY a").await;
    let error = ours(&found.unwrap_err());
    let of = |e: &_| matches!(e, Error::Cancelled { operation: "three" });
    assert!(of(&error), "{error:?}");
    drop(ctx);
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

#[test]
fn a_table_refuses_batches_of_another_schema_or_device() {
    let (a, b) = (Sim::new(), Sim::new());
    let made = |device: &Sim, batch| {
        let of = vec![vec![a.upload(&batch).unwrap()]];
        DeviceTable::from_batches(numbers(0, 1).schema(), device.device.clone(), of)
    };
    let refused = |table| matches!(table, Err(Error::InvalidArgument(_)));
    assert!(refused(made(&a, rows(0, 3))));
    assert!(refused(made(&b, numbers(0, 3))));
    assert!(made(&a, numbers(0, 3)).is_ok());
    // A union makes such batches: they are never null where the table's may be, and have no metadata.
    let batch = numbers(0, 3);
    let looser = batch
        .schema()
        .fields()
        .iter()
        .map(|field| field.as_ref().clone().with_nullable(true))
        .collect::<Vec<_>>();
    let looser = Arc::new(Schema::new(looser));
    let table = DeviceTable::from_batches(
        looser.clone(),
        a.device.clone(),
        vec![vec![a.upload(&batch).unwrap()]],
    )
    .unwrap();
    assert_eq!(table.schema(), looser);
}
