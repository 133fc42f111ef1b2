//! Streams of futures: no thread waits for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, ThreadId};

use arrow_device::DeviceRecordBatches;
use arrow_device::Error;
use arrow_device_datafusion::{DeviceExec, DeviceTable, SendableDeviceStream};
use futures::StreamExt;

use crate::kit::*;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// 64 partitions, each opened on the only thread of the runtime, and not before it is polled.
#[tokio::test(flavor = "current_thread")]
async fn async_openers_run_on_the_runtimes_thread() {
    let sim = Sim::new();
    let batch = sim.upload(&numbers(0, 16)).unwrap();
    let (opened, elsewhere) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let (count, flag, own): (_, _, ThreadId) =
        (opened.clone(), elsewhere.clone(), thread::current().id());
    let of = batch.clone();
    let open = move |request: arrow_device_datafusion::ScanRequest| {
        let (batch, count, flag) = (of.clone(), count.clone(), flag.clone());
        async move {
            tokio::task::yield_now().await;
            count.fetch_add(1, SeqCst);
            flag.fetch_or(thread::current().id() != own, SeqCst);
            let device_type = request.device.id().device_type;
            let batches = futures::stream::iter([Ok(batch.clone())]);
            Ok(DeviceRecordBatches::from_stream(
                batches,
                batch.schema(),
                device_type,
            ))
        }
    };
    let table = DeviceTable::from_streams(batch.schema(), sim.device.clone(), 64, open);
    let scan = DeviceExec::from(table.scan_on_device(None, None).unwrap());
    let context = session().task_ctx();
    let start = |p| scan.execute_device(p, context.clone()).unwrap();
    let mut streams: Vec<SendableDeviceStream> = (0..64).map(start).collect();
    assert_eq!(opened.load(SeqCst), 0, "opened before the first poll");
    for stream in &mut streams {
        assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 16);
    }
    assert_eq!(opened.load(SeqCst), 64);
    assert!(!elsewhere.load(SeqCst), "an opener ran on another thread");
    for stream in &mut streams {
        assert!(stream.next().await.is_none());
    }
}

/// The threads of a process, counted in one that runs nothing else: the test starts itself again.
#[test]
fn no_thread_is_made_for_async_openers() {
    const CHILD: &str = "ARROW_DEVICE_COUNT_THREADS";
    const NAME: &str = "source::streams::no_thread_is_made_for_async_openers";
    if std::env::var_os(CHILD).is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([NAME, "--exact", "--test-threads=1"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success() && text.contains("test result: ok. 1 passed"),
            "{text}"
        );
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(async {
        let device = arrow_device::Devices::cpu();
        let batch = device.upload(&numbers(0, 16)).unwrap();
        let of = batch.clone();
        let table = DeviceTable::from_streams(batch.schema(), device, 64, move |request| {
            let stream = request.stream(futures::stream::iter([Ok(of.clone())]));
            async move { Ok(stream) }
        });
        let scan = scan(Arc::new(table)).await;
        let context = session().task_ctx();
        let before = threads();
        let start = |p| scan.execute(p, context.clone()).unwrap();
        let mut streams: Vec<_> = (0..64).map(start).collect();
        let mut rows = 0;
        for stream in &mut streams {
            rows += stream.next().await.unwrap().unwrap().num_rows();
        }
        assert_eq!((rows, threads()), (64 * 16, before));
    });
}

#[tokio::test]
async fn an_opener_that_fails_fails_the_query_once() {
    let sim = Sim::new();
    let open = |request: arrow_device_datafusion::ScanRequest| async move {
        let text = format!("no object {}", request.partition);
        Err::<SendableDeviceStream, _>(Error::InvalidArgument(text.into()))
    };
    let table = DeviceTable::from_streams(numbers(0, 1).schema(), sim.device.clone(), 1, open);
    let scan = scan(Arc::new(table)).await;
    let mut stream = scan.execute(0, session().task_ctx()).unwrap();
    let error = stream.next().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("no object 0"), "{error}");
    assert!(stream.next().await.is_none());
}

/// The stream's schema is known only once it is open, even of one without batches.
#[tokio::test]
async fn a_stream_of_another_schema_is_refused_once_it_is_open() {
    let sim = Sim::new();
    let open = |request: arrow_device_datafusion::ScanRequest| async move {
        let device_type = request.device.id().device_type;
        let none = futures::stream::empty();
        Ok(DeviceRecordBatches::from_stream(
            none,
            schema(),
            device_type,
        ))
    };
    let table = DeviceTable::from_streams(numbers(0, 1).schema(), sim.device.clone(), 1, open);
    let error = query(&over(Arc::new(table)), "SELECT a FROM t")
        .await
        .unwrap_err();
    assert!(error.to_string().contains("another schema"), "{error}");
}
