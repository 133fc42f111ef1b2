//! What the vendors' own tests have alike: all uses of a device, and of streams that are given.

use std::sync::Arc;

use arrow_array::{ArrayRef, Int64Array, RecordBatch};
use arrow_device::{DeviceBufferMut, DeviceRecordBatch, Error, Queue, SyncPolicy};

use crate::fake::Group;
use crate::rig::Rig;
use crate::support::{assert_same_batch, wide_batch};

/// Everything that a program does with a device.
pub(crate) fn everything(rig: &Rig) {
    let batch = wide_batch(8, 300);
    let up = rig.upload(&batch).unwrap();
    let queue = rig.new_queue().unwrap();
    drop(up.column(1).unwrap().validity_on(&queue).unwrap());
    let (array, schema) = up.export(SyncPolicy::Event).unwrap();
    // SAFETY: both structs come from one export of this crate.
    let again = unsafe { DeviceRecordBatch::import_with(array, &schema, &rig.options) }.unwrap();
    assert_same_batch(&batch, &again.to_host().unwrap(), "everything");
    drop((up, again, queue));
    rig.synchronize().unwrap();
    rig.trim();
}

/// Uses a per-thread stream's queue on several threads. The stream is another one on each thread: events keep one order.
pub(crate) fn on_many_threads(rig: &Rig, queue: &Queue) {
    for round in 0..20i64 {
        let values = Int64Array::from_iter_values((0..5000).map(|i| i * round));
        let column: ArrayRef = Arc::new(values);
        let batch = RecordBatch::try_from_iter([("v", column)]).unwrap();
        let device = &rig.device;
        let up = std::thread::scope(|scope| {
            let up = scope.spawn(|| device.upload_on(&batch, queue).unwrap());
            up.join().unwrap()
        });
        // Read on this thread's stream, freed on a third one's.
        assert_eq!(up.to_host().unwrap(), batch);
        let mut copy = DeviceBufferMut::allocate(queue, 64).unwrap();
        copy.fill(1).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                drop((up, copy));
                // Without an order this runs the free, and the fill comes later.
                queue.synchronize().unwrap();
            });
        });
    }
}

/// Work that would only be captured is refused: it would run when its memory is gone.
#[track_caller]
pub(crate) fn assert_refused_while_captured(rig: &Rig, queue: &Queue, batch: &RecordBatch) {
    for refused in [
        rig.upload_on(batch, queue).map(drop),
        queue.record().map(drop),
        DeviceBufferMut::allocate(queue, 100).map(drop),
    ] {
        let e = refused.unwrap_err();
        assert!(matches!(e, Error::NotSupported { .. }), "{e}");
        assert!(e.to_string().contains("captured"), "{e}");
    }
}

/// Whether a stream is captured is asked once in a scope; of a stream that was given, whose owner may
/// begin a capture at any time, before each operation.
pub(crate) fn captures_are_noticed(
    rig: &Rig,
    given: &Queue,
    begin: impl FnOnce(),
    end: impl FnOnce(),
) {
    let asked = || {
        let calls = Group::thread_calls();
        calls.get("cuStreamIsCapturing").copied().unwrap_or(0)
    };
    let own = rig.new_queue().unwrap();
    for (queue, questions) in [(&own, 1), (given, 3)] {
        let before = asked();
        rig.backend().within(&mut || {
            for _ in 0..3 {
                drop(queue.record().unwrap());
            }
        });
        assert_eq!(asked() - before, questions);
    }
    let (mut begin, mut refused) = (Some(begin), None);
    rig.backend().within(&mut || {
        drop(given.record().unwrap());
        if let Some(begin) = begin.take() {
            begin();
        }
        refused = given.record().err();
    });
    end();
    assert!(refused.unwrap().to_string().contains("captured"));
}
