//! Where barriers are recorded. Drivers for processors order all commands anyway, so that no result shows a barrier that is missing.

use arrow_device::Queue;
use arrow_device_vulkan::VulkanQueue;

use crate::interposer::account::calls;
use crate::interposer::interposed;
use crate::program::Program;

/// What a program's commands have written is available to whoever sees the event, or submits after `submitted`.
#[test]
fn events_and_submissions_of_a_program_come_after_a_barrier() {
    if !interposed("faults::barriers::events_and_submissions_of_a_program_come_after_a_barrier") {
        return;
    }
    let device = Program::new().adopt();
    let queue = device.new_queue().unwrap();
    let record = |queue: &Queue| drop(queue.record().unwrap());
    let submitted = |queue: &Queue| {
        let _ = VulkanQueue::of(queue).unwrap().submitted().unwrap();
    };
    for work in [record as fn(&Queue), submitted] {
        let before = calls("vkCmdPipelineBarrier");
        work(&queue);
        assert_eq!(calls("vkCmdPipelineBarrier"), before + 1);
    }
    queue.synchronize().unwrap();
}
