//! The validation layer, as the test script (`backends/vulkan/test`) loads it for every program, ends a process at its first message.
//! Without this, a run without messages would prove nothing.
#![cfg(all(target_os = "linux", not(miri)))]

#[path = "../support/program.rs"]
mod program;
#[path = "../support/vulkan.rs"]
mod vulkan;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use ash::vk;
use program::Program;
use vulkan::{is_required, is_there};

/// Tells the child what to do.
const TASK: &str = "ARROW_DEVICE_TEST_LAYER";
const SIGTRAP: i32 = 5;

fn buffer(program: &Program, bytes: u64) -> vk::Buffer {
    let info = vk::BufferCreateInfo::default()
        .size(bytes)
        .usage(vk::BufferUsageFlags::TRANSFER_SRC | vk::BufferUsageFlags::TRANSFER_DST);
    // SAFETY: the device is live. With 0 bytes this is a misuse that the driver survives.
    unsafe { program.device.create_buffer(&info, None) }.unwrap()
}

/// Makes two copies that write to the same bytes without a barrier between them.
fn race(program: &Program) {
    let device = &program.device;
    let buffers = [buffer(program, 64), buffer(program, 64)];
    // SAFETY: the objects are live until the end, and the commands are never submitted: the driver only records them.
    unsafe {
        let needs = device.get_buffer_memory_requirements(buffers[0]);
        let kind = needs.memory_type_bits.trailing_zeros();
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(needs.size)
            .memory_type_index(kind);
        let memory = buffers.map(|buffer| {
            let memory = device.allocate_memory(&info, None).unwrap();
            device.bind_buffer_memory(buffer, memory, 0).unwrap();
            memory
        });
        let info = vk::CommandPoolCreateInfo::default();
        let pool = device.create_command_pool(&info, None).unwrap();
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(pool)
            .command_buffer_count(1);
        let commands = device.allocate_command_buffers(&info).unwrap()[0];
        let info = vk::CommandBufferBeginInfo::default();
        device.begin_command_buffer(commands, &info).unwrap();
        let all = [vk::BufferCopy::default().size(64)];
        for _ in 0..2 {
            device.cmd_copy_buffer(commands, buffers[0], buffers[1], &all);
        }
        device.end_command_buffer(commands).unwrap();
        device.destroy_command_pool(pool, None);
        for (buffer, memory) in buffers.into_iter().zip(memory) {
            device.destroy_buffer(buffer, None);
            device.free_memory(memory, None);
        }
    }
}

/// What a child does.
fn work(task: &str) {
    let program = Program::new();
    match task {
        "wrong argument" => drop(buffer(&program, 0)),
        "race" => race(&program),
        "leak" => drop(buffer(&program, 64)),
        "nothing" => {}
        _ => panic!("no such task: {task}"),
    }
    drop(program);
    println!("the task came to its end");
}

/// Runs a task in a process under the layer.
fn child(test: &str, task: &str) -> (Output, String) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/layer");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--test-threads=1", "--nocapture"]);
    command.env("VK_INSTANCE_LAYERS", "VK_LAYER_KHRONOS_validation");
    command.env("VK_LAYER_SETTINGS_PATH", here).env(TASK, task);
    let output = command.output().unwrap();
    let both = [&output.stdout[..], &output.stderr].concat();
    (output, String::from_utf8_lossy(&both).into_owned())
}

fn has_layer() -> bool {
    // SAFETY: Vulkan's loader may be loaded on any thread, and the other call has no requirement.
    let layers = unsafe {
        let entry = ash::Entry::load().unwrap();
        entry.enumerate_instance_layer_properties().unwrap()
    };
    let name = Ok(c"VK_LAYER_KHRONOS_validation");
    let has = layers
        .iter()
        .any(|layer| layer.layer_name_as_c_str() == name);
    let lacks =
        "the validation layer is not installed (Debian and Ubuntu: vulkan-validationlayers)";
    assert!(has || !is_required(), "{lacks}");
    if !has {
        eprintln!("skipped: {lacks}");
    }
    has
}

#[test]
fn a_message_ends_the_process() {
    if let Ok(task) = std::env::var(TASK) {
        return work(&task);
    }
    if !is_there() || !has_layer() {
        return;
    }
    let tasks = [
        ("wrong argument", "VUID-VkBufferCreateInfo-size-00912"),
        ("race", "SYNC-HAZARD-WRITE-AFTER-WRITE"),
        // Noticed at the device's end.
        ("leak", "VUID-vkDestroyDevice-device-00378"),
    ];
    for (task, message) in tasks {
        let (output, text) = child("a_message_ends_the_process", task);
        assert_eq!(output.status.signal(), Some(SIGTRAP), "{task}: {text}");
        assert!(text.contains(message), "{task}: {text}");
        assert!(!text.contains("came to its end"), "{task}: {text}");
    }
    let (output, text) = child("a_message_ends_the_process", "nothing");
    assert!(output.status.success(), "{text}");
    assert!(text.contains("came to its end"), "{text}");
}
