//! A kernel that fails: CUDA then refuses everything in that process, which is therefore another one.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use arrow_device::device::DevicePtr;
use arrow_device::{DeviceBuffer, Devices, Error, SyncPolicy};

use crate::cuda_suite::kernels::{fill_at, fill_kernel};
use crate::gpu_suite::soon;
use crate::places::{REQUIRE, places};
use crate::support::wide_batch;

const CHILD: &str = "ARROW_DEVICE_TEST_FAILED_KERNEL";
const TEST: &str = "failed::a_kernel_that_fails_ends_the_device_for_its_process";
const ILLEGAL_ADDRESS: i32 = 700;

#[test]
fn a_kernel_that_fails_ends_the_device_for_its_process() {
    for place in places() {
        if std::env::var_os(CHILD).is_some() {
            return fail();
        }
        run(Command::new(std::env::current_exe().unwrap()));
        // What happened there does not matter here.
        drop(
            place
                .open(crate::vendor::DEVICE)
                .upload(&wide_batch(4, 100))
                .unwrap(),
        );
    }
}

/// Runs the other half of the test. A device that has failed must not keep its process.
fn run(mut command: Command) {
    command
        .args([TEST, "--exact", "--nocapture"])
        .env(CHILD, "1");
    command
        .env(REQUIRE, "cuda")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("it hangs:\n{}", text(child));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let success = child.wait().unwrap().success();
    let text = text(child);
    assert!(success && text.contains("1 passed"), "{text}");
}

fn text(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[track_caller]
fn assert_failed<T>(result: Result<T, Error>, what: &str) {
    match result.err() {
        Some(Error::Device {
            code: ILLEGAL_ADDRESS,
            message,
            ..
        }) => {
            assert!(message.contains("ILLEGAL_ADDRESS"), "{what}: {message}");
            assert!(
                message.contains("cannot be used any more"),
                "{what}: {message}"
            );
        }
        e => panic!("{what}: {e:?}"),
    }
}

/// An owner that counts how often it is dropped.
struct Counts(Arc<AtomicUsize>);

impl Drop for Counts {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

fn fail() {
    let device = Devices::open("cuda:0").unwrap();
    let kernel = fill_kernel(&device);
    let queue = device.new_queue().unwrap();
    let sent = wide_batch(8, 1000);
    let up = device.upload(&sent).unwrap();
    let (array, schema) = up.export(SyncPolicy::Event).unwrap();
    // Somebody else's memory, in use by the queue.
    let dropped = Arc::new(AtomicUsize::new(0));
    let owner = Box::new(Counts(dropped.clone()));
    let base = DevicePtr::new(std::ptr::without_provenance_mut(256));
    // SAFETY: the host never reads the memory, and no kernel is given its address.
    let foreign = unsafe { DeviceBuffer::from_raw(&device, base, 256, owner, None) };
    let loan = foreign.on(&queue).unwrap();
    // Nothing is there.
    let nowhere = DevicePtr::new(std::ptr::without_provenance_mut(8));
    fill_at(&kernel, &queue, nowhere, 1, 1);
    drop(loan);
    drop(foreign);

    assert_failed(device.synchronize(), "synchronize");
    assert_failed(device.upload(&sent), "upload");
    assert_failed(up.to_host(), "download");
    assert_failed(device.synchronize(), "synchronize again");
    assert!(soon(|| dropped.load(SeqCst) > 0), "the owner was kept");
    assert_eq!(dropped.load(SeqCst), 1);
    // The memory of others that are not the driver's.
    assert_eq!(
        Devices::cpu().upload(&sent).unwrap().to_host().unwrap(),
        sent
    );

    // Nothing of this waits or panics, on whatever thread.
    std::thread::spawn(move || drop((array, schema)))
        .join()
        .unwrap();
    drop((up, queue));
    device.trim();
    assert!(device.take_drop_error().is_some(), "the frees have failed");
    drop((kernel, device));
}

/// The tests of this program that the stand-in's do not have, on the stand-in, where it was built.
#[cfg(target_os = "linux")]
#[test]
fn on_the_stand_in() {
    let program = std::env::current_exe().unwrap();
    let library = program.with_file_name("libcuda_fake.so");
    if !library.exists() {
        return;
    }
    let stand_in = || {
        let mut command = Command::new(&program);
        command
            .env("LD_PRELOAD", &library)
            .env("FAKE_CUDA_COUNT", "2");
        command.env(REQUIRE, "cuda");
        command
    };
    run(stand_in());
    let others = [
        "the_example_in",
        "the_other_kernels",
        "a_kernel_that",
        "two_contexts",
    ];
    let output = stand_in().args(others).output().unwrap();
    let both = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&both);
    assert!(
        output.status.success() && text.contains("4 passed"),
        "{text}"
    );
}
