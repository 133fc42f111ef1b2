//! Exchange with another library of the program, which shares its VkDevice and has memory and events of its own: this crate knows of it
//! what the C structs say.

use std::ptr::{NonNull, from_ref, null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Int64Array, RecordBatch};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_data::ffi::FFI_ArrowArray;
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceBuffer, DeviceRecordBatch, Devices,
    FFI_ArrowDeviceArray, ImportOptions, SyncPolicy,
};
use arrow_device_conformance::soon;
use arrow_device_vulkan::VulkanDevice;
use arrow_device_vulkan::ash::vk;
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field, Schema};

use crate::program::{Program, ProgramBuffer};
use crate::rigs::{assert_clean, hold, is_there, open};

const ROWS: i64 = 10_000;

fn values() -> Vec<i64> {
    (0..ROWS).map(|i| 3 * i).collect()
}

/// When the event of an array is set.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Set {
    /// By commands that are submitted later.
    Later,
    /// By commands that are submitted already.
    ByQueue,
    /// By the host, before.
    Before,
    /// There is none.
    Never,
}

/// An array of the library. Its release drops this.
struct Made {
    program: Arc<Program>,
    memory: Arc<ProgramBuffer>,
    source: Arc<ProgramBuffer>,
    /// Where `sync_event` points.
    event: vk::Event,
    commands: vk::CommandBuffer,
    submitted: Mutex<vk::Fence>,
}

impl Made {
    fn new(program: &Arc<Program>, set: Set) -> Arc<Self> {
        let (memory, source) = (
            program.buffer(8 * ROWS as usize),
            program.buffer(8 * ROWS as usize),
        );
        let device = &program.device;
        let is_written = matches!(set, Set::Before | Set::Never);
        memory.write(&if is_written {
            values()
        } else {
            vec![-1; ROWS as usize]
        });
        source.write(&values());
        // SAFETY: the device is live, and so are event and buffers when the commands run.
        let (event, commands) = unsafe {
            let event = device
                .create_event(&vk::EventCreateInfo::default(), None)
                .unwrap();
            if set == Set::Before {
                device.set_event(event).unwrap();
            }
            let all = vk::PipelineStageFlags::ALL_COMMANDS;
            let region = vk::BufferCopy::default().size(memory.bytes as u64);
            let barrier = vk::MemoryBarrier::default()
                .src_access_mask(vk::AccessFlags::MEMORY_WRITE)
                .dst_access_mask(vk::AccessFlags::MEMORY_READ);
            let commands = program.record(|own| {
                device.cmd_copy_buffer(own, source.raw, memory.raw, &[region]);
                let none = vk::DependencyFlags::empty();
                device.cmd_pipeline_barrier(own, all, all, none, &[barrier], &[], &[]);
                device.cmd_set_event(own, event, all);
            });
            (event, commands)
        };
        let made = Arc::new(Self {
            program: program.clone(),
            memory,
            source,
            event,
            commands,
            submitted: Mutex::default(),
        });
        if set == Set::ByQueue {
            made.submit();
        }
        made
    }

    fn submit(&self) {
        let (device, commands) = (&self.program.device, [self.commands]);
        let queue = self.program.queue.lock().unwrap();
        let submit = [vk::SubmitInfo::default().command_buffers(&commands)];
        // SAFETY: this thread has the queue; the commands and what they use live until the fence is signalled.
        *self.submitted.lock().unwrap() = unsafe {
            let fence = device
                .create_fence(&vk::FenceCreateInfo::default(), None)
                .unwrap();
            device.queue_submit(*queue, &submit, fence).unwrap();
            fence
        };
    }

    /// Makes the VkBuffer known, as nobody can ask Vulkan for the buffer of an address. Only copies need it.
    fn announce(&self, device: &Device) -> DeviceBuffer {
        let (buffer, bytes) = (self.memory.raw, self.memory.bytes);
        // SAFETY: the buffer is kept. What is written to it until its event is set, nobody reads before.
        unsafe { VulkanDevice::wrap_buffer(device, buffer, bytes, self.memory.clone()) }.unwrap()
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let (device, fence) = (&self.program.device, *self.submitted.lock().unwrap());
        // SAFETY: both are destroyed once, after the commands.
        unsafe {
            if fence != vk::Fence::null() {
                device.wait_for_fences(&[fence], true, u64::MAX).unwrap();
            }
            device.destroy_fence(fence, None);
            device.destroy_event(self.event, None);
        }
        let _ = &self.source;
    }
}

/// Hands an array over through the C structs.
fn import(made: &Arc<Made>, set: Set, device: &Device) -> DeviceArray {
    let info = vk::BufferDeviceAddressInfo::default().buffer(made.memory.raw);
    // SAFETY: the buffer has an address.
    let address = unsafe { made.program.device.get_buffer_device_address(&info) };
    let address = NonNull::new(without_provenance_mut::<u8>(address as usize)).unwrap();
    // SAFETY: only the address is used, and the owner keeps the memory.
    let (array, schema) = unsafe {
        let owner = std::panic::AssertUnwindSafe(made.clone());
        let buffer = Buffer::from_custom_allocation(address, made.memory.bytes, Arc::new(owner));
        let data = ArrayData::builder(DataType::Int64)
            .len(ROWS as usize)
            .add_buffer(buffer);
        let array = FFI_ArrowArray::new(&data.build_unchecked());
        let event = match set {
            Set::Never => null_mut(),
            _ => from_ref(&made.event).cast_mut().cast(),
        };
        let array =
            FFI_ArrowDeviceArray::new(array, ArrowDeviceType::VULKAN, device.id().id, event);
        (
            array,
            FFI_ArrowSchema::try_from(&Field::new("v", DataType::Int64, false)).unwrap(),
        )
    };
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let options = ImportOptions {
        devices: Some(devices),
        ..Default::default()
    };
    // SAFETY: the values are valid once the event is set.
    unsafe { DeviceArray::import(array, &schema, &options) }.unwrap()
}

fn begin() -> Option<(Arc<Program>, Device)> {
    let program = is_there().then(Program::new)?;
    let device = program.adopt();
    Some((program, device))
}

#[test]
fn our_event_is_polled() {
    let Some((program, device)) = begin() else {
        return;
    };
    let column = Arc::new(Int64Array::from(values())) as _;
    let batch = RecordBatch::try_from_iter([("v", column)]).unwrap();
    let queue = device.new_queue().unwrap();
    for _ in 0..3 {
        let mut held = hold(&queue);
        let up = device.upload_on(&batch, &queue).unwrap();
        let (array, _schema) = up.export(SyncPolicy::Event).unwrap();
        drop(up);
        // SAFETY: `sync_event` points to a VkEvent, which lives as long as the array.
        let is_set = || unsafe {
            let event = array.sync_event().cast::<vk::Event>();
            program.device.get_event_status(*event).unwrap()
        };
        assert!(!is_set(), "set before the copy ran");
        held.open();
        assert!(soon(is_set), "never set");
        drop(array);
        assert_clean(&device);
    }
}

/// An import does not wait. Whoever makes a queue wait does, because Vulkan lets no queue wait for the event of another library.
#[test]
fn a_foreign_event_is_waited_for() {
    let Some((program, device)) = begin() else {
        return;
    };
    for set in [Set::Later, Set::ByQueue, Set::Before, Set::Never] {
        let mut held = (set == Set::ByQueue).then(|| hold(&device.default_queue()));
        let made = Made::new(&program, set);
        let (known, array) = (made.announce(&device), import(&made, set, &device));
        let is_pending = matches!(set, Set::Later | Set::ByQueue);
        assert_eq!(array.is_ready().unwrap(), !is_pending, "{set:?}");
        let (queue, part) = (device.new_queue().unwrap(), array.slice(10, 100).unwrap());
        let opened = AtomicBool::new(!is_pending);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                opened.store(true, SeqCst);
                match set {
                    Set::Later => made.submit(),
                    Set::ByQueue => held.as_mut().unwrap().open(),
                    _ => {}
                }
            });
            let download = part.start_to_host(&queue).unwrap();
            assert!(opened.load(SeqCst), "{set:?}: read before it was written");
            let back = download.wait().unwrap();
            assert_eq!(
                back.as_primitive::<Int64Type>().values()[..],
                values()[10..110],
                "{set:?}"
            );
        });
        // Through the host: the functions of one VkDevice know nothing of another's buffers and events.
        let there = array.to_device(&open()).unwrap().to_host().unwrap();
        assert_eq!(
            there.as_primitive::<Int64Type>().values()[..],
            values(),
            "{set:?}"
        );
        drop((known, array, part));
        assert!(
            soon(|| Arc::strong_count(&made) == 1),
            "{set:?}: not released"
        );
    }
}

/// An export of two columns waits for both producers' events. The consumer may release it at once.
#[test]
fn an_export_waits_for_foreign_events() {
    let Some((program, device)) = begin() else {
        return;
    };
    let made = [(); 2].map(|()| Made::new(&program, Set::Later));
    let columns = made
        .each_ref()
        .map(|made| import(made, Set::Later, &device));
    let fields = ["a", "b"].map(|name| Field::new(name, DataType::Int64, true));
    let schema = Arc::new(Schema::new(fields.to_vec()));
    let batch = DeviceRecordBatch::try_new(schema, &columns).unwrap();
    let opened = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(30));
            opened.store(true, SeqCst);
            made.iter().for_each(|made| made.submit());
        });
        let (array, _schema) = batch.export(SyncPolicy::Event).unwrap();
        assert!(opened.load(SeqCst), "exported before it was written");
        drop((columns, batch, array));
    });
    let are_released = || made.iter().all(|made| Arc::strong_count(made) == 1);
    assert!(soon(are_released), "not released");
}
