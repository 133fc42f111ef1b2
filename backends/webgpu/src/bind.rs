//! Where the memory of columns is in terms of wgpu, and what shaders are given.

use std::mem::size_of;

use arrow_device::device::DevicePtr;
use arrow_device::{DeviceBufferMut, Error, Loan, Result};
use wgpu::{BindingResource, BufferBinding, BufferSize, BufferUsages};

use crate::memory::Place;
use crate::runtime::WgpuDevice;

/// What is bound in the place of no bytes: at least one element of any type that a shader is likely to have there.
const NOTHING: u64 = 256;

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
                let _inside = self.gpu.health.enter()?;
                let usages = BufferUsages::STORAGE | BufferUsages::COPY_SRC;
                let (gpu, bytes) = (&self.gpu, NOTHING as usize);
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
        let gpu = &self.gpu;
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
                self.gpu.limits.max_buffer_size
            );
            return Err(self.gpu.not_supported("resolve", reason));
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
        let _inside = self.gpu.health.enter()?;
        match self.memories.find(address, bytes) {
            Some((memory, offset)) if bytes > 0 => {
                let mut place = memory.locate(offset);
                place.bytes = place.bytes.min(bytes as u64);
                Ok(place)
            }
            _ => Err(Error::InvalidArgument(
                format!(
                    "{bytes} bytes at {address:?} are not memory of {}",
                    self.gpu.id()
                )
                .into(),
            )),
        }
    }
}
