//! Where the memory of columns is in terms of wgpu: what shaders are given, and buffers in and out without a copy.

use std::mem::{ManuallyDrop, size_of};
use std::sync::Mutex;

use arrow_device::device::DevicePtr;
use arrow_device::device::parts::exit;
use arrow_device::{Device, DeviceBuffer, DeviceBufferMut, Error, Loan, Result};
use wgpu::{BindingResource, BufferBinding, BufferSize, BufferUsages};

use crate::device::WgpuDevice;
use crate::shared::Handle;

/// What is bound in the place of no bytes: at least one element of any type that a shader is likely to have there.
const NOTHING: u64 = 256;

/// Bytes of a `wgpu::Buffer`. See [`WgpuDevice::resolve`].
#[derive(Clone, Debug)]
pub struct Place {
    /// The buffer.
    pub buffer: wgpu::Buffer,
    /// Bytes before the first one.
    pub offset: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// Memory as a shader's binding. See [`WgpuDevice::bind`].
///
/// A binding begins where the device allows one, which may be before the memory: the shader skips [`skip`](Self::skip) bytes. It
/// ends with the memory, rounded up to a whole word (4 bytes), so `arrayLength` may count elements that are not of the memory, at both
/// ends: pass the number of rows to the shader.
#[derive(Clone, Debug)]
pub struct Binding {
    place: Place,
    /// Multiple of the device's alignment.
    start: u64,
    size: BufferSize,
    skip: u32,
    bit: u32,
}

impl Binding {
    /// Returns the binding as an entry of a bind group takes it.
    pub fn resource(&self) -> BindingResource<'_> {
        BindingResource::Buffer(self.binding())
    }

    /// Returns the binding as [`resource`](Self::resource) does, with its buffer, offset and size.
    pub fn binding(&self) -> BufferBinding<'_> {
        BufferBinding {
            buffer: &self.place.buffer,
            offset: self.start,
            size: Some(self.size),
        }
    }

    /// Returns where the memory is: the bytes themselves, without what the binding has before and after.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Returns how many bytes of the binding come before the memory.
    pub fn skip(&self) -> u32 {
        self.skip
    }

    /// Returns how many elements of type `T` come before the first one, for a shader that binds an array of such elements. Of
    /// columns, whose values are aligned, this is exact.
    pub fn first<T>(&self) -> u32 {
        self.skip / u32::try_from(size_of::<T>()).unwrap_or(u32::MAX).max(1)
    }

    /// Returns the first row's bit, counted from the beginning of the binding, if this is a bitmap.
    pub fn first_bit(&self) -> u32 {
        8 * self.skip + self.bit
    }
}

/// Memory that [`WgpuDevice::bind`] makes a binding of: the loans of columns and buffers, and fresh memory.
pub trait Bindable: sealed::Memory {}

impl<T: 'static> Bindable for Loan<'_, T> {}
impl Bindable for DeviceBufferMut {}

mod sealed {
    use std::any::TypeId;

    use super::{DeviceBufferMut, DevicePtr, Loan, size_of};

    pub trait Memory {
        fn address(&self) -> DevicePtr;
        fn bytes(&self) -> usize;
        /// Bits of the first byte that are not of the memory: below 8.
        fn bit(&self) -> u32 {
            0
        }
    }

    /// Of a bitmap from the first row's byte on, so that the offset of a slice neither makes the binding large nor overflows a shader's
    /// numbers.
    impl<T: 'static> Memory for Loan<'_, T> {
        fn address(&self) -> DevicePtr {
            self.address().offset(self.bit_offset() / 8)
        }
        fn bytes(&self) -> usize {
            match self.is_empty() {
                true => 0,
                false if TypeId::of::<T>() == TypeId::of::<bool>() => {
                    (self.bit_offset() % 8 + self.len()).div_ceil(8)
                }
                false => self.len() * size_of::<T>(),
            }
        }
        fn bit(&self) -> u32 {
            (self.bit_offset() % 8) as u32
        }
    }

    impl Memory for DeviceBufferMut {
        fn address(&self) -> DevicePtr {
            self.address()
        }
        fn bytes(&self) -> usize {
            self.len()
        }
    }
}

impl WgpuDevice {
    /// Returns the memory of a loan, or fresh memory, as a binding for a storage buffer of a shader. Copies nothing and waits for
    /// nothing.
    ///
    /// A slice is bound from its own first row on. A bitmap begins within a byte, so its first row is at
    /// [`first_bit`](Binding::first_bit). WebGPU has no bindings of 0 bytes: in place of memory without any, as of a column without
    /// rows, the call returns a new buffer of 256 zero bytes.
    ///
    /// ```
    /// use arrow_device::{DeviceArray, DeviceBufferMut, Queue, Result};
    /// use arrow_device_wgpu::{WgpuDevice, wgpu};
    /// use arrow_schema::DataType;
    ///
    /// /// Twice the values of a column, null where it is null.
    /// fn double(shader: &wgpu::ComputePipeline, column: &DeviceArray, queue: &Queue) -> Result<DeviceArray> {
    ///     let gpu = WgpuDevice::of(queue.device())?;
    ///     let doubled = DeviceBufferMut::for_values::<f32>(queue, column.len())?;
    ///     let input = column.values_on::<f32>(queue)?;
    ///     // SAFETY: the shader reads `input` and writes `doubled`, and is submitted while both are there.
    ///     let (from, to) = unsafe { (gpu.bind(&input)?, gpu.bind(&doubled)?) };
    ///     let group = gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
    ///         label: None,
    ///         layout: &shader.get_bind_group_layout(0),
    ///         entries: &[
    ///             wgpu::BindGroupEntry { binding: 0, resource: from.resource() },
    ///             wgpu::BindGroupEntry { binding: 1, resource: to.resource() },
    ///         ],
    ///     });
    ///     let numbers = [from.first::<f32>(), to.first::<f32>(), column.len() as u32];
    ///     # let _ = numbers;
    ///     // ... for the shader, as a uniform or as immediates
    ///     let mut encoder = gpu.device().create_command_encoder(&Default::default());
    ///     let mut pass = encoder.begin_compute_pass(&Default::default());
    ///     pass.set_pipeline(shader);
    ///     pass.set_bind_group(0, &group, &[]);
    ///     pass.dispatch_workgroups(column.len().div_ceil(64) as u32, 1, 1);
    ///     drop(pass);
    ///     gpu.queue().submit([encoder.finish()]);
    ///     drop(input);
    ///     column.with_values(DataType::Float32, doubled.freeze()?)
    /// }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the memory is not of this device, and [`Error::NotSupported`] if one binding cannot
    /// have it: more than the device's `max_storage_buffer_binding_size`, or in several `wgpu::Buffer`s
    /// ([`resolve_parts`](Self::resolve_parts) helps with both), or in a wrapped buffer without the usage `STORAGE`.
    ///
    /// # Safety
    /// All calls of wgpu are safe, so nothing else keeps a shader from changing a column that safe code relies on. The caller
    /// guarantees for the binding, and for the buffer that it names:
    /// - work with it reads the memory of loans, and writes only that of a [`DeviceBufferMut`]; nothing outside of it is written, and
    ///   what is read outside of it is not relied on;
    /// - this work is submitted to [`queue`](Self::queue) before the loan is dropped, or before the `DeviceBufferMut` is frozen, shrunk
    ///   or dropped; from then on the buffer is neither used, nor destroyed, nor mapped. Handles of it may be dropped at any time.
    pub unsafe fn bind(&self, memory: &impl Bindable) -> Result<Binding> {
        let mut binding = match memory.bytes() {
            0 => {
                self.shared.gpu.check()?;
                let usages = BufferUsages::STORAGE | BufferUsages::COPY_SRC;
                let (gpu, bytes) = (&self.shared.gpu, NOTHING as usize);
                let place = Place {
                    buffer: gpu.create_buffer("bind", bytes, usages, false)?,
                    offset: 0,
                    bytes: NOTHING,
                };
                self.binding(place)?
            }
            // SAFETY: the caller guarantees what is done with the buffer (see `# Safety`).
            bytes => self.binding(unsafe { self.resolve(memory.address(), bytes) }?)?,
        };
        binding.bit = memory.bit();
        Ok(binding)
    }

    /// Returns a binding for bytes of a buffer, for example a part of a long column: from the last offset at which the
    /// device allows a binding.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn binding(&self, place: Place) -> Result<Binding> {
        let gpu = &self.shared.gpu;
        let refused = |reason: String| Err(gpu.not_supported("bind", reason));
        let Place {
            buffer,
            offset,
            bytes,
        } = &place;
        if !buffer.usage().contains(BufferUsages::STORAGE) {
            return refused("the buffer was created without the usage STORAGE".into());
        }
        let skip = *offset % u64::from(gpu.limits.min_storage_buffer_offset_alignment.max(4));
        let start = offset - skip;
        let end = offset.saturating_add(*bytes).checked_next_multiple_of(4);
        let end = end.filter(|end| *end <= buffer.size());
        let size = end.and_then(|end| BufferSize::new(end.saturating_sub(start)));
        let Some(size) = size.filter(|_| *bytes > 0) else {
            return refused(format!(
                "{bytes} bytes at {offset} of a buffer of {}",
                buffer.size()
            ));
        };
        let most = gpu.limits.max_storage_buffer_binding_size;
        if size.get() > most {
            return refused(format!(
                "{size} bytes in one binding; the device binds {most} at most (max_storage_buffer_binding_size): bind them in parts \
                 (resolve_parts), or upload smaller batches"
            ));
        }
        let skip = skip as u32; // less than an alignment, which is one
        Ok(Binding {
            start,
            size,
            skip,
            bit: 0,
            place,
        })
    }

    /// Returns the buffer behind an address, with the offset of the address in it.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the bytes are not of one live allocation of the device, or are none, and
    /// [`Error::NotSupported`] if they are in several buffers: use [`resolve_parts`](Self::resolve_parts).
    ///
    /// # Safety
    /// As [`bind`](Self::bind). The address is one that a loan or a [`DeviceBufferMut`] returned, which is still there.
    pub unsafe fn resolve(&self, address: DevicePtr, bytes: usize) -> Result<Place> {
        let place = self.first_part(address, bytes)?;
        if place.bytes < bytes as u64 {
            let reason = format!(
                "{bytes} bytes of memory that is in several wgpu::Buffers, since the device makes none larger than {} bytes: use \
                 resolve_parts",
                self.shared.gpu.limits.max_buffer_size
            );
            return Err(self.shared.gpu.not_supported("resolve", reason));
        }
        Ok(place)
    }

    /// As [`resolve`](Self::resolve), in parts of at most `most` bytes, in their order: for memory that is in several buffers, or larger
    /// than a binding may be. Of 0 bytes there are no parts.
    ///
    /// If `most` is at most the device's `max_storage_buffer_binding_size` less its `min_storage_buffer_offset_alignment`, each part can
    /// be bound ([`binding`](Self::binding)). Buffers of an allocation meet at multiples of 256 bytes from its beginning, so with a
    /// `most` that is a multiple of an element's size, a power of two, no part ends within an element.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] as [`resolve`](Self::resolve), or if `most` is 0.
    ///
    /// # Safety
    /// As [`resolve`](Self::resolve).
    pub unsafe fn resolve_parts(
        &self,
        address: DevicePtr,
        bytes: usize,
        most: u64,
    ) -> Result<Vec<Place>> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        if most == 0 {
            return Err(Error::InvalidArgument(
                "resolve_parts: parts of 0 bytes".into(),
            ));
        }
        let (mut parts, mut done) = (Vec::new(), 0);
        while done < bytes {
            let mut part = self.first_part(address.offset(done), bytes - done)?;
            part.bytes = part.bytes.min(most as u64);
            done += part.bytes as usize; // at most `bytes`
            parts.push(part);
        }
        Ok(parts)
    }

    /// Returns the part of memory that is in its first buffer.
    fn first_part(&self, address: DevicePtr, bytes: usize) -> Result<Place> {
        let gpu = &self.shared.gpu;
        gpu.check()?;
        let memory = &self.shared.memory;
        let allocation = memory.allocation(address);
        let lies = allocation.is_some_and(|found| bytes <= found.bytes - found.offset);
        match memory.find(address) {
            Some(found) if bytes > 0 && lies => Ok(Place {
                buffer: found.buffer,
                offset: found.offset,
                bytes: found.left.min(bytes as u64),
            }),
            _ => Err(Error::InvalidArgument(
                format!("{bytes} bytes at {address:?} are not memory of {}", gpu.id).into(),
            )),
        }
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
    /// Returns [`Error::InvalidArgument`] if the device is not one of this crate, [`Error::NotSupported`] if the buffer has no bytes, a
    /// size that is not a multiple of 4, not the usage `COPY_SRC`, or is of another device as far as wgpu can tell, and [`Error::OutOfMemory`] if there are no
    /// addresses for it. `keep` is dropped then.
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
        let (gpu, memory) = (&this.shared.gpu, &this.shared.memory);
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
        let bytes = usize::try_from(size).map_err(|_| gpu.out_of_memory("wrap", usize::MAX))?;
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
        let base = memory.insert(gpu, buffer)?;
        let owner = Wrapped {
            shared: this.shared.clone(),
            base,
            keep: ManuallyDrop::new(Mutex::new(keep)),
        };
        // SAFETY: the table keeps the buffer, and so the memory at its addresses, until the owner is dropped. The caller guarantees
        // that nobody changes it (see `# Safety`). What was submitted before comes before all work of the device's one queue, and
        // the host reads by such work only.
        Ok(unsafe { DeviceBuffer::from_raw(device, base, bytes, Box::new(owner), None) })
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
        let gpu = &self.shared.gpu;
        let memory = match gpu.check_alive() {
            Err(e) => return Err((buffer, e)),
            Ok(()) => self.shared.memory.allocation(buffer.address()),
        };
        let error = match memory.as_ref().map(|found| found.value.buffers()) {
            None => Error::InvalidArgument(format!("take: {buffer:?} is not memory of {}", gpu.id).into()),
            Some([taken]) => {
                let (taken, queue) = (taken.clone(), buffer.device().default_queue());
                let bytes = buffer.len() as u64;
                let (base, _) = buffer.into_raw(&queue)?;
                // Addresses stand for it no more, and nothing reuses it.
                drop(self.shared.memory.remove(base));
                return Ok((taken, bytes));
            }
            Some(several) => gpu.not_supported(
                "take",
                format!(
                    "the memory is in {} wgpu::Buffers, since the device makes none larger than {} bytes; use resolve_parts",
                    several.len(),
                    gpu.limits.max_buffer_size
                ),
            ),
        };
        Err((buffer, error))
    }
}

/// Keeps a program's buffer.
struct Wrapped<K> {
    shared: Handle,
    base: DevicePtr,
    /// The owner of a buffer is `Sync`, which a program's value need not be.
    keep: ManuallyDrop<Mutex<K>>,
}

impl<K> Drop for Wrapped<K> {
    fn drop(&mut self) {
        // In a forked child nothing of wgpu's may be dropped, nor what is of the program.
        if self.shared.gpu.is_forked() {
            return;
        }
        // Nor while the process ends.
        let Some(_inside) = exit::enter() else {
            return;
        };
        drop(self.shared.memory.remove(self.base));
        // SAFETY: the value is dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.keep) };
    }
}
