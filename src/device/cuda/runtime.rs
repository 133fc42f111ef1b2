//! What CUDA does differently from HIP: contexts, kinds of memory, copies.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUmemoryPool, CUpointer_attribute as Attribute};

use super::context::Cuda;
use super::{CudaDevice, CudaQueue};
use crate::device::backend::CopyOp;
use crate::device::gpu::{
    Answer, Before, Found, Library, Peer, PointerKind, RawEvent, RawStream, Runtime,
};

impl Cuda {
    /// Whether a stream belongs to a green context, as far as the driver tells.
    ///
    /// # Safety
    /// The stream is live, and not a default stream.
    unsafe fn is_green(&self, stream: RawStream) -> bool {
        let Some(call) = &self.driver.stream_contexts else {
            return false;
        };
        let (mut of, mut green) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the caller guarantees a live stream (see `# Safety`); both are valid for the
        // write of a handle.
        let code = unsafe { call(stream, &raw mut of, &raw mut green) };
        code == 0 && !green.is_null()
    }
}

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

    fn blocks_waits(&self) -> bool {
        self.blocking_waits
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
        let push = &self.driver.cuCtxPushCurrent_v2;
        // SAFETY: the context lives as long as `self`.
        push.check(unsafe { push(self.raw) })?;
        Ok(Before::default())
    }

    fn leave(&self, _: Before) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: `popped` is valid for the write of a handle. What is popped was pushed on this
        // thread by `enter`, or put in its place by cudarc.
        unsafe { (self.driver.cuCtxPopCurrent_v2)(&raw mut popped) };
    }

    unsafe fn foreign(&self, stream: RawStream) -> Answer<Option<String>> {
        const NOT_SUPPORTED: c_int = 801;
        let call = &self.driver.cuStreamGetCtx;
        let mut of = std::ptr::null_mut();
        // SAFETY: the caller guarantees a live stream (see `Runtime::foreign`); `of` is valid for
        // the write of a handle.
        let code = unsafe { call(stream, &raw mut of) };
        if code == 0 && of == self.raw {
            return Ok(None);
        }
        // For a stream of a green context the driver returns a context that stands for that one,
        // or the code for what it does not support.
        // SAFETY: the caller guarantees a live stream (see `Runtime::foreign`).
        if code == NOT_SUPPORTED || unsafe { self.is_green(stream) } {
            let why = "the stream belongs to a green context, whose work this crate cannot order; \
                       use a queue of the device, and make the stream wait for its events";
            return Ok(Some(why.into()));
        }
        call.check(code)?;
        let why = format!("the stream belongs to another context{}", super::ADVICE);
        Ok(Some(why))
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
                attributes.as_mut_ptr(),
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
            is_exact: true,
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

    unsafe fn record_all(&self, event: RawEvent) -> Option<Answer> {
        let call = self.driver.record_context.as_ref()?;
        // SAFETY: the context lives as long as `self`, and the caller guarantees a live event of it
        // (see `Runtime::record_all`).
        Some(call.check(unsafe { call(self.raw, event) }))
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
}
