//! [`WgpuDevice`]: wgpu's objects, and buffers in and out without a copy.

use std::sync::Arc;

use arrow_device::device::engine::Engine;
use arrow_device::{Device, DeviceBuffer, Error, Result};
use wgpu::BufferUsages;

use crate::memory::Allocation;
use crate::runtime::WgpuDevice;

impl WgpuDevice {
    /// Returns the WebGPU device behind a device.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if it is not a device of this crate.
    pub fn of(device: &Device) -> Result<&Self> {
        Engine::of(device).map(Engine::runtime)
    }

    /// Returns the device in wgpu: the one that was adopted, or that was opened.
    ///
    /// `wgpu::Device::destroy` ends this device too. It must not run while another thread transfers arrays of the device: wgpu 30 then frees
    /// staging memory that is mapped, which is undefined behaviour of wgpu that this crate cannot prevent.
    pub fn device(&self) -> &wgpu::Device {
        &self.gpu.device
    }

    /// Returns the queue in wgpu, for kernels. All queues of the device are this one: what is submitted to it runs after all that this
    /// crate was given before, and before all that it is given later. What `wgpu::Queue::write_buffer` writes counts from
    /// the next submission on, of the program or of this crate, or from the next event or download of this crate, if that is earlier.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.gpu.queue
    }

    /// Returns what wgpu reports about the adapter.
    pub fn info(&self) -> wgpu::AdapterInfo {
        self.gpu.info.clone()
    }

    /// Runs the callbacks of work that has ended, the program's included. Never blocks. With
    /// [`Polling::Program`](crate::Polling::Program) the program calls this in each frame, or polls its `wgpu::Device`.
    ///
    /// # Errors
    /// Returns the failure of the device, which every later call returns too.
    pub fn poll(&self) -> Result<()> {
        let _inside = self.gpu.health.enter()?;
        self.gpu.poll()?;
        self.gpu.check_alive()
    }
    /// Makes a device buffer of a program's `wgpu::Buffer`, without a copy. `keep` is dropped once nothing uses the memory any more:
    /// no buffer, no array, no loan, and no work that was queued with them.
    ///
    /// There is one queue, so what the program has submitted before, or given to `write_buffer`, comes before all that is done with the
    /// returned buffer. Shaders can be given it if it has the usage `STORAGE`.
    ///
    /// ```
    /// use arrow_device::{Device, DeviceArray, Result};
    /// use arrow_device_wgpu::{WgpuDevice, wgpu};
    /// use arrow_schema::DataType;
    ///
    /// /// A column of a buffer that a program's shader has filled with 32-bit floats.
    /// fn column(device: &Device, buffer: wgpu::Buffer) -> Result<DeviceArray> {
    ///     let rows = (buffer.size() / 4) as usize;
    ///     // SAFETY: the buffer is of this device, and the program does not write to it any more.
    ///     let values = unsafe { WgpuDevice::wrap(device, buffer, ()) }?;
    ///     DeviceArray::from_values(DataType::Float32, rows, values, None)
    /// }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device is not one of this crate, or if the buffer has no bytes, a size that is not a multiple
    /// of 4, not the usage `COPY_SRC`, or is of another device as far as wgpu can tell, and [`Error::OutOfMemory`] if there are no addresses
    /// for it. `keep` is dropped then.
    ///
    /// # Safety
    /// The buffer was created on this device ([`WgpuDevice::device`]) and is not mapped. From this call until `keep` is dropped,
    /// nobody writes to it, maps it or destroys it; work that was submitted before may.
    pub unsafe fn wrap<K: Send + 'static>(
        device: &Device,
        buffer: wgpu::Buffer,
        keep: K,
    ) -> Result<DeviceBuffer> {
        let this = Self::of(device)?;
        let gpu = &this.gpu;
        let _inside = gpu.health.enter()?;
        gpu.check_alive()?;
        let refused = |reason: &str| Err(gpu.not_supported("wrap", reason));
        let size = buffer.size();
        if size == 0 || !size.is_multiple_of(4) {
            return refused(
                "a buffer has at least 4 bytes, and a multiple of 4; create it with a size that is rounded up",
            );
        }
        if !buffer.usage().contains(BufferUsages::COPY_SRC) {
            return refused(
                "the buffer was created without the usage COPY_SRC, which downloads need",
            );
        }
        // Never submitted: wgpu says whether the buffer is of the device.
        let word = gpu.create_buffer("wrap", 4, BufferUsages::COPY_DST, false)?;
        let tried = gpu.call("wrap", |device, _| {
            let mut encoder = device.create_command_encoder(&Default::default());
            encoder.copy_buffer_to_buffer(&buffer, 0, &word, 0, 4);
            drop(encoder.finish());
        });
        if let Err(e) = tried {
            return refused(&format!("the buffer is of no use to this device ({e})"));
        }
        let memory = Arc::new(Allocation::of(gpu, buffer, Box::new(keep))?);
        let bytes = memory.bytes();
        // SAFETY: the caller guarantees that nobody changes the memory (see `# Safety`). What was submitted before comes before all work of
        // the device's one queue, and the host reads by such work only.
        unsafe { DeviceBuffer::wrap::<Self>(device, memory, bytes) }
    }

    /// Takes the `wgpu::Buffer` of a whole allocation out of its device buffer, without a copy, together with the number of bytes that the
    /// device buffer had; what follows them is padding. The `wgpu::Buffer` is the program's from now on. Work that this crate was given
    /// before, as the kernel or the upload that filled it, comes before all that the program submits.
    ///
    /// ```
    /// use arrow_device::DeviceBufferMut;
    /// use arrow_device_wgpu::{WgpuDevice, wgpu};
    ///
    /// fn sums_for_drawing(sums: DeviceBufferMut) -> arrow_device::Result<wgpu::Buffer> {
    ///     let sums = sums.freeze()?;
    ///     let device = sums.device().clone();
    ///     let (buffer, _bytes) = WgpuDevice::of(&device)?.take(sums).map_err(|(_, e)| e)?;
    ///     Ok(buffer)
    /// }
    /// ```
    ///
    /// # Errors
    /// Returns the buffer, unchanged, with the reason. [`Error::InvalidArgument`]: it is not the only holder of its memory, as the columns of
    /// an uploaded batch are not, which share one allocation; it is not all of an allocation that the device made, as a slice or
    /// a wrapped buffer is not; or it is of another device. [`Error::NotSupported`]: it is in several `wgpu::Buffer`s.
    pub fn take(
        &self,
        buffer: DeviceBuffer,
    ) -> std::result::Result<(wgpu::Buffer, u64), (DeviceBuffer, Error)> {
        match self.try_take(&buffer) {
            Err(e) => Err((buffer, e)),
            Ok(taken) => {
                let (device, bytes) = (buffer.device().clone(), buffer.len() as u64);
                let (base, _) = buffer.into_raw(&device.default_queue())?;
                // Addresses stand for it no more, and nothing reuses it.
                // SAFETY: `into_raw` has given it up. wgpu keeps a buffer until work that was submitted with it has ended.
                drop(Engine::<Self>::of(&device).map(|engine| unsafe { engine.take(base) }));
                Ok((taken, bytes))
            }
        }
    }

    /// Returns the one buffer that has all of the memory.
    fn try_take(&self, buffer: &DeviceBuffer) -> Result<wgpu::Buffer> {
        let gpu = &self.gpu;
        let _inside = gpu.health.enter()?;
        gpu.check_alive()?;
        let found = self.memories.find(buffer.address(), buffer.len());
        match found.as_ref().map(|(memory, _)| memory.buffers()) {
            None => Err(Error::InvalidArgument(
                format!("take: {buffer:?} is not memory of {}", gpu.id()).into(),
            )),
            Some([taken]) => Ok(taken.clone()),
            Some(several) => Err(gpu.not_supported(
                "take",
                format!(
                    "the memory is in {} wgpu::Buffers, since the device makes none larger than {} bytes; use resolve_parts",
                    several.len(),
                    gpu.limits.max_buffer_size
                ),
            )),
        }
    }
}
