//! What the consumer calls: the producer's struct, and tasks.

use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, Weak};

use super::demand::Demand;
use crate::abi::{
    ArrowDeviceType, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask, FFI_ArrowDeviceArray, guard,
};

/// The producer's struct with what it leads to. It lives until the handler is released and the last task
/// is extracted: some consumers (Arrow C++) call `request` for tasks that they take after the release.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) demand: Demand,
    ffi: FFI_ArrowAsyncProducer,
    /// What `ffi` points to.
    _metadata: Option<Vec<u8>>,
}

// SAFETY: consumers only read `ffi`, whose pointers are to this struct and its metadata.
unsafe impl Sync for Shared {}

impl Shared {
    pub(super) fn new(device_type: ArrowDeviceType, metadata: Option<Vec<u8>>) -> Arc<Self> {
        Arc::new_cyclic(|this: &Weak<Self>| {
            let encoded = metadata.as_ref().map_or(ptr::null(), |m| m.as_ptr().cast());
            // SAFETY: the callbacks below keep to the interface for a live `Shared`; the metadata is encoded
            // as it says, and its bytes stay where they are.
            let ffi = unsafe {
                FFI_ArrowAsyncProducer::from_parts(
                    device_type,
                    request,
                    cancel,
                    encoded,
                    this.as_ptr().cast_mut().cast(),
                )
            };
            Self {
                demand: Demand::new(),
                ffi,
                _metadata: metadata,
            }
        })
    }

    /// For `handler.producer`: only to be read.
    pub(super) fn as_producer(self: &Arc<Self>) -> *mut FFI_ArrowAsyncProducer {
        // SAFETY: within the `Arc`'s allocation.
        unsafe { (&raw const (*Arc::as_ptr(self)).ffi).cast_mut() }
    }

    /// A task that hands `array` over.
    pub(super) fn task(self: &Arc<Self>, array: FFI_ArrowDeviceArray) -> FFI_ArrowAsyncTask {
        let task = Box::new(Task {
            array,
            _producer: self.clone(),
        });
        // SAFETY: `extract_data` keeps to the interface for a boxed `Task`.
        unsafe { FFI_ArrowAsyncTask::from_parts(extract_data, Box::into_raw(task).cast()) }
    }
}

/// A task's `private_data`.
struct Task {
    array: FFI_ArrowDeviceArray,
    _producer: Arc<Shared>,
}

/// # Safety
/// `producer` is null or the struct of a live [`Shared`].
unsafe fn shared<'a>(producer: *mut FFI_ArrowAsyncProducer) -> Option<&'a Shared> {
    // SAFETY: the caller's.
    unsafe {
        producer
            .as_ref()
            .map(|producer| &*producer.private_data().cast::<Shared>())
    }
}

unsafe extern "C-unwind" fn request(producer: *mut FFI_ArrowAsyncProducer, n: i64) {
    // SAFETY: the consumer's.
    if let Some(shared) = unsafe { shared(producer) } {
        // A waker may panic.
        let _ = guard::callback("request", || {
            shared.demand.request(n);
            Ok(())
        });
    }
}

unsafe extern "C-unwind" fn cancel(producer: *mut FFI_ArrowAsyncProducer) {
    // SAFETY: the consumer's.
    if let Some(shared) = unsafe { shared(producer) } {
        let _ = guard::callback("cancel", || {
            shared.demand.cancel();
            Ok(())
        });
    }
}

unsafe extern "C-unwind" fn extract_data(
    task: *mut FFI_ArrowAsyncTask,
    out: *mut FFI_ArrowDeviceArray,
) -> c_int {
    // SAFETY: the consumer's: null or a task of ours, extracted once. What is in it is taken out, so that a
    // second call through the same struct finds nothing.
    let task = unsafe {
        if task.is_null() {
            return libc::EINVAL;
        }
        FFI_ArrowAsyncTask::from_raw(task)
    };
    if task.is_empty() {
        return libc::EINVAL;
    }
    // SAFETY: `Shared::task` made it, and this is the one call.
    let Task { array, _producer } = *unsafe { Box::from_raw(task.private_data().cast::<Task>()) };
    if !out.is_null() {
        // SAFETY: the consumer's: `out` is valid for a write and holds nothing that must be released.
        unsafe { array.write_to(out) };
        return drop_producer(_producer);
    }
    let released = guard::callback("extract_data", || {
        drop(array);
        Ok(())
    });
    // An array that cannot be released is let go of all the same.
    drop(released);
    drop_producer(_producer)
}

fn drop_producer(producer: Arc<Shared>) -> c_int {
    let _ = guard::callback("extract_data", || {
        drop(producer);
        Ok(())
    });
    0
}
