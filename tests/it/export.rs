//! What exports look like to C code, and who frees what when.

use crate::support::types::structure;
use crate::support::{Nulls, Variant, array, assert_same, wide_batch};
use crate::support_c::export::{import, ints, join, upload_data};
use crate::support_c::sim::{Place, places, simulated};
use crate::support_c::{Foreign, Moved, c, take};
use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch, make_array};
use arrow_device::device::sim::SimMode;
use arrow_device::{ExportOptions, FFI_ArrowDeviceArray, SyncPolicy};
use arrow_schema::DataType;

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);
const WAIT: ExportOptions = ExportOptions::new(SyncPolicy::Wait);

#[test]
fn members() {
    for place in places() {
        let batch = wide_batch(9, 50);
        let up = place.device.upload(&batch).unwrap().slice(7, 40).unwrap();
        for sync in [SyncPolicy::Event, SyncPolicy::Wait] {
            let mut exported = up.export_array(&ExportOptions::new(sync)).unwrap();
            let e = c(&mut exported);
            assert_eq!(e.reserved, [0; 3]);
            assert_eq!(
                (e.device_type, e.device_id),
                (place.device.id().device_type.value(), place.device.id().id)
            );
            let null = place.sim.is_none() || sync == SyncPolicy::Wait;
            assert_eq!(e.sync_event.is_null(), null, "{place}");
            let a = &e.array;
            assert_eq!(
                (a.length, a.offset, a.null_count, a.n_buffers, a.n_children),
                (40, 0, 0, 1, 9)
            );
            assert!(a.dictionary.is_null());
            // SAFETY: the export is live, and has the buffers and children that are read here.
            unsafe {
                assert!((*a.buffers).is_null(), "a batch has no mask");
                for i in 0..9 {
                    let child = &**a.children.add(i);
                    let column = up.column(i).unwrap();
                    assert_eq!((child.length, child.offset), (40, column.offset() as i64));
                    assert_eq!(child.offset, 7 + child_offset(&batch, i, &place));
                    let nulls = batch.column(i).slice(7, 40).null_count();
                    assert_eq!(child.null_count, nulls as i64);
                    assert_eq!((*child.buffers).is_null(), nulls == 0);
                }
            }
            drop(exported);
        }
        drop(up);
        place.assert_clean();
    }
}

/// Where arrow-rs's column starts; uploads start at 0.
fn child_offset(batch: &RecordBatch, i: usize, place: &Place) -> i64 {
    if place.sim.is_some() {
        0
    } else {
        batch.column(i).to_data().offset() as i64
    }
}

/// One event is handed on as it is, several become one, completed ones none.
#[test]
fn events() {
    for mode in [SimMode::Async, SimMode::Deferred] {
        let Some(place) = simulated(mode) else { return };
        let device = &place.device;
        let data = ints(100).to_data();
        // Handed on again and again: the same pointer, and no work.
        let up = upload_data(device, &data);
        let before = device.stats();
        let mut exported = up.export_array(&EVENT).unwrap();
        let event = c(&mut exported).sync_event;
        assert!(!event.is_null());
        drop(up);
        for _ in 0..3 {
            let again = import(exported, &DataType::Int32, &place);
            let again = again.slice(1, again.len() - 1).unwrap();
            let unknown = ExportOptions {
                counts_nulls: false,
                ..EVENT
            };
            exported = again.export_array(&unknown).unwrap();
            assert_eq!(c(&mut exported).sync_event, event);
        }
        assert_eq!(device.stats(), before, "{place}");
        // Waiting gives none.
        let again = import(exported, &DataType::Int32, &place);
        let exported = again
            .export_array(&ExportOptions {
                counts_nulls: false,
                ..WAIT
            })
            .unwrap();
        assert!(exported.sync_event().is_null());
        assert!(again.is_ready().unwrap());
        assert_eq!(device.stats().since(&before).queue_waits, 0);
        assert_same(
            &ints(100).slice(3, 97),
            &import(exported, &DataType::Int32, &place)
                .to_host()
                .unwrap(),
            "waited",
        );
        drop(again);
        // Three queues: one new event that completes after all.
        let queues: Vec<_> = (0..3).map(|_| device.new_queue().unwrap()).collect();
        let columns: Vec<_> = queues
            .iter()
            .map(|q| {
                device
                    .upload_array_on(&make_array(data.clone()), q)
                    .unwrap()
            })
            .collect();
        let batch = join(&columns);
        if mode == SimMode::Deferred {
            let before = device.stats();
            let mut exported = batch.export_array(&EVENT).unwrap();
            let delta = device.stats().since(&before);
            assert_eq!(
                (delta.events, delta.queue_waits, delta.host_waits),
                (1, 3, 0)
            );
            assert!(!c(&mut exported).sync_event.is_null());
            drop((columns, batch));
            let data_type = structure(vec![
                ("0", DataType::Int32),
                ("1", DataType::Int32),
                ("2", DataType::Int32),
            ]);
            let again = import(exported, &data_type, &place);
            assert!(!again.is_ready().unwrap());
            again.wait().unwrap();
            let back = again.to_host().unwrap();
            for column in arrow_array::cast::AsArray::as_struct(&back).columns() {
                assert_same(&ints(100), column, "merged");
            }
            // One pending among completed ones is handed on; if all have completed there is none.
            let columns: Vec<_> = queues
                .iter()
                .map(|q| {
                    device
                        .upload_array_on(&make_array(data.clone()), q)
                        .unwrap()
                })
                .collect();
            let batch = join(&columns);
            columns[0].wait().unwrap();
            columns[2].wait().unwrap();
            let before = device.stats();
            let one = batch.export_array(&EVENT).unwrap();
            let alone = columns[1].export_array(&EVENT).unwrap();
            assert_eq!(one.sync_event(), alone.sync_event());
            assert_eq!(device.stats(), before);
            columns[1].wait().unwrap();
            assert!(batch.export_array(&EVENT).unwrap().sync_event().is_null());
            // The event lives as long as the root, though its memory's column is gone.
            let mut one = one;
            drop((alone, columns, batch));
            let live = || place.sim().report().live_allocations;
            let before = live();
            // SAFETY: the export is live and has this child.
            drop(unsafe { Moved(take(*c(&mut one).array.children.add(1))) });
            assert_eq!(live(), before - 1);
            assert!(event_is_live(&one, &place));
        } else {
            drop((columns, batch));
        }
        drop(queues);
        place.assert_clean();
    }
}

/// Whether the device still knows the event.
fn event_is_live(array: &FFI_ArrowDeviceArray, place: &Place) -> bool {
    let event = arrow_device::device::EventPtr::new(array.sync_event()).unwrap();
    // SAFETY: the simulated device compares addresses and follows none.
    unsafe { place.device.backend().check_event(event) }.is_ok()
}

/// An array without any buffer has no memory that an event could guard: the producer gets its struct back at once.
#[test]
fn events_without_buffers() {
    let Some(place) = simulated(SimMode::Deferred) else {
        return;
    };
    let mut foreign = Foreign::new(
        &array(&DataType::Null, 5, Nulls::None, 1).to_data(),
        &place.device,
    );
    let imported = foreign.import(&place.options).unwrap();
    foreign.assert_released("null array");
    let exported = imported.export_array(&EVENT).unwrap();
    assert!(exported.sync_event().is_null());
    drop(exported);
    drop(foreign);
    place.assert_clean();
}

/// Unknown null counts are found out together, or go out as they are.
#[test]
fn null_counts() {
    for place in places() {
        let data_type = structure((0..20).map(|_| ("c", DataType::Int32)).collect());
        let whole = array(&data_type, 300, Nulls::Some, 5);
        let made = Variant::Both(11).of(&whole, 5).unwrap();
        let (data, rows) = (made.data(), &made.rows);
        let unknown = || {
            let mut foreign = Foreign::part(&made.around, made.offset, rows.len(), &place.device);
            foreign.root().null_count = -1;
            (0..20).for_each(|i| foreign.at(&[i]).null_count = -1);
            place.device.synchronize().unwrap();
            let imported = foreign.import(&place.options).unwrap();
            (foreign, imported)
        };
        let counts = |mut e: FFI_ArrowDeviceArray| -> Vec<i64> {
            let a = c(&mut e).array;
            // SAFETY: the export is live and has this child.
            let child = |i| unsafe { (**a.children.add(i)).null_count };
            [a.null_count]
                .into_iter()
                .chain((0..20).map(child))
                .collect()
        };
        // A struct's children count all that they have.
        let expected: Vec<i64> = [data.null_count()]
            .into_iter()
            .chain(data.child_data().iter().map(|c| c.null_count()))
            .map(|n| n as i64)
            .collect();
        // Without a mask there are none.
        let masks = data.child_data().iter().map(|c| c.nulls().is_some());
        let masks = [data.nulls().is_some()].into_iter().chain(masks);
        let uncounted: Vec<i64> = masks.map(|mask| -i64::from(mask)).collect();
        let n_unknown = uncounted.iter().filter(|n| **n == -1).count() as u64;
        assert!(n_unknown > 5);
        let (_foreign, imported) = unknown();
        let before = place.device.stats();
        let allowed = ExportOptions {
            counts_nulls: false,
            ..EVENT
        };
        assert_eq!(counts(imported.export_array(&allowed).unwrap()), uncounted);
        if place.sim.is_some() {
            assert_eq!(place.device.stats(), before);
        }
        assert_eq!(counts(imported.export_array(&EVENT).unwrap()), expected);
        if place.sim.is_some() {
            let delta = place.device.stats().since(&before);
            assert_eq!((delta.host_waits, delta.copies), (1, n_unknown), "{place}");
        }
        let before = place.device.stats();
        assert_eq!(
            counts(imported.export_array(&EVENT).unwrap()),
            expected,
            "counted once"
        );
        if place.sim.is_some() {
            assert_eq!(place.device.stats(), before);
        }
        drop(imported);
        let (_other, imported) = unknown();
        // Slices are counted by their own rows.
        let slice = imported.child(3).unwrap().slice(13, 101).unwrap();
        let e = slice.export_array(&EVENT).unwrap();
        let nulls = rows.as_struct().column(3).slice(13, 101).null_count();
        assert_eq!(e.array().null_count(), nulls);
        drop((e, slice, imported));
        [_foreign, _other]
            .iter()
            .for_each(|f| f.assert_released_by(&place.device, "counts"));
        place.assert_clean();
    }
}

/// Lengths of view buffers: right, and where the host can read them; a foreign list goes on as it is while unknown.
#[test]
fn view_lengths() {
    for place in places() {
        let views = array(&DataType::Utf8View, 200, Nulls::Some, 1);
        let lengths = |e: &mut FFI_ArrowDeviceArray| {
            let a = c(e).array;
            let n = a.n_buffers as usize;
            // SAFETY: the export is live, and its last buffer is a list of lengths that the host
            // can read.
            unsafe {
                let list = *a.buffers.add(n - 1);
                (
                    list,
                    std::slice::from_raw_parts(list.cast::<i64>(), n - 3).to_vec(),
                )
            }
        };
        let up = place.device.upload_array(&views).unwrap();
        let (_, stated) = lengths(&mut up.export_array(&EVENT).unwrap());
        let expected: Vec<i64> = (2..up.num_buffers())
            .map(|i| up.buffer(i).map_or(0, |b| b.len() as i64))
            .collect();
        assert!(!expected.is_empty());
        assert_eq!(stated, expected, "{place}");

        for variant in [Variant::Whole, Variant::Both(11)] {
            let made = variant.of(&views, 1).unwrap();
            let rows = made.rows.len();
            let mut foreign = Foreign::part(&made.around, made.offset, rows, &place.device);
            let n = foreign.root().n_buffers as usize;
            let theirs = foreign.buffer(&[], n - 1);
            let imported = foreign.import(&place.options).unwrap();
            let before = place.device.stats();
            let mut exported = imported.export_array(&EVENT).unwrap();
            let (list, _) = lengths(&mut exported);
            assert_eq!(list, theirs, "{place}");
            if place.sim.is_some() {
                assert_eq!(place.device.stats(), before);
            }
            // Known, they are stated.
            imported.resolve_sizes().unwrap();
            let mut known = imported.export_array(&EVENT).unwrap();
            assert_ne!(lengths(&mut known).0, theirs);
            assert_eq!(lengths(&mut known).1, lengths(&mut exported).1);
            drop(imported);
            assert_same(
                &views,
                &import(exported, &DataType::Utf8View, &place)
                    .to_host()
                    .unwrap(),
                "handed on",
            );
            assert_same(
                &views,
                &import(known, &DataType::Utf8View, &place)
                    .to_host()
                    .unwrap(),
                "stated",
            );
            drop(foreign);
        }
        drop(up);
        place.assert_clean();
    }
}
