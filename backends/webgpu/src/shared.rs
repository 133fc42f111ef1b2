//! [`Shared`]: what a device and its queues share.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use arrow_device::Result;
use arrow_device::device::DeviceId;
use arrow_device::device::parts::{Worker, exit};
use wgpu::BufferUsages;

use crate::bytes::Bytes;
use crate::event::{Polling, Timeline};
use crate::memory::Memory;
use crate::staging::Staging;
use crate::sys::Gpu;

/// What a device and its queues share.
pub(crate) struct Shared {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) memory: Memory,
    pub(crate) staging: Staging,
    pub(crate) timeline: Arc<Timeline>,
    bytes: OnceLock<Bytes>,
}

impl Shared {
    pub(crate) fn new(
        id: DeviceId,
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        usages: BufferUsages,
        idle_bytes: usize,
        polling: Polling,
    ) -> Result<Self> {
        let gpu = Arc::new(Gpu::new(id, device, queue)?);
        Ok(Self {
            memory: Memory::new(&gpu, usages, idle_bytes)?,
            staging: Staging::new(&gpu, idle_bytes),
            timeline: Timeline::new(gpu.clone(), polling),
            bytes: OnceLock::new(),
            gpu,
        })
    }

    /// Returns the compute shader for bytes that are not whole words, which is made at its first use.
    pub(crate) fn bytes(&self) -> Result<&Bytes> {
        match self.bytes.get() {
            Some(bytes) => Ok(bytes),
            None => {
                let made = Bytes::new(&self.gpu)?;
                Ok(self.bytes.get_or_init(|| made))
            }
        }
    }
}

/// A reference to what a device and its queues share. In a child of the process that opened the device it is never the last one,
/// because nothing of wgpu may be dropped there, nor while the process ends.
#[derive(Clone)]
pub(crate) struct Handle(ManuallyDrop<Arc<Shared>>);

impl Handle {
    pub(crate) fn new(shared: Shared) -> Self {
        Self(ManuallyDrop::new(Arc::new(shared)))
    }
}

impl Deref for Handle {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.gpu.is_forked() {
            return;
        }
        if let Some(_inside) = exit::enter() {
            // SAFETY: it is not used after this drop, the only one (the obligation of `ManuallyDrop::drop`).
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.timeline.end();
        // wgpu waits for the work where the last handle of a queue is dropped, and frees memory of a device that is kept once it is
        // polled after the work.
        if !self.gpu.poll().unwrap_or(true) {
            let gpu = self.gpu.clone();
            Worker::new("arrow-device wgpu end").push(move || drop(gpu.wait(None)));
        }
    }
}
