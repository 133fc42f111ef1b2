//! DLPack tensors of CUDA memory: which stream waits for what, and when memory is let go.

use std::ffi::c_void;
use std::ptr;
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::time::Duration;

use arrow_array::Int64Array;
use arrow_device::dlpack::{
    DLDataType, DLDevice, DLManagedTensorVersioned, DLPackVersion, DLTensor, DlpackOptions,
    DlpackStream,
};
use arrow_device::{
    ArrowDeviceType, Device, DeviceArray, DeviceBufferMut, Error, Queue, ReleasePolicy,
    TransferStats,
};
use cudarc::driver::{CudaStream, sys};

use crate::block::Block;
use crate::fake::{LAZY, MODES, NO_POOLS, PAGEABLE_EAGER, fake};
use crate::rig::{hold, soon};
use crate::support::assert_same;
use crate::vendor::{DEVICE, HOST, MANAGED, assert_untouched, unset_context};
use crate::world::World;

const ROWS: usize = 1000;

fn longs() -> Int64Array {
    Int64Array::from_iter_values((0..ROWS as i64).map(|i| i * 5 - 9))
}

/// The stream is a consumer's.
impl World {
    fn upload(&self) -> DeviceArray {
        self.rig.upload_array(&longs()).unwrap()
    }

    fn handle(&self) -> i64 {
        self.stream.cu_stream().addr() as i64
    }

    /// What a consumer does on its stream: it copies the tensor to page-locked memory.
    fn read(&self, stream: i64, tensor: &DLTensor) -> Read {
        let bytes = ROWS * 8;
        let mut to: *mut c_void = ptr::null_mut();
        let context = self.context.cu_ctx();
        let stream = ptr::without_provenance_mut(stream as usize);
        let mut popped = ptr::null_mut();
        // SAFETY: the context is live, and the memory is the consumer's until the stream was waited
        // for.
        unsafe {
            assert_eq!(sys::cuCtxPushCurrent_v2(context) as i32, 0);
            assert_eq!(sys::cuMemHostAlloc(&raw mut to, bytes, 0) as i32, 0);
            let code = sys::cuMemcpyDtoHAsync_v2(to, tensor.data.addr() as u64, bytes, stream);
            assert_eq!(code as i32, 0);
            assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0);
        }
        Read {
            to: to.cast(),
            stream,
            context,
        }
    }
}

/// A copy on a consumer's stream.
struct Read {
    to: *mut i64,
    stream: sys::CUstream,
    context: sys::CUcontext,
}

impl Read {
    /// Waits for the stream, and for nothing else. (On the lazy driver only what it needs runs.)
    fn finish(self) -> Vec<i64> {
        let mut popped = ptr::null_mut();
        // SAFETY: the context is live; the memory is this consumer's, and is read only after the
        // stream was waited for.
        unsafe {
            assert_eq!(sys::cuCtxPushCurrent_v2(self.context) as i32, 0);
            assert_eq!(sys::cuStreamSynchronize(self.stream) as i32, 0);
            let seen = std::slice::from_raw_parts(self.to, ROWS).to_vec();
            assert_eq!(sys::cuMemFreeHost(self.to.cast()) as i32, 0);
            assert_eq!(sys::cuCtxPopCurrent_v2(&raw mut popped) as i32, 0);
            seen
        }
    }
}

fn numbered(number: Option<i64>) -> DlpackOptions<'static> {
    // SAFETY: the tests' streams live during the export.
    DlpackOptions::new(unsafe { DlpackStream::from_number(number) })
}

/// A tensor in a consumer's hands.
struct Held(*mut DLManagedTensorVersioned);

// SAFETY: DLPack lets a tensor be read, and its deleter be called, on any thread.
unsafe impl Send for Held {}

impl Held {
    fn export(column: &DeviceArray, options: &DlpackOptions<'_>) -> Self {
        Self(column.export_dlpack(options).unwrap().into_versioned())
    }

    fn tensor(&self) -> &DLTensor {
        // SAFETY: the tensor lives until its deleter is called, which only this type's owner does.
        unsafe { &(*self.0).dl_tensor }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the consumer owns the tensor and calls its deleter once.
        unsafe { (*self.0).deleter.unwrap()(self.0) }
    }
}

fn waits(device: &Device, before: &TransferStats) -> (u64, u64) {
    let since = device.stats().since(before);
    (since.host_waits, since.queue_waits)
}

/// The consumer's stream waits for the upload, on the device: on the lazy driver it would otherwise read
/// what nobody has written yet.
#[test]
fn the_consumers_stream_waits() {
    for flags in MODES.into_iter().chain([LAZY | NO_POOLS]) {
        for memory in [DEVICE, MANAGED] {
            let world = World::new(flags, memory);
            let legacy = (memory == DEVICE).then_some(None);
            let streams = [
                Some(Some(world.handle())),
                Some(Some(1)),
                Some(Some(2)),
                legacy,
            ];
            for number in streams.into_iter().flatten() {
                let column = world.upload();
                // Keeps the upload from having run on an eager driver.
                let held_up = hold(&world.rig.default_queue());
                let late = world.upload();
                // The thread that frees for other consumers would wait as well, and be counted.
                let options = DlpackOptions {
                    release: ReleasePolicy::Ordered,
                    ..numbered(number)
                };
                let before = world.rig.stats();
                let tensor = Held::export(&late, &options);
                assert_eq!(waits(&world.rig, &before), (0, 1), "{number:?}");
                drop(held_up);
                let read = world.read(number.unwrap_or(1), tensor.tensor());
                assert_eq!(read.finish(), longs().values().to_vec(), "{number:?}");
                // Now that it is ready nothing waits.
                let before = world.rig.stats();
                drop(Held::export(&late, &options));
                let since = world.rig.stats().since(&before);
                assert_eq!((since.queue_waits, since.events), (0, 0));
                drop((tensor, late, column));
            }
            world.end();
        }
    }
}

/// Who names no stream may read on the host what the host can read: this thread waits.
#[test]
fn memory_that_the_host_reads() {
    for mode in MODES {
        for memory in [HOST, MANAGED] {
            let world = World::new(mode, memory);
            let column = world.upload();
            let before = world.rig.stats();
            let tensor = Held::export(&column, &numbered(None));
            assert_eq!(waits(&world.rig, &before).1, 0);
            assert!(column.is_ready().unwrap());
            // SAFETY: the tensor is host memory of `ROWS` values, and the data is ready.
            let seen = unsafe {
                std::slice::from_raw_parts(tensor.tensor().data.cast::<i64>(), ROWS).to_vec()
            };
            assert_eq!(seen, longs().values().to_vec());
            let device = tensor.tensor().device;
            assert_eq!((device.device_type, device.device_id), (memory, 0));
            drop((tensor, column));
            world.end();
        }
    }
}

/// -1: the consumer has seen to it.
#[test]
fn nothing_waits() {
    let world = World::new(LAZY, DEVICE);
    let column = world.upload();
    let before = world.rig.stats();
    let tensor = Held::export(&column, &numbered(Some(-1)));
    assert_eq!(waits(&world.rig, &before), (0, 0));
    assert!(!column.is_ready().unwrap());
    let device = tensor.tensor().device;
    assert_eq!(device.device_type, ArrowDeviceType::CUDA);
    assert_eq!(device.device_id as usize, world.rig.group.ordinal());
    drop((tensor, column));
    world.end();
}

#[test]
fn streams_that_are_refused() {
    let world = World::new(LAZY, DEVICE);
    let column = world.upload();
    for number in [0, -2, i64::MIN] {
        let e = column.export_dlpack(&numbered(Some(number))).unwrap_err();
        assert!(matches!(e, Error::InvalidArgument(_)), "{e}");
    }
    // Of another context.
    let other = World::new(0, DEVICE);
    let e = column
        .export_dlpack(&numbered(Some(other.handle())))
        .unwrap_err();
    assert!(e.to_string().contains("another context"), "{e}");
    other.end();
    // Captured into a graph; ready memory needs no work on it.
    let raw = world.stream.cu_stream();
    world.context.bind_to_thread().unwrap();
    let code = fake!(cuStreamBeginCapture_v2(raw => sys::CUstream, 0 => i32) -> i32);
    assert_eq!(code, 0);
    let e = column
        .export_dlpack(&numbered(Some(world.handle())))
        .unwrap_err();
    assert!(e.to_string().contains("captured"), "{e}");
    column.wait().unwrap();
    drop(
        column
            .export_dlpack(&numbered(Some(world.handle())))
            .unwrap(),
    );
    let mut graph: *mut () = ptr::null_mut();
    let code =
        fake!(cuStreamEndCapture(raw => sys::CUstream, &raw mut graph => *mut *mut ()) -> i32);
    assert_eq!(code, 0);
    unset_context();
    drop(column);
    world.end();
}

/// Exports and deleters leave the caller's context as it was: here, none.
#[test]
fn no_context_is_left_current() {
    let world = World::new(0, DEVICE);
    let column = world.upload();
    let held_up = hold(&world.rig.default_queue());
    let late = world.upload();
    assert_untouched();
    let tensors = [Some(world.handle()), Some(1), Some(2), None]
        .map(|number| Held::export(&late, &numbered(number)));
    assert_untouched();
    drop((held_up, tensors));
    assert_untouched();
    drop((column, late));
    world.end();
}

/// The deleter returns at once, and the memory outlives what the consumer has queued.
#[test]
fn deleted_while_in_use() {
    for flags in MODES.into_iter().chain([LAZY | NO_POOLS]) {
        let world = World::new(flags, DEVICE);
        let consumer = Queue::from_cuda_stream(&world.rig.device, world.stream.clone()).unwrap();
        let column = world.upload();
        let tensor = Held::export(&column, &numbered(Some(world.handle())));
        drop(column);
        let held_up = hold(&consumer);
        let read = world.read(world.handle(), tensor.tensor());
        let (sender, deleted) = channel();
        let deleter = std::thread::spawn(move || {
            drop(tensor);
            sender.send(()).unwrap();
        });
        let returned = deleted.recv_timeout(Duration::from_secs(5));
        // Used again at once, if it were free.
        let noise: Vec<_> = (0..4)
            .map(|_| {
                let mut memory = DeviceBufferMut::allocate(&world.rig.default_queue(), ROWS * 8);
                memory.as_mut().unwrap().fill(0xEE).unwrap();
                memory.unwrap()
            })
            .collect();
        drop(held_up);
        deleter.join().unwrap();
        returned.expect("the deleter waits");
        assert_eq!(read.finish(), longs().values().to_vec());
        drop((noise, consumer));
        world.end();
    }
}

/// What is passed to producers: a stream that work can be given to under that number.
#[test]
fn the_number_of_a_queue() {
    for memory in [DEVICE, MANAGED, HOST] {
        let world = World::new(0, memory);
        let of = |stream: Arc<CudaStream>| {
            let queue = Queue::from_cuda_stream(&world.rig.device, stream).unwrap();
            queue.dlpack_stream().unwrap()
        };
        let numbers = [of(world.context.default_stream()), of(world.stream.clone())];
        let own = world.rig.default_queue().dlpack_stream().unwrap();
        match memory {
            HOST => assert_eq!((numbers, own), ([None; 2], None)),
            _ => {
                assert_eq!(numbers, [Some(1), Some(world.handle())]);
                assert!(own.is_some_and(|own| own > 2));
            }
        }
        unset_context();
        world.end();
    }
}

/// A producer's struct over a slice of cudarc's.
#[repr(C)]
struct Produced {
    managed: DLManagedTensorVersioned,
    dims: [i64; 2],
    slice: Option<cudarc::driver::CudaSlice<i64>>,
    alive: Arc<()>,
}

unsafe extern "C-unwind" fn delete(this: *mut DLManagedTensorVersioned) {
    // SAFETY: `produce` gave up the box, and the deleter, which takes it back, is called once.
    let produced = unsafe { Box::from_raw((*this).manager_ctx.cast::<Produced>()) };
    drop(produced.slice);
    drop(produced.alive);
}

fn produce(
    data: usize,
    device: DLDevice,
    slice: Option<cudarc::driver::CudaSlice<i64>>,
) -> (*mut DLManagedTensorVersioned, Weak<()>) {
    let alive = Arc::new(());
    let watch = Arc::downgrade(&alive);
    let produced = Box::into_raw(Box::new(Produced {
        managed: DLManagedTensorVersioned {
            version: DLPackVersion { major: 1, minor: 0 },
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete),
            flags: 0,
            dl_tensor: DLTensor {
                data: ptr::with_exposed_provenance_mut(data),
                device,
                ndim: 1,
                dtype: DLDataType {
                    code: DLDataType::INT,
                    bits: 64,
                    lanes: 1,
                },
                shape: ptr::null_mut(),
                strides: ptr::null_mut(),
                byte_offset: 0,
            },
        },
        dims: [ROWS as i64, 1],
        slice,
        alive,
    }));
    // SAFETY: the struct was just made, and nothing else has it.
    unsafe {
        let managed = &raw mut (*produced).managed;
        (*managed).manager_ctx = produced.cast();
        (*managed).dl_tensor.shape = (&raw mut (*produced).dims).cast();
        (managed, watch)
    }
}

/// A producer makes the queue's stream wait for its own; then the tensor is imported on the queue. What
/// reads the column elsewhere waits for the queue, and the deleter comes after all of it.
#[test]
fn tensors_in() {
    for mode in MODES {
        let world = World::new(mode | PAGEABLE_EAGER, DEVICE);
        let queue = world.rig.new_queue().unwrap();
        let device = DLDevice::try_from(world.rig.id()).unwrap();
        let (producer, expected) = (&world.stream, longs());
        let written = producer.clone_htod(expected.values().as_ref()).unwrap();
        let address = {
            use cudarc::driver::DevicePtr;
            written.device_ptr(producer).0 as usize
        };
        // `__dlpack__(stream=...)`
        let number = queue.dlpack_stream().unwrap().unwrap();
        let done = producer.record_event(None).unwrap();
        let stream = ptr::without_provenance_mut(number as usize);
        // SAFETY: stream and event are live, and cudarc has made their context current.
        let code = unsafe { sys::cuStreamWaitEvent(stream, done.cu_event(), 0) };
        assert_eq!(code as i32, 0);
        unset_context();

        let (tensor, alive) = produce(address, device, Some(written));
        let before = world.rig.stats();
        // SAFETY: the queue waits for the writing stream, and nobody writes any more.
        let column = unsafe { DeviceArray::import_dlpack(tensor, &queue) }.unwrap();
        let since = world.rig.stats().since(&before);
        assert_eq!(
            (since.host_waits, since.queue_waits, since.copies),
            (0, 0, 0)
        );
        if mode == LAZY {
            assert!(!column.is_ready().unwrap());
        }
        let part = column.slice(10, 100).unwrap();
        assert_same(
            &expected.slice(10, 100),
            &part.to_host().unwrap(),
            "a slice",
        );
        // Out again, to a consumer's stream.
        let again = Held::export(&column, &numbered(Some(1)));
        drop((column, part));
        assert_eq!(alive.strong_count(), 1);
        let read = world.read(1, again.tensor());
        drop(again);
        assert_eq!(read.finish(), expected.values().to_vec());
        assert!(soon(|| alive.strong_count() == 0));
        drop((done, queue));
        world.stream.synchronize().unwrap();
        unset_context();
        world.end();
    }
}

/// Memory that is not what the tensor says.
#[test]
fn memory_of_others() {
    let world = World::new(0, DEVICE);
    let other = World::new(0, DEVICE);
    let device = DLDevice::try_from(world.rig.id()).unwrap();
    let column = other.upload();
    let elsewhere = column.buffer(1).unwrap();
    let ordinary = vec![0i64; ROWS];
    for (address, text) in [
        (elsewhere.address().address(), "memory of CUDA device"),
        (
            ordinary.as_ptr().expose_provenance(),
            "ordinary host memory",
        ),
    ] {
        let (tensor, alive) = produce(address, device, None);
        // SAFETY: the tensor is refused for its address before anything is read there.
        let e = unsafe { DeviceArray::import_dlpack(tensor, &world.rig.default_queue()) };
        let text_of = e.unwrap_err().to_string();
        assert!(
            text_of.contains("dl_tensor.data") && text_of.contains(text),
            "{text_of}"
        );
        assert_eq!(alive.strong_count(), 0, "deleted");
    }
    let (tensor, alive) = produce(elsewhere.address().address(), device, None);
    // SAFETY: the tensor is refused for its device before anything is read through it.
    let e = unsafe { DeviceArray::import_dlpack(tensor, &other.rig.default_queue()) };
    assert!(e.unwrap_err().to_string().contains("dl_tensor.device"));
    assert_eq!(alive.strong_count(), 0, "deleted");
    drop((column, elsewhere));
    other.end();
    world.end();
}

/// Failures of the driver on the way out and in: an error, and nothing is lost.
#[test]
fn failures_on_the_way() {
    for (inward, name) in [
        (false, "cuStreamGetCtx"),
        (false, "cuStreamIsCapturing"),
        (false, "cuStreamWaitEvent"),
        (true, "cuEventRecord"),
        (true, "cuPointerGetAttributes"),
    ] {
        let world = World::new(LAZY, DEVICE);
        let column = world.upload();
        let queue = world.rig.new_queue().unwrap();
        let device = DLDevice::try_from(world.rig.id()).unwrap();
        // Not of the device, which knows its own memory.
        let block = Block::device(world.rig.group.first, ROWS * 8);
        let (tensor, alive) = produce(block.ptr.addr(), device, None);
        world.rig.group.fail(name, 1, 999);
        let failed = match inward {
            // SAFETY: the tensor is valid: the block is its memory, which nobody writes.
            true => unsafe { DeviceArray::import_dlpack(tensor, &queue) }.map(drop),
            false => {
                // SAFETY: the test is the tensor's only owner, and deletes it once.
                unsafe { delete(tensor) };
                let options = numbered(Some(world.handle()));
                column.export_dlpack(&options).map(drop)
            }
        };
        assert_eq!(world.rig.group.clear(), 1, "{name} was not called");
        assert!(failed.is_err(), "{name}");
        assert_eq!(alive.strong_count(), 0, "{name}: not deleted");
        drop(Held::export(&column, &numbered(Some(world.handle()))));
        drop((column, queue, block));
        world.end();
    }
}
