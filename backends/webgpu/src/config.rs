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
    /// `SHADER_F64` and `SHADER_INT64`. wgpu's environment variables, such as `WGPU_BACKEND`, choose among backends.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`] with the reason if there is no adapter, or if it makes no device.
    pub fn open(&self) -> Result<Device> {
        let id = self.id();
        PROCESS.check(id, -1)?;
        let _inside = exit::enter().ok_or_else(|| absent(id, "the process is ending"))?;
        let caught = std::panic::catch_unwind(|| request(id, self.adapter));
        let (device, queue) = caught
            .unwrap_or_else(|_| Err(absent(id, "wgpu panicked while it looked for adapters")))?;
        adopt(&device, &queue, self)
    }
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
    let instance = Instance::new(InstanceDescriptor::new_without_display_handle_from_env());
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
    let live = || -> Vec<Device> {
        lock(&ADOPTED)
            .iter()
            .filter_map(WeakDevice::upgrade)
            .collect()
    };
    let find = |live: &[Device]| {
        let is_it = |other: &&Device| {
            WgpuDevice::of(other).is_ok_and(|other| is_same(other.device(), device))
        };
        live.iter().find(is_it).cloned()
    };
    if let Some(found) = find(&live()) {
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
    if let Some(found) = find(&live) {
        drop(adopted);
        return Ok(found);
    }
    live.push(made.clone());
    *adopted = live.iter().map(Device::downgrade).collect();
    Ok(made)
}
