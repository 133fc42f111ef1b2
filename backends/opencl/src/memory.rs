//! The memory of a device: its kinds, copies and fills.

use std::ffi::c_void;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use arrow_device::Result;
use arrow_device::device::engine::{Memories, Reserved};
use arrow_device::device::{CopyKind, CopyOp, DevicePtr};
use opencl_sys::*;

use crate::context::Context;
use crate::platform::Kind;
use crate::sys::{Answer, BUFFER, Failed, Object, Usm, call};

/// The alignment in bytes that arrow-device asks for.
const ALIGNMENT: cl_uint = 64;

/// Memory of the runtime, which its drop frees at once: nothing may use it any more.
#[derive(Debug)]
pub struct Allocation {
    context: Arc<Context>,
    pub(crate) base: DevicePtr,
    /// What the addresses stand for, and what reserves them, if the memory has none of its own.
    mem: Option<(Object, Reserved)>,
}

impl Allocation {
    pub(crate) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        let (cl, raw) = (context.cl, context.raw());
        if bytes > context.info.max_allocation {
            let what = "a single allocation (the most is CL_DEVICE_MAX_MEM_ALLOC_SIZE; use smaller batches)";
            return Err(context.out_of_memory(what, bytes));
        }
        let made = match context.kind {
            // SAFETY: the context is live and the device one of its own.
            Kind::Usm(usm) => unsafe {
                call!(made usm.clDeviceMemAllocINTEL(raw, context.device, null(), bytes, ALIGNMENT))
            },
            Kind::Svm(svm) => {
                // SAFETY: the context is live; its device supports this kind of memory.
                let made = unsafe { (svm.clSVMAlloc)(raw, CL_MEM_READ_WRITE, bytes, ALIGNMENT) };
                let (call, code) = ("clSVMAlloc", CL_MEM_OBJECT_ALLOCATION_FAILURE);
                NonNull::new(made).ok_or(Failed { call, code })
            }
            Kind::Handles => {
                // SAFETY: the context is live. The buffer is nobody else's.
                let made = unsafe {
                    call!(made cl.clCreateBuffer(raw, CL_MEM_READ_WRITE, bytes, null_mut()))
                        .map(|made| Object::own(cl, BUFFER, made))
                };
                return Self::of_handle(context, context.check_allocation(made, bytes)?, bytes);
            }
        };
        Self::of_pointer(context, context.check_allocation(made, bytes)?)
    }

    /// Allocates memory of the host.
    pub(crate) fn on_host(context: &Arc<Context>, usm: Usm, bytes: usize) -> Result<Self> {
        // SAFETY: the context is live.
        let made =
            unsafe { call!(made usm.clHostMemAllocINTEL(context.raw(), null(), bytes, ALIGNMENT)) };
        Self::of_pointer(context, context.check_allocation(made, bytes)?)
    }

    fn of_pointer(context: &Arc<Context>, made: NonNull<c_void>) -> Result<Self> {
        let (context, base, mem) = (context.clone(), DevicePtr::new(made.as_ptr()), None);
        let this = Self { context, base, mem };
        if this.base.address().is_multiple_of(ALIGNMENT as usize) {
            return Ok(this);
        }
        let reason =
            format!("the runtime returned {base:?}, which is not aligned to {ALIGNMENT} bytes");
        Err(this.context.not_supported("allocate", reason))
    }

    /// Makes an address for a buffer.
    pub(crate) fn of_handle(context: &Arc<Context>, mem: Object, bytes: usize) -> Result<Self> {
        let reserved = Reserved::new(context.health.id(), bytes)?;
        let (context, base, mem) = (context.clone(), reserved.base(), Some((mem, reserved)));
        Ok(Self { context, base, mem })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let (raw, base) = (self.context.raw(), self.base.as_ptr());
        // SAFETY: the memory is of this context and used by nothing any more; this is its only owner.
        unsafe {
            match self.context.kind {
                // An error has no place to go.
                Kind::Usm(usm) => drop(call!(code usm.clMemFreeINTEL(raw, base))),
                Kind::Svm(svm) => (svm.clSVMFree)(raw, base),
                Kind::Handles => {}
            }
        }
    }
}

/// The memory of a device that is in use, and what its queues do with it.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) context: Arc<Context>,
    pub(crate) all: Memories<Arc<Allocation>>,
}

impl Memory {
    pub(crate) fn new(context: Arc<Context>) -> Self {
        let all = Memories::default();
        Self { context, all }
    }

    /// Returns the handle in which all bytes at an address lie and the offset in bytes, with what keeps the handle.
    pub(crate) fn handle(
        &self,
        address: DevicePtr,
        bytes: usize,
    ) -> Answer<(Arc<Allocation>, *mut c_void, usize)> {
        let found = self.all.find(address, bytes);
        let handle = found.and_then(|(memory, offset)| {
            let mem = memory.mem.as_ref()?.0.raw();
            Some((memory, mem, offset))
        });
        let (call, code) = ("looking up the cl_mem of an address", CL_INVALID_MEM_OBJECT);
        handle.ok_or(Failed { call, code })
    }

    /// Queues a copy.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](arrow_device::device::RawQueue::copy); the queue is live.
    pub(crate) unsafe fn copy(&self, queue: cl_command_queue, op: &CopyOp) -> Answer {
        let cl = self.context.cl;
        let (to, from, bytes) = (op.dst.as_ptr(), op.src.as_ptr().cast_const(), op.bytes);
        // SAFETY: the caller guarantees the queue, and memory for all bytes until the copy has completed. A live allocation keeps
        // its handle, and the runtime keeps it from then on.
        unsafe {
            match (self.context.kind, op.kind) {
                (Kind::Usm(usm), _) => {
                    call!(enqueue usm.clEnqueueMemcpyINTEL(queue, CL_FALSE, to, from, bytes))
                }
                (Kind::Svm(svm), _) => {
                    call!(enqueue svm.clEnqueueSVMMemcpy(queue, CL_FALSE, to, from, bytes))
                }
                (Kind::Handles, CopyKind::HostToDevice) => {
                    let (_memory, mem, at) = self.handle(op.dst, bytes)?;
                    call!(enqueue cl.clEnqueueWriteBuffer(queue, mem, CL_FALSE, at, bytes, from))
                }
                (Kind::Handles, CopyKind::DeviceToHost) => {
                    let (_memory, mem, at) = self.handle(op.src, bytes)?;
                    call!(enqueue cl.clEnqueueReadBuffer(queue, mem, CL_FALSE, at, bytes, to))
                }
                (Kind::Handles, _) => {
                    let (_from, from, from_at) = self.handle(op.src, bytes)?;
                    let (_to, to, to_at) = self.handle(op.dst, bytes)?;
                    call!(enqueue cl.clEnqueueCopyBuffer(queue, from, to, from_at, to_at, bytes))
                }
            }
        }
    }

    /// Queues setting bytes.
    ///
    /// # Safety
    /// As [`RawQueue::fill`](arrow_device::device::RawQueue::fill); the queue is live.
    pub(crate) unsafe fn fill(
        &self,
        queue: cl_command_queue,
        dst: DevicePtr,
        byte: u8,
        bytes: usize,
    ) -> Answer {
        // Runtimes set a pattern at a time: the longest that the bytes are made of. The call copies it.
        let pattern = [byte; 64];
        let length = |at: usize| 1 << (at | bytes | 64).trailing_zeros();
        let (to, pattern) = (dst.as_ptr(), pattern.as_ptr().cast());
        // SAFETY: the caller guarantees the queue, and memory for all bytes until the fill has completed. The pattern is read
        // before the call returns, and its length divides the length and the address.
        unsafe {
            match self.context.kind {
                Kind::Usm(usm) => {
                    call!(enqueue usm.clEnqueueMemFillINTEL(queue, to, pattern, length(dst.address()), bytes))
                }
                Kind::Svm(svm) => {
                    call!(enqueue svm.clEnqueueSVMMemFill(queue, to, pattern, length(dst.address()), bytes))
                }
                Kind::Handles => {
                    let (cl, (_memory, mem, at)) = (self.context.cl, self.handle(dst, bytes)?);
                    call!(enqueue cl.clEnqueueFillBuffer(queue, mem, pattern, length(at), at, bytes))
                }
            }
        }
    }
}
