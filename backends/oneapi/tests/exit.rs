//! The end of a process that uses a oneAPI device. Threads that are in SYCL while its library's destructors run crash, so this is a
//! program, which starts itself: the process must end, soon, with the status of its `main`.

#![cfg(target_os = "linux")]

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use arrow_array::Int64Array;
use arrow_device::device::{EventPtr, Queue};
use arrow_device::{Device, Result};
use arrow_device_oneapi::OneApiQueue;

#[path = "oneapi/programs.rs"]
#[allow(dead_code)]
mod programs;
#[path = "oneapi/support.rs"]
#[allow(dead_code)]
mod support;

use programs::programs;

const STATUS: u8 = 7;
/// A name, and what a child does before its `main` returns.
type Case = (&'static str, fn(&Device));

const CASES: [Case; 5] = [
    ("busy", busy),
    ("pending", pending),
    ("foreign", foreign),
    ("kept", kept),
    ("waiting", waiting),
];

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    if let (Some("--child"), Some(case)) = (args.next().as_deref(), args.next()) {
        // SAFETY: the function only sleeps.
        unsafe { libc::atexit(linger) };
        let device = support::device().unwrap();
        let (_, work) = CASES.into_iter().find(|(name, _)| *name == case).unwrap();
        work(&device);
        return ExitCode::from(STATUS);
    }
    if support::number().is_none() {
        return ExitCode::SUCCESS;
    }
    programs(); // compiled once
    for round in 0..5 {
        for (case, _) in CASES {
            let start = Instant::now();
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--child", case])
                .output()
                .unwrap();
            let took = start.elapsed();
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(
                output.status.code(),
                Some(STATUS.into()),
                "{case}, round {round}: {}: {text}",
                output.status
            );
            assert!(
                took < Duration::from_secs(10),
                "{case}, round {round}: {took:?}"
            );
        }
    }
    println!("the process ended well in {} cases", CASES.len());
    ExitCode::SUCCESS
}

fn upload(device: &Device) -> Result<()> {
    let queue = device.new_queue()?;
    let up = device.upload_array_on(&Int64Array::from_iter_values(0..10_000), &queue)?;
    up.to_host_on(&queue).map(drop)
}

/// Threads transfer while `main` returns. Afterwards they get errors.
fn busy(device: &Device) {
    for _ in 0..4 {
        let device = device.clone();
        std::thread::spawn(move || {
            loop {
                let _ = upload(&device);
            }
        });
    }
    std::thread::sleep(Duration::from_millis(30));
}

struct Called;

impl Wake for Called {
    fn wake(self: Arc<Self>) {}
}

fn sycl_queue(queue: &Queue) -> *mut std::ffi::c_void {
    queue
        .raw()
        .as_any()
        .downcast_ref::<OneApiQueue>()
        .unwrap()
        .sycl_queue()
}

/// Work that ends never, with wakers, frees and waits behind it.
fn pending(device: &Device) {
    let queue = device.new_queue().unwrap();
    // SAFETY: the queue is live. The event is never ended.
    unsafe { (programs().hold_by_event)(sycl_queue(&queue)) };
    let up = device
        .upload_array_on(&Int64Array::from_iter_values(0..10_000), &queue)
        .unwrap();
    let event = queue.record().unwrap().unwrap();
    event.notify(&Waker::from(Arc::new(Called))).unwrap();
    drop(up);
    device.trim();
    std::thread::spawn(move || event.wait());
    std::thread::sleep(Duration::from_millis(30));
}

/// Threads that wait for work stay, since an error would be taken for its end: then its memory is freed.
fn waiting(device: &Device) {
    let queue = device.new_queue().unwrap();
    // SAFETY: the queue is live. The event is never ended.
    unsafe { (programs().hold_by_event)(sycl_queue(&queue)) };
    let event = queue.record().unwrap().unwrap();
    // SAFETY: it ends the process.
    let ended = || unsafe { libc::_exit(1) };
    let settled = device.clone();
    std::thread::spawn(move || {
        let _ = settled.backend().settle();
        ended()
    });
    std::thread::spawn(move || {
        let _ = event.wait();
        ended()
    });
    std::thread::sleep(Duration::from_millis(30));
}

/// Gives threads time while the process ends, after SYCL's own end.
extern "C" fn linger() {
    std::thread::sleep(Duration::from_millis(50));
}

/// A queue that waits for an event of another context, which never completes.
fn foreign(device: &Device) {
    let mut held = std::ptr::null_mut();
    // SAFETY: the number is that of a device; `held` is valid for a write.
    let event = unsafe {
        let theirs = (programs().queue_new)(device.id().id, programs::OWN_CONTEXT);
        EventPtr::new((programs().event_held)(theirs, &raw mut held)).unwrap()
    };
    let queue = device.new_queue().unwrap();
    // SAFETY: the event lives as long as the process.
    unsafe { queue.raw().wait(event) }.unwrap();
    drop(
        device
            .upload_array_on(&Int64Array::from_iter_values(0..10_000), &queue)
            .unwrap(),
    );
    std::thread::sleep(Duration::from_millis(30));
}

/// Devices, arrays and queues are kept beyond `main`.
fn kept(device: &Device) {
    upload(device).unwrap();
    std::mem::forget((
        device.clone(),
        device.upload_array(&Int64Array::from(vec![1])).unwrap(),
        device.new_queue().unwrap(),
    ));
}
