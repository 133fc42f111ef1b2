//! Errors: they end the query, and say where and what.

use std::sync::Arc;

use arrow_device::async_stream::DeviceRecordBatchStreamAdapter;
use arrow_device::device::sim::{FaultOp, SimConfig};
use arrow_device::{
    DeviceRecordBatchStreamReader, Error, ExportOptions, FFI_ArrowDeviceArrayStream, ImportOptions,
    SyncPolicy,
};
use arrow_device_datafusion::{DevicePlan, DeviceTable, ScanRequest, to_datafusion};
use datafusion::arrow::error::ArrowError;
use datafusion::catalog::TableProvider;
use datafusion::common::{DataFusionError, Result, Statistics};
use datafusion::physical_plan::{collect, execute_stream};
use futures::StreamExt;

use crate::kit::*;

async fn run(plan: &Plan) -> Result<Vec<i64>> {
    let batches = collect(plan.clone(), session().task_ctx()).await?;
    Ok(numbers_of(&batches))
}

/// The error of a query whose stream gives `good` batches first, and ends after it.
async fn fails_after(plan: &Plan, good: usize) -> DataFusionError {
    let mut stream = execute_stream(plan.clone(), session().task_ctx()).unwrap();
    for i in 0..good {
        let batch = stream.next().await;
        let batch = batch.unwrap_or_else(|| panic!("ends before batch {i}"));
        batch.unwrap_or_else(|e| panic!("batch {i}: {e}"));
    }
    let error = stream.next().await.expect("no end").unwrap_err();
    assert!(stream.next().await.is_none(), "goes on after an error");
    error
}

/// Device, operation and the device's text: in the error itself, and in what a user sees.
#[track_caller]
fn assert_device_error(error: &DataFusionError, sim: &Sim, operation: &str, text: &str) {
    match ours(error) {
        Error::Device {
            device,
            operation: o,
            message,
            ..
        } => {
            assert_eq!((device, o), (sim.id(), operation));
            assert!(message.contains(text), "{message}");
        }
        e => panic!("{e:?}"),
    }
    let shown = error.to_string();
    for part in [operation, text, &sim.id().to_string()] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}

fn partition(batches: i64) -> Vec<datafusion::arrow::array::RecordBatch> {
    (0..batches).map(|i| numbers(i * 16, 16)).collect()
}

#[tokio::test]
async fn an_injected_failure_names_device_operation_and_text() {
    let sim = Sim::new();
    let table = device_table(&sim, &[partition(4)]);
    for (op, operation) in [
        (FaultOp::Copy, "copy"),
        (FaultOp::NewQueue, "new queue"),
        (FaultOp::QueueWait, "queue wait"),
        (FaultOp::Launch, "launch"),
    ] {
        let plan = with_transitions(double(scan(table.clone()).await, &sim));
        sim.sim.faults().fail_nth(op, 1);
        let error = run(&plan).await.unwrap_err();
        assert_device_error(&error, &sim, operation, "injected failure");
        // The next one is as if nothing had been.
        assert_eq!(run(&plan).await.unwrap().len(), 64);
    }
    drop(table);
    sim.assert_done();
}

#[tokio::test]
async fn batches_before_an_error_come_and_none_after_it() {
    let sim = Sim::new();
    let table = device_table(&sim, &[partition(4)]);
    let plan = scan(table).await;
    sim.sim.faults().fail_nth(FaultOp::Copy, 3);
    let error = fails_after(&plan, 2).await;
    assert_device_error(&error, &sim, "copy", "injected failure");
}

/// Every operation in turn: an error that is the device's, or the right result; and nothing stays
/// behind.
#[tokio::test]
async fn any_operation_may_fail() {
    let sim = Sim::new();
    let expected: Vec<i64> = (0..48).map(|i| i * 4).collect();
    let mut failures = 0;
    for n in 1..500 {
        let host = scan(host_table(&[partition(3)])).await;
        let plan = with_transitions(double(double(host, &sim), &sim));
        sim.sim.faults().clear();
        sim.sim.faults().fail_nth_of_any(n);
        let result = run(&plan).await;
        let fired = sim.sim.faults().fired() > 0;
        sim.sim.faults().clear();
        match result {
            Ok(numbers) => assert_eq!(numbers, expected, "operation {n}"),
            Err(e) => {
                let device = match ours(&e) {
                    Error::Device { device, .. } | Error::OutOfMemory { device, .. } => device,
                    other => panic!("operation {n}: {other:?}"),
                };
                assert_eq!(device, sim.id(), "operation {n}");
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

#[tokio::test]
async fn a_reader_that_errs_ends_the_query_with_its_error() {
    let sim = Sim::new();
    let next = |i| match i {
        0 | 1 => Some(Ok(numbers(0, 16))),
        _ => Some(Err(Error::Cancelled {
            operation: "reading the sensor",
        })),
    };
    let (table, asked) = reader_table(&sim, next);
    let plan = scan(table.clone()).await;
    let error = fails_after(&plan, 2).await;
    assert!(matches!(ours(&error), Error::Cancelled { .. }), "{error:?}");
    assert!(error.to_string().contains("reading the sensor"), "{error}");
    assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 3);
    // Through operators and other nodes as well.
    let ctx = session_with(4, 2);
    register(&ctx, "t", table);
    let sql = "SELECT a % 3, count(*) FROM t GROUP BY a % 3";
    let error = query(&ctx, sql).await.unwrap_err();
    assert!(error.to_string().contains("reading the sensor"), "{error}");
    drop((plan, ctx));
    sim.assert_done();
}

/// As with DataFusion's own nodes.
#[tokio::test]
async fn an_error_is_no_batch() {
    let sim = Sim::new();
    let next = |i| match i {
        0 => Some(Ok(numbers(0, 16))),
        _ => Some(Err(Error::Cancelled { operation: "a" })),
    };
    let plan = scan(reader_table(&sim, next).0).await;
    fails_after(&plan, 1).await;
    assert_eq!(metric(&plan, "DeviceScanExec", "output_batches"), Some(1));
    assert_eq!(metric(&plan, "DeviceToHostExec", "output_batches"), Some(1));
}

#[tokio::test]
async fn a_reader_that_panics_ends_the_query_with_the_text() {
    let sim = Sim::new();
    let next = |i| match i {
        0 => Some(Ok(numbers(0, 16))),
        _ => panic!("the reader is broken"),
    };
    let plan = with_transitions(double(scan(reader_table(&sim, next).0).await, &sim));
    let error = fails_after(&plan, 1).await;
    assert!(matches!(ours(&error), Error::Panic { .. }), "{error:?}");
    assert!(
        error.to_string().contains("the reader is broken"),
        "{error}"
    );
    drop(plan);
    sim.assert_done();
}

#[test]
fn statistics_of_another_number_of_columns_are_refused() {
    let sim = Sim::new();
    let columns = schema().fields().len();
    let unread = || {
        let open = |_| -> arrow_device::Result<Reader> { unreachable!("only planned") };
        DeviceTable::from_readers(schema(), sim.device.clone(), 1, open)
    };
    for found in [0, 1, columns - 1, columns + 1] {
        let statistics = Statistics {
            column_statistics: vec![Default::default(); found],
            ..Statistics::new_unknown(&schema())
        };
        let table = unread();
        let error = table.with_statistics(statistics).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error:?}");
        let text = format!("statistics of {found} columns for a table of {columns}");
        assert!(error.to_string().contains(&text), "{error}");
    }
    let table = unread();
    let known = Statistics::new_unknown(&schema());
    let table = table.with_statistics(known.clone()).unwrap();
    assert_eq!(TableProvider::statistics(&table), Some(known));
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
    let error = query(&ctx, "SELECT a FROM t").await.unwrap_err();
    assert!(matches!(ours(&error), Error::InvalidArgument(_)));
    assert!(error.to_string().contains("no file"), "{error}");
}

#[tokio::test]
async fn a_failing_kernel() {
    let sim = Sim::new();
    let table = device_table(&sim, &[partition(4)]);
    let kernel = |n| match n {
        20.. => Err(format!("the kernel does not like {n}")),
        n => Ok(n),
    };
    let plan = with_transitions(map(vec![scan(table).await], &sim, kernel));
    let error = run(&plan).await.unwrap_err();
    assert_device_error(&error, &sim, "kernel", "the kernel does not like 20");
    // A lasting error of the device: later queries say the same.
    let error = run(&plan).await.unwrap_err();
    assert_device_error(&error, &sim, "kernel", "the kernel does not like 20");
    drop(plan);
    sim.assert_done();
}

/// Errno and text of a producer come through the C interface.
#[tokio::test]
async fn a_foreign_stream_that_errs() {
    let sim = Sim::new();
    let device = sim.device.clone();
    let open = move |_| {
        let next = |i| match i {
            0 | 1 => Some(Ok(numbers(0, 16))),
            _ => Some(Err(
                ArrowError::ComputeError("the disk is gone".into()).into()
            )),
        };
        let reader = Reader::new(&device, numbers(0, 1).schema(), next);
        let options = ExportOptions::new(SyncPolicy::Event);
        let stream = FFI_ArrowDeviceArrayStream::new(reader, options)?;
        let devices = arrow_device::Devices::new();
        devices.add(device.clone())?;
        let options = ImportOptions::default().with_devices(devices);
        // SAFETY: the stream is one of this crate's.
        unsafe { DeviceRecordBatchStreamReader::new(stream, options) }
    };
    let schema = numbers(0, 1).schema();
    let table = DeviceTable::from_readers(schema, sim.device.clone(), 1, open);
    let plan = with_transitions(double(scan(Arc::new(table)).await, &sim));
    let error = fails_after(&plan, 2).await;
    match ours(&error) {
        Error::Foreign {
            operation, errno, ..
        } => assert_eq!((operation, errno), ("get_next", 5)),
        e => panic!("{e:?}"),
    }
    assert!(error.to_string().contains("the disk is gone"), "{error}");
    drop(plan);
    sim.assert_done();
}

/// A host plan that errs, under an operator on the device.
async fn over_errors(
    error: impl Fn() -> DataFusionError + Send + Sync + 'static,
) -> DataFusionError {
    let sim = Sim::new();
    let (table, _) = host_stream(move |i| match i {
        0 => Some(Ok(numbers(0, 16))),
        _ => Some(Err(error())),
    });
    let plan = with_transitions(double(scan(table).await, &sim));
    assert!(text(&plan, &[]).contains("HostToDeviceExec"));
    let error = fails_after(&plan, 1).await;
    drop(plan);
    sim.assert_done();
    error
}

#[tokio::test]
async fn an_upload_passes_datafusions_errors_on() {
    let error = over_errors(|| DataFusionError::Execution("no such thing".into())).await;
    let root = error.find_root();
    assert!(matches!(root, DataFusionError::Execution(text) if text == "no such thing"));
    let error = over_errors(|| DataFusionError::ResourcesExhausted("too much".into())).await;
    let root = error.find_root();
    assert!(matches!(root, DataFusionError::ResourcesExhausted(text) if text == "too much"));
    assert!(error.to_string().contains("too much"), "{error}");
}

#[tokio::test]
async fn an_upload_passes_errors_of_arrow_and_of_other_crates_on() {
    let error = over_errors(|| ArrowError::DivideByZero.into()).await;
    assert!(error.to_string().contains("Divide by zero"), "{error}");
    let error = over_errors(|| {
        let e = std::io::Error::other("the cable is cut");
        DataFusionError::External(Box::new(e))
    })
    .await;
    assert!(error.to_string().contains("the cable is cut"), "{error}");
    // One of ours that comes from below.
    let error = over_errors(|| to_datafusion(Error::Cancelled { operation: "below" })).await;
    assert!(matches!(
        ours(&error),
        Error::Cancelled { operation: "below" }
    ));
}

#[tokio::test]
async fn an_error_of_a_host_expression_below_an_operator() {
    let sim = Sim::new();
    let ctx = over(host_table(&[partition(2)]));
    let host = plan(&ctx, "SELECT 10 / (a - 20) AS a FROM t").await;
    let plan = with_transitions(double(host, &sim));
    let error = run(&plan).await.unwrap_err();
    assert!(error.to_string().contains("Divide by zero"), "{error}");
}

/// Whoever matches an error of arrow-rs that went up and down again finds it.
#[tokio::test]
async fn an_error_of_arrow_stays_one() {
    let error = over_errors(|| ArrowError::DivideByZero.into()).await;
    match &error {
        DataFusionError::ArrowError(e, _) => {
            assert!(matches!(**e, ArrowError::DivideByZero), "{e:?}")
        }
        e => panic!("{e:?}"),
    }
}

#[tokio::test]
async fn out_of_memory_on_the_device() {
    let config = SimConfig::default();
    let config = config.with_capacity_bytes(1 << 20).with_quarantine_bytes(0);
    // By an upload.
    let sim = Sim::with(config.clone());
    let (table, _) = host_stream(|i| (i == 0).then(|| Ok(numbers(0, 1 << 18))));
    let host = scan(table).await;
    let plan = with_transitions(double(host, &sim));
    let error = run(&plan).await.unwrap_err();
    match ours(&error) {
        Error::OutOfMemory { device, bytes, .. } => {
            assert_eq!((device, bytes), (sim.id(), 8 << 18));
        }
        e => panic!("{e:?}"),
    }
    assert!(error.to_string().contains("out of memory"), "{error}");
    drop(plan);
    sim.assert_done();
    // By an operator.
    let sim = Sim::with(config);
    let table = device_table(&sim, &[vec![numbers(0, 80_000)]]);
    let plan = with_transitions(double(scan(table).await, &sim));
    let error = run(&plan).await.unwrap_err();
    assert!(matches!(
        ours(&error),
        Error::OutOfMemory { bytes: 640_000, .. }
    ));
    drop(plan);
    sim.assert_done();
}

/// The others end with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_error_of_one_partition_ends_the_query() {
    let sim = Sim::new();
    let device = sim.device.clone();
    let open = move |request: ScanRequest| {
        let next = move |i| match (request.partition, i) {
            (2, 3) => Some(Err(Error::Cancelled { operation: "three" })),
            _ => (i < MANY).then(|| Ok(numbers(0, 16))),
        };
        Ok(Reader::new(&device, numbers(0, 1).schema(), next))
    };
    let schema = numbers(0, 1).schema();
    let table = DeviceTable::from_readers(schema, sim.device.clone(), 4, open);
    let ctx = session_with(4, 1);
    register(&ctx, "t", Arc::new(table));
    // The others never end by themselves.
    let error = query(&ctx, "SELECT a, count(*) FROM t GROUP BY a").await;
    let error = error.unwrap_err();
    assert!(
        matches!(ours(&error), Error::Cancelled { operation: "three" }),
        "{error:?}"
    );
    drop(ctx);
    sim.assert_done();
}

/// A scan asks no more after an error, nor after its last row: the producer goes while the scan's
/// stream lives.
#[tokio::test]
async fn a_scan_lets_its_producer_go_at_the_end() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let broken = Error::Cancelled { operation: "a" };
    for (fetch, expected) in [(None, 2), (Some(16), 1), (Some(0), 0)] {
        let alive = Arc::new(());
        let (batch, broken, held) = (batch.clone(), broken.clone(), alive.clone());
        let open = move |_| {
            let items = vec![Ok(batch.clone()), Err(broken.clone()), Ok(batch.clone())];
            let held = held.clone();
            let items = futures::stream::iter(items).inspect(move |_| {
                let _ = &held;
            });
            let (schema, device_type) = (batch.schema(), batch.device().id().device_type);
            let items = DeviceRecordBatchStreamAdapter::new(schema, device_type, items);
            async move { Ok(items) }
        };
        let schema = numbers(0, 1).schema();
        let table = DeviceTable::from_streams(schema, sim.device.clone(), 1, open);
        let scan = table.scan_on_device(None, fetch).unwrap();
        let idle = Arc::strong_count(&alive);
        let mut stream = scan.execute_device(0, &sim, session().task_ctx()).unwrap();
        assert_eq!(Arc::strong_count(&alive), idle + 1);
        let mut items = 0;
        while stream.next().await.is_some() {
            items += 1;
        }
        assert_eq!(
            (items, Arc::strong_count(&alive)),
            (expected, idle),
            "{fetch:?}"
        );
    }
}

/// What comes is checked against what the table says.
#[tokio::test]
async fn batches_of_another_schema_are_an_error() {
    let sim = Sim::new();
    let next = |i| match i {
        0 => Some(Ok(numbers(0, 16))),
        _ => Some(Ok(rows(0, 16))),
    };
    let plan = scan(reader_table(&sim, next).0).await;
    let error = fails_after(&plan, 1).await;
    assert!(error.to_string().contains("schema"), "{error}");
    drop(plan);
    sim.assert_done();
}

#[test]
fn a_table_refuses_batches_of_another_schema_or_device() {
    let (a, b) = (Sim::new(), Sim::new());
    let of = |batch| vec![vec![a.upload(&batch).unwrap()]];
    let schema = || numbers(0, 1).schema();
    let refused = |device: &Sim, batch| {
        DeviceTable::from_batches(schema(), device.device.clone(), of(batch)).unwrap_err()
    };
    assert!(matches!(refused(&a, rows(0, 3)), Error::InvalidArgument(_)));
    assert!(matches!(
        refused(&b, numbers(0, 3)),
        Error::InvalidArgument(_)
    ));
    let good = DeviceTable::from_batches(schema(), a.device.clone(), of(numbers(0, 3)));
    assert!(good.is_ok());
}
