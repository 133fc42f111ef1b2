//! Which addresses and events an import takes.

use std::ffi::c_void;
use std::ptr;

use arrow_array::{Array, ArrayRef, Int32Array, StringViewArray};
use arrow_device::{DeviceArray, Devices, Error};

use crate::block::Block;
use crate::fake::{Group, MODES, NO_CONCURRENT_MANAGED};
use crate::gpu_suite::host_memories;
use crate::rig::Rig;
use crate::support::assert_same;
use crate::support_c::Foreign;
use crate::vendor::{DEVICE, HOST, MEMORY_NAMES, error_text, load, open_device};

fn ints() -> Int32Array {
    (0..100).map(|i| (i % 3 != 0).then_some(i)).collect()
}

/// The array with its values at `values`.
fn moved(rig: &Rig, values: *const c_void) -> Foreign {
    let mut foreign = Foreign::new(&ints().to_data(), &rig.device);
    foreign.set_buffer(&[], 1, values);
    foreign
}

#[track_caller]
fn refused(rig: &Rig, mut foreign: Foreign, expected: &str) {
    let e = foreign.import(&rig.options).unwrap_err();
    assert!(e.to_string().contains(expected), "{e}");
    assert!(e.to_string().contains(&rig.device.to_string()), "{e}");
    foreign.assert_released(expected);
}

#[track_caller]
fn accepted(rig: &Rig, mut foreign: Foreign) {
    let imported = foreign.import(&rig.options).unwrap();
    assert_same(&ints(), &imported.to_host().unwrap(), "imported");
    drop(imported);
    rig.device.synchronize().unwrap();
    assert!(crate::rig::soon(|| foreign.releases() == (1, 1)));
}

#[test]
fn device_memory_is_the_claimed_devices() {
    for mode in MODES {
        let group = Group::open(2, mode);
        let rig = Rig::of(group, open_device(DEVICE, group.ordinal()));
        accepted(&rig, Foreign::new(&ints().to_data(), &rig.device));
        let values = ints().values().to_vec();

        let other = Block::device(group.first + 1, 400);
        let text = format!("it is memory of CUDA device {}", group.first + 1);
        refused(&rig, moved(&rig, other.ptr), &text);
        drop(other);
        // Memory of a pool belongs to no context, but to a device.
        let neighbour = Rig::of(group, open_device(DEVICE, group.ordinal() + 1));
        let there = neighbour.upload_array(&ints()).unwrap();
        let address = there.buffer(1).unwrap().address().as_ptr();
        refused(&rig, moved(&rig, address), "array.buffers[1]");
        drop(there);
        neighbour.synchronize().unwrap();
        neighbour.trim();
        drop(neighbour);
        // Too short: the last byte is somebody else's.
        let short = Block::device(group.first, 128);
        refused(&rig, moved(&rig, short.ptr), "array.buffers[1]");
        let freed = short.ptr;
        drop(short);
        refused(&rig, moved(&rig, freed), "array.buffers[1]");

        // What other libraries label as the device's.
        let managed = Block::managed(group.first, 400).with(&values);
        accepted(&rig, moved(&rig, managed.ptr));
        let pinned = Block::pinned(group.first, 400).with(&values);
        accepted(&rig, moved(&rig, pinned.ptr));
        drop((managed, pinned));
        rig.end();
    }
}

#[test]
fn what_the_host_is_to_read_it_can() {
    for memory in host_memories() {
        let rig = Rig::with(0, memory);
        accepted(&rig, Foreign::new(&ints().to_data(), &rig.device));
        let values = ints().values().to_vec();
        // Device memory under such a name would be read by the host.
        let device = Block::device(rig.group.first, 400);
        refused(&rig, moved(&rig, device.ptr), "array.buffers[1]");
        refused(
            &rig,
            moved(&rig, vec![0u8; 400].as_ptr().cast()),
            "array.buffers[1]",
        );
        let pinned = Block::pinned(rig.group.first, 400).with(&values);
        accepted(&rig, moved(&rig, pinned.ptr));
        let managed = Block::managed(rig.group.first, 400).with(&values);
        accepted(&rig, moved(&rig, managed.ptr));
        drop((device, pinned, managed));
        rig.end();
    }
}

/// The lengths of a view array's buffers may be anywhere.
#[test]
fn lengths_of_views() {
    let texts = [
        "short",
        "one that is longer than twelve bytes",
        "and another such one",
    ];
    let array: ArrayRef = std::sync::Arc::new(StringViewArray::from_iter_values(texts));
    for mode in MODES {
        let rig = Rig::new(mode);
        let lengths: Vec<i64> = array.to_data().buffers()[1..]
            .iter()
            .map(|b| b.len() as i64)
            .collect();
        let pinned = Block::pinned(rig.group.first, 64).with(&lengths);
        let managed = Block::managed(rig.group.first, 64).with(&lengths);
        let bytes: Vec<u8> = lengths.iter().flat_map(|n| n.to_ne_bytes()).collect();
        let bytes = arrow_array::UInt8Array::from(bytes);
        let there = rig.upload_array(&bytes).unwrap().buffer(1).unwrap();
        // On the heap, as `Foreign` has them, and elsewhere.
        let places = [
            None,
            Some(pinned.ptr),
            Some(managed.ptr),
            Some(there.address().as_ptr()),
        ];
        for place in places {
            let mut foreign = Foreign::new(&array.to_data(), &rig.device);
            let last = foreign.root().n_buffers as usize - 1;
            if let Some(place) = place {
                foreign.set_buffer(&[], last, place);
            }
            let imported = foreign.import(&rig.options).unwrap();
            assert_same(&array, &imported.to_host().unwrap(), "views");
            drop(imported);
            rig.synchronize().unwrap();
            foreign.assert_released("views");
        }
        drop((pinned, managed, there));
        rig.end();
    }
}

#[test]
fn events() {
    for mode in MODES {
        let rig = Rig::new(mode);
        let foreign = || Foreign::new(&ints().to_data(), &rig.device);
        // A handle that is null, and an address that cannot be an event's.
        let null: *mut c_void = ptr::null_mut();
        let mut array = foreign();
        array.device_array.sync_event = (&raw const null).cast_mut().cast();
        let e = array.import(&rig.options).unwrap_err();
        assert!(e.to_string().contains("sync_event"), "{e}");
        array.assert_released("null event");
        let mut array = foreign();
        array.device_array.sync_event = (&raw const null).cast_mut().wrapping_byte_add(1).cast();
        assert!(array.import(&rig.options).is_err());
        array.assert_released("misaligned event");
        rig.assert_done();

        // A handle that is none: an error where it is waited for, and one release.
        let handle: Box<*mut c_void> = Box::new(ptr::without_provenance_mut(0xdead0));
        let mut array = foreign();
        array.device_array.sync_event = (&raw const *handle).cast_mut().cast();
        let imported = array.import(&rig.options).unwrap();
        let e = imported.to_host().unwrap_err();
        assert!(matches!(e, Error::Device { code: 400, .. }), "{e}");
        assert!(e.to_string().contains(error_text(400)), "{e}");
        drop(imported);
        rig.synchronize().unwrap();
        assert!(crate::rig::soon(|| array.releases() == (1, 1)));
        assert!(
            rig.group.report().contains("violation"),
            "the stand-in noticed"
        );
    }
}

/// The stream that reads waits for the event; the host does only if it reads.
#[test]
fn the_queue_waits_and_not_the_host() {
    for mode in MODES {
        let rig = Rig::new(mode);
        let mut foreign = Foreign::new(&ints().to_data(), &rig.device);
        let before = rig.stats();
        let imported = foreign.import(&rig.options).unwrap();
        let queue = rig.new_queue().unwrap();
        drop(imported.values_on::<i32>(&queue).unwrap());
        let cost = rig.stats().since(&before);
        assert_eq!((cost.host_waits, cost.queue_waits), (0, 1));
        let (again, schema) = export(&imported);
        assert_eq!(rig.stats().since(&before).host_waits, 0);
        drop((again, schema));
        assert_same(&ints(), &imported.to_host().unwrap(), "read");
        assert_eq!(rig.stats().since(&before).host_waits, 1);
        drop((imported, queue));
        rig.synchronize().unwrap();
        assert!(crate::rig::soon(|| foreign.releases() == (1, 1)));
        rig.end();
    }
}

/// Managed memory under the name of host memory, where the host must not read it.
#[test]
fn managed_memory_as_host_memory() {
    let rig = Rig::with(NO_CONCURRENT_MANAGED, HOST);
    let managed = Block::managed(rig.group.first, 400).with(ints().values());
    refused(
        &rig,
        moved(&rig, managed.ptr),
        "managed memory, which the host must not read",
    );
    drop(managed);
    rig.end();
}

fn export(
    array: &DeviceArray,
) -> (
    arrow_device::FFI_ArrowDeviceArray,
    arrow_schema::ffi::FFI_ArrowSchema,
) {
    array.export(arrow_device::SyncPolicy::Event).unwrap()
}

/// A device that an import is told of must be there.
#[test]
fn devices_that_are_not_there() {
    load();
    for name in MEMORY_NAMES {
        let name = format!("{name}:999");
        let e = Devices::open(&name).unwrap_err();
        assert!(matches!(e, Error::DeviceNotAvailable { .. }), "{e:?}");
        for part in ["CUDA devices, 0 to", &name] {
            assert!(e.to_string().contains(part), "{e}");
        }
    }
    let cpu = Devices::cpu();
    assert!(matches!(
        cpu.cuda_context(),
        Err(Error::NotSupported { .. })
    ));
}
