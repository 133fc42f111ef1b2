//! What a handler and its stream share.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::atomic::AtomicPtr;

use arrow_schema::SchemaRef;

use super::inbox::Inbox;
use super::task::Task;
use crate::abi::{
    ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, ForeignSchema,
    guard,
};
use crate::error::{Error, Result};
use crate::interchange::metadata::decode_metadata;
use crate::interchange::schema::import_schema;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) inbox: Inbox<Opened, Task, Error, Producer>,
    /// Tasks to request in `on_schema`: at least 1.
    pub(super) queue_depth: i64,
    /// The handler's memory, if this crate allocated it.
    pub(super) memory: AtomicPtr<MaybeUninit<FFI_ArrowAsyncDeviceStreamHandler>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        let memory = *self.memory.get_mut();
        if !memory.is_null() {
            // SAFETY: `AsyncStreamHandler::into_raw` made the pointer from a box. The handler in it is released, since it
            // held a share of this, and a producer does not touch a released handler.
            drop(unsafe { Box::from_raw(memory) });
        }
    }
}

/// What `on_schema` reports.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) schema: SchemaRef,
    pub(super) device_type: ArrowDeviceType,
    pub(super) metadata: HashMap<String, String>,
}

impl Opened {
    /// # Safety
    /// `producer` belongs to a handler whose `on_schema` is being called.
    pub(super) unsafe fn new(producer: Producer, schema: Option<ForeignSchema>) -> Result<Self> {
        let schema = schema.ok_or_else(|| Error::invalid("schema", "is null or misaligned"))?;
        // SAFETY: the caller guarantees that the producer's struct lives. The interface requires its metadata to be null or
        // encoded as the specification says.
        let (device_type, metadata) = unsafe {
            let metadata = decode_metadata((*producer.this).additional_metadata);
            ((*producer.this).device_type, metadata)
        };
        Ok(Self {
            schema: import_schema(schema.as_ref())?,
            device_type,
            metadata: metadata.map_err(|e| Error::invalid("producer.additional_metadata", e))?,
        })
    }
}

/// A producer's struct and its callbacks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Producer {
    this: *mut FFI_ArrowAsyncProducer,
    request: unsafe extern "C-unwind" fn(*mut FFI_ArrowAsyncProducer, i64),
    cancel: unsafe extern "C-unwind" fn(*mut FFI_ArrowAsyncProducer),
}

// SAFETY: the interface lets a consumer call its producer on any thread.
unsafe impl Send for Producer {}

impl Producer {
    /// # Safety
    /// `this` is null or the producer of a handler whose `on_schema` is being called.
    pub(super) unsafe fn of(this: *mut FFI_ArrowAsyncProducer) -> Result<Self> {
        if this.is_null() || !this.is_aligned() {
            return Err(Error::invalid("handler.producer", "is null or misaligned"));
        }
        // SAFETY: the caller guarantees that a pointer that is not null points to a live producer.
        let (request, cancel) = unsafe { ((*this).request, (*this).cancel) };
        let missing = |name: &'static str| move || Error::invalid(name, "is null");
        Ok(Self {
            this,
            request: request.ok_or_else(missing("producer.request"))?,
            cancel: cancel.ok_or_else(missing("producer.cancel"))?,
        })
    }

    /// # Safety
    /// The producer has not called the handler's release, or waits in it for this call.
    pub(super) unsafe fn request(self, n: i64) -> Result<()> {
        // SAFETY: the caller guarantees that the producer's struct lives. The callback is the struct's own.
        guard::call_foreign("request", || unsafe { (self.request)(self.this, n) })
    }

    /// # Safety
    /// As for [`request`](Self::request).
    pub(super) unsafe fn cancel(self) -> Result<()> {
        // SAFETY: the caller guarantees that the producer's struct lives. The callback is the struct's own.
        guard::call_foreign("cancel", || unsafe { (self.cancel)(self.this) })
    }
}
