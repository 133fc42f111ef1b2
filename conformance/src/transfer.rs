//! Rules about the cost of transfers and the lifetime of memory.

use std::sync::{Arc, Weak};

use arrow_device::arrow_array::{Array, ArrayRef, Int64Array, RecordBatch};
use arrow_device::arrow_buffer::{Buffer, ScalarBuffer};
use arrow_device::arrow_schema::{DataType, Field, Schema};

use super::kit::{Block, Host, LARGE, NO_EVENTS, assert_bytes, content, down, finish, queue, soon};
use super::{Subject, Verdict};
use arrow_device::DeviceId;
use arrow_device::device::{CopyKind, CopyOp, DevicePtr};

/// More bytes than [`LARGE`], a multiple of 64.
const VALUES: usize = (LARGE / 64 + 1) * 8;

pub(super) fn counts(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let bytes = VALUES as u64 * 8;
    let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..VALUES as i64));
    let fields = vec![
        Field::new("a", DataType::Int64, false),
        Field::new("b", DataType::Int64, false),
    ];
    let schema = Arc::new(Schema::new(fields));
    let batch = RecordBatch::try_new(schema, vec![column.clone(), column]).expect("columns fit");
    // Fills the pools.
    for _ in 0..2 {
        let up = device.upload(&batch).expect("upload");
        up.to_host().expect("to_host");
        device.synchronize().expect("synchronize");
    }

    let before = device.stats();
    let up = device.upload(&batch).expect("upload");
    let cost = device.stats().since(&before);
    assert_eq!(cost.host_waits, 0, "an upload waits: {cost:?}");
    if device.id() == DeviceId::CPU {
        assert_eq!(cost, Default::default(), "an upload to the CPU is free");
    } else {
        assert_eq!(cost.allocations, 1, "one allocation for a batch: {cost:?}");
        assert!(cost.copies >= 1, "{cost:?}");
        assert!(cost.bytes_to_device >= 2 * bytes, "{cost:?}");
        assert!(cost.bytes_to_device <= cost.allocated_bytes, "{cost:?}");
        assert_eq!(cost.bytes_to_host + cost.bytes_on_device, 0, "{cost:?}");
        let events = u64::from(!device.is_synchronous());
        assert_eq!(cost.events, events, "{cost:?}");
    }
    up.wait().expect("wait");

    let before = device.stats();
    let host = up.to_host().expect("to_host");
    let cost = device.stats().since(&before);
    if device.is_host_readable() {
        assert_eq!(cost, Default::default(), "a view of ready memory is free");
    } else {
        let waits = u64::from(!device.is_synchronous());
        assert_eq!(cost.host_waits, waits, "one wait for a batch: {cost:?}");
        assert_eq!(cost.bytes_to_host, 2 * bytes, "{cost:?}");
        assert_eq!(cost.allocations, 0, "{cost:?}");
    }
    assert_eq!(host, batch);

    // The release thread may not have freed earlier memory yet.
    soon(subject.patience, || {
        let stats = device.stats();
        stats.frees + 1 >= stats.allocations
    });
    let before = device.stats();
    drop((up, host));
    let cost = device.stats().since(&before);
    assert_eq!(cost.host_waits, 0, "a drop waits: {cost:?}");
    assert_eq!(cost.drop_errors, 0, "{cost:?}");
    let frees = u64::from(device.id() != DeviceId::CPU);
    assert_eq!(cost.frees, frees, "{cost:?}");
    Verdict::Kept
}

/// Values, and a handle that shows whether their memory is still in use.
fn watched() -> (Int64Array, Weak<Vec<i64>>) {
    let owner = Arc::new((0..VALUES as i64).collect::<Vec<_>>());
    let watch = Arc::downgrade(&owner);
    let start = std::ptr::NonNull::from(owner.as_slice()).cast::<u8>();
    // SAFETY: the buffer keeps the vector, which is never changed, and whose values have this
    // length in bytes.
    let buffer = unsafe { Buffer::from_custom_allocation(start, VALUES * 8, owner) };
    let values = ScalarBuffer::new(buffer, 0, VALUES);
    (Int64Array::new(values, None), watch)
}

pub(super) fn source(subject: &Subject) -> Verdict {
    let device = &subject.device;
    if device.is_synchronous() {
        return NO_EVENTS;
    }
    let queue = queue(device);
    let (array, watch) = watched();
    let expected = array.values().to_vec();
    let mut hold = subject.hold(&queue);
    let up = device.upload_array_on(&array, &queue).expect("upload");
    // A device that copies straight from the memory must still find it there.
    drop(array);
    if hold.holds() {
        assert!(
            !up.is_ready().expect("is_ready"),
            "ready before it was copied"
        );
    }
    let early = device
        .backend()
        .capabilities()
        .copies_read_host_at_once
        .then(|| {
            let released = watch.upgrade().is_none();
            assert!(released, "the source is kept though it has been read");
            // The call itself has read its source, which may change at once.
            let block = Block::new(&queue, VALUES * 8);
            let mut source = expected.clone();
            let copy = CopyOp {
                src: DevicePtr::new(source.as_mut_ptr().cast()),
                dst: block.at(0),
                bytes: VALUES * 8,
                kind: CopyKind::HostToDevice,
            };
            // SAFETY: both sides have this many bytes; the source is not read after the call, as the capabilities say.
            unsafe { queue.raw().copy(&[copy]) }.expect("copy");
            source.fill(-1);
            (block, source)
        });
    hold.open();
    if let Some((block, source)) = early {
        let there = content(&queue, &block);
        assert_bytes(
            &Buffer::from_vec(expected.clone()),
            &there,
            "a source that changed after its copy",
        );
        drop(source);
    }
    up.wait().expect("wait");
    let released = soon(subject.patience, || watch.upgrade().is_none());
    assert!(released, "the source is kept though its copies are done");
    let back = up.to_host().expect("to_host");
    let back = back.as_any().downcast_ref::<Int64Array>().expect("int64");
    assert!(back.values()[..] == expected[..], "other values came back");
    Verdict::Kept
}

pub(super) fn loan(subject: &Subject) -> Verdict {
    let device = &subject.device;
    let (home, user) = (device.default_queue(), queue(device));
    let values: Vec<i64> = (0..VALUES as i64).map(|i| i * 5).collect();
    let expected = Buffer::from_vec(values.clone());
    let array = Int64Array::from(values);
    let up = device.upload_array(&array).expect("upload");
    assert!(
        up.values_on::<i32>(&user).is_err(),
        "values of another type"
    );
    let host = Host::empty(device, VALUES * 8);
    let mut hold = subject.hold(&user);
    let values = up.values_on::<i64>(&user).expect("values_on");
    assert_eq!(values.len(), VALUES);
    down(&user, values.address(), host.at(0), VALUES * 8);
    drop(values);
    let before = device.stats();
    drop(up);
    let cost = device.stats().since(&before);
    assert_eq!(cost.host_waits, 0, "a drop waits for uses: {cost:?}");
    // This could reuse the memory if it were already free.
    let next = Block::new(&home, VALUES * 8);
    next.fill(&home, 0x77);
    hold.open();
    finish(&user);
    assert_bytes(&expected, host.bytes(), "memory dropped while in use");
    let there = content(&home, &next);
    assert_bytes(&vec![0x77; VALUES * 8], &there, "the next allocation");
    Verdict::Kept
}

pub(super) fn drop_order(subject: &Subject) -> Verdict {
    let Some(make) = &subject.another else {
        return Verdict::Skipped("there is only one device of the type");
    };
    let (array, watch) = watched();
    let expected: ArrayRef = Arc::new(array.clone());
    let device = make();
    let queue = queue(&device);
    let mut hold = subject.hold(&queue);
    let up = device.upload_array_on(&array, &queue).expect("upload");
    let host = device.host_buffer(100).expect("host_buffer");
    drop((device, array));
    hold.open();
    drop(queue);
    assert!(
        *up.to_host().expect("to_host") == *expected,
        "the last handle was dropped"
    );
    let queue = up.device().new_queue().expect("new_queue");
    drop(up);
    std::thread::scope(|scope| {
        scope.spawn(|| drop((queue, host, expected)));
    });
    let released = soon(subject.patience, || watch.upgrade().is_none());
    assert!(released, "the source is kept though nothing is left");

    // Dropped while work runs that nothing waits for.
    let device = make();
    let (array, _) = watched();
    let up = device.upload_array(&array).expect("upload");
    let event = device.default_queue().record().expect("record");
    drop((array, device));
    drop(up);
    if let Some(event) = event {
        event.wait().expect("wait_event");
    }
    Verdict::Kept
}
