//! OpenCL's handles behind devices and queues, and a program's own buffers.

use std::sync::Arc;

use arrow_device::device::DevicePtr;
use arrow_device::device::engine::Engine;
use arrow_device::{Device, DeviceBuffer, Error, Queue, Result};
use opencl_sys::*;

use crate::memory::Allocation;
use crate::platform::{Kind, OpenClDeviceInfo, OpenClMemory};
use crate::runtime::{OpenClDevice, OpenClQueue};
use crate::sys::{BUFFER, Object, call};

impl OpenClDevice {
    /// Returns the OpenCL device behind a device.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if it is not an OpenCL device of this crate.
    pub fn of(device: &Device) -> Result<&Self> {
        Engine::of(device).map(Engine::runtime)
    }

    /// Returns what OpenCL reports about the device.
    pub fn info(&self) -> &OpenClDeviceInfo {
        &self.context.info
    }

    /// Returns which memory the device allocates.
    pub fn memory(&self) -> OpenClMemory {
        self.context.kind.name()
    }

    /// Returns the context. It lives as long as this value; retain it to keep it longer.
    pub fn context(&self) -> cl_context {
        self.context.raw()
    }

    /// Returns the device's handle in OpenCL.
    pub fn device_id(&self) -> cl_device_id {
        self.context.device
    }

    /// Returns the `cl_mem` in which all of `bytes` bytes at an address lie, and the offset of the address in bytes. The buffer lives as
    /// long as the memory does; retain it to keep it longer.
    ///
    /// A sub-buffer can begin at the offset only if it is a multiple of the device's `CL_DEVICE_MEM_BASE_ADDR_ALIGN` (in bits,
    /// mostly 128 bytes), which columns of a batch, aligned to 64 bytes, need not be. Pass kernels the whole `cl_mem` and the
    /// offset instead.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device does not allocate [`OpenClMemory::Handles`], and
    /// [`Error::InvalidArgument`] if they are not in memory of the device.
    pub fn resolve(&self, address: DevicePtr, bytes: usize) -> Result<(cl_mem, usize)> {
        let context = &self.context;
        if !matches!(context.kind, Kind::Handles) {
            let reason = format!(
                "its memory ({:?}) has addresses and no cl_mem; pass the address to the kernel",
                self.memory()
            );
            return Err(context.not_supported("resolve", reason));
        }
        let _inside = context.health.enter()?;
        let id = context.health.id();
        let absent = |_| {
            Error::InvalidArgument(
                format!("{bytes} bytes at {address:?} are not in memory of {id}").into(),
            )
        };
        let (_memory, mem, offset) = self.memory.handle(address, bytes).map_err(absent)?;
        Ok((mem, offset))
    }

    /// Wraps a `cl_mem` of the program, of which it takes a reference of its own, as a buffer of a device with
    /// [`OpenClMemory::Handles`]. Copies nothing and waits for nothing. The buffer covers the whole `cl_mem`.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the device has other memory, or the `cl_mem` is of another context or not a buffer.
    ///
    /// # Safety
    /// `mem` is a live `cl_mem`. Work on it that was enqueued before is finished, or ordered before the work that uses the buffer
    /// (on the same queue, or by an event). Nobody writes to it until the buffer and what is made of it were dropped and their
    /// uses have ended.
    pub unsafe fn wrap(device: &Device, mem: cl_mem) -> Result<DeviceBuffer> {
        let context = &Self::of(device)?.context;
        let cl = context.cl;
        let refused = |reason: &str| Err(context.not_supported("wrap", reason));
        if !matches!(context.kind, Kind::Handles) {
            return refused(
                "its memory has no handles; open the device with OpenClMemory::Handles",
            );
        }
        let _inside = context.health.enter()?;
        // SAFETY: the caller guarantees the buffer (see `# Safety`); each value is asked for as what the specification says it is.
        let asked = unsafe {
            Object::retain(cl, BUFFER, mem).and_then(|mem| {
                let of: cl_context = call!(info cl.clGetMemObjectInfo(mem.raw(), CL_MEM_CONTEXT))?;
                let kind: cl_mem_object_type =
                    call!(info cl.clGetMemObjectInfo(mem.raw(), CL_MEM_TYPE))?;
                let bytes: usize = call!(info cl.clGetMemObjectInfo(mem.raw(), CL_MEM_SIZE))?;
                Ok((mem, of, kind, bytes))
            })
        };
        let (mem, of, kind, bytes) = context.check(asked)?;
        if of != context.raw() {
            return refused("the cl_mem is of another context; adopt that context");
        }
        if kind != CL_MEM_OBJECT_BUFFER {
            return refused("the cl_mem is an image or a pipe, and not a buffer");
        }
        let memory = Arc::new(Allocation::of_handle(context, mem, bytes)?);
        // SAFETY: the address stands for the whole buffer, which the memory keeps; the caller guarantees that it does not change.
        unsafe { DeviceBuffer::wrap::<Self>(device, memory, bytes) }
    }
}

impl OpenClQueue {
    /// Returns the command queue of a queue, to launch kernels on.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if the queue is another device's.
    pub fn of(queue: &Queue) -> Result<&Self> {
        Engine::<OpenClDevice>::stream(queue).map(Arc::as_ref)
    }

    /// Returns the command queue. It lives as long as this value; retain it to keep it longer.
    ///
    /// Kernels that are enqueued there run in the order of the queue, after the events that it was told to wait for. A command
    /// that is given a failed event to wait for may end the process (PoCL) or run nevertheless (Intel's runtime).
    pub fn handle(&self) -> cl_command_queue {
        self.object.raw()
    }

    /// Makes device memory the argument `index` of a kernel, by the call that belongs to the device's memory: for example
    /// `clSetKernelArgSVMPointer`. Returns how many bytes after the beginning of the argument the address lies: 0, except with
    /// [`OpenClMemory::Handles`](crate::OpenClMemory::Handles), where the argument is a whole `cl_mem` and the kernel needs that
    /// number as a further argument. (A sub-buffer could begin at multiples of the device's alignment only, mostly 128 bytes.)
    /// A null address, for a missing validity bitmap, is a null pointer in the kernel.
    ///
    /// # Errors
    /// Returns the runtime's error.
    ///
    /// # Safety
    /// - `kernel` is live and of the device's context, and no other thread uses it meanwhile.
    /// - `address` is null or in memory of this device that is alive, for the runtime, until the kernel has run: keep the loan
    ///   (or the buffer that is written) until the kernel is enqueued.
    pub unsafe fn set_kernel_arg(
        &self,
        kernel: cl_kernel,
        index: u32,
        address: DevicePtr,
    ) -> Result<usize> {
        let (memory, context) = (&self.memory, &self.memory.context);
        let _inside = context.health.enter()?;
        let (cl, pointer) = (context.cl, address.as_ptr().cast_const());
        // SAFETY: the caller guarantees the kernel. The runtime keeps no argument's memory alive; it does not follow a pointer, and
        // reads a handle, which a live allocation keeps, before it returns.
        let set = || unsafe {
            match context.kind {
                Kind::Usm(usm) => {
                    call!(code usm.clSetKernelArgMemPointerINTEL(kernel, index, pointer))?
                }
                // A kernel with a null pointer from `clSetKernelArgSVMPointer` did not start on NVIDIA's driver 580: CL_INVALID_KERNEL_ARGS.
                _ if address.is_null() => {
                    call!(code cl.clSetKernelArg(kernel, index, size_of::<cl_mem>(), std::ptr::null()))?;
                }
                Kind::Svm(svm) => call!(code svm.clSetKernelArgSVMPointer(kernel, index, pointer))?,
                Kind::Handles => {
                    let (_memory, mem, at) = memory.handle(address, 1)?;
                    let value = (&raw const mem).cast();
                    call!(code cl.clSetKernelArg(kernel, index, size_of::<cl_mem>(), value))?;
                    return Ok(at);
                }
            }
            Ok(0)
        };
        context.check(set())
    }
}
