//! The argument `stream` of `__dlpack__`, for exports and imports.

use crate::abi::ArrowDeviceType as T;
use crate::device::backend::not_supported;
use crate::device::{Device, Queue};
use crate::error::{Error, Result};
use crate::memory::{Owner, check_queue};

/// The stream on which a consumer will use a tensor, as Python passes it in `__dlpack__(stream=...)`. The export makes that
/// stream wait until the memory is ready.
///
/// | `stream` | CUDA | ROCm | the CPU and others |
/// | --- | --- | --- | --- |
/// | `None` | the legacy default stream; for page-locked and managed memory the host waits | the default stream | the host waits, if there is something to wait for |
/// | -1 | nothing waits | nothing waits | nothing waits; an error for the CPU |
/// | 0 | an error: it could mean either default stream | the default stream | an error |
/// | 1, 2 | the legacy and the per-thread default stream | an error | an error |
/// | above 2 | the stream with that handle | the stream with that handle | an error |
///
/// The device makes a queue of the stream, which waits ([`Backend::adopt_queue`](crate::device::Backend::adopt_queue)). If it does not
/// support that, the host waits for `None`, and numbers are an error.
///
/// ```
/// use arrow_device::dlpack::{DlpackOptions, DlpackStream};
/// // SAFETY: 1 is CUDA's legacy default stream, not a handle.
/// let stream = unsafe { DlpackStream::from_number(Some(1)) };
/// let options = DlpackOptions::new(stream);
/// # let _ = options;
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DlpackStream<'a>(Kind<'a>);

#[derive(Clone, Copy, Debug)]
enum Kind<'a> {
    Number(Option<i64>),
    Queue(&'a Queue),
}

impl DlpackStream<'static> {
    /// Python's `None`, which every device accepts.
    pub const NONE: Self = Self(Kind::Number(None));

    /// -1: the consumer orders its work itself.
    pub const NO_SYNC: Self = Self(Kind::Number(Some(-1)));

    /// The stream that Python has passed.
    ///
    /// # Safety
    /// A number above 2 is the handle of a stream of the exporting device's runtime, which is live until the export has
    /// returned.
    pub const unsafe fn from_number(number: Option<i64>) -> Self {
        Self(Kind::Number(number))
    }
}

impl<'a> From<&'a Queue> for DlpackStream<'a> {
    /// A queue of the exporting device, for consumers in Rust.
    fn from(queue: &'a Queue) -> Self {
        Self(Kind::Queue(queue))
    }
}

impl DlpackStream<'_> {
    /// Makes this wait until the memory of `owner`, if there is some, is ready.
    ///
    /// # Safety
    /// A stream given by its handle is a live stream of `device`, the owner's.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a stream that the device cannot have, and those that the device reports.
    pub(crate) unsafe fn wait(self, device: &Device, owner: Option<&Owner>) -> Result<()> {
        let number = match self.0 {
            Kind::Number(number) => number,
            Kind::Queue(queue) => {
                check_queue(queue, device)?;
                return owner.map_or(Ok(()), |owner| owner.wait_on(queue));
            }
        };
        let device_type = device.id().device_type;
        let cuda = matches!(device_type, T::CUDA | T::CUDA_HOST | T::CUDA_MANAGED);
        let rocm = matches!(device_type, T::ROCM | T::ROCM_HOST);
        // `None` means that this thread waits.
        let stream = match number {
            // Consumers on the host read memory that the host can read at once.
            None if device_type == T::CUDA => Ok(Some(1)),
            None if device_type == T::ROCM => Ok(Some(0)),
            None => Ok(None),
            Some(_) if device_type == T::CPU => Err("on the CPU only None is accepted"),
            Some(-1) => return Ok(()),
            Some(0) if cuda => Err("0 could mean either default stream; pass 1 or 2"),
            Some(1 | 2) if rocm => Err("ROCm's default stream is 0 or None"),
            Some(n) if cuda || rocm => usize::try_from(n)
                .map(Some)
                .map_err(|_| "the only negative number allowed is -1"),
            Some(_) => Err("streams of this device have no numbers; pass None or -1"),
        };
        let stream = stream.map_err(|why| {
            let number = number.map_or("None".into(), |n| n.to_string());
            Error::argument(format!("DLPack stream {number} for {device}: {why}"))
        })?;
        let Some((owner, event)) = owner.and_then(|owner| Some((owner, owner.ready()?))) else {
            return Ok(());
        };
        let backend = device.backend();
        let accepts = event.device == device || backend.relation(event.device.backend()).waits;
        let Some(stream) = stream.filter(|_| accepts) else {
            return owner.wait_host();
        };
        if event.is_complete()? {
            return Ok(());
        }
        // SAFETY: the caller guarantees that the stream is live (see `# Safety`).
        match unsafe { Queue::adopt(device, stream) } {
            Ok(queue) => queue.wait_ref(event),
            Err(Error::NotSupported { .. }) if number.is_none() => owner.wait_host(),
            Err(e) => Err(e),
        }
    }
}

impl Queue {
    /// Returns the number to pass as `__dlpack__(stream=...)` to a producer whose tensor is then imported on this queue
    /// ([`DeviceArray::import_dlpack`](crate::DeviceArray::import_dlpack)). Returns `None` for devices whose tensors have no
    /// stream: the CPU, page-locked memory, and every device that is neither CUDA nor ROCm.
    ///
    /// ```
    /// let queue = arrow_device::Devices::cpu().default_queue();
    /// assert_eq!(queue.dlpack_stream()?, None);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] if DLPack requires a number and the device's backend has none: the producer would make
    /// another stream wait.
    pub fn dlpack_stream(&self) -> Result<Option<i64>> {
        let id = self.device().id();
        let default = match id.device_type {
            T::CUDA | T::CUDA_MANAGED => 1,
            T::ROCM => 0,
            _ => return Ok(None),
        };
        match self.raw().stream_handle().map(i64::try_from) {
            Some(Ok(0)) => Ok(Some(default)),
            Some(Ok(1 | 2)) if default == 0 => Err(not_supported(
                id,
                "DLPack",
                "DLPack has a number only for the ROCm default stream with handle 0",
            )),
            Some(Ok(handle)) => Ok(Some(handle)),
            _ => Err(not_supported(
                id,
                "DLPack",
                "its backend has no stream numbers for its queues",
            )),
        }
    }
}
