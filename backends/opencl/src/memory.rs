//! Memory: of which kinds it is, and how each is allocated, copied, filled and passed to kernels.

use std::ffi::c_void;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use arrow_device::Result;
use arrow_device::device::parts::{Ranges, Reserved};
use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use opencl_sys::*;

use crate::context::Context;
use crate::object::MemObject;
use crate::sys::{Answer, Failed, Svm, Usm, call, create};

/// Which of OpenCL's memories a device allocates.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum OpenClMemory {
    /// Unified shared memory of the device (cl_intel_unified_shared_memory): device addresses, not readable by the host.
    Usm,
    /// Coarse-grained shared virtual memory (OpenCL 2.0): device addresses. The host could read them only while they are
    /// mapped, so they count as not readable by the host.
    Svm,
    /// Fine-grained shared virtual memory (optional in OpenCL 2.0): the host reads it too.
    /// Arrays that are imported to such a device must be in memory that the host can read.
    FineSvm,
    /// `cl_mem` buffers (OpenCL 1.2). Their addresses are placeholders that nothing can be read at, and are not exported:
    /// [`OpenClDevice::handle`](crate::OpenClDevice::handle) returns the `cl_mem` behind one.
    Handles,
}

/// A kind of memory, with the functions for it.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Usm(Usm),
    Svm(Svm),
    FineSvm(Svm),
    Handles,
}

/// The alignment in bytes that arrow-device asks for.
const ALIGNMENT: cl_uint = 64;

impl Kind {
    pub(crate) fn name(self) -> OpenClMemory {
        match self {
            Self::Usm(_) => OpenClMemory::Usm,
            Self::Svm(_) => OpenClMemory::Svm,
            Self::FineSvm(_) => OpenClMemory::FineSvm,
            Self::Handles => OpenClMemory::Handles,
        }
    }

    /// Allocates memory, with an address for it if it has none of its own.
    pub(crate) fn allocate(self, context: &Arc<Context>, bytes: usize) -> Result<Allocation> {
        let place = match self {
            Self::Usm(usm) => {
                // SAFETY: the context is live and the device one of its own.
                let made = unsafe {
                    create!(
                        usm,
                        clDeviceMemAllocINTEL(
                            context.raw(),
                            context.device(),
                            null(),
                            bytes,
                            ALIGNMENT
                        )
                    )
                };
                Place::Usm(usm, address(context.check_allocation(made, bytes)?))
            }
            Self::Svm(svm) | Self::FineSvm(svm) => {
                let fine = match self {
                    Self::FineSvm(_) => CL_MEM_SVM_FINE_GRAIN_BUFFER,
                    _ => 0,
                };
                // SAFETY: the context is live; its device supports this kind of memory.
                let made = unsafe {
                    (svm.clSVMAlloc)(context.raw(), CL_MEM_READ_WRITE | fine, bytes, ALIGNMENT)
                };
                let made = NonNull::new(made);
                let made = made.ok_or_else(|| context.out_of_memory("clSVMAlloc", bytes))?;
                if fine != 0 {
                    // The host may read the memory at once.
                    // SAFETY: the runtime returned this many bytes that the host may write, and nothing else uses them.
                    unsafe { made.cast::<u8>().write_bytes(0, bytes) };
                }
                Place::Svm(svm, address(made))
            }
            Self::Handles => {
                // SAFETY: the context is live.
                let made = unsafe {
                    create!(
                        context.cl,
                        clCreateBuffer(context.raw(), CL_MEM_READ_WRITE, bytes, null_mut())
                    )
                };
                let made = context.check_allocation(made, bytes)?;
                // SAFETY: the buffer was just made, and nobody else has it.
                let mem = unsafe { MemObject::own(context.cl, made) };
                Place::Handle(mem, Reserved::new(context.id, bytes)?)
            }
        };
        let allocation = Allocation {
            context: context.clone(),
            place,
            bytes,
        };
        if !allocation
            .base()
            .address()
            .is_multiple_of(ALIGNMENT as usize)
        {
            let reason = format!(
                "the runtime returned {:?}, which is not aligned to {ALIGNMENT} bytes",
                allocation.base()
            );
            return Err(context.not_supported("allocate", reason));
        }
        Ok(allocation)
    }
}

fn address(memory: NonNull<c_void>) -> DevicePtr {
    DevicePtr::new(memory.as_ptr())
}

/// Memory of the runtime, which its drop frees at once: nothing may use it any more.
pub(crate) struct Allocation {
    context: Arc<Context>,
    place: Place,
    bytes: usize,
}

enum Place {
    Usm(Usm, DevicePtr),
    Svm(Svm, DevicePtr),
    Handle(MemObject, Reserved),
}

impl Allocation {
    /// Makes an address for a buffer.
    pub(crate) fn of_handle(context: &Arc<Context>, mem: MemObject, bytes: usize) -> Result<Self> {
        Ok(Self {
            context: context.clone(),
            place: Place::Handle(mem, Reserved::new(context.id, bytes)?),
            bytes,
        })
    }

    pub(crate) fn base(&self) -> DevicePtr {
        match &self.place {
            Place::Usm(_, base) | Place::Svm(_, base) => *base,
            Place::Handle(_, reserved) => reserved.base(),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the handle, if the address stands for one.
    pub(crate) fn mem(&self) -> Option<cl_mem> {
        match &self.place {
            Place::Handle(mem, _) => Some(mem.raw()),
            _ => None,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.context.is_forked() {
            return;
        }
        match &self.place {
            Place::Usm(usm, base) => {
                // An error has no place to go.
                // SAFETY: the memory is of this context and used by nothing any more; this is its only owner.
                let _: Answer<()> =
                    unsafe { call!(usm, clMemFreeINTEL(self.context.raw(), base.as_ptr())) };
            }
            // SAFETY: the memory is of this context and used by nothing any more; this is its only owner.
            Place::Svm(svm, base) => unsafe { (svm.clSVMFree)(self.context.raw(), base.as_ptr()) },
            Place::Handle(..) => {}
        }
    }
}

/// The live allocations of a device.
pub(crate) type Allocations = Ranges<Arc<Allocation>>;

/// Returns the handle behind an address, and the offset in bytes.
pub(crate) fn handle(
    live: &Allocations,
    address: DevicePtr,
) -> Option<(Arc<Allocation>, cl_mem, usize)> {
    let found = live.find(address)?;
    let mem = found.value.mem()?;
    Some((found.value, mem, found.offset))
}

/// An address that stands for no handle.
const NO_HANDLE: Failed = Failed {
    call: "looking up the cl_mem of an address",
    code: CL_INVALID_MEM_OBJECT,
};

impl Kind {
    /// Queues a copy.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](arrow_device::device::RawQueue::copy); the queue is live.
    pub(crate) unsafe fn copy(
        self,
        context: &Context,
        live: &Allocations,
        queue: cl_command_queue,
        op: &CopyOp,
    ) -> Answer<()> {
        let (dst, src, bytes) = (op.dst.as_ptr(), op.src.as_ptr().cast_const(), op.bytes);
        let cl = context.cl;
        let handle = |address| handle(live, address).ok_or(NO_HANDLE);
        // SAFETY: the caller guarantees the queue, and memory for all bytes until the copy has completed. A live allocation keeps
        // its handle, and the runtime keeps it from then on.
        unsafe {
            match self {
                Self::Usm(usm) => call!(
                    usm,
                    clEnqueueMemcpyINTEL(queue, CL_FALSE, dst, src, bytes, 0, null(), null_mut())
                ),
                Self::Svm(svm) | Self::FineSvm(svm) => call!(
                    svm,
                    clEnqueueSVMMemcpy(queue, CL_FALSE, dst, src, bytes, 0, null(), null_mut())
                ),
                Self::Handles => match op.kind {
                    CopyKind::HostToDevice => {
                        let (_memory, mem, at) = handle(op.dst)?;
                        call!(
                            cl,
                            clEnqueueWriteBuffer(
                                queue,
                                mem,
                                CL_FALSE,
                                at,
                                bytes,
                                src,
                                0,
                                null(),
                                null_mut()
                            )
                        )
                    }
                    CopyKind::DeviceToHost => {
                        let (_memory, mem, at) = handle(op.src)?;
                        call!(
                            cl,
                            clEnqueueReadBuffer(
                                queue,
                                mem,
                                CL_FALSE,
                                at,
                                bytes,
                                dst,
                                0,
                                null(),
                                null_mut()
                            )
                        )
                    }
                    CopyKind::DeviceToDevice => {
                        let (_from, src, src_at) = handle(op.src)?;
                        let (_to, dst, dst_at) = handle(op.dst)?;
                        call!(
                            cl,
                            clEnqueueCopyBuffer(
                                queue,
                                src,
                                dst,
                                src_at,
                                dst_at,
                                bytes,
                                0,
                                null(),
                                null_mut()
                            )
                        )
                    }
                    _ => Err(Failed {
                        call: "a copy of an unknown kind",
                        code: CL_INVALID_OPERATION,
                    }),
                },
            }
        }
    }

    /// Queues setting bytes.
    ///
    /// # Safety
    /// As [`RawQueue::fill`](arrow_device::device::RawQueue::fill); the queue is live.
    pub(crate) unsafe fn fill(
        self,
        context: &Context,
        live: &Allocations,
        queue: cl_command_queue,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    ) -> Answer<()> {
        // Runtimes set a pattern at a time: the longest that the bytes are made of. The call copies it.
        let pattern = [byte; 64];
        let aligned = 1 << (dst.address() | bytes | 64).trailing_zeros();
        let (at, pattern) = (dst.as_ptr(), pattern.as_ptr().cast());
        // SAFETY: the caller guarantees the queue, and memory for all bytes until the fill has completed. The pattern is read
        // before the call returns, and its length divides the length and the address.
        unsafe {
            match self {
                Self::Usm(usm) => call!(
                    usm,
                    clEnqueueMemFillINTEL(
                        queue,
                        at,
                        pattern,
                        aligned,
                        bytes,
                        0,
                        null(),
                        null_mut()
                    )
                ),
                Self::Svm(svm) | Self::FineSvm(svm) => call!(
                    svm,
                    clEnqueueSVMMemFill(queue, at, pattern, aligned, bytes, 0, null(), null_mut())
                ),
                Self::Handles => {
                    let (_memory, mem, at) = handle(live, dst).ok_or(NO_HANDLE)?;
                    let aligned = 1 << (at | bytes | 64).trailing_zeros();
                    call!(
                        context.cl,
                        clEnqueueFillBuffer(
                            queue,
                            mem,
                            pattern,
                            aligned,
                            at,
                            bytes,
                            0,
                            null(),
                            null_mut()
                        )
                    )
                }
            }
        }
    }

    /// Makes memory an argument of a kernel. Returns the offset of the address in it.
    ///
    /// # Safety
    /// The kernel is live, and no other thread uses it during the call.
    pub(crate) unsafe fn set_kernel_arg(
        self,
        context: &Context,
        live: &Allocations,
        kernel: cl_kernel,
        index: cl_uint,
        address: DevicePtr,
    ) -> Answer<usize> {
        let pointer = address.as_ptr().cast_const();
        // SAFETY: the caller guarantees the kernel. The runtime keeps no argument's memory alive; it does not follow a pointer, and
        // reads a handle, which a live allocation keeps, before it returns.
        unsafe {
            match self {
                Self::Usm(usm) => {
                    call!(usm, clSetKernelArgMemPointerINTEL(kernel, index, pointer)).map(|()| 0)
                }
                // A kernel with a null pointer from `clSetKernelArgSVMPointer` did not start on NVIDIA's driver 580: CL_INVALID_KERNEL_ARGS.
                Self::Svm(_) | Self::FineSvm(_) if pointer.is_null() => {
                    let (size, null) = (size_of::<cl_mem>(), std::ptr::null());
                    call!(context.cl, clSetKernelArg(kernel, index, size, null)).map(|()| 0)
                }
                Self::Svm(svm) | Self::FineSvm(svm) => {
                    call!(svm, clSetKernelArgSVMPointer(kernel, index, pointer)).map(|()| 0)
                }
                Self::Handles => {
                    let found = match address.is_null() {
                        true => None,
                        false => Some(handle(live, address).ok_or(NO_HANDLE)?),
                    };
                    let (mem, at) = found
                        .as_ref()
                        .map_or((null_mut(), 0), |(_, mem, at)| (*mem, *at));
                    let value = (&raw const mem).cast();
                    call!(
                        context.cl,
                        clSetKernelArg(kernel, index, size_of::<cl_mem>(), value)
                    )
                    .map(|()| at)
                }
            }
        }
    }
}
