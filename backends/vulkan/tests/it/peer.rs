//! `peer.c`, compiled and called.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock, PoisonError};

use arrow_device::FFI_ArrowDeviceArray;
use arrow_device_vulkan::ash::{self, vk};
use libloading::Library;

use crate::program::{FAMILY, Program};
use crate::rigs::is_required;

/// When the event of an array is set, as in the C program.
pub(crate) const LATER: c_int = 0;
pub(crate) const BY_QUEUE: c_int = 1;
pub(crate) const SET_BEFORE: c_int = 2;
pub(crate) const NO_EVENT: c_int = 3;

/// The C program, compiled once; `None` if there are no headers of Vulkan.
fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(compile).as_ref()
}

fn compile() -> Option<Library> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/peer.c");
    let name = format!("peer-{}.so", std::process::id());
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(&compiler)
        .args(["-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC", "-o"])
        .args([&built, &source])
        .arg("-l:libvulkan.so.1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    if text.contains("vulkan/vulkan.h: No such file") && !is_required() {
        eprintln!("skipped: there are no headers of Vulkan (Debian and Ubuntu: libvulkan-dev)");
        return None;
    }
    assert!(output.status.success(), "{compiler}: {text}");
    // SAFETY: the library has no initialisers.
    let loaded = unsafe { Library::new(&built) }.unwrap();
    std::fs::remove_file(built).unwrap();
    Some(loaded)
}

/// Calls a function of the C program.
macro_rules! call {
    ($name:ident($($argument:expr => $type:ty),*)) => {{
        let name = concat!(stringify!($name), "\0");
        // SAFETY: `peer.c` has the function with these parameters, and the methods below pass what it asks for.
        unsafe {
            let function = library().unwrap().get::<unsafe extern "C" fn($($type),*) -> c_int>(name.as_bytes()).unwrap();
            function($($argument),*)
        }
    }};
}

/// `struct shared` of the C program.
#[repr(C)]
struct Shared {
    physical: vk::PhysicalDevice,
    device: vk::Device,
    family: u32,
    submit: unsafe extern "C" fn(*const vk::SubmitInfo<'_>, vk::Fence, *const c_void) -> vk::Result,
    context: *const c_void,
}

/// The program's way to its queue.
unsafe extern "C" fn submit(
    work: *const vk::SubmitInfo<'_>,
    fence: vk::Fence,
    program: *const c_void,
) -> vk::Result {
    // SAFETY: the context in `Peer::new` is the program, which lives as long as the peer, and the C program passes a structure that
    // is valid during the call.
    let (program, work) = unsafe { (&*program.cast::<Program>(), &*work) };
    let queue = program.queue.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the work's objects are live, as the C program keeps them, and the queue is locked.
    let done = unsafe { program.device.queue_submit(*queue, &[*work], fence) };
    done.err().unwrap_or(vk::Result::SUCCESS)
}

/// The C program on a device.
pub(crate) struct Peer {
    shared: Shared,
    _program: Arc<Program>,
}

// SAFETY: the structure is read only, and `submit` may be called on any thread.
unsafe impl Sync for Peer {}
// SAFETY: no part of the structure belongs to one thread.
unsafe impl Send for Peer {}

/// An array that the C program has made, and its memory.
pub(crate) struct Produced {
    pub array: FFI_ArrowDeviceArray,
    pub buffer: vk::Buffer,
    pub bytes: u64,
    /// For `open`.
    pub producer: usize,
}

impl Peer {
    pub(crate) fn new(program: &Arc<Program>) -> Option<Self> {
        library()?;
        let shared = Shared {
            physical: program.physical,
            device: program.device.handle(),
            family: FAMILY,
            submit,
            context: Arc::as_ptr(program).cast(),
        };
        let _program = program.clone();
        Some(Self { shared, _program })
    }

    pub(crate) fn produce(&self, device_id: i64, rows: i64, who: c_int) -> Produced {
        let mut array = FFI_ArrowDeviceArray::empty();
        let (mut buffer, mut bytes) = (vk::Buffer::null(), 0);
        let mut producer = std::ptr::null_mut();
        let line = call!(peer_produce(
            &raw const self.shared => *const Shared, (&raw mut array).cast() => *mut c_void,
            device_id => i64, rows => i64, who => c_int,
            &raw mut buffer => *mut vk::Buffer, &raw mut bytes => *mut u64, &raw mut producer => *mut *mut c_void
        ));
        assert_eq!(line, 0, "peer.c");
        let producer = producer.expose_provenance();
        Produced {
            array,
            buffer,
            bytes,
            producer,
        }
    }

    /// Submits the commands that set the event of an array that was made with `LATER`.
    pub(crate) fn open(&self, producer: usize) {
        let producer = std::ptr::with_exposed_provenance_mut(producer);
        assert_eq!(call!(peer_open(producer => *mut c_void)), 0, "peer.c");
    }

    pub(crate) fn poll(&self, array: &FFI_ArrowDeviceArray) -> bool {
        let array = std::ptr::from_ref(array).cast();
        call!(peer_poll(&raw const self.shared => *const Shared, array => *const c_void)) == 1
    }

    /// Returns twice the values of the only column of a batch, which it releases. Waits for the batch's event.
    pub(crate) fn double(&self, array: &mut FFI_ArrowDeviceArray, rows: usize) -> Vec<f32> {
        let kernel = include_bytes!("../../examples/kernel/kernel.spv");
        let kernel = ash::util::read_spv(&mut std::io::Cursor::new(&kernel[..])).unwrap();
        let mut doubled = vec![0f32; rows];
        let line = call!(peer_double(
            &raw const self.shared => *const Shared, std::ptr::from_mut(array).cast() => *mut c_void,
            kernel.as_ptr() => *const u32, size_of_val(&kernel[..]) => usize, doubled.as_mut_ptr() => *mut f32
        ));
        assert_eq!(line, 0, "peer.c");
        doubled
    }

    pub(crate) fn releases() -> c_int {
        call!(peer_releases())
    }
}
