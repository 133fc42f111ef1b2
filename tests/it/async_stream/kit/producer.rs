//! A producer as C code would write one, which does what a test tells it to and counts what is done to it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use super::Opening;
use arrow_device::abi::{
    FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask,
};
use arrow_device::async_stream::AsyncDeviceRecordBatchStream;
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, FFI_ArrowDeviceArray, ImportOptions, SyncPolicy,
};
use arrow_schema::Schema;
use arrow_schema::ffi::FFI_ArrowSchema;

use super::{CountedSchema, no_task};

type Extract = Box<dyn FnOnce(*mut FFI_ArrowDeviceArray) -> c_int + Send>;
type Hook = Arc<dyn Fn(&FakeProducer, i64) + Send + Sync>;

/// What the producer keeps for a task.
pub(crate) struct TaskState {
    body: Mutex<Option<Extract>>,
    pub(crate) calls: AtomicUsize,
    pub(crate) with_null: AtomicUsize,
    log: Arc<Mutex<Vec<&'static str>>>,
}

struct Inner {
    producer: AtomicPtr<FFI_ArrowAsyncProducer>,
    handler: AtomicPtr<FFI_ArrowAsyncDeviceStreamHandler>,
    metadata: Mutex<Option<Vec<u8>>>,
    released: AtomicBool,
    requests: Mutex<Vec<i64>>,
    requested: AtomicI64,
    cancels: AtomicUsize,
    late_calls: AtomicUsize,
    released_under_a_call: AtomicBool,
    /// Threads that are in `request` or `cancel`.
    inside: Mutex<Vec<ThreadId>>,
    tasks: Mutex<Vec<Arc<TaskState>>>,
    schemas: Mutex<Vec<Arc<AtomicUsize>>>,
    on_request: Mutex<Option<Hook>>,
    on_cancel: Mutex<Option<Hook>>,
    log: Arc<Mutex<Vec<&'static str>>>,
}

/// Clones are the same producer. The last one releases the handler, if nobody did.
#[derive(Clone)]
pub(crate) struct FakeProducer(Arc<Inner>);

impl Drop for Inner {
    fn drop(&mut self) {
        self.release();
        // SAFETY: the box was given up by `Box::into_raw`; the handler is released, so nobody
        // follows the pointer.
        drop(unsafe { Box::from_raw(self.producer.load(SeqCst)) });
    }
}

impl Inner {
    fn release(&self) {
        let handler = self.handler.swap(ptr::null_mut(), SeqCst);
        if handler.is_null() {
            return;
        }
        // SAFETY: the handler is live until its release, which is called once.
        unsafe {
            let release = (*handler).release.unwrap();
            release(handler);
        }
        self.released.store(true, SeqCst);
        let me = std::thread::current().id();
        let others = self
            .inside
            .lock()
            .unwrap()
            .iter()
            .any(|thread| *thread != me);
        self.released_under_a_call.fetch_or(others, SeqCst);
    }

    fn call(&self, log: &'static str) -> impl Drop + '_ {
        struct Inside<'a>(&'a Mutex<Vec<ThreadId>>);
        impl Drop for Inside<'_> {
            fn drop(&mut self) {
                let me = std::thread::current().id();
                let mut inside = self.0.lock().unwrap();
                let at = inside.iter().position(|thread| *thread == me);
                inside.swap_remove(at.unwrap());
            }
        }
        self.log.lock().unwrap().push(log);
        self.inside
            .lock()
            .unwrap()
            .push(std::thread::current().id());
        if self.released.load(SeqCst) {
            self.late_calls.fetch_add(1, SeqCst);
        }
        Inside(&self.inside)
    }
}

/// The producer behind `private_data`.
unsafe fn of(producer: *mut FFI_ArrowAsyncProducer) -> FakeProducer {
    // SAFETY: `private_data` is the `Arc` of a producer that the tests hold as long as it can be
    // called.
    unsafe {
        let inner = (*producer).private_data.cast_const().cast::<Inner>();
        Arc::increment_strong_count(inner);
        FakeProducer(Arc::from_raw(inner))
    }
}

unsafe extern "C-unwind" fn request(producer: *mut FFI_ArrowAsyncProducer, n: i64) {
    // SAFETY: the consumer passes the struct that this file made, which is live until the release.
    let this = unsafe { of(producer) };
    let _inside = this.0.call("request");
    this.0.requests.lock().unwrap().push(n);
    this.0.requested.fetch_add(n, SeqCst);
    let hook = this.0.on_request.lock().unwrap().clone();
    if let Some(hook) = hook {
        hook(&this, n);
    }
}

unsafe extern "C-unwind" fn cancel(producer: *mut FFI_ArrowAsyncProducer) {
    // SAFETY: the consumer passes the struct that this file made, which is live until the release.
    let this = unsafe { of(producer) };
    let _inside = this.0.call("cancel");
    this.0.cancels.fetch_add(1, SeqCst);
    let hook = this.0.on_cancel.lock().unwrap().clone();
    if let Some(hook) = hook {
        hook(&this, 0);
    }
}

unsafe extern "C-unwind" fn extract(
    task: *mut FFI_ArrowAsyncTask,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    // SAFETY: `private_data` is an `Arc` that the task gives up in the first call; for later calls
    // the producer still holds one.
    let state = unsafe {
        let state = (*task).private_data.cast_const().cast::<TaskState>();
        if (*state).calls.fetch_add(1, SeqCst) > 0 {
            return 0;
        }
        Arc::from_raw(state)
    };
    state
        .log
        .lock()
        .unwrap()
        .push(if out.is_null() { "drop" } else { "extract" });
    let body = state.body.lock().unwrap().take();
    if out.is_null() {
        state.with_null.fetch_add(1, SeqCst);
        return 0;
    }
    body.unwrap()(out)
}

impl FakeProducer {
    /// A handler of ours, and a producer that has it.
    pub(crate) fn open(depth: usize) -> (Self, Opening) {
        Self::open_with(depth, ArrowDeviceType::CPU, ImportOptions::default())
    }

    pub(crate) fn open_with(
        depth: usize,
        device_type: ArrowDeviceType,
        options: ImportOptions,
    ) -> (Self, Opening) {
        // SAFETY: what the tests send breaks the protocol, but its pointers are valid.
        let (handler, opening) = unsafe { AsyncDeviceRecordBatchStream::handler(depth, options) };
        (Self::new(handler, device_type), opening)
    }

    pub(crate) fn new(
        handler: *mut FFI_ArrowAsyncDeviceStreamHandler,
        device_type: ArrowDeviceType,
    ) -> Self {
        let inner = Arc::new(Inner {
            producer: AtomicPtr::new(ptr::null_mut()),
            handler: AtomicPtr::new(handler),
            metadata: Mutex::default(),
            released: AtomicBool::new(false),
            requests: Mutex::default(),
            requested: AtomicI64::new(0),
            cancels: AtomicUsize::new(0),
            late_calls: AtomicUsize::new(0),
            released_under_a_call: AtomicBool::new(false),
            inside: Mutex::default(),
            tasks: Mutex::default(),
            schemas: Mutex::default(),
            on_request: Mutex::default(),
            on_cancel: Mutex::default(),
            log: Arc::default(),
        });
        let private = Arc::as_ptr(&inner).cast_mut().cast();
        // The callbacks of this file keep to the interface, and `private` is the `Arc` that they expect.
        let producer = FFI_ArrowAsyncProducer {
            device_type,
            request: Some(request),
            cancel: Some(cancel),
            additional_metadata: ptr::null(),
            private_data: private,
        };
        inner
            .producer
            .store(Box::into_raw(Box::new(producer)), SeqCst);
        Self(inner)
    }

    /// Overwrites word `i` of the C struct with null: 1 is `request`, 2 is `cancel`.
    pub(crate) fn without_callback(&self, i: usize) {
        let words = self.0.producer.load(SeqCst).cast::<*const c_void>();
        // SAFETY: `i` is one of the struct's five words, a callback, which may be null.
        unsafe { words.add(i).write(ptr::null()) };
    }

    pub(crate) fn set_metadata(&self, metadata: Vec<u8>) {
        let words = self.0.producer.load(SeqCst).cast::<*const c_void>();
        // SAFETY: word 3 is `additional_metadata`; the bytes live as long as the producer.
        unsafe { words.add(3).write(metadata.as_ptr().cast()) };
        *self.0.metadata.lock().unwrap() = Some(metadata);
    }

    /// Called within `request`, after it was counted.
    pub(crate) fn on_request(&self, hook: impl Fn(&Self, i64) + Send + Sync + 'static) {
        *self.0.on_request.lock().unwrap() = Some(Arc::new(hook));
    }

    pub(crate) fn on_cancel(&self, hook: impl Fn(&Self) + Send + Sync + 'static) {
        *self.0.on_cancel.lock().unwrap() = Some(Arc::new(move |this, _| hook(this)));
    }

    fn handler(&self) -> *mut FFI_ArrowAsyncDeviceStreamHandler {
        let handler = self.0.handler.load(SeqCst);
        assert!(!handler.is_null(), "a call after release");
        handler
    }

    /// Sets the producer and gives the schema of `numbers`.
    pub(crate) fn schema(&self) -> c_int {
        self.schema_of(super::numbers(0, 1).schema().as_ref())
    }

    pub(crate) fn schema_of(&self, schema: &Schema) -> c_int {
        self.connect();
        self.give(CountedSchema::of(
            FFI_ArrowSchema::try_from(schema).unwrap(),
        ))
    }

    pub(crate) fn connect(&self) {
        // SAFETY: the handler is live, and so is the producer until it was released.
        unsafe { (*self.handler()).producer = self.0.producer.load(SeqCst) };
    }

    pub(crate) fn give(&self, mut schema: CountedSchema) -> c_int {
        self.0.schemas.lock().unwrap().push(schema.releases.clone());
        // SAFETY: the handler is live, and the schema is null or a live struct that is handed over.
        unsafe { self.raw_schema(&raw mut schema.c) }
    }

    /// # Safety
    /// Null or a schema.
    pub(crate) unsafe fn raw_schema(&self, schema: *mut FFI_ArrowSchema) -> c_int {
        let handler = self.handler();
        // SAFETY: the handler is live, and the schema is null or a live struct that is handed over.
        unsafe { (*handler).on_schema.unwrap()(handler, schema) }
    }

    pub(crate) fn task(&self, batch: &DeviceRecordBatch) -> c_int {
        self.task_with(batch, None)
    }

    pub(crate) fn task_with(&self, batch: &DeviceRecordBatch, metadata: Option<&[u8]>) -> c_int {
        let (array, _) = batch.export(SyncPolicy::Event).unwrap();
        let give = move |out: *mut FFI_ArrowDeviceArray| {
            // SAFETY: the consumer passes memory for one struct.
            unsafe { out.write(array) };
            0
        };
        self.task_of(give, metadata)
    }

    /// A task whose extraction with data runs `body`.
    pub(crate) fn task_of(
        &self,
        body: impl FnOnce(*mut FFI_ArrowDeviceArray) -> c_int + Send + 'static,
        metadata: Option<&[u8]>,
    ) -> c_int {
        let mut task = self.make_task(body);
        let code = self.raw_task(&mut task, metadata);
        // Consumers copy the bytes; what is here is poison for who did not.
        task = no_task();
        let _ = task;
        code
    }

    pub(crate) fn make_task(
        &self,
        body: impl FnOnce(*mut FFI_ArrowDeviceArray) -> c_int + Send + 'static,
    ) -> FFI_ArrowAsyncTask {
        let state = Arc::new(TaskState {
            body: Mutex::new(Some(Box::new(body))),
            calls: AtomicUsize::new(0),
            with_null: AtomicUsize::new(0),
            log: self.0.log.clone(),
        });
        self.0.tasks.lock().unwrap().push(state.clone());
        // `extract` keeps to the interface, and the private data is the `Arc` that it expects.
        FFI_ArrowAsyncTask {
            extract_data: Some(extract),
            private_data: Arc::into_raw(state).cast_mut().cast(),
        }
    }

    pub(crate) fn raw_task(&self, task: *mut FFI_ArrowAsyncTask, metadata: Option<&[u8]>) -> c_int {
        let handler = self.handler();
        let metadata = metadata.map_or(ptr::null(), |m| m.as_ptr().cast::<c_char>());
        // SAFETY: the handler is live; task and metadata are null or live for the call.
        unsafe { (*handler).on_next_task.unwrap()(handler, task, metadata) }
    }

    pub(crate) fn end(&self) -> c_int {
        self.raw_task(ptr::null_mut(), None)
    }

    pub(crate) fn error(&self, code: c_int, text: Option<&CStr>, metadata: Option<&[u8]>) {
        let handler = self.handler();
        let text = text.map_or(ptr::null(), CStr::as_ptr);
        let metadata = metadata.map_or(ptr::null(), |m| m.as_ptr().cast::<c_char>());
        // SAFETY: the handler is live; text and metadata are null or live for the call.
        unsafe { (*handler).on_error.unwrap()(handler, code, text, metadata) }
    }

    pub(crate) fn release(&self) {
        self.0.release();
    }

    pub(crate) fn is_released(&self) -> bool {
        self.0.released.load(SeqCst)
    }

    pub(crate) fn requests(&self) -> Vec<i64> {
        self.0.requests.lock().unwrap().clone()
    }

    /// The sum of all requests.
    pub(crate) fn requested(&self) -> i64 {
        self.0.requested.load(SeqCst)
    }

    pub(crate) fn cancels(&self) -> usize {
        self.0.cancels.load(SeqCst)
    }

    pub(crate) fn log(&self) -> Vec<&'static str> {
        self.0.log.lock().unwrap().clone()
    }

    /// How many tasks were made, extracted with data and extracted with null.
    pub(crate) fn tasks(&self) -> (usize, usize, usize) {
        let tasks = self.0.tasks.lock().unwrap();
        let calls: usize = tasks.iter().map(|t| t.calls.load(SeqCst)).sum();
        let null: usize = tasks.iter().map(|t| t.with_null.load(SeqCst)).sum();
        (tasks.len(), calls - null, null)
    }

    /// How often each schema was released.
    pub(crate) fn schema_releases(&self) -> Vec<usize> {
        let schemas = self.0.schemas.lock().unwrap();
        schemas.iter().map(|n| n.load(SeqCst)).collect()
    }

    /// Everything was taken back exactly once, and nothing called after the release.
    #[track_caller]
    pub(crate) fn assert_balanced(&self) {
        self.assert_balanced_but_tasks();
        for (i, task) in self.0.tasks.lock().unwrap().iter().enumerate() {
            assert_eq!(task.calls.load(SeqCst), 1, "extractions of task {i}");
        }
    }

    /// As `assert_balanced`; tasks may be left.
    #[track_caller]
    pub(crate) fn assert_balanced_but_tasks(&self) {
        assert!(self.is_released(), "the producer has not released yet");
        assert!(self.schema_releases().iter().all(|n| *n == 1), "schemas");
        assert_eq!(self.0.late_calls.load(SeqCst), 0, "calls after the release");
        let under = self.0.released_under_a_call.load(SeqCst);
        assert!(!under, "the release did not wait for a call");
        assert!(
            self.requests().iter().all(|n| *n > 0),
            "{:?}",
            self.requests()
        );
    }
}
