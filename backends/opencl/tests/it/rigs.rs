//! OpenCL devices for tests, and a program's own calls of OpenCL.

use std::ffi::c_char;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use arrow_device::device::{DevicePtr, EventPtr};
use arrow_device::{Device, Queue};
use arrow_device_conformance::{Foreign, Hold, assert_balanced, found, next_id};
use arrow_device_opencl::{OpenClConfig, OpenClDevice, OpenClMemory, OpenClQueue, devices};
use cl3::command_queue::*;
use cl3::device::{CL_DEVICE_PLATFORM, get_device_info};
use cl3::event::*;
use cl3::types::{CL_FALSE, cl_device_id, cl_event, cl_int};
use opencl_sys::clEnqueueMemcpyINTEL_t;

pub(crate) const REQUIRED: &str = "ARROW_DEVICE_OPENCL_REQUIRED";

/// Returns whether the first device has this memory. Says why a test is skipped, or fails if it must not be.
#[track_caller]
pub(crate) fn has(memory: OpenClMemory) -> bool {
    let Some(all) = found(devices(), REQUIRED) else {
        return false;
    };
    let first = all.first().expect("a platform without devices");
    // PoCL and NVIDIA's runtime have no unified shared memory.
    if memory == OpenClMemory::Usm && !first.platform.contains("Intel") {
        return first.memory.contains(&memory);
    }
    found(OpenClConfig::new(0).with_memory(memory).open(), REQUIRED).is_some()
}

/// The kinds of memory to test on.
#[track_caller]
pub(crate) fn memories() -> Vec<OpenClMemory> {
    let all = [OpenClMemory::Usm, OpenClMemory::Svm, OpenClMemory::Handles];
    all.into_iter().filter(|memory| has(*memory)).collect()
}

/// The first device, with an id that no other device of this process has.
#[track_caller]
pub(crate) fn open(memory: OpenClMemory) -> Device {
    let config = OpenClConfig::new(0).with_memory(memory);
    config.with_id(next_id()).open().unwrap()
}

/// A user event of a device's context.
pub(crate) struct Gate(cl_event);

// SAFETY: events may be used on any thread.
unsafe impl Send for Gate {}
// SAFETY: events may be used on several threads at once.
unsafe impl Sync for Gate {}

impl Gate {
    pub(crate) fn new(device: &Device) -> Arc<Self> {
        let context = OpenClDevice::of(device).unwrap().context();
        Arc::new(Self(create_user_event(context).unwrap()))
    }

    pub(crate) fn event(&self) -> cl_event {
        self.0
    }

    /// Ends the event: with 0 it completes, with a negative status it fails.
    pub(crate) fn end(&self, status: cl_int) {
        set_user_event_status(self.0, status).unwrap();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // SAFETY: this is the reference of `new`.
        unsafe { release_event(self.0) }.unwrap();
    }
}

/// Keeps a queue busy.
pub(crate) fn hold(queue: &Queue) -> Hold {
    let gate = Gate::new(queue.device());
    let handle = OpenClQueue::of(queue).unwrap().handle();
    let event = gate.event();
    // SAFETY: queue and event are live and of one context.
    let barrier = unsafe { enqueue_barrier_with_wait_list(handle, 1, &raw const event) }.unwrap();
    // SAFETY: the barrier's event is not used.
    unsafe { release_event(barrier) }.unwrap();
    Hold::new(move || gate.end(0))
}

/// An event of another library, in a device's context.
pub(crate) fn foreign(device: &Device) -> Foreign {
    let gate = Gate::new(device);
    // Where `sync_event` points to.
    let mut place = Box::new(gate.event());
    let event = EventPtr::new((&raw mut *place).cast()).unwrap();
    let keep = (place, gate.clone());
    // SAFETY: `keep` has the event, and the place of its handle.
    unsafe {
        Foreign::new(event, keep, move |works| {
            gate.end(if works { 0 } else { -5 })
        })
    }
}

/// A command queue of another library copies what is at an address, after an event.
#[allow(deprecated)] // The newer function is not in OpenCL 1.2.
pub(crate) fn consumer(
    device: &Device,
    event: EventPtr,
    from: DevicePtr,
    bytes: usize,
) -> Box<dyn FnMut() -> Option<Vec<u8>>> {
    let opencl = OpenClDevice::of(device).unwrap();
    // Not freed before the copy has ended.
    let mut read = ManuallyDrop::new(vec![0; bytes]);
    let (to, from) = (read.as_mut_ptr().cast(), from.as_ptr().cast_const());
    // SAFETY: context and device are live and belong together; event and memory live until the copy has ended, and so does `read`. Each
    // reference is given back once.
    let behind = unsafe {
        let event: cl_event = event.as_ptr().cast::<cl_event>().read();
        let queue = create_command_queue(opencl.context(), opencl.device_id(), 0).unwrap();
        let mut behind = std::ptr::null_mut();
        if opencl.memory() == OpenClMemory::Usm {
            let copy = memcpy_intel(opencl.device_id()).unwrap();
            let (events, behind) = (&raw const event, &raw mut behind);
            let code = copy(queue, CL_FALSE, to, from, bytes, 1, events, behind);
            assert_eq!(code, 0);
        } else {
            let events = &raw const event;
            let copy = enqueue_svm_mem_cpy(queue, CL_FALSE, to, from, bytes, 1, events);
            behind = copy.unwrap();
        }
        release_command_queue(queue).unwrap();
        Gate(behind)
    };
    let status = move || get_event_info(behind.event(), CL_EVENT_COMMAND_EXECUTION_STATUS).unwrap();
    Box::new(move || (i32::from(status()) == CL_COMPLETE).then(|| std::mem::take(&mut *read)))
}

/// The function of cl_intel_unified_shared_memory that copies.
fn memcpy_intel(device: cl_device_id) -> clEnqueueMemcpyINTEL_t {
    let platform = get_device_info(device, CL_DEVICE_PLATFORM).unwrap();
    let name = c"clEnqueueMemcpyINTEL";
    // SAFETY: the loader's function has this signature, and the function that it finds has that of the extension.
    unsafe {
        let loader = libloading::Library::new("libOpenCL.so.1").unwrap();
        type Find = unsafe extern "C" fn(isize, *const c_char) -> clEnqueueMemcpyINTEL_t;
        let find = loader.get::<Find>(b"clGetExtensionFunctionAddressForPlatform\0");
        find.unwrap()(platform.into(), name.as_ptr())
    }
}

#[track_caller]
pub(crate) fn assert_clean(device: &Device) {
    assert_balanced::<OpenClDevice>(device);
}
