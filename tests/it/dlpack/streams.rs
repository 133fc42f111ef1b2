//! Which numbers of streams which devices take.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use arrow_array::Int32Array;
use arrow_device::device::{
    Backend, Capabilities, CopyOp, DevicePtr, EventPtr, RawQueue, device_error,
};
use arrow_device::dlpack::{DLDevice, DLManagedTensorVersioned, DlpackOptions, DlpackStream};
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceBuffer, DeviceId, Devices, Error, Result,
};
use arrow_schema::DataType;

use crate::dlpack::kit::{Calls, Held, INT32, produce};

/// A device of any type over host memory, whose events complete when the host waits for them.
#[derive(Debug)]
struct Stub {
    id: DeviceId,
    /// Whether it knows streams by their handles.
    streams: bool,
    queue: Arc<StubQueue>,
    waited: Mutex<Vec<usize>>,
    host_waits: AtomicUsize,
    settled: AtomicUsize,
}

#[derive(Debug)]
struct StubQueue {
    handle: Option<usize>,
    complete: Arc<AtomicUsize>,
}

impl Stub {
    fn device(device_type: ArrowDeviceType, handle: Option<usize>) -> (Device, Arc<Self>) {
        let stub = Arc::new(Self {
            id: DeviceId::new(device_type, 2),
            streams: handle.is_some(),
            queue: Arc::new(StubQueue {
                handle,
                complete: Arc::default(),
            }),
            waited: Mutex::default(),
            host_waits: AtomicUsize::new(0),
            settled: AtomicUsize::new(0),
        });
        (Device::new(stub.clone()).unwrap(), stub)
    }

    fn column(device: &Device) -> DeviceArray {
        let values = Box::new([1i32, 2, 3]);
        let base = DevicePtr::new(values.as_ptr().cast_mut().cast());
        let event = device.default_queue().record().unwrap();
        // SAFETY: the box keeps the values, which nobody writes.
        let buffer = unsafe { DeviceBuffer::from_raw(device, base, 12, values, event) };
        DeviceArray::from_values(DataType::Int32, 3, buffer, None).unwrap()
    }
}

// SAFETY: it declares that the host cannot read its memory, so none is read; it has no memory and
// no work of its own.
unsafe impl Backend for Stub {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(self.id)
    }
    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }
    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }
    unsafe fn query_event(&self, _: EventPtr) -> Result<bool> {
        Ok(self.queue.complete.load(SeqCst) > 0)
    }
    unsafe fn wait_event(&self, _: EventPtr) -> Result<()> {
        self.host_waits.fetch_add(1, SeqCst);
        self.queue.complete.store(1, SeqCst);
        Ok(())
    }
    unsafe fn adopt_queue(&self, handle: usize) -> Result<Arc<dyn RawQueue>> {
        if !self.streams {
            return Err(Error::NotSupported {
                device: self.id,
                operation: "adopt a queue",
                reason: "there is no stream with a handle".into(),
            });
        }
        self.waited.lock().unwrap().push(handle);
        Ok(self.queue.clone())
    }
    fn synchronize(&self) -> Result<()> {
        self.settled.fetch_add(1, SeqCst);
        self.queue.complete.store(1, SeqCst);
        Ok(())
    }
}

// SAFETY: it allocates nothing and runs no work.
unsafe impl RawQueue for StubQueue {
    fn allocate(&self, _: usize) -> Result<DevicePtr> {
        Err(device_error(
            DeviceId::CPU,
            "allocate",
            1,
            "a stub has no memory",
        ))
    }
    unsafe fn free(&self, _: DevicePtr, _: usize) -> Result<()> {
        Ok(())
    }
    unsafe fn copy(&self, _: &[CopyOp]) -> Result<()> {
        Ok(())
    }
    unsafe fn fill(&self, _: DevicePtr, _: u8, _: usize) -> Result<()> {
        Ok(())
    }
    fn record(&self) -> Result<EventPtr> {
        static EVENT: u8 = 0;
        let event = EventPtr::new((&raw const EVENT).cast_mut().cast());
        event.ok_or_else(|| Error::Released("the event"))
    }
    unsafe fn wait(&self, _: EventPtr) -> Result<bool> {
        Ok(true)
    }
    fn stream_handle(&self) -> Option<usize> {
        self.handle
    }
}

fn numbered(number: Option<i64>) -> DlpackOptions<'static> {
    // SAFETY: the stubs follow no handle, and the CPU accepts none.
    DlpackOptions::new(unsafe { DlpackStream::from_number(number) })
}

/// What an export does.
#[derive(Debug, PartialEq)]
enum Does {
    Host,
    Nothing,
    Stream(usize),
    Refuses,
}

/// The Python array API's numbers: 1 and 2 are CUDA's default streams, and 0 is ROCm's.
fn expected(device_type: ArrowDeviceType, number: Option<i64>) -> Does {
    use ArrowDeviceType as T;
    use Does::{Host, Nothing, Refuses, Stream};
    let cuda = [T::CUDA, T::CUDA_HOST, T::CUDA_MANAGED].contains(&device_type);
    let rocm = [T::ROCM, T::ROCM_HOST].contains(&device_type);
    match number {
        Some(-1) => Nothing,
        None if device_type == T::CUDA => Stream(1),
        None if device_type == T::ROCM => Stream(0),
        None => Host,
        Some(0) if rocm => Stream(0),
        Some(1 | 2) if cuda => Stream(number.unwrap() as usize),
        Some(handle) if handle > 2 && (cuda || rocm) => Stream(handle as usize),
        Some(_) => Refuses,
    }
}

#[test]
fn numbers() {
    use ArrowDeviceType as T;
    use Does::{Host, Nothing, Refuses, Stream};
    let some = [-1, 0, 1, 2, 3, 0x7fff_1234_5678, -2, i64::MIN].map(Some);
    for device_type in [
        T::CUDA,
        T::CUDA_HOST,
        T::CUDA_MANAGED,
        T::ROCM,
        T::ROCM_HOST,
        T::EXT_DEV,
        T::VPI,
        T::ONEAPI,
        T::new(77),
    ] {
        for number in some.into_iter().chain([None]) {
            let expected = expected(device_type, number);
            let (device, stub) = Stub::device(device_type, Some(5));
            let column = Stub::column(&device);
            let exported = column.export_dlpack(&numbered(number));
            let waited = stub.waited.lock().unwrap().clone();
            let does = match (&exported, stub.host_waits.load(SeqCst), waited.as_slice()) {
                (Err(e), 0, []) => {
                    let text = e.to_string();
                    let named = text.contains(&device.to_string()) && text.contains("stream");
                    assert!(named && matches!(e, Error::InvalidArgument(_)), "{text}");
                    Refuses
                }
                (Ok(_), 1, []) => Host,
                (Ok(_), 0, []) => Nothing,
                (Ok(_), 0, [stream]) => Stream(*stream),
                other => panic!("{device} {number:?}: {other:?}"),
            };
            assert_eq!(does, expected, "{device} {number:?}");
            assert_eq!(
                device.stats().host_waits,
                u64::from(does == Host),
                "{device}"
            );
            let stream_waits = u64::from(matches!(does, Stream(_)));
            assert_eq!(device.stats().queue_waits, stream_waits, "{device}");
            drop(exported);
            // Memory that is ready needs no wait, and the same numbers are refused.
            stub.queue.complete.store(1, SeqCst);
            let again = column.export_dlpack(&numbered(number));
            assert_eq!(again.is_err(), does == Refuses, "{device} {number:?}");
            assert_eq!(stub.waited.lock().unwrap().len(), waited.len());
            let nothing = column.slice(0, 0).unwrap().export_dlpack(&numbered(number));
            assert_eq!(
                nothing.is_err(),
                does == Refuses,
                "{device} {number:?}: no rows"
            );
        }
    }
}

/// Where a backend cannot make a stream wait.
#[test]
fn backends_without_streams() {
    use ArrowDeviceType as T;
    for device_type in [T::CUDA, T::ROCM] {
        let (device, stub) = Stub::device(device_type, None);
        let column = Stub::column(&device);
        let e = column.export_dlpack(&numbered(Some(64))).unwrap_err();
        assert!(matches!(e, Error::NotSupported { .. }), "{e}");
        assert_eq!(stub.host_waits.load(SeqCst), 0);
        drop(column.export_dlpack(&numbered(None)).unwrap());
        assert_eq!(stub.host_waits.load(SeqCst), 1);
        let e = device.default_queue().dlpack_stream().unwrap_err();
        assert!(matches!(e, Error::NotSupported { .. }), "{e}");
    }
}

#[test]
fn the_cpu() {
    let cpu = Devices::cpu();
    let column = cpu.upload_array(&Int32Array::from(vec![1])).unwrap();
    assert!(column.export_dlpack(&numbered(None)).is_ok());
    for number in [-1, 0, 1, 2, 1000] {
        let e = column.export_dlpack(&numbered(Some(number))).unwrap_err();
        assert!(e.to_string().contains("only None"), "{e}");
    }
    let queue = cpu.default_queue();
    let options = DlpackOptions::new(DlpackStream::from(&queue));
    assert!(column.export_dlpack(&options).is_ok());
    // A queue of another device.
    let (device, _) = Stub::device(ArrowDeviceType::CUDA, Some(5));
    let queue = device.default_queue();
    let options = DlpackOptions::new(DlpackStream::from(&queue));
    assert!(matches!(
        column.export_dlpack(&options),
        Err(Error::InvalidArgument(_))
    ));
}

/// What a consumer tells a producer.
#[test]
fn the_number_of_a_queue() {
    use ArrowDeviceType as T;
    for (device_type, handle, expected) in [
        (T::CUDA, 0, Some(1)),
        (T::CUDA, 2, Some(2)),
        (T::CUDA, 0x7000, Some(0x7000)),
        (T::CUDA_MANAGED, 0x7000, Some(0x7000)),
        (T::CUDA_HOST, 0x7000, None),
        (T::ROCM, 0, Some(0)),
        (T::ROCM, 0x7000, Some(0x7000)),
        (T::ROCM_HOST, 0x7000, None),
        (T::EXT_DEV, 0x7000, None),
    ] {
        let (device, _) = Stub::device(device_type, Some(handle));
        let number = device.default_queue().dlpack_stream().unwrap();
        assert_eq!(number, expected, "{device} {handle}");
    }
    let (device, _) = Stub::device(T::ROCM, Some(2));
    assert!(device.default_queue().dlpack_stream().is_err());
}

/// The device of a tensor is the queue's: by type and id, where ids tell something.
#[test]
fn the_device_of_a_tensor() {
    use ArrowDeviceType as T;
    for (device_type, accepted) in [
        (T::CUDA, [2].as_slice()),
        (T::ROCM, &[2]),
        (T::EXT_DEV, &[2]),
        (T::CUDA_HOST, &[0, 2]),
        (T::CUDA_MANAGED, &[0, 2]),
    ] {
        for id in [-1, 0, 1, 2, 3] {
            let (device, stub) = Stub::device(device_type, Some(5));
            let tensor = Stub::column(&device)
                .export_dlpack(&numbered(Some(-1)))
                .unwrap();
            let raw = Held::<DLManagedTensorVersioned>::new(tensor).into_raw();
            // SAFETY: the tensor was just made, and only this test has it.
            unsafe { (*raw).dl_tensor.device.device_id = id };
            // SAFETY: the tensor is valid, and nobody writes to its memory.
            let back = unsafe { DeviceArray::import_dlpack(raw, &device.default_queue()) };
            assert_eq!(back.is_ok(), accepted.contains(&id), "{device} {id}");
            match back {
                Ok(column) => drop(column),
                Err(e) => assert!(e.to_string().contains("dl_tensor.device"), "{e}"),
            }
            // Deleted: by default after all work of the device.
            let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
            stub.queue.complete.store(1, SeqCst);
            while stub.settled.load(SeqCst) == 0 {
                assert!(
                    std::time::Instant::now() < end,
                    "the device was not waited for"
                );
                std::thread::yield_now();
            }
        }
    }
}

/// On these devices DLPack's `data` is an object of the runtime's, and Arrow's `buffers[i]` an address.
#[test]
fn devices_whose_tensors_hold_objects() {
    use ArrowDeviceType as T;
    for device_type in [T::METAL, T::OPENCL, T::VULKAN, T::WEBGPU] {
        let (device, stub) = Stub::device(device_type, Some(5));
        let column = Stub::column(&device);
        let buffer = column.buffer(1).unwrap();
        for refused in [
            column.export_dlpack(&numbered(None)),
            column.slice(1, 2).unwrap().export_dlpack(&numbered(None)),
            column.slice(0, 0).unwrap().export_dlpack(&numbered(None)),
            buffer.export_dlpack(INT32, &numbered(None)),
        ] {
            let e = refused.unwrap_err();
            assert!(matches!(e, Error::NotSupported { .. }), "{e}");
            let text = e.to_string();
            assert!(text.contains(&device.to_string()), "{text}");
            assert!(text.contains("buffer object"), "{text}");
        }
        assert_eq!(stub.host_waits.load(SeqCst), 0, "{device}");
        // Nothing is left to a thread that would wait for the event.
        column.wait().unwrap();
        drop((column, buffer));
        // Such an object, as another producer gives it out.
        let calls = Calls::default();
        let of = DLDevice {
            device_type,
            device_id: 2,
        };
        let mut object = Box::new(0u64);
        let data = std::ptr::from_mut(&mut *object).cast();
        let raw = produce::<DLManagedTensorVersioned>(data, of, INT32, &[2], object, &calls);
        // SAFETY: the struct is the test's own, and nobody writes to what it points to.
        let refused = unsafe { DeviceArray::import_dlpack(raw, &device.default_queue()) };
        let e = refused.unwrap_err();
        assert!(matches!(e, Error::NotSupported { .. }), "{e}");
        assert_eq!(calls.get(), 1, "{device}: deleted");
    }
}
