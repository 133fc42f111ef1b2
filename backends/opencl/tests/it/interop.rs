//! Exchange with a program in plain C (`peer.c`), whose contexts, queues and events are its own.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_device::{Device, DeviceArray, Devices, FFI_ArrowDeviceArray, ImportOptions};
use arrow_device_conformance::{is_required, soon};
use arrow_device_opencl::{OpenClConfig, OpenClDevice, OpenClMemory, register};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{DataType, Field};
use cl3::types::cl_event;
use libloading::Library;

use crate::rigs::{REQUIRED, has};

const ROWS: i64 = 10_000;

/// The C program, compiled once; `None` if there are no OpenCL headers.
fn peer() -> Option<&'static Library> {
    static PEER: OnceLock<Option<Library>> = OnceLock::new();
    let compile = || {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/peer.c");
        let library =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("peer-{}.so", std::process::id()));
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let output = Command::new(&compiler)
            .args([
                "-std=gnu11",
                "-Wall",
                "-Werror",
                "-Wno-deprecated-declarations",
                "-shared",
                "-fPIC",
                "-o",
            ])
            .args([&library, &source])
            .arg("-l:libOpenCL.so.1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        if text.contains("CL/cl.h: No such file") && !is_required(REQUIRED) {
            eprintln!("skipped: there are no OpenCL headers (Debian and Ubuntu: opencl-c-headers)");
            return None;
        }
        assert!(output.status.success(), "{compiler}: {text}");
        // SAFETY: the library has no initialisers.
        let loaded = unsafe { Library::new(&library) }.unwrap();
        std::fs::remove_file(library).unwrap();
        Some(loaded)
    };
    PEER.get_or_init(compile).as_ref()
}

/// Calls a function of the C program.
macro_rules! call {
    ($name:ident($($argument:expr => $type:ty),*)) => {{
        let name = concat!(stringify!($name), "\0");
        // SAFETY: `peer.c` has the function with these parameters, and the tests pass what it asks for.
        unsafe {
            let function = peer().unwrap().get::<unsafe extern "C" fn($($type),*) -> c_int>(name.as_bytes()).unwrap();
            function($($argument),*)
        }
    }};
}

/// When the C program releases its queue, as there.
const WITH_ARRAY: c_int = 0;
const WHILE_PENDING: c_int = 1;
const WHEN_FINISHED: c_int = 2;

/// An array of the C program, and the event that its copy waits for.
fn produce(
    device_id: i64,
    memory: OpenClMemory,
    release_queue: c_int,
) -> (FFI_ArrowDeviceArray, usize) {
    let mut gate: cl_event = std::ptr::null_mut();
    let mut array = FFI_ArrowDeviceArray::empty();
    let (out, gate_out) = (&raw mut array, &raw mut gate);
    let line = call!(peer_produce(
        out.cast() => *mut c_void, device_id => i64, ROWS => i64,
        c_int::from(memory == OpenClMemory::Usm) => c_int, release_queue => c_int,
        gate_out => *mut cl_event
    ));
    assert_eq!(line, 0, "peer.c");
    (array, gate.expose_provenance())
}

fn open_gate(gate: usize) {
    let gate = std::ptr::with_exposed_provenance_mut(gate);
    assert_eq!(call!(peer_open(gate => cl_event)), 0);
}

fn schema() -> FFI_ArrowSchema {
    FFI_ArrowSchema::try_from(&Field::new("v", DataType::Int64, false)).unwrap()
}

fn import(array: FFI_ArrowDeviceArray, devices: &Devices) -> DeviceArray {
    let options = ImportOptions {
        devices: Some(devices.clone()),
        ..Default::default()
    };
    // SAFETY: the C program keeps to the interface.
    unsafe { DeviceArray::import(array, &schema(), &options) }.unwrap()
}

/// Its event is pending, on a queue that was not flushed; nothing but the download waits.
#[track_caller]
fn arrives(devices: &Devices, memory: OpenClMemory) -> Device {
    let before = call!(peer_releases());
    let (array, gate) = produce(0, memory, WITH_ARRAY);
    let array = import(array, devices);
    let device = array.device().clone();
    assert_eq!(device.stats().host_waits, 0);
    assert!(!array.is_ready().unwrap());
    let part = array.slice(10, 100).unwrap();
    let opened = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let download = scope.spawn(|| {
            let host = part.to_host().unwrap();
            assert!(opened.load(Ordering::SeqCst), "read before the copy ran");
            host
        });
        std::thread::sleep(Duration::from_millis(30));
        opened.store(true, Ordering::SeqCst);
        open_gate(gate);
        let values: Vec<i64> = (10..110).map(|i| 3 * i).collect();
        assert_eq!(
            download
                .join()
                .unwrap()
                .as_primitive::<Int64Type>()
                .values()[..],
            values
        );
    });
    let values: Vec<i64> = (0..ROWS).map(|i| 3 * i).collect();
    assert_eq!(
        array
            .to_host()
            .unwrap()
            .as_primitive::<Int64Type>()
            .values()[..],
        values
    );
    drop((array, part));
    assert!(soon(|| call!(peer_releases()) > before), "not released");
    device
}

/// All in one test: the releases are counted for the process.
#[test]
fn a_c_producer_with_a_context_of_its_own() {
    if !has(OpenClMemory::Svm) || peer().is_none() {
        return;
    }
    // Without a resolver the set's device is used.
    let devices = Devices::new();
    let device = OpenClConfig::new(0)
        .with_memory(OpenClMemory::Svm)
        .open()
        .unwrap();
    devices.add(device.clone()).unwrap();
    // Where a context's memory is another's too: on a GPU it is not.
    if OpenClDevice::of(&device).unwrap().info().is_cpu {
        assert_eq!(arrives(&devices, OpenClMemory::Svm), device);
    }

    // With it, a device in the producer's context.
    let devices = Devices::new();
    register(&devices);
    let own = devices.get(device.id()).unwrap();
    let theirs = arrives(&devices, OpenClMemory::Svm);
    assert_ne!(theirs, own);
    // Not the memory that would be chosen otherwise: the producer's is shared virtual memory.
    assert_eq!(
        OpenClDevice::of(&theirs).unwrap().memory(),
        OpenClMemory::Svm
    );
    let context = |device| OpenClDevice::of(device).unwrap().context();
    assert_ne!(context(&theirs), context(&own));
    assert_eq!(theirs.id(), own.id());
    // The next producer has another context.
    assert_ne!(arrives(&devices, OpenClMemory::Svm), theirs);
    if has(OpenClMemory::Usm) {
        let theirs = arrives(&devices, OpenClMemory::Usm);
        let memory = OpenClDevice::of(&theirs).unwrap().memory();
        assert_eq!(memory, OpenClMemory::Usm);
    }
    // An id that names no device here: the context has only one.
    let (array, gate) = produce(77, OpenClMemory::Svm, WITH_ARRAY);
    let array = import(array, &devices);
    assert_eq!(array.device().id().id, 77);
    open_gate(gate);
    assert_eq!(array.to_host().unwrap().len(), ROWS as usize);

    // The queue of its event is gone.
    for when in [WHILE_PENDING, WHEN_FINISHED] {
        let (array, gate) = produce(0, OpenClMemory::Svm, when);
        let array = import(array, &devices);
        let ready = array.is_ready();
        // First: the array is released only once its copy has run.
        if when == WHILE_PENDING {
            open_gate(gate);
        }
        assert_eq!(ready.unwrap(), when == WHEN_FINISHED);
        array.wait().unwrap();
        assert_eq!(array.to_host().unwrap().len(), ROWS as usize);
    }
}
