//! Downloads that are started, polled, waited for and awaited, and the queue that their work runs on.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use crate::simkit::*;
use crate::support::r#gen::{Nulls, array};
use crate::support::types::{list, structure};
use crate::support::*;
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_device::device::sim::{FaultOp, SimConfig, SimMode};
use arrow_device::{
    DeviceArray, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatches, Devices,
    ExportOptions, ImportOptions, Result, SyncPolicy, TransferStats,
};
use arrow_schema::{DataType, Field, Schema};

/// A type with validity bitmaps, and with sizes that a slice or an import has to read.
fn nested() -> DataType {
    list(structure(vec![
        ("text", DataType::Utf8),
        ("flag", DataType::Boolean),
    ]))
}

/// The same array from the other side of the C interface: neither sizes nor null counts are known.
fn unknown(up: &DeviceArray) -> DeviceArray {
    let devices = Devices::new();
    devices.add(up.device().clone()).unwrap();
    let options = ImportOptions {
        devices: Some(devices),
        ..Default::default()
    };
    let export = ExportOptions {
        counts_nulls: false,
        ..ExportOptions::new(SyncPolicy::Event)
    };
    let field = Arc::new(Field::new("again", up.data_type().clone(), true));
    let exported = up.export_array(&export).unwrap();
    // SAFETY: the struct comes from an export of this crate, and the type is the exported one.
    unsafe { DeviceArray::import_as(exported, field, &options) }.unwrap()
}

fn batch_of(column: &ArrayRef) -> RecordBatch {
    let field = Field::new("a", column.data_type().clone(), true);
    RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![column.clone()]).unwrap()
}

fn cost<T>(work: impl FnOnce() -> T) -> (T, TransferStats) {
    TransferStats::scope(work)
}

/// Whether its task was woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Awaits on this thread.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    futures::executor::block_on(future)
}

/// Work on the default queue that runs only if something waits for that queue: no operation on another queue does.
#[test]
fn all_work_of_an_operation_runs_on_its_queue() {
    let sim = Sim::new(SimMode::Deferred);
    let queue = sim.new_queue().unwrap();
    let host = array(&nested(), 200, Nulls::Some, 7);
    let batch = batch_of(&host);
    let up = sim.upload_array(&host).unwrap();
    let up_batch = sim.upload(&batch).unwrap();
    let texts = sim
        .upload_array(&array(&DataType::Utf8, 100, Nulls::Some, 8))
        .unwrap();

    let touched = Arc::new(AtomicBool::new(false));
    let mark = touched.clone();
    launch(&sim.default_queue(), move |_| {
        mark.store(true, Ordering::SeqCst);
        Ok(())
    })
    .unwrap();
    let part = || up.slice(3, 150);
    let batch_part = || up_batch.slice(3, 150);
    let column = |batch: RecordBatch| batch.column(0).clone();
    let rows = host.slice(3, 150);
    let works: [(&str, &dyn Fn() -> Result<ArrayRef>); 4] = [
        ("start_to_host", &|| part()?.start_to_host(&queue)?.wait()),
        ("of unknown sizes", &|| {
            unknown(&part()?).start_to_host(&queue)?.wait()
        }),
        ("start of a batch", &|| {
            Ok(column(batch_part()?.start_to_host(&queue)?.wait()?))
        }),
        ("upload_array_on", &|| {
            sim.upload_array_on(&rows, &queue)?
                .start_to_host(&queue)?
                .wait()
        }),
    ];
    for (name, work) in works {
        assert_same(&rows, &work().unwrap(), name);
        assert!(!touched.load(Ordering::SeqCst), "{name}: the default queue");
    }
    let lent = unknown(&texts);
    assert!(lent.buffer(2).is_none());
    let len = lent.bytes_on(&queue).unwrap().len();
    let bytes = lent.buffer(2).unwrap();
    let bytes = DeviceArray::from_values(DataType::UInt8, len, bytes, None).unwrap();
    assert_eq!(
        bytes.start_to_host(&queue).unwrap().wait().unwrap().len(),
        len
    );
    assert!(!touched.load(Ordering::SeqCst), "bytes_on");

    // That the mark sees what it should: the same without a queue.
    up.slice(3, 150).unwrap().to_host().unwrap();
    assert!(touched.load(Ordering::SeqCst));
    drop((up, up_batch, texts, bytes, lent));
    sim.assert_done();
}

/// Starting costs no wait, and neither does the end of a download whose completion was seen. Sizes that are stored in device memory
/// are read first.
#[test]
fn a_download_that_is_polled() {
    let sim = Sim::new(SimMode::Deferred);
    let host = array(&DataType::Utf8, 60, Nulls::Some, 9);
    let up = sim.upload_array(&host).unwrap();
    for reads in [0, 1] {
        let source = || if reads == 0 { up.clone() } else { unknown(&up) };
        let (mut download, started) = cost(|| source().start_to_host(None).unwrap());
        assert_eq!((started.events, started.host_waits), (1, 0), "{started:?}");
        assert!(reads == 0 || started.bytes_to_host == 4, "{started:?}");
        assert!(!download.is_ready().unwrap());
        for _ in 0..reads {
            sim.synchronize().unwrap();
            let (ready, polled) = cost(|| download.is_ready().unwrap());
            assert!(!ready, "the copies were only queued now");
            assert!(polled.bytes_to_host > 4 && polled.host_waits == 0);
        }
        let (_, polled) = cost(|| download.is_ready().unwrap());
        assert_eq!(polled, TransferStats::default());
        sim.synchronize().unwrap();
        assert!(download.is_ready().unwrap());
        let (rows, finished) = cost(|| download.wait().unwrap());
        assert_eq!((finished.copies, finished.host_waits), (0, 0));
        assert_same(&host, &rows, "polled");
        // Not polled: a wait for the sizes, and one for the copies.
        let (rows, whole) = cost(|| source().start_to_host(None).unwrap().wait().unwrap());
        assert_eq!(whole.host_waits, 1 + reads);
        assert_same(&host, &rows, "waited for");
    }
    drop(up);
    sim.assert_done();
}

/// On the simulated device, whose worker wakes the task, and without a wait of any thread.
#[test]
fn a_download_that_is_awaited() {
    let sim = Sim::new(SimMode::Async);
    let host = array(&nested(), 80, Nulls::Some, 5);
    let batch = batch_of(&host);
    let (up, up_batch) = (
        sim.upload_array(&host).unwrap(),
        sim.upload(&batch).unwrap(),
    );
    let before = sim.stats();
    let rows = block_on(unknown(&up).start_to_host(None).unwrap()).unwrap();
    assert_same(&host, &rows, "array");
    drop(rows);
    let rows = block_on(up_batch.start_to_host(None).unwrap()).unwrap();
    assert_same_batch(&batch, &rows, "batch");
    assert_eq!(sim.stats().since(&before).host_waits, 0);
    drop((up, up_batch, rows));
    sim.assert_done();

    // A poll never runs the work itself, and the wake comes after it.
    let sim = Sim::new(SimMode::Deferred);
    let up = sim.upload_array(&host).unwrap();
    let mut download = pin!(up.start_to_host(None).unwrap());
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut cx = Context::from_waker(&waker);
    assert!(download.as_mut().poll(&mut cx).is_pending());
    assert_eq!(woken.0.load(Ordering::SeqCst), 0);
    sim.synchronize().unwrap();
    let rows = loop {
        if let Poll::Ready(rows) = download.as_mut().poll(&mut cx) {
            break rows.unwrap();
        }
    };
    assert_same(&host, &rows, "polled by hand");
}

/// The copies may still run: their memory stays until they have.
#[test]
fn a_download_that_is_dropped() {
    for wait in [false, true] {
        let sim = Sim::new(SimMode::Deferred);
        let up = sim
            .upload_array(&array(&nested(), 50, Nulls::Some, 3))
            .unwrap();
        up.wait().unwrap();
        let download = unknown(&up).start_to_host(None).unwrap();
        drop(download);
        let download = up.start_to_host(None).unwrap();
        drop(up);
        match wait {
            true => assert_eq!(download.wait().unwrap().len(), 50),
            false => drop(download),
        }
        sim.trim();
        // A copy into freed memory would be a violation.
        sim.assert_done();
    }
}

/// Memory that the host reads is neither copied nor waited for by the start.
#[test]
fn a_download_in_place() {
    let cpu = Devices::cpu();
    let host = array(&DataType::Utf8, 20, Nulls::Some, 3);
    let up = cpu.upload_array(&host).unwrap();
    let (mut download, started) = cost(|| up.start_to_host(None).unwrap());
    assert_eq!(started, TransferStats::default());
    assert!(download.is_ready().unwrap());
    assert_same(&host, &download.wait().unwrap(), "in place");
    let batch = batch_of(&host);
    let awaited = block_on(cpu.upload(&batch).unwrap().start_to_host(None).unwrap()).unwrap();
    assert_same_batch(&batch, &awaited, "in place");
}

#[test]
fn queues_of_other_devices_are_refused() {
    let (cpu, sim) = (Devices::cpu(), Sim::new(SimMode::Deferred));
    let queue = sim.default_queue();
    let up = cpu
        .upload_array(&array(&DataType::Utf8, 20, Nulls::Some, 3))
        .unwrap();
    let host = up.to_host().unwrap();
    let batch = cpu.upload(&batch_of(&host)).unwrap();
    let refused = [
        up.start_to_host(&queue).err(),
        batch.start_to_host(&queue).err(),
        cpu.upload_array_on(&host, &queue).err(),
    ];
    for (i, e) in refused.into_iter().enumerate() {
        let e = e.unwrap_or_else(|| panic!("{i}: not refused")).to_string();
        assert!(e.contains("a queue of sim"), "{i}: {e}");
    }
}

/// Each failure comes back once: from the start, from a poll, or from the wait. What was queued is kept and freed later.
#[test]
fn each_step_of_a_download_may_fail() {
    let config = SimConfig {
        mode: SimMode::Deferred,
        ..SimConfig::default()
    };
    let sim = Sim::with(SimConfig {
        capacity_bytes: 16 << 20,
        ..config
    });
    let host = array(&DataType::Utf8, 60, Nulls::Some, 9);
    let up = sim.upload_array(&host).unwrap();
    up.wait().unwrap();
    let whole = |polls: bool| -> Result<ArrayRef> {
        let mut download = unknown(&up).start_to_host(None)?;
        while polls && !download.is_ready()? {
            sim.synchronize()?;
        }
        download.wait()
    };
    let mut failures = 0;
    for (polls, op) in [true, false]
        .into_iter()
        .flat_map(|polls| FaultOp::ALL.map(|op| (polls, op)))
    {
        for n in 1..100 {
            sim.trim();
            sim.faults().clear();
            sim.faults().fail_nth(op, n);
            let result = whole(polls);
            let fired = sim.faults().fired() > 0;
            sim.faults().clear();
            match result {
                Ok(rows) => assert_same(&host, &rows, "despite a failure"),
                Err(e) => {
                    assert!(fired, "{op:?} {n}: {e}");
                    failures += 1;
                }
            }
            sim.synchronize().unwrap();
            assert_same(&host, &whole(polls).unwrap(), "the next one");
            if !fired {
                break;
            }
        }
    }
    assert!(failures >= 10, "{failures}");
    drop(up);
    sim.assert_done();
}

/// A poll that fails ends the download: its copies were not queued, or not waited for, so nothing may read them.
#[test]
fn a_poll_that_fails() {
    let sim = Sim::new(SimMode::Deferred);
    let up = sim.upload_array(&array(&DataType::Utf8, 60, Nulls::Some, 9));
    let mut download = unknown(&up.unwrap()).start_to_host(None).unwrap();
    sim.synchronize().unwrap();
    sim.faults().fail_nth(FaultOp::Copy, 1);
    assert!(download.is_ready().is_err());
    let e = download.is_ready().unwrap_err().to_string();
    assert!(e.contains("the download is over"), "{e}");
    assert!(download.wait().is_err());
    sim.assert_done();

    let host = array(&DataType::Utf8, 60, Nulls::Some, 9);
    for sizes_first in [false, true] {
        let sim = Sim::new(SimMode::Deferred);
        let up = sim.upload_array(&host).unwrap();
        up.wait().unwrap();
        for again in 0..3 {
            let mut cx = Context::from_waker(Waker::noop());
            let mut download = loop {
                let source = match sizes_first {
                    true => unknown(&up),
                    false => up.clone(),
                };
                let mut download = source.start_to_host(None).unwrap();
                sim.faults().fail_nth(FaultOp::Query, 1);
                let polled = pin!(&mut download).poll(&mut cx);
                let fired = sim.faults().fired();
                sim.faults().clear();
                match polled {
                    Poll::Ready(Err(_)) => break download,
                    // The release thread asked first, for an event of its own, and was told of the failure.
                    Poll::Pending if fired == 1 => {}
                    polled => panic!("{polled:?}"),
                }
            };
            let error = match again {
                0 => download.wait().unwrap_err(),
                1 => download.is_ready().unwrap_err(),
                _ => match pin!(&mut download).poll(&mut cx) {
                    Poll::Ready(result) => result.unwrap_err(),
                    Poll::Pending => panic!("a download that is over is pending"),
                },
            };
            assert!(error.to_string().contains("is over"), "{error}");
        }
        drop(up);
        sim.assert_done();
    }
}

/// The next batch's copies are queued before the last one's are waited for.
#[test]
fn downloads_are_queued_ahead() {
    let sim = Sim::new(SimMode::Deferred);
    let sent: Vec<_> = (0..3)
        .map(|i| array(&nested(), 50, Nulls::Some, i))
        .collect();
    let up: Vec<_> = sent
        .iter()
        .map(|array| sim.upload_array(array).unwrap())
        .collect();
    sim.synchronize().unwrap();
    let lists = sim.faults().seen(FaultOp::Copy);
    let (downloads, cost) = cost(|| {
        let started = up.iter().map(|up| up.start_to_host(None).unwrap());
        started.collect::<Vec<_>>()
    });
    assert_eq!(
        (sim.faults().seen(FaultOp::Copy) - lists, cost.host_waits),
        (3, 0)
    );
    for (sent, download) in sent.iter().zip(downloads) {
        assert_same(sent, &download.wait().unwrap(), "started together");
    }

    for ahead in [0, 1, 2] {
        let batches: Vec<_> = sent
            .iter()
            .map(|array| sim.upload(&batch_of(array)))
            .collect();
        sim.synchronize().unwrap();
        let schema = batch_of(&sent[0]).schema();
        let stream = DeviceRecordBatches::new(batches, schema, sim.id().device_type);
        let mut reader = stream.into_host_reader().with_prefetch(ahead);
        let lists = sim.faults().seen(FaultOp::Copy);
        sim.faults().fail_nth(FaultOp::HostWait, 1);
        reader.next().unwrap().unwrap_err();
        let queued = sim.faults().seen(FaultOp::Copy) - lists;
        assert_eq!(queued, 1 + ahead as u64, "the first wait comes after them");
    }
    sim.synchronize().unwrap();
    drop(up);
    sim.assert_done();
}

/// Sizes that are stored in device memory are not read behind the copies of the batch before: a wait for them would be one
/// for those.
#[test]
fn reads_of_sizes_overtake_copies() {
    let sim = Sim::new(SimMode::Deferred);
    let text = array(&DataType::Utf8, 60, Nulls::Some, 9);
    let sent = batch_of(&text);
    let batch = || {
        let column = unknown(&sim.upload_array(&text).unwrap());
        DeviceRecordBatch::try_new(sent.schema(), &[column])
    };
    let batches = [batch(), batch()].map(Result::unwrap);
    sim.synchronize().unwrap();
    let results = batches.clone().map(Ok);
    let stream = DeviceRecordBatches::new(results, sent.schema(), sim.id().device_type);
    let mut reader = stream.into_host_reader();
    let lists = sim.faults().seen(FaultOp::Copy);
    // Two reads of sizes, then the wait for the first batch's copies.
    sim.faults().fail_nth(FaultOp::HostWait, 3);
    reader.next().unwrap().unwrap_err();
    assert_eq!(sim.faults().seen(FaultOp::Copy) - lists, 4);
    // A wait for the batch, a list of copies and an event, for each batch.
    assert_eq!(sim.sim.report().pending_operations, 6, "no copy has run");
    drop((reader, batches));
    sim.synchronize().unwrap();
    sim.assert_done();
}
