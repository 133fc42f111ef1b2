//! How a WebGPU device is opened or adopted.

use std::panic::catch_unwind;
use std::sync::{Arc, LazyLock, Mutex};

use arrow_device::device::engine::{Engine, Health};
use arrow_device::device::{DeviceId, WeakDevice};
use arrow_device::{ArrowDeviceType, Device, Error, Result};
use wgpu::{
    Adapter, AdapterInfo, Backends, DeviceDescriptor, Features, Instance, InstanceDescriptor,
    PowerPreference, RequestAdapterOptions,
};

use crate::order::Polling;
use crate::runtime::WgpuDevice;
use crate::sys::{is_same, lock, now};

/// How a WebGPU device is opened or adopted. `Devices::open("webgpu:0")` uses the defaults once the crate is
/// [registered](crate::register).
///
/// ```no_run
/// use arrow_device_wgpu::WgpuConfig;
/// let device = WgpuConfig::best().with_idle_limit(64 << 20).open()?;
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct WgpuConfig {
    id: Option<i64>,
    /// `None` for the best one.
    adapter: Option<usize>,
    idle_bytes: usize,
    polling: Polling,
}

impl WgpuConfig {
    /// Configures an adapter, by its number in the order of [`devices`].
    pub fn new(ordinal: usize) -> Self {
        Self {
            adapter: Some(ordinal),
            ..Self::best()
        }
    }

    /// Configures the best adapter: one with high performance first.
    pub fn best() -> Self {
        Self {
            id: None,
            adapter: None,
            idle_bytes: 256 << 20,
            polling: Polling::Wait,
        }
    }

    /// Sets the id that arrays of the device carry; by default the adapter's number, or 0 for the best one.
    /// [`Devices::add`](arrow_device::Devices::add) refuses a second device of the same id, so each that is adopted needs its own.
    #[must_use]
    pub fn with_id(mut self, id: i64) -> Self {
        self.id = Some(id);
        self
    }

    /// Sets how many bytes of freed memory are kept for reuse, 256 MiB by default: of device memory, and as many of staging memory for each
    /// direction. [`Device::trim`] frees what is kept.
    #[must_use]
    pub fn with_idle_limit(mut self, bytes: usize) -> Self {
        self.idle_bytes = bytes;
        self
    }

    /// Sets how threads wait for work of the device.
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
        let _inside = WGPU.enter()?;
        // One that was lost since is let go.
        while let Some((device, queue)) = take_unused(self.adapter) {
            if let Ok(opened) = self.keep(device, queue) {
                return Ok(opened);
            }
        }
        let (device, queue) = request(self.id(), self.adapter)?;
        self.keep(device, queue)
    }

    /// Adopts a device of this crate, and remembers it.
    fn keep(&self, device: wgpu::Device, queue: wgpu::Queue) -> Result<Device> {
        let opened = self.adopt(&device, &queue)?;
        lock(&OPENED).push((self.adapter, device, queue));
        Ok(opened)
    }

    /// Makes a device of a program's `wgpu::Device` and its queue: that of bevy, cubecl, burn or egui, for example. Both are kept as long as
    /// the device is used. A `wgpu::Device` that is adopted already is the same device again, whatever the configuration says then.
    ///
    /// Memory has the limits of the `wgpu::Device`: what is larger than its largest buffer spans several.
    ///
    /// The program must not call `wgpu::Device::destroy` while another thread transfers arrays: see [`WgpuDevice::device`].
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the queue is another device's, and an error if the device is lost.
    pub fn adopt(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Device> {
        let _inside = WGPU.enter()?;
        if let Some(found) = find(&adopted(), device) {
            return Ok(found);
        }
        let (runtime, stream) = self.runtime(device, queue)?;
        // SAFETY: the stream is the device's only one.
        let made = unsafe { Engine::open(runtime, stream, self.idle_bytes) }?;
        // Made without the lock: wgpu runs callbacks of the program meanwhile, which may adopt devices. Handles are dropped after the lock
        // is, since one of them may be the last.
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

    fn runtime(
        &self,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
    ) -> Result<(WgpuDevice, Arc<wgpu::Queue>)> {
        let runtime = WgpuDevice::new(self.id(), device, queue, self.idle_bytes, self.polling)?;
        let stream = runtime.gpu.queue.clone();
        Ok((runtime, stream))
    }

    /// What [`open`](Self::open) gives to the engine, for tests that let its calls fail.
    #[doc(hidden)]
    pub fn parts(&self) -> Result<(WgpuDevice, Arc<wgpu::Queue>, usize)> {
        let _inside = WGPU.enter()?;
        let (device, queue) = request(self.id(), self.adapter)?;
        let (runtime, stream) = self.runtime(&device, &queue)?;
        Ok((runtime, stream, self.idle_bytes))
    }
}

/// Of the process that used wgpu first: its children must not.
static WGPU: LazyLock<Health> =
    LazyLock::new(|| Health::new(DeviceId::new(ArrowDeviceType::WEBGPU, 0)));

/// The devices that this crate has made, with the number of the adapter that was asked for. They are used again, and never destroyed:
/// NVIDIA's driver locks up if a device is destroyed while a thread that has called the driver ends.
static OPENED: Mutex<Vec<(Option<usize>, wgpu::Device, wgpu::Queue)>> = Mutex::new(Vec::new());

/// The devices of this crate, by what they adopted.
static ADOPTED: Mutex<Vec<WeakDevice>> = Mutex::new(Vec::new());

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

/// The devices of this crate that are in use.
fn adopted() -> Vec<Device> {
    let adopted = lock(&ADOPTED);
    adopted.iter().filter_map(WeakDevice::upgrade).collect()
}

/// Returns that of the devices which adopted this `wgpu::Device`.
fn find(live: &[Device], device: &wgpu::Device) -> Option<Device> {
    let is_it =
        |other: &&Device| WgpuDevice::of(other).is_ok_and(|other| is_same(other.device(), device));
    live.iter().find(is_it).cloned()
}

/// Returns the error for a device that there is not.
pub(crate) fn absent(device: DeviceId, reason: impl Into<String>) -> Error {
    Error::DeviceNotAvailable {
        device,
        reason: reason.into().into(),
    }
}

const NO_ADAPTER: &str = "wgpu finds no adapter; install a driver of Vulkan, Direct3D 12 or Metal (for processors without a GPU: Mesa's lavapipe)";

/// Looks for adapters.
fn look<T>(id: DeviceId, find: impl FnOnce(Instance) -> Result<T>) -> Result<T> {
    let caught = catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut descriptor = InstanceDescriptor::new_without_display_handle_from_env();
        // OpenGL's libraries end some processes with a signal on NVIDIA's driver, and its adapters are others' in Vulkan.
        descriptor.backends = Backends::PRIMARY.with_env();
        find(Instance::new(descriptor))
    }));
    caught.unwrap_or_else(|_| Err(absent(id, "wgpu panicked while it looked for adapters")))
}

fn adapters(instance: &Instance) -> Vec<Adapter> {
    now(instance.enumerate_adapters(Backends::all())).unwrap_or_default()
}

fn request(id: DeviceId, adapter: Option<usize>) -> Result<(wgpu::Device, wgpu::Queue)> {
    look(id, |instance| {
        let adapter = match adapter {
            Some(number) => {
                let all = adapters(&instance);
                let text = match all.len() {
                    0 => NO_ADAPTER.into(),
                    count => format!("wgpu lists {count} adapters, which are numbered from 0"),
                };
                all.into_iter().nth(number).ok_or(text)
            }
            None => {
                let found = now(instance.request_adapter(&RequestAdapterOptions {
                    power_preference: PowerPreference::HighPerformance,
                    ..Default::default()
                }));
                let found = found.ok_or(NO_ADAPTER.to_string());
                found.and_then(|found| found.map_err(|e| format!("{NO_ADAPTER} ({e})")))
            }
        };
        let adapter = adapter.map_err(|text| absent(id, text))?;
        let wanted = Features::SHADER_F16 | Features::SHADER_F64 | Features::SHADER_INT64;
        let made = now(adapter.request_device(&DeviceDescriptor {
            label: Some("arrow-device"),
            required_features: adapter.features() & wanted,
            required_limits: adapter.limits(),
            ..Default::default()
        }));
        let name = || adapter.get_info().name;
        let made = made.ok_or_else(|| absent(id, format!("{} makes no device", name())))?;
        made.map_err(|e| absent(id, format!("{} makes no device: {e}", name())))
    })
}

/// Lists the adapters: by backend (Vulkan, then Metal, then Direct3D 12), and then as the driver lists them.
///
/// # Errors
/// wgpu panics, or the process was forked after wgpu was used.
pub fn devices() -> Result<Vec<AdapterInfo>> {
    let _inside = WGPU.enter()?;
    look(WGPU.id(), |instance| {
        Ok(adapters(&instance).iter().map(Adapter::get_info).collect())
    })
}
