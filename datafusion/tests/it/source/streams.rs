//! Streams of futures: no thread waits for them.

use crate::kit::*;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// 64 partitions, each opened on the only thread of the runtime, and not before it is polled. The threads of a process are counted in
/// one that runs nothing else: the test starts itself again.
#[test]
fn async_openers_run_on_the_runtimes_thread() {
    const CHILD: &str = "ARROW_DEVICE_COUNT_THREADS";
    const NAME: &str = "source::streams::async_openers_run_on_the_runtimes_thread";
    if std::env::var_os(CHILD).is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.args([NAME, "--exact", "--test-threads=1"]);
        let child = child.env(CHILD, "1").output().unwrap();
        return says(
            &String::from_utf8_lossy(&child.stdout),
            &["test result: ok. 1 passed"],
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let device = Devices::cpu();
        let batch = device.upload(&numbers(0, 16)).unwrap();
        let (opened, own) = (Arc::<AtomicUsize>::default(), thread::current().id());
        let (of, count) = (batch.clone(), opened.clone());
        let open = move |request: ScanRequest| {
            let (batch, count) = (of.clone(), count.clone());
            async move {
                tokio::task::yield_now().await;
                assert_eq!(thread::current().id(), own);
                count.fetch_add(1, SeqCst);
                Ok(request.stream(futures::stream::iter([Ok(batch)])))
            }
        };
        let table = DeviceTable::from_streams(batch.schema(), device, 64, open);
        let scan = scan(Arc::new(table)).await;
        let (context, before) = (session().task_ctx(), threads());
        let start = |p| scan.execute(p, context.clone()).unwrap();
        let mut streams: Vec<_> = (0..64).map(start).collect();
        assert_eq!(opened.load(SeqCst), 0, "opened before the first poll");
        for stream in &mut streams {
            assert_eq!(stream.next().await.unwrap().unwrap().num_rows(), 16);
        }
        assert_eq!((opened.load(SeqCst), threads()), (64, before));
        for stream in &mut streams {
            assert!(stream.next().await.is_none());
        }
    });
}

#[tokio::test]
async fn an_opener_that_fails_fails_the_query_once() {
    let sim = Sim::new();
    let open = |request: ScanRequest| async move {
        let text = format!("no object {}", request.partition);
        Err::<SendableDeviceStream, _>(Error::InvalidArgument(text.into()))
    };
    let table = DeviceTable::from_streams(numbers(0, 1).schema(), sim.device.clone(), 1, open);
    let scan = scan(Arc::new(table)).await;
    let mut stream = scan.execute(0, session().task_ctx()).unwrap();
    fails(stream.next().await.unwrap(), &["no object 0"]);
    assert!(stream.next().await.is_none());
}

/// The stream's schema is known only once it is open, even of one without batches.
#[tokio::test]
async fn a_stream_of_another_schema_is_refused_once_it_is_open() {
    let sim = Sim::new();
    let open = |request: ScanRequest| async move {
        let (none, device_type) = (futures::stream::empty(), request.device.id().device_type);
        Ok(DeviceRecordBatches::from_stream(
            none,
            schema(),
            device_type,
        ))
    };
    let table = DeviceTable::from_streams(numbers(0, 1).schema(), sim.device.clone(), 1, open);
    let found = query(&over(Arc::new(table)), "SELECT a FROM t").await;
    fails(found, &["another schema"]);
}
