//! [`WgpuDevice`]: the backend.

use std::fmt;
use std::sync::Arc;

use arrow_device::device::parts::exit;
use arrow_device::device::{
    AddressClass, Backend, Capabilities, DevicePtr, EventPtr, ExportSync, PointerInfo, RawQueue,
};
use arrow_device::{Device, Error, Result};

use crate::queue::WgpuQueue;
use crate::shared::{Handle, Shared};

/// A WebGPU device: the backend of an arrow-device device.
///
/// [`WgpuConfig`](crate::WgpuConfig) opens one, and [`adopt`](crate::adopt) makes one of a program's `wgpu::Device`.
pub struct WgpuDevice {
    pub(crate) shared: Handle,
    queue: Arc<WgpuQueue>,
}

impl WgpuDevice {
    /// Returns the WebGPU device behind a device.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if it is not a device of this crate.
    pub fn of(device: &Device) -> Result<&Self> {
        let found = device.backend().downcast_ref();
        found.ok_or_else(|| {
            Error::InvalidArgument(format!("{device} is not a WebGPU device").into())
        })
    }

    pub(crate) fn new(shared: Shared) -> Self {
        let shared = Handle::new(shared);
        let queue = WgpuQueue::new(&shared);
        Self { shared, queue }
    }

    /// Returns the device in wgpu: the one that was adopted, or that was opened.
    ///
    /// `wgpu::Device::destroy` ends this device too. It must not run while another thread transfers arrays of the device: wgpu 30 then frees
    /// staging memory that is mapped, which is undefined behaviour of wgpu that this crate cannot prevent.
    pub fn device(&self) -> &wgpu::Device {
        &self.shared.gpu.device
    }

    /// Returns the queue in wgpu, for kernels. All queues of the device are this one: what is submitted to it runs after all that this
    /// crate was given before, and before all that it is given later. What `wgpu::Queue::write_buffer` writes counts from
    /// the next submission on, of the program or of this crate, or from the next event or download of this crate, if that is earlier.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.shared.gpu.queue
    }

    /// Returns what wgpu reports about the adapter.
    pub fn info(&self) -> wgpu::AdapterInfo {
        self.shared.gpu.info.clone()
    }

    /// Runs the callbacks of work that has ended, the program's included. Never blocks. With
    /// [`Polling::Program`](crate::Polling::Program) the program calls this in each frame, or polls its `wgpu::Device`.
    ///
    /// # Errors
    /// Returns the failure of the device, which every later call returns too.
    pub fn poll(&self) -> Result<()> {
        self.shared.gpu.check_process()?;
        let polled = self
            .shared
            .gpu
            .check()
            .and_then(|()| self.shared.gpu.poll());
        let alive = polled.and_then(|_| self.shared.gpu.check_alive());
        self.shared.timeline.push();
        alive
    }

    /// Holds back what is given to the device from now on, as if it were running; or no more. For tests: no driver in software lets
    /// work wait.
    #[doc(hidden)]
    pub fn hold(&self, is_held: bool) {
        self.shared.timeline.hold(is_held);
    }

    /// Returns how many allocations and events are in use, for tests of leaks.
    #[doc(hidden)]
    pub fn in_use(&self) -> (usize, usize) {
        (self.shared.memory.used(), self.shared.timeline.used())
    }
}

// SAFETY:
// - the host cannot read the memory, whose addresses nothing can be read at;
// - `classify` vouches only for live allocations of this device, for their whole length; `Host` is what no WebGPU device has memory at:
//   addresses of the host, or of nothing;
// - an event completes once wgpu has called back for all work before it and its downloads were copied to the host, and only while the
//   device is not lost;
// - `copy` has written what it uploads to staging buffers when it returns;
// - `settle` waits until wgpu reports that all work has ended, and takes back the downloads that have not landed.
unsafe impl Backend for WgpuDevice {
    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.shared.gpu.id);
        // Whoever can reach the memory uses the one queue.
        this.exports = ExportSync::QueueOrder;
        // `Batch::upload` writes to staging buffers.
        this.copies_read_host_at_once = true;
        this
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        self.shared.gpu.check()?;
        Ok(WgpuQueue::new(&self.shared))
    }

    unsafe fn check_event(&self, event: EventPtr) -> Result<()> {
        self.shared.timeline.check(event)
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        self.shared.timeline.query(event)
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        self.shared.timeline.wait(event)
    }

    unsafe fn release_event(&self, event: EventPtr) {
        if !self.shared.gpu.is_forked() {
            self.shared.timeline.release(event);
        }
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        let own = match self.shared.gpu.is_forked() {
            true => None,
            false => self.shared.memory.classify(address, bytes),
        };
        // All memory of WebGPU devices has addresses that this crate reserved, where there is nothing to read. So what else an array
        // points to, such as the lengths of the buffers of views, is memory of the host.
        own.unwrap_or_else(|| PointerInfo::new(AddressClass::Host, address.range(bytes)))
            .with_reason(
                "WebGPU has no addresses: those of its arrays stand for buffers of the `wgpu::Device` that they were allocated on; import \
                 with the device that this crate made of it",
            )
    }

    /// The call reads all of it, at the speed of a memcpy.
    fn copies_directly_from(&self, address: DevicePtr, _: usize) -> bool {
        !address.is_null()
    }

    fn trim(&self) {
        if self.shared.gpu.is_forked() {
            return;
        }
        if let Some(_inside) = exit::enter() {
            self.shared.memory.trim();
            self.shared.staging.trim();
        }
    }

    fn synchronize(&self) -> Result<()> {
        self.shared.timeline.synchronize()
    }

    fn settle(&self) -> Result<()> {
        self.shared.timeline.settle()
    }
}

impl fmt::Debug for WgpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = &self.shared.gpu.info;
        write!(
            f,
            "WebGPU({}: {} by {:?})",
            self.shared.gpu.id, info.name, info.backend
        )
    }
}
