//! The provider of the engine: [`WgpuDevice`].

use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, OnceLock};

use arrow_device::device::engine::{Health, Memories, Reserved, Runtime};
use arrow_device::device::{
    AddressClass, Capabilities, CopyOp, DeviceId, DevicePtr, EventPtr, ExportSync, PointerInfo,
};
use arrow_device::{Error, Result};

use crate::bytes::Bytes;
use crate::memory::{Allocation, chunk};
use crate::order::{Event, Order, Polling};
use crate::staging::Staging;
use crate::sys::Gpu;

/// A WebGPU device.
///
/// [`WgpuConfig`](crate::WgpuConfig) opens one, or makes one of a program's `wgpu::Device`.
pub struct WgpuDevice {
    pub(crate) memories: Memories<Arc<Allocation>>,
    /// The most bytes of a buffer.
    chunk: usize,
    pub(crate) staging: Staging,
    pub(crate) order: Order,
    bytes: OnceLock<Bytes>,
    pub(crate) gpu: Gpu,
}

impl WgpuDevice {
    pub(crate) fn new(
        id: DeviceId,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        idle_bytes: usize,
        polling: Polling,
    ) -> Result<Self> {
        let gpu = Gpu::new(id, device, queue)?;
        Ok(Self {
            memories: Memories::default(),
            chunk: chunk(&gpu)?,
            staging: Staging::new(&gpu, idle_bytes),
            order: Order::new(polling),
            bytes: OnceLock::new(),
            gpu,
        })
    }

    /// Returns the compute shader for bytes that are not whole words, which is made at its first use.
    pub(crate) fn bytes(&self) -> Result<&Bytes> {
        if let Some(bytes) = self.bytes.get() {
            return Ok(bytes);
        }
        let made = Bytes::new(&self.gpu)?;
        Ok(self.bytes.get_or_init(|| made))
    }
}

// SAFETY:
// - memory starts at a page of reserved addresses, where the host can read nothing; its buffers are its own;
// - there is one stream, the device's queue: work is submitted to it when it is given, and runs in its order;
// - an event completes once wgpu has called back for all work before it and its downloads were copied to the host, and only while the
//   device is not lost;
// - `synchronize` waits for such an event, or until wgpu reports that all work has ended, and then takes back the downloads that have not
//   landed before it says that the device is over;
// - `copy` has written what it uploads to staging buffers when it returns;
// - `classify` returns `Host` for what no WebGPU device has memory at: addresses of the host, or of nothing.
unsafe impl Runtime for WgpuDevice {
    type Stream = wgpu::Queue;
    type Event = Event;
    type Memory = Arc<Allocation>;

    /// WebGPU has no events that libraries could share.
    const EVENT_WORDS: usize = 0;

    fn health(&self) -> &Health {
        &self.gpu.health
    }

    fn memories(&self) -> &Memories<Arc<Allocation>> {
        &self.memories
    }

    fn capabilities(&self) -> Capabilities {
        let mut this = Capabilities::new(self.gpu.id());
        // Whoever can reach the memory uses the one queue.
        this.exports = ExportSync::QueueOrder;
        // `Batch::upload` writes to staging buffers.
        this.copies_read_host_at_once = true;
        this
    }

    fn new_stream(&self) -> Result<Arc<wgpu::Queue>> {
        Ok(self.gpu.queue.clone())
    }

    fn allocate(&self, bytes: usize, _: &wgpu::Queue) -> Result<Arc<Allocation>> {
        Allocation::new(&self.gpu, bytes, self.chunk).map(Arc::new)
    }

    fn base(&self, memory: &Arc<Allocation>) -> DevicePtr {
        memory.base()
    }

    fn trim(&self) {
        self.staging.trim();
        // wgpu frees buffers that were dropped after it has called back for what has ended.
        let _ = self.gpu.poll();
    }

    unsafe fn copy(&self, _: &wgpu::Queue, copies: &[CopyOp], under_way: &mut bool) -> Result<()> {
        // SAFETY: the caller guarantees the memory until the copies have completed (contract of `Runtime::copy`).
        unsafe { self.copy_all(copies, under_way) }
    }

    unsafe fn fill(&self, _: &wgpu::Queue, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        self.fill_all(dst, byte, bytes)
    }

    fn record(&self, _: &wgpu::Queue) -> Result<Event> {
        self.order.record(&self.gpu)
    }

    fn mark(&self, _: &wgpu::Queue) -> Result<Event> {
        Ok(self.order.mark())
    }

    fn pointer(&self, event: &Event) -> *mut c_void {
        std::ptr::from_ref(event).cast_mut().cast()
    }

    unsafe fn foreign_event(&self, _: EventPtr) -> Result<Event> {
        let text = format!(
            "the event is not one of {}, whose arrays carry none",
            self.gpu.id()
        );
        Err(Error::InvalidArgument(text.into()))
    }

    fn is_done(&self, event: &Event) -> Result<bool> {
        self.order.is_done(&self.gpu, event)
    }

    fn wait_host(&self, event: &Event) -> Result<()> {
        self.order.reach(&self.gpu, event)
    }

    /// Work that is queued later comes after an event of this device as it is.
    fn wait(&self, _: &wgpu::Queue, _: &Event, is_own: bool) -> Result<bool> {
        Ok(is_own)
    }

    fn synchronize(&self, _: &[Arc<wgpu::Queue>]) -> Result<()> {
        self.order.synchronize(&self.gpu)
    }

    fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
        // All memory of WebGPU devices has addresses that were reserved, where there is nothing to read. So what else an array points to,
        // such as the lengths of the buffers of views, is memory of the host.
        let class = match Reserved::covers(address, bytes) {
            true => AddressClass::Inaccessible,
            false => AddressClass::Host,
        };
        PointerInfo::new(class, address.range(bytes)).with_reason(
            "WebGPU has no addresses: those of its arrays stand for buffers of the `wgpu::Device` that they were allocated on; import \
             with the device that this crate made of it",
        )
    }

    /// The call reads all of it, at the speed of a memcpy.
    fn copies_directly_from(&self, _: DevicePtr, _: usize) -> bool {
        true
    }
}

impl fmt::Debug for WgpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = &self.gpu.info;
        write!(
            f,
            "WebGPU({}: {} by {:?})",
            self.gpu.id(),
            info.name,
            info.backend
        )
    }
}
