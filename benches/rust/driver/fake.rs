//! The stand-in for the CUDA driver, loaded before anything looks for the real one.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use arrow_device::cuda::CudaConfig;
use arrow_device::{Device, Devices, ImportOptions};
use arrow_device_benches::cases::Result;
use libloading::{Library, Symbol};

/// Copies of more than 64 KiB move nothing: `HOLLOW` of the stand-in.
pub(crate) const HOLLOW: u32 = 1 << 16;

fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let beside = std::env::current_exe()?.with_file_name("libcuda_fake.so");
    // SAFETY: the library's initialisers are those of the Rust runtime, which may run on any
    // thread.
    let library = unsafe { Library::new(&beside) };
    let library = library.map_err(|e| format!("build cuda-fake along with this program: {e}"))?;
    Ok(LIBRARY.get_or_init(|| library))
}

/// A CUDA device on a fresh engine of the stand-in.
pub(crate) struct Fake {
    ordinal: i32,
    pub(crate) device: Device,
    /// They find the device.
    pub(crate) options: ImportOptions,
}

impl Fake {
    pub(crate) fn open(flags: u32, capacity_bytes: u64) -> Result<Self> {
        // SAFETY: the stand-in's function of this name has this type.
        let open: Symbol<unsafe extern "C" fn(i32, u32, u64) -> i32> =
            unsafe { library()?.get("fake_cuda_open") }?;
        // SAFETY: it takes numbers only.
        let ordinal = unsafe { open(1, flags, capacity_bytes) };
        let device = CudaConfig::new(usize::try_from(ordinal)?).open()?;
        let devices = Devices::new();
        devices.add(device.clone())?;
        let options = ImportOptions::default().with_devices(devices);
        Ok(Self {
            ordinal,
            device,
            options,
        })
    }

    /// Sets the clock of the engine: bytes per second each way, nanoseconds of a call and a query.
    pub(crate) fn set_clock(&self, rate: f64, call: u64, query: u64) -> Result<()> {
        type SetClock = unsafe extern "C" fn(i32, f64, f64, u64, u64) -> i32;
        // SAFETY: the stand-in's function of this name has this type.
        let set: Symbol<SetClock> = unsafe { library()?.get("fake_cuda_clock") }?;
        // SAFETY: it takes numbers only.
        match unsafe { set(self.ordinal, rate, rate, call, query) } {
            0 => Ok(()),
            _ => Err("the stand-in has refused the clock".into()),
        }
    }

    /// Calls of one driver function.
    pub(crate) fn calls_of(&self, name: &str) -> Result<u64> {
        // SAFETY: the stand-in's function of this name has this type.
        let calls: Symbol<unsafe extern "C" fn(i32, *const c_char) -> u64> =
            unsafe { library()?.get("fake_cuda_calls") }?;
        let name = CString::new(name)?;
        // SAFETY: the text lives until the call has returned.
        Ok(unsafe { calls(self.ordinal, name.as_ptr()) })
    }

    /// Calls of all driver functions by this thread. The device's own thread waits and frees in the background, as often as
    /// the machine has time for it.
    pub(crate) fn own_calls(&self) -> Result<u64> {
        // SAFETY: the stand-in's function of this name has this type.
        let calls: Symbol<unsafe extern "C" fn(*mut u8, usize) -> usize> =
            unsafe { library()?.get("fake_cuda_thread_calls") }?;
        let mut text = vec![0; 1 << 14];
        // SAFETY: the buffer has as many bytes as the call is told.
        let length = unsafe { calls(text.as_mut_ptr(), text.len()) };
        // One function a line, with the number of its calls.
        let text = text.get(..length).ok_or("too many functions")?;
        let lines = std::str::from_utf8(text)?.lines();
        let counts = lines.filter_map(|line| line.split(' ').next_back());
        counts.map(|n| Ok(n.parse::<u64>()?)).sum()
    }

    /// Calls of all driver functions by all threads.
    pub(crate) fn calls(&self) -> Result<u64> {
        self.calls_of("*")
    }
}
