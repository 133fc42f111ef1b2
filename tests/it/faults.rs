//! Every operation of a device fails once, everywhere: errors come back, nothing is lost or freed
//! early, and the next attempt works.

use std::sync::Arc;

use crate::simkit::*;
use crate::support::*;
use arrow_array::{Array, ArrayRef, Int32Array, Int64Array, RecordBatch};
use arrow_device::device::sim::{FaultOp, SimConfig, SimMode};
use arrow_device::{DeviceArray, DeviceBufferMut, DeviceRecordBatch, Error, Result, Validity};
use arrow_schema::DataType;

/// Runs `operation` with each of its device operations failing in turn: each kind by itself, and all
/// of them in order. `prepare` makes what it works on. At least one of the failures comes back.
fn fail_everywhere<P, R>(
    name: &str,
    sims: &[Sim],
    prepare: impl Fn() -> P,
    operation: impl Fn(&P) -> Result<R>,
    check: impl Fn(R),
) {
    let failed = failures(name, sims, 0, prepare, operation, check);
    assert!(failed > 0, "{name}: no failure came back");
}

/// As `fail_everywhere`; how many failures came back where all operations were counted in order.
fn failures<P, R>(
    name: &str,
    sims: &[Sim],
    faulty: usize,
    prepare: impl Fn() -> P,
    operation: impl Fn(&P) -> Result<R>,
    check: impl Fn(R),
) -> usize {
    let mut in_order = 0;
    let faults = sims[faulty].faults();
    let orders = FaultOp::ALL.map(Some).into_iter().chain([None]);
    for (order, keep) in orders.flat_map(|order| [(order, true), (order, false)]) {
        let mut failed = 0;
        for n in 1.. {
            assert!(n < 200, "{name}: {order:?} never ends");
            let mut prepared = prepare();
            faults.clear();
            faults.fail_nth(order, n);
            let result = operation(&prepared);
            let fired = faults.fired() > 0;
            faults.clear();
            // Host memory that was let go under a queued copy would be freed now.
            sims.iter().for_each(|sim| sim.trim());
            let context = format!("{name}, {order:?} {n}");
            match result {
                Err(e) => {
                    assert!(fired, "{context}: {e}");
                    failed += 1;
                    let sane =
                        matches!(e, Error::OutOfMemory { .. } | Error::Device { code: 1, .. });
                    assert!(sane, "{context}: {e:?}");
                    if !keep {
                        // And so would what it worked on.
                        drop(prepared);
                        sims.iter().for_each(|sim| sim.synchronize().unwrap());
                        prepared = prepare();
                    }
                }
                Ok(result) => check(result),
            }
            // The same once more, without a failure.
            let again = operation(&prepared).unwrap_or_else(|e| panic!("{context}, again: {e}"));
            check(again);
            drop(prepared);
            sims.iter().for_each(|sim| sim.synchronize().unwrap());
            sims.iter().for_each(Sim::assert_done);
            if !fired {
                break;
            }
        }
        if order.is_none() {
            in_order += failed;
        }
    }
    in_order
}

fn sims(peer: bool) -> [Sim; 2] {
    // Deferred, so that a source that was let go early is noticed for certain.
    let config = SimConfig {
        mode: SimMode::Deferred,
        ..SimConfig::default()
    };
    let config = SimConfig {
        peer_access: peer,
        capacity_bytes: 64 << 20,
        ..config
    };
    [Sim::with(config.clone()), Sim::with(config)]
}

fn types() -> Vec<DataType> {
    use crate::support::types::{list, run_ends, structure};
    vec![
        DataType::Int32,
        DataType::Boolean,
        list(structure(vec![
            ("a", DataType::Utf8),
            ("b", DataType::Int64),
        ])),
        run_ends(DataType::Int32, DataType::Utf8),
        DataType::Utf8View,
    ]
}

#[test]
fn uploads() {
    let sims = sims(false);
    let expected = batch(&types(), 40, Nulls::Some, 3);
    // The host's batch is dropped before the copies run.
    fail_everywhere(
        "upload",
        &sims,
        || (),
        |()| sims[0].upload(&batch(&types(), 40, Nulls::Some, 3)),
        |up| assert_same_batch(&expected, &up.to_host().unwrap(), "uploaded"),
    );
}

/// Several chunks of staging memory, and direct copies among them.
#[test]
fn large_uploads() {
    let sims = sims(false);
    let small = || -> ArrayRef { Arc::new(Int32Array::from_iter_values(0..132_001)) };
    let large: ArrayRef = Arc::new(Int64Array::from_iter_values(0..132_001));
    let columns = [("a", small()), ("b", large), ("c", small()), ("d", small())];
    let expected = RecordBatch::try_from_iter(columns).unwrap();
    fail_everywhere(
        "large upload",
        &sims,
        || (),
        |()| sims[0].upload(&expected.slice(0, 132_001)),
        |up| assert_eq!(up.to_host().unwrap(), expected),
    );
}

#[test]
fn downloads() {
    let sims = sims(false);
    let expected = batch(&types(), 40, Nulls::Some, 3);
    let prepare = || sims[0].upload(&expected).unwrap();
    let same = |offset, rows| {
        let expected = expected.slice(offset, rows);
        move |down| assert_same_batch(&expected, &down, "downloaded")
    };
    fail_everywhere("download", &sims, prepare, |up| up.to_host(), same(0, 40));
    let cut = |up: &DeviceRecordBatch| up.slice(5, 21)?.to_host();
    fail_everywhere("download of a slice", &sims, prepare, cut, same(5, 21));
    let queue = sims[0].new_queue().unwrap();
    let elsewhere = || sims[0].upload_on(&expected, &queue).unwrap();
    fail_everywhere(
        "from another queue",
        &sims,
        elsewhere,
        |up| up.to_host(),
        same(0, 40),
    );
}

#[test]
fn from_device_to_device() {
    let expected = batch(&types(), 40, Nulls::Some, 3);
    for peer in [false, true] {
        let sims = sims(peer);
        for faulty in [0, 1] {
            for rows in [40, 17] {
                let name = format!("to_device, peer {peer}, device {faulty} fails, {rows} rows");
                let failed = failures(
                    &name,
                    &sims,
                    faulty,
                    || sims[0].upload(&expected).unwrap(),
                    |up| up.slice(40 - rows, rows)?.to_device(&sims[1]),
                    |there| {
                        let expected = expected.slice(40 - rows, rows);
                        assert_same_batch(&expected, &there.to_host().unwrap(), &name);
                    },
                );
                // A peer asks the source of a whole array only to wait for an event, which may have completed.
                let asked = faulty == 1 || !peer || rows < 40;
                assert!(failed > 0 || !asked, "{name}: no failure came back");
            }
        }
    }
}

/// Values that go straight, bits and offsets that the host rewrites, nulls that it counts.
#[test]
fn compact_copies() {
    let sims = sims(false);
    let expected = batch(&types(), 45, Nulls::Some, 3);
    for (offset, rows) in [(0, 45), (8, 20), (5, 21)] {
        let name = format!("compact, {rows} rows from {offset}");
        fail_everywhere(
            &name,
            &sims,
            || sims[0].upload(&expected).unwrap(),
            |up| {
                let slice = up.slice(offset, rows)?;
                let array = slice.as_struct().compact()?;
                let columns: Vec<_> = (0..5).filter_map(|i| array.child(i)).collect();
                DeviceRecordBatch::try_new(up.schema(), &columns)
            },
            |copy| {
                let expected = expected.slice(offset, rows);
                assert_same_batch(&expected, &copy.to_host().unwrap(), &name);
            },
        );
    }
    let array = array(&DataType::Int32, 70, Nulls::Some, 5);
    fail_everywhere(
        "compact, nulls not counted",
        &sims,
        || uncounted(&sims[0], &array),
        |up| up.compact(),
        |copy| assert_eq!(copy.null_count(), Some(array.null_count())),
    );
}

/// Arrays that are put together: with bitmaps that are shifted, offsets and keys that are rebased, and nulls that the
/// host counts.
#[test]
fn concatenations() {
    use crate::support::types::{dictionary, list, union};
    let sims = sims(false);
    let mut types = types();
    types.push(dictionary(DataType::Int32, list(DataType::Utf8)));
    types.push(union(
        arrow_schema::UnionMode::Dense,
        vec![DataType::Int32, DataType::Utf8],
    ));
    let (some, none) = (
        batch(&types, 45, Nulls::Some, 3),
        batch(&types, 13, Nulls::None, 4),
    );
    let queue = sims[0].new_queue().unwrap();
    for queue in [sims[0].default_queue(), queue] {
        fail_everywhere(
            "concat",
            &sims,
            || [&some, &none].map(|batch| sims[0].upload(batch).unwrap()),
            |[some, none]| {
                let parts = [some.slice(5, 21)?, none.clone(), some.slice(8, 30)?];
                DeviceRecordBatch::concat(
                    &batch(&types, 1, Nulls::None, 1).schema(),
                    &parts,
                    &queue,
                )
            },
            |whole| {
                let down = whole.to_host().unwrap();
                assert_same_batch(&some.slice(5, 21), &down.slice(0, 21), "first");
                assert_same_batch(&none, &down.slice(21, 13), "second");
                assert_same_batch(&some.slice(8, 30), &down.slice(34, 30), "third");
            },
        );
    }
    let array = array(&DataType::Int32, 70, Nulls::Some, 5);
    fail_everywhere(
        "concat, nulls not counted",
        &sims,
        || uncounted(&sims[0], &array),
        |up| DeviceArray::concat(&[up, &up.slice(3, 60)?]),
        |whole| {
            let nulls = array.null_count() + array.slice(3, 60).null_count();
            assert_eq!(whole.null_count(), Some(nulls));
        },
    );
}

/// Counts that nobody knows yet.
fn uncounted(sim: &Sim, array: &ArrayRef) -> DeviceArray {
    let up = sim.upload_array(array).unwrap();
    let bits = up
        .buffer(0)
        .map(|bits| Validity::new(bits, 0, up.len()).unwrap());
    let (device, data_type) = (up.device(), up.data_type().clone());
    // SAFETY: the parts are those of a valid array of this type and length.
    let again =
        unsafe { DeviceArray::from_parts(device, data_type, up.len(), bits, &[up.buffer(1)], &[]) };
    again.unwrap()
}

#[test]
fn null_counts() {
    let sims = sims(false);
    let array = array(&DataType::Int32, 70, Nulls::Some, 5);
    fail_everywhere(
        "null counts",
        &sims,
        || uncounted(&sims[0], &array),
        |up| {
            Ok((
                up.resolve_null_counts()?,
                up.slice(3, 50)?.resolve_null_counts()?,
            ))
        },
        |counts| {
            assert_eq!(
                counts,
                (array.null_count(), array.slice(3, 50).null_count())
            )
        },
    );
}

/// A use that cannot be recorded: the free waits for the device.
#[test]
fn loans() {
    let sims = sims(false);
    let array = array(&DataType::Int32, 70, Nulls::None, 5);
    let queue = sims[0].new_queue().unwrap();
    fail_everywhere(
        "loan",
        &sims,
        || (),
        |()| {
            let up = sims[0].upload_array(&array)?;
            let values = up.values_on::<i32>(&queue)?;
            let (address, rows) = (values.address(), values.len());
            launch(&queue, move |m| m.slice::<i32>(address, rows).map(|_| ()))?;
            drop(values);
            // And the array goes before its reader has run.
            Ok(())
        },
        |()| (),
    );
}

#[test]
fn buffers() {
    let sims = sims(false);
    let queue = sims[0].new_queue().unwrap();
    fail_everywhere(
        "fill, freeze, to the host",
        &sims,
        || (),
        |()| {
            let mut buffer = DeviceBufferMut::allocate(&queue, 28)?;
            buffer.fill(7)?;
            buffer.freeze()?.to_host()
        },
        |host| assert_eq!(host.as_slice(), [7; 28]),
    );
}

/// Whatever fails, a source lives until its copy has run.
#[test]
fn sources_of_failed_uploads() {
    // The record fails; so does the next one, whereupon the release thread waits for the device.
    for failures in 1..=2 {
        let sim = Sim::new(SimMode::Deferred);
        let (column, watch) = watched(200_001);
        let ops = 5; // two allocations, the copies, two records
        sim.faults().fail_nth(FaultOp::Record, 1);
        if failures == 2 {
            sim.faults().fail_nth(None, ops);
        }
        assert!(sim.upload_array(&column).is_err());
        drop(column);
        assert_eq!(sim.faults().fired(), failures);
        sim.trim();
        // If no event could be recorded the release thread waits for the device.
        assert!(watch.strong_count() > 0 || failures == 2);
        sim.assert_done();
        // The release thread drops the source after the memory that `assert_done` waits for.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while watch.strong_count() > 0 {
            assert!(
                std::time::Instant::now() < end,
                "the source is never dropped"
            );
            std::thread::sleep(std::time::Duration::from_micros(200));
        }
    }
}

/// A device that has failed for good: errors everywhere, no panic, no violation.
#[test]
fn a_dead_device() {
    for mode in MODES {
        let sim = Sim::new(mode);
        let batch = batch(&types(), 40, Nulls::Some, 3);
        let up = sim.upload(&batch).unwrap();
        let before = sim.upload(&batch).unwrap();
        launch(&sim.default_queue(), |_| Err("broken".into())).unwrap();
        assert!(sim.synchronize().is_err());
        assert!(up.to_host().is_err());
        assert!(up.slice(3, 20).unwrap().to_host().is_err());
        assert!(sim.upload(&batch).is_err());
        assert!(
            up.column(0)
                .unwrap()
                .values_on::<i32>(&sim.default_queue())
                .is_ok()
        );
        drop((up, before));
        sim.trim();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while !sim.sim.report().is_clean() {
            assert!(std::time::Instant::now() < end, "{:#?}", sim.sim.report());
            std::thread::sleep(std::time::Duration::from_millis(1));
            sim.trim();
        }
    }
}
