//! The structs that the consumer calls: the producer's own, and tasks.

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Weak};

use super::demand::Demand;
use crate::abi::{
    ArrowDeviceType, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask, FFI_ArrowDeviceArray, guard,
};

/// The producer's struct and what it points to. It lives until the handler is released and the last task is extracted,
/// since some consumers (Arrow C++) call `request` for tasks that they take after the release.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) demand: Demand,
    ffi: FFI_ArrowAsyncProducer,
    /// For shares of this during the consumer's calls.
    this: Weak<Self>,
    /// What `ffi` points to.
    _metadata: Option<Vec<u8>>,
}

// SAFETY: `ffi`, which is not `Sync` for its pointers, is only read; they point to this struct and its metadata, which do
// not change.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn new(device_type: ArrowDeviceType, metadata: Option<Vec<u8>>) -> Arc<Self> {
        Arc::new_cyclic(|this: &Weak<Self>| {
            let encoded = metadata.as_ref().map_or(ptr::null(), |m| m.as_ptr().cast());
            // The callbacks below keep to the interface for a `private_data` that points to a live `Shared`, as this one does. The
            // metadata is encoded as the specification says, and its bytes do not move with the vector.
            let ffi = FFI_ArrowAsyncProducer {
                device_type,
                request: Some(request),
                cancel: Some(cancel),
                additional_metadata: encoded,
                private_data: this.as_ptr().cast_mut().cast(),
            };
            Self {
                demand: Demand::new(),
                ffi,
                this: this.clone(),
                _metadata: metadata,
            }
        })
    }

    /// The pointer for `handler.producer`, through which nothing is written.
    pub(super) fn as_producer(self: &Arc<Self>) -> *mut FFI_ArrowAsyncProducer {
        // SAFETY: `Arc::as_ptr` points to a live `Shared`, of which this takes a member's address.
        unsafe { (&raw const (*Arc::as_ptr(self)).ffi).cast_mut() }
    }

    /// A task that moves `array` to the consumer.
    pub(super) fn task(self: &Arc<Self>, array: FFI_ArrowDeviceArray) -> FFI_ArrowAsyncTask {
        let task = Box::new(Task {
            array,
            _producer: self.clone(),
        });
        FFI_ArrowAsyncTask {
            extract_data: Some(extract_data),
            private_data: Box::into_raw(task).cast(),
        }
    }
}

/// A task's `private_data`.
struct Task {
    array: FFI_ArrowDeviceArray,
    _producer: Arc<Shared>,
}

/// Runs `call` with a share of what the consumer calls: the waker of the producer's task may drop the task, whose share may be the
/// last one. A waker may panic, too.
///
/// # Safety
/// `producer` is null or the struct of a live [`Shared`].
unsafe fn call(
    producer: *mut FFI_ArrowAsyncProducer,
    operation: &'static str,
    call: impl FnOnce(&Shared),
) {
    // SAFETY: the caller guarantees that a pointer that is not null points to the struct of a live `Shared`, to which its
    // `private_data` points.
    let shared = unsafe {
        let producer = producer.as_ref();
        producer.and_then(|producer| (*producer.private_data.cast::<Shared>()).this.upgrade())
    };
    if let Some(shared) = shared {
        let _ = guard::callback(operation, move || {
            call(&shared);
            Ok(())
        });
    }
}

unsafe extern "C-unwind" fn request(producer: *mut FFI_ArrowAsyncProducer, n: i64) {
    // SAFETY: the interface lets the consumer pass the struct until the release and for tasks after it; `Shared` lives as
    // long.
    unsafe { call(producer, "request", |shared| shared.demand.request(n)) };
}

unsafe extern "C-unwind" fn cancel(producer: *mut FFI_ArrowAsyncProducer) {
    // SAFETY: the interface lets the consumer pass the struct until the release, and `Shared` lives longer.
    unsafe { call(producer, "cancel", |shared| shared.demand.cancel()) };
}

unsafe extern "C-unwind" fn extract_data(
    task: *mut FFI_ArrowAsyncTask,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    // SAFETY: the interface requires the consumer to pass a task of this producer, valid for reads and writes. Its content
    // is moved out, so that a second call through the same struct finds nothing.
    let task = unsafe {
        if task.is_null() {
            return libc::EINVAL;
        }
        task.replace(FFI_ArrowAsyncTask::empty())
    };
    if task.extract_data.is_none() {
        return libc::EINVAL;
    }
    // SAFETY: `Shared::task` made the pointer from a box, and the interface allows one extraction.
    let Task { array, _producer } = *unsafe { Box::from_raw(task.private_data.cast::<Task>()) };
    if !out.is_null() {
        // SAFETY: the interface requires an `out` that is null or valid for writes, and holds nothing to release.
        unsafe { out.write(array) };
    } else {
        let _ = guard::callback("extract_data", || {
            drop(array);
            Ok(())
        });
    }
    let _ = guard::callback("extract_data", || {
        drop(_producer);
        Ok(())
    });
    0
}
