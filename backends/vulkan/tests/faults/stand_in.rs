//! What the other tests rest on: the interposer sees the calls of the process, fails them and keeps account of objects.

use ash::vk;

use crate::interposer::account::{alone, calls, clear, fail, fail_from, live, misuses};
use crate::interposer::replace;
use crate::program::Program;
use crate::vulkan::is_there;

#[test]
fn calls_are_seen_and_fail() {
    let _alone = alone();
    if !replace() || !is_there() {
        return;
    }
    let program = Program::new();
    let device = &program.device;
    let before = live();
    assert_eq!((before["instance"], before["device"]), (1, 1));
    let info = vk::BufferCreateInfo::default()
        .size(64)
        .usage(vk::BufferUsageFlags::TRANSFER_DST);
    // SAFETY: the device is live.
    let buffer = || unsafe { device.create_buffer(&info, None) };
    let made = calls("vkCreateBuffer");
    fail("vkCreateBuffer", 2, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    let outcomes = [buffer(), buffer(), buffer()];
    assert_eq!(outcomes[1], Err(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY));
    assert_eq!(clear(), ["vkCreateBuffer"]);
    assert_eq!(calls("vkCreateBuffer"), made + 3);
    assert_eq!(live()["buffer"], 2);
    fail_from("*", 1, vk::Result::ERROR_DEVICE_LOST);
    assert_eq!(buffer(), Err(vk::Result::ERROR_DEVICE_LOST));
    for made in [outcomes[0], outcomes[2]] {
        // SAFETY: they were made here, and nothing uses them.
        unsafe { device.destroy_buffer(made.unwrap(), None) };
    }
    // SAFETY: the device is live.
    let idle = unsafe { device.device_wait_idle() };
    assert_eq!(idle, Err(vk::Result::ERROR_DEVICE_LOST));
    assert_eq!(clear(), ["vkCreateBuffer", "vkDeviceWaitIdle"]);
    assert_eq!(live(), before);
    drop(program);
    assert!(live().is_empty(), "{:?}", live());
    assert!(misuses().is_empty(), "{:?}", misuses());
}
