//! Sizes stored in device memory: the bytes of text and binary values, which only the last offset tells, and
//! those of a view array's data buffers. They stay unknown until something needs them; then all that an array
//! lacks are read together.

use std::sync::Arc;

use crate::data::array::DeviceArray;
use crate::data::gather::{Request, gather, int};
use crate::data::layout::BufferKind;
use crate::data::node::{Node, View};
use crate::device::{AddressClass, Device, DeviceId, DevicePtr, Queue};
use crate::error::{Error, Result};
use crate::memory::check_queue;

impl DeviceArray {
    /// Reads the sizes of this array's buffers, and of its descendants', that are stored in device memory and not
    /// known yet. They are copied to the host together, on the device's default queue, with one host wait, and
    /// kept: [`buffer`](Self::buffer) returns such buffers afterwards. Where the host can read them, nothing is
    /// copied.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] with the buffer's path if a size is impossible, and the errors that the
    /// device reports.
    pub fn resolve_sizes(&self) -> Result<()> {
        self.read_unknown_sizes(None)
    }

    /// As [`resolve_sizes`](Self::resolve_sizes), on a queue of the array's device.
    ///
    /// # Errors
    /// As [`resolve_sizes`](Self::resolve_sizes). Also returns [`Error::InvalidArgument`] if the queue belongs to
    /// another device.
    pub fn resolve_sizes_on(&self, queue: &Queue) -> Result<()> {
        check_queue(queue, self.device())?;
        self.read_unknown_sizes(Some(queue))
    }

    fn read_unknown_sizes(&self, queue: Option<&Queue>) -> Result<()> {
        let unknown = unknown_sizes(self);
        if unknown.is_empty() {
            return Ok(());
        }
        let requests: Vec<_> = unknown.iter().map(|sizes| sizes.request).collect();
        // SAFETY: the requests of `Sizes::of` lie in the array's memory; nobody writes to an array's memory (contract
        // of the import).
        let answers = unsafe { gather(self, &requests, queue) }?;
        let mut unknown = unknown.iter().enumerate();
        unknown.try_for_each(|(i, sizes)| sizes.set(self, answers.bytes(i)))
    }

    /// Returns the size in bytes of the data buffer of a binary or text array. If it is not known yet, it is read on
    /// `queue` with one host wait, and kept.
    pub(super) fn read_bytes_on(&self, queue: &Queue) -> Result<usize> {
        let node = self.node();
        if let Some(sizes) = Sizes::of(self.device(), node) {
            // SAFETY: the request of `Sizes::of` lies in the array's memory; nobody writes to an array's memory: imports
            // and constructors demand it.
            let answers = unsafe { gather(self, &[sizes.request], Some(queue)) }?;
            sizes.set(self, answers.bytes(0))?;
        }
        Ok(node.buffers[2].bytes().unwrap_or(0))
    }
}

/// Finds out the unknown sizes of the own buffers of a node of `array`.
///
/// # Safety
/// The host can read the array's memory, and it is ready.
pub(crate) unsafe fn read_sizes(array: &DeviceArray, node: &Arc<Node>) -> Result<()> {
    let Some(sizes) = Sizes::of(array.device(), node) else {
        return Ok(());
    };
    let Request { address, bytes, .. } = sizes.request;
    // SAFETY: the caller guarantees that the host can read the memory and that it is ready; the request lies in it
    // (`Sizes::of`).
    let stored = unsafe { std::slice::from_raw_parts(address.as_ptr().cast(), bytes) };
    sizes.set(array, stored)
}

/// Returns `bytes`, a size in bytes of the buffer at `address`, unless it is negative or more than the device
/// has there.
pub(crate) fn check_size(
    device: &Device,
    address: DevicePtr,
    bytes: i64,
    path: impl Fn() -> String,
) -> Result<usize> {
    let refuse = |what: String| Err(Error::invalid(path(), what));
    // The end must lie inside the address space too.
    let end = |n: usize| isize::try_from(address.address().saturating_add(n));
    let size = usize::try_from(bytes).ok();
    let Some(size) = size.filter(|n| isize::try_from(*n).is_ok() && end(*n).is_ok()) else {
        return refuse(format!("has a length of {bytes} bytes"));
    };
    if size == 0 {
        return Ok(0);
    }
    if address.is_null() {
        return refuse(format!("is null but {size} bytes long"));
    }
    let backend = device.backend();
    let class = match device.id() {
        DeviceId::CPU => AddressClass::HostAccessible,
        _ => backend.classify(address, size),
    };
    if matches!(class, AddressClass::Host | AddressClass::Inaccessible) {
        let why = backend.explain(address, size);
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        return refuse(format!(
            "claims {size} bytes at {address:?}, which {device} does not have{why}"
        ));
    }
    Ok(size)
}

/// Where the sizes of a node's buffers from number 2 on are stored.
#[derive(Debug)]
pub(crate) struct Sizes {
    pub(crate) request: Request,
    node: Arc<Node>,
    /// Bytes of each integer.
    width: usize,
}

impl Sizes {
    /// Returns `None` if the node has no unknown sizes. The request lies in the node's memory: the import checked
    /// that there are `offset + length + 1` offsets, and one size for each data buffer.
    pub(crate) fn of(device: &Device, node: &Arc<Node>) -> Option<Self> {
        let buffers = &node.buffers[..];
        if let [_, BufferKind::Offsets { width }, BufferKind::Bytes] = *node.layout.buffers() {
            let width = usize::from(width);
            if buffers[2].bytes().is_some() {
                return None;
            }
            if buffers[1].is_null() || node.length == 0 {
                buffers[2].set_bytes(0);
                return None;
            }
            let last = (node.offset + node.length) * width;
            let request = Request {
                address: buffers[1].address().offset(last),
                bytes: width,
                on_host: false,
            };
            return Some(Self {
                request,
                node: node.clone(),
                width,
            });
        }
        let [_, _, data @ .., sizes] = buffers else {
            return None;
        };
        if !node.layout.variadic || data.iter().all(|data| data.bytes().is_some()) {
            return None;
        }
        let (address, bytes) = (sizes.address(), data.len() * 8);
        let class = device.backend().classify(address, bytes);
        let request = Request {
            address,
            bytes,
            on_host: class == AddressClass::Host,
        };
        Some(Self {
            request,
            node: node.clone(),
            width: 8,
        })
    }

    /// Keeps the sizes, from the bytes that were asked for. The node is one of `array`.
    pub(crate) fn set(&self, array: &DeviceArray, stored: &[u8]) -> Result<()> {
        let buffers = self.node.buffers[2..].iter();
        for (k, (buffer, bytes)) in buffers.zip(stored.chunks(self.width)).enumerate() {
            let at = || array.node().buffer_path(&self.node, 2 + k);
            let bytes = int(bytes, self.width);
            let bytes = check_size(array.device(), buffer.address(), bytes, at)?;
            buffer.set_bytes(bytes);
        }
        Ok(())
    }
}

/// Lists all unknown sizes of an array and its descendants.
pub(crate) fn unknown_sizes(array: &DeviceArray) -> Vec<Sizes> {
    let mut unknown = Vec::new();
    let mut list = |view: View<'_>, _| unknown.extend(Sizes::of(array.device(), view.node));
    array.view().each_part(None, false, &mut list);
    unknown
}
