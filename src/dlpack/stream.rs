//! Streams: the argument `stream` of `__dlpack__`, on both sides.

use crate::abi::ArrowDeviceType as T;
use crate::device::{Counters, Device, Queue};
use crate::error::{Error, Result};
use crate::memory::{Owner, check_queue};

/// Where a consumer will use a tensor: what Python passes as `__dlpack__(stream=...)`. The producer makes
/// that stream wait until the memory is ready.
///
/// | `stream` | CUDA | ROCm | the CPU and others |
/// | --- | --- | --- | --- |
/// | `None` | the legacy default stream; for page-locked and managed memory the host waits | the default stream | the host waits, if there is something to wait for |
/// | -1 | nothing waits | nothing waits | nothing waits; refused for the CPU |
/// | 0 | refused: it could mean either default stream | the default stream | refused |
/// | 1, 2 | the legacy and the per-thread default stream | refused | refused |
/// | above 2 | that stream's handle | that stream's handle | refused |
///
/// Which devices can be addressed so is up to their backend
/// ([`Backend::stream_wait`](crate::device::Backend::stream_wait)). Where it cannot, the host waits for
/// `None`, and numbers are refused.
#[derive(Clone, Copy, Debug)]
pub struct DlpackStream<'a>(Kind<'a>);

#[derive(Clone, Copy, Debug)]
enum Kind<'a> {
    Number(Option<i64>),
    Queue(&'a Queue),
}

impl DlpackStream<'static> {
    /// `None`: what every device takes.
    pub const NONE: Self = Self(Kind::Number(None));

    /// -1: the consumer sees to the order itself.
    pub const NO_SYNC: Self = Self(Kind::Number(Some(-1)));

    /// As Python passes it.
    ///
    /// # Safety
    /// A number above 2 is the handle of a stream of the exporting device's runtime, which is alive while
    /// the export is made.
    pub const unsafe fn from_number(number: Option<i64>) -> Self {
        Self(Kind::Number(number))
    }
}

impl<'a> DlpackStream<'a> {
    /// A queue of the exporting device, for consumers in Rust.
    pub const fn queue(queue: &'a Queue) -> Self {
        Self(Kind::Queue(queue))
    }

    /// What is to be done on `device`.
    pub(super) fn order(self, device: &Device) -> Result<Order<'a>> {
        let number = match self.0 {
            Kind::Number(number) => number,
            Kind::Queue(queue) => {
                check_queue(queue, device)?;
                return Ok(Order::Queue(queue));
            }
        };
        let device_type = device.id().device_type;
        let cuda = matches!(device_type, T::CUDA | T::CUDA_HOST | T::CUDA_MANAGED);
        let rocm = matches!(device_type, T::ROCM | T::ROCM_HOST);
        let stream = |n: i64| usize::try_from(n).ok();
        let order = match number {
            // Consumers on the host read at once what the host can read.
            None if device_type == T::CUDA => Ok(Order::Default(1)),
            None if device_type == T::ROCM => Ok(Order::Default(0)),
            None => Ok(Order::Host),
            Some(_) if device_type == T::CPU => Err("on the CPU only None is accepted"),
            Some(-1) => Ok(Order::Nothing),
            Some(0) if cuda => Err("0 could mean either default stream; pass 1 or 2"),
            Some(1 | 2) if rocm => Err("ROCm's default stream is 0 or None"),
            Some(n) if cuda || rocm => match stream(n) {
                Some(handle) => Ok(Order::Stream(handle)),
                None => Err("below 0 only -1 has a meaning"),
            },
            Some(_) => Err("this device has no streams with numbers; pass None or -1"),
        };
        order.map_err(|why| {
            let number = number.map_or("None".into(), |n| n.to_string());
            Error::argument(format!("stream {number} of DLPack for {device}: {why}"))
        })
    }
}

/// What waits until the memory is ready.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order<'a> {
    Nothing,
    /// This thread.
    Host,
    Queue(&'a Queue),
    /// A default stream, or this thread where the backend cannot make it wait.
    Default(usize),
    Stream(usize),
}

impl Order<'_> {
    /// Makes what is to wait for the memory do so.
    ///
    /// # Safety
    /// A stream is a live one of the owner's device.
    pub(super) unsafe fn apply(self, owner: &Owner) -> Result<()> {
        let stream = match self {
            Self::Nothing => return Ok(()),
            Self::Host => return owner.wait_host(),
            Self::Queue(queue) => return owner.wait_on(queue),
            Self::Default(stream) | Self::Stream(stream) => stream,
        };
        let Some(event) = owner.ready() else {
            return Ok(());
        };
        if event.is_complete()? {
            return Ok(());
        }
        let device = owner.device();
        let backend = device.backend();
        if event.device() != device && !backend.accepts_events_of(event.device().backend()) {
            return event.wait();
        }
        // SAFETY: the caller's; the owner keeps the event alive, and it is one that the device waits for.
        if unsafe { backend.stream_wait(stream, event.ptr()) }? {
            Counters::add(&device.counters().queue_waits, 1);
            return Ok(());
        }
        match self {
            Self::Default(_) => owner.wait_host(),
            _ => Err(Error::NotSupported {
                device: device.id(),
                operation: "DLPack",
                reason: "its backend knows no streams by number; pass the stream None".into(),
            }),
        }
    }
}

impl Queue {
    /// The number to pass as `__dlpack__(stream=...)` to a producer whose tensor is then imported on this
    /// queue ([`DeviceArray::import_dlpack`](crate::DeviceArray::import_dlpack)); `None` for devices whose
    /// tensors come without a stream: the CPU, page-locked memory, and all that is neither CUDA nor ROCm.
    ///
    /// A per-thread stream (2) means the calling thread's: call `__dlpack__` and the import on one thread.
    ///
    /// ```
    /// let queue = arrow_device::Devices::cpu().default_queue();
    /// assert_eq!(queue.dlpack_stream()?, None);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NotSupported`] if the device's backend gives its streams no numbers where DLPack wants them:
    /// without one the producer would make another stream wait.
    pub fn dlpack_stream(&self) -> Result<Option<i64>> {
        let id = self.device().id();
        let default = match id.device_type {
            T::CUDA | T::CUDA_MANAGED => 1,
            T::ROCM => 0,
            _ => return Ok(None),
        };
        match self.raw().stream_handle().map(i64::try_from) {
            Some(Ok(0)) => Ok(Some(default)),
            Some(Ok(1 | 2)) if default == 0 => Err(Error::NotSupported {
                device: id,
                operation: "DLPack",
                reason: "of ROCm's default streams it names only the one of handle 0".into(),
            }),
            Some(Ok(handle)) => Ok(Some(handle)),
            _ => Err(Error::NotSupported {
                device: id,
                operation: "DLPack",
                reason: "its backend gives its queues no stream numbers".into(),
            }),
        }
    }
}
