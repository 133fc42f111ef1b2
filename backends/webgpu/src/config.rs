//! How a WebGPU device is opened or adopted.

use std::sync::{Arc, LazyLock, Mutex};

use arrow_device::device::parts::{Process, exit};
use arrow_device::device::{DeviceId, WeakDevice};
use arrow_device::{ArrowDeviceType, Device, Error, Result};
use wgpu::{
    Adapter, Backends, BufferUsages, DeviceDescriptor, Features, Instance, InstanceDescriptor,
    PowerPreference, RequestAdapterOptions,
};

use crate::device::WgpuDevice;
use crate::event::Polling;
use crate::shared::Shared;
use crate::sys::{is_same, lock, now};

/// How a WebGPU device is opened or adopted. `Devices::open("webgpu:0")` uses the defaults once the crate is
/// [registered](crate::register).
///
/// ```no_run
/// use arrow_device_wgpu::{WgpuConfig, wgpu};
/// let device = WgpuConfig::new().with_usages(wgpu::BufferUsages::VERTEX).open()?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct WgpuConfig {
    id: Option<i64>,
    adapter: Option<usize>,
    usages: BufferUsages,
    idle_bytes: usize,
    polling: Polling,
}

impl Default for WgpuConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl WgpuConfig {
    /// Configures the best adapter: one with high performance first.
    pub fn new() -> Self {
        Self {
            id: None,
            adapter: None,
            usages: BufferUsages::empty(),
            idle_bytes: 256 << 20,
            polling: Polling::Thread,
        }
    }

    /// Sets the id that arrays of the device carry; by default the adapter's number if there is one, or else 0: that of every device that is
    /// adopted. [`Devices::add`](arrow_device::Devices::add) refuses a second one of the same id, so each needs its own.
    #[must_use]
    pub fn with_id(mut self, id: i64) -> Self {
        self.id = Some(id);
        self
    }

    /// Sets which adapter [`open`](Self::open) uses, by its number in the order of [`register`](crate::register).
    #[must_use]
    pub fn with_adapter(mut self, ordinal: usize) -> Self {
        self.adapter = Some(ordinal);
        self
    }

    /// Sets for what else than `STORAGE`, `COPY_SRC` and `COPY_DST` the memory of the device may be used: for `VERTEX` or `UNIFORM`, for
    /// example.
    #[must_use]
    pub fn with_usages(mut self, usages: BufferUsages) -> Self {
        self.usages = usages;
        self
    }

    /// Sets how many bytes of freed memory are kept for reuse, 256 MiB by default: of device memory, and as many of staging memory for each
    /// direction. [`Device::trim`](arrow_device::Device::trim) frees what is kept.
    #[must_use]
    pub fn with_idle_limit(mut self, bytes: usize) -> Self {
        self.idle_bytes = bytes;
        self
    }

    /// Sets who polls the device; by default this crate does.
    #[must_use]
    pub fn with_polling(mut self, polling: Polling) -> Self {
        self.polling = polling;
        self
    }

    fn id(&self) -> DeviceId {
        let number = self.adapter.and_then(|adapter| i64::try_from(adapter).ok());
        DeviceId::new(ArrowDeviceType::WEBGPU, self.id.or(number).unwrap_or(0))
    }

    /// Opens an adapter: makes a `wgpu::Device` with the limits of the adapter and, where it has them, the features `SHADER_F16`,
    /// `SHADER_F64` and `SHADER_INT64`. Adapters of Vulkan, Metal and Direct3D 12 are looked for, or those of the backends that wgpu's
    /// environment variable `WGPU_BACKEND` names. The `wgpu::Device` is kept to the end of the process: once the device is dropped, the next
    /// call for the same adapter uses it again.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`] with the reason if there is no adapter, or if it makes no device.
    pub fn open(&self) -> Result<Device> {
        let id = self.id();
        PROCESS.check(id, -1)?;
        let _inside = exit::enter().ok_or_else(|| absent(id, "the process is ending"))?;
        // One that was lost since is let go.
        while let Some((device, queue)) = take_unused(self.adapter) {
            if let Ok(opened) = self.keep(device, queue) {
                return Ok(opened);
            }
        }
        let caught = std::panic::catch_unwind(|| request(id, self.adapter));
        let (device, queue) = caught
            .unwrap_or_else(|_| Err(absent(id, "wgpu panicked while it looked for adapters")))?;
        self.keep(device, queue)
    }

    /// Adopts a device of this crate, and remembers it.
    fn keep(&self, device: wgpu::Device, queue: wgpu::Queue) -> Result<Device> {
        let opened = adopt(&device, &queue, self)?;
        lock(&OPENED).push((self.adapter, device, queue));
        Ok(opened)
    }
}

/// The devices that this crate has made, with the number of the adapter that was asked for. They are used again, and never destroyed:
/// NVIDIA's driver locks up if a device is destroyed while a thread that has called the driver ends.
static OPENED: Mutex<Vec<(Option<usize>, wgpu::Device, wgpu::Queue)>> = Mutex::new(Vec::new());

/// Takes a device of such an adapter that nobody uses.
fn take_unused(adapter: Option<usize>) -> Option<(wgpu::Device, wgpu::Queue)> {
    let live = adopted();
    let mut opened = lock(&OPENED);
    let is_unused = |device: &wgpu::Device| find(&live, device).is_none();
    let at = opened
        .iter()
        .position(|(of, device, _)| *of == adapter && is_unused(device))?;
    let (_, device, queue) = opened.swap_remove(at);
    // One of the handles may be the last.
    drop(opened);
    Some((device, queue))
}

/// The process that used wgpu first: its children must not.
static PROCESS: LazyLock<Process> = LazyLock::new(Process::this);

/// Returns the error for a device that there is not.
pub(crate) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into().into(),
    }
}

const NO_ADAPTER: &str = "wgpu finds no adapter; install a driver of Vulkan, Direct3D 12 or Metal (for processors without a GPU: Mesa's lavapipe)";

fn request(id: DeviceId, adapter: Option<usize>) -> Result<(wgpu::Device, wgpu::Queue)> {
    let mut descriptor = InstanceDescriptor::new_without_display_handle_from_env();
    // OpenGL's libraries end some processes with a signal on NVIDIA's driver, and its adapters are others' in Vulkan.
    descriptor.backends = Backends::PRIMARY.with_env();
    let instance = Instance::new(descriptor);
    let adapter: Adapter = match adapter {
        Some(number) => {
            let adapters = now(instance.enumerate_adapters(Backends::all())).unwrap_or_default();
            let count = adapters.len();
            let found = adapters.into_iter().nth(number);
            found.ok_or_else(|| match count {
                0 => absent(id, NO_ADAPTER),
                _ => absent(
                    id,
                    format!("wgpu finds {count} adapters, which are numbered from 0"),
                ),
            })?
        }
        None => {
            let options = RequestAdapterOptions {
                power_preference: PowerPreference::HighPerformance,
                ..Default::default()
            };
            let found = now(instance.request_adapter(&options));
            match found {
                Some(Ok(adapter)) => adapter,
                Some(Err(e)) => return Err(absent(id, format!("{NO_ADAPTER} ({e})"))),
                None => return Err(absent(id, NO_ADAPTER)),
            }
        }
    };
    let wanted = Features::SHADER_F16 | Features::SHADER_F64 | Features::SHADER_INT64;
    let made = now(adapter.request_device(&DeviceDescriptor {
        label: Some("arrow-device"),
        required_features: adapter.features() & wanted,
        required_limits: adapter.limits(),
        ..Default::default()
    }));
    match made {
        Some(Ok(made)) => Ok(made),
        Some(Err(e)) => Err(absent(
            id,
            format!("{} makes no device: {e}", adapter.get_info().name),
        )),
        None => Err(absent(
            id,
            format!("{} makes no device", adapter.get_info().name),
        )),
    }
}

/// The devices of this crate, by what they adopted.
static ADOPTED: Mutex<Vec<WeakDevice>> = Mutex::new(Vec::new());

/// The devices of this crate that are in use.
fn adopted() -> Vec<Device> {
    lock(&ADOPTED)
        .iter()
        .filter_map(WeakDevice::upgrade)
        .collect()
}

/// Returns that of the devices which adopted this `wgpu::Device`.
fn find(live: &[Device], device: &wgpu::Device) -> Option<Device> {
    let is_it =
        |other: &&Device| WgpuDevice::of(other).is_ok_and(|other| is_same(other.device(), device));
    live.iter().find(is_it).cloned()
}

/// Makes a device of a program's `wgpu::Device` and its queue: that of bevy, cubecl, burn or egui, for example. Both are kept as long as
/// the device is used. A `wgpu::Device` that is adopted already is the same device again, whatever the configuration says then.
///
/// Memory has the limits of the `wgpu::Device`: what is larger than its largest buffer spans several.
///
/// The program must not call `wgpu::Device::destroy` while another thread transfers arrays: see
/// [`WgpuDevice::device`](crate::WgpuDevice::device).
///
/// # Errors
/// Returns [`Error::NotSupported`] if the queue is another device's, and an error if the device is lost.
pub fn adopt(device: &wgpu::Device, queue: &wgpu::Queue, config: &WgpuConfig) -> Result<Device> {
    PROCESS.check(config.id(), -1)?;
    if let Some(found) = find(&adopted(), device) {
        return Ok(found);
    }
    let WgpuConfig {
        usages,
        idle_bytes,
        polling,
        ..
    } = *config;
    let shared = Shared::new(config.id(), device, queue, usages, idle_bytes, polling)?;
    let made = Device::new(Arc::new(WgpuDevice::new(shared)))?;
    // Made without the lock: wgpu runs callbacks of the program meanwhile, which may adopt devices. Handles are dropped after the lock is,
    // since one of them may be the last.
    let mut live: Vec<Device>;
    let mut adopted = lock(&ADOPTED);
    live = adopted.iter().filter_map(WeakDevice::upgrade).collect();
    if let Some(found) = find(&live, device) {
        drop(adopted);
        return Ok(found);
    }
    live.push(made.clone());
    *adopted = live.iter().map(Device::downgrade).collect();
    Ok(made)
}
