//! The end of a process whose threads wait for work that does not end.

use std::mem::forget;
use std::time::Duration;

use arrow_device::device::EventPtr;
use arrow_device_vulkan::VulkanDevice;
use arrow_device_vulkan::ash::vk;

use crate::exit::ends_well;
use crate::program::Program;
use crate::rigs::hold;

#[test]
fn at_the_end() {
    ends_well("waits::at_the_end", |device| {
        // For an event of another library, which this thread polls.
        let (shared, vulkan) = (device.clone(), VulkanDevice::of(&device).unwrap());
        // SAFETY: the device is live.
        let event = unsafe { vulkan.device().create_event(&Default::default(), None) };
        let event: &mut vk::Event = Box::leak(Box::new(event.unwrap()));
        let pointer = EventPtr::new(std::ptr::from_mut(event).cast()).unwrap();
        // SAFETY: the event lives until the process ends.
        std::thread::spawn(move || unsafe { shared.backend().wait_event(pointer) }.unwrap());
        // For work on the device. NVIDIA's driver does not let a process end that has such work.
        if !Program::new().is_nvidia() {
            let queue = device.new_queue().unwrap();
            forget(hold(&queue));
            let event = queue.record().unwrap().unwrap();
            std::thread::spawn(move || event.wait().unwrap());
        }
        forget(device);
        std::thread::sleep(Duration::from_millis(5));
    });
}
