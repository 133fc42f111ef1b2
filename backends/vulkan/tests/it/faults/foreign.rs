//! Events of a program, and how long the crate uses them.

use std::time::Duration;

use arrow_device::device::EventPtr;
use arrow_device_vulkan::set_event;
use ash::vk;

use crate::faults::every_call::batch;
use crate::interposer::account::{calls, clear, delay, fail, live, misuses};
use crate::interposer::interposed;
use crate::program::Program;
use crate::suite::soon;

/// A program's event, which the host sets.
pub(crate) struct Foreign<'a>(&'a Program, Box<vk::Event>);

impl<'a> Foreign<'a> {
    pub(crate) fn new(program: &'a Program) -> Self {
        let info = vk::EventCreateInfo::default();
        // SAFETY: the device is live.
        let make = || unsafe { program.device.create_event(&info, None) };
        // The first call may be the one that fails.
        Self(program, Box::new(make().or_else(|_| make()).unwrap()))
    }

    pub(crate) fn pointer(&self) -> EventPtr {
        EventPtr::new((&raw const *self.1).cast_mut().cast()).unwrap()
    }

    pub(crate) fn set(&self) {
        // SAFETY: the event is live, and nobody else sets it.
        let set = || unsafe { set_event(&self.0.device, *self.1) };
        set().or_else(|_| set()).unwrap();
    }
}

impl Drop for Foreign<'_> {
    fn drop(&mut self) {
        // SAFETY: the tests wait for what uses it.
        unsafe { self.0.device.destroy_event(*self.1, None) };
    }
}

/// A queue that could record nothing behind its wait is dropped: the event is still asked for, so that who waits for the end of all
/// work waits for the event.
#[test]
fn a_queue_is_dropped_while_its_event_is_asked_for() {
    if !interposed("faults::foreign::a_queue_is_dropped_while_its_event_is_asked_for") {
        return;
    }
    let program = Program::new();
    let owned = live();
    let device = program.adopt();
    let event = Foreign::new(&program);
    let queue = device.new_queue().unwrap();
    // SAFETY: the event lives until all work has ended.
    unsafe { queue.raw().wait(event.pointer()) }.unwrap();
    fail("vkCreateEvent", 1, vk::Result::ERROR_OUT_OF_HOST_MEMORY);
    assert!(queue.record().is_err());
    assert_eq!(clear(), ["vkCreateEvent"]);
    drop(queue);
    std::thread::scope(|scope| {
        let settled = scope.spawn(|| device.backend().settle());
        std::thread::sleep(Duration::from_millis(100));
        let is_early = settled.is_finished();
        event.set();
        settled.join().unwrap().unwrap();
        assert!(!is_early, "the event is still asked for");
    });
    drop(event);
    std::thread::sleep(Duration::from_millis(50));
    assert!(misuses().is_empty(), "{:?}", misuses());
    drop(device);
    assert!(soon(|| live() == owned), "left {:?}", live());
}

/// Whoever is told that the device has failed may destroy the event, even if a thread was about to ask for it.
#[test]
fn nobody_asks_for_an_event_once_the_device_has_failed() {
    if !interposed("faults::foreign::nobody_asks_for_an_event_once_the_device_has_failed") {
        return;
    }
    let program = Program::new();
    let owned = live();
    let device = program.adopt();
    let event = Foreign::new(&program);
    let queue = device.new_queue().unwrap();
    delay("vkGetEventStatus", Duration::from_millis(50));
    // SAFETY: the event lives until the device has failed.
    unsafe { queue.raw().wait(event.pointer()) }.unwrap();
    let asked = calls("vkGetEventStatus");
    assert!(soon(|| calls("vkGetEventStatus") > asked), "nobody polls");
    fail("vkQueueSubmit", 1, vk::Result::ERROR_DEVICE_LOST);
    assert!(device.upload(&batch()).is_err());
    drop(event);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(clear(), ["vkQueueSubmit"]);
    assert!(misuses().is_empty(), "{:?}", misuses());
    drop((queue, device));
    assert!(soon(|| live() == owned), "left {:?}", live());
}
