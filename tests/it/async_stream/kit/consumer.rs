//! A consumer as C code would write one, which answers what a test tells it to and records what is done to it.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use arrow_device::abi::{
    FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask, ForeignSchema,
};
use arrow_device::{ArrowDeviceType, DeviceRecordBatch, FFI_ArrowDeviceArray, ImportOptions};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{Schema, SchemaRef};

use super::no_task;

pub(crate) type Handler = FFI_ArrowAsyncDeviceStreamHandler;
type Hook = Arc<dyn Fn(&FakeConsumer) -> c_int + Send + Sync>;

/// One callback.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Call {
    Schema(SchemaRef),
    Task(Option<HashMap<String, String>>),
    End,
    Error {
        errno: c_int,
        text: Option<String>,
        metadata: Option<HashMap<String, String>>,
    },
    Release,
}

#[derive(Default)]
struct Inner {
    calls: Mutex<Vec<(Call, Option<ThreadId>)>>,
    tasks: Mutex<VecDeque<FFI_ArrowAsyncTask>>,
    producer: AtomicPtr<FFI_ArrowAsyncProducer>,
    schema: Mutex<Option<SchemaRef>>,
    device_type: AtomicI64,
    metadata: Mutex<Option<HashMap<String, String>>>,
    /// What may still come; negative: too much has come.
    demand: AtomicI64,
    received: AtomicUsize,
    busy: AtomicBool,
    violations: Mutex<Vec<String>>,
    on_schema: Mutex<Option<Hook>>,
    on_task: Mutex<Option<Hook>>,
    on_error: Mutex<Option<Hook>>,
    on_release: Mutex<Option<Hook>>,
    options: Mutex<ImportOptions>,
}

/// Clones are the same consumer.
#[derive(Clone, Default)]
pub(crate) struct FakeConsumer(Arc<Inner>);

struct Busy<'a>(&'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

/// The consumer behind `private_data`.
unsafe fn of(handler: *mut Handler) -> FakeConsumer {
    // SAFETY: `private_data` is the `Arc` that the handler holds until its release.
    unsafe {
        let inner = (*handler).private_data.cast_const().cast::<Inner>();
        Arc::increment_strong_count(inner);
        FakeConsumer(Arc::from_raw(inner))
    }
}

unsafe extern "C-unwind" fn on_schema(
    handler: *mut Handler,
    schema: *mut FFI_ArrowSchema,
) -> c_int {
    // SAFETY: the producer passes the handler that this file made, with its own struct set, and a
    // schema that it hands over.
    let (this, schema, producer) = unsafe {
        let this = of(handler);
        (this, ForeignSchema::from_raw(schema), (*handler).producer)
    };
    let _busy = this.enter();
    let schema = Arc::new(Schema::try_from(schema.as_ref()).unwrap());
    *this.0.schema.lock().unwrap() = Some(schema.clone());
    if producer.is_null() {
        this.violation("no producer at on_schema");
    } else {
        // SAFETY: the producer's struct is live until the handler's release.
        unsafe {
            this.0
                .device_type
                .store((*producer).device_type.value().into(), SeqCst);
            *this.0.metadata.lock().unwrap() = super::decode((*producer).additional_metadata);
        }
    }
    this.0.producer.store(producer, SeqCst);
    this.record(Call::Schema(schema));
    this.run(&this.0.on_schema)
}

unsafe extern "C-unwind" fn on_next_task(
    handler: *mut Handler,
    task: *mut FFI_ArrowAsyncTask,
    metadata: *const c_char,
) -> c_int {
    // SAFETY: the producer passes the handler that this file made, which is not released yet.
    let this = unsafe { of(handler) };
    let _busy = this.enter();
    if this.0.producer.load(SeqCst).is_null() {
        this.violation("a task before the schema");
    }
    if task.is_null() {
        this.record(Call::End);
        return 0;
    }
    // SAFETY: the producer passes a task and metadata that are null or valid for the call.
    let (task, metadata) = unsafe { (task.replace(no_task()), super::decode(metadata)) };
    if this.0.demand.fetch_sub(1, SeqCst) < 1 {
        this.violation("a task that was not requested");
    }
    this.0.received.fetch_add(1, SeqCst);
    this.0.tasks.lock().unwrap().push_back(task);
    this.record(Call::Task(metadata));
    this.run(&this.0.on_task)
}

unsafe extern "C-unwind" fn on_error(
    handler: *mut Handler,
    errno: c_int,
    text: *const c_char,
    metadata: *const c_char,
) {
    // SAFETY: the producer passes the handler that this file made, and a text and metadata that are
    // null or valid for the call.
    let (this, text, metadata) = unsafe {
        let text = (!text.is_null()).then(|| CStr::from_ptr(text).to_str().unwrap().to_string());
        (of(handler), text, super::decode(metadata))
    };
    let _busy = this.enter();
    // SAFETY: the producer passes the handler that this file made, which is not released yet.
    if unsafe { (*handler).producer }.is_null() {
        this.violation("no producer at on_error");
    }
    this.record(Call::Error {
        errno,
        text,
        metadata,
    });
    this.run(&this.0.on_error);
}

unsafe extern "C-unwind" fn release(handler: *mut Handler) {
    // SAFETY: the producer passes the handler that this file boxed, once: its `Arc` and its memory are given up here.
    let this = unsafe {
        let handler = Box::from_raw(handler);
        FakeConsumer(Arc::from_raw(handler.private_data.cast_const().cast()))
    };
    let _busy = this.enter();
    this.record(Call::Release);
    this.run(&this.0.on_release);
}

impl FakeConsumer {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn with_options(options: ImportOptions) -> Self {
        let this = Self::default();
        *this.0.options.lock().unwrap() = options;
        this
    }

    /// A consumer that asks for `n` in `on_schema`.
    pub(crate) fn requesting(n: i64) -> Self {
        let this = Self::default();
        this.on_schema(move |this| {
            this.request(n);
            0
        });
        this
    }

    /// A handler in memory that its release frees.
    pub(crate) fn handler(&self) -> *mut Handler {
        let private = Arc::into_raw(self.0.clone()).cast_mut().cast();
        // The callbacks of this file keep to the interface, and `private` is the `Arc` that they expect.
        Box::into_raw(Box::new(Handler {
            on_schema: Some(on_schema),
            on_next_task: Some(on_next_task),
            on_error: Some(on_error),
            release: Some(release),
            producer: ptr::null_mut(),
            private_data: private,
        }))
    }

    /// Called within `on_schema`; its answer is the answer.
    pub(crate) fn on_schema(&self, hook: impl Fn(&Self) -> c_int + Send + Sync + 'static) {
        *self.0.on_schema.lock().unwrap() = Some(Arc::new(hook));
    }

    /// Called within `on_next_task`, but not at the end.
    pub(crate) fn on_task(&self, hook: impl Fn(&Self) -> c_int + Send + Sync + 'static) {
        *self.0.on_task.lock().unwrap() = Some(Arc::new(hook));
    }

    pub(crate) fn on_error(&self, hook: impl Fn(&Self) -> c_int + Send + Sync + 'static) {
        *self.0.on_error.lock().unwrap() = Some(Arc::new(hook));
    }

    pub(crate) fn on_release(&self, hook: impl Fn(&Self) -> c_int + Send + Sync + 'static) {
        *self.0.on_release.lock().unwrap() = Some(Arc::new(hook));
    }

    fn run(&self, hook: &Mutex<Option<Hook>>) -> c_int {
        let hook = hook.lock().unwrap().clone();
        hook.map_or(0, |hook| hook(self))
    }

    fn enter(&self) -> Busy<'_> {
        if self.0.busy.swap(true, SeqCst) {
            self.violation("two callbacks at once");
        }
        Busy(&self.0.busy)
    }

    fn violation(&self, what: &str) {
        self.0.violations.lock().unwrap().push(what.into());
    }

    fn record(&self, call: Call) {
        let mut calls = self.0.calls.lock().unwrap();
        if calls.iter().any(|(call, _)| *call == Call::Release) {
            self.violation(&format!("{call:?} after the release"));
        }
        calls.push((call, Some(std::thread::current().id())));
    }

    fn producer(&self) -> *mut FFI_ArrowAsyncProducer {
        let producer = self.0.producer.load(SeqCst);
        assert!(!producer.is_null(), "no schema has come");
        producer
    }

    /// Asks for more. The tests call this only while the producer's struct lives.
    pub(crate) fn request(&self, n: i64) {
        let producer = self.producer();
        let add = |demand: i64| Some(demand.saturating_add(n.max(0)));
        self.0.demand.fetch_update(SeqCst, SeqCst, add).unwrap();
        // SAFETY: the struct lives until the release and the last task's extraction.
        unsafe { (*producer).request.unwrap()(producer, n) };
    }

    /// As `request`.
    pub(crate) fn cancel(&self) {
        let producer = self.producer();
        // SAFETY: the struct lives until the release and the last task's extraction.
        unsafe { (*producer).cancel.unwrap()(producer) };
    }

    /// Cancels unless the handler was released: for consumers that do not know whether it was.
    pub(crate) fn try_cancel(&self) {
        let calls = self.0.calls.lock().unwrap();
        // The release cannot be recorded meanwhile.
        if !calls.iter().any(|(call, _)| *call == Call::Release) {
            self.cancel();
        }
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        let calls = self.0.calls.lock().unwrap();
        calls.iter().map(|(call, _)| call.clone()).collect()
    }

    /// The callbacks as letters: `S`chema, `T`ask, `.` the end, `E`rror, `R`elease.
    pub(crate) fn story(&self) -> String {
        let letter = |call: Call| match call {
            Call::Schema(_) => 'S',
            Call::Task(_) => 'T',
            Call::End => '.',
            Call::Error { .. } => 'E',
            Call::Release => 'R',
        };
        self.calls().into_iter().map(letter).collect()
    }

    /// On which threads the callbacks ran.
    pub(crate) fn threads(&self) -> Vec<ThreadId> {
        let calls = self.0.calls.lock().unwrap();
        calls.iter().filter_map(|(_, thread)| *thread).collect()
    }

    /// The one error that was reported.
    #[track_caller]
    pub(crate) fn error(&self) -> (c_int, String, Option<HashMap<String, String>>) {
        let errors = self.calls().into_iter().filter_map(|call| match call {
            Call::Error {
                errno,
                text,
                metadata,
            } => Some((errno, text.unwrap_or_default(), metadata)),
            _ => None,
        });
        let errors: Vec<_> = errors.collect();
        assert_eq!(errors.len(), 1, "{errors:?}");
        errors.into_iter().next().unwrap()
    }

    pub(crate) fn released(&self) -> bool {
        self.calls().contains(&Call::Release)
    }

    pub(crate) fn received(&self) -> usize {
        self.0.received.load(SeqCst)
    }

    pub(crate) fn device_type(&self) -> ArrowDeviceType {
        ArrowDeviceType::new(self.0.device_type.load(SeqCst) as i32)
    }

    pub(crate) fn metadata(&self) -> Option<HashMap<String, String>> {
        self.0.metadata.lock().unwrap().clone()
    }

    /// The oldest task that was not taken.
    #[track_caller]
    pub(crate) fn take(&self) -> FFI_ArrowAsyncTask {
        self.try_take().expect("no task is there")
    }

    pub(crate) fn try_take(&self) -> Option<FFI_ArrowAsyncTask> {
        self.0.tasks.lock().unwrap().pop_front()
    }

    /// Extracts the oldest task.
    #[track_caller]
    pub(crate) fn extract(&self) -> DeviceRecordBatch {
        self.extract_task(self.take())
    }

    #[track_caller]
    pub(crate) fn extract_task(&self, task: FFI_ArrowAsyncTask) -> DeviceRecordBatch {
        self.try_extract(task).expect("a task that was not refused")
    }

    /// The batch of a task, or `None` if the task was refused.
    pub(crate) fn try_extract(&self, task: FFI_ArrowAsyncTask) -> Option<DeviceRecordBatch> {
        let (code, array) = Self::extract_raw(task);
        let refused = arrow_device::Error::Cancelled { operation: "" };
        if code == refused.errno() {
            assert!(array.is_released());
            return None;
        }
        assert_eq!(code, 0);
        assert!(!array.is_released(), "nothing was extracted");
        let schema = self.0.schema.lock().unwrap().clone().unwrap();
        let options = self.0.options.lock().unwrap().clone();
        // SAFETY: the struct comes from an export of this crate, whose values are valid, and the
        // type is the exported one.
        Some(unsafe { DeviceRecordBatch::import_as(array, schema, &options) }.unwrap())
    }

    pub(crate) fn extract_raw(mut task: FFI_ArrowAsyncTask) -> (c_int, FFI_ArrowDeviceArray) {
        let mut array = FFI_ArrowDeviceArray::empty();
        let call = task.extract_data.unwrap();
        // SAFETY: this is the one call for this task; `array` is memory for one struct.
        let code = unsafe { call(&raw mut task, &raw mut array) };
        (code, array)
    }

    /// Tells the producer that a task's array is not wanted.
    pub(crate) fn refuse(mut task: FFI_ArrowAsyncTask) -> c_int {
        let call = task.extract_data.unwrap();
        // SAFETY: this is the one call for this task; null says that the array is not wanted.
        unsafe { call(&raw mut task, ptr::null_mut()) }
    }

    /// Lets go of all tasks; checks that the producer kept to the protocol and has released.
    #[track_caller]
    pub(crate) fn assert_done(&self) {
        while let Some(task) = self.try_take() {
            assert_eq!(Self::refuse(task), 0);
        }
        assert_eq!(*self.0.violations.lock().unwrap(), [""; 0]);
        assert_eq!(self.calls().last(), Some(&Call::Release));
    }
}
