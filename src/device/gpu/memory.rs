//! Memory of each kind, whose memory an address is, and lists of copies.

use std::ffi::c_uint;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::api::{Answer, Failed, RawStream, code};
use super::context::{Context, Current};
use super::vendor::{Kind, Library, PointerKind, Vendor, to_ptr};
use crate::device::backend::{
    AddressClass, CopyKind, CopyOp, DevicePtr, PointerInfo, out_of_memory,
};
use crate::error::Result;

/// From this many copies on, the library is given the list in one call. On an H200, 100 copies of 4 KiB to page-locked memory take 57 us
/// so, and 176 us one by one.
const LIST: usize = 8;
/// A copy of this many bytes goes by itself: next to its own time that of a call is nothing.
const LARGE: usize = 1 << 20;

/// Memory that the drop frees, unless that is done already. The drop may wait for the device: on an H200 `cuMemFreeHost` waits for all
/// queued work of the context; such a free may also hold a lock of the library meanwhile, so that a host function that waits for another
/// thread's call of the library never returns (reported for `cuMemFree` and `cuMemFreeHost`).
pub(crate) struct Block<V: Vendor> {
    context: Arc<Context<V>>,
    kind: Kind,
    pub(super) address: usize,
    is_freed: AtomicBool,
}

impl<V: Vendor> Block<V> {
    fn new(context: &Arc<Context<V>>, kind: Kind, address: usize) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            kind,
            address,
            is_freed: AtomicBool::new(false),
        })
    }

    /// Allocates memory: the device's own in a stream's order if there is a pool, and otherwise in no order. Host memory serves all devices.
    ///
    /// # Safety
    /// The stream is live, or stands for a default stream.
    pub(super) unsafe fn allocate(
        context: &Arc<Context<V>>,
        current: Current<'_, V>,
        kind: Kind,
        bytes: usize,
        stream: RawStream,
    ) -> Result<Arc<Self>> {
        const ATTACH_GLOBAL: c_uint = 1;
        if let (Kind::Device, Some(program)) = (kind, context.vendor.program()) {
            let base = (program.allocate)(context.health.id(), bytes)?;
            return Ok(Self::new(context, kind, base.address()));
        }
        let (calls, mut address) = (current.context.calls, 0);
        let at = &raw mut address;
        // SAFETY: `at` is valid for the write of an address; the context has the pool, and the caller guarantees the stream.
        let made = unsafe {
            match (kind, context.pool) {
                (Kind::Device, Some(pool)) => calls.allocate_in_order(at, bytes, pool, stream),
                (Kind::Device, None) => calls.allocate_device(at, bytes),
                (Kind::Host, _) => calls.allocate_host(at, bytes, V::Library::HOST_FLAGS),
                (Kind::Managed, _) => calls.allocate_managed(at, bytes, ATTACH_GLOBAL),
            }
        };
        // HIP 5.2 reports success for a pool that is full.
        let made = made.and_then(|()| match address {
            0 => calls.allocate_in_order.check(code::OUT_OF_MEMORY),
            _ => Ok(()),
        });
        match made {
            // Some drivers call a size invalid that no device has. All else about the call is in order, so nothing but the size can be.
            Err(Failed {
                call,
                code: code::OUT_OF_MEMORY | code::INVALID_VALUE,
            }) => Err(out_of_memory(context.health.id(), call, bytes)),
            made => context
                .check(made)
                .map(|()| Self::new(context, kind, address)),
        }
    }

    /// Adopts memory of the device itself.
    #[cfg(feature = "cuda")]
    pub(crate) fn adopt(context: &Arc<Context<V>>, address: usize) -> Arc<Self> {
        Self::new(context, Kind::Device, address)
    }

    /// Somebody else frees the memory, or has.
    pub(crate) fn let_go(&self) {
        self.is_freed.store(true, Ordering::Relaxed);
    }
}

impl<V: Vendor> Drop for Block<V> {
    fn drop(&mut self) {
        if *self.is_freed.get_mut() {
            return;
        }
        let ptr = to_ptr(self.address);
        if let (Kind::Device, Some(program)) = (self.kind, self.context.vendor.program()) {
            return (program.free)(ptr);
        }
        let ptr = ptr.as_ptr();
        // An error has no place to go: a failed device keeps its memory until its context is released.
        // SAFETY: the memory is of this kind and is freed once; nothing uses it any more (contract of `Runtime::Memory`).
        let _ = self.context.call(|calls| unsafe {
            match self.kind {
                Kind::Host => calls.free_host(ptr),
                Kind::Device | Kind::Managed => calls.free_device(ptr),
            }
        });
    }
}

impl<V: Vendor> Current<'_, V> {
    /// Returns what `bytes` bytes at `address` are, and the addresses of that kind: those of the allocation, or only those of the bytes, of
    /// which the first and the last one were asked about. `None` if these are not the same, or there is no such range.
    ///
    /// # Errors
    /// The library cannot tell, so nothing may be assumed.
    pub(super) fn allocation_of(
        &self,
        address: DevicePtr,
        bytes: usize,
    ) -> Answer<Option<(PointerKind, Range<usize>)>> {
        let first = address.address();
        let last = first.checked_add(bytes.saturating_sub(1));
        let Some(last) = last.filter(|_| first != 0) else {
            return Ok(None);
        };
        let (kind, range) = self.look_up(first)?;
        // A range that does not hold all bytes says nothing.
        let whole = range.filter(|range| range.contains(&first) && range.contains(&last));
        if whole.is_none() && bytes > 1 && kind != self.look_up(last)?.0 {
            return Ok(None);
        }
        Ok(Some((kind, whole.unwrap_or(address.range(bytes)))))
    }

    /// Returns the class of memory, and why it is not accepted.
    pub(super) fn judge(&self, kind: PointerKind, range: Range<usize>) -> PointerInfo {
        use AddressClass as A;
        use PointerKind as P;
        let (own, vendor, advice) = (self.context.kind, V::Library::VENDOR, V::Library::ADVICE);
        let of_class = |class| PointerInfo::new(class, range.clone());
        let unknown = "the driver does not know it: it is ordinary host memory, or none";
        let why = match kind {
            P::Unknown => return of_class(A::Host).with_reason(unknown),
            P::Managed if own == Kind::Host && !self.context.reads_managed => {
                "it is managed memory, which the host must not read while the device works".into()
            }
            P::Host { mapped: false } if own != Kind::Host => {
                let why = "the device does not reach it at this address";
                return of_class(A::Host).with_reason(why);
            }
            P::Managed | P::Host { .. } => return of_class(A::HostAccessible),
            P::Device(of, _) if own != Kind::Device => {
                format!("it is memory of {vendor} device {of}, which the host cannot read")
            }
            P::Device(of, _) if of != self.context.ordinal() => {
                format!("it is memory of {vendor} device {of}")
            }
            P::Device(..) if self.peer_of(kind) == Ok(None) => return of_class(A::Device),
            // Kernels of this context cannot reach the memory.
            P::Device(..) => format!("it is memory of another context{advice}"),
        };
        of_class(A::Inaccessible).with_reason(why)
    }

    /// Looks up the source of each copy between devices: imported arrays may mix kinds of memory, so another context of this device must
    /// be named, and so must another device, since the library does not find memory of its pools by the address.
    fn peers(&self, copies: &[CopyOp]) -> Result<Vec<Option<usize>>> {
        let context = self.context;
        // Most sources lie in one allocation.
        let mut last: Option<(PointerKind, Range<usize>)> = None;
        let peer = |copy: &CopyOp| {
            if copy.kind != CopyKind::DeviceToDevice || context.kind != Kind::Device {
                return Ok(None);
            }
            let src = copy.src.address();
            if !last.as_ref().is_some_and(|(_, range)| range.contains(&src)) {
                last = context.check(self.allocation_of(copy.src, 1))?;
            }
            match &last {
                Some((kind, _)) => context.check(self.peer_of(*kind)),
                None => Ok(None),
            }
        };
        copies.iter().map(peer).collect()
    }

    /// Queues a copy, or a list of them.
    ///
    /// # Safety
    /// As [`RawQueue::copy`](crate::device::RawQueue::copy); the stream is live, or stands for a default stream.
    pub(super) unsafe fn copy_all(
        &self,
        copies: &[CopyOp],
        stream: RawStream,
        under_way: &mut bool,
    ) -> Result<()> {
        let peers = self.peers(copies)?;
        let fits = |(copy, peer): &(&CopyOp, Option<usize>)| copy.bytes < LARGE && peer.is_none();
        let (mut small, mut alone): (Vec<_>, Vec<_>) = copies.iter().zip(peers).partition(fits);
        if small.len() >= LIST && !stream.is_default() {
            let list: Vec<&CopyOp> = small.iter().map(|(copy, _)| *copy).collect();
            // SAFETY: the caller guarantees memory and stream (see `# Safety`), which is no default stream.
            let taken = unsafe { self.copy_list(&list, stream) };
            *under_way = taken.is_some();
            if taken == Some(Ok(())) {
                small.clear();
            }
        }
        // A list that the library does not take goes one by one. To queue a copy again changes nothing.
        alone.append(&mut small);
        alone.into_iter().try_for_each(|(copy, from)| {
            // SAFETY: the caller guarantees memory and stream (see `# Safety`); `from` is what `peer_of` returned for the source.
            let queued = unsafe { self.copy(copy, from, stream) };
            self.context.check(queued)?;
            *under_way = true;
            Ok(())
        })
    }
}
