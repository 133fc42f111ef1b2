//! What CUDA does differently from HIP: contexts, kinds of memory, copies.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUmemoryPool, CUpointer_attribute as Attribute};

use super::context::Cuda;
use super::driver::CopyAttributes;
use super::{CudaDevice, CudaQueue};
use crate::device::backend::CopyOp;
use crate::device::gpu::{Answer, Before, Found, Library, Peer, PointerKind, RawStream, Runtime};

// SAFETY: each method is the call of the driver that its name and its documentation ask for; the
// driver aligns memory to 256 bytes and more.
unsafe impl Runtime for Cuda {
    fn library(&self) -> &dyn Library {
        self.driver
    }

    fn ordinal(&self) -> c_int {
        self.ordinal
    }

    fn reads_managed(&self) -> bool {
        self.has(super::Has::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)
    }

    fn supports_pools(&self) -> bool {
        self.has(super::Has::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)
    }

    fn owns(&self, kind: PointerKind) -> bool {
        let PointerKind::Device(ordinal, context) = kind else {
            return false;
        };
        ordinal == self.ordinal && context.is_none_or(|of| of == self.raw.addr())
    }

    fn ordinal_of(&self, other: &dyn Any) -> Option<c_int> {
        let other = other.downcast_ref::<CudaDevice>();
        other.map(|other| other.cuda.ordinal)
    }

    fn queue(&self, raw: RawStream) -> Box<dyn Any + Send + Sync> {
        Box::new(CudaQueue {
            stream: raw.0.cast(),
            given: None,
        })
    }

    fn enter(&self) -> Answer<Before> {
        let push = &self.driver.cuCtxPushCurrent;
        // SAFETY: the context lives as long as `self`.
        push.check(unsafe { push(self.raw) })?;
        Ok(Before::default())
    }

    fn leave(&self, _: Before) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is valid for the write of a handle. What is popped was pushed on this
        // thread by `enter`, or put in its place by cudarc.
        unsafe { (self.driver.cuCtxPopCurrent)(&raw mut popped) };
    }

    unsafe fn foreign(&self, stream: RawStream) -> Answer<Option<String>> {
        let call = &self.driver.cuStreamGetCtx;
        let mut of = std::ptr::null_mut();
        // SAFETY: the caller guarantees a live stream (see `Runtime::foreign`); `of` is valid for
        // the write of a handle.
        call.check(unsafe { call(stream, &raw mut of) })?;
        // For a stream of a green context the driver returns a context that stands for that one.
        let why = || format!("the stream belongs to another context{}", super::ADVICE);
        Ok((of != self.raw).then(why))
    }

    fn look_up(&self, address: usize) -> Answer<Found> {
        let mut memory_type: c_uint = 0;
        let mut managed: c_uint = 0;
        let mut ordinal: c_int = -1;
        let mut device_pointer: CUdeviceptr = 0;
        let mut of: CUcontext = std::ptr::null_mut();
        let mut start: CUdeviceptr = 0;
        let mut bytes: usize = 0;
        let mut is_legacy: c_uint = 0;
        let mut pool: CUmemoryPool = std::ptr::null_mut();
        let mut attributes = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
            Attribute::CU_POINTER_ATTRIBUTE_CONTEXT,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        ];
        let mut values: [*mut c_void; 9] = [
            (&raw mut memory_type).cast(),
            (&raw mut managed).cast(),
            (&raw mut ordinal).cast(),
            (&raw mut device_pointer).cast(),
            (&raw mut of).cast(),
            (&raw mut start).cast(),
            (&raw mut bytes).cast(),
            (&raw mut is_legacy).cast(),
            (&raw mut pool).cast(),
        ];
        let call = &self.driver.cuPointerGetAttributes;
        // SAFETY: both lists have the length that is given, and each value has its attribute's
        // type. The driver looks the address up and does not follow it.
        call.check(unsafe {
            call(
                attributes.len() as c_uint,
                attributes.as_mut_ptr().cast(),
                values.as_mut_ptr(),
                address as CUdeviceptr,
            )
        })?;
        const HOST: c_uint = 1;
        const DEVICE: c_uint = 2;
        let kind = match memory_type {
            _ if managed != 0 => PointerKind::Managed,
            HOST => PointerKind::Host {
                mapped: device_pointer == address as CUdeviceptr,
            },
            DEVICE => PointerKind::Device(ordinal, (!of.is_null()).then(|| of.expose_provenance())),
            _ => PointerKind::Unknown,
        };
        let start = start as usize;
        let end = start.checked_add(bytes).filter(|end| start < *end);
        // Device memory that is neither of a pool nor of an ordinary allocation, whose handle other
        // processes could open, is mapped by the program itself. The driver then reports all the
        // addresses that were reserved for it, of which some may be mapped to nothing.
        let is_mapped = matches!(kind, PointerKind::Device(..)) && is_legacy == 0 && pool.is_null();
        Ok(Found {
            kind,
            range: end.filter(|_| !is_mapped).map(|end| start..end),
        })
    }

    fn peer_of(&self, kind: PointerKind) -> Answer<Option<Peer>> {
        match kind {
            PointerKind::Device(_, Some(of)) => Ok((of != self.raw.addr()).then_some(Peer(of))),
            PointerKind::Device(ordinal, None) if ordinal != self.ordinal => {
                let of = self.primary_of(ordinal)?;
                Ok(Some(Peer(of.expose_provenance())))
            }
            _ => Ok(None),
        }
    }

    unsafe fn copy(&self, copy: &CopyOp, from: Option<Peer>, stream: RawStream) -> Answer {
        let (dst, src, bytes) = (copy.dst.as_ptr(), copy.src.as_ptr(), copy.bytes);
        let (plain, peer) = (&self.driver.cuMemcpyAsync, &self.driver.cuMemcpyPeerAsync);
        match from {
            // SAFETY: the caller guarantees live memory and a live or default stream (see
            // `Runtime::copy`). All memory is in one address space, in which the driver finds the
            // direction.
            None => plain.check(unsafe { plain(dst, src, bytes, stream) }),
            Some(Peer(of)) => {
                let of = std::ptr::with_exposed_provenance_mut(of);
                // SAFETY: the caller guarantees live memory, a live or default stream, and that
                // `of` is what `peer_of` returned: the context of the source, which lives as long
                // as the source (see `Runtime::copy`).
                peer.check(unsafe { peer(dst, self.raw, src, of, bytes, stream) })
            }
        }
    }
    unsafe fn copy_list(&self, copies: &[CopyOp], stream: RawStream) -> Option<Answer> {
        let call = self.driver.copy_list.as_ref()?;
        let mut dst: Vec<_> = copies.iter().map(|copy| copy.dst.as_ptr()).collect();
        let mut src: Vec<_> = copies.iter().map(|copy| copy.src.as_ptr()).collect();
        let mut sizes: Vec<_> = copies.iter().map(|copy| copy.bytes).collect();
        let (dst, src, bytes) = (dst.as_mut_ptr(), src.as_mut_ptr(), sizes.as_mut_ptr());
        // One set of attributes, from the first copy on.
        let (mut attributes, mut first) = (CopyAttributes::IN_STREAM_ORDER, 0usize);
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        // SAFETY: the three lists have a member for each copy, there is one set of attributes, and
        // all live during the call; the caller guarantees that memory and stream are live (see
        // `Runtime::copy_list`).
        let code = unsafe { call(dst, src, bytes, copies.len(), attributes, first, 1, stream) };
        Some(call.check(code))
    }
}
