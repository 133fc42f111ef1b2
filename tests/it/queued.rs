//! A device of ordinary memory whose copies run later, on a thread: what is still in use is seen by Miri, which the simulated
//! device cannot run under.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;

use arrow_array::types::Int32Type;
use arrow_array::{
    Array, ArrayRef, BooleanArray, Int32Array, Int64Array, RecordBatch, RecordBatchIterator,
    RunArray, StringArray,
};
use arrow_device::device::{Backend, Capabilities, CopyOp, DevicePtr, EventPtr, RawQueue};
use arrow_device::{
    ArrowDeviceType, Device, DeviceBufferMut, DeviceId, DeviceRecordBatch, Devices, ImportOptions,
    Result, SyncPolicy, Validation, upload_reader,
};

#[derive(Default, Debug)]
struct Event(Mutex<bool>, Condvar);

impl Event {
    /// # Safety
    /// The event was recorded by [`Queue::record`] and not released.
    unsafe fn of(event: EventPtr) -> Arc<Self> {
        let event = event.as_ptr().cast::<Self>().cast_const();
        // SAFETY: the caller guarantees a share of an event, of which this is one more.
        unsafe {
            Arc::increment_strong_count(event);
            Arc::from_raw(event)
        }
    }

    fn complete(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }

    fn is_complete(&self) -> bool {
        *self.0.lock().unwrap()
    }

    fn wait(&self) {
        let done = self.0.lock().unwrap();
        drop(self.1.wait_while(done, |done| !*done).unwrap());
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Its thread ends once the queue is dropped and its work is done.
#[derive(Debug)]
struct Queue(Mutex<Sender<Work>>);

impl Queue {
    fn new() -> Arc<Self> {
        let (sender, works) = channel::<Work>();
        thread::spawn(move || works.into_iter().for_each(|work| work()));
        Arc::new(Self(Mutex::new(sender)))
    }

    fn push(&self, work: impl FnOnce() + Send + 'static) {
        let sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sender.send(Box::new(work)).unwrap();
    }
}

#[derive(Debug)]
struct Queued {
    queue: Arc<Queue>,
    /// All others.
    queues: Mutex<Vec<Weak<Queue>>>,
}

fn device() -> Device {
    let backend = Queued {
        queue: Queue::new(),
        queues: Mutex::default(),
    };
    Device::new(Arc::new(backend)).unwrap()
}

// SAFETY: the host is not said to read the memory. Work of a queue runs in order, and marks its events when it gets there.
unsafe impl Backend for Queued {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(DeviceId::new(ArrowDeviceType::EXT_DEV, 77))
    }

    fn default_queue(&self) -> Result<Arc<dyn RawQueue>> {
        Ok(self.queue.clone())
    }

    fn new_queue(&self) -> Result<Arc<dyn RawQueue>> {
        let queue = Queue::new();
        self.queues.lock().unwrap().push(Arc::downgrade(&queue));
        Ok(queue)
    }

    unsafe fn query_event(&self, event: EventPtr) -> Result<bool> {
        // SAFETY: the caller guarantees a live event.
        Ok(unsafe { Event::of(event) }.is_complete())
    }

    unsafe fn wait_event(&self, event: EventPtr) -> Result<()> {
        // SAFETY: the caller guarantees a live event.
        unsafe { Event::of(event) }.wait();
        Ok(())
    }

    unsafe fn release_event(&self, event: EventPtr) {
        // SAFETY: `record` made the pointer of a share, and the caller guarantees that this is its only release.
        drop(unsafe { Arc::from_raw(event.as_ptr().cast::<Event>().cast_const()) });
    }

    fn synchronize(&self) -> Result<()> {
        let others = self.queues.lock().unwrap().clone();
        let mut queues: Vec<_> = others.iter().filter_map(Weak::upgrade).collect();
        queues.push(self.queue.clone());
        for queue in queues {
            let event = Arc::new(Event::default());
            let mark = event.clone();
            queue.push(move || mark.complete());
            event.wait();
        }
        Ok(())
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 64).unwrap()
}

/// # Safety
/// As [`RawQueue::copy`], and the copy may run now.
unsafe fn run(copy: CopyOp) {
    let (from, to) = (copy.src.as_ptr().cast::<u8>(), copy.dst.as_ptr().cast());
    // SAFETY: the caller guarantees valid memory that does not overlap.
    unsafe { from.copy_to_nonoverlapping(to, copy.bytes) };
}

// SAFETY: memory is allocated by the global allocator, aligned to 64 bytes, and freed by the queue's thread, which runs work in order.
unsafe impl RawQueue for Queue {
    fn allocate(&self, bytes: usize) -> Result<DevicePtr> {
        // SAFETY: the size is not 0.
        Ok(DevicePtr::new(
            unsafe { alloc_zeroed(layout(bytes)) }.cast(),
        ))
    }

    unsafe fn free(&self, base: DevicePtr, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees memory of `allocate`, which only earlier work uses.
        self.push(move || unsafe { dealloc({ base }.as_ptr().cast(), layout(bytes)) });
        Ok(())
    }

    unsafe fn copy(&self, copies: &[CopyOp]) -> Result<()> {
        let copies = copies.to_vec();
        // The last first: copies of a list have no order.
        self.push(move || {
            for copy in copies.into_iter().rev() {
                // SAFETY: the caller guarantees memory that is valid until the copies have run.
                unsafe { run(copy) };
            }
        });
        Ok(())
    }

    unsafe fn fill(&self, dst: DevicePtr, byte: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller guarantees memory that is valid until the fill has run.
        self.push(move || unsafe { { dst }.as_ptr().cast::<u8>().write_bytes(byte, bytes) });
        Ok(())
    }

    fn record(&self) -> Result<EventPtr> {
        let event = Arc::new(Event::default());
        let mark = event.clone();
        self.push(move || mark.complete());
        Ok(EventPtr::new(Arc::into_raw(event).cast_mut().cast()).unwrap())
    }

    unsafe fn wait(&self, event: EventPtr) -> Result<bool> {
        // SAFETY: the caller guarantees a live event.
        let event = unsafe { Event::of(event) };
        self.push(move || event.wait());
        Ok(true)
    }
}

fn small() -> RecordBatch {
    let numbers = Int32Array::from(vec![Some(1), None, Some(3), Some(4), Some(5)]);
    let text = StringArray::from(vec![Some("a"), Some("bc"), None, Some(""), Some("xyz")]);
    let bits = BooleanArray::from(vec![true, false, true, true, false]);
    let ends = Int32Array::from(vec![2, 5]);
    let runs = RunArray::<Int32Type>::try_new(&ends, &Int32Array::from(vec![7, 8])).unwrap();
    let columns: [(_, ArrayRef); 4] = [
        ("i", Arc::new(numbers)),
        ("s", Arc::new(text)),
        ("b", Arc::new(bits)),
        ("r", Arc::new(runs)),
    ];
    RecordBatch::try_from_iter(columns).unwrap()
}

#[test]
fn batches_go_up_and_come_back() {
    let (device, batch) = (device(), small());
    let up = device.upload(&batch).unwrap();
    assert_eq!(up.to_host().unwrap(), batch);
    let slice = up.slice(1, 3).unwrap();
    assert_eq!(slice.to_host().unwrap(), batch.slice(1, 3));
    let compact = slice.compact().unwrap();
    assert_eq!(compact.to_host().unwrap(), batch.slice(1, 3));
    let parts = [slice.clone(), up.clone(), slice];
    let joined = DeviceRecordBatch::concat(&batch.schema(), &parts, None).unwrap();
    assert_eq!(joined.slice(3, 5).unwrap().to_host().unwrap(), batch);
    drop((up, joined));
    device.synchronize().unwrap();
}

/// A staging buffer is packed on while its first half is copied.
#[test]
fn copies_run_while_the_rest_is_packed() {
    let device = device();
    let values = Int64Array::from_iter_values(0..(3 << 20) / 8);
    let up = device.upload_array(&values).unwrap();
    let back = up
        .start_to_host(&device.new_queue().unwrap())
        .unwrap()
        .wait()
        .unwrap();
    assert_eq!(&back as &dyn Array, &values as &dyn Array);
}

#[test]
fn streams_and_unfinished_downloads() {
    let (device, batch) = (device(), small());
    let reader = RecordBatchIterator::new((0..6).map(|_| Ok(small())), batch.schema());
    for up in upload_reader(reader, &device) {
        drop(up.unwrap());
    }
    let up = device.upload(&batch).unwrap();
    let downloads: Vec<_> = (0..3).map(|_| up.start_to_host(None).unwrap()).collect();
    for (i, download) in downloads.into_iter().enumerate() {
        match i {
            1 => drop(download),
            _ => assert_eq!(download.wait().unwrap(), batch),
        }
    }
    let mut buffer = DeviceBufferMut::allocate(&device.default_queue(), 1000).unwrap();
    buffer.fill(7).unwrap();
    buffer.truncate(100);
    buffer.shrink_to_fit().unwrap();
    let bytes = buffer.freeze().unwrap().to_host().unwrap();
    assert_eq!(bytes.as_ref(), [7; 100]);
}

#[test]
fn exports_with_their_events() {
    let (device, batch) = (device(), small());
    let devices = Devices::new();
    devices.add(device.clone()).unwrap();
    let options = ImportOptions {
        devices: Some(devices),
        validation: Validation::Full,
        ..Default::default()
    };
    let slice = device.upload(&batch).unwrap().slice(1, 4).unwrap();
    let (array, schema) = slice.export(SyncPolicy::Event).unwrap();
    drop(slice);
    // SAFETY: the array was just exported.
    let again = unsafe { DeviceRecordBatch::import(array, &schema, &options) }.unwrap();
    assert_eq!(again.to_host().unwrap(), batch.slice(1, 4));
}
