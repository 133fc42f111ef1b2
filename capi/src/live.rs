//! Memory of the host that was given out and is not released.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer};
use arrow_data::ArrayData;

static BUFFERS: AtomicI64 = AtomicI64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

/// Returns the same data, whose buffers are counted until the last user of each has let go. Nothing is copied.
pub fn counted(data: &ArrayData) -> ArrayData {
    let nulls = data.nulls().map(|nulls| {
        let bits = nulls.inner();
        let buffer = counted_buffer(bits.inner());
        NullBuffer::new(BooleanBuffer::new(buffer, bits.offset(), bits.len()))
    });
    let builder = ArrayData::builder(data.data_type().clone())
        .len(data.len())
        .offset(data.offset())
        .nulls(nulls)
        .buffers(data.buffers().iter().map(counted_buffer).collect())
        .child_data(data.child_data().iter().map(counted).collect());
    // SAFETY: the data is that of `data`, which is valid, in buffers with other owners.
    unsafe { builder.build_unchecked() }
}

/// Returns how many buffers of [`counted`] data a consumer, or work of a device, still holds.
pub fn live_buffers() -> i64 {
    BUFFERS.load(SeqCst)
}

/// Returns the bytes of these buffers.
pub fn live_bytes() -> i64 {
    BYTES.load(SeqCst)
}

/// A buffer that is counted as long as it lives.
struct Counted(Buffer);

impl Drop for Counted {
    fn drop(&mut self) {
        BUFFERS.fetch_sub(1, SeqCst);
        BYTES.fetch_sub(self.0.len() as i64, SeqCst);
    }
}

fn counted_buffer(buffer: &Buffer) -> Buffer {
    let Some(address) = NonNull::new(buffer.as_ptr().cast_mut()) else {
        return buffer.clone();
    };
    BUFFERS.fetch_add(1, SeqCst);
    BYTES.fetch_add(buffer.len() as i64, SeqCst);
    let owner = Arc::new(Counted(buffer.clone()));
    // SAFETY: the owner holds the buffer, and so the memory.
    unsafe { Buffer::from_custom_allocation(address, buffer.len(), owner) }
}
