//! Small batches that are joined on the device.

use datafusion::execution::memory_pool::UnboundedMemoryPool;
use tokio::runtime::Handle;

use crate::kit::*;
use crate::memory::limited;
use crate::nodes::*;
use crate::ops::run_on_device;

/// Batches of these numbers of rows, in one partition.
async fn leaf_of(device: &Device, sizes: &[usize]) -> Plan {
    let batches = sizes.iter().scan(0, |first, size| {
        *first += *size as i64;
        Some(rows(*first - *size as i64, *size))
    });
    device_leaf(device_table(device, &[batches.collect()])).await
}

#[tokio::test]
async fn small_batches_are_joined_and_large_ones_passed_on() {
    for sim in [Sim::new(), Sim::deferred()] {
        // What comes, what is made of it, and how many of those are joined.
        for (from, to, joined) in [
            (&[][..], &[][..], 0),
            (&[0, 0], &[], 0),
            (&[7], &[7], 0),
            (&[3, 0, 4, 2, 0], &[9], 1),
            (&[9, 9, 2, 9], &[20, 9], 1),
            (&[3, 3, 10, 40, 1, 2], &[6, 10, 40, 3], 2),
            (&[3, 30, 3], &[3, 30, 3], 0),
        ] {
            let plan = joining(leaf_of(&sim, from).await, &sim, 20);
            let (batches, cost) = run_on_device(&plan, &sim).await.unwrap();
            assert_eq!(rows_of(&batches[0]), to, "{from:?}");
            let expected = rows(0, from.iter().sum());
            assert_eq!(lines(&to_host(&batches[0])), lines(&[expected]));
            // An allocation for each batch that was joined, and nothing over the bus but sizes of strings.
            assert_eq!(cost.allocations, joined, "{from:?}");
        }
        sim.assert_done();
    }
}

/// Without a wait and without a byte to or from the host. Rows without columns are rows all the same.
#[tokio::test]
async fn joining_numbers_copies_on_the_device_only() {
    let sim = Sim::new();
    let leaf = device_leaf(device_table(&sim, &[batches(0, 8)])).await;
    let (batches, cost) = run_on_device(&joining(leaf, &sim, 64), &sim).await.unwrap();
    assert_eq!(rows_of(&batches[0]), [64, 64]);
    assert_eq!((cost.bytes_to_device, cost.bytes_to_host), (0, 0));
    assert_eq!((cost.bytes_on_device, cost.host_waits), (8 * 128, 0));
    assert_eq!(numbers_on(&batches[0]), multiples(128, 1));
    let rows = [3, 0, 4, 50].map(no_columns).to_vec();
    let leaf = device_leaf(device_table(&sim, &[rows])).await;
    let (batches, cost) = run_on_device(&joining(leaf, &sim, 20), &sim).await.unwrap();
    assert_eq!((rows_of(&batches[0]), cost.copies), (vec![7, 50], 0));
}

/// Each operation of the device fails once: an error, or the right rows.
#[tokio::test]
async fn a_device_that_fails_while_batches_are_joined() {
    let sim = Sim::new();
    let leaf = leaf_of(&sim, &[3, 3, 9, 9, 9]).await;
    let mut failures = 0;
    for op in FaultOp::ALL {
        for n in 1..20 {
            sim.sim.faults().fail_nth(op, n);
            let plan = joining(leaf.clone(), &sim, 20);
            let result = run_on_device(&plan, &sim).await;
            sim.sim.faults().fail_nth(op, 0);
            match result {
                Ok((batches, _)) => {
                    assert_eq!(lines(&to_host(&batches[0])), lines(&[rows(0, 33)]));
                }
                Err(_) => failures += 1,
            }
        }
    }
    assert!(failures >= 3, "{failures}");
    drop(leaf);
    sim.assert_done();
}

/// The keys of dictionaries could be exhausted.
#[tokio::test]
async fn batches_whose_join_could_fail_are_passed_on() {
    let sim = Sim::new();
    let batch = |i: usize| {
        let values: ArrayRef = Arc::new(StringArray::from(vec![i.to_string()]));
        let column = DictionaryArray::<Int8Type>::new(Int8Array::from(vec![0]), values);
        RecordBatch::try_from_iter([("d", Arc::new(column) as ArrayRef)]).unwrap()
    };
    let batches = (0..300).map(batch).collect();
    let leaf = device_leaf(device_table(&sim, &[batches])).await;
    let (batches, cost) = run_on_device(&joining(leaf, &sim, 1000), &sim)
        .await
        .unwrap();
    assert_eq!((batches[0].len(), cost.allocations), (300, 0));
}

/// What waits is reserved, and given back when it has been joined.
#[tokio::test]
async fn batches_that_wait_are_reserved() {
    let sim = Sim::new();
    let leaf = device_leaf(device_table(&sim, &[batches(0, 8)])).await;
    let plan = joining(leaf, &sim, 64);
    // Four batches of 128 bytes wait for each that is made.
    for (limit, fits) in [(511, false), (512, true)] {
        let (context, pool) = limited(limit);
        let node = DeviceExec::of(&plan).unwrap();
        let stream = node.execute_device(0, context).unwrap();
        let mut found = stream.collect::<Vec<_>>().await;
        let last = found.pop().unwrap();
        match fits {
            true => assert!(last.is_ok() && found.len() == 1),
            // Nothing comes before, so that the query may still run on the host.
            false => {
                fails(last, &["DeviceCoalesceBatchesExec, partition 0"]);
                assert!(found.is_empty());
            }
        }
        assert_eq!(pool.reserved(), 0);
    }
}

/// What a join does on a blocking thread counts as the node's.
#[tokio::test]
async fn a_join_of_texts_is_counted() {
    let sim = Sim::new();
    let plan = joining(leaf_of(&sim, &[8, 8, 8, 8]).await, &sim, 32);
    let (batches, cost) = run_on_device(&plan, &sim).await.unwrap();
    assert_eq!(batches[0].len(), 1);
    assert!(cost.host_waits > 0 && cost.bytes_on_device > 0, "{cost:?}");
    for (name, expected) in [
        ("copies", cost.copies),
        ("host_waits", cost.host_waits),
        ("bytes_on_device", cost.bytes_on_device),
        ("bytes_to_host", cost.bytes_to_host),
        ("peak_mem_used", cost.allocated_bytes),
    ] {
        let found = metric(&plan, "DeviceCoalesceBatchesExec", name);
        assert_eq!(found, Some(expected as usize), "{name}");
    }
}

/// The stream of a join of texts, executed within this runtime.
fn texts(sim: &Sim, context: Arc<TaskContext>, runtime: &Handle) -> SendableDeviceStream {
    let plan = joining(block_on(leaf_of(sim, &[8, 8, 8, 8])), sim, 32);
    let _within = runtime.enter();
    let node = DeviceExec::of(&plan).unwrap();
    node.execute_device(0, context).unwrap()
}

/// A stream that is dropped while a blocking thread joins, or before it begins, leaves nothing.
#[test]
fn a_join_whose_stream_is_dropped_lets_everything_go() {
    let sim = Sim::new();
    let pool: Arc<dyn MemoryPool> = Arc::new(UnboundedMemoryPool::default());
    let of = pool.clone();
    let pools = DevicePools::new(move |_| of.clone());
    let context = task(config(|_| ()).with_extension(Arc::new(pools)));
    let mut own = Builder::new_current_thread();
    let own = own.max_blocking_threads(1).build().unwrap();
    for i in 0..50 {
        let before = sim.stats();
        let (release, released) = mpsc::channel::<()>();
        let begins = i % 2 == 0;
        if !begins {
            own.spawn_blocking(move || released.recv().unwrap_err());
        }
        let mut stream = texts(&sim, context.clone(), own.handle());
        let mut cx = Context::from_waker(Waker::noop());
        let polled = stream.poll_next_unpin(&mut cx);
        assert!(polled.is_pending() || begins);
        drop((polled, stream, release));
        eventually("nothing is reserved", || pool.reserved() == 0);
        assert!(begins || sim.stats().since(&before).host_waits == 0);
    }
    own.shutdown_background();
    sim.assert_done();
}

/// Without its runtime a join is an error, and not the end of the input. Nor does a plan that runs in no runtime panic.
#[test]
fn a_join_needs_a_runtime() {
    let sim = Sim::new();
    let own = Builder::new_current_thread().build().unwrap();
    let context = task(config(|_| ()));
    let mut stream = texts(&sim, context.clone(), own.handle());
    own.shutdown_background();
    fails(block_on(stream.next()).unwrap(), &["joining batches"]);
    assert!(block_on(stream.next()).is_none());
    drop(stream);
    let plan = joining(block_on(leaf_of(&sim, &[8, 8])), &sim, 32);
    let node = DeviceExec::of(&plan).unwrap();
    let started = node.execute_device(0, context);
    fails(started, &["DeviceCoalesceBatchesExec", "Tokio runtime"]);
    drop(plan);
    sim.assert_done();
}
